"""``Config``: how the kernels of collectives run. ``ReduceOp``: what reductions compute."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch.distributed as dist

from iris.errors import ArgumentError, UnsupportedError

ALL_REDUCE_VARIANTS = ("atomic", "spinlock", "ring", "two_shot", "one_shot", "push", "torch")
VARIANTS = {
    "all_reduce": ALL_REDUCE_VARIANTS,
    "all_gather": ("persistent", "partitioned", "copy_engine", "torch"),
    "all_to_all": ("default", "torch"),
    "reduce_scatter": ("two_shot", "torch"),
    "broadcast": ("direct", "scatter_allgather", "torch"),
}


class ReduceOp(IntEnum):
    """What a reduction computes; AVG for floating-point dtypes only, the bitwise ones are names only."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7


_SUPPORTED = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)


def reduce_op(op: Any, floating: bool) -> ReduceOp:
    """The operation meant by ``op``: None (SUM), a :class:`ReduceOp`, its number, or one of torch.distributed.

    Args:
        op: what the caller gave.
        floating: whether the values are floating-point.

    Raises:
        UnsupportedError: a known operation that is not supported; also a ValueError.
        ArgumentError: no operation.
    """
    possible = ", ".join(o.name for o in _SUPPORTED)
    if op is None:
        return ReduceOp.SUM
    if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        name = str(op).rpartition(".")[2]
        if name not in ReduceOp.__members__:
            raise _UnsupportedOp(f"the reduction {op} is not supported; possible: {possible}")
        op = ReduceOp[name]
    if isinstance(op, bool) or not isinstance(op, int) or op not in list(ReduceOp):
        raise ArgumentError(f"op must be None or an iris.ccl.ReduceOp, got {op!r}; possible: {possible}")
    op = ReduceOp(op)
    if op not in _SUPPORTED:
        raise _UnsupportedOp(f"the reduction {op.name} is not supported; possible: {possible}")
    if op == ReduceOp.AVG and not floating:
        raise _UnsupportedOp("the reduction AVG needs a floating-point dtype; SUM and divide, and say how to round")
    return op


class _UnsupportedOp(UnsupportedError, ValueError):
    """The original API raises ValueError for these, and programs catch that."""


@dataclass(frozen=True)
class Config:
    """How a collective's kernel runs; None leaves a choice to the operation.

    Attributes:
        block_size_m, block_size_n: their product is the number of elements that a program handles at a time, which the
            default leaves to the operation; where tiles have owners (``reduce_scatter`` with an output of the input's
            shape), the tile. Powers of two.
        swizzle_size: rows of tiles that are numbered together, where tiles have owners.
        comm_sms: compute units to use at most. A rank takes no more than it has, and no more than there are blocks.
        num_xcds, chunk_size, use_gluon, num_stages, threads_per_warp, waves_per_eu: kept for programs that set them.
        all_reduce_variant: one of atomic, spinlock, ring, two_shot, one_shot, push, torch.
        all_reduce_distribution: kept for programs that set it; shards of a tensor are contiguous.
        all_reduce_num_rings: 2 sends every second block the other way around the ring.
        all_reduce_ring_slice_n: kept for programs that set it.
        all_gather_variant: persistent (a program writes a block to all ranks), partitioned (to one), copy_engine (no
            programs, copies beside the stream), torch.
        all_to_all_variant: default, torch.
        reduce_scatter_variant: two_shot, torch.
        reduce_scatter_distribution: where tiles have owners: 1 gives each rank contiguous tiles, 0 every W-th.
        broadcast_variant: direct, scatter_allgather, torch.
        num_warps: 1, 2, 4, 8, 16 or 32.

    Raises:
        ArgumentError: names the field, its value and what is possible.
    """

    block_size_m: int = 32
    block_size_n: int = 64
    swizzle_size: int = 4
    comm_sms: int | None = None
    num_xcds: int | None = None
    chunk_size: int | None = None
    use_gluon: bool = False
    all_gather_variant: str | None = None
    all_to_all_variant: str | None = None
    all_reduce_variant: str | None = None
    all_reduce_distribution: int = 1
    all_reduce_num_rings: int = 1
    all_reduce_ring_slice_n: int | None = None
    reduce_scatter_variant: str | None = None
    reduce_scatter_distribution: int = 1
    broadcast_variant: str | None = None
    num_stages: int = 1
    num_warps: int | None = None
    threads_per_warp: int | None = None
    waves_per_eu: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size_m", "block_size_n"):
            value = getattr(self, name)
            if not _is_count(value) or value & (value - 1):
                raise ArgumentError(f"Config.{name} must be a power of two, got {value!r}")
        if self.block_size_m * self.block_size_n > 1 << 16:
            raise ArgumentError(
                f"Config.block_size_m={self.block_size_m} times block_size_n={self.block_size_n} is more than the "
                f"{1 << 16} elements that a program can hold"
            )
        for name in ("swizzle_size", "all_reduce_num_rings", "num_stages"):
            if not _is_count(getattr(self, name)):
                raise ArgumentError(f"Config.{name} must be above 0, got {getattr(self, name)!r}")
        for name in ("comm_sms", "num_xcds", "chunk_size", "all_reduce_ring_slice_n"):
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                raise ArgumentError(f"Config.{name} must be None or above 0, got {value!r}")
        slice_n = self.all_reduce_ring_slice_n
        if slice_n is not None and (slice_n & (slice_n - 1) or self.block_size_n % slice_n):
            raise ArgumentError(
                f"Config.all_reduce_ring_slice_n must be a power of two that divides block_size_n={self.block_size_n}, "
                f"got {slice_n}"
            )
        for name in ("all_reduce_distribution", "reduce_scatter_distribution"):
            if getattr(self, name) not in (0, 1):
                raise ArgumentError(
                    f"Config.{name} must be 0 (every W-th) or 1 (contiguous), got {getattr(self, name)!r}"
                )
        for operation, possible in VARIANTS.items():
            value = getattr(self, f"{operation}_variant")
            if value is not None and value not in possible:
                raise ArgumentError(
                    f"Config.{operation}_variant must be None or one of {', '.join(possible)}; got {value!r}"
                )
        if self.num_warps not in (None, 1, 2, 4, 8, 16, 32):
            raise ArgumentError(f"Config.num_warps must be None, 1, 2, 4, 8, 16 or 32, got {self.num_warps!r}")
        if self.threads_per_warp not in (None, 32, 64):
            raise ArgumentError(f"Config.threads_per_warp must be None, 32 or 64, got {self.threads_per_warp!r}")
        if not isinstance(self.waves_per_eu, int) or self.waves_per_eu < 0:
            raise ArgumentError(f"Config.waves_per_eu must be at least 0, got {self.waves_per_eu!r}")
        if self.use_gluon:
            raise ArgumentError("Config.use_gluon=True: there are no Gluon kernels; leave it at False")

    @property
    def names_block(self) -> bool:
        """Whether the number of elements that a program handles is given, rather than left to the operation."""
        return (self.block_size_m, self.block_size_n) != (Config.block_size_m, Config.block_size_n)

    def variant(self, operation: str) -> str | None:
        """The variant that is asked for; None when it is open, or when the operation has no variants."""
        return getattr(self, f"{operation}_variant", None)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
