"""Vector clocks over the programs and streams of a world, and the table of what they did.

An *actor* does things one after another: a program of a launch, or a stream (for the PyTorch operations of host code).
Each has a slot. What an actor knows of the others is an array of the latest time of every slot that is ordered before
it; its own time advances whenever it passes that knowledge on. An *access* is what an actor did at one place of the
source between two such moments; accesses are numbered from 1, and number 0 is ordered before everything.

Method: happens-before race detection with epochs for writers and sets for readers (Flanagan and Freund, FastTrack,
PLDI 2009), on whole arrays of elements at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

PLAIN, CTA, GPU, SYS = range(4)  # how far an access reaches as an atomic; PLAIN is none
LEVELS = {"cta": CTA, "gpu": GPU, "sys": SYS}


@dataclass(frozen=True)
class Doing:
    """What an access is, for messages: who, where and what."""

    who: Any
    file: str
    line: int
    what: str


class Actor:
    """One sequence of accesses.

    Attributes:
        slot: its column of the clocks.
        rank: the rank it belongs to.
        time: its own time; what it does now carries it.
        who: the program or stream, for messages.
    """

    __slots__ = ("_known", "_shared", "clocks", "numbers", "rank", "slot", "time", "who")

    def __init__(self, clocks: Clocks, slot: int, rank: int, who: Any, known: np.ndarray):
        self.clocks = clocks
        self.slot = slot
        self.rank = rank
        self.who = who
        self.time = clocks.begin(slot)
        self._known = known
        self._shared = True
        self.numbers: dict[tuple, int] = {}

    def known(self) -> np.ndarray:
        """Latest time of every slot that is ordered before the actor; not to be written to."""
        if len(self._known) < self.clocks.capacity:
            self._known = _padded(self._known, self.clocks.capacity)
            self._shared = False
        return self._known

    def learn(self, other: np.ndarray | None) -> None:
        """Be ordered after everything that ``other`` is ordered after."""
        if other is None:
            return
        known = self.known()
        other = _padded(other, len(known))
        if self._shared:
            self._known = np.maximum(known, other)
            self._shared = False
        else:
            np.maximum(known, other, out=known)

    def publish(self) -> np.ndarray:
        """What whoever learns from the actor now comes to know; later accesses of the actor are not part of it."""
        message = self.known().copy()
        message[self.slot] = self.time
        self.time += 1
        self.clocks.end(self.slot, self.time)
        self.numbers = {}
        return message


def joined(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """What is known by whoever knows both; a new array."""
    if len(one) < len(other):
        one, other = other, one
    result = one.copy()
    np.maximum(result[: len(other)], other, out=result[: len(other)])
    return result


def _padded(array: np.ndarray, length: int) -> np.ndarray:
    if len(array) >= length:
        return array
    longer = np.zeros(length, dtype=np.int32)
    longer[: len(array)] = array
    return longer


class Clocks:
    """Slots, and the table of accesses."""

    def __init__(self) -> None:
        self.capacity = 64
        self._used = 1  # slot 0 belongs to nobody: access 0 was done there at time 0
        self._times: list[int] = [0]
        self.count = 1
        self.slots = np.zeros(256, dtype=np.int32)
        self.times = np.zeros(256, dtype=np.int32)
        self.levels = np.zeros(256, dtype=np.int8)
        self.ranks = np.zeros(256, dtype=np.int32)
        self.doings: list[Doing | None] = [None]
        # Sets of accesses, by number; set 0 is empty.
        self.sets: list[np.ndarray] = [np.zeros(0, dtype=np.int32)]
        self._set_numbers: dict[tuple[int, ...], int] = {(): 0}
        self._additions: dict[tuple[int, int], int] = {}

    def nothing(self) -> np.ndarray:
        """The knowledge of an actor that is ordered after nobody."""
        return np.zeros(self.capacity, dtype=np.int32)

    def new_slot(self) -> int:
        slot = self._used
        self._used += 1
        self._times.append(0)
        while self._used > self.capacity:
            self.capacity *= 2
        return slot

    def begin(self, slot: int) -> int:
        """First time of the next actor of a slot, later than all of its earlier ones."""
        self._times[slot] += 1
        return self._times[slot]

    def end(self, slot: int, time: int) -> None:
        self._times[slot] = max(self._times[slot], time)

    def number(self, actor: Actor, file: str, line: int, what: str, level: int = PLAIN) -> int:
        """The number of what ``actor`` does now at a place."""
        key = (file, line, what, level)
        number = actor.numbers.get(key)
        if number is None:
            number = self.count
            if number == len(self.slots):
                for name in ("slots", "times", "levels", "ranks"):
                    setattr(self, name, np.concatenate([getattr(self, name), np.zeros_like(getattr(self, name))]))
            self.slots[number], self.times[number] = actor.slot, actor.time
            self.levels[number], self.ranks[number] = level, actor.rank
            self.doings.append(Doing(actor.who, file, line, what))
            self.count += 1
            actor.numbers[key] = number
        return number

    def unordered(self, actor: Actor, accesses: np.ndarray, level: int = PLAIN) -> np.ndarray:
        """Which of ``accesses`` are neither ordered before ``actor`` nor atomics that may happen beside its own."""
        slots = self.slots[accesses]
        open_ = (actor.known()[slots] < self.times[accesses]) & (slots != actor.slot)
        if level > CTA and open_.any():
            theirs, same = self.levels[accesses], self.ranks[accesses] == actor.rank
            open_ &= ~(((theirs == SYS) & (level == SYS)) | (same & (theirs >= GPU)))
        return open_

    def add(self, members: int, access: int, actor: Actor) -> int:
        """The set with ``access`` added and what is ordered before it left out."""
        key = (members, access)
        number = self._additions.get(key)
        if number is None:
            old = self.sets[members]
            before = (self.slots[old] == actor.slot) | (actor.known()[self.slots[old]] >= self.times[old])
            # Left out is an earlier access when whoever races with it races with this one too: it reaches at least as
            # far, from the same rank, as an atomic of gpu scope may happen beside this one but not beside that of
            # another rank, however far that reaches. Beside one of cta scope or none nothing may happen.
            covered = before & (self.levels[old] >= self.levels[access])
            if self.levels[access] > CTA:
                covered &= self.ranks[old] == actor.rank
            content = tuple(sorted({*old[~covered].tolist(), access}))
            number = self._set_numbers.get(content, 0)
            if number == 0:
                number = len(self.sets)
                self.sets.append(np.array(content, dtype=np.int32))
                self._set_numbers[content] = number
            self._additions[key] = number
        return number
