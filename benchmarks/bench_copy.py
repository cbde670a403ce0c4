"""Copies between ranks: what PyTorch moves inside a GPU against what a kernel reads from a peer, checked and in turns.

    python benchmarks/bench_copy.py
    python benchmarks/bench_copy.py --axis_num_ranks=2 --axis_nbytes=pow2:20:28 --benchmark_out copy.json --plot plots
    iris run --sim -n 2 benchmarks/bench_copy.py --axis_nbytes=65536

Every copy is compared bit by bit before it is timed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import iris
from iris import bench

BLOCK = 4096


@triton.jit
def read_peer(target, source, numel, rank: tl.constexpr, peer, heap_bases, BLOCK: tl.constexpr):
    """``target[i] = source[i]`` of rank ``peer``."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < numel
    tl.store(target + offs, iris.load(source + offs, rank, peer, heap_bases, mask=mask), mask=mask)


@bench.register
@bench.axis("nbytes", [1 << 16, 1 << 20, 1 << 24, 1 << 28])
@bench.axis("dtype", [torch.float32])
@bench.axis("algorithm", ["local", "peer"], alternate=True, baseline="local")
def copy(state, ctx):
    """Every rank copies a tensor of its next neighbour, or of its own."""
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    dtype, peer = state["dtype"], (rank + 1) % world
    numel = state["nbytes"] // dtype.itemsize
    if peer == rank and state["algorithm"] == "peer":
        state.skip("a rank alone has no peer")
    source = ctx.as_symmetric(bench.random_tensor((numel,), dtype, seed=1, rank=rank).to(device))
    target = torch.empty_like(source)
    state.set_bytes(2 * source.nbytes)  # read and written

    if state["algorithm"] == "local":
        state.validate(target, source, bitwise=True)
        state.exec(lambda: target.copy_(source))
        return
    expected = bench.random_tensor((numel,), dtype, seed=1, rank=peer)
    grid = (triton.cdiv(numel, BLOCK),)
    state.validate(target, expected, bitwise=True)
    state.exec(lambda: read_peer[grid](target, source, numel, rank, peer, ctx.get_heap_bases(), BLOCK=BLOCK))


if __name__ == "__main__":
    bench.main()
