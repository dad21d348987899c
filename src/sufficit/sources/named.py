"""The sources of a run: those that a user gave, by name or as words, then controls."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sufficit.errors import UserError
from sufficit.explainers import EXPLAINERS
from sufficit.explainers.explanation import Method as AnyMethod
from sufficit.explainers.registry import word_of
from sufficit.explainers.words import FIT, HeatmapFileSource, source_from, sources_from
from sufficit.files import safe_name
from sufficit.sources.fitted import Fitted
from sufficit.sources.kinds import CONTROLS, Control, MapFile, MapTensor, Method, Source

Given = AnyMethod | HeatmapFileSource | Tensor | Source
"""What a user may give as a source: words, options, adapters, functions, heatmaps, a Source."""


def source_of(
    name: str, given: Given, *, layer: str | None = None, seed: int = 0, normalize: str = "none"
) -> Source:
    """Return what a user gave as a source of this name; words are read as on the command line."""
    read: Any = source_from(given)[1] if isinstance(given, str) else given
    if isinstance(read, str) and read in CONTROLS:
        return Control(read, seed)
    if isinstance(read, Tensor):
        return MapTensor(name, read, normalize)
    if isinstance(read, HeatmapFileSource):
        return MapFile(name, read.path, normalize)
    if isinstance(read, tuple):
        return Method(name, word_of(*read), layer, seed)
    if hasattr(read, "maps") and hasattr(read, "digest"):
        source: Source = read
        return source
    return Method(name, read, layer, seed)


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
    found = [
        source_of(name, one, layer=layer, seed=seed, normalize=normalize)
        for name, one in named.items()
    ]
    for source in found:
        if source.name in CONTROLS and not isinstance(source, Control):
            raise UserError(
                f"{source.name!r} is the name of a control: give the source another name"
            )
    ranked = [source for source in found if not isinstance(source, Control)]
    wanted = [one for one in CONTROLS if controls or one in named]
    return (*ranked, *(Control(one, seed) for one in wanted))


def check_names(sources: Sequence[Source], reserved: Sequence[str]) -> None:
    """Raise for two sources of one name, and for names of the run's own files."""
    names = [source.name for source in sources]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two sources are called {twice!r}: give one of them another name")
    for name in names:
        ends = (".json", ".csv", ".html", ".png", ".toml")
        if safe_name(name) in reserved or name.endswith(ends):
            raise UserError(f"{name!r} is a file of every run: give the source another name")
