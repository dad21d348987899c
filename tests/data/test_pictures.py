"""Images as Pillow reads them, and files that claim more than they hold."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as V

import bombs
from sufficit import UserError, View
from sufficit.data.image_files import expand
from sufficit.data.pictures import BadImageError, LargeImageError, read_picture, seen
from sufficit.training.trainer import read_checkpoint
from untrusted_files import FUZZ


def picture(content: bytes) -> Image.Image:
    return read_picture(io.BytesIO(content), View())


@pytest.mark.slow
@FUZZ
@given(
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.none() | st.integers(1, 50),
    st.booleans(),
    st.sampled_from(["nearest", "nearest-exact", "bilinear", "bicubic", "box", "lanczos"]),
)
def test_the_crop_is_torchvisions(
    size: tuple[int, int], crop: tuple[int, int], resize: int | None, stretch: bool, how: str
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    found = seen(Image.fromarray(pixels), View(crop, resize, stretch=stretch, interpolation=how))
    wanted = Image.fromarray(pixels)
    if size != crop:
        (h, w), (height, width) = size, crop
        sides = list(crop)
        if not stretch and resize is None:
            scale = max(height / h, width / w)
            sides = [max(height, round(h * scale)), max(width, round(w * scale))]
        elif not stretch:
            longer = int(resize * max(h, w) / min(h, w))
            sides = [resize, longer] if h <= w else [longer, resize]
        wanted = V.resize(wanted, sides, interpolation=InterpolationMode(how))
        wanted = V.center_crop(wanted, list(crop))
    assert np.array_equal(np.asarray(found), np.asarray(wanted))


def test_an_image_of_too_many_pixels_is_refused() -> None:
    with pytest.raises(LargeImageError, match="exceeds limit"):
        picture(bombs.big_picture())


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("most", [65535, 1023])
def test_16_bit_pgm_is_scaled_to_8_bit(plain: bool, most: int) -> None:
    values = [0, most // 2, most]
    raw = " ".join(map(str, values)).encode() if plain else np.array(values, ">u2").tobytes()
    found = picture(b"P%d 3 1 %d\n" % (2 if plain else 5, most) + raw)
    assert np.asarray(found)[0, :, 0].tolist() == [round(v / most * 255) for v in values]


def test_a_png_with_a_wrong_checksum_is_corrupt() -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "png", pnginfo=None)
    content = bytearray(file.getvalue())
    assert picture(bytes(content)).size == (8, 8)
    place = content.index(b"IDAT") + 4 + int.from_bytes(content[content.index(b"IDAT") - 4 :][:4])
    content[place] ^= 1
    with pytest.raises(BadImageError, match="wrong checksum of IDAT"):
        picture(bytes(content))


def test_a_checkpoint_of_very_many_epochs_is_refused(tmp_path: Path) -> None:
    bombs.late_epoch(tmp_path / "checkpoint.pt", 10**12)
    with pytest.raises(UserError, match="0 rows for 1000000000000 epochs"):
        read_checkpoint(tmp_path, {})


def test_a_compressed_checkpoint_is_refused(tmp_path: Path) -> None:
    """torch.save never compresses; a reader would make room for all that is announced."""
    torch.save({"a": torch.zeros(2**20)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole:
        members = {one.filename: whole.read(one) for one in whole.infolist()}
    bombs.packed(tmp_path / "checkpoint.pt", members, zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="holds more bytes than the file has"):
        read_checkpoint(tmp_path, {})


def test_an_old_checkpoint_has_the_bytes_that_it_announces(tmp_path: Path) -> None:
    """Before torch 1.6 files were no zip archives: a number says how many values follow."""
    path = tmp_path / "checkpoint.pt"
    torch.save({"a": torch.zeros(70_000)}, path, _use_new_zipfile_serialization=False)
    few, many = (b"J" + number.to_bytes(4, "little") for number in (70_000, 2**31 - 1))
    path.write_bytes(path.read_bytes().replace(few, many))
    with pytest.raises(UserError, match="wrong byte size"):
        read_checkpoint(tmp_path, {})


@pytest.mark.parametrize("pattern", ["x{0..20000000}.tar", "{0..999}{0..999}.tar"])
def test_patterns_name_a_limited_number_of_files(pattern: str) -> None:
    with pytest.raises(UserError, match="names more than 100000 files"):
        expand(pattern)


def test_a_pattern_without_end_is_a_name() -> None:
    assert expand("{" + "9" * 5000 + "..9}") == ["{" + "9" * 5000 + "..9}"]
