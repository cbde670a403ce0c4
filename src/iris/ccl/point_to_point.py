"""Send and receive: a message from one rank to another.

Protocol. Messages pass through slots of the channels that are theirs alone, block by block, so the tensors may lie
anywhere. The sender writes a block into a slot of the receiver and says *sent*; the receiver copies it out and says
*taken*. Each direction between two ranks counts for itself and has two slots a lane, so a send ends when all but the
last two blocks of each lane have been taken: short messages wait in the slots for a receiver that comes later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris.ccl import _calls
from iris.ccl._arguments import check_config, place_of
from iris.ccl._calls import Call, Request, Work
from iris.ccl._launch import kernel_launch, matrix_shape
from iris.ccl._pieces import Pieces, check_writable, integer_dtype, pieces
from iris.ccl._slot_kernels import transfer_kernel
from iris.ccl.choice import Programs
from iris.ccl.config import Config
from iris.errors import ArgumentError, RankMismatch
from iris.runtime.checks import check_tensor
from iris.runtime.groups import Group
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris

_NOTHING = Pieces(0, 0, 1, 0, 0, flat=True)


def send(
    tensor: torch.Tensor,
    ctx: Iris,
    dst: int,
    group: Any = None,
    tag: int = 0,
    async_op: bool = False,
    config: Config | None = None,
) -> Work:
    """Send a tensor to a rank, which receives it with :func:`recv`. Messages of two ranks arrive in the order of calls.

    A message that is longer than what waits in the slots (two blocks of 16 KiB for each of 16 lanes) holds up the
    sender's stream until the receiver's runs, so two ranks that both send a long one first wait for each other until
    the time limit: use :func:`sendrecv`. On the first call of a combination, when the two compare their arguments, that
    is a RankMismatch for short messages too.

    Args:
        tensor: any shape and dtype, anywhere on the device. Contiguous, or strided as a matrix is.
        ctx: the context.
        dst: rank of the world, not the caller.
        group: the group that both are in; None for all ranks.
        tag: must be the receiver's; messages do not overtake each other.
        async_op: see :func:`iris.ccl.all_gather.all_gather`.
        config: ``comm_sms`` bounds the programs, on both ranks alike.

    Returns:
        The handle.

    Raises:
        ArgumentError, DeviceMismatch: on the rank that has it, before any launch.
        RankMismatch: sender and receiver differ in number of elements, dtype, tag or config.
        NotAMemberError: the caller is not in ``group``.
        CaptureError: the first such call, while a graph is captured.
    """
    work = Work()

    def request() -> Request:
        pair = _pair(ctx, ctx.resolve_group(group), dst, "dst")
        tensors = {"output_tensor": None, "tensor": tensor}
        return Request(ctx, "send/recv", pair, group, tensors, _facts(tensor, ctx.cur_rank, dst, tag, config), ())

    given = ("send", group, config, dst, tag)
    _calls.run(ctx, given, (None, tensor), request, _prepare_pair, async_op=async_op, work=work)
    return work


def recv(
    tensor: torch.Tensor,
    ctx: Iris,
    src: int,
    group: Any = None,
    tag: int = 0,
    async_op: bool = False,
    config: Config | None = None,
) -> Work:
    """Receive what a rank sends with :func:`send`, of as many elements and the dtype; see there."""
    work = Work()

    def request() -> Request:
        pair = _pair(ctx, ctx.resolve_group(group), src, "src")
        tensors = {"tensor": tensor, "input_tensor": None}
        return Request(ctx, "send/recv", pair, group, tensors, _facts(tensor, src, ctx.cur_rank, tag, config), ())

    given = ("recv", group, config, src, tag)
    _calls.run(ctx, given, (tensor, None), request, _prepare_pair, async_op=async_op, work=work)
    return work


def sendrecv(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    ctx: Iris,
    dst: int,
    src: int,
    group: Any = None,
    tag: int = 0,
    async_op: bool = False,
    config: Config | None = None,
) -> Work:
    """Send to one rank and receive from another at once. Collective over ``group``: every member calls it.

    Args:
        send_tensor: what ``dst`` gets.
        recv_tensor: what ``src`` sends; apart from ``send_tensor`` in memory.
        dst, src: ranks of the world; may be the same, and the caller when both are.

    The other arguments, the result and the errors are those of :func:`send`.
    """
    work = Work()

    def request() -> Request:
        tensors = {"recv_tensor": recv_tensor, "send_tensor": send_tensor}
        facts = {"tag": tag, "config": config}
        return Request(ctx, "sendrecv", ctx.resolve_group(group), group, tensors, facts, ())

    _calls.run(
        ctx, ("sendrecv", group, config, dst, src, tag), (recv_tensor, send_tensor),
        request, lambda made: _prepare_exchange(made, dst, src), async_op=async_op, work=work,
    )  # fmt: skip
    return work


def _pair(ctx: Iris, members: Group, peer: Any, name: str) -> Group:
    place_of(members, peer, name)
    if peer == ctx.cur_rank:
        raise ArgumentError(f"{name} must be another rank than the caller, {peer}; sendrecv may send to itself")
    ranks = tuple(sorted((ctx.cur_rank, peer)))
    return Group(ranks, ranks.index(ctx.cur_rank))


def _facts(tensor: Any, src: int, dst: int, tag: int, config: Config | None) -> dict[str, Any]:
    known = isinstance(tensor, torch.Tensor)
    return {
        "elements of tensor": tensor.numel() if known else type(tensor).__name__,
        "dtype of tensor": tensor.dtype if known else None,
        "src": src,
        "dst": dst,
        "tag": tag,
        "config": config,
    }


def _prepare_pair(request: Request) -> Call:
    out, inp = request.tensors.values()
    tensor = check_tensor(request.ctx, "tensor", inp if out is None else out)
    if out is not None:
        check_writable("tensor", tensor)
    peer = 1 - request.members.index
    layout = pieces("tensor", tensor)
    sends, receives = (layout, _NOTHING) if out is None else (_NOTHING, layout)
    places = (peer, -1) if out is None else (-1, peer)
    return _call(request, tensor.dtype, sends, receives, places)


def _prepare_exchange(request: Request, dst: int, src: int) -> Call:
    ctx, members = request.ctx, request.members
    out = check_tensor(ctx, "recv_tensor", request.tensors["recv_tensor"])
    inp = check_tensor(ctx, "send_tensor", request.tensors["send_tensor"])
    if out.dtype != inp.dtype:
        raise ArgumentError(f"recv_tensor and send_tensor must have one dtype, got {out.dtype} and {inp.dtype}")
    check_writable("recv_tensor", out)
    _calls.check_alias(request, False, "give the received message its own memory")
    places = (place_of(members, dst, "dst"), place_of(members, src, "src"))
    if (dst == ctx.cur_rank) != (src == ctx.cur_rank):
        raise ArgumentError(f"dst={dst} and src={src} must both be the caller, {ctx.cur_rank}, or neither")
    sends, receives = pieces("send_tensor", inp), pieces("recv_tensor", out)
    if dst == ctx.cur_rank:
        if out.numel() != inp.numel():
            raise ArgumentError(
                f"recv_tensor must have as many elements as send_tensor, {inp.numel()}, got {out.numel()}"
            )
        plan = Plan("sendrecv", "copy", None, "heuristic", "the rank sends to itself", str(tuple(inp.shape)))
        call = Call(plan, _calls.copy_alone if inp.numel() else None)
    else:
        call = _call(request, inp.dtype, sends, receives, places)

    messages = {(ctx.cur_rank, dst): (inp.numel(), inp.dtype), (src, ctx.cur_rank): (out.numel(), out.dtype)}
    call.verify = lambda compared: _verify(ctx, members, dst, src, messages if dst != ctx.cur_rank else {}, compared)
    return call


def _verify(ctx: Iris, members: Group, dst: int, src: int, messages: dict, compared: bool) -> None:
    """Compare partners across the group when its arguments have just been, and messages by pairs of ranks.

    By pairs, because ranks whose own messages stay as they are do not compare again. Every rank takes its pairs in the
    same order, so that none waits for another in a circle.
    """
    if compared and members.size > 1:
        posts = ctx.exchange.all_gather("sendrecv(): partners", (dst, src), members.ranks)
        expects = {rank: source for rank, (_, source) in zip(members.ranks, posts, strict=True)}
        for rank, (to, _) in zip(members.ranks, posts, strict=True):
            if expects[to] != rank:
                raise RankMismatch(
                    f"sendrecv: rank {rank} sends to rank {to}, which expects a message from rank {expects[to]}; "
                    "nothing was launched"
                )
    for pair, (elements, dtype) in sorted(messages.items()):
        try:
            group = Group(pair, pair.index(ctx.cur_rank))
            ctx.agreement.reach("sendrecv", group, {"elements of the message": elements, "dtype": dtype})
        except RankMismatch as error:
            # The others of the group may be on their way into the kernel.
            ctx.exchange.post_fault(f"{type(error).__name__}: {error}")
            raise


def _call(request: Request, dtype: torch.dtype, sends: Pieces, receives: Pieces, places: tuple[int, int]) -> Call:
    ctx = request.ctx
    config = check_config(request.facts["config"])
    layout = ctx.channels.layout
    # The lane of a block must not depend on what else sender or receiver do, so lanes and blocks are always the same.
    lanes = min(layout.message_lanes, ctx.get_cu_count(), (config and config.comm_sms) or layout.message_lanes)
    block = layout.slot_bytes // dtype.itemsize
    in_blocks, out_blocks = -(-sends.count // block), -(-receives.count // block)
    how = Programs(max(1, min(lanes, max(in_blocks, out_blocks))), block, (config and config.num_warps) or 8)
    launch = kernel_launch(
        ctx, request.operation, transfer_kernel, request.members, how,
        numbers=(sends.count, receives.count, in_blocks, out_blocks),
        shape=matrix_shape(sends, receives),
        slots=integer_dtype(dtype), moves=True, indexed=False, root=places,
        messages=True, IN_FLAT=sends.flat, OUT_FLAT=receives.flat, LANES=lanes, MESSAGE_LANES=layout.message_lanes,
    )  # fmt: skip
    counts = f"sends {sends.count}, receives {receives.count} elements"
    problem = f"{counts} of {str(dtype).removeprefix('torch.')}, ranks {list(request.members.ranks)}"
    plan = Plan(
        request.operation, "slots", how, "heuristic", "messages pass through slots; the only algorithm", problem
    )
    return Call(plan, launch if max(in_blocks, out_blocks) else None)
