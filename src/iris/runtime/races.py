"""Finds races, reads of memory that nothing wrote, and accesses out of bounds, in what programs and host code do.

Order (see :mod:`iris.runtime.clocks`) comes from the stream, from host exchanges, and from atomics: an acquire learns
what the releases at the same location published, also through relaxed read-modify-writes in between, until a plain
store ends the chain. A release of ``gpu`` scope is for programs of the same rank, ``cta`` scope for nobody else.
Volatile loads count as relaxed atomic reads at system scope.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from iris.errors import OutOfBoundsError, RaceError, UninitializedReadError
from iris.runtime.advice import missing_order
from iris.runtime.clocks import CTA, LEVELS, PLAIN, SYS, Actor, Clocks, Doing, joined
from iris.runtime.memory_map import MemoryMap, MemoryRegion
from iris.runtime.reports import Access, BoundsReport, RaceReport, UninitializedReport
from iris.runtime.source import source_line


class _Message:
    """What releases at a location have published: to every rank, and to programs of each rank."""

    __slots__ = ("everyone", "single", "within")

    def __init__(self, everyone: np.ndarray | None, within: dict[int, np.ndarray]):
        self.everyone = everyone
        self.within = within
        self.single = 0  # the granule at which it is the message of one entry alone; 0 when of several


class RaceChecker:
    """Checks accesses one after another, in the order in which they happen.

    Args:
        memory: the known regions.
        clocks: the actors' clocks.
        describe: names an actor's ``who`` for messages: rank, kernel, program, a number of the launch, and which launch
            of the kernel it is.
        races, bounds, uninitialized: what to check.
    """

    def __init__(
        self,
        memory: MemoryMap,
        clocks: Clocks,
        describe: Callable[[object], tuple[int, str, tuple[int, ...] | None, int, int]],
        *,
        races: bool = True,
        bounds: bool = True,
        uninitialized: bool = True,
    ):
        self.memory = memory
        self.clocks = clocks
        self.races = races
        self.bounds = bounds
        self.uninitialized = uninitialized
        # Stores that were released before every warp of their program had met: number -> where.
        self.uncovered: dict[int, tuple[str, str, int]] = {}
        self.relied: Callable[[int, Actor], None] = lambda earlier, later: None
        self._describe = describe
        self._messages: list[_Message | None] = [None]

    def locate(
        self, actor: Actor, addresses: np.ndarray, itemsize: int, doing: tuple[str, int, str]
    ) -> list[tuple[MemoryRegion, np.ndarray | None]]:
        """The regions that 1-D addresses lie in, each with which of them are inside it; None stands for all.

        Raises:
            OutOfBoundsError: an address lies in no live region, or an access reaches past the end of one.
        """
        if addresses.size == 0:
            return []
        low, high = int(addresses.min()), int(addresses.max())
        region = self.memory.find(low)
        if region is not None and high + itemsize <= region.end:
            return [(region, None)]
        found: list[tuple[MemoryRegion, np.ndarray | None]] = []
        left = np.ones(addresses.size, dtype=bool)
        while left.any():
            low = int(addresses[left].min())
            region = self.memory.find(low) or self.memory.search(low, actor.rank)
            if region is None or low + itemsize > region.end:
                if self.bounds:
                    self._out_of_bounds(actor, low, addresses, itemsize, doing)
                inside = left & (addresses == low)
            else:
                inside = left & (addresses <= np.uint64(region.end - itemsize))
                found.append((region, inside))
            left &= ~inside
        return found

    def plain(self, actor: Actor, region: MemoryRegion, entries, write: bool, doing: tuple[str, int, str]) -> int:
        """A load or store that is no atomic, at shadow entries of a region; returns the number of the access."""
        assert region.writes is not None
        assert region.reads is not None
        number = self.clocks.number(actor, *doing)
        if self.uninitialized and not write:
            self._check_initialized(actor, region, entries, doing)
        if self.races:
            self._check(actor, region, region.writes, entries, number, PLAIN, False)
            if region.atomics is not None:
                self._check(actor, region, region.atomics, entries, number, PLAIN, True)
        if not write:
            self._include(actor, region.reads, entries, number)
            return number
        if self.races:
            self._check(actor, region, region.reads, entries, number, PLAIN, True)
        region.writes[entries] = number
        region.reads[entries] = 0
        if region.atomics is not None:
            assert region.published is not None
            region.atomics[entries] = 0
            region.published[entries] = 0
        return number

    def atomic(
        self,
        actor: Actor,
        region: MemoryRegion,
        entries: np.ndarray,
        changed: np.ndarray,
        doing: tuple[str, int, str],
        sem: str,
        scope: str,
        name: str = "load",
    ) -> None:
        """An atomic, ``name`` as in :meth:`iris.runtime.observer.Observer.atomic`, at shadow entries of a region.

        ``changed`` says which of them were changed.
        """
        assert region.writes is not None
        assert region.reads is not None
        region.need_atomics()
        assert region.atomics is not None
        level = LEVELS[scope]
        number = self.clocks.number(actor, *doing, level)
        overwrites = name in ("xchg", "store")
        if self.uninitialized and not overwrites:
            self._check_initialized(actor, region, entries, doing)
        self._acquire(actor, region, entries, sem, level)
        if self.races:
            self._check(actor, region, region.writes, entries, number, level, False)
            self._check(actor, region, region.atomics, entries, number, level, True)
        # Storing what was there already is a write too; an addition of 0 is how flags are polled.
        written, read = (entries, entries[:0]) if overwrites else (entries[changed], entries[~changed])
        if written.size:
            if self.races:
                self._check(actor, region, region.reads, written, number, level, True)
            self._include(actor, region.atomics, written, number)
        if read.size:
            self._include(actor, region.reads, read, number)
        if name == "store":  # what was published before reaches only through read-modify-writes
            assert region.published is not None
            region.published[entries] = 0
        # A compare-and-swap that fails is only a load.
        released = written if name in ("cas", "load") else entries
        if sem in ("release", "acq_rel") and level > CTA and released.size:
            self._release(actor, region, released, level)

    def accesses(self, region: MemoryRegion, address: int) -> list[Access]:
        """Who wrote an address, the last plain write first."""
        if region.writes is None:
            return []
        entry = (address - region.start) // region.granule
        numbers = [int(region.writes[entry])]
        if region.atomics is not None:
            numbers += self.clocks.sets[int(region.atomics[entry])].tolist()
        return [self.access(n, region, address) for n in numbers if n]

    def access(self, number: int, region: MemoryRegion, address: int, extent: str = "") -> Access:
        """What an access was, for messages."""
        doing = self.clocks.doings[number]
        assert doing is not None
        return self.access_of(doing, region, address, extent)

    def access_of(self, doing: Doing, region: MemoryRegion, address: int, extent: str = "") -> Access:
        rank, kernel, program, launch, nth = self._describe(doing.who)
        source = source_line(doing.file, doing.line)
        return Access(
            rank=rank,
            kernel=kernel,
            program=program,
            file=doing.file,
            line=doing.line,
            source=source,
            what=doing.what,
            tensor=region.label,
            owner=region.rank,
            site=region.site,
            elements=extent or region.element(address),
            launch=launch,
            nth=nth,
        )

    def _include(self, actor: Actor, members: np.ndarray, entries, number: int) -> None:
        current = members[entries]
        if current.size == 0:
            return
        low, high = current.min(), current.max()
        if low == high:
            new = self.clocks.add(int(low), number, actor)
            if new != low:
                members[entries] = new
            return
        values, inverse = np.unique(current, return_inverse=True)
        new_values = np.array([self.clocks.add(int(v), number, actor) for v in values], dtype=np.int32)
        members[entries] = new_values[inverse].reshape(current.shape)

    def _check(
        self, actor: Actor, region: MemoryRegion, shadow: np.ndarray, entries, number: int, level: int, sets: bool
    ) -> None:
        current = shadow[entries]
        if current.size == 0:
            return
        low, high = int(current.min()), int(current.max())
        if high == 0 and (sets or not region.born):
            return
        values = (low,) if low == high else np.unique(current)
        for value in values:
            accesses = self.clocks.sets[value] if sets else np.array([value or region.born], dtype=np.int32)
            unordered = self.clocks.unordered(actor, accesses, level)
            if self.uncovered and not sets and value in self.uncovered and self.clocks.slots[value] != actor.slot:
                self.relied(int(value), actor)
            if unordered.any():
                self._race(actor, region, entries, current == value, int(accesses[unordered][0]), number)

    def _check_initialized(self, actor: Actor, region: MemoryRegion, entries, doing: tuple[str, int, str]) -> None:
        if not region.born_uninitialized:
            return
        assert region.writes is not None
        unwritten = region.writes[entries] == 0
        if not unwritten.any():
            return
        if region.atomics is not None:
            unwritten &= region.atomics[entries] == 0
            if not unwritten.any():
                return
        address, extent = self._extent(region, entries, unwritten)
        access = self.access_of(Doing(actor.who, *doing), region, address, extent)
        raise_report(UninitializedReadError, UninitializedReport(access))

    def _acquire(self, actor: Actor, region: MemoryRegion, entries: np.ndarray, sem: str, level: int) -> None:
        if sem not in ("acquire", "acq_rel") or level <= CTA:
            return
        assert region.published is not None
        current = region.published[entries]
        for value in (current[0],) if current.size == 1 else np.unique(current):
            message = self._messages[value]
            if message is not None:
                if level == SYS:
                    actor.learn(message.everyone)
                actor.learn(message.within.get(actor.rank))

    def _release(self, actor: Actor, region: MemoryRegion, entries: np.ndarray, level: int) -> None:
        assert region.published is not None
        mine = actor.publish()
        current = region.published[entries]
        if current.size == 1:
            # Replaced in place where possible, so that a flag that is set for ever leaves no trail of messages.
            old = int(current[0])
            message, before = self._joined_message(old, mine, actor.rank, level), self._messages[old]
            message.single = region.granule
            if before is not None and before.single == region.granule:
                self._messages[old] = message
            else:
                region.published[entries] = self._new_message(message)
            return
        values, inverse = np.unique(current, return_inverse=True)
        new = [self._new_message(self._joined_message(int(v), mine, actor.rank, level)) for v in values]
        region.published[entries] = np.array(new, dtype=np.int32)[inverse].reshape(current.shape)

    def _joined_message(self, old: int, mine: np.ndarray, rank: int, level: int) -> _Message:
        before = self._messages[old]
        if before is None:
            return _Message(mine if level == SYS else None, {rank: mine})
        everyone = before.everyone
        if level == SYS:
            everyone = mine if everyone is None else joined(everyone, mine)
        within = before.within.get(rank)
        return _Message(everyone, {**before.within, rank: mine if within is None else joined(within, mine)})

    def _new_message(self, message: _Message) -> int:
        self._messages.append(message)
        return len(self._messages) - 1

    def _extent(self, region: MemoryRegion, entries, chosen: np.ndarray) -> tuple[int, str]:
        """First address and the elements of the chosen entries, in words."""
        if isinstance(entries, slice):
            positions = np.arange(entries.start, entries.stop)[chosen.reshape(-1)]
        else:
            positions = np.unique(entries.reshape(-1)[chosen.reshape(-1)])
        addresses = region.start + positions * region.granule
        first, last = int(addresses[0]), int(addresses[-1])
        if region.element(first) == region.element(last):
            return first, region.element(first)
        count = len(np.unique((addresses - region.start) // region.itemsize))
        return first, f"{region.element(first)} to {region.element(last)} ({count} elements)"

    def _race(self, actor: Actor, region: MemoryRegion, entries, chosen: np.ndarray, earlier: int, later: int) -> None:
        address, extent = self._extent(region, entries, chosen)
        first, second = self.access(earlier, region, address, extent), self.access(later, region, address, extent)
        missing = missing_order(first, second, int(self.clocks.levels[earlier]), int(self.clocks.levels[later]))
        raise_report(RaceError, RaceReport(first, second, missing))

    def _out_of_bounds(
        self, actor: Actor, address: int, addresses: np.ndarray, itemsize: int, doing: tuple[str, int, str]
    ) -> None:
        where, distance = "no tensor is known", 0
        region = self.memory.nearest(address)
        if region is None:
            region = MemoryRegion(address, itemsize, actor.rank, f"address {address:#x}")
        else:
            distance = address - region.end if address >= region.end else address - region.start
            side = "past the end" if address >= region.end else "before the start"
            if region.start <= address < region.end:
                side, distance = "across the end", address + itemsize - region.end
            elements = (region.end - region.start) // region.itemsize
            where = (
                f"{abs(distance)} bytes {side} of {region.describe()} ({elements} elements of {region.itemsize} bytes)"
            )
        inside = (addresses >= region.start) & (addresses + np.uint64(itemsize) <= region.end)
        beyond = addresses.size - int(inside.sum())
        index = (address - region.start) // region.itemsize
        access = self.access_of(Doing(actor.who, *doing), region, address, f"{region.label}[{index}]")
        raise_report(OutOfBoundsError, BoundsReport(access, where, beyond))


def raise_report(kind, report) -> None:
    """Raise the error of a report, whose text is the message."""
    raise kind(str(report), report)
