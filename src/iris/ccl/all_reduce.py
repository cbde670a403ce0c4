"""All-reduce: every rank gets the combination of all ranks' inputs, element by element.

Algorithms (``Config.all_reduce_variant``). Values are combined in wide type (float32; 64-bit types in themselves;
int32 for narrower integers) and rounded once, and every rank holds bitwise the same result.

``push``
    Each rank writes its input into small slots of every peer, then combines what its own slots hold; one meeting for
    each block that fits a slot. Lowest latency. Tensors may lie anywhere, in place too.
``one_shot``
    The ranks meet; each reads every input and combines them; they meet again. The input is on the heap, apart from
    the output.
``two_shot``
    The ranks meet; each combines its shard of every input and writes the result to every output; they meet again.
    Moves the least bytes. Input and output are on the heap; in place is fine: a shard is read by its owner alone.
``ring``
    From neighbour to neighbour through slots. Tensors may lie anywhere, in place too.
``atomic``, ``spinlock``
    Parts are added at an owner, by atomics or under a lock, in the order of arrival, and handed out from there. SUM and
    AVG only; the last bits differ from run to run. The output is on the heap; in place is fine.
``torch``
    ``torch.distributed.all_reduce``.

``push``, ``one_shot`` and ``two_shot`` combine in group order and so agree bitwise with each other; ``ring`` in an
order that depends on the element alone. Protocols: :mod:`iris.x.channel`, :mod:`iris.ccl._kernels`,
:mod:`iris.ccl._slot_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from iris.ccl import _calls
from iris.ccl._arguments import check_config, check_pair, check_reduced, meant_op
from iris.ccl._calls import Call, Request, Work
from iris.ccl._kernels import reduce_kernel
from iris.ccl._launch import kernel_launch, matrix_shape
from iris.ccl._pieces import Pieces, check_writable, pieces
from iris.ccl._slot_kernels import all_reduce_accumulate_kernel, all_reduce_push_kernel, all_reduce_ring_kernel
from iris.ccl.choice import Programs, choose, most_block, plan, programs, torch_obstacle, wide_dtype
from iris.ccl.config import Config, ReduceOp, reduce_op
from iris.errors import ArgumentError, IrisError, NotSymmetricError, UnsupportedError
from iris.runtime import channels as channel_memory
from iris.runtime import checks
from iris.runtime.channels import Channels
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris

OPERATION = "all_reduce"
# A shard of two_shot is a multiple of this, so that the blocks of all ranks are aligned alike.
_SHARD = 128


@dataclass
class AllReduceWorkspace(Work):
    """What ranks meet through in an all-reduce. Fits every shape and dtype; calls that are to overlap need one each.

    Attributes:
        variant, shape, dtype: of the latest call.
        channels: None for those of the context.
        prepared: True; for programs that ask.
    """

    variant: str = ""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    channels: Channels | None = field(default=None, repr=False)
    prepared: bool = True
    num_rings: int = 1


def all_reduce(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    ctx: Iris,
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
    config: Config | None = None,
    workspace: AllReduceWorkspace | None = None,
    *,
    tune: bool = False,
) -> AllReduceWorkspace:
    """Combine the inputs of all ranks on every rank. Collective over ``group``.

    Args:
        output_tensor: the input's shape and dtype; may be the input, except for ``one_shot``.
        input_tensor: any shape, the same on every rank; float64, float32, float16, bfloat16, fp8, int8, uint8, int16,
            int32 or int64. Contiguous, or strided as a matrix is. Where tensors must lie depends on the algorithm; the
            choice respects where they do.
        ctx: the context.
        op: None (SUM), an :class:`iris.ccl.ReduceOp` or one of ``torch.distributed.ReduceOp``: SUM, PRODUCT, MIN, MAX,
            AVG (floating point). Integer sums wrap around.
        group: None for all ranks, a process group, or a sequence of ranks.
        async_op: return at launch; ``wait()`` of the result orders the current stream after the operation, and the
            tensors must live until then.
        config: how the kernel runs; ``all_reduce_variant`` names the algorithm.
        workspace: from :func:`all_reduce_preamble` or an earlier call; None uses the context's own channels, which
            puts calls in order even when they are made on different streams.
        tune: when nothing was tuned for the call on this machine, measure several algorithms, which overwrites the
            output, and keep what was found for this and later programs; leaves ``config`` open.

    Returns:
        The workspace, which is the handle too; its ``plan`` says what ran and why.

    Raises:
        ArgumentError, NotSymmetricError, DeviceMismatch, UnsupportedError: on the rank that has it, before any launch.
        RankMismatch: on the other ranks then, and on all ranks whose arguments differ.
        NotAMemberError: the caller is not in ``group``.
        CaptureError: the first such call, while a graph is captured.
    """
    work = workspace if isinstance(workspace, AllReduceWorkspace) else AllReduceWorkspace()
    where = type(workspace) if work is not workspace and workspace is not None else _place(ctx, work)
    before = work.plan
    _calls.run(
        ctx, (OPERATION, group, config, op, where), (output_tensor, input_tensor),
        lambda: _request(ctx, output_tensor, input_tensor, op, group, config, where), _prepare,
        async_op=async_op, work=work, channels=work.channels, tune=tune,
    )  # fmt: skip
    if work.plan is not before:
        work.variant = work.plan.algorithm if work.plan else ""
        work.shape, work.dtype = tuple(input_tensor.shape), input_tensor.dtype
        work.num_rings = config.all_reduce_num_rings if config else 1
    return work


def all_reduce_preamble(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    ctx: Iris,
    config: Config | None = None,
    workspace: AllReduceWorkspace | None = None,
) -> AllReduceWorkspace:
    """A workspace with channels of its own. Collective over the world: it allocates on the symmetric heap.

    Args:
        output_tensor, input_tensor, ctx, config: of the calls to come; they are checked and compared.
        workspace: one that has channels is returned as it is, since it fits every call.
    """
    # No agreement on calls without a workspace.
    request = _request(ctx, output_tensor, input_tensor, None, None, config, "to be made")
    call = _calls.agree(request, _prepare)
    if workspace is None or workspace.channels is None:
        made = channel_memory.make(ctx, f"{OPERATION}()")
        workspace = workspace or AllReduceWorkspace()
        workspace.channels = made
    workspace.plan = call.plan
    workspace.variant, workspace.shape, workspace.dtype = (
        call.plan.algorithm,
        tuple(input_tensor.shape),
        input_tensor.dtype,
    )
    return workspace


def explain(
    ctx: Iris,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    op: Any = None,
    group: Any = None,
    config: Config | None = None,
) -> Plan:
    """The plan that :func:`all_reduce` would follow with these arguments; runs nothing. Local."""
    return _prepare(_request(ctx, output_tensor, input_tensor, op, group, config)).plan


def _place(ctx: Iris, workspace: AllReduceWorkspace) -> int | None:
    """Where a workspace's channels lie in the heap, None for those of the context."""
    return workspace.channels.flags.data_ptr() - ctx.heap.base if workspace.channels else None


def _request(ctx, output_tensor, input_tensor, op, group, config, workspace=None) -> Request:
    tensors = {"output_tensor": output_tensor, "input_tensor": input_tensor}
    facts = {"op": meant_op(op), "config": config, "offset of workspace in the heap": workspace}
    return Request(ctx, OPERATION, ctx.resolve_group(group), group, tensors, facts, tuple(tensors))


def _prepare(request: Request) -> Call:
    ctx, members = request.ctx, request.members
    out, inp = check_pair(ctx, **request.tensors)
    config = check_config(request.facts["config"])
    workspace = request.facts["offset of workspace in the heap"]
    if isinstance(workspace, type):
        raise ArgumentError(f"workspace must be None or an AllReduceWorkspace, got {workspace.__name__}")
    check_reduced(ctx, inp.dtype)
    op = reduce_op(request.facts["op"], inp.dtype.is_floating_point)
    if out.shape != inp.shape:
        raise ArgumentError(f"output_tensor must have the input's shape {tuple(inp.shape)}, got {tuple(out.shape)}")
    check_writable("output_tensor", out)
    to, source = pieces("output_tensor", out), pieces("input_tensor", inp)
    in_place = _calls.relation(out, inp) == "same" and to.strides == source.strides
    _calls.check_alias(request, in_place, "the output may be the input, or apart from it")
    problem = f"{tuple(inp.shape)} {str(inp.dtype).removeprefix('torch.')} {op.name}, {members.size} ranks"
    if members.size == 1:
        return Call(_calls.alone(OPERATION, problem), _calls.copy_alone if inp.numel() else None)
    choice = choose(
        ctx, OPERATION, members, request.group, inp.numel() * inp.element_size(),
        config.all_reduce_variant if config else None,
        _obstacles(request, out, inp, op, in_place),
        ("two_shot", "one_shot", "ring", "push") if inp.numel() > _SHARD else ("push",),
        inp.dtype, config,
    )  # fmt: skip
    config = choice.config
    if choice.algorithm == "torch":
        return Call(plan(OPERATION, choice, None, problem), _torch(request.group, op) if inp.numel() else None)
    how, issue = _kernel(request, choice.algorithm, config, source, to, op, inp.dtype)
    touched = {"one_shot": ("input_tensor",), "two_shot": ("output_tensor", "input_tensor")}
    touched |= {"atomic": ("output_tensor",), "spinlock": ("output_tensor",)}
    names = touched.get(choice.algorithm, ()) if inp.numel() else ()
    return Call(plan(OPERATION, choice, how, problem), issue if inp.numel() else None, names)


def _obstacles(request: Request, out, inp, op: ReduceOp, in_place: bool) -> dict[str, IrisError | None]:
    """Why each algorithm cannot be taken."""
    ctx = request.ctx
    reading, writing = _elsewhere(ctx, "input_tensor", inp, "read"), _elsewhere(ctx, "output_tensor", out, "written")
    overwritten = ArgumentError(
        "one_shot cannot work in place: a rank would overwrite what its peers still read; two_shot, push and ring can"
    )
    adding = None
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        adding = UnsupportedError(f"atomic and spinlock compute SUM and AVG, not {op.name}; the other variants do")
    refused = torch_obstacle(ctx, request.members, request.group, (out, inp), op)
    return {
        "push": None,
        "ring": None,
        "one_shot": reading or (overwritten if in_place and inp.numel() else None),
        "two_shot": reading or writing,
        "atomic": adding or writing,
        "spinlock": adding or writing,
        "torch": UnsupportedError(refused) if refused else None,
    }


def _elsewhere(ctx: Iris, name: str, tensor: torch.Tensor, touched: str) -> NotSymmetricError | None:
    try:
        checks.check_symmetric(ctx, name, tensor, touched)
    except NotSymmetricError as error:
        return error
    return None


def _kernel(request: Request, algorithm: str, config: Config | None, source: Pieces, to: Pieces, op, dtype):
    """How the kernel of an algorithm runs, and what launches it."""
    ctx, members = request.ctx, request.members
    world, n, layout = members.size, source.count, ctx.channels.layout
    meta = {"OP": int(op), "IN_FLAT": source.flat, "OUT_FLAT": to.flat}
    shape = matrix_shape(source, to)
    if algorithm in ("one_shot", "two_shot"):
        shard = n if algorithm == "one_shot" else -(-n // (world * _SHARD)) * _SHARD
        how = programs(ctx, config, shard, dtype.itemsize, layout.lanes, most_block(world, dtype))
        return how, kernel_launch(
            ctx, OPERATION, reduce_kernel, members, how,
            numbers=(n, shard, -(-shard // how.block)),
            shape=(0, *shape), root=(0,), ROOTED=False, TO_ALL=algorithm == "two_shot", **meta,
        )  # fmt: skip
    if algorithm == "push":
        slot = layout.slot_bytes // dtype.itemsize
        how = programs(
            ctx, config, n, dtype.itemsize, layout.slot_lanes, min(slot, most_block(world, dtype)), streams=False
        )
        return how, kernel_launch(
            ctx, OPERATION, all_reduce_push_kernel, members, how,
            numbers=(n, -(-n // how.block)), shape=shape, slots=dtype, SLOT=slot, **meta,
        )  # fmt: skip
    wide = wide_dtype(dtype)
    slot = layout.slot_bytes // wide.itemsize
    most = programs(ctx, config, n, wide.itemsize, layout.slot_lanes, slot, streams=False)
    # A lane takes a chunk for each rank at a time, and a chunk fills a slot.
    how = Programs(min(most.count, max(1, -(-n // (world * slot)))), slot, (config and config.num_warps) or 8)
    rounds = -(-n // (how.count * world * slot))
    if algorithm == "ring":
        kernel, more = all_reduce_ring_kernel, {"RINGS": min(2, config.all_reduce_num_rings if config else 1)}
    else:
        kernel, more = all_reduce_accumulate_kernel, {"LOCKED": algorithm == "spinlock"}
    return how, kernel_launch(
        ctx, OPERATION, kernel, members, how, numbers=(n, rounds), shape=shape, slots=wide, **more, **meta
    )


def _torch(group: Any, op: ReduceOp):
    chosen = group if isinstance(group, dist.ProcessGroup) else None
    theirs = getattr(dist.ReduceOp, op.name)

    def issue(channels, out: torch.Tensor, inp: torch.Tensor) -> None:
        if out.data_ptr() != inp.data_ptr():
            out.copy_(inp)
        dist.all_reduce(out, op=theirs, group=chosen)

    return issue
