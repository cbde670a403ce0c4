"""What Iris costs the host: import, allocation, a call, committed memory. One process, or ranks of ``iris run``.

python benchmarks/bench_host.py
iris run -n 4 benchmarks/bench_host.py
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time

IMPORT = "import time, torch; start = time.perf_counter(); import iris; print(time.perf_counter() - start)"


def import_seconds(repeats=5):
    """Median time that importing iris adds to importing torch, in fresh processes."""
    command = [sys.executable, "-c", IMPORT]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(repeats)]
    return statistics.median(float(run.stdout) for run in runs)


def microseconds(call, repeats):
    call()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e6


def main():
    import torch

    import iris
    from iris.ops import FusedConfig
    from iris.runtime import launch

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ctx = iris.iris(8 << 30)
    device = ctx.get_device()
    exchanges = 0
    real_exchange = ctx.exchange.all_gather

    def counted(*args, **kwargs):
        nonlocal exchanges
        exchanges += 1
        return real_exchange(*args, **kwargs)

    ctx.exchange.all_gather = counted
    allocation = microseconds(lambda: ctx.heap.allocate(1 << 16, torch.float16), 5000)
    during = exchanges
    barrier = microseconds(ctx.barrier, 200)
    like = {"dtype": torch.float16, "device": device}
    a, b = ctx.zeros(64, 64, **like), torch.zeros(64 * ctx.get_num_ranks(), 64, **like)
    out, bias = torch.zeros(64, 64, **like), torch.zeros(64, **like)
    config = FusedConfig(64, 64, 64, num_warps=4)
    ctx.ops.all_gather_matmul(out, a, b, bias, config=config)
    launch.start = lambda *args, **kwargs: None
    call = microseconds(lambda: ctx.ops.all_gather_matmul(out, a, b, bias, config=config), 2000)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if ctx.get_rank() == 0:
        print("| what | measured |")
        print("|---|---|")
        if "RANK" not in os.environ:
            print(f"| import iris after torch | {import_seconds():.3f} s |")
        print(f"| allocation of 128 KiB on the heap, dropped | {allocation:.1f} us, {during} host exchanges in 5000 |")
        print(f"| barrier() of {ctx.get_num_ranks()} ranks | {barrier:.0f} us |")
        print(f"| all_gather_matmul with a known plan, launch left out | {call:.1f} us |")
        print(f"| memory committed by a context with a heap of 8 GiB | {grown:.0f} MiB |")
    ctx.barrier()


if __name__ == "__main__":
    main()
