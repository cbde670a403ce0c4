"""Kernels that pass values through the slots of the channels, so that tensors may lie anywhere.

:mod:`iris.x.channel` says when a slot may be used again. A kernel with slots needs no meeting at its end: what a peer
still reads is its own slots, not the caller's tensors.
"""

import triton
import triton.language as tl

from iris.ccl._elements import combine, elements, finish
from iris.device import atomics, link, memory, numeric, signal
from iris.x.channel import close_channel, meet, open_channel, parity_of, slot, take_lane
from iris.x.schedule import rotated_rank

# Words of a line of flags of messages.
SENT = tl.constexpr(0)
TAKEN = tl.constexpr(1)


@triton.jit(do_not_specialize=["index"])
def all_reduce_push_kernel(
    in_ptr,
    out_ptr,
    n,
    blocks,
    in_columns,
    in_row,
    in_column,
    out_columns,
    out_row,
    out_column,
    slots,
    flags,
    epochs,
    tickets,
    members,
    index,
    context,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    TICKETS: tl.constexpr,
    OP: tl.constexpr,
    IN_FLAT: tl.constexpr,
    OUT_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """All-reduce in one shot: each rank writes a block into every peer's slot, then combines what its own slots hold.

    One meeting for each block. The caller's input is read before anything is written, so out may be the input.
    """
    lane = take_lane(tickets, TICKETS)
    place = tl.arange(0, PEERS)
    there = (place < WORLD) & (place != index)
    channel = open_channel(flags, epochs, lane, members, there, context, WORLD, PEERS)
    rank = channel.rank
    num_ranks = tl.load(context + 1).to(tl.int32)
    offsets = tl.arange(0, BLOCK)
    wide: tl.constexpr = numeric.wide_dtype(in_ptr.dtype.element_ty)
    meeting = 0
    for block in range(lane, blocks, tl.num_programs(0)):
        meeting += 1
        start = tl.cast(block, tl.int64) * BLOCK
        inside = offsets < n - start
        own = tl.load(elements(in_ptr, start, offsets, in_columns, in_row, in_column, IN_FLAT), mask=inside, other=0.0)
        for step in tl.static_range(1, WORLD):
            peer = tl.load(members + rotated_rank(index, step, WORLD))
            to = slot(slots, lane, parity_of(channel, peer, meeting), rank, num_ranks, SLOT) + offsets
            memory.store(to, own, rank, peer, context + 2, inside)
        meet(channel, meeting, KERNEL)
        total = own.to(wide)
        for member in tl.static_range(WORLD):
            peer = tl.load(members + member)
            arrived = slot(slots, lane, parity_of(channel, peer, meeting), peer, num_ranks, SLOT) + offsets
            # The own value stands at its place in the order, so that every rank adds in the same one.
            theirs = tl.where(index == member, 0, n - start)
            value = tl.load(arrived, mask=offsets < theirs, other=0.0)
            value = tl.where(index == member, own, value).to(wide)
            if member == 0:
                total = value
            else:
                total = combine(total, value, OP)
        to = elements(out_ptr, start, offsets, out_columns, out_row, out_column, OUT_FLAT)
        tl.store(to, numeric.narrow(finish(total, OP, WORLD), out_ptr.dtype.element_ty), mask=inside)
    close_channel(channel, meeting)


@triton.jit(do_not_specialize=["index"])
def all_reduce_ring_kernel(
    in_ptr,
    out_ptr,
    n,
    rounds,
    in_columns,
    in_row,
    in_column,
    out_columns,
    out_row,
    out_column,
    slots,
    flags,
    epochs,
    tickets,
    members,
    index,
    context,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    TICKETS: tl.constexpr,
    OP: tl.constexpr,
    RINGS: tl.constexpr,
    IN_FLAT: tl.constexpr,
    OUT_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """All-reduce from neighbour to neighbour: ``WORLD - 1`` steps for partial sums, then as many for results.

    In each round a lane takes ``WORLD`` chunks of ``BLOCK`` elements. The sum of a chunk begins at the member of its
    number and is kept in wide type; the last member to add sends it around, and every rank rounds it once.
    With ``RINGS`` of 2 every second lane runs the other way. A slot holds ``BLOCK`` elements of wide type.
    Source: the ring algorithm of Patarasuk and Yuan (2009).
    """
    lane = take_lane(tickets, TICKETS)
    lanes = tl.num_programs(0)
    direction = 1
    if RINGS > 1:
        direction = tl.where(lane % 2 == 0, 1, WORLD - 1)
    after = rotated_rank(index, direction, WORLD)
    before = rotated_rank(index, WORLD - direction, WORLD)
    place = tl.arange(0, PEERS)
    there = (place == after) | (place == before)
    channel = open_channel(flags, epochs, lane, members, there, context, WORLD, PEERS)
    rank = channel.rank
    num_ranks = tl.load(context + 1).to(tl.int32)
    receiver = tl.load(members + after)
    sender = tl.load(members + before)
    offsets = tl.arange(0, BLOCK)
    wide: tl.constexpr = numeric.wide_dtype(in_ptr.dtype.element_ty)
    meeting = 0
    for turn in range(rounds):
        base = tl.cast(turn * lanes + lane, tl.int64) * (WORLD * BLOCK)
        passed = tl.zeros((BLOCK,), dtype=wide)
        for step in tl.static_range(2 * WORLD - 2):
            meeting += 1
            if step < WORLD - 1:
                # Chunk ``index`` first, then the one that has just come, with the own part added.
                start = base + rotated_rank(index, (WORLD - direction) * step, WORLD) * BLOCK
                inside = offsets < n - start
                source = elements(in_ptr, start, offsets, in_columns, in_row, in_column, IN_FLAT)
                own = tl.load(source, mask=inside, other=0.0).to(wide)
                if step == 0:
                    passed = own
                else:
                    passed = combine(passed, own, OP)
            to = slot(slots, lane, parity_of(channel, receiver, meeting), rank, num_ranks, BLOCK) + offsets
            memory.store(to, passed, rank, receiver, context + 2)
            meet(channel, meeting, KERNEL)
            passed = tl.load(slot(slots, lane, parity_of(channel, sender, meeting), sender, num_ranks, BLOCK) + offsets)
            if step >= WORLD - 2:
                # What has come is complete but for the own part, or complete.
                start = base + rotated_rank(index, (WORLD - direction) * (step + 1), WORLD) * BLOCK
                inside = offsets < n - start
                if step == WORLD - 2:
                    source = elements(in_ptr, start, offsets, in_columns, in_row, in_column, IN_FLAT)
                    own = tl.load(source, mask=inside, other=0.0).to(wide)
                    passed = finish(combine(passed, own, OP), OP, WORLD)
                result = numeric.narrow(passed, out_ptr.dtype.element_ty)
                to = elements(out_ptr, start, offsets, out_columns, out_row, out_column, OUT_FLAT)
                tl.store(to, result, mask=inside)
    close_channel(channel, meeting)


@triton.jit(do_not_specialize=["to_index", "from_index"])
def transfer_kernel(
    in_ptr,
    out_ptr,
    in_n,
    out_n,
    in_blocks,
    out_blocks,
    in_columns,
    in_row,
    in_column,
    out_columns,
    out_row,
    out_column,
    slots,
    flags,
    counts,
    tickets,
    members,
    to_index,
    from_index,
    context,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    TICKETS: tl.constexpr,
    IN_FLAT: tl.constexpr,
    OUT_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    MESSAGE_LANES: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Sends ``in_n`` elements to member ``to_index`` and receives ``out_n`` from ``from_index``; -1 for neither.

    Block number b of a message passes through lane ``b % LANES``. A slot holds ``BLOCK`` elements. Each direction
    between two ranks counts its blocks for itself: the sender sets *sent* on the receiver after it has written a slot,
    the receiver *taken* on the sender after it has copied it out. A sender writes block n when n - 2 has been taken, so
    two blocks a lane wait for a receiver that comes later.
    """
    lane = take_lane(tickets, TICKETS)
    rank = tl.load(context).to(tl.int32)
    num_ranks = tl.load(context + 1).to(tl.int32)
    line = lane * num_ranks
    sends = tl.where(to_index >= 0, tl.cdiv(tl.maximum(in_blocks - lane, 0), LANES), 0)
    receives = tl.where(from_index >= 0, tl.cdiv(tl.maximum(out_blocks - lane, 0), LANES), 0)
    receiver = tl.load(members + tl.maximum(to_index, 0))
    sender = tl.load(members + tl.maximum(from_index, 0))
    sent_before = tl.load(counts + line + receiver)
    taken_before = tl.load(counts + MESSAGE_LANES * num_ranks + line + sender)
    mine = flags + (line + rank) * signal.FLAG_STRIDE
    offsets = tl.arange(0, BLOCK)
    for turn in range(tl.maximum(sends, receives)):
        start = tl.cast(turn * LANES + lane, tl.int64) * BLOCK
        if turn < sends:
            number = sent_before + turn + 1
            signal.wait(flags + (line + receiver) * signal.FLAG_STRIDE + TAKEN, number - 2, context, receiver, KERNEL)
            inside = offsets < in_n - start
            value = tl.load(elements(in_ptr, start, offsets, in_columns, in_row, in_column, IN_FLAT), mask=inside)
            to = slot(slots, lane, number & 1, rank, num_ranks, BLOCK) + offsets
            memory.store(to, value, rank, receiver, context + 2, inside)
            signal.notify(mine + SENT, number, rank, receiver, context + 2)
        if turn < receives:
            number = taken_before + turn + 1
            signal.wait(flags + (line + sender) * signal.FLAG_STRIDE + SENT, number, context, sender, KERNEL)
            inside = offsets < out_n - start
            value = tl.load(slot(slots, lane, number & 1, sender, num_ranks, BLOCK) + offsets, mask=inside)
            to = elements(out_ptr, start, offsets, out_columns, out_row, out_column, OUT_FLAT)
            tl.store(to, value, mask=inside)
            signal.notify(mine + TAKEN, number, rank, sender, context + 2)
    tl.debug_barrier()
    if to_index >= 0:
        tl.store(counts + line + receiver, sent_before + sends)
    if from_index >= 0:
        tl.store(counts + MESSAGE_LANES * num_ranks + line + sender, taken_before + receives)


@triton.jit(do_not_specialize=["index"])
def all_reduce_accumulate_kernel(
    in_ptr,
    out_ptr,
    n,
    rounds,
    in_columns,
    in_row,
    in_column,
    out_columns,
    out_row,
    out_column,
    slots,
    flags,
    epochs,
    tickets,
    members,
    index,
    context,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    TICKETS: tl.constexpr,
    LOCKED: tl.constexpr,
    OP: tl.constexpr,
    IN_FLAT: tl.constexpr,
    OUT_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """All-reduce in which every member adds its part of a chunk at the chunk's owner, who then writes it to all.

    In each round a lane takes ``WORLD`` chunks of ``BLOCK`` elements, one for each owner. The owner's sum lies in a
    slot that no message uses, in wide type. Parts are added in the order of arrival, by atomics or (``LOCKED``) under
    the lock in the second word of the lane's own line of flags; so the last bits differ from run to run, and are the
    same on every rank.
    """
    lane = take_lane(tickets, TICKETS)
    lanes = tl.num_programs(0)
    place = tl.arange(0, PEERS)
    there = (place < WORLD) & (place != index)
    channel = open_channel(flags, epochs, lane, members, there, context, WORLD, PEERS)
    rank = channel.rank
    num_ranks = tl.load(context + 1).to(tl.int32)
    offsets = tl.arange(0, BLOCK)
    wide: tl.constexpr = numeric.wide_dtype(in_ptr.dtype.element_ty)
    meeting = 0
    for turn in range(rounds):
        base = tl.cast(turn * lanes + lane, tl.int64) * (WORLD * BLOCK)
        sums = slot(slots, lane, turn % 2, rank, num_ranks, BLOCK) + offsets
        tl.store(sums, tl.zeros((BLOCK,), dtype=wide))
        meeting += 1
        meet(channel, meeting, KERNEL)
        for step in tl.static_range(WORLD):
            owner = rotated_rank(index, step, WORLD)
            peer = tl.load(members + owner)
            start = base + owner * BLOCK
            inside = offsets < n - start
            source = elements(in_ptr, start, offsets, in_columns, in_row, in_column, IN_FLAT)
            value = tl.load(source, mask=inside, other=0.0).to(wide)
            theirs = slot(slots, lane, turn % 2, peer, num_ranks, BLOCK) + offsets
            if LOCKED:
                lock = channel.flags + peer * signal.FLAG_STRIDE + 1
                signal.lock(lock, rank, peer, context, KERNEL)
                before = memory.load(theirs, rank, peer, context + 2)
                memory.store(theirs, before + value, rank, peer, context + 2)
                signal.unlock(lock, rank, peer, context)
            else:
                link.pace_write(theirs, rank, peer, context + 2)
                atomics.atomic_add(theirs, value, rank, peer, context + 2, None, "relaxed", "sys")
        meeting += 1
        meet(channel, meeting, KERNEL)
        start = base + index * BLOCK
        inside = offsets < n - start
        result = numeric.narrow(finish(tl.load(sums), OP, WORLD), out_ptr.dtype.element_ty)
        to = elements(out_ptr, start, offsets, out_columns, out_row, out_column, OUT_FLAT)
        for step in tl.static_range(WORLD):
            peer = tl.load(members + rotated_rank(index, step, WORLD))
            memory.store(to, result, rank, peer, context + 2, inside)
    meeting += 1
    meet(channel, meeting, KERNEL)
    close_channel(channel, meeting)
