"""The end of a run: units merged into rows, curves, summary, record and the images to show.

One pass over the units, each file read once. A search for alpha_min needs a pass before it, and the
few images to show are read again. Memory grows by 16 bytes per image.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sufficit.classifier.fingerprint import fingerprint
from sufficit.data.loader import check_any
from sufficit.metrics.columns import msi
from sufficit.metrics.further_columns import WHOLE_CURVES, Shares, best_shares
from sufficit.metrics.leakage import TENSORS, Leak, leak_warning
from sufficit.metrics.localization import LOCALIZATION
from sufficit.metrics.plan import ALPHA_GRID, Plan, coarse
from sufficit.metrics.scores import AlphaSearch, Scores, read, summary_of, with_leak
from sufficit.perturbation.predictions import Predictions
from sufficit.provenance import plain, provenance, save_json
from sufficit.report.content import Choice
from sufficit.runs import rankings
from sufficit.runs.config import write_toml
from sufficit.runs.job import Job
from sufficit.runs.maps import heatmaps_from_file, source_facts
from sufficit.runs.results import OWN_BEST, RunResults
from sufficit.runs.rows import SourceTotals, csv_writer, grouped, joined
from sufficit.runs.shown import write_shown
from sufficit.runs.store import HEATMAPS, LEAK, SCORES, Store, UnitFile
from sufficit.similarity import correlations
from sufficit.statistics import Estimate, estimates_of
from sufficit.sums import Sums, few_images

TOGETHER = 512  # images that are merged at a time, at least, where there are so many
OF_SOME = {"alpha": "/alphas", "ceiling": "/ceiling"}  # kinds and tensors of some images of a unit
NAMED = 1000  # skipped and stretched images, at most, that run.json names


def msi_tried(job: Job, store: Store, sources: Iterable[str]) -> dict[str, Sums]:
    """The sums of some sources' MSI, at every alpha_min tried."""
    tried = {schedule.alpha_min: schedule for schedule in job.plan.schedules}
    found = {name: Sums([*tried], seed=job.config.seed) for name in sources}
    for unit in range(len(job.units)) if found else ():
        kept = store.read(SCORES, unit)
        for name, sums in found.items() if kept.facts["names"] else ():
            one = _predictions(job, kept, name)
            sums.add(
                kept.facts["numbers"], {a: msi(one, schedule) for a, schedule in tried.items()}
            )
    return found


def best_alpha(job: Job, tried: Mapping[str, Sums]) -> float:
    """The alpha_min of a run: the given one, or the best for the mean of the ranked sources."""
    if not job.plan.searching:
        return job.plan.schedules[0].alpha_min
    return _search([tried[name] for name in job.ranked]).best


def is_precise(job: Job, store: Store) -> bool:
    """Whether the intervals of all ranked sources' MSI are as narrow as `within` asks."""
    first, tried = job.plan.schedules[0].alpha_min, msi_tried(job, store, job.ranked).values()
    known = [estimates_of(sums, {first: True}, job.chance)[first] for sums in tried]
    return rankings.half_width(known) <= (job.config.within or 0)


def _search(tried: Sequence[Sums]) -> AlphaSearch:
    """Mean MSI of some sources at every alpha_min, and the best for their mean."""
    means = np.stack([sums.means() for sums in tried])
    return AlphaSearch(tried[0].columns, torch.from_numpy(means))


def write_results(
    job: Job, store: Store, tried: Mapping[str, Sums], *, flat: bool, temporary: bool
) -> RunResults:
    """Merge the units into rows, curves, summary and record; the units are deleted at the end.

    `tried` has the MSI of every source at every alpha_min, of a search.
    """
    store.clear_earlier()
    alpha_min = best_alpha(job, tried)
    out, merged = store.folder, _merged(job, store, alpha_min, flat=flat)
    write_toml(out / "RUN.toml", job.config)
    summaries = {
        name: summary_of(one.columns, one.leaked, job.plan, job.chance)
        for name, one in merged.sources.items()
    }
    searches = {name: _search([sums]) for name, sums in tried.items()}
    for name, search in searches.items():
        limits = lambda _: job.plan.limits("msi")  # noqa: E731  # of every alpha_min
        own = estimates_of(tried[name], {search.best: True}, limits=limits)
        summaries[name][OWN_BEST] = own[search.best]
    worst = rankings.add_worst(job, summaries)
    ranked = merged.rankings.ranked()
    standing = ranked[0].standing if ranked else None
    order = [*(standing.ranking if standing else job.ranked)]
    order += [name for name in job.sources if name not in order]
    shown: dict[str, str] = {}
    if standing is not None and len(merged.shapes) == 1:
        shown = write_shown(job, store, merged.choice, np.concatenate(merged.places))
    summary: dict[str, Any] = plain({name: dict(summaries[name]) for name in order})
    if flat:
        summary = summary[order[0]]
    elif standing is not None:
        summary["standing"] = asdict(standing)
    save_json(out / "summary.json", summary)
    save_json(out / "curves.json", {name: merged.sources[name].mean_curves() for name in order})
    if standing is not None and not flat:
        rankings.write_pairs(out / "pairs.csv", [one.standing for one in ranked])
    record = _record(job, merged, alpha_min, order, summaries, searches)
    record |= {"shown": shown, "flat": flat, "run": store.run, "worst_fill": worst}
    if job.twin is not None:
        accuracy = next((one.clean_accuracy for one in ranked if one.twin), None)
        about = {"model": job.config.twin, "fingerprint": asdict(fingerprint(job.twin))}
        record["twin"] = plain(about | {"clean_accuracy": accuracy})
    record["conditions"] = plain(ranked)
    record["rank_correlations"] = plain(correlations(ranked))
    if standing is not None and flat:
        record["standing"] = plain(standing)
    results = RunResults.read(out, record)
    save_json(out / "run.json", record)
    if temporary:
        return replace(results, rows=results.rows.in_memory())
    store.remove_units()
    return results


class First(dict[str, str]):
    """The first NAMED images of a kind with the reason of each, and the number of all."""

    n = 0

    def add(self, found: Mapping[str, str]) -> None:
        """Count images, and keep some."""
        self.n += len(found)
        self |= dict(islice(found.items(), NAMED - len(self)))


@dataclass
class Merged:
    """What all units say, added up."""

    rankings: rankings.Rankings
    rank_shares: dict[str, Shares]
    sources: dict[str, SourceTotals] = field(default_factory=dict)
    n: int = 0
    skipped: First = field(default_factory=First)
    stretched: First = field(default_factory=First)
    bad_truths: First = field(default_factory=First)
    shapes: set[tuple[int, ...]] = field(default_factory=set)  # no more than two
    empty: Counter[str] = field(default_factory=Counter)
    output: str = ""  # what is wrong with what the model gives
    choice: Choice = field(default_factory=Choice)
    places: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """Number and unit of the image of each row: [n,2], of every unit."""
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By kind of OF_SOME: images, calls, and MSI by source."""

    def add(self, kept: UnitFile) -> None:
        """Add what a unit says besides the rows."""
        facts = kept.facts
        self.stretched.add(dict.fromkeys(facts["stretched"], ""))
        self.bad_truths.add(facts["bad_truths"])
        self.shapes |= {tuple(facts["shape"])} if len(self.shapes) < 2 else set()
        self.empty.update(facts["empty"])
        self.output = self.output or facts.get("output", "")
        for kind, end in OF_SOME.items():
            if f"{kind}_images" not in facts:
                continue
            found = self.samples.setdefault(kind, {"images": [], "calls": 0, "msi": {}})
            found["images"] += facts[f"{kind}_images"]
            found["calls"] += facts[f"{kind}_calls"]
            for name in (one for one in kept.tensors if one.endswith(end)):
                found["msi"].setdefault(name.removesuffix(end), []).append(kept.tensors[name])


def _rank_shares(job: Job, store: Store) -> dict[str, Shares]:
    """The shares of msi_rank, by source, from the sums of all units; no tensor is read."""
    sums: dict[str, Tensor] = {}
    for unit in range(len(job.units)) if job.plan.ranks else ():
        for name, found in store.facts(SCORES, unit).get("rank", {}).items():
            sums[name] = sums.get(name, torch.tensor(0.0)) + torch.tensor(found).double()
    return {name: best_shares(found, job.plan.schedules[0]) for name, found in sums.items()}


def _merged(job: Job, store: Store, alpha_min: float, *, flat: bool) -> Merged:
    """Write the rows and curves of every source, and add up what else the units hold."""
    found = Merged(rankings.Rankings(job), _rank_shares(job, store))
    fixed = replace(job.plan, searching=False)
    first = next(one for one in job.plan.schedules if one.alpha_min == alpha_min)
    shares = {name: found.rank_shares.get(name) for name in job.sources}
    plans = {
        name: replace(fixed, schedules=(replace(first, best_shares=one),))
        for name, one in shares.items()
    }
    with ExitStack() as closing:
        for units in grouped(_units(job, store, found, closing), TOGETHER):
            whole = joined([kept for _, kept in units], without=(*OF_SOME.values(),))
            names, numbers = whole.facts["names"], whole.facts["numbers"]
            scores = {name: _scores(job, whole, name, plan) for name, plan in plans.items()}
            for name, one in scores.items():
                if name not in found.sources:
                    place = store.folder if flat else store.folder / name
                    how: Any = {"seed": job.config.seed, "heatmaps": job.config.save_heatmaps}
                    found.sources[name] = SourceTotals(place, one, closing, **how)
                found.sources[name].add(names, numbers, one)
            found.rankings.add(numbers, scores)
            if "msi" in job.plan.columns:
                ranked = {name: scores[name].columns["msi"].numpy() for name in job.ranked}
                found.choice.add(numbers, ranked)
            for unit, kept in units:
                found.add(kept)
                found.places.append(np.array([(k, unit) for k in kept.facts["numbers"]]))
                if job.config.save_heatmaps:
                    drawn = heatmaps_from_file(store.read(HEATMAPS, unit), job.config.seed)
                    for name, source in found.sources.items():
                        source.add_maps(kept.facts["names"], drawn[name])
            found.n += len(names)
        if not found.n:  # whoever repairs the files starts again: nothing here is worth a resume
            store.clear_units()
        check_any(found.n, found.skipped.n, found.skipped)
    return found


def _units(
    job: Job, store: Store, found: Merged, closing: ExitStack
) -> Iterator[tuple[int, UnitFile]]:
    """Every unit that has scores, leakage included; skipped images are written down."""
    for unit in range(len(job.units)):
        kept = store.read(SCORES, unit)
        if kept.facts["skipped"]:
            if not found.skipped:
                heads = ["image", "reason"]
                skip = closing.enter_context(csv_writer(store.folder / "skipped.csv", heads))
            for one in kept.facts["skipped"].items():
                skip(one)
            found.skipped.add(kept.facts["skipped"])
        if kept.facts["names"]:
            if job.config.leak and job.plan.searching:
                kept.tensors.update(store.read(LEAK, unit).tensors)
            yield unit, kept


def stem_of(name: str, key: str) -> str:
    """Where a unit's file has a source's predictions under a condition."""
    return f"{name}/{key}" if key else name


def _predictions(job: Job, kept: UnitFile, name: str, key: str = "") -> Predictions:
    """A source's predictions of a unit under a condition."""
    plan, stem = job.plans[key], stem_of(name, key)
    return plan.predictions({part: kept.tensors[f"{stem}/{part}"] for part in plan.parts})


def _scores(job: Job, kept: UnitFile, name: str, fixed: Plan) -> Scores:
    """A source's scores at the run's alpha_min."""
    found = {key: _predictions(job, kept, name, key) for key in job.plans}
    scores = read(found, fixed, job.conditions)
    parts = {part: f"{name}/leak/{part}" for part in TENSORS}
    if not all(tensor in kept.tensors for tensor in parts.values()):
        return scores  # not asked for, or donors of one class only: nothing was measured
    leaked = {part: kept.tensors[tensor] for part, tensor in parts.items()}
    return with_leak(scores, Leak(**leaked, alpha_min=scores.alpha_min))


def _record(
    job: Job,
    merged: Merged,
    alpha_min: float,
    order: Sequence[str],
    summaries: Mapping[str, Mapping[str, Estimate]],
    searches: Mapping[str, AlphaSearch],
) -> dict[str, Any]:
    """What run.json holds: config, provenance, counts, and what the tables do not."""
    sources, classifier, folders = merged.sources, job.classifier, job.class_folders
    record = provenance(asdict(job.config), classifier.device, classifier.dtype)
    leaks = {n: leak_warning(s) for n, s in summaries.items() if "leak_ratio" in s}
    record |= {
        "n": merged.n,
        "n_skipped": merged.skipped.n,
        "targets": job.targets,
        "clean_accuracy": float(sources[order[0]].facts.means(["clean_accuracy"])[0]),
        "alpha_min": alpha_min,
        "methods": list(order),
        "sources": {name: source_facts(job.sources[name]) for name in order},
        "controls": job.controls,
        "references": list(job.references),
        "model_calls": int(sum(s.facts.groups(["calls"])[0].sum() for s in sources.values())),
        "empty_heatmaps": merged.empty,
        "n_stretched": merged.stretched.n,
        "stretched_heatmaps": list(merged.stretched),
        "truth": _truth(job, merged, summaries),
        "rank_shares": plain(merged.rank_shares),
        "leak_ratio": {n: s["leak_ratio"].mean for n, s in summaries.items() if "leak_ratio" in s},
        "leak_warnings": {name: words for name, words in leaks.items() if words},
        "skipped": [{"name": name, "reason": why} for name, why in merged.skipped.items()],
        "output": classifier.output,
        "output_remark": merged.output,
        "preprocessing": classifier.view and asdict(classifier.view),
        "class_folders": folders,
        "class_names": _class_names(job, folders),
        "sampled": _sampled(job),
        "few_images": few_images(merged.n),
        "seed": job.config.seed,
        "chance": asdict(job.chance),
        "within": rankings.outcome(job, summaries),
    }
    if searches:
        means = {name: search.means.tolist() for name, search in searches.items()}
        alphas = list(next(iter(searches.values())).alphas)
        record["search"] = {"alphas": alphas, "mean_msi": means}
        record["own_alpha_min"] = {name: search.best for name, search in searches.items()}
    if sample := merged.samples.get("alpha"):
        record["alpha_curve"] = {
            "images": sample["images"],
            "model_calls": sample["calls"],
            "value_step": coarse(job.config.value_step),
            "alphas": list(ALPHA_GRID),
            "mean_msi": {n: torch.cat(p).nanmean(0).tolist() for n, p in sample["msi"].items()},
        }
    if sample := merged.samples.get("ceiling"):
        record["ceiling"] = rankings.ceiling_record(job, sample)
    return record


def _sampled(job: Job) -> str | None:
    """What a reader must know of a run that asks some of the masks."""
    if job.plan.sampling is None:
        return None
    found = (
        f"Each image was asked at most {job.plan.calls} of {len(job.plan.asks)} masks, drawn by"
        " seed: means, intervals and tests account for it, scores of a single image are estimates."
    )
    if job.config.columns and "all" in job.config.columns:
        found += f" Not scored, because it takes all masks of a curve: {', '.join(WHOLE_CURVES)}."
    if job.plan.searching:
        found += (
            " MSI at the alpha_min found is too high, as the highest of several estimates is:"
            " choose alpha_min on other images."
        )
    return found


def _truth(
    job: Job, merged: Merged, summaries: Mapping[str, Mapping[str, Estimate]]
) -> dict[str, Any] | None:
    """Of how many images the truth is known, and what is wrong with that of others."""
    columns = [name for name in job.plan.columns if name in LOCALIZATION]
    if not columns:
        return None
    without = next(iter(summaries.values()))[columns[0]].n_nan
    bad = {"n_bad": merged.bad_truths.n, "bad": merged.bad_truths}
    return {"path": job.config.truth, "n_without": without, **bad}


def _class_names(job: Job, folders: Mapping[str, int]) -> list[str] | None:
    """Names of the classes: the model's own, or those of the class folders."""
    if job.classifier.classes is not None or not folders:
        return None if job.classifier.classes is None else list(job.classifier.classes)
    known = {number: folder for folder, number in folders.items()}
    return [known.get(number, f"class {number}") for number in range(max(known) + 1)]
