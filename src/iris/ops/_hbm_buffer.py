"""What the host does for the kernel with a staging buffer: sizes of grid and buffer, the launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris.ops._hbm_buffer_kernel import hbm_buffer_kernel
from iris.ops.config import HbmBufferConfig
from iris.runtime import launch

if TYPE_CHECKING:
    import torch

    from iris.ops.arguments import Problem
    from iris.runtime.context import Iris
    from iris.tuning import Plan

_KERNEL = launch.kernel_id("all_gather_matmul/hbm_buffer")
# Flags that a program reads at once, to see how much has come.
_AHEAD = 32


def grid(ctx: Iris, problem: Problem, plan: Plan) -> tuple[int, ...]:
    if plan.config is None:
        return (0,)
    config = plan.config
    shards = problem.world_size if problem.gather_dim == 0 else 1
    rows = problem.M // shards if shards else problem.M
    tiles = -(-rows // config.block_size_m) * -(-problem.N // config.block_size_n) * shards
    if isinstance(config, HbmBufferConfig):
        tiles += max(config.num_fetch_sms, config.first_stage_fetch_sms)
    return (min(tiles, config.num_sms or ctx.get_cu_count()),)


def staging_sizes(problem: Problem, plan: Plan, a: torch.Tensor) -> tuple[int, int]:
    """Bytes of the staging buffer and number of its flags; zeros for a plan that has none."""
    if not isinstance(plan.config, HbmBufferConfig):
        return 0, 0
    rows, depth = a.shape
    tiles = -(-rows // plan.config.block_size_m)
    blocks = -(-depth // plan.config.block_size_k)
    groups = -(-blocks // plan.config.k_per_flag)
    # At least one of each: one rank has no peers, and empty tensors have no address.
    parts = max(1, problem.world_size - 1)
    return max(1, parts * rows * depth) * a.element_size(), max(1, tiles * groups * parts)


def run_hbm_buffer(ctx, call, workspace, out, a, b, bias, scales, members) -> None:
    problem, config = call.problem, call.plan.config
    wide = bias.expand(problem.M, problem.N) if bias is not None else out
    scale_a, scale_b = scales if problem.scaled else (out, out)
    buffer, fetched = workspace.staging.get(*call.staging)
    rows, depth = a.shape
    part = rows * depth
    staged = buffer[: call.staging[0]].view(a.dtype)
    tiles_m = -(-rows // config.block_size_m)
    launch.start(
        ctx, hbm_buffer_kernel, call.grid,
        a, b, wide, out, scale_a, scale_b, staged,
        rows, problem.N, depth,
        *a.stride(), *b.stride(), *(wide.stride() if bias is not None else (0, 0)), *out.stride(),
        part, *((depth, 1) if config.staged_a_layout == "k_contiguous" else (1, rows)),
        fetched, workspace.staging.queue, min(config.num_fetch_sms, call.grid[0]), config.first_stage_fetch_sms,
        workspace.locks, workspace.counters, ctx.group_members(members), members.index, ctx.get_device_context(),
        WORLD=members.size,
        GATHER_DIM=problem.gather_dim,
        BLOCK_M=config.block_size_m,
        BLOCK_N=config.block_size_n,
        BLOCK_K=config.block_size_k,
        GROUP_M=config.group_size_m,
        STAGE_M=-(-tiles_m // min(config.num_fetch_stages, max(1, tiles_m))),
        K_PER_FLAG=config.k_per_flag,
        AHEAD=_AHEAD,
        HAS_BIAS=bias is not None,
        HAS_SCALES=problem.scaled,
        ACTIVATION=problem.activation,
        PRECISION=call.precision,
        KERNEL=_KERNEL,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
