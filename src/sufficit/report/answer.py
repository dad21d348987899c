"""The answer in five lines: the best method, and what speaks for and against it."""

import math
from dataclasses import dataclass

from sufficit.metrics.columns import heading
from sufficit.metrics.leakage import LIMIT
from sufficit.report.content import Content
from sufficit.report.interpretation import Caution, cautions, joined, leaks, sentences
from sufficit.similarity import RankedCondition, best_changes, correlations, lost_leads
from sufficit.sums import FEW

YES, NO, UNSURE, UNKNOWN = "Yes", "No", "Unsure", "Not measured"


@dataclass(frozen=True)
class Answer:
    """A question, the answer in a word, and the reason."""

    question: str
    word: str
    text: str

    def __str__(self) -> str:
        return f"{self.question} {self.word}. {self.text}"


def answer(content: Content) -> list[Answer]:
    """Five lines that a reader who knows no metric understands."""
    return [_best(content), _holds(content), _leaking(content), _ceiling(content), _sure(content)]


def notes(content: Content) -> list[str]:
    """What to know besides the answer and the warnings."""
    return [*sentences(content), *orders(content), *filter(None, [cost(content)])]


def warnings_of(content: Content) -> list[Caution]:
    """All that speaks against trusting the numbers."""
    return [*map(Caution, ranking_remarks(content)), *cautions(content)]


def _best(content: Content) -> Answer:
    question, standing = "Which method is best?", content.standing
    best, top, column = standing.best, standing.leader, heading(standing.column).long
    most = "highest" if standing.higher_is_better else "lowest"
    found = content.summaries[top][standing.column]
    ends = f" (95 % interval {found.low:.2f} to {found.high:.2f})"
    value = f"{found.mean:.2f}{'' if math.isnan(found.low) else ends}"
    if top != best:
        beaten = standing.beats(top, best)
        words = "significantly worse" if beaten else "not significantly different"
        text = (
            f"No method is better than the control {top}, which has the {most} {column}: {value}."
        )
        text += f" The {most} of the methods, {best} with {content.mean(best):.2f}, is {words}."
        return Answer(question, "None", text)
    text, rivals = f"Its {column} is {most}, {value}", standing.rivals
    agnostic = " It draws the same map for every class." * (best in content.class_agnostic)
    if standing.is_clear or not rivals:
        words = f"{text}{', significantly so' if rivals else ''}.{agnostic}"
        return Answer(question, best, words)
    unsure = [one for one in rivals if not standing.beats(best, one)]
    words = f"{text}, but not significantly {'above' if standing.higher_is_better else 'below'}"
    return Answer(question, f"{best}, but not for sure", f"{words} {joined(unsure)}.{agnostic}")


def ranking_remarks(content: Content) -> list[str]:
    """What the paired tests say against the ranking under other conditions; warnings."""
    found = []
    for other in content.conditions[1:]:
        first, here = content.standing, other.standing
        if best_changes(first, here):
            found.append(
                f"The best method changes {other.words}: {here.best} is significantly better than"
                f" {first.best} there (MSI {here.means[here.best]:.3f} and"
                f" {here.means[first.best]:.3f}, n = {here.n})."
            )
        lost = [one for one in lost_leads(first, here) if one.gone or one.reversed]
        if lost:
            words = [f"{one.method} over {joined((*one.reversed, *one.gone))}" for one in lost]
            found.append(
                f"Leads that do not survive {other.words} (paired tests, n = {here.n}):"
                f" {'; '.join(words)}."
            )
    return found


def orders(content: Content) -> list[str]:
    """How far the methods' order agrees between the first condition and each other."""
    first, found = content.conditions[:1], []
    for other in content.conditions[1:]:
        (one,) = correlations([*first, other])
        if not math.isnan(one.kendall):
            order = ", ".join(other.standing.ranking)
            found.append(
                f"Order of the methods {other.words}: {order}. Rank correlation with the order"
                f" above: Spearman {one.spearman:.2f}, Kendall {one.kendall:.2f}."
            )
    return found


def cost(content: Content) -> str:
    """The share of the model calls that a held-out fill took; empty without one."""
    held_out = [one for one in content.conditions if one.key == "held_out"]
    whole = sum(one.model_calls for one in content.conditions)
    if not held_out or not whole:
        return ""
    one = held_out[0]
    return (
        f"The held-out fill {one.fill} was asked {one.masks} masks per image at most,"
        f" {one.model_calls / whole:.0%} of the calls for scores."
    )


def _holds(content: Content) -> Answer:
    question = "Does that hold with another fill, and for a model used to masks (twin)?"
    others, best = content.conditions[1:], content.standing.best
    if not others:
        text = "Add several --fills or a --twin: hidden pixels may mislead the model."
        return Answer(question, UNKNOWN, text)
    turned = [one for one in others if best_changes(content.standing, one.standing)]
    lost = [one for one in others if _lost(content, one)]
    places = [_place(content, one) for one in others]
    if turned:
        named = [f"{one.standing.best} {one.words}" for one in turned]
        word, text = NO, f"Significantly better than {best}: {'; '.join(named)}"
    elif lost:
        names = [f"{joined(_lost(content, one))} {one.words}" for one in lost]
        word, text = UNSURE, f"No longer significantly behind {best}: {'; '.join(names)}"
    elif content.standing.is_clear:
        word, text = YES, f"The lead of {best} stays significant"
    else:
        word, text = UNSURE, "There is no significant lead with the first fill"
    twin = "" if any(one.twin for one in others) else " No twin was asked."
    return Answer(question, word, f"{text}. {' '.join(places)}{twin}")


def _lost(content: Content, other: RankedCondition) -> tuple[str, ...]:
    """The methods that the best one is not significantly ahead of any more."""
    found = lost_leads(content.standing, other.standing)
    own = [one for one in found if one.method == content.standing.best]
    return (*own[0].reversed, *own[0].gone) if own else ()


def _place(content: Content, other: RankedCondition) -> str:
    """Where the best method is under another condition."""
    standing, best = other.standing, content.standing.best
    place = standing.ranking.index(best) + 1
    mean = standing.means[best]
    words = f"{other.words[0].upper()}{other.words[1:]}"
    return f"{words} {best} ranks {place} of {len(standing.ranking)}, MSI {mean:.2f}."


def _leaking(content: Content) -> Answer:
    question = "Does the shape of its mask give the class away (leakage)?"
    best = content.standing.best
    ratio = content.summaries[best].get("leak_ratio")
    if ratio is None:
        return Answer(question, UNKNOWN, "Add --leak, with images of two classes or more.")
    if not math.isfinite(ratio.mean):
        if not leaks(content, best):
            text = "On these images it never happens by chance: score more."
            return Answer(question, UNSURE, text)
        share = content.summaries[best]["leak"].mean
        text = (
            f"Laid over images of other classes, its masks make the model name their class in"
            f" {share:.0%} of the cases, masks of other classes never: its score is too high."
        )
        return Answer(question, YES, text)
    times = (
        "Laid over images of other classes, its masks make the model name their class"
        f" {ratio.mean:.2f} times as often as chance"
    )
    if leaks(content, best):
        return Answer(question, YES, f"{times}: its score is too high.")
    word = NO if ratio.high <= 2 * LIMIT else UNSURE
    return Answer(question, word, f"{times}; 1 is no leakage.")


def _ceiling(content: Content) -> Answer:
    question = "How much of what is possible does it reach?"
    found, best = content.ceiling, content.standing.best
    if found is None or best not in found.get("msi", {}):
        return Answer(question, UNKNOWN, "Add --ceiling to search each image for the best box.")
    own, most = found["msi"][best], found["searched"]["mean"]
    text = (
        f"MSI with the fill {found['fill']} on {found['n']} images, against boxes searched for"
        " each image with other fills."
    )
    return Answer(question, f"{own:.2f} of {most:.2f}", text)


def _sure(content: Content) -> Answer:
    question, standing, n = "How sure is this?", content.standing, content.standing.n
    images = f"{n:,} image{'s' if n > 1 else ''}"
    if standing.is_clear and n >= FEW:
        text = f"{images}; paired tests, at most 5 % of such claims are wrong by chance."
        return Answer(question, "Sure", text)
    if standing.is_clear:
        return Answer(question, UNSURE, f"Significant, but from {images} only: score more.")
    alike = joined(standing.not_different) if standing.not_different else "a control"
    text = f"{images} cannot tell {standing.best} from {alike}: score more images."
    return Answer(question, UNSURE, text)
