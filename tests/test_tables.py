"""Tables of methods in the terminal, and pairs on disk."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from rich.console import Console
from sufficit.results import save_pairs
from torch import nn

from reference import three_methods
from sufficit import Classifier, Scores, compare_scores, evaluate
from sufficit.provenance import save_json
from sufficit.statistics import Estimate, Standing, compare_values
from sufficit.tables import legend, mark, methods_table, ranked

NAN = float("nan")
COLUMNS = ("msi", "deletion_percent", "mask_penalty")


@pytest.fixture(scope="module")
def scores() -> dict[str, Scores]:
    torch.manual_seed(0)
    classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3)))
    images = torch.rand(9, 3, 8, 8)
    return {
        name: evaluate(classifier, images, torch.rand(9, 8, 8), columns=COLUMNS)
        for name in ("one", "two", "three")
    }


def test_pairs_on_disk_carry_what_they_were_made_with(tmp_path: Path) -> None:
    standing = compare_values(three_methods(), seed=4, draws=300)
    save_pairs(tmp_path / "pairs.csv", standing)
    frame = pandas.read_csv(tmp_path / "pairs.csv")
    assert frame["difference"].tolist() == pytest.approx([p.difference for p in standing.pairs])
    assert frame[["column", "seed", "resamples", "draws", "correction"]].drop_duplicates().to_dict(
        "records"
    ) == [{"column": "msi", "seed": 4, "resamples": 2000, "draws": 300, "correction": "holm"}]
    save_json(tmp_path / "a.json", asdict(standing))
    stored = json.loads((tmp_path / "a.json").read_text())
    assert (stored["best"], stored["tied"], stored["ranking"]) == ("a", ["b"], ["a", "b", "c"])
    assert stored["chance"]["draws"] == 300
    assert stored["pairs"][0]["p_corrected"] == standing.pairs[0].p_corrected


def summaries_of(values: Mapping[str, np.ndarray]) -> dict[str, dict[str, Estimate]]:
    return {
        name: {
            "msi": Estimate(float(found.mean()), -0.5, 0.5, len(found), 0, True),
            "deletion_percent": Estimate(0.25, NAN, NAN, 1, 0, False),
        }
        for name, found in values.items()
    }


def printed(values: Mapping[str, np.ndarray], standing: Standing) -> list[str]:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(methods_table(summaries_of(values), standing, "Means"))
    return capture.get().splitlines()


def test_the_table_marks_the_best_and_those_not_told_from_it() -> None:
    values = three_methods()
    table = printed(values, compare_values(values))
    rows = {line.split()[0]: line.split() for line in table if line.strip()}
    assert list(rows)[3:6] == ["a", "b", "c"]
    assert rows["a"][1:4] == ["0.250", f"{values['a'].mean():.3f}", "*"]
    assert rows["b"][1:4] == ["0.250", f"{values['b'].mean():.3f}", "="]
    assert rows["c"][1:4] == ["0.250", f"{values['c'].mean():.3f}", "-0.50"]
    assert rows["method"][1:5] == ["deletion", "↓", "MSI", "↑"]
    text = " ".join(" ".join(table).split())
    assert "* best MSI of 3; = not distinguishable from it: sign-flip test on the same" in text
    assert "(10,000 draws), level 0.05, Holm's correction for 3 pairs" in text
    assert "2,000 resamples. Seed 0." in text


def test_a_mean_of_nothing_is_a_dash_in_the_table() -> None:
    values = three_methods()
    summaries = summaries_of(values)
    summaries["b"] = summaries["b"] | {"deletion_percent": Estimate(NAN, NAN, NAN, 0, 3, False)}
    table = methods_table(summaries, compare_values(values), "Means")
    assert list(table.columns[1].cells) == ["0.250", "-", "0.250"]


def test_controls_are_in_the_table_and_not_in_the_contest() -> None:
    values = three_methods()
    standing = compare_values({name: values[name] for name in "bc"})
    table = methods_table(summaries_of(values), standing, "Means")
    assert ranked(summaries_of(values), standing) == ["a", "b", "c"]
    assert [row.style for row in table.rows] == ["dim", "bold", None]
    assert [mark(name, standing) for name in "abc"] == [" ", "*", " "]
    assert "all others differ from it" in legend(standing)
    assert legend(compare_values({"a": values["a"]})).startswith("* best MSI of 1. Interval")


def test_a_table_by_another_column_has_its_interval_and_ranks_by_it(
    scores: dict[str, Scores],
) -> None:
    standing = compare_scores(scores, column="mask_penalty")
    summaries = {name: found.summary() for name, found in scores.items()}
    table = methods_table(summaries, standing, "Means", {"msi": "MSI"})
    assert [column.header.strip() for column in table.columns] == [
        "method", "MSI ↑", "mask_penalty ↓", "95 % interval",
    ]  # fmt: skip
    means = [summaries[name]["mask_penalty"].mean for name in ranked(summaries, standing)]
    assert means == sorted(means)
    best = summaries[standing.best]["mask_penalty"]
    assert next(iter(table.columns[3].cells)) == f"{best.low:.2f} .. {best.high:.2f}"
