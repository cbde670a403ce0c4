"""``all_gather`` by copies: the GPU's copy engine writes a rank's input into every output, and no kernel moves bytes.

Protocol, in the stream of the call:

1. A kernel of one program meets its like on all members, in lane 0 of the channels. After it every output may be
   written.
2. Streams of their own, one for each peer and one for the own piece, wait for that kernel and copy the input into its
   place in every output. Every rank begins with the next member, so that the ranks write to different peers. The
   stream of the call waits for all of them.
3. The same kernel once more. After it every output is complete, and the input may be overwritten.

Order. A copy has ended, and what it wrote is in the peer's memory, before the kernel of step 3 starts, because the
stream waits for it. That kernel releases at system scope, which covers all that came before it in the stream and not
only its own stores, and its like on the peer acquires before it ends.

Numbers of meetings. Each of the two kernels is one of the kernels of :mod:`iris.x.channel`: it reads the counts of its
lane, meets every other member once, and stores the counts when it ends. So both ranks of a pair count two meetings for
a call, as they do for one of the other algorithms in that lane, and whatever comes before or after finds the counts
that it expects; no other lane takes part. No call can come between the two kernels: the host issues both before the
call returns, and a call on another stream, as with ``async_op``, waits for all of this one
(:class:`iris.runtime.calls.StreamOrder`). Slots are not touched; meetings without a message are as good as others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from iris.ccl._pieces import Pieces, integer_dtype
from iris.device import link, memory
from iris.runtime import launch
from iris.runtime.channels import Channels
from iris.runtime.groups import Group
from iris.x.channel import close_channel, meet, open_channel
from iris.x.schedule import rotated_rank

if TYPE_CHECKING:
    from iris.runtime.context import Iris


@triton.jit(do_not_specialize=["index"])
def meet_kernel(
    flags,
    epochs,
    members,
    index,
    context,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Meet all other members once, in lane 0; one program."""
    place = tl.arange(0, PEERS)
    there = (place < WORLD) & (place != index)
    channel = open_channel(flags, epochs, 0, members, there, context, WORLD, PEERS)
    meet(channel, 1, KERNEL)
    close_channel(channel, 1)


@triton.jit(do_not_specialize=["n", "rank", "peer"])
def copy_kernel(in_ptr, own_ptr, n, rank, peer, context, BLOCK: tl.constexpr):
    """Copy ``n`` elements to the peer's place of ``own_ptr``, where there is no copy engine; one program."""
    for start in range(0, n, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < n
        value = tl.load(in_ptr + place, mask=inside)
        memory.store(own_ptr + place, value, rank, peer, context + 2, inside)


@triton.jit(do_not_specialize=["nbytes", "index"])
def carried_kernel(nbytes, members, index, context, WORLD: tl.constexpr):
    """Hold the stream until imitated links have carried ``nbytes`` to each of the other members; one program."""
    rank = tl.load(context).to(tl.int32)
    last = tl.full((), 0, tl.int64)
    for step in range(1, WORLD):
        peer = tl.load(members + rotated_rank(index, step, WORLD))
        last = tl.maximum(last, link.charge_write(nbytes, rank, peer, context + 2))
    link.carried(last)


def obstacle(source: Pieces, to: Pieces) -> str:
    """Why copies cannot move the pieces; empty when they can."""
    scattered = [name for name, one in (("the input", source), ("a rank's piece of the output", to)) if not one.flat]
    if not scattered:
        return ""
    return (
        f"the copy engine copies what lies together in memory, and {' and '.join(scattered)} "
        f"{'does' if len(scattered) == 1 else 'do'} not; possible: contiguous tensors whose sizes before dim are 1, or "
        "all_gather_variant='persistent' or 'partitioned'"
    )


def copies(
    ctx: Iris, operation: str, members: Group, source: Pieces, to: Pieces, in_place: bool
) -> Callable[[Channels, torch.Tensor, torch.Tensor], None]:
    """A function ``(channels, out, inp)`` that issues the call to the current stream.

    Args:
        ctx: the context.
        operation: name of the operation, for messages.
        members: the group, of two ranks at least.
        source, to: the input, and the output's pieces; :func:`obstacle` has found nothing.
        in_place: the input is the own piece of the output.
    """
    meeting = meetings(ctx, operation, members)
    # The own piece last in a row, not in time: its stream is another one.
    places = [(members.index + step) % members.size for step in range(1, members.size + (not in_place))]
    peers = [members.ranks[place] for place in places]
    copy = _engine(ctx) if ctx.target.compiled else _program(ctx)

    def issue(channels: Channels, out: torch.Tensor, inp: torch.Tensor) -> None:
        if ctx.kept_launches is not None:
            meeting(channels)
            return  # the ranks do not meet, so nothing may be written to a peer
        start, streams = ctx.current_stream(), channels.streams(len(peers))
        mine = inp.as_strided((source.count,), (1,))
        own = out.as_strided((to.count,), (1,), out.storage_offset() + members.index * to.distance)
        meeting(channels)
        met = start.record_event()
        for stream in streams:
            stream.wait_event(met)
        for number, peer in enumerate(peers):
            with ctx.use_stream(streams[number % len(streams)]):
                copy(mine, own, peer)
        if ctx.target.compiled and link.LINK_PACED.value:
            # Beside the copies, which run at the rate of the memory.
            launch.start(
                ctx, carried_kernel, (1,), mine.numel() * mine.element_size(), ctx.group_members(members),
                members.index, ctx.get_device_context(), WORLD=members.size, num_warps=1,
            )  # fmt: skip
        for stream in streams:
            start.wait_stream(stream)
        meeting(channels)

    return issue


def meetings(ctx: Iris, operation: str, members: Group) -> Callable[[Channels], None]:
    """A function that lets the members meet once in the current stream, over the channels it is given."""
    ranks, context = ctx.group_members(members), ctx.get_device_context()
    meta: dict[str, Any] = {
        "WORLD": members.size,
        "PEERS": max(2, triton.next_power_of_2(members.size)),
        "KERNEL": launch.kernel_id(operation),
    }
    again: Callable[..., None] | None = None

    def meeting(channels: Channels) -> None:
        nonlocal again
        if again is not None and ctx.kept_launches is None:
            words = channels.flags.data_ptr(), channels.epochs.data_ptr()
            again(ctx.stream_handle(), *words, ranks.data_ptr(), members.index, context.data_ptr())
            return
        compiled = launch.start(
            ctx, meet_kernel, (1,), channels.flags, channels.epochs, ranks, members.index, context, num_warps=1, **meta
        )
        if compiled is not None:
            again = launch.again(compiled, meet_kernel, (1,), **meta)

    return meeting


# Copies ``mine`` to a peer's place of ``own``, in the current stream.
_Copy = Callable[[torch.Tensor, torch.Tensor, int], None]


def _engine(ctx: Iris) -> _Copy:
    """Copies of PyTorch between mapped memories, which the copy engine makes where the memory is another GPU's."""
    theirs: dict[tuple[int, int], torch.Tensor] = {}

    def copy(mine: torch.Tensor, own: torch.Tensor, peer: int) -> None:
        target = theirs.get((own.data_ptr(), peer))
        if target is None:
            target = theirs[own.data_ptr(), peer] = ctx.heap.on_peer(own.view(torch.uint8), peer)
        target.copy_(mine.view(torch.uint8))

    return copy


def _program(ctx: Iris) -> _Copy:
    """Copies by a program of the interpreter, which has no other engine."""
    rank, context = ctx.cur_rank, ctx.get_device_context()

    def copy(mine: torch.Tensor, own: torch.Tensor, peer: int) -> None:
        integers = integer_dtype(mine.dtype)
        mine, own = mine.view(integers), own.view(integers)
        launch.start(ctx, copy_kernel, (1,), mine, own, mine.numel(), rank, peer, context, BLOCK=4096)

    return copy
