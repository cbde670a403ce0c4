"""Random data, tolerances and comparisons that tell where and by how much."""

from __future__ import annotations

import torch

# Largest relative error of one rounding to the dtype (half an ulp), and of one float32 addition. fp8 inputs carry no
# rounding of their own: they are exact once they are stored.
_ROUNDING = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8 / 2,
    torch.float64: 2.0**-53,
}
_FLOAT32 = 2.0**-24


def tolerance(dtype: torch.dtype, k: int) -> tuple[float, float]:
    """(absolute, relative) error allowed for a sum of ``k`` products, kept in float32 and rounded once to ``dtype``.

    The relative part is that of the last rounding, doubled, since the reference may round the other way. The absolute
    part bounds the float32 additions of products of magnitude about 1: the error of a sum in any order grows like
    ``sqrt(k)`` additions of partial sums of size ``sqrt(k)``; the factor 8 covers the largest of many elements.
    """
    return 8 * _FLOAT32 * max(1, k), 2 * _ROUNDING.get(dtype, _FLOAT32)


def random_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, *, seed: int, rank: int, integers: bool = False
) -> torch.Tensor:
    """Random values on the CPU that depend on seed, rank and position.

    Args:
        integers: whole numbers in [-2, 2], exact in every dtype; otherwise normal deviates (int8: in [-5, 5]).
    """
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    if integers or dtype == torch.int8:
        bound = 2 if integers else 5
        return torch.randint(-bound, bound + 1, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, k: int) -> None:
    """Compare with a float64 reference within :func:`tolerance`; NaN is wrong.

    Raises:
        AssertionError: says how many elements are wrong, the first one, both values and the largest error.
    """
    absolute, relative = tolerance(actual.dtype if actual.dtype.is_floating_point else dtype, k)
    have, want = _same_shape(actual, expected)
    wrong = ~((have - want).abs() <= absolute + relative * want.abs())
    _report(have, want, wrong, f"allowed error {absolute:.3g} + {relative:.3g} x |expected|")


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare exactly; NaN equals NaN only here.

    Raises:
        AssertionError: as :func:`assert_close`.
    """
    have, want = _same_shape(actual, expected)
    _report(have, want, ~((have == want) | (have.isnan() & want.isnan())), "must be equal")


def _same_shape(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    return actual.detach().cpu().to(torch.float64), expected.detach().cpu().to(torch.float64)


def _report(have: torch.Tensor, want: torch.Tensor, wrong: torch.Tensor, rule: str) -> None:
    count = int(wrong.sum())
    if not count:
        return
    first = tuple(int(i) for i in wrong.nonzero()[0])
    error = (have - want).abs()
    largest = float(error[~error.isnan()].max()) if bool((~error.isnan()).any()) else float("nan")
    raise AssertionError(
        f"{count} of {wrong.numel()} elements are wrong ({rule}); the first at {first}: got {have[first].item()!r}, "
        f"expected {want[first].item()!r}; {int(have.isnan().sum())} are NaN; largest error {largest:.6g}"
    )
