"""all_gather_matmul on a machine that is not there: the time that the simulator's cost model predicts for its kernel
with a staging buffer, beside what was published for upstream's kernel of the same name.

    python benchmarks/predict_all_gather_matmul.py --machine mi325x --ranks 2,4,8 --m 1024,4096,16384
    python benchmarks/predict_all_gather_matmul.py --ranks 2 --m 256 --interpret

``iris.sim.predict`` interprets every statement of a kernel, about 4 ms for a block of K, of which a product of this
size has a million. So the kernel's accesses, products, flags and counters are told to the same cost model
(:class:`iris.sim.virtual_time.VirtualTime`) without the values: every program of every rank, every block of K, at full
size, in the order of virtual time. Who does what comes from the library: the numbers of the launch from
``iris.ops._hbm_buffer``, the order of pieces, blocks and tiles from ``iris.x.schedule``. What is written down a second
time is the control flow of the kernel, in :class:`Program`.

``--interpret`` also runs the kernel itself under ``iris.sim.predict``. To take minutes, not hours, every size of
problem and tile is divided by 4 there, every rate of bytes by 16 and that of products by 64, which leaves the number of
tiles and blocks and the time of each as they are, but not how much a fetcher reads at once. So the same is told, too,
and these two are to be compared.
"""

from __future__ import annotations

import argparse
import heapq
import os
import platform
import random
import statistics
import time
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("IRIS_RUNTIME", "sim")

import torch
import triton
import triton.language as tl

import iris
from iris._machine import Machine, by_name, names
from iris._target import INTERPRETER, KNOWN
from iris.ops._hbm_buffer import Schedule, schedule
from iris.ops.arguments import Problem
from iris.ops.config import HbmBufferConfig
from iris.sim.virtual_time import VirtualTime
from iris.x.schedule import fetched_piece, gathered_block, piece_flag, staged_tile, turn_start

# Milliseconds by ranks and rows of A: fp16, N=3584, K=8192, on 8x MI325X, with tiles of 128x256x64, 16 blocks a flag,
# 32 fetchers and 256 for the first stage.
PUBLISHED = {
    "mi325x": {
        (2, 1024): 0.467, (2, 4096): 1.396, (2, 16384): 8.155,
        (4, 1024): 0.455, (4, 4096): 1.032, (4, 16384): 6.224,
        (8, 1024): 0.568, (8, 4096): 1.155, (8, 16384): 6.279,
    }
}  # fmt: skip
PUBLISHED_SIZES = (3584, 8192)
CONFIG = HbmBufferConfig(
    128, 256, 64, k_per_flag=16, num_fetch_sms=32, first_stage_fetch_sms=256, num_warps=8, num_stages=2
)
FP16 = 2
WINDOW_NS = 200.0  # programs whose clocks are no further apart go on in any order, as in the simulator
SCALE = 4  # of --interpret


@triton.jit
def pieces_kernel(out, count, tiles_m, groups, parts, STAGE_M: tl.constexpr, BLOCK: tl.constexpr):
    """Part, row of tiles, group and flag of every piece that is fetched."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = item < count
    part, row, group = fetched_piece(tl.where(inside, item, 0), tiles_m, groups, parts, STAGE_M, True)
    tl.store(out + item, part, mask=inside)
    tl.store(out + count + item, row, mask=inside)
    tl.store(out + 2 * count + item, group, mask=inside)
    tl.store(out + 3 * count + item, piece_flag(part, row, group, tiles_m, groups, parts, True), mask=inside)


@triton.jit
def blocks_kernel(out, count, blocks, parts, K_PER_FLAG: tl.constexpr, BLOCK: tl.constexpr):
    """Turn, part and block of every block of K that a tile goes through, and where the turn of that number begins."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    turn, part, block = gathered_block(tl.where(inside, position, 0), blocks, parts, K_PER_FLAG)
    tl.store(out + position, turn, mask=inside)
    tl.store(out + count + position, part, mask=inside)
    tl.store(out + 2 * count + position, block, mask=inside)
    tl.store(out + 3 * count + position, turn_start(position, blocks, parts, K_PER_FLAG), mask=inside)


@triton.jit
def tiles_kernel(out, count, tiles_m, tiles_n, STAGE_M: tl.constexpr, GROUP_M: tl.constexpr, BLOCK: tl.constexpr):
    """Row and column of every tile of the output."""
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tile < count
    row, column = staged_tile(tl.where(inside, tile, 0), tiles_m, tiles_n, STAGE_M, GROUP_M)
    tl.store(out + tile, row, mask=inside)
    tl.store(out + count + tile, column, mask=inside)


def table(kernel: Any, columns: int, count: int, *args: int, **constants: int) -> list[tuple[int, ...]]:
    """What the kernel says of 0 to ``count - 1``."""
    out = torch.zeros((columns, count), dtype=torch.int32)
    if count:
        block = min(triton.next_power_of_2(count), 1 << 16)
        kernel[(triton.cdiv(count, block),)](out, count, *args, **constants, BLOCK=block)
    return list(zip(*out.tolist(), strict=True))


@dataclass
class Rank:
    """What the programs of a rank share."""

    rank: int
    started: int = 0
    roles: int = 0
    fetches: int = 0
    work: int = 0
    fetched: int = 0
    ended: int = 0
    flags: set[Flag] = field(default_factory=set)  # those that are set
    waiting: dict[Flag, list[Program]] = field(default_factory=dict)


class Replay:
    """One call of the kernel on all ranks, told to virtual time. A is sharded along K, operands are fp16.

    ``seed`` decides between programs whose clocks are close, and ``target`` is what the launch is made for, by default
    the machine.
    """

    def __init__(
        self, machine: Machine, world_size: int, M: int, N: int, K: int, config: HbmBufferConfig, seed: int = 0,
        target: Any = None,
    ):  # fmt: skip
        self.machine, self.world, self.config = machine, world_size, config
        self.M, self.N, self.depth = M, N, K // world_size
        self.time = VirtualTime(machine, world_size)
        # What the numbers of a launch depend on.
        target = target or KNOWN[machine.name]
        ctx: Any = SimpleNamespace(get_cu_count=lambda: machine.compute_units, target=target, runtime="gpu", gpu_id=0)
        problem = Problem(M, N, K, *(torch.float16,) * 3, world_size, 1, None, "NN")
        a, b = (torch.empty(size, dtype=torch.float16, device="meta") for size in ((M, self.depth), (K, N)))
        s: Schedule = schedule(ctx, problem, config, a, b)
        self.s, self.parts = s, world_size - 1
        tiles_m, tiles_n = triton.cdiv(M, config.block_size_m), triton.cdiv(N, config.block_size_n)
        blocks, parts = triton.cdiv(self.depth, config.block_size_k), self.parts
        self.blocks, self.turns = blocks, triton.cdiv(blocks, s.k_per_flag) * parts
        self.pieces = table(
            pieces_kernel, 4, tiles_m * self.turns, tiles_m, triton.cdiv(blocks, s.k_per_flag), parts,
            STAGE_M=s.stage_rows,
        )  # fmt: skip
        self.positions = table(blocks_kernel, 4, blocks * parts, blocks, parts, K_PER_FLAG=s.k_per_flag)
        self.turn_starts = [start for *_, start in self.positions[: self.turns]] + [blocks * parts]
        self.tiles = table(
            tiles_kernel, 2, tiles_m * tiles_n, tiles_m, tiles_n, STAGE_M=s.stage_rows, GROUP_M=config.group_size_m
        )
        self.ranks = [Rank(rank) for rank in range(world_size)]
        self.ready: list[tuple[float, float, int, Program]] = []
        self.random = random.Random(seed)  # decides between programs whose clocks are close
        self.entered = 0
        self.waits = 0
        # Where in the memory of a rank things begin, far from each other.
        self.a, self.staged, self.b, self.out, self.sums, self.words, self.flag_words = (i << 40 for i in range(1, 8))

    def run(self) -> float:
        """Nanoseconds from the start of a rank's first program to the end of its last, on the slowest rank."""
        for rank in range(self.world):
            self.time.launch_issued(rank, rank, 0, "hbm_buffer_kernel", self.s.grid)
        programs = [Program(self, rank, index) for index in range(self.s.grid) for rank in range(self.world)]
        for program in programs:
            self.resume_at(self.time.program_started(program, program.rank, program.index), program)
        while self.ready:
            *_, program = heapq.heappop(self.ready)
            try:
                flag = next(program.steps)
            except StopIteration:
                self.time.program_ended(program)
                continue
            if flag is None:
                self.resume_at(self.time.now(program) + program.looked_ns, program)
            else:
                self.ranks[program.rank].waiting.setdefault(flag, []).append(program)
        left = [flag for rank in self.ranks for flag in rank.waiting]
        if left:
            raise RuntimeError(f"programs wait for {len(left)} flags that nobody sets, the first is {left[0]}")
        ends = [self.time.launch_ended(rank) for rank in range(self.world)]
        return max(end - launch.start_ns for end, launch in zip(ends, self.time.launches, strict=True))

    def resume_at(self, ns: float, program: Program) -> None:
        self.entered += 1
        heapq.heappush(self.ready, (ns // WINDOW_NS, self.random.random(), self.entered, program))


class Program:
    """A program of the kernel. Its steps give None where it gives way to earlier programs, and a flag to wait for."""

    def __init__(self, replay: Replay, rank: int, index: int):
        self.replay, self.rank, self.index = replay, rank, index
        self.time, self.mine = replay.time, replay.ranks[rank]
        self.home = rank << 50  # of its rank's addresses
        self.looked_ns = 0.0  # of looks that are not over
        self.everything = False  # whether all pieces have come, as far as it has seen
        self.steps = self.kernel()

    def small_load(self) -> None:
        self.time.transfer(self, self.rank, 4, False, "", address=self.home + self.replay.words)

    def counter(self, name: str) -> Steps:
        """Add 1 to a counter of the rank; returns the number before."""
        yield None
        self.time.atomic(self, self.rank, "")
        self.time.released(self, self.address(self.rank, (name, 0)), owner=self.rank)
        before = getattr(self.mine, name)
        setattr(self.mine, name, before + 1)
        return before

    def set_flag(self, owner: int, flag: Flag) -> Steps:
        yield None
        self.time.atomic(self, owner, "")
        address = self.address(owner, flag)
        self.time.released(self, address, owner=owner)
        theirs = self.replay.ranks[owner]
        theirs.flags.add(flag)
        release = self.time.last_release(address)
        assert release is not None
        for program in theirs.waiting.pop(flag, ()):
            self.replay.resume_at(release.visible_ns, program)

    def wait(self, flag: Flag) -> Steps:
        yield None
        if flag not in self.mine.flags:
            # Not at once: the address of the error slot and the time limit are read before the polling.
            self.looked([flag])
            self.small_load()
            yield None
            if flag not in self.mine.flags:
                yield flag
        self.looked([flag])

    def looked(self, flags: list[Flag]) -> None:
        """The end of a look at flags: it took an access, or until what it saw was visible."""
        releases = [self.time.last_release(self.address(self.rank, flag)) for flag in flags]
        latest = max((r for r in releases if r is not None), key=lambda r: r.visible_ns, default=None)
        if latest is not None and latest.visible_ns > self.time.now(self) + self.replay.machine.local_latency_ns:
            self.time.waited(self, self.address(self.rank, flags[0]), "", release=latest)
        else:
            self.time.atomic(self, self.rank, "")

    def address(self, rank: int, flag: Flag) -> int:
        kind, number = flag
        return (rank << 50) + self.replay.flag_words + (KINDS.index(kind) << 32) + 4 * number

    def kernel(self) -> Steps:
        """``hbm_buffer_kernel`` and ``begin_turn``."""
        replay, s, world = self.replay, self.replay.s, self.replay.world
        self.small_load()
        if world > 1:
            if (yield from self.counter("started")) == 0:
                yield from self.tell_peers("ready")
            self.small_load()
            role = yield from self.counter("roles")
            if role < max(s.fetchers, s.first_fetchers):
                yield from self.fetch(role)
        count = s.whole + (len(replay.tiles) - s.whole) * s.splits
        item = yield from self.counter("work")
        while item < count:
            if item < s.whole:
                item = yield from self.multiply(item, 0, 1)
            else:
                later = item - s.whole
                item = yield from self.multiply(s.whole + later // s.splits, later % s.splits, s.splits)
        yield from self.end_turn()

    def tell_peers(self, kind: str) -> Steps:
        for step in range(1, self.replay.world):
            self.small_load()
            yield from self.set_flag((self.rank + step) % self.replay.world, (kind, self.rank))

    def end_turn(self) -> Steps:
        self.small_load()
        if (yield from self.counter("ended")) == self.replay.s.grid - 1 and self.replay.world > 1:
            yield from self.tell_peers("consumed")
            for step in range(1, self.replay.world):
                self.small_load()
                yield from self.wait(("consumed", (self.rank + step) % self.replay.world))

    def fetch(self, role: int) -> Steps:
        """``_fetch``."""
        replay, s, pieces = self.replay, self.replay.s, self.replay.pieces
        of_first_stage = s.stage_rows * replay.turns
        known: set[int] = set()
        self.small_load()
        item = yield from self.counter("fetches")
        if item < len(pieces):
            yield from self.may_read(pieces[item][0], known)
            chunks = self.chunks(item)
            self.load_chunk(chunks[0])
        while item < len(pieces):
            following = len(pieces)
            if role < s.fetchers or item < of_first_stage:
                following = yield from self.counter("fetches")
            for number in range(1, len(chunks)):
                self.load_chunk(chunks[number])
                self.store_chunk(chunks[number - 1])
            last = chunks[-1]
            if following < len(pieces):
                yield from self.may_read(pieces[following][0], known)
                chunks = self.chunks(following)
                self.load_chunk(chunks[0])
            self.store_chunk(last)
            yield from self.set_flag(self.rank, ("piece", pieces[item][3]))
            yield from self.counter("fetched")
            item = following

    def may_read(self, part: int, known: set[int]) -> Steps:
        """Wait until the owner of a part has said that it may be read; ``known`` are the parts of which it is."""
        self.small_load()
        if part not in known:
            self.small_load()
            yield from self.wait(("ready", (self.rank + 1 + part) % self.replay.world))
            known.add(part)

    def chunks(self, item: int) -> list[Chunk]:
        """What a piece is fetched in."""
        replay, s, config = self.replay, self.replay.s, self.replay.config
        part, row, group, _ = replay.pieces[item]
        peer = (self.rank + 1 + part) % replay.world
        first_row = row * config.block_size_m
        rows = min(replay.M - first_row, config.block_size_m)
        first = group * s.k_per_flag * config.block_size_k
        last = min(first + s.k_per_flag * config.block_size_k, replay.depth)
        source = (peer << 50) + replay.a + first_row * replay.depth * FP16
        target = self.home + replay.staged + (part * s.part_stride + first_row * s.row_stride) * FP16
        return [
            (peer, rows * min(s.fetch_k, last - k) * FP16, source + k * FP16, target + k * s.column_stride * FP16)
            for k in range(first, last, s.fetch_k)
        ]

    def load_chunk(self, chunk: Chunk) -> None:
        peer, nbytes, source, _ = chunk
        self.time.transfer(self, peer, nbytes, False, "", address=source)

    def store_chunk(self, chunk: Chunk) -> None:
        _, nbytes, _, target = chunk
        self.time.transfer(self, self.rank, nbytes, True, "", address=target)

    def multiply(self, tile: int, piece: int, pieces: int) -> Steps:
        """One piece of work on a tile of the output; returns the number of the next."""
        replay, s, config = self.replay, self.replay.s, self.replay.config
        row, column = replay.tiles[tile]
        own = replay.blocks
        total = own * replay.world
        first, last = total * piece * 15 // (pieces * 16), total * (piece + 1) * 15 // (pieces * 16)
        if piece == pieces - 1:
            last = total
        for block in range(min(first, own), min(last, own)):
            self.multiply_block(row, column, block, -1)
        position, end = max(first - own, 0), max(last - own, 0)
        while position < end:
            until = yield from self.come(row, position, end)
            for i in range(position, until):
                _, part, block, _ = replay.positions[i]
                self.multiply_block(row, column, block, (part + row) % replay.parts)
            position = until
        area = config.block_size_m * config.block_size_n
        sums = (tile - s.whole) * (pieces - 1)
        if piece < pieces - 1:
            address = self.home + replay.sums + (sums + piece) * area * 4
            self.time.transfer(self, self.rank, area * 4, True, "", address=address)
            yield from self.set_flag(self.rank, ("partial", sums + piece))
            return (yield from self.counter("work"))
        for other in range(pieces - 1):
            yield from self.wait(("partial", sums + other))
        following = yield from self.counter("work")
        self.finish(row, column, sums, pieces - 1)
        return following

    def come(self, row: int, position: int, end: int) -> Steps:
        """Wait for the next of the groups that a tile needs; returns up to which block they have come."""
        replay = self.replay
        looks: list[list[Flag]] = []
        come, turn = AHEAD, replay.positions[position][0]
        if not self.everything:
            yield None
            self.everything = self.mine.fetched == len(replay.pieces)
            looks.append([("fetched", 0)])
            if not self.everything:
                flags = [("piece", row * replay.turns + min(turn + lane, replay.turns - 1)) for lane in range(AHEAD)]
                self.looked_ns = replay.machine.local_latency_ns
                yield None
                self.looked_ns = 0.0
                come = next((lane for lane, flag in enumerate(flags) if flag not in self.mine.flags), AHEAD)
                looks.append(flags)
            for look in looks:
                self.looked(look)
            if come == 0:
                come = 1
                self.small_load()
                replay.waits += 1
                yield from self.wait(flags[0])
        return end if self.everything else min(replay.turn_starts[min(turn + come, replay.turns)], end)

    def finish(self, row: int, column: int, sums: int, count: int) -> None:
        """``_finish``, by halves where the tile is wide."""
        replay, config = self.replay, self.replay.config
        m, n = config.block_size_m, config.block_size_n
        top, left, width = row * m, column * n, n // 2 if n >= 256 else n
        for first in range(0, n, width):
            for other in range(count):
                address = self.home + replay.sums + ((sums + other) * m * n + first) * 4
                self.time.transfer(self, self.rank, m * width * 4, False, "", address=address)
            nbytes = min(m, replay.M - top) * max(0, min(width, replay.N - left - first)) * FP16
            address = self.home + replay.out + (top * replay.N + left + first) * FP16
            self.time.transfer(self, self.rank, nbytes, True, "", address=address)

    def multiply_block(self, row: int, column: int, block: int, part: int) -> None:
        """A block of K of ``multiply_blocks``: of the own shard with part -1, else of that part of the buffer."""
        replay, s, config = self.replay, self.replay.s, self.replay.config
        m, n, k = config.block_size_m, config.block_size_n, config.block_size_k
        depth = min(k, replay.depth - block * k)
        if part < 0:
            a = replay.a + (row * m * replay.depth + block * k) * FP16
        else:
            a = replay.staged + (part * s.part_stride + row * m * s.row_stride + block * k * s.column_stride) * FP16
        b_row = (self.rank + 1 + part) % replay.world * replay.depth + block * k
        b = replay.b + (b_row * replay.N + column * n) * FP16
        transfer, nbytes = self.time.transfer, depth * FP16
        transfer(self, self.rank, min(m, replay.M - row * m) * nbytes, False, "", address=self.home + a)
        transfer(self, self.rank, min(n, replay.N - column * n) * nbytes, False, "", address=self.home + b)
        self.time.dot(self, m, n, k, "fp16")


Flag = tuple[str, int]
Chunk = tuple[int, int, int, int]  # peer, bytes, where it is read and where it is written
Steps = Generator[Flag | None, None, Any]
# Of flags, and counters of a rank.
KINDS = ("ready", "consumed", "piece", "partial", "started", "roles", "fetches", "fetched", "work", "ended")
AHEAD = 32  # flags that a program looks at together


def body(ctx: Any, M: int, N: int, K: int, config: HbmBufferConfig) -> None:
    a = ctx.zeros(M, K // ctx.get_num_ranks(), dtype=torch.float16)
    b = torch.zeros(K, N, dtype=torch.float16)
    ctx.ops.all_gather_matmul(torch.zeros(M, N, dtype=torch.float16), a, b, algorithm="hbm_buffer", config=config)
    ctx.synchronize()


def divided(
    machine: Machine, sizes: tuple[int, int, int], config: HbmBufferConfig, scale: int
) -> tuple[Machine, tuple[int, int, int], HbmBufferConfig]:
    """All sizes divided by ``scale``, and the rates of the machine such that a tile takes as long."""
    rates = {
        name: getattr(machine, name) / scale**2
        for name in (
            "memory_bytes_per_s", "cache_bytes_per_s", "link_peer_bytes_per_s", "link_total_bytes_per_s",
            "program_local_bytes_per_s", "program_remote_bytes_per_s", "program_remote_bulk_bytes_per_s",
        )
    }  # fmt: skip
    slower = replace(
        machine,
        **rates,
        cache_bytes=machine.cache_bytes // scale**2,
        matrix_flops_per_s={dtype: rate / scale**3 for dtype, rate in machine.matrix_flops_per_s.items()},
        matrix_tile=tuple(max(1, size // scale) for size in machine.matrix_tile),
    )
    tiles = {name: getattr(config, name) // scale for name in ("block_size_m", "block_size_n", "block_size_k")}
    M, N, K = (size // scale for size in sizes)
    return slower, (M, N, K), replace(config, **tiles)


def interpreted(
    machine: Machine, world_size: int, sizes: tuple[int, int, int], config: HbmBufferConfig, seed: int = 0
) -> float:
    """Nanoseconds as :meth:`Replay.run`, of the kernel itself."""
    prediction = iris.sim.predict(body, world_size, *sizes, config, device=machine, seed=seed)
    return prediction.summary.kernel_ns["hbm_buffer_kernel"]


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--machine", default="mi325x", choices=sorted(names()))
    parser.add_argument("--ranks", type=numbers, default=[2, 4, 8], help="a list")
    parser.add_argument("--m", type=numbers, default=[1024, 4096, 16384], help="rows of A, a list")
    parser.add_argument("--n", type=int, default=PUBLISHED_SIZES[0], help="columns of B")
    parser.add_argument("--k", type=int, default=PUBLISHED_SIZES[1], help="columns of A over all ranks")
    parser.add_argument("--seeds", type=int, default=3, help="predictions to take the median of")
    parser.add_argument("--interpret", action="store_true", help=f"also run the kernel itself, all sizes / {SCALE}")
    for name in CONFIGURABLE:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(CONFIG, name))
    return parser.parse_args()


CONFIGURABLE = (
    "block_size_m", "block_size_n", "block_size_k", "group_size_m", "k_per_flag", "num_fetch_sms", "num_fetch_stages",
    "first_stage_fetch_sms",
)  # fmt: skip


def main() -> None:
    options = arguments()
    machine = by_name(options.machine)
    config = replace(CONFIG, **{name: getattr(options, name) for name in CONFIGURABLE})
    print(f"Predicted (cost model {machine.name}, not measured): fp16, N={options.n}, K={options.k}, {config}")
    print(f"Python {platform.python_version()}, Triton {triton.__version__}; {time.strftime('%Y-%m-%d')}\n")
    columns = ["ranks", "M", "predicted ms", "over seeds", "published ms, upstream's kernel", "error", "took s"]
    if options.interpret:
        columns[4:4] = [f"told / {SCALE} ms", f"interpreted / {SCALE} ms"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|", flush=True)
    same = (options.n, options.k) == PUBLISHED_SIZES
    for ranks in options.ranks:
        for rows in options.m:
            started = time.perf_counter()
            sizes = (rows, options.n, options.k)
            runs = [Replay(machine, ranks, *sizes, config, seed).run() / 1e6 for seed in range(options.seeds)]
            ms = statistics.median(runs)
            took = time.perf_counter() - started
            known = PUBLISHED.get(machine.name, {}).get((ranks, rows)) if same and config == CONFIG else None
            cells = [ranks, rows, f"{ms:.3f}", f"{min(runs):.3f} to {max(runs):.3f}"]
            if options.interpret:
                slower, fewer, smaller = divided(machine, sizes, config, SCALE)
                told = [
                    Replay(slower, ranks, *fewer, smaller, seed, INTERPRETER).run() for seed in range(options.seeds)
                ]
                cells.append(f"{statistics.median(told) / 1e6:.3f}")
                cells.append(f"{interpreted(slower, ranks, fewer, smaller) / 1e6:.3f}")
            cells += [f"{known:.3f}", f"{(ms / known - 1) * 100:+.0f} %"] if known else ["", ""]
            print(f"| {' | '.join(map(str, cells))} | {took:.0f} |", flush=True)


if __name__ == "__main__":
    main()
