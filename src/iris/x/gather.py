"""A tile of another rank, as a block of values."""

import triton
import triton.language as tl


@triton.jit
def gather(tile_view, src_view, source_rank, ctx, hint: tl.constexpr = None):
    """The block of ``tile_view`` in the ``src_view`` of ``source_rank``; stores nothing.

    Precondition: ``source_rank`` has stored the tile and this program knows it, from a barrier or from
    :func:`iris.x.publish.wait_tile`.
    Guarantee: elements past the matrix are 0.
    The caller owes ``source_rank`` word that the tile was read, a barrier or a flag, before that overwrites it.

    Args:
        tile_view: :class:`iris.x.tile.TileView` or :class:`iris.x.tile.Tile`.
        src_view: (M, N) on the heap, at the same place on every rank.
        source_rank: the rank to read from.
        ctx: :class:`iris.x.context.DeviceContext`.
        hint: the caller's word that blocks of that extent are contiguous and aligned, as in ``iris.load``.

    Returns:
        block (block_m, block_n) of the dtype of ``src_view``.
    """
    ptrs, mask = src_view.tile_ptr(tile_view)
    return ctx.load(ptrs, source_rank, mask=mask, other=0.0, hint=hint)
