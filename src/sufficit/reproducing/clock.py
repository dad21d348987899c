"""What takes how long, told and kept."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sufficit.results import save_json


@dataclass(frozen=True)
class Clock:
    """Adds the seconds of each stage to a file; a stage that was stopped and begun again adds up.

    The time of a stage inside another is its own and not the other's.
    """

    path: Path
    say: Callable[[str], None]

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time a stage."""
        begun, before = time.monotonic(), sum(self.seconds().values())
        try:
            yield
        finally:
            inner = sum(self.seconds().values()) - before
            took = time.monotonic() - begun - inner
            known = self.seconds()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_json(self.path, known | {stage: round(known.get(stage, 0) + took, 2)})
        self.say(f"{stage}: {took:.1f} s")

    def seconds(self) -> dict[str, float]:
        """What each stage took so far."""
        try:
            return dict(json.loads(self.path.read_text()))
        except FileNotFoundError:
            return {}
