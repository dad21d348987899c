"""The report of a run, made from its numbers alone."""

from dataclasses import replace
from pathlib import Path

import torch

from sufficit.comparing.settings import CONTROLS
from sufficit.metrics.compare_scores import compare_scores
from sufficit.metrics.scores import Plan as Asked
from sufficit.metrics.scores import Scores, make_plan, read
from sufficit.perturbation.types import ANOTHER, NO_CLASS, Predictions
from sufficit.report import Content, Facts, MethodScores, Shown, write_report
from sufficit.reproduce.kept import Kept
from sufficit.reproduce.outcome import PLACES, Outcome, summary_of
from sufficit.reproduce.plans import NUMBERS
from sufficit.reproduce.scoring import NO_ANSWER
from sufficit.reproduce.tables import table_of


def report_run(out: Path, path: Path, outcome: Outcome) -> Path:
    """Write the report of a run."""
    return write_report(path, content_of(out, outcome))


def content_of(out: Path, outcome: Outcome) -> Content:
    """What the report shows: every method and every adapter."""
    scores = scores_of(out, outcome)
    seed, record = outcome.plan.seed, outcome.facts["record"]
    contest = {method: one for method, one in scores.items() if method not in CONTROLS}
    tensors, facts = Kept(out / NUMBERS / "shown.safetensors").read()
    own = {m: {k: v for k, v in c.items() if k not in PLACES} for m, c in outcome.columns.items()}
    rows = [outcome.names.index(name) for name in facts["names"]]
    right = f"{outcome.trained['test_accuracy']:.1%} of {outcome.trained['test_images']}"
    return Content(
        title=f"{table_of(outcome.plan.table).title}: {outcome.plan.model}",
        facts=Facts.of(
            record,
            model=outcome.plan.model,
            data=outcome.facts["source"],
            seed=seed,
            targets="label",
            more={"Test accuracy": right},
        ),
        scores={method: MethodScores.of(one, rows) for method, one in scores.items()},
        summaries={method: summary_of(columns, seed) for method, columns in own.items()},
        standing=compare_scores(contest, seed=seed),
        names=outcome.names,
        shown=Shown(
            rows,
            tensors["images"].float() / 255,
            {m: tensors[f"{m}/heatmaps"].float() / 255 for m in scores},
            chosen="drawn by the seed, as many of each class",
        ),
        classes=facts["classes"],
        controls=[method for method in scores if method in CONTROLS],
    )


def scores_of(out: Path, outcome: Outcome) -> dict[str, Scores]:
    """Every method's scores with the answers behind them; the columns are the exact ones."""
    tensors, facts = Kept(out / NUMBERS / "answers.safetensors").read()
    plan = make_plan(**facts["scoring"])
    targets = torch.tensor(outcome.targets)
    found = {}
    for method, columns in outcome.columns.items():
        answers = _answers({k: tensors[f"{method}/{k}"] for k in _FIELDS}, plan, targets)
        exact = {k: torch.from_numpy(v) for k, v in columns.items() if k not in PLACES}
        found[method] = replace(read(answers, plan), columns=exact)
    return found


_FIELDS = ("hits", "confidences", "shares", "calls")


def _answers(kept: dict[str, torch.Tensor], plan: Asked, targets: torch.Tensor) -> Predictions:
    hits = kept["hits"]
    named = targets.int()[:, None].expand(hits.shape).masked_fill(hits == 0, ANOTHER)
    return Predictions(
        bands=plan.asks,
        named=named.masked_fill(hits == NO_ANSWER, NO_CLASS),
        confidences=kept["confidences"].float(),
        weighed=plan.weighs,
        shares=kept["shares"],
        targets=targets,
        calls=kept["calls"],
    )
