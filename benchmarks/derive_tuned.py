"""Derives the package's tables and rules of the H200 from what was measured.

    python benchmarks/derive_tuned.py --add ag_4.json ag_8.json      # results of collect_tuned.py -> benchmarks/data
    python benchmarks/derive_tuned.py --into h200_eight.json --add results/data/sweep-*.json   # those of real links
    python benchmarks/derive_tuned.py                                # benchmarks/data -> src/iris/tuning/data, a report
    python benchmarks/derive_tuned.py --check                        # whether what is there is what would be derived

Tables have the best way that was measured for each case. Rules are for the cases between: a decision tree over a few
features, whose leaves are a variation of the library's own choice or PyTorch's operations. It is grown, one split after
the other, so that the sum of what is lost against the best way of each case becomes least, and being slower than
PyTorch counts threefold. Every third case is held out: no rule has seen it, and the report is about those.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _tuned import GATHERED, REDUCED, STAGED_CHANGES, of_name, variant_of

HERE = Path(__file__).parent
DATA = HERE / "data"
PACKAGE = HERE.parent / "src" / "iris" / "tuning" / "data"
SWEEP = DATA / "h200_sweep.json"
TORCH, MATMUL = "torch", "matmul"
OPERATIONS = ("all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter")
# Ways that no choice takes: they add in the order in which ranks come.
NOT_CHOSEN = ("atomic", "spinlock", "ring")
COPIED = "copy_engine"
NOISE = 0.01  # two ways that differ by less are equal
_SLOWER_COUNTS = 2.0  # how many times a loss against PyTorch counts besides
_LEAST_CASES = 3  # of a leaf
_MOST_DEPTH = 4
_READ = "SCHEMA.md says how it is read."
# A gather of less than this many elements is over before a kernel has begun to hide it: two H200, docs/performance.md.
_FEW = {"when": {"elements": {"max": (1 << 21) - 1}}, "then": {"algorithm": TORCH}}
_LEAST_GAIN = 0.02  # of a split: what the cases together lose less, as logarithms of times


@dataclass
class Case:
    """A problem, and what each way took.

    Attributes:
        provenance: name of where its figures come from.
        times: milliseconds by variation of the library's own choice, as an index of ``STAGED_CHANGES``.
        best: the fastest kernel: algorithm, parameters, milliseconds. Copies, which no graph can hold, only where they
            are faster than the others by more than noise.
    """

    operation: str
    world: int
    gather_dim: int | None
    sizes: dict[str, int]
    emulated: bool
    provenance: str
    torch: float
    ways: list[tuple[str, dict[str, Any], float]] = field(default_factory=list)
    times: dict[int, float] = field(default_factory=dict)

    @property
    def best(self) -> tuple[str, dict[str, Any], float]:
        return min(self.ways, key=lambda way: way[2] * (1 if way[0] == COPIED else 1 - NOISE))

    @property
    def least(self) -> float:
        """Milliseconds of the fastest way, PyTorch's among them."""
        return min(self.torch, self.best[2])

    @property
    def features(self) -> dict[str, int]:
        M, N, K = (self.sizes[name] for name in "MNK")
        return {"world": self.world, "M": M, "N": N, "elements": M * K}

    @property
    def order(self) -> tuple:
        return self.gather_dim or 0, self.world, *self.sizes.values()


# from results to benchmarks/data


def added(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Rows of benchmarks/data from results of collect_tuned.py."""
    rows = []
    for number, file in enumerate(files):
        groups: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
        for result in json.loads(file.read_text()):
            if result["gpu_time_ms"]:
                groups[result["benchmark"], tuple(sorted(result["params"].items()))].append(result)
        for (operation, params), results in groups.items():
            rows += _of_case(operation, dict(params), results, number)
    return rows


def _of_case(operation: str, params: dict[str, Any], results: list[dict[str, Any]], run: int) -> list[dict[str, Any]]:
    world = results[0]["world_size"]
    layer, gathers = params["layer"], operation == "all_gather_matmul"
    N, K = GATHERED[layer].of_rank(world) if gathers else REDUCED[layer].size
    times = {result["candidate"]: round(result["gpu_time_ms"], 5) for result in results}
    case = {"operation": operation, "world": world, "dtype": params["dtype"], "layer": layer}
    case["sizes"] = {"M": params["M"], "N": N, "K": K}
    if gathers:
        case["gather_dim"] = params["gather_dim"]
    rows = []
    for name, ms in times.items():
        if name in (MATMUL, TORCH):
            continue
        algorithm, fields = of_name(name)
        fields.pop("all_reduce_variant", None)
        rows.append(
            {**case, "algorithm": algorithm, "params": fields, "ms": ms, "torch_ms": times[TORCH],
             "matmul_ms": times[MATMUL], "run": run}
        )  # fmt: skip
    return rows


def about_real_links(file: Path) -> dict[str, Any]:
    """What a new file of benchmarks/data says of its rows, by the first of results over a real link."""
    where = json.loads(file.read_text())[0]["environment"]
    names = ", ".join(f"{where['devices'].count(name)} x {name}" for name in sorted(set(where["devices"])))
    hardware = f"{names}, link {where['link']}"
    software = f"torch {where['torch']}, Triton {where['triton']}, Python {where['python']}"
    return {
        "machine": "h200", "link": where["link"], "emulated": False,
        "source": f"{hardware}; {software}; {where['date']}; benchmarks/collect_tuned.py",
        "hardware": hardware, "software": software, "date": where["date"], "command": where["command"],
        "notes": ["medians of 9 calls after 2 on the slowest rank, candidates in turns, cold caches, random inputs",
                  "results were compared with float64"],
        "about": "ms of each candidate; torch_ms, matmul_ms: PyTorch's operations one after the other and the "
                 "multiplication alone, in the same run. sizes: of the whole product.",
    }  # fmt: skip


def add(files: Sequence[Path], into: Path) -> str:
    """Put rows of results in the place of those that a file has; in words why not, empty when it was done."""
    rates = {row["environment"]["emulated_link"] for file in files for row in json.loads(file.read_text())}
    names = {name for file in files for row in json.loads(file.read_text()) for name in row["environment"]["devices"]}
    if not all("H200" in name for name in names):
        return f"the tables are of the H200, and these results of {', '.join(sorted(names))}"
    if into.exists():
        data = json.loads(into.read_text())
    elif any(rates):
        return f"{into.name} is not there, and only a file of real links is made"
    else:
        data = about_real_links(files[0])
    if any(bool(rate) != data["emulated"] for rate in rates):
        kinds = ("a real", "an imitated")
        return (
            f"{into.name} is of {kinds[data['emulated']]} link, and of these results some are not: give another --into"
        )
    data["rows"] = added(files)
    into.write_text(written(data.pop("rows"), data))
    return ""


def written(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """A file of benchmarks/data, a row a line."""
    head = json.dumps(about, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    return f'{head},\n "rows": [\n{lines}\n ]\n}}\n'


# tables


def cases_of(data: dict[str, Any], provenance: str = "") -> list[Case]:
    """The cases of a file of benchmarks/data whose rows have PyTorch's time."""
    found: dict[tuple, Case] = {}
    for row in data["rows"]:
        if row["operation"] not in OPERATIONS or "torch_ms" not in row or row["algorithm"] in (*NOT_CHOSEN, TORCH):
            continue
        sizes, dim = row["sizes"], row.get("gather_dim")
        key = (row["operation"], row["world"], dim, tuple(sizes.values()))
        if key not in found:
            found[key] = Case(*key[:3], sizes, data["emulated"], provenance, row["torch_ms"])
        case = found[key]
        # Runs are compared by what PyTorch's operations took in each.
        scale = case.torch / row["torch_ms"]
        case.ways.append((row["algorithm"], row["params"], row["ms"] * scale))
        if row["algorithm"] == "hbm_buffer" and data["emulated"]:
            variant = variant_of(row["world"], dim, sizes, row["params"])
            if variant is not None:
                case.times[variant] = min(row["ms"] * scale, case.times.get(variant, math.inf))
    return sorted(found.values(), key=lambda case: case.order)


def table(operation: str, cases: Iterable[Case], files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """``tuned/<operation>/h200.json``."""
    entries = []
    for case in cases:
        algorithm, params, ms = case.best
        if ms > case.torch * (1 - NOISE):
            algorithm, params, ms = TORCH, {}, case.torch
        options = {} if case.gather_dim is None else {"gather_dim": str(case.gather_dim)}
        entry = {
            "name": f"{case.sizes['M']}x{case.sizes['N']}x{case.sizes['K']}",
            "link": "nvlink", "world": case.world, "dtype": "16-bit", "options": {**options, "transpose": "NN"},
            "sizes": case.sizes, "algorithm": algorithm, "params": params,
            "measured": {
                "ms": round(ms, 4), "torch_ms": round(case.torch, 4), "speedup": round(case.torch / ms, 3),
                "tflops": round(_flops(case) / ms / 1e9, 1), "trials": len(case.ways),
            },
            "provenance": case.provenance,
        }  # fmt: skip
        if case.emulated:
            entry["emulated"] = True
        entries.append(entry)
    provenance = {}
    for name, data in files.items():
        provenance[name] = {
            "hardware": data["hardware"], "software": data["software"], "date": data["date"],
            "source": data["command"], "notes": data["notes"],
        }  # fmt: skip
    return {
        "schema": 1,
        "about": f"Measured cases of {operation} on H200; made by benchmarks/derive_tuned.py. {_READ}",
        "operation": operation, "machine": "h200", "arch": "sm_90",
        "provenance": provenance,
        "entries": entries,
    }  # fmt: skip


def _flops(case: Case) -> float:
    M, N, K = (case.sizes[name] for name in "MNK")
    return 2 * M * N * K / (1 if case.operation == "all_gather_matmul" else case.world)


# rules

Choice = int | str  # a variation, or PyTorch's operations


@dataclass
class Leaf:
    choice: Choice


@dataclass
class Split:
    """Cases whose ``feature`` is at most ``most``, and the others."""

    feature: str
    most: int
    low: Any
    high: Any


def cost(case: Case, choice: Choice) -> float:
    """What is lost by a choice: the logarithm of its time over the best way's, and more where PyTorch is faster."""
    took = case.torch if choice == TORCH else case.times[choice]
    return math.log(took / case.least) + _SLOWER_COUNTS * max(0.0, math.log(took / case.torch) - NOISE)


def best_choice(cases: Sequence[Case]) -> tuple[Choice, float]:
    """The choice by which all cases together lose least, of those that were measured for all of them."""
    common = set.intersection(*(set(case.times) for case in cases))
    choices: list[Choice] = [*sorted(common), TORCH]
    costs = [(sum(cost(case, choice) for case in cases), place) for place, choice in enumerate(choices)]
    least, place = min(costs)
    return choices[place], least


def grow(cases: Sequence[Case], depth: int = 0) -> Leaf | Split:
    """The tree of these cases."""
    choice, lost = best_choice(cases)
    best: tuple[float, str, int] | None = None
    for feature in cases[0].features:
        values = sorted({case.features[feature] for case in cases})
        for low, high in itertools.pairwise(values):
            below = [case for case in cases if case.features[feature] <= low]
            above = [case for case in cases if case.features[feature] > low]
            if min(len(below), len(above)) < _LEAST_CASES:
                continue
            left = best_choice(below)[1] + best_choice(above)[1]
            # Halfway between the two, as ratios go.
            most = low if feature == "world" else math.floor(math.sqrt(low * high))
            if best is None or left < best[0] - 1e-12:
                best = (left, feature, most)
    if best is None or depth == _MOST_DEPTH or lost - best[0] < _LEAST_GAIN:
        return Leaf(choice)
    _, feature, most = best
    below = [case for case in cases if case.features[feature] <= most]
    above = [case for case in cases if case.features[feature] > most]
    return Split(feature, most, grow(below, depth + 1), grow(above, depth + 1))


def decide(tree: Leaf | Split, features: dict[str, int]) -> Choice:
    while isinstance(tree, Split):
        tree = tree.low if features[tree.feature] <= tree.most else tree.high
    return tree.choice


def rules(tree: Leaf | Split, limits: dict[str, dict[str, int]] | None = None) -> list[dict[str, Any]]:
    """The leaves, as rules of ``data/heuristics``."""
    limits = limits or {}
    if isinstance(tree, Split):
        low, high = limits.get(tree.feature, {}), limits.get(tree.feature, {})
        return [
            *rules(tree.low, {**limits, tree.feature: {**low, "max": tree.most}}),
            *rules(tree.high, {**limits, tree.feature: {**high, "min": tree.most + 1}}),
        ]
    then = {"algorithm": TORCH}
    if tree.choice != TORCH:
        then = {"algorithm": "hbm_buffer", **STAGED_CHANGES[int(tree.choice)]}
        # So that a rule says that the problem decides the numbers.
        then.setdefault("stage", 1.0)
    return [{"when": {name: limits[name] for name in sorted(limits)}, "then": then}]


def heuristic(trees: dict[int, Leaf | Split], data: dict[str, Any], seen: int, least: int) -> dict[str, Any]:
    """``heuristics/all_gather_matmul/h200.json``."""
    found = []
    for dim, tree in sorted(trees.items()):
        found += [{"when": {"gather_dim": str(dim), **rule["when"]}, "then": rule["then"]} for rule in rules(tree)]
    return {
        "schema": 1,
        "about": f"all_gather_matmul where no measured case is near; made by benchmarks/derive_tuned.py. {_READ}",
        "operation": "all_gather_matmul", "machine": "h200", "arch": "sm_90",
        "provenance": {
            "emulated": {
                "hardware": data["hardware"], "software": data["software"], "date": data["date"],
                "source": f"a decision tree grown from {seen} cases; benchmarks/derive_tuned.py",
                "notes": data["notes"],
            }
        },
        # Sizes below those of the sweep have no rules.
        "where": {"link": "nvlink", "dtype": "16-bit", "world": {"min": 3, "max": 8}, "M": {"min": least}},
        "groups": [{"derive": {"elements": "M * K"}, "rules": [_FEW, *found]}],
    }  # fmt: skip


# report


def report(held_out: Sequence[Case], decided: Callable[[Case], Choice], title: str) -> list[str]:
    """How the choice does on cases that the rules have not seen."""
    lost, slower, default = [], [], []
    for case in held_out:
        choice = decided(case)
        took = case.torch if choice == TORCH else case.times.get(choice, math.nan)
        lost.append(took / case.least - 1)
        slower.append(took / case.torch - 1)
        default.append(min(case.torch, case.times[0]) / case.least - 1)
    near = sum(value <= 0.03 for value in lost)
    percent = [100 * value for value in lost]
    ours = 100 * statistics.mean(default)
    losses = (
        f"median {statistics.median(percent):.1f} %, mean {statistics.mean(percent):.1f} %, most {max(percent):.1f} %"
    )
    slow, most = sum(value > NOISE for value in slower), 100 * max(0.0, *slower)
    return [
        f"{title}: {len(held_out)} cases",
        f"  within 3 % of the best way: {near} ({100 * near / len(held_out):.0f} %)",
        f"  lost against it: {losses}; the better of the unchanged choice and PyTorch: mean {ours:.1f} %",
        f"  slower than PyTorch by more than {100 * NOISE:.0f} %: {slow}, at most by {most:.1f} %",
    ]


def markdown(data: dict[str, Any]) -> list[str]:
    """The sweep of all_gather_matmul, for docs/performance.md: the best kernel, in times of PyTorch's operations."""
    layers = {}
    for row in data["rows"]:
        if row["operation"] == "all_gather_matmul":
            layers[row["gather_dim"], row["world"], tuple(row["sizes"].values())] = row["layer"]
    cells: dict[tuple, str] = {}
    for case in cases_of(data):
        if case.operation == "all_gather_matmul":
            layer = layers[case.gather_dim, case.world, tuple(case.sizes.values())]
            unchanged = f"{case.torch / case.times[0]:.2f}" if 0 in case.times else "-"
            cells[case.gather_dim, layer, case.world, case.sizes["M"]] = (
                f"{case.torch / case.best[2]:.2f} ({unchanged})"
            )
    worlds, rows = sorted({key[2] for key in cells}), sorted({key[3] for key in cells})
    columns = list(itertools.product(worlds, rows))
    lines = ["| layer | gather_dim | " + " | ".join(f"{world} ranks, M={M}" for world, M in columns) + " |"]
    lines.append("|---|---|" + "---|" * len(columns))
    for dim, layer in dict.fromkeys(key[:2] for key in cells):
        shown = " | ".join(cells.get((dim, layer, world, M), "-") for world, M in columns)
        lines.append(f"| `{layer}` | {dim} | {shown} |")
    return lines


def text_of(value: dict[str, Any]) -> str:
    """JSON with lists of records a record a line."""
    lines, lists = [], ("entries",)
    for name, item in value.items():
        if name in lists:
            body = ",\n".join("    " + json.dumps(one) for one in item)
            lines.append(f'  "{name}": [\n{body}\n  ]')
        elif name == "groups":
            body = ",\n".join(
                '    {"derive": ' + json.dumps(group["derive"]) + ', "rules": [\n'
                + ",\n".join("      " + json.dumps(rule) for rule in group["rules"]) + "\n    ]}"
                for group in item
            )  # fmt: skip
            lines.append(f'  "{name}": [\n{body}\n  ]')
        else:
            lines.append(f'  "{name}": {json.dumps(item)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def over_real_links() -> dict[str, dict[str, Any]]:
    """Files of benchmarks/data of GPUs that a link joins, by the end of their names."""
    found = {path.stem.removeprefix("h200_"): json.loads(path.read_text()) for path in DATA.glob("h200_*.json")}
    return {name: data for name, data in sorted(found.items()) if not data["emulated"]}


def derived() -> tuple[dict[Path, str], list[str]]:
    """The files of the package, and the report."""
    sweep, real = json.loads(SWEEP.read_text()), over_real_links()
    measured = cases_of(sweep, "emulated")
    over_links = [case for name, data in real.items() for case in cases_of(data, name)]
    known = {(case.operation, case.world, case.gather_dim, *case.sizes.values()) for case in over_links}
    files = {}
    for operation in OPERATIONS:
        # What was measured over a real link takes the place of what was imitated.
        cases = [case for case in over_links if case.operation == operation]
        cases += [
            case
            for case in measured
            if case.operation == operation
            and (operation, case.world, case.gather_dim, *case.sizes.values()) not in known
        ]
        cases.sort(key=lambda case: case.order)
        made = table(operation, cases, {**real, "emulated": sweep})
        files[PACKAGE / "tuned" / operation / "h200.json"] = text_of(made)
    # With two ranks a table by bytes has what was measured over real links.
    gathers = [case for case in measured if case.operation == "all_gather_matmul" and case.world > 2]
    trees, lines, seen = {}, [], 0
    for dim in sorted({case.gather_dim or 0 for case in gathers}):
        own = [case for case in gathers if (case.gather_dim or 0) == dim]
        held_out = own[1::3]
        training = [case for case in own if case not in held_out]
        seen += len(training)
        trees[dim] = tree = grow(training)
        lines += report(held_out, lambda case, tree=tree: decide(tree, case.features), f"gather_dim={dim}, held out")
        lines += report(training, lambda case, tree=tree: decide(tree, case.features), f"gather_dim={dim}, seen")
    files[PACKAGE / "heuristics" / "all_gather_matmul" / "h200.json"] = text_of(
        heuristic(trees, sweep, seen, min(case.sizes["M"] for case in gathers))
    )
    return files, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs="+", type=Path, metavar="FILE", help="results of collect_tuned.py, in JSON")
    parser.add_argument(
        "--into",
        default=SWEEP.name,
        metavar="NAME",
        help="with --add: the file of benchmarks/data; default %(default)s",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; leave with 1 where a file would change")
    parser.add_argument("--markdown", action="store_true", help="print the sweep as a table, and write nothing")
    given = parser.parse_args()
    if given.markdown:
        print("\n".join(markdown(json.loads(SWEEP.read_text()))))
        return
    if given.add:
        trouble = add(given.add, DATA / given.into)
        if trouble:
            parser.error(trouble)
        return
    files, lines = derived()
    print("\n".join(lines))
    changed = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in changed:
        print(f"{'would change' if given.check else 'written'}: {path.relative_to(HERE.parent)}")
        if not given.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path])
    sys.exit(1 if given.check and changed else 0)


if __name__ == "__main__":
    main()
