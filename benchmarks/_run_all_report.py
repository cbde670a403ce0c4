"""What run_all.py writes: tables, figures and a page that sums them up."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import report_concurrent_speed as concurrent
from _run_all_goals import (
    Data,
    counted,
    gigabytes,
    goals,
    left_out,
    problem_name,
    problems,
    size_text,
    speedup,
    time_of,
)
from _run_all_steps import SEEDS, Step

SUMMARY, TABLES = "summary.md", "tables.md"
# Of bench_matmul_reduce.py: a multiplication and a reduction one after the other, and what is not ours or is a part.
PAIRS = ("torch", "ccl", "torch_one_shot", "torch_two_shot", "torch_reduce_scatter")
PARTS = ("torch_fused", "auto", "matmul", "own matmul")
MOST_NAMES = 100


def _markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in rows:
        cells = ["-" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return [*lines, ""]


def links_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """GB/s of one direction: a column for each number of programs and the copy engine."""
    own = [row for row in rows if row["benchmark"] == "bandwidth"]
    columns = list(dict.fromkeys(row["params"]["by"] for row in own))
    cells: dict[tuple, dict[str, float | None]] = {}
    for row in own:
        key = tuple(row["params"][name] for name in ("direction", "way", "nbytes"))
        cells.setdefault(key, {})[row["params"]["by"]] = row["bandwidth_gbps"]
    shown = [[d, w, size_text(n), *(by.get(c) for c in columns)] for (d, w, n), by in sorted(cells.items())]
    return _markdown(["direction", "way", "size", *columns], shown) if own else []


def trips_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    own = [row for row in rows if row["benchmark"] == "round_trip"]
    names = ("round trip us", "fastest us", "slowest batch us")
    shown = [[row["params"]["payload"], *(row["counters"].get(name) for name in names)] for row in own]
    return _markdown(["what goes", *names], shown) if own else []


def products_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """all_gather_matmul: one line a problem."""
    header = ["N", "K", "dtype", "gather_dim", "M", "torch ms", "torch_fused ms", "auto ms", "auto takes", "x torch"]
    header += ["x torch_fused", "hidden %", "hidden of possible %", "TFLOPS", "matmul ms"]
    shown = []
    for key, ways in problems(rows).items():
        auto, fused, ours = ways.get("auto", {}), time_of(ways, "torch_fused"), time_of(ways, "auto")
        line = [*key, time_of(ways, "torch"), fused, ours, auto.get("counters", {}).get("takes")]
        line += [auto.get("speedups", {}).get("torch"), fused / ours if fused and ours else None]
        line += [
            auto.get("hidden_pct"),
            auto.get("hidden_of_possible_pct"),
            auto.get("tflops"),
            time_of(ways, "matmul"),
        ]
        shown.append(line)
    return _markdown(header, shown) if shown else []


def seeds_section(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Shapes that were measured elsewhere: one line a problem, and those that were left out."""
    found = problems(rows)
    names = ("torch", "hbm_buffer", "copy_engine", "auto")
    header = ["M", "N", "K", *(f"{name} ms" for name in names), "auto takes", "x torch", f"x torch on {SEEDS}"]
    shown, without = [], []
    for key, ways in found.items():
        (n, k, _, _, m), why = key, left_out(ways)
        if why:
            without.append(f"- left out: {problem_name(key, whole=True)}: {why}")
            continue
        counters = ways.get("auto", {}).get("counters", {})
        line = [m, n, k, *(time_of(ways, name) for name in names), counters.get("takes"), speedup(ways)]
        shown.append([*line, counters.get("published speedup")])
    return [*(_markdown(header, shown) if shown else []), *without, *([""] if without else [])]


def sweeps_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Configurations of all_gather_matmul: one line a case, the fastest against the library's own without tables."""
    header = ["layer", "gather_dim", "M", "tried", "torch ms", "unchanged ms", "best ms", "x torch", "best"]
    cases: dict[tuple, dict[str, float]] = {}
    for row in rows:
        if row["gpu_time_ms"] is not None:
            key = tuple(row["params"][name] for name in ("layer", "gather_dim", "M"))
            cases.setdefault(key, {})[row["candidate"]] = row["gpu_time_ms"]
    shown = []
    for key, times in cases.items():
        ours = {name: ms for name, ms in times.items() if name not in ("torch", "matmul")}
        if not ours:
            continue
        best, theirs = min(ours, key=ours.__getitem__), times.get("torch")
        unchanged = ours.get(next(iter(ours)))
        shown.append([*key, len(ours), theirs, unchanged, ours[best], theirs and theirs / ours[best], best])
    return _markdown(header, shown) if shown else []


def grids_table(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Grids of iris.concurrent: what a case takes at best, and how much longer by tuning and without."""
    header = ["case", "points", "best ms", "8 timed, + %", "default, + %"]
    shown = [
        [c["case"], c["points"], c["best_ms"], *(None if c[n] is None else 100 * c[n] for n in ("tuning", "default"))]
        for c in cases
    ]
    return _markdown(header, shown) if shown else []


def sums_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """matmul_all_reduce and matmul_reduce_scatter: one line a problem, our best against what else there is."""
    header = ["operation", "N", "K", "dtype", "M", "torch ms", "best pair", "ms", "torch_fused ms", "our best", "ms"]
    header += ["auto ms", "auto takes", "best pair / our best", "best pair / auto", "hidden %", "TFLOPS", "matmul ms"]
    found: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        # What follows the operation is the name of a model.
        operation = "_".join(row["benchmark"].split("_")[:3])
        key = operation, *(row["params"][name] for name in ("N", "K", "dtype", "M"))
        found.setdefault(key, {})[row["params"]["algorithm"]] = row
    shown = []
    for key, ways in sorted(found.items(), key=lambda item: (*map(str, item[0][:4]), item[0][4])):
        timed = {name: row["gpu_time_ms"] for name, row in ways.items() if row["gpu_time_ms"]}
        ours = [name for name in timed if name not in (*PAIRS, *PARTS) and not name.endswith("reduction")]
        pair, own = (min(names, key=timed.__getitem__, default="") for names in (timed.keys() & set(PAIRS), ours))
        best, line = timed.get(pair), [*key, timed.get("torch"), pair or None, timed.get(pair)]
        line += [timed.get("torch_fused"), own or None, timed.get(own), timed.get("auto")]
        line += [ways.get("auto", {}).get("counters", {}).get("takes")]
        line += [best / timed[name] if best and name in timed else None for name in (own, "auto")]
        line += [ways.get(own, {}).get(name) for name in ("hidden_pct", "tflops")]
        shown.append([*line, timed.get("matmul")])
    return _markdown(header, shown) if shown else []


def concurrent_section(rows: Sequence[dict[str, Any]]) -> list[str]:
    """iris.concurrent: one line a problem, and how many reach what."""
    found = concurrent.problems(rows)
    if not found:
        return []
    return [*concurrent.table(found, markdown=True), "", *(f"- {line}" for line in concurrent.goals(found)), ""]


def gathers_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """all_gather: GB/s that a rank receives, a column for each candidate."""
    own = [row for row in rows if row["operation"] == "all_gather"]
    columns = list(dict.fromkeys(row["name"] for row in own))
    shown = []
    for (_, nbytes), found in by_size(own).items():
        rates = {row["name"]: gigabytes(row) for row in found}
        shown.append([size_text(nbytes), *(rates.get(name) for name in columns)])
    return _markdown(["size", *columns], shown) if shown else []


def by_size(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["operation"], row["bytes"]), []).append(row)
    return found


def collectives_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line a size: auto, our best and the best peer, in graphs where all can be captured."""
    header = [
        "operation",
        "size",
        "auto us",
        "auto takes",
        "our best",
        "us",
        "best peer",
        "us",
        "peer / auto",
        "auto GB/s",
    ]
    shown = []
    for (operation, nbytes), own in by_size(rows).items():
        auto = next((row for row in own if row["variant"] == "auto"), None)
        ours = min((r for r in own if not r["peer"]), key=lambda r: r["median_us"], default=None)
        peer = min((r for r in own if r["peer"]), key=lambda r: r["median_us"], default=None)
        line = [operation, size_text(nbytes), auto and auto["median_us"], auto and auto.get("algorithm")]
        for one in (ours, peer):
            line += [one and one["name"], one and one["median_us"]]
        line += [peer["median_us"] / auto["median_us"] if peer and auto else None]
        line += [nbytes / auto["median_us"] / 1e3 if auto else None]
        shown.append(line)
    return _markdown(header, shown) if shown else []


def bench_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows of one benchmark of iris.bench, whatever their axes are."""
    axes = list(dict.fromkeys(name for row in rows for name in row["params"] if name != "num_ranks"))
    counters = list(dict.fromkeys(name for row in rows for name in row["counters"]))
    against = list(dict.fromkeys(name for row in rows for name in row["speedups"]))
    header = [*axes, "candidate", "ms", "skew %", "GB/s", "TFLOPS", *counters, *(f"x {name}" for name in against)]
    header += ["hidden %", "checked", "why not"]
    shown = []
    for row in rows:
        line = [*(row["params"].get(name) for name in axes), row.get("candidate") or None, row["gpu_time_ms"]]
        line += [row["skew_pct"], row["bandwidth_gbps"], row["tflops"], *(row["counters"].get(n) for n in counters)]
        line += [*(row["speedups"].get(name) for name in against), row["hidden_pct"]]
        line += ["yes" if row["validated"] else None, row["error"] or row["skip_reason"] or None]
        shown.append(line)
    return _markdown(header, shown) if shown else []


def tests_section(found: dict[str, dict[str, str]], why: dict[str, dict[str, str]]) -> list[str]:
    header = ["step", "passed", "failed", "skipped", "not ended"]
    shown = []
    for name, tests in found.items():
        counts = counted(tests)
        shown.append([name, *counts.values(), list(tests.values()).count("started")])
    lines = _markdown(header, shown) if shown else ["No test has run.", ""]
    failed = [(name, test, reason) for name, tests in why.items() for test, reason in tests.items()]
    if failed:
        lines += ["Failed:", ""]
        for _, test, reason in failed[:MOST_NAMES]:
            lines.append(f"- `{test}`: `{reason.replace('`', chr(39))}`")
        lines += [f"- and {len(failed) - MOST_NAMES} more"] * (len(failed) > MOST_NAMES)
        steps = dict.fromkeys(name for name, _, _ in failed)
        where = ", ".join(f"`data/{name}.jsonl` (`reason`), `logs/{name}.log`" for name in steps)
        lines += ["", f"More of each reason: {where}.", ""]
    return lines


def _machine(machine: dict[str, Any]) -> list[str]:
    if not machine:
        return ["The step `machine` has not run.", ""]
    gpus = machine["gpus"]
    names = ", ".join(f"{gpus.count(name)} x {name}" for name in sorted(set(gpus))) or "no GPU"
    toolkit = f"CUDA {machine['cuda']}" if machine["cuda"] else machine["hip"] and f"HIP {machine['hip']}"
    versions = [f"torch {machine['torch']}", f"Triton {machine['triton']}", f"Python {machine['python']}", toolkit]
    versions += [machine["nccl"] and f"NCCL {machine['nccl']}", f"commit {machine['commit']}"]
    lines = [f"{names}; {machine['cpus']} CPUs; {', '.join(filter(None, versions))}; {machine['date']}.", ""]
    lines += [f"Driver: {machine['driver']}", ""] if machine["driver"] else []
    for command, text in machine["topology"].items():
        lines += [f"`{command}`", "", "```", text, "```", ""]
    return lines


def summary(data: Data, state: dict[str, Any], figures: Sequence[str] = ()) -> str:
    """The page that sums everything up."""
    ranks = state.get("ranks")
    lines = [f"# What {ranks} ranks measured", ""]
    if state.get("small"):
        lines += ["**Tiny problems (`--small`): this says that the steps work, and nothing about speed.**", ""]
    if data.interpreted:
        lines += ["**Kernels were interpreted: times mean nothing.**", ""]
    lines += _machine(data.machine)
    lines += [
        "NVLink multicast was off in NCCL, PyTorch and NVSHMEM. Every result was compared before it was timed.",
        "",
    ]
    lines += [
        "## Goals",
        "",
        *_markdown(["goal", "measured", ""], [[g.goal, g.measured, g.verdict] for g in goals(data, ranks or 2)]),
    ]
    sections = (
        ("Links, GB/s in one direction", links_table(data.rows("links"))),
        ("Round trips of a flag", trips_table(data.rows("round_trip"))),
        ("all_gather_matmul", products_table(data.rows("all_gather_matmul"))),
        ("all_gather_matmul, layers of Llama 70B, N divided by the ranks", products_table(data.rows("llama"))),
        (f"all_gather_matmul, shapes of {SEEDS}", seeds_section(data.rows("seed_shapes"))),
        ("matmul_all_reduce and matmul_reduce_scatter", sums_table(data.rows("matmul_reduce"))),
        ("A GEMM beside a collective", concurrent_section(data.rows("concurrent"))),
        ("Collectives", collectives_table(data.collectives())),
        ("all_gather, GB/s that a rank receives", gathers_table(data.collectives())),
        ("Copies", bench_table(data.rows("copy"))),
        ("Splits of a GEMM beside a collective, from 8 timed", grids_table(data.grids())),
        ("Configurations of all_gather_matmul", sweeps_table(data.sweeps())),
    )
    for title, table in sections:
        if table:
            lines += [f"## {title}", "", *table]
    lines += ["## Tests on distinct GPUs", "", *tests_section(data.tests(), data.reasons())]
    if figures:
        lines += ["## Figures", "", *(f"![{Path(name).stem}]({name})" for name in figures), ""]
    shown = []
    for step in data.steps:
        record = state["steps"].get(step.name, {})
        ended = record.get("state", "waiting")
        shown.append([step.name, ended, record.get("seconds") or None, step.estimate, record.get("error") or None])
    lines += ["## Steps", "", *_markdown(["step", "state", "s", "estimate s", "why"], shown)]
    lines += ["Commands, `{out}` is the folder of results:", "", "```"]
    lines += [*state.get("calls", ()), *("python " + " ".join(step.words) for step in data.steps), "```", ""]
    for step in data.steps:
        record = state["steps"].get(step.name, {})
        if record.get("state") == "failed" and record.get("last_lines"):
            lines += [f"### Last lines of {step.name}", "", "```", *record["last_lines"], "```", ""]
    lines += [f"All rows: [{TABLES}]({TABLES}); JSON in `data`, output in `logs`.", ""]
    return "\n".join(lines)


def tables(data: Data) -> str:
    """Every row of every step."""
    lines = ["# All rows", ""]
    rows = data.rows()
    for name in dict.fromkeys(row["benchmark"] for row in rows):
        lines += [f"## {name}", "", *bench_table([row for row in rows if row["benchmark"] == name])]
    header = ["operation", "size", "candidate", "graph us", "eager us", "p50 us", "p99 us", "calls", "buffer sets"]
    kinds = ("graph_us", "eager_us", "p50_us", "p99_us", "calls", "sets")
    shown = [[r["operation"], size_text(r["bytes"]), r["name"], *(r.get(k) for k in kinds)] for r in data.collectives()]
    lines += ["## Collectives", "", *_markdown(header, shown)] if shown else []
    return "\n".join(lines)


Lines = dict[str, list[tuple[float, float]]]


def charts(data: Data) -> dict[str, tuple[str, str, str, Lines]]:
    """For each figure its title, the names of its axes, and its lines."""
    found: dict[str, tuple[str, str, str, Lines]] = {}

    def add(name, title, x, y, line, at, value):
        if value is not None:
            found.setdefault(name, (title, x, y, {}))[3].setdefault(line, []).append((at, value))

    for row in data.rows("links"):
        p = row["params"]
        if row["benchmark"] == "bandwidth":
            name = f"links_{p['way']}_{p['direction']}"
            title = f"{p['way']}, {'one direction' if p['direction'] == 'one' else 'both directions at once'}"
            add(name, title, "bytes", "GB/s in one direction", p["by"], p["nbytes"], row["bandwidth_gbps"])
    for (n, k, dtype, dim, m), ways in problems(data.rows("all_gather_matmul")).items():
        for algorithm, row in ways.items():
            title = f"all_gather_matmul, N={n}, K={k}, {dtype}, gather_dim={dim}"
            add(f"all_gather_matmul_{dtype}_{dim}", title, "M", "TFLOPS", algorithm, m, row["tflops"])
    for row in data.rows("matmul_reduce"):
        p = row["params"]
        title = f"{row['benchmark']}, N={p['N']}, K={p['K']}, {p['dtype']}"
        name = f"{row['benchmark']}_{p['N']}_{p['K']}_{p['dtype']}"
        add(name, title, "M", "TFLOPS", p["algorithm"], p["M"], row["tflops"])
    for row in data.collectives():
        title = f"{row['operation']}, {row['world']} ranks"
        add(row["operation"], title, "bytes", "us", row["name"], row["bytes"], row["median_us"])
    return found


def draw(data: Data, folder: Path) -> list[str]:
    """Draw the figures; names of files relative to the results. None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = []
    for name, (title, x, y, lines) in charts(data).items():
        folder.mkdir(parents=True, exist_ok=True)
        figure, axes = pyplot.subplots(figsize=(7.5, 4.8), layout="constrained")
        for label, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=label)
        axes.set(title=title + " (interpreted: times mean nothing)" * data.interpreted, xlabel=x, ylabel=y)
        axes.set_xscale("log", base=2)
        if y == "us":
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        for suffix in ("png", "svg"):
            figure.savefig(folder / f"{name}.{suffix}", dpi=110)
        pyplot.close(figure)
        names.append(f"{folder.name}/{name}.png")
    return names


def write(out: Path, steps: Sequence[Step], state: dict[str, Any], *, draw_figures: bool = False) -> None:
    """Write the summary and the tables; with ``draw_figures`` the figures too."""
    data = Data(out, steps)
    folder = out / "figures"
    known = [f"{folder.name}/{path.name}" for path in sorted(folder.glob("*.png"))]
    figures = draw(data, folder) if draw_figures else known
    (out / TABLES).write_text(tables(data))
    (out / SUMMARY).write_text(summary(data, state, figures or known))
