"""What programs were doing over time: series for pictures, from the spans of a trace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from iris.tracing.chrome import Span


@dataclass(frozen=True, slots=True)
class Piece:
    """A time in which a program did one thing.

    Attributes:
        program: who.
        kind: what.
        start_us, end_us: from when to when; never empty.
    """

    program: Hashable
    kind: str
    start_us: float
    end_us: float


def pieces(
    spans: Iterable[Span], kind_of: Callable[[Span], str | None], program_of: Callable[[Span], Hashable]
) -> list[Piece]:
    """Cut the spans into pieces of which no two of a program overlap, in the order of their times for each program.

    Within another span the inner one counts. Spans without an end, and those that ``kind_of`` has None for, are left
    out.
    """
    by_program: dict[Hashable, list[tuple[float, float, str]]] = {}
    for span in spans:
        kind = kind_of(span)
        if kind is not None and span.end_us is not None:
            by_program.setdefault(program_of(span), []).append((span.start_us, span.end_us, kind))
    found: list[Piece] = []
    for program, own in by_program.items():
        found += _flat(program, sorted(own, key=lambda one: (one[0], -one[1])))
    return found


def _flat(program: Hashable, spans: Sequence[tuple[float, float, str]]) -> list[Piece]:
    found: list[Piece] = []
    around: list[tuple[float, str]] = []  # ends and kinds of the spans that are not over, the innermost last
    now = 0.0

    def until(time: float, kind: str) -> None:
        nonlocal now
        if time > now:
            found.append(Piece(program, kind, now, time))
            now = time

    for start, end, kind in spans:
        while around and around[-1][0] <= start:
            until(*around.pop())
        if around:
            until(start, around[-1][1])
        now = max(now, start)
        around.append((end, kind))
    while around:
        until(*around.pop())
    return found


def counts(found: Iterable[Piece], kinds: Sequence[str]) -> tuple[list[float], dict[str, list[int]]]:
    """How many programs did what: times, and for each kind as many numbers, each valid until the next time.

    The first time is that of the first piece of these kinds; at the last one nobody does any of them any more.
    """
    changes: dict[float, dict[str, int]] = {}
    for piece in found:
        if piece.kind in kinds:
            for time, change in ((piece.start_us, 1), (piece.end_us, -1)):
                of_time = changes.setdefault(time, {})
                of_time[piece.kind] = of_time.get(piece.kind, 0) + change
    times = sorted(changes)
    numbers: dict[str, list[int]] = {}
    for kind in kinds:
        number = 0
        numbers[kind] = [number := number + changes[time].get(kind, 0) for time in times]
    return times, numbers


def sampled(found: Iterable[Piece], programs: Sequence[Hashable], times: Sequence[float]) -> list[list[str | None]]:
    """What each of some programs did at some times, a row for each program; None for nothing."""
    own: Mapping[Hashable, list[Piece]] = {program: [] for program in programs}
    for piece in found:
        if piece.program in own:
            own[piece.program].append(piece)
    rows: list[list[str | None]] = []
    for program in programs:
        of_program = sorted(own[program], key=lambda piece: piece.start_us)
        starts = [piece.start_us for piece in of_program]
        row: list[str | None] = []
        for time in times:
            at = bisect_right(starts, time) - 1
            row.append(of_program[at].kind if at >= 0 and time < of_program[at].end_us else None)
        rows.append(row)
    return rows
