"""What takes how long, told and kept."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sufficit.errors import UserError
from sufficit.files import make_folder, read_json
from sufficit.results import save_json


@dataclass(frozen=True)
class Clock:
    """Adds the seconds of each stage to a file; a stage that was stopped and begun again adds up.

    The time of a stage inside another is its own and not the other's.
    """

    path: Path
    say: Callable[[str], None]
    mute: bool = False  # in all processes but the first: nothing is told, nothing kept

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time a stage."""
        if self.mute:
            yield
            return
        begun, before = time.monotonic(), sum(self.seconds().values())
        try:
            yield
        finally:
            inner = sum(self.seconds().values()) - before
            took = time.monotonic() - begun - inner
            known = self.seconds()
            make_folder(self.path.parent)
            save_json(self.path, known | {stage: round(known.get(stage, 0) + took, 2)})
        self.say(f"{stage}: {took:.1f} s")

    def seconds(self) -> dict[str, float]:
        """What each stage took so far; a file that can't be read tells nothing, and is no loss."""
        try:
            return {str(stage): float(took) for stage, took in read_json(self.path).items()}
        except (UserError, AttributeError, TypeError, ValueError, OverflowError):
            return {}
