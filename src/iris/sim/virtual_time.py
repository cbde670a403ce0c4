"""Virtual time: what the kernels and hosts of a simulation would have taken on a machine, by its cost model.

The simulator runs programs in an order of its own and tells :class:`VirtualTime` what each did. Clocks are per program
and per host, in ns from the start of the simulation. A program has two clocks, one for its accesses and one for its
arithmetic, because loads run ahead of dots on hardware; whatever synchronises (an atomic, a wait, its end) brings both
together. Rates are shared in ledgers (:class:`iris.sim.machine.Channel`), so a program that the simulator ran early
does not take what belonged to one that it ran late. ``docs/virtual-time.md`` has the formulas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from iris._machine import Machine
from iris.errors import ArgumentError
from iris.sim._occupancy import Occupancy, ProgramTimes
from iris.sim.machine import Channel, Paths, take
from iris.sim.timeline import COMPUTE, FETCH, OTHER, STORE, WAIT

_RELEASES_KEPT = 64  # per address; waits for older values see the oldest one kept


class Release(NamedTuple):
    """A change of a flag: its new value if known, from when on it is visible (ns), and who made it."""

    value: int | None
    visible_ns: float
    rank: int
    program: Hashable


class VirtualTime(Occupancy):
    """Clocks of all programs and hosts of a simulation. Programs and launches are named by any hashable keys.

    Args:
        machine: the device that every rank has.
        world_size: number of ranks.
        resident_programs: programs of a rank that run at a time; None for what the machine's units hold.
        bucket_ns: resolution in which rates are shared.
        pipeline_stages: loads run ahead of the dots that use them by at most this many dots.

    Attributes:
        spans: what was recorded so far, in no particular order (:class:`iris.sim.timeline.Span`).
        launches: what was launched so far, in the order of :meth:`launch_issued`.
        unmodelled: names of what the simulator saw and has no time for.
        resident: programs of a rank that run at a time.
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
        if bucket_ns <= 0:
            raise ArgumentError(f"bucket_ns is {bucket_ns}; it must be greater than 0")
        super().__init__(machine, world_size, resident_programs, pipeline_stages)
        self._bucket_ns = bucket_ns
        self._releases: dict[int, deque[Release]] = {}  # by address, in the order of modification
        self._paths = Paths(machine, world_size, bucket_ns)
        self._arithmetic: dict[tuple[int, int], tuple[Channel]] = {}  # of units that programs share, by rank and unit
        self._dots: dict[tuple[int, int, int, str], float] = {}

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
        if self.resident > self.units:  # programs share units
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
            history.append(Release(value, visible, state.rank, state.key))

    def last_release(self, address: int) -> Release | None:
        """The last change of the flag at ``address``; None for a flag that no program has set."""
        history = self._releases.get(address)
        return history[-1] if history else None

    def waited(
        self,
        program: Hashable,
        address: int,
        where: str,
        *,
        value: int | None = None,
        release: Release | None = None,
    ) -> None:
        """A program that polled ``address`` has seen what it waited for; called once a wait, not once a poll.

        Its clock becomes the time at which that was visible, if it is later: of the last release, with ``value`` of the
        first that brought the flag to at least that, or of ``release``, if it is known which one the program saw. A
        flag that no program released was set before: no wait.
        """
        state = self._program(program)
        now = state.synchronise()
        release = release or self.last_release(address)
        if release is None:
            return
        if value is not None:
            history = self._releases[address]
            release = next((entry for entry in history if entry.value is not None and entry.value >= value), release)
        if release.visible_ns > now:
            state.memory = state.compute = release.visible_ns
            writer = (release.rank, release.program)
            self._span(state, WAIT, now, release.visible_ns, release.rank, writer, address=address, where=where)

    # Inside

    def _unit(self, state: ProgramTimes) -> tuple[Channel]:
        key = (state.rank, state.slot % self.units)
        unit = self._arithmetic.get(key)
        if unit is None:  # one nanosecond of the unit a nanosecond
            unit = self._arithmetic[key] = (Channel(1.0, self._bucket_ns),)
        return unit

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ArgumentError(f"rank {rank} owns no memory; possible: 0 to {self.world_size - 1}")
