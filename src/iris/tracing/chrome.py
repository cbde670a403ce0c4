"""The file of a trace: JSON that Chrome's and Perfetto's viewers show, written and read here alone.

``{"traceEvents": [...], "displayTimeUnit": "ns", "metadata": {...}}``, times in microseconds. A rank is a process
(``pid``), a compute unit a thread (``tid``). A span with an end is an event ``X``, one without an end an instant ``i``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from iris.errors import ArgumentError

SCHEMA_VERSION = "1.1"


def rank_name(rank: int) -> dict[str, Any]:
    """The event that names a rank's process."""
    return {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"Rank {rank}"}}


def event(
    name: str, rank: int, track: str, start_us: float, end_us: float | None, args: Mapping[str, Any]
) -> dict[str, Any]:
    """A span; without an end, an instant. Times are rounded to a nanosecond."""
    start_us = round(start_us, 3)
    shared = {"name": name, "cat": "iris", "ts": start_us}
    if end_us is None:
        shape: dict[str, Any] = {"ph": "i", "s": "t"}
    else:
        shape = {"ph": "X", "dur": max(0.0, round(round(end_us, 3) - start_us, 3))}
    return {**shared, **shape, "pid": rank, "tid": track, "args": dict(args)}


def document(ranks: Iterable[int], events: Sequence[dict[str, Any]], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A whole trace of some ranks; ``metadata`` after the version of the schema and the number of events."""
    return {
        "traceEvents": [*map(rank_name, ranks), *events],
        "displayTimeUnit": "ns",
        "metadata": {"schema_version": SCHEMA_VERSION, "num_events": len(events), "time_unit": "us", **metadata},
    }


def write(path: str | Path, trace: Mapping[str, Any]) -> Path:
    """Write a trace to a file, make its folder when there is none, and return the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace), encoding="utf-8")
    return path


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a program, or the host of a rank, did.

    Attributes:
        name: what: ``fetch``, ``compute``, ``wait`` and so on.
        rank: who.
        track: where: a compute unit, or ``host``.
        start_us: when it began.
        end_us: when it ended; None when that was not recorded.
        target_rank: the rank whose memory was moved or that was waited for; -1 for none.
        payload_bytes: what was moved.
        args: everything else that was recorded.
    """

    name: str
    rank: int
    track: str
    start_us: float
    end_us: float | None
    target_rank: int
    payload_bytes: int
    args: Mapping[str, Any]

    @property
    def duration_us(self) -> float:
        """Its length; 0 when its end was not recorded."""
        return 0.0 if self.end_us is None else self.end_us - self.start_us


@dataclass(frozen=True)
class Trace:
    """What a file, or the files of several ranks, hold.

    Attributes:
        spans: in the order of the files.
        ranks: every rank that a file names, with spans or without, in ascending order.
        dropped: rank -> events that did not fit into its buffer, where a file says so.
        predicted: name of the modelled machine when the times are predictions; None when they were measured.
        aligned: whether times of different ranks can be compared.
        uncertainty_us: by how much times of two ranks may be off each other, as far as is known.
        metadata: of each file.
    """

    spans: tuple[Span, ...]
    ranks: tuple[int, ...]
    dropped: Mapping[int, int] = field(default_factory=dict)
    predicted: str | None = None
    aligned: bool = True
    uncertainty_us: float = 0.0
    metadata: tuple[Mapping[str, Any], ...] = ()


def read(*paths: str | Path) -> Trace:
    """The trace in a file, or in one file for each rank, as times since its first event.

    Raises:
        ArgumentError: a file cannot be read or is no trace, or two hold the same rank.
    """
    if not paths:
        raise ArgumentError("no file was given")
    files = [_read(Path(path)) for path in paths]
    owners: dict[int, Path] = {}
    for path, trace in zip(paths, files, strict=True):
        for rank in trace.ranks:
            if rank in owners:
                raise ArgumentError(f"{owners[rank]} and {path} both hold rank {rank}; give one file for each rank")
            owners[rank] = Path(path)
    predicted = {trace.predicted for trace in files}
    if len(predicted) > 1:
        raise ArgumentError("the files mix measured and predicted times, or predictions of different machines")
    first = min((span.start_us for trace in files for span in trace.spans), default=0.0)
    spans = tuple(
        replace(span, start_us=span.start_us - first, end_us=None if span.end_us is None else span.end_us - first)
        for trace in files
        for span in trace.spans
    )
    return Trace(
        spans=spans,
        ranks=tuple(sorted(owners)),
        dropped={rank: number for trace in files for rank, number in trace.dropped.items()},
        predicted=predicted.pop(),
        aligned=_comparable(files),
        uncertainty_us=max(trace.uncertainty_us for trace in files),
        metadata=tuple(trace.metadata[0] for trace in files),
    )


def _comparable(files: Sequence[Trace]) -> bool:
    if len(files) == 1:
        return files[0].aligned or len(files[0].ranks) == 1
    if all(trace.aligned for trace in files):
        return True
    clocks = {trace.metadata[0].get("clock") for trace in files}
    return len(clocks) == 1 and None not in clocks


def _read(path: Path) -> Trace:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:  # of JSON and of UTF-8
        raise ArgumentError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ArgumentError(f"{path} is no trace: it has no list `traceEvents`")
    metadata = found.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ArgumentError(f"{path} is no trace of Iris: `metadata` is no object")
    unit = metadata.get("time_unit", "us")
    if unit != "us":
        raise ArgumentError(f"{path}: times are in {unit!r}; Iris writes and reads 'us'")
    spans, ranks = [], set()
    for number, given in enumerate(found["traceEvents"]):
        try:
            span = _span(given)
            ranks.add(int(given["pid"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(f"{path}: event {number} is none of Iris: {type(error).__name__}: {error}") from error
        if span is not None:
            spans.append(span)
    if not ranks:
        raise ArgumentError(f"{path} names no rank: `traceEvents` is empty")
    return Trace(
        spans=tuple(spans),
        ranks=tuple(sorted(ranks)),
        dropped=_dropped(metadata, path),
        predicted=str(metadata.get("machine", "unknown")) if metadata.get("predicted") else None,
        aligned=bool(metadata.get("aligned", metadata.get("predicted", False))),
        uncertainty_us=max(_numbers(metadata.get("clock_uncertainty_us", 0.0), path), default=0.0),
        metadata=(metadata,),
    )


def _span(given: Mapping[str, Any]) -> Span | None:
    if given["ph"] not in ("X", "i"):
        return None
    args = given.get("args", {})
    start = float(given["ts"])
    end = start + float(given["dur"]) if given["ph"] == "X" else None
    if end is not None and end < start:
        raise ValueError(f"dur is {given['dur']}")
    return Span(
        str(given["name"]),
        int(given["pid"]),
        str(given["tid"]),
        start,
        end,
        int(args.get("target_rank", -1)),
        int(args.get("payload_size", 0)),
        args,
    )


def _numbers(given: Any, path: Path) -> list[float]:
    try:
        return [float(value) for value in (given if isinstance(given, list) else [given])]
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{path} is no trace of Iris: in `metadata`, {error}") from error


def _dropped(metadata: Mapping[str, Any], path: Path) -> dict[int, int]:
    given = metadata.get("dropped_events", {})
    if isinstance(given, dict):
        try:
            return {int(rank): int(number) for rank, number in given.items()}
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{path} is no trace of Iris: `dropped_events`: {error}") from error
    return {int(metadata.get("rank", 0)): int(_numbers(given, path)[0])}
