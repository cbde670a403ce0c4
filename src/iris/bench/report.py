"""Results as text: an aligned table, a markdown table, JSON, CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from iris.bench._environment import NO_TIMES, describe
from iris.bench.results import Result, plain


def render(format: str, results: Sequence[Result], environments: Sequence[dict[str, Any]]) -> str:
    """All results in a format: ``console``, ``markdown``, ``json`` or ``csv``.

    Args:
        format: its name.
        results: in order.
        environments: what each run of ranks was measured on.
    """
    render_one = {"console": _console, "markdown": _markdown, "json": _json, "csv": _csv}[format]
    return render_one(results, environments)


def table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of one benchmark. The cells of what was not measured are the reason alone."""
    axes = list(dict.fromkeys(name for result in results for name in result.params))
    counters = list(dict.fromkeys(name for result in results for name in result.counters))
    baselines = list(dict.fromkeys(name for result in results for name in result.speedups))
    named = any(result.candidate for result in results)
    hidden = any(result.hidden_pct is not None for result in results)
    possible = any(result.hidden_of_possible_pct is not None for result in results)
    sizes = "num_ranks" not in axes and len({result.world_size for result in results}) > 1
    header = [*axes, *(["ranks"] if sizes else []), *(["candidate"] if named else [])]
    header += ["GPU Time (ms)", "Skew %", "BW (GB/s)", "TFLOPS", *counters]
    header += [f"x {name}" for name in baselines] + (["hidden %"] if hidden else [])
    header += ["hidden of possible %"] if possible else []
    header += ["min (ms)", "q1-q3 (ms)", "checked"]
    rows = []
    for result in results:
        row = [str(plain(result.params.get(name, "-"))) for name in axes]
        row += ([str(result.world_size)] if sizes else []) + ([result.candidate or "-"] if named else [])
        if result.gpu_time_ms is None or result.quartiles_ms is None:
            why = f"(skipped) {result.skip_reason}" if result.skipped else f"({result.failure}) {result.error}"
            rows.append([*row, why.strip()])
            continue
        row += [_number(result.gpu_time_ms, 3), _number(result.skew_pct, 1)]
        row += [_number(result.bandwidth_gbps, 1), _number(result.tflops, 1)]
        row += [_any(result.counters.get(name)) for name in counters]
        row += [_number(result.speedups.get(name), 2) for name in baselines]
        row += [_number(result.hidden_pct, 0)] if hidden else []
        row += [_number(result.hidden_of_possible_pct, 0)] if possible else []
        first, _, third = result.quartiles_ms
        row += [_number(result.fastest_ms, 3), f"{first:.3f}-{third:.3f}", "yes" if result.validated else "no"]
        rows.append(row)
    return header, rows


def _heading(environments: Sequence[dict[str, Any]]) -> list[str]:
    lines = [describe(environment) for environment in environments]
    if any(environment["clock"] != "gpu" for environment in environments):
        lines.append(NO_TIMES)
    commands = dict.fromkeys(environment["command"] for environment in environments)
    return [*lines, *(f"Command: {command}" for command in commands)]


def _by_benchmark(results: Sequence[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.benchmark_name, []).append(result)
    return found


def _notes(results: Sequence[Result]) -> list[str]:
    ways = {
        f"{r.n_repeat} calls after {r.n_warmup + 1}, caches {'cold' if r.cold_cache else 'as they are'}, ranks meet "
        f"{'in the stream' if r.meeting == 'stream' else 'on the host'}{', graphs replayed' if r.graph else ''}"
        for r in results
        if r.gpu_time_ms is not None
    }
    return [*sorted(ways), *dict.fromkeys(result.note for result in results if result.note)]


def _console(results: Sequence[Result], environments: Sequence[dict[str, Any]]) -> str:
    lines = _heading(environments)
    for name, own in _by_benchmark(results).items():
        header, rows = table(own)
        # The reason of a row that was not measured may be long; it widens no column.
        widths = [max(len(r[i]) for r in [header, *rows] if len(r) == len(header)) for i in range(len(header))]
        widths = [
            max([width, *(len(r[i]) for r in rows if i < len(r) - 1 and len(r) < len(header))])
            for i, width in enumerate(widths)
        ]
        lines += ["", name, "  ".join(cell.rjust(width) for cell, width in zip(header, widths, strict=True))]
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
            if len(row) < len(header):
                cells[-1] = row[-1]
            lines.append("  ".join(cells))
        lines += _notes(own)
    return "\n".join(lines) + "\n"


def _markdown(results: Sequence[Result], environments: Sequence[dict[str, Any]]) -> str:
    lines = [line for text in _heading(environments) for line in (text, "")]
    for name, own in _by_benchmark(results).items():
        header, rows = table(own)
        lines += [f"## {name}", "", "| " + " | ".join(map(_cell, header)) + " |", "|" + "---|" * len(header)]
        for row in rows:
            padded = [*row, *[""] * (len(header) - len(row))]
            lines.append("| " + " | ".join(map(_cell, padded)) + " |")
        lines += ["", *(line for note in _notes(own) for line in (note, ""))]
    return "\n".join(lines)


def _json(results: Sequence[Result], environments: Sequence[dict[str, Any]]) -> str:
    runs = {environment["world_size"]: environment for environment in environments}
    records = [{**result.record(), "environment": runs.get(result.world_size)} for result in results]
    return json.dumps(records, indent=2) + "\n"


def _csv(results: Sequence[Result], environments: Sequence[dict[str, Any]]) -> str:
    runs = {environment["world_size"]: environment for environment in environments}
    axes = list(dict.fromkeys(name for result in results for name in result.params))
    counters = list(dict.fromkeys(name for result in results for name in result.counters))
    baselines = list(dict.fromkeys(name for result in results for name in result.speedups))
    facts = list(dict.fromkeys(name for environment in environments for name in environment))
    own = ["candidate", "q1_ms", "q3_ms", "fastest_ms", "hidden_pct", "hidden_of_possible_pct", "failure", "error"]
    own += ["validated", "graph", "n_warmup", "n_repeat", "cold_cache", "meeting", "note", "timed_ranks"]
    header = ["benchmark", "world_size", *axes, "gpu_time_ms", "min_time_ms", "skew_pct", "bandwidth_gbps", "tflops"]
    header += [*counters, "skipped", "skip_reason", *own, *(f"speedup_{name}" for name in baselines)]
    header += [name for name in facts if name != "world_size"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for result in results:
        quartiles = result.quartiles_ms or [None] * 3
        row: list[Any] = [result.benchmark_name, result.world_size, *(plain(result.params.get(name)) for name in axes)]
        row += [result.gpu_time_ms, result.min_time_ms, result.skew_pct, result.bandwidth_gbps, result.tflops]
        row += [*(plain(result.counters.get(name)) for name in counters), result.skipped, result.skip_reason]
        row += [result.candidate, quartiles[0], quartiles[2], result.fastest_ms, result.hidden_pct]
        row += [result.hidden_of_possible_pct, result.failure, result.error, result.validated, result.graph]
        row += [result.n_warmup, result.n_repeat, result.cold_cache, result.meeting, result.note]
        row += [_fact(result.timed_ranks), *(result.speedups.get(name) for name in baselines)]
        run = runs.get(result.world_size, {})
        row += [_fact(run.get(name)) for name in facts if name != "world_size"]
        writer.writerow(row)
    return text.getvalue()


def _fact(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, list) else value


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _any(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(plain(value))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
