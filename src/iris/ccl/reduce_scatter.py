"""Reduce-scatter: the inputs of all ranks are combined, and each rank gets a part of the result.

Two meanings, told apart by the output's shape:

- ``output[M / world, ...]``: part r of the first dimension for member r, as
  ``torch.distributed.reduce_scatter_tensor``.
- An output of the input's shape (M, N), two-dimensional: the original API's ownership of tiles. Each tile of
  ``block_size_m`` x ``block_size_n`` has one owner, who gets it at its own position; the rest of the output is left as
  it is. :func:`owner_of` says whose a (row, column) is.

Values are combined in group order, in wide type, and rounded once.

Protocol. The ranks meet, so every input may be read; each reads its part of every input and writes its own output; the
ranks meet again, so the inputs may be overwritten by what follows in the stream. The input is read by peers and lies on
the symmetric heap; the output may lie anywhere, or be the own part of the input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from iris.ccl import _calls
from iris.ccl._arguments import check_config, check_pair, check_reduced, meant_op
from iris.ccl._calls import Call, Request, Work
from iris.ccl._kernels import reduce_kernel, reduce_tiles_kernel
from iris.ccl._launch import kernel_launch, matrix_shape
from iris.ccl._pieces import check_writable, is_piece, pieces
from iris.ccl.choice import Programs, choose, most_block, plan, programs, torch_obstacle
from iris.ccl.config import Config, ReduceOp, reduce_op
from iris.errors import ArgumentError, UnsupportedError
from iris.runtime import checks
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris

OPERATION = "reduce_scatter"
# PyTorch 2.13 renamed it.
_torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def reduce_scatter(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    ctx: Iris,
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
    config: Config | None = None,
    *,
    tune: bool = False,
) -> Work:
    """Combine the inputs of all ranks, a part on each. Collective over ``group``.

    Args:
        output_tensor: the input's dtype; its shape says which meaning is asked for, see the module's docstring.
        input_tensor: on the symmetric heap; float64, float32, float16, bfloat16, fp8, int8, uint8, int16, int32 or
            int64. Contiguous, or strided as a matrix is.
        op: None (SUM), an :class:`iris.ccl.ReduceOp` or one of ``torch.distributed.ReduceOp``: SUM, PRODUCT, MIN, MAX,
            AVG (floating point).
        ctx, group, async_op: see :func:`iris.ccl.all_gather.all_gather`.
        config: how the kernel runs; ``reduce_scatter_variant`` names the algorithm. Where tiles have owners, its
            ``block_size_m``, ``block_size_n``, ``swizzle_size`` and ``reduce_scatter_distribution`` say which.
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
        ctx, (OPERATION, group, config, op), (output_tensor, input_tensor),
        lambda: _request(ctx, output_tensor, input_tensor, op, group, config), _prepare, async_op=async_op, work=work,
        tune=tune,
    )  # fmt: skip
    return work


def explain(
    ctx: Iris,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    op: Any = None,
    group: Any = None,
    config: Config | None = None,
) -> Plan:
    """The plan that :func:`reduce_scatter` would follow with these arguments; runs nothing. Local."""
    return _prepare(_request(ctx, output_tensor, input_tensor, op, group, config)).plan


def owner_of(row: int, column: int, shape: tuple[int, int], world_size: int, config: Config | None = None) -> int:
    """The member that gets element (row, column) of an output of the input's ``shape``.

    Args:
        row, column: the element.
        shape: (M, N).
        world_size: number of ranks in the group.
        config: of the call.

    Raises:
        ArgumentError: the element is not in the tensor.
    """
    if not (0 <= row < shape[0] and 0 <= column < shape[1]):
        raise ArgumentError(f"({row}, {column}) is not in a tensor of shape {tuple(shape)}")
    config = config or Config()
    rows, columns = -(-shape[0] // config.block_size_m), -(-shape[1] // config.block_size_n)
    tile_m, tile_n = row // config.block_size_m, column // config.block_size_n
    group = tile_m // config.swizzle_size
    size = min(config.swizzle_size, rows - group * config.swizzle_size)
    tile = group * config.swizzle_size * columns + tile_n * size + tile_m % config.swizzle_size
    if config.reduce_scatter_distribution == 0:
        return tile % world_size
    return tile // -(-rows * columns // world_size)


def _request(ctx, output_tensor, input_tensor, op, group, config) -> Request:
    tensors = {"output_tensor": output_tensor, "input_tensor": input_tensor}
    return Request(
        ctx, OPERATION, ctx.resolve_group(group), group, tensors, {"op": meant_op(op), "config": config}, tuple(tensors)
    )


def _prepare(request: Request) -> Call:
    ctx, members = request.ctx, request.members
    out, inp = check_pair(ctx, **request.tensors)
    config = check_config(request.facts["config"])
    check_reduced(ctx, inp.dtype)
    op = reduce_op(request.facts["op"], inp.dtype.is_floating_point)
    check_writable("output_tensor", out)
    tiles = out.shape == inp.shape and out.dim() == 2 and members.size > 1
    part = [inp.shape[0] // members.size, *inp.shape[1:]] if inp.dim() else []
    if not tiles and (not inp.dim() or inp.shape[0] % members.size or list(out.shape) != part):
        raise ArgumentError(
            f"output_tensor must have the input's shape with the first dimension divided by {members.size} ranks, or "
            f"for ownership of tiles the input's shape with two dimensions; got {tuple(out.shape)}, input "
            f"{tuple(inp.shape)}"
        )
    problem = f"{tuple(inp.shape)} {str(inp.dtype).removeprefix('torch.')} {op.name}, {members.size} ranks"
    if members.size == 1:
        in_place = _calls.relation(out, inp) == "same" and out.stride() == inp.stride()
        _calls.check_alias(request, in_place, "a single rank may work in place")
        return Call(_calls.alone(OPERATION, problem), _calls.copy_alone if inp.numel() else None)
    checks.check_symmetric(ctx, "input_tensor", inp, "read")
    if tiles:
        return _by_tiles(request, out, inp, op, config, problem)
    to, source = pieces("output_tensor", out), pieces("input_tensor", inp, members.size)
    _calls.check_alias(
        request,
        is_piece(out, to, inp, source, members.index),
        "the output may be the own part of the input, or apart from it",
    )
    obstacle = torch_obstacle(ctx, members, request.group, (out, inp), op)
    choice = choose(
        ctx, OPERATION, members, request.group, inp.numel() * inp.element_size(),
        config.reduce_scatter_variant if config else None,
        {"two_shot": None, "torch": UnsupportedError(obstacle) if obstacle else None},
        ("two_shot",),
        inp.dtype, config,
    )  # fmt: skip
    config = choice.config
    if choice.algorithm == "torch":
        return Call(plan(OPERATION, choice, None, problem), _torch(request.group, op) if inp.numel() else None)
    size = inp.element_size()
    how = programs(ctx, config, to.count, size, ctx.channels.layout.lanes, most_block(members.size, inp.dtype))
    issue = kernel_launch(
        ctx, OPERATION, reduce_kernel, members, how,
        numbers=(to.count, to.count, -(-to.count // how.block)),
        shape=(source.distance, *matrix_shape(source, to)), root=(0,),
        ROOTED=False, TO_ALL=False, OP=int(op), IN_FLAT=source.flat, OUT_FLAT=to.flat,
    )  # fmt: skip
    return Call(plan(OPERATION, choice, how, problem), issue if inp.numel() else None, ("input_tensor",))


def _by_tiles(request: Request, out, inp, op: ReduceOp, config: Config | None, problem: str) -> Call:
    ctx, members = request.ctx, request.members
    same = _calls.relation(out, inp) == "same" and out.stride() == inp.stride()
    _calls.check_alias(request, same, "the output may be the input, or apart from it")
    config = config or Config()
    if config.reduce_scatter_variant == "torch":
        raise UnsupportedError(
            "PyTorch's reduce-scatter gives each rank a contiguous part; for that the output has the input's shape "
            f"with the first dimension divided by {members.size} ranks"
        )
    shape = f"tiles of {config.block_size_m}x{config.block_size_n}"
    tiles = -(-inp.shape[0] // config.block_size_m) * -(-inp.shape[1] // config.block_size_n)
    share = -(-tiles // members.size)
    most = min(ctx.channels.layout.lanes, ctx.get_cu_count(), config.comm_sms or ctx.get_cu_count())
    how = Programs(max(1, min(most, share)), config.block_size_m * config.block_size_n, config.num_warps or 4)
    issue = kernel_launch(
        ctx, OPERATION, reduce_tiles_kernel, members, how,
        numbers=(*inp.shape, share), shape=(*inp.stride(), *out.stride()),
        BLOCK_M=config.block_size_m, BLOCK_N=config.block_size_n, GROUP_M=config.swizzle_size,
        CONTIGUOUS=config.reduce_scatter_distribution == 1, OP=int(op),
    )  # fmt: skip
    source = "user" if config.reduce_scatter_variant else "heuristic"
    reason = f"the output has the input's shape, so each rank gets the tiles that it owns, {shape}"
    return Call(
        Plan(OPERATION, "two_shot", how, source, reason, problem), issue if inp.numel() else None, ("input_tensor",)
    )


def _torch(group: Any, op: ReduceOp):
    chosen = group if isinstance(group, dist.ProcessGroup) else None
    theirs = getattr(dist.ReduceOp, op.name)

    def issue(channels, out: torch.Tensor, inp: torch.Tensor) -> None:
        _torch_reduce_scatter(out, inp, op=theirs, group=chosen)

    return issue
