"""What bench_concurrent.py times: the tensors of a product and of a collective beside it, and the library's ways."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _ways import (
    CHECKED_AT_ONCE,
    SAMPLED_COLUMNS,
    SAMPLED_ROWS,
    Compared,
    Way,
    gib,
    memory_beside_heap,
    random_on_device,
    spread,
)

from iris.concurrent import autotune
from iris.concurrent._call import Asked, Call
from iris.concurrent._candidates import candidates, default_split
from iris.concurrent._collectives import COLLECTIVES
from iris.concurrent.predictor import comm_remote_bytes_per_rank
from iris.errors import ArgumentError
from iris.testing.numeric import tolerance

DEFAULT_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
_CHUNKED = ("reduce_scatter", "all_to_all")  # comm_src has a chunk of rows for each rank
_TILE_ROWS = 256  # of a tile of the collective
_VALUES = 4  # inputs of the collective are whole numbers from -4 to 4, so that sums are exact
_LOOKED_AT = 64  # candidates among which those with few tiles are taken


@dataclass(frozen=True)
class Shape:
    """One problem: ``(M, K) @ (K, N)`` on each rank, and a collective whose ``comm_src`` is (rows, columns)."""

    collective: str
    M: int
    N: int
    K: int
    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def flops(self) -> int:
        """Floating-point operations of a rank."""
        return 2 * self.M * self.N * self.K

    def moved(self, world: int) -> float:
        """Bytes that a rank reads from peers or writes to them."""
        return comm_remote_bytes_per_rank(
            self.collective, self.rows, self.columns, world, dtype_bytes=self.dtype.itemsize
        )

    def result_rows(self, world: int) -> int:
        """Rows of ``comm_dst``."""
        return {"all_gather": self.rows * world, "reduce_scatter": self.rows // world}.get(self.collective, self.rows)

    def trouble(self, ctx: Any) -> str:
        """Why the problem cannot be measured here; empty when it can. The same on every rank."""
        world, itemsize, heap = ctx.get_num_ranks(), self.dtype.itemsize, ctx.heap.total_bytes
        result = self.result_rows(world) * self.columns * itemsize
        on_heap = self.rows * self.columns * itemsize + result
        if on_heap > 0.9 * heap:
            return f"it takes {gib(on_heap)} of a heap of {gib(heap)}: give --heap_size"
        product = (self.M * self.K + self.K * self.N + self.M * self.N) * itemsize
        # What must come out, in float32 while it is added up, and an input of a rank; what is different of it.
        wanted = product + 4 * result + 2 * (on_heap - result) + 2 * CHECKED_AT_ONCE
        there = memory_beside_heap(ctx)
        return f"it takes about {gib(wanted)} a rank, and {gib(there)} are there" if wanted > there else ""


def sides(text: str) -> tuple[int, int, int]:
    """M, N and K of ``MxNxK``.

    Raises:
        ArgumentError: the text is something else.
    """
    found = [int(word) for word in text.split("x") if word.isdigit()]
    if len(found) != 3 or text.count("x") != 2 or not all(found):
        raise ArgumentError(f"axis gemm: {text!r} is not MxNxK, three whole numbers above 0")
    return found[0], found[1], found[2]


def sized(
    collective: str, gemm: str, nbytes: float, dtype: torch.dtype, columns: int, world: int, tile_rows: int = _TILE_ROWS
) -> Shape:
    """The problem whose collective moves about so many bytes, in whole tiles and chunks that are alike.

    Raises:
        ArgumentError: there is no such collective, or no such product.
    """
    if collective not in COLLECTIVES:
        raise ArgumentError(f"axis collective: {collective!r} is not known; possible: {', '.join(COLLECTIVES)}")
    unit = tile_rows * (world if collective in _CHUNKED or tile_rows % world else 1)
    each = comm_remote_bytes_per_rank(collective, unit, columns, world, dtype_bytes=dtype.itemsize)
    units = max(1, round(nbytes / each)) if each else 1
    return Shape(collective, *sides(gemm), unit * units, columns, dtype)


@dataclass(frozen=True)
class Half:
    """The product or the collective in a way.

    Attributes:
        prepare: makes its output wrong before each call, not timed.
        results: what must agree afterwards.
        everywhere: whether a rank that works alone leaves something on the others, too.
    """

    prepare: Callable[[], Any]
    results: list[Compared]
    everywhere: bool = False


class Product:
    """A, B and C of a rank, random, and a sample of what C must be."""

    def __init__(self, ctx: Any, shape: Shape):
        self._allowed = tolerance(shape.dtype, shape.K)
        rank, device = ctx.get_rank(), ctx.get_device()
        self.a = random_on_device(ctx, (shape.M, shape.K), shape.dtype, 2 * rank)
        self.b = random_on_device(ctx, (shape.K, shape.N), shape.dtype, 2 * rank + 1)
        self.c = torch.empty(shape.M, shape.N, dtype=shape.dtype, device=device)
        self._rows, self._columns = (
            spread(shape.M, SAMPLED_ROWS).to(device),
            spread(shape.N, SAMPLED_COLUMNS).to(device),
        )
        self._want = self.a[self._rows].cpu().double() @ self.b[:, self._columns].cpu().double()

    def half(self) -> Half:
        def sample() -> torch.Tensor:
            return self.c[self._rows][:, self._columns].cpu()

        def unwritten() -> torch.Tensor:
            return torch.tensor([sum(int(chunk.isnan().sum()) for chunk in self.c.split(4096))])

        results = [Compared(sample, self._want, self._allowed), Compared(unwritten, torch.zeros(1, dtype=torch.int64))]
        return Half(lambda: self.c.fill_(math.nan), results)


class Payload:
    """Input and output of the collective on a rank, both on the heap; ``want`` is what the output must be."""

    def __init__(self, ctx: Any, shape: Shape):
        self.shape = shape
        self.rank, self.world = ctx.get_rank(), ctx.get_num_ranks()
        self._device = ctx.get_device()
        self.src = ctx.empty(shape.rows, shape.columns, dtype=shape.dtype)
        self.src.copy_(self._source(self.rank))
        self.dst = ctx.empty(shape.result_rows(self.world), shape.columns, dtype=shape.dtype)
        self.want = self._result()

    def _source(self, rank: int) -> torch.Tensor:
        """A rank's input, made anew."""
        generator = torch.Generator(self._device).manual_seed(1000 + rank)
        size = self.shape.rows, self.shape.columns
        drawn = torch.randint(
            -_VALUES, _VALUES + 1, size, dtype=torch.int8, generator=generator, device=self._device
        )  # fmt: skip
        return drawn.to(self.shape.dtype)

    def _result(self) -> torch.Tensor:
        name, chunk = self.shape.collective, self.shape.rows // self.world
        if name == "broadcast":
            return self._source(0)
        if name == "all_gather":
            return torch.cat([self._source(peer) for peer in range(self.world)])
        own = slice(self.rank * chunk, (self.rank + 1) * chunk) if name in _CHUNKED else slice(None)
        parts = (self._source(peer)[own] for peer in range(self.world))
        if name == "all_to_all":
            return torch.cat(list(parts))
        total = next(parts).float()
        for part in parts:
            total += part
        return total.to(self.shape.dtype)

    def half(
        self,
        result: torch.Tensor | None = None,
        want: torch.Tensor | None = None,
        prepare: Callable[[], Any] | None = None,
    ) -> Half:
        """The collective, with its result in ``comm_dst`` if nothing else is given. Where ``want`` is NaN the result
        must be as well: nobody writes there."""
        there = self.dst if result is None else result
        wanted = self.want if want is None else want

        def wrong() -> torch.Tensor:
            """How many elements are wrong, in all of it."""
            count, step = 0, max(1, CHECKED_AT_ONCE // self.shape.columns)
            for at in range(0, len(there), step):
                has, must = there[at : at + step], wanted[at : at + step]
                count += int(((has != must) & ~(has.isnan() & must.isnan())).sum())
            return torch.tensor([count])

        return Half(prepare or (lambda: there.fill_(math.nan)), [Compared(wrong, torch.zeros(1, dtype=torch.int64))])


@dataclass(frozen=True)
class Moving:
    """PyTorch's collective.

    Attributes:
        begin: starts it beside what follows in the current stream; returns what lets that wait for it.
        half: see :class:`Half`.
        note: what is to be said about it.
    """

    begin: Callable[[], Callable[[], Any]]
    half: Half
    note: str = ""


class Together:
    """The ways of a problem where all ranks work. Construction is collective.

    Attributes:
        ctx: the context. shape: the problem.
        units: compute units of a rank.
        product, payload: its tensors.
    """

    def __init__(self, ctx: Any, shape: Shape):
        self.ctx, self.shape, self.units = ctx, shape, ctx.get_cu_count()
        self.product, self.payload = Product(ctx, shape), Payload(ctx, shape)
        self._workspace: Any = None  # the context's

    def way(self, call: Callable[[], Any], *halves: Half, note: str = "") -> Way:
        def prepare() -> None:
            for half in halves:
                half.prepare()

        return Way(call, prepare, [one for half in halves for one in half.results], note=note)

    def moved(self) -> Half:
        """What the library's collective leaves behind."""
        return self.payload.half()

    def before(self) -> None:
        """What has to be issued before the library's collective."""

    def matmul(self) -> Way:
        """PyTorch's product alone."""
        a, b, c = self.product.a, self.product.b, self.product.c
        return self.way(lambda: torch.matmul(a, b, out=c), self.product.half())

    def own_matmul(self, units: int) -> Way:
        """The library's kernel with an empty collective of one rank."""
        a, b, c = self.product.a, self.product.b, self.product.c
        # The same collective in all problems, so that it is compiled once.
        run, nothing, nowhere = self.ctx.concurrent.all_gather, self.payload.src[:0], self.payload.dst[:0]
        options = {"group": [self.ctx.get_rank()], "num_wgs": units, "gemm_wgs": units}
        return self.way(lambda: run(a, b, nothing, C=c, comm_dst=nowhere, **options), self.product.half())

    def own_collective(self, units: int) -> Way:
        """The library's kernel that exchanges alone, beside one with an empty product."""
        a, b, c = self.product.a[:0], self.product.b, self.product.c[:0]
        return self.way(lambda: self._run(a, b, c, mode="concurrent", gemm_wgs=1, comm_wgs=units), self.moved())

    def both(self, **options: Any) -> Way:
        """The library's operation."""
        a, b, c = self.product.a, self.product.b, self.product.c
        return self.way(lambda: self._run(a, b, c, **options), self.product.half(), self.moved())

    def _run(self, a, b, c, **options: Any) -> None:
        self.before()
        run, payload = getattr(self.ctx.concurrent, self.shape.collective), self.payload
        run(a, b, payload.src, C=c, comm_dst=payload.dst, workspace=self._workspace, **options)

    def torch_collective(self, moving: Moving) -> Way:
        """PyTorch's collective alone."""

        def call() -> None:
            arrived = moving.begin()
            arrived()

        return self.way(call, moving.half, note=moving.note)

    def torch_both(self, moving: Moving) -> Way:
        """PyTorch's collective on another stream, and its product."""
        a, b, c = self.product.a, self.product.b, self.product.c

        def call() -> None:
            arrived = moving.begin()
            torch.matmul(a, b, out=c)
            arrived()

        return self.way(call, self.product.half(), moving.half, note=moving.note)

    def agreed(self) -> Call:
        """What the operation's default comes to."""
        product, payload = self.product, self.payload
        tensors = product.a, product.b, payload.src, product.c, payload.dst
        members = self.ctx.resolve_group(None)
        root = 0 if self.shape.collective == "broadcast" else None
        return Call(self.ctx, self.shape.collective, Asked(root=root), members, *tensors)

    def tried(self, most: int, most_tiles: int = 3) -> list[tuple[int, tuple[int, int, int]]]:
        """Splits and tiles that tuning would try, the first of those that have few tiles. Each tile is compiled."""
        shape, call, name = self.shape, self.agreed(), str(self.shape.dtype).removeprefix("torch.")
        where = autotune._conditions(
            self.ctx, call.members, name, name, self.units, mode="fused", comm_block=call.comm_block
        )
        asked = {"gemm_m": shape.M, "gemm_n": shape.N, "gemm_k": shape.K, "comm_m": shape.rows, "comm_n": shape.columns}
        asked |= {"collective": shape.collective, "world": call.members.size}
        own = call.tiles.block_m, call.tiles.block_n, call.tiles.block_k
        tiles, found = {own}, []
        for one in candidates(asked, where, own, most=_LOOKED_AT):
            known = one.gemm_block in tiles
            if one.way != (default_split(self.units, "fused"), own) and (known or len(tiles) < most_tiles):
                tiles.add(one.gemm_block)
                found.append(one.way)
        return found[:most]
