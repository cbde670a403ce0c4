"""All-to-all: every rank gives a piece of its input to every rank.

The input is cut along ``dim`` into as many pieces as there are ranks; the output's piece r is what member r had for
the caller. ``dim=-1``, the default, cuts columns as the original API does; ``dim=0`` is
``torch.distributed.all_to_all_single`` with equal splits.

Protocol. As in :mod:`iris.ccl.all_gather`; a rank writes piece d of its input into its own piece of d's output.
The output is written by peers and lies on the symmetric heap; the input may lie anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from iris.ccl import _calls
from iris.ccl._arguments import check_config, check_dimension, check_pair
from iris.ccl._calls import Call, Request, Work
from iris.ccl._kernels import push_kernel
from iris.ccl._launch import kernel_launch
from iris.ccl._pieces import check_writable, pieces
from iris.ccl.choice import choose, plan, programs, torch_obstacle
from iris.ccl.config import Config
from iris.errors import ArgumentError, UnsupportedError
from iris.runtime import checks
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris

OPERATION = "all_to_all"


def all_to_all(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    ctx: Iris,
    group: Any = None,
    async_op: bool = False,
    config: Config | None = None,
    *,
    dim: int = -1,
    tune: bool = False,
) -> Work:
    """Exchange pieces with all ranks. Collective over ``group``.

    Args:
        output_tensor: the input's shape, on the symmetric heap.
        input_tensor: any shape and dtype, the same on every rank; the size along ``dim`` is a multiple of the number
            of ranks. Contiguous, or strided as a matrix is.
        ctx, group, async_op, config: see :func:`iris.ccl.all_gather.all_gather`; ``all_to_all_variant`` names the
            algorithm.
        dim: dimension that is cut; the last by default.
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
    work = Work()
    _calls.run(
        ctx, (OPERATION, group, config, dim), (output_tensor, input_tensor),
        lambda: _request(ctx, output_tensor, input_tensor, group, config, dim), _prepare, async_op=async_op, work=work,
        tune=tune,
    )  # fmt: skip
    return work


def explain(
    ctx: Iris,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    config: Config | None = None,
    *,
    dim: int = -1,
) -> Plan:
    """The plan that :func:`all_to_all` would follow with these arguments; runs nothing. Local."""
    return _prepare(_request(ctx, output_tensor, input_tensor, group, config, dim)).plan


def _request(ctx, output_tensor, input_tensor, group, config, dim) -> Request:
    tensors = {"output_tensor": output_tensor, "input_tensor": input_tensor}
    return Request(
        ctx, OPERATION, ctx.resolve_group(group), group, tensors, {"config": config, "dim": dim}, tuple(tensors)
    )


def _prepare(request: Request) -> Call:
    ctx, members = request.ctx, request.members
    out, inp = check_pair(ctx, **request.tensors)
    config = check_config(request.facts["config"])
    dim = check_dimension(request.facts["dim"], inp)
    if out.shape != inp.shape:
        raise ArgumentError(f"output_tensor must have the input's shape {tuple(inp.shape)}, got {tuple(out.shape)}")
    check_writable("output_tensor", out)
    to, source = pieces("output_tensor", out, members.size, dim), pieces("input_tensor", inp, members.size, dim)
    problem = f"{tuple(inp.shape)} {str(inp.dtype).removeprefix('torch.')}, dim={dim}, {members.size} ranks"
    if members.size == 1:
        in_place = _calls.relation(out, inp) == "same" and to.strides == source.strides
        _calls.check_alias(request, in_place, "a single rank may work in place")
        return Call(_calls.alone(OPERATION, problem), _calls.copy_alone if inp.numel() else None)
    _calls.check_alias(
        request, False, "pieces would be overwritten before they are read; give the output its own memory"
    )
    checks.check_symmetric(ctx, "output_tensor", out, "written")
    obstacle = torch_obstacle(ctx, members, request.group, (out, inp))
    if not obstacle and any(size > 1 for size in inp.shape[:dim]):
        obstacle = "PyTorch's all-to-all exchanges contiguous pieces, those of the first dimension"
    choice = choose(
        ctx, OPERATION, members, request.group, inp.numel() * inp.element_size(),
        config.all_to_all_variant if config else None,
        {"default": None, "torch": UnsupportedError(obstacle) if obstacle else None},
        ("default",),
        inp.dtype, config,
    )  # fmt: skip
    config = choice.config
    if choice.algorithm == "torch":
        return Call(plan(OPERATION, choice, None, problem), _torch(request.group) if inp.numel() else None)
    how = programs(ctx, config, source.count * members.size, inp.element_size(), ctx.channels.layout.lanes, 1 << 16)
    issue = kernel_launch(
        ctx, OPERATION, push_kernel, members, how,
        numbers=(source.count, -(-source.count // how.block)),
        shape=(source.distance, *source.strides, to.distance, *to.strides),
        root=(0,),
        moves=True,
        ROOTED=False, BY_RECEIVER=True, BY_SENDER=True, AT_ONCE=False, IN_FLAT=source.flat, OUT_FLAT=to.flat,
    )  # fmt: skip
    return Call(plan(OPERATION, choice, how, problem), issue if inp.numel() else None, ("output_tensor",))


def _torch(group: Any):
    chosen = group if isinstance(group, dist.ProcessGroup) else None

    def issue(channels, out: torch.Tensor, inp: torch.Tensor) -> None:
        # As bytes: gloo and NCCL do not carry every dtype.
        dist.all_to_all_single(out.view(torch.uint8).flatten(), inp.view(torch.uint8).flatten(), group=chosen)

    return issue
