"""The K loop of matrix products: :func:`multiply_blocks`; what it does with a block: :func:`multiply_block`; with it a
whole tile: :func:`multiply_tile`.

One function for every operation. Operands come by tensor descriptors where the target copies tiles in hardware and the
layouts allow it, by pointers elsewhere; see :mod:`iris.x.operands` for the host's side. It waits for
nothing, so that its loads are pipelined: whoever multiplies data that is still on its way waits before.
"""

import triton
import triton.language as tl

from iris.device import link, numeric
from iris.x.schedule import gathered_block, rotated_rank


@triton.jit
def multiply_blocks(
    acc,
    a_desc,
    a_ptr,
    a_row,
    a_rows,
    row_mask,
    part_rows,
    stride_part,
    stride_ak,
    b_desc,
    b_ptr,
    b_column,
    b_columns,
    column_mask,
    stride_bk,
    first,
    last,
    depth,
    part,
    origin,
    me,
    owner,
    link_context,
    k_per_flag,
    WORLD: tl.constexpr,
    PARTS: tl.constexpr,
    ALONG_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``acc`` plus the product of a row of tiles of A and a column of tiles of B, over blocks ``first..last - 1`` of K.

    A lies in parts of ``depth`` columns, ``cdiv(depth, BLOCK_K)`` blocks each. With ``PARTS`` > 1 the blocks go through
    all parts, from ``part`` on, as :func:`iris.x.schedule.gathered_block` says; otherwise all are of part ``part``.

    Args:
        acc: block (BLOCK_M, BLOCK_N) of the accumulator's type.
        a_desc, b_desc: tensor descriptors of blocks (BLOCK_M, BLOCK_K) of A and (BLOCK_K, BLOCK_N) of B, or with
            ``B_TRANSPOSED`` (BLOCK_N, BLOCK_K) of B's transpose; not used without ``DESCRIPTORS``.
        a_ptr, b_ptr: first element of A's part 0, and of B.
        a_row, b_column: first row and column of the tile.
        a_rows, b_columns: the same as offsets (int64) of all its rows and columns; ``row_mask``, ``column_mask``: which
            of them there are.
        part_rows, stride_part: rows of the descriptor, and elements, between two parts.
        origin: part p belongs to member ``(origin + p) % WORLD``.
        me, owner, link_context: of :func:`iris.device.link.pace_read`: the own rank, and the one that A is read from.
        k_per_flag: blocks of a part that follow one another there.
        ALONG_K: the parts are columns of one A, so part p meets the rows of B of its member; else all meet all rows.
    """
    blocks = tl.cdiv(depth, BLOCK_K)
    for i in range(first, last):
        of, block = part, i
        if PARTS > 1:
            _, of, block = gathered_block(i, blocks, PARTS, k_per_flag)
            of = (of + part) % PARTS
        k = block * BLOCK_K
        b_k = k
        if ALONG_K:
            b_k = k + rotated_rank(origin, of, WORLD) * depth
        acc = multiply_block(
            acc, a_desc, a_ptr + tl.cast(of, tl.int64) * stride_part, of * part_rows + a_row, a_rows, row_mask,
            stride_ak, b_desc, b_ptr, b_column, b_columns, column_mask, stride_bk, k, b_k, depth,
            me, owner, link_context, BLOCK_K, B_TRANSPOSED, DESCRIPTORS, PRECISION,
        )  # fmt: skip
    return acc


@triton.jit
def multiply_block(
    acc,
    a_desc,
    a_ptr,
    a_row,
    a_rows,
    row_mask,
    stride_ak,
    b_desc,
    b_ptr,
    b_column,
    b_columns,
    column_mask,
    stride_bk,
    k,
    b_k,
    depth,
    me,
    owner,
    link_context,
    BLOCK_K: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``acc`` plus the product of a block of A, from its column ``k`` on, and one of B, from its row ``b_k`` on.

    The arguments are those of :func:`multiply_blocks`; ``a_ptr`` and ``a_row`` are of the part that the block is in.
    """
    if DESCRIPTORS:
        a = a_desc.load([a_row, k])
        if B_TRANSPOSED:
            b = b_desc.load([b_column, b_k]).T
        else:
            b = b_desc.load([b_k, b_column])
    else:
        offsets = tl.arange(0, BLOCK_K)
        inside = k + offsets < depth
        a_ptrs = a_ptr + a_rows[:, None] + ((k + offsets).to(tl.int64) * stride_ak)[None, :]
        link.pace_read(a_ptrs, me, owner, link_context)
        a = tl.load(a_ptrs, mask=row_mask[:, None] & inside[None, :], other=0.0)
        b_ptrs = b_ptr + ((b_k + offsets).to(tl.int64) * stride_bk)[:, None] + b_columns[None, :]
        b = tl.load(b_ptrs, mask=inside[:, None] & column_mask[None, :], other=0.0)
    return numeric.mma(a, b, acc, PRECISION)


@triton.jit
def multiply_tile(
    tile_m,
    tile_n,
    a_desc,
    b_desc,
    a_ptr,
    b_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    rank,
    context,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The tile of the rank's own ``A @ B``, float32 or int32; 0 past the last row and column."""
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=numeric.accumulator_dtype(a_ptr.dtype.element_ty))
    return multiply_blocks(
        acc, a_desc, a_ptr, tile_m * BLOCK_M, rows.to(tl.int64) * stride_am, rows < M, 0, 0, stride_ak,
        b_desc, b_ptr, tile_n * BLOCK_N, columns.to(tl.int64) * stride_bn, columns < N, stride_bk,
        0, tl.cdiv(K, BLOCK_K), K, 0, 0, rank, rank, context + 2, 1,
        1, 1, False, BLOCK_M, BLOCK_N, BLOCK_K, B_TRANSPOSED, DESCRIPTORS, PRECISION,
    )  # fmt: skip
