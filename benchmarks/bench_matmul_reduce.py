"""matmul_all_reduce and matmul_reduce_scatter: every algorithm against PyTorch's pairs, checked and in turns.

    python benchmarks/bench_matmul_reduce.py --axis_num_ranks=2 --axis_M=1,16,64,256,1024,4096,16384
    python benchmarks/bench_matmul_reduce.py --axis_num_ranks=2 --shapes=llama70b --benchmark_filter=all_reduce
    iris run -n 2 benchmarks/bench_matmul_reduce.py --axis_num_ranks=2 --benchmark_out mm_reduce.json --plot plots
    iris run --loopback --link-gbps 370 -n 4 benchmarks/bench_matmul_reduce.py --axis_num_ranks=4
    iris run --loopback --link-gbps 370 -n 2 benchmarks/bench_matmul_reduce.py --axis_num_ranks=2 --alone
    python benchmarks/bench_matmul_reduce.py --small

The K of a problem is divided among the ranks. Rows: ``torch``, ``ccl``, ``torch_one_shot``, ``torch_two_shot`` and
``torch_reduce_scatter`` multiply with PyTorch and add up with ``torch.distributed``, ``ctx.ccl`` and PyTorch's
symmetric memory; ``torch_fused`` is PyTorch's fused operation. ``matmul``, ``own matmul`` (the library's kernel with
one rank) and ``reduction``, ``ccl reduction`` and so on are the parts alone. The rest are algorithms of the library;
``auto`` leaves the choice to it. ``hidden %`` compares with the fastest of the pairs and of the two multiplications,
``hidden of possible %`` with the fastest reduction too. ``BW`` is what a rank has to receive, by time.

Inputs are random. A sample of each result is compared with float64 and all of it with what rounding allows. No rank
meets another on the host within what is timed, and caches are emptied before each call.
"""

from __future__ import annotations

import argparse
import os

import torch
from _matmul_reduce import KERNELS, UNFUSED, Operands, Shape, reduction_of, way
from _matmul_reduce_alone import Alone
from _ways import AUTO, MATMUL, OWN_MATMUL, TORCH, TORCH_FUSED, Refused, hand_over, shared

from iris import bench

# Layers whose output is a sum over the ranks: N, and K of the attention's output and of the feed-forward layer's.
SHAPES = {
    "llama7b": (4096, [4096, 11008]),
    "llama70b": (8192, [8192, 28672]),
    "mixtral": (4096, [4096, 14336]),
}


def chosen(text: str) -> list[str]:
    names = [word.strip() for word in text.split(",")]
    for name in names:
        if name not in SHAPES:
            raise argparse.ArgumentTypeError(f"{name!r} is not known; possible: {', '.join(SHAPES)}")
    return names


OWN = argparse.ArgumentParser(add_help=False)
OWN.add_argument("--shapes", type=chosen, default=[], help=f"layers of models instead, a list: {', '.join(SHAPES)}")
OWN.add_argument(
    "--alone",
    action="store_true",
    help="time rank 0 alone, with the whole card, the others have sent; for ranks in one process (iris run --loopback)",
)
OWN.add_argument("--small", action="store_true", help="tiny problems, to try it without GPUs")


def roles(operation: str) -> dict[str, str]:
    """The ways that are one of the two parts, or one after the other."""
    found = dict.fromkeys(UNFUSED[operation], "communication+compute")
    found |= dict.fromkeys((MATMUL, OWN_MATMUL), "compute")
    return found | dict.fromkeys(map(reduction_of, UNFUSED[operation]), "communication")


def declare(operation: str, name: str, rows: list[int], columns: int, depths: list[int], ranks: list[int]) -> None:
    """Register the benchmark of an operation for some problems."""

    def benchmark(state, ctx):
        measure(state, ctx, Shape(operation, *(state[name] for name in ("M", "N", "K", "dtype"))))

    benchmark.__name__ = benchmark.__qualname__ = name
    benchmark.__doc__ = f"{operation}, K divided among the ranks."
    known = roles(operation)
    fused = [] if operation == "matmul_all_reduce" else [TORCH_FUSED]
    values = [*UNFUSED[operation], *fused, *KERNELS[operation], AUTO]
    values += [name for name in known if name not in values]
    axes = (
        bench.axis("algorithm", values, alternate=True, baseline=TORCH, roles=known),
        bench.axis("dtype", [torch.float16]),
        bench.axis("K", depths),
        bench.axis("N", [columns]),
        bench.axis("M", rows),
        bench.axis("num_ranks", ranks),
    )
    for axis in axes:
        benchmark = axis(benchmark)
    bench.register(benchmark)


def measure(state, ctx, shape: Shape) -> None:
    """Hand one algorithm for one problem over."""
    given, algorithm, world = OWN.parse_known_args()[0], state["algorithm"], ctx.get_num_ranks()
    if given.alone and ctx.runtime == "gpu":
        state.skip("--alone is for ranks in one process: iris run --loopback")
    trouble = shape.trouble(ctx)
    if trouble:
        state.skip(trouble)
    try:
        if given.alone:
            alone = shared(ctx, shape, lambda: Alone(ctx, shape))
            found = alone.way(ctx, algorithm)
            state.set_timed_ranks([0])
            state.add_note(
                f"Rank 0 alone is timed, with all {alone.units} compute units; what peers send is there beforehand. "
                "torch and reduction copy and add within the card while the link, if one is imitated, carries"
            )
        else:
            found = way(ctx, shared(ctx, shape, lambda: Operands(ctx, shape)), algorithm)
    except Refused as refused:
        state.skip(str(refused))
    if algorithm not in map(reduction_of, UNFUSED[shape.operation]):
        state.set_flops(shape.flops(world))
    if algorithm not in (MATMUL, OWN_MATMUL):
        state.set_bytes(shape.received(world))
    if ctx.target.compiled:
        state.set_warmup(3)
        state.set_repeat(15)
    hand_over(state, found)


def main():
    given = OWN.parse_known_args()[0]
    if given.alone:
        os.environ["IRIS_CHECK"] = "off"  # the ranks do not make the same calls
    ranks, rows = ([2], [33]) if given.small else ([2, 4, 8], [16, 256, 4096, 16384])
    problems = {f"_{name}": SHAPES[name] for name in given.shapes} or {"": (3584, [8192])}
    for operation in UNFUSED:
        for suffix, (columns, depths) in problems.items():
            # The names of models stay, so that what is tried is what will be measured.
            columns, depths = (40, [96]) if given.small else (columns, depths)
            declare(operation, operation + suffix, rows, columns, depths, ranks)
    bench.main(parser=OWN)


if __name__ == "__main__":
    main()
