"""Figures of results: throughput and latency over the problem sizes, a line for each algorithm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from iris.bench._environment import describe
from iris.bench.results import Result, from_record, plain
from iris.errors import ArgumentError

_SIZES = ("M", "N", "K")
_LINES = "algorithm"


def draw_file(path: str | Path, folder: str | Path) -> list[Path]:
    """Draw what ``--benchmark_out`` wrote as JSON, as :func:`draw` does; names of figures begin with the file's."""
    results, environments = [], []
    for record in json.loads(Path(path).read_text()):
        environments.append(record.pop("environment"))
        results.append(from_record(record, record["params"]))
    return draw(results, environments, Path(folder), f"{Path(path).stem}_")


def draw(
    results: Sequence[Result], environments: Sequence[dict[str, Any]], folder: Path, prefix: str = ""
) -> list[Path]:
    """Draw every benchmark for each number of ranks, as PNG and as SVG; the files that were written.

    Args:
        results: those without a time are left out.
        environments: what each run of ranks was measured on.
        folder: where the files go; made when there is none.
        prefix: what their names begin with.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ArgumentError(
            "plots need matplotlib, which is not installed: pip install 'iris-kernels[plot]'"
        ) from error
    mpl.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    measured = [result for result in results if result.gpu_time_ms is not None]
    for name, world_size in dict.fromkeys((r.benchmark_name, r.world_size) for r in measured):
        own = [r for r in measured if (r.benchmark_name, r.world_size) == (name, world_size)]
        run = next((e for e in environments if e["world_size"] == world_size), None)
        figure, panels = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
        _fill(panels, own)
        meaningless = run is not None and run["clock"] != "gpu"
        title = f"{name}, {world_size} rank{'s' * (world_size != 1)}"
        figure.suptitle(title + " (kernels interpreted: times mean nothing)" * meaningless)
        if run is not None:
            figure.text(0.5, -0.04, describe(run), ha="center", fontsize=7)
        for suffix in ("png", "svg"):
            path = folder / f"{prefix}{name}_{world_size}ranks.{suffix}"
            figure.savefig(path, bbox_inches="tight")
            written.append(path)
        pyplot.close(figure)
    return written


def points(results: Sequence[Result]) -> tuple[list[str], dict[str, dict[str, Result]]]:
    """The labels of the x axis in order, and for each line its results by label."""
    varying = {
        name
        for result in results
        for name in result.params
        if len({str(plain(other.params.get(name))) for other in results}) > 1
    }
    labels: dict[str, None] = {}
    lines: dict[str, dict[str, Result]] = {}
    for result in results:
        params = {name: str(plain(value)) for name, value in result.params.items() if name != "num_ranks"}
        sizes = "x".join(params[name] for name in _SIZES if name in params)
        others = [f"{params[n]}" for n in params if n in varying and n not in (*_SIZES, _LINES)]
        label = " ".join([sizes, *others]).strip() or result.benchmark_name
        line = " ".join(filter(None, (params.get(_LINES, ""), result.candidate))) or result.benchmark_name
        labels[label] = None
        lines.setdefault(line, {})[label] = result
    return list(labels), lines


def _fill(panels: Any, results: Sequence[Result]) -> None:
    labels, lines = points(results)
    rate, unit = ("tflops", "TFLOPS") if any(r.tflops is not None for r in results) else ("bandwidth_gbps", "GB/s")
    for line, by_label in lines.items():
        places = [i for i, label in enumerate(labels) if label in by_label]
        own = [by_label[labels[i]] for i in places]
        if all(getattr(result, rate) is not None for result in own):
            panels[0].plot(places, [getattr(result, rate) for result in own], marker="o", label=line)
        latencies = panels[1].plot(places, [result.gpu_time_ms for result in own], marker="o", label=line)
        quartiles = [result.quartiles_ms or [0.0] * 3 for result in own]
        panels[1].fill_between(
            places, [q[0] for q in quartiles], [q[2] for q in quartiles], alpha=0.2, color=latencies[0].get_color()
        )
    for panel, title in zip(panels, (unit, "latency, ms (band: quartiles)"), strict=True):
        panel.set_title(title)
        panel.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
        panel.grid(alpha=0.3)
        top = max((float(y) for line in panel.lines for y in line.get_ydata()), default=0.0)
        panel.set_ylim(0, 1.1 * top or 1)
        if panel.lines:
            panel.legend()
