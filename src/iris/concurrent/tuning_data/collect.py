"""Measures whole grids of splits and tiles, from which ``derive`` chooses those that are worth timing.

    iris run -n 8 -m iris.concurrent.tuning_data.collect --out h200_8.json
    iris run -n 2 -m iris.concurrent.tuning_data.collect --out quick.json --quick
    iris run -n 2 -m iris.concurrent.tuning_data.collect --out h200_2.json --collectives all_reduce --cases 0:4
    iris run --loopback --link-gbps 370 -n 8 -m iris.concurrent.tuning_data.collect --out h200_alone.json --alone

Each case is a shape and a collective. The operation is tuned as ``tune=True`` does it, but with every point of the
grid, and the results of each are checked before it is timed. What is found counts for later calls, too. The file is
written after each case; one that is there is continued: its cases are not measured again. ``SCHEMA.md`` describes it.

``--alone`` is for ranks that share a card: rank 0 works with all of it, as between GPUs, and the others stand in; the
link between them should be imitated. What is found then is in the file alone. ``--compile-only`` fills Triton's cache,
so that several numbers of ranks can be prepared side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from iris.concurrent import autotune
from iris.concurrent._call import usual_tiles
from iris.concurrent._candidates import Conditions, default_split, tiles_for
from iris.concurrent._collectives import COLLECTIVES
from iris.concurrent.tuning_data import SCHEMA, split_of
from iris.concurrent.tuning_data._operands import TOLERANCE, Operands, Shape
from iris.concurrent.tuning_data.derive import KIND, read
from iris.errors import ArgumentError, UnsupportedError
from iris.runtime.launch import compiling
from iris.runtime.links import imitated, incoming_rate, link_of
from iris.runtime.local import current_world, whole_card
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
_TILES, _QUICK_TILES = 5, 2
_HOPELESS = 1.5  # what takes so many times the best at once is timed no more
_LINKS = ("link", "link_gbps", "alone")  # what says of a corpus how its ranks were joined
_SLACK = 64 << 20


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
        alone: whether rank 0 alone works, with the whole card.
        compile_only: whether kernels are compiled, and nothing is measured.
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
    alone: bool = False
    compile_only: bool = False
    cases: list[tuple[str, Shape]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.cases:
            self.cases.extend((name, shape) for shape in self.shapes for name in self.collectives)


def run(ctx: Iris, request: Request, operands_of: type[Operands] = Operands) -> dict[str, Any]:
    """Measure what is asked for on the ranks of a context, and write it on rank 0; returns the corpus.

    Args:
        ctx: the context.
        request: what is asked for.
        operands_of: makes the tensors of a case.

    Raises:
        ArgumentError: the file that is there was made under other conditions; ``alone`` where ranks are processes.
        UnsupportedError: nothing can be measured on this runtime.
    """
    reason = tuner.pointless(ctx)
    if reason:
        raise UnsupportedError(f"collect: {reason}; it needs a GPU (`iris doctor` says what is missing)")
    if request.alone:
        if current_world() is None:
            raise ArgumentError("collect: --alone is for ranks of one process: iris run --loopback")
        whole_card(ctx)
    if request.compile_only:
        _compile(ctx, request)
        return {}
    corpus = _begin(ctx, request)
    known = [(case["collective"], case["world"], case["sizes"]) for case in corpus["cases"]]
    for number, (name, shape) in enumerate(request.cases):
        if (name, ctx.get_num_ranks(), shape.sizes) in known:
            continue
        operands = operands_of(ctx, name, shape, request.dtype, request.mode, number, request.alone)
        _meet(ctx)
        if ctx.get_rank() == 0 or not request.alone:
            corpus["cases"].append(_measured(ctx, request, operands))
        if ctx.get_rank() == 0:
            _write(request.out, corpus)
            print(f"{number + 1} of {len(request.cases)}: {name} {shape}: {_summary(corpus['cases'][-1])}", flush=True)
        _meet(ctx)
        del operands  # the heap has no room for all
    return corpus


def _meet(ctx: Iris) -> None:
    """Wait for the other ranks on the host alone: a barrier in the stream would take programs' places."""
    ctx.synchronize()
    ctx.exchange.all_gather("collect: a case", None)


def _compile(ctx: Iris, request: Request) -> None:
    """Compile the kernels of all cases, those of one tile and collective once."""
    wanted, done = [], set()
    for name, shape in request.cases:
        _, tiles, default = _grid(ctx, request, shape)
        missing = [tile for tile in dict.fromkeys([*tiles, default[1]]) if (name, tile) not in done]
        if not missing:
            continue
        operands = Operands(ctx, name, shape, request.dtype, request.mode, 0, request.alone)
        with compiling(ctx) as launches:
            for tile in missing:
                operands.call(gemm_wgs=default[0], gemm_block=tile)
        del operands  # the heap has no room for all
        wanted += launches
        done.update((name, tile) for tile in missing)
    if ctx.get_rank() == 0:
        failures = [text for text in tuner.compile_all(wanted, ctx.target.shared_memory_bytes, load=False) if text]
        print(f"{len(wanted)} kernels compiled, {len(failures)} failed", *failures, sep="\n    ", flush=True)
    _meet(ctx)


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
        "link_gbps": incoming_rate(ctx, 1) / 1e9 if imitated(ctx) else None,
        "alone": request.alone,
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
    for name in ("machine", "arch", "device", "units", "mode", "dtype", "quick", "software", *_LINKS):
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


def _grid(
    ctx: Iris, request: Request, shape: Shape
) -> tuple[dict[autotune.Way, float], list[autotune.Tile], autotune.Way]:
    """Shares by split and tile; the tiles; and the split and the tile that run without tuning."""
    units = ctx.get_cu_count()
    itemsize = getattr(torch, request.dtype).itemsize
    where = Conditions(
        ctx.target, ctx.target.product, request.dtype, itemsize, itemsize, units, units, request.mode
    )  # fmt: skip
    tiles = list(request.tiles or tiles_for(shape.asked, where)[: _QUICK_TILES if request.quick else _TILES])
    points: dict[autotune.Way, float] = {}
    for share in request.shares:
        for tile in tiles:
            points.setdefault((min(where.most, split_of(share, units)), tile), share)
    own = usual_tiles(ctx.target, shape.M, shape.N, shape.K, itemsize)
    return points, tiles, (default_split(units, request.mode), (own.block_m, own.block_n, own.block_k))


def _measured(ctx: Iris, request: Request, operands: Operands) -> dict[str, Any]:
    """The grid of one case."""
    name, shape, world = operands.name, operands.shape, ctx.get_num_ranks()
    points, _, usual = _grid(ctx, request, shape)
    told: list[tuner.Tuning] = []
    with tuner.using(
        budget_s=request.budget_s, check=operands.check, told=told.append, kept=not request.alone, hopeless=_HOPELESS
    ):
        if request.alone:
            autotune.tune_config(
                ctx, run=lambda split, tile: operands.call(gemm_wgs=split, gemm_block=tile), candidates=list(points),
                shape={"collective": name, "world": world, **shape.asked}, mode=request.mode, dtype=request.dtype,
                default_gemm_wgs=usual[0], default_gemm_block=usual[1], force=True, group=[0],
            )  # fmt: skip
        else:
            ctx.service("tuned").forget()  # who collects wants it measured again
            with autotune.trying(list(points)):
                operands.call(tune=True)
    ctx.synchronize()
    if not told:
        raise UnsupportedError(f"collect: there is nothing to choose from for {name} {shape}: {len(points)} points")
    default, *others = told[0].trials
    assert default.candidate.name.startswith(autotune.shown(*usual))
    found = [_point(points.get(usual), usual, default)] if usual in points else []
    for trial in others:
        params = trial.candidate.params
        own = params["gemm_wgs"], tuple(params["gemm_block"])
        found.append(_point(points[own], own, trial))
    best = min((point for point in found if point["ms"] is not None), key=lambda point: point["ms"], default=None)
    case = {"collective": name, "world": world, "sizes": shape.sizes}
    return {**case, "default": _point(None, usual, default), "best": best, "points": found}


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


def _heap_bytes(request: Request, world: int) -> int:
    itemsize = getattr(torch, request.dtype).itemsize
    largest = max(
        shape.comm_m * shape.comm_n * itemsize * (1 + (world if name == "all_gather" else 1))
        for name, shape in request.cases
    )
    # For two cases: what one leaves is free again only after the first tensor of the next has its place.
    return 2 * largest


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
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float16", help="default: %(default)s")
    parser.add_argument(
        "--budget-s", type=float, default=6.0, help="seconds for a case's timing (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="3 shapes, 3 splits, 2 tiles")
    parser.add_argument("--alone", action="store_true", help="rank 0 works with the whole card (iris run --loopback)")
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache and measure nothing")
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
        options.mode, options.dtype, options.budget_s, options.quick, options.alone,
        options.compile_only,
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
    if request.alone:
        os.environ["IRIS_CHECK"] = "off"  # the ranks do not make the same calls
    run(iris(_SLACK + _heap_bytes(request, world)), request)
    return 0


if __name__ == "__main__":
    sys.exit(main())
