"""Gather: rank ``dst`` gets every rank's input, one after the other along the first dimension, in group order.

Protocol. The root meets every other rank, so every input may be read; it reads them into its own output; it meets them
again, so that they may overwrite their inputs. The input is read by the root and lies on the symmetric heap; the output
is used on the root alone and may lie anywhere; there the input may be its own piece of the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris.ccl import _calls
from iris.ccl._arguments import check_config, check_pair, place_of
from iris.ccl._calls import Call, Request, Work
from iris.ccl._kernels import gather_kernel
from iris.ccl._launch import kernel_launch
from iris.ccl._pieces import check_writable, is_piece, pieces
from iris.ccl.choice import programs
from iris.ccl.config import Config
from iris.errors import ArgumentError
from iris.runtime import checks
from iris.runtime.checks import check_tensor
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris

OPERATION = "gather"


def gather(
    output_tensor: torch.Tensor | None,
    input_tensor: torch.Tensor,
    ctx: Iris,
    dst: int = 0,
    group: Any = None,
    async_op: bool = False,
    config: Config | None = None,
) -> Work:
    """Collect the inputs of all ranks on one. Collective over ``group``.

    Args:
        output_tensor: on ``dst`` (world * M, ...) for inputs of (M, ...); not looked at elsewhere, where it may be
            None.
        input_tensor: any shape and dtype, the same on every rank, on the symmetric heap.
        dst: the rank of the world that gets the result.
        ctx, group, async_op, config: see :func:`iris.ccl.all_gather.all_gather`.

    Returns:
        The handle; its ``plan`` says what ran and why.

    Raises:
        ArgumentError, NotSymmetricError, DeviceMismatch: on the rank that has it, before any launch.
        RankMismatch: on the other ranks then, and on all ranks whose arguments differ.
        NotAMemberError: the caller is not in ``group``.
        CaptureError: the first such call, while a graph is captured.
    """
    work = Work()
    out = output_tensor if ctx.cur_rank == dst else None
    _calls.run(
        ctx, (OPERATION, group, config, dst), (out, input_tensor),
        lambda: _request(ctx, out, input_tensor, dst, group, config), _prepare, async_op=async_op, work=work,
    )  # fmt: skip
    return work


def explain(
    ctx: Iris,
    output_tensor: torch.Tensor | None,
    input_tensor: torch.Tensor,
    dst: int = 0,
    group: Any = None,
    config: Config | None = None,
) -> Plan:
    """The plan that :func:`gather` would follow with these arguments; runs nothing. Local."""
    return _prepare(_request(ctx, output_tensor, input_tensor, dst, group, config)).plan


def _request(ctx, output_tensor, input_tensor, dst, group, config) -> Request:
    tensors = {"output_tensor": output_tensor if ctx.cur_rank == dst else None, "input_tensor": input_tensor}
    return Request(
        ctx, OPERATION, ctx.resolve_group(group), group, tensors, {"dst": dst, "config": config}, ("input_tensor",)
    )


def _prepare(request: Request) -> Call:
    ctx, members = request.ctx, request.members
    root = place_of(members, request.facts["dst"], "dst")
    inp = check_tensor(ctx, "input_tensor", request.tensors["input_tensor"])
    config = check_config(request.facts["config"])
    source = pieces("input_tensor", inp)
    to = source
    if members.index == root:
        out, _ = check_pair(ctx, **request.tensors)
        want = list(inp.shape) or [1]
        want[0] *= members.size
        if list(out.shape) != want:
            raise ArgumentError(
                f"output_tensor must have shape {tuple(want)}: the input's {tuple(inp.shape)}, times {members.size} "
                f"ranks along the first dimension; got {tuple(out.shape)}"
            )
        check_writable("output_tensor", out)
        to = pieces("output_tensor", out, members.size)
        _calls.check_alias(
            request,
            is_piece(inp, source, out, to, root),
            "the input may be the own piece of the output, or apart from it",
        )
    problem = f"{tuple(inp.shape)} {str(inp.dtype).removeprefix('torch.')}, {members.size} ranks"
    if members.size == 1:
        return Call(_calls.alone(OPERATION, problem), _calls.copy_alone if inp.numel() else None)
    checks.check_symmetric(ctx, "input_tensor", inp, "read")
    count = source.count * members.size
    how = programs(ctx, config, count, inp.element_size(), ctx.channels.layout.lanes, 1 << 16)
    issue = kernel_launch(
        ctx, OPERATION, gather_kernel, members, how,
        numbers=(source.count, -(-source.count // how.block)),
        shape=(*source.strides, to.distance, *to.strides),
        root=(root,),
        moves=True,
        IN_FLAT=source.flat, OUT_FLAT=to.flat,
    )  # fmt: skip
    plan = Plan(OPERATION, "pull", how, "heuristic", "the root reads every input; the only algorithm", problem)
    return Call(plan, issue if inp.numel() else None, ("input_tensor",))
