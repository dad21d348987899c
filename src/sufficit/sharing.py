"""Every process goes through all images as they are found, and does its share of the groups."""

import hashlib
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from sufficit.crews import Crew
from sufficit.data.loader import Entry, Unit
from sufficit.errors import UserError
from sufficit.keeping import Parts

SCORES, LEAK = "scores", "leak"  # the stages that leave parts


def dealt(groups: Iterable[Unit], done: Collection[int], crew: Crew) -> Iterator[Unit]:
    """The groups that are not done and fall to this process, in turn with the others."""
    turn = 0
    for group in groups:
        if group.number not in done:
            if turn % crew.size == crew.rank:
                yield group
            turn += 1


@dataclass
class Passage:
    """The groups that have gone by: those that were done before must still be the same."""

    parts: Parts
    done: Collection[int]  # what was scored before; none where another process looks after them
    closed: bool = False  # whether that was all
    groups: int = 0
    images: int = 0
    _names: Any = field(default_factory=hashlib.sha256)

    def watch(self, groups: Iterable[Unit]) -> Iterator[Unit]:
        """The groups as they come."""
        for group in groups:
            self.groups, self.images = self.groups + 1, self.images + len(group)
            names = "".join(f"{name}\n" for name in group.names)
            self._names.update(names.encode(errors="surrogateescape"))
            if group.number in self.done:
                _check_unchanged(group, self.parts.facts(SCORES, group.number), self.parts)
            elif self.closed:
                raise _another_run(self.parts, f"{group.names[0]} was not there when it was scored")
            yield group

    def check(self, crew: Crew) -> None:
        """Raise, when all have gone by, where other processes or an earlier start saw others."""
        if any(number >= self.groups for number in self.done):
            raise _another_run(self.parts, f"there were more images than the {self.images} now")
        names = self._names.hexdigest()[:16]
        crew.check_alike({"number of images": self.images, "names of images": names}, "images")


def images_in(parts: Parts, done: Collection[int]) -> int:
    """How many images there are in groups that are done; none but the last is smaller than others.

    So no more than two parts are read.
    """
    if not done:
        return 0
    first, last = (len(_all_of(parts.facts(SCORES, k))) for k in (min(done), max(done)))
    return first * (len(done) - 1) + last


def sizes_of(group: Unit) -> dict[str, int]:
    """The size of each image's file; -1 where there is none to be had."""
    return {entry.image.name: _bytes(entry) for entry in group.entries}


def scored_of(group: Unit, parts: Parts) -> list[Entry]:
    """The images of a group that were scored."""
    names = parts.facts(SCORES, group.number)["names"]
    known = {entry.image.name: entry for entry in group.entries}
    if not known.keys() >= {*names}:
        raise _another_run(parts, f"the images up to {group.names[-1]} are no longer the same")
    return [known[name] for name in names]


@dataclass(frozen=True)
class Roll:
    """The images that were scored: all that the leak must know of them."""

    targets: Tensor  # [N] the class each was scored for
    counts: Sequence[int]  # how many there are of each group

    @cached_property
    def starts(self) -> list[int]:
        """The row of each group's first image, and how many there are at all."""
        return [0, *accumulate(self.counts)]

    @property
    def digest(self) -> str:
        """A short name for exactly these groups and classes."""
        told = self.targets.numpy().tobytes() + str(list(self.counts)).encode()
        return hashlib.sha256(told).hexdigest()[:16]

    def facts(self, alpha_min: float) -> dict[str, Any]:
        """What a part of the leak says of all of it."""
        return {"alpha_min": alpha_min, "roll": self.digest}

    def of(self, group: Unit) -> Tensor:
        """The classes of a group's images."""
        return self.targets[self.starts[group.number] : self.starts[group.number + 1]]

    def left(
        self, groups: Iterable[Unit], done: Collection[int], parts: Parts, crew: Crew
    ) -> Iterator[Unit]:
        """The groups that are not done and fall to this process, of them what was scored."""
        empty = {number for number, count in enumerate(self.counts) if not count}
        for group in dealt(islice(groups, len(self.counts)), empty.union(done), crew):
            yield replace(group, entries=tuple(scored_of(group, parts)))

    def entries(self, rows: Sequence[int], groups: Iterable[Unit], parts: Parts) -> list[Entry]:
        """The pictures of some rows, for which the images are gone through once."""
        wanted: dict[int, list[int]] = {}
        for row in rows:
            wanted.setdefault(bisect_right(self.starts, row) - 1, []).append(row)
        found: dict[int, Entry] = {}
        for group in groups:
            if group.number in wanted:
                scored, start = scored_of(group, parts), self.starts[group.number]
                found |= {row: scored[row - start] for row in wanted.pop(group.number)}
            if not wanted:
                break
        return [found[row] for row in rows]


def begun_round(parts: Parts, crew: Crew) -> tuple[set[int], Passage]:
    """The groups that were scored before, in every process; the first checks them on its way."""
    done = {*crew.tell(f"done-{SCORES}", parts.done(SCORES))}
    if not crew.first:
        return done, Passage(parts, ())
    return done, Passage(parts, done, parts.is_complete)


def begun_leak(parts: Parts, roll: Roll, crew: Crew) -> set[int]:
    """The groups whose leak was measured before, over donors of the same images."""
    done = {*crew.tell(f"done-{LEAK}", parts.done(LEAK))}
    if done and parts.facts(LEAK, min(done))["roll"] != roll.digest:
        raise _another_run(parts, "images have come or gone since the leak was first measured")
    return done


def told_roll(roll: Roll | None, alpha_min: float, crew: Crew) -> tuple[Roll, float]:
    """What the first process knows of the images that were scored, and alpha_min, in all."""
    known = None if roll is None else [roll.targets.tolist(), list(roll.counts), alpha_min]
    targets, counts, alpha = crew.tell("roll", known)
    return Roll(torch.tensor(targets), counts), alpha


def _check_unchanged(group: Unit, facts: dict[str, Any], parts: Parts) -> None:
    if {*group.names} != _all_of(facts):
        raise _another_run(parts, f"the images up to {group.names[-1]} are no longer the same")
    for name, size in sizes_of(group).items():
        if facts["bytes"][name] != size:
            raise UserError(
                f"{name} is no longer the file that was scored when this run was begun: choose"
                " another --out, or --overwrite it"
            )


def _another_run(parts: Parts, reason: str) -> UserError:
    return UserError(
        f"{parts.folder.parent} holds part of another run: {reason}. Go on with the images it was"
        " begun with, choose another --out, or --overwrite it"
    )


def _all_of(facts: dict[str, Any]) -> set[str]:
    """The images of a group, scored or not."""
    return {*facts["names"], *facts["skipped"]}


def _bytes(entry: Entry) -> int:
    try:
        return entry.image.bytes()
    except OSError:
        return -1
