"""What a GEMM beside a collective gains, by what bench_concurrent.py measured; needs no GPU.

    python benchmarks/report_concurrent_speed.py concurrent_2.json concurrent_8_alone.json
    python benchmarks/report_concurrent_speed.py concurrent_2.json --markdown

A table for each file, a line a problem. ``GEMM`` and ``comm`` are the fastest product and the fastest collective alone,
``longer`` is the longer one of the two, which nothing ends before. ``bound`` is the least, over the splits that --bound
measured, of the longer one of both alone with their parts of the compute units: what a split can be at best, as long as
the two do not help each other. Speed-ups are of one after the other, (GEMM + comm) / both.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAKESPAN, SPEEDUP, BALANCED, SHARE = 1.10, 1.25, (0.5, 2.0), 0.9
MATMULS, THEIRS, OURS = ("matmul", "own matmul"), ("torch", "torch symm_mem"), ("fused", "concurrent")
COLUMNS = (
    "ranks", "collective", "GEMM", "share", "dtype", "GEMM ms", "comm ms", "comm / GEMM", "our best", "ms",
    "default ms", "torch ms", "best / longer", "default / longer", "bound / longer", "speed-up", "of torch",
    "torch / our best",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One problem, and milliseconds by the names of its rows."""

    params: Mapping[str, Any]
    ms: dict[str, float] = field(default_factory=dict)
    units: float | None = None

    def _least(self, names: Iterable[str]) -> float | None:
        return min((self.ms[name] for name in names if name in self.ms), default=None)

    @property
    def gemm(self) -> float | None:
        return self._least(MATMULS)

    @property
    def comm(self) -> float | None:
        return self._least(f"{whose} {self.params['collective']}" for whose in ("own", "torch"))

    @property
    def theirs(self) -> float | None:
        return self._least(THEIRS)

    @property
    def default(self) -> float | None:
        return self.ms.get("fused")

    @property
    def best(self) -> tuple[str, float] | None:
        """Name and time of our fastest row."""
        ours = [(name, ms) for name, ms in self.ms.items() if name.split(" ")[0] in OURS]
        return min(ours, key=lambda one: one[1], default=None)

    @property
    def bound(self) -> float | None:
        """The least, over the splits, of the longer one of both alone with their parts of the units."""
        found = []
        for name, ms in self.ms.items():
            split = re.fullmatch(r"own matmul on (\d+)", name)
            if split and self.units is not None:
                rest = self.ms.get(f"own {self.params['collective']} on {int(self.units) - int(split[1])}")
                found += [] if rest is None else [max(ms, rest)]
        return min(found, default=None)

    @property
    def longer(self) -> float | None:
        return None if self.gemm is None or self.comm is None else max(self.gemm, self.comm)

    @property
    def ratio(self) -> float | None:
        return _over(self.comm, self.gemm)

    def over_longer(self, ms: float | None) -> float | None:
        return _over(ms, self.longer)

    def speedup(self, ms: float | None) -> float | None:
        """Of one after the other."""
        return None if self.gemm is None or self.comm is None else _over(self.gemm + self.comm, ms)

    @property
    def best_ms(self) -> float | None:
        return None if self.best is None else self.best[1]

    @property
    def against_theirs(self) -> float | None:
        return _over(self.theirs, self.best_ms)

    def line(self) -> list[Any]:
        """The cells of :data:`COLUMNS`."""
        best, params = self.best, self.params
        return [
            params.get("num_ranks"), params["collective"], params["gemm"], params["share"], params["dtype"],
            self.gemm, self.comm, self.ratio, best and best[0], best and best[1], self.default, self.theirs,
            self.over_longer(self.best_ms), self.over_longer(self.default), self.over_longer(self.bound),
            self.speedup(self.best_ms), self.speedup(self.theirs), self.against_theirs,
        ]  # fmt: skip


def problems(rows: Iterable[Mapping[str, Any]]) -> list[Problem]:
    """The problems of the benchmark's rows; a row that was not measured has no time."""
    found: dict[str, Problem] = {}
    for row in rows:
        if row["benchmark"] != "concurrent":
            continue
        key = json.dumps(row["params"], sort_keys=True)
        one = found.setdefault(key, Problem(row["params"], {}, row["counters"].get("units")))
        if row["gpu_time_ms"]:
            one.ms[row["candidate"]] = row["gpu_time_ms"]
    return list(found.values())


def goals(found: Sequence[Problem]) -> list[str]:
    """How many problems reach each goal; those without the figure are said apart."""
    low, high = BALANCED
    balanced = [one for one in found if one.ratio is not None and low <= one.ratio <= high]

    def counted(what: str, among: Sequence[Problem], figure: Callable[[Problem], Any], good: Callable[[float], bool]):
        values = [value for one in among if (value := figure(one)) is not None]
        lacking = f"; {len(among) - len(values)} have no figure" if len(values) < len(among) else ""
        worst = f", {min(values):.2f} to {max(values):.2f}" if values else ""
        return f"{what}: {sum(map(good, values))} of {len(values)}{worst}{lacking}"

    within = f"at most {MAKESPAN:.2f} times the longer of the two alone"
    best_of = [one for one in found if one.bound is not None and (one.over_longer(one.bound) or 9) <= MAKESPAN]
    lines = [
        counted(f"our best {within}", found, lambda one: one.over_longer(one.best_ms), lambda v: v <= MAKESPAN),
        counted(f"the default {within}", found, lambda one: one.over_longer(one.default), lambda v: v <= MAKESPAN),
    ]
    if any(one.bound is not None for one in found):
        where = f"our best {within}, where the bound is"
        lines.append(counted(where, best_of, lambda one: one.over_longer(one.best_ms), lambda v: v <= MAKESPAN))
    what = f"speed-up of our best at least {SPEEDUP}, comm / GEMM from {low} to {high}"
    lines.append(counted(what, balanced, lambda one: one.speedup(one.best_ms), lambda v: v >= SPEEDUP))
    both = [one.against_theirs for one in found if one.against_theirs is not None]
    reached = "nothing to compare" if not both else "reached" if _share(both) >= SHARE else "missed"
    what = f"our best at least as fast as torch on two streams, {SHARE:.0%} wanted ({reached})"
    lines.append(counted(what, found, lambda one: one.against_theirs, lambda v: v >= 1))
    return lines


def _share(values: Sequence[float]) -> float:
    return sum(value >= 1 for value in values) / len(values)


def _over(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by


def shown(value: Any) -> str:
    """A cell."""
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def heading(rows: Sequence[Mapping[str, Any]]) -> str:
    """What was measured, on what, and how."""
    where = next((row["environment"] for row in rows if row.get("environment")), {})
    timed = next((row["timed_ranks"] for row in rows if row.get("timed_ranks")), None)
    link = where.get("emulated_link")
    devices = where.get("devices") or []
    words = [f"{len(devices)} ranks ({where.get('runtime')}) on {', '.join(dict.fromkeys(devices))}"]
    words += [f"link {where.get('link')}", *([f"imitated: {link}"] if link else [])]
    words += [f"rank {', '.join(map(str, timed))} alone is timed, with the whole card"] if timed else []
    words += ["kernels were interpreted: times mean nothing"] if where.get("clock") not in (None, "gpu") else []
    failed = [row for row in rows if row.get("failure")]
    words += [f"{len(failed)} rows were wrong or failed"] if failed else []
    return "; ".join(words)


def table(found: Sequence[Problem], markdown: bool) -> list[str]:
    """A line a problem."""
    cells = [list(COLUMNS), *([shown(cell) for cell in one.line()] for one in found)]
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in cells]
        return [lines[0], "|" + "---|" * len(COLUMNS), *lines[1:]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def report(name: str, rows: Sequence[Mapping[str, Any]], markdown: bool = False) -> str:
    """The table of a file and what it comes to."""
    found = problems(rows)
    lines = [f"## {name}" if markdown else name, "", heading(rows), "", *table(found, markdown), ""]
    return "\n".join([*lines, *(f"- {line}" for line in goals(found)), ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="JSON that bench_concurrent.py wrote with --benchmark_out")
    parser.add_argument("--markdown", action="store_true", help="tables as markdown")
    options = parser.parse_args(argv)
    for path in options.files:
        print(report(path.stem, json.loads(path.read_text()), options.markdown))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
