"""Virtual time: what the kernels and hosts of a simulation would have taken on a machine, by its cost model.

The simulator runs programs in an order of its own and tells :class:`VirtualTime` what each did. Clocks are per program
and per host, in ns from the start of the simulation. A program has two clocks, one for its accesses and one for its
arithmetic, because loads run ahead of dots on hardware; whatever synchronises (an atomic, a wait, its end) brings both
together. Rates are shared in ledgers (:class:`iris.sim.machine.Channel`), so a program that the simulator ran early
does not take what belonged to one that it ran late. ``docs/virtual-time.md`` has the formulas.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from iris.errors import ArgumentError
from iris.sim.machine import Channel, Machine, Paths, take
from iris.sim.timeline import BARRIER, COMPUTE, FETCH, HOST, OTHER, STORE, WAIT, Span

_RELEASES_KEPT = 64  # per address; waits for older values see the oldest one kept


@dataclass(slots=True)
class _Launch:
    rank: int
    kernel: str
    programs: int
    after: tuple[_Launch, ...]
    earliest_ns: float
    ready_ns: float | None = None
    end_ns: float = 0.0
    started: int = 0
    running: int = 0
    ended: bool = False

    def ready(self) -> float:
        """When its first program may start; known once everything before it has ended."""
        if self.ready_ns is None:
            late = [before.kernel for before in self.after if not before.ended]
            if late:
                raise ArgumentError(
                    f"a program of kernel {self.kernel} on rank {self.rank} started while a launch before it has not "
                    f"ended: {', '.join(late)}; call launch_ended for each first"
                )
            self.ready_ns = max([self.earliest_ns, *(before.end_ns for before in self.after)])
            self.after = ()  # a chain of launches must not keep all that came before
        return self.ready_ns


@dataclass(slots=True)
class _Program:
    key: Hashable
    launch: _Launch
    rank: int
    index: int
    slot: int
    memory: float  # clock of its accesses, ns
    compute: float  # clock of its arithmetic, ns
    dot_ends: deque[float]  # of as many dots as loads may run ahead
    latency_paid: float = 0.0  # by the loads since the last store or synchronisation, ns
    sent: float | None = None  # when the last access left, if it was an atomic: its answer comes later
    sent_to: int = -1
    memory_span: Span | None = None  # still growing
    arithmetic_span: Span | None = None

    def synchronise(self) -> float:
        """Let all that is under way come to its end; returns the program's clock."""
        now = self.memory = self.compute = max(self.memory, self.compute)
        self.latency_paid = 0.0
        self.dot_ends.clear()
        self.memory_span = self.arithmetic_span = self.sent = None
        return now


class _Release(NamedTuple):
    value: int | None
    visible_ns: float
    rank: int
    program: Hashable


class VirtualTime:
    """Clocks of all programs and hosts of a simulation. Programs and launches are named by any hashable keys.

    Args:
        machine: the device that every rank has.
        world_size: number of ranks.
        resident_programs: programs of a rank that run at a time; None for what the machine's units hold.
        bucket_ns: resolution in which rates are shared.
        pipeline_stages: loads run ahead of the dots that use them by at most this many dots.

    Attributes:
        spans: what was recorded so far, in no particular order (:class:`iris.sim.timeline.Span`).
        units: compute units of a rank that programs run on.
    """

    def __init__(
        self,
        machine: Machine,
        world_size: int,
        *,
        resident_programs: int | None = None,
        bucket_ns: float = 1000.0,
        pipeline_stages: int = 3,
    ):
        slots = machine.compute_units * machine.resident_programs_per_unit
        if resident_programs is not None:
            slots = resident_programs
        given = {"world_size": world_size, "resident_programs": slots, "bucket_ns": bucket_ns}
        for name, value in (given | {"pipeline_stages": pipeline_stages}).items():
            if value <= 0:
                raise ArgumentError(f"{name} is {value}; it must be greater than 0")
        self.machine = machine
        self.world_size = world_size
        self.units = min(machine.compute_units, slots)
        self.spans: list[Span] = []
        self._slots = slots
        self._bucket_ns = bucket_ns
        self._stages = pipeline_stages
        self._hosts = [0.0] * world_size
        self._free = [[(0.0, slot) for slot in range(slots)] for _ in range(world_size)]  # heaps of (free from, slot)
        self._launches: dict[Hashable, _Launch] = {}
        self._streams: dict[tuple[int, Hashable], _Launch] = {}
        self._programs: dict[Hashable, _Program] = {}
        self._releases: dict[int, deque[_Release]] = {}  # by address, in the order of modification
        self._paths = Paths(machine, world_size, bucket_ns)
        self._arithmetic: dict[tuple[int, int], tuple[Channel]] = {}  # of units that programs share, by rank and unit
        self._dots: dict[tuple[int, int, int, str], float] = {}

    # Hosts

    def host_now(self, rank: int) -> float:
        """The clock of a rank's host code, ns."""
        return self._hosts[rank]

    def host_works(self, rank: int, ns: float, what: str) -> None:
        """Host code of a rank is busy for ``ns``; ``what`` is shown in the timeline."""
        self._host_until(rank, self._hosts[rank] + ns, OTHER, -1, what)

    def hosts_met(self, ranks: Iterable[int], what: str) -> None:
        """Hosts have met in an exchange: all leave together, the host latency after the last to arrive."""
        arrived = {rank: self._hosts[rank] for rank in ranks}
        last = max(arrived, key=lambda rank: (arrived[rank], -rank))
        end = arrived[last] + self.machine.host_exchange_latency_ns
        for rank, since in arrived.items():
            # Those that came as late as the last waited for nobody.
            self._host_until(rank, end, BARRIER, last if since < arrived[last] else -1, what)

    def host_waited_for_launch(self, rank: int, launch: Hashable) -> None:
        """Host code has waited for the end of a launch."""
        known = self._launch(launch)
        if not known.ended:
            raise ArgumentError(f"kernel {known.kernel} has not ended; call launch_ended before host_waited_for_launch")
        self._host_until(rank, known.end_ns, WAIT, known.rank, known.kernel)

    def _host_until(self, rank: int, end: float, kind: str, peer: int, what: str) -> None:
        now = self._hosts[rank]
        if end > now:
            self.spans.append(Span(kind, rank, HOST, "", -1, now, end, peer, where=what))
            self._hosts[rank] = end

    # Launches and programs

    def launch_issued(
        self,
        launch: Hashable,
        rank: int,
        stream: Hashable,
        kernel: str,
        programs: int,
        after: Iterable[Hashable] = (),
    ) -> None:
        """A host has launched a kernel.

        It is ready the launch latency later, once the launch before it on the rank's stream and those of ``after``
        (awaited events) have ended. The host's clock does not move: charge its own work with :meth:`host_works`.

        Raises:
            ArgumentError: the key is that of a launch that has not ended, or one in ``after`` is not known.
        """
        if launch in self._launches and not self._launches[launch].ended:
            raise ArgumentError(f"launch {launch!r} of kernel {self._launches[launch].kernel} has not ended yet")
        before = [self._launch(other) for other in after]
        if (rank, stream) in self._streams:
            before.append(self._streams[rank, stream])
        earliest = self._hosts[rank] + self.machine.launch_latency_ns
        record = _Launch(rank, kernel, programs, tuple(before), earliest)
        self._launches[launch] = self._streams[rank, stream] = record

    def program_started(self, program: Hashable, launch: Hashable, index: int) -> float:
        """A program of a launch takes the slot of its rank that has been free for longest; returns its start, ns.

        Raises:
            ArgumentError: the key is in use, a launch before this one has not ended, or as many programs of the rank as
                are resident are running.
        """
        if program in self._programs:
            raise ArgumentError(f"program {program!r} is running already; call program_ended first")
        record = self._launch(launch)
        ready, free = record.ready(), self._free[record.rank]
        if not free:
            raise ArgumentError(
                f"rank {record.rank} runs {self._slots} programs, as many as are resident on {self.machine.name}; "
                f"one of kernel {record.kernel} cannot start before another ends"
            )
        free_from, slot = heapq.heappop(free)
        start = max(ready, free_from)
        record.started += 1
        record.running += 1
        ahead: deque[float] = deque(maxlen=self._stages)
        self._programs[program] = _Program(program, record, record.rank, index, slot, start, start, ahead)
        return start

    def program_ended(self, program: Hashable) -> float:
        """A program has ended and its slot is free; returns the end, ns."""
        state = self._program(program)
        end = state.synchronise()
        heapq.heappush(self._free[state.rank], (end, state.slot))
        state.launch.running -= 1
        state.launch.end_ns = max(state.launch.end_ns, end)
        del self._programs[program]
        return end

    def launch_ended(self, launch: Hashable) -> float:
        """All programs of a launch have ended; returns the end, ns."""
        record = self._launch(launch)
        if record.running or record.started != record.programs:
            raise ArgumentError(
                f"kernel {record.kernel} on rank {record.rank} has not ended: of {record.programs} programs "
                f"{record.started} have started and {record.running} still run"
            )
        record.end_ns = max(record.end_ns, record.ready())
        record.ended = True
        return record.end_ns

    def now(self, program: Hashable) -> float:
        """A program's clock, ns: the later of its accesses and its arithmetic."""
        state = self._program(program)
        return max(state.memory, state.compute)

    def next_free(self, rank: int) -> float:
        """When a rank has room for one more program, ns; infinite while every slot is taken."""
        free = self._free[rank]
        return free[0][0] if free else float("inf")

    # What programs do

    def transfer(
        self,
        program: Hashable,
        owner: int,
        nbytes: int,
        write: bool,
        where: str,
        *,
        address: int | None = None,
        bulk: bool = False,
    ) -> None:
        """A program loads (or, with ``write``, stores) a tile in the memory of rank ``owner``.

        A load waits for earlier loads and for its place in the pipeline, not for arithmetic; a store waits for both.

        Args:
            program: the program.
            owner: the rank whose memory it is; the program's own rank for local memory.
            nbytes: bytes that are not masked.
            write: whether it is a store.
            where: source place.
            address: of the first element; the same tile again comes from the cache. None: always from memory.
            bulk: whether a bulk copy (TMA) moves it. A bulk store does not end a run of loads.
        """
        if nbytes <= 0:
            return
        state = self._program(program)
        rank, machine = state.rank, self.machine
        if owner != rank:
            self._check_rank(owner)
        if write:
            start = begin = max(state.memory, state.compute)
            if not bulk:  # the program itself held the data, so it has waited for its loads
                state.latency_paid = 0.0
        else:
            begin = state.memory
            ends = state.dot_ends
            if len(ends) == self._stages and ends[0] > begin:
                begin = ends[0]
            latency = machine.local_latency_ns if owner == rank else machine.remote_latency_ns
            start = begin
            if latency > state.latency_paid:
                start += latency - state.latency_paid
                state.latency_paid = latency
        end = self._paths.move(rank, owner, nbytes, write, start, address, bulk)
        state.memory, state.sent, state.sent_to = end, None, owner
        span, kind = state.memory_span, STORE if write else FETCH
        if span is not None and span.kind == kind and span.peer == owner and begin <= span.end_ns:
            span.end_ns = end
            span.nbytes += nbytes
        else:
            state.memory_span = self._span(state, kind, begin, end, owner, None, nbytes, address, where)

    def dot(self, program: Hashable, m: int, n: int, k: int, dtype: str) -> None:
        """A program multiplies an [m, k] and a [k, n] block that its loads so far have brought."""
        state = self._program(program)
        ns = self._dots.get((m, n, k, dtype))
        if ns is None:
            ns = self._dots[m, n, k, dtype] = self.machine.dot_ns(m, n, k, dtype)
        start = max(state.compute, state.memory)
        end = start + ns
        if self._slots > self.units:  # programs share units
            end = take(self._unit(state), start, ns, 1.0)
        state.compute = end
        state.sent = None
        state.dot_ends.append(end)
        span = state.arithmetic_span
        if span is not None and start <= span.end_ns:
            span.end_ns = end
        else:
            state.arithmetic_span = self._span(state, COMPUTE, start, end)

    def atomic(self, program: Hashable, owner: int, where: str) -> None:
        """A program does an atomic on memory of rank ``owner`` and has its answer; earlier accesses end before."""
        state = self._program(program)
        self._check_rank(owner)
        machine = self.machine
        start = state.synchronise()
        latency = machine.local_latency_ns if owner == state.rank else machine.remote_latency_ns
        state.memory = state.compute = start + latency
        state.sent, state.sent_to = start, owner
        self._span(state, OTHER, start, start + latency, owner, where=where)

    def released(self, program: Hashable, address: int, *, owner: int | None = None, value: int | None = None) -> None:
        """A program's last access, an atomic or a store, has set the flag at ``address``. Call it after that access.

        It is visible the flag latency after it left.

        Args:
            program: the program that wrote.
            address: the flag, the same number for all ranks.
            owner: the rank in whose memory the flag is; None for the one of the program's last access.
            value: the flag's value now, if waits tell theirs.
        """
        state = self._program(program)
        owner = (state.sent_to if state.sent_to >= 0 else state.rank) if owner is None else owner
        machine = self.machine
        sent = state.sent if state.sent is not None else max(state.memory, state.compute)
        visible = sent + (machine.local_flag_latency_ns if owner == state.rank else machine.remote_flag_latency_ns)
        history = self._releases.get(address)
        if history is None:
            history = self._releases[address] = deque(maxlen=_RELEASES_KEPT)
        if history and history[-1].visible_ns > visible:
            # A counter has its value once all that were added to it are visible, the latest of them last.
            history.append(history[-1]._replace(value=value))
        else:
            history.append(_Release(value, visible, state.rank, state.key))

    def waited(self, program: Hashable, address: int, where: str, *, value: int | None = None) -> None:
        """A program that polled ``address`` has seen what it waited for; called once a wait, not once a poll.

        Its clock becomes the time at which that was visible, if it is later: of the last release, or with ``value`` of
        the first that brought the flag to at least that. A flag that no program released was set before: no wait.
        """
        state = self._program(program)
        now = state.synchronise()
        history = self._releases.get(address)
        if not history:
            return
        release = history[-1]
        if value is not None:
            release = next((entry for entry in history if entry.value is not None and entry.value >= value), release)
        if release.visible_ns > now:
            state.memory = state.compute = release.visible_ns
            writer = (release.rank, release.program)
            self._span(state, WAIT, now, release.visible_ns, release.rank, writer, address=address, where=where)

    # Inside

    def _span(
        self,
        state: _Program,
        kind: str,
        start: float,
        end: float,
        peer: int = -1,
        writer: Any = None,
        nbytes: int = 0,
        address: int | None = None,
        where: str = "",
    ) -> Span:
        kernel, index = state.launch.kernel, state.index
        span = Span(kind, state.rank, state.slot, kernel, index, start, end, peer, writer, nbytes, address, where)
        self.spans.append(span)
        return span

    def _unit(self, state: _Program) -> tuple[Channel]:
        key = (state.rank, state.slot % self.units)
        unit = self._arithmetic.get(key)
        if unit is None:  # one nanosecond of the unit a nanosecond
            unit = self._arithmetic[key] = (Channel(1.0, self._bucket_ns),)
        return unit

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ArgumentError(f"rank {rank} owns no memory; possible: 0 to {self.world_size - 1}")

    def _program(self, program: Hashable) -> _Program:
        try:
            return self._programs[program]
        except KeyError:
            self._unknown("program", program, self._programs)

    def _launch(self, launch: Hashable) -> _Launch:
        try:
            return self._launches[launch]
        except KeyError:
            self._unknown("launch", launch, self._launches)

    def _unknown(self, what: str, key: Hashable, known: dict[Hashable, Any]) -> NoReturn:
        shown = ", ".join(repr(name) for name in list(known)[:8]) or "none"
        raise ArgumentError(f"{what} {key!r} is not known; known: {shown}{', ...' if len(known) > 8 else ''}") from None
