"""All-reduce of tiles: the sum of a tile over all ranks, on all ranks.

| form | sums where | same bits on all ranks | source | dst before | dst complete |
|---|---|---|---|---|---|
| atomic | in dst, by atomics | no | ``tile.data`` | zeroed | after a barrier |
| spinlock | in dst, under a lock | no | ``tile.data`` | zeroed | after a barrier |
| one_shot | on every rank | yes | published | anything | at return, the own |
| two_shot | on one rank a tile | yes | published | not in use | after a barrier |
| ring | along the ranks | yes | own ``src_view`` | not in use | at return, the own |

one_shot, two_shot and ring keep sums in ``numeric.wide_dtype`` (float32, float64 for float64, int32, int64 for
int64), add in rank order and round once, so they agree bit by bit with each other. atomic and spinlock add in
whatever order the ranks come, and round to the dtype of dst at every step; give them a wide dst where that matters.

Progress. A program may wait only for work that runs or is done. Where one loop publishes and reduces tiles, either all
ranks take the tiles in the same order with the same number of resident programs, or every program publishes all its
tiles before it reduces the first.
"""

import triton
import triton.language as tl

from iris.device import numeric, signal
from iris.device._compat import constexpr_function
from iris.x.publish import sum_published
from iris.x.schedule import rotated_rank


@constexpr_function
def _has_atomic_add(dtype):
    return dtype.primitive_bitwidth in (32, 64) or dtype in (tl.float16, tl.bfloat16)


@triton.jit
def all_reduce_atomic(tile, dst_view, ctx):
    """Add ``tile`` to its place in ``dst_view`` on every rank, element by element.

    Precondition: ``dst_view`` was zeroed on every rank, and a barrier of all ranks came after that.
    Guarantee: none yet. The sums are complete after a barrier of all ranks that follows the kernels.
    The caller owes that barrier before any rank reads ``dst_view``, and another before it is zeroed again. The source
    of the tile may be overwritten at once.

    Not the same bits on all ranks, nor in all runs: floating-point sums are rounded to the dtype of ``dst_view`` at
    each addition, in the order in which ranks come.

    Args:
        tile: :class:`iris.x.tile.Tile`.
        dst_view: (M, N) on the heap, at the same place on every rank; float16, bfloat16 or of 32 or 64 bits.
        ctx: :class:`iris.x.context.DeviceContext`.
    """
    tl.static_assert(
        _has_atomic_add(dst_view.ptr.dtype.element_ty),
        "all_reduce_atomic: no atomic addition for the dtype of dst_view; possible: float16, bfloat16 and types of 32 "
        "or 64 bits, or another all_reduce",
    )
    ptrs, mask = dst_view.tile_ptr(tile)
    value = numeric.narrow(tile.data, dst_view.ptr.dtype.element_ty)
    for step in tl.static_range(ctx.world_size):
        peer = rotated_rank(ctx.rank, step, ctx.world_size)
        ctx.atomic_add(ptrs, value, peer, mask=mask, sem="relaxed", scope="sys")


all_reduce = all_reduce_atomic


@triton.jit
def all_reduce_spinlock(tile, dst_view, locks, ctx):
    """Add ``tile`` to its place in ``dst_view`` on every rank, under that rank's lock of the tile.

    Precondition: ``dst_view`` and ``locks`` were zeroed on every rank, and a barrier of all ranks came after that.
    Guarantee: none yet. The sums are complete, and all locks are 0 again, after a barrier of all ranks that follows
    the kernels.
    The caller owes that barrier before any rank reads ``dst_view``, and another before it is zeroed again. Nobody
    else may add to these tiles without the lock. Locks of this function hold 0 or 1, so they are not those of a
    function that takes a generation.

    A lock that does not come free within the time limit of waits ends the attempt; the host raises
    :class:`iris.errors.WaitTimeout`. Zero the locks before they are used again then.

    Not the same bits on all ranks, nor in all runs: each addition is computed in ``numeric.wide_dtype`` and rounded
    to the dtype of ``dst_view``, in the order in which ranks come.

    Args:
        tile: :class:`iris.x.tile.Tile`.
        dst_view: (M, N) on the heap, at the same place on every rank; any dtype.
        locks: int32 on the heap, one for each tile.
        ctx: :class:`iris.x.context.DeviceContext`.
    """
    ptrs, mask = dst_view.tile_ptr(tile)
    wide: tl.constexpr = numeric.wide_dtype(dst_view.ptr.dtype.element_ty)
    lock = locks + dst_view.tile_id(tile)
    for step in range(ctx.world_size):
        # One lock at a time, so ranks cannot wait for each other in a circle.
        peer = rotated_rank(ctx.rank, step, ctx.world_size)
        if signal.lock(lock, ctx.rank, peer, ctx.context) == 1:
            total = ctx.load(ptrs, peer, mask=mask, other=0.0).to(wide) + tile.data.to(wide)
            ctx.store(ptrs, numeric.narrow(total, dst_view.ptr.dtype.element_ty), peer, mask=mask)
            signal.unlock(lock, ctx.rank, peer, ctx.context)


@triton.jit
def all_reduce_one_shot(tile, src_view, dst_view, locks, ctx, generation=1):
    """Wait for ``tile`` on every rank, read them all and store their sum to the own ``dst_view``.

    Precondition: every rank publishes this tile (:func:`iris.x.publish.publish_tile`) with ``generation``, in a
    program that runs or is done.
    Guarantee: the tile in the own ``dst_view`` is stored by this program; no other rank writes there.
    The caller owes a barrier of all ranks, or flags, before any rank overwrites its ``src_view``.

    Args:
        tile: :class:`iris.x.tile.TileView` or :class:`iris.x.tile.Tile`, whose data is not used: what counts is what
            was
            published.
        src_view: (M, N) on the heap, at the same place on every rank.
        dst_view: (M, N), anywhere on the own device.
        locks: int32 on the heap, one for each tile.
        ctx: :class:`iris.x.context.DeviceContext`.
        generation: number of the call, as in ``publish_tile``.
    """
    total = sum_published(tile, src_view, locks, ctx, generation)
    ptrs, mask = dst_view.tile_ptr(tile)
    tl.store(ptrs, numeric.narrow(total, dst_view.ptr.dtype.element_ty), mask=mask)


@triton.jit
def all_reduce_two_shot(tile, src_view, dst_view, locks, start_tile, stride, ctx, generation=1):
    """On the rank whose turn ``tile`` is: wait for it on every rank, sum, and store to every ``dst_view``; else
    nothing.

    A rank's tiles are ``start_tile``, ``start_tile + stride`` and so on. With ``start_tile=rank`` and
    ``stride=world_size``, as the method of ``DeviceContext`` has it, each tile is one rank's for any number of tiles.

    Precondition: every rank publishes this tile (:func:`iris.x.publish.publish_tile`) with ``generation``, in a
    program that runs or is done; nobody reads it in any rank's ``dst_view`` any more.
    Guarantee: none yet. ``dst_view`` is complete on every rank after a barrier of all ranks.
    The caller owes that barrier before any rank reads ``dst_view`` or overwrites its ``src_view``.

    Args:
        tile: :class:`iris.x.tile.TileView` or :class:`iris.x.tile.Tile`, whose data is not used.
        src_view, dst_view: (M, N) on the heap, at the same place on every rank, and not the same memory.
        locks: int32 on the heap, one for each tile.
        start_tile, stride: which tiles are this rank's.
        ctx: :class:`iris.x.context.DeviceContext`.
        generation: number of the call, as in ``publish_tile``.
    """
    ahead = src_view.tile_id(tile) - start_tile
    if (ahead >= 0) & (ahead % stride == 0):
        total = sum_published(tile, src_view, locks, ctx, generation)
        value = numeric.narrow(total, dst_view.ptr.dtype.element_ty)
        ptrs, mask = dst_view.tile_ptr(tile)
        for step in tl.static_range(ctx.world_size):
            ctx.store(ptrs, value, rotated_rank(ctx.rank, step, ctx.world_size), mask=mask)


@triton.jit
def all_reduce_ring(tile, src_view, dst_view, ctx, locks=None, generation=1, scratch_view=None):
    """Sum ``tile`` along the ranks and send the result around: each rank reads from nobody and writes to the next.

    Rank 0 sends its tile to rank 1, which adds its own and sends on, to the last rank. That rounds the sum and sends
    it to rank 0, and each rank passes it on until all have it. The sum travels in ``numeric.wide_dtype`` through
    ``scratch_view``, or through ``dst_view`` where that has the dtype.

    Locks are the ring's own, zero at first: ``2 * generation - 1`` on a rank says that the partial sum of the ranks
    before it is there, ``2 * generation`` that the result is.

    Precondition: this rank's tile is in the own ``src_view``, stored by this program or before this kernel; nobody
    reads the tile in the next rank's ``dst_view`` any more. All ranks call it for the same tiles in the same order,
    from programs that run.
    Guarantee: at return the tile in the own ``dst_view`` is complete and seen by this program. The own ``src_view``
    may be overwritten.
    The caller owes a barrier of all ranks, after its last reading of ``dst_view`` and before the next call with the
    same ``dst_view``: the rank before this one writes there as soon as it calls.

    The original function of this name takes no locks and is not safe; ``locks`` must be given here.

    Args:
        tile: :class:`iris.x.tile.TileView` or :class:`iris.x.tile.Tile`, whose data is not used.
        src_view: (M, N), anywhere on the own device.
        dst_view: (M, N) on the heap, at the same place on every rank.
        ctx: :class:`iris.x.context.DeviceContext`.
        locks: int32 on the heap, one for each tile.
        generation: number of the call, from 1 on (int32); only grows.
        scratch_view: (M, N) of the wide dtype on the heap; None where ``dst_view`` has that dtype.
    """
    tl.static_assert(
        locks is not None, "all_reduce_ring needs locks: int32 on the heap, one for each tile, zero at first"
    )
    wide: tl.constexpr = numeric.wide_dtype(src_view.ptr.dtype.element_ty)
    if scratch_view is None:
        carrier = dst_view
    else:
        carrier = scratch_view
    tl.static_assert(
        carrier.ptr.dtype.element_ty == wide,
        "all_reduce_ring: partial sums need a scratch_view of float32 (float64 for float64, int32 or int64 for "
        "integers), or a dst_view of that dtype",
    )
    lock = locks + dst_view.tile_id(tile)
    next_rank: tl.constexpr = (ctx.rank + 1) % ctx.world_size
    last_rank: tl.constexpr = ctx.world_size - 1
    partial = 2 * generation - 1
    complete = 2 * generation
    own, inside = src_view.tile_ptr(tile)
    carried, mask = carrier.tile_ptr(tile)
    ptrs, mask = dst_view.tile_ptr(tile)
    tl.debug_barrier()  # this program's threads may have stored the tile
    total = tl.load(own, mask=inside, other=0.0).to(wide)
    if ctx.rank > 0:
        ctx.wait(lock, partial, ctx.rank - 1)
        total = tl.load(carried, mask=mask, other=0.0) + total
    if ctx.rank < last_rank:
        ctx.store(carried, total, next_rank, mask=mask)
        ctx.notify(lock, partial, next_rank)
        ctx.wait(lock, complete, (ctx.rank + last_rank) % ctx.world_size)
        if next_rank < last_rank:
            ctx.store(ptrs, tl.load(ptrs, mask=mask), next_rank, mask=mask)
            ctx.notify(lock, complete, next_rank)
    else:
        result = numeric.narrow(total, dst_view.ptr.dtype.element_ty)
        tl.store(ptrs, result, mask=mask)
        if ctx.world_size > 1:
            ctx.store(ptrs, result, next_rank, mask=mask)
            ctx.notify(lock, complete, next_rank)
