"""The answer in five lines: the best method, and what speaks for and against it."""

import math
from typing import NamedTuple

from sufficit.metrics.leakage import LIMIT
from sufficit.report.content import Content
from sufficit.report.interpretation import joined, leaks, unmarked_words
from sufficit.similarity import best_changes, lost_leads
from sufficit.sums import FEW

YES, NO, UNSURE, UNKNOWN = "Yes", "No", "Unsure", "Not measured"


class Answer(NamedTuple):
    """A question, the answer in a word, and the reason."""

    question: str
    word: str
    text: str

    def __str__(self) -> str:
        return f"{self.question} {self.word}. {self.text}"


def answer(content: Content) -> list[Answer]:
    """Five lines that a reader who knows no metric understands."""
    held = "Does that hold with another fill, and for a model used to masks (twin)?"
    return [
        Answer("Which method is best?", *_best(content)),
        Answer(held, *_holds(content)),
        Answer("Does the shape of its mask give the class away (leakage)?", *_leaking(content)),
        Answer("How much of what is possible does it reach?", *_ceiling(content)),
        Answer("How sure is this?", *_sure(content)),
    ]


def _best(content: Content) -> tuple[str, str]:
    standing, rivals = content.standing, content.standing.rivals
    best, top, column = standing.best, standing.leader, content.heading(standing.column).long
    most = "highest" if standing.higher_is_better else "lowest"
    found = content.summaries[top][standing.column]
    ends = f" (95 % interval {found.low:.2f} to {found.high:.2f})"
    value = f"{found.mean:.2f}{'' if math.isnan(found.low) else ends}"
    empty = unmarked_words(content, best)
    if top != best:
        beaten = standing.beats(top, best)
        words = "significantly worse" if beaten else "not significantly different"
        return "None", (
            f"No method is better than the control {top}, which has the {most} {column}: {value}."
            f" The {most} of the methods, {best} with {content.mean(best):.2f}, is {words}.{empty}"
        )
    text = f"Its {column} is {most}, {value}"
    rest = " It draws the same map for every class." * (best in content.class_agnostic) + empty
    if standing.is_clear or not rivals:
        word = f"{best}, with a caveat" if empty else best
        return word, f"{text}{', significantly so' if rivals else ''}.{rest}"
    unsure = joined([one for one in rivals if not standing.beats(best, one)])
    side = "above" if standing.higher_is_better else "below"
    return f"{best}, but not for sure", f"{text}, but not significantly {side} {unsure}.{rest}"


def _holds(content: Content) -> tuple[str, str]:
    others, first, best = content.conditions[1:], content.standing, content.standing.best
    if not others:
        return UNKNOWN, "Add several --fills or a --twin: hidden pixels may mislead the model."
    turned = [
        f"{one.standing.best} {one.words}" for one in others if best_changes(first, one.standing)
    ]
    lost = [
        f"{joined(found)} {one.words}"
        for one in others
        if (found := lost_leads(first, one.standing).get(best))
    ]
    if turned:
        word, text = NO, f"Significantly better than {best}: {'; '.join(turned)}"
    elif lost:
        word, text = UNSURE, f"No longer significantly behind {best}: {'; '.join(lost)}"
    elif first.is_clear:
        word, text = YES, f"The lead of {best} stays significant"
    else:
        word, text = UNSURE, "There is no significant lead with the first fill"
    for one in others:
        place = f"{one.standing.ranking.index(best) + 1} of {len(one.standing.ranking)}"
        text += f". {one.words[0].upper()}{one.words[1:]} {best} ranks {place}, MSI"
        text += f" {one.standing.means[best]:.2f}"
    twin = "" if any(one.twin for one in others) else " No twin was asked."
    return word, f"{text}.{twin}"


def _leaking(content: Content) -> tuple[str, str]:
    summary = content.summaries[content.standing.best]
    ratio, laid = summary.get("leak_ratio"), "Laid over images of other classes, its masks make"
    if ratio is None:
        return UNKNOWN, "Add --checks default, with images of two classes or more."
    leaking, times = leaks(summary), f"{laid} the model name their class"
    if not math.isfinite(ratio.mean):
        if not leaking:
            return UNSURE, "On these images it never happens by chance: score more."
        share = f"in {summary['leak'].mean:.0%} of the cases, masks of other classes never"
        return YES, f"{times} {share}: its score is too high."
    times += f" {ratio.mean:.2f} times as often as chance"
    if leaking:
        return YES, f"{times}: its score is too high."
    return NO if ratio.high <= 2 * LIMIT else UNSURE, f"{times}; 1 is no leakage."


def _ceiling(content: Content) -> tuple[str, str]:
    best = content.summaries[content.standing.best]
    own, searched = best.get("msi_ceiling"), best.get("ceiling")
    if own is None or searched is None:
        return UNKNOWN, "Add --checks default,ceiling to search each image for the best box."
    return f"{own.mean:.2f} of {searched.mean:.2f}", (
        f"MSI with a held-out fill on {own.n} images, against boxes searched for each image with"
        " other fills."
    )


def _sure(content: Content) -> tuple[str, str]:
    standing, n = content.standing, content.standing.n
    images = f"{n:,} image{'s' if n > 1 else ''}"
    if standing.is_clear and n >= FEW:
        return "Sure", f"{images}; paired tests, at most 5 % of such claims are wrong by chance."
    if standing.is_clear:
        return UNSURE, f"Significant, but from {images} only: score more."
    alike = joined(standing.not_different) if standing.not_different else "a control"
    return UNSURE, f"{images} cannot tell {standing.best} from {alike}: score more images."
