"""The end of the way of a tile whose partial sums move: its result on all ranks."""

import triton
import triton.language as tl

from iris.device import link
from iris.device.address import translate
from iris.x.epilogue import write_tile
from iris.x.schedule import rotated_rank


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
