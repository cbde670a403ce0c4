"""What bench_all_gather_matmul.py times: the tensors of a problem, and the ways to gather A and multiply."""

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

from iris.testing.numeric import tolerance

OPERATION, GATHER = "all_gather_matmul", "gather"
# PyTorch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Shape:
    """One problem: ``(M, K) @ (K, N)``, A sharded along K (``gather_dim`` 1) or M (0)."""

    M: int
    N: int
    K: int
    dtype: torch.dtype
    gather_dim: int

    @property
    def flops(self) -> int:
        return 2 * self.M * self.N * self.K

    def shard(self, world_size: int) -> tuple[int, int]:
        """Shape of a rank's part of A."""
        if self.gather_dim == 1:
            return self.M, self.K // world_size
        return self.M // world_size, self.K

    def trouble(self, ctx: Any, alone: bool) -> str:
        """Why the problem cannot be measured here; empty when it can. The same on every rank."""
        world = ctx.get_num_ranks()
        name, extent = ("K", self.K) if self.gather_dim == 1 else ("M", self.M)
        if extent % world:
            return f"{name}={extent} is no multiple of {world} ranks"
        itemsize = self.dtype.itemsize
        shard, heap = math.prod(self.shard(world)) * itemsize, ctx.heap.total_bytes
        if shard > 0.9 * heap:
            return f"a shard of A takes {gib(shard)} of a heap of {gib(heap)}: give --heap_size"
        a, b, out = self.M * self.K * itemsize, self.K * self.N * itemsize, self.M * self.N * itemsize
        # Gathered A, a place to gather it to, a staging buffer; PyTorch's way makes two of its own, alone a second out.
        wanted = 3 * a + b + out + (out if alone else 2 * a)
        there = memory_beside_heap(ctx, alone)
        return f"it takes about {gib(wanted)} a rank, and {gib(there)} are there" if wanted > there else ""


class Operands:
    """The tensors of a problem on one rank, which all ways share.

    Attributes:
        a: the own shard, on the symmetric heap. b: B. out: the output. whole: A of all ranks.
        scratch: where A is gathered to.
        rows, columns: of the output that are compared; every rank's part of A has some.
        want: what they must be, in float64.
    """

    def __init__(self, ctx: Any, shape: Shape):
        self.shape = shape
        rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
        self.whole = torch.empty((shape.M, shape.K), dtype=shape.dtype, device=device)
        self.a = own_shard(ctx, shape)
        for owner in range(world):
            self.part(self.whole, owner, world).copy_(self.a if owner == rank else random(ctx, shape, owner))
        self.b = random(ctx, shape)
        self.out = torch.empty((shape.M, shape.N), dtype=shape.dtype, device=device)
        self.scratch = torch.empty_like(self.whole)
        parts = world if shape.gather_dim == 0 else 1
        within = spread(shape.M // parts, -(-SAMPLED_ROWS // parts))
        self.rows = (torch.arange(parts)[:, None] * (shape.M // parts) + within).flatten().to(device)
        self.columns = spread(shape.N, SAMPLED_COLUMNS).to(device)
        self.want = self.whole[self.rows].cpu().double() @ self.b[:, self.columns].cpu().double()

    def part(self, whole: torch.Tensor, owner: int, world: int) -> torch.Tensor:
        """The place of a rank's shard in a gathered A."""
        return whole.chunk(world, dim=self.shape.gather_dim)[owner]

    def sample(self, product: torch.Tensor | None = None) -> torch.Tensor:
        """The elements of a product that are compared; default those of ``out``."""
        product = self.out if product is None else product
        return product[self.rows][:, self.columns].cpu()

    def unwritten(self) -> torch.Tensor:
        """How many elements of ``out`` are NaN, as it was before the call."""
        chunks = self.out.split(max(1, CHECKED_AT_ONCE // self.shape.N))
        return torch.tensor([sum(int(chunk.isnan().sum()) for chunk in chunks)])


def random(ctx: Any, shape: Shape, owner: int | None = None) -> torch.Tensor:
    """Random values: a rank's shard, or B."""
    size = (shape.K, shape.N) if owner is None else shape.shard(ctx.get_num_ranks())
    return random_on_device(ctx, size, shape.dtype, 1 if owner is None else 1000 + owner)


def own_shard(ctx: Any, shape: Shape) -> torch.Tensor:
    return ctx.as_symmetric(random(ctx, shape, ctx.get_rank()))


def product(work: Operands, call: Callable[[], Any], **more: Any) -> Way:
    """A way that multiplies into ``out``."""
    whole = Compared(work.unwritten, torch.zeros(1, dtype=torch.int64))
    return Way(call, lambda: work.out.fill_(math.nan), [sampled(work), whole], **more)


def sampled(work: Operands, result: Callable[[], torch.Tensor] | None = None) -> Compared:
    """The elements of a product that are compared with float64; default those of ``out``."""
    return Compared(result or work.sample, work.want, tolerance(work.shape.dtype, work.shape.K))


def matmul(work: Operands) -> Way:
    """PyTorch's matmul of the gathered A."""
    return product(work, lambda: torch.matmul(work.whole, work.b, out=work.out))


def own_matmul(ctx: Any, work: Operands) -> Way:
    """The library's kernel with nothing to gather."""
    options = {"algorithm": "hbm_buffer", "group": [ctx.get_rank()], "gather_dim": work.shape.gather_dim}
    explained(ctx, OPERATION, work.out, work.whole, work.b, **options)
    return product(work, lambda: ctx.ops.all_gather_matmul(work.out, work.whole, work.b, **options))


def fetch(ctx: Any, work: Operands, carry: Callable[[int, dict[int, int]], Callable[[], None]] | None = None) -> None:
    """Copy the peers' shards to ``scratch``, each rank from the next one first. ``carry`` takes an imitated link."""
    rank, world, nbytes = ctx.get_rank(), ctx.get_num_ranks(), work.a.nbytes
    peers = [(rank + step) % world for step in range(1, world)]
    arrive = None if carry is None or not peers else carry(rank, dict.fromkeys(peers, nbytes))
    for peer in peers:
        work.part(work.scratch, peer, world).copy_(ctx.heap.on_peer(work.a, peer))
    if arrive is not None:
        arrive()


def emptied(ctx: Any, work: Operands) -> None:
    """Put ``scratch`` into its state before copies: the own shard is there."""
    work.scratch.fill_(math.nan)
    work.part(work.scratch, ctx.get_rank(), ctx.get_num_ranks()).copy_(work.a)


def copied_gather(ctx: Any, work: Operands, call: Callable[[], Any], **more: Any) -> Way:
    """A way that gathers A into ``scratch`` by copies."""

    def gathered() -> torch.Tensor:
        return work.scratch[work.rows].cpu()

    return Way(call, lambda: emptied(ctx, work), [Compared(gathered, work.whole[work.rows].cpu())], **more)


def copied_product(ctx: Any, work: Operands, copies: Callable[[], Any], **more: Any) -> Way:
    """A way that copies A into ``scratch`` and multiplies then."""

    def call() -> None:
        copies()
        torch.matmul(work.scratch, work.b, out=work.out)

    way = product(work, call, **more)
    poison = way.prepare
    way.prepare = lambda: (poison(), emptied(ctx, work))
    return way


def gather(ctx: Any, work: Operands) -> Way:
    """PyTorch's all-gather alone."""
    if torch_carries(ctx):
        flat, shape, rows, world = work.scratch.view(-1), work.shape, work.rows, ctx.get_num_ranks()

        def gathered() -> torch.Tensor:
            if shape.gather_dim == 0:
                return work.scratch[rows].cpu()
            return flat.view(world, shape.M, -1)[:, rows].transpose(0, 1).reshape(len(rows), shape.K).cpu()

        def call() -> None:
            _all_gather(flat, work.a.view(-1))

        return Way(call, lambda: work.scratch.fill_(math.nan), [Compared(gathered, work.whole[rows].cpu())])
    return copied_gather(ctx, work, lambda: _fetch_after_meeting(ctx, work), note=_COPIES)


def sequence(ctx: Any, work: Operands) -> Way:
    """PyTorch's all-gather, then its matmul."""
    if torch_carries(ctx):
        return ours(ctx, work, TORCH)
    return copied_product(ctx, work, lambda: _fetch_after_meeting(ctx, work), note=_COPIES)


_COPIES = (
    "torch and gather meet on the device and copy the shards between the ranks' memories: gloo would take them through "
    "the host"
)


def _fetch_after_meeting(ctx: Any, work: Operands) -> None:
    ctx.device_barrier()
    fetch(ctx, work)


def ours(ctx: Any, work: Operands, algorithm: str, config: Any = None) -> Way:
    """The library's operation, with a configuration of its kernel if one is given."""
    named = None if algorithm == AUTO else algorithm
    options = {"algorithm": named, "config": config, "gather_dim": work.shape.gather_dim}
    plan = explained(ctx, OPERATION, work.out, work.a, work.b, **options)
    way = product(work, lambda: ctx.ops.all_gather_matmul(work.out, work.a, work.b, **options))
    way.takes = plan.algorithm if algorithm == AUTO else ""
    return way


def torch_fused(ctx: Any, work: Operands) -> Way:
    """PyTorch's fused operation over its symmetric memory."""
    check_symmetric_memory(ctx, "fused_all_gather_matmul")
    if work.shape.gather_dim == 1:
        raise Refused("PyTorch has it for A sharded along M only: --axis_gather_dim=0")
    returned: list[torch.Tensor] = []

    def call() -> None:
        _, products = torch.ops.symm_mem.fused_all_gather_matmul(work.a, [work.b], 0, group_name())
        returned[:] = products

    tried(ctx, call)
    return Way(call, returned.clear, [sampled(work, lambda: work.sample(returned[0]))])


def way(ctx: Any, work: Operands, algorithm: str, config: Any = None) -> Way:
    """The way of that name, with a configuration of its kernel if one is given.

    Raises:
        Refused: says why it does not exist here.
    """
    known = {MATMUL: lambda: matmul(work), OWN_MATMUL: lambda: own_matmul(ctx, work), GATHER: lambda: gather(ctx, work)}
    known |= {TORCH: lambda: sequence(ctx, work), TORCH_FUSED: lambda: torch_fused(ctx, work)}
    return known[algorithm]() if algorithm in known else ours(ctx, work, algorithm, config)
