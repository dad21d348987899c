"""Set-up that all tests share."""

import sys

import lightning.fabric  # noqa: F401  # its log keeps the stderr it is imported under: the real one
import pytest
import torch

from sufficit.cli import main

# The tests' models are so small that two threads mostly wait for each other.
torch.set_num_threads(1)
# A GPU's convolutions round to TF32 unless told otherwise, DataParallel's too.
torch.backends.cudnn.allow_tf32 = False


class Run:
    """What a command printed and how it ended; `words` and `err` without their line breaks."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out = code, out
        self.words, self.err = " ".join(out.split()), " ".join(err.split())


@pytest.fixture(autouse=True)
def no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test opens a window."""
    monkeypatch.setattr("webbrowser.get", lambda *_: pytest.fail("a test wants a browser"))


@pytest.fixture
def sufficit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*words: object) -> Run:
        monkeypatch.setattr(sys, "argv", ["sufficit", *map(str, words)])
        monkeypatch.setattr("warnings.showwarning", None)
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Run(int(ended.value.code or 0), printed.out, printed.err)

    return run
