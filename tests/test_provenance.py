"""Where numbers come from, and JSON that any reader takes."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch

from sufficit import provenance as module
from sufficit.files import place
from sufficit.provenance import command_line, provenance, resume_command, save_json


def test_json_has_null_for_nan_and_names_in_any_script(tmp_path: Path) -> None:
    save_json(tmp_path / "a.json", {"x": float("nan"), "名": [1.5, float("inf")]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None, "名": [1.5, None]}


def test_provenance_says_what_ran_where() -> None:
    run = provenance({"seed": 1}, torch.device("cpu"), torch.float32)
    assert run["config"] == {"seed": 1}
    assert run["versions"]["torch"] == torch.__version__.split("+")[0]
    assert run["device"]["type"] == "cpu"
    assert run["device"]["dtype"] == "torch.float32"


def test_a_copy_without_history_takes_its_commit_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "provenance.py"))
    module._commit.cache_clear()
    monkeypatch.setenv("SUFFICIT_COMMIT", "1c5a3f6")
    assert provenance({}, torch.device("cpu"), torch.float32)["commit"] == "1c5a3f6"
    module._commit.cache_clear()
    monkeypatch.delenv("SUFFICIT_COMMIT")
    assert provenance({}, torch.device("cpu"), torch.float32)["commit"] is None
    module._commit.cache_clear()


def test_the_command_is_recorded_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/bin/sufficit", "compare", "--data", "s3://KEY:a/PASS+@birds/x", "--seed", "1"]
    monkeypatch.setattr(sys, "argv", words)
    run = provenance({}, torch.device("cpu"), torch.float32)
    assert run["command"] == "sufficit compare --data 's3://***@birds/x' --seed 1"
    assert resume_command() == f"cd {shlex.quote(str(Path.cwd()))} && {run['command']}"
    words = ["sufficit", "explain", "https://a.b/c?sig=KEY&x=1", "--overwrite", "--out", "o p"]
    monkeypatch.setattr(sys, "argv", words)
    assert shlex.split(command_line()) == [*words[:2], "https://a.b/c?sig=***&x=1", *words[3:]]
    ending = " && sufficit explain 'https://a.b/c?sig=***&x=1' --out 'o p'"
    assert str(resume_command()).endswith(ending)
    monkeypatch.setattr(sys, "argv", ["my_training.py"])
    assert resume_command() is None


def test_remote_paths_are_text_in_json(tmp_path: Path) -> None:
    save_json(tmp_path / "a.json", {"local": Path("a/b"), "remote": place("memory://a/b")})
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "local": "a/b",
        "remote": "memory://a/b",
    }
