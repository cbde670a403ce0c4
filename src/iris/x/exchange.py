"""Collectives of whole tensors, a tile at a time: what one program does for one tile, with the peers it concerns.

For kernels whose inputs are complete before they begin, and which know from :mod:`iris.x.turn` that every peer's kernel
has begun. Any program may take any tile, in any order: nobody waits in these functions, and no element is written
twice. All have the same parameters, so that one kernel takes any of them as an argument:

    tile(item, src_ptr, dst_ptr, rows, columns, first, stride_sm, stride_sn, stride_dm, stride_dn,
         members, index, context, WORLD, BLOCK_M, BLOCK_N, GROUP_M)

| function | for | items of a rank | from | to |
|---|---|---|---|---|
| ``push_tile`` | all-gather, broadcast | tiles of ``rows`` | own ``src`` | every ``dst``, row ``first`` on |
| ``fetch_tile`` | all-to-all | WORLD x tiles of ``rows`` | one ``src``, row ``first`` on | own ``dst`` |
| ``add_tile`` | reduce-scatter | tiles of ``rows`` | every ``src``, row ``first`` on | own ``dst`` |
| ``add_and_push_tile`` | all-reduce | every WORLD-th tile of ``rows`` | every ``src`` | every ``dst`` |

Sums are kept in ``numeric.wide_dtype``, added in the order of the members and rounded once, so their bits do not depend
on who adds. What peers read or write lies on the heap, at the same place and with the same strides on every member.

Args:
    item: number of the work item of this rank, from 0.
    src_ptr, dst_ptr: first elements of the own input and output.
    rows, columns: size of the matrix that the rank's tiles divide.
    first: row at which the rank's part begins in what is whole on every member.
    members, index: ranks of the group (int32), and the place of the own one among them.
    context: tensor of ``ctx.get_device_context()``.
"""

import triton
import triton.language as tl

from iris.device import link, numeric
from iris.device.address import element_bytes, translate
from iris.x.schedule import grouped_tile, rotated_rank, strided_tile
from iris.x.tile import tile_layout


@triton.jit
def _layout(tile, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    tile_m, tile_n = grouped_tile(tile, tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP_M)
    return tile_layout(tile_m, tile_n, rows, columns, BLOCK_M, BLOCK_N)


@triton.jit
def _at(ptr, rm, rn, stride_m, stride_n):
    return ptr + (rm.to(tl.int64) * stride_m)[:, None] + (rn.to(tl.int64) * stride_n)[None, :]


@triton.jit
def _push(value, mine, mask, members, index, context, WORLD: tl.constexpr):
    """Store a block at the same place on every member."""
    rank = tl.load(members + index)
    nbytes: tl.constexpr = value.numel * element_bytes(mine.dtype)
    due = tl.full((), 0, tl.int64)
    # From the next member on, so that the members write to different ones at a time; the own place comes last.
    for step in range(1, WORLD + 1):
        peer = tl.load(members + rotated_rank(index, step, WORLD))
        due = tl.maximum(due, link.charge_write(nbytes, rank, peer, context + 2))
        tl.store(translate(mine, rank, peer, context + 2), value, mask=mask)
    link.carried(due)


@triton.jit
def _read(mine, mask, members, index, step, context):
    """The block at the same place on member ``step``."""
    rank, peer = tl.load(members + index), tl.load(members + step)
    theirs = translate(mine, rank, peer, context + 2)
    link.pace_read(theirs, rank, peer, context + 2)
    return tl.load(theirs, mask=mask, other=0)


@triton.jit
def _sum(mine, mask, members, index, context, WORLD: tl.constexpr):
    """The block at the same place on every member, added."""
    wide = numeric.wide_dtype(mine.dtype.element_ty)
    first = _read(mine, mask, members, index, 0, context)
    if WORLD == 1:
        total = first.to(wide)
    else:
        # While one is added the next is on its way. Without the barriers the compiler puts loads of the next behind
        # additions of the one, which wait for what was loaded first.
        ahead = _read(mine, mask, members, index, 1, context)
        tl.debug_barrier()
        total = first.to(wide)
        # Not unrolled: the compiler would load the blocks of all members side by side and run out of registers.
        for step in tl.range(2, WORLD, loop_unroll_factor=1):
            value = ahead
            ahead = _read(mine, mask, members, index, step, context)
            tl.debug_barrier()
            total += value.to(wide)
        total += ahead.to(wide)
    return total


@triton.jit
def push_tile(
    item, src_ptr, dst_ptr, rows, columns, first, stride_sm, stride_sn, stride_dm, stride_dn, members, index, context,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Store a tile of the own input in every member's output; see the module."""
    rm, rn, mask = _layout(item, rows, columns, BLOCK_M, BLOCK_N, GROUP_M)
    value = tl.load(_at(src_ptr, rm, rn, stride_sm, stride_sn), mask=mask, other=0)
    _push(value, _at(dst_ptr, first + rm, rn, stride_dm, stride_dn), mask, members, index, context, WORLD)


@triton.jit
def fetch_tile(
    item, src_ptr, dst_ptr, rows, columns, first, stride_sm, stride_sn, stride_dm, stride_dn, members, index, context,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Copy a tile of what one member's input holds for this rank to that one's rows of the own output; see the module.

    Items that follow each other come from different members, so that all links carry at a time.
    """
    source = rotated_rank(index, 1 + item % WORLD, WORLD)
    rm, rn, mask = _layout(item // WORLD, rows, columns, BLOCK_M, BLOCK_N, GROUP_M)
    value = _read(_at(src_ptr, first + rm, rn, stride_sm, stride_sn), mask, members, index, source, context)
    tl.store(_at(dst_ptr, source * rows + rm, rn, stride_dm, stride_dn), value, mask=mask)


@triton.jit
def add_tile(
    item, src_ptr, dst_ptr, rows, columns, first, stride_sm, stride_sn, stride_dm, stride_dn, members, index, context,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Add a tile of the own rows of every member's input into the own output; see the module."""
    rm, rn, mask = _layout(item, rows, columns, BLOCK_M, BLOCK_N, GROUP_M)
    total = _sum(_at(src_ptr, first + rm, rn, stride_sm, stride_sn), mask, members, index, context, WORLD)
    value = numeric.narrow(total, dst_ptr.dtype.element_ty)
    tl.store(_at(dst_ptr, rm, rn, stride_dm, stride_dn), value, mask=mask)


@triton.jit
def add_and_push_tile(
    item, src_ptr, dst_ptr, rows, columns, first, stride_sm, stride_sn, stride_dm, stride_dn, members, index, context,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Add a tile that is this rank's of every member's input, and store it in every member's output; see the module.

    The output may be the input: nobody but this rank reads the tile, before it stores it.
    """
    rm, rn, mask = _layout(strided_tile(item, index, WORLD), rows, columns, BLOCK_M, BLOCK_N, GROUP_M)
    total = _sum(_at(src_ptr, rm, rn, stride_sm, stride_sn), mask, members, index, context, WORLD)
    value = numeric.narrow(total, dst_ptr.dtype.element_ty)
    _push(value, _at(dst_ptr, rm, rn, stride_dm, stride_dn), mask, members, index, context, WORLD)
