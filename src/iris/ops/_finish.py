"""The end of every tile of all-gather + matmul with a staging buffer."""

import triton
import triton.language as tl

from iris.x.epilogue import write_tile


@triton.jit
def _finish(
    acc,
    sums_ptr,
    count,
    first,
    out_ptr,
    row_mask,
    out_rows,
    column,
    N,
    stride_om,
    stride_on,
    bias_ptr,
    stride_biasm,
    stride_biasn,
    scale_a_ptr,
    scale_b_ptr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Add ``count`` sums of other programs to the ``WIDTH`` columns from ``first`` on of a tile and write them."""
    offsets = first + tl.arange(0, WIDTH)
    place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + offsets[None, :]
    for other in range(count):
        acc += tl.load(sums_ptr + tl.cast(other, tl.int64) * (BLOCK_M * BLOCK_N) + place)
    columns = column + offsets
    write_tile(
        acc, out_ptr, out_rows, columns, row_mask[:, None] & (columns < N)[None, :], stride_om, stride_on,
        bias_ptr, stride_biasm, stride_biasn, scale_a_ptr, scale_b_ptr, HAS_BIAS, HAS_SCALES, ACTIVATION,
    )  # fmt: skip


@triton.jit
def finish_tile(
    acc,
    sums_ptr,
    count,
    out_ptr,
    row_mask,
    out_rows,
    column,
    N,
    stride_om,
    stride_on,
    bias_ptr,
    stride_biasm,
    stride_biasn,
    scale_a_ptr,
    scale_b_ptr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Add ``count`` sums of other programs to a tile and write it from ``column`` on."""
    if BLOCK_N >= 256:
        # By halves, for which registers and shared memory have room besides.
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        _finish(
            left, sums_ptr, count, 0, out_ptr, row_mask, out_rows, column, N, stride_om, stride_on,
            bias_ptr, stride_biasm, stride_biasn, scale_a_ptr, scale_b_ptr,
            BLOCK_M, BLOCK_N, BLOCK_N // 2, HAS_BIAS, HAS_SCALES, ACTIVATION,
        )  # fmt: skip
        _finish(
            right, sums_ptr, count, BLOCK_N // 2, out_ptr, row_mask, out_rows, column, N, stride_om, stride_on,
            bias_ptr, stride_biasm, stride_biasn, scale_a_ptr, scale_b_ptr,
            BLOCK_M, BLOCK_N, BLOCK_N // 2, HAS_BIAS, HAS_SCALES, ACTIVATION,
        )  # fmt: skip
    else:
        _finish(
            acc, sums_ptr, count, 0, out_ptr, row_mask, out_rows, column, N, stride_om, stride_on,
            bias_ptr, stride_biasm, stride_biasn, scale_a_ptr, scale_b_ptr,
            BLOCK_M, BLOCK_N, BLOCK_N, HAS_BIAS, HAS_SCALES, ACTIVATION,
        )  # fmt: skip
