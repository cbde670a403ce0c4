"""matmul + all-reduce with sums that move between the ranks: the variants ``atomic``, ``spinlock`` and ``ring``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from iris.device.signal import FLAG_STRIDE
from iris.ops._matmul_all_reduce_atomic_kernel import matmul_all_reduce_atomic_kernel
from iris.ops._matmul_all_reduce_ring_kernel import matmul_all_reduce_ring_kernel
from iris.ops.arguments import Problem
from iris.ops.config import FusedConfig
from iris.ops.workspace import FusedWorkspace
from iris.runtime import launch
from iris.runtime.groups import Group
from iris.tuning import Plan
from iris.x.operands import describe_a, describe_b, takes_descriptors

if TYPE_CHECKING:
    from iris.ops._matmul_reduce_call import Call
    from iris.runtime.context import Iris

ALGORITHMS = ("atomic", "spinlock", "ring")
# Sums on their way to a rank: 4 MiB of tiles of 128 x 128. A power of two, and the same in all calls.
RING_SLOTS = 64
_KERNELS = {name: launch.kernel_id(f"matmul_all_reduce/{name}") for name in ALGORITHMS}
_WIDEST = 128
# Bytes of sums and of what they are rounded to that a warp has at once: about a third of its registers.
_WARP_BYTES = 10 << 10


@dataclass(frozen=True)
class Schedule:
    """The numbers of one call, from its problem and configuration alone.

    Attributes:
        grid: number of programs.
        nbytes, flags: sizes of the sums that a rank owns or of its slots, and of their words.
        reduce_rows: rows of a sum that are taken at once, where it comes from memory.
        slots: of a ring.
        descriptors: whether operands come by tensor descriptors.
    """

    grid: int
    nbytes: int
    flags: int
    reduce_rows: int
    slots: int
    descriptors: bool


def narrowed(config: FusedConfig) -> FusedConfig:
    """Tiles that leave registers for a sum, or for the addresses of atomics, beside the product."""
    if config.block_size_n <= _WIDEST:
        return config
    return replace(config, block_size_n=_WIDEST)


def schedule(ctx: Iris, problem: Problem, plan: Plan, a: torch.Tensor, b: torch.Tensor, precision: str) -> Schedule:
    """The numbers of a call."""
    config = plan.config
    m, n = config.block_size_m, config.block_size_n
    tiles = -(-problem.M // m) * -(-problem.N // n)
    slots = RING_SLOTS if plan.algorithm == "ring" else 0
    owned = -(-tiles // problem.world_size)
    reduce_rows = m
    while reduce_rows > 1 and reduce_rows * n * 8 > _WARP_BYTES * config.num_warps:
        reduce_rows //= 2
    return Schedule(
        grid=min(tiles, config.num_sms or ctx.get_cu_count()),
        nbytes=(slots or owned) * m * n * 4 if tiles else 0,
        flags=(2 * slots or owned) * FLAG_STRIDE.value if tiles else 0,
        reduce_rows=reduce_rows,
        slots=slots,
        # As for partial products that are exchanged.
        descriptors=takes_descriptors(ctx.target, a, b) and (a.dtype != torch.float32 or precision == "tf32"),
    )


def run(
    ctx: Iris, call: Call, s: Schedule, workspace: FusedWorkspace, out, a, b, bias, scales: tuple[Any, Any],
    members: Group,
) -> None:  # fmt: skip
    """Launch the kernel of a call."""
    problem, config, algorithm = call.problem, call.plan.config, call.plan.algorithm
    assert workspace.partials is not None
    memory = workspace.partials.get(s.nbytes, s.flags)
    assert memory.buffer is not None
    workspace.aux_buffer = memory.buffer
    wide = bias.expand(problem.M, problem.N) if bias is not None else out
    descriptors = (None, None)
    if s.descriptors:
        descriptors = (
            describe_a(a, config.block_size_m, config.block_size_k),
            describe_b(b, config.block_size_n, config.block_size_k),
        )
    if algorithm == "ring":
        kernel, own = matmul_all_reduce_ring_kernel, {"SLOTS": s.slots}
    else:
        kernel = matmul_all_reduce_atomic_kernel
        own = {"LOCKED": algorithm == "spinlock", "REDUCE_M": s.reduce_rows}
    launch.start(
        ctx, kernel, (s.grid,),
        *descriptors, a, b, wide, *(scales if problem.scaled else (out, out)), out,
        memory.buffer[: s.nbytes].view(torch.int32 if a.dtype == torch.int8 else torch.float32),
        problem.M, problem.N, problem.K,
        *a.stride(), *b.stride(), *(wide.stride() if bias is not None else (0, 0)), *out.stride(),
        memory.arrived, memory.queue,
        memory.locks, memory.counters, ctx.group_members(members), members.index, ctx.get_device_context(),
        WORLD=members.size,
        **own,
        BLOCK_M=config.block_size_m,
        BLOCK_N=config.block_size_n,
        BLOCK_K=config.block_size_k,
        GROUP_M=config.group_size_m,
        DESCRIPTORS=s.descriptors,
        B_TRANSPOSED=b.stride(1) != 1,
        HAS_BIAS=bias is not None,
        HAS_SCALES=problem.scaled,
        ACTIVATION=problem.activation,
        PRECISION=call.precision,
        TRACING=ctx.tracing.enabled,
        KERNEL=_KERNELS[algorithm],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
