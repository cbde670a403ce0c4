"""Reduce-scatter of tiles: each tile is summed on the one rank that owns it.

Ownership. The tiles are numbered row by row. Each rank owns ``tiles // world_size`` in a row and the last rank the rest
as well, so with fewer tiles than ranks the last one owns all. :func:`reduce_scatter_owner` says it for an element, in
kernels; :func:`owner_of_element` on the host.
"""

import triton
import triton.language as tl

from iris.device import numeric
from iris.x.publish import sum_published
from iris.x.schedule import contiguous_owner, tile_number
from iris.x.tile import number_of_tiles


@triton.jit
def reduce_scatter(tile, src_view, dst_view, locks, ctx, generation=1):
    """Where this rank owns ``tile``: wait for it on every rank and store the sum to the own ``dst_view``; else nothing.

    ``dst_view`` is (M, N) like ``src_view``; a rank stores its own tiles at their places and touches no others. Sums
    are kept in ``numeric.wide_dtype``, added in rank order and rounded once.

    Precondition: every rank publishes this tile (:func:`iris.x.publish.publish_tile`) with ``generation``, in a
    program that runs or is done: earlier in this kernel before it waits for anything, or in an earlier kernel.
    Guarantee: the tile in the own ``dst_view`` is stored by this program; no other rank writes there.
    The caller owes a barrier of all ranks, or flags, before any rank overwrites its ``src_view``.

    Args:
        tile: :class:`iris.x.tile.TileView` or :class:`iris.x.tile.Tile`, whose data is not used.
        src_view: (M, N) on the heap, at the same place on every rank.
        dst_view: (M, N), anywhere on the own device.
        locks: int32 on the heap, one for each tile.
        ctx: :class:`iris.x.context.DeviceContext`.
        generation: number of the call, as in ``publish_tile``.
    """
    tiles = src_view.number_of_tiles(tile.block_m, tile.block_n)
    if contiguous_owner(src_view.tile_id(tile), tiles, ctx.world_size) == ctx.rank:
        total = sum_published(tile, src_view, locks, ctx, generation)
        ptrs, mask = dst_view.tile_ptr(tile)
        tl.store(ptrs, numeric.narrow(total, dst_view.ptr.dtype.element_ty), mask=mask)


@triton.jit
def reduce_scatter_owner(row, column, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, world_size):
    """The rank that owns the element of an (M, N) matrix in tiles of (BLOCK_M, BLOCK_N)."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tile_number(row // BLOCK_M, column // BLOCK_N, tiles_n)
    return contiguous_owner(tile, tl.cdiv(M, BLOCK_M) * tiles_n, world_size)


def owner_of_element(row: int, column: int, M: int, N: int, block_m: int, block_n: int, world_size: int) -> int:
    """:func:`reduce_scatter_owner` on the host, by the same rule."""
    tile = tile_number.fn(row // block_m, column // block_n, number_of_tiles(1, N, 1, block_n))
    return int(contiguous_owner.fn(tile, number_of_tiles(M, N, block_m, block_n), world_size))
