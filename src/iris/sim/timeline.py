"""What happened when in virtual time: a summary in words and numbers, and a trace for Chrome's and Perfetto's viewers.

Every figure is a prediction of the cost model (:mod:`iris.sim.virtual_time`); none was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iris._events import EVENT_NAMES, Event
from iris.tracing import chrome

if TYPE_CHECKING:
    from iris.sim.virtual_time import VirtualTime

# Kinds of spans. The kinds of traced events have the events' names; `other` (atomics, host work) has no event.
FETCH, STORE, COMPUTE, WAIT, BARRIER = (
    EVENT_NAMES[event] for event in (Event.FETCH, Event.STORE, Event.COMPUTE, Event.WAIT, Event.BARRIER)
)
OTHER = "other"
BUSY_KINDS = (FETCH, STORE, COMPUTE, OTHER)
HOST = -1


@dataclass(slots=True)
class Span:
    """A stretch of virtual time in which one program, or the host of a rank, did one thing.

    Attributes:
        kind: one of ``fetch``, ``store``, ``compute``, ``wait``, ``barrier`` and ``other``.
        rank: the rank that did it.
        slot: place of the program: slot ``s`` is on compute unit ``s % units``; -1 for the host.
        kernel: the kernel's name; empty for the host.
        program: index of the program in its grid; -1 for the host.
        start_ns: when it began.
        end_ns: when it ended.
        peer: the rank whose memory was accessed or that was waited for; -1 for none.
        writer: the program that was waited for; None where it is not known.
        nbytes: payload.
        address: the first address that was accessed or waited on; None where it was not given.
        where: source place, or what the host did; of merged accesses the first.
    """

    kind: str
    rank: int
    slot: int
    kernel: str
    program: int
    start_ns: float
    end_ns: float
    peer: int = -1
    writer: Any = None
    nbytes: int = 0
    address: int | None = None
    where: str = ""

    @property
    def duration_ns(self) -> float:
        return self.end_ns - self.start_ns

    @property
    def is_link_transfer(self) -> bool:
        """Whether a program moved bytes between two ranks."""
        return self.kind in (FETCH, STORE) and self.peer != self.rank


@dataclass(frozen=True)
class Summary:
    """Figures of a timeline, all of them predicted. Times count from the start of the simulation.

    Attributes:
        machine: name of the machine that was modelled.
        makespan_ns: end of the last span of any rank.
        rank_makespan_ns: the same for each rank.
        hidden_fraction: of the time in which a rank had transfers over a link under way (union over its programs), the
            fraction in which at least one program of that rank computed; over all ranks. None without link transfers.
        rank_hidden_fraction: the same for each rank.
        rank_link_ns: for each rank, the time in which its programs had link transfers under way.
        idle_fraction: for each rank and compute unit, the fraction of ``makespan_ns`` in which no program on the unit
            fetched, stored, computed or did an atomic. Waiting is idle.
        rank_idle_fraction: mean over the rank's units.
        busy_ns: time by kind, summed over programs; transfers and compute of one program may overlap.
        waited_ns: waiting rank -> rank waited for -> ns, summed over programs.
        host_waited_ns: the same for hosts: at barriers for the last to arrive, and for kernels of the own rank.
        kernel_ns: for each kernel, its longest launch on any rank, from its first program's start to its last's end.
        unmodelled: what ran and took no time, because the cost model has none for it.
        predicted: always True.
    """

    machine: str
    makespan_ns: float
    rank_makespan_ns: tuple[float, ...]
    hidden_fraction: float | None
    rank_hidden_fraction: tuple[float | None, ...]
    rank_link_ns: tuple[float, ...]
    idle_fraction: tuple[tuple[float, ...], ...]
    rank_idle_fraction: tuple[float, ...]
    busy_ns: Mapping[str, float]
    waited_ns: Mapping[int, Mapping[int, float]]
    host_waited_ns: Mapping[int, Mapping[int, float]]
    kernel_ns: Mapping[str, float]
    unmodelled: tuple[str, ...]
    predicted: bool = True

    def __str__(self) -> str:
        lines = [
            f"Predicted (cost model {self.machine}, not measured)",
            f"  makespan {_us(self.makespan_ns)}, link transfers hidden by compute: {_percent(self.hidden_fraction)}",
            f"  {'rank':>4} {'ends at':>12} {'on links':>12} {'hidden':>8} {'units idle':>10}",
        ]
        for rank, end in enumerate(self.rank_makespan_ns):
            hidden, idle = _percent(self.rank_hidden_fraction[rank]), _percent(self.rank_idle_fraction[rank])
            lines.append(f"  {rank:>4} {_us(end):>12} {_us(self.rank_link_ns[rank]):>12} {hidden:>8} {idle:>10}")
        busy = ", ".join(f"{kind} {_us(ns)}" for kind, ns in self.busy_ns.items())
        lines.append(f"  summed over programs: {busy or 'nothing'}")
        for title, table in (("programs", self.waited_ns), ("hosts", self.host_waited_ns)):
            waits = ((ns, rank, peer) for rank, row in table.items() for peer, ns in row.items())
            for ns, rank, peer in sorted(waits, reverse=True):
                lines.append(f"  {title} of rank {rank} waited {_us(ns)} for rank {peer}")
        lines += [f"  kernel {name}: longest launch {_us(ns)}" for name, ns in self.kernel_ns.items()]
        if self.unmodelled:
            lines.append(f"  took no time, for want of a model: {', '.join(self.unmodelled)}")
        return "\n".join(lines)


class Timeline:
    """The spans and launches of a simulation.

    Args:
        time: the virtual time after the simulation.
    """

    def __init__(self, time: VirtualTime):
        self.machine = time.machine
        self.world_size = time.world_size
        self.units = time.units
        self.spans = tuple(time.spans)
        self.launches = tuple(time.launches)
        self.unmodelled = tuple(sorted(time.unmodelled))

    def summary(self) -> Summary:
        """The figures of this timeline."""
        makespan = max((span.end_ns for span in self.spans), default=0.0)
        by_rank: list[list[Span]] = [[] for _ in range(self.world_size)]
        busy_ns: dict[str, float] = {}
        waited: dict[int, dict[int, float]] = {}
        host_waited: dict[int, dict[int, float]] = {}
        for span in self.spans:
            by_rank[span.rank].append(span)
            if span.slot != HOST:
                busy_ns[span.kind] = busy_ns.get(span.kind, 0.0) + span.duration_ns
            if span.kind in (WAIT, BARRIER) and span.peer >= 0 and span.duration_ns > 0:
                row = (host_waited if span.slot == HOST else waited).setdefault(span.rank, {})
                row[span.peer] = row.get(span.peer, 0.0) + span.duration_ns
        kernel_ns: dict[str, float] = {}
        for launch in self.launches:
            if launch.start_ns is not None:
                kernel_ns[launch.kernel] = max(kernel_ns.get(launch.kernel, 0.0), launch.end_ns - launch.start_ns)
        link, hidden = [], []
        for spans in by_rank:
            transfers = union((s.start_ns, s.end_ns) for s in spans if s.is_link_transfer)
            computes = union((s.start_ns, s.end_ns) for s in spans if s.kind == COMPUTE)
            link.append(length(transfers))
            hidden.append(length(intersection(transfers, computes)))
        idle = tuple(self._idle_of_units(spans, makespan) for spans in by_rank)
        return Summary(
            machine=self.machine.name,
            makespan_ns=makespan,
            rank_makespan_ns=tuple(max((span.end_ns for span in spans), default=0.0) for spans in by_rank),
            hidden_fraction=sum(hidden) / sum(link) if sum(link) > 0 else None,
            rank_hidden_fraction=tuple(h / t if t > 0 else None for h, t in zip(hidden, link, strict=True)),
            rank_link_ns=tuple(link),
            idle_fraction=idle,
            rank_idle_fraction=tuple(sum(of_units) / len(of_units) for of_units in idle),
            busy_ns=busy_ns,
            waited_ns=waited,
            host_waited_ns=host_waited,
            kernel_ns=kernel_ns,
            unmodelled=self.unmodelled,
        )

    def _idle_of_units(self, spans: list[Span], makespan: float) -> tuple[float, ...]:
        busy: list[list[tuple[float, float]]] = [[] for _ in range(self.units)]
        for span in spans:
            if span.slot != HOST and span.kind in BUSY_KINDS:
                busy[span.slot % self.units].append((span.start_ns, span.end_ns))
        return tuple(1.0 - length(union(of_unit)) / makespan if makespan > 0 else 1.0 for of_unit in busy)

    def to_chrome(self) -> dict[str, Any]:
        """The trace as Chrome's and Perfetto's JSON: a process per rank, a track per compute unit.

        Transfers overlap the arithmetic of the same program, so each unit has a second track, ``..._MEM``, for them;
        programs that share a unit have tracks of their own, ``..._S<i>``. Times are rounded to a nanosecond.
        """
        ordered = sorted(self.spans, key=lambda span: (span.start_ns, span.rank, span.slot, span.end_ns))
        facts = {
            "world_size": self.world_size,
            "predicted": True,
            "machine": self.machine.name,
            "sources": dict(self.machine.sources),
            "process_name": "iris.sim",
            "gpu_cu_count": self.machine.compute_units,
            "gpu_num_xcc": self.machine.chiplets,
        }
        return chrome.document(range(self.world_size), [self._event(i, span) for i, span in enumerate(ordered)], facts)

    def write(self, path: str | Path) -> Path:
        """Write :meth:`to_chrome` to a file and return its path."""
        return chrome.write(path, self.to_chrome())

    def _event(self, op_index: int, span: Span) -> dict[str, Any]:
        args: dict[str, Any] = {"program_id": span.program, "target_rank": span.peer, "payload_size": span.nbytes}
        args |= {"op_index": op_index, "kernel": span.kernel, "where": span.where}
        if span.address is not None:
            args["address"] = hex(span.address)
        if span.writer is not None:
            args["waited_for"] = str(span.writer)
        track = "host"
        if span.slot != HOST:
            # The hardware deals programs out to its chiplets in turn, and slots are handed out in order.
            layer, unit = divmod(span.slot, self.units)
            cu_id, xcc_id = divmod(unit, self.machine.chiplets)
            args |= {"xcc_id": xcc_id, "cu_id": cu_id}
            track = f"XCC{xcc_id}_CU{cu_id}" + (f"_S{layer}" if layer else "")
            track += "_MEM" if span.kind in (FETCH, STORE) else ""
        return chrome.event(span.kind, span.rank, track, span.start_ns / 1e3, span.end_ns / 1e3, args)


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same points in time as disjoint intervals in ascending order."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            if end > joined[-1][1]:
                joined[-1] = (joined[-1][0], end)
        elif end > start:
            joined.append((start, end))
    return joined


def intersection(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points in time that are in both of two lists as :func:`union` gives them."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def _us(ns: float) -> str:
    return f"{ns / 1e3:,.2f} us"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"
