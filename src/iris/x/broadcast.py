"""Broadcast of tiles: one rank pushes its tiles to all ranks."""

import triton
import triton.language as tl

from iris.device import numeric
from iris.x.schedule import rotated_rank


@triton.jit
def broadcast(tile, dst_view, source_rank, ctx):
    """On ``source_rank`` store ``tile`` to its place in ``dst_view`` on every rank, the own included; else nothing.

    Precondition: nobody reads this tile in any rank's ``dst_view`` any more.
    Guarantee: none yet. The stores are seen after a barrier of all ranks, or by who waits for a flag that
    ``source_rank`` sets with ``ctx.notify`` afterwards.
    The caller owes a barrier, or such flags, before any rank reads ``dst_view``.

    Args:
        tile: :class:`iris.x.tile.Tile`; its data is rounded to the dtype of ``dst_view``, and used on ``source_rank``
            only. dst_view: (M, N) on the heap, at the same place on every rank. source_rank: the rank whose tile is
            sent; the same on all ranks. ctx: :class:`iris.x.context.DeviceContext`.
    """
    if source_rank == ctx.rank:
        ptrs, mask = dst_view.tile_ptr(tile)
        value = numeric.narrow(tile.data, dst_view.ptr.dtype.element_ty)
        for step in tl.static_range(ctx.world_size):
            ctx.store(ptrs, value, rotated_rank(ctx.rank, step, ctx.world_size), mask=mask)
