"""Random data, tolerances and comparisons that tell where and by how much."""

from __future__ import annotations

import torch

# Largest relative error of one rounding to the dtype: half a unit in the last place, 2**-(stored bits + 1). Integers
# are exact. A dtype that is not here has no tolerance: compare it with assert_bitwise_equal.
ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
    torch.int32: 0.0,
    torch.int8: 0.0,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tolerance(dtype: torch.dtype, k: int = 1) -> tuple[float, float]:
    """(absolute, relative) error allowed for a sum of ``k`` products, kept in float32 and rounded once to ``dtype``.

    The relative part is that of the last rounding, doubled, since the reference may round the other way. The absolute
    part bounds the float32 additions of products of magnitude about 1: the error of a sum in any order grows like
    ``sqrt(k)`` additions of partial sums of size ``sqrt(k)``; the factor 8 covers the largest of many elements. Below
    the smallest normal number rounding is no longer relative: half of the smallest number is added.

    Args:
        dtype: of the result.
        k: number of products in a sum; 0 for a result that is only rounded.

    Raises:
        ValueError: the dtype has no entry in :data:`ROUNDING`.
    """
    if dtype not in ROUNDING:
        known = ", ".join(map(str, ROUNDING))
        raise ValueError(f"no tolerance is known for {dtype}; possible: {known}")
    if not dtype.is_floating_point:
        return 0.0, 0.0
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    unit = ROUNDING[torch.float64 if dtype == torch.float64 else torch.float32]
    return 8 * unit * k + smallest / 2, 2 * ROUNDING[dtype]


def random_tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    seed: int,
    rank: int,
    device: torch.device | str = "cpu",
    integers: bool = False,
) -> torch.Tensor:
    """Random values that depend on seed, rank and position, the same on every device.

    Args:
        shape: of the tensor.
        dtype: floating point, fp8 included, or an integer type.
        seed: of the data set.
        rank: whose share of the data set it is.
        device: where to put it.
        integers: whole numbers in [-2, 2], exact in every dtype; otherwise normal deviates (integer types: whole
            numbers in [-5, 5]).
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    if integers or not dtype.is_floating_point:
        bound = 2 if integers else 5
        values = torch.randint(-bound, bound + 1, shape, generator=generator)
    else:
        values = torch.randn(shape, generator=generator)
    return values.to(dtype).to(device)


def random_like(tensor: torch.Tensor, *, seed: int, rank: int, integers: bool = False) -> torch.Tensor:
    """:func:`random_tensor` with the shape, dtype and device of ``tensor``."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    return random_tensor(shape, dtype, seed=seed, rank=rank, device=tensor.device, integers=integers)


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    k: int = 1,
    *,
    allowed: tuple[float, float] | None = None,
) -> None:
    """Compare with a float64 reference within :func:`tolerance`; NaN is wrong on either side.

    Args:
        actual: what was computed.
        expected: the reference, of the same shape.
        dtype: the least precise dtype the result went through on its way, often that of ``actual``. The larger of
            the tolerances of it and of ``actual`` counts.
        k: number of products in each sum.
        allowed: (absolute, relative) error that takes the place of the tolerance.

    Raises:
        AssertionError: says how many elements are wrong, the first one, both values and the largest errors.
    """
    bounds = [tolerance(t, k) for t in (dtype, actual.dtype)] if allowed is None else [allowed]
    absolute, relative = max(b[0] for b in bounds), max(b[1] for b in bounds)
    have, want = _same_shape(actual, expected)
    # Equal infinities have no difference. Written so that NaN, which compares false, counts as wrong.
    right = ((have - want).abs() <= absolute + relative * want.abs()) & want.isfinite() | (have == want)
    _report(have, want, ~right, f"allowed error {absolute:.3g} + {relative:.3g} x |expected|")


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare dtype, shape and every bit: -0.0 differs from 0.0, and a NaN equals only a NaN of the same bits.

    Raises:
        AssertionError: as :func:`assert_close`.
    """
    if actual.dtype != expected.dtype:
        raise AssertionError(f"dtype {actual.dtype}, expected {expected.dtype}")
    have, want = _same_shape(actual, expected)
    wrong = _bits(actual) != _bits(expected)
    _report(have, want, wrong, "every bit must be equal")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(_BITS[tensor.element_size()])


def _same_shape(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    return actual.detach().cpu().to(torch.float64), expected.detach().cpu().to(torch.float64)


def _report(have: torch.Tensor, want: torch.Tensor, wrong: torch.Tensor, rule: str) -> None:
    count = int(wrong.sum())
    if not count:
        return
    first = tuple(int(i) for i in wrong.nonzero()[0])
    error = (have - want).abs().nan_to_num(0.0, posinf=float("inf"))
    relative = (error / want.abs()).nan_to_num(0.0, posinf=float("inf"))
    raise AssertionError(
        f"{count} of {wrong.numel()} elements are wrong ({rule}); the first at {first}: got {have[first].item()!r}, "
        f"expected {want[first].item()!r}; {int(have.isnan().sum())} are NaN ({int(want.isnan().sum())} in the "
        f"reference); largest error {float(error.max()):.6g} absolute, {float(relative.max()):.6g} relative"
    )
