"""What the scores mean in words, for the terminal and the report.

How MSI is read follows the supplement of MSI's paper.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from sufficit.metrics.columns import COLUMNS
from sufficit.metrics.leakage import LIMIT, leak_warning
from sufficit.report.content import Content
from sufficit.similarity import best_changes, correlations, lost_leads
from sufficit.statistics import Estimate, Standing
from sufficit.sums import few_images

NEAR = 0.25  # how far from +1, 0 or -1 is still close to it
LOW_ACCURACY = 0.7
MANY_NAN = 0.05
MOST_EMPTY = 0.1  # share of images in which a map may mark nothing
HEAD = "random_head"
UNMOVED = 0.9  # rank correlation with the maps of a random output layer


@dataclass(frozen=True)
class Reading:
    """One method's scores in words.

    `losses` keep the mean MSI from +1 and add up to 1 - MSI: size, the share of the image that is
    marked; short, what is marked does not suffice; outside, what is not marked suffices too;
    weaker, what is marked suffices without its peak.
    """

    method: str
    msi: float
    place: str  # which of the paper's three marks MSI is close to
    why: str
    losses: Mapping[str, float]


def readings(content: Content) -> list[Reading]:
    """What the mean MSI of each method means, and which of its parts decides that, best first.

    Every method that has all columns of MSI. The score of what is not marked follows from the mean
    base score, which is 1/2 [kept - outside + mean of Show - mean of Hide].
    """
    found, needed = [], ("msi", "base_score", "mask_penalty")
    for method in content.methods:
        scores, summary = content.scores[method], content.summaries[method]
        if not {*needed} <= {*scores.columns}:
            continue
        show = scores.curves["show"]
        kept, inner, weak = show.values[0].item(), show.height, scores.curves["hide"].height
        msi, base, size = (summary[name].mean for name in needed)
        outside = kept + inner - weak - 2 * base
        losses = {"size": size, "short": 1 - (kept + inner) / 2}
        losses |= {"outside": outside / 2, "weaker": weak / 2}
        words = why(msi, losses, kept, inner, accuracy=scores.schedule.score == "accuracy")
        words += unmarked_words(content, method)
        found.append(Reading(method, msi, place_of(msi), words, losses))
    return found


def place_of(msi: float) -> str:
    """Which of the marks +1, 0 and -1 an MSI is close to.

    >>> [place_of(msi) for msi in (0.8, 0.5, 0.1, -0.5, -1.2)]
    ['close to +1', 'between 0 and +1', 'near 0', 'between 0 and -1', 'close to -1']
    """
    if math.isnan(msi):
        return "unknown"
    if abs(msi) <= NEAR:
        return "near 0"
    mark = "+1" if msi > 0 else "-1"
    return f"close to {mark}" if abs(msi) >= 1 - NEAR else f"between 0 and {mark}"


def why(
    msi: float, losses: Mapping[str, float], kept: float, inner: float, *, accuracy: bool
) -> str:
    """Why a mean MSI is what it is; `kept` is the mean score of what is marked, `inner` the mean as
    the threshold rises from alpha_min to 1. Scores are accuracies or else confidences.
    """
    right, given = "is right on {:.0%} of the images", "gives the class {:.0%} on average"
    says = f"the model {right if accuracy else given}".format
    outside, weak = says(2 * losses["outside"]), says(2 * losses["weaker"])
    if math.isnan(msi):
        return "The model answered with NaN for every image."
    if msi >= 1 - NEAR:
        return (
            f"A small region suffices: {losses['size']:.0%} of the image is marked, and with that"
            f" alone {says(kept)}. It likely holds all the evidence there is."
        )
    other = {
        "size": (
            f"The mask is too large: it marks {losses['size']:.0%} of the image. Check whether the"
            " object is as large, or whether the explanation lacks focus."
        ),
        "outside": (
            f"Other regions suffice too: with all that it marks removed, {outside}, so there is"
            " evidence that it does not capture."
        ),
        "weaker": f"Its peak is not needed: with the peak removed from the marked region, {weak}.",
    }
    if (largest := max(losses, key=lambda name: losses[name])) in other:
        return other[largest]
    found = f"with that alone {says(kept)}"
    if kept > inner + NEAR:
        found = (
            f"with all that is marked {says(kept)}, and as the threshold rises from there,"
            f" {says(inner)} on average"
        )
    if msi > NEAR:
        return f"It stays below +1 mostly because what it marks does not always suffice: {found}."
    if msi >= -NEAR:
        return (
            f"It is near 0 because what it marks does not suffice: {found}. The size of the mask"
            f" ({losses['size']:.0%} of the image) and evidence elsewhere (without what it marks"
            f" {outside}) matter less."
        )
    poor = "A poor mask: what" if msi <= NEAR - 1 else "What"
    return f"{poor} it marks does not suffice: {found}."


def notes(content: Content) -> list[str]:
    """What to know besides the answer and the cautions."""
    return [*sentences(content), *orders(content)]


def sentences(content: Content) -> Iterator[str]:
    """What to know of the scores besides the answer."""
    standing, own = content.standing, own_alphas(content)
    if content.facts.targets == "label":
        right = f"{content.first.clean:.1%} of whole images correctly."
        yield f"Targets: the labels. The model classifies {right}"
    elif content.facts.targets:
        yield "Targets: the model's own predictions."
    if standing.controls and not _unbeaten(standing):
        yield control_words(content)
    if _has_head(content) and not _unmoved(content):
        yield f"{_random_head(content)} the maps of all methods change."
    yield "MSI is near +1 when a small region suffices and nothing else does."
    yield from _by_rank(content)
    if own:
        listed = ", ".join(f"{m} {own[m]:g}" for m in content.methods if m in own)
        yield (
            "All methods are compared at one alpha_min. Column own has the MSI of each method at"
            f" the alpha_min that is best for it alone ({listed}). It is chosen on the same images,"
            " so this MSI is slightly too high."
        )


def orders(content: Content) -> Iterator[str]:
    """How far the methods' order agrees between the first condition and each other, and the share
    of the model calls that a held-out fill took.
    """
    conditions = content.conditions
    whole = sum(one.model_calls for one in conditions)
    for other in conditions[1:]:
        (one,) = correlations([conditions[0], other])
        if not math.isnan(one["kendall"]):
            order = ", ".join(other.standing.ranking)
            yield (
                f"Order of the methods {other.words}: {order}. Rank correlation with the order"
                f" above: Spearman {one['spearman']:.2f}, Kendall {one['kendall']:.2f}."
            )
    for held_out in (one for one in conditions if one.key == "held_out" and whole):
        yield (
            f"The held-out fill {held_out.fill} was asked {held_out.masks} masks per image at most,"
            f" {held_out.model_calls / whole:.0%} of the calls for scores."
        )


def _by_rank(content: Content) -> Iterator[str]:
    """Where MSI by rank orders the methods otherwise than MSI does."""
    order = content.standing.ranking
    means = {
        m: found.mean for m in order if (found := content.summaries[m].get("msi_rank")) is not None
    }
    if content.standing.column != "msi" or any(map(math.isnan, means.values())):
        return
    if len({*means.values()}) < 2:  # one method, or no order
        return
    turned = [(a, b) for a, b in combinations(order, 2) if means[b] > means[a]]
    if not turned:
        yield "MSI by rank, which ignores how values are scaled, orders the methods the same way."
        return
    first, second = turned[0]
    pairs = len(order) * (len(order) - 1) // 2
    more = f" {len(turned)} of {pairs} pairs are turned." if turned[1:] else ""
    yield (
        "MSI by rank, which ignores how values are scaled, orders some methods the other way:"
        f" {second} ({means[second]:.3f}) before {first} ({means[first]:.3f}).{more}"
    )


def _has_head(content: Content) -> bool:
    return any(HEAD in found for found in content.summaries.values())


def _random_head(content: Content) -> str:
    counts = [found[HEAD].n for found in content.summaries.values() if HEAD in found]
    return f"With random weights in the output layer ({max(counts)} images)"


def _unmoved(content: Content) -> list[str]:
    """Whose maps do not change when the output layer is made random, in words."""
    means = {m: found[HEAD].mean for m, found in content.summaries.items() if HEAD in found}
    # A map without order has no correlation, NaN.
    same = [m for m in content.standing.ranking if means.get(m, 0) >= UNMOVED]
    return [f"{method} (rank correlation {means[method]:.2f})" for method in same]


def control_words(content: Content) -> str:
    """What the tests say of methods and controls; empty without controls."""
    standing, n, found = content.standing, content.standing.n, []
    for control in standing.controls:
        name = f"the control {control} ({content.mean(control):.3f}, n = {n})"
        worse = [m for m in standing.ranking if standing.beats(control, m)]
        behind = [m for m in standing.ranking if standing.beats(m, control)]
        unsure = [m for m in standing.ranking if m not in (*worse, *behind)]
        if unsure:
            found.append(f"Not significantly different from {name}: {joined(unsure)}.")
        if worse:
            found.append(f"Significantly worse than {name}: {joined(worse)}.")
    if standing.controls and not found:
        listed = ", ".join(f"{one} {content.mean(one):.3f}" for one in standing.controls)
        return f"All methods are significantly better than the controls ({listed}; n = {n})."
    return " ".join(found)


def own_alphas(content: Content) -> dict[str, float]:
    """The alpha_min that is best for each method alone, where it was searched for."""
    found = {}
    for method, scores in content.scores.items():
        known = {a: msi for a, msi in (scores.alphas or {}).items() if not math.isnan(msi)}
        if known:
            found[method] = max(known, key=known.__getitem__)
    return found


def alpha_note(content: Content) -> str:
    """On which images and curves MSI over alpha_min was measured."""
    curve, n = content.alpha_curve, content.n
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


@dataclass(frozen=True)
class Caution:
    """What a reader should know before trusting the numbers, with details on demand."""

    text: str
    details: tuple[str, ...] = ()


def cautions(content: Content) -> list[Caution]:
    """All that a reader should know before trusting the numbers."""
    said = (*_other_rankings(content), *content.remarks, *_remarks(content))
    return [*map(Caution, said), *_leaks(content)]


def _other_rankings(content: Content) -> Iterator[str]:
    """What the paired tests say against the ranking under other conditions."""
    first = content.standing
    for other in content.conditions[1:]:
        here = other.standing
        if best_changes(first, here):
            yield (
                f"The best method changes {other.words}: {here.best} is significantly better than"
                f" {first.best} there (MSI {here.means[here.best]:.3f} and"
                f" {here.means[first.best]:.3f}, n = {here.n})."
            )
        if lost := lost_leads(first, here):
            words = [f"{method} over {joined(others)}" for method, others in lost.items()]
            yield (
                f"Leads that do not survive {other.words} (paired tests, n = {here.n}):"
                f" {'; '.join(words)}."
            )


def unmarked_words(content: Content, method: str) -> str:
    """That a method's map marks nothing in many images; empty if it does not."""
    if method not in content.unmarked:
        return ""
    images = f"{content.unmarked[method]} of {content.n} images"
    where = f"{method} marks nothing at alpha_min {content.first.alpha_min:g} in {images}"
    return f" {where}: MSI there is that of an empty mask."


def unmarked_remark(n: int, unmarked: Mapping[str, int], alpha_min: float) -> str:
    """What MSI is worth where maps mark nothing at alpha_min; `unmarked` counts such images."""
    listed = ", ".join(f"{method} {count}" for method, count in unmarked.items())
    return (
        f"Maps that mark nothing at alpha_min {alpha_min:g}, of {n} images: {listed}. MSI there is"
        " that of an empty mask, between -0.5 and 0 as a rule, and not of an explanation: compare"
        " at a lower alpha_min too."
    )


def run_remarks(n: int, empty: Mapping[str, int], *, random_weights: bool = False) -> list[str]:
    """Remarks that only the run itself can make: of all-zero heatmaps, and of random weights."""
    found = ["The model has random weights: its scores mean nothing."] if random_weights else []
    zeros = [f"{method} {count}" for method, count in empty.items() if count]
    if zeros:
        found.append(f"All-zero heatmaps, which mark nothing, of {n} images: {', '.join(zeros)}.")
    return found


def _remarks(content: Content) -> Iterator[str]:
    """What the scores say against themselves."""
    n, right, standing = content.n, content.first.clean, content.standing
    if (few := few_images(n)) and few not in content.remarks:
        yield few
    if right < 0.5 and content.facts.targets == "label":
        yield (
            f"The model classifies only {right:.0%} of the whole images correctly: check that these"
            " are images and classes of its own task."
        )
    elif right < LOW_ACCURACY:
        yield (
            f"The classifier gives only {right:.0%} of the whole images their target class. Where"
            " it is wrong on the whole image, no mask can do well, and MSI says more about the"
            " classifier than about the explanation."
        )
    for method in content.methods:
        summary = content.summaries[method]
        # Others lack a value for reasons of their own, such as an empty heatmap or no truth.
        counts = {c: one.n_nan for c, one in summary.items() if c in COLUMNS} or {"msi": 0}
        worst = max(counts, key=lambda column: counts[column])
        if counts[worst] > MANY_NAN * n:
            column = content.heading(worst).long
            yield (
                f"{method}: {counts[worst]} of {n} images have no {column}, because the model"
                " answered NaN. Means leave them out."
            )
    if _unbeaten(standing):
        yield control_words(content)
    if _has_head(content) and (same := _unmoved(content)):
        stay = "stay: they do not show what this output rests on."
        yield f"{_random_head(content)} the maps of {joined(same)} {stay}"


def _unbeaten(standing: Standing) -> bool:
    """Whether a method is not significantly better than a control."""
    return any(not standing.beats(m, c) for m in standing.ranking for c in standing.controls)


def leaks(summary: Mapping[str, Estimate]) -> bool:
    """Whether the leak ratio of a method is far above 1, and significantly so."""
    ratio = summary.get("leak_ratio")
    return ratio is not None and ratio.mean > LIMIT and ratio.low > 1


def _leaks(content: Content) -> Iterator[Caution]:
    """What there is to say about leaks, one caution for all methods of one case."""
    found = {
        method: sentence
        for method in content.methods
        if method not in content.standing.controls
        and "leak_ratio" in (summary := content.summaries[method])
        and (sentence := leak_warning(summary))
    }
    leaking = [method for method in found if leaks(content.summaries[method])]
    unsure = [method for method in found if method not in leaking]
    leak = "masks of {} leak: their shape alone tells the model the class, so MSI is too high for"
    few = "There are too few images to say whether the masks of {} leak."
    for methods, text in ((leaking, f"The {leak} them."), (unsure, few)):
        if methods:
            details = tuple(f"{method}: {found[method]}." for method in methods)
            yield Caution(text.format(joined(methods)), details)


def joined(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> joined(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
