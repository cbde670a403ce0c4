"""The kernel of matmul + reduce-scatter and matmul + all-reduce.

Its protocol is in :mod:`iris.ops.matmul_reduce_scatter` and :mod:`iris.ops.matmul_all_reduce`.
"""

import triton
import triton.language as tl

from iris._events import Event
from iris.device import link, numeric, signal, tracing
from iris.device.address import element_bytes, translate
from iris.x.epilogue import finished_tile
from iris.x.gemm import multiply_blocks
from iris.x.schedule import divided_tile, grouped_tile, rotated_rank
from iris.x.turn import end_alone, end_turn

# Words of ``queue``, int32 in ordinary memory.
TILES = tl.constexpr(0)  # pieces of work that a program has taken
SENDS = tl.constexpr(1)  # programs that had something to send
SENT = tl.constexpr(2)  # programs that have sent it
EPOCH = tl.constexpr(3)  # calls before this one
QUEUE_WORDS = 4

SCATTER, TWO_SHOT, ONE_SHOT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_COMPUTE = tl.constexpr(int(Event.COMPUTE))
_REDUCE = tl.constexpr(int(Event.REDUCE))
_STORE = tl.constexpr(int(Event.STORE))
_WAIT = tl.constexpr(int(Event.WAIT))


@triton.jit
def owned_tile(position, owned, ahead, WORLD: tl.constexpr):
    """How many ranks further on the owner of the ``position``-th tile is, and the tile's number among the owner's.

    Every rank owns ``owned`` tiles. Those of the others come ``ahead`` numbers before the own ones, so that peers have
    sent their part of an own tile before it is multiplied; a number of the others is taken owner by owner, from the
    next rank on. On no rank does a tile of another rank come later than the owner has it himself, for any ``ahead`` in
    ``0..owned``.
    """
    others: tl.constexpr = WORLD - 1
    lead = ahead * others
    between = (owned - ahead) * WORLD
    later = position - lead
    last = later - between
    turn = later % WORLD
    # The first of the others' tiles; others' and own tiles in turn; the last of the own ones.
    in_lead, in_last = later < 0, last >= 0
    number = tl.where(turn < others, ahead + later // WORLD, later // WORLD)
    number = tl.where(in_lead, position // max(others, 1), tl.where(in_last, owned - ahead + last, number))
    distance = tl.where(in_lead, 1 + position % max(others, 1), tl.where(in_last, 0, (turn + 1) % WORLD))
    return distance, number


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


@triton.jit
def _write_to_peers(value, to, mask, index, members, context, WORLD: tl.constexpr):
    rank = tl.load(members + index)
    due = tl.full((), 0, tl.int64)
    for step in range(1, WORLD):
        # The peer's partial product has come, so its kernel runs and its output may be overwritten.
        peer = tl.load(members + rotated_rank(index, step, WORLD))
        due = tl.maximum(due, link.charge_write(value.numel * element_bytes(to.dtype), rank, peer, context + 2))
        tl.store(translate(to, rank, peer, context + 2), value, mask=mask)
    link.carried(due)


@triton.jit
def _whole_sum(acc, sums_ptr, count, place, SIZE: tl.constexpr):
    """``acc`` plus what ``count`` other programs have multiplied for the same tile."""
    for other in range(count):
        acc += tl.load(sums_ptr + tl.cast(other, tl.int64) * SIZE + place)
    return acc


@triton.jit
def _may_send(queue, senders, context, rank, KERNEL: tl.constexpr):
    """Wait until fewer than ``senders`` programs send. Those that do wait for nothing but links."""
    turn = tl.atomic_add(queue + SENDS, 1, sem="relaxed", scope="gpu")
    if turn >= senders:
        signal.wait(queue + SENT, turn + 1 - senders, context, rank, KERNEL)


@triton.jit
def _sent(queue):
    tl.debug_barrier()
    tl.atomic_add(queue + SENT, 1, sem="relaxed", scope="gpu")


@triton.jit
def _send(product, mine, place, distance, index, members, context, WORLD: tl.constexpr):
    """Store a partial product in the owner's memory, in the place that is for this rank."""
    rank = tl.load(members + index)
    owner = tl.load(members + rotated_rank(index, distance, WORLD))
    nbytes: tl.constexpr = product.numel * element_bytes(mine.dtype)
    due = link.charge_write(nbytes, rank, owner, context + 2)
    tl.store(translate(mine + place, rank, owner, context + 2), product)
    return due


@triton.jit
def _sum_of_members(product, theirs, stride_part, place, index, WORLD: tl.constexpr, ACCUMULATOR: tl.constexpr):
    """The own partial product plus those of the peers, which have come to ``theirs``."""
    if WORLD == 2:
        total = product.to(ACCUMULATOR) + tl.load(theirs + place).to(ACCUMULATOR)
    else:
        total = tl.zeros(product.shape, dtype=ACCUMULATOR)
        # In the order of the members, whoever adds: all ranks, and all algorithms, have the same bits. Not unrolled, or
        # all parts would be loaded at once, for which registers do not suffice.
        for step in range(WORLD):
            part = (step + WORLD - 1 - index) % WORLD
            there = place * 0 + part < WORLD - 1
            value = tl.load(theirs + part * stride_part + place, mask=there, other=0)
            total += tl.where(there, value, product).to(ACCUMULATOR)
    return total


@triton.jit
def _finish(
    total, rows, columns, mask, index, members, out_ptr, stride_om, stride_on, bias_ptr, stride_biasm, stride_biasn,
    scale_a_ptr, scale_b_ptr, context,
    WORLD: tl.constexpr, TO_PEERS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Write what comes of a sum, with ``TO_PEERS`` on every rank."""
    value = finished_tile(
        total, rows, columns, mask, bias_ptr, stride_biasm, stride_biasn, scale_a_ptr, scale_b_ptr,
        HAS_BIAS, HAS_SCALES, ACTIVATION, out_ptr.dtype.element_ty,
    )  # fmt: skip
    to = out_ptr + rows.to(tl.int64)[:, None] * stride_om + columns.to(tl.int64)[None, :] * stride_on
    tl.store(to, value, mask=mask)
    if TO_PEERS:
        _write_to_peers(value, to, mask, index, members, context, WORLD)


@triton.jit(do_not_specialize=["M", "index", "flags_of_peer", "ahead", "whole", "splits", "senders"])
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
    sums_ptr,
    summed,
    queue,
    alternate,
    flags_of_peer,
    ahead,
    whole,
    splits,
    senders,
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

    ``chunk`` are the rows of an owner with ``SCATTER``. ``partial_ptr`` on the heap has, for each peer from the next
    rank on and each tile that this rank adds up, the peer's product, BLOCK_M x BLOCK_N elements in a row; ``arrived``
    has ``flags_of_peer`` flags for each peer, one for a tile: how often the two ranks have met when it is there. Their
    number is the same in all calls, so that a flag has one writer, whatever the shapes.

    The tiles from the ``whole``-th on are divided along K into ``splits`` pieces. All but the last leave their sums in
    ``sums_ptr`` (of the accumulator's type) and the number of the call in ``summed``; the last adds them.

    At most ``senders`` programs send at a time. Tiles take the same time, so programs end them together, and if all
    sent at once each would wait until a link has carried everything. So they come to end their tiles one after the
    other instead.

    With ``ONE_SHOT`` there are two of ``partial_ptr``, ``alternate`` elements apart, for calls in turn: a peer that has
    sent something for this call has done with the call before, so nobody waits for that at the end.
    """
    rank = tl.load(members + index)
    epoch = tl.load(queue + EPOCH) + 1
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_m = tl.cdiv(M, BLOCK_M)
    if VARIANT == SCATTER:
        tiles_m = tl.cdiv(chunk, BLOCK_M)
    tiles = tiles_m * tiles_n
    owned, positions = tiles, tiles
    if VARIANT == SCATTER:
        positions = tiles * WORLD
    if VARIANT == TWO_SHOT:
        owned = tl.cdiv(tiles, WORLD)
        positions = owned * WORLD
    size: tl.constexpr = BLOCK_M * BLOCK_N
    blocks = tl.cdiv(K, BLOCK_K)
    kind: tl.constexpr = numeric.accumulator_dtype(a_ptr.dtype.element_ty)
    partial_kind: tl.constexpr = partial_ptr.dtype.element_ty
    lanes = tl.arange(0, LANES)
    peers = tl.load(members + (index + 1 + lanes) % WORLD)
    # How often this rank and each peer have met when this call is over.
    meetings = tl.load(counters + peers) + 1
    in_row = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N

    items = whole + (positions - whole) * splits
    to_peers: tl.constexpr = VARIANT == TWO_SHOT and WORLD > 1
    item = tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")
    while item < items:
        position, piece, pieces = divided_tile(item, whole, splits)
        distance, number = tl.full((), 0, tl.int32), position
        if VARIANT != ONE_SHOT:
            distance, number = owned_tile(position, owned, ahead, WORLD)
        owner = rotated_rank(index, distance, WORLD)
        slot = number * WORLD + owner
        if VARIANT == ONE_SHOT:
            slot = number
        first_row, row_end, out_row, tile_n = tile_place(
            owner, number, tl.minimum(slot, tiles - 1), M, tiles_m, tiles_n, chunk, BLOCK_M, GROUP_M, VARIANT
        )
        there = first_row < row_end
        if VARIANT == TWO_SHOT:
            there = slot < tiles
        if there:
            if TRACING:
                span = tracing.start(context, _COMPUTE, tl.load(members + owner), number, piece)
            columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            rows = first_row + tl.arange(0, BLOCK_M)
            # The last piece is longer: it ends when the others have left their sums.
            first = blocks * piece * 15 // (pieces * 16)
            last = blocks * (piece + 1) * 15 // (pieces * 16)
            if piece == pieces - 1:
                last = blocks
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=kind)
            acc = multiply_blocks(
                acc, a_desc, a_ptr, first_row, rows.to(tl.int64) * stride_am, rows < row_end, 0, 0, stride_ak,
                b_desc, b_ptr, tile_n * BLOCK_N, columns.to(tl.int64) * stride_bn, columns < N, stride_bk,
                first, last, K, 0, 0, rank, rank, context + 2, 1,
                1, 1, False, BLOCK_M, BLOCK_N, BLOCK_K, B_TRANSPOSED, DESCRIPTORS, PRECISION,
            )  # fmt: skip
            if TRACING:
                tracing.end(context, span)
            sums = (position - whole) * (splits - 1)
            others = sums_ptr + tl.cast(sums, tl.int64) * size
            # Sums, partial products and outputs go by halves of a wide tile, for which registers and shared memory
            # have room beside the other half.
            wide: tl.constexpr = BLOCK_N >= 256
            half: tl.constexpr = BLOCK_N // 2 if BLOCK_N >= 256 else BLOCK_N
            place = in_row + tl.arange(0, half)[None, :]
            if piece < pieces - 1:
                tl.store(others + tl.cast(piece, tl.int64) * size + in_row + tl.arange(0, BLOCK_N)[None, :], acc)
                signal.publish(summed + sums + piece, epoch)
                item = tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")
            else:
                # The other pieces were given out before this one, to programs that wait for nothing.
                for other in range(pieces - 1):
                    signal.wait(summed + sums + other, epoch, context, rank, KERNEL)
                if wide:
                    left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, half)), (0, 2, 1)))
                    left = numeric.narrow(_whole_sum(left, others, pieces - 1, place, size), partial_kind)
                    right = numeric.narrow(_whole_sum(right, others, pieces - 1, place + half, size), partial_kind)
                else:
                    left = numeric.narrow(_whole_sum(acc, others, pieces - 1, place, size), partial_kind)

                if distance > 0:
                    # On its way while the product is stored. Not before a wait: what is given out is begun at once.
                    item = tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")
                if (WORLD > 1) & ((distance > 0) | (VARIANT == ONE_SHOT)):
                    if TRACING:
                        span = tracing.start(context, _STORE, tl.load(members + owner), number, piece)
                    _may_send(queue, senders, context, rank, KERNEL)
                    due = tl.full((), 0, tl.int64)
                    nearest, farthest = distance, distance + 1
                    if VARIANT == ONE_SHOT:
                        nearest, farthest = distance + 1, distance + WORLD
                    for to in range(nearest, farthest):
                        mine = partial_ptr + tl.cast((WORLD - 1 - to) * owned + number, tl.int64) * size
                        if VARIANT == ONE_SHOT:
                            mine += (epoch & 1) * alternate
                        due = tl.maximum(due, _send(left, mine, place, to, index, members, context, WORLD))
                        if wide:
                            sent = _send(right, mine, place + half, to, index, members, context, WORLD)
                            due = tl.maximum(due, sent)
                    link.carried(due)
                    readers = lanes < WORLD - 1
                    if VARIANT != ONE_SHOT:
                        readers = lanes + 1 == distance
                    arrives = arrived + (WORLD - 2 - lanes) * flags_of_peer + number
                    signal.notify_all(tl.where(readers, arrives, arrived), meetings, readers, rank, peers, context + 2)
                    _sent(queue)
                    if TRACING:
                        tracing.end(context, span)

                if distance == 0:
                    if WORLD > 1:
                        if TRACING:
                            span = tracing.start(context, _WAIT, -1, slot, number)
                        awaited = tl.minimum(lanes, WORLD - 2)
                        peer = tl.load(members + (index + 1 + awaited) % WORLD)
                        meeting = tl.load(counters + peer) + 1
                        flag = arrived + awaited * flags_of_peer + number
                        signal.wait_all(flag, meeting, context, peer, KERNEL)
                        if TRACING:
                            tracing.end(context, span)
                    item = tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")
                    if TRACING:
                        span = tracing.start(context, _REDUCE, -1, slot, number)
                    theirs = partial_ptr + tl.cast(number, tl.int64) * size
                    if VARIANT == ONE_SHOT:
                        theirs += (epoch & 1) * alternate
                    part = tl.cast(owned, tl.int64) * size
                    out_rows = out_row + tl.arange(0, BLOCK_M)
                    row_mask = (rows < row_end)[:, None]
                    to_columns = tile_n * BLOCK_N + tl.arange(0, half)
                    if to_peers:
                        _may_send(queue, senders, context, rank, KERNEL)
                    total = _sum_of_members(left, theirs, part, place, index, WORLD, kind)
                    if wide:
                        second = _sum_of_members(right, theirs, part, place + half, index, WORLD, kind)
                    _finish(
                        total, out_rows, to_columns, row_mask & (to_columns < N)[None, :],
                        index, members, out_ptr, stride_om, stride_on,
                        bias_ptr, stride_biasm, stride_biasn, scale_a_ptr, scale_b_ptr, context,
                        WORLD, to_peers, HAS_BIAS, HAS_SCALES, ACTIVATION,
                    )  # fmt: skip
                    if wide:
                        to_columns += half
                        _finish(
                            second, out_rows, to_columns, row_mask & (to_columns < N)[None, :],
                            index, members, out_ptr, stride_om, stride_on,
                            bias_ptr, stride_biasm, stride_biasn, scale_a_ptr, scale_b_ptr, context,
                            WORLD, to_peers, HAS_BIAS, HAS_SCALES, ACTIVATION,
                        )  # fmt: skip
                    if to_peers:
                        _sent(queue)
                    if TRACING:
                        tracing.end(context, span)
        else:
            item = tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")

    if VARIANT == ONE_SHOT:
        last = end_alone(counters, context)
        if last & (WORLD > 1):
            # Every lane of a peer; the number of this rank with itself is not used.
            tl.store(counters + peers, meetings, mask=lanes < WORLD - 1)
    else:
        last = end_turn(flags, counters, members, index, context, WORLD, KERNEL)
    if last:
        tl.store(queue + TILES, 0)
        tl.store(queue + SENDS, 0)
        tl.store(queue + SENT, 0)
        tl.store(queue + EPOCH, epoch)
