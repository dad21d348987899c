"""A Python file runs where `python:` stands in model, methods, score or twin, and nowhere else."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shard_files import png
from sufficit.runs.config import RunConfig

RUNS = ("model", "methods", "score", "twin")
LISTS = ("methods", "fills", "checks", "columns", "prompts")


@pytest.fixture
def sprung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that evil.py in the working directory makes when it runs."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sprung"
    (tmp_path / "evil.py").write_text(f"from pathlib import Path\nPath({str(path)!r}).touch()\n")
    for label in ("0", "1"):
        (tmp_path / "digits" / label).mkdir(parents=True)
        (tmp_path / "digits" / label / "a.png").write_bytes(png(int(label)))
    return path


@pytest.mark.parametrize("name", [one.name for one in fields(RunConfig)])
def test_a_line_of_a_config_runs_code_if_it_is_one_of_four(
    sufficit, sprung: Path, name: str
) -> None:
    word = "python:evil.py:f"
    values = {"model": "sufficit:digits", "data": "digits", "methods": ["gradcam"]}
    values |= {name: [word] if name in LISTS else word}
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in values.items()]
    Path("RUN.toml").write_text("".join(lines))
    ran = sufficit("compare", "--config", "RUN.toml", "--out", "out")
    assert ran.code == 2
    assert sprung.exists() == (name in RUNS)


@pytest.mark.parametrize("name", ["python:evil.py:f", "evil.py"])
@pytest.mark.parametrize("kind", ["data", "heatmaps", "truth", "adapter"])
def test_names_inside_files_run_no_code(sufficit, sprung: Path, kind: str, name: str) -> None:
    given = ["--model", "sufficit:digits", "--data", "digits", "--methods", "gradcam"]
    if kind == "data":
        Path("digits", name).mkdir()
        Path("digits", name, "a.png").write_bytes(png(3))
    elif kind == "heatmaps":
        np.savez("maps.npz", **{name: np.ones((4, 4))})
        save_file({name: torch.ones(4, 4)}, "maps.safetensors")
        given[-1] = "gradcam,maps.npz,other=maps.safetensors"
    elif kind == "truth":
        Path("boxes.csv").write_text(f"image,x,y,width,height,category\n{name},0,0,2,2,{name}\n")
        given += ["--truth", "boxes.csv"]
    else:
        Path("lax").mkdir()
        Path("lax/config.json").write_text(json.dumps({"model": name, "layer": name, "net": name}))
        Path("lax/model.safetensors").write_bytes(b"")
        given[-1] = "gradcam,lax"
    sufficit("compare", *given, "--out", "out", "--value-step", "0.5", "--percent-step", "0.5")
    assert not sprung.exists()
