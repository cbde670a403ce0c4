"""What the files of results of run_all.py have, and which goals they reach."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _run_all_steps import GRID_CASES, Step
from _run_all_tests import outcomes, reasons

SPEEDUP, HIDDEN, FROM_M = 1.2, 80.0, 4096
SMALL_US, SMALL_BYTES = 12.0, 64 << 10
GATHER_GBPS = 350.0
NK = (3584, 8192)  # of all_gather_matmul's goals
# Goals of more than two ranks.
SPEEDUP_OF_MANY = 1.3
NOISE = 0.03  # two turns of the same operations differ by as much: what is slower by less is not called slower
AT_BYTES, AT_US = 8 << 10, 11.0
SPLIT_LOSS = 0.02
REACHED, MISSED, UNKNOWN = "reached", "missed", "not measured"


@dataclass(frozen=True)
class Goal:
    """A goal, what was measured, and whether that reaches it."""

    goal: str
    measured: str
    verdict: str


class Data:
    """What the steps wrote; a step without a file has none."""

    def __init__(self, out: Path, steps: Sequence[Step]):
        self.out, self.steps = out, steps

    def _read(self, step: Step, file: str = "") -> Any:
        try:
            return json.loads((self.out / (file or step.output)).read_text())
        except (FileNotFoundError, ValueError):  # a step that was ended may have left half a file
            return None

    @property
    def machine(self) -> dict[str, Any]:
        step = next((step for step in self.steps if step.kind == "machine"), None)
        return (step and self._read(step)) or {}

    def rows(self, prefix: str = "") -> list[dict[str, Any]]:
        """Rows of iris.bench of the steps whose names begin so."""
        chosen = [step for step in self.steps if step.kind == "bench" and step.name.startswith(prefix)]
        return [row for step in chosen for row in self._read(step) or ()]

    def collectives(self) -> list[dict[str, Any]]:
        chosen = [step for step in self.steps if step.kind == "collectives"]
        return [row for step in chosen for row in (self._read(step) or {}).get("rows", ())]

    def sweeps(self) -> list[dict[str, Any]]:
        """Rows of the sweeps of configurations."""
        return [row for step in self.steps if step.kind == "sweep" for row in self._read(step) or ()]

    def grids(self) -> list[dict[str, Any]]:
        """What tuning loses in each case of the grids of iris.concurrent."""
        chosen = [step for step in self.steps if step.kind == "grid"]
        return [case for step in chosen for case in (self._read(step, step.digest) or {}).get("cases", ())]

    def tests(self) -> dict[str, dict[str, str]]:
        """Outcomes by step and test, of steps that have begun."""
        return {step.name: outcomes(self.out / step.output) for step in self._begun_tests()}

    def reasons(self) -> dict[str, dict[str, str]]:
        """Why tests failed, by step and test."""
        return {step.name: reasons(self.out / step.output) for step in self._begun_tests()}

    def _begun_tests(self) -> list[Step]:
        return [step for step in self.steps if step.kind == "tests" and (self.out / step.output).exists()]

    @property
    def interpreted(self) -> bool:
        """Whether times mean nothing."""
        clocks = {row["environment"]["clock"] for row in self.rows() if row.get("environment")}
        links = {row["link"] for row in self.collectives()}
        return bool(clocks - {"gpu"}) or "interpreted" in links


def counted(tests: dict[str, str]) -> dict[str, int]:
    """How many tests have each outcome; those that have not ended are left out."""
    return {outcome: list(tests.values()).count(outcome) for outcome in ("passed", "failed", "skipped")}


def has_failed(out: Path, step: Step, state: dict[str, Any]) -> bool:
    """Whether a step failed, or tests of one that has not ended did."""
    record = state["steps"].get(step.name, {})
    if record.get("state") == "failed":
        return True
    return (
        step.kind == "tests" and record.get("state") == "partly" and counted(outcomes(out / step.output))["failed"] > 0
    )


def problems(rows: Iterable[dict[str, Any]]) -> dict[tuple, dict[str, dict[str, Any]]]:
    """Rows of all_gather_matmul by algorithm, for each (N, K, dtype, gather_dim, M)."""
    found: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        params = row["params"]
        if "shape" in params:
            params = {**params, **dict(zip("MNK", map(int, params["shape"].split("x")), strict=True))}
        if "gather_dim" in params:
            key = tuple(params[name] for name in ("N", "K", "dtype", "gather_dim", "M"))
            found.setdefault(key, {})[params["algorithm"]] = row
    return dict(sorted(found.items(), key=lambda item: tuple(map(str, item[0][:4])) + (item[0][4],)))


def time_of(ways: dict[str, dict[str, Any]], name: str) -> float | None:
    return ways.get(name, {}).get("gpu_time_ms")


def problem_name(key: tuple, whole: bool = False) -> str:
    columns = f" N={key[0]} K={key[1]}" if whole else ""
    return f"M={key[4]}{columns} {key[2]} gather_dim={key[3]}"


def speedup(ways: dict[str, dict[str, Any]]) -> float | None:
    """How many times as fast as PyTorch's operations ``auto`` is."""
    return ways.get("auto", {}).get("speedups", {}).get("torch")


def _judged(goal: str, values: dict[str, float | None], reaches: Callable[[float], bool], form: str, low: bool) -> Goal:
    """A goal that every problem must reach. ``low``: whether the smallest value is the worst one."""
    measured = {name: value for name, value in values.items() if value is not None}
    if not measured:
        return Goal(goal, "-", UNKNOWN)
    worst, best = (min, max) if low else (max, min)
    ends = [pick(measured, key=measured.__getitem__) for pick in (worst, best)]
    good = sum(map(reaches, measured.values()))
    text = f"in {good} of {len(values)}: " + " to ".join(f"{format(measured[end], form)} ({end})" for end in ends)
    missing = len(values) - len(measured)
    if missing:
        text += f"; {missing} have no figure"
    if good < len(measured):
        return Goal(goal, text, MISSED)
    return Goal(goal, text, UNKNOWN if missing else REACHED)


def goals(data: Data, ranks: int) -> list[Goal]:
    """Each goal for a number of ranks with what was measured for it."""
    found = _goals_of_two(data) if ranks <= 2 else _goals_of_many(data)
    if data.interpreted:
        return [Goal(one.goal, "kernels were interpreted, so times mean nothing", UNKNOWN) for one in found]
    return found


def _large(data: Data) -> dict[str, dict[str, dict[str, Any]]]:
    """The problems of the sweep over M with as many rows as goals speak of."""
    found = problems(data.rows("all_gather_matmul"))
    return {problem_name(key): own for key, own in found.items() if key[:2] == NK and key[4] >= FROM_M}


def _faster(data: Data, least: float) -> Goal:
    return _judged(
        f"all_gather_matmul at least {least} times as fast as NCCL + cuBLAS, M >= {FROM_M}",
        {name: speedup(own) for name, own in _large(data).items()},
        lambda value: value >= least,
        ".2f",
        True,
    )


def _goals_of_two(data: Data) -> list[Goal]:
    ways = _large(data)
    auto = [row for row in data.collectives() if row["variant"] == "auto"]
    hidden = {name: own.get("auto", {}).get("hidden_pct") for name, own in ways.items()}
    fused = {}
    for name, own in ways.items():
        if name.endswith("=0"):
            ours, theirs = time_of(own, "auto"), time_of(own, "torch_fused")
            fused[name] = theirs / ours if ours and theirs else None
    small = {
        size_text(row["bytes"]): row["median_us"]
        for row in auto
        if row["operation"] == "all_reduce" and row["bytes"] <= SMALL_BYTES
    }
    received = {row["bytes"]: gigabytes(row) for row in auto if row["operation"] == "all_gather"}
    largest = {size_text(b): received[b] for b in (max(received),)} if received else {}
    return [
        _faster(data, SPEEDUP),
        _judged(
            f"all_gather_matmul hides at least {HIDDEN:.0f} % of the communication, M >= {FROM_M}",
            hidden,
            lambda value: value >= HIDDEN,
            ".0f",
            True,
        ),
        _judged(
            f"all_gather_matmul faster than PyTorch's fused operation (times as fast), M >= {FROM_M}",
            fused,
            lambda value: value > 1,
            ".2f",
            True,
        ),
        _judged(
            f"all_reduce under {SMALL_US:.0f} us up to {size_text(SMALL_BYTES)}",
            small,
            lambda value: value < SMALL_US,
            ".1f",
            False,
        ),
        _judged(
            f"all_gather at least {GATHER_GBPS:.0f} GB/s a direction, at the largest size",
            largest,
            lambda value: value >= GATHER_GBPS,
            ".0f",
            True,
        ),
    ]


def _goals_of_many(data: Data) -> list[Goal]:
    every = {}
    for prefix in ("all_gather_matmul", "llama", "seed_shapes"):
        for key, own in problems(data.rows(prefix)).items():
            if not left_out(own):
                every[problem_name(key, whole=True)] = speedup(own)
    small = {
        size_text(row["bytes"]): row.get("graph_us")
        for row in data.collectives()
        if (row["operation"], row["variant"], row["bytes"]) == ("all_reduce", "auto", AT_BYTES)
    }
    return [
        _faster(data, SPEEDUP_OF_MANY),
        _judged(
            f"all_gather_matmul nowhere slower than NCCL + cuBLAS by what is chosen: at least {1 - NOISE:.2f} times as "
            f"fast, since {100 * NOISE:.0f} % are noise",
            every,
            lambda value: value >= 1 - NOISE,
            ".2f",
            True,
        ),
        _judged(
            f"all_reduce of {AT_BYTES // 2} elements of bf16 ({size_text(AT_BYTES)}) under {AT_US:.0f} us in graphs",
            small,
            lambda value: value < AT_US,
            ".1f",
            False,
        ),
        _split_goal(data.grids()),
    ]


def _split_goal(cases: Sequence[dict[str, Any]]) -> Goal:
    """Whether the best of few timed splits is near the best of the grid, on average over the cases."""
    goal = f"iris.concurrent: the best of 8 timed splits within {100 * SPLIT_LOSS:.0f} % of the best on average"
    if not cases:
        return Goal(goal, "-", UNKNOWN)
    lost = {case["case"]: case["tuning"] for case in cases}
    mean, worst = statistics.fmean(lost.values()), max(lost, key=lost.__getitem__)
    text = f"{100 * mean:.1f} % over {len(lost)} of {GRID_CASES} cases, at most {100 * lost[worst]:.0f} % ({worst})"
    if mean > SPLIT_LOSS:
        return Goal(goal, text, MISSED)
    return Goal(goal, text, REACHED if len(lost) >= GRID_CASES else UNKNOWN)


def left_out(ways: dict[str, dict[str, Any]]) -> str:
    """Why a problem was not measured at all; empty when it was, or should have been."""
    why = {row["skip_reason"] for row in ways.values()}
    return why.pop() if len(why) == 1 else ""


def gigabytes(row: dict[str, Any]) -> float:
    """GB/s that a rank receives in an all_gather, whose ``bytes`` are those of the gathered tensor."""
    return row["bytes"] * (row["world"] - 1) / row["world"] / row["median_us"] / 1e3


def size_text(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"
