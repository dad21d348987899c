"""The one error users are meant to read, and the nearest known name for a mistyped one."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class UserError(ValueError):
    """Something the caller can mend: what was wanted, what came, what to do."""


class NotFiniteError(UserError):
    """The model gave NaN or infinite values for some of the images, which are named by number."""

    def __init__(self, message: str, images: Sequence[int]) -> None:
        super().__init__(message)
        self.images = tuple(images)


class GoneError(UserError):
    """The place that images come from is no longer there: the run can go on when it is back."""


class EmptyHeatmapWarning(UserWarning):
    """Some heatmaps have no positive part: a method found nothing for the class."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Name the nearest known word.

    >>> str(unknown("fill", "blak", ["black", "blur"]))
    "Unknown fill 'blak'. Did you mean 'black'? Known: black, blur"
    """
    names = list(known)
    lower = {other.lower(): other for other in reversed(names)}
    close = get_close_matches(name[:100].lower(), lower, n=1, cutoff=0.5)
    hint = f" Did you mean {lower[close[0]]!r}?" if close else ""
    told = repr(name) if len(name) <= 100 else f"{name[:100]!r}..."
    shown = ", ".join(names[:20]) + (f", and {len(names) - 20} more" if len(names) > 20 else "")
    return UserError(f"Unknown {kind} {told}.{hint} Known: {shown}")
