"""Programs that bring pieces of the peers' shards of A into the staging buffer; they run :func:`fetch_pieces`."""

import triton
import triton.language as tl

from iris._events import Event
from iris.device import link, signal, tracing
from iris.device.address import element_bytes, translate
from iris.x.schedule import fetched_piece, piece_flag, rotated_rank
from iris.x.turn import wait_for_input

# Words of ``queue``, int32 in ordinary memory.
ROLES = tl.constexpr(0)  # programs that have started
FETCHES = tl.constexpr(1)  # pieces of A that a program has taken to fetch
TILES = tl.constexpr(2)  # pieces of work on the output that a program has taken
EPOCH = tl.constexpr(3)  # calls before this one
FETCHED = tl.constexpr(4)  # pieces of A that have come
QUEUE_WORDS = 5

_FETCH = tl.constexpr(int(Event.FETCH))


@triton.jit
def _chunk(
    a_ptr,
    staged_ptr,
    M,
    stride_am,
    stride_ak,
    stride_part,
    stride_sm,
    stride_sk,
    part,
    tile_m,
    start,
    last,
    rank,
    peer,
    context,
    BLOCK_M: tl.constexpr,
    FETCH_K: tl.constexpr,
):
    """Where columns ``start`` to ``last - 1``, at most ``FETCH_K``, of a row of tiles lie with the peer, where they go,
    and which there are."""
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = start + tl.arange(0, FETCH_K)
    wide_rows, wide_k = rows.to(tl.int64)[:, None], k.to(tl.int64)[None, :]
    source = translate(a_ptr, rank, peer, context + 2) + wide_rows * stride_am + wide_k * stride_ak
    target = staged_ptr + tl.cast(part, tl.int64) * stride_part + wide_rows * stride_sm + wide_k * stride_sk
    return source, target, (rows < M)[:, None] & (k < last)[None, :]


@triton.jit
def _begin(
    a_ptr,
    item,
    ready,
    M,
    K_shard,
    tiles_m,
    groups,
    flags,
    counters,
    members,
    index,
    rank,
    context,
    stage_rows,
    k_per_flag,
    WORLD: tl.constexpr,
    GATHER_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Wait until a piece may be read: its part, row of tiles, group, owner, first column and the one past its last, the
    tick at which an imitated link has carried it, and ``ready``, a bit for each part that may be read."""
    parts: tl.constexpr = WORLD - 1
    part, tile_m, group = fetched_piece(item, tiles_m, groups, parts, stage_rows, GATHER_DIM == 1)
    peer = tl.load(members + rotated_rank(index, 1 + part, WORLD))
    bit = tl.full((), 1, tl.int64) << (part % 64)
    if (ready & bit) == 0:
        wait_for_input(flags, counters, peer, context, KERNEL)
        if parts <= 64:
            ready |= bit
    first = group * (k_per_flag * BLOCK_K)
    last = tl.minimum(first + k_per_flag * BLOCK_K, K_shard)
    nbytes = tl.minimum(M - tile_m * BLOCK_M, BLOCK_M) * (last - first) * element_bytes(a_ptr.dtype)
    return part, tile_m, group, peer, first, last, link.charge(nbytes, rank, peer, context + 2), ready


@triton.jit
def fetch_pieces(
    a_ptr,
    staged_ptr,
    M,
    K_shard,
    stride_am,
    stride_ak,
    stride_part,
    stride_sm,
    stride_sk,
    fetched,
    queue,
    epoch,
    role,
    fetchers,
    flags,
    counters,
    members,
    index,
    context,
    stage_rows,
    k_per_flag,
    WORLD: tl.constexpr,
    GATHER_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FETCH_K: tl.constexpr,
    TRACING: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Bring pieces of the peers' shards into the staging buffer until none is left, or with a role past ``fetchers``
    until the first stage has been given out.

    While a chunk of a piece is stored and a piece announced, the next chunk is on its way, be it of the next piece.
    """
    rank = tl.load(members + index)
    parts: tl.constexpr = WORLD - 1
    tiles_m = tl.cdiv(M, BLOCK_M)
    groups = tl.cdiv(tl.cdiv(K_shard, BLOCK_K), k_per_flag)
    items = tiles_m * groups * parts
    of_first_stage = tl.minimum(stage_rows, tiles_m) * groups * parts
    item = tl.atomic_add(queue + FETCHES, 1, sem="relaxed", scope="gpu")
    if item < items:
        part, tile_m, group, peer, first, last, due, ready = _begin(
            a_ptr, item, tl.full((), 0, tl.int64), M, K_shard, tiles_m, groups, flags, counters, members, index, rank,
            context, stage_rows, k_per_flag, WORLD, GATHER_DIM, BLOCK_M, BLOCK_K, KERNEL,
        )  # fmt: skip
        if TRACING:
            span = tracing.start(context, _FETCH, peer, tile_m, group)
        source, target, mask = _chunk(
            a_ptr, staged_ptr, M, stride_am, stride_ak, stride_part, stride_sm, stride_sk,
            part, tile_m, first, last, rank, peer, context, BLOCK_M, FETCH_K,
        )  # fmt: skip
        value = tl.load(source, mask=mask, other=0.0)
        while item < items:
            # The next number is on its way while this piece is.
            following = items
            if (role < fetchers) | (item < of_first_stage):
                following = tl.atomic_add(queue + FETCHES, 1, sem="relaxed", scope="gpu")
            start = first
            for start_of_next in range(first + FETCH_K, last, FETCH_K):
                source, _, next_mask = _chunk(
                    a_ptr, staged_ptr, M, stride_am, stride_ak, stride_part, stride_sm, stride_sk,
                    part, tile_m, start_of_next, last, rank, peer, context, BLOCK_M, FETCH_K,
                )  # fmt: skip
                next_value = tl.load(source, mask=next_mask, other=0.0)
                _, target, mask = _chunk(
                    a_ptr, staged_ptr, M, stride_am, stride_ak, stride_part, stride_sm, stride_sk,
                    part, tile_m, start, last, rank, peer, context, BLOCK_M, FETCH_K,
                )  # fmt: skip
                tl.store(target, value, mask=mask)
                value = next_value
                start = start_of_next
            _, target, mask = _chunk(
                a_ptr, staged_ptr, M, stride_am, stride_ak, stride_part, stride_sm, stride_sk,
                part, tile_m, start, last, rank, peer, context, BLOCK_M, FETCH_K,
            )  # fmt: skip
            flag = fetched + piece_flag(part, tile_m, group, tiles_m, groups, parts, GATHER_DIM == 1)
            arrives = due
            if TRACING:
                done = span
            if following < items:
                part, tile_m, group, peer, first, last, due, ready = _begin(
                    a_ptr, following, ready, M, K_shard, tiles_m, groups, flags, counters, members, index, rank,
                    context, stage_rows, k_per_flag, WORLD, GATHER_DIM, BLOCK_M, BLOCK_K, KERNEL,
                )  # fmt: skip
                if TRACING:
                    span = tracing.start(context, _FETCH, peer, tile_m, group)
            source, _, next_mask = _chunk(
                a_ptr, staged_ptr, M, stride_am, stride_ak, stride_part, stride_sm, stride_sk,
                part, tile_m, first, tl.where(following < items, last, first), rank, peer, context, BLOCK_M, FETCH_K,
            )  # fmt: skip
            next_value = tl.load(source, mask=next_mask, other=0.0)
            tl.store(target, value, mask=mask)
            value = next_value
            link.carried(arrives)
            signal.publish(flag, epoch)
            # After the flag: who sees all of them here need not look at any flag.
            tl.atomic_add(queue + FETCHED, 1, sem="release", scope="gpu")
            if TRACING:
                tracing.end(context, done)
            item = following
