"""Folders of pictures and files of heatmaps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from sufficit import UserError, View
from sufficit.data.digits import synthetic_digits
from sufficit.data.heatmap_files import HeatmapFile, write_heatmaps
from sufficit.data.images import (
    BadImageError,
    list_images,
    read_image,
)


def paint(path: Path, size: tuple[int, int] = (8, 6), mode: str = "RGB") -> Path:
    """A picture of (width, height) whose red grows to the right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    w, h = size
    values = np.zeros((h, w, 3), dtype=np.uint8)
    values[..., 0] = np.linspace(0, 255, w, dtype=np.uint8)
    Image.fromarray(values).convert(mode).save(path)
    return path


def test_pictures_are_found_in_order_with_their_class_folders(tmp_path: Path) -> None:
    for name in ("b/2.png", "a/1.PNG", "a/deep/3.jpg"):
        paint(tmp_path / name)
    (tmp_path / "a" / "notes.txt").write_text("no picture")
    found = [(p.name, p.folder) for p in list_images(tmp_path)]
    assert found == [("a/1.PNG", "a"), ("a/deep/3.jpg", "a"), ("b/2.png", "b")]


def test_a_folder_without_pictures_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no images in .*expected files ending in .*\.png"):
        list_images(tmp_path)
    with pytest.raises(UserError, match="no folder of images"):
        list_images(tmp_path / "absent")


def test_a_picture_of_the_right_size_is_read_to_the_bit(tmp_path: Path) -> None:
    path = paint(tmp_path / "a.png", (8, 6))
    image = read_image(path, View((6, 8)))
    expected = torch.from_numpy(np.asarray(Image.open(path)).transpose(2, 0, 1).copy())
    assert torch.equal((image * 255).round().to(torch.uint8), expected)
    assert torch.allclose(image * 255, expected.float(), atol=1e-4)


def test_a_picture_is_scaled_and_cropped_in_the_middle(tmp_path: Path) -> None:
    path = paint(tmp_path / "a.png", (40, 20))
    image = read_image(path, View((10, 10), resize=20))
    assert image.shape == (3, 10, 10)
    # Columns 15..24 of 40 remain, and red grows linearly from 0 to 1 over the 40.
    assert image[0, 5, 0].item() == pytest.approx(15 / 39, abs=0.01)
    assert image[0, 5, 9].item() == pytest.approx(24 / 39, abs=0.01)
    covered = read_image(path, View((10, 10)))
    assert covered[0, 5].mean().item() == pytest.approx(0.5, abs=0.02)
    assert covered[0, 5, 9] - covered[0, 5, 0] > image[0, 5, 9] - image[0, 5, 0]


def test_grey_models_read_one_channel(tmp_path: Path) -> None:
    assert read_image(paint(tmp_path / "a.png"), View((6, 8), channels=1)).shape == (1, 6, 8)


def test_pictures_in_other_modes_become_colour(tmp_path: Path) -> None:
    for mode in ("L", "P", "1"):
        image = read_image(paint(tmp_path / f"{mode}.png", mode=mode), None)
        assert image.shape == (3, 6, 8)
        assert 0 <= image.min() <= image.max() <= 1
    rotated = Image.open(paint(tmp_path / "r.jpg"))
    exif = rotated.getexif()
    exif[0x0112] = 6
    rotated.save(tmp_path / "r.jpg", exif=exif)
    assert read_image(tmp_path / "r.jpg", None).shape == (3, 8, 6)


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "empty"), (b"not an image", "not a readable image")]
)
def test_broken_pictures_say_why(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(BadImageError, match=reason):
        read_image(path, None)


def test_a_truncated_picture_says_so(tmp_path: Path) -> None:
    path = paint(tmp_path / "a.png", (300, 300))
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(BadImageError, match="not a readable image"):
        read_image(path, None)


def test_deep_pixels_are_scaled_or_refused(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    image = read_image(tmp_path / "deep.png", None)
    assert image[0].numpy() == pytest.approx(ramp / 65535, abs=0.003)
    Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)).save(
        tmp_path / "float.tiff"
    )
    with pytest.raises(BadImageError, match="mode F have no known range"):
        read_image(tmp_path / "float.tiff", None)


def test_a_sliver_is_not_blown_up(tmp_path: Path) -> None:
    Image.new("RGB", (300_000, 2)).save(tmp_path / "sliver.png")
    with pytest.raises(BadImageError, match="too large"):
        read_image(tmp_path / "sliver.png", View((224, 224), 256))


def test_an_enormous_picture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = paint(tmp_path / "a.png", (100, 100))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 6000)
    with pytest.raises(BadImageError, match="too large"):
        read_image(path, None)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_heatmaps_are_found_by_path_name_or_stem(tmp_path: Path, suffix: str) -> None:
    maps = {"cat/1.png": torch.full((2, 3), 0.1), "2.png": torch.ones(2, 2), "3": torch.zeros(1, 1)}
    path = tmp_path / f"maps{suffix}"
    if suffix == ".npz":
        write_heatmaps(path, maps)
    else:
        save_file(maps, path)
    with HeatmapFile(path) as file:
        names = ["cat/1.png", "dog/2.png", "dog/3.jpg", "dog/4.png"]
        found = {name: file.key(name) for name in [*names, *names]}
        read = file.read("cat/1.png")
    assert found == {
        "cat/1.png": "cat/1.png",
        "dog/2.png": "2.png",
        "dog/3.jpg": "3",
        "dog/4.png": None,
    }
    assert torch.equal(read, maps["cat/1.png"])


def test_an_exact_key_is_never_ambiguous(tmp_path: Path) -> None:
    names = ["cat.png", "sub/cat.png", "file"]
    maps = {name: torch.full((2, 2), i / 10) for i, name in enumerate(names)}
    write_heatmaps(tmp_path / "m.npz", maps)
    with HeatmapFile(tmp_path / "m.npz") as file:
        assert [file.key(name) for name in names] == names
        assert all(torch.equal(file.read(name), maps[name]) for name in names)


def test_a_damaged_archive_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    write_heatmaps(path, {"a": torch.rand(40, 40)})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with HeatmapFile(path) as file, pytest.raises(UserError, match=r"'a' .* could not be read"):
        file.read("a")


@pytest.mark.parametrize("names", [["a/1.png", "b/1.png"], ["1.png", "b/1.png"]])
@pytest.mark.parametrize("order", [1, -1], ids=["forth", "back"])
def test_a_key_that_fits_two_images_is_an_error_whichever_comes_first(
    tmp_path: Path, names: list[str], order: int
) -> None:
    write_heatmaps(tmp_path / "m.npz", {"1.png": torch.ones(2, 2)})
    first, second = names[::order]
    with HeatmapFile(tmp_path / "m.npz") as file:
        assert file.key(first) == "1.png"
        both = ", ".join(sorted(names))  # whichever of the threads that read came first
        with pytest.raises(UserError, match=rf"'1.png' .* fits 2 images .*{both}"):
            file.key(second)


def test_a_key_that_fits_two_images_and_is_nobodys_is_no_error(tmp_path: Path) -> None:
    names = ["a/1.png", "b/1.png"]
    write_heatmaps(tmp_path / "m.npz", {name: torch.ones(2, 2) for name in [*names, "1"]})
    with HeatmapFile(tmp_path / "m.npz") as file:
        assert [file.key(name) for name in names] == names


def test_heatmap_files_with_anything_else_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "o.npz", a=np.array([{"x": 1}], dtype=object))
    with HeatmapFile(tmp_path / "o.npz") as file, pytest.raises(UserError, match="pickle"):
        file.read("a")
    np.savez(tmp_path / "c.npz", a=np.ones((3, 2, 2)))
    with (
        HeatmapFile(tmp_path / "c.npz") as file,
        pytest.raises(UserError, match=r"must be \[h,w\], got \[3, 2, 2\]"),
    ):
        file.read("a")
    (tmp_path / "x.npz").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="could not be read as heatmaps"):
        HeatmapFile(tmp_path / "x.npz")
    (tmp_path / "x.txt").write_text("nonsense")
    with pytest.raises(UserError, match=r"\.npz or \.safetensors"):
        HeatmapFile(tmp_path / "x.txt")


def test_synthetic_digits_repeat_by_seed_and_keep_the_held_out_apart() -> None:
    one, two, other = (synthetic_digits(4, seed=s) for s in (5, 5, 6))
    assert torch.equal(one.images, two.images)
    assert not torch.equal(one.images, other.images)
    train = synthetic_digits(4, seed=5, held_out=False)
    assert not torch.equal(train.masks, one.masks)
    # The mask lies on the bright strokes.
    inside = (one.images.mean(1) * one.masks).sum() / one.masks.sum()
    outside = (one.images.mean(1) * (1 - one.masks)).sum() / (1 - one.masks).sum()
    assert inside > 0.7
    assert outside < 0.5


def test_two_copies_stand_in_two_halves() -> None:
    masks = synthetic_digits(6, seed=2, copies=2).masks
    assert (masks[:, :, :32].sum((1, 2)) > 20).all()
    assert (masks[:, :, 32:].sum((1, 2)) > 20).all()


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_the_first_pictures_are_the_same_however_many_are_made(copies: int) -> None:
    few, many = (synthetic_digits(n, seed=7, copies=copies) for n in (3, 17))
    assert torch.equal(few.images, many.images[:3])
    assert torch.equal(few.masks, many.masks[:3])
    assert torch.equal(few.labels, many.labels[:3])
    assert len({tuple(row) for row in many.images.flatten(1).tolist()}) == 17


def test_digits_vary_in_size_place_and_class_as_far_as_they_may() -> None:
    digits = synthetic_digits(600, seed=8)
    assert 0 <= digits.images.min() < 1e-4
    assert 0.99 < digits.images.max() <= 1
    assert digits.labels.bincount(minlength=10).min() > 30
    covered = digits.masks.sum(0)
    assert min(covered[:, 2:8].sum(), covered[:, -8:-2].sum(), covered[2:8].sum()) > 0
    # Boxes are flat: two neighbours in a row agree only there. 0 to 4 boxes of 4 to 24 a side,
    # two on average, of 14 by 14 pixels on average, cover up to a tenth of 64 by 64.
    flat = (digits.images.diff(dim=3) == 0).all(1).float().mean((1, 2))
    assert (flat < 0.001).float().mean() == pytest.approx(0.2, abs=0.05)
    assert 0.06 < flat.mean() < 0.1


def test_more_copies_than_fit_are_refused() -> None:
    with pytest.raises(UserError, match="copies must be 1 to 3, got 4"):
        synthetic_digits(1, copies=4)
