"""The kernel of matmul + all-reduce whose ranks add up their products at an owner, as they come.

A tile of C has an owner, who has a float32 sum of it on its heap. Every rank adds its product there, by atomics or
under a lock, and whoever is the last to add takes the sum, and stores the result on all ranks. Nobody waits for a
product: a program waits for a lock at most, and who holds one waits for nothing.

How many have added is counted in a word next to the sum. The last to add puts that back to 0, and with atomics the sum,
too. Nobody adds to them again before: all have added once, and the next call begins when this one has ended on all
ranks (:mod:`iris.x.turn`), which is after the last stores of all programs. Under a lock the first to add overwrites
the sum.
"""

import triton
import triton.language as tl

from iris._events import Event
from iris.device import atomics, link, memory, signal, tracing
from iris.device.address import translate
from iris.ops._all_reduced_tile_kernel import write_on_all
from iris.x.gemm import multiply_tile
from iris.x.schedule import grouped_tile, rotated_rank, strided_rounds, strided_tile
from iris.x.turn import end_turn

# Word of ``queue``, int32 in ordinary memory: tiles that a program has taken.
TILES = tl.constexpr(0)
# Words of a line of ``words``, one line for each tile that the rank owns.
ADDED = tl.constexpr(0)
LOCK = tl.constexpr(1)

_COMPUTE = tl.constexpr(int(Event.COMPUTE))
_REDUCE = tl.constexpr(int(Event.REDUCE))


@triton.jit(do_not_specialize=["M", "index"])
def matmul_all_reduce_atomic_kernel(
    a_desc,
    b_desc,
    a_ptr,
    b_ptr,
    bias_ptr,
    scale_a_ptr,
    scale_b_ptr,
    out_ptr,
    sums_ptr,
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
    words,
    queue,
    flags,
    counters,
    members,
    index,
    context,
    WORLD: tl.constexpr,
    LOCKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    REDUCE_M: tl.constexpr,
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
    """``out = act(sum over ranks of A @ B + bias)`` on every rank.

    ``sums_ptr`` has, on the heap, BLOCK_M x BLOCK_N elements in a row for each tile that the rank owns, and ``words`` a
    line of int32. Between calls ``words`` are 0, and without ``LOCKED`` the sums are.
    """
    rank = tl.load(members + index)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    positions = strided_rounds(tiles, WORLD) * WORLD
    size: tl.constexpr = BLOCK_M * BLOCK_N
    position = tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")
    while position < positions:
        # Each round has a tile of every owner, and the ranks turn to different ones at a time.
        number = position // WORLD
        owner = rotated_rank(index, 1 + position - number * WORLD, WORLD)
        tile = strided_tile(number, owner, WORLD)
        if tile < tiles:
            peer = tl.load(members + owner)
            tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
            if TRACING:
                span = tracing.start(context, _COMPUTE, peer, tile, number)
            acc = multiply_tile(
                tile_m, tile_n, a_desc, b_desc, a_ptr, b_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                rank, context, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, B_TRANSPOSED, PRECISION,
            )  # fmt: skip
            if TRACING:
                tracing.end(context, span)
                span = tracing.start(context, _REDUCE, peer, tile, number)
            rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            sums = sums_ptr + tl.cast(number, tl.int64) * size
            line = words + number * signal.FLAG_STRIDE
            added = line + ADDED
            inside = (rows < M)[:, None] & (columns < N)[None, :]
            if LOCKED:
                if signal.lock(line + LOCK, rank, peer, context, KERNEL) == 1:
                    # An atomic gives all threads one value; the lock orders it.
                    before = atomics.atomic_add(added, 1, rank, peer, context + 2, None, "relaxed", "sys")
                    there = inside & (rows < tl.where(before > 0, M, 0))[:, None]
                    acc += memory.load(sums + place, rank, peer, context + 2, there, 0)
                    kept = inside & (rows < tl.where(before < WORLD - 1, M, 0))[:, None]
                    memory.store(sums + place, acc, rank, peer, context + 2, kept)
                    if before == WORLD - 1:
                        atomics.atomic_xchg(added, 0, rank, peer, context + 2, None, "relaxed", "sys")
                    signal.unlock(line + LOCK, rank, peer, context)
                    if before == WORLD - 1:
                        # All have added, so all kernels run, and their outputs may be overwritten.
                        write_on_all(
                            acc, rows, columns, M, N, out_ptr, stride_om, stride_on, bias_ptr, stride_biasm,
                            stride_biasn, scale_a_ptr, scale_b_ptr, members, index, context,
                            WORLD, HAS_BIAS, HAS_SCALES, ACTIVATION,
                        )  # fmt: skip
            else:
                link.pace_write(sums + place, rank, peer, context + 2)
                atomics.atomic_add(sums + place, acc, rank, peer, context + 2, inside, "relaxed", "sys")
                if signal.notify_add(added, 1, rank, peer, context + 2) == WORLD - 1:
                    # All have added, so this does not wait: it acquires what they have added.
                    word = translate(added, rank, peer, context + 2)
                    signal.wait(word, WORLD, context, peer, KERNEL)
                    for first in range(0, BLOCK_M, REDUCE_M):
                        piece = (first + tl.arange(0, REDUCE_M))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                        total = memory.load(sums + piece, rank, peer, context + 2)
                        write_on_all(
                            total, tile_m * BLOCK_M + first + tl.arange(0, REDUCE_M), columns, M, N, out_ptr, stride_om,
                            stride_on, bias_ptr, stride_biasm, stride_biasn, scale_a_ptr, scale_b_ptr, members, index,
                            context, WORLD, HAS_BIAS, HAS_SCALES, ACTIVATION,
                        )  # fmt: skip
                    # Other threads may have read what a thread overwrites.
                    tl.debug_barrier()
                    for first in range(0, BLOCK_M, REDUCE_M):
                        piece = (first + tl.arange(0, REDUCE_M))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                        nothing = tl.zeros((REDUCE_M, BLOCK_N), dtype=acc.dtype)
                        memory.store(sums + piece, nothing, rank, peer, context + 2)
                    tl.atomic_xchg(word, 0, sem="relaxed", scope="sys")
            if TRACING:
                tracing.end(context, span)
        position = tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")

    if end_turn(flags, counters, members, index, context, WORLD, KERNEL):
        tl.store(queue + TILES, 0)
