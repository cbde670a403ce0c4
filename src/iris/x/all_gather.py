"""All-gather of tiles: each rank pushes the tiles of its shard to all ranks."""

import triton
import triton.language as tl

from iris.device import numeric
from iris.errors import ArgumentError
from iris.x.schedule import rotated_rank


@triton.jit
def all_gather(tile, dst_view, dim: tl.constexpr, ctx):
    """Store ``tile`` of this rank's shard to its place in ``dst_view`` on every rank, the own included.

    ``dst_view`` is (M, N), the gathered matrix. The shard of rank r is its rows from ``r * (M // world_size)`` on
    (``dim`` 0) or its columns from ``r * (N // world_size)`` on (``dim`` 1); ``tile`` counts within the shard, and is
    masked at the shard's edge. The extent along ``dim`` must be a multiple of the world size: :func:`shard_extent`
    checks it on the host, kernels only with assertions on (interpreted, or with TRITON_DEBUG=1).

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
        tl.device_assert(dst_view.M % ctx.world_size == 0, "all_gather: M is no multiple of the world size")
        shard_m = dst_view.M // ctx.world_size
        first_m = shard_m * ctx.rank
    else:
        tl.device_assert(dst_view.N % ctx.world_size == 0, "all_gather: N is no multiple of the world size")
        shard_n = dst_view.N // ctx.world_size
        first_n = shard_n * ctx.rank
    _, _, inside = tile.layout(shard_m, shard_n)
    ptrs, mask = dst_view.offset_tile_ptr(tile, first_m, first_n, inside)
    value = numeric.narrow(tile.data, dst_view.ptr.dtype.element_ty)
    for step in tl.static_range(ctx.world_size):
        ctx.store(ptrs, value, rotated_rank(ctx.rank, step, ctx.world_size), mask=mask)


def shard_extent(extent: int, world_size: int) -> int:
    """On the host: rows or columns of a shard.

    Raises:
        ArgumentError: the extent is no multiple of the world size.
    """
    if extent % world_size:
        raise ArgumentError(
            f"an extent of {extent} cannot be sharded over {world_size} ranks: it must be a multiple of {world_size}, "
            f"for example {extent - extent % world_size + world_size}"
        )
    return extent // world_size
