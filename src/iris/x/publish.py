"""The producer's half of the tile collectives, and the wait that belongs to it.

Protocol. Rank p's ``locks[tile_id]``, in p's own memory, says up to which generation p's tile is stored in p's
``src_view``. :func:`publish_tile` stores and sets it (release at system scope, after the stores of all threads); who
needs the tile polls it there (acquire at system scope) until it has reached the generation, and then reads the tile. A
lock is set by its own rank alone and read by any number of ranks, so one int32 for each tile is enough, and nothing is
reset: the next call passes the next generation.

The caller makes sure that nobody still reads the tile of an earlier generation when it stores the next one: by a
``ctx.barrier()`` or ``ctx.device_barrier()`` between the calls, by flags of its own, or by two source buffers that take
turns where every rank consumes generation g of a tile before it publishes generation g + 1 of it.
"""

import triton
import triton.language as tl

from iris.device import numeric, signal
from iris.device.address import translate


@triton.jit
def publish_tile(tile, src_view, locks, ctx, generation=1):
    """Store ``tile`` to the own ``src_view`` and tell every rank that it is there.

    Precondition: nobody reads this tile of ``src_view`` any more.
    Guarantee: who waits for ``generation`` of this tile, as the collectives do, then reads what is stored here.
    The caller must not publish a tile from two programs.

    Args:
        tile: :class:`iris.x.tile.Tile`; its data is rounded to the dtype of ``src_view``.
        src_view: (M, N) on the heap, at the same place on every rank.
        locks: int32 on the heap, one for each tile of ``src_view``.
        ctx: :class:`iris.x.context.DeviceContext`.
        generation: number of the call, from 1 on (int32); only grows, and may wrap.
    """
    ptrs, mask = src_view.tile_ptr(tile)
    tl.store(ptrs, numeric.narrow(tile.data, src_view.ptr.dtype.element_ty), mask=mask)
    signal.notify(locks + src_view.tile_id(tile), generation, ctx.rank, ctx.rank, ctx.heap_bases)


@triton.jit
def wait_tile(tile, src_view, locks, from_rank, ctx, generation=1):
    """Wait until ``from_rank`` has published ``generation`` of ``tile``; returns 1, or 0 when it gave up.

    After 1, what ``from_rank`` stored may be read with :func:`iris.x.gather.gather`. A caller may ignore the result:
    the host raises after a 0.

    Args: as :func:`publish_tile`; ``tile`` may be a :class:`iris.x.tile.TileView`.
    """
    lock = translate(locks + src_view.tile_id(tile), ctx.rank, from_rank, ctx.heap_bases)
    return signal.wait(lock, generation, ctx.context, from_rank)


@triton.jit
def sum_published(tile, src_view, locks, ctx, generation=1):
    """Wait for ``tile`` of every rank and add them in rank order: block of ``numeric.wide_dtype`` of the view's dtype.

    Rank order makes the sum the same on whichever rank it is computed, bit by bit.
    """
    for step in tl.static_range(ctx.world_size):
        wait_tile(tile, src_view, locks, (ctx.rank + step) % ctx.world_size, ctx, generation)
    ptrs, mask = src_view.tile_ptr(tile)
    wide: tl.constexpr = numeric.wide_dtype(src_view.ptr.dtype.element_ty)
    total = ctx.load(ptrs, 0, mask=mask, other=0.0).to(wide)
    # Not unrolled: the compiler would load the tiles of all ranks side by side and run out of registers.
    for source in tl.range(1, ctx.world_size, loop_unroll_factor=1):
        total += ctx.load(ptrs, source, mask=mask, other=0.0).to(wide)
    return total
