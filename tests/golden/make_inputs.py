"""The inputs of the recorded runs: sixteen pictures of digits, made from one file of pixels.

Nothing here imports sufficit. `pictures.npz` holds pixels [16,64,64,3] and labels [16].
"""

import io
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

PICTURES = Path(__file__).with_name("pictures.npz")


def pictures(count: int = 16) -> tuple[np.ndarray, list[int], list[str]]:
    """Pixels [n,64,64,3] in 0..255, labels, and names such as 7/03.png, in the order of names."""
    with np.load(PICTURES) as kept:
        pixels, labels = kept["pixels"][:count], kept["labels"][:count].tolist()
    names = [f"{label}/{number:02d}.png" for number, label in enumerate(labels)]
    order = sorted(range(len(names)), key=names.__getitem__)
    return pixels[order], [labels[i] for i in order], [names[i] for i in order]


def write_folder(folder: Path, count: int, *, broken: bool = False) -> Path:
    """Class folders 0..9 with the first pictures; broken adds one file that is no picture."""
    pixels, _, names = pictures(count)
    for name, content in zip(names, pixels, strict=True):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(content).save(path)
    if broken:
        whole = (folder / names[0]).read_bytes()
        (folder / names[0]).with_name("broken.png").write_bytes(whole[: len(whole) // 3])
    return folder


def write_shards(folder: Path, count: int, shards: int = 2) -> Path:
    """Shards 0.tar, 1.tar and so on with NN.cls and NN.png for each of the first pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels, labels, _ = pictures(count)
    for shard, rows in enumerate(np.array_split(np.arange(count), shards)):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for row in rows.tolist():
                _add(tar, f"{row:02d}.cls", str(labels[row]).encode())
                _add(tar, f"{row:02d}.png", _png(pixels[row]))
    return folder


def write_heatmaps(path: Path, count: int) -> Path:
    """A hill of 16 x 16 float32 for each of the first pictures, keyed by the picture's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **dict(zip(pictures(count)[2], hills(count), strict=True)))
    return path


def hills(count: int) -> np.ndarray:
    """Hills whose place and width follow from their number: [n,16,16] in 0..1."""
    number = np.arange(count)[:, None, None]
    y, x = np.mgrid[:16, :16]
    centre_y, centre_x = 3 + number * 5 % 11, 3 + number * 7 % 11
    width = 2 + number % 4
    distance = (y - centre_y) ** 2 + (x - centre_x) ** 2
    return np.exp(-distance / (2 * width**2)).astype(np.float32)


def write_all(folder: Path) -> Path:
    """Every input of the recorded runs."""
    for count in (4, 6, 8, 12, 16):
        write_folder(folder / f"images-{count}", count)
    write_folder(folder / "images-broken", 5, broken=True)
    write_shards(folder / "shards", 6)
    write_heatmaps(folder / "hills.npz", 12)
    (folder / "save.toml").write_text("save_heatmaps = true\n", encoding="utf-8")
    return folder


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
