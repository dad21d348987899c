"""Score a folder of images and a file of heatmaps: the whole chain. Read this file first."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sufficit import figures
from sufficit.classifiers import Classifier
from sufficit.data.heatmaps import HeatmapError, HeatmapFile
from sufficit.data.images import (
    BadPictureError,
    Picture,
    find_pictures,
    labels_of,
    quiet_reading,
    read_picture,
)
from sufficit.errors import UserError
from sufficit.heatmaps import check_range, normalize, resize
from sufficit.metrics.columns import COLUMNS
from sufficit.metrics.evaluate import ALPHA_GRID, Scores, evaluate, join, make_plan, with_leak
from sufficit.metrics.leak import leak_in_groups, leak_warning
from sufficit.metrics.probe import Setting, check_classes
from sufficit.parts import View
from sufficit.progress import bar
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

GROUP = 32  # images read, and scored, at a time


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
class Skipped:
    """An image that was not scored, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class FolderScores:
    """What came out of a folder."""

    scores: Scores
    names: tuple[str, ...]
    summary: dict[str, Estimate]
    skipped: tuple[Skipped, ...]
    target_kind: str


@dataclass(frozen=True)
class _Item:
    picture: Picture
    label: int | None
    image: Tensor  # [C,H,W]
    heatmap: Tensor  # [H,W]


@dataclass
class _Reader:
    """Reads images with their heatmaps, and keeps note of those it could not read."""

    view: View | None
    maps: HeatmapFile
    keys: dict[str, str | None]
    options: Options
    skipped: list[Skipped] = field(default_factory=list)
    askew: list[str] = field(default_factory=list)
    sizes: dict[tuple[int, ...], str] = field(default_factory=dict)

    def items(self, pictures: Iterable[tuple[Picture, int | None]]) -> list[_Item]:
        items = [item for picture, label in pictures if (item := self._item(picture, label))]
        if not self.options.leak_donors:  # the leak lays masks over images of other groups
            self.sizes.clear()
        self.sizes |= {tuple(item.image.shape): item.picture.name for item in items}
        if len(self.sizes) > 1:
            listed = ", ".join(
                f"{name} {list(size)}" for size, name in list(self.sizes.items())[:3]
            )
            raise UserError(
                f"images differ in size ({listed}) and the model names none: give --size"
            )
        return items

    def _item(self, picture: Picture, label: int | None) -> _Item | None:
        key = self.keys[picture.name]
        try:
            if key is None:
                raise BadPictureError(f"no heatmap: {self.maps.path.name} has no such key")
            image = read_picture(picture.path, self.view)
            return _Item(picture, label, image, self._heatmap(key, picture.name, image))
        except (BadPictureError, HeatmapError, OSError) as error:
            if self.options.on_error == "stop":
                raise UserError(
                    f"{picture.name}: {error}. Mend it, or go on without such images with"
                    " --on-error skip"
                ) from error
            self.skipped.append(Skipped(picture.name, str(error)))
            return None

    def _heatmap(self, key: str, name: str, image: Tensor) -> Tensor:
        heatmap = self.maps.read(key)[None]
        if not heatmap.isfinite().all():
            raise BadPictureError("its heatmap has NaN or infinite values")
        if self.options.normalize:
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
        reader = _Reader(classifier.view, maps, _keys(maps, pictures), options)
        labels = _labels(classifier, pictures, reader)
        if options.leak_donors and labels:
            check_classes(torch.tensor(labels), torch.tensor(labels))
        names, parts = _score_all(classifier, pictures, labels, reader)
        _remark(reader, len(parts), len(pictures))
        scores = join(parts)
        if options.leak_donors and len(scores.targets.unique()) > 1:
            kept = set(names)
            scored = [picture for picture in pictures if picture.name in kept]
            scores = _with_leak(classifier, scores, scored, reader)
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
    scores = result.scores
    folder.mkdir(parents=True, exist_ok=True)
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
        "class_folders": _folder_targets(result),
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


def _folder_targets(result: FolderScores) -> dict[str, int]:
    """Which class number each class folder was taken for."""
    if result.target_kind != "label":
        return {}
    targets = result.scores.targets.tolist()
    return {name.split("/")[0]: k for name, k in zip(result.names, targets, strict=True)}


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
    reader: _Reader,
) -> tuple[list[str], list[Scores]]:
    """The names of the images that were scored, and their scores group by group."""
    names: list[str] = []
    parts: list[Scores] = []
    done = 0
    with bar("scoring images", reader.options.progress) as tick, quiet_reading():
        for asked, items in _ahead(reader, pictures, labels):
            if items:
                inner = _within(tick, done, asked, len(pictures))
                labelled = labels is not None
                parts.append(_score(classifier, items, labelled, reader.options, inner))
                names.extend(item.picture.name for item in items)
            done += asked
            if tick:
                tick(done, len(pictures))
    return names, parts


def _with_leak(
    classifier: Classifier, scores: Scores, pictures: Sequence[Picture], reader: _Reader
) -> Scores:
    """Scores with the leak, for which these images, all that were scored, are read once more.

    Only now alpha_min and the target of every image are known.
    """
    options = replace(reader.options, on_error="stop")
    again = _Reader(reader.view, reader.maps, reader.keys, options)
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


def _within(tick: Progress | None, done: int, asked: int, total: int) -> Progress | bool:
    """The progress of one group as part of the whole."""
    if tick is None:
        return False
    return lambda part, whole: tick(done + asked * part / whole, total)


def _remark(reader: _Reader, scored: int, images: int) -> None:
    """Say what was odd, and raise where nothing could be scored."""
    if not scored:
        first = reader.skipped[0]
        raise UserError(
            f"all {images} images were skipped; the first, {first.name}: {first.reason}"
        )
    if reader.askew:
        warnings.warn(
            f"{len(reader.askew)} heatmaps (first {reader.askew[0]}) have other proportions than"
            " what the model sees, and are stretched to it: were they made on the uncropped"
            " image?",
            stacklevel=3,
        )


def _labels(
    classifier: Classifier, pictures: Sequence[Picture], reader: _Reader
) -> list[int] | None:
    """Class numbers from folder names, unless the model's own predictions are wanted."""
    wanted = reader.options.targets
    if wanted == "prediction":
        return None
    labels = None
    if any(picture.folder for picture in pictures):
        labels = labels_of(pictures, classifier.classes, _num_classes(classifier, pictures, reader))
    if labels is None and wanted == "label":
        raise UserError("--targets label needs class folders: DATA/CLASS/image.png")
    return labels


def _num_classes(classifier: Classifier, pictures: Sequence[Picture], reader: _Reader) -> int:
    """How many classes the model has: from its names, or by asking it once."""
    if classifier.classes is not None:
        return len(classifier.classes)
    for picture in pictures:
        try:
            image = read_picture(picture.path, reader.view)
        except (BadPictureError, OSError):
            continue
        with torch.no_grad():
            return classifier(image[None]).shape[1]
    raise UserError(f"none of the {len(pictures)} images can be read")


def _ahead(
    reader: _Reader, pictures: Sequence[Picture], labels: Sequence[int] | None
) -> Iterator[tuple[int, list[_Item]]]:
    """Groups of images, the next one read in the background while this one is scored."""
    known: Sequence[int | None] = labels or [None] * len(pictures)
    pairs = list(zip(pictures, known, strict=True))
    groups = [pairs[i : i + GROUP] for i in range(0, len(pairs), GROUP)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.items, groups[0])
        for group, following in zip(groups, [*groups[1:], None], strict=True):
            items = waiting.result()
            if following is not None:
                waiting = pool.submit(reader.items, following)
            yield len(group), items


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
