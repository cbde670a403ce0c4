"""Channels: the memory through which the programs of collective kernels meet, lane by lane.

A kernel that works for several ranks runs as many programs on each of them, and program *lane* of one rank meets only
the program of the same lane on the others. Each lane has, on every rank, a line of flags for each rank, and small slots
that peers write to. What a lane counts, it counts by pairs of ranks and for itself, so kernels with any number of lanes
and groups of any mixture may follow each other; :mod:`iris.x.channel` has the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris.runtime.calls import StreamOrder
from iris.runtime.copies import CopyStreams
from iris.runtime.heap import ALIGNMENT

if TYPE_CHECKING:
    from iris._target import Target
    from iris.runtime.context import Iris

_LINE_BYTES = 128


@dataclass(frozen=True)
class Layout:
    """How the memory of the channels is divided; the same on every rank.

    Attributes:
        lanes: programs of a rank that can take part.
        slot_lanes: lanes, from 0 on, that have slots.
        slot_bytes: bytes of a slot, a power of two. A lane has two slots for each rank: while one is read, the next
            message may come into the other.
        message_lanes: lanes that messages between two ranks pass through, with flags and slots of their own: a message
            may lie there while collectives go on.
        num_ranks: ranks of the world.
    """

    lanes: int
    slot_lanes: int
    slot_bytes: int
    message_lanes: int
    num_ranks: int

    @property
    def flag_bytes(self) -> int:
        return self.lanes * self.num_ranks * _LINE_BYTES

    @property
    def message_flag_bytes(self) -> int:
        return self.message_lanes * self.num_ranks * _LINE_BYTES

    @property
    def all_flag_bytes(self) -> int:
        return self.flag_bytes + self.message_flag_bytes

    @property
    def slots_bytes(self) -> int:
        return self.slot_lanes * 2 * self.num_ranks * self.slot_bytes

    @property
    def all_slots_bytes(self) -> int:
        return self.slots_bytes + self.message_lanes * 2 * self.num_ranks * self.slot_bytes

    @property
    def nbytes(self) -> int:
        """Bytes on the heap, a multiple of its alignment."""
        return -(-(self.all_flag_bytes + self.all_slots_bytes) // ALIGNMENT) * ALIGNMENT


def layout(target: Target, num_ranks: int) -> Layout:
    """The layout for a target. Interpreted kernels get few and small lanes: their cost is by program, not by byte."""
    if not target.compiled:
        return Layout(lanes=8, slot_lanes=4, slot_bytes=1024, message_lanes=2, num_ranks=num_ranks)
    return Layout(lanes=512, slot_lanes=64, slot_bytes=16384, message_lanes=16, num_ranks=num_ranks)


class Channels:
    """The channels of a context, or of a workspace.

    Args:
        ctx: the context.
        layout: how ``area`` is divided.
        area: uint8[layout.nbytes] on the symmetric heap, at the same place on every rank; its flags must be zero on
            all ranks before any of them uses them.

    Attributes:
        order: puts calls that use the channels in order.
        flags: int32, a line of 128 bytes for each lane and rank.
        slots: uint8, slots by lane, parity and sending rank.
        epochs: int32[lanes * num_ranks] in ordinary memory, how often a lane met each rank.
        tickets: int32[1] in ordinary memory, programs of the running kernel that have started.
        message_flags, message_slots: as flags and slots, for messages between two ranks.
        message_counts: int32[2 * message_lanes * num_ranks] in ordinary memory, blocks that a lane has sent to each
            rank, then blocks that it has received.
        words, message_words: what kernels take: flags, counts and tickets.
    """

    def __init__(self, ctx: Iris, layout: Layout, area: torch.Tensor):
        self.layout = layout
        self.order = StreamOrder(ctx)
        self._copy_streams = CopyStreams(ctx)
        self.flags = area[: layout.flag_bytes].view(torch.int32)
        self.message_flags = area[layout.flag_bytes : layout.all_flag_bytes].view(torch.int32)
        slots = area[layout.all_flag_bytes : layout.all_flag_bytes + layout.all_slots_bytes]
        self.slots, self.message_slots = slots[: layout.slots_bytes], slots[layout.slots_bytes :]
        self.epochs = torch.zeros(layout.lanes * layout.num_ranks, dtype=torch.int32, device=area.device)
        self.tickets = torch.zeros(1, dtype=torch.int32, device=area.device)
        messages = 2 * layout.message_lanes * layout.num_ranks
        self.message_counts = torch.zeros(messages, dtype=torch.int32, device=area.device)
        # What kernels take, in this order.
        self.words = (self.flags, self.epochs, self.tickets)
        self.message_words = (self.message_flags, self.message_counts, self.tickets)

    def streams(self, copies: int) -> list[Any]:
        """As :meth:`iris.runtime.copies.CopyStreams.take`."""
        return self._copy_streams.take(copies)


def make(ctx: Iris, what: str) -> Channels:
    """Channels with memory of their own. Collective over the world: it allocates on the symmetric heap.

    Args:
        ctx: the context.
        what: whose they are, for messages.
    """
    wanted = ctx.channels.layout
    area = ctx.heap.allocate(wanted.nbytes, torch.uint8, site=f"{what} channels")
    area[: wanted.all_flag_bytes].zero_()
    channels = Channels(ctx, wanted, area)
    # A peer may set a flag as soon as it launches, so the flags are zero on all ranks before any of them does.
    ctx.synchronize()
    ctx.exchange.all_gather(f"{what}: channels ready", None)
    return channels
