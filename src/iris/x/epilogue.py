"""What follows the K loop of a matrix product: :func:`write_tile`."""

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
    HAS_BIAS: tl.constexpr,
):
    """Store ``acc + bias`` where ``mask`` (block) is set, rounded once to the output's type.

    Args:
        acc: block (BLOCK_M, BLOCK_N) of the accumulator's type.
        rows, columns: blocks of the output's rows and columns; offsets are computed in 64 bits.
    """
    rows = rows.to(tl.int64)[:, None]
    columns = columns.to(tl.int64)[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows * stride_biasm + columns * stride_biasn, mask=mask, other=0.0)
        acc += bias.to(acc.dtype)
    to = out_ptr + rows * stride_om + columns * stride_on
    tl.store(to, numeric.narrow(acc, out_ptr.dtype.element_ty), mask=mask)
