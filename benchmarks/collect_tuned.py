"""Times variations of a fused operation's configuration, from which the package's tables are derived.

    iris run --loopback --link-gbps 370 -n 4 benchmarks/collect_tuned.py --axis_num_ranks=4 --alone \
        --benchmark_format json --benchmark_out all_gather_matmul_4.json
    iris run -n 2 benchmarks/collect_tuned.py --axis_num_ranks=2 --benchmark_out all_gather_matmul_2.json

Each combination is a layer of a model as tensor parallelism splits it over the ranks, or the sweep over M with N=3584
and K=8192. The candidates are PyTorch's operations one after the other, the library's choice as it is without tables,
and that choice with one thing changed; where ranks are processes, copies too. A candidate's name is its
configuration, so that ``derive_tuned.py`` can read it. ``--alone`` is for ranks in one process: rank 0 works with the
whole card, over an imitated link. ``--small`` tries it without GPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from _all_gather_matmul import Operands, Shape, way
from _all_gather_matmul_alone import Alone
from _matmul_reduce import Operands as ReduceOperands
from _matmul_reduce import Shape as ReduceShape
from _matmul_reduce import way as reduce_way
from _matmul_reduce_alone import Alone as ReduceAlone
from _tuned import GATHERED, REDUCED, copies, name_of, variations
from _ways import MATMUL, TORCH, Refused, Way, shared, whole_card

from iris import bench

OWN = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
OWN.add_argument(
    "--variations",
    metavar="N,...",
    help="of all_gather_matmul, by their place in _tuned.STAGED_CHANGES; all by default",
)
OWN.add_argument("--alone", action="store_true", help="time rank 0 alone, with the whole card (iris run --loopback)")
OWN.add_argument("--small", action="store_true", help="tiny problems of all_gather_matmul, to try it")
SMALL = (32, 40, 96)  # M, N, K
_PEERS_STAND_IN = (
    "Rank 0 alone is timed, with all compute units of the card; the others stand in. PyTorch's operations copy within "
    "the card while the link, if one is imitated, carries"
)


@bench.register
@bench.axis("num_ranks", [2, 4, 8])
@bench.axis("layer", list(GATHERED))
@bench.axis("M", [1024, 4096, 16384])
@bench.axis("gather_dim", [0])
@bench.axis("dtype", [torch.bfloat16])
def all_gather_matmul(state, ctx):
    """(M, K) @ (K, N / ranks), A sharded along M (gather_dim 0) or K (1)."""
    given, world = OWN.parse_known_args()[0], ctx.get_num_ranks()
    alone, layer = given.alone, GATHERED[state["layer"]]
    M, N, K = SMALL if given.small else (state["M"], *layer.of_rank(world))
    shape = Shape(M, N, K, state["dtype"], state["gather_dim"])
    odd = f"N={layer.size[0]} is no multiple of {world} ranks" if layer.columns and layer.size[0] % world else ""
    trouble = odd or shape.trouble(ctx, alone)
    if trouble:
        state.skip(trouble)
    if alone:
        whole_card(ctx)
        work = shared(ctx, shape, lambda: Alone(ctx, shape))
        candidates = variations(ctx, "all_gather_matmul", shape, _asked())
        measure(state, lambda algorithm, config: work.way(ctx, algorithm, config), candidates)
        state.set_timed_ranks([0])
        state.add_note(_PEERS_STAND_IN)
    else:
        operands = shared(ctx, shape, lambda: Operands(ctx, shape))
        candidates = [*variations(ctx, "all_gather_matmul", shape, _asked()), *copies(ctx, shape)]
        measure(state, lambda algorithm, config: way(ctx, operands, algorithm, config), candidates)


def _asked() -> list[int] | None:
    given = OWN.parse_known_args()[0].variations
    return [int(word) for word in given.split(",")] if given else None


def reduced(state, ctx, operation):
    """(M, K / ranks) @ (K / ranks, N), the products of the ranks added."""
    alone = OWN.parse_known_args()[0].alone
    shape = ReduceShape(operation, state["M"], *REDUCED[state["layer"]].size, state["dtype"])
    trouble = shape.trouble(ctx)
    if trouble:
        state.skip(trouble)
    if alone:
        whole_card(ctx)
        work = shared(ctx, shape, lambda: ReduceAlone(ctx, shape))
        measure(state, lambda name, config: work.way(ctx, name, config), variations(ctx, operation, shape))
        state.set_timed_ranks([0])
        state.add_note(_PEERS_STAND_IN)
    else:
        operands = shared(ctx, shape, lambda: ReduceOperands(ctx, shape))
        candidates = variations(ctx, operation, shape)
        measure(state, lambda name, config: reduce_way(ctx, operands, name, config), candidates)


def declare_reductions() -> None:
    """A benchmark for each operation that adds."""
    for operation in ("matmul_all_reduce", "matmul_reduce_scatter"):

        def benchmark(state, ctx, operation=operation):
            """(M, K / ranks) @ (K / ranks, N), the products of the ranks added."""
            reduced(state, ctx, operation)

        benchmark.__name__ = benchmark.__qualname__ = operation
        for axis in (
            bench.axis("dtype", [torch.bfloat16]),
            bench.axis("M", [64, 1024, 4096, 16384]),
            bench.axis("layer", list(REDUCED)),
            bench.axis("num_ranks", [2, 4, 8]),
        ):
            benchmark = axis(benchmark)
        bench.register(benchmark)


def measure(state: Any, make: Callable[[str, Any], Way], candidates: list[tuple[str, Any]]) -> None:
    """Hand the candidates over: ``matmul`` alone, PyTorch's operations, and configurations by their names."""
    ways: dict[str, tuple[str, Any]] = {MATMUL: (MATMUL, None), TORCH: (TORCH, None)}
    ways |= {name_of(algorithm, config): (algorithm, config) for algorithm, config in candidates}
    for name, (algorithm, config) in ways.items():
        try:
            found = make(algorithm, config)
        except Refused as refused:
            state.add_note(f"{name}: {refused}")
            continue
        for one in found.results:
            state.validate(one.result, one.want, tolerance=one.allowed, bitwise=one.allowed is None, candidate=name)
        role = "compute" if name == MATMUL else None
        state.candidate(name, found.call, preamble_fn=found.prepare, baseline=name == TORCH, role=role)
    state.set_warmup(2)
    state.set_repeat(9)


def main():
    if OWN.parse_known_args()[0].alone:
        os.environ["IRIS_CHECK"] = "off"  # the ranks do not make the same calls
    declare_reductions()
    bench.main(sys.argv[1:], parser=OWN)


if __name__ == "__main__":
    main()
