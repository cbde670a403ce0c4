"""Measures whole grids of splits and tiles, from which ``derive`` chooses those that are worth timing.

    iris run -n 8 -m iris.concurrent.tuning_data.collect --out h200_8.json
    iris run -n 2 -m iris.concurrent.tuning_data.collect --out quick.json --quick
    iris run -n 2 -m iris.concurrent.tuning_data.collect --out h200_2.json --collectives all_reduce --cases 0:4

Each case is a shape and a collective. The operation is tuned as ``tune=True`` does it, but with every point of the
grid, and the results of each are checked before it is timed. What is found counts for later calls, too. The file is
written after each case; one that is there is continued: its cases are not measured again. ``SCHEMA.md`` describes it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from iris.concurrent import autotune
from iris.concurrent._candidates import Conditions, default_split, tiles_for
from iris.concurrent._collectives import COLLECTIVES
from iris.concurrent.tuning_data import SCHEMA, split_of
from iris.concurrent.tuning_data.derive import KIND, read
from iris.errors import ArgumentError, OutputError, UnsupportedError
from iris.runtime.links import link_of
from iris.tuning import autotune as tuner
from iris.tuning import store

if TYPE_CHECKING:
    from iris.runtime.context import Iris

# M, N, K of the product; rows of the collective in times of 256 a rank, and its columns.
SHAPES = (
    (1, 8192, 8192, 1, 4096), (16, 8192, 8192, 1, 4096), (128, 8192, 8192, 1, 4096), (512, 8192, 8192, 1, 4096),
    (2048, 2048, 2048, 1, 2048), (4096, 4096, 4096, 1, 2048), (8192, 8192, 8192, 1, 4096),
    (16384, 16384, 16384, 1, 4096), (4096, 512, 8192, 1, 2048), (4096, 8192, 512, 1, 2048),
    (2048, 2048, 16384, 1, 2048), (16384, 2048, 2048, 1, 4096), (4096, 16384, 2048, 1, 4096),
    (4096, 4096, 4096, 4, 8192), (8192, 8192, 8192, 4, 16384),
)  # fmt: skip
QUICK = (SHAPES[3], SHAPES[5], SHAPES[6])
SHARES = (0.55, 0.65, 0.72, 0.75, 0.78, 0.84, 0.88, 0.92, 0.96, 1.0)
QUICK_SHARES = (0.75, 0.9, 1.0)
_ROWS_A_RANK = 256
_QUICK_TILES = 2
_SLACK = 64 << 20
_ROWS = 64  # of the product that are computed in float64
_TOLERANCE = {"float16": 0.02, "bfloat16": 0.1, "float32": 0.002}
_VALUES = 4  # inputs of a sum are whole numbers from -4 to 4, so that it is exact


@dataclass(frozen=True)
class Shape:
    """Sizes of a case; ``comm_m`` and ``comm_n`` are those of ``comm_src``."""

    M: int
    N: int
    K: int
    comm_m: int
    comm_n: int

    def __str__(self) -> str:
        return "x".join(map(str, (self.M, self.N, self.K, self.comm_m, self.comm_n)))

    @property
    def sizes(self) -> dict[str, int]:
        return {"M": self.M, "N": self.N, "K": self.K, "comm_m": self.comm_m, "comm_n": self.comm_n}


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        out: the file.
        collectives, shapes: the cases.
        shares: of the programs that begin with the GEMM.
        tiles: of the GEMM; none for those that the device has room for.
        mode, dtype: of the operation.
        budget_s: seconds for the timed calls of a case.
        quick: whether it is a smaller grid than ``derive`` wants.
    """

    out: Path
    collectives: tuple[str, ...]
    shapes: tuple[Shape, ...]
    shares: tuple[float, ...] = SHARES
    tiles: tuple[tuple[int, int, int], ...] = ()
    mode: str = "fused"
    dtype: str = "float16"
    budget_s: float = 6.0
    quick: bool = False
    cases: list[tuple[str, Shape]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.cases:
            self.cases.extend((name, shape) for name in self.collectives for shape in self.shapes)


def run(ctx: Iris, request: Request) -> dict[str, Any]:
    """Measure what is asked for on the ranks of a context, and write it on rank 0; returns the corpus.

    Raises:
        ArgumentError: the file that is there was made under other conditions.
        UnsupportedError: nothing can be measured on this runtime.
    """
    reason = tuner.pointless(ctx)
    if reason:
        raise UnsupportedError(f"collect: {reason}; it needs a GPU (`iris doctor` says what is missing)")
    corpus = _begin(ctx, request)
    known = [(case["collective"], case["world"], case["sizes"]) for case in corpus["cases"]]
    for number, (name, shape) in enumerate(request.cases):
        if (name, ctx.get_num_ranks(), shape.sizes) in known:
            continue
        corpus["cases"].append(_measured(ctx, request, name, shape, number))
        if ctx.get_rank() == 0:
            _write(request.out, corpus)
            print(f"{number + 1} of {len(request.cases)}: {name} {shape}: {_summary(corpus['cases'][-1])}", flush=True)
        ctx.barrier()
    return corpus


def _begin(ctx: Iris, request: Request) -> dict[str, Any]:
    """The corpus that rank 0 finds in the file, or an empty one; the same on all ranks."""
    device = torch.cuda.get_device_name() if ctx.target.compiled else ctx.target.name
    header = {
        "schema": SCHEMA,
        "kind": KIND,
        "machine": ctx.target.product,
        "arch": ctx.target.arch,
        "device": device,
        "units": ctx.get_cu_count(),
        "link": link_of(ctx),
        "mode": request.mode,
        "dtype": request.dtype,
        "comm_dtype": request.dtype,
        "comm_block": None,
        "quick": request.quick,
        "kernel": "this library's kernel",
        "source": "python -m iris.concurrent.tuning_data.collect",
        "software": ", ".join(f"{name} {version}" for name, version in store.versions()),
        "date": store.now()[:10],
        "cases": [],
    }
    found, error = None, None
    if ctx.get_rank() == 0:
        try:
            found = _continued(request.out, header)
        except ArgumentError as caught:
            error = str(caught)
    found, error = ctx.exchange.all_gather("collect: the file", (found, error))[0]
    if error:
        raise ArgumentError(error)
    return found


def _continued(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return header
    there = read(path)
    for name in ("machine", "arch", "device", "units", "link", "mode", "dtype", "quick", "software"):
        if there.get(name) != header[name]:
            raise ArgumentError(
                f"{path} has {name} {there.get(name)!r}, and this run has {header[name]!r}; give another --out"
            )
    return there


def _write(path: Path, corpus: dict[str, Any]) -> None:
    """Put the corpus in the place of the file, a point a line."""
    lines = ["{", *(f"{json.dumps(name)}: {json.dumps(value)}," for name, value in corpus.items() if name != "cases")]
    cases = []
    for case in corpus["cases"]:
        begin = json.dumps({name: value for name, value in case.items() if name != "points"})[:-1]
        cases.append(f'{begin}, "points": [\n' + ",\n".join(json.dumps(point) for point in case["points"]) + "\n]}")
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text("\n".join([*lines, '"cases": [', ",\n".join(cases), "]", "}"]) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _measured(ctx: Iris, request: Request, name: str, shape: Shape, number: int) -> dict[str, Any]:
    """The grid of one case."""
    units, world = ctx.get_cu_count(), ctx.get_num_ranks()
    itemsize = getattr(torch, request.dtype).itemsize
    where = Conditions(
        ctx.target, ctx.target.product, request.dtype, itemsize, itemsize, units, units, request.mode
    )  # fmt: skip
    asked = {"gemm_m": shape.M, "gemm_n": shape.N, "gemm_k": shape.K}
    tiles = request.tiles or tiles_for(asked, where)[: _QUICK_TILES if request.quick else None]
    points = {}
    for share in request.shares:
        for tile in tiles:
            points.setdefault((min(where.most, split_of(share, units)), tuple(tile)), share)
    call, check = _prepared(ctx, request, name, shape, number)
    ctx.service("tuned").forget()  # who collects wants it measured again
    told: list[tuner.Tuning] = []
    with tuner.using(budget_s=request.budget_s, check=check, told=told.append), autotune.trying(list(points)):
        call()
    ctx.synchronize()
    if not told:
        raise UnsupportedError(f"collect: there is nothing to choose from for {name} {shape}: {len(points)} points")
    default, *others = told[0].trials
    split, tile = default.candidate.name.split(" ")[:2]
    way = int(split), tuple(int(side) for side in tile.split("x"))
    assert way[0] == default_split(units, request.mode)
    found = [_point(points.get(way), way, default)] if way in points else []
    for trial in others:
        params = trial.candidate.params
        own = params["gemm_wgs"], tuple(params["gemm_block"])
        found.append(_point(points[own], own, trial))
    best = min((point for point in found if point["ms"] is not None), key=lambda point: point["ms"], default=None)
    case = {"collective": name, "world": world, "sizes": shape.sizes}
    return {**case, "default": _point(None, way, default), "best": best, "points": found}


def _point(share: float | None, way: tuple[int, tuple[int, ...]], trial: tuner.Trial) -> dict[str, Any]:
    point: dict[str, Any] = {} if share is None else {"split_frac": share}
    ms = None if trial.milliseconds is None else round(trial.milliseconds, 5)
    point |= {"gemm_wgs": way[0], "gemm_block": list(way[1]), "ms": ms, "rounds": trial.rounds}
    return {**point, "failure": trial.failure} if trial.failure else point


def _summary(case: dict[str, Any]) -> str:
    default, best = case["default"]["ms"], case["best"]
    if best is None:
        return "no point ran"
    tile = "x".join(map(str, best["gemm_block"]))
    failed = sum(point["ms"] is None for point in case["points"])
    gain = "" if default is None else f", {default / best['ms']:.2f} times as fast as the default"
    return f"{best['ms']:.4f} ms with {best['gemm_wgs']} programs and {tile}{gain}; {failed} points failed"


def _prepared(
    ctx: Iris, request: Request, name: str, shape: Shape, number: int
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """What runs the operation with tune=True, and what raises when a result is wrong."""
    world, rank, device = ctx.get_num_ranks(), ctx.get_rank(), ctx.get_device()
    dtype = getattr(torch, request.dtype)

    def generator(of: int) -> torch.Generator:
        return torch.Generator(device).manual_seed(1009 * number + of)

    def source(of: int) -> torch.Tensor:
        drawn = torch.randint(
            -_VALUES, _VALUES + 1, (shape.comm_m, shape.comm_n), generator=generator(of), device=device
        )
        return drawn.to(dtype)

    a = torch.randn(shape.M, shape.K, generator=generator(500 + rank), device=device).to(dtype)
    b = (torch.randn(shape.K, shape.N, generator=generator(900), device=device) * shape.K**-0.5).to(dtype)
    c = torch.empty(shape.M, shape.N, dtype=dtype, device=device)
    part = COLLECTIVES[name].part(shape.comm_m, None, ctx.resolve_group(None), 0)
    # As many rows on every rank, whatever it has of them.
    rows = {"all_gather": part.whole, "reduce_scatter": part.chunk, "all_to_all": part.chunk * world}
    src, dst = (ctx.empty(n, shape.comm_n, dtype=dtype) for n in (shape.comm_m, rows.get(name, shape.comm_m)))
    src.copy_(source(rank))
    dst = dst[: part.dst_rows]
    picked = torch.linspace(0, shape.M - 1, min(shape.M, _ROWS), device=device).long()
    wanted = a[picked].double() @ b.double()
    expected = _expected(name, source, part, rank, world).to(dtype)

    def check() -> None:
        ctx.synchronize()
        bad = (c[picked].double() - wanted).abs() > _TOLERANCE[request.dtype] * (1 + wanted.abs())
        if bad.any() or c.isnan().any():
            raise OutputError(f"the product is wrong: {int(bad.sum())} of {bad.numel()} elements")
        # A wrong element is one that is not equal, NaN among them.
        wrong = dst != expected
        if wrong.any():
            raise OutputError(f"the {name} is wrong: {int(wrong.sum())} of {wrong.numel()} elements")
        c.fill_(float("nan"))
        # Peers may write it as soon as they begin, so all have to have filled it.
        dst.fill_(float("nan"))
        ctx.synchronize()
        ctx.exchange.all_gather("collect: outputs are filled", None)

    c.fill_(float("nan"))
    dst.fill_(float("nan"))
    ctx.barrier()
    operation = getattr(ctx.concurrent, name)
    return lambda: operation(a, b, src, C=c, comm_dst=dst, mode=request.mode, tune=True), check


def _expected(name: str, source: Callable[[int], torch.Tensor], part: Any, rank: int, world: int) -> torch.Tensor:
    """The collective's result on a rank, from what all ranks have."""
    if name == "broadcast":
        return source(0)
    if name == "all_gather":
        return torch.cat([source(peer) for peer in range(world)])
    if name == "all_to_all":
        first = rank * part.chunk
        return torch.cat([source(peer)[first : first + part.chunk] for peer in range(world)])
    total = source(0).double()
    for peer in range(1, world):
        total += source(peer).double()
    return total if name == "all_reduce" else total[part.first : part.first + part.dst_rows]


def _heap_bytes(request: Request, world: int) -> int:
    itemsize = getattr(torch, request.dtype).itemsize
    return max(
        shape.comm_m * shape.comm_n * itemsize * (1 + (world if name == "all_gather" else 1))
        for name, shape in request.cases
    )


def parse(argv: Sequence[str] | None, world: int) -> Request:
    """The request of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m iris.concurrent.tuning_data.collect", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="the file; one that is there is continued")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES), help="default: %(default)s")
    parser.add_argument("--shapes", help="MxNxKxCOMM_MxCOMM_N,..., in place of the usual ones")
    parser.add_argument("--cases", metavar="FROM:TO", help="only those of the shapes, by their places")
    parser.add_argument("--shares", help="of the programs that begin with the GEMM, as 0.5,0.75")
    parser.add_argument("--tiles", help="ROWSxCOLUMNSxK,..., in place of those that the device has room for")
    parser.add_argument("--mode", choices=("fused", "concurrent"), default="fused", help="default: %(default)s")
    parser.add_argument("--dtype", choices=tuple(_TOLERANCE), default="float16", help="default: %(default)s")
    parser.add_argument(
        "--budget-s", type=float, default=6.0, help="seconds for a case's timing (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="3 shapes, 3 splits, 2 tiles")
    options = parser.parse_args(argv)
    names = tuple(options.collectives.split(","))
    unknown = [name for name in names if name not in COLLECTIVES]
    if unknown:
        raise ArgumentError(f"--collectives: {', '.join(unknown)} is not known; possible: {', '.join(COLLECTIVES)}")
    if options.shapes:
        shapes = tuple(Shape(*_sides(word, 5)) for word in options.shapes.split(","))
    else:
        usual = QUICK if options.quick else SHAPES
        shapes = tuple(Shape(m, n, k, _ROWS_A_RANK * world * times, columns) for m, n, k, times, columns in usual)
    if options.cases:
        first, _, last = options.cases.partition(":")
        shapes = shapes[int(first or 0) : int(last) if last else None]
    if not shapes:
        raise ArgumentError(f"--cases {options.cases} leaves no shape")
    shares = tuple(float(word) for word in options.shares.split(",")) if options.shares else None
    return Request(
        options.out, names, shapes, shares or (QUICK_SHARES if options.quick else SHARES),
        tuple(_sides(word, 3) for word in options.tiles.split(",")) if options.tiles else (),
        options.mode, options.dtype, options.budget_s, options.quick,
    )  # fmt: skip


def _sides(word: str, count: int) -> Any:
    sides = tuple(int(side) for side in word.split("x") if side.isdigit())
    if len(sides) != count or not all(sides):
        raise ArgumentError(f"{word!r} is not {count} whole numbers above 0 with x between them")
    return sides


def main(argv: Sequence[str] | None = None) -> int:
    from iris.runtime.context import iris

    world = int(os.environ.get("WORLD_SIZE", "1"))
    request = parse(argv, world)
    run(iris(_SLACK + _heap_bytes(request, world)), request)
    return 0


if __name__ == "__main__":
    sys.exit(main())
