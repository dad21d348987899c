"""Files of other people, as broken or hostile as they come, for tests."""

import contextlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from sufficit import UserError
from sufficit.data.heatmap_files import HeatmapFile

FUZZ = settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
DEEP = 100_000
DEEP_JSON = "[" * DEEP + "]" * DEEP
HUGE = "9" * 5000


def npy(shape: str, dtype: str = "<f4", content: bytes = b"\0" * 16) -> bytes:
    """An array whose header says what it likes."""
    words = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(words).to_bytes(2, "little") + words + content


def npz(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", content)
    return path


def read_maps(path: Path) -> dict[str, torch.Tensor]:
    with HeatmapFile(path) as maps:
        return {key: maps.read(key) for key in maps.keys}  # a list it has


def described(saved: Path, **changes: object) -> None:
    path = saved / "classifier.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def resnet(**options: object) -> dict[str, object]:
    return {"source": "torchvision:resnet18", "options": options}


def bent(content: bytes, changes: list[tuple[int, int]], cut: int | None) -> bytes:
    """Some bytes changed, and the end cut off."""
    found = bytearray(content)
    for place, value in changes:
        found[place % len(found)] = value
    return bytes(found if cut is None else found[: cut % len(found)])


CHANGES = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=6)
CUT = st.none() | st.integers(0, 2**16)


def reads(read: Callable[[], object]) -> None:
    """It is read or a UserError; nothing else may come out."""
    with contextlib.suppress(UserError):
        read()


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
