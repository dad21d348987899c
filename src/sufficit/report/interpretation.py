"""What a reader should know of a run besides the verdict: cautions, and how it was measured."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from sufficit.metrics.columns import COLUMNS, ZERO_LINE
from sufficit.metrics.leakage import LIFT, OVER_GRADCAM, leak_warning, leaks
from sufficit.report.content import Content
from sufficit.similarity import RankedCondition, best_changes, correlations, lost_leads
from sufficit.statistics import Estimate, Standing
from sufficit.sums import FEW, few_images

LOW_ACCURACY = 0.7
MANY_NAN = 0.05
MOST_EMPTY = 0.1  # share of images in which a map may mark nothing
HEAD = "random_head"
UNMOVED = 0.9  # rank correlation with the maps of a random output layer
OF_NOTHING = (
    "MSI there is that of an empty mask, between -0.5 and 0 as a rule, and not of an explanation:"
    " compare at a lower alpha_min too."
)
RANDOM_WEIGHTS = "The model has random weights: its scores mean nothing."


@dataclass(frozen=True)
class Caution:
    """What a reader should know before trusting the numbers: a short line, and details."""

    text: str
    details: tuple[str, ...] = ()


def joined(names: Sequence[str]) -> str:
    """Return names in a sentence.

    >>> joined(["a", "b", "c"])
    'a, b and c'
    """
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


# Cautions


def cautions(content: Content) -> list[Caution]:
    """Return all that a reader should know before trusting the numbers, what matters most first."""
    return [
        *_unreadable(content),
        *_leaks(content),
        *_other_rankings(content),
        *_unmoved_maps(content),  # who has this checked wants to hear of it
        *_few(content),
        *_unmarked(content),
        *_same_for_every_class(content),
        *_without_value(content),
        *(Caution(remark) for remark in content.remarks if remark != RANDOM_WEIGHTS),
        *_unsure_leaks(content),
    ]


def _unreadable(content: Content) -> Iterator[Caution]:
    """Yield why the scores say more about the model than about its explanations."""
    right = content.first.clean
    if RANDOM_WEIGHTS in content.remarks:
        yield Caution(RANDOM_WEIGHTS)
    if right < LOW_ACCURACY:
        words = "gets their target class" if content.facts.targets != "label" else "is right"
        yield Caution(
            f"The model {words} on only {right:.0%} of the whole images.",
            (
                "Where it is wrong on the whole image, no mask can do well. Check that these are"
                " images and classes of its own task.",
            ),
        )


def leak_words(summary: Mapping[str, Estimate]) -> str:
    """Return how often, or by how much, masks reveal their class on images of other classes.

    >>> leak_words({"leak_ratio": Estimate(2.4, 1.9, 3.1, 200, 0, False)})
    '2.4 times as often as chance (1.9 to 3.1)'
    """
    if LIFT in summary:
        over = summary.get(OVER_GRADCAM)
        lift = over or summary[LIFT]
        above = "" if over is None else " more than Grad-CAM's"
        return f"by {lift.mean:.1f} in log probability{above} ({lift.low:.1f} to {lift.high:.1f})"
    ratio = summary["leak_ratio"]
    if not math.isfinite(ratio.mean):
        return "where masks of other classes never do"
    ends = f" ({ratio.low:.1f} to {ratio.high:.1f})" if math.isfinite(ratio.high) else ""
    return f"{ratio.mean:.1f} times as often as chance{ends}"


def _leak_details(content: Content, methods: Sequence[str]) -> tuple[str, ...]:
    """Return what was measured of the leakage of some methods."""
    found = {method: leak_warning(content.summaries[method]) for method in methods}
    return tuple(f"{method}: {sentence}." for method, sentence in found.items() if sentence)


def _leaks(content: Content) -> Iterator[Caution]:
    """Yield methods whose masks reveal the class by their shape."""
    leaking = [m for m in content.standing.ranking if leaks(content.summaries[m])]
    if leaking:
        yield Caution(leak_line(leaking), _leak_details(content, leaking))


def leak_line(methods: Sequence[str]) -> str:
    """Return the warning of methods that leak."""
    return f"Leakage: the masks of {joined(methods)} reveal the class by their shape."


def _unsure_leaks(content: Content) -> Iterator[Caution]:
    """Yield methods of which too few images cannot tell whether they leak."""
    unsure = [
        method
        for method in content.standing.ranking
        if "leak_ratio" in content.summaries[method]
        and not leaks(content.summaries[method])
        and leak_warning(content.summaries[method])
    ]
    if unsure:
        yield Caution(
            f"Too few images to tell whether the masks of {joined(unsure)} leak.",
            _leak_details(content, unsure),
        )


def _other_rankings(content: Content) -> Iterator[Caution]:
    """Yield what the paired tests say against the ranking under other conditions."""
    for other in content.conditions[1:]:
        pairs = zip(content.groups, content.groups_of(other.standing), strict=True)
        for first, here in pairs:
            if best_changes(first, here):
                means = f"MSI {here.means[here.best]:.3f} and {here.means[first.best]:.3f}"
                yield Caution(
                    f"{_start(other)} {here.best} is significantly better than {first.best}.",
                    (f"{means}, paired tests, n = {here.n}.",),
                )
            lost = lost_leads(first, here)
            if best_changes(first, here):
                lost.pop(first.best, None)
            if lost:
                words = [f"{method} over {joined(others)}" for method, others in lost.items()]
                yield Caution(
                    f"{_start(other)} the lead of {joined([*lost])} is not significant.",
                    (f"Leads that are lost (paired tests, n = {here.n}): {'; '.join(words)}.",),
                )


def _start(condition: RankedCondition) -> str:
    """Return the words of a condition as the start of a sentence."""
    return f"{condition.words[0].upper()}{condition.words[1:]}"


def _few(content: Content) -> Iterator[Caution]:
    """Yield how little few images show."""
    n = content.n
    details = few_images(n)
    if details is not None:
        images = f"{n} image{'s' if n > 1 else ''}"
        text = f"Only {images}: small differences do not show. Score {FEW} or more."
        yield Caution(text, (details,))


def _unmarked(content: Content) -> Iterator[Caution]:
    """Yield methods that mark nothing in many images."""
    alpha = content.first.alpha_min
    for method, count in content.unmarked.items():
        yield Caution(
            f"{method} marks nothing at alpha_min {alpha:g} in {count} of {content.n} images.",
            (OF_NOTHING,),
        )


def _same_for_every_class(content: Content) -> Iterator[Caution]:
    """Yield the best methods that cannot explain one class against another."""
    for standing in content.groups:
        if standing.best in content.class_agnostic:
            yield Caution(f"{standing.best} draws the same map for every class.")


def _unmoved_maps(content: Content) -> Iterator[Caution]:
    """Yield methods whose maps do not change when the output layer is made random."""
    same = _unmoved(content)
    if same:
        yield Caution(
            f"The maps of {joined([*same])} stay when the output layer is made random.",
            tuple(
                f"{method}: rank correlation {mean:.2f}. Such maps do not show what this output"
                " rests on."
                for method, mean in same.items()
            ),
        )


def _unmoved(content: Content) -> dict[str, float]:
    """Return the rank correlation of methods whose maps stay."""
    means = {m: found[HEAD].mean for m, found in content.summaries.items() if HEAD in found}
    # A map without order has no correlation, NaN.
    return {m: means[m] for m in content.standing.ranking if means.get(m, 0) >= UNMOVED}


def _without_value(content: Content) -> Iterator[Caution]:
    """Yield methods that lack many values, because the model answered NaN."""
    for method in content.methods:
        if method == ZERO_LINE:  # which has no order, and so no value by rank
            continue
        summary = content.summaries[method]
        # Others lack a value for reasons of their own, such as an empty heatmap or no truth.
        counts = {c: one.n_nan for c, one in summary.items() if c in COLUMNS} or {"msi": 0}
        worst = max(counts, key=lambda column: counts[column])
        if counts[worst] > MANY_NAN * content.n:
            column = content.heading(worst).long
            yield Caution(
                f"{method} has no {column} in {counts[worst]} of {content.n} images.",
                ("The model answered NaN. Means leave these images out.",),
            )


# How it was measured


def notes(content: Content) -> list[str]:
    """Return what else there is to know, in sentences."""
    return [*sentences(content), *orders(content), *content.made]


def sentences(content: Content) -> Iterator[str]:
    """Yield how the scores are read, and what was compared with what."""
    if content.facts.targets == "label":
        right = f"{content.first.clean:.1%} of whole images correctly."
        yield f"Targets: the labels. The model classifies {right}"
    elif content.facts.targets:
        yield "Targets: the model's own predictions."
    yield "MSI is near +1 when a small region suffices and nothing else does."
    if not math.isnan(content.zero_line):
        yield zero_line_words(content)
    yield from control_sentences(content)
    if _has_head(content) and not _unmoved(content):
        yield f"{_random_head(content)} the maps of all methods change."
    yield from _by_rank(content)
    yield from alpha_sentences(content)


def zero_line_words(content: Content) -> str:
    """Return what the zero line is, and where it was measured."""
    return (
        f"The zero line is the MSI of marking the whole image: {content.zero_line:.3f}"
        f" ({ZERO_LINE}). Below it a map is worse than marking the whole image."
    )


def control_words(content: Content) -> str:
    """Return what the tests say of methods and controls; empty without controls."""
    return " ".join(control_sentences(content))


def control_sentences(content: Content) -> Iterator[str]:
    """Yield what the tests say of each group of methods and its controls."""
    for standing in content.groups:
        if not standing.controls:
            continue
        who = _group_name(content, standing)
        if all(standing.beats(m, c) for m in standing.ranking for c in standing.controls):
            yield f"{who} are significantly better than {_listed(standing)}."
            continue
        for control in standing.controls:
            name = f"{control} ({standing.means[control]:.3f}, n = {standing.n})"
            worse = [m for m in standing.ranking if standing.beats(control, m)]
            behind = [m for m in standing.ranking if standing.beats(m, control)]
            unsure = [m for m in standing.ranking if m not in (*worse, *behind)]
            if unsure:
                yield f"Not significantly different from {name}: {joined(unsure)}."
            if worse:
                yield f"Significantly worse than {name}: {joined(worse)}."


def _group_name(content: Content, standing: Standing) -> str:
    """Return what the methods of a group are called in a sentence."""
    if len(content.groups) == 1:
        return "All methods"
    return "All fitted methods" if standing.best in content.fit_fills else "All methods as drawn"


def _listed(standing: Standing) -> str:
    """Return the controls of a standing with their means."""
    means = [f"{one} ({standing.means[one]:.3f})" for one in standing.controls]
    return f"the controls {joined(means)}"


def own_alphas(content: Content) -> dict[str, float]:
    """Return the alpha_min that is best for each method alone, where it was searched for."""
    found = {}
    for method, scores in content.scores.items():
        known = {a: msi for a, msi in (scores.alphas or {}).items() if not math.isnan(msi)}
        if known:
            found[method] = max(known, key=known.__getitem__)
    return found


@dataclass(frozen=True)
class AlphaOrder:
    """How methods rank where each is read at the alpha_min that is best for it, on a sample."""

    at: Mapping[str, float]  # that alpha_min, by method
    order: tuple[str, ...]  # of the methods there, best first
    now: tuple[str, ...]  # of the methods on the same sample, at the run's alpha_min
    images: int


def alpha_order(content: Content) -> AlphaOrder | None:
    """Return what the sampled curve says of the methods as they are drawn; None without a curve.

    A fitted map is cut at the same place at every alpha_min.
    """
    curve = content.alpha_curve
    drawn = [m for m in content.standing.ranking if m not in content.fit_fills]
    if curve is None or own_alphas(content) or not drawn:
        return None
    alphas = curve["alphas"]
    best: dict[str, tuple[float, float]] = {}
    here: dict[str, float] = {}
    # The grid of the curve may not have the alpha_min of the run.
    nearest = min(range(len(alphas)), key=lambda i: abs(alphas[i] - content.first.alpha_min))
    for method in drawn:
        values = curve["mean_msi"].get(method, [])
        means = [-math.inf if one is None or math.isnan(one) else one for one in values]
        if not means or max(means) == -math.inf:
            return None
        # The smaller alpha_min of two that are equally good, as a search chooses it.
        best[method] = max(zip(means, alphas, strict=True), key=lambda pair: (pair[0], -pair[1]))
        here[method] = means[nearest]
    return AlphaOrder(
        at={method: alpha for method, (_, alpha) in best.items()},
        order=tuple(sorted(drawn, key=lambda m: -best[m][0])),
        now=tuple(sorted(drawn, key=lambda m: -here[m])),
        images=curve["images"],
    )


def alpha_sentences(content: Content) -> Iterator[str]:
    """Yield at which alpha_min each method is best, and whether that changes the order."""
    own = own_alphas(content)
    if own:
        listed = ", ".join(f"{m} {own[m]:g}" for m in content.methods if m in own)
        yield (
            "All methods are compared at one alpha_min. Column own has the MSI of each method at"
            f" the alpha_min that is best for it alone ({listed}). It is chosen on the same images,"
            " so this MSI is slightly too high."
        )
    found = alpha_order(content)
    if found is None:
        return
    listed = ", ".join(f"{method} {alpha:g}" for method, alpha in found.at.items())
    images = f"{found.images} image{'s' if found.images > 1 else ''}"
    yield f"alpha_min that is best for each method, on a sample of {images}: {listed}."
    if len(found.order) < 2:
        return
    if found.order == found.now:
        yield "There the order of the methods stays."
    else:
        yield (
            f"There the order is {', '.join(found.order)}, at one alpha_min for all it is"
            f" {', '.join(found.now)}. --alpha-min search finds the best one for all, NAME+fit cuts"
            " each map where the model agrees."
        )


def alpha_note(content: Content) -> str:
    """Return on which images and curves MSI over alpha_min was measured."""
    curve = content.alpha_curve
    n = content.n
    if curve is None or content.first.alphas is not None:
        return "Mean MSI at every alpha_min tried; the dotted line is the one chosen."
    count = curve["images"]
    whole = "the one image" if n == 1 else f"all {n} images"
    which = f"{count} of the {n:,} images, chosen before scoring" if count < n else whole
    finer = content.first.schedule.value_step < curve["value_step"]
    why = " and ".join(["fewer images"] * (count < n) + ["coarser steps"] * finer)
    differs = f"; with {why}, MSI may differ slightly from the table" if why else ""
    found = f"Mean MSI on {which}, from curves in steps of {curve['value_step']:g}"
    return f"{found}. The dotted line is the alpha_min of the table{differs}."


def orders(content: Content) -> Iterator[str]:
    """Yield how far the methods' order agrees between the first condition and each other."""
    conditions = content.conditions
    # All conditions together: a share of what the run asked.
    whole = sum(one.model_calls for one in conditions)
    for other in conditions[1:]:
        pairs = zip(content.groups, content.groups_of(other.standing), strict=True)
        for first, here in pairs:
            (one,) = correlations(
                [replace(conditions[0], standing=first), replace(other, standing=here)]
            )
            if not math.isnan(one["kendall"]):
                yield (
                    f"Order of the methods {other.words}: {', '.join(here.ranking)}. Rank"
                    f" correlation with the order above: Spearman {one['spearman']:.2f}, Kendall"
                    f" {one['kendall']:.2f}."
                )
    for held_out in (one for one in conditions if one.key == "held_out" and whole):
        yield (
            f"The held-out fill is {held_out.fill}: {_why_held_out(content)}. It was scored with at"
            f" most {held_out.masks} masks per image, {held_out.model_calls / whole:.0%} of the"
            " forward passes for scores."
        )


def _why_held_out(content: Content) -> str:
    """Return which fills are not held out, and why."""
    scored = [one.fill for one in content.conditions if one.key != "held_out" and not one.twin]
    found = f"the scores use {joined(scored)}"
    asked = dict.fromkeys(fill for fills in content.fit_fills.values() for fill in fills)
    if asked:
        found += f", and the fit has asked the model with {joined([*asked])}"
    return found


def _by_rank(content: Content) -> Iterator[str]:
    """Yield where MSI by rank orders the methods otherwise than MSI does."""
    for standing in content.groups:
        means = {
            method: content.summaries[method]["msi_rank"].mean
            for method in standing.ranking
            if "msi_rank" in content.summaries[method]
        }
        if standing.column != "msi" or any(map(math.isnan, means.values())):
            continue
        if len({*means.values()}) < 2:  # one method, or no order
            continue
        # Pairs whose order by MSI is the other way by rank.
        turned = [(a, b) for a, b in combinations(means, 2) if means[b] > means[a]]
        if not turned:
            yield (
                "MSI by rank, which ignores how values are scaled, orders"
                f" {joined([*means])} the same way."
            )
            continue
        first, second = turned[0]
        pairs = len(means) * (len(means) - 1) // 2
        more = f" {len(turned)} of {pairs} pairs are turned." if turned[1:] else ""
        yield (
            "MSI by rank, which ignores how values are scaled, orders some methods the other way:"
            f" {second} ({means[second]:.3f}) before {first} ({means[first]:.3f}).{more}"
        )


def _has_head(content: Content) -> bool:
    """Return whether maps were drawn for a random output layer too."""
    return any(HEAD in found for found in content.summaries.values())


def _random_head(content: Content) -> str:
    """Return on how many images maps were drawn for a random output layer."""
    counts = [found[HEAD].n for found in content.summaries.values() if HEAD in found]
    return f"With random weights in the output layer ({max(counts)} images)"


# What only the run itself can say


def run_remarks(n: int, empty: Mapping[str, int], *, random_weights: bool = False) -> list[str]:
    """Return what only the run itself knows: random weights, and all-zero heatmaps."""
    found = [RANDOM_WEIGHTS] if random_weights else []
    zeros = [f"{method} {count}" for method, count in empty.items() if count]
    if zeros:
        found.append(f"All-zero heatmaps, which mark nothing, of {n} images: {', '.join(zeros)}.")
    return found


def unmarked_remark(n: int, unmarked: Mapping[str, int], alpha_min: float) -> str:
    """Return what MSI is worth where maps mark nothing; `unmarked` counts such images."""
    listed = ", ".join(f"{method} {count}" for method, count in unmarked.items())
    return (
        f"Maps that mark nothing at alpha_min {alpha_min:g}, of {n} images: {listed}. {OF_NOTHING}"
    )
