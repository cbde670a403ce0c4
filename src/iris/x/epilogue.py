"""What follows the K loop of a matrix product: scales, bias, activation and the one rounding."""

import triton
import triton.language as tl

from iris.device import numeric


@triton.jit
def finished_tile(
    acc,
    rows,
    columns,
    mask,
    bias_ptr,
    stride_biasm,
    stride_biasn,
    scale_a_ptr,
    scale_b_ptr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """``act(scale_a * scale_b * acc + bias)`` where ``mask`` (block) is set, rounded once to ``DTYPE``.

    Args:
        acc: block (BLOCK_M, BLOCK_N) of the accumulator's type; int32 takes a bias, no scales and no activation.
        rows, columns: blocks of the output's rows and columns; offsets are computed in 64 bits.
        scale_a_ptr, scale_b_ptr: one float32 each, read when the tile is written, so a graph replays with what they
            hold then; any pointers without ``HAS_SCALES``.
        ACTIVATION: of :func:`iris.device.numeric.activate`.
    """
    if HAS_SCALES:
        acc *= tl.load(scale_a_ptr) * tl.load(scale_b_ptr)
    if HAS_BIAS:
        offsets = rows.to(tl.int64)[:, None] * stride_biasm + columns.to(tl.int64)[None, :] * stride_biasn
        bias = tl.load(bias_ptr + offsets, mask=mask, other=0.0)
        acc += bias.to(acc.dtype)
    return numeric.narrow(numeric.activate(acc, ACTIVATION), DTYPE)


@triton.jit
def write_tile(
    acc,
    out_ptr,
    rows,
    columns,
    mask,
    stride_om,
    stride_on,
    bias_ptr,
    stride_biasm,
    stride_biasn,
    scale_a_ptr,
    scale_b_ptr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Store what :func:`finished_tile`, which has the arguments, gives where ``mask`` (block) is set."""
    value = finished_tile(
        acc, rows, columns, mask, bias_ptr, stride_biasm, stride_biasn, scale_a_ptr, scale_b_ptr, HAS_BIAS, HAS_SCALES,
        ACTIVATION, out_ptr.dtype.element_ty,
    )  # fmt: skip
    to = out_ptr + rows.to(tl.int64)[:, None] * stride_om + columns.to(tl.int64)[None, :] * stride_on
    tl.store(to, value, mask=mask)
