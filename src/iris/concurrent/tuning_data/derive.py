"""Derives the splits and tiles that are worth timing from whole grids of them.

    python -m iris.concurrent.tuning_data.derive h200_2.json h200_8.json           # adds or replaces their architecture
    python -m iris.concurrent.tuning_data.derive h200_2.json h200_8.json --check   # whether the set is what they give

The files are those of ``collect``; ``SCHEMA.md`` describes them. Points are chosen greedily: the next one is that which
is within the tolerance of the best in the most cases where none before it is, and of equal ones that which leaves the
cases the least slow on average. ``candidate_set.json`` of the package is rewritten; what it has of other architectures
stays.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iris.concurrent.tuning_data import FILE, SCHEMA
from iris.errors import ArgumentError

TOLERANCE = 0.03
LEAST_CASES = 10  # fewer say too little to choose from
KIND = "concurrent"

Point = tuple[float, tuple[int, int, int]]  # share of the programs that begin with the GEMM, and its tile


@dataclass(frozen=True)
class Case:
    """A shape that a grid was measured of.

    Attributes:
        arch, world: where.
        points: how many times as long as the best each point takes.
        default: the same of what runs without tuning; counts where none of the chosen points was measured.
    """

    arch: str
    world: int
    points: Mapping[Point, float]
    default: float

    def slowness(self, chosen: Sequence[Point]) -> float:
        """The least of the chosen points'."""
        return min((self.points[point] for point in chosen if point in self.points), default=self.default)


def read(path: Path) -> dict[str, Any]:
    """A corpus.

    Raises:
        ArgumentError: it is none, or one of another schema.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or content.get("kind") != KIND or content.get("schema") != SCHEMA:
        raise ArgumentError(f"{path} is no corpus of schema {SCHEMA}; SCHEMA.md describes one, and collect makes it")
    return content


def cases_of(corpus: Mapping[str, Any]) -> list[Case]:
    """The cases of a corpus whose grid was measured, at least in part."""
    found = []
    for case in corpus["cases"]:
        times = {
            (point["split_frac"], tuple(point["gemm_block"])): point["ms"]
            for point in case.get("points", ())
            if point["ms"] is not None
        }
        if not times:
            continue
        default = case["default"]["ms"]
        best = min([*times.values(), *([] if default is None else [default])])
        slow = {point: ms / best for point, ms in times.items()}
        without = max(slow.values()) if default is None else default / best
        found.append(Case(corpus["arch"], case["world"], slow, without))
    return found


def order(cases: Sequence[Case], tolerance: float = TOLERANCE) -> list[Point]:
    """The points to try, the most useful first, until each case that can has one within the tolerance."""
    left = list(cases)
    possible = sorted({point for case in cases for point in case.points}, key=lambda point: (point[1], point[0]))
    chosen: list[Point] = []

    def good(case: Case, point: Point) -> bool:
        return case.points.get(point, math.inf) <= 1 + tolerance

    def worth(point: Point, of: Sequence[Case]) -> tuple[int, float]:
        slow = statistics.fmean(case.slowness([*chosen, point]) for case in cases)
        return sum(good(case, point) for case in of), -slow

    while left:
        found = {point: worth(point, left) for point in possible}
        best = max(possible, key=found.__getitem__)
        if not found[best][0]:
            break
        chosen.append(best)
        left = [case for case in left if not good(case, best)]
    return chosen


def coverage(cases: Sequence[Case], chosen: Sequence[Point], tolerance: float = TOLERANCE) -> list[dict[str, Any]]:
    """How good the best of the first ``k`` points is, for each ``k``."""
    rows = []
    for k in range(1, len(chosen) + 1):
        slow = [case.slowness(chosen[:k]) for case in cases]
        within = sum(one <= 1 + tolerance for one in slow) / len(slow)
        rows.append(
            {"k": k, "pct_within_tol": round(100 * within, 1), "mean_slowdown": round(statistics.fmean(slow), 4),
             "max_slowdown": round(max(slow), 4)}
        )  # fmt: skip
    return rows


def derive(corpora: Sequence[Mapping[str, Any]], tolerance: float, least_cases: int) -> dict[str, Any]:
    """What the candidate set has of each architecture that these corpora are of.

    Raises:
        ArgumentError: an architecture has too few cases.
    """
    found = {}
    for arch in sorted({corpus["arch"] for corpus in corpora}):
        own = [corpus for corpus in corpora if corpus["arch"] == arch]
        cases = [case for corpus in own for case in cases_of(corpus)]
        if len(cases) < max(1, least_cases):
            raise ArgumentError(
                f"{arch} has {len(cases)} cases with a grid, {max(1, least_cases)} are needed; collect more"
            )
        chosen = order(cases, tolerance)
        found[arch] = {
            "source": "; ".join(dict.fromkeys(_sentence(corpus) for corpus in own)),
            "tolerance": tolerance,
            "points": len(cases),
            "worlds": sorted({case.world for case in cases}),
            "order": [{"split_frac": share, "gemm_block": list(tile)} for share, tile in chosen],
            "coverage": coverage(cases, chosen, tolerance),
        }
    return found


def _sentence(corpus: Mapping[str, Any]) -> str:
    return f"derived from {corpus['kernel']} on {corpus['device']}, {corpus['software']}, {corpus['date']}"


def as_text(archs: Mapping[str, Any]) -> str:
    """The file of a candidate set, a point a line."""
    lines = ["{", f'"schema": {SCHEMA},', '"archs": {']
    for number, (arch, found) in enumerate(archs.items()):
        lines.append(f"{json.dumps(arch)}: {{")
        fields = []
        for name, value in found.items():
            if name in ("order", "coverage"):
                fields.append(f'"{name}": [\n' + ",\n".join(json.dumps(one) for one in value) + "\n]")
            else:
                fields.append(f'"{name}": {json.dumps(value)}')
        lines += [",\n".join(fields), "}" + ("," if number < len(archs) - 1 else "")]
    return "\n".join([*lines, "}", "}"]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m iris.concurrent.tuning_data.derive", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("corpora", type=Path, nargs="+", help="files of collect; those of a quick run are left out")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).with_name(FILE), help="the candidate set (default: the package's)"
    )
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="share above the best (default: %(default)s)"
    )
    parser.add_argument(
        "--least-cases", type=int, default=LEAST_CASES, help="that an architecture must have (default: %(default)s)"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the set would change")
    options = parser.parse_args(argv)
    corpora = [read(path) for path in options.corpora]
    whole = [corpus for corpus in corpora if not corpus.get("quick")]
    for path, corpus in zip(options.corpora, corpora, strict=True):
        if corpus.get("quick"):
            print(f"{path}: left out, it is of a quick run")
    if not whole:
        raise ArgumentError("none of the files has a whole grid")
    there = json.loads(options.out.read_text(encoding="utf-8"))["archs"] if options.out.exists() else {}
    found = derive(whole, options.tolerance, options.least_cases)
    text = as_text({**there, **found})
    for arch, known in found.items():
        print(f"{arch}: {len(known['order'])} points for {known['points']} cases of {known['worlds']} ranks")
        for row in known["coverage"]:
            if row["k"] in (1, 4, 8, len(known["order"])):
                print(
                    f"  the best of {row['k']}: {row['pct_within_tol']} % of the cases within {options.tolerance:.0%} "
                    f"of the best, {row['mean_slowdown']:.3f} times as long, at most {row['max_slowdown']:.3f}"
                )
    if options.check:
        same = options.out.exists() and options.out.read_text(encoding="utf-8") == text
        print(f"{options.out} is {'' if same else 'not '}what the files give")
        return 0 if same else 1
    options.out.write_text(text, encoding="utf-8")
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
