"""All-to-all of tiles: each rank pulls its columns from every rank."""

import triton
import triton.language as tl

from iris.errors import ArgumentError


@triton.jit
def all_to_all(tile_view, src_view, dst_view, N_per_rank: tl.constexpr, ctx):
    """Fill ``tile_view`` of the own ``dst_view`` with the columns that the other ranks hold for this one.

    Both views are (M, world_size * N_per_rank). Column ``r * N_per_rank + j`` of ``dst_view`` on rank d is column
    ``d * N_per_rank + j`` of ``src_view`` on rank r. A tile may reach over the columns of several ranks. Columns
    past that width belong to nobody and are left alone; :func:`columns_per_rank` refuses such widths on the host.

    Precondition: every rank has stored its ``src_view``, and this program knows it from a barrier of all ranks or from
    flags.
    Guarantee: the tile in the own ``dst_view`` is stored by this program; no other rank writes there.
    The caller owes a barrier of all ranks, or flags, before any rank overwrites its ``src_view``.

    Args:
        tile_view: :class:`iris.x.tile.TileView` or :class:`iris.x.tile.Tile`, in ``dst_view``.
        src_view: on the heap, at the same place on every rank.
        dst_view: anywhere on the own device; another dtype than that of ``src_view`` is rounded to.
        N_per_rank: columns for each pair of ranks (constexpr).
        ctx: :class:`iris.x.context.DeviceContext`.
    """
    rm, rn = tile_view.indices()
    ptrs, inside = dst_view.tile_ptr(tile_view)
    first = tile_view.pid_n * tile_view.block_n // N_per_rank
    last = tl.minimum((tile_view.pid_n * tile_view.block_n + tile_view.block_n - 1) // N_per_rank, ctx.world_size - 1)
    for source in range(first, last + 1):
        within = rn - source * N_per_rank
        held = (within >= 0) & (within < N_per_rank)
        src_ptrs, there = src_view.tile_ptr_from_indices(rm, tl.where(held, within, 0) + ctx.rank * N_per_rank)
        mask = inside & there & held[None, :]
        value = ctx.load(src_ptrs, source, mask=mask, other=0.0)
        tl.store(ptrs, value.to(dst_view.ptr.dtype.element_ty), mask=mask)


def columns_per_rank(N: int, world_size: int) -> int:
    """On the host: ``N_per_rank`` of :func:`all_to_all` for matrices of ``N`` columns.

    Raises:
        ArgumentError: ``N`` is no multiple of the world size.
    """
    if N % world_size:
        raise ArgumentError(
            f"all_to_all: {N} columns cannot be dealt out to {world_size} ranks; possible: a multiple of {world_size}, "
            f"such as {N - N % world_size + world_size}"
        )
    return N // world_size
