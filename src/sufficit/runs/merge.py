"""The end of a run: units merged into rows, curves, summary, record and the images to show."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.loader import Skipped, check_any
from sufficit.errors import GoneError, UserError
from sufficit.files import make_folder, writing
from sufficit.metrics.columns import Curve
from sufficit.metrics.leakage import TENSORS, Leak, leak_warning
from sufficit.metrics.plan import ALPHA_GRID, Plan
from sufficit.metrics.scores import AlphaSearch, Scores, coarse, read, summarise, with_leak
from sufficit.perturbation.predictions import Predictions
from sufficit.provenance import plain, provenance, save_json
from sufficit.report.content import choose
from sufficit.runs.config import write_toml
from sufficit.runs.job import Job
from sufficit.runs.maps import maps_from_file
from sufficit.runs.results import OWN_BEST, PARTS, RunResults
from sufficit.runs.store import HEATMAPS, LEAK, PIXELS, SCORES, Store, UnitFile
from sufficit.statistics import (
    Chance,
    Estimate,
    Floats,
    Standing,
    compare_values,
    estimates,
)

if TYPE_CHECKING:
    import pyarrow

FACTS = ("clean_accuracy", "calls")  # columns of rows that are not scores
ROWS = 1024  # of a row group of curves.parquet


def best_alpha(job: Job, store: Store) -> float:
    """The alpha_min of a run: the given one, or the best for the mean of the ranked sources."""
    if not job.plan.searching:
        return job.plan.schedules[0].alpha_min
    means = torch.stack([_search(job, store, name).means for name in job.ranked])
    return AlphaSearch(tuple(s.alpha_min for s in job.plan.schedules), means).best


def write_results(
    job: Job, store: Store, alpha_min: float, *, flat: bool, temporary: bool
) -> RunResults:
    """Merge the units into rows, curves, summary and record; the units are deleted at the end."""
    if find_spec("pyarrow") is None:
        raise UserError(
            "every unit is done, but writing the results needs pyarrow, which is not installed:"
            " install it and run the same command again, here or where you copy the folder"
        )
    out, merged = store.folder, _merged(job, store)
    check_any(len(merged.names), merged.skipped)
    write_toml(out / "RUN.toml", job.config)
    fixed = replace(
        job.plan,
        schedules=tuple(s for s in job.plan.schedules if s.alpha_min == alpha_min),
        searching=False,
    )
    columns: dict[str, dict[str, Floats]] = {}
    searches: dict[str, AlphaSearch] = {}
    for name in job.sources:
        place = out if flat else make_folder(out / name)
        columns[name] = _write_rows(job, store, name, fixed, place, merged)
        if job.plan.searching:
            searches[name] = _search(job, store, name)
        if job.config.save_heatmaps:
            write_heatmaps(place / "heatmaps.npz", heatmaps_of(job, store, name, merged.units))
    seed = job.config.seed
    summaries = {
        name: summarise({c: found[c] for c in found if c not in FACTS}, job.plan, seed=seed)
        for name, found in columns.items()
    }
    for name, search in searches.items():
        own = search.msi[:, search.alphas.index(search.best)].numpy()
        summaries[name] |= estimates({OWN_BEST: own}, {OWN_BEST: True}, seed=seed)
    standing = None
    if "msi" in job.plan.columns:
        msi = {name: columns[name]["msi"] for name in job.ranked}
        standing = compare_values(msi, "msi", seed=seed)
    order = [*(standing.ranking if standing else job.ranked)]
    order += [name for name in job.sources if name not in order]
    shown: dict[str, str] = {}
    if standing is not None and len(merged.shapes) == 1:
        shown = _write_shown(job, store, merged, {n: columns[n]["msi"] for n in job.ranked})
    summary: dict[str, Any] = plain({name: dict(summaries[name]) for name in order})
    if flat:
        summary = summary[order[0]]
    elif standing is not None:
        summary["standing"] = asdict(standing)
    save_json(out / "summary.json", summary)
    if standing is not None and not flat:
        _write_pairs(out / "pairs.csv", standing)
    record = _record(job, merged, alpha_min, order, summaries, columns, searches)
    record |= {"shown": shown, "flat": flat}
    results = RunResults.read(out, record)
    save_json(out / "run.json", record)
    if not temporary:
        store.remove_units()
    return results


@dataclass(frozen=True)
class Merged:
    """What the units say of their images, in order."""

    units: list[int]  # that have images
    names: list[str]
    numbers: list[int]
    skipped: list[Skipped]
    shapes: set[tuple[int, ...]]
    empty: dict[str, int]
    stretched: list[str]
    alpha_curve: dict[str, Any] | None


def _merged(job: Job, store: Store) -> Merged:
    found = Merged([], [], [], [], set(), dict.fromkeys(job.sources, 0), [], None)
    curves: dict[str, list[Tensor]] = {name: [] for name in job.sources}
    sample: list[str] = []
    calls = 0
    for unit in job.units:
        facts = store.facts(SCORES, unit.number)
        found.skipped.extend(Skipped(*pair) for pair in facts["skipped"].items())
        if not facts["names"]:
            continue
        found.units.append(unit.number)
        found.names.extend(facts["names"])
        found.numbers.extend(facts["numbers"])
        found.shapes.add(tuple(facts["shape"]))
        found.stretched.extend(facts["stretched"])
        for name in job.sources:
            found.empty[name] += facts["empty"][name]
        if "alpha_images" in facts:
            sample += facts["alpha_images"]
            calls += facts["alpha_calls"]
            kept = store.read(SCORES, unit.number, names=[f"{name}/alphas" for name in curves])
            for name, parts in curves.items():
                parts.append(kept.tensors[f"{name}/alphas"])
    if not sample:
        return found
    means = {name: torch.cat(parts).nanmean(0).tolist() for name, parts in curves.items()}
    return replace(
        found,
        alpha_curve={
            "images": sample,
            "value_step": coarse(job.config.value_step),
            "alphas": list(ALPHA_GRID),
            "mean_msi": means,
            "model_calls": calls,
        },
    )


def _search(job: Job, store: Store, name: str) -> AlphaSearch:
    """MSI of a source at every alpha_min tried."""
    parts = []
    for unit in job.units:
        if store.facts(SCORES, unit.number)["names"]:
            search = read(
                _predictions(job.plan, _unit(job, store, name, unit.number), name), job.plan
            ).search
            assert search is not None  # the plan searches
            parts.append(search.msi)
    if not parts:
        parts = [torch.empty(0, len(job.plan.schedules))]
    return AlphaSearch(tuple(s.alpha_min for s in job.plan.schedules), torch.cat(parts))


def _unit(job: Job, store: Store, name: str, unit: int) -> UnitFile:
    """A source's predictions of a unit."""
    stems = [name, *([f"{name}/held_out"] if job.held_out_fill is not None else [])]
    names = [f"{stem}/{part}" for stem in stems for part in PARTS]
    return store.read(SCORES, unit, names=names)


def _predictions(plan: Plan, kept: UnitFile, name: str, *, held_out: bool = False) -> Predictions:
    stem = f"{name}/held_out" if held_out else name
    parts = {part: kept.tensors[f"{stem}/{part}"] for part in PARTS}
    return Predictions(bands=plan.msi_asks if held_out else plan.asks, weighed=plan.weighs, **parts)


def _unit_scores(job: Job, store: Store, name: str, unit: int, fixed: Plan) -> Scores:
    """A source's scores of a unit at the run's alpha_min."""
    kept, second = _unit(job, store, name, unit), job.held_out_fill is not None
    held_out = _predictions(job.plan, kept, name, held_out=True) if second else None
    scores = read(_predictions(job.plan, kept, name), fixed, held_out)
    stage = LEAK if job.plan.searching else SCORES
    if not job.config.leak or not store.has(stage, unit):
        return scores
    try:
        parts = store.read(stage, unit, names=[f"{name}/leak/{part}" for part in TENSORS]).tensors
    except GoneError:
        raise
    except UserError:  # donors of one class only: nothing was measured
        return scores
    leaked = {part: parts[f"{name}/leak/{part}"] for part in TENSORS}
    return with_leak(scores, Leak(**leaked, alpha_min=scores.alpha_min))


def _write_rows(
    job: Job, store: Store, name: str, fixed: Plan, place: Path, merged: Merged
) -> dict[str, Floats]:
    """Write scores.parquet and curves.parquet of a source; return its columns: each [N]."""
    import pandas
    import pyarrow
    from pyarrow import parquet

    frames: list[pandas.DataFrame] = []
    waiting: list[pyarrow.Table] = []
    start = 0
    with writing(place / "curves.parquet") as path, ExitStack() as closing:
        writer: Any = None
        for k, unit in enumerate(merged.units, 1):
            scores = _unit_scores(job, store, name, unit, fixed)
            names = merged.names[start : start + len(scores)]
            start += len(scores)
            frame = scores.frame()
            frame.insert(0, "image", names)
            frames.append(frame)
            waiting.append(_curves_table(scores.curves(), names))
            if sum(map(len, waiting)) >= ROWS or k == len(merged.units):
                table = pyarrow.concat_tables(waiting)
                writer = writer or closing.enter_context(parquet.ParquetWriter(path, table.schema))
                writer.write_table(table)
                waiting = []
    rows = pandas.concat(frames, ignore_index=True)
    with writing(place / "scores.parquet") as path:
        rows.to_parquet(path, index=False)
    return {column: rows[column].to_numpy(np.float64) for column in rows.columns[2:]}


def _curves_table(curves: Mapping[str, Curve], names: Sequence[str]) -> "pyarrow.Table":
    """One row per image, one column per curve and kind of score; the grids are in the schema."""
    import pyarrow

    columns: dict[str, Any] = {"image": list(names)}
    for name, curve in curves.items():
        for kind in ("accuracy", "confidence"):
            columns[f"{name}_{kind}"] = list(getattr(curve, kind).float().numpy())
    grids = {name: list(curve.grid) for name, curve in curves.items()}
    return pyarrow.table(columns).replace_schema_metadata({"grids": json.dumps(grids)})


def _write_pairs(path: Path, standing: Standing) -> None:
    """Write one row per pair of sources, with how its interval and p-value were made."""
    frame = standing.frame()
    frame.insert(0, "column", standing.column)
    with writing(path) as part:
        frame.assign(**asdict(standing.chance)).to_csv(part, index=False)


def heatmaps_of(
    job: Job, store: Store, name: str, units: Sequence[int]
) -> Iterator[tuple[str, Tensor]]:
    """Every image's heatmap at the image's size, a unit at a time."""
    for unit in units:
        kept = store.read(HEATMAPS, unit)
        _, h, w = kept.facts["shape"]
        maps = maps_from_file(kept, job.config.seed)[name]
        yield from zip(kept.facts["names"], maps.at((h, w)), strict=True)


def _write_shown(
    job: Job, store: Store, merged: Merged, msi: Mapping[str, Floats]
) -> dict[str, str]:
    """Write the pixels, maps and predictions of the images to show; return them with reasons."""
    from safetensors.torch import save

    kept = {n: k for k in merged.units for n in store.facts(PIXELS, k)["numbers"]}
    row_of = {number: row for row, number in enumerate(merged.numbers)}
    chosen = choose(msi, seed=job.config.seed, allowed=sorted(row_of[n] for n in kept))
    numbers = [merged.numbers[row] for row in chosen]
    rows: dict[str, list[Tensor]] = {}
    for number in numbers:
        unit = kept[number]
        pixels, maps = store.read(PIXELS, unit), store.read(HEATMAPS, unit)
        scores = store.read(SCORES, unit, names=[f"{n}/{p}" for n in job.sources for p in PARTS])
        rows.setdefault("pixels", []).append(
            pixels.tensors["pixels"][pixels.facts["numbers"].index(number)]
        )
        place = maps.facts["numbers"].index(number)
        for name, tensor in {**maps.tensors, **scores.tensors}.items():
            rows.setdefault(name, []).append(tensor[place])
    tensors = {name: torch.stack(parts) for name, parts in rows.items()}
    if isinstance(job.fill, Tensor):
        tensors["fill"] = job.fill
    known = {name: maps.facts[name] for name in ("final", "controls", "shape")}
    facts = {"rows": list(chosen), "reasons": list(chosen.values()), "numbers": numbers, **known}
    whole = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    with writing(store.folder / "shown.safetensors") as path:
        path.write_bytes(save(whole, metadata={"facts": json.dumps(facts)}))
    return {merged.names[row]: reason for row, reason in chosen.items()}


def _record(
    job: Job,
    merged: Merged,
    alpha_min: float,
    order: Sequence[str],
    summaries: Mapping[str, Mapping[str, Estimate]],
    columns: Mapping[str, Mapping[str, Floats]],
    searches: Mapping[str, AlphaSearch],
) -> dict[str, Any]:
    """What run.json holds: config, provenance, counts, and what the tables do not."""
    rows, classifier = columns[order[0]], job.classifier
    folders = job.class_folders
    record = provenance(asdict(job.config), classifier.device, classifier.dtype)
    leaks = {n: leak_warning(s) for n, s in summaries.items() if "leak_ratio" in s}
    record |= {
        "n": len(merged.names),
        "n_skipped": len(merged.skipped),
        "targets": job.targets,
        "clean_accuracy": _mean(rows["clean_accuracy"]),
        "alpha_min": alpha_min,
        "methods": list(order),
        "controls": [name for name in order if name not in (*job.ranked, *job.references)],
        "references": list(job.references),
        "model_calls": int(sum(found["calls"].sum() for found in columns.values())),
        "empty_heatmaps": merged.empty,
        "stretched_heatmaps": merged.stretched,
        "leak_ratio": {n: s["leak_ratio"].mean for n, s in summaries.items() if "leak_ratio" in s},
        "leak_warnings": {name: words for name, words in leaks.items() if words},
        "skipped": [asdict(skipped) for skipped in merged.skipped],
        "preprocessing": classifier.view and asdict(classifier.view),
        "class_folders": folders,
        "class_names": _class_names(job, folders),
        "seed": job.config.seed,
        "chance": asdict(Chance(job.config.seed)),
    }
    if searches:
        found = {name: search.means.tolist() for name, search in searches.items()}
        alphas = list(next(iter(searches.values())).alphas)
        record["search"] = {"alphas": alphas, "mean_msi": found}
        record["own_alpha_min"] = {name: search.best for name, search in searches.items()}
    if merged.alpha_curve is not None:
        record["alpha_curve"] = merged.alpha_curve
    return record


def _mean(values: Floats) -> float:
    """The mean without NaN; NaN where there is nothing else."""
    return float(np.nanmean(values)) if not np.isnan(values).all() else float("nan")


def _class_names(job: Job, folders: Mapping[str, int]) -> list[str] | None:
    """Names of the classes: the model's own, or those of the class folders."""
    if job.classifier.classes is not None or not folders:
        return None if job.classifier.classes is None else list(job.classifier.classes)
    known = {number: folder for folder, number in folders.items()}
    return [known.get(number, f"class {number}") for number in range(max(known) + 1)]
