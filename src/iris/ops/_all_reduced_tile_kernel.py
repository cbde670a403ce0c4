"""Both ends of the way of a tile whose partial sums move: its product on one rank, and its result on all."""

import triton
import triton.language as tl

from iris.device import link, numeric
from iris.device.address import translate
from iris.x.epilogue import write_tile
from iris.x.gemm import multiply_blocks
from iris.x.schedule import rotated_rank


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


@triton.jit
def write_on_all(
    total,
    rows,
    columns,
    M,
    N,
    out_ptr,
    stride_om,
    stride_on,
    bias_ptr,
    stride_biasm,
    stride_biasn,
    scale_a_ptr,
    scale_b_ptr,
    members,
    index,
    context,
    WORLD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """:func:`iris.x.epilogue.write_tile` to the output of every member, the own first. Their kernels must run."""
    rank = tl.load(members + index)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    for step in range(WORLD):
        peer = tl.load(members + rotated_rank(index, step, WORLD))
        out = translate(out_ptr, rank, peer, context + 2)
        link.pace_write(out + mask.to(tl.int32), rank, peer, context + 2)
        write_tile(
            total, out, rows, columns, mask, stride_om, stride_on, bias_ptr, stride_biasm, stride_biasn,
            scale_a_ptr, scale_b_ptr, HAS_BIAS, HAS_SCALES, ACTIVATION,
        )  # fmt: skip
