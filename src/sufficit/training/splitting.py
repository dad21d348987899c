"""The training split of a folder, by its earlier names."""

from collections.abc import Sequence

from sufficit.data.splits import Folder, evenly, how_many, read_folder

__all__ = ["Folder", "held_out", "how_many", "read_folder"]


def held_out(labels: Sequence[int], n: int, seed: int) -> list[int]:
    """The rows to hold out."""
    rows: list[int] = evenly(labels, n, seed, spare_half=True).tolist()
    return rows
