"""Figures of a trace: how often and how long each rank did what, and who waited for whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from iris._events import EVENT_NAMES, Event
from iris.tracing.chrome import Span, Trace

WAITS = tuple(EVENT_NAMES[event] for event in (Event.WAIT, Event.BARRIER, Event.WG_GEMM_WAIT))


@dataclass(frozen=True)
class Row:
    """What one rank did of one kind.

    Attributes:
        rank: the rank.
        kind: name of the event.
        count: how often.
        total_us: time, summed over programs.
        median_us: of one.
        payload_bytes: what was moved.
        open: how many have no end, and no time.
    """

    rank: int
    kind: str
    count: int
    total_us: float
    median_us: float
    payload_bytes: int
    open: int


@dataclass(frozen=True)
class Wait:
    """How long programs of a rank, or its host, waited for another rank.

    Attributes:
        rank: who waited.
        host: whether its host did.
        target_rank: for whom; the rank itself for its own programs.
        count: how often.
        total_us: time, summed over programs.
        longest_us: the longest one.
    """

    rank: int
    host: bool
    target_rank: int
    count: int
    total_us: float
    longest_us: float


def rows(trace: Trace) -> list[Row]:
    """For each rank and kind a row; kinds by the time that they took on all ranks, the longest first."""
    totals: dict[str, float] = {}
    groups: dict[tuple[int, str], list[Span]] = {}
    for span in trace.spans:
        groups.setdefault((span.rank, span.name), []).append(span)
        totals[span.name] = totals.get(span.name, 0.0) + span.duration_us
    found = []
    for rank, kind in sorted(groups, key=lambda key: (key[0], -totals[key[1]], key[1])):
        spans = groups[rank, kind]
        lengths = [span.duration_us for span in spans if span.end_us is not None]
        middle = median(lengths) if lengths else 0.0
        payload = sum(span.payload_bytes for span in spans)
        found.append(Row(rank, kind, len(spans), sum(lengths), middle, payload, len(spans) - len(lengths)))
    return found


def waits(trace: Trace) -> list[Wait]:
    """Who waited for whom, the longest time first."""
    groups: dict[tuple[int, bool, int], list[float]] = {}
    for span in trace.spans:
        if span.name in WAITS and span.target_rank >= 0 and span.end_us is not None:
            groups.setdefault((span.rank, span.track == "host", span.target_rank), []).append(span.duration_us)
    found = [Wait(*key, len(lengths), sum(lengths), max(lengths)) for key, lengths in groups.items()]
    return sorted(found, key=lambda wait: (-wait.total_us, wait.rank, wait.host, wait.target_rank))


def report(trace: Trace) -> str:
    """The figures as text."""
    end = max((span.end_us or span.start_us for span in trace.spans), default=0.0)
    lines = [title(trace), f"{len(trace.spans)} spans of {_ranks(trace.ranks)} in {_us(end)}"]
    if trace.spans:
        lines += ["", f"{'rank':>4} {'kind':<14} {'count':>8} {'total':>15} {'median':>13} {'bytes':>14}"]
    for row in rows(trace):
        note = f"   {row.open} without an end" if row.open else ""
        lines.append(
            f"{row.rank:>4} {row.kind:<14} {row.count:>8} {_us(row.total_us):>15} {_us(row.median_us):>13} "
            f"{row.payload_bytes:>14,}{note}"
        )
    waited = waits(trace)
    lines += [""] if waited else []
    for wait in waited:
        who = f"the host of rank {wait.rank}" if wait.host else f"rank {wait.rank}"
        whom = "itself" if wait.target_rank == wait.rank else f"rank {wait.target_rank}"
        lines.append(
            f"{who} waited {_us(wait.total_us)} for {whom}, {wait.count} times, at most {_us(wait.longest_us)}"
        )
    notes = [
        f"rank {rank}: {number} events did not fit into its buffer and are missing"
        for rank, number in sorted(trace.dropped.items())
        if number
    ]
    if not trace.aligned:
        notes.append(
            "the ranks' clocks were not compared: do not compare times of different ranks; export(merge=True) does it"
        )
    elif trace.uncertainty_us:
        notes.append(f"times of different ranks may be off by {_us(trace.uncertainty_us)}")
    return "\n".join([*lines, *([""] if notes else []), *notes])


def title(trace: Trace) -> str:
    """One line: measured or predicted, and on what machine."""
    if trace.predicted is not None:
        return f"Predicted for {trace.predicted}, not measured"
    if any(facts.get("steps") for facts in trace.metadata):
        return "Counted in steps of the simulator, which are no times; iris.sim.predict predicts times"
    names = {str(facts.get("gpu_device_name") or "an unknown device") for facts in trace.metadata}
    return f"Measured on {', '.join(sorted(names)) or 'an unknown device'}"


def _ranks(ranks: Iterable[int]) -> str:
    named = list(ranks)
    return f"{len(named)} ranks" if len(named) != 1 else f"rank {named[0]}"


def _us(us: float) -> str:
    return f"{us:,.2f} us"
