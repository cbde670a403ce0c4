"""The kernel of matmul + all-reduce whose partial sums go from rank to rank.

Tiles of C are taken in rounds of one for each member. The sum of tile t begins with the product of member t mod world;
each rank in turn adds its own product and sends the sum, in float32 (int32), to the next one, and the last stores the
result on all ranks. So in each step of a round all ranks work, each for another tile, and every link carries a sum. In
the last round tiles may be missing; nothing is sent for them.

A sum is sent into one of ``SLOTS`` slots of the next rank, tile by tile in turn, whatever the call. The messages of a
link are numbered from the first call on: message m lies in slot ``m % SLOTS``, *full* says that it is there, *free*
that it has been read, and it is sent when message ``m - SLOTS`` has been read. Both flags hold m + 1, so they grow and
nothing is reset.

Progress. A program takes a task, one step of a round, by ticket; so the rank's tasks begin in the order of (round,
step). It multiplies, receives (all steps but the first) and then sends (all but the last). Compare the tasks that are
not done on any rank by (round, step), receiving before sending. The first of them belongs to a program that runs,
because tasks are handed out in that order, to programs that run. If it receives, the sum comes from the step before of
that round, which is done. If it sends, its slot was used by an earlier task (r, s) of its rank, and is read by task
(r, s + 1) of the next rank, which receives: that does not come after this one, so it has been read. So the first of
them goes on, however few programs run at once, as long as the ranks' kernels run at the same time.
"""

import triton
import triton.language as tl

from iris._events import Event
from iris.device import memory, signal, tracing
from iris.ops._all_reduced_tile_kernel import write_on_all
from iris.x.gemm import multiply_tile
from iris.x.schedule import grouped_tile, rotated_rank, strided_count, strided_rounds, strided_tile
from iris.x.turn import end_turn

# Words of ``queue``, int32 in ordinary memory.
TASKS = tl.constexpr(0)  # steps that a program has taken
SENT = tl.constexpr(1)  # messages to the next rank in earlier calls
RECEIVED = tl.constexpr(2)  # messages from the rank before
RING_WORDS = 3

_COMPUTE = tl.constexpr(int(Event.COMPUTE))
_REDUCE = tl.constexpr(int(Event.REDUCE))
_WAIT = tl.constexpr(int(Event.WAIT))


@triton.jit
def sent_by(member, tiles, WORLD: tl.constexpr):
    """Number of messages that ``member`` sends in a call: one for each tile but those that end with it."""
    return tiles - strided_count(tiles, rotated_rank(member, 1, WORLD), WORLD)


@triton.jit
def sent_before(member, round, step, tiles, WORLD: tl.constexpr):
    """Number of messages that ``member`` sends in a call before the task (round, step), in the order of tasks.

    In its steps a member has the tiles that begin with itself, then with the members before it, around the ring. Of a
    round that is not whole there are the first ``present`` only.
    """
    present = tl.minimum(tiles - round * WORLD, WORLD)
    low = member + 1 - step
    own = tl.minimum(present, member + 1) - tl.minimum(present, tl.maximum(low, 0))
    around = tl.maximum(present - WORLD - tl.minimum(low, 0), 0)
    return round * (WORLD - 1) + own + around


@triton.jit(do_not_specialize=["M", "index"])
def matmul_all_reduce_ring_kernel(
    a_desc,
    b_desc,
    a_ptr,
    b_ptr,
    bias_ptr,
    scale_a_ptr,
    scale_b_ptr,
    out_ptr,
    slots_ptr,
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
    SLOTS: tl.constexpr,
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
    """``out = act(sum over ranks of A @ B + bias)`` on every rank.

    ``slots_ptr`` has, on the heap, ``SLOTS`` times BLOCK_M x BLOCK_N elements in a row; ``words`` a line of int32 for
    each slot, *full*, and behind them one for each slot of the next rank, *free*. ``SLOTS`` is a power of two, and the
    same in all calls.
    """
    rank = tl.load(members + index)
    before = rotated_rank(index, WORLD - 1, WORLD)
    sender = tl.load(members + before)
    receiver = tl.load(members + rotated_rank(index, 1, WORLD))
    sent = tl.load(queue + SENT)
    received = tl.load(queue + RECEIVED)
    full = words
    free = words + SLOTS * signal.FLAG_STRIDE
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    tasks = strided_rounds(tiles, WORLD) * WORLD
    size: tl.constexpr = BLOCK_M * BLOCK_N
    place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    task = tl.atomic_add(queue + TASKS, 1, sem="relaxed", scope="gpu")
    while task < tasks:
        round = task // WORLD
        step = task - round * WORLD
        tile = strided_tile(round, rotated_rank(index, WORLD - step, WORLD), WORLD)
        if tile < tiles:
            tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
            if TRACING:
                span = tracing.start(context, _COMPUTE, receiver, tile, step)
            acc = multiply_tile(
                tile_m, tile_n, a_desc, b_desc, a_ptr, b_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                rank, context, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS, B_TRANSPOSED, PRECISION,
            )  # fmt: skip
            if TRACING:
                tracing.end(context, span)
            if step > 0:
                message = received + sent_before(before, round, step - 1, tiles, WORLD)
                slot = message & (SLOTS - 1)
                if TRACING:
                    span = tracing.start(context, _WAIT, sender, tile, step)
                signal.wait(full + slot * signal.FLAG_STRIDE, message + 1, context, sender, KERNEL)
                if TRACING:
                    tracing.end(context, span)
                acc += tl.load(slots_ptr + slot * size + place)
                signal.notify(free + slot * signal.FLAG_STRIDE, message + 1, rank, sender, context + 2)
            if TRACING:
                span = tracing.start(context, _REDUCE, receiver, tile, step)
            if step < WORLD - 1:
                message = sent + sent_before(index, round, step, tiles, WORLD)
                slot = message & (SLOTS - 1)
                signal.wait(free + slot * signal.FLAG_STRIDE, message + 1 - SLOTS, context, receiver, KERNEL)
                memory.store(slots_ptr + slot * size + place, acc, rank, receiver, context + 2)
                signal.notify(full + slot * signal.FLAG_STRIDE, message + 1, rank, receiver, context + 2)
            else:
                # All have multiplied this tile, so all kernels run, and their outputs may be overwritten.
                rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
                columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
                write_on_all(
                    acc, rows, columns, M, N, out_ptr, stride_om, stride_on, bias_ptr, stride_biasm, stride_biasn,
                    scale_a_ptr, scale_b_ptr, members, index, context, WORLD, HAS_BIAS, HAS_SCALES, ACTIVATION,
                )  # fmt: skip
            if TRACING:
                tracing.end(context, span)
        task = tl.atomic_add(queue + TASKS, 1, sem="relaxed", scope="gpu")

    if end_turn(flags, counters, members, index, context, WORLD, KERNEL):
        tl.store(queue + TASKS, 0)
        tl.store(queue + SENT, sent + sent_by(index, tiles, WORLD))
        tl.store(queue + RECEIVED, received + sent_by(before, tiles, WORLD))
