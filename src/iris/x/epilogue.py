"""What follows the K loop of a matrix product: scales, bias, activation and the one rounding, :func:`write_tile`."""

import triton
import triton.language as tl

from iris.device import numeric


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
    """Store ``act(scale_a * scale_b * acc + bias)`` where ``mask`` (block) is set, rounded once to the output's type.

    Args:
        acc: block (BLOCK_M, BLOCK_N) of the accumulator's type; int32 takes a bias, no scales and no activation.
        rows, columns: blocks of the output's rows and columns; offsets are computed in 64 bits.
        scale_a_ptr, scale_b_ptr: one float32 each, read when the tile is written, so a graph replays with what they
            hold then; any pointers without ``HAS_SCALES``.
        ACTIVATION: of :func:`iris.device.numeric.activate`.
    """
    rows = rows.to(tl.int64)[:, None]
    columns = columns.to(tl.int64)[None, :]
    if HAS_SCALES:
        acc *= tl.load(scale_a_ptr) * tl.load(scale_b_ptr)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows * stride_biasm + columns * stride_biasn, mask=mask, other=0.0)
        acc += bias.to(acc.dtype)
    acc = numeric.activate(acc, ACTIVATION)
    to = out_ptr + rows * stride_om + columns * stride_on
    tl.store(to, numeric.narrow(acc, out_ptr.dtype.element_ty), mask=mask)
