"""How far the predictions of iris.tuning.cost_model are from what was measured; needs no GPU.

    python benchmarks/report_cost_model.py
    python benchmarks/report_cost_model.py --out cost_model.md
    python benchmarks/report_cost_model.py --rows h200_two

Compared are the rows of ``benchmarks/data/*.json`` and the entries of the package's ``tuning/data/tuned`` and
``tuning/data/published``, whose forms are in docs/cost-model.md and in ``tuning/data/SCHEMA.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import iris
from iris.errors import ArgumentError
from iris.tuning.cost_model import ALGORITHMS, Prediction, predict

DATA = Path(__file__).parent / "data"
PACKAGED = Path(iris.__file__).parent / "tuning" / "data"
DTYPES = {"16-bit": "float16", "any": "float16"}

ERRORS = (
    "Error: predicted over measured, less 1. *Fused* are the library's operations, *unfused* PyTorch's, a case of "
    "several rows counted once."
)
CHOICES = (
    "Choice: cases with several candidates, PyTorch's operations among them. *Loss* is how much longer the candidate "
    "that is predicted to be the best takes than the measured best. *Fixed* is the same for the algorithm that is the "
    "best to take always, which one knows afterwards only. *Order* is Spearman's correlation of predicted and measured "
    "times in a case."
)


@dataclass(frozen=True)
class Row:
    """A measured case: ``case`` is what its rivals share, ``torch_ms`` is None where it was not measured."""

    case: tuple
    operation: str
    machine: str
    sizes: dict[str, int]
    world: int
    dtype: str
    algorithm: str
    params: dict[str, Any]
    gather_dim: int
    units: int | None
    link_gbps: float | None
    ms: float
    torch_ms: float | None

    def predicted(self, algorithm: str | None = None) -> Prediction:
        params = {} if algorithm == "torch" else self.params
        return predict(
            self.operation, self.machine, self.sizes, self.world, self.dtype, params,
            algorithm=algorithm or self.algorithm, gather_dim=self.gather_dim, units=self.units,
            link_gbps=self.link_gbps,
        )  # fmt: skip


@dataclass(frozen=True)
class DataSet:
    """Rows of one file. ``kernel``: whose kernel was measured, where it is not the library's."""

    name: str
    rows: tuple[Row, ...]
    kernel: str
    left_out: int


@dataclass(frozen=True)
class Choice:
    """One case that several ways were measured for.

    Attributes:
        loss: time of the predicted best in times of the measured best, less 1.
        losses: the same of each candidate, in the order of the data.
        algorithms: their algorithms.
        order: rank correlation of predicted and measured times.
    """

    loss: float
    losses: tuple[float, ...]
    algorithms: tuple[str, ...]
    order: float

    def of(self, algorithm: str) -> float | None:
        """The least loss of an algorithm; None without it."""
        return min(
            (loss for name, loss in zip(self.algorithms, self.losses, strict=True) if name == algorithm), default=None
        )


def sets() -> Iterator[DataSet]:
    for path in sorted(DATA.glob("h[12]00_*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "rows" in content:  # those of another kind have a report of their own
            yield _data_set(path.stem, [_measured(content, row) for row in content["rows"]], content.get("kernel", ""))
    for path in sorted([*PACKAGED.glob("tuned/*/*.json"), *PACKAGED.glob("published/*.json")]):
        content = json.loads(path.read_text(encoding="utf-8"))
        kernels = {str(entry.get("kernel") or "") for entry in content["provenance"].values()} - {""}
        name = f"{content['operation']} {content['machine']}"
        yield _data_set(name, [_published(content, entry) for entry in content["entries"]], "; ".join(sorted(kernels)))


def _data_set(name: str, rows: Iterable[Row | None], kernel: str) -> DataSet:
    found = list(rows)
    kept = tuple(row for row in found if row is not None)
    return DataSet(name, kept, kernel, len(found) - len(kept))


def _measured(content: dict[str, Any], row: dict[str, Any]) -> Row | None:
    """A row of ``benchmarks/data``; None where the model knows nothing of its algorithm."""
    where = {**{name: content.get(name) for name in ("machine", "units", "link_gbps")}, **row}
    return _row(where, row["ms"], row.get("torch_ms"), row.get("gather_dim", 1), row["algorithm"])


def _published(content: dict[str, Any], entry: dict[str, Any]) -> Row | None:
    """An entry of a packaged table; None without a time."""
    measured, earlier = entry["measured"], entry.get("earlier") or {}
    ms, torch_ms = measured.get("ms"), measured.get("torch_ms")
    if torch_ms is None and ms and measured.get("speedup"):
        torch_ms = ms * measured["speedup"]
    torch_ms = torch_ms or earlier.get("torch_ms")
    where = {"machine": content["machine"], "operation": content["operation"], **entry}
    return _row(where, ms, torch_ms, int(entry.get("options", {}).get("gather_dim", 1)), entry["algorithm"])


def _row(
    where: dict[str, Any], ms: float | None, torch_ms: float | None, gather_dim: int, algorithm: str
) -> Row | None:
    operation = where["operation"]
    if not ms or algorithm not in ALGORITHMS.get(operation, ()):
        return None
    dtype = DTYPES.get(where["dtype"], where["dtype"])
    units, link_gbps = where.get("units"), where.get("link_gbps")
    case = operation, where["machine"], where["world"], dtype, gather_dim, units, link_gbps, *where["sizes"].items()
    return Row(
        case, operation, where["machine"], dict(where["sizes"]), where["world"], dtype, algorithm, where["params"],
        gather_dim, units, link_gbps, ms, torch_ms,
    )  # fmt: skip


def errors(rows: Iterable[Row]) -> tuple[list[float], list[float]]:
    """Predicted over measured, less 1: of the rows, and of PyTorch's operations, once for each case."""
    fused, unfused = [], {}
    for row in rows:
        prediction = row.predicted()
        if row.algorithm != "torch":
            fused.append(prediction.fused * 1e3 / row.ms - 1)
        if row.torch_ms:
            unfused[row.case] = prediction.unfused * 1e3 / row.torch_ms - 1
    return fused, list(unfused.values())


def choices(rows: Iterable[Row]) -> list[Choice]:
    """What the model would have chosen in each case that has at least two ways, PyTorch's operations among them."""
    cases: dict[tuple, list[Row]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    found = []
    for rivals in cases.values():
        measured = [row.ms for row in rivals]
        predicted = [row.predicted().fused for row in rivals]
        algorithms = [row.algorithm for row in rivals]
        torch_ms = next((row.torch_ms for row in rivals if row.torch_ms), None)
        if torch_ms and "torch" not in algorithms:
            measured.append(torch_ms)
            predicted.append(rivals[0].predicted("torch").fused)
            algorithms.append("torch")
        if len(measured) > 1:
            losses = tuple(ms / min(measured) - 1 for ms in measured)
            loss = losses[predicted.index(min(predicted))]
            found.append(Choice(loss, losses, tuple(algorithms), rank_correlation(predicted, measured)))
    return found


def best_fixed(made: Sequence[Choice]) -> tuple[str, float]:
    """The algorithm whose mean loss is least when it is always taken, of those that every case has; and that loss."""
    found = {}
    for algorithm in dict.fromkeys(name for choice in made for name in choice.algorithms):
        losses = [choice.of(algorithm) for choice in made]
        if None not in losses:
            found[algorithm] = statistics.mean(loss for loss in losses if loss is not None)
    name = min(found, key=lambda algorithm: found[algorithm])
    return name, found[name]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's, with the mean rank for equal values; 1 is the same order, -1 the opposite."""
    if len(set(one)) == 1 or len(set(other)) == 1:
        return 0.0
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def report(found: Sequence[DataSet]) -> str:
    lines = [
        ERRORS,
        "",
        "| data | operation | rows | fused, median | worst | unfused, median | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        groups = {row.operation: [each for each in one.rows if each.operation == row.operation] for row in one.rows}
        if len(groups) > 1:
            groups = {**groups, "all": list(one.rows)}
        for operation, rows in groups.items():
            fused, unfused = errors(rows)
            lines.append(f"| {one.name} | {operation} | {len(rows)} | {_error(fused)} | {_error(unfused)} |")
    lines += [
        "",
        CHOICES,
        "",
        "| data | operation | cases | best found | loss, mean | worst | fixed, mean | order, median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        for operation in dict.fromkeys(row.operation for row in one.rows):
            made = choices(row for row in one.rows if row.operation == operation)
            if made:
                losses = [choice.loss for choice in made]
                fixed, its_loss = best_fixed(made)
                lines.append(
                    f"| {one.name} | {operation} | {len(made)} | {sum(loss == 0 for loss in losses)} | "
                    f"{statistics.mean(losses):.1%} | {max(losses):.0%} | "
                    f"{its_loss:.1%} `{fixed}` | "
                    f"{statistics.median(choice.order for choice in made):.2f} |"
                )
    notes = [f"- {one.name}: {one.kernel}." for one in found if one.kernel]
    notes += [
        f"- {one.name}: {one.left_out} rows left out, which have no time or an algorithm without a model."
        for one in found
        if one.left_out
    ]
    return "\n".join([*lines, *([""] + notes if notes else [])])


def _error(values: Sequence[float]) -> str:
    if not values:
        return "- | -"
    return f"{statistics.median(map(abs, values)):.1%} | {max(values, key=abs):+.0%}"


def details(one: DataSet) -> str:
    lines = []
    for row in one.rows:
        prediction = row.predicted()
        torch_ms = f", PyTorch {row.torch_ms:.4f} ms" if row.torch_ms else ""
        sizes = "x".join(map(str, row.sizes.values()))
        lines.append(
            f"{sizes} {row.dtype}, {row.world} ranks, gather_dim {row.gather_dim}: measured {row.ms:.4f} ms{torch_ms}\n"
            f"    {prediction.fused * 1e3 / row.ms - 1:+.0%}: {prediction}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the report there as markdown, too")
    parser.add_argument("--rows", metavar="DATA", help="every row of one data set, with how its prediction came about")
    options = parser.parse_args(argv)
    found = [one for one in sets() if one.rows]
    if options.rows is not None:
        chosen = [one for one in found if one.name == options.rows]
        if not chosen:
            raise ArgumentError(f"there is no data {options.rows!r}; possible: {', '.join(one.name for one in found)}")
        print(details(chosen[0]))
        return 0
    text = report(found)
    print(text)
    if options.out:
        options.out.write_text(f"# Errors of the cost model\n\n{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
