"""The verdict: what is best, how sure that is, and what would change it.

Methods as they are drawn and methods that are fitted answer different questions, so each group has
a sentence of its own. A method is best only if it is significantly better than every control.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sufficit.metrics.columns import ZERO_LINE
from sufficit.metrics.leakage import leaks
from sufficit.report.content import Content
from sufficit.report.interpretation import (
    RANDOM_WEIGHTS,
    alpha_order,
    cautions,
    joined,
    leak_line,
    leak_words,
)
from sufficit.similarity import RankedCondition, best_changes
from sufficit.statistics import Pair, Standing

CONTROLS = {
    ZERO_LINE: "marking the whole image",
    "center": "a blob that ignores the image",
    "random": "random noise",
    "center+fit": "a fitted blob that ignores the image",
}
FIT_CONTROL = "center+fit"
DRAWN = "As drawn"
FITTED = "Fitted"
MOST_WARNINGS = 3
WORTHLESS = 0.5  # share of whole images that the model must get right
EQUAL = 0.1  # methods are equally good if their MSI differs by less, with 95 % confidence
POWER = 8  # images that show a difference of one standard deviation in four of five cases
MOST_TIMES = 50  # more images than were scored, that a verdict asks for


@dataclass(frozen=True)
class Verdict:
    """Three lines, and the warnings that matter for them."""

    answer: str
    sure: str
    change: str
    warnings: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, str, str]:
        """The answer, how sure it is, and what would change it."""
        return self.answer, self.sure, self.change


def verdict(content: Content) -> Verdict:
    """Return what the scores say, in three lines and at most three warnings."""
    outcomes = [_outcome(group) for group in content.groups]
    found = _unreadable(content) or _of_groups(content, outcomes)
    answer, sure, change = found
    # What the answer says already is no warning.
    said = (RANDOM_WEIGHTS, leak_line([m for o in outcomes for m in _leaking(content, o)]))
    warnings = [one.text for one in cautions(content) if one.text not in said]
    return Verdict(answer, sure, change, tuple(warnings[:MOST_WARNINGS]))


def _unreadable(content: Content) -> tuple[str, str, str] | None:
    """Return the three lines where the scores mean nothing."""
    right = content.first.clean
    labels = content.facts.targets == "label"
    if RANDOM_WEIGHTS in content.remarks:
        why = "the model has random weights"
        sure = "A map shows what a trained model uses."
        change = "Leave out --weights none, or give a file of weights."
    elif labels and right < WORTHLESS:
        why = f"the model is right on only {right:.0%} of the images"
        sure = "No mask can make a wrong prediction right."
        change = "Check classes, normalisation and weights, or use --targets prediction."
    elif math.isnan(content.mean(content.standing.best)):
        why = "no method has an MSI"
        sure = f"{_images(content.n)} {'was' if content.n == 1 else 'were'} scored."
        change = "Check that the model gives finite numbers."
    else:
        return None
    return f"These scores mean nothing yet: {why}.", sure, change


# What the tests say of a group


@dataclass(frozen=True)
class Outcome:
    """What the tests say of the methods of one group."""

    standing: Standing
    winners: tuple[str, ...]  # better than every control, and no method is better than they are
    unsure: tuple[str, ...]  # other methods that the first winner is not better than
    lacking: tuple[str, ...]  # controls that were not scored

    @property
    def top(self) -> str:
        """The method that the group's sentences are about."""
        return self.winners[0] if self.winners else self.standing.best

    @property
    def rivals(self) -> tuple[str, ...]:
        """The methods that are no winners."""
        return tuple(one for one in self.standing.ranking if one not in self.winners)


def _outcome(standing: Standing) -> Outcome:
    """Return who is best by the tests."""
    needed = (ZERO_LINE, "center", "random")
    lacking = tuple(one for one in needed if one not in standing.controls)
    beating = [
        method
        for method in standing.ranking
        if not lacking and all(standing.beats(method, one) for one in standing.controls)
    ]
    if not beating:
        return Outcome(standing, (), (), lacking)
    # The best mean of those that beat every control, which need not be the best of all.
    first = beating[0]
    # Those it is not significantly better than.
    level = [m for m in standing.ranking if m != first and not standing.beats(first, m)]
    # "Not different" is not transitive: of those level with the first, some may beat others.
    tied = [m for m in level if m in beating and not any(standing.beats(o, m) for o in level)]
    unsure = tuple(method for method in level if method not in tied)
    return Outcome(standing, (first, *tied), unsure, lacking)


def _of_groups(content: Content, outcomes: Sequence[Outcome]) -> tuple[str, str, str]:
    """Return the three lines of one group or two; a group with a winner makes the answer."""
    # A group without a winner adds to how sure the answer is, not to the answer.
    decided = [one for one in outcomes if one.winners] or [*outcomes]
    others = [one for one in outcomes if one not in decided]
    named = len(outcomes) > 1
    answer = [_of_group(content, one, _answer, named=named) for one in decided]
    sure = [_of_group(content, one, _sure, named=named) for one in decided]
    for one in others:
        sure.append(_of_group(content, one, _answer, named=named))
        sure.append(_sure(content, one))
    change = " ".join(_change(content, [*decided, *others]))
    return " ".join(answer), " ".join(sure), change


def _of_group(
    content: Content,
    outcome: Outcome,
    sentence: Callable[[Content, Outcome], str],
    *,
    named: bool,
) -> str:
    """Return a sentence about a group, with the group's name if there are two."""
    words = sentence(content, outcome)
    if not named:
        return words
    group = FITTED if outcome.top in content.fit_fills else DRAWN
    if words.split()[0] in ("No", "The", "It", "On", "Whether"):  # and not the name of a method
        words = words[0].lower() + words[1:]
    return f"{group}, {words}"


def badges(content: Content) -> dict[str, str]:
    """Return the badge of methods in the report: best, tie, top, or not different from the top.

    Only a method that beats all others and every control is best.
    """
    found: dict[str, str] = {}
    for outcome in [_outcome(group) for group in content.groups]:
        word = "best" if len(outcome.winners) == 1 else "tie"
        if not outcome.winners or outcome.unsure:
            word = "top"
        found |= dict.fromkeys(outcome.standing.not_different, "n.s.")
        found |= dict.fromkeys(outcome.winners or (outcome.top,), word)
    return found


# The answer


def _answer(content: Content, outcome: Outcome) -> str:
    """Return who is best, in a sentence."""
    standing = outcome.standing
    top = outcome.top
    count = len(standing.ranking)
    if outcome.lacking:
        highest = f"the highest MSI of {count} methods" if count > 1 else "MSI"
        return f"{top} has {highest}{':' if count > 1 else ''} {_value(content, top)}."
    if not outcome.winners:
        return _no_winner(outcome)
    leaking = _leaking(content, outcome)
    if leaking:
        whose = "its masks" if leaking == [top] else f"the masks of {joined(leaking)}"
        return f"{top} has MSI {_value(content, top)}, but {whose} leak: the score is too high."
    turned = _turned(content, outcome)
    if turned:
        here, other = turned
        fill = content.conditions[0].fill
        return (
            f"{top} is best with the fill {fill} (MSI {standing.means[top]:.2f}), {other.best}"
            f" {here.words} ({other.means[other.best]:.2f})."
        )
    return _best(content, outcome)


def _best(content: Content, outcome: Outcome) -> str:
    """Return the methods that beat every control, where nothing speaks against them."""
    top = outcome.top
    count = len(outcome.standing.ranking)
    if outcome.unsure:
        return (
            f"{top} beats {CONTROLS[ZERO_LINE]} with MSI {_value(content, top)}. Whether it is"
            f" better than {joined(outcome.unsure)} is open."
        )
    if len(outcome.winners) > 1:
        return _tie(content, outcome)
    if count == 1:
        return f"{top} beats {CONTROLS[ZERO_LINE]}: MSI {_value(content, top)}."
    return f"{top} is the best of {count} methods: MSI {_value(content, top)}."


def _leaking(content: Content, outcome: Outcome) -> list[str]:
    """Return the winners whose masks leak."""
    return [one for one in outcome.winners if leaks(content.summaries[one])]


def _no_winner(outcome: Outcome) -> str:
    """Return the control that no method beats."""
    standing = outcome.standing
    control = _unbeaten(outcome)
    words = f"{CONTROLS.get(control, control)} ({control}, MSI {standing.means[control]:.2f})"
    if standing.means[control] < standing.means[outcome.top]:
        return f"Whether a method beats {words} is open."
    if any(standing.beats(method, control) for method in standing.ranking):
        return f"No method beats every control; the best one does not beat {words}."
    return f"No method beats {words}."


def _unbeaten(outcome: Outcome) -> str:
    """Return the control that the best method does not beat: one with a higher mean comes first."""
    standing = outcome.standing
    top = outcome.top
    unbeaten = [one for one in standing.controls if not standing.beats(top, one)]
    higher = [one for one in unbeaten if standing.means[one] >= standing.means[top]]
    known = [one for one in CONTROLS if one in (higher or unbeaten)]
    return (known or unbeaten)[0]


def _tie(content: Content, outcome: Outcome) -> str:
    """Return the methods that share the first place."""
    standing = outcome.standing
    winners = outcome.winners
    means = joined([f"{standing.means[one]:.2f}" for one in winners])
    alike = f"do not differ significantly on {_images(standing.n)}"
    if _are_equal(outcome):
        alike = "are equally good"
    both = "Both" if len(winners) == 2 else "All"
    ahead = all(standing.beats(one, other) for one in winners for other in outcome.rivals)
    else_ = "everything else" if ahead else "every control"
    return f"{joined(winners)} {alike}: MSI {means}. {both} beat {else_}."


def _are_equal(outcome: Outcome) -> bool:
    """Return whether the winners are so close that their difference does not matter."""
    first, *others = outcome.winners
    pairs = [outcome.standing.pair(first, one) for one in others]
    return all(p is not None and max(abs(p.low), abs(p.high)) < EQUAL for p in pairs)


def _turned(content: Content, outcome: Outcome) -> tuple[RankedCondition, Standing] | None:
    """Return the condition in which another method of the group is significantly better, if any."""
    for other in content.conditions[1:]:
        for here in content.groups_of(other.standing):
            same = {*here.ranking} == {*outcome.standing.ranking}
            if same and best_changes(outcome.standing, here):
                return other, here
    return None


# How sure it is


def _sure(content: Content, outcome: Outcome) -> str:
    """Return how sure the answer is."""
    standing = outcome.standing
    top = outcome.top
    images = _images(standing.n)
    if outcome.lacking:
        return f"On {images}. Whether it beats {CONTROLS[ZERO_LINE]} was not tested."
    if not outcome.winners:
        return _how_far_below(content, outcome)
    if outcome.unsure or len(outcome.winners) > 1:
        other = (*outcome.unsure, *outcome.winners[1:])[0]
        found = standing.pair(top, other)
        words = f"{top} and {other} differ by {_difference(found, top)} on {images}."
    else:
        words = _lead(content, outcome)
    return f"{words}{_beyond_the_fit(outcome)}"


def _lead(content: Content, outcome: Outcome) -> str:
    """Return how far the one winner is ahead of the next, and under which other conditions."""
    standing = outcome.standing
    top = outcome.top
    held = [one.words for one in content.conditions[1:] if _leads(content, outcome, one)]
    where = f"on {_images(standing.n)}{f', also {joined(held)}' if held else ''}."
    if not outcome.rivals and FIT_CONTROL in standing.controls:
        return f"It beats every control {where}"  # how far is said of the fit's control
    second = next(iter(outcome.rivals), standing.controls[0])
    others = "every control" if outcome.rivals else "every other control"
    difference = _difference(standing.pair(top, second), top)
    return f"It beats {second} by {difference} and {others} {where}"


def _leads(content: Content, outcome: Outcome, condition: RankedCondition) -> bool:
    """Return whether the winner is significantly ahead of all others there too."""
    standing = condition.standing
    others = (*outcome.rivals, *outcome.standing.controls)
    return all(standing.beats(outcome.top, one) for one in others)


def _beyond_the_fit(outcome: Outcome) -> str:
    """Return what the map brings beyond the fit, which knows something by itself."""
    standing = outcome.standing
    top = outcome.top
    if FIT_CONTROL not in standing.controls:
        return ""
    found = standing.pair(top, FIT_CONTROL)
    if found is None:
        return ""
    return (
        f" Its map brings {_difference(found, top)} beyond the fit alone ({FIT_CONTROL}"
        f" {standing.means[FIT_CONTROL]:.2f})."
    )


def _how_far_below(content: Content, outcome: Outcome) -> str:
    """Return how the best method stands to the control that it does not beat."""
    standing = outcome.standing
    top = outcome.top
    control = _unbeaten(outcome)
    apart = "not significantly different from"
    if standing.beats(control, top):
        apart = "significantly worse than"
    who = top if len(standing.ranking) == 1 else f"The best method, {top},"
    return f"{who} has {_value(content, top)} on {_images(standing.n)}, {apart} {control}."


# What would change it


def _change(content: Content, outcomes: Sequence[Outcome]) -> list[str]:
    """Return what to do, and what the order depends on."""
    found = []
    if any(outcome.lacking for outcome in outcomes):
        found.append("Add --checks controls: a map must beat marking the whole image.")
    elif not any(outcome.winners for outcome in outcomes):
        found += _remedies(content, outcomes)
    for outcome in outcomes:
        found += _open_questions(content, outcome)
    found += _alpha_words(content)
    return found or ["Look at the worst images in the report before you rely on it."]


def _remedies(content: Content, outcomes: Sequence[Outcome]) -> list[str]:
    """Return what to do where no method beats the controls."""
    best = outcomes[0].standing.best
    ways = []
    if not content.fitted:
        ways.append(f"cut each map where the model agrees (--methods {best}+fit)")
    ways.append("train LAX (sufficit train-lax)")
    found = [f"{ways[0][0].upper()}{' or '.join(ways)[1:]}."]
    ranks = {
        method: content.summaries[method]["msi_rank"].mean
        for method in outcomes[0].standing.ranking
        if "msi_rank" in content.summaries[method]
    }
    known = {method: mean for method, mean in ranks.items() if not math.isnan(mean)}
    if known:
        first = max(known, key=known.__getitem__)
        found.append(
            f"By the order of its pixels alone {first} is first (msi_rank {known[first]:.2f})."
        )
    return found


def _open_questions(content: Content, outcome: Outcome) -> list[str]:
    """Return what would settle what the tests leave open."""
    standing = outcome.standing
    top = outcome.top
    leaking = _leaking(content, outcome)
    if leaking:
        return _leak_words(content, outcome, leaking)
    if _turned(content, outcome):
        return ["The ranking depends on what replaces hidden pixels: report both fills."]
    if len(outcome.winners) > 1 and not outcome.unsure and _are_equal(outcome):
        return ["More images would hardly change this: choose the cheaper one."]
    other = next(iter((*outcome.unsure, *outcome.winners[1:])), None)
    if not outcome.winners and not outcome.lacking:
        other = _unbeaten(outcome)
        if standing.means[other] >= standing.means[top]:
            return []
    needed = None if other is None else _images_needed(standing.pair(top, other))
    if needed is None:
        return []
    return [f"About {needed:,} images would tell {top} and {other} apart."]


def _leak_words(content: Content, outcome: Outcome, leaking: Sequence[str]) -> list[str]:
    """Return how far masks leak, and which method does not."""
    standing = outcome.standing
    words = leak_words(content.summaries[leaking[0]])
    found = [f"The masks of {leaking[0]} reveal their class {words}."]
    clean = [one for one in standing.ranking if not leaks(content.summaries[one])]
    if clean:
        mean = standing.means[clean[0]]
        found.append(f"The best method without leakage is {clean[0]}, MSI {mean:.2f}.")
    return found


def _images_needed(pair: Pair | None) -> int | None:
    """Return how many images show a pair's difference in four of five cases; None for too many."""
    if pair is None or math.isnan(pair.low) or pair.difference == 0:
        return None
    # From the interval: 1.96 standard errors to each side.
    deviation = (pair.high - pair.low) / (2 * 1.96) * math.sqrt(pair.n)
    needed = POWER * (deviation / pair.difference) ** 2
    if needed > MOST_TIMES * pair.n:
        return None
    needed = max(needed, 2 * pair.n)
    # Rounded up to one digit and a half: it is an estimate.
    step = 10 ** (len(str(int(needed))) - 1) // 2 or 1
    return math.ceil(needed / step) * step


def _alpha_words(content: Content) -> list[str]:
    """Return whether the order of methods hangs on the scale of their values."""
    found = alpha_order(content)
    if found is None:
        return []
    first = found.order[0]
    images = _images(found.images)
    if len(found.order) == 1:
        return [f"{first} is best at alpha_min {found.at[first]:g} (curve of {images})."]
    listed = ", ".join(f"{method} {found.at[method]:g}" for method in found.order)
    start = f"With each method at its own best alpha_min ({listed}; curve of {images})"
    if found.order == found.now:
        return [f"{start} the order stays."]
    changes = f"{first} stays first, the order below changes"
    if first != found.now[0]:
        changes = f"{first} is first"
    return [f"{start} {changes}: try --alpha-min search, or {first}+fit."]


# Words


def _value(content: Content, method: str) -> str:
    """Return the mean of the ranked column with its interval."""
    found = content.summaries[method][content.standing.column]
    if math.isnan(found.low):
        return f"{found.mean:.2f}"
    return f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"


def _difference(pair: Pair | None, ahead: str) -> str:
    """Return how far a method is ahead in a pair, with the interval."""
    if pair is None:
        return "an unknown amount"
    sign = 1 if pair.first == ahead else -1
    low, high = sorted((sign * pair.low, sign * pair.high))
    if math.isnan(low):
        return f"{sign * pair.difference:.2f}"
    return f"{sign * pair.difference:.2f} ({low:.2f} to {high:.2f})"


def _images(n: int) -> str:
    return f"{n:,} image{'s' if n > 1 else ''}"
