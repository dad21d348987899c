"""Put the demo's photographs, its network and its adapter into the package.

    python tools/ship_pets.py photos DATA      one test photograph per breed, and its mask
    python tools/ship_pets.py net build/net    what tools/train_pets.py wrote
    python tools/ship_pets.py lax FOLDER       a LAX adapter of that network

The photographs are drawn before anything is scored, by one rule: of the test photographs of each
breed, the one whose file name has the smallest SHA-256. DATA has `test/images/BREED_NUMBER.jpg` and
`test/masks/BREED_NUMBER.png`, both 224 pixels wide and high; files are copied as they are.
"""

import argparse
import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import load_file
from safetensors.torch import save as as_bytes

from sufficit import Classifier, Lax, Recipe
from sufficit.classifier.checkpoint import WEIGHTS
from sufficit.classifier.digit_net import SMALL_NETS
from sufficit.classifier.fingerprint import fingerprint, same
from sufficit.classifier.pets_net import folded
from sufficit.explainers.lax import WEIGHTS as ADAPTER

PETS = SMALL_NETS["pets"]
FACTS = "pets-net.json"
BEFORE = Path("build/net")  # what tools/train_pets.py wrote
MOST = 8_000_000  # bytes of everything


def breed_of(photo: Path) -> str:
    """Return the breed in a file name.

    >>> breed_of(Path("american_bulldog_107.jpg"))
    'american_bulldog'
    """
    return photo.stem.rpartition("_")[0]


def drawn(photos: Iterable[Path]) -> list[Path]:
    """Return the photograph of each breed whose file name has the smallest SHA-256.

    >>> [one.name for one in drawn([Path("Bengal_2.jpg"), Path("Bengal_1.jpg"), Path("pug_9.jpg")])]
    ['Bengal_1.jpg', 'pug_9.jpg']
    """
    first: dict[str, Path] = {}
    for photo in sorted(photos, key=lambda one: hashlib.sha256(one.name.encode()).digest()):
        first.setdefault(breed_of(photo), photo)
    return [first[breed] for breed in sorted(first)]


def ship_photos(data: Path) -> None:
    """Copy the photographs and their masks into class folders."""
    for part in ("photos", "masks"):
        shutil.rmtree(PETS / part, ignore_errors=True)
    for photo in drawn((data / "test/images").glob("*.jpg")):
        mask = data / "test/masks" / f"{photo.stem}.png"
        for part, file in (("photos", photo), ("masks", mask)):
            folder = PETS / part / breed_of(photo)
            folder.mkdir(parents=True)
            shutil.copyfile(file, folder / file.name)


def ship_net(trained: Path) -> None:
    """Save the classifier under the package's name, its batch norms folded, in half precision."""
    classifier = Classifier.load(trained)
    folded(classifier.bare.eval())
    classifier.recipe = Recipe("sufficit:pets")
    classifier.save(PETS)
    halve(PETS / WEIGHTS)
    shutil.copyfile(trained / FACTS, PETS / FACTS)


def ship_lax(trained: Path) -> None:
    """Save an adapter in half precision, as one of the classifier that ships.

    It was trained on that one, or on the network before its batch norms were folded (BEFORE), whose
    features are the same.
    """
    lax = Lax.from_pretrained(trained)
    shipped = Classifier.load("sufficit:pets")
    if lax.fingerprint is None or not same(lax.fingerprint, fingerprint(shipped)):
        lax.check(Classifier.load(BEFORE))
        lax.belong_to(shipped, *lax.layers)
    lax.save_pretrained(PETS / "lax")
    halve(PETS / "lax" / ADAPTER)
    Lax.from_pretrained(PETS / "lax").check(shipped)


def halve(file: Path) -> None:
    """Round weights on disk to half precision."""
    weights = {name: one.half() for name, one in load_file(file).items()}
    file.write_bytes(as_bytes(weights))


def main() -> None:
    """Copy one part; say how large all of them are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"photos": ship_photos, "net": ship_net, "lax": ship_lax}
    parser.add_argument("part", choices=parts)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    PETS.mkdir(exist_ok=True)
    parts[args.part](args.folder)
    size = sum(file.stat().st_size for file in PETS.rglob("*") if file.is_file())
    print(f"{PETS}: {size:,} bytes")
    assert size < MOST, "the wheel must stay small"


if __name__ == "__main__":
    main()
