"""The kernel of matmul + reduce-scatter and matmul + all-reduce.

Its protocol is in :mod:`iris.ops.matmul_reduce_scatter` and :mod:`iris.ops.matmul_all_reduce`.
"""

import triton
import triton.language as tl

from iris._events import Event
from iris.device import link, numeric, signal, tracing
from iris.device.address import element_bytes, translate
from iris.x.epilogue import write_tile
from iris.x.gemm import multiply_blocks
from iris.x.schedule import grouped_tile, rotated_rank
from iris.x.turn import begin_turn, end_turn

# Words of ``queue``, int32 in ordinary memory.
ROLES = tl.constexpr(0)  # programs that have started
TILES = tl.constexpr(1)  # tiles that a program has taken to multiply
SUMS = tl.constexpr(2)  # tiles that a program has taken to add up
EPOCH = tl.constexpr(3)  # calls before this one
QUEUE_WORDS = 4

SCATTER, TWO_SHOT, ONE_SHOT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_COMPUTE = tl.constexpr(int(Event.COMPUTE))
_REDUCE = tl.constexpr(int(Event.REDUCE))
_WAIT = tl.constexpr(int(Event.WAIT))


@triton.jit
def owned_tile(position, tiles, index, WORLD: tl.constexpr, VARIANT: tl.constexpr):
    """Owner, number among the owner's tiles, and slot of the ``position``-th tile that a rank multiplies.

    ``tiles`` are those of one owner (``SCATTER``) or of all (otherwise); a slot past the last one is no tile. Owners
    take turns from the next rank on, so that each has something to add early; with ``ONE_SHOT`` every rank adds every
    tile, in the order in which all multiply them.
    """
    if VARIANT == ONE_SHOT:
        return index, position, position
    else:
        number = position // WORLD
        owner = rotated_rank(index, 1 + position - number * WORLD, WORLD)
        if VARIANT == SCATTER:
            return owner, number, owner * tiles + number
        else:
            return owner, number, number * WORLD + owner


@triton.jit
def tile_place(
    owner, number, slot, M, tiles_m, tiles_n, chunk, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr, VARIANT: tl.constexpr
):
    """First row of a tile in A, where its rows end, first row in the output, and column of tiles."""
    if VARIANT == SCATTER:
        tile_m, tile_n = grouped_tile(number, tiles_m, tiles_n, GROUP_M)
        first = owner * chunk
        return first + tile_m * BLOCK_M, tl.minimum(first + chunk, M), tile_m * BLOCK_M, tile_n
    else:
        tile_m, tile_n = grouped_tile(slot, tiles_m, tiles_n, GROUP_M)
        return tile_m * BLOCK_M, M, tile_m * BLOCK_M, tile_n


@triton.jit(do_not_specialize=["M", "index", "reducers"])
def matmul_reduce_kernel(
    a_desc,
    b_desc,
    a_ptr,
    b_ptr,
    bias_ptr,
    scale_a_ptr,
    scale_b_ptr,
    out_ptr,
    partial_ptr,
    M,
    N,
    K,
    chunk,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_biasm,
    stride_biasn,
    stride_om,
    stride_on,
    arrived,
    queue,
    reducers,
    flags,
    counters,
    members,
    index,
    context,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    VARIANT: tl.constexpr,
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
    """``out = act(sum over ranks of A @ B + bias)``, or the rows of it that the rank owns (``SCATTER``).

    ``chunk`` are the rows of an owner with ``SCATTER``. Tile ``slot`` of the own product lies in ``partial_ptr``, on
    the heap, BLOCK_M x BLOCK_N elements in a row; ``arrived`` has, on the heap, a flag for each member and slot: how
    often the two ranks have met when the member's tile may be read (for the own tiles: calls).
    """
    begin_turn(flags, counters, members, index, context, WORLD)
    rank = tl.load(members + index)
    epoch = tl.load(queue + EPOCH) + 1
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_m = tl.cdiv(M, BLOCK_M)
    if VARIANT == SCATTER:
        tiles_m = tl.cdiv(chunk, BLOCK_M)
    tiles = tiles_m * tiles_n
    slots, positions, sums = tiles, tiles, tiles
    if VARIANT == SCATTER:
        slots = tiles * WORLD
        positions = slots
    if VARIANT == TWO_SHOT:
        positions = tl.cdiv(tiles, WORLD) * WORLD
        sums = (tiles + WORLD - 1 - index) // WORLD
    size: tl.constexpr = BLOCK_M * BLOCK_N
    nbytes: tl.constexpr = REDUCE_M * BLOCK_N * element_bytes(partial_ptr.dtype)
    lanes = tl.arange(0, LANES)
    there = lanes < WORLD
    everyone = tl.load(members + lanes, mask=there, other=0)
    meeting = tl.load(counters + everyone, mask=there & (lanes != index), other=0) + 1
    meeting = tl.where(lanes == index, epoch, meeting)

    # Some programs add up what has come after their first tile, the others when all is multiplied. Program 0 multiplies
    # until nothing is left, so every tile that is waited for is multiplied, however few programs run at once.
    role = tl.atomic_add(queue + ROLES, 1, sem="relaxed", scope="gpu")
    for phase in range(2):
        left = positions
        if (phase == 0) & (role > 0) & (role <= reducers):
            left = 1
        position = positions
        if left > 0:
            position = tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")
        while position < positions:
            owner, number, slot = owned_tile(position, tiles, index, WORLD, VARIANT)
            if slot < slots:
                first_row, row_end, _, tile_n = tile_place(
                    owner, number, slot, M, tiles_m, tiles_n, chunk, BLOCK_M, GROUP_M, VARIANT
                )
                if TRACING:
                    span = tracing.start(context, _COMPUTE, tl.load(members + owner), slot, number)
                rows = first_row + tl.arange(0, BLOCK_M)
                columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
                acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=numeric.accumulator_dtype(a_ptr.dtype.element_ty))
                acc = multiply_blocks(
                    acc, a_desc, a_ptr, first_row, rows.to(tl.int64) * stride_am, rows < row_end, 0, 0, stride_ak,
                    b_desc, b_ptr, tile_n * BLOCK_N, columns.to(tl.int64) * stride_bn, columns < N, stride_bk,
                    0, tl.cdiv(K, BLOCK_K), K, 0, 0, rank, rank, context + 2,
                    1, 1, False, BLOCK_M, BLOCK_N, BLOCK_K, 1, B_TRANSPOSED, DESCRIPTORS, PRECISION,
                )  # fmt: skip
                place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                mine = partial_ptr + tl.cast(slot, tl.int64) * size
                tl.store(mine + place, numeric.narrow(acc, partial_ptr.dtype.element_ty))
                flag = arrived + index * slots + slot
                readers = there
                if VARIANT != ONE_SHOT:
                    readers = lanes == owner
                signal.notify_all(flag + 0 * lanes, meeting, readers, rank, everyone, context + 2)
                if TRACING:
                    tracing.end(context, span)
            left -= 1
            position = positions
            if left > 0:
                position = tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")

        number = tl.atomic_add(queue + SUMS, 1, sem="relaxed", scope="gpu")
        while number < sums:
            slot = number
            if VARIANT == SCATTER:
                slot = index * tiles + number
            if VARIANT == TWO_SHOT:
                slot = number * WORLD + index
            _, row_end, out_row, tile_n = tile_place(
                index, number, slot, M, tiles_m, tiles_n, chunk, BLOCK_M, GROUP_M, VARIANT
            )
            if VARIANT == SCATTER:
                row_end -= index * chunk
            if TRACING:
                pause = tracing.start(context, _WAIT, -1, slot, number)
            waits = arrived + tl.where(there, lanes, index) * slots + slot
            signal.wait_all(waits, tl.where(there, meeting, epoch), context, tl.where(there, everyone, rank), KERNEL)
            if TRACING:
                tracing.end(context, pause)
                span = tracing.start(context, _REDUCE, -1, slot, number)
            columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            for first in range(0, BLOCK_M, REDUCE_M):
                place = (first + tl.arange(0, REDUCE_M))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                tile = partial_ptr + tl.cast(slot, tl.int64) * size + place
                total = tl.zeros((REDUCE_M, BLOCK_N), dtype=numeric.accumulator_dtype(a_ptr.dtype.element_ty))
                due = tl.full((), 0, tl.int64)
                # In the order of the members, whoever adds: all ranks have the same bits.
                for step in tl.static_range(WORLD):
                    peer = tl.load(members + step)
                    due = tl.maximum(due, link.charge(nbytes, rank, peer, context + 2))
                    total += tl.load(translate(tile, rank, peer, context + 2)).to(total.dtype)
                link.carried(due)
                rows = out_row + first + tl.arange(0, REDUCE_M)
                mask = (rows < row_end)[:, None] & (columns < N)[None, :]
                if VARIANT == TWO_SHOT:
                    for step in range(WORLD):
                        # The peer's tile has come, so its kernel runs and its output may be overwritten.
                        peer = tl.load(members + rotated_rank(index, step, WORLD))
                        out = translate(out_ptr, rank, peer, context + 2)
                        write_tile(
                            total, out, rows, columns, mask, stride_om, stride_on, bias_ptr, stride_biasm, stride_biasn,
                            scale_a_ptr, scale_b_ptr, HAS_BIAS, HAS_SCALES, ACTIVATION,
                        )  # fmt: skip
                else:
                    write_tile(
                        total, out_ptr, rows, columns, mask, stride_om, stride_on, bias_ptr, stride_biasm, stride_biasn,
                        scale_a_ptr, scale_b_ptr, HAS_BIAS, HAS_SCALES, ACTIVATION,
                    )  # fmt: skip
            if TRACING:
                tracing.end(context, span)
            number = tl.atomic_add(queue + SUMS, 1, sem="relaxed", scope="gpu")

    if end_turn(flags, counters, members, index, context, WORLD, KERNEL):
        tl.store(queue + ROLES, 0)
        tl.store(queue + TILES, 0)
        tl.store(queue + SUMS, 0)
        tl.store(queue + EPOCH, epoch)
