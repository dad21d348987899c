"""The stages that score: test images, all methods, alpha_min, places, a few images to look at."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sufficit.compare import Scored, score_folder
from sufficit.comparing.groups import draw, quiet
from sufficit.comparing.jobs import Job, make_job
from sufficit.data.images import ImageFile, ImageSource, list_images
from sufficit.data.loader import Entry
from sufficit.data.splits import evenly, middle
from sufficit.files import make_folder, read_json, safe_name, writing
from sufficit.perturbation.types import hits_of
from sufficit.reproduce.kept import Kept
from sufficit.reproduce.work import TRAINED, Work
from sufficit.results import save_json

SEARCH_STEP = 0.05  # of the curves when alpha_min is searched for
MSI = ("base_score", "mask_penalty", "msi")
SHOWN = 12
NO_ANSWER = 2  # stands for NaN among hits


def write_the_test_folder(work: Work) -> None:
    """Some of the test images, as many of each class, as PNG in class folders."""
    note = work.out / "test.json"
    if note.exists():
        return
    sets, plan = work.sets, work.plan
    with work.clock("test folder"):
        chosen = evenly(sets.test.labels, plan.images, plan.seed)
        split = sets.test.pick(chosen).to("cpu")
        labels = split.labels.tolist()
        names = [
            f"{sets.classes[k]}/{i:05d}.png" for k, i in zip(labels, chosen.tolist(), strict=True)
        ]
        for name in sets.classes:
            make_folder(work.out / "test" / safe_name(name))
        pixels = middle(split.images, plan.side).permute(0, 2, 3, 1).contiguous().numpy()

        def write(job: tuple[str, Any]) -> None:
            with writing(work.out / "test" / job[0]) as path:
                Image.fromarray(job[1]).save(path)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, zip(names, pixels, strict=True)))
        if split.masks is not None:
            facts = {"names": names}
            Kept(work.out / "masks.safetensors").write({"masks": split.masks.byte()}, facts)
        save_json(note, {"names": names, "labels": labels, "of": len(sets.test)})


def score_the_table(work: Work) -> None:
    """All methods at the paper's alpha_min, with every column and the leak."""
    kept, place = work.kept("scores"), work.out / "compare"
    if not _is_left(work, kept, place):
        return
    with work.clock("scoring"), quiet():
        scored = score_folder(work.settings, place, **_asked(work, "scores"))
        if scored is None:
            return
        work.kept("answers").write(compact(scored), {"scoring": scored.job.scoring})
        trained = read_json(work.out / "classifier" / TRAINED)
        facts = {"record": work.record(), "classifier": trained, "source": trained["data"]}
        kept.write(_columns(scored), _facts(scored) | facts)
    shutil.rmtree(place, ignore_errors=True)


def search_alpha(work: Work) -> None:
    """MSI of all methods over alpha_min, on some of the images."""
    kept, place = work.kept("search"), work.out / "search"
    if not _is_left(work, kept, place):
        return
    settings = replace(
        work.settings, alpha_min="search", leak=False, value_step=max(SEARCH_STEP, work.plan.step)
    )
    pictures = some_pictures(work, work.plan.search_images)
    with work.clock("search of alpha_min"), quiet():
        asked = _asked(work, "search") | {"columns": MSI, "pictures": pictures}
        scored = score_folder(settings, place, **asked)
        if scored is None:
            return
        searches = {method: one.search for method, one in scored.scores.items() if one.search}
        alphas = list(next(iter(searches.values())).alphas)
        tensors = {f"{method}/msi": search.msi for method, search in searches.items()}
        kept.write(tensors, _facts(scored) | {"alphas": alphas})
    shutil.rmtree(place, ignore_errors=True)


def find_the_digits(work: Work) -> None:
    """Where masks of the object are known: overlap with it, and whether the peak lies on it."""
    kept, masks = work.kept("places"), Kept(work.out / "masks.safetensors")
    if kept.exists() or not masks.exists():
        return
    with work.clock("places"), quiet():
        truth, facts = masks.read()
        job, labels = _job(work, work.plan.images), _labels(work)
        where = {name: i for i, name in enumerate(facts["names"])}
        found: dict[str, list[Tensor]] = {}
        names = list[str]()
        for group in job.groups():
            some = group.names
            names += some
            _, maps = draw(job, group.entries, torch.tensor([labels[name] for name in some]))
            digit = truth["masks"][[where[name] for name in some]].bool()
            for method, heatmaps in maps.items():
                iou = overlap(heatmaps, digit, work.table.alpha_min)
                found.setdefault(f"{method}/iou", []).append(iou)
                found.setdefault(f"{method}/pointing", []).append(pointing(heatmaps, digit))
        kept.write({key: torch.cat(parts) for key, parts in found.items()}, {"names": names})


def overlap(heatmaps: Tensor, truth: Tensor, alpha_min: float) -> Tensor:
    """Intersection over union of what is marked and what is there: [N,H,W], [N,H,W] -> [N]."""
    marked = heatmaps > alpha_min
    both = (marked & truth).flatten(1).sum(1)
    return both.double() / (marked | truth).flatten(1).sum(1).clamp(min=1)


def pointing(heatmaps: Tensor, truth: Tensor) -> Tensor:
    """Share of the highest pixels that lie on what is there: [N,H,W], [N,H,W] -> [N]."""
    flat = heatmaps.flatten(1)
    highest = flat == flat.amax(1, keepdim=True)
    return (highest & truth.flatten(1)).sum(1).double() / highest.sum(1)


def draw_some(work: Work) -> None:
    """A few images with every method's heatmap, as bytes, for the sheet and the report."""
    kept = work.kept("shown")
    if kept.exists():
        return
    with work.clock("sheet"), quiet():
        job, labels = _job(work, SHOWN), _labels(work)
        entries = [Entry(number, picture) for number, picture in enumerate(job.pictures)]
        names = [entry.image.name for entry in entries]
        images, maps = draw(job, entries, torch.tensor([labels[name] for name in names]))
        tensors = {"images": as_bytes(images)}
        tensors |= {f"{method}/heatmaps": as_bytes(found) for method, found in maps.items()}
        facts = {"names": names, "methods": list(maps), "classes": work.classifier.classes}
        kept.write(tensors, facts)


def as_bytes(values: Tensor) -> Tensor:
    """Values in 0..1 as 0..255."""
    return (values * 255).round().byte()


def compact(scored: Scored) -> dict[str, Tensor]:
    """What the model answered, as small as the curves of a report allow."""
    found: dict[str, Tensor] = {}
    for method, answers in scored.found.answers.items():
        hits = hits_of(answers.named, answers.targets)
        found[f"{method}/hits"] = hits.nan_to_num(NO_ANSWER).byte()
        found[f"{method}/confidences"] = answers.confidences.half()
        found[f"{method}/shares"] = answers.shares
        found[f"{method}/calls"] = answers.calls
    return found


def _is_left(work: Work, kept: Kept, place: Path) -> bool:
    """Whether a stage is left to do: the first process looks, and all do as it says."""
    if work.crew.first and kept.exists():
        shutil.rmtree(place, ignore_errors=True)  # a killed run may have left it
    left: bool = work.crew.tell(f"left-{place.name}", not kept.exists())
    return left


def _asked(work: Work, stage: str) -> dict[str, Any]:
    asked = {"classifier": work.classifier, "group": work.plan.group, "progress": work.progress}
    return asked | {"crew": work.crew.again(stage)}


def some_pictures(work: Work, n: int) -> list[ImageFile]:
    """As many of each class, of the test folder."""
    pictures = list_images(work.out / "test")
    labels = _labels(work)
    rows = evenly([labels[picture.name] for picture in pictures], n, work.plan.seed)
    return [pictures[row] for row in rows.tolist()]


def _labels(work: Work) -> dict[str, int]:
    note = read_json(work.out / "test.json", most=2**28)
    return dict(zip(note["names"], note["labels"], strict=True))


def _job(work: Work, n: int) -> Job:
    pictures = ImageSource.of(some_pictures(work, n))
    return make_job(work.settings, work.classifier, pictures, work.plan.group, False)


def _columns(scored: Scored) -> dict[str, Tensor]:
    """Every method's columns, a value an image."""
    return {
        f"{method}/{name}": values.double()
        for method, scores in scored.scores.items()
        for name, values in scores.columns.items()
    } | {"clean": next(iter(scored.scores.values())).clean}


def _facts(scored: Scored) -> dict[str, Any]:
    scores = scored.scores
    return {
        "names": list(scored.found.names),
        "targets": scored.found.targets.tolist(),
        "methods": list(scores),
        "contest": scored.contest,
        "alpha_min": scores[scored.contest[0]].alpha_min,
        "empty": scored.found.empty,
        "model_calls": sum(int(one.calls.sum()) for one in scores.values()),
    }
