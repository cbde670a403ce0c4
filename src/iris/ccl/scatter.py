"""Scatter: every rank gets its piece of rank ``src``'s input, cut along the first dimension in group order.

Protocol. The root meets every other rank, so their outputs may be written; it writes the pieces; it meets them again,
so that the outputs are complete. The output is written by the root and lies on the symmetric heap; the input is used on
the root alone and may lie anywhere; there the output may be its own piece of the input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris.ccl import _calls
from iris.ccl._arguments import check_config, check_pair, place_of
from iris.ccl._calls import Call, Request, Work
from iris.ccl._kernels import push_kernel
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

OPERATION = "scatter"


def scatter(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor | None,
    ctx: Iris,
    src: int = 0,
    group: Any = None,
    async_op: bool = False,
    config: Config | None = None,
) -> Work:
    """Hand out the pieces of one rank's input. Collective over ``group``.

    Args:
        output_tensor: (M, ...), the same on every rank, any dtype, on the symmetric heap.
        input_tensor: on ``src`` (world * M, ...); not looked at elsewhere, where it may be None.
        src: the rank of the world that has the input.
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
    inp = input_tensor if ctx.cur_rank == src else None
    _calls.run(
        ctx, (OPERATION, group, config, src), (output_tensor, inp),
        lambda: _request(ctx, output_tensor, inp, src, group, config), _prepare, async_op=async_op, work=work,
    )  # fmt: skip
    return work


def explain(
    ctx: Iris,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor | None,
    src: int = 0,
    group: Any = None,
    config: Config | None = None,
) -> Plan:
    """The plan that :func:`scatter` would follow with these arguments; runs nothing. Local."""
    return _prepare(_request(ctx, output_tensor, input_tensor, src, group, config)).plan


def _request(ctx, output_tensor, input_tensor, src, group, config) -> Request:
    # The input is the root's alone.
    tensors = {"output_tensor": output_tensor, "input_tensor": input_tensor if ctx.cur_rank == src else None}
    return Request(
        ctx, OPERATION, ctx.resolve_group(group), group, tensors, {"src": src, "config": config}, ("output_tensor",)
    )


def _prepare(request: Request) -> Call:
    ctx, members = request.ctx, request.members
    root = place_of(members, request.facts["src"], "src")
    out = check_tensor(ctx, "output_tensor", request.tensors["output_tensor"])
    config = check_config(request.facts["config"])
    check_writable("output_tensor", out)
    to = pieces("output_tensor", out)
    source = to
    if members.index == root:
        _, inp = check_pair(ctx, **request.tensors)
        want = list(out.shape) or [1]
        want[0] *= members.size
        if list(inp.shape) != want:
            raise ArgumentError(
                f"input_tensor must have shape {tuple(want)}: the output's {tuple(out.shape)}, times {members.size} "
                f"ranks along the first dimension; got {tuple(inp.shape)}"
            )
        source = pieces("input_tensor", inp, members.size)
        _calls.check_alias(
            request,
            is_piece(out, to, inp, source, root),
            "the output may be the own piece of the input, or apart from it",
        )
    problem = f"{tuple(out.shape)} {str(out.dtype).removeprefix('torch.')}, {members.size} ranks"
    if members.size == 1:
        return Call(_calls.alone(OPERATION, problem), _calls.copy_alone if out.numel() else None)
    checks.check_symmetric(ctx, "output_tensor", out, "written")
    how = programs(ctx, config, to.count * members.size, out.element_size(), ctx.channels.layout.lanes, 1 << 16)
    issue = kernel_launch(
        ctx, OPERATION, push_kernel, members, how,
        numbers=(to.count, -(-to.count // how.block)),
        shape=(source.distance, *source.strides, 0, *to.strides),
        root=(root,),
        moves=True,
        ROOTED=True, BY_RECEIVER=True, BY_SENDER=False, AT_ONCE=False, IN_FLAT=source.flat, OUT_FLAT=to.flat,
    )  # fmt: skip
    plan = Plan(OPERATION, "push", how, "heuristic", "the root writes every output; the only algorithm", problem)
    return Call(plan, issue if out.numel() else None, ("output_tensor",))
