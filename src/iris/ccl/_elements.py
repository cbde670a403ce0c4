"""How collective kernels address tensors, and how they combine values. Device functions."""

import triton
import triton.language as tl

SUM = tl.constexpr(0)
PRODUCT = tl.constexpr(1)
MIN = tl.constexpr(2)
MAX = tl.constexpr(3)
AVG = tl.constexpr(7)


@triton.jit
def elements(pointer, start, offsets, columns, row_stride, column_stride, FLAT: tl.constexpr):
    """Pointers to the elements ``start + offsets`` of a tensor, counted in row-major order.

    Args:
        pointer: first element.
        start: int64 scalar.
        offsets: block of int32.
        columns, row_stride, column_stride: the tensor as a matrix; of no use when ``FLAT``.
        FLAT: the elements lie one after the other.
    """
    if FLAT:
        return pointer + start + offsets
    else:
        number = start + offsets
        return pointer + (number // columns) * row_stride + (number % columns) * column_stride


@triton.jit
def combine(one, other, OP: tl.constexpr):
    """Two values of a reduction; NaN wins over any number in MIN and MAX, as in ``torch.minimum``."""
    if OP == PRODUCT:
        return one * other
    elif OP == MIN:
        if one.dtype.is_floating():
            return tl.minimum(one, other, propagate_nan=tl.PropagateNan.ALL)
        else:
            return tl.minimum(one, other)
    elif OP == MAX:
        if one.dtype.is_floating():
            return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)
        else:
            return tl.maximum(one, other)
    else:
        return one + other


@triton.jit
def finish(value, OP: tl.constexpr, WORLD: tl.constexpr):
    """What a reduction over ``WORLD`` ranks comes to, given all values combined."""
    if OP == AVG:
        if value.dtype == tl.float32:
            # Rounded as everywhere else; the compiler's own division of float32 is a little off.
            return tl.div_rn(value, tl.full(value.shape, WORLD, tl.float32))
        else:
            return value / WORLD
    else:
        return value
