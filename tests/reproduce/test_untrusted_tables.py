"""Untrusted plans and numbers of a reproduction: one clear error."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save as as_safetensors
from sufficit.reproduce.outcome import read_outcome
from sufficit.reproduce.plans import make_plan, read_plan
from sufficit.reproduce.scoring import write_the_test_folder

from sufficit import UserError
from sufficit.data.splits import Split
from sufficit.provenance import save_json


@pytest.mark.parametrize(
    "changes",
    [
        {"recipes": ["../../elsewhere"]},
        {"seeds": 10**12},
        {"seeds": "many"},
        {"side": "wide"},
        {"model": "/etc/passwd"},
        {"table": ["a"]},
        {"seed": -1},
        {"step": None},
    ],
)
def test_an_untrusted_plan_is_one_line(tmp_path: Path, changes: dict[str, object]) -> None:
    plan = vars(make_plan("synthetic-mnist", {}, quick=True, cuda=False))
    save_json(_made(tmp_path / "numbers") / "plan.json", plan | changes)
    with pytest.raises(UserError, match=r"plan\.json can't be read"):
        read_plan(tmp_path)
    save_json(tmp_path / "numbers" / "plan.json", plan)
    assert vars(read_plan(tmp_path)) == plan


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


FACTS = {"names": ["a"], "targets": [0], "methods": ["gradcam"], "classifier": {}}


@pytest.mark.parametrize(
    ("tensors", "facts"),
    [
        ({"clean": torch.ones(1)}, {}),
        ({"clean": torch.ones(1)}, FACTS | {"methods": 3}),
        ({"clean": torch.ones(1), "other/msi": torch.ones(1)}, FACTS),
        ({"clean": torch.ones(1), "gradcam/msi": torch.ones(2)}, FACTS),
        ({}, FACTS),
    ],
)
def test_untrusted_numbers_are_one_line(
    tmp_path: Path, tensors: dict[str, torch.Tensor], facts: dict[str, object]
) -> None:
    numbers = _made(tmp_path / "numbers")
    save_json(numbers / "plan.json", vars(make_plan("synthetic-mnist", {}, quick=True, cuda=False)))
    content = as_safetensors(tensors, metadata={"facts": json.dumps(facts)})
    (numbers / "scores.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="numbers is damaged"):
        read_outcome(tmp_path)


def test_a_class_of_a_data_set_makes_no_folder_elsewhere(tmp_path: Path) -> None:
    split = Split(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]), 8)
    work = SimpleNamespace(
        out=tmp_path / "out",
        sets=SimpleNamespace(test=split, classes=("a", "../../../escaped")),
        plan=SimpleNamespace(images=4, seed=0, side=8),
        clock=lambda stage: contextlib.nullcontext(),
    )
    with pytest.raises(UserError, match=r"'../../../escaped' can't be the name"):
        write_the_test_folder(work)
    assert not list(tmp_path.rglob("escaped"))
