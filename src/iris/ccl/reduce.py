"""Reduce: rank ``dst`` gets the combination of all ranks' inputs, element by element.

Values are combined in group order, in wide type, and rounded once.

Protocol. The root meets every other rank, so every input may be read; it reads them and writes its own output; it meets
them again, so that they may overwrite their inputs. The input is read by the root and lies on the symmetric heap; the
output is used on the root alone and may lie anywhere, or be the root's input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris.ccl import _calls
from iris.ccl._arguments import check_config, check_pair, check_reduced, meant_op, place_of
from iris.ccl._calls import Call, Request, Work
from iris.ccl._kernels import reduce_kernel
from iris.ccl._launch import kernel_launch, matrix_shape
from iris.ccl._pieces import check_writable, pieces
from iris.ccl.choice import most_block, programs
from iris.ccl.config import Config, reduce_op
from iris.errors import ArgumentError
from iris.runtime import checks
from iris.runtime.checks import check_tensor
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris

OPERATION = "reduce"


def reduce(
    output_tensor: torch.Tensor | None,
    input_tensor: torch.Tensor,
    ctx: Iris,
    dst: int = 0,
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
    config: Config | None = None,
) -> Work:
    """Combine the inputs of all ranks on one. Collective over ``group``.

    Args:
        output_tensor: on ``dst`` the input's shape and dtype; not looked at elsewhere, where it may be None.
        input_tensor: any shape, the same on every rank, on the symmetric heap; dtypes as in
            :func:`iris.ccl.all_reduce.all_reduce`.
        dst: the rank of the world that gets the result.
        op: see :func:`iris.ccl.all_reduce.all_reduce`.
        ctx, group, async_op, config: see :func:`iris.ccl.all_gather.all_gather`.

    Returns:
        The handle; its ``plan`` says what ran and why.

    Raises:
        ArgumentError, NotSymmetricError, DeviceMismatch, UnsupportedError: on the rank that has it, before any launch.
        RankMismatch: on the other ranks then, and on all ranks whose arguments differ.
        NotAMemberError: the caller is not in ``group``.
        CaptureError: the first such call, while a graph is captured.
    """
    work = Work()
    out = output_tensor if ctx.cur_rank == dst else None
    _calls.run(
        ctx, (OPERATION, group, config, dst, op), (out, input_tensor),
        lambda: _request(ctx, out, input_tensor, dst, op, group, config), _prepare, async_op=async_op, work=work,
    )  # fmt: skip
    return work


def explain(
    ctx: Iris,
    output_tensor: torch.Tensor | None,
    input_tensor: torch.Tensor,
    dst: int = 0,
    op: Any = None,
    group: Any = None,
    config: Config | None = None,
) -> Plan:
    """The plan that :func:`reduce` would follow with these arguments; runs nothing. Local."""
    return _prepare(_request(ctx, output_tensor, input_tensor, dst, op, group, config)).plan


def _request(ctx, output_tensor, input_tensor, dst, op, group, config) -> Request:
    members = ctx.resolve_group(group)
    tensors = {"output_tensor": output_tensor if ctx.cur_rank == dst else None, "input_tensor": input_tensor}
    return Request(
        ctx, OPERATION, members, group, tensors, {"dst": dst, "op": meant_op(op), "config": config}, ("input_tensor",)
    )


def _prepare(request: Request) -> Call:
    ctx, members = request.ctx, request.members
    root = place_of(members, request.facts["dst"], "dst")
    inp = check_tensor(ctx, "input_tensor", request.tensors["input_tensor"])
    config = check_config(request.facts["config"])
    check_reduced(ctx, inp.dtype)
    op = reduce_op(request.facts["op"], inp.dtype.is_floating_point)
    source = pieces("input_tensor", inp)
    to = source
    if members.index == root:
        out, _ = check_pair(ctx, **request.tensors)
        if out.shape != inp.shape:
            raise ArgumentError(f"output_tensor must have the input's shape {tuple(inp.shape)}, got {tuple(out.shape)}")
        check_writable("output_tensor", out)
        to = pieces("output_tensor", out)
        in_place = _calls.relation(out, inp) == "same" and to.strides == source.strides
        _calls.check_alias(request, in_place, "the output may be the input, or apart from it")
    problem = f"{tuple(inp.shape)} {str(inp.dtype).removeprefix('torch.')} {op.name}, {members.size} ranks"
    if members.size == 1:
        return Call(_calls.alone(OPERATION, problem), _calls.copy_alone if inp.numel() else None)
    checks.check_symmetric(ctx, "input_tensor", inp, "read")
    size = inp.element_size()
    how = programs(ctx, config, source.count, size, ctx.channels.layout.lanes, most_block(members.size, inp.dtype))
    issue = kernel_launch(
        ctx, OPERATION, reduce_kernel, members, how,
        numbers=(source.count, source.count, -(-source.count // how.block)),
        shape=(0, *matrix_shape(source, to)), root=(root,),
        ROOTED=True, TO_ALL=False, OP=int(op), IN_FLAT=source.flat, OUT_FLAT=to.flat,
    )  # fmt: skip
    plan = Plan(OPERATION, "pull", how, "heuristic", "the root reads every input; the only algorithm", problem)
    return Call(plan, issue if inp.numel() else None, ("input_tensor",))
