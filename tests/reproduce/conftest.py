"""One table in a very small size for all tests of a process."""

from pathlib import Path

import pytest
import torch

from small_table import small_table
from sufficit.reproduce.table_results import TableResults


@pytest.fixture(scope="session")
def ticks() -> list[float]:
    """The progress steps of `table`, once that is made."""
    return []


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory, ticks: list[float]) -> Path:
    """The folder of a run that was not interrupted; tests only read it."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("table") / "run"
    small_table(out, progress=lambda done, total: ticks.append(done))
    return out


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables without figures and report, which take half the time of one and hold no number."""
    monkeypatch.setattr("sufficit.plots.save", lambda *_, **__: None)
    monkeypatch.setattr(TableResults, "_report", lambda *_: None)
