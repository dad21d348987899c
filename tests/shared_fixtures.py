"""Set-up and fixtures that all tests share; conftest.py loads them where tests run."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import lightning.fabric  # noqa: F401  # its log keeps the stderr it is imported under: the real one
import pytest
import torch

from digit_images import write_digits
from small_runs import write_photos
from sufficit import Classifier, Lax
from sufficit.cli import main
from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.images import list_images
from sufficit.files import writing

if TYPE_CHECKING:
    from object_server import ObjectServer

# Figures are full of cycles: collected as often as usual, they take a tenth of the time.
gc.set_threshold(20_000, 20, 20)
# The tests' models are so small that two threads mostly wait for each other.
torch.set_num_threads(1)
# A GPU's convolutions round to TF32 unless told otherwise, DataParallel's too.
torch.backends.cudnn.allow_tf32 = False
# Ray reads this when it is imported, by whichever test: what runs start here is on the loopback.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


class Run:
    """What a command printed and how it ended; `words` and `err` without their line breaks."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out = code, out
        self.words, self.err = " ".join(out.split()), " ".join(err.split())


def overriding(words: list[str]) -> list[str]:
    """The words without options that a later one gives another value: tests change the usual."""
    found: list[str] = []
    for k, word in enumerate(words):
        valued = word.startswith("--") and k + 1 < len(words) and words[k + 1][:2] != "--"
        again = word in words[k + 1 :] and word not in ("--example", "--allow-host")
        changed = k > 0 and found[-1:] == ["DROPPED"]
        if changed:
            found.pop()
        elif valued and again:
            found.append("DROPPED")
        else:
            found.append(word)
    return found


@pytest.fixture(autouse=True)
def no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test opens a window."""
    monkeypatch.setattr("webbrowser.get", lambda *_: pytest.fail("a test wants a browser"))


@pytest.fixture
def sufficit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*words: object, literally: bool = False) -> Run:
        given = [*map(str, words)]
        monkeypatch.setattr(sys, "argv", ["sufficit", *(given if literally else overriding(given))])
        monkeypatch.setattr("warnings.showwarning", None)
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Run(int(ended.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons of the command line leave an empty report: pictures take most of their time."""

    def write_nothing(_: object, folder: Path) -> None:
        with writing(folder / "report.html") as path:
            path.touch()

    monkeypatch.setattr("sufficit.cli.compare.write_pictures", write_nothing)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eleven small images in class folders, and a model that knows the classes."""
    return write_photos(tmp_path)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """The folder of a small adapter with random weights."""
    Lax(4, widths=(4, 2)).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a saved classifier."""
    return Classifier.load("sufficit:digits").save(tmp_path / "saved")


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Six digits in class folders, and maps.npz with heatmaps of 16 x 16 for them."""
    folder = write_digits(tmp_path / "digits", 6)
    names = [image.name for image in list_images(folder)]
    maps = torch.rand(6, 16, 16, generator=torch.Generator().manual_seed(0))
    write_heatmaps(tmp_path / "maps.npz", dict(zip(names, maps, strict=True)))
    return folder


@pytest.fixture(scope="session")
def object_server() -> "Iterator[ObjectServer]":
    """An S3 server on the loopback."""
    from object_server import ObjectServer

    server = ObjectServer()
    yield server
    server.stop()


@pytest.fixture
def bucket(object_server: "ObjectServer", monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket as s3://NAME, with the environment to reach it."""
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    object_server.start()
    object_server.faults.clear()
    object_server.requests.clear()
    name = f"bucket-{uuid4().hex[:12]}"
    object_server.client().create_bucket(Bucket=name)
    return f"s3://{name}"


@pytest.fixture(scope="session")
def machines() -> Iterator[Any]:
    """Ray with a head and a second node, one CPU each."""
    ray = pytest.importorskip("ray")
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 10**8}
    found = Cluster(initialize_head=True, head_node_args=head)
    found.second = found.add_node(num_cpus=1, object_store_memory=10**8)
    ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
    yield found
    ray.shutdown()
    found.shutdown()
