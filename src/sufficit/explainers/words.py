"""Heatmap sources by word: a method's name, an adapter, a Python function, a heatmap file."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard, cast

from sufficit.classifier.source_code import python_function
from sufficit.errors import UserError, unknown
from sufficit.explainers.explainer import of_library, split_word
from sufficit.explainers.explanation import Method
from sufficit.explainers.lax import Lax, is_shipped, name_of
from sufficit.explainers.registry import EXPLAINERS, explainer_named
from sufficit.files import is_remote, place, safe_name

FIT = "+fit"  # the end of a word that asks for the cut
FILE_SUFFIXES = (".npz", ".safetensors")


@dataclass(frozen=True)
class ToFit:
    """A source whose maps are to be cut where the model agrees."""

    source: "Method | Path"


Named = Method | Path | ToFit
"""What a word may name; a path is that of a file of heatmaps that were drawn elsewhere."""


def sources_from(words: str | Iterable[str]) -> dict[str, Named]:
    """Return heatmap sources by name, from words or from one text with commas between them.

    A word is the name of a method, with options as in `finer-cam:nearest=5`; the folder of a LAX
    adapter, or `sufficit:digits`; `python:FILE.py:FUNCTION`, a function (classifier, images,
    targets) -> [N,H,W]; or a heatmap file. Each has its own name, and `NAME=WORD` gives it another.
    `+fit` behind a word has its maps cut where the model agrees.

    >>> sources_from("gradcam+fit")
    {'gradcam+fit': ToFit(source='gradcam')}
    >>> sources_from("gradcam, old=maps/gradcam.npz")
    {'gradcam': 'gradcam', 'old': PosixPath('maps/gradcam.npz')}
    """
    listed = words.split(",") if isinstance(words, str) else words
    word_of: dict[str, str] = {}  # each source's, by its name
    sources: dict[str, Named] = {}
    for word in filter(None, map(str.strip, listed)):
        if word in word_of.values():
            raise UserError(f"the method {word} is given twice: leave one out")
        name, source = source_from(word)
        if name in sources:
            wrong = f"two methods are called {name} ({word_of[name]}, {word})"
            bare = word.removeprefix(f"{name}=")
            raise UserError(f"{wrong}: write NAME={bare} to give one of them another name")
        word_of[name] = word
        sources[name] = source
    return sources


def methods_from(words: str | Iterable[str]) -> dict[str, Method]:
    """Return the same for commands that draw heatmaps, which take no heatmap file.

    >>> methods_from("gradcam, layercam")
    {'gradcam': 'gradcam', 'layercam': 'layercam'}
    """
    methods: dict[str, Method] = {}
    for name, named in sources_from(words).items():
        # What draws an order is the same with and without the cut.
        source = named.source if isinstance(named, ToFit) else named
        if is_path(source):
            wrong = f"{source} holds finished heatmaps, where a method that draws them must be"
            raise UserError(f"{wrong}: score the file with sufficit evaluate or sufficit compare")
        methods[name] = source  # type: ignore[assignment]  # no path by now
    return methods


def source_from(word: str) -> tuple[str, Named]:
    """Return the name and the heatmap source of one word."""
    name, equals, rest = word.partition("=")
    # An equals sign is also part of options, as in finer-cam:nearest=5, and of some paths.
    if not equals or any(sign in name for sign in ("/", "\\", ":")) or place(word).exists():
        name = ""
        rest = word
    if not rest.removesuffix(FIT).strip():
        raise UserError(f"{word} names no source: write NAME=SOURCE, such as mine=gradcam")
    source: Named
    usual, source = _unnamed(rest.removesuffix(FIT))
    if rest.endswith(FIT):
        usual = f"{usual}{FIT}"
        source = ToFit(source)
    chosen = safe_name(name if rest != word else usual)
    if chosen in EXPLAINERS and source != chosen:
        remedy = f"write NAME={rest} to give {rest} its own"
        raise UserError(f"{chosen!r} is the name of another method: {remedy}")
    return chosen, source


def is_path(source: object) -> TypeGuard[Path]:
    """Return whether a source is a heatmap file, on disk or on object storage."""
    # A path on object storage is no `Path`, but reads as one.
    return isinstance(source, Path) or (
        hasattr(source, "read_bytes") and is_remote(cast(Path, source))
    )


def _unnamed(word: str) -> tuple[str, Method | Path]:
    """Return the usual name and the source of a word without NAME=."""
    if split_word(word)[0] in EXPLAINERS or of_library(word):
        explainer_named(word)  # raises for unknown options
        return re.sub(r"[:/\\]+", "-", word), word
    if word.startswith("python:"):
        return word.rpartition(":")[2], python_function(word.removeprefix("python:"))
    path = place(word)
    if path.is_dir() or is_shipped(word):
        return name_of(word), Lax.from_pretrained(word)
    if path.suffix in FILE_SUFFIXES:
        return path.stem, path
    if word == "lax":
        raise UserError(
            "lax is trained for each model: give the folder of its adapter, --methods PATH. Make"
            " one with sufficit train-lax; sufficit:digits ships for the model of that name"
        )
    if path.suffix == ".npy" or path.is_file():
        wrong = f"heatmaps must be a .npz or .safetensors file, got {path.name}"
        raise UserError(f"{wrong}: save one array [h,w] per image, keyed by the image's name")
    if "/" in word:
        raise UserError(f"no LAX adapter or heatmap file at {word}")
    places = ["the folder of a LAX adapter", "python:FILE.py:FUNCTION", "a heatmap file"]
    places += ["captum:NAME", "zennit:NAME"]
    raise unknown("method", word, [*places, *EXPLAINERS])
