"""All-gather: every rank gets every rank's input, in group order.

``output[..., r * n : (r + 1) * n, ...]`` along ``dim`` is the input of member r, with n the input's size along ``dim``.

Protocol. The ranks meet lane by lane, so every output may be written; each rank writes its input into its piece of
every output; the ranks meet again, so every output is complete and may be read by what follows in the stream.
The output is written by peers and lies on the symmetric heap; the input may lie anywhere, or be the own piece of the
output. A kernel does all of that, or with ``copy_engine`` a kernel meets and copies write (:mod:`iris.ccl._copies`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from iris.ccl import _calls, _copies
from iris.ccl._arguments import check_config, check_dimension, check_pair
from iris.ccl._calls import Call, Request, Work
from iris.ccl._kernels import push_kernel
from iris.ccl._launch import kernel_launch
from iris.ccl._pieces import Pieces, check_writable, is_piece, pieces
from iris.ccl.choice import choose, plan, programs, torch_obstacle
from iris.ccl.config import Config
from iris.errors import ArgumentError, UnsupportedError
from iris.runtime import checks
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris

OPERATION = "all_gather"
# PyTorch 2.13 renamed it.
_torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    ctx: Iris,
    group: Any = None,
    async_op: bool = False,
    config: Config | None = None,
    *,
    dim: int = 0,
    tune: bool = False,
) -> Work:
    """Concatenate the inputs of all ranks along ``dim`` on every rank. Collective over ``group``.

    Args:
        output_tensor: the input's shape with the size along ``dim`` times the number of ranks, on the symmetric heap.
        input_tensor: any shape and dtype, the same on every rank; contiguous, or strided as a matrix is.
        ctx: the context.
        group: None for all ranks, a process group, or a sequence of ranks; pieces are in group order.
        async_op: return at launch; ``wait()`` of the result orders the current stream after the operation, and the
            tensors must live until then.
        config: how the kernel runs; ``all_gather_variant`` names the algorithm.
        dim: dimension along which the pieces lie.
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
    dim: int = 0,
) -> Plan:
    """The plan that :func:`all_gather` would follow with these arguments; runs nothing. Local."""
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
    want = list(inp.shape) or [1]
    want[dim] *= members.size
    if list(out.shape) != want:
        raise ArgumentError(
            f"output_tensor must have shape {tuple(want)}: the input's {tuple(inp.shape)}, times {members.size} ranks "
            f"along dimension {dim}; got {tuple(out.shape)}"
        )
    check_writable("output_tensor", out)
    to, source = pieces("output_tensor", out, members.size, dim), pieces("input_tensor", inp)
    in_place = is_piece(inp, source, out, to, members.index)
    _calls.check_alias(request, in_place, "the input may be the own piece of the output, or apart from it")
    problem = f"{tuple(inp.shape)} {str(inp.dtype).removeprefix('torch.')}, dim={dim}, {members.size} ranks"
    if members.size == 1:
        return Call(_calls.alone(OPERATION, problem), _calls.copy_alone if inp.numel() else None)
    checks.check_symmetric(ctx, "output_tensor", out, "written")
    obstacle = torch_obstacle(ctx, members, request.group, (out, inp))
    if not obstacle and any(size > 1 for size in inp.shape[:dim]):
        obstacle = "PyTorch's all-gather puts the pieces one after the other, so sizes before dim must be 1"
    apart = _copies.obstacle(source, to)
    choice = choose(
        ctx, OPERATION, members, request.group, out.numel() * out.element_size(),
        config.all_gather_variant if config else None,
        {
            "persistent": None,
            "partitioned": None,
            "copy_engine": UnsupportedError(apart) if apart else None,
            "torch": UnsupportedError(obstacle) if obstacle else None,
        },
        ("persistent",),
        inp.dtype, config,
    )  # fmt: skip
    config = choice.config
    if choice.algorithm == "torch":
        return Call(plan(OPERATION, choice, None, problem), _torch(request.group) if inp.numel() else None)
    if choice.algorithm == "copy_engine":
        copies = _copies.copies(ctx, OPERATION, members, source, to, in_place) if inp.numel() else None
        return Call(plan(OPERATION, choice, None, problem), copies, ("output_tensor",))
    how = programs(ctx, config, source.count, inp.element_size(), ctx.channels.layout.lanes, 1 << 16)
    issue = _kernel(request, choice.algorithm, how, source, to) if inp.numel() else None
    return Call(plan(OPERATION, choice, how, problem), issue, ("output_tensor",))


def _kernel(request: Request, algorithm: str, how, source: Pieces, to: Pieces):
    return kernel_launch(
        request.ctx, OPERATION, push_kernel, request.members, how,
        numbers=(source.count, -(-source.count // how.block)),
        shape=(0, *source.strides, to.distance, *to.strides),
        root=(0,),
        moves=True,
        ROOTED=False, BY_RECEIVER=False, BY_SENDER=True, AT_ONCE=algorithm == "persistent",
        IN_FLAT=source.flat, OUT_FLAT=to.flat,
    )  # fmt: skip


def _torch(group: Any):
    chosen = group if isinstance(group, dist.ProcessGroup) else None

    def issue(channels, out: torch.Tensor, inp: torch.Tensor) -> None:
        # As bytes: gloo and NCCL do not carry every dtype.
        whole, mine = (t.view(torch.uint8).flatten() if t.dim() else t.reshape(1).view(torch.uint8) for t in (out, inp))
        _torch_all_gather(whole, mine, group=chosen)

    return issue
