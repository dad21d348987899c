"""Options of a run: flags, RUN.toml and Python say the same; wrong values are refused."""

import math
import re
import tomllib
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sufficit import UserError
from sufficit.cli.compare import OPTIONS
from sufficit.explainers import CAMS
from sufficit.perturbation.fills import FILLS
from sufficit.runs.config import (
    CHECKS,
    DEFAULT_CHECKS,
    METHODS,
    RunConfig,
    Workers,
    check_values,
    config_from,
    read_toml,
    read_workers,
    workers_from,
    write_toml,
)

OTHER = {  # of each option, another value than the default
    "model": "m",
    "data": "d",
    "images": 7,
    "quick": True,
    "methods": ("gradcam", "own=python:a.py:f"),
    "layer": "features.3",
    "normalize": "percentile",
    "truth": "boxes.csv",
    "targets": "label",
    "alpha_min": 0.4,
    "score": "confidence",
    "fills": ("blur", "mean"),
    "twin": "t",
    "checks": ("controls", "fill"),
    "donors": 7,
    "columns": ("msi", "base_score"),
    "calls": 30,
    "within": 0.02,
    "value_step": 0.05,
    "percent_step": 0.1,
    "weights": "none",
    "output": "probabilities",
    "prompts": ("a cat", "a dog"),
    "num_classes": 12,
    "size": "64x32",
    "image_column": "picture",
    "label_column": "kind",
    "on_error": "stop",
    "device": "cpu",
    "precision": "bf16",
    "compile": "on",
    "batch_size": 9,
    "unit_size": 5,
    "save_heatmaps": True,
    "log": "csv",
    "seed": 3,
}


def flags_of(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, ",".join(value) if isinstance(value, tuple) else str(value)]


@pytest.fixture
def config_of_flags(sufficit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The config that `sufficit compare` makes of some words."""
    made: list[RunConfig] = []

    def take(config: RunConfig, **_: object) -> None:
        made.append(config)
        raise UserError("taken")

    monkeypatch.setattr("sufficit.runs.job.make_job", take)

    def parse(*words: str) -> RunConfig:
        run = sufficit("compare", *words, "--out", tmp_path / "out")
        assert "taken" in run.err, run.err
        return made[-1]

    return parse


def test_every_option_is_tried_here_and_most_have_a_flag() -> None:
    names = {field.name for field in fields(RunConfig)}
    assert names == set(OTHER)
    assert set(OPTIONS) < names
    assert {"alpha_min", "fills", "checks", "calls", "within", "truth", "twin"} <= set(OPTIONS)
    assert all(value != getattr(RunConfig, name, None) for name, value in OTHER.items())


def test_flags_toml_and_python_make_the_same_config(config_of_flags, tmp_path: Path) -> None:
    of_python = config_from(OTHER)
    assert asdict(of_python) == OTHER
    write_toml(tmp_path / "RUN.toml", of_python)
    assert config_from(read_toml(tmp_path / "RUN.toml")) == of_python
    assert config_of_flags("--config", str(tmp_path / "RUN.toml")) == of_python
    flagged = {name: value for name, value in OTHER.items() if name in OPTIONS}
    words = [word for name, value in flagged.items() for word in flags_of(name, value)]
    assert config_of_flags(*words) == config_from(flagged)


def test_flags_override_a_run_file(config_of_flags, tmp_path: Path) -> None:
    write_toml(tmp_path / "RUN.toml", config_from(OTHER))
    given = ("--alpha-min", "search", "--checks", "all", "-m", "center", "--columns", "msi")
    found = config_of_flags("--config", str(tmp_path / "RUN.toml"), *given)
    changed = {"alpha_min": "search", "checks": ("all",), "methods": ("center",)}
    assert asdict(found) == OTHER | changed | {"columns": ("msi",)}


def test_the_default_methods_are_the_cams() -> None:
    assert METHODS == CAMS


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("default", {"controls", "fill", "leak", "alpha-curve"}),
        ("all", {"controls", "fill", "leak", "alpha-curve", "head", "ceiling"}),
        ("none", set()),
        ("head,leak", {"head", "leak"}),
        ("default,ceiling", {"controls", "fill", "leak", "alpha-curve", "ceiling"}),
    ],
)
def test_checks_are_words_and_groups_of_them(words: str, wanted: set[str]) -> None:
    found = config_from({"model": "m", "data": "d", "checks": words})
    assert found.wanted_checks >= wanted
    assert found.wanted_checks <= {*CHECKS}
    if words not in ("all", "default"):
        assert found.wanted_checks - set(DEFAULT_CHECKS) == wanted - set(DEFAULT_CHECKS)


def test_a_text_is_a_list_with_commas(tmp_path: Path) -> None:
    (tmp_path / "RUN.toml").write_text('checks = "leak,head"\nmethods = "gradcam"')
    assert read_toml(tmp_path / "RUN.toml") == {"checks": ("leak", "head"), "methods": ("gradcam",)}


def test_an_unknown_check_is_refused() -> None:
    with pytest.raises(UserError, match="Unknown check 'leaks'. Did you mean 'leak'"):
        config_from({"model": "m", "data": "d", "checks": "leaks"})
    with pytest.raises(UserError, match="fills must name at least one fill"):
        config_from({"model": "m", "data": "d", "fills": []})


def test_what_a_run_needs_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"no model given: pass --model or set it in --config"):
        config_from({"data": "d"})
    with pytest.raises(UserError, match="no data given"):
        config_from({"model": "m"})


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("alpha_mim = 0.5", "Unknown option in RUN.toml 'alpha_mim'. Did you mean 'alpha_min'?"),
        ('alpha_min = "serch"', "alpha_min must be a number or search, got 'serch'"),
        ("seed = true", "seed must be a whole number, got True"),
        ("seed = -1", "seed must be 0 or more, got -1"),
        ("seed = 9223372036854775808", "seed must be 9223372036854775807 or less"),
        ("donors = 0", "donors must be 1 or more, got 0"),
        ("donors = 1_000_000_000", "donors must be 1000000 or less"),
        ("methods = 1", "methods must be a list of words"),
        ("methods = [1]", "methods must be a list of words"),
        ('score = "acuracy"', "Unknown score 'acuracy'. Did you mean 'accuracy'?"),
        ("save_heatmaps = 1", "save_heatmaps must be true or false, got 1"),
        ("size = 224", "size must be text, got 224"),
        ("seed = ", "is not valid TOML"),
    ],
)
def test_wrong_values_in_a_run_file_are_one_error(tmp_path: Path, line: str, error: str) -> None:
    (tmp_path / "RUN.toml").write_text(line + "\n")
    with pytest.raises(UserError) as raised:
        read_toml(tmp_path / "RUN.toml")
    assert error in str(raised.value)


def test_a_run_file_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UserError, match=r"cannot read .*: give a RUN\.toml"):
            read_toml(path)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(data=text, layer=st.none() | text, methods=st.lists(text, max_size=3), seed=st.integers(0))
def test_any_text_is_read_back_from_a_run_file(
    tmp_path_factory: pytest.TempPathFactory, data: str, layer: str, methods: list[str], seed: int
) -> None:
    values = {"data": data, "layer": layer, "methods": methods, "seed": seed % 2**63}
    config = config_from({"model": 'C:\\a\\"b"\n\t\x00\x1f\x7f é 猫 🐈', **values})
    path = tmp_path_factory.mktemp("toml") / "RUN.toml"
    write_toml(path, config)
    assert config_from(read_toml(path)) == config
    assert tomllib.loads(path.read_text())["data"] == data


def test_a_path_that_is_not_utf8_can_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not valid UTF-8 .*: rename it"):
        write_toml(tmp_path / "RUN.toml", RunConfig(model="m", data="\udcff"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "kind"), [(math.nan, float), (2**70, int), (["a"] * 10**5, list), ({}, dict)]
)
def test_odd_values_are_refused_in_short_words(value: Any, kind: type) -> None:
    with pytest.raises(UserError) as raised:
        check_values({"score": value})
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"count": 0}, "workers must be 1 or more, got 0"),
        ({"count": 1.5}, "workers must be 1 or more, got 1.5"),
        ({"gpus": -1.0}, "gpus must be 0 or more"),
        ({"gpus": "many"}, "gpus must be a number, got 'many'"),
        ({"cpus": 0.0}, "cpus must be more than 0"),
        ({"unit_timeout": math.inf}, "unit_timeout must be more than 0"),
        ({"address": "10.0.0.1"}, "workers must be a number, auto, HOST:PORT"),
        ({"address": 7}, "workers must be a number, auto, HOST:PORT"),
    ],
)
def test_wrong_workers_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        Workers(**options)


def test_workers_are_those_of_the_table_and_of_the_flag_which_overrides_it(tmp_path: Path) -> None:
    path = tmp_path / "RUN.toml"
    path.write_text('model = "m"\ndata = "d"\n[workers]\ncount = 8\ngpus = 0.5\ncpus = 2\n')
    assert config_from(read_toml(path)) == config_from({"model": "m", "data": "d"})
    table = read_workers(path)
    assert workers_from(table) == Workers(count=8, gpus=0.5, cpus=2)
    found = workers_from(table | {"workers": "ray://head:10001", "unit_timeout": 60.0})
    assert found == Workers(8, "ray://head:10001", gpus=0.5, cpus=2, unit_timeout=60.0)
    assert workers_from(table | {"workers": "2"}) == Workers(count=2, gpus=0.5, cpus=2)
    assert workers_from({"gpus": 1}) is None, "without a number or a cluster nobody is started"
    path.write_text("workers = 3\n")
    with pytest.raises(UserError, match=r"must be a table, \[workers\], got 3"):
        read_workers(path)
    path.write_text("[workers]\ngpu = 1\n")
    with pytest.raises(UserError, match="Did you mean 'gpus'"):
        read_workers(path)


@pytest.mark.parametrize(
    "line",
    [
        'data = "s3://KEY:PASS@birds/x"',
        'methods = ["gradcam", "a=s3://birds/m.npz?Signature=PASS"]',
    ],
)
def test_credentials_in_a_toml_are_refused_and_not_repeated(tmp_path: Path, line: str) -> None:
    (tmp_path / "RUN.toml").write_text(line)
    with pytest.raises(UserError, match="set them in the environment") as raised:
        read_toml(tmp_path / "RUN.toml")
    assert "PASS" not in str(raised.value)


def test_the_help_of_fills_names_every_fill() -> None:
    text = RunConfig.__dataclass_fields__["fills"].metadata["help"]
    assert [fill for fill in FILLS if not re.search(rf"\b{fill}\b", text)] == []
