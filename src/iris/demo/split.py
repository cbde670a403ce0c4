"""A matmul of the model split over the ranks: sharding, the calls and their times, the comparison with float64."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from iris.ops import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris

# Each of K additions rounds by at most 2^-24 of a partial sum, evenly spread: a standard deviation of 2^-24/sqrt(3) of
# it. A random walk of K such steps, five standard deviations far (one element in two million is further), is
# 5/sqrt(3) < 3 times sqrt(K) 2^-24 of the largest partial sum, which |A| |B| + |bias| bounds generously.
_WALK = 3
TOLERANCE = (
    f"{_WALK} sqrt(K) 2^-24 (|A| |B| + |bias|) for K sums in float32, whose rounding errors add up like a random walk, "
    "and half a unit in the last place for the output's dtype"
)


@dataclass(frozen=True)
class Check:
    """How far a result is from float64.

    Attributes:
        largest: largest absolute difference of any element; NaN when the result has one.
        error: absolute difference of the element that comes closest to what it is allowed, or exceeds it most.
        allowed: what rounding explains of that element; see :data:`TOLERANCE`.
    """

    largest: float
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether rounding explains the error of every element. NaN never passes."""
        return self.error <= self.allowed

    @property
    def severity(self) -> float:
        """The error in units of what is allowed, for finding the worst of several checks."""
        return math.inf if math.isnan(self.error) else self.error / self.allowed


@dataclass(frozen=True)
class Shares:
    """What one rank had and measured in one matmul.

    Attributes:
        rank: the rank.
        a, b, out: shapes of its columns of A, of B and of the result.
        first_ms, warm_ms: wall time of its first and of its second call.
        check: of its result.
    """

    rank: int
    a: tuple[int, ...]
    b: tuple[int, ...]
    out: tuple[int, ...]
    first_ms: float
    warm_ms: float
    check: Check


@dataclass(frozen=True)
class Measured:
    """One matmul on all ranks.

    Attributes:
        name: what it is in the model.
        K: inner dimension in the model.
        padding: columns of zeros that were added to A so that the ranks divide it.
        plan: what ran and why, the same on all ranks.
        ranks: in rank order.
    """

    name: str
    K: int
    padding: int
    plan: Plan
    ranks: list[Shares]

    @property
    def passed(self) -> bool:
        """Whether the result of every rank passed."""
        return all(share.check.passed for share in self.ranks)


def matmul(
    ctx: Iris, name: str, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype, algorithm: str
) -> tuple[torch.Tensor, Measured]:
    """``a @ weight.t() + bias`` through ``ctx.ops.all_gather_matmul``, twice, and compared with float64. Collective.

    Args:
        a: (M, K) on every rank, which keeps its K/world columns of it on the symmetric heap.
        weight: (N, K) as linear layers store it; B is its transposed view.
        bias: (N,).
        dtype: of A, B, bias and the result.
        algorithm: of the operation, or ``"auto"``.

    Returns:
        (M, N) in ``dtype``, and what all ranks measured.
    """
    K = a.shape[1]
    padding = -K % ctx.num_ranks
    shard = own_columns(a, ctx.cur_rank, ctx.num_ranks).to(dtype)
    A_sharded = ctx.empty(shard.shape, dtype=dtype)
    A_sharded.copy_(shard)
    # Without padding and in float32 this is the weight itself, read in transposed order.
    B = (F.pad(weight, (0, padding)) if padding else weight).to(dtype).t()
    bias = bias.to(dtype)
    out = torch.empty((a.shape[0], B.shape[1]), dtype=dtype, device=ctx.get_device())
    named = None if algorithm == "auto" else algorithm
    times = []
    for _ in range(2):
        # The second call must not find the first one's result.
        out.fill_(math.nan)
        ctx.barrier()
        start = time.perf_counter()
        workspace = ctx.ops.all_gather_matmul(out, A_sharded, B, bias, algorithm=named)
        ctx.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    # The shards as the peers have them: their earlier results may differ from this rank's in rounding.
    shards = ctx.exchange.all_gather(f"iris.demo: shards of {name}", A_sharded.cpu())
    check = compare(out, shards, B, bias)
    mine = Shares(ctx.cur_rank, tuple(A_sharded.shape), tuple(B.shape), tuple(out.shape), times[0], times[1], check)
    ranks = ctx.exchange.all_gather(f"iris.demo: results of {name}", mine)
    return out, Measured(name, K, padding, workspace.plan, ranks)


def own_columns(a: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """(M, ceil(K/world)): a rank's columns of ``a``, with columns of zeros where ``a`` has no more."""
    padded = F.pad(a, (0, -a.shape[1] % world_size))
    return padded.chunk(world_size, dim=1)[rank]


def compare(out: torch.Tensor, shards: Sequence[torch.Tensor], B: torch.Tensor, bias: torch.Tensor) -> Check:
    """Compare ``out`` with float64 computed on the host from the same inputs.

    Args:
        out: (M, N), the result.
        shards: every rank's columns of A, in rank order.
        B: (K, N), in any strides.
        bias: (N,).
    """
    a = torch.cat([shard.cpu().double() for shard in shards], dim=1)
    b, added = B.cpu().double(), bias.cpu().double()
    exact = a @ b + added
    kind = torch.finfo(out.dtype)
    # Below the smallest normal number the last place keeps its size.
    last_place = kind.eps / 2 * exact.abs().clamp(min=kind.tiny)
    allowed = _WALK * math.sqrt(a.shape[1]) * 2.0**-24 * (a.abs() @ b.abs() + added.abs()) + last_place
    error = (out.cpu().double() - exact).abs()
    # The largest of a tensor with a NaN is NaN, and so is the place where it is.
    worst = (error / allowed).argmax()
    return Check(error.max().item(), error.flatten()[worst].item(), allowed.flatten()[worst].item())
