"""Collectives: every variant against PyTorch's, in one run.

    iris run -n 8 benchmarks/bench_collectives.py
    iris run -n 8 benchmarks/bench_collectives.py --ops all_gather,broadcast --sizes 64KiB,64MiB --json out.json
    iris run -n 8 benchmarks/bench_collectives.py --ops all_gather --variants persistent,auto --comm_sms 8,16
    iris run --loopback -n 8 benchmarks/bench_collectives.py

A size is that of the larger of an operation's two tensors. Each result is compared with float64 before it is timed, as
single calls and as replayed graphs; a wrong one is reported, not timed, and fails the run. Candidates take turns within
each sample, the ranks meet on the device before each, and a sample counts on the slowest rank.

``graph`` is the time of a call in a CUDA graph of several: no host in it. ``eager`` is the time of calls that a program
issues one after another. ``p50`` and ``p99`` are of single calls that the host issued beforehand. All in microseconds.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import statistics
import sys
import time

import torch
import triton
from _collectives import VARIANTS, Buffers, Candidate, Data, absent, candidates, peers_here
from _collectives_report import UNITS, shown, summary, table

import iris
from iris.errors import ArgumentError, IrisError, UnsupportedError
from iris.runtime.links import link_of
from iris.runtime.settle import settled

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SIZES = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
SMALL = 256 << 10  # up to here single calls are timed too
LATENCIES = 512
COLD = 128 << 20  # twice what the cache of an H200 holds, so that data is gone from it when its buffers' turn comes
CACHED_SETS = 8  # where the data stays in the cache anyway; several, so that stale data shows in the results
SLACK = {"cuda": 128 << 20, "cpu": 16 << 20}  # of heap, for what the operations allocate themselves
CYCLES_A_MICROSECOND = 2_000
HOST_US = 60  # more than the host needs to issue a launch


class WrongResult(IrisError):
    """A candidate computed something else than the reference. The message names operation, variant, size, element."""


def size(text):
    match = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; possible: numbers with {', '.join(UNITS)}, as 64KiB")
    return int(match[1]) * UNITS[match[2]]


def words(known):
    def parse(text):
        chosen = [word.strip() for word in text.split(",")]
        for word in chosen:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is not known; possible: {', '.join(known)}")
        return chosen

    return parse


def arguments():
    every = list(dict.fromkeys(variant for variants in VARIANTS.values() for variant in variants))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=words(list(VARIANTS)), default=["all_reduce"], help=", ".join(VARIANTS))
    parser.add_argument("--variants", type=words(every), default=every, help="ours, as far as an operation has them")
    parser.add_argument(
        "--blocks",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[],
        help="elements of a block, powers of two, for variants that go by blocks; default what auto takes",
    )
    parser.add_argument(
        "--comm_sms",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[],
        help="each variant once more with at most so many compute units, a list",
    )
    parser.add_argument(
        "--sizes", type=lambda text: [size(word) for word in text.split(",")], default=SIZES, help="as 4KiB,1MiB"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--samples", type=int, default=20, help="at most 10 are taken above 4 MiB, 5 above 64 MiB")
    parser.add_argument("--json", help="also write the figures to this file, anew after each size")
    return parser.parse_args()


def calls_of(nbytes, on_gpu):
    """How many calls a sample has."""
    if not on_gpu:
        return 2
    return 32 if nbytes <= SMALL else 10 if nbytes <= 4 << 20 else 4 if nbytes <= 64 << 20 else 2


def samples_of(nbytes, samples):
    return samples if nbytes <= 4 << 20 else min(samples, 10) if nbytes <= 64 << 20 else min(samples, 5)


def sets_of(nbytes, on_gpu, ranks_a_card):
    """How many buffer sets calls take in turn: as many as it takes to exceed the cache, if the calls of a sample do."""
    calls, wanted = calls_of(nbytes, on_gpu), sets_wanted(nbytes, ranks_a_card)
    return wanted if wanted <= calls else min(calls, CACHED_SETS)


def sets_wanted(nbytes, ranks_a_card):
    return -(-COLD // (2 * nbytes * ranks_a_card))


def capacities(sets):
    """Bytes of each buffer set, given how many sets each size has: of the largest size that has so many."""
    return [max(nbytes for nbytes in sets if sets[nbytes] > which) for which in range(max(sets.values()))]


class Bench:
    """A context and what all measurements share. Counts follow from sizes and options, so the ranks agree on them."""

    def __init__(self, options):
        self.options, self.dtype = options, DTYPES[options.dtype]
        on_gpu = settled()[0] == "gpu"
        # Before the context exists the number of ranks on a card is not known; these are the most sets for any number.
        most = {nbytes: min(calls_of(nbytes, on_gpu), sets_wanted(nbytes, 1)) for nbytes in options.sizes}
        heap = 2 * sum(capacities(most)) + SLACK["cuda" if on_gpu else "cpu"]
        self.ctx = ctx = iris.iris(heap)
        self.rank, self.world = ctx.get_rank(), ctx.get_num_ranks()
        self.on_gpu = ctx.get_device().type == "cuda"
        self.link = link_of(ctx)
        self.ranks_a_card = -(-self.world // torch.cuda.device_count()) if self.on_gpu else 1
        if ctx.runtime == "loopback":
            self.ranks_a_card = self.world
        ctx.device_barrier()
        _, self.symmetric = peers_here(ctx)
        self.data = Data(self.world, self.dtype, ctx.get_device())
        sets = {nbytes: sets_of(nbytes, self.on_gpu, self.ranks_a_card) for nbytes in options.sizes}
        numels = [nbytes // self.dtype.itemsize for nbytes in capacities(sets)]
        self.buffers = Buffers(ctx, self.data, numels, self.symmetric)
        self.wrong: list[str] = []
        ctx.barrier()

    def say(self, text=""):
        if self.rank == 0:
            print(text, flush=True)

    def hold(self, launches):
        """Keep the GPU busy until the host has issued the launches that follow, the first of them a barrier."""
        torch.cuda._sleep(max(1_000, HOST_US * launches) * CYCLES_A_MICROSECOND)

    def slowest(self, mine):
        """Every sample on the rank where it took longest, for {candidate: {kind: samples}}."""
        everyone = self.ctx.exchange.all_gather("benchmark: samples", mine)
        return {
            name: {kind: [max(each) for each in zip(*(t[name][kind] for t in everyone), strict=True)] for kind in kinds}
            for name, kinds in mine.items()
        }

    def header(self):
        ctx = self.ctx
        machine = torch.cuda.get_device_name() if self.on_gpu else f"{platform.machine()} (interpreter)"
        if ctx.runtime == "loopback":
            where = "loopback: all ranks in one process on one GPU"
        elif self.on_gpu:
            where = f"processes, {self.ranks_a_card} on a GPU"
        else:
            where = f"{ctx.runtime} runtime"
        return (
            f"{self.world} ranks on {machine}, {where}, {ctx.get_cu_count()} compute units a rank; torch "
            f"{torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}; "
            f"{self.options.dtype}; {time.strftime('%Y-%m-%d')}"
        )


def copy_rates(bench):
    """Bytes a second, read and written, of large copies: of all ranks at once, and of rank 0 alone."""
    ctx, repeats = bench.ctx, 4
    source = torch.ones((256 << 20) if bench.on_gpu else 1 << 20, dtype=torch.uint8, device=ctx.get_device())
    target = torch.empty_like(source)
    copy = Candidate("copy", None, False, lambda _: target.copy_(source), lambda _: target, lambda _: target.zero_())
    graph = captured(bench, copy, repeats, 1, "copy") if bench.on_gpu else None
    replay = None if graph is None else graph.replay
    rates = []
    for copying in (range(bench.world), (0,)):
        times = []
        for _ in range(5):
            ctx.barrier()
            if bench.rank in copying:
                times.append(sample(bench, copy.call, repeats, 1, meet=len(copying) > 1, replay=replay))
        everyone = [theirs for theirs in ctx.exchange.all_gather("benchmark: copies", times) if theirs]
        us = statistics.median(max(each) for each in zip(*everyone, strict=True))
        rates.append(len(copying) * 2 * source.numel() / us * 1e6)
    return rates


def sample(bench, call, calls, sets, *, meet=True, replay=None):
    """Microseconds a call of ``calls`` in a row, or of a graph with as many, after the ranks have met."""
    ctx = bench.ctx
    if not bench.on_gpu:
        if meet:
            ctx.barrier()
        begin = time.perf_counter()
        for i in range(calls):
            call(i % sets)
        return (time.perf_counter() - begin) / calls * 1e6
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if replay is not None:
        bench.hold(2)
    if meet:
        ctx.device_barrier()
    start.record()
    if replay is not None:
        replay()
    else:
        for i in range(calls):
            call(i % sets)
    end.record()
    ctx.synchronize()
    return start.elapsed_time(end) / calls * 1e3


def latencies(bench, candidate, calls, sets):
    """Microseconds of single calls, each after a meeting of the ranks, issued beforehand in batches of ``calls``."""
    for which in range(sets):
        candidate.start(which)
    if not bench.on_gpu:
        return [sample(bench, candidate.call, 1, 1) for _ in range(calls)]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    bench.hold(2 * calls)
    for i, (start, end) in enumerate(events):
        bench.ctx.device_barrier()
        start.record()
        candidate.call(i % sets)
        end.record()
    bench.ctx.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def right(bench, operation, candidate: Candidate, numel, sets, label, run):
    """Whether ``run`` works on all ranks and gives the result of the operation in every set; says so if not."""
    ctx, trouble, fault = bench.ctx, None, None
    for which in range(sets):
        candidate.start(which)
    ctx.barrier()
    try:
        run()
        ctx.synchronize()
    except (ArgumentError, UnsupportedError) as error:
        trouble = f"{type(error).__name__}: {error}"
    except RuntimeError as error:
        if not candidate.peer:
            raise
        trouble = f"{type(error).__name__}: {error}".splitlines()[0]
    for which in range(sets) if trouble is None else ():
        have = candidate.result(which)
        fault = bench.data.fault(operation, have, bench.rank, numel, which, often=candidate.peer)
        if fault is not None:
            fault = f"rank {bench.rank}, buffer set {which}, {fault}"
            break
    verdicts = ctx.exchange.all_gather("benchmark: verdicts", (trouble, fault))
    troubles, faults = ([v[kind] for v in verdicts if v[kind] is not None] for kind in (0, 1))
    if faults:
        bench.wrong.append(f"{label}: {faults[0]}")
        bench.say(f"WRONG, not timed: {bench.wrong[-1]}\n")
    elif troubles:
        bench.say(f"Not timed: {label}: {troubles[0]}\n")
    return not faults and not troubles


def captured(bench, candidate, calls, sets, label):
    """A graph of ``calls`` calls, None when a peer cannot be captured. Making one may wait for the whole device."""
    bench.ctx.barrier()
    graph, trouble = torch.cuda.CUDAGraph(), None
    try:
        # The outer `with` restores the stream, which a failed capture does not. NCCL's watchdog thread may query its
        # events meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            for i in range(calls):
                candidate.call(i % sets)
    except RuntimeError as error:
        if not candidate.peer:
            raise
        trouble = str(error).splitlines()[0]
    bench.ctx.barrier()
    troubles = [text for text in bench.ctx.exchange.all_gather("benchmark: capture", trouble) if text is not None]
    if troubles:
        bench.say(f"Not captured in a graph: {label}: {troubles[0]}\n")
    return None if troubles else graph


def measure(bench, operation, nbytes):
    """One row a candidate for one operation and size, and what ``auto`` takes."""
    ctx, options = bench.ctx, bench.options
    # Whole blocks of 16 bytes for each rank.
    block = 16 // bench.dtype.itemsize * bench.world
    numel = nbytes // bench.dtype.itemsize // block * block
    calls, sets = calls_of(nbytes, bench.on_gpu), sets_of(nbytes, bench.on_gpu, bench.ranks_a_card)
    variants = [variant for variant in VARIANTS[operation] if variant in options.variants]
    found, plan = candidates(ctx, operation, variants, options.blocks, options.comm_sms, bench.buffers, numel, sets)
    able, graphs = [], {}
    for candidate in found:
        label = f"{operation}, {candidate.name}, {shown(nbytes)}"

        def run(candidate=candidate):
            for which in range(sets):
                candidate.call(which)

        if not right(bench, operation, candidate, numel, sets, label, run):
            continue
        graph = captured(bench, candidate, calls, sets, label) if bench.on_gpu else None
        if graph is not None:
            graphs[candidate.name] = graph
            # A second call in place adds up sums: right, but not the reference.
            once = candidate.once and calls > sets
            if not once and not right(bench, operation, candidate, numel, sets, f"{label}, graph", graph.replay):
                continue
        able.append(candidate)
    times = {c.name: {"eager": [], **({"graph": []} if c.name in graphs else {})} for c in able}
    for turn in range(samples_of(nbytes, options.samples) + 2):
        for candidate in able:
            for kind in times[candidate.name]:
                for which in range(sets):
                    candidate.start(which)
                replay = graphs[candidate.name].replay if kind == "graph" else None
                us = sample(bench, candidate.call, calls, sets, replay=replay)
                if turn >= 2:
                    times[candidate.name][kind].append(us)
    single = LATENCIES if bench.on_gpu else options.samples
    for batch in range(-(-single // calls) + 1 if nbytes <= SMALL else 0):
        for candidate in able:
            each = latencies(bench, candidate, calls, sets)
            if batch >= 1:
                times[candidate.name].setdefault("single", []).extend(each)
    rows = []
    slowest = bench.slowest(times)
    for candidate in able:
        kinds = slowest[candidate.name]
        row = {"operation": operation, "link": bench.link, "world": bench.world, "bytes": numel * bench.dtype.itemsize}
        row |= {"name": candidate.name, "variant": candidate.variant, "block": candidate.block, "peer": candidate.peer}
        row["sms"] = candidate.sms
        row |= {"calls": calls, "sets": sets}
        row |= {f"{kind}_us": statistics.median(kinds[kind]) for kind in ("graph", "eager") if kind in kinds}
        if "single" in kinds:
            ordered = sorted(kinds["single"])
            row |= {"p50_us": statistics.median(ordered), "p99_us": ordered[math.ceil(0.99 * len(ordered)) - 1]}
        row["median_us"] = row.get("graph_us", row["eager_us"])
        row["samples"] = {kind: [round(us, 3) for us in kinds[kind]] for kind in ("graph", "eager") if kind in kinds}
        rows.append(row)
    ctx.barrier()
    return rows, plan


def main():
    options = arguments()
    bench = Bench(options)
    bench.say(bench.header() + "\n")
    if not bench.on_gpu:
        bench.say("Kernels run in the interpreter: the times mean nothing, only the results do.\n")
    if bench.ctx.runtime in ("loopback", "sim"):
        bench.say("PyTorch's own collectives need a process for each rank and are left out.\n")
    copies = copy_rates(bench)
    bench.say(
        f"Copies, read and written: {copies[0] / 1e12:.3f} TB/s by all ranks together, {copies[1] / 1e12:.3f} TB/s by "
        "one rank alone.\n"
    )
    everything = []
    for operation in options.ops:
        sizes = []
        for op in absent(operation) if bench.symmetric else ():
            bench.say(f"This torch has no torch.ops.symm_mem.{op}: one peer less.\n")
        for nbytes in options.sizes:
            rows, plan = measure(bench, operation, nbytes)
            for row in rows:
                if row["variant"] == "auto":
                    row["algorithm"] = plan.algorithm
            cold = 2 * nbytes * bench.ranks_a_card * sets_of(nbytes, bench.on_gpu, bench.ranks_a_card) >= COLD
            bench.say(table(operation, nbytes, rows, plan, copies, cold))
            sizes.append(rows)
            everything += rows
            if options.json and bench.rank == 0:
                with open(options.json, "w") as file:
                    record = {"machine": bench.header(), "command": sys.argv, "copies": copies, "rows": everything}
                    json.dump(record, file, indent=1)
        bench.say(summary(operation, sizes))
    bench.ctx.barrier()
    if bench.wrong:
        raise WrongResult("; ".join(bench.wrong))


if __name__ == "__main__":
    main()
