"""Who runs when in virtual time: clocks of hosts, order of launches, and the slots that programs take and leave."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from iris._machine import Machine
from iris.errors import ArgumentError
from iris.sim.timeline import BARRIER, HOST, OTHER, WAIT, Span


@dataclass(slots=True)
class LaunchTimes:
    """A launch. Times in ns; ``ready_ns`` and ``start_ns`` (of its first program) are None until they are known."""

    rank: int
    kernel: str
    programs: int
    after: tuple[LaunchTimes, ...]
    earliest_ns: float
    ready_ns: float | None = None
    start_ns: float | None = None
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
class ProgramTimes:
    """A program that runs."""

    key: Hashable
    launch: LaunchTimes
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


class Occupancy:
    """Clocks of hosts and programs. The arguments are those of :class:`iris.sim.virtual_time.VirtualTime`."""

    def __init__(self, machine: Machine, world_size: int, resident_programs: int | None, pipeline_stages: int):
        resident = machine.compute_units * machine.resident_programs_per_unit
        resident = resident if resident_programs is None else resident_programs
        given = {"world_size": world_size, "resident_programs": resident, "pipeline_stages": pipeline_stages}
        for name, value in given.items():
            if value <= 0:
                raise ArgumentError(f"{name} is {value}; it must be greater than 0")
        self.machine = machine
        self.world_size = world_size
        self.resident = resident
        self.units = min(machine.compute_units, self.resident)
        self.spans: list[Span] = []
        self.launches: list[LaunchTimes] = []
        self.unmodelled: set[str] = set()
        self._stages = pipeline_stages
        self._hosts = [0.0] * world_size
        # Heaps of (free from, slot).
        self._free = [[(0.0, slot) for slot in range(resident)] for _ in range(world_size)]
        self._launches: dict[Hashable, LaunchTimes] = {}
        self._streams: dict[tuple[int, Hashable], LaunchTimes] = {}
        self._programs: dict[Hashable, ProgramTimes] = {}

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
        issued_ns: float | None = None,
    ) -> None:
        """A host has launched a kernel.

        It is ready the launch latency later, once the launch before it on the rank's stream and those of ``after``
        (awaited events) have ended. The host's clock does not move: charge its own work with :meth:`host_works`.
        ``issued_ns`` is the host's clock when it launched, if it has moved on since.

        Raises:
            ArgumentError: the key is that of a launch that has not ended, or one in ``after`` is not known.
        """
        if launch in self._launches and not self._launches[launch].ended:
            raise ArgumentError(f"launch {launch!r} of kernel {self._launches[launch].kernel} has not ended yet")
        before = [self._launch(other) for other in after]
        if (rank, stream) in self._streams:
            before.append(self._streams[rank, stream])
        issued = self._hosts[rank] if issued_ns is None else issued_ns
        earliest = issued + self.machine.launch_latency_ns
        record = LaunchTimes(rank, kernel, programs, tuple(before), earliest)
        self._launches[launch] = self._streams[rank, stream] = record
        self.launches.append(record)

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
                f"rank {record.rank} runs {self.resident} programs, as many as are resident on {self.machine.name}; "
                f"one of kernel {record.kernel} cannot start before another ends"
            )
        free_from, slot = heapq.heappop(free)
        start = max(ready, free_from)
        record.start_ns = start if record.start_ns is None else min(record.start_ns, start)
        record.started += 1
        record.running += 1
        ahead: deque[float] = deque(maxlen=self._stages)
        self._programs[program] = ProgramTimes(program, record, record.rank, index, slot, start, start, ahead)
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

    def launch_ended(self, launch: Hashable, *, failed: bool = False) -> float:
        """All programs of a launch have ended; returns the end, ns. If it ``failed``, some may never have started."""
        record = self._launch(launch)
        if record.running or (record.started != record.programs and not failed):
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

    def place(self, program: Hashable) -> tuple[int, int]:
        """The compute unit that a program runs on, counted within its die, and the die."""
        # The hardware deals programs out to its dies in turn, and slots are handed out in order.
        return divmod(self._program(program).slot % self.units, self.machine.chiplets)

    def next_free(self, rank: int) -> float:
        """When a rank has room for one more program, ns; infinite while every slot is taken."""
        free = self._free[rank]
        return free[0][0] if free else float("inf")

    # Inside

    def _span(
        self,
        state: ProgramTimes,
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

    def _program(self, program: Hashable) -> ProgramTimes:
        try:
            return self._programs[program]
        except KeyError:
            self._unknown("program", program, self._programs)

    def _launch(self, launch: Hashable) -> LaunchTimes:
        try:
            return self._launches[launch]
        except KeyError:
            self._unknown("launch", launch, self._launches)

    def _unknown(self, what: str, key: Hashable, known: dict[Hashable, Any]) -> NoReturn:
        shown = ", ".join(repr(name) for name in list(known)[:8]) or "none"
        raise ArgumentError(f"{what} {key!r} is not known; known: {shown}{', ...' if len(known) > 8 else ''}") from None
