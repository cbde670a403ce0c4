"""The picture of the two queues of ``iris.concurrent``, from a trace."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iris.errors import ArgumentError
from iris.tracing import activity, figures, gantt
from iris.tracing.activity import Piece
from iris.tracing.chrome import Span, Trace

FACTS = "two_queues"  # in the metadata of a trace: how the call was made, and its times without tracing
GEMM, COLLECTIVE, WAITING, NEITHER = "in a tile of the GEMM", "in a tile of the collective", "waiting", "in neither"
COLOURS = {GEMM: "#2a6fbb", COLLECTIVE: "#f28e2b", WAITING: "#d62728", NEITHER: "#e6e6e6"}
# Words of the kernel's spans: the name, and `pid_n`, which is the number of the queue.
_QUEUES = {("compute", 0): GEMM, ("store", 1): COLLECTIVE}
_COLUMNS = 1000  # of the image of programs
_DPI = 150  # of what is an image in an SVG
_INCHES = (1.6, 1.2, 2.4)  # heights of the panels, in proportion


@dataclass(frozen=True)
class Column:
    """A column of the picture: a rank in a trace.

    Attributes:
        title: above it.
        pieces: what its programs did.
        taken: for each queue the times when its tiles were taken, ascending.
        programs: all, the rows of the lowest panel from above.
        first: how many of them begin with the GEMM.
        start_us, end_us: from the first span to the end of the last one.
    """

    title: str
    pieces: list[Piece]
    taken: Mapping[str, list[float]]
    programs: list[Hashable]
    first: int
    start_us: float
    end_us: float

    def helpers(self) -> dict[str, int]:
        """How many programs turned to each queue from the other one, by the order of their first tiles."""
        order: dict[Hashable, list[str]] = {}
        for piece in sorted(self.pieces, key=lambda piece: piece.start_us):
            known = order.setdefault(piece.program, [])
            if piece.kind != WAITING and piece.kind not in known:
                known.append(piece.kind)
        turned = [known[1] for known in order.values() if len(known) > 1]
        return {queue: turned.count(queue) for queue in (GEMM, COLLECTIVE)}


def kind_of(span: Span) -> str | None:
    """What a span of the kernel of two queues is; None for those of other kernels."""
    if span.name in figures.WAITS:
        return WAITING
    return _QUEUES.get((span.name, span.args.get("pid_n")))


def column(trace: Trace, rank: int) -> Column:
    """A rank of a trace.

    Raises:
        ArgumentError: it has no tile of the two queues.
    """
    facts: Mapping[str, Any] = next((of_file[FACTS] for of_file in trace.metadata if FACTS in of_file), {})
    apart = facts.get("mode") == "concurrent"

    def program_of(span: Span) -> Hashable:
        # Programs of two kernels have the same numbers.
        return (int(apart and span.name != "compute"), int(span.args["program_id"]))

    spans = [span for span in trace.spans if span.rank == rank and span.end_us is not None and kind_of(span)]
    taken = {queue: sorted(s.start_us for s in spans if kind_of(s) == queue) for queue in (GEMM, COLLECTIVE)}
    if not any(taken.values()):
        raise ArgumentError(
            f"the trace has no tile of iris.concurrent on rank {rank}; its ranks are {list(trace.ranks)}, and "
            "ctx.tracing.enable() records tiles of the calls after it"
        )
    seen = sorted({program_of(span) for span in spans})
    gemm, comm = _programs(facts, len(taken[GEMM]), len(taken[COLLECTIVE]))
    if apart:
        wanted = [(0, program) for program in range(gemm)] + [(1, program) for program in range(comm)]
    else:
        wanted = [(0, program) for program in range(gemm + comm)]
    programs = sorted({*wanted, *seen})
    title = _title(trace, facts, rank, gemm, comm)
    ends = [span.end_us for span in spans if span.end_us is not None]
    found = activity.pieces(spans, kind_of, program_of)
    return Column(title, found, taken, [*programs], gemm, min(s.start_us for s in spans), max(ends))


def draw(traces: Sequence[Trace], ranks: Sequence[int] | None, path: Path) -> list[Path]:
    """Draw some ranks of some traces, None for all of them, to an SVG and a PNG of that name, side by side.

    Raises:
        ArgumentError: a rank has no tiles, or matplotlib is missing.
    """
    outputs = [path.with_suffix(suffix) for suffix in (".svg", ".png")]
    for output in outputs:
        gantt.check_output(output)
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    columns = [column(trace, rank) for trace in traces for rank in (trace.ranks if ranks is None else ranks)]
    figure = Figure(figsize=(4 + 5.5 * len(columns), 8), layout="constrained", dpi=_DPI)
    panels = figure.subplots(
        3, len(columns), squeeze=False, sharex=True, sharey="row" if len(columns) > 1 else False,
        gridspec_kw={"height_ratios": _INCHES},
    )  # fmt: skip
    for one, (upper, middle, lower) in zip(columns, panels.T, strict=True):
        upper.set_title(one.title, fontsize=9, loc="left")
        _draw_counts(upper, one)
        _draw_taken(middle, one)
        _draw_programs(lower, one)
        lower.set_xlabel("microseconds from the first span")
        for panel in (upper, lower):
            panel.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        lower.set_xlim(0, max(other.end_us - other.start_us for other in columns))
    for panel, label in zip(panels[:, 0], ("programs", "tiles taken, %", "program"), strict=True):
        panel.set_ylabel(label)
    figure.suptitle(_headline(traces), fontsize=10)
    shown = {NEITHER, GEMM, COLLECTIVE, *(piece.kind for one in columns for piece in one.pieces)}
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The same bytes from the same trace.
    with rc_context({"svg.hashsalt": FACTS}):
        for output in outputs:
            figure.savefig(output, dpi=_DPI, metadata={"Date": None} if output.suffix == ".svg" else None)
    return outputs


def _draw_counts(panel: Any, one: Column) -> None:
    busy = (GEMM, COLLECTIVE, WAITING)
    times, numbers = activity.counts(one.pieces, busy)
    at = [time - one.start_us for time in times]
    below = [0] * len(at)
    for kind in busy:
        above = [a + b for a, b in zip(below, numbers[kind], strict=True)]
        panel.fill_between(at, below, above, step="post", color=COLOURS[kind], linewidth=0, rasterized=True)
        below = above
    every = [len(one.programs)] * len(at)
    panel.fill_between(at, below, every, step="post", color=COLOURS[NEITHER], linewidth=0, rasterized=True)
    panel.set_ylim(0, len(one.programs))


def _draw_taken(panel: Any, one: Column) -> None:
    helped = one.helpers()
    for queue, times in one.taken.items():
        if not times:
            continue
        at = [time - one.start_us for time in times]
        share = [100 * (number + 1) / len(at) for number in range(len(at))]
        name = "GEMM" if queue == GEMM else "collective"
        label = f"{name}: {len(at)} tiles, the last taken at {at[-1]:,.0f} us"
        if helped[queue]:
            label += f"; {helped[queue]} programs of the other queue came"
        panel.plot(_thinned(at), _thinned(share), drawstyle="steps-post", color=COLOURS[queue], label=label)
        panel.axvline(at[-1], color=COLOURS[queue], linewidth=0.7, linestyle="--")
    panel.set_ylim(0, 103)
    panel.grid(linewidth=0.3)
    panel.legend(fontsize=7, loc="lower right")


def _thinned(values: list[float]) -> list[float]:
    """Some of the values, and the last one, so that a line of thousands of tiles stays small in an SVG."""
    every = 1 + len(values) // _COLUMNS
    return [*values[:-1:every], values[-1]]


def _draw_programs(panel: Any, one: Column) -> None:
    from matplotlib.colors import to_rgb

    length = one.end_us - one.start_us
    times = [one.start_us + length * (column + 0.5) / _COLUMNS for column in range(_COLUMNS)]
    rows = activity.sampled(one.pieces, one.programs, times)
    colours = {kind: to_rgb(colour) for kind, colour in COLOURS.items()}
    image = [[colours[kind or NEITHER] for kind in row] for row in rows]
    panel.imshow(image, extent=(0, length, len(rows), 0), aspect="auto", interpolation="nearest")
    if 0 < one.first < len(rows):
        panel.axhline(one.first, color="black", linewidth=0.6)


def _programs(facts: Mapping[str, Any], products: int, items: int) -> tuple[int, int]:
    """How many programs began with the GEMM and with the collective: no more than there were tiles."""
    gemm, comm = int(facts.get("gemm_wgs", 0)), int(facts.get("comm_wgs", 0))
    if facts.get("mode") == "concurrent":
        return min(gemm, products), min(comm, items)
    every = min(gemm + comm, products + items)
    return min(gemm, every), every - min(gemm, every)


def _title(trace: Trace, facts: Mapping[str, Any], rank: int, gemm: int, comm: int) -> str:
    if not facts:
        title = f"rank {rank}"
    elif facts["mode"] == "concurrent":
        title = f"rank {rank}, two kernels: {gemm} programs for the GEMM, {comm} for the collective"
    else:
        title = f"rank {rank}, one kernel: {gemm} programs begin with the GEMM, {comm} with the collective"
    if facts:
        untraced, traced = (facts[f"{name}_ms"][str(rank)] * 1e3 for name in ("untraced", "traced"))
        title += f"\n{untraced:,.0f} us without tracing (median of {facts['repeats']}), {traced:,.0f} us with it"
    dropped = trace.dropped.get(rank, 0)
    return title + (f"\n{dropped} spans did not fit and are missing" if dropped else "")


def _headline(traces: Sequence[Trace]) -> str:
    """What was called, and where."""
    lines, places = [], []
    for trace in traces:
        places.append(figures.title(trace))
        for facts in (of_file[FACTS] for of_file in trace.metadata if FACTS in of_file):
            gemm, comm = ("x".join(map(str, facts[name])) for name in ("gemm", "comm"))
            lines.append(
                f"GEMM {gemm} beside {facts['collective']} of {comm} a rank, {facts['dtype']}, {facts['ranks']} ranks"
            )
            if facts["alone"]:
                places[-1] += "; rank 0 works alone, with the whole card"
            elif facts["one_gpu"]:
                places[-1] += "; the ranks share one GPU"
            if facts["link"]:
                places[-1] += f"; an imitated link, {facts['link']}"
    return "\n".join(dict.fromkeys([*lines, *places]))
