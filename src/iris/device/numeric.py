"""Widen on load, narrow on store, accumulate in 32 bits, multiply through :func:`mma`."""

import triton
import triton.language as tl

from iris.device._compat import constexpr_function


@constexpr_function
def accumulator_dtype(dtype):
    """The type that sums of products of ``dtype`` are kept in: int32 for integers, float32 for the rest."""
    return tl.int32 if dtype.is_int() else tl.float32


@constexpr_function
def wide_dtype(dtype):
    """The type that sums of values of ``dtype`` are kept in: itself for 64-bit types, else float32 or int32."""
    if dtype.primitive_bitwidth == 64:
        return dtype
    return tl.int32 if dtype.is_int() else tl.float32


@triton.jit
def mma(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` for blocks of one dtype, or of two fp8 dtypes.

    Args:
        a: block (M, K).  b: block (K, N).  acc: block (M, N) of :func:`accumulator_dtype`.
        PRECISION: how float32 operands are multiplied: ``"ieee"`` or ``"tf32"``.

    fp8 products are added in full float32 after every instruction: the tensor cores of Hopper otherwise keep about 14
    bits between promotions. Two different fp8 dtypes are widened to fp16, which holds both exactly.
    """
    if a.dtype.is_int():
        return tl.dot(a, b, acc, out_dtype=tl.int32)
    elif a.dtype != b.dtype:
        return tl.dot(a.to(tl.float16), b.to(tl.float16), acc)
    elif a.dtype.is_fp8():
        return tl.dot(a, b, acc, max_num_imprecise_acc=32 if a.shape[1] > 32 else a.shape[1])
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """``value`` rounded once to ``dtype``, to nearest even."""
    return value.to(dtype)


@triton.jit
def activate(value, ACTIVATION: tl.constexpr):
    """``value``, a float32 block, after ``"none"``, ``"relu"``, ``"gelu"`` (with erf) or ``"silu"``; NaN stays NaN."""
    if ACTIVATION == "relu":
        return tl.where(value < 0, 0.0, value)
    elif ACTIVATION == "gelu":
        return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACTIVATION == "silu":
        # The exponential of a number that is not positive cannot overflow.
        small = tl.exp(-tl.abs(value))
        return value * tl.where(value < 0, small, 1.0) / (1.0 + small)
    else:
        tl.static_assert(ACTIVATION == "none", "ACTIVATION must be 'none', 'relu', 'gelu' or 'silu'")
        return value
