"""Connects a world to the checker: which access of a program or of host code means what, and what orders what."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from iris.errors import MissingBarrierWarning
from iris.runtime import streams
from iris.runtime.clocks import Actor, Clocks, joined
from iris.runtime.memory_map import MemoryMap, MemoryRegion
from iris.runtime.observer import Observer
from iris.runtime.races import RaceChecker
from iris.runtime.scheduler import Launch, Program
from iris.runtime.source import place
from iris.runtime.world import LaunchState, World

if TYPE_CHECKING:
    from collections.abc import Sequence

CHECKS = ("races", "deadlocks", "bounds", "uninitialized")

_CONTEXT_FLAGS = "flags of the context"


@dataclass(frozen=True)
class Who:
    """An actor's name: a program of a kernel, or the host code of a rank (no kernel)."""

    rank: int
    kernel: str = ""
    program: tuple[int, int, int] | None = None
    launch: Any = None


def _describe(who: Any) -> tuple[int, str, tuple[int, ...] | None, int, int]:
    if who.launch is None:
        return who.rank, who.kernel, who.program, 0, 0
    return who.rank, who.kernel, who.program, id(who.launch), who.launch.nth


def _named(who: Who) -> str:
    return f"kernel {who.kernel} of rank {who.rank}" if who.kernel else f"the host code of rank {who.rank}"


class Watcher(Observer):
    """Told of everything that happens in a world.

    Args:
        world: the world.
        check: which of :data:`CHECKS` to make.
        many_warps: whether the simulated device runs a program on warps that need a barrier before a release.
    """

    def __init__(self, world: World, check: Sequence[str] = CHECKS, many_warps: bool = True):
        self.world = world
        self.many_warps = many_warps
        self.clocks = Clocks()
        self.memory = MemoryMap()
        self.tracking = "races" in check or "uninitialized" in check
        self.checker = RaceChecker(
            self.memory,
            self.clocks,
            _describe,
            races="races" in check,
            bounds="bounds" in check,
            uninitialized="uninitialized" in check,
        )
        self.checker.relied = self._relied
        self._hosts = [self.clocks.nothing() for _ in range(world.size)]
        self._actors: weakref.WeakKeyDictionary[Any, Actor] = weakref.WeakKeyDictionary()
        self._slots: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._launched: Counter[tuple[int, str]] = Counter()
        self._warned: set[tuple[str, int]] = set()
        # Blocks by address, and their bytes, that peers have allocated but not yet the rank whose memory it is: peers
        # may store there already. And how often a rank has yet to give back what peers have given back.
        self._given: dict[int, int] = {}
        self._taken: Counter[int] = Counter()
        self._covered: dict[int, int] = {}  # stores in `uncovered` -> time of their program at its next barrier
        world.observer = self
        world.memory_watcher = self
        world.met = self.hosts_met

    # Memory.

    def allocated(self, rank: int, everywhere: list[int], nbytes: int, itemsize: int, site: str) -> None:
        """A block of a rank's heap was given out; ``everywhere`` has its address on each rank."""
        if self._given.pop(everywhere[rank], None) == nbytes:
            return
        short = site.rpartition("/")[2]
        for owner, start in enumerate(everywhere):
            region = MemoryRegion(start, nbytes, owner, short, site, born_uninitialized=True, itemsize=itemsize)
            region.everywhere = tuple(everywhere)
            self.memory.add(region)
            if owner != rank:
                self._given[start] = nbytes

    def freed(self, address: int) -> None:
        """A block of a rank's heap was given back, which all ranks have agreed on."""
        if self._taken[address]:
            self._taken[address] -= 1
            return
        region = self.memory.find(address)
        for start in region.everywhere if region is not None else ():
            self.memory.remove(start)
            self._given.pop(start, None)
            if start != address:
                self._taken[start] += 1

    def noted(self, rank: int, tensor: torch.Tensor, label: str) -> None:
        """Bookkeeping of a context, which reports leave out."""
        region = self.memory.add_tensor(tensor, rank, label, internal=True)
        if region is not None:  # known already since an operation made it
            region.label, region.internal = label, True

    def _name_arguments(self, launch: Launch, rank: int) -> None:
        for name, value in (launch.keep or {}).items():
            base = getattr(value, "base", value)  # a tensor descriptor has its tensor there
            if not isinstance(base, torch.Tensor) or base.numel() == 0:
                continue
            region = self.memory.find(base.data_ptr()) or self.memory.add_tensor(base, rank, name)
            if region is None or region.internal:
                continue
            whole = base.is_contiguous() and base.data_ptr() == region.start
            for known in self._counterparts(region):
                known.label = name
                known.itemsize = base.element_size()
                known.shape = tuple(base.shape) if whole else None

    def _counterparts(self, region: MemoryRegion) -> list[MemoryRegion]:
        """The same allocation on every rank."""
        found = (self.memory.find(address) for address in region.everywhere) if region.everywhere else (region,)
        return [r for r in found if r is not None and r.label != _CONTEXT_FLAGS]

    # Kernels.

    def launch_issued(self, launch: Launch, stream: Any) -> None:
        rank = self.world.rank()
        launch.state = LaunchState(rank, stream=stream, issued=self._hosts[rank])
        self._launched[rank, launch.name] += 1
        launch.nth = self._launched[rank, launch.name]
        self._name_arguments(launch, rank)

    def launch_started(self, launch: Launch, stream: Any) -> None:
        actor = self._stream_actor(stream, launch.state.rank)
        actor.learn(launch.state.issued)
        launch.state.known = actor.publish()

    def program_started(self, program: Program) -> None:
        launch, state = program.launch, program.launch.state
        free = self._slots.setdefault(state.stream, [])
        slot = free.pop() if free else self.clocks.new_slot()
        who = Who(state.rank, launch.name, program.index, launch)
        actor = program.state.actor = Actor(self.clocks, slot, state.rank, who, state.known)
        state.programs.append(actor)

    def launch_ended(self, launch: Launch, stream: Any) -> None:
        actor = self._stream_actor(stream, launch.state.rank)
        for program in launch.state.programs:
            actor.learn(program.publish())
        self._slots.setdefault(stream, []).extend(p.slot for p in launch.state.programs)
        launch.state.programs = []
        # What runs later is ordered after the end of the launch, which covers all of its stores.
        ended = [n for n in self.checker.uncovered if self._launch_of(n) is launch]
        for number in ended:
            del self.checker.uncovered[number]
            self._covered.pop(number, None)

    def _launch_of(self, number: int) -> Launch | None:
        doing = self.clocks.doings[number]
        return doing.who.launch if doing is not None else None

    def _running(self) -> Program:
        program = self.world.current
        assert program is not None
        return program

    def load(self, addresses: np.ndarray, mask: np.ndarray | None, itemsize: int, volatile: bool) -> None:
        flat = active(addresses, mask)
        if flat.size == 0:
            return
        state = self._running().state
        state.accesses += not volatile
        actor = state.actor
        doing = (*place(), "volatile load" if volatile else "load")
        for region, inside in self.checker.locate(actor, flat, itemsize, doing):
            if self.tracking and not region.internal:
                entries = region.select(flat if inside is None else flat[inside], itemsize)
                if volatile:
                    unchanged = np.zeros(entries.size, dtype=bool)
                    self.checker.atomic(actor, region, entries, unchanged, doing, "relaxed", "sys")
                else:
                    self.checker.plain(actor, region, entries, False, doing)

    def store(self, addresses: np.ndarray, mask: np.ndarray | None, itemsize: int) -> None:
        flat = active(addresses, mask)
        if flat.size == 0:
            return
        state = self._running().state
        state.accesses += 1
        doing = (*place(), "store")
        for region, inside in self.checker.locate(state.actor, flat, itemsize, doing):
            if self.tracking and not region.internal:
                entries = region.select(flat if inside is None else flat[inside], itemsize)
                number = self.checker.plain(state.actor, region, entries, True, doing)
                if flat.size > 1 and self._warps(state) > 1:
                    state.unpublished.add(number)
        self.world.changed(int(flat.min()), int(flat.max()) + itemsize - 1)

    def before_atomic(self, addresses: np.ndarray, mask: np.ndarray | None, itemsize: int) -> None:
        if self.checker.bounds:
            self.checker.locate(self._running().state.actor, active(addresses, mask), itemsize, (*place(), "atomic"))

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
        flat = active(addresses, mask)
        if flat.size == 0:
            return
        state = self._running().state
        file, line = place()
        releases = sem in ("release", "acq_rel") and scope != "cta" and (name != "cas" or changed.any())
        if releases and state.unpublished:
            where = (self._running().launch.name, file, line)
            self.checker.uncovered.update(dict.fromkeys(state.unpublished, where))
        if self.tracking:
            doing = (file, line, f"atomic {name} ({sem}, {scope})")
            changes = active(changed, mask)
            for region, inside in self.checker.locate(state.actor, flat, itemsize, doing):
                if region.internal:
                    continue
                chosen, moved = (flat, changes) if inside is None else (flat[inside], changes[inside])
                entries = region.select(chosen, itemsize)
                if entries.size != moved.size:
                    moved = np.repeat(moved, entries.size // moved.size)
                self.checker.atomic(state.actor, region, entries, moved, doing, sem, scope, name)
        if changed.any():
            self.world.changed(int(flat.min()), int(flat.max()) + itemsize - 1)

    def barrier(self) -> None:
        state = self._running().state
        for number in state.unpublished & self.checker.uncovered.keys():
            self._covered[number] = state.actor.time
        state.unpublished.clear()

    def _warps(self, state: Any) -> int:
        return self._running().launch.num_warps if self.many_warps else 1

    def _relied(self, earlier: int, later: Actor) -> None:
        """A program has used a store that was released without a barrier of the storing program's warps."""
        kernel, file, line = self.checker.uncovered[earlier]
        covered = self._covered.get(earlier)
        released_again = covered is not None and later.known()[self.clocks.slots[earlier]] >= covered
        if released_again or (file, line) in self._warned:
            return
        self._warned.add((file, line))
        stored = self.clocks.doings[earlier]
        assert stored is not None
        warnings.warn_explicit(
            f"kernel {kernel} releases at {file}:{line} without tl.debug_barrier() after its stores at {stored.file}:"
            f"{stored.line}, and {_named(later.who)} relies on them: on a GPU the release covers the stores of the "
            "releasing thread only, those of other warps may come later. Call tl.debug_barrier() before the release, "
            "or use iris.signal.notify",
            MissingBarrierWarning,
            file,
            line,
        )

    # Hosts and streams.

    def stream_actor(self, rank: int) -> Actor:
        """Who does the PyTorch operations of a rank's host code now, ordered after the host."""
        actor = self._stream_actor(streams.current_stream(), rank)
        actor.learn(self._hosts[rank])
        return actor

    def _stream_actor(self, stream: Any, rank: int) -> Actor:
        actor = self._actors.get(stream)
        if actor is None:
            actor = Actor(self.clocks, self.clocks.new_slot(), rank, Who(rank), self._hosts[rank])
            self._actors[stream] = actor
        return actor

    def event_recorded(self, mark: Any, stream: Any) -> None:
        actor = self._actors.get(stream)
        mark.known = actor.publish() if actor is not None else None

    def event_awaited(self, mark: Any, stream: Any) -> None:
        self._stream_actor(stream, self._rank_of(stream)).learn(getattr(mark, "known", None))

    def _rank_of(self, stream: Any) -> int:
        actor, host = self._actors.get(stream), self.world.host
        if actor is not None or host is not None:
            return actor.rank if actor is not None else self.world.rank()
        return next(h.rank for h in self.world.hosts if stream in h.streams.busy)

    def host_awaited(self, what: Any) -> None:
        rank = self.world.rank()
        if isinstance(what, streams.Stream):
            actor = self._actors.get(what)
            known = actor.publish() if actor is not None else None
        else:
            known = getattr(what, "known", None)
        if known is not None:
            self._hosts[rank] = joined(self._hosts[rank], known)

    def hosts_met(self, ranks: Sequence[int], what: str) -> None:
        """Hosts have exchanged something: what each does next is ordered after what all had waited for."""
        together = self._hosts[ranks[0]]
        for rank in ranks[1:]:
            together = joined(together, self._hosts[rank])
        for rank in ranks:
            self._hosts[rank] = together

    def host_operation(self, name: str) -> None:
        """Host code of a rank does a PyTorch operation that is not a mere view."""

    def collective(self, ranks: Sequence[int], what: str) -> None:
        """A collective of torch.distributed: orders the ranks' current streams and hosts with each other."""
        actors = []
        for rank in ranks:
            actor = self._stream_actor(self.world.hosts[rank].streams.current[-1], rank)
            actor.learn(self._hosts[rank])
            actors.append(actor)
        together = self.clocks.nothing()
        for actor in actors:
            together = joined(together, actor.publish())
        for rank, actor in zip(ranks, actors, strict=True):
            actor.learn(together)
            self._hosts[rank] = joined(self._hosts[rank], together)

    def ticks(self) -> int:
        """The clock of the running program in nanoseconds, for kernels that read one.

        It goes on with the program's accesses, and in a loop without accesses, which may wait for it.
        """
        program = self.world.current
        if program is None:
            return 0
        program.state.accesses += program.turns > 0
        return 1000 * program.state.accesses

    def unit(self) -> tuple[int, int]:
        """The compute unit that the running program is on, counted within its die, and the die."""
        return 0, 0


def active(values: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """The elements that are not masked, as one dimension."""
    if mask is None or mask.all():
        return values.reshape(-1)
    return values[np.broadcast_to(mask, values.shape)]
