"""Untrusted heatmap files: parsed without running code, and never larger than they are."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save as as_safetensors

from sufficit import UserError
from sufficit.data.heatmap_files import HeatmapError, HeatmapFile, write_heatmaps
from sufficit.errors import unknown
from sufficit.files import safe_name
from untrusted_files import (
    CHANGES,
    CUT,
    FUZZ,
    bent,
    npy,
    npz,
    read_maps,
    reads,
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npy("(4,)"), r"must be \[h,w\], got \[4\]"),
        (npy("(8, 8)"), "could not be read"),
        (npy("(-2, -2)"), "could not be read"),
        (npy("(2, 2)", "|O"), "allow_pickle=False"),
        (npy("(1, 2)", "<c8"), "expected numbers"),
        (npy("(1, 1)", "<U4"), "expected numbers"),
        (npy("(2, 2, )" + " " * 20_000), "could not be read"),
        (npy("(" * 200 + ")" * 200), "could not be read"),
        (b"\x93NUMPY\x09\x00", "version"),
        (b"no array", "could not be read"),
    ],
)
def test_an_array_that_is_no_heatmap_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(HeatmapError, match=words):
        read_maps(npz(tmp_path / "m.npz", content))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f8", "|u1", "<i8", "|b1"])
def test_arrays_of_all_numbers_are_read_as_numpy_reads_them(
    tmp_path: Path, dtype: str, order: str
) -> None:
    values = np.array([[0, 1, 1], [1, 0, 0]]).astype(dtype).copy(order=order)
    np.savez(tmp_path / "m.npz", a=values)
    read = read_maps(tmp_path / "m.npz")["a"]
    assert read.dtype == torch.float32
    assert np.array_equal(read.numpy(), values.astype(np.float32))


def test_values_too_large_for_a_float_are_infinite(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", a=np.array([[1e300, 0]]))
    assert read_maps(tmp_path / "m.npz")["a"].tolist() == [[float("inf"), 0]]


def test_a_header_of_gigabytes_is_refused(tmp_path: Path) -> None:
    for size in (2**33, 2**63, 90):
        path = tmp_path / "m.safetensors"
        path.write_bytes(size.to_bytes(8, "little") + b"{}")
        with pytest.raises(UserError, match="could not be read as heatmaps"):
            HeatmapFile(path)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc", "a/b", "a\\b", "a\0b"])
def test_names_lead_to_no_other_place(name: str) -> None:
    with pytest.raises(UserError, match="can't be the name"):
        safe_name(name)


def test_a_long_name_is_shortened_in_errors() -> None:
    assert str(unknown("fill", "x" * 10**6, ["black"])).startswith(f"Unknown fill '{'x' * 100}'...")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_heatmap_files_with_any_bytes_are_read_or_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    maps = {"a": torch.rand(3, 4), "b": torch.rand(2, 2)}
    if suffix == ".npz":
        write_heatmaps(path, maps)
    else:
        path.write_bytes(as_safetensors(maps))
    whole = path.read_bytes()

    @FUZZ
    @given(CHANGES, CUT)
    def bend(changes: list[tuple[int, int]], cut: int | None) -> None:
        path.write_bytes(bent(whole, changes, cut))
        reads(lambda: read_maps(path))

    bend()


@FUZZ
@given(
    shape=st.recursive(st.integers() | st.text(max_size=3), st.tuples, max_leaves=4),
    dtype=st.sampled_from(["<f4", "|O", "<f8", "V8", "<M8[s]", "f4, f4", "?", ">u2", "junk", ""]),
    content=st.binary(max_size=40),
)
def test_arrays_with_any_header_are_read_or_refused(
    tmp_path: Path, shape: object, dtype: str, content: bytes
) -> None:
    reads(lambda: read_maps(npz(tmp_path / "m.npz", npy(repr(shape), dtype, content))))
