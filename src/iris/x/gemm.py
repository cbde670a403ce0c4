"""The K loop of matrix products: :func:`multiply_shards`."""

import triton
import triton.language as tl

from iris.device import link, numeric
from iris.x.schedule import rotated_rank


@triton.jit
def multiply_shards(
    acc,
    a_ptr,
    stride_part,
    a_rows,
    row_mask,
    stride_ak,
    b_ptr,
    b_columns,
    column_mask,
    stride_bk,
    first,
    last,
    depth,
    origin,
    me,
    owner,
    link_context,
    WORLD: tl.constexpr,
    ALONG_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``acc`` plus the product of a row of tiles of A and a column of tiles of B, over blocks ``first..last - 1`` of K.

    A lies in parts, one after the other, each ``depth`` columns in ``cdiv(depth, BLOCK_K)`` blocks. Part p belongs to
    member ``(origin + p) % WORLD``. One loop goes through all parts, so that the loads of one are under way while
    another is multiplied; it waits for nothing.

    Args:
        acc: block (BLOCK_M, BLOCK_N) of the accumulator's type.
        a_ptr: first element of part 0.
        stride_part: elements between two parts.
        a_rows, row_mask: offsets (int64) of the rows within a part, and which rows there are.
        b_ptr, b_columns, column_mask: first element of B, offsets (int64) of the columns, and which there are.
        me, owner, link_context: of :func:`iris.device.link.pace_read`: the own rank, and the one that A is read from.
        ALONG_K: the parts are columns of one A, so part p meets the rows of B of its member; else all meet all rows.
    """
    blocks = tl.cdiv(depth, BLOCK_K)
    offsets = tl.arange(0, BLOCK_K)
    for block in range(first, last):
        part = block // blocks
        k = (block - part * blocks) * BLOCK_K + offsets
        inside = k < depth
        a_part = a_ptr + tl.cast(part, tl.int64) * stride_part
        a_ptrs = a_part + a_rows[:, None] + (k.to(tl.int64) * stride_ak)[None, :]
        link.pace_read(a_ptrs, me, owner, link_context)
        a = tl.load(a_ptrs, mask=row_mask[:, None] & inside[None, :], other=0.0)
        b_row = k
        if ALONG_K:
            b_row = k + rotated_rank(origin, part, WORLD) * depth
        b_ptrs = b_ptr + (b_row.to(tl.int64) * stride_bk)[:, None] + b_columns[None, :]
        b = tl.load(b_ptrs, mask=inside[:, None] & column_mask[None, :], other=0.0)
        acc = numeric.mma(a, b, acc, PRECISION)
    return acc
