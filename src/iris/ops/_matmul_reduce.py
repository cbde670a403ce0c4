"""What runs a call of matmul + reduce-scatter or + all-reduce: the launch of the kernel, and PyTorch's operations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from iris.errors import ArgumentError
from iris.ops import _moving_sums
from iris.ops._candidates import tuner
from iris.ops._matmul_reduce_call import Asked, Call, Schedule, State, checked, new_workspace
from iris.ops._matmul_reduce_kernel import matmul_reduce_kernel
from iris.ops.arguments import ACTIVATIONS
from iris.ops.call import address, agreed, float32_matmul, issue_in_order, layout, outside_of_graphs
from iris.ops.workspace import FusedWorkspace
from iris.runtime import checks, launch
from iris.runtime.groups import Group
from iris.tuning import Plan
from iris.x.operands import describe_a, describe_b

if TYPE_CHECKING:
    from iris.runtime.context import Iris

_KERNELS = {
    "fused": launch.kernel_id("matmul_reduce_scatter/fused"),
    "two_shot": launch.kernel_id("matmul_all_reduce/two_shot"),
    "one_shot": launch.kernel_id("matmul_all_reduce/one_shot"),
}
# PyTorch 2.13 renamed it.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def matmul_reduce(
    ctx: Iris, asked: Asked, out: Any, a: Any, b: Any, bias: Any, async_op: bool, workspace: FusedWorkspace | None
) -> FusedWorkspace:
    """The body of both operations; see :mod:`iris.ops.matmul_all_reduce`."""
    if not isinstance(async_op, bool):
        raise ArgumentError(
            f"async_op must be True or False, got {type(async_op).__name__}; the bias is given by name: bias=..."
        )
    return outside_of_graphs(_matmul_reduce)(ctx, asked, out, a, b, bias, async_op, workspace)


def prepare(ctx: Iris, asked: Asked, out: Any, a: Any, b: Any, bias: Any, workspace: Any) -> FusedWorkspace:
    """The body of both preambles."""
    members = ctx.resolve_group(asked.group)
    call = _state(ctx).agree(members, asked, out, a, b, bias, workspace, preamble=True)
    return workspace if workspace is not None else new_workspace(ctx, call, members)


def plan_of(ctx: Iris, asked: Asked, out: Any, a: Any, b: Any, bias: Any) -> Plan:
    """The plan that a call would follow; runs nothing. Local."""
    return checked(ctx, ctx.resolve_group(asked.group), asked, out, a, b, bias).plan


def _matmul_reduce(ctx, asked: Asked, out, a, b, bias, async_op, workspace) -> FusedWorkspace:
    members = ctx.resolve_group(asked.group)
    state = _state(ctx)
    key = (
        asked.operation, *layout(out), *layout(a), *layout(b), *layout(bias), asked.activation,
        *layout(asked.scales[0]), *layout(asked.scales[1]), address(out), asked.algorithm, asked.config,
        workspace is None, members.ranks, type(asked.group), torch.get_float32_matmul_precision(),
        asked.tune, asked.allow_fallback,
    )  # fmt: skip

    def tried(algorithm: str, config: Any) -> None:
        one = replace(asked, algorithm=algorithm, config=config, tune=False, allow_fallback=True)
        _matmul_reduce(ctx, one, out, a, b, bias, False, None)

    call, used = agreed(
        state, key, lambda: state.agree(members, asked, out, a, b, bias, workspace),
        (out, a, b, bias, *asked.scales), workspace, members, asked.allow_fallback,
        tuner(ctx, members, asked.algorithm, asked.config, workspace, asked.group, tried, out) if asked.tune else None,
    )  # fmt: skip
    if call.problem.M and call.problem.N:
        shared = used.partials is None or not used.partials.fixed
        issue_in_order(
            ctx, used, state.order if shared else None, async_op,
            lambda: _issue(ctx, call, used, out, a, b, bias, asked, members),
        )  # fmt: skip
    return used


def _issue(ctx, call: Call, workspace, out, a, b, bias, asked: Asked, members: Group) -> None:
    if call.schedule is None:
        _run_torch(call, out, a, b, bias, asked)
    elif isinstance(call.schedule, _moving_sums.Schedule):
        _moving_sums.run(ctx, call, call.schedule, workspace, out, a, b, bias, asked.scales, members)
    else:
        _run_kernel(ctx, call, workspace, out, a, b, bias, asked.scales, members)


def _run_kernel(ctx, call: Call, workspace, out, a, b, bias, scales, members: Group) -> None:
    problem, config, s = call.problem, call.plan.config, call.schedule
    assert isinstance(s, Schedule)
    memory = workspace.partials.get(s.nbytes, s.flags)
    sums, summed = memory.sums(s.sums, s.summed, torch.int32 if a.dtype == torch.int8 else torch.float32)
    workspace.aux_buffer = memory.buffer
    wide = bias.expand(problem.M, problem.N)[call.first :] if bias is not None else out
    scale_a, scale_b = scales if problem.scaled else (out, out)
    descriptors = (None, None)
    if s.descriptors:
        descriptors = (
            describe_a(a, config.block_size_m, config.block_size_k),
            describe_b(b, config.block_size_n, config.block_size_k),
        )
    launch.start(
        ctx, matmul_reduce_kernel, (s.grid,),
        *descriptors, a, b, wide, scale_a, scale_b, out, memory.buffer.view(out.dtype),
        problem.M, problem.N, problem.K, call.chunk,
        *a.stride(), *b.stride(), *(wide.stride() if bias is not None else (0, 0)), *out.stride(),
        memory.arrived, sums, summed, memory.queue,
        memory.sizes[0] // 2 // out.element_size(), memory.sizes[1] // max(1, members.size - 1),
        s.ahead, s.whole, s.splits, s.senders,
        memory.locks, memory.counters, ctx.group_members(members), members.index, ctx.get_device_context(),
        WORLD=members.size,
        # A block has at least two elements.
        LANES=max(2, 1 << (members.size - 1).bit_length()),
        VARIANT=s.variant,
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
        KERNEL=_KERNELS[call.plan.algorithm],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def _run_torch(call: Call, out, a, b, bias, asked: Asked) -> None:
    problem = call.problem
    group = asked.group if isinstance(asked.group, dist.ProcessGroup) else None
    if a.dtype in checks.FP8:
        # Both fp8 formats are exact in each of the output types.
        a, b = a.to(out.dtype), b.to(out.dtype)
    world, dtype, device = problem.world_size, out.dtype, out.device
    plain = bias is None and problem.activation == "none" and not problem.scaled
    if call.scatter:
        # The ranks' parts have one size for PyTorch; rows past the last one belong to nobody.
        product = torch.empty((call.chunk * world, problem.N), dtype=dtype, device=device)
        product[problem.M :].zero_()
    elif plain and out.is_contiguous():
        product = out
    else:
        product = torch.empty((problem.M, problem.N), dtype=dtype, device=device)
    if a.dtype == dtype:
        torch.matmul(a, b, out=product[: problem.M])
    else:
        product[: problem.M].copy_(float32_matmul(a, b))
    total = product
    if world > 1 and call.scatter:
        direct = plain and call.rows == call.chunk and out.is_contiguous()
        total = out if direct else torch.empty((call.chunk, problem.N), dtype=dtype, device=device)
        _reduce_scatter(total, product, group=group)
    elif world > 1:
        dist.all_reduce(product, group=group)
    total = total[: call.rows]
    if plain:
        if total.data_ptr() != out.data_ptr():
            out.copy_(total)
        return
    # In float32, so that what follows the sum is rounded once, at the end.
    total = total.to(torch.promote_types(total.dtype, torch.float32))
    if problem.scaled:
        total *= (asked.scales[0] * asked.scales[1]).reshape(())
    if bias is not None:
        total += bias.expand(problem.M, problem.N)[call.first : call.first + call.rows]
    out.copy_(ACTIVATIONS[problem.activation](total))


def _state(ctx: Iris) -> State:
    return ctx.service("matmul_reduce_state")
