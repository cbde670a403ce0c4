"""A picture of a trace: one panel for each rank, one line for each track, time from left to right."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from iris._events import EVENT_NAMES, Event
from iris.errors import ArgumentError
from iris.tracing.chrome import Span, Trace
from iris.tracing.figures import title

SUFFIXES = (".png", ".svg", ".pdf")

_NAMED_COLOURS = {
    Event.FETCH: "#1f77b4",
    Event.GET: "#1f77b4",
    Event.LOAD: "#4a90c4",
    Event.STORE: "#17a2a2",
    Event.PUT: "#17a2a2",
    Event.COPY: "#5ab4ac",
    Event.COMPUTE: "#2ca02c",
    Event.REDUCE: "#98c93c",
    Event.WAIT: "#d62728",
    Event.BARRIER: "#ff9896",
}
_COLOURS = {EVENT_NAMES[event]: colour for event, colour in _NAMED_COLOURS.items()}
_FURTHER_COLOURS = ("#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#7f7f7f", "#ff7f0e")
_TRACKS_NAMED = 40  # more names than that cannot be read
_INCH_A_TRACK = 0.22


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_output(path: Path) -> None:
    """Raises ArgumentError when no picture can be written to ``path`` for its suffix, or matplotlib is missing."""
    if path.suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"{path}: the suffix says which picture to write; possible: {', '.join(SUFFIXES)}")
    if not available():
        raise ArgumentError(f"{path} needs matplotlib, which is not installed: pip install 'iris-kernels[plot]'")


def draw(trace: Trace, path: Path) -> Path:
    """Draw the trace to a file, PNG or SVG by its suffix, and return its path.

    Where spans of one track overlap, the kinds that are shorter in the mean are on top.

    Raises:
        ArgumentError: the suffix is unknown, or matplotlib is missing.
    """
    check_output(path)
    from matplotlib.figure import Figure

    tracks = {rank: _tracks(trace, rank) for rank in trace.ranks}
    heights = [max(2, len(tracks[rank])) for rank in trace.ranks]
    inches = min(60.0, 1.6 + sum(0.7 + _INCH_A_TRACK * min(height, _TRACKS_NAMED * 2) for height in heights))
    by_rank: dict[int, list[Span]] = {rank: [] for rank in trace.ranks}
    for span in trace.spans:
        by_rank[span.rank].append(span)
    figure = Figure(figsize=(14, inches), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    colours = _colours(trace)
    for rank, panel in zip(trace.ranks, panels[:, 0], strict=True):
        _draw_rank(panel, by_rank[rank], tracks[rank], colours)
        dropped = trace.dropped.get(rank, 0)
        panel.set_title(f"Rank {rank}" + (f" ({dropped} events missing)" if dropped else ""), loc="left", fontsize=9)
    panels[-1, 0].set_xlabel("microseconds")
    figure.suptitle(title(trace) + ("" if trace.aligned else " (clocks of the ranks not compared)"), fontsize=11)
    handles = [_patch(colour, kind) for kind, colour in colours.items()]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _draw_rank(panel: Any, spans: list[Span], tracks: list[str], colours: dict[str, str]) -> None:
    lines = {track: number for number, track in enumerate(tracks)}
    groups: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.name, span.track), []).append(span)
    kinds = list(colours)
    for (kind, track), chosen in sorted(groups.items(), key=lambda group: kinds.index(group[0][0])):
        number, colour = lines[track], colours[kind]
        bars = [(span.start_us, span.duration_us) for span in chosen if span.end_us is not None]
        if bars:
            panel.broken_barh(bars, (number - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.2)
        instants = [span.start_us for span in chosen if span.end_us is None]
        if instants:
            panel.plot(instants, [number] * len(instants), "|", color=colour, markersize=8)
    panel.set_ylim(max(1, len(tracks)) - 0.4, -0.6)
    if len(tracks) <= _TRACKS_NAMED:
        panel.set_yticks(range(len(tracks)), tracks, fontsize=7)
    else:
        panel.set_yticks([])
        panel.set_ylabel(f"{len(tracks)} tracks", fontsize=8)
    panel.grid(axis="x", linewidth=0.3)
    panel.set_axisbelow(True)


def _tracks(trace: Trace, rank: int) -> list[str]:
    found = {span.track for span in trace.spans if span.rank == rank}
    return sorted(found, key=lambda track: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", track)])


def _colours(trace: Trace) -> dict[str, str]:
    """A colour for each kind, in the order in which they are drawn: kinds that enclose others first."""
    totals: dict[str, list[float]] = {}
    for span in trace.spans:
        totals.setdefault(span.name, []).append(span.duration_us)
    kinds = sorted(totals, key=lambda kind: (-sum(totals[kind]) / len(totals[kind]), kind))
    further = iter(_FURTHER_COLOURS * (1 + len(kinds) // len(_FURTHER_COLOURS)))
    return {kind: _COLOURS.get(kind) or next(further) for kind in kinds}


def _patch(colour: str, kind: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=kind)
