"""Tells the cost model what a simulated world does: the watcher that also keeps virtual time.

Accesses are charged as the interpreter makes them; when a program waits is worked out in :mod:`iris.sim._looks`.
Programs give way to earlier ones before they synchronise, so flags and counters change in the order of time.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from iris.runtime import streams
from iris.runtime.memory_map import MemoryRegion
from iris.runtime.scheduler import Launch, Program
from iris.runtime.source import place
from iris.runtime.world import World
from iris.sim._looks import Looks, ProgramName, Running
from iris.sim.virtual_time import VirtualTime
from iris.sim.watcher import Watcher, active

# An access to at most so many elements may be to flags; more are data.
MOST_FLAGS = 32
_CONTEXT_MADE = "iris.iris()"
_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "convolution", "scaled_dot_product_attention"}
)
_DESCRIPTOR_ACCESSES = ("create_descriptor_load", "create_descriptor_store")


@dataclass(slots=True)
class _Issued:
    number: int
    issued_ns: float


@dataclass(slots=True)
class _StreamOrder:
    number: int
    reached: list[int] = field(default_factory=list)  # ended launches that cover all that the stream has done


class Timing(Watcher):
    """A watcher that also tells virtual time what happens.

    Args:
        world, check: as for :class:`iris.sim.watcher.Watcher`; the world's ``clock`` must be :meth:`now`.
        time: the virtual time to keep.
    """

    def __init__(self, world: World, check: Sequence[str], time: VirtualTime):
        super().__init__(world, check)
        self.time = time
        self._launches: dict[Launch, _Issued] = {}
        self._launch_numbers, self._stream_numbers = itertools.count(), itertools.count()
        self._orders: weakref.WeakKeyDictionary[Any, _StreamOrder] = weakref.WeakKeyDictionary()
        self._programs: dict[Program, Running] = {}
        self._looks = Looks(time)
        # Addresses as spans and caches know them: the same in every run.
        self._starts: weakref.WeakKeyDictionary[MemoryRegion, int] = weakref.WeakKeyDictionary()
        self._next_start = 1 << 20

    def now(self, program: Program) -> float:
        """When a program does its next access, ns. One that polls in vain does not hold up the others for ever."""
        running = self._programs[program]
        return self.time.now(running.name) + running.looked_ns

    def ticks(self) -> int:
        program = self.world.current
        if program is None:
            return 0
        running = self._programs[program]
        self._looks.end_late(running)
        return round(self.time.now(running.name))

    def unit(self) -> tuple[int, int]:
        program = self.world.current
        return self.time.place(self._programs[program].name) if program is not None else (0, 0)

    # Launches and programs.

    def launch_issued(self, launch: Launch, stream: Any) -> None:
        super().launch_issued(launch, stream)
        self._launches[launch] = _Issued(next(self._launch_numbers), self.time.host_now(launch.state.rank))

    def launch_started(self, launch: Launch, stream: Any) -> None:
        super().launch_started(launch, stream)
        issued, order = self._launches[launch], self._order(stream)
        x, y, z = launch.grid
        self.time.launch_issued(
            issued.number,
            launch.state.rank,
            order.number,
            launch.name,
            x * y * z,
            after=order.reached,
            issued_ns=issued.issued_ns,
        )

    def launch_ended(self, launch: Launch, stream: Any) -> None:
        super().launch_ended(launch, stream)
        for program in [p for p in self._programs if p.launch is launch]:
            self.program_ended(program)  # the launch has failed
        number = self._launches.pop(launch).number
        self.time.launch_ended(number, failed=launch.error is not None)
        self._order(stream).reached = [number]

    def program_started(self, program: Program) -> None:
        super().program_started(program)
        launch = program.launch
        (x, y, z), (extent_x, extent_y, _) = program.index, launch.grid
        name = ProgramName(launch.name, self._launches[launch].number, x + extent_x * (y + extent_y * z))
        self._programs[program] = Running(name, launch.state.rank)
        self.time.program_started(name, name.launch, name.index)

    def program_ended(self, program: Program) -> None:
        super().program_ended(program)
        running = self._programs[program]
        self._looks.end(running)
        self.time.program_ended(running.name)
        del self._programs[program]

    # Accesses.

    def load(self, addresses: np.ndarray, mask: np.ndarray | None, itemsize: int, volatile: bool) -> None:
        flat = active(addresses, mask)
        if volatile and 0 < flat.size <= MOST_FLAGS:
            if not self._is_internal(flat):
                self.world.give_way()
                self._looks.look(self._at_work(), self._flags(flat), _where())
        else:
            self._transfer(flat, itemsize, write=False)
        super().load(addresses, mask, itemsize, volatile)

    def store(self, addresses: np.ndarray, mask: np.ndarray | None, itemsize: int) -> None:
        flat = active(addresses, mask)
        self._transfer(flat, itemsize, write=True)
        super().store(addresses, mask, itemsize)
        if 0 < flat.size <= MOST_FLAGS and not self._is_internal(flat):
            self._looks.released(self._at_work(), self._flags(flat))

    def before_atomic(self, addresses: np.ndarray, mask: np.ndarray | None, itemsize: int) -> None:
        flat = active(addresses, mask)
        if flat.size and not self._is_internal(flat):
            self.world.give_way()
        super().before_atomic(addresses, mask, itemsize)

    def atomic(
        self,
        name: str,
        addresses: np.ndarray,
        mask: np.ndarray | None,
        itemsize: int,
        sem: str,
        scope: str,
        changed: np.ndarray,
    ) -> None:
        super().atomic(name, addresses, mask, itemsize, sem, scope, changed)
        flat = active(addresses, mask)
        if not flat.size or self._is_internal(flat):
            return
        if not changed.any() and flat.size <= MOST_FLAGS:
            self._looks.look(self._at_work(), self._flags(flat), _where())
            return
        running = self._at_work()
        address, owner = self._named(int(flat[0]))
        seen = None
        if address in running.looks or name in ("cas", "xchg"):
            # It ends a wait for what it has found, or is a wait of one turn.
            self._looks.forget(running, address)
            seen = self.time.last_release(address)
        self._looks.end(running)
        where = _where()
        if flat.size > 1:
            for first, rank, elements in self._parts(flat, itemsize):
                self.time.transfer(running.name, rank, elements * itemsize, True, where, address=first)
        self.time.atomic(running.name, owner, where)
        if self._looks.is_late(running, seen):
            self.time.waited(running.name, address, where, release=seen)
        if flat.size <= MOST_FLAGS:
            self._looks.released(running, self._flags(active(np.broadcast_to(addresses, changed.shape), changed)))

    def dot(self, m: int, n: int, k: int, dtype: str) -> None:
        super().dot(m, n, k, dtype)
        running = self._at_work()
        self._looks.end(running)
        self.time.dot(running.name, m, n, k, dtype)

    def _transfer(self, flat: np.ndarray, itemsize: int, write: bool) -> None:
        if not flat.size or self._is_internal(flat):
            return
        running = self._at_work()
        self._looks.end(running)
        bulk = sys._getframe(3).f_code.co_name in _DESCRIPTOR_ACCESSES
        where = _where()
        for first, owner, elements in self._parts(flat, itemsize):
            self.time.transfer(running.name, owner, elements * itemsize, write, where, address=first, bulk=bulk)

    def _parts(self, flat: np.ndarray, itemsize: int) -> Iterator[tuple[int, int, int]]:
        """First address, owner and number of elements of an access in each allocation."""
        low, high = int(flat.min()), int(flat.max())
        region = self.memory.find(low)
        if region is not None and high < region.end:
            yield *self._named(low), flat.size
            return
        left = flat.size
        for _, inside in self.checker.locate(self._running().state.actor, flat, itemsize, (*place(), "access")):
            chosen = flat if inside is None else flat[inside]
            left -= chosen.size
            yield *self._named(int(chosen.min())), chosen.size
        if left:
            yield *self._named(low), left

    def _named(self, address: int) -> tuple[int, int]:
        """What spans and caches call an address, and the rank that owns it."""
        region = self.memory.find(address)
        if region is None:
            return address, self._at_work().rank
        start = self._starts.get(region)
        if start is None:
            start = self._starts[region] = self._next_start
            self._next_start += -(-(region.end - region.start) // 4096) * 4096
        # Memory that is on no heap may be shared by ranks that would have copies of their own.
        return start + address - region.start, region.rank if region.everywhere else self._at_work().rank

    def _flags(self, flat: np.ndarray) -> list[tuple[int, int]]:
        return [self._named(address) for address in flat.tolist()]

    def _at_work(self) -> Running:
        return self._programs[self._running()]

    def _is_internal(self, flat: np.ndarray) -> bool:
        region = self.memory.find(int(flat.flat[0]))
        return region is not None and region.internal

    # Hosts and streams.

    def _order(self, stream: Any) -> _StreamOrder:
        order = self._orders.get(stream)
        if order is None:
            order = self._orders[stream] = _StreamOrder(next(self._stream_numbers))
        return order

    def event_recorded(self, mark: Any, stream: Any) -> None:
        super().event_recorded(mark, stream)
        mark.launches = list(self._order(stream).reached)

    def event_awaited(self, mark: Any, stream: Any) -> None:
        super().event_awaited(mark, stream)
        order = self._order(stream)
        order.reached = list(dict.fromkeys([*order.reached, *getattr(mark, "launches", ())]))

    def host_awaited(self, what: Any) -> None:
        super().host_awaited(what)
        rank = self.world.rank()
        is_stream = isinstance(what, streams.Stream)
        for launch in self._order(what).reached if is_stream else getattr(what, "launches", ()):
            self.time.host_waited_for_launch(rank, launch)

    def hosts_met(self, ranks: Sequence[int], what: str) -> None:
        super().hosts_met(ranks, what)
        if not what.startswith(_CONTEXT_MADE):  # a prediction begins when the ranks have their contexts
            self.time.hosts_met(ranks, what)

    def host_operation(self, name: str) -> None:
        super().host_operation(name)
        if name in _PRODUCTS:
            self.time.unmodelled.add(f"aten.{name}")

    def collective(self, ranks: Sequence[int], what: str) -> None:
        super().collective(ranks, what)
        self.time.unmodelled.add(what)
        orders = [self._order(self.world.hosts[rank].streams.current[-1]) for rank in ranks]
        together = list(dict.fromkeys(launch for order in orders for launch in order.reached))
        for order in orders:
            order.reached = together


def _where() -> str:
    file, line = place()
    return f"{file.rpartition('/')[2]}:{line}"
