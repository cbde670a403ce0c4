"""The kernel of matmul + all-gather; its protocol is described in :mod:`iris.ops.matmul_all_gather`."""

import triton
import triton.language as tl

from iris._events import Event
from iris.device import link, tracing
from iris.device.address import element_bytes, translate
from iris.x.epilogue import finished_tile
from iris.x.gemm import multiply_tile
from iris.x.schedule import grouped_tile, rotated_rank
from iris.x.turn import begin_turn, end_turn, wait_for_input

# Word of ``queue``, int32 in ordinary memory: tiles that a program has taken.
TILES = tl.constexpr(0)
QUEUE_WORDS = 1

_COMPUTE = tl.constexpr(int(Event.COMPUTE))
_STORE = tl.constexpr(int(Event.STORE))


@triton.jit(do_not_specialize=["M", "index"])
def matmul_all_gather_kernel(
    a_desc,
    b_desc,
    a_ptr,
    b_ptr,
    bias_ptr,
    scale_a_ptr,
    scale_b_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_biasm,
    stride_biasn,
    stride_om,
    stride_on,
    queue,
    flags,
    counters,
    members,
    index,
    context,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    TRACING: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Rows ``index * M .. index * M + M - 1`` of every rank's output are ``act(scales * A @ B + bias)`` of this rank.

    ``M`` is the number of rows of the own A. ``out_ptr`` is the own output, on the heap.
    """
    begin_turn(flags, counters, members, index, context, WORLD)
    rank = tl.load(members + index)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_row = tl.cast(index, tl.int64) * M
    nbytes: tl.constexpr = BLOCK_M * BLOCK_N * element_bytes(out_ptr.dtype)
    # Peers' outputs may be written once their kernels run; nobody looks before the first tile is done.
    unmet = 1
    tile = tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")
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
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        value = finished_tile(
            acc, rows, columns, mask, bias_ptr, stride_biasm, stride_biasn, scale_a_ptr, scale_b_ptr, HAS_BIAS,
            HAS_SCALES, ACTIVATION, out_ptr.dtype.element_ty,
        )  # fmt: skip
        if TRACING:
            tracing.end(context, span)

        if unmet == 1:
            for step in range(1, WORLD):
                wait_for_input(flags, counters, tl.load(members + rotated_rank(index, step, WORLD)), context, KERNEL)
            unmet = 0
        if TRACING:
            span = tracing.start(context, _STORE, -1, tile, 0)
        mine = out_ptr + (first_row + rows)[:, None] * stride_om + columns.to(tl.int64)[None, :] * stride_on
        # From the next rank on, so that the ranks write to different ones at a time; the own output comes last.
        due = tl.full((), 0, tl.int64)
        for step in range(1, WORLD + 1):
            peer = tl.load(members + rotated_rank(index, step, WORLD))
            due = tl.maximum(due, link.charge_write(nbytes, rank, peer, context + 2))
            tl.store(translate(mine, rank, peer, context + 2), value, mask=mask)
        link.carried(due)
        if TRACING:
            tracing.end(context, span)
        tile = tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")

    if end_turn(flags, counters, members, index, context, WORLD, KERNEL):
        tl.store(queue + TILES, 0)
