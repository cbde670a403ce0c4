"""Channels in a kernel: how the programs of collective kernels meet their like on other ranks, lane by lane.

    lane = take_lane(tickets, TICKETS)
    channel = open_channel(flags, epochs, lane, members, there, context, WORLD, PEERS)
    meet(channel, 1, KERNEL)   # every peer's earlier work is done: their memory may be touched
    ...
    meet(channel, 2, KERNEL)   # every peer's program of this lane has done what it does before its second meeting
    close_channel(channel, 2)

Protocol. Program *lane* of a rank meets the programs of the same lane on its peers, and nobody else. A meeting: set the
own flag on every peer to the number of the meeting (release at system scope, after all stores of the program), then
wait until every peer's flag here has reached it. Numbers are counted for each lane and pair of ranks, in device memory,
and only grow, so nothing is reset, captured graphs replay, they may wrap, and calls of any mixture of groups share
the flags. Both programs of a pair must make the same number of meetings in a kernel.

- *Ready*: a kernel's first meeting says that all earlier work of the peers' streams is done.
- *Consumed*: its last meeting says that the peers' programs of this lane no longer touch this rank's memory. Every lane
  waits for its own, so when the kernel ends no peer's program touches anything: later work in the stream may overwrite.

Slots. Each lane has two slots for each sending rank in its own memory. A message goes into the slot of the parity of
the meeting that announces it. The sender may use that slot again two meetings later: it has met the receiver once more
in between, and the receiver came to that meeting after it had read the slot.

Progress. Either all programs of a kernel are resident at a time, or lanes are given out in the order in which programs
start. Then of the lanes that are not done on every rank the lowest runs everywhere, or can start because a lower one
has ended, whatever the order and number of resident programs.
"""

import triton
import triton.language as tl

from iris.device import signal
from iris.device._compat import aggregate, constexpr_function


@aggregate
class Channel:
    """The own lane; made by :func:`open_channel`.

    Attributes:
        flags: int32 pointer, the lane's lines of flags in the own memory, one for each rank.
        epochs: int32 pointer, how often the lane has met each rank.
        first: block, meetings with each peer before this kernel.
        peers: block of ranks; where ``there`` is off, the own one.
        there: block, which peers there are.
        rank: the own rank.
        context: tensor of ``ctx.get_device_context()``.
    """

    flags: tl.tensor
    epochs: tl.tensor
    first: tl.tensor
    peers: tl.tensor
    there: tl.tensor
    rank: tl.tensor
    context: tl.tensor

    @constexpr_function
    def __init__(self, flags, epochs, first, peers, there, rank, context):
        self.flags = flags
        self.epochs = epochs
        self.first = first
        self.peers = peers
        self.there = there
        self.rank = rank
        self.context = context


@triton.jit
def take_lane(tickets, TICKETS: tl.constexpr):
    """The lane of this program (int32 scalar).

    Args:
        tickets: of :class:`iris.runtime.channels.Channels`.
        TICKETS: whether lanes are given out in the order in which programs start. Without, it is the program's number;
            then all programs must fit the machine at a time.
    """
    lane = tl.program_id(0)
    if TICKETS:
        lane = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        if lane == tl.num_programs(0) - 1:
            # Nobody else of this kernel takes one; the next kernel of the stream starts from 0.
            tl.atomic_xchg(tickets, 0, sem="relaxed", scope="gpu")
    return lane


@triton.jit
def open_channel(flags, epochs, lane, members, there, context, WORLD: tl.constexpr, PEERS: tl.constexpr):
    """The channel of a lane.

    Args:
        flags, epochs: of :class:`iris.runtime.channels.Channels`.
        lane: from :func:`take_lane`.
        members: int32[WORLD], ranks of the group.
        there: block of ``PEERS`` bools, which members this rank meets, itself not among them.
        context: tensor of ``ctx.get_device_context()``.
        PEERS: a power of two, at least 2 and at least ``WORLD``.
    """
    rank = tl.load(context).to(tl.int32)
    num_ranks = tl.load(context + 1).to(tl.int32)
    place = tl.arange(0, PEERS)
    peers = tl.load(members + place, mask=there & (place < WORLD), other=rank)
    mine = epochs + lane * num_ranks
    # Nobody counts meetings with oneself, so that entry stays 0, as does the own flag.
    first = tl.load(mine + peers)
    lines = flags + lane * (num_ranks * signal.FLAG_STRIDE)
    return Channel(lines, mine, first, peers, there, rank, context)


@triton.jit
def meet(channel, meeting, KERNEL: tl.constexpr):
    """Meet the peers for the ``meeting``-th time in this kernel, counted from 1; see the module's docstring."""
    numbers = tl.where(channel.there, channel.first + meeting, channel.first)
    own = channel.flags + channel.rank * signal.FLAG_STRIDE
    signal.notify_all(own, numbers, channel.there, channel.rank, channel.peers, channel.context + 2)
    signal.wait_all(channel.flags + channel.peers * signal.FLAG_STRIDE, numbers, channel.context, channel.peers, KERNEL)


@triton.jit
def close_channel(channel, meetings):
    """Count the kernel's meetings."""
    # Other warps of the program may still ask for the parity of a meeting.
    tl.debug_barrier()
    tl.store(channel.epochs + channel.peers, channel.first + meetings, mask=channel.there)


@triton.jit
def slot(slots, lane, parity, sender, num_ranks, SLOT: tl.constexpr):
    """Pointer to a slot in the own memory, ``SLOT`` elements of the type that ``slots`` points to.

    Args:
        slots: of :class:`iris.runtime.channels.Channels`, viewed as the type.
        lane: the lane, one that has slots.
        parity: 0 or 1, of the number of the meeting that announces the message.
        sender: rank that writes to it.
    """
    return slots + ((lane * 2 + parity) * num_ranks + sender) * SLOT


@triton.jit
def parity_of(channel, peer, meeting):
    """Parity of this kernel's ``meeting``-th meeting with ``peer``."""
    return (tl.load(channel.epochs + peer) + meeting) & 1
