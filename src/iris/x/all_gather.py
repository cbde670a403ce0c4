"""All-gather of tiles: each rank pushes the tiles of its shard to all ranks."""

import triton
import triton.language as tl

from iris.device import numeric
from iris.x.schedule import chunk_extent, chunk_first, rotated_rank


@triton.jit
def all_gather(tile, dst_view, dim: tl.constexpr, ctx):
    """Store ``tile`` of this rank's shard to its place in ``dst_view`` on every rank, the own included.

    ``dst_view`` is (M, N), the gathered matrix. The shard of rank r is its rows from ``r * cdiv(M, world_size)`` on
    (``dim`` 0), or its columns likewise (``dim`` 1): ``cdiv(M, world_size)`` of them, as far as the matrix has so many,
    as ``torch.chunk`` cuts it. ``tile`` counts within the shard and is masked at its edge. :func:`shard_extent` says on
    the host how long a shard is.

    Precondition: nobody reads this shard in any rank's ``dst_view`` any more.
    Guarantee: none yet. The stores are seen after a barrier of all ranks, or by who waits for a flag that this
    program sets with ``ctx.notify`` afterwards.
    The caller owes a barrier, or such flags, before any rank reads ``dst_view``. The source of the tile may be
    overwritten at once.

    Args:
        tile: :class:`iris.x.tile.Tile`; its data is rounded to the dtype of ``dst_view``.
        dst_view: (M, N) on the heap, at the same place on every rank.
        dim: 0 or 1.
        ctx: :class:`iris.x.context.DeviceContext`.
    """
    tl.static_assert((dim == 0) | (dim == 1), "dim must be 0 (shards are rows) or 1 (shards are columns)")
    shard_m = dst_view.M
    shard_n = dst_view.N
    first_m = 0
    first_n = 0
    if dim == 0:
        first_m = chunk_first(dst_view.M, ctx.rank, ctx.world_size)
        shard_m = chunk_extent(dst_view.M, ctx.world_size)
    else:
        first_n = chunk_first(dst_view.N, ctx.rank, ctx.world_size)
        shard_n = chunk_extent(dst_view.N, ctx.world_size)
    _, _, inside = tile.layout(shard_m, shard_n)
    ptrs, mask = dst_view.offset_tile_ptr(tile, first_m, first_n, inside)
    value = numeric.narrow(tile.data, dst_view.ptr.dtype.element_ty)
    for step in tl.static_range(ctx.world_size):
        ctx.store(ptrs, value, rotated_rank(ctx.rank, step, ctx.world_size), mask=mask)


def shard_extent(extent: int, rank: int, world_size: int) -> int:
    """On the host: rows or columns of a rank's shard of ``extent``; may be 0."""
    left = extent - chunk_first.fn(extent, rank, world_size)
    return max(0, min(left, chunk_extent.fn(extent, world_size)))
