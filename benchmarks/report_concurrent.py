"""How far the predictor of iris.concurrent is from what was measured, and what tuning loses to the best; needs no GPU.

    python benchmarks/report_concurrent.py
    python benchmarks/report_concurrent.py --out concurrent.md
    python benchmarks/report_concurrent.py --cases concurrent_mi300x     # every case
    python benchmarks/report_concurrent.py my_corpus.json                # another corpus than the shipped ones
    python benchmarks/report_concurrent.py my_corpus.json --json losses.json      # what tuning loses in each case

Read are the corpora ``benchmarks/data/concurrent_*.json``, whose form is in iris/concurrent/tuning_data/SCHEMA.md. Of
each case the grid is ranked without its times, and the best of the first 1, 4 and 8 points is compared with the best.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iris._target import KNOWN
from iris.concurrent import _candidates
from iris.concurrent._candidates import Candidate, Conditions
from iris.concurrent.tuning_data.derive import read
from iris.errors import ArgumentError

DATA = Path(__file__).parent / "data"
TIMED = (1, 4, 8)
_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}

LOSSES = (
    "Loss: how much longer the best of the first k points of a case takes than the best of its grid, on average over "
    "the cases and in the worst. *Predictor* ranks by prediction, *set* is the candidate set of the architecture, and "
    "*tuning* takes the default and then both in turn, as `tune=True` does. *Default* is what runs without tuning."
)
ERRORS = (
    "Error of the times: predicted over measured, less 1, of all points of the grids. *Order* is Spearman's "
    "correlation of predicted and measured times in a case, the median of the cases."
)

Way = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A case whose grid was measured: milliseconds of its points, of the default, and what is asked."""

    name: str
    shape: Mapping[str, Any]
    where: Conditions
    times: Mapping[Way, float]
    default: tuple[Way, float | None]

    @property
    def best(self) -> float:
        """Milliseconds of the best point; the default's where that is better."""
        own = self.default[1]
        return min([*self.times.values(), *([] if own is None else [own])])

    @property
    def splits(self) -> list[int]:
        return sorted({split for split, _ in self.times})

    @property
    def tiles(self) -> list[Any]:
        return list(dict.fromkeys(tile for _, tile in self.times))

    def loss(self, ranked: Sequence[Candidate], k: int, tuning: bool = False) -> float:
        """How much longer than the best the best of the first ``k`` takes; in ``tuning`` the default is one of the
        ``k``. Those that failed are not counted."""
        way, took = self.default
        tried = [took] if tuning and took is not None else []
        others = [self.times[one.way] for one in ranked if one.way in self.times and not (tried and one.way == way)]
        return min([*tried, *others[: k - len(tried)]], default=math.inf) / self.best - 1


def corpora(files: Sequence[Path] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Names and contents of corpora, the shipped ones by default."""
    return [(path.stem, read(path)) for path in files or sorted(DATA.glob("concurrent_*.json"))]


def cases_of(corpus: Mapping[str, Any]) -> list[Case]:
    """The cases of a corpus that have a grid."""
    target = KNOWN[corpus["machine"]]
    found = []
    for case in corpus["cases"]:
        points = [point for point in case.get("points", ()) if point["ms"] is not None]
        if not points:
            continue
        sizes = case["sizes"]
        shape = {f"gemm_{name.lower()}": sizes[name] for name in "MNK"}
        shape |= {"comm_m": sizes["comm_m"], "comm_n": sizes["comm_n"]}
        shape |= {"collective": case["collective"], "world": case["world"]}
        # Ranks that share a card have no links, unless they are imitated.
        where = Conditions(
            target, corpus["machine"], corpus["dtype"], _ITEMSIZE[corpus["dtype"]], _ITEMSIZE[corpus["comm_dtype"]],
            corpus["units"], corpus["units"], corpus["mode"],
            comm_block=tuple(corpus["comm_block"]) if corpus["comm_block"] else None,
            link_gbps=corpus.get("link_gbps") or (math.inf if corpus["link"] == "shared" else None),
        )  # fmt: skip
        shown = f"{case['collective']} {'x'.join(map(str, sizes.values()))}, {case['world']} ranks"
        times = {(point["gemm_wgs"], tuple(point["gemm_block"])): point["ms"] for point in points}
        default = case["default"]
        own = (default["gemm_wgs"], tuple(default["gemm_block"])), default["ms"]
        found.append(Case(shown, shape, where, times, own))
    return found


def by_predictor(case: Case) -> list[Candidate]:
    return _candidates.predicted(case.shape, case.where, case.tiles, case.splits)


def by_set(case: Case) -> list[Candidate]:
    return _candidates.derived(case.where, case.tiles, case.splits)


def by_tuning(case: Case) -> list[Candidate]:
    return _candidates.candidates(case.shape, case.where, case.tiles[0], case.tiles, case.splits, len(case.times))


SOURCES: dict[str, Callable[[Case], list[Candidate]]] = {
    "predictor": by_predictor,
    "set": by_set,
    "tuning": by_tuning,
}


def errors(case: Case) -> list[float]:
    """Predicted over measured, less 1, of each point."""
    ms = {one.way: one.pred_ms for one in by_predictor(case)}
    return [ms[way] / took - 1 for way, took in case.times.items()]


def order(case: Case) -> float:
    ms = {one.way: one.pred_ms for one in by_predictor(case)}
    measured = [_rank(took, case.times.values()) for took in case.times.values()]
    ranked = [_rank(ms[way], ms.values()) for way in case.times]
    return 0.0 if len(set(ranked)) == 1 else statistics.correlation(ranked, measured)


def _rank(value: float, among: Any) -> float:
    return sum(one < value for one in among) + sum(one == value for one in among) / 2


def report(found: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    heads = [f"{k} timed" for k in TIMED]
    lines = [LOSSES, "", f"| corpus | cases | points by | {' | '.join(heads)} |", "|---|---|---|" + "---|" * len(TIMED)]
    losses, times, notes = [], [], []
    for name, corpus in found:
        cases = cases_of(corpus)
        notes.append(f"- {name}: {_note(corpus, cases)}")
        if not cases:
            continue
        for source, ranked in SOURCES.items():
            orders = [ranked(case) for case in cases]
            if all(orders):
                tuning = source == "tuning"
                shown = (
                    _loss([case.loss(one, k, tuning) for case, one in zip(cases, orders, strict=True)]) for k in TIMED
                )
                losses.append(f"| {name} | {len(cases)} | {source} | {' | '.join(shown)} |")
        own = [case.default[1] / case.best - 1 for case in cases if case.default[1] is not None]
        losses.append(f"| {name} | {len(own)} | default | {_loss(own)} |" + " - |" * (len(TIMED) - 1))
        off = [error for case in cases for error in errors(case)]
        median = statistics.median(map(abs, off))
        times.append(
            f"| {name} | {len(off)} | {median:.0%} | {max(off, key=abs):+.0%} | "
            f"{statistics.median(order(case) for case in cases):.2f} |"
        )
    lines += [
        *losses,
        "",
        ERRORS,
        "",
        "| corpus | points | error, median | worst | order |",
        "|---|---|---|---|---|",
        *times,
    ]
    return "\n".join([*lines, "", *notes])


def tuning_losses(corpus: Mapping[str, Any]) -> dict[str, Any]:
    """For each case what tuning loses to the best of the grid, and what the default does, as shares of the best."""
    k, found = TIMED[-1], []
    for case in cases_of(corpus):
        ranked = by_tuning(case)
        own = case.default[1]
        found.append(
            {
                "case": case.name,
                "points": len(case.times),
                "best_ms": case.best,
                "tuning": case.loss(ranked, k, tuning=True),
                "default": None if own is None else own / case.best - 1,
            }
        )
    return {"timed": k, "machine": corpus["machine"], "cases": found}


def _loss(losses: Sequence[float]) -> str:
    return f"{statistics.fmean(losses):.1%}, worst {max(losses):.0%}"


def _note(corpus: Mapping[str, Any], cases: Sequence[Case]) -> str:
    left_out = len(corpus["cases"]) - len(cases)
    more = f"; {left_out} more cases have the best and the default point alone" if left_out else ""
    return f"{corpus['kernel']}, {corpus['device']}, {corpus['software']}, {corpus['date']}; {corpus['source']}{more}."


def details(corpus: Mapping[str, Any]) -> str:
    lines = []
    for case in cases_of(corpus):
        best = min(case.times, key=lambda way: case.times[way])
        lines.append(f"{case.name}: best {_shown(best, case.times[best])}; default {_shown(*case.default)}")
        for source, ranked in SOURCES.items():
            first = [one for one in ranked(case) if one.way in case.times][:4]
            shown = "; ".join(
                _shown(one.way, case.times[one.way])
                + ("" if one.pred_ms is None else f" ({one.pred_ms / case.times[one.way] - 1:+.0%})")
                for one in first
            )
            lines.append(f"    {source}: {shown}")
    return "\n".join(lines)


def _shown(way: Way, ms: float | None) -> str:
    took = "failed" if ms is None else f"{ms:.4f} ms"
    return f"{way[0]} {'x'.join(map(str, way[1]))} {took}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("corpora", type=Path, nargs="*", help="default: benchmarks/data/concurrent_*.json")
    parser.add_argument("--out", type=Path, help="write the report there as markdown, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what tuning loses in each case there instead")
    parser.add_argument("--cases", metavar="CORPUS", help="every case of one corpus, and the first in rank")
    options = parser.parse_args(argv)
    found = corpora(options.corpora)
    if options.json is not None:
        if len(found) != 1:
            raise ArgumentError(f"--json is for one corpus, and there are {len(found)}: name it")
        options.json.write_text(json.dumps(tuning_losses(found[0][1]), indent=1) + "\n", encoding="utf-8")
        return 0
    if options.cases is not None:
        chosen = [corpus for name, corpus in found if name == options.cases]
        if not chosen:
            known = ", ".join(name for name, _ in found)
            raise ArgumentError(f"there is no corpus {options.cases!r}; possible: {known}")
        print(details(chosen[0]))
        return 0
    text = report(found)
    print(text)
    if options.out:
        options.out.write_text(f"# Errors of the predictor of iris.concurrent\n\n{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
