"""The end of a run: rows are added up, pooled columns are chosen, tables and record are written.

Two passes over the units: sums choose the pooled columns, then everything is written. Memory grows
by 8 bytes per image.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from sufficit.classifier.classifier import Classifier
from sufficit.classifier.fingerprint import fingerprint
from sufficit.data.loader import check_any
from sufficit.files import writing
from sufficit.metrics.column import CANDIDATE, Heading, candidates_of
from sufficit.metrics.columns import HEADINGS
from sufficit.metrics.leakage import LIFT, leak_warning
from sufficit.metrics.localization import LOCALIZATION
from sufficit.metrics.pooled import RANK_STEM, Halves, RankShares, halves_of
from sufficit.metrics.scores import worst_of
from sufficit.outside import as_csv
from sufficit.probes.probe import CALLS
from sufficit.probes.probe import RIGHT as RIGHT_UNDER
from sufficit.probes.standard import groups_of
from sufficit.provenance import plain, save_json
from sufficit.report.content import Choice
from sufficit.runs.config import write_toml
from sufficit.runs.groups import Group, groups, nothing
from sufficit.runs.job import Job
from sufficit.runs.probes_of import ALPHA_CURVE, coarse_step, models_of
from sufficit.runs.reader import BAD_TRUTH
from sufficit.runs.record import Record, SearchRecord, TruthRecord
from sufficit.runs.results import OWN_BEST, RunResults
from sufficit.runs.rows import SourceWriter, csv_writer
from sufficit.runs.shown import maps_in_full, write_shown
from sufficit.runs.store import Store
from sufficit.runs.unit_rows import EMPTY, RIGHT, SKIPPED, Rows
from sufficit.similarity import RankedCondition, correlations
from sufficit.sources import STRETCHED
from sufficit.statistics import Estimate, estimates_of, ratio_of, standing_of
from sufficit.sums import Floats, Sums, both, few_images, with_pairs

NAMED = 1000  # noted images, at most, that run.json names
FACTS = (RIGHT, "calls")  # columns that are no scores


def half_width(found: Sequence[Estimate]) -> float:
    """Half the width of the widest interval; NaN where one is unknown."""
    return float(np.max([(one.high - one.low) / 2 for one in found]))


# What is added up


# Not a dict of all: a run of a million images may skip a hundred thousand.
class First(dict[str, str]):
    """The first NAMED images of a kind with the reason of each, and the number of all."""

    n = 0

    def add(self, found: Mapping[str, str]) -> None:
        """Count images, and keep some."""
        self.n += len(found)
        self |= dict(islice(found.items(), NAMED - len(self)))


@dataclass
class SourceSums:
    """The sums of one source."""

    columns: Sums
    ratios: dict[tuple[str, str], Sums]  # of two columns
    writer: SourceWriter
    calls: float = 0.0
    empty: int = 0


@dataclass
class Totals:
    """What all units say, added up."""

    sources: dict[str, SourceSums] = field(default_factory=dict)
    conditions: dict[str, Sums] = field(default_factory=dict)  # of each ranked column, with pairs
    condition_calls: dict[str, float] = field(default_factory=dict)
    right: dict[str, tuple[float, int]] = field(default_factory=dict)  # hits on whole images
    candidates: dict[str, Sums] = field(default_factory=dict)  # by source
    notes: dict[str, First] = field(default_factory=dict)
    shapes: set[tuple[int, ...]] = field(default_factory=set)  # no more than two
    remark: str = ""
    choice: Choice = field(default_factory=Choice)
    numbers: list[int] = field(default_factory=list)
    units: list[int] = field(default_factory=list)  # of each row
    skip: Callable[[Sequence[str]], None] | None = None  # writes a skipped image down

    @property
    def n(self) -> int:
        """The number of images that were scored."""
        return len(self.numbers)

    def noted(self, kind: str) -> First:
        """Return the images of a kind of note."""
        return self.notes.setdefault(kind, First())


def write_results(
    job: Job,
    store: Store,
    units: range,
    search: SearchRecord | None,
    own_best: Mapping[str, Estimate],
    *,
    temporary: bool,
) -> RunResults:
    """Add up the units; write rows, curves, summary, record; delete the units at the end.

    `own_best` has the MSI of each source at the alpha_min that is best for it, if one was searched.
    """
    store.clear_earlier()
    out = store.folder
    # First pass: what all images choose together. Second pass: everything else.
    shares = _rank_shares(job, store, units)
    totals = _totals(job, store, units, shares)
    headings = headings_of(job)
    summaries = {
        name: _summary(job, own, headings, totals.numbers) for name, own in totals.sources.items()
    }
    worst = _add_worst(job, summaries, headings)
    if search is not None:
        headings[OWN_BEST] = HEADINGS[OWN_BEST]
        for name, best in own_best.items():
            summaries[name][OWN_BEST] = best
    ranked = _ranked(job, totals)
    standing = ranked[0].standing if ranked else None
    # Best first by MSI, as tables have it; without MSI in the order they were given.
    order = [*(standing.ranking if standing else job.ranked)]
    order += [source.name for source in job.sources if source.name not in order]
    write_toml(out / "RUN.toml", job.config)
    # The report shows the images that MSI chooses, in one size.
    shown: dict[str, str] = {}
    if standing is not None and len(totals.shapes) == 1:
        shown = write_shown(job, store, totals.choice, totals.numbers, totals.units)
    summary: dict[str, Any] = plain({name: summaries[name] for name in order})
    if standing is not None:
        summary["standing"] = asdict(standing)
        _write_pairs(job, store, ranked)
    save_json(out / "summary.json", summary)
    curves = {name: totals.sources[name].writer.mean_curves() for name in order}
    save_json(out / "curves.json", curves)
    record = _record(job, totals, headings, order, summaries)
    record = replace(
        record,
        run=store.run,
        shown=shown,
        worst_fill=worst,
        rank_shares={name: list(own.best) for name, own in shares.items() if own.shares},
        conditions=ranked,
        rank_correlations=correlations(ranked),
        within=None if job.config.within is None else _within_outcome(job, units, summaries),
        search=search,
    )
    # Read before run.json is there: only what can be read counts as finished.
    known = record.as_json(job)
    results = RunResults.read(out, known)
    save_json(out / "run.json", known)
    if temporary:  # the folder is deleted when `run` returns
        return replace(results, rows=results.rows.in_memory())
    store.remove_units()
    return results


def headings_of(job: Job) -> dict[str, Heading]:
    """Return the heading of every column of the table, the paper's columns first."""
    found = {name: one for probe in job.probes for name, one in probe.headings.items()}
    found |= {name: one for source in job.sources for name, one in source.headings.items()}
    found |= {one.name: one.heading for one in job.derived}
    order = dict.fromkeys([*job.scoring.metrics, *found])
    return {name: found[name] for name in order if name in found}


def _rank_shares(job: Job, store: Store, units: range) -> dict[str, RankShares]:
    """Return the share of pixels at which each source is read by rank, chosen by all images."""
    found = {source.name: RankShares() for source in job.sources}
    if RANK_STEM not in job.scoring.metrics:
        return found
    for group in groups(store, units):
        halves = halves_of(group.names, job.config.seed)
        for source, own in found.items():
            own.add(halves, group.table.get(source, {}))
    return found


def _totals(job: Job, store: Store, units: range, shares: Mapping[str, RankShares]) -> Totals:
    """Write the rows of every source, and add up all that the units hold."""
    totals = Totals()
    headings = headings_of(job)
    # Answers are stored only where all masks are asked; without them each read is shorter.
    keeps = job.first_probe is not None and job.first_probe.keeps_answers
    # The passes of probes that look at some of the images are no part of an image's row.
    sampled = {CALLS + probe.key for probe in job.probes if probe.images is not None}
    with ExitStack() as closing:
        for group in groups(store, units, answers=keeps):
            for rows in group.rows:
                _add_notes(totals, rows, store, closing)
            if not group.names:
                continue
            # Halves are needed only where msi_rank chooses a share on one and reads the other.
            split = any(own.shares for own in shares.values())
            halves = halves_of(group.names if split else (), job.config.seed)
            visible = {
                source: _visible(columns, headings, shares[source], halves, sampled)
                for source, columns in group.table.items()
            }
            for source, columns in visible.items():
                if source not in totals.sources:
                    totals.sources[source] = _new_sums(job, store, source, columns, closing)
                _add_source(totals.sources[source], group, source, columns)
                _add_candidates(totals, job, source, group)
            _add_conditions(totals, job, group, visible)
            if "msi" in headings:
                # Controls have no part in the choice: the best images are those of the methods.
                ranked = {name: visible[name]["msi"] for name in job.ranked}
                totals.choice.add(group.numbers, ranked)
            totals.numbers += group.numbers
            totals.units += group.units
        # Inside the block: an error here leaves no half-written files.
        if not totals.n:  # whoever repairs the files starts again: nothing here is worth a resume
            store.clear_units()
        skipped = totals.noted(SKIPPED)
        check_any(totals.n, skipped.n, skipped)
        if job.config.save_heatmaps:
            _save_heatmaps(job, store, units, totals)
    return totals


def _visible(
    columns: Mapping[str, Floats],
    headings: Mapping[str, Heading],
    shares: RankShares,
    halves: Halves,
    sampled: Collection[str],
) -> dict[str, Floats]:
    """Return the columns that tables show: facts, then scores in the order of their headings."""
    own = {name: values for name, values in columns.items() if CANDIDATE not in name}
    if shares.shares:
        own |= shares.settle(halves, columns)
    calls = np.zeros(len(columns[RIGHT]))
    for name, values in columns.items():
        if name.startswith(CALLS) and name not in sampled:
            calls += np.nan_to_num(values)
    found = {RIGHT: own[RIGHT], "calls": calls}
    return found | {name: own[name] for name in headings if name in own}


def _new_sums(
    job: Job, store: Store, source: str, columns: Mapping[str, Floats], closing: ExitStack
) -> SourceSums:
    """Return the empty sums of a source, and open its files."""
    seed = job.config.seed
    writer = SourceWriter(
        store.folder / source,
        closing,
        schedule=job.schedule,
        asked=job.first_probe,
        heatmaps=job.config.save_heatmaps,
    )
    ratios = {
        parts: Sums(["own", "chance"], seed=seed)
        for probe in job.probes
        for parts in probe.ratios.values()
        if {*parts} <= {*columns}
    }
    scored = [name for name in columns if name not in FACTS]
    return SourceSums(Sums([*scored, *FACTS], seed=seed), ratios, writer)


def _add_source(sums: SourceSums, group: Group, source: str, columns: Mapping[str, Floats]) -> None:
    """Add up and write the rows of a source."""
    # The columns are those of the first group: a probe of some images may look at none of these.
    whole = {name: columns.get(name, nothing(len(group.names))) for name in sums.columns.columns}
    sums.columns.add(group.numbers, whole)
    for (over, under), own in sums.ratios.items():
        own.add(group.numbers, both(columns[over], columns[under]))
    ordered = {name: whole[name] for name in [*FACTS, *whole]}
    sums.writer.add(group.names, group.targets, ordered)
    for rows in group.rows:
        sums.writer.add_curves(rows, source)
    for name, values in group.table[source].items():
        if name.startswith(CALLS):
            sums.calls += float(np.nansum(values))
    sums.empty += int(np.nansum(group.table[source][EMPTY]))


def _add_candidates(totals: Totals, job: Job, source: str, group: Group) -> None:
    """Add up the candidates that nothing chooses among, such as those of a curve over alpha_min."""
    found = candidates_of(ALPHA_CURVE, group.table[source])
    if not found:
        return
    own = totals.candidates.setdefault(source, Sums([*found], seed=job.config.seed))
    own.add(group.numbers, {name: group.table[source][name] for name in own.columns})


def _add_conditions(
    totals: Totals, job: Job, group: Group, visible: Mapping[str, Mapping[str, Floats]]
) -> None:
    """Add up what ranks the sources under each condition."""
    tested = (*job.ranked, *job.controls)
    for probe in job.probes:
        for condition in probe.conditions:
            pairs = with_pairs({name: visible[name][condition.column] for name in tested})
            seed = job.config.seed
            sums = totals.conditions.setdefault(condition.key, Sums([*pairs], seed=seed))
            sums.add(group.numbers, pairs)
            calls = totals.condition_calls.get(condition.key, 0.0)
            for own in group.table.values():
                calls += float(np.nansum(own.get(CALLS + condition.key, np.zeros(1))))
            totals.condition_calls[condition.key] = calls
            # Whole images have the same answer for every source: read it from the first.
            first = group.table[job.sources[0].name]
            hits = first.get(RIGHT_UNDER + condition.key, nothing(1))
            total, count = totals.right.get(condition.key, (0.0, 0))
            known = total + float(np.nansum(hits)), count + int((~np.isnan(hits)).sum())
            totals.right[condition.key] = known


def _add_notes(totals: Totals, rows: Rows, store: Store, closing: ExitStack) -> None:
    """Add what a unit says besides its rows; skipped images are written down."""
    for kind, found in rows.notes.items():
        if kind == SKIPPED and found:
            if totals.skip is None:
                path = store.folder / "skipped.csv"
                totals.skip = closing.enter_context(csv_writer(path, ["image", "reason"]))
            for one in found.items():
                totals.skip(one)
        totals.noted(kind).add(found)
    if rows.shape and len(totals.shapes) < 2:
        totals.shapes |= {rows.shape}
    totals.remark = totals.remark or rows.remark


def _save_heatmaps(job: Job, store: Store, units: range, totals: Totals) -> None:
    """Write the heatmaps of every source at the images' size."""
    for unit in units:
        if len(store.read(unit)):
            kept = store.read_maps(unit)
            for name, maps in maps_in_full(kept, job.config.seed).items():
                if name in totals.sources:
                    totals.sources[name].writer.add_maps(kept.names, maps)


# Means, ranks, record


def _summary(
    job: Job, own: SourceSums, headings: Mapping[str, Heading], numbers: Sequence[int]
) -> dict[str, Estimate]:
    """Return the mean and interval of every column of a source, and its ratios."""
    names = [name for name in own.columns.columns if name not in FACTS]
    directions = {name: headings[name].higher_is_better for name in names}
    limits = {name: headings[name].limits for name in names}
    found = estimates_of(own.columns, directions, job.chance, limits.__getitem__)
    for probe in job.probes:
        if probe.images is not None:  # others were not to have a value
            outside = own.columns.n - len(probe.images & {*numbers})
            for name in {*probe.headings} & {*found}:
                lacking = max(0, found[name].n_nan - outside)
                found[name] = replace(found[name], n_nan=lacking)
    ratios = {parts: n for probe in job.probes for n, parts in probe.ratios.items()}
    return found | {ratios[parts]: ratio_of(sums, job.chance) for parts, sums in own.ratios.items()}


def _add_worst(
    job: Job, summaries: Mapping[str, dict[str, Estimate]], headings: dict[str, Heading]
) -> dict[str, dict[str, str]]:
    """Add MSI with the worst fill to every source's summary; return the columns it is from."""
    found: dict[str, dict[str, str]] = {}
    for end, columns in groups_of(models_of(job)).items() if "msi" in headings else ():
        headings[f"msi_worst{end}"] = HEADINGS[f"msi_worst{end}"]
        for name, own in summaries.items():
            # The worst on average, not per image: the minimum of noisy values would be too low.
            lowest = worst_of(columns, {column: own[column].mean for column in columns})
            own[f"msi_worst{end}"] = own[lowest]
            found.setdefault(f"msi_worst{end}", {})[name] = lowest
    return found


def _ranked(job: Job, totals: Totals) -> list[RankedCondition]:
    """Return how the sources rank under every condition, the first one first."""
    found = []
    for probe in job.probes:
        for condition in probe.conditions:
            hits, images = totals.right[condition.key]
            sums = totals.conditions[condition.key]
            standing = standing_of(sums, job.ranked, condition.column, job.chance, job.controls)
            one = RankedCondition(
                key=condition.key,
                fill=condition.fill,
                twin=condition.twin,
                masks=condition.masks,
                model_calls=int(totals.condition_calls[condition.key]),
                clean_accuracy=hits / images if images else float("nan"),
                standing=standing,
            )
            found.append(one)
    return found


def _write_pairs(job: Job, store: Store, ranked: Sequence[RankedCondition]) -> None:
    """Write one row per condition and pair, with how its interval and p-value were made."""
    import pandas

    frames = [one.standing.frame().assign(**asdict(one.standing.chance)) for one in ranked]
    for frame, one in zip(frames, ranked, strict=True):
        # `frame` does not say of which condition it is: the column does, msi_blur for blur.
        frame.insert(0, "column", one.standing.column)
    with writing(store.folder / "pairs.csv") as part:
        part.write_text(as_csv(pandas.concat(frames)), encoding="utf-8")


def _record(
    job: Job,
    totals: Totals,
    headings: Mapping[str, Heading],
    order: Sequence[str],
    summaries: Mapping[str, Mapping[str, Estimate]],
) -> Record:
    """Return what run.json holds besides config and provenance."""
    classifier = job.classifier
    skipped = totals.noted(SKIPPED)
    stretched = totals.noted(STRETCHED)
    leaks = {n: leak_warning(s) for n, s in summaries.items() if {"leak_ratio", LIFT} & {*s}}
    clean = totals.sources[order[0]].columns.means([RIGHT])[0]
    ratios = {
        name: HEADINGS.get(name, Heading(name, name)) for one in job.probes for name in one.ratios
    }
    return Record(
        n=totals.n,
        n_skipped=skipped.n,
        targets=job.targets,
        clean_accuracy=float(clean),
        alpha_min=job.schedule.alpha_min,
        methods=list(order),
        columns={**headings, **ratios},
        sources={source.name: source.facts() for source in job.sources},
        controls=job.controls,
        references=[s.name for s in job.sources if s.name not in (*job.ranked, *job.controls)],
        model_calls=int(sum(own.calls for own in totals.sources.values())),
        empty_heatmaps={name: own.empty for name, own in totals.sources.items()},
        n_stretched=stretched.n,
        stretched_heatmaps=list(stretched),
        truth=_truth(job, totals, summaries),
        leak_ratio={n: s["leak_ratio"].mean for n, s in summaries.items() if "leak_ratio" in s},
        leak_warnings={name: words for name, words in leaks.items() if words},
        skipped=[{"name": name, "reason": why} for name, why in skipped.items()],
        output=classifier.output,
        output_remark=totals.remark,
        preprocessing=None if classifier.view is None else asdict(classifier.view),
        class_folders=dict(job.class_folders),
        class_names=_class_names(job),
        sampled=_sampled(job),
        few_images=few_images(totals.n),
        seed=job.config.seed,
        chance=job.chance,
        alpha_curve=_alpha_curve(job, totals) if totals.candidates else None,
        twin=None if job.twin is None else _twin(job, job.twin, totals),
    )


def _alpha_curve(job: Job, totals: Totals) -> dict[str, Any]:
    """Return mean MSI over alpha_min on the sample that the probe looked at."""
    first = next(iter(totals.candidates.values()))
    alphas = [*candidates_of(ALPHA_CURVE, [*first.columns]).values()]
    probe = next(one for one in job.probes if one.key == "alpha-curve")
    images = probe.images or frozenset()
    return {
        "images": sum(number in images for number in totals.numbers),
        "alphas": alphas,
        "value_step": coarse_step(job.config.value_step),
        "mean_msi": {name: own.means().tolist() for name, own in totals.candidates.items()},
    }


def _twin(job: Job, twin: Classifier, totals: Totals) -> dict[str, Any]:
    """Return what run.json says of a twin."""
    hits, images = totals.right.get("twin", (0.0, 0))
    return {
        "model": job.config.twin,
        "fingerprint": asdict(fingerprint(twin)),
        "clean_accuracy": hits / images if images else None,
    }


def _sampled(job: Job) -> str | None:
    """Return what a reader must know of a run that asks some of the masks; None if it asks all."""
    probe = job.first_probe
    if probe is None or probe.drawing is None:
        return None
    masks = len(probe.bands) + 1
    return (
        f"Each image was scored with at most {job.scoring.calls} of {masks} masks per method, drawn"
        " by seed: the scores of a single image are estimates. --calls exact uses all masks."
    )


def _truth(
    job: Job, totals: Totals, summaries: Mapping[str, Mapping[str, Estimate]]
) -> TruthRecord | None:
    """Count the images without a truth, or with an unusable one; None if no column needs it."""
    columns = [name for name in job.scoring.metrics if name in LOCALIZATION]
    if not columns:
        return None
    bad = totals.noted(BAD_TRUTH)
    without = next(iter(summaries.values()))[columns[0]].n_nan
    return TruthRecord(job.config.truth, without, bad.n, dict(bad))


def _class_names(job: Job) -> list[str] | None:
    """Return names of the classes: the model's own, or those of the class folders."""
    folders = job.class_folders
    if job.classifier.classes is not None or not folders:
        return None if job.classifier.classes is None else list(job.classifier.classes)
    known = {number: folder for folder, number in folders.items()}
    return [known.get(number, f"class {number}") for number in range(max(known) + 1)]


def _within_outcome(
    job: Job, seen: range, summaries: Mapping[str, Mapping[str, Estimate]]
) -> dict[str, Any]:
    """Return what run.json says of a run with `within`."""
    within = job.config.within
    assert within is not None  # the caller asked
    n = job.units.images_in(seen)  # those that were skipped count: the order is by image
    total = len(job.entries)
    half = half_width([summaries[name]["msi"] for name in job.ranked])
    reached = half <= within
    if reached:
        words = (
            f"MSI of every method is known to ± {half:.2g} (--within {within:g}) from {n:,} of"
            f" {total:,} images, in random order."
        )
    else:
        # The width of an interval falls with the root of the number of images.
        needed = n * (half / within) ** 2
        words = (
            f"All {total:,} images are scored, and MSI is known to ± {half:.2g} only, not to ±"
            f" {within:g} (--within): that takes about {needed:,.0f} images."
        )
    return {
        "target": within,
        "half_width": half,
        "reached": reached,
        "images": n,
        "of": total,
        "words": words,
    }
