"""The table of methods in the terminal: order, marks, dashes and the legend."""

import base64
import io
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
from rich.console import Console

from reference import three_methods
from report_content import make
from sufficit.metrics.column import Heading
from sufficit.metrics.columns import heading_of
from sufficit.metrics.further_columns import FURTHER
from sufficit.metrics.localization import LOCALIZATION
from sufficit.report import Content, write_report
from sufficit.report.tables import further_tables, legend, results_table
from sufficit.statistics import Estimate, Standing, compare_values

NAN = float("nan")


@pytest.fixture(scope="module")
def content() -> Content:
    return make()


def with_values(
    content: Content, values: Mapping[str, np.ndarray], standing: Standing | None = None
) -> Content:
    summaries = {
        name: {
            "msi": Estimate(float(found.mean()), -0.5, 0.5, len(found), 0, True),
            "deletion_percent": Estimate(0.25, NAN, NAN, 1, 0, False),
        }
        for name, found in values.items()
    }
    return replace(content, summaries=summaries, standing=standing or compare_values(values))


def test_the_table_marks_the_best_and_those_that_do_not_differ_significantly(
    content: Content,
) -> None:
    values = three_methods()
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(results_table(with_values(content, values)))
    table = capture.get().splitlines()
    rows = {line.split()[0]: line.split() for line in table if line.strip()}
    assert list(rows)[3:6] == ["a", "b", "c"]
    assert rows["a"][1:4] == ["0.250", f"{values['a'].mean():.3f}", "*"]
    assert rows["b"][1:4] == ["0.250", f"{values['b'].mean():.3f}", "="]
    assert rows["c"][1:4] == ["0.250", f"{values['c'].mean():.3f}", "-0.50"]
    assert rows["method"][1:6] == ["del.", "%", "↓", "MSI", "↑"]
    assert legend(with_values(content, values)) == [
        "* highest MSI; = not significantly different from it.",
        "Paired tests (n = 40): sign flips (10,000 draws) and the interval, level 0.05, Holm"
        " correction for the 3 pairs of methods.",
        "Interval: Student's t, corrected for skewness.",
    ]


def test_fitted_methods_and_controls_have_parts_of_their_own(content: Content) -> None:
    three = three_methods()
    values = {"a+fit": three["a"], "b": three["b"], "c": three["c"], "everything": three["c"] - 1}
    standing = compare_values(values, controls=["everything"])
    found = replace(with_values(content, values, standing), fit_fills={"a+fit": ("black",)})
    table = results_table(found)
    assert [str(cell) for cell in table.columns[0].cells] == ["b", "c", "a+fit", "everything (c)"]
    assert [row.end_section for row in table.rows] == [False, True, True, False]
    marks = [str(cell)[-1] for cell in table.columns[2].cells]
    assert marks == ["*", " ", "*", " "], "each group has a best of its own"
    first, ranked_apart, *_ = legend(found)
    assert first == "* highest MSI of its group; (c) control."
    assert ranked_apart.startswith("Fitted methods are ranked apart")


def test_a_mean_of_nothing_is_a_dash_in_the_table(content: Content) -> None:
    found = with_values(content, three_methods())
    none = {"deletion_percent": Estimate(NAN, NAN, NAN, 0, 3, False)}
    summaries = {**found.summaries, "b": {**found.summaries["b"], **none}}
    table = results_table(replace(found, summaries=summaries))
    assert list(table.columns[1].cells) == ["0.250", "-", "0.250"]


@pytest.mark.parametrize(("n", "empty"), [(1, True), (8, False)])
def test_a_dash_in_the_column_by_rank_has_its_reason(n: int, empty: bool, tmp_path: Path) -> None:
    content = make(n=n, columns=("paper", "msi_rank"))
    table = results_table(content)
    assert str(table.columns[1].header).startswith("by rank")
    assert ({*table.columns[1].cells} == {"-"}) is empty
    page = " ".join(write_report(tmp_path / "report.html", content).read_text().split())
    for said in (
        "By rank is - because it needs images in both of two halves, which are drawn by name: score"
        " more images.",
        "An interval needs two images.",
    ):
        assert (said in " ".join(legend(content))) is empty
        assert (said in page) is empty


def test_controls_and_class_agnostic_methods_are_marked_in_the_table(content: Content) -> None:
    values = three_methods()
    standing = compare_values(values, controls=["a"])
    found = replace(with_values(content, values, standing), class_agnostic=["a", "c"])
    assert found.methods == ["b", "c", "a"]
    table = results_table(found)
    assert [str(cell) for cell in table.columns[0].cells] == ["b", "c (a)", "a (c)"]
    assert [row.style for row in table.rows] == ["bold", None, "dim"]
    assert [cell[-1] for cell in table.columns[2].cells] == ["*", " ", " "]
    assert "(c) control; (a) class-agnostic: the same map for every class." in legend(found)[0]
    alone = legend(with_values(content, {"a": values["a"]}))
    assert alone == ["* highest MSI.", "Interval: Student's t, corrected for skewness."]


def test_a_method_without_a_rank_is_marked_in_the_table(content: Content) -> None:
    first, *others = content.standing.ranking
    part = replace(content, standing=replace(content.standing, ranking=tuple(others)))
    names = [str(cell) for cell in results_table(part).columns[0].cells]
    assert names == [others[0], f"{first} (-)"]
    assert "(-) not ranked" in legend(part)[0]
    assert "(-)" not in legend(content)[0]


def test_a_table_by_another_column_has_its_interval_and_ranks_by_it(content: Content) -> None:
    values = {name: found["mask_penalty"].numpy() for name, found in content.scores.items()}
    standing = compare_values(values, "mask_penalty", higher_is_better=False)
    found = replace(content, standing=standing)
    means = [found.summaries[name]["mask_penalty"].mean for name in found.methods]
    assert means == sorted(means)
    table = results_table(found)
    heads = [column.header.strip() for column in table.columns]
    assert heads == [
        *("method", "ins. % ↑", "del. % ↓", "base ↑", "penalty ↓", "MSI ↑", "95 % interval"),
    ]
    best = found.summaries[standing.best]["mask_penalty"]
    assert next(iter(table.columns[4].cells)) == f"{best.mean:.3f} *"
    assert next(iter(table.columns[6].cells)) == f"{best.low:.2f} .. {best.high:.2f}"


FURTHER_TITLE = "Further columns"
OTHER_FILLS = "MSI with other fills, and for a twin"
UNKNOWN = {  # of probes that nobody here has heard of
    "blink": Heading("blink", "Share of blinks", "How often it blinks.", (0.0, 1.0), False),
    "wink": Heading("wink", "Winks", "", higher_is_better=True, group="Of the eye"),
}


def with_further(content: Content) -> tuple[Content, list[str]]:
    """The content with columns of other fills, of a truth, of further metrics and of probes."""
    msi = heading_of("msi")
    headings = {
        "msi_blur": msi.under("fill blur", "blur", OTHER_FILLS),
        "msi_twin": msi.under("twin", "twin", OTHER_FILLS),
        **{name: heading_of(name) for name in ("msi_mean", *LOCALIZATION, *FURTHER)},
        **{name: heading_of(name) for name in ("ceiling", "msi_ceiling", "random_head")},
        **UNKNOWN,
    }
    given = {
        name: Estimate(0.5, 0.4, 0.6, 8, 0, heading.higher_is_better)
        for name, heading in headings.items()
    }
    summaries = {name: {**own, **given} for name, own in content.summaries.items()}
    summaries["bright"]["iou"] = Estimate(NAN, NAN, NAN, 0, 8, True)
    del summaries["coarse"]["wink"]  # a source that this probe leaves out
    found = replace(content, summaries=summaries, headings=headings, class_agnostic=["bright"])
    return found, [*headings]


def test_columns_that_were_asked_for_have_tables_of_80_letters(content: Content) -> None:
    found, names = with_further(content)
    tables = [*further_tables(found)]
    titles = [table.title for table in tables if table.title]
    assert titles == [
        OTHER_FILLS,
        "Compared with the truth",
        FURTHER_TITLE,
        "What a search reaches",
        "With a random output layer",
        "Of the eye",
    ]
    heads = [str(column.header).split("  ")[0].strip() for t in tables for column in t.columns[1:]]
    arrows = {True: " \u2191", False: " \u2193", None: ""}
    known = {name: found.heading(name) for name in names}
    wanted = [f"{one.short}{arrows[one.higher_is_better]}" for one in known.values()]
    assert sorted(heads) == sorted(wanted)
    assert {"MSI blur \u2191", "MSI twin \u2191", "blink \u2193", "wink \u2191"} <= {*heads}
    truth = next(table for table in tables if table.title == "Compared with the truth")
    rows = dict(zip(map(str, truth.columns[0].cells), truth.columns[1].cells, strict=True))
    assert rows == {"bright (a)": "-", "coarse": "0.500"}
    eye = next(table for table in tables if table.title == "Of the eye")
    rows = dict(zip(map(str, eye.columns[0].cells), eye.columns[1].cells, strict=True))
    assert rows == {"bright (a)": "0.500"}, "a method without any of its columns is left out"
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    assert "\u2026" not in capture.get(), "nothing is cut"
    assert [*further_tables(content)] == []


def test_columns_of_an_unknown_probe_are_in_the_report_and_its_files(
    content: Content, tmp_path: Path
) -> None:
    found, _ = with_further(content)
    values = {name: {**own.columns, "blink": own["msi"] + 1} for name, own in found.scores.items()}
    scores = {name: replace(own, columns=values[name]) for name, own in found.scores.items()}
    rows = {
        name: own.assign(blink=values[name]["blink"].numpy()) for name, own in found.rows.items()
    }
    text = write_report(
        tmp_path / "report.html", replace(found, scores=scores, rows=rows)
    ).read_text()
    assert 'data-method="bright" data-column="blink"><span class="mean">0.500<' in text
    assert "Share of blinks" in text
    assert "How often it blinks." in text
    for name in ("methods.csv", "images.csv"):
        address = re.search(rf'download="{name}" href="data:[^,]*,([^"]*)"', text)
        assert address is not None
        table = pandas.read_csv(io.BytesIO(base64.b64decode(address[1])))
        if name == "methods.csv":
            (mean,) = table.query("method == 'coarse' and column == 'blink'")["mean"]
            assert mean == 0.5
        else:
            assert table["blink"].to_numpy() == pytest.approx(table["msi"] + 1, abs=1e-4)
