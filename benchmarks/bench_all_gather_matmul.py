"""all_gather_matmul: every algorithm against PyTorch's all-gather and matmul, checked and in turns.

    python benchmarks/bench_all_gather_matmul.py --axis_num_ranks=2,4,8 --benchmark_out ag_mm.json --plot plots
    iris run -n 2 benchmarks/bench_all_gather_matmul.py --axis_num_ranks=2 --axis_M=16,128 --axis_gather_dim=0
    iris run --loopback --link-gbps 370 -n 8 benchmarks/bench_all_gather_matmul.py --axis_num_ranks=8 --alone
    iris run --loopback --link-gbps 48 --link-per-peer -n 8 benchmarks/bench_all_gather_matmul.py --alone --regression
    python benchmarks/bench_all_gather_matmul.py --shapes=mi300x --benchmark_filter=8_ranks --n_warmup=1 --n_repeat=5

Rows: ``torch`` gathers and multiplies with PyTorch, ``torch_fused`` is PyTorch's operation over symmetric memory, and
``matmul``, ``own matmul`` (the library's kernel with one rank) and ``gather`` are the two parts alone. The rest are
algorithms of the library; ``auto`` leaves the choice to it. ``hidden %`` compares with the better one of the two
multiplications, ``hidden of possible %`` with the longer one of multiplication and gather. ``BW`` is what a rank
receives, by time.

Inputs are random. Of each result a sample of rows and columns, some of every rank's part, is compared with float64, and
the rest must have been written. No rank meets another on the host within what is timed, and caches are emptied before
each call.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from _all_gather_matmul import GATHER, Operands, Shape, way
from _all_gather_matmul_alone import Alone
from _published import MACHINES, shapes, shown
from _ways import AUTO, MATMUL, OWN_MATMUL, TORCH, TORCH_FUSED, Refused, hand_over, host_microseconds, shared

from iris import bench

REGRESSION = Path(__file__).with_name("all_gather_matmul_regression_shapes.json")
ROLES = {TORCH: "communication+compute", MATMUL: "compute", OWN_MATMUL: "compute", GATHER: "communication"}
STAGED = ["hbm_buffer", "copy_engine", AUTO]
COUNTED = ("pull", "hbm_buffer")  # whose host time is that of a launch, which can be left out


def chosen(text: str) -> list[str]:
    names = [word.strip() for word in text.split(",")]
    for name in names:
        if name not in MACHINES:
            raise argparse.ArgumentTypeError(f"{name!r} is not known; possible: {', '.join(MACHINES)}")
    return names


OWN = argparse.ArgumentParser(add_help=False)
OWN.add_argument(
    "--shapes",
    type=chosen,
    default=[],
    help=f"those of the package's table of a machine instead, a list: {', '.join(MACHINES)}",
)
OWN.add_argument(
    "--alone",
    action="store_true",
    help="time rank 0 alone, with the whole card, the others stand in; for ranks in one process (iris run --loopback)",
)
OWN.add_argument("--regression", action="store_true", help="the shapes of all_gather_matmul_regression_shapes.json")
OWN.add_argument("--host_cost", action="store_true", help="add a column: microseconds of the host in a call")


def compared(algorithms):
    """The axis of what is measured in turns."""
    values = [TORCH, *algorithms, *(name for name in ROLES if name != TORCH)]
    return bench.axis("algorithm", values, alternate=True, baseline=TORCH, roles=ROLES)


@bench.register
@bench.axis("num_ranks", [2, 4, 8])
@bench.axis("M", [1024, 4096, 16384])
@bench.axis("N", [3584])
@bench.axis("K", [8192])
@bench.axis("dtype", [torch.float16])
@bench.axis("gather_dim", [1])
@compared(["pull", *STAGED, TORCH_FUSED])
def all_gather_matmul(state, ctx):
    """(M, K) @ (K, N), A sharded along K (gather_dim 1) or M (0)."""
    measure(state, ctx, Shape(*(state[name] for name in ("M", "N", "K", "dtype", "gather_dim"))))


def declare_published(name, published):
    """A benchmark for each number of ranks that has published shapes."""
    for num_ranks in sorted({entry["num_ranks"] for entry in published}):
        known = {shown(entry): entry for entry in published if entry["num_ranks"] == num_ranks}

        def benchmark(state, ctx, known=known):
            """Published shapes, MxNxK, A sharded along K."""
            entry = known.get(state["shape"], {})
            for figure in ("speedup", "tflops"):
                state.add_counter(f"published {figure}", entry[figure] if entry.get(figure) is not None else "-")
            M, N, K = map(int, state["shape"].split("x"))
            measure(state, ctx, Shape(M, N, K, state["dtype"], state["gather_dim"]))

        benchmark.__name__ = benchmark.__qualname__ = f"{name}_{num_ranks}_ranks"
        axes = (
            compared(STAGED),
            bench.axis("gather_dim", [1]),
            bench.axis("dtype", [torch.float16]),
            bench.axis("shape", list(known)),
            bench.axis("num_ranks", [num_ranks]),
        )
        for axis in axes:
            benchmark = axis(benchmark)
        bench.register(benchmark)


def measure(state, ctx, shape):
    """Hand one algorithm for one problem over."""
    given, algorithm = OWN.parse_known_args()[0], state["algorithm"]
    if given.alone and ctx.runtime == "gpu":
        state.skip("--alone is for ranks in one process: iris run --loopback")
    trouble = shape.trouble(ctx, given.alone)
    if trouble:
        state.skip(trouble)
    try:
        if given.alone:
            alone = shared(ctx, shape, lambda: Alone(ctx, shape))
            found = alone.way(ctx, algorithm)
            state.set_timed_ranks([0])
            state.add_note(
                f"Rank 0 alone is timed, with all {alone.units} compute units; peers have said beforehand that their "
                "inputs may be read. torch and gather copy within the card while the link, if one is imitated, carries"
            )
        else:
            found = way(ctx, shared(ctx, shape, lambda: Operands(ctx, shape)), algorithm)
    except Refused as refused:
        state.skip(str(refused))
    if algorithm != GATHER:
        state.set_flops(shape.flops)
    if algorithm not in (MATMUL, OWN_MATMUL):
        rows, columns = shape.shard(ctx.get_num_ranks())
        state.set_bytes((ctx.get_num_ranks() - 1) * rows * columns * shape.dtype.itemsize)
    if given.host_cost and not given.alone and algorithm in COUNTED:
        state.add_counter("host us", host_microseconds(ctx, found.call))
    if ctx.target.compiled:
        state.set_warmup(3)
        state.set_repeat(15)
    hand_over(state, found)


def main():
    given = OWN.parse_known_args()[0]
    if given.alone:
        os.environ["IRIS_CHECK"] = "off"  # the ranks do not make the same calls
    published = {machine: shapes(machine) for machine in given.shapes}
    if given.regression:
        published["regression"] = json.loads(REGRESSION.read_text())["shapes"]
    for name, entries in published.items():
        declare_published(name, entries)
    words = [f"--benchmark_filter=^({'|'.join(published)})_"] if published else []
    bench.main([*words, *sys.argv[1:]], parser=OWN)


if __name__ == "__main__":
    main()
