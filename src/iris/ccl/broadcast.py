"""Broadcast: every rank gets rank ``src``'s tensor.

Algorithms (``Config.broadcast_variant``).

``direct``
    The ranks meet the root; it writes every output; they meet again.
``scatter_allgather``
    All ranks meet; the root writes a shard to each rank; they meet; each rank writes its shard to the others; they meet
    again. Uses every rank's links instead of the root's alone, at the price of one more meeting.
``torch``
    ``torch.distributed.broadcast``.

The output is written by peers and lies on the symmetric heap; the input is used on the root alone and may lie anywhere,
or be the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from iris.ccl import _calls
from iris.ccl._arguments import check_config, check_pair, place_of
from iris.ccl._calls import Call, Request, Work
from iris.ccl._kernels import push_kernel, spread_kernel
from iris.ccl._launch import kernel_launch, matrix_shape
from iris.ccl._pieces import check_writable, pieces
from iris.ccl.choice import choose, plan, programs, torch_obstacle
from iris.ccl.config import Config
from iris.errors import ArgumentError, UnsupportedError
from iris.runtime import checks
from iris.runtime.checks import check_tensor
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris

OPERATION = "broadcast"
# A shard is a multiple of this, so that the blocks of all ranks are aligned alike.
_SHARD = 128


def broadcast(
    tensor: torch.Tensor,
    ctx: Iris,
    src: int = 0,
    group: Any = None,
    async_op: bool = False,
    config: Config | None = None,
    *,
    tune: bool = False,
) -> Work:
    """Copy one rank's tensor into every rank's. Collective over ``group``.

    Args:
        tensor: any shape and dtype, the same on every rank, on the symmetric heap.
        src: the rank of the world whose values all get.
        ctx, group, async_op, config: see :func:`iris.ccl.all_gather.all_gather`; ``broadcast_variant`` names the
            algorithm.
        tune: when nothing was tuned for the call on this machine, measure several algorithms, which overwrites the
            output, and keep what was found for this and later programs; leaves ``config`` open.

    Returns:
        The handle; its ``plan`` says what ran and why.

    Raises:
        ArgumentError, NotSymmetricError, DeviceMismatch, UnsupportedError: on the rank that has it, before any launch.
        RankMismatch: on the other ranks then, and on all ranks whose arguments differ.
        NotAMemberError: the caller is not in ``group``.
        CaptureError: the first such call, while a graph is captured.
    """
    return broadcast_tensor(tensor, tensor, ctx, src, group, async_op, config, tune=tune)


def broadcast_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor | None,
    ctx: Iris,
    src: int = 0,
    group: Any = None,
    async_op: bool = False,
    config: Config | None = None,
    *,
    tune: bool = False,
) -> Work:
    """Copy one rank's input into every rank's output. Collective over ``group``.

    Args:
        output_tensor: any shape and dtype, the same on every rank, on the symmetric heap.
        input_tensor: on ``src`` a tensor like the output, or the output; not looked at elsewhere, where it may be None.

    The other arguments, the result and the errors are those of :func:`broadcast`.
    """
    work = Work()
    inp = input_tensor if ctx.cur_rank == src else None
    _calls.run(
        ctx, (OPERATION, group, config, src), (output_tensor, inp),
        lambda: _request(ctx, output_tensor, inp, src, group, config), _prepare, async_op=async_op, work=work,
        tune=tune,
    )  # fmt: skip
    return work


def explain(
    ctx: Iris,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor | None = None,
    src: int = 0,
    group: Any = None,
    config: Config | None = None,
) -> Plan:
    """The plan that :func:`broadcast_tensor` would follow with these arguments; runs nothing. Local.

    Without ``input_tensor``, that of :func:`broadcast`.
    """
    source = output_tensor if input_tensor is None else input_tensor
    return _prepare(_request(ctx, output_tensor, source, src, group, config)).plan


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
        if inp.shape != out.shape:
            raise ArgumentError(f"input_tensor must have the output's shape {tuple(out.shape)}, got {tuple(inp.shape)}")
        source = pieces("input_tensor", inp)
        in_place = _calls.relation(out, inp) == "same" and to.strides == source.strides
        _calls.check_alias(request, in_place, "the input may be the output, or apart from it")
    problem = f"{tuple(out.shape)} {str(out.dtype).removeprefix('torch.')}, {members.size} ranks"
    if members.size == 1:
        return Call(_calls.alone(OPERATION, problem), _calls.copy_alone if out.numel() else None)
    checks.check_symmetric(ctx, "output_tensor", out, "written")
    obstacle = torch_obstacle(ctx, members, request.group, (out,))
    choice = choose(
        ctx, OPERATION, members, request.group, out.numel() * out.element_size(),
        config.broadcast_variant if config else None,
        {"direct": None, "scatter_allgather": None, "torch": UnsupportedError(obstacle) if obstacle else None},
        ("direct",),
        out.dtype, config,
    )  # fmt: skip
    config = choice.config
    if choice.algorithm == "torch":
        issue = _torch(request.group, request.facts["src"]) if out.numel() else None
        return Call(plan(OPERATION, choice, None, problem), issue)
    n, lanes = to.count, ctx.channels.layout.lanes
    shard = n if choice.algorithm == "direct" else -(-n // (members.size * _SHARD)) * _SHARD
    how = programs(ctx, config, shard, out.element_size(), lanes, 1 << 16)
    if choice.algorithm == "direct":
        issue = kernel_launch(
            ctx, OPERATION, push_kernel, members, how,
            numbers=(n, -(-n // how.block)), shape=(0, *source.strides, 0, *to.strides), root=(root,), moves=True,
            ROOTED=True, BY_RECEIVER=False, BY_SENDER=False, AT_ONCE=True, IN_FLAT=source.flat, OUT_FLAT=to.flat,
        )  # fmt: skip
    else:
        issue = kernel_launch(
            ctx, OPERATION, spread_kernel, members, how,
            numbers=(n, shard, -(-shard // how.block)), shape=matrix_shape(source, to), root=(root,), moves=True,
            IN_FLAT=source.flat, OUT_FLAT=to.flat,
        )  # fmt: skip
    return Call(plan(OPERATION, choice, how, problem), issue if out.numel() else None, ("output_tensor",))


def _torch(group: Any, src: int):
    chosen = group if isinstance(group, dist.ProcessGroup) else None

    def issue(channels, out: torch.Tensor, inp: torch.Tensor | None) -> None:
        if inp is not None and inp.data_ptr() != out.data_ptr():
            out.copy_(inp)
        # As bytes: gloo and NCCL do not carry every dtype.
        whole = out.view(torch.uint8) if out.dim() else out.reshape(1).view(torch.uint8)
        dist.broadcast(whole, src=src, group=chosen)

    return issue
