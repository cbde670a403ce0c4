"""Kernels that work on tensors in place: ``push_kernel`` moves pieces, ``reduce_kernel`` combines what ranks hold.

Both meet at the start, so that peers' memory may be touched, and at the end, so that peers have done with the own;
:mod:`iris.x.channel` has the protocol. A tensor is given as a matrix of pieces: ``*_piece`` is the distance of two
pieces, the rest says where the elements of a piece lie (:func:`iris.ccl._elements.elements`).
"""

import triton
import triton.language as tl

from iris.ccl._elements import combine, elements, finish
from iris.device import memory, numeric
from iris.x.channel import close_channel, meet, open_channel, take_lane
from iris.x.schedule import grouped_tile, rotated_rank


@triton.jit
def peers_there(index, root, WORLD: tl.constexpr, PEERS: tl.constexpr, ROOTED: tl.constexpr):
    """Which members the caller meets: all others, or with ``ROOTED`` the root all others and they the root."""
    place = tl.arange(0, PEERS)
    there = (place < WORLD) & (place != index)
    if ROOTED:
        there = there & (place == tl.where(index == root, place, root))
    return there


@triton.jit(do_not_specialize=["index", "root"])
def push_kernel(
    in_ptr,
    out_ptr,
    n,
    blocks,
    in_piece,
    in_columns,
    in_row,
    in_column,
    out_piece,
    out_columns,
    out_row,
    out_column,
    flags,
    epochs,
    tickets,
    members,
    index,
    root,
    context,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    TICKETS: tl.constexpr,
    ROOTED: tl.constexpr,
    BY_RECEIVER: tl.constexpr,
    BY_SENDER: tl.constexpr,
    AT_ONCE: tl.constexpr,
    IN_FLAT: tl.constexpr,
    OUT_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Writes pieces of ``n`` elements to every member; with ``ROOTED`` the root alone does.

    The piece of ``in_ptr`` is the receiver's (``BY_RECEIVER``) or the first; it goes to the sender's piece of
    ``out_ptr`` (``BY_SENDER``) or the first. ``AT_ONCE``: a program reads a block once and writes it to all members;
    otherwise a program takes one block for one member at a time.
    """
    lane = take_lane(tickets, TICKETS)
    lanes = tl.num_programs(0)
    there = peers_there(index, root, WORLD, PEERS, ROOTED)
    channel = open_channel(flags, epochs, lane, members, there, context, WORLD, PEERS)
    meet(channel, 1, KERNEL)

    mine = blocks
    if ROOTED:
        mine = tl.where(index == root, blocks, 0)
    offsets = tl.arange(0, BLOCK)
    target = out_ptr
    if BY_SENDER:
        target += tl.cast(index, tl.int64) * out_piece
    if AT_ONCE:
        for block in range(lane, mine, lanes):
            start = tl.cast(block, tl.int64) * BLOCK
            inside = offsets < n - start
            value = tl.load(elements(in_ptr, start, offsets, in_columns, in_row, in_column, IN_FLAT), mask=inside)
            to = elements(target, start, offsets, out_columns, out_row, out_column, OUT_FLAT)
            for step in tl.static_range(WORLD):
                peer = tl.load(members + rotated_rank(index, step, WORLD))
                memory.store(to, value, channel.rank, peer, context + 2, inside)
    else:
        for item in range(lane, mine * WORLD, lanes):
            block = item // WORLD
            # A program's members change from block to block, so that no program is tied to one link.
            receiver = rotated_rank(index, item + block, WORLD)
            start = tl.cast(block, tl.int64) * BLOCK
            inside = offsets < n - start
            source = in_ptr
            if BY_RECEIVER:
                source += tl.cast(receiver, tl.int64) * in_piece
            value = tl.load(elements(source, start, offsets, in_columns, in_row, in_column, IN_FLAT), mask=inside)
            to = elements(target, start, offsets, out_columns, out_row, out_column, OUT_FLAT)
            memory.store(to, value, channel.rank, tl.load(members + receiver), context + 2, inside)
    meet(channel, 2, KERNEL)
    close_channel(channel, 2)


@triton.jit(do_not_specialize=["index", "root"])
def spread_kernel(
    in_ptr,
    out_ptr,
    n,
    shard,
    blocks,
    in_columns,
    in_row,
    in_column,
    out_columns,
    out_row,
    out_column,
    flags,
    epochs,
    tickets,
    members,
    index,
    root,
    context,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    TICKETS: tl.constexpr,
    IN_FLAT: tl.constexpr,
    OUT_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Broadcast in two steps: the root writes a shard to each member, which hands it on to the others.

    ``shard`` elements a member, in ``blocks`` blocks; the last shards may be short or empty. A block of a shard passes
    through programs of one lane, so the meeting between the steps is all the order that they need.
    """
    lane = take_lane(tickets, TICKETS)
    lanes = tl.num_programs(0)
    there = peers_there(index, root, WORLD, PEERS, False)
    channel = open_channel(flags, epochs, lane, members, there, context, WORLD, PEERS)
    meet(channel, 1, KERNEL)
    offsets = tl.arange(0, BLOCK)
    if index == root:
        for block in range(lane, blocks, lanes):
            within = tl.cast(block, tl.int64) * BLOCK
            for step in tl.static_range(WORLD):
                receiver = rotated_rank(index, step, WORLD)
                start = receiver * tl.cast(shard, tl.int64) + within
                inside = (offsets < shard - within) & (offsets < n - start)
                value = tl.load(elements(in_ptr, start, offsets, in_columns, in_row, in_column, IN_FLAT), mask=inside)
                to = elements(out_ptr, start, offsets, out_columns, out_row, out_column, OUT_FLAT)
                memory.store(to, value, channel.rank, tl.load(members + receiver), context + 2, inside)
                if receiver != index:
                    tl.store(to, value, mask=inside)
    meet(channel, 2, KERNEL)
    for block in range(lane, blocks, lanes):
        within = tl.cast(block, tl.int64) * BLOCK
        start = index * tl.cast(shard, tl.int64) + within
        inside = (offsets < shard - within) & (offsets < n - start)
        own = elements(out_ptr, start, offsets, out_columns, out_row, out_column, OUT_FLAT)
        value = tl.load(own, mask=inside)
        for step in tl.static_range(1, WORLD):
            receiver = rotated_rank(index, step, WORLD)
            # The root has everything already.
            if receiver != root:
                memory.store(own, value, channel.rank, tl.load(members + receiver), context + 2, inside)
    meet(channel, 3, KERNEL)
    close_channel(channel, 3)


@triton.jit(do_not_specialize=["index", "root"])
def reduce_kernel(
    in_ptr,
    out_ptr,
    n,
    shard,
    blocks,
    in_piece,
    in_columns,
    in_row,
    in_column,
    out_columns,
    out_row,
    out_column,
    flags,
    epochs,
    tickets,
    members,
    index,
    root,
    context,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    TICKETS: tl.constexpr,
    ROOTED: tl.constexpr,
    TO_ALL: tl.constexpr,
    OP: tl.constexpr,
    IN_FLAT: tl.constexpr,
    OUT_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Reads elements from every member, combines them in group order in wide type, rounds once, and writes them.

    The caller's own piece of ``in_ptr``, ``n`` elements, to the own ``out_ptr``, or with ``TO_ALL`` its shard of
    ``shard`` elements, in ``blocks`` blocks, to every member's; the last shards may be short or empty. With ``ROOTED``
    the root alone does so. What differs between ranks is computed here and not passed, so that the kernel is compiled
    once for all ranks.
    """
    lane = take_lane(tickets, TICKETS)
    lanes = tl.num_programs(0)
    there = peers_there(index, root, WORLD, PEERS, ROOTED)
    channel = open_channel(flags, epochs, lane, members, there, context, WORLD, PEERS)
    meet(channel, 1, KERNEL)
    rank = channel.rank
    mine = blocks
    if ROOTED:
        mine = tl.where(index == root, blocks, 0)
    offsets = tl.arange(0, BLOCK)
    piece = in_ptr + tl.cast(index, tl.int64) * in_piece
    first = tl.cast(0, tl.int64)
    if TO_ALL:
        first = tl.cast(index, tl.int64) * shard
    wide: tl.constexpr = numeric.wide_dtype(in_ptr.dtype.element_ty)
    for block in range(lane, mine, lanes):
        within = tl.cast(block, tl.int64) * BLOCK
        start = first + within
        inside = (offsets < shard - within) & (offsets < n - start)
        source = elements(piece, start, offsets, in_columns, in_row, in_column, IN_FLAT)
        total = memory.load(source, rank, tl.load(members), context + 2, inside, 0.0).to(wide)
        for member in tl.static_range(1, WORLD):
            value = memory.load(source, rank, tl.load(members + member), context + 2, inside, 0.0)
            total = combine(total, value.to(wide), OP)
        result = numeric.narrow(finish(total, OP, WORLD), out_ptr.dtype.element_ty)
        to = elements(out_ptr, start, offsets, out_columns, out_row, out_column, OUT_FLAT)
        if TO_ALL:
            for step in tl.static_range(WORLD):
                peer = tl.load(members + rotated_rank(index, step, WORLD))
                memory.store(to, result, rank, peer, context + 2, inside)
        else:
            tl.store(to, result, mask=inside)
    meet(channel, 2, KERNEL)
    close_channel(channel, 2)


@triton.jit(do_not_specialize=["index"])
def reduce_tiles_kernel(
    in_ptr,
    out_ptr,
    M,
    N,
    share,
    stride_im,
    stride_in,
    stride_om,
    stride_on,
    flags,
    epochs,
    tickets,
    members,
    index,
    context,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    TICKETS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    OP: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Combines the tiles that this rank owns of all members' (M, N) inputs, each written at its own position.

    Tiles are numbered in grouped order; member r owns ``share`` tiles from ``r * share`` on, or without ``CONTIGUOUS``
    every ``WORLD``-th from r on. ``BLOCK`` is a tile's number of elements.
    """
    lane = take_lane(tickets, TICKETS)
    there = peers_there(index, 0, WORLD, PEERS, False)
    channel = open_channel(flags, epochs, lane, members, there, context, WORLD, PEERS)
    meet(channel, 1, KERNEL)
    rank = channel.rank
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    wide: tl.constexpr = numeric.wide_dtype(in_ptr.dtype.element_ty)
    for turn in range(lane, share, tl.num_programs(0)):
        tile = index + turn * WORLD
        if CONTIGUOUS:
            tile = index * share + turn
        if tile < tiles_m * tiles_n:
            tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
            rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = (rows < M)[:, None] & (columns < N)[None, :]
            rows = rows.to(tl.int64)[:, None]
            columns = columns.to(tl.int64)[None, :]
            source = in_ptr + rows * stride_im + columns * stride_in
            total = memory.load(source, rank, tl.load(members), context + 2, inside, 0.0).to(wide)
            for member in tl.static_range(1, WORLD):
                value = memory.load(source, rank, tl.load(members + member), context + 2, inside, 0.0)
                total = combine(total, value.to(wide), OP)
            result = numeric.narrow(finish(total, OP, WORLD), out_ptr.dtype.element_ty)
            tl.store(out_ptr + rows * stride_om + columns * stride_on, result, mask=inside)
    meet(channel, 2, KERNEL)
    close_channel(channel, 2)


@triton.jit(do_not_specialize=["index", "root"])
def gather_kernel(
    in_ptr,
    out_ptr,
    n,
    blocks,
    in_columns,
    in_row,
    in_column,
    out_piece,
    out_columns,
    out_row,
    out_column,
    flags,
    epochs,
    tickets,
    members,
    index,
    root,
    context,
    WORLD: tl.constexpr,
    PEERS: tl.constexpr,
    TICKETS: tl.constexpr,
    IN_FLAT: tl.constexpr,
    OUT_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """The root reads ``n`` elements of every member into the member's piece of its output."""
    lane = take_lane(tickets, TICKETS)
    there = peers_there(index, root, WORLD, PEERS, True)
    channel = open_channel(flags, epochs, lane, members, there, context, WORLD, PEERS)
    meet(channel, 1, KERNEL)
    offsets = tl.arange(0, BLOCK)
    if index == root:
        for item in range(lane, blocks * WORLD, tl.num_programs(0)):
            block = item // WORLD
            sender = rotated_rank(index, item + block, WORLD)
            start = tl.cast(block, tl.int64) * BLOCK
            inside = offsets < n - start
            source = elements(in_ptr, start, offsets, in_columns, in_row, in_column, IN_FLAT)
            value = memory.load(source, channel.rank, tl.load(members + sender), context + 2, inside)
            piece = out_ptr + tl.cast(sender, tl.int64) * out_piece
            tl.store(elements(piece, start, offsets, out_columns, out_row, out_column, OUT_FLAT), value, mask=inside)
    meet(channel, 2, KERNEL)
    close_channel(channel, 2)
