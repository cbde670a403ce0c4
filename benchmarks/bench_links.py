"""What the links between ranks carry: puts and gets by kernels and by the copy engine, and round trips of a flag.

    python benchmarks/bench_links.py --benchmark_out links.json
    python benchmarks/bench_links.py --axis_num_ranks=2 --axis_nbytes=pow2:20:30 --axis_by=32,all,copy_engine
    iris run --sim -n 2 benchmarks/bench_links.py --axis_nbytes=65536 --axis_by=2,copy_engine --axis_trips=32

``bandwidth``: every rank puts to, or gets from, its next neighbour (``both``: with two ranks, both directions at once),
or rank 0 alone does (``one``). ``by`` is how many programs a kernel has, ``all`` for one a compute unit, or
``copy_engine`` for a copy of PyTorch between the ranks' memories. ``BW`` is what one rank moves in one direction. Every
byte is compared with what the source held before anything is timed.

``round_trip``: ranks 0 and 1 send a flag back and forth in one kernel, ``iris.device.signal`` on both sides; with
``flag+data`` each flag follows 128 bytes, which the receiver adds up. ``round trip us`` is the median over batches of
trips, by the clock of rank 0's GPU.
"""

from __future__ import annotations

import weakref

import torch
import triton
import triton.language as tl

import iris
from iris import bench
from iris.device import _asm, signal

BLOCK = 16384  # elements that a program moves at a time: 64 KiB in flight
THREADS = 1024
SENTINEL = -(2**31)  # what targets hold before; no source does
LINE = 32  # int32 elements that go with a flag
BATCH = 32  # trips between two looks at the clock, which may tick once a microsecond only
ENGINE = "copy_engine"


@triton.jit
def put_kernel(target, source, numel, rank: tl.constexpr, peer, heap_bases, BLOCK: tl.constexpr):
    """``target[i] = source[i]``, the target on rank ``peer``."""
    for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        iris.put(source + offs, target + offs, rank, peer, heap_bases, mask=offs < numel)


@triton.jit
def get_kernel(target, source, numel, rank: tl.constexpr, peer, heap_bases, BLOCK: tl.constexpr):
    """``target[i] = source[i]``, the source on rank ``peer``."""
    for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        iris.get(source + offs, target + offs, rank, peer, heap_bases, mask=offs < numel)


@triton.jit(do_not_specialize=["base"])
def ping_pong_kernel(
    context, flag, inbox, seen, times, base, trips, rank: tl.constexpr, DATA: tl.constexpr, BATCH: tl.constexpr
):
    """``trips`` round trips between ranks 0 and 1; the flags go from ``base`` to ``base + trips``.

    Rank 0 sends trip t and waits for the answer, rank 1 waits for trip t and answers. A line of data is written before
    its flag, and not again before the flag that the receiver sends after it has read it. Two lines take turns all the
    same, so that a flag that overtakes its data shows in the sum.

    Args:
        context: of ``ctx.get_device_context()``.
        flag: int32, on the heap.
        inbox: int32[2, 32], on the heap.
        seen: int32[33]: sum of the lines that were received, and how many waits ended as they should.
        times: int64[trips // BATCH + 1], rank 0's clock after each batch.
        base: of the flags of this call; a multiple of BATCH.
        trips: a multiple of BATCH.
    """
    peer = 1 - rank
    offs = tl.arange(0, 32)
    total = tl.zeros((32,), tl.int32)
    arrived = tl.zeros((1,), tl.int32)
    for batch in range(trips // BATCH):
        if rank == 0:
            tl.store(times + batch, _asm.ticks())
        for step in range(BATCH):
            trip = base + batch * BATCH + step + 1
            line = inbox + (trip % 2) * 32 + offs
            if rank == 0:
                if DATA:
                    iris.store(line, trip * 64 + offs, rank, peer, context + 2)
                signal.notify(flag, trip, rank, peer, context + 2)
            arrived += signal.wait(flag, trip, context, peer)
            if DATA:
                total += tl.load(line, volatile=True)
            if rank == 1:
                if DATA:
                    iris.store(line, trip * 64 + 32 + offs, rank, peer, context + 2)
                signal.notify(flag, trip, rank, peer, context + 2)
    if rank == 0:
        tl.store(times + trips // BATCH, _asm.ticks())
    tl.store(seen + offs, total)
    tl.store(seen + 32 + tl.arange(0, 1), arrived)


def warps(ctx):
    return THREADS // ctx.target.warp_size


def random_words(ctx, numel, rank):
    """Random int32, a rank's own. Made on the device, since 1 GiB of them takes the host many seconds."""
    generator = torch.Generator(ctx.get_device()).manual_seed(1000 + rank)
    return torch.randint(
        SENTINEL + 1, 2**31 - 1, (numel,), dtype=torch.int32, device=ctx.get_device(), generator=generator
    )


class Buffers:
    """A source and a target on the heap, and what the source of the rank holds that this rank receives from."""

    def __init__(self, ctx, numel):
        rank, world = ctx.get_rank(), ctx.get_num_ranks()
        self.source = ctx.as_symmetric(random_words(ctx, numel, rank))
        self.target = ctx.empty(numel, dtype=torch.int32)
        self.words = {r: random_words(ctx, numel, r) for r in {(rank + 1) % world, (rank - 1) % world}}


_latest: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def buffers_of(ctx, numel):
    """The buffers of a size, which all combinations of that size share. Collective."""
    if ctx not in _latest or _latest[ctx].source.numel() != numel:
        _latest.pop(ctx, None)
        _latest[ctx] = Buffers(ctx, numel)
    return _latest[ctx]


@bench.register
@bench.axis("num_ranks", [2])
@bench.axis("nbytes", [1 << 20, 1 << 24, 1 << 28, 1 << 30])
@bench.axis("direction", ["one", "both"])
@bench.axis("way", ["put", "get"])
@bench.axis("by", ["4", "8", "16", "32", "all", ENGINE], alternate=True, baseline=ENGINE)
def bandwidth(state, ctx):
    """Every rank, or rank 0 alone, moves bytes to or from its next neighbour."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    direction, way, by = state["direction"], state["way"], state["by"]
    if world == 1:
        state.skip("a rank alone has no link")
    if direction not in ("one", "both") or way not in ("put", "get"):
        state.skip(f"direction={direction} way={way} is not known; possible: one, both; put, get")
    if by not in ("all", ENGINE) and not (by.isdecimal() and int(by) > 0):
        state.skip(f"by={by} is not known; possible: a number of programs, all, {ENGINE}")
    numel = state["nbytes"] // 4
    work, peer = buffers_of(ctx, numel), (rank + 1) % world
    acting = range(world) if direction == "both" else (0,)
    # Who receives, and from whom: a put goes to the next rank, a get comes from it.
    sender = (rank - 1) % world if way == "put" else peer
    receives = (sender if way == "put" else rank) in acting
    expected = work.words[sender]

    def wrong():
        """How many words are not what they must be: the sender's, or where nothing arrives what was there before."""
        want = expected if receives else torch.full_like(work.target, SENTINEL)
        return (work.target != want).sum().cpu()

    def move():
        if rank not in acting:
            return
        if by == ENGINE:
            if way == "put":
                ctx.heap.on_peer(work.target, peer).copy_(work.source)
            else:
                work.target.copy_(ctx.heap.on_peer(work.source, peer))
            return
        kernel = put_kernel if way == "put" else get_kernel
        grid = (ctx.get_cu_count() if by == "all" else int(by),)
        options = {"num_warps": warps(ctx)} if ctx.target.compiled else {}
        kernel[grid](work.target, work.source, numel, rank, peer, ctx.get_heap_bases(), BLOCK=BLOCK, **options)

    state.set_bytes(4 * numel)
    state.set_timed_ranks(list(acting))
    if ctx.target.compiled:
        state.set_warmup(3)
        state.set_repeat(15)
    state.validate(wrong, torch.zeros((), dtype=torch.int64), bitwise=True)
    state.exec(move, preamble_fn=lambda: work.target.fill_(SENTINEL))


class PingPong:
    """Flags, lines and counters of the round trips, and calls of the kernel. Construction is collective."""

    def __init__(self, ctx, trips, data):
        self.ctx, self.trips, self.data, self.base = ctx, trips, data, 0
        self.flag, self.inbox = ctx.zeros(32, dtype=torch.int32), ctx.zeros(2 * LINE, dtype=torch.int32)
        self.seen = torch.zeros(LINE + 1, dtype=torch.int32, device=ctx.get_device())
        self.times = torch.zeros(trips // BATCH + 1, dtype=torch.int64, device=ctx.get_device())
        ctx.barrier()

    def __call__(self):
        rank = self.ctx.get_rank()
        if rank < 2:
            options = {"num_warps": 1} if self.ctx.target.compiled else {}
            context, tensors = self.ctx.get_device_context(), (self.flag, self.inbox, self.seen, self.times)
            ping_pong_kernel[(1,)](context, *tensors, self.base, self.trips, rank, self.data, BATCH, **options)
        self.base += self.trips

    def result(self):
        """What the last call left: sums, waits that ended as they should, the flag."""
        return torch.cat([self.seen.cpu(), self.flag[:1].cpu()])

    def expected(self):
        """What it must have left, in integers."""
        rank = self.ctx.get_rank()
        trips = torch.arange(self.base - self.trips + 1, self.base + 1, dtype=torch.int64)
        sums = (trips[:, None] * 64 + (32 if rank == 0 else 0) + torch.arange(LINE)).sum(0) * self.data
        # As int32 wraps.
        sums = (sums + 2**31) % 2**32 - 2**31
        want = torch.cat([sums, torch.tensor([self.trips, self.base])])
        # Ranks that have no part keep what was there.
        return (want if rank < 2 else torch.tensor([0] * LINE + [7, 0])).to(torch.int32)

    def start(self):
        """Put counters into the state before a call."""
        self.seen.zero_()
        self.seen[LINE] = 7

    def microseconds(self):
        """Of a round trip, each batch of the last call, on rank 0's clock."""
        # NVIDIA's clock ticks in ns, AMD's in 10 ns; see signal's time limit for the same fact on the device.
        ns = 10 if self.ctx.target.vendor == "amd" else 1
        return (self.times.diff().cpu().double() * ns / 1e3 / BATCH).sort().values


@bench.register
@bench.axis("num_ranks", [2])
@bench.axis("payload", ["flag", "flag+data"])
@bench.axis("trips", [4096])
def round_trip(state, ctx):
    """A flag goes from rank 0 to rank 1 and back, many times in one kernel."""
    trips, payload = state["trips"], state["payload"]
    if ctx.get_num_ranks() == 1:
        state.skip("a rank alone has no link")
    if payload not in ("flag", "flag+data") or trips < BATCH or trips % BATCH:
        state.skip(f"payload={payload} trips={trips}; possible: flag, flag+data; multiples of {BATCH}")
    play = PingPong(ctx, trips, payload == "flag+data")
    for _ in range(2):  # the first one compiles
        play()
        ctx.barrier()
    if ctx.get_rank() == 0:
        each = play.microseconds()
        state.add_counter("round trip us", float(each.median()))
        state.add_counter("fastest us", float(each[0]))
        state.add_counter("slowest batch us", float(each[-1]))
    state.set_timed_ranks([0, 1])
    if ctx.target.compiled:
        state.set_warmup(2)
        state.set_repeat(10)
    state.add_note(f"ranks 0 and 1; the time is that of {trips} round trips in one kernel")
    state.validate(play.result, play.expected, bitwise=True)
    state.exec(play, preamble_fn=play.start)


if __name__ == "__main__":
    bench.main()
