"""The plan of a table: defaults, checks, and what a resumed run accepts."""

import json
from pathlib import Path

import pytest

from sufficit.errors import UserError
from sufficit.reproduce.paper_tables import TITLES
from sufficit.reproduce.table_plan import (
    PLAN,
    TablePlan,
    check_same,
    clear,
    keep_plan,
    make_plan,
    plan_for,
    read_plan,
)

DATA = {"source": "CIFAR-10", "digest": "0123"}


def plan_of(table: str, *, quick: bool = False, cuda: bool = False, **asked: object) -> TablePlan:
    return make_plan(table, asked, quick=quick, cuda=cuda)


def test_a_quick_run_is_small_and_a_full_one_is_the_papers() -> None:
    quick = plan_of("synthetic-mnist", quick=True)
    assert (quick.model, quick.weights, quick.side) == ("small-net", "default", 64)
    assert plan_of("cifar10", quick=True).weights == "none"
    full = plan_of("cifar10-vit", cuda=True)
    assert (full.model, full.weights, full.side) == ("vit-b-16", "default", 224)
    assert (full.precision, full.batch_size, full.seeds, full.images) == ("bf16", 512, 3, 2000)
    assert plan_of("cifar10", cuda=True).batch_size == 2048
    assert plan_of("cifar10", quick=True, model="deit-tiny").side == 224


def test_a_table_has_the_papers_cams_adapters_and_controls() -> None:
    plan = plan_of("cifar10", seeds=2, recipes=("paper",))
    cams = ["gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam"]
    assert plan.methods == [*cams, "lax-paper-0", "lax-paper-1", "random", "center"]
    assert plan_of("cifar10-vit", seeds=0).methods == [*cams, "rollout", "random", "center"]
    assert plan_of("cifar10").recipes == ("paper", "robust")
    crisp = plan_of("cifar10", seeds=1, recipes=("crisp",))
    assert crisp.methods == [*cams, "lax-crisp-0", "random", "center"]
    assert {*crisp.methods} - {*TITLES} == {"lax-crisp-0"}  # its row is that of all seeds
    assert "lax-crisp" in TITLES
    assert crisp.recipe("crisp").contrast == 4


def test_the_papers_recipe_has_the_values_of_the_table() -> None:
    names = ("synthetic-mnist", "cub200", "cifar10", "cifar10-vit")
    found = [plan_of(name).recipe("paper") for name in names]
    assert [recipe.entropy for recipe in found] == [5, 5, 2, 2]
    assert [recipe.upsample for recipe in found] == [1, 1, 2, 1]
    assert [recipe.lr for recipe in found] == [1e-3, 1e-4, 1e-3, 1e-3]
    assert plan_of("cub200").recipe("robust").lr == 1e-3
    assert plan_of("cub200", lax_epochs=7).recipe("robust").epochs == 7


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"recipes": ("papre",)}, "Unknown recipe 'papre'. Did you mean 'paper'"),
        ({"precision": "fp64"}, "Unknown precision 'fp64'"),
        ({"model": "resnet19"}, "Unknown model 'resnet19'. Did you mean 'resnet18'"),
        ({"classes": ("crow",)}, "--classes is for cub200"),
        ({"images": 1}, "images must be a whole number, 2 or more"),
        ({"seeds": 1001}, "seeds must be a whole number, 0 or more, at most 1000, got 1001"),
        ({"step": 0.0}, "a step must lie in 0..1"),
        ({"step": 0.6}, "a step must lie in 0..1, at least 0.0001, got 1.2"),
        ({"weights": "w.pt"}, "no weights file at w.pt"),
    ],
)
def test_impossible_options_are_refused(asked: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan_of("cifar10", **asked)


def test_a_single_class_is_refused_before_training() -> None:
    with pytest.raises(UserError, match="--classes has 'crow' alone: name two classes or more"):
        plan_of("cub200", classes=("crow",))


def start(out: Path) -> TablePlan:
    """A folder in which the first stage is done."""
    plan = plan_of("cifar10", quick=True, images=10)
    keep_plan(out, plan, DATA)
    (out / "classifier").mkdir()
    return plan


def test_a_started_folder_resumes_with_its_own_options_on_any_device(tmp_path: Path) -> None:
    plan = start(tmp_path)
    assert read_plan(tmp_path) == plan
    assert plan_for(tmp_path, "cifar10", {"images": None}, quick=True, cuda=True) == plan


@pytest.mark.parametrize(
    ("table", "asked", "quick", "words"),
    [
        ("cifar10", {}, False, "`quick` was True, now False"),
        ("cifar10", {"images": 11}, True, "`images` was 10, now 11"),
        ("cub200", {}, True, "`table` was 'cifar10', now 'cub200'"),
    ],
)
def test_a_started_folder_refuses_other_options(
    tmp_path: Path, table: str, asked: dict[str, object], quick: bool, words: str
) -> None:
    start(tmp_path)
    with pytest.raises(UserError, match=f"Cannot resume .*{words}.*--overwrite"):
        plan_for(tmp_path, table, asked, quick=quick, cuda=False)


def test_other_data_or_recipes_are_refused(tmp_path: Path) -> None:
    plan = start(tmp_path)
    keep_plan(tmp_path, plan, DATA)
    check_same(tmp_path, "recipes", plan.recipe_values)
    with pytest.raises(UserError, match="`source of the data` was 'CIFAR-10', now 'MNIST'"):
        keep_plan(tmp_path, plan, DATA | {"source": "MNIST"})
    with pytest.raises(UserError, match=r"`robust.donors of the recipes` was 2\.0, now 0\.6"):
        check_same(tmp_path, "recipes", plan.recipe_values | {"robust.donors": 0.6})


def test_a_plan_without_any_stage_is_replaced(tmp_path: Path) -> None:
    keep_plan(tmp_path, plan_of("cifar10", images=9), DATA)
    plan = plan_for(tmp_path, "cifar10", {"images": 10}, quick=True, cuda=False)
    assert plan.images == 10


def test_a_folder_with_files_of_others_is_refused_and_never_cleared(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    with pytest.raises(UserError, match=r"has results, but no reproduce.json of an earlier run"):
        plan_for(tmp_path, "cifar10", {}, quick=True, cuda=False)
    clear(tmp_path)
    assert (tmp_path / "results").exists()


def test_clearing_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    start(tmp_path)
    (tmp_path / "notes.txt").write_text("my own")
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "change",
    [
        {"images": "many"},
        {"classes": 3},
        {"step": None},
        {"model": "/etc/passwd"},
        {"more": 1},
        {"recipes": ["../../elsewhere"]},
        {"seeds": 10**12},
        {"seed": -1},
        {"side": "wide"},
        {"table": ["a"]},
    ],
)
def test_a_corrupt_plan_is_one_error(tmp_path: Path, change: dict[str, object]) -> None:
    start(tmp_path)
    stored = json.loads((tmp_path / PLAN).read_text())
    (tmp_path / PLAN).write_text(json.dumps({**stored, "plan": stored["plan"] | change}))
    with pytest.raises(UserError, match=r"cannot read .*reproduce.json"):
        read_plan(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"plan": 3}'])
def test_a_file_that_is_no_plan_is_one_error(tmp_path: Path, content: str) -> None:
    (tmp_path / PLAN).write_text(content)
    with pytest.raises(UserError, match=r"reproduce\.json"):
        read_plan(tmp_path)
