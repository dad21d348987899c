"""Bad files of every kind, made by code: what tools/attack.py has read."""

import io
import json
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import bombs
from shard_files import png, write_shard
from sufficit import Classifier, Lax
from sufficit.data.image_files import expand
from sufficit.data.images import list_images
from sufficit.runs.config import read_toml
from sufficit.training.trainer import read_checkpoint
from untrusted_files import DEEP_JSON, HUGE, described, npy, npz, resnet

KINDS = ("png", "jpeg", "gif", "bmp", "ppm", "tiff", "webp")
Reader = Callable[[], object]


class Sprung:
    """Unpickled, it leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def picture(kind: str, size: tuple[int, int] = (24, 16)) -> bytes:
    """A small image of a format."""
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def bad_images() -> Iterator[tuple[str, bytes]]:
    """Images that are cut, changed, too large, or none."""
    for kind in KINDS:
        whole = picture(kind)
        yield from ((f"{kind} cut at {cut}", whole[: len(whole) * cut // 8]) for cut in range(7))
        rng = random.Random(kind)
        for k in range(4):
            changed = bytearray(whole)
            for _ in range(5):
                changed[rng.randrange(len(whole))] = rng.randrange(256)
            yield f"{kind} changed {k}", bytes(changed)
    yield "60,000 x 60,000", bombs.big_picture()
    yield "9,000 x 9,000 of nothing", bombs.big_picture(9000)
    for text in (b"", b"%!PS\n(x) show", b"<svg onload='x'/>", b"%PDF-1.7", b"\0" * 999):
        yield f"{text[:8]!r}", text


def bad_maps(folder: Path, sprung: Path) -> Iterator[Path]:
    """Heatmap files that are cut, hostile or too large."""
    written = io.BytesIO()
    np.save(written, np.array([Sprung(sprung)], dtype=object), allow_pickle=True)
    contents = {
        "pickle": written.getvalue(),
        "shape-1": npy("(-1, 4)"),
        "shape-2": npy("(99999999999, 99999999999)"),
        "shape-3": npy("(2, 2, 2)"),
        "shape-4": npy("()"),
        "text": npy("(2, 2)", "<U4"),
        "complex": npy("(1, 2)", "<c8"),
        "short": npy("(9, 9)"),
        "long": npy("(1, 1)", content=bytes(99)),
        "no-npy": b"hello",
        "empty": b"",
    }
    for name, content in contents.items():
        yield npz(folder / f"{name}.npz", content)
    whole = npz(folder / "whole.npz", npy("(2, 2)")).read_bytes()
    for cut in range(1, 6):
        (folder / f"cut-{cut}.npz").write_bytes(whole[: len(whole) * cut // 6])
        yield folder / f"cut-{cut}.npz"
    for k, text in enumerate((b"", b"\xff" * 8 + b"{}", b"\x02" + bytes(7) + b"{}", b"x" * 99)):
        (folder / f"{k}.safetensors").write_bytes(text)
        yield folder / f"{k}.safetensors"


def bad_models(folder: Path, sprung: Path) -> Iterator[tuple[str, Reader]]:
    """Saved classifiers and adapters, weights and checkpoints."""
    evil = folder / "evil.py"
    evil.write_text(f"from pathlib import Path\nPath({str(sprung)!r}).touch()\n")
    options = ({"num_classes": 10**8}, {"num_classes": -1}, {"weights": "DEFAULT"}, {"width": "x"})
    recipes: list[object] = [resnet(**one) for one in options]
    recipes += [
        {"source": f"python:{evil}:f", "options": {}},
        "x",
        None,
        {"source": "torchvision:"},
    ]
    auto = {"AutoConfig": "evil.A", "AutoModelForImageClassification": "evil.B"}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    recipes += [{"source": f"transformers:{folder}", "options": {}}]
    yield "transformers", lambda: Classifier.load(f"transformers:{folder}")
    for k, recipe in enumerate(recipes):
        saved = Classifier.load("sufficit:digits").save(folder / f"saved-{k}")
        described(saved, recipe=recipe)
        yield f"recipe {recipe!s:.60}", partial(Classifier.load, saved)
    views = ({"crop": [10**6, 10**6]}, {"crop": [2**14, 2**14]}, {"channels": 10**6}, {"crop": "x"})
    for k, view in enumerate(views):
        saved = Classifier.load("sufficit:digits").save(folder / f"view-{k}")
        usual = {"crop": [64, 64], "resize": None, "channels": 3, "stretch": False}
        described(saved, view=usual | {"interpolation": "bilinear"} | view)
        yield f"view {view}", partial(Classifier.load, saved)
    for k, text in enumerate((DEEP_JSON, '{"channels": ' + HUGE + "}", "[]", "{", '{"layer": 3}')):
        Lax(4, widths=(4, 2)).save_pretrained(folder / f"adapter-{k}")
        (folder / f"adapter-{k}" / "config.json").write_text(text)
        yield f"adapter {text:.20}", partial(Lax.from_pretrained, folder / f"adapter-{k}")
    for name, content in (
        ("a", pickle.dumps(Sprung(sprung))),
        ("b", b""),
        ("c", b"PK\3\4" + bytes(99)),
    ):
        (folder / f"{name}.pt").write_bytes(content)
        load = {"weights": folder / f"{name}.pt", "num_classes": 10}
        yield f"weights {name}", partial(Classifier.load, "torchvision:resnet18", **load)
        (folder / name).mkdir()
        (folder / name / "checkpoint.pt").write_bytes(content)
        yield f"checkpoint {name}", partial(read_checkpoint, folder / name, {})
    bombs.late_epoch(folder / "checkpoint.pt", 10**12)
    yield "late epoch", lambda: read_checkpoint(folder, {})


def bad_data(folder: Path) -> Iterator[tuple[str, Reader]]:
    """Shards, patterns and settings."""
    tars = {
        "outside": write_shard(folder / "out.tar", [("../../x.png", png(1)), ("/x.png", png(1))]),
        "twice": write_shard(folder / "twice.tar", [("a.png", png(1)), ("a.png", png(2))]),
        "deep": write_shard(
            folder / "deep.tar", [("a.png", png(1)), ("a.json", DEEP_JSON.encode())]
        ),
    }
    whole = tars["twice"].read_bytes()
    for cut in (1, 100, 513, 900, 1700):
        (folder / f"cut-{cut}.tar").write_bytes(whole[:cut])
        tars[f"cut at {cut}"] = folder / f"cut-{cut}.tar"
    for what, path in tars.items():
        yield f"tar {what}", partial(_names, path)
    for k, content in enumerate((b"PAR1", b"PAR1" + bytes(99) + b"PAR1", b"")):
        (folder / f"{k}.parquet").write_bytes(content)
        yield f"parquet {k}", partial(_names, folder / f"{k}.parquet")
    for pattern in ("x{0..20000000}.tar", "{0..999}{0..999}{0..9}.tar"):
        yield pattern, partial(expand, pattern)
    texts = (
        f"donors = {HUGE}",
        "a = " + "[" * 10**5,
        "num_classes = 10000000",
        "\xff",
        "value_step = 1e-9",
    )
    for k, text in enumerate(texts):
        (folder / f"{k}.toml").write_bytes(text.encode("latin-1"))
        yield f"toml {text:.20}", partial(read_toml, folder / f"{k}.toml")


def _names(path: Path) -> list[str]:
    return [one.name for one in list_images(path)]
