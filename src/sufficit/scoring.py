"""Score a folder of images and a file of heatmaps: the whole chain."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sufficit import figures
from sufficit.classifiers import Classifier
from sufficit.data.heatmaps import HeatmapFile
from sufficit.data.images import (
    BadPictureError,
    Picture,
    find_pictures,
    quiet_reading,
    read_picture,
)
from sufficit.errors import UserError
from sufficit.files import make_folder
from sufficit.heatmaps import check_range, normalize, resize
from sufficit.metrics.columns import COLUMNS
from sufficit.metrics.evaluate import ALPHA_GRID, Scores, evaluate, join, make_plan, with_leak
from sufficit.metrics.leak import leak_in_groups, leak_warning
from sufficit.metrics.probe import Setting, check_classes
from sufficit.parts import View
from sufficit.progress import bar
from sufficit.reading import (
    GROUP,
    Item,
    Reader,
    Skipped,
    folder_targets,
    in_groups,
    labels_for,
    within,
)
from sufficit.resampling import RESAMPLES
from sufficit.results import (
    Estimate,
    as_json,
    provenance,
    save_json,
    save_scores,
    summarise,
)
from sufficit.types import Progress, ScoreKind


@dataclass(frozen=True)
class Options:
    """How to score: the options of `evaluate`, and what to do with targets and bad files."""

    alpha_min: float | Literal["search"] = 0.5
    score: ScoreKind = "accuracy"
    fill: str | Tensor = "black"
    value_step: float = 0.01
    percent_step: float = 0.02
    batch_size: int | None = None
    columns: tuple[str, ...] = COLUMNS
    alphas: tuple[float, ...] = ALPHA_GRID
    held_out_fill: str | Tensor | None = None
    leak_donors: int = 0
    targets: Literal["auto", "label", "prediction"] = "auto"
    normalize: bool = False
    on_error: Literal["skip", "stop"] = "skip"
    seed: int = 0
    progress: bool | None = None

    def scoring(self) -> dict[str, Any]:
        """What of this makes a plan."""
        names = ("alpha_min", "score", "value_step", "percent_step", "columns", "alphas")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class FolderScores:
    """What came out of a folder."""

    scores: Scores
    names: tuple[str, ...]
    summary: dict[str, Estimate]
    skipped: tuple[Skipped, ...]
    target_kind: str


@dataclass(frozen=True)
class _Item(Item):
    heatmap: Tensor  # [H,W]


@dataclass(frozen=True)
class _Pairs:
    """Pictures with their heatmaps."""

    view: View | None
    maps: HeatmapFile
    keys: dict[str, str | None]
    normalize: bool
    askew: list[str] = field(default_factory=list)

    def read(self, picture: Picture, label: int | None) -> _Item:
        """A picture and its heatmap, or an error that says what is wrong with either."""
        key = self.keys[picture.name]
        if key is None:
            raise BadPictureError(f"no heatmap: {self.maps.path.name} has no such key")
        image = read_picture(picture.path, self.view)
        return _Item(picture, label, image, self._heatmap(key, picture.name, image))

    def _heatmap(self, key: str, name: str, image: Tensor) -> Tensor:
        heatmap = self.maps.read(key)[None]
        if not heatmap.isfinite().all():
            raise BadPictureError("its heatmap has NaN or infinite values")
        if self.normalize:
            heatmap = normalize(heatmap)
        check_range(heatmap, [name])
        ratio = heatmap.shape[1] / heatmap.shape[2] * image.shape[2] / image.shape[1]
        if not 0.9 < ratio < 1.1:
            self.askew.append(name)
        return resize(heatmap, (image.shape[1], image.shape[2]))[0]


def score_folder(
    classifier: Classifier, data: Path, heatmaps: Path, options: Options | None = None
) -> FolderScores:
    """Score every image below a folder that has a heatmap in the file."""
    options = options or Options()
    make_plan(**options.scoring())  # what is wrong with it is said before anything is read
    for fill in (options.fill, options.held_out_fill):
        if isinstance(fill, Tensor) and fill.ndim > 3:
            raise UserError("a fill for a folder is one for all images: a number, [C] or [C,H,W]")
    pictures = find_pictures(data)
    with HeatmapFile(heatmaps) as maps:
        pairs = _Pairs(classifier.view, maps, _keys(maps, pictures), options.normalize)
        # The leak lays masks over images of other groups.
        reader = Reader(pairs.read, options.on_error, one_size=bool(options.leak_donors))
        labels = labels_for(classifier, pictures, options.targets)
        if options.leak_donors and labels:
            check_classes(torch.tensor(labels), torch.tensor(labels))
        names, parts = _score_all(classifier, pictures, labels, reader, options)
        reader.check_any(len(parts), len(pictures))
        _remark(pairs.askew)
        scores = join(parts)
        if options.leak_donors and len(scores.targets.unique()) > 1:
            kept = set(names)
            scored = [picture for picture in pictures if picture.name in kept]
            scores = _with_leak(classifier, scores, scored, pairs, options)
    broken = int(scores.clean.isnan().sum())
    if broken:
        warnings.warn(
            f"the model answered NaN for {broken} of {len(scores)} whole images: they are left out"
            " of the means; try another --precision",
            stacklevel=2,
        )
    kind = "prediction" if labels is None else "label"
    summary = summarise(scores, seed=options.seed)
    if options.leak_donors and scores.leaked is None:
        warnings.warn("no leak: all images that were scored are of one class", stacklevel=2)
    elif scores.leaked is not None and (remark := leak_warning(summary)):
        warnings.warn(remark, stacklevel=2)
    return FolderScores(scores, tuple(names), summary, tuple(reader.skipped), kind)


def save_run(
    folder: Path,
    result: FolderScores,
    classifier: Classifier,
    config: dict[str, Any],
    options: Options,
) -> None:
    """Write scores.parquet, curves.parquet, summary.json, curves.png and, last, run.json."""
    scores, labelled = result.scores, result.target_kind == "label"
    make_folder(folder)
    save_scores(folder, scores, result.names)
    save_json(folder / "summary.json", as_json(result.summary))
    figures.save(figures.curves_figure(scores), folder / "curves.png")
    settings = asdict(options)
    for name in ("fill", "held_out_fill"):
        if isinstance(fill := getattr(options, name), Tensor):
            settings[name] = f"own tensor {list(fill.shape)}"
    run = provenance(config | {"options": settings}, classifier.device, classifier.dtype)
    run |= run_facts(result) | {
        "skipped": [asdict(skipped) for skipped in result.skipped],
        "class_folders": folder_targets(result.names, scores.targets) if labelled else {},
        "seed": options.seed,
        "resamples": RESAMPLES,
    }
    if scores.search:
        run["search"] = {
            "alphas": list(scores.search.alphas),
            "mean_msi": scores.search.means.tolist(),
        }
    save_json(folder / "run.json", run)


def run_facts(result: FolderScores) -> dict[str, Any]:
    """What a reader of the means must know beside them."""
    scores = result.scores
    facts = {
        "n": len(scores),
        "n_skipped": len(result.skipped),
        "targets": result.target_kind,
        "clean_accuracy": float(scores.clean.nanmean()),
        "alpha_min": scores.alpha_min,
        "model_calls": int(scores.calls.sum()),
    }
    if scores.leaked is not None:
        facts |= {"leak_ratio": scores.leak_ratio, "leak_warning": leak_warning(result.summary)}
    return facts


def _keys(maps: HeatmapFile, pictures: Sequence[Picture]) -> dict[str, str | None]:
    keys = maps.match([picture.name for picture in pictures])
    if not any(keys.values()):
        raise UserError(
            f"none of the {len(pictures)} images has a heatmap in {maps.path}: images are named"
            f" like {pictures[0].name!r}, keys like {(maps.keys or ['(none)'])[0]!r}"
        )
    return keys


def _score_all(
    classifier: Classifier,
    pictures: Sequence[Picture],
    labels: Sequence[int] | None,
    reader: Reader[_Item],
    options: Options,
) -> tuple[list[str], list[Scores]]:
    """The names of the images that were scored, and their scores group by group."""
    names: list[str] = []
    parts: list[Scores] = []
    done, groups = 0, in_groups(pictures, labels, GROUP)
    with bar("scoring images", options.progress) as tick, quiet_reading():
        for group, items in zip(groups, reader.ahead(groups), strict=True):
            if items:
                inner = within(tick, done, len(group), len(pictures))
                parts.append(_score(classifier, items, labels is not None, options, inner))
                names.extend(item.picture.name for item in items)
            done += len(group)
            if tick:
                tick(done, len(pictures))
    return names, parts


def _with_leak(
    classifier: Classifier,
    scores: Scores,
    pictures: Sequence[Picture],
    pairs: _Pairs,
    options: Options,
) -> Scores:
    """Scores with the leak, for which these images, all that were scored, are read once more.

    Only now alpha_min and the target of every image are known.
    """
    again = Reader(pairs.read, "stop")
    setting = Setting(
        scores.alpha_min,
        options.leak_donors,
        options.seed,
        fill=options.fill,
        batch_size=options.batch_size,
    )

    def read(numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        items = again.items((pictures[i], None) for i in numbers)
        images, heatmaps = (
            [getattr(item, name) for item in items] for name in ("image", "heatmap")
        )
        return torch.stack(images), torch.stack(heatmaps)

    with bar("measuring the leak", options.progress) as tick, quiet_reading():
        found = leak_in_groups(classifier, read, scores.targets, setting, GROUP, tick)
    return with_leak(scores, found)


def _remark(askew: Sequence[str]) -> None:
    """Say which heatmaps had to be stretched."""
    if askew:
        warnings.warn(
            f"{len(askew)} heatmaps (first {askew[0]}) have other proportions than"
            " what the model sees, and are stretched to it: were they made on the uncropped"
            " image?",
            stacklevel=3,
        )


def _score(
    classifier: Classifier,
    items: Sequence[_Item],
    labelled: bool,
    options: Options,
    progress: Progress | bool,
) -> Scores:
    targets = torch.tensor([item.label for item in items]) if labelled else None
    return evaluate(
        classifier,
        torch.stack([item.image for item in items]),
        torch.stack([item.heatmap for item in items]),
        targets,
        fill=options.fill,
        held_out_fill=options.held_out_fill,
        batch_size=options.batch_size,
        progress=progress,
        **options.scoring(),
    )
