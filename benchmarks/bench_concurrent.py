"""A GEMM beside an independent collective: iris.concurrent against both alone and PyTorch's on two streams.

    python benchmarks/bench_concurrent.py --axis_num_ranks=2 --benchmark_out concurrent_2.json
    iris run --loopback --link-gbps 370 -n 8 benchmarks/bench_concurrent.py --axis_num_ranks=8 --alone --bound
    iris run -n 2 benchmarks/bench_concurrent.py --axis_num_ranks=2 --axis_gemm=8192x8192x8192 --axis_share=1
    python benchmarks/bench_concurrent.py --small
    python benchmarks/report_concurrent_speed.py concurrent_2.json

``share`` says how long the collective takes in times of the GEMM, by rates that are assumed for both (--nominal-tflops,
--nominal-gbps); what they take is measured. Rows, in turns: ``matmul`` and ``own matmul`` (the library's kernel with an
empty collective) are the product alone, ``torch all_gather`` and ``own all_gather`` (the kernel that exchanges alone)
the collective alone. ``torch``, the baseline, is PyTorch's collective on one stream and its product on another, ``torch
symm_mem`` the same with PyTorch's symmetric memory. ``fused`` and ``concurrent`` are the two modes as they are without
tuning, ``fused 112 128x256x64`` one of the splits and tiles that tuning would try, ``concurrent 124`` two kernels with
fewer programs for the collective. ``own matmul on 99`` and ``own all_gather on 33`` are the parts alone with a part of
the compute units (--bound): where they do not disturb each other, a split takes the longer of the two.

The product is of random numbers, a sample compared with float64; the collective is of random whole numbers, all of it
compared. Outputs are NaN before each call. No rank meets another on the host within what is timed, and caches are
emptied before each call. ``report_concurrent_speed.py`` sums up what was measured.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from _concurrent import DEFAULT_COLLECTIVES, Moving, Shape, Together, sized
from _concurrent_alone import Alone
from _concurrent_torch import copied, distributed, symmetric_memory
from _ways import MATMUL, OWN_MATMUL, TORCH, Refused, Way

from iris import bench
from iris.concurrent.autotune import shown

FUSED, CONCURRENT, SYMM_MEM = "fused", "concurrent", "torch symm_mem"
# Programs that begin with the product, of which the parts alone bound what a split can be.
BOUND_SHARES = (1 / 2, 5 / 8, 3 / 4, 13 / 16, 7 / 8, 15 / 16)
FEWER = (16, 11)  # of the compute units that the collective has in two kernels, beside the default of an eighth
COLUMNS, SMALL_COLUMNS, SMALL_TILE_ROWS = 4096, 264, 24  # the small ones have two tiles where they are interpreted

OWN = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
OWN.add_argument("--nominal-tflops", type=float, default=700.0, help="assumed rate of the GEMM (%(default)s)")
OWN.add_argument("--nominal-gbps", type=float, default=370.0, help="assumed rate of a rank's links (%(default)s)")
OWN.add_argument("--candidates", type=int, default=8, help="splits and tiles beside the defaults (%(default)s)")
OWN.add_argument("--bound", action="store_true", help="the parts alone with parts of the compute units, too")
OWN.add_argument(
    "--alone",
    action="store_true",
    help="time rank 0 alone, with the whole card; for ranks in one process (iris run --loopback)",
)
OWN.add_argument("--small", action="store_true", help="tiny problems, to try it without GPUs")


def declare(small: bool) -> None:
    """Register the benchmark."""

    def concurrent(state, ctx):
        """A GEMM on each rank beside a collective."""
        given = OWN.parse_known_args()[0]
        if given.alone and ctx.runtime == "gpu":
            state.skip("--alone is for ranks in one process: iris run --loopback")
        measure(state, ctx, problem(state, ctx, given), given)

    gemms = ["48x40x32"] if small else ["8192x8192x8192", "4096x4096x4096", "2048x8192x8192"]
    for axis in (
        bench.axis("dtype", [torch.float16]),
        bench.axis("share", [0.5] if small else [0.2, 0.5, 1.0]),
        bench.axis("gemm", gemms),
        bench.axis("collective", list(DEFAULT_COLLECTIVES)),
        bench.axis("num_ranks", [2] if small else [2, 4, 8]),
    ):
        concurrent = axis(concurrent)
    bench.register(concurrent)


def problem(state, ctx, given) -> Shape:
    """The problem of a combination."""
    names = (state["collective"], state["gemm"])
    kind, world = state["dtype"], ctx.get_num_ranks()
    if given.small:
        return sized(*names, 0, kind, SMALL_COLUMNS, world, SMALL_TILE_ROWS)
    flops = sized(*names, 0, kind, COLUMNS, world).flops
    seconds = float(state["share"]) * flops / (given.nominal_tflops * 1e12)
    return sized(*names, seconds * given.nominal_gbps * 1e9, kind, COLUMNS, world)


def measure(state, ctx, shape: Shape, given) -> None:
    """Hand the ways to do one problem over."""
    trouble = shape.trouble(ctx)
    if trouble:
        state.skip(trouble)
    work = (Alone if given.alone else Together)(ctx, shape)
    flops, nbytes = shape.flops, shape.moved(ctx.get_num_ranks())
    for name, (role, make) in rows(work, given).items():
        try:
            found = make()
        except Refused as refused:
            state.add_note(f"{name}: {refused}")
            continue
        if found.note and found.note not in state.notes:
            state.add_note(found.note)
        for one in found.results:
            state.validate(one.result, one.want, tolerance=one.allowed, bitwise=one.allowed is None, candidate=name)
        amounts = {"flops": None if role == "communication" else flops, "nbytes": None if role == "compute" else nbytes}
        state.candidate(name, found.call, preamble_fn=found.prepare, baseline=name == TORCH, role=role, **amounts)
    state.add_counter("rows", shape.rows)
    state.add_counter("units", work.units)
    if ctx.target.compiled:
        state.set_warmup(2)
        state.set_repeat(9)
    if given.alone:
        state.set_timed_ranks([0])
        state.add_note(
            f"Rank 0 alone is timed, with all {work.units} compute units; peers' inputs are there and nobody waits. "
            "Before an all_reduce of the library the imitated link takes what peers would write to rank 0"
        )


def rows(work: Together, given) -> dict[str, tuple[str | None, Callable[[], Way]]]:
    """The ways of a problem by name, with their roles."""
    name, units = work.shape.collective, work.units
    ways: dict[str, tuple[str | None, Callable[[], Way]]] = {
        MATMUL: ("compute", work.matmul),
        OWN_MATMUL: ("compute", lambda: work.own_matmul(units)),
        f"own {name}": ("communication", lambda: work.own_collective(units)),
        f"torch {name}": ("communication", lambda: work.torch_collective(torch_moving(work, given))),
        TORCH: (None, lambda: work.torch_both(torch_moving(work, given))),
    }
    if name == "all_reduce":
        ways[SYMM_MEM] = (None, lambda: work.torch_both(peers_moving(work, given)))
    ways |= {mode: (None, lambda mode=mode: work.both(mode=mode)) for mode in (FUSED, CONCURRENT)}
    # Two kernels do not help each other, so how many programs the collective has matters more.
    for comm in sorted({max(1, units // part) for part in FEWER} - {max(1, units // 8)}):
        ways[f"{CONCURRENT} {units - comm}"] = None, lambda comm=comm: work.both(mode=CONCURRENT, comm_wgs=comm)
    for split, tile in work.tried(given.candidates):
        ways[f"{FUSED} {shown(split, tile)}"] = (
            None,
            lambda split=split, tile=tile: work.both(gemm_wgs=split, gemm_block=tile),
        )
    for split in splits(units) if given.bound else ():
        ways[f"{OWN_MATMUL} on {split}"] = None, lambda split=split: work.own_matmul(split)
        ways[f"own {name} on {units - split}"] = None, lambda split=split: work.own_collective(units - split)
    return ways


def splits(units: int) -> list[int]:
    """Numbers of programs for the product that leave some for the collective."""
    return sorted({split for share in BOUND_SHARES if 0 < (split := int(units * share)) < units})


def torch_moving(work: Together, given) -> Moving:
    return (copied if given.alone else distributed)(work.ctx, work.payload)


def peers_moving(work: Together, given) -> Moving:
    if given.alone:
        raise Refused("it needs all ranks")
    return symmetric_memory(work.ctx, work.payload)


def main() -> Any:
    given = OWN.parse_known_args()[0]
    if given.alone:
        os.environ["IRIS_CHECK"] = "off"  # the ranks do not make the same calls
    declare(given.small)
    return bench.main(parser=OWN)


if __name__ == "__main__":
    main()
