"""The tools and benchmarks are scripts; all of them import what exists."""

import importlib
import importlib.util
import sys
from pathlib import Path

import hypothesis  # noqa: F401  # its modules import each other, not where sys.modules is a copy
import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted([*(ROOT / "tools").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_imports_cleanly(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))  # what it imports is forgotten
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    assert module.__doc__


def test_an_attack_with_random_inputs_finds_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    attack = importlib.import_module("attack")
    tried = attack.Attack(7, tmp_path)
    counts = attack.fuzz(tried, inputs=600, minutes=5)
    assert tried.broken == []
    assert counts["read"] + counts["refused"] == 600
    assert min(counts.values()) > 20, "every kind was tried"
