"""Heatmap sources: whatever gives a map per image; `Fitted` and `Cut` cut the map of another."""

from sufficit.explainers.explanation import cut_at
from sufficit.sources.asked import Asked
from sufficit.sources.cut import Cut
from sufficit.sources.fitted import Fitted
from sufficit.sources.kinds import (
    CONTROLS,
    NOT_FINITE,
    STRETCHED,
    Control,
    MapFile,
    Maps,
    MapTensor,
    Method,
    Role,
    Source,
    SourceBase,
    SourceFacts,
    draw,
    noise,
)
from sufficit.sources.named import Given, check_names, source_of, sources_of

__all__ = [
    "CONTROLS",
    "NOT_FINITE",
    "STRETCHED",
    "Asked",
    "Control",
    "Cut",
    "Fitted",
    "Given",
    "MapFile",
    "MapTensor",
    "Maps",
    "Method",
    "Role",
    "Source",
    "SourceBase",
    "SourceFacts",
    "check_names",
    "cut_at",
    "draw",
    "noise",
    "source_of",
    "sources_of",
]
