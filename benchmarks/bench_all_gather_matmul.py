"""all_gather_matmul: every algorithm against PyTorch's all-gather + matmul, in one run.

    iris run -n 2 benchmarks/bench_all_gather_matmul.py --m 16,128,1024 --n 3584 --k 8192 --dtype fp16

Each result is compared with float64 before anything is timed. Candidates take turns within each sample, so drifts of
the clock meet all of them; a figure is the median over samples on the slowest rank. ``host`` is what a call costs the
host without the launches of its kernels.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time

import torch
import triton

import iris
from iris.errors import IrisError
from iris.runtime import launch
from iris.testing.numeric import assert_close, random_tensor
from iris.testing.reference import all_gather_matmul as reference

SLEEP_CYCLES = 20_000_000  # about 10 ms

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def numbers(text):
    return [int(word) for word in text.split(",")]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--m", type=numbers, default=[1, 16, 64, 128, 256, 1024, 4096], help="rows of A, a list")
    parser.add_argument("--n", type=int, default=3584, help="columns of B")
    parser.add_argument("--k", type=int, default=8192, help="columns of A over all ranks")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--gather-dim", type=int, choices=(0, 1), default=1)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--json", help="also write the figures to this file")
    return parser.parse_args()


def timed(ctx, call):
    """Milliseconds of one call on the device, or on the host's clock without one."""
    if ctx.get_device().type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The GPU sleeps until every rank has issued all of it, and the ranks then start together: what is timed has nothing
    # of the host, which in loopback serves one rank after the other.
    torch.cuda._sleep(SLEEP_CYCLES)
    ctx.device_barrier()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def host_microseconds(call, repeats=300):
    """Microseconds of the host in one call, the launch itself left out."""
    real, launch.start = launch.start, lambda *args, **kwargs: None
    try:
        for _ in range(20):
            call()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats * 1e6
    finally:
        launch.start = real


def measure(ctx, options, M):
    """One row: {name: milliseconds on the slowest rank}, and what the operation chose by itself."""
    rank, world, device, dtype = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device(), DTYPES[options.dtype]
    shape = (M, options.k // world) if options.gather_dim == 1 else (M // world, options.k)
    shards = [random_tensor(shape, dtype, seed=M, rank=r) for r in range(world)]
    b_host = random_tensor((options.k, options.n), dtype, seed=M + 1, rank=0)
    a, b = ctx.as_symmetric(shards[rank].to(device)), b_host.to(device)
    out = torch.empty((M, options.n), dtype=dtype, device=device)
    whole = torch.cat(shards, dim=options.gather_dim).to(device)
    rows = torch.linspace(0, M - 1, min(M, 64)).long()
    want = reference([torch.cat(shards, dim=options.gather_dim)[rows]], b_host)

    def run(algorithm):
        return lambda: ctx.ops.all_gather_matmul(out, a, b, algorithm=algorithm, gather_dim=options.gather_dim)

    calls = {"matmul alone": lambda: torch.matmul(whole, b, out=out)}
    for algorithm in ("torch", "pull"):
        out.fill_(float("nan"))
        run(algorithm)()
        ctx.synchronize()
        assert_close(out.cpu()[rows], want, dtype, k=options.k)
        calls[algorithm] = run(algorithm)
    samples = {name: [] for name in calls}
    for turn in range(options.samples + 3):
        for name, call in calls.items():
            ctx.barrier()
            elapsed = timed(ctx, call)
            if turn >= 3:
                samples[name].append(elapsed)
    mine = {name: statistics.median(values) for name, values in samples.items()}
    everyone = ctx.exchange.all_gather("benchmark", mine)
    slowest = {name: max(theirs[name] for theirs in everyone) for name in mine}
    host = max(ctx.exchange.all_gather("benchmark", host_microseconds(run("pull"))))
    plan = ctx.ops.explain("all_gather_matmul", out, a, b, gather_dim=options.gather_dim)
    ctx.barrier()
    return {"M": M, **slowest, "host us": host, "chosen": plan.algorithm}


def main():
    options = arguments()
    ctx = iris.iris(4 * max(options.m) * options.k + (8 << 20))
    on_gpu = ctx.get_device().type == "cuda"
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.processor() or platform.machine()} (interpreter)"
    head = (
        f"{ctx.get_num_ranks()} ranks on {machine}, {ctx.get_cu_count()} compute units a rank; "
        f"torch {torch.__version__}, "
        f"Triton {triton.__version__}, Python {platform.python_version()}; N={options.n}, K={options.k}, "
        f"{options.dtype}, gather_dim={options.gather_dim}; {time.strftime('%Y-%m-%d')}"
    )
    rows = []
    if ctx.get_rank() == 0:
        print(head, "\n")
        print("| M | matmul alone ms | torch ms | pull ms | pull is faster by | host us | chosen |")
        print("|---|---|---|---|---|---|---|", flush=True)
    for M in options.m:
        try:
            row = measure(ctx, options, M)
        except IrisError as error:
            if ctx.get_rank() == 0:
                print(f"M={M} failed: {error}", file=sys.stderr, flush=True)
            raise
        rows.append(row)
        if ctx.get_rank() == 0:
            print(
                f"| {M} | {row['matmul alone']:.3f} | {row['torch']:.3f} | {row['pull']:.3f} | "
                f"{row['torch'] / row['pull']:.2f}x | {row['host us']:.0f} | {row['chosen']} |",
                flush=True,
            )
    if options.json and ctx.get_rank() == 0:
        with open(options.json, "w") as file:
            json.dump({"machine": head, "command": sys.argv, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
