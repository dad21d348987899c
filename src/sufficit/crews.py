"""The processes that share a run: who does what, how far all are, and whether all still live.

They meet in a folder that all of them see, with a small file each. No tensors are exchanged, and no
process waits in a collective call, where it could not notice that another one is gone.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from sufficit.errors import UserError
from sufficit.files import writing

if TYPE_CHECKING:
    from sufficit.progress import Progress

BEAT = 2.0  # seconds between two signs of life
SILENCE = 300.0  # seconds without one, after which a process is taken for dead
START = 1800.0  # seconds within which it must have given its first
GLANCE = 0.2  # seconds between two looks at the others
FOLDER, END = "crew", "end"


def is_first() -> bool:
    """Whether this process is the first of all, as far as whoever started it has said."""
    told = os.environ
    if "RANK" in told:
        return told["RANK"] == "0"
    if "LOCAL_RANK" in told:
        node = told.get("NODE_RANK", told.get("GROUP_RANK", "0"))
        return told["LOCAL_RANK"] == "0" and node == "0"
    return told.get("NODE_RANK", told.get("SLURM_PROCID", "0")) == "0"


def by_torchrun() -> bool:
    """Whether torchrun has started this process, and so decides how many there are."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def leads(devices: int, nodes: int) -> bool:
    """Whether this process is the first of a run, or all of it, whatever its number elsewhere."""
    return is_first() or (devices * nodes == 1 and not by_torchrun())


class FirstGoneError(UserError):
    """The first process has ended before its time, and has said why if it could."""


class Crew:
    """One process among those that share a run; alone, it needs no files and waits for nobody."""

    def __init__(
        self, rank: int = 0, size: int = 1, run: str = "", device: str | None = None
    ) -> None:
        self.rank, self.size, self.run = rank, size, run
        self.device = device  # of this process, where it is not the caller's to choose
        self._said: dict[str, Any] = {"run": run, "beat": 0, "done": {}, "over": []}
        self._heard: dict[int, dict[str, Any]] = {}
        self._since: dict[int, float] = {}
        self._looked = 0.0
        self._outer: Crew | None = None  # the meeting within which this one is
        self._lock = Lock()
        # The first process of a machine may outlive the shell that started it.
        self._parent = os.getppid() if os.environ.get("LOCAL_RANK", "0") != "0" else None

    def again(self, word: str) -> "Crew":
        """The same processes for a meeting within this one, in a folder of its own."""
        crew = Crew(self.rank, self.size, f"{self.run}-{word}", self.device)
        crew._outer = self
        return crew

    @property
    def first(self) -> bool:
        """Whether this process speaks, and writes the results."""
        return self.rank == 0

    def voice(self, progress: "bool | Progress | None") -> "bool | Progress | None":
        """The progress that is wanted, in the first process; none in the others."""
        return progress if self.first else False

    @contextmanager
    def meet(self, folder: Path) -> Iterator[None]:
        """Signs of life below the folder while the block runs; the first leaves it last."""
        if self.size == 1:
            yield
            return
        self._folder = folder / FOLDER
        self._since = dict.fromkeys(range(self.size), time.monotonic())
        ended = Event()
        beating = Thread(target=self._keep_beating, args=(ended,), daemon=True)
        try:
            if self.first:
                self._folder.mkdir(parents=True, exist_ok=True)
            else:
                self._wait_until(lambda: self._note("met") is not None)
            beating.start()
            self.tell("met", True)
            yield
            self._wait_for_all(END)
            last: dict[str, Any] = {"over": [*self._said["over"], END]}
        except BaseException as error:
            last = {"trouble": str(error) or type(error).__name__}
            raise
        finally:
            ended.set()
            if beating.is_alive():
                beating.join()
            with suppress(UserError, OSError):  # the last word; the folder may be gone after it
                self._beat(**last)

    def tell(self, key: str, value: Any) -> Any:
        """What the first process says under a key, in all of them; the others' value is unused."""
        if self.size == 1:
            return value
        if self.first:
            with writing(self._folder / f"told-{key}.json") as part:
                part.write_text(json.dumps({"run": self.run, "value": value}))
            return value
        self._wait_until(lambda: self._note(key) is not None)
        return (self._note(key) or {})["value"]

    def check_alike(self, identity: Mapping[str, Any], word: str = "identity") -> None:
        """Raise where this process has other images or another model than the first one."""
        own = {key: value for key, value in identity.items() if key != "device"}
        own = json.loads(json.dumps(own, default=str))  # as the others read it
        first = self.tell(word, own)
        for key, value in own.items():
            if first[key] != value:
                raise UserError(
                    f"all processes must see the same, but {key} is {value!r} in process"
                    f" {self.rank} and {first[key]!r} in the first"
                )

    def mine(self, key: str, numbers: Sequence[int]) -> list[int]:
        """The share of this process in the numbers that the first one names."""
        told: list[int] = self.tell(f"share-{key}", list(numbers))
        return told[self.rank :: self.size]

    @contextmanager
    def stage(
        self, name: str, tick: "Progress | None", before: float, total: float
    ) -> "Iterator[Progress]":
        """Something to tell this process's progress; the first ends when all processes are done.

        `tick` hears of all processes together, beside what was done `before`.
        """

        def told(done: float, total: float) -> None:
            whole = before + self._count(name, done)
            if tick:
                tick(whole, total)

        yield told
        with self._lock:
            self._said["over"].append(name)
        own = self._said["done"].get(name, 0.0)
        self._wait_for_all(name, lambda: told(own, total))

    def _count(self, stage: str, done: float) -> float:
        """Note how much of a stage is done here, and learn how much is in all processes."""
        if self.size == 1:
            return done
        with self._lock:
            self._said["done"][stage] = done
        if time.monotonic() - self._looked > GLANCE:
            self._look()
        others = (said["done"].get(stage, 0.0) for said in self._heard.values())
        return float(done + sum(others))

    def _wait_for_all(self, stage: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """In the first process, wait until no process has anything left to do of a stage."""
        if self.size == 1 or not self.first:
            return

        def all_over() -> bool:
            meanwhile()
            met = len(self._heard) == self.size - 1
            return met and all(stage in said["over"] for said in self._heard.values())

        self._wait_until(all_over)

    @property
    def _others(self) -> Sequence[int]:
        """Whom this process listens to: the first to all, the others to the first."""
        return range(1, self.size) if self.first else (0,)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        while not done():
            time.sleep(GLANCE)
            self._look()

    def _look(self) -> None:
        """Read what the others say; raise where one is gone."""
        if self._outer is not None:
            self._outer._look()
        self._looked = time.monotonic()
        if self._parent is not None and os.getppid() != self._parent:
            raise FirstGoneError("the process that started this one is gone")
        for rank in self._others:
            said = _read(self._folder / f"{rank}.json")
            if said is not None and said["run"] == self.run:
                if said["beat"] != self._heard.get(rank, {}).get("beat"):
                    self._since[rank] = self._looked
                self._heard[rank] = said
            self._check(rank)

    def _check(self, rank: int) -> None:
        """Raise where a process has met trouble, or has been silent for too long."""
        said = self._heard.get(rank, {"over": []})
        if END in said["over"]:
            return
        kind = UserError if self.first else FirstGoneError
        if "trouble" in said:
            raise kind(f"process {rank} has stopped: {said['trouble']}")
        patience = SILENCE if rank in self._heard else START
        if self._looked - self._since[rank] > patience:
            raise kind(
                f"process {rank} has given no sign of life for {patience:g} seconds: the same"
                " command, given again, goes on with what is left"
            )

    def _note(self, key: str) -> dict[str, Any] | None:
        """What the first process has told in this run, None as long as it has not."""
        note = _read(self._folder / f"told-{key}.json")
        return note if note is not None and note["run"] == self.run else None

    def _beat(self, **last: Any) -> None:
        with self._lock:
            self._said |= {"beat": self._said["beat"] + 1, **last}
            words = json.dumps(self._said)
        with writing(self._folder / f"{self.rank}.json") as part:
            part.write_text(words)

    def _keep_beating(self, ended: Event) -> None:
        while not ended.is_set():
            with suppress(UserError, OSError):  # a disk that is away for a moment
                self._beat()
            ended.wait(BEAT)


def _read(path: Path) -> dict[str, Any] | None:
    """A process's file; None where there is none, or none that can be read at this moment."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found
