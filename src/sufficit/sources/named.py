"""The sources of a run: those that a user gave, by name or as words, then controls."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sufficit.errors import UserError
from sufficit.explainers import EXPLAINERS
from sufficit.explainers.explanation import Method as AnyMethod
from sufficit.explainers.registry import word_of
from sufficit.explainers.words import FIT, ToFit, is_path, source_from, sources_from
from sufficit.files import safe_name
from sufficit.sources.fitted import Fitted
from sufficit.sources.kinds import CONTROLS, Control, MapFile, MapTensor, Method, Source

Given = AnyMethod | Path | ToFit | Tensor | Source
"""What a user may give as a source: words, options, adapters, functions, heatmaps, a Source.

Heatmaps are a tensor, or the path of a file.
"""


def source_of(
    name: str, given: Given, *, layer: str | None = None, seed: int = 0, normalize: str = "none"
) -> Source:
    """Return what a user gave as a source of this name; words are read as on the command line."""
    read: Any = source_from(given)[1] if isinstance(given, str) else given
    if isinstance(read, ToFit):
        read = Fitted(read.source)
    if isinstance(read, Fitted):
        return _around(read, name, layer=layer, seed=seed, normalize=normalize)
    if isinstance(read, str) and read in CONTROLS:
        return Control(name, seed, alias_of="" if name == read else read)
    if isinstance(read, Tensor):
        return MapTensor(name, read, normalize)
    if is_path(read):
        return MapFile(name, read, normalize)
    if hasattr(read, "maps") and hasattr(read, "digest"):
        source: Source = read
        if source.name != name:
            raise UserError(
                f"a source calls itself {source.name!r} and is given as {name!r}: use one name"
            )
        return source
    return Method(name, word_of(*read) if isinstance(read, tuple) else read, layer, seed)


def _around(fitted: Fitted, name: str, *, layer: str | None, seed: int, normalize: str) -> Source:
    """Return a fit around its source, which has the name that it would have alone."""
    alone = name.removesuffix(FIT)
    inner = source_of(alone, fitted.source, layer=layer, seed=seed, normalize=normalize)
    return fitted.around(inner, name)


def sources_of(
    given: Mapping[str, Given] | Sequence[str],
    *,
    controls: bool = True,
    layer: str | None = None,
    seed: int = 0,
    normalize: str = "none",
) -> tuple[Source, ...]:
    """Return the sources of a run: those that a user gave, by name or as words, then controls."""
    named = given if isinstance(given, Mapping) else sources_from(given)
    if not named:
        raise UserError(f"no method given: name one or more of {', '.join(EXPLAINERS)}")
    sources = [
        source_of(name, source, layer=layer, seed=seed, normalize=normalize)
        for name, source in named.items()
    ]
    for source in sources:
        if source.name in CONTROLS and not (isinstance(source, Control) and not source.alias_of):
            raise UserError(
                f"{source.name!r} is the name of a control: give the source another name"
            )
    sources = _drawn_once(sources)
    ranked = [source for source in sources if source.name not in CONTROLS]
    last: list[Source] = [Control(word, seed) for word in CONTROLS if controls or word in named]
    fitted = [source for source in ranked if isinstance(source, Fitted)]
    name = f"center{FIT}"
    if controls and fitted and name not in named:
        # The fit itself knows something: what does it make of a map that ignores the image?
        last.append(fitted[0].around(Control("center", seed), name))
    return (*ranked, *last)


def _drawn_once(sources: Sequence[Source]) -> list[Source]:
    """Return the sources; a fit has the same inner source as the run, if both name one method.

    The batch remembers maps by source, so that the method is drawn once for both.
    """
    plain = {
        source.method: source
        for source in sources
        if isinstance(source, Method) and isinstance(source.method, str)
    }
    shared: list[Source] = []
    for source in sources:
        inner = source.source if isinstance(source, Fitted) else None
        if isinstance(source, Fitted) and isinstance(inner, Method) and inner.method in plain:
            shared.append(source.around(plain[inner.method], source.name))
        else:
            shared.append(source)
    return shared


def check_names(sources: Sequence[Source], reserved: Sequence[str]) -> None:
    """Raise for two sources of one name, and for names of the run's own files."""
    names = [source.name for source in sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"two sources are called {twice!r}: give one of them another name")
    for name in names:
        ends = (".json", ".csv", ".html", ".png", ".toml")
        if safe_name(name) in reserved or name.endswith(ends):
            raise UserError(f"{name!r} is a file of every run: give the source another name")
