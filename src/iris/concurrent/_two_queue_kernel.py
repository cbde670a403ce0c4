"""The kernel of a GEMM beside a collective; its protocol is in :mod:`iris.concurrent.gemm`."""

import triton
import triton.language as tl

from iris._events import Event
from iris.device import tracing
from iris.x.epilogue import write_tile
from iris.x.gemm import multiply_tile
from iris.x.schedule import grouped_tile, rotated_rank
from iris.x.turn import begin_turn, end_alone, end_turn, wait_for_input

# Words of ``queue``, int32 in ordinary memory. Each is on a line of its own, because all programs add to it.
PRODUCTS = tl.constexpr(0)  # tiles of the GEMM that a program has taken
ITEMS = tl.constexpr(32)  # tickets for tiles of the collective that programs have taken
COMERS = tl.constexpr(64)  # programs that have come to the collective
QUEUE_WORDS = 96
# Tiles of a collective for a ticket. A ticket is broadcast within a program, so all its warps wait for the slowest and
# then for the counter; between tickets each goes on to its next tile alone.
BATCH = tl.constexpr(4)

_COMPUTE = tl.constexpr(int(Event.COMPUTE))
_STORE = tl.constexpr(int(Event.STORE))
_WAIT = tl.constexpr(int(Event.WAIT))


@triton.jit
def _multiply_tiles(
    a_desc, b_desc, a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    queue, rank, context,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr, B_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, TRACING: tl.constexpr,
):  # fmt: skip
    """Take tiles of ``C = A @ B`` until none are left."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.atomic_add(queue + PRODUCTS, 1, sem="relaxed", scope="gpu")
    while tile < tiles_m * tiles_n:
        if TRACING:
            span = tracing.start(context, _COMPUTE, rank, tile, 0)
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = multiply_tile(
            tile_m, tile_n, a_desc, b_desc, a_ptr, b_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
            rank, context, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, B_TRANSPOSED, PRECISION,
        )  # fmt: skip
        # On its way while the tile is written.
        tile = tl.atomic_add(queue + PRODUCTS, 1, sem="relaxed", scope="gpu")
        write_tile(
            acc, c_ptr, rows, columns, (rows < M)[:, None] & (columns < N)[None, :], stride_cm, stride_cn,
            c_ptr, 0, 0, c_ptr, c_ptr, False, False, "none",
        )  # fmt: skip
        if TRACING:
            tracing.end(context, span)


@triton.jit
def _first_item(ticket, batches, BATCH: tl.constexpr):
    """The first tile of a ticket for the collective: ``batches`` have BATCH tiles each, those after them one."""
    return tl.where(ticket < batches, ticket * BATCH, ticket + batches * (BATCH - 1))


@triton.jit
def _exchange_tiles(
    TILE: tl.constexpr, src_ptr, dst_ptr, rows, columns, first, stride_sm, stride_sn, stride_dm, stride_dn,
    items, batches, cap, queue, flags, counters, members, index, rank, context,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, TRACING: tl.constexpr,
    KERNEL: tl.constexpr,
):  # fmt: skip
    """Take tiles of the collective until none are left, unless ``cap`` programs have come before this one.

    Whoever comes stays to the end, so that many are there at most.
    """
    if tl.atomic_add(queue + COMERS, 1, sem="relaxed", scope="gpu") < cap:
        item = _first_item(tl.atomic_add(queue + ITEMS, 1, sem="relaxed", scope="gpu"), batches, BATCH)
        if item < items:
            for step in range(1, WORLD):
                peer = tl.load(members + rotated_rank(index, step, WORLD))
                if TRACING:
                    waiting = tracing.start(context, _WAIT, peer, item, 0)
                wait_for_input(flags, counters, peer, context, KERNEL)
                if TRACING:
                    tracing.end(context, waiting)
        while item < items:
            following = _first_item(tl.atomic_add(queue + ITEMS, 1, sem="relaxed", scope="gpu"), batches, BATCH)
            count = tl.where(item < batches * BATCH, BATCH, 1)
            for tile in tl.range(item, item + count, loop_unroll_factor=1):
                if TRACING:
                    span = tracing.start(context, _STORE, rank, tile, 1)
                TILE(
                    tile, src_ptr, dst_ptr, rows, columns, first, stride_sm, stride_sn, stride_dm, stride_dn,
                    members, index, context, WORLD, BLOCK_M, BLOCK_N, GROUP_M,
                )  # fmt: skip
                if TRACING:
                    tracing.end(context, span)
            item = following


@triton.jit(
    do_not_specialize=["M", "rows", "first", "items", "batches", "multipliers", "cap", "index"],
)
def two_queue_kernel(
    a_desc,
    b_desc,
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    src_ptr,
    dst_ptr,
    rows,
    columns,
    first,
    stride_sm,
    stride_sn,
    stride_dm,
    stride_dn,
    items,
    batches,
    multipliers,
    cap,
    queue,
    flags,
    counters,
    members,
    index,
    context,
    TILE: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_GROUP_M: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    EXCHANGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    TRACING: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """``C = A @ B``, and ``items`` tiles of the collective whose tile function (:mod:`iris.x.exchange`) is ``TILE``.

    The first ``batches * BATCH`` of those are taken ``BATCH`` at a time.

    The first ``multipliers`` programs begin with the GEMM, the others with the collective; who finds no more tiles
    turns to the other. With one of ``MULTIPLIES`` and ``EXCHANGES`` the kernel has that queue alone. ``rows``,
    ``columns`` and ``first`` are those of the tile function.
    """
    if EXCHANGES:
        begin_turn(flags, counters, members, index, context, WORLD)
    rank = tl.load(members + index)
    multiplies = (tl.program_id(0) < multipliers).to(tl.int32)
    for _ in range(2):
        if MULTIPLIES:
            if multiplies == 1:
                _multiply_tiles(
                    a_desc, b_desc, a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                    stride_cm, stride_cn, queue, rank, context,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, DESCRIPTORS, B_TRANSPOSED, PRECISION, TRACING,
                )  # fmt: skip
        if EXCHANGES:
            if multiplies == 0:
                _exchange_tiles(
                    TILE, src_ptr, dst_ptr, rows, columns, first, stride_sm, stride_sn, stride_dm, stride_dn,
                    items, batches, cap, queue, flags, counters, members, index, rank, context,
                    WORLD, TILE_M, TILE_N, TILE_GROUP_M, TRACING, KERNEL,
                )  # fmt: skip
        multiplies = 1 - multiplies

    if EXCHANGES:
        last = end_turn(flags, counters, members, index, context, WORLD, KERNEL)
    else:
        last = end_alone(counters, context)
    if last:
        if MULTIPLIES:
            tl.store(queue + PRODUCTS, 0)
        if EXCHANGES:
            tl.store(queue + ITEMS, 0)
            tl.store(queue + COMERS, 0)
