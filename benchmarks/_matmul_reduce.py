"""What bench_matmul_reduce.py times: the tensors of a problem, and the ways to multiply and add up over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _ways import (
    AUTO,
    CHECKED_AT_ONCE,
    MATMUL,
    OWN_MATMUL,
    SAMPLED_COLUMNS,
    SAMPLED_ROWS,
    TORCH,
    TORCH_FUSED,
    Compared,
    Refused,
    Way,
    check_symmetric_memory,
    explained,
    gib,
    group_name,
    memory_beside_heap,
    random_on_device,
    spread,
    torch_carries,
    tried,
)

from iris import ops
from iris.ops._matmul_reduce_call import ALGORITHMS
from iris.testing.numeric import ROUNDING, tolerance

ALL_REDUCE, REDUCE_SCATTER = "matmul_all_reduce", "matmul_reduce_scatter"
CCL = "ccl"
# What adds up after a multiplication: PyTorch's collective, the library's, and PyTorch's over symmetric memory.
SYMMETRIC_MEMORY = {
    ALL_REDUCE: {"torch_one_shot": "one_shot_all_reduce_out", "torch_two_shot": "two_shot_all_reduce_"},
    REDUCE_SCATTER: {"torch_reduce_scatter": "reduce_scatter_out"},
}
UNFUSED = {operation: (TORCH, CCL, *peers) for operation, peers in SYMMETRIC_MEMORY.items()}
KERNELS = {operation: tuple(n for n in ALGORITHMS[operation] if n != TORCH) for operation in UNFUSED}
_REDUCTION = "reduction"
_TILE = 256  # at most so many rows of a tile are kept for a problem with fewer
# PyTorch 2.13 renamed it.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def reduction_of(unfused: str) -> str:
    """The name of the way that does the second part of ``unfused`` alone."""
    return _REDUCTION if unfused == TORCH else f"{unfused} {_REDUCTION}"


@dataclass(frozen=True)
class Shape:
    """One problem: the sum over the ranks of ``(M, K / ranks) @ (K / ranks, N)``; the operation says who gets what."""

    operation: str
    M: int
    N: int
    K: int
    dtype: torch.dtype

    def flops(self, world_size: int) -> int:
        """Floating-point operations of a rank."""
        return 2 * self.M * self.N * self.K // world_size

    def received(self, world_size: int) -> int:
        """Bytes that a rank has to receive: its part of the others' products, and the others' parts of the sum."""
        each = self.M * self.N * self.dtype.itemsize * (world_size - 1) // world_size
        return each if self.operation == REDUCE_SCATTER else 2 * each

    def chunk(self, world_size: int) -> int:
        """Rows of the output of a rank; the last ranks may have fewer."""
        return self.M if self.operation == ALL_REDUCE else -(-self.M // world_size)

    def trouble(self, ctx: Any) -> str:
        """Why the problem cannot be measured here; empty when it can. The same on every rank."""
        world = ctx.get_num_ranks()
        if self.K % world:
            return f"K={self.K} is no multiple of {world} ranks"
        itemsize, heap = self.dtype.itemsize, ctx.heap.total_bytes
        product = (self.M + world) * self.N * itemsize
        # The product, partial products in tiles of the operation and of one rank's own, the output.
        on_heap = product + 2 * (self.M + world * _TILE) * self.N * itemsize + self.chunk(world) * self.N * itemsize
        if on_heap > 0.9 * heap:
            return f"it takes {gib(on_heap)} of a heap of {gib(heap)}: give --heap_size"
        a, b = self.M * self.K // world * itemsize, self.K // world * self.N * itemsize
        # What must come out and what may differ, in float32; PyTorch's symmetric memory, its result and its workspace.
        wanted = a + b + 8 * self.chunk(world) * self.N + 3 * product
        # While that is computed: a rank's A and B, B in float64, rows of A and of the sum in float64.
        wanted += a + b + 8 * b // itemsize + 16 * CHECKED_AT_ONCE // 8
        there = memory_beside_heap(ctx)
        return f"it takes about {gib(wanted)} a rank, and {gib(there)} are there" if wanted > there else ""


class Operands:
    """The tensors of a problem on one rank, which all ways share.

    Attributes:
        a, b: this rank's. first, rows: of the sum that it gets.
        padded: on the symmetric heap, the output and the rows that make all ranks' outputs alike; ``out`` without them.
        whole: on the heap, room for the own product, its rows padded likewise; ``product`` without them.
        total, magnitude: what the output must be, and the sum of the partial products' absolute values.
        picked, columns: rows and columns that are compared with float64. want, own: the sum's there, and those of the
            own product, whose rows are picked anew: ``own_picked``.
        own_want: what the own product must be there.
    """

    def __init__(self, ctx: Any, shape: Shape):
        self.shape = shape
        rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
        chunk = shape.chunk(world)
        self.first = 0 if shape.operation == ALL_REDUCE else min(shape.M, rank * chunk)
        self.rows = min(shape.M, self.first + chunk) - self.first
        self.a, self.b = parts(ctx, shape, rank)
        self.padded = ctx.empty((chunk, shape.N), dtype=shape.dtype)
        self.out = self.padded[: self.rows]
        alike = shape.M if shape.operation == ALL_REDUCE else chunk * world
        self.whole = ctx.zeros((alike, shape.N), dtype=shape.dtype)
        self.product = self.whole[: shape.M]
        self.picked = spread(self.rows, SAMPLED_ROWS).to(device)
        self.own_picked = spread(shape.M, SAMPLED_ROWS).to(device)
        self.columns = spread(shape.N, SAMPLED_COLUMNS).to(device)
        self.total = torch.zeros((self.rows, shape.N), device=device)
        self.magnitude = torch.zeros_like(self.total)
        self._symmetric: torch.Tensor | None = None
        for owner in range(world):
            a, b = (self.a, self.b) if owner == rank else parts(ctx, shape, owner)
            b = b.double()
            # A few rows at a time, since float64 takes four times the room.
            step = max(1, CHECKED_AT_ONCE // 8 // max(shape.N, b.shape[0]))
            for at in range(0, self.rows, step):
                part = a[self.first + at : min(self.first + at + step, self.first + self.rows)].double() @ b
                self.total[at : at + step] += part
                self.magnitude[at : at + step] += part.abs()
        self.own_want = self.a[self.own_picked].cpu().double() @ self.b[:, self.columns].cpu().double()

    def symmetric(self) -> torch.Tensor:
        """A place for the product in PyTorch's symmetric memory, as large as ``whole``. Collective when it is new."""
        if self._symmetric is None:
            import torch.distributed._symmetric_memory as symm_mem

            made = symm_mem.empty(*self.whole.shape, dtype=self.shape.dtype, device=self.whole.device)
            symm_mem.rendezvous(made, dist.group.WORLD)  # pyright: ignore[reportArgumentType]
            self._symmetric = made.zero_()
        return self._symmetric

    def compared(self, result: Callable[[], torch.Tensor], roundings: int) -> list[Compared]:
        """How the output is compared.

        Args:
            result: gives it.
            roundings: how often a partial product is rounded on its way, that of the last sum left out.
        """
        absolute, relative = tolerance(self.shape.dtype, self.shape.K)
        rounded = roundings * ROUNDING[self.shape.dtype]

        def sample() -> torch.Tensor:
            return result()[self.picked][:, self.columns].cpu()

        def wrong() -> torch.Tensor:
            """How many elements are wrong, in all of it."""
            count, step = 0, max(1, CHECKED_AT_ONCE // 8 // self.shape.N)
            for at in range(0, self.rows, step):
                want, magnitude = self.total[at : at + step], self.magnitude[at : at + step]
                error = (result()[at : at + step].float() - want).abs()
                # So that NaN is wrong.
                count += int((~(error <= absolute + relative * want.abs() + rounded * magnitude)).sum())
            return torch.tensor([count])

        most = rounded * float(self.magnitude.max()) if self.rows else 0.0
        want = self.total[self.picked][:, self.columns].cpu()
        return [Compared(sample, want, (absolute + most, relative)), Compared(wrong, torch.zeros(1, dtype=torch.int64))]

    def own_compared(self, result: torch.Tensor) -> list[Compared]:
        """How the own product is compared."""

        def sample() -> torch.Tensor:
            return result[self.own_picked][:, self.columns].cpu()

        def unwritten() -> torch.Tensor:
            return torch.tensor([sum(int(chunk.isnan().sum()) for chunk in result.split(4096))])

        allowed = tolerance(self.shape.dtype, self.shape.K)
        return [Compared(sample, self.own_want, allowed), Compared(unwritten, torch.zeros(1, dtype=torch.int64))]


def parts(ctx: Any, shape: Shape, owner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's A and B."""
    depth = shape.K // ctx.get_num_ranks()
    a = random_on_device(ctx, (shape.M, depth), shape.dtype, 2 * owner)
    return a, random_on_device(ctx, (depth, shape.N), shape.dtype, 2 * owner + 1)


@dataclass(frozen=True)
class Reduction:
    """One way to add up products that have been computed.

    Attributes:
        source: where the product has to be; its first M rows.
        call: adds up.
        result: where the output is afterwards.
        roundings: see :meth:`Operands.compared`.
        note: what is to be said about it.
    """

    source: torch.Tensor
    call: Callable[[], Any]
    result: torch.Tensor
    roundings: int = 1
    note: str = ""


def reduction(ctx: Any, work: Operands, name: str) -> Reduction:
    """What adds up in an unfused way.

    Raises:
        Refused: says why it does not exist here.
    """
    if name in (TORCH, CCL):
        return _torch(ctx, work) if name == TORCH and torch_carries(ctx) else _ccl(ctx, work, name)
    return _symmetric_memory(ctx, work, name)


def _torch(ctx: Any, work: Operands) -> Reduction:
    world = ctx.get_num_ranks()
    if work.shape.operation == ALL_REDUCE:
        return Reduction(work.out, lambda: dist.all_reduce(work.out), work.out, world)
    return Reduction(work.whole, lambda: _reduce_scatter(work.padded, work.whole), work.out, world)


def _ccl(ctx: Any, work: Operands, name: str) -> Reduction:
    collective = ctx.ccl.all_reduce if work.shape.operation == ALL_REDUCE else ctx.ccl.reduce_scatter
    note = "torch adds up as ccl does: gloo would take the products through the host" if name == TORCH else ""
    return Reduction(work.whole, lambda: collective(work.padded, work.whole), work.out, ctx.get_num_ranks(), note=note)


def _symmetric_memory(ctx: Any, work: Operands, name: str) -> Reduction:
    operation = SYMMETRIC_MEMORY[work.shape.operation].get(name)
    if operation is None:
        possible = ", ".join(UNFUSED[work.shape.operation])
        raise Refused(f"{name} is no part of {work.shape.operation}; possible: {possible}")
    check_symmetric_memory(ctx, operation)
    try:
        source = work.symmetric()
    except RuntimeError as error:
        raise Refused(f"PyTorch refuses symmetric memory: {error}".splitlines()[0]) from error
    own, group, world = torch.ops.symm_mem, group_name(), ctx.get_num_ranks()
    flat, out = source.view(-1), work.padded.view(-1)
    call, result = {
        "one_shot_all_reduce_out": (lambda: own.one_shot_all_reduce_out(flat, "sum", group, out), work.out),
        "two_shot_all_reduce_": (lambda: own.two_shot_all_reduce_(flat, "sum", group), source),
        "reduce_scatter_out": (lambda: own.reduce_scatter_out(flat, group, False, out), work.out),
    }[operation]
    tried(ctx, call)
    return Reduction(source, call, result, world)


def unfused(work: Operands, found: Reduction) -> Way:
    """Multiply with PyTorch, then add up."""
    target = found.source[: work.shape.M]

    def call() -> None:
        torch.matmul(work.a, work.b, out=target)
        found.call()

    def prepare() -> None:
        target.fill_(math.nan)
        found.result.fill_(math.nan)

    return Way(call, prepare, work.compared(lambda: found.result, found.roundings), note=found.note)


def reduction_alone(work: Operands, found: Reduction) -> Way:
    """Add up what has been multiplied before."""

    def prepare() -> None:
        found.result.fill_(math.nan)
        torch.matmul(work.a, work.b, out=found.source[: work.shape.M])

    return Way(found.call, prepare, work.compared(lambda: found.result, found.roundings), note=found.note)


def torch_fused(ctx: Any, work: Operands) -> Way:
    """PyTorch's fused operation over its symmetric memory."""
    check_symmetric_memory(ctx, "fused_matmul_reduce_scatter")
    if work.shape.operation == ALL_REDUCE:
        raise Refused("PyTorch has no fused matmul and all-reduce")
    world, M = ctx.get_num_ranks(), work.shape.M
    if M % world:
        raise Refused(f"PyTorch has it for M that is a multiple of the ranks; M={M}, {world} ranks")
    returned: list[torch.Tensor] = []

    def call() -> None:
        returned[:] = [torch.ops.symm_mem.fused_matmul_reduce_scatter(work.a, work.b, "sum", 0, group_name())]

    tried(ctx, call)
    return Way(call, returned.clear, work.compared(lambda: returned[0], world))


def matmul(work: Operands) -> Way:
    """PyTorch's matmul of the own A and B."""
    product = work.product
    return Way(
        lambda: torch.matmul(work.a, work.b, out=product), lambda: product.fill_(math.nan), work.own_compared(product)
    )


def own_matmul(ctx: Any, work: Operands) -> Way:
    """The library's kernel with one rank, which has nothing to add. Collective: it takes memory of the heap."""
    operation, product = work.shape.operation, work.product
    options = {"algorithm": KERNELS[operation][0], "group": [ctx.get_rank()]}
    explained(ctx, operation, product, work.a, work.b, **options)
    workspace = getattr(ops, f"{operation}_preamble")(ctx, product, work.a, work.b, **options)
    run = getattr(ctx.ops, operation)
    return Way(
        lambda: run(product, work.a, work.b, workspace=workspace, **options),
        lambda: product.fill_(math.nan),
        work.own_compared(product),
    )


def ours(ctx: Any, work: Operands, algorithm: str, config: Any = None) -> Way:
    """The library's operation, with a configuration of its kernel if one is given."""
    options = {"algorithm": None if algorithm == AUTO else algorithm, "config": config}
    operation = work.shape.operation
    plan = explained(ctx, operation, work.out, work.a, work.b, **options)
    run = getattr(ctx.ops, operation)
    return Way(
        lambda: run(work.out, work.a, work.b, **options),
        lambda: work.out.fill_(math.nan),
        work.compared(lambda: work.out, ctx.get_num_ranks() if plan.algorithm == TORCH else 1),
        takes=plan.algorithm if algorithm == AUTO else "",
    )


def way(ctx: Any, work: Operands, algorithm: str, config: Any = None) -> Way:
    """The way of that name, with a configuration of its kernel if one is given. Collective.

    Raises:
        Refused: says why it does not exist here.
    """
    known = {MATMUL: lambda: matmul(work), OWN_MATMUL: lambda: own_matmul(ctx, work)}
    known[TORCH_FUSED] = lambda: torch_fused(ctx, work)
    for name in dict.fromkeys(name for names in UNFUSED.values() for name in names):
        known[name] = lambda name=name: unfused(work, reduction(ctx, work, name))
        known[reduction_of(name)] = lambda name=name: reduction_alone(work, reduction(ctx, work, name))
    return known[algorithm]() if algorithm in known else ours(ctx, work, algorithm, config)
