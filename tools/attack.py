"""Attack Sufficit as an outsider would, and count what does not hold.

python tools/attack.py              # everything; kills take the longest
python tools/attack.py files fuzz   # bad files, fuzzed inputs

Exit status 1 means that something did not hold; it is named.
"""

import argparse
import io
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attack_files import KINDS, Reader, bad_data, bad_images, bad_maps, bad_models, picture

from shard_files import png, write_shard
from sufficit import UserError, View
from sufficit.data.image_files import BadImageError, decode_image, expand
from sufficit.data.images import list_images
from sufficit.outside import csv_cell, literal
from sufficit.runs.config import read_toml
from sufficit.runs.overlays import class_number
from untrusted_files import npy, npz, read_maps

MOST_SECONDS, MOST_GROWTH = 10.0, 400 * 2**20  # per file: seconds, bytes of memory


class Attack:
    """What was tried, and what did not hold."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.counts, self.broken = Counter[str](), list[str]()
        self.random, self.folder = random.Random(seed), folder
        self.sprung = self.folder / "sprung"  # a file that hostile code would make

    def reads(self, what: str, read: Reader, *, quick: bool = False) -> None:
        """A file is read or refused in the package's words, in little time and memory."""
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        try:
            read()
            self.counts["read"] += 1
        except (UserError, BadImageError):
            self.counts["refused"] += 1
        except Exception as error:  # anything else is a fault
            self.broken.append(f"{what}: {type(error).__name__}: {error!s:.100}")
        if quick:
            return
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        if time.monotonic() - started > MOST_SECONDS or grown > MOST_GROWTH:
            self.broken.append(f"{what}: {time.monotonic() - started:.1f} s, {grown / 1e6:.0f} MB")

    def end(self, part: str) -> dict[str, Any]:
        """What a part counted."""
        if self.sprung.exists():
            self.broken.append(f"{part}: code of a file ran")
        found, self.counts = dict(self.counts), Counter()
        return found


def files(attack: Attack) -> dict[str, Any]:
    """Bad files of every kind, one at a time, with their time and memory."""
    folder, sprung = attack.folder, attack.sprung
    for name, content in bad_images():
        read = partial(decode_image, io.BytesIO(content), View((16, 16)))
        attack.reads(f"image {name}", read)
    for path in bad_maps(folder, sprung):
        attack.reads(f"maps {path.name}", partial(read_maps, path))
    for what, load in (*bad_models(folder, sprung), *bad_data(folder)):
        attack.reads(what, load)
    return attack.end("files")


def fuzz(attack: Attack, inputs: int, minutes: float) -> dict[str, Any]:
    """Random bytes and texts for every reader of outside input."""
    rng, folder = attack.random, attack.folder
    wholes = {kind: picture(kind) for kind in KINDS}
    maps = npz(folder / "f.npz", npy("(2, 2)")).read_bytes()
    shard = write_shard(folder / "f.tar", [("a.png", png(1)), ("a.cls", b"3")]).read_bytes()
    toml = (
        b'model = "sufficit:digits"\ndata = "x"\nseed = 3\nalpha_min = 0.5\nmethods = ["gradcam"]\n'
    )
    alphabet = "\\[]/@#=+-:;|%{}0123456789.abz\n\r\t\0\x1b\x9b\u202e\ud800 '\""

    def bent(content: bytes) -> bytes:
        found = bytearray(content)
        for _ in range(rng.randint(1, 6)):
            found[rng.randrange(len(found))] = rng.randrange(256)
        return bytes(found[: rng.randrange(1, len(found))] if rng.random() < 0.3 else found)

    def words() -> str:
        return "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 30)))

    def image() -> None:
        decode_image(io.BytesIO(bent(wholes[rng.choice(KINDS)])), View((16, 16)))

    def heatmap() -> None:
        (folder / "x.npz").write_bytes(bent(maps))
        read_maps(folder / "x.npz")

    def tar() -> None:
        (folder / "x.tar").write_bytes(bent(shard))
        for one in list_images(folder / "x.tar"):
            with suppress(BadImageError):
                one.read(None)

    def settings() -> None:
        (folder / "x.toml").write_bytes(bent(toml))
        read_toml(folder / "x.toml")

    def text() -> None:
        found = words()
        if not literal(found).plain.isprintable() or csv_cell(found)[:1] in ("=", "@"):
            attack.broken.append(f"text {found!r}")
        expand(found)

    def target() -> None:
        classes = [words() for _ in range(3)]
        number = class_number(words(), classes)
        if number < 0:
            attack.broken.append(f"a negative class {number}")

    kinds = {image: 40, heatmap: 15, tar: 10, settings: 15, text: 12, target: 8}
    end = time.monotonic() + 60 * minutes
    for one in rng.choices([*kinds], weights=[*kinds.values()], k=inputs):
        if time.monotonic() > end:
            break
        attack.counts[one.__name__] += 1
        attack.reads(one.__name__, one, quick=True)
    return attack.end("fuzz")


def kills(_: Attack, count: int) -> dict[str, Any]:
    """Kills of all commands, of Ray workers, nodes and drivers."""
    from kill import kills as kill_runs

    return dict(kill_runs(count))


def main() -> None:
    """Run the parts that are named, print their counts, and say what did not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["files", "fuzz", "kills"])
    for name, usual in (("inputs", 100_000), ("kills", 200), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--minutes", type=float, default=60, help="the longest that fuzz may take")
    given = parser.parse_args()
    attack = Attack(given.seed, Path(tempfile.mkdtemp(prefix="attack-")))
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "files": lambda: files(attack),
        "fuzz": lambda: fuzz(attack, given.inputs, given.minutes),
        "kills": lambda: kills(attack, given.kills),
    }
    for part in given.parts:
        started = time.monotonic()
        counts = parts[part]()
        print(part, json.dumps(counts), f"{time.monotonic() - started:.0f} s", flush=True)
    for one in attack.broken:
        print("does not hold:", ascii(one))
    if not attack.broken:
        shutil.rmtree(attack.folder)
    sys.exit(bool(attack.broken))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main()
