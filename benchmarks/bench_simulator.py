"""The simulator: how long it takes, what its checks cost, how much memory they take, how many ranks it holds.

    taskset -c 0 python benchmarks/bench_simulator.py

Each figure is the median of three runs with different seeds, on one core when started as above. Checked and unchecked
runs take turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import resource
import statistics
import time
from pathlib import Path

os.environ.setdefault("IRIS_RUNTIME", "sim")

import torch
import triton
import triton.language as tl

import iris
from iris.ops import FusedConfig


def body_all_gather_matmul(ctx, M, N, K, tile):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    generator = torch.Generator().manual_seed(rank)
    a = ctx.zeros(M, K // world, dtype=torch.float16)
    a.copy_(torch.randn(M, K // world, generator=generator))
    b = torch.randn(K, N, generator=generator.manual_seed(99)).half()
    out = torch.full((M, N), float("nan"), dtype=torch.float16)
    ctx.barrier()
    ctx.ops.all_gather_matmul(out, a, b, config=FusedConfig(tile, tile, 64), algorithm="pull")
    ctx.barrier()
    return out


@triton.jit
def put_kernel(source, inbox, n, rank: tl.constexpr, world: tl.constexpr, bases, BLOCK: tl.constexpr):
    for i in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offs = i * BLOCK + tl.arange(0, BLOCK)
        for peer in range(world):
            iris.put(source + offs, inbox + rank * n + offs, rank, peer, bases, mask=offs < n)


def body_puts(ctx, n):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    source, inbox = ctx.zeros(n, dtype=torch.float16), ctx.zeros(n * world, dtype=torch.float16)
    source.fill_(rank + 1)
    ctx.barrier()
    put_kernel[(8,)](source, inbox, n, rank, world, ctx.get_heap_bases(), BLOCK=1024)
    ctx.barrier()


@triton.jit
def add_kernel(sums, BLOCK: tl.constexpr, rank: tl.constexpr, world: tl.constexpr, bases):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for peer in range(world):
        iris.atomic_add(sums + offs, 1.0, rank, peer, bases)


def body_adds(ctx, n):
    sums = ctx.zeros(n, dtype=torch.float32)
    ctx.barrier()
    add_kernel[(n // 1024,)](sums, 1024, ctx.get_rank(), ctx.get_num_ranks(), ctx.get_heap_bases())
    ctx.barrier()


def body_barriers(ctx, count):
    for _ in range(count):
        ctx.device_barrier()
    ctx.barrier()


def seconds(body, world, *args, check, seed):
    start = time.perf_counter()
    iris.sim.run(body, world, *args, check=check, seed=seed)
    return time.perf_counter() - start


def compare(name, body, world, *args):
    """A row: seconds with all checks and without, and their ratio."""
    seconds(body, world, *args, check=(), seed=0)
    times = {iris.sim.CHECKS: [], (): []}
    for seed in (1, 2, 3):
        for check, samples in times.items():
            samples.append(seconds(body, world, *args, check=check, seed=seed))
    checked, plain = (statistics.median(samples) for samples in times.values())
    print(f"| {name} | {world} | {checked:.2f} | {plain:.2f} | {checked / plain:.2f} |", flush=True)


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def body_touch(ctx, mib):
    ctx.zeros(mib << 20, dtype=torch.int8)
    ctx.barrier()


def memory():
    """Host memory that one rank takes for each byte of int8 that it touches, of a heap of 8 GiB."""
    iris.sim.run(body_touch, 1, 1, heap_size=8 << 30)
    before, mib = peak_mib(), 64
    iris.sim.run(body_touch, 1, mib, heap_size=8 << 30)
    print(f"\n{mib} MiB of int8 written by the host on a heap of 8 GiB: {(peak_mib() - before) / mib:.1f} bytes a byte")


def many_seeds():
    """Seconds of 200 seeds of the exchange of examples/08_find_a_race.py, which is right in every order."""
    path = Path(__file__).parents[1] / "examples" / "08_find_a_race.py"
    spec = importlib.util.spec_from_file_location("find_a_race", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    start = time.perf_counter()
    iris.sim.explore(example.exchange, 4, True, seeds=range(200))
    print(f"\n200 seeds of the exchange of {path.name}, 4 ranks: {time.perf_counter() - start:.1f} s")


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    cores = len(os.sched_getaffinity(0))
    print(
        f"{platform.machine()}, {cores} core(s); torch {torch.__version__}, Triton {triton.__version__}, "
        f"Python {platform.python_version()}; {time.strftime('%Y-%m-%d')}\n"
    )
    print("| run | ranks | s, all checks | s, no checks | ratio |\n|---|---|---|---|---|")
    compare("all_gather_matmul 512x512x512, tiles of 128", body_all_gather_matmul, 4, 512, 512, 512, 128)
    compare("all_gather_matmul 256x256x512, tiles of 32", body_all_gather_matmul, 4, 256, 256, 512, 32)
    compare("puts of 100,000 fp16 to every rank", body_puts, 4, 100_000)
    compare("atomic adds of 32,768 fp32 to every rank", body_adds, 4, 32_768)
    compare("10 device barriers", body_barriers, 4, 10)
    compare("2 device barriers", body_barriers, 16, 2)
    compare("2 device barriers", body_barriers, 32, 2)
    compare("all_gather_matmul 256x256x2048, tiles of 128", body_all_gather_matmul, 16, 256, 256, 2048, 128)
    compare("all_gather_matmul 256x256x2048, tiles of 128", body_all_gather_matmul, 32, 256, 256, 2048, 128)
    memory()
    many_seeds()


if __name__ == "__main__":
    main()
