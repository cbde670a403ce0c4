"""The kernel of all-gather + matmul with a staging buffer; its protocol is in :mod:`iris.ops.all_gather_matmul`."""

import triton
import triton.language as tl

from iris._events import Event
from iris.device import _asm, link, numeric, signal, tracing
from iris.device.address import translate
from iris.ops._finish import finish_tile
from iris.ops._hbm_fetch import EPOCH, FETCHED, FETCHES, ROLES, TILES, fetch_pieces
from iris.ops._whole_tiles_kernel import multiply_whole_tiles
from iris.x.gemm import multiply_blocks
from iris.x.schedule import (
    divided_tile,
    gathered_block,
    gathered_tile,
    piece_flag,
    rotated_rank,
    staged_tile,
    turn_start,
)
from iris.x.turn import begin_turn, end_turn, wait_for_input

_COMPUTE = tl.constexpr(int(Event.COMPUTE))
_WAIT = tl.constexpr(int(Event.WAIT))


@triton.jit(do_not_specialize=["count", "index"])
def inputs_kernel(
    arrivals,
    count,
    flags,
    counters,
    members,
    index,
    context,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Clear the flags of the copies that follow, say that the own input may be read, and wait until all peers' may; one
    program."""
    begin_turn(flags, counters, members, index, context, WORLD)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(arrivals + place, 0, mask=place < count)
    for step in range(1, WORLD):
        wait_for_input(flags, counters, tl.load(members + rotated_rank(index, step, WORLD)), context, KERNEL)


@triton.jit
def arrived_kernel(flag):
    """Set the flag of a copy that came before in the stream, where the host has no way of its own to do that."""
    signal.publish(flag, 1)


@triton.jit(do_not_specialize=["count", "rank", "peer"])
def bring_kernel(a_ptr, staged_ptr, count, flag, rank, peer, context, BLOCK: tl.constexpr):
    """Copy ``count`` elements from the peer's place of ``a_ptr`` and set the flag; one program."""
    source = translate(a_ptr, rank, peer, context + 2)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(staged_ptr + place, tl.load(source + place, mask=place < count, other=0.0), mask=place < count)
    signal.publish(flag, 1)


@triton.jit(do_not_specialize=["nbytes", "rank", "peer"])
def carried_kernel(nbytes, rank, peer, context):
    """Hold the stream until the imitated link has carried a copy; one program."""
    link.carried(link.charge(nbytes, rank, peer, context + 2))


@triton.jit(
    do_not_specialize=[
        "M",
        "index",
        "fetchers",
        "first_fetchers",
        "whole",
        "splits",
        "stage_rows",
        "k_per_flag",
        "flag_rows",
    ]
)
def hbm_buffer_kernel(
    a_desc,
    staged_desc,
    b_desc,
    a_ptr,
    staged_ptr,
    b_ptr,
    bias_ptr,
    scale_a_ptr,
    scale_b_ptr,
    out_ptr,
    M,
    N,
    K_shard,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_biasm,
    stride_biasn,
    stride_om,
    stride_on,
    part_rows,
    stride_part,
    stride_sm,
    stride_sk,
    fetched,
    partials,
    sums_ptr,
    queue,
    fetchers,
    first_fetchers,
    whole,
    splits,
    stage_rows,
    k_per_flag,
    flag_rows,
    flags,
    counters,
    members,
    index,
    context,
    WORLD: tl.constexpr,
    GATHER_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FETCH_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    AHEAD: tl.constexpr,
    COPIED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    TRACING: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """``out = act(cat(A shards) @ B + bias)``: some programs fetch the peers' shards, all multiply what has come.

    ``M`` is the number of rows of one shard (``GATHER_DIM == 0``) or of A; ``K_shard`` the columns of one shard. Part p
    of ``staged_ptr`` is the shard of member ``index + 1 + p``, in ``part_rows`` rows. ``fetched`` has a flag for each
    part, row of tiles and group of ``k_per_flag`` blocks: the number of the call that has brought it. With ``COPIED``
    the host's copies bring the parts instead, ``flag_rows`` rows of tiles at a time and all K of a part at once, and
    a flag is 0 before its copy and 1 afterwards. With ``OVERLAPPED``, which needs that, whole tiles are multiplied by
    :mod:`iris.ops._whole_tiles_kernel`.

    The tiles from ``whole`` on are divided along K into ``splits`` pieces. All but the last leave their sums in
    ``sums_ptr`` (float32 or int32) and the number of the call in ``partials``; the last adds them.
    """
    if not COPIED:
        begin_turn(flags, counters, members, index, context, WORLD)
    rank = tl.load(members + index)
    epoch = tl.load(queue + EPOCH) + 1
    parts: tl.constexpr = WORLD - 1
    along_k: tl.constexpr = GATHER_DIM == 1
    if WORLD > 1:
        if not COPIED:
            # Roles go to programs in the order in which they start, so those that fetch are running.
            role = tl.atomic_add(queue + ROLES, 1, sem="relaxed", scope="gpu")
            if role < tl.maximum(fetchers, first_fetchers):
                fetch_pieces(
                    a_ptr, staged_ptr, M, K_shard, stride_am, stride_ak, stride_part, stride_sm, stride_sk,
                    fetched, queue, epoch, role, fetchers, flags, counters, members, index, context,
                    stage_rows, k_per_flag, WORLD, GATHER_DIM, BLOCK_M, BLOCK_K, FETCH_K, TRACING, KERNEL,
                )  # fmt: skip

    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    blocks = tl.cdiv(K_shard, BLOCK_K)
    turns = tl.cdiv(blocks, k_per_flag)  # of one part
    # What a tile goes through: its own blocks, then those of all parts (along K) or of one part only.
    sequence: tl.constexpr = parts if GATHER_DIM == 1 else 1
    wanted = epoch
    if COPIED:
        wanted = 1
    tiles = tiles_m * tiles_n
    if GATHER_DIM == 0:
        tiles *= WORLD
    items = whole + (tiles - whole) * splits
    offsets_m = tl.arange(0, BLOCK_M)
    offsets_n = tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, AHEAD)
    partial = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    everything = 0  # whether all pieces of A have come, as far as this program has seen
    done = 0  # items that are not given out here
    if OVERLAPPED:
        done = whole
        multiply_whole_tiles(
            a_desc, staged_desc, b_desc, a_ptr, staged_ptr, b_ptr, bias_ptr, scale_a_ptr, scale_b_ptr, out_ptr,
            M, N, K_shard, stride_am, stride_ak, stride_bk, stride_bn, stride_biasm, stride_biasn, stride_om, stride_on,
            part_rows, stride_part, fetched, sums_ptr, whole, stage_rows, flag_rows, members, index, context,
            WORLD, GATHER_DIM, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, DESCRIPTORS, B_TRANSPOSED, HAS_BIAS, HAS_SCALES,
            ACTIVATION, PRECISION, KERNEL,
        )  # fmt: skip
    item = done + tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")
    while item < items:
        tile, piece, pieces = divided_tile(item, whole, splits)
        row_shard = tl.full((), 0, tl.int32)
        if GATHER_DIM == 0 and WORLD > 1:
            row_shard, tile_m, tile_n = gathered_tile(tile, tiles_m, tiles_n, parts, stage_rows, GROUP_M)
        else:
            tile_m, tile_n = staged_tile(tile, tiles_m, tiles_n, stage_rows, GROUP_M)
        if TRACING:
            span = tracing.start(context, _COMPUTE, -1, tile_m, tile_n)
        rows = tile_m * BLOCK_M + offsets_m
        columns = tile_n * BLOCK_N + offsets_n
        b_columns = columns.to(tl.int64) * stride_bn
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=numeric.accumulator_dtype(a_ptr.dtype.element_ty))
        own = blocks
        staged = blocks * parts
        if GATHER_DIM == 0:
            own = tl.where(row_shard == 0, blocks, 0)
            staged = blocks - own
        # The last piece is longer: it ends when the others have left their sums.
        first = (own + staged) * piece * 15 // (pieces * 16)
        last = (own + staged) * (piece + 1) * 15 // (pieces * 16)
        if piece == pieces - 1:
            last = own + staged
        acc = multiply_blocks(
            acc, a_desc, a_ptr, tile_m * BLOCK_M, rows.to(tl.int64) * stride_am, rows < M, 0, 0, stride_ak,
            b_desc, b_ptr, tile_n * BLOCK_N, b_columns, columns < N, stride_bk,
            tl.minimum(first, own), tl.minimum(last, own), K_shard, 0, index, rank, rank, context + 2,
            k_per_flag, WORLD, 1, along_k, BLOCK_M, BLOCK_N, BLOCK_K, B_TRANSPOSED, DESCRIPTORS, PRECISION,
        )  # fmt: skip
        if WORLD > 1:
            flag_row = tile_m // flag_rows
            part = flag_row % parts  # the one that the tile begins with
            if GATHER_DIM == 0:
                part = tl.maximum(row_shard - 1, 0)  # the only one
            base = fetched + piece_flag(part, flag_row, 0, tl.cdiv(tiles_m, flag_rows), turns, parts, along_k)
            position = tl.maximum(first - own, 0)
            end = tl.maximum(last - own, 0)
            while position < end:
                # As many groups in a row as have come, at least the next one: while data still arrives the loop waits
                # between groups, afterwards it goes through the rest without a stop. The reads are atomic because those
                # give all threads of the program one number, and they acquire what they have seen.
                turn, _, _ = gathered_block(position, blocks, sequence, k_per_flag)
                come = AHEAD
                if everything == 0:
                    if not COPIED:
                        there = tl.atomic_add(queue + FETCHED, 0, sem="acquire", scope="gpu")
                        everything = (there == tiles_m * turns * parts).to(tl.int32)
                    if everything == 0:
                        flag = base + tl.minimum(turn + lanes, turns * sequence - 1)
                        seen = tl.atomic_add(flag, tl.zeros((AHEAD,), tl.int32), sem="acquire", scope="sys")
                        come = tl.min(tl.where(seen - wanted < 0, lanes, AHEAD))
                    tl.debug_barrier()
                    if come == 0:
                        come = 1
                        peer = tl.load(members + rotated_rank(index, 1 + (part + turn % sequence) % parts, WORLD))
                        if TRACING:
                            pause = tracing.start(context, _WAIT, peer, tile_m, turn)
                        signal.wait(base + turn, wanted, context, peer, KERNEL)
                        if TRACING:
                            tracing.end(context, pause)
                    if DESCRIPTORS:
                        _asm.order_descriptor_loads()
                until = end
                if everything == 0:
                    until = tl.minimum(turn_start(turn + come, blocks, sequence, k_per_flag), end)
                acc = multiply_blocks(
                    acc, staged_desc, staged_ptr, tile_m * BLOCK_M, rows.to(tl.int64) * stride_sm, rows < M,
                    part_rows, stride_part, stride_sk,
                    b_desc, b_ptr, tile_n * BLOCK_N, b_columns, columns < N, stride_bk,
                    position, until, K_shard, part, index + 1, rank, rank, context + 2,
                    k_per_flag, WORLD, sequence, along_k, BLOCK_M, BLOCK_N, BLOCK_K, B_TRANSPOSED, DESCRIPTORS,
                    PRECISION,
                )  # fmt: skip
                position = until

        sums = (tile - whole) * (splits - 1)
        if piece < pieces - 1:
            tl.store(sums_ptr + tl.cast(sums + piece, tl.int64) * (BLOCK_M * BLOCK_N) + partial, acc)
            signal.publish(partials + sums + piece, epoch)
            item = done + tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")
        else:
            # The other pieces were given out before this one, to programs that wait for fetchers only.
            for other in range(pieces - 1):
                signal.wait(partials + sums + other, epoch, context, rank, KERNEL)
            # On its way while the tile is written. Not earlier: what is given out must be begun at once.
            item = done + tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")
            out_rows = rows
            if GATHER_DIM == 0:
                out_rows = rotated_rank(index, row_shard, WORLD) * M + rows
            others = sums_ptr + tl.cast(sums, tl.int64) * (BLOCK_M * BLOCK_N)
            finish_tile(
                acc, others, pieces - 1, out_ptr, rows < M, out_rows, tile_n * BLOCK_N, N, stride_om, stride_on,
                bias_ptr, stride_biasm, stride_biasn, scale_a_ptr, scale_b_ptr,
                BLOCK_M, BLOCK_N, HAS_BIAS, HAS_SCALES, ACTIVATION,
            )  # fmt: skip
        if TRACING:
            tracing.end(context, span)

    if end_turn(flags, counters, members, index, context, WORLD, KERNEL):
        tl.store(queue + ROLES, 0)
        tl.store(queue + FETCHES, 0)
        tl.store(queue + TILES, 0)
        tl.store(queue + FETCHED, 0)
        tl.store(queue + EPOCH, epoch)
