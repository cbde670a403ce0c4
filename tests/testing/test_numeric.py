"""Data and comparisons: what they accept, what they refuse, and what they say."""

import math

import pytest
import torch

from iris.testing import numeric, reference
from iris.testing.numeric import assert_bitwise_equal, assert_close, random_like, random_tensor, tolerance

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=str)
@pytest.mark.parametrize("integers", [False, True])
def test_random_tensors(dtype, integers):
    def make(seed, rank):
        return random_tensor((32, 17), dtype, seed=seed, rank=rank, integers=integers).to(torch.float64)

    one = make(0, 0)
    assert torch.equal(one, make(0, 0))
    assert not torch.equal(one, make(0, 1))
    assert not torch.equal(one, make(1, 0))
    assert not torch.equal(one[0], one[1])
    assert one.isfinite().all()
    if integers:
        assert set(one.unique().tolist()) == {-2, -1, 0, 1, 2}
    like = random_like(torch.empty(32, 17, dtype=dtype), seed=0, rank=0, integers=integers)
    assert like.dtype == dtype
    assert torch.equal(like.to(torch.float64), one)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_table_holds_the_error_of_one_rounding(dtype):
    assert numeric.ROUNDING[dtype] == torch.finfo(dtype).eps / 2
    exact = torch.rand(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4 - 2
    assert_close(exact.to(dtype), exact, dtype, k=0)
    # Two units in the last place are too much.
    far = exact * (1 + 2 * torch.finfo(dtype).eps)
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_close(far.to(dtype), exact, dtype, k=0)


def test_a_dtype_without_a_tolerance_is_refused():
    with pytest.raises(ValueError, match=r"no tolerance is known for torch.complex64; possible: .*torch.float32"):
        tolerance(torch.complex64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [1, 100, 5000])
def test_a_right_product_passes(dtype, k):
    a, b = random_tensor((20, k), dtype, seed=1, rank=0), random_tensor((k, 30), dtype, seed=2, rank=0)
    got = (a.float() @ b.float()).to(dtype)
    assert_close(got, a.double() @ b.double(), dtype, k=k)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("gather_dim", [0, 1])
def test_two_swapped_shards_are_noticed(dtype, integers, gather_dim):
    shards = [random_tensor((24, 16), dtype, seed=5, rank=r, integers=integers) for r in range(4)]
    b = random_tensor((16 * 4 if gather_dim == 1 else 16, 8), dtype, seed=6, rank=0, integers=integers)
    want = reference.all_gather_matmul(shards, b, gather_dim=gather_dim)
    assert_close(want.to(torch.float32), want, torch.float32, k=b.shape[0])
    shards[1], shards[2] = shards[2], shards[1]
    swapped = reference.all_gather_matmul(shards, b, gather_dim=gather_dim)
    with pytest.raises(AssertionError, match="are wrong"):
        assert_close(swapped.to(torch.float32), want, torch.bfloat16, k=b.shape[0])


def test_the_report_says_where_and_by_how_much():
    want = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    got = want.float()
    got[1, 2] += 3
    got[2, 0] = math.nan
    with pytest.raises(AssertionError) as caught:
        assert_close(got, want, torch.float32)
    text = str(caught.value)
    assert "2 of 12 elements are wrong" in text
    assert "the first at (1, 2): got 9.0, expected 6.0" in text
    assert "1 are NaN (0 in the reference)" in text
    assert "largest error 3 absolute, 0.5 relative" in text


@pytest.mark.parametrize(
    ("got", "want", "right"),
    [
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.nan, math.nan, False),
        (math.inf, 1.0, False),
        (1.0, math.inf, False),
        (math.inf, math.inf, True),
        (-math.inf, math.inf, False),
        (0.0, 0.0, True),
    ],
)
def test_nan_and_infinity(got, want, right):
    pair = torch.tensor([got]), torch.tensor([want], dtype=torch.float64)
    if right:
        assert_close(*pair, torch.float32)
    else:
        with pytest.raises(AssertionError, match="1 of 1 elements are wrong"):
            assert_close(*pair, torch.float32)


def test_integers_have_no_tolerance():
    want = torch.tensor([1.0, -7.0], dtype=torch.float64)
    assert_close(torch.tensor([1, -7], dtype=torch.int8), want, torch.int8, k=100)
    with pytest.raises(AssertionError, match="1 of 2"):
        assert_close(torch.tensor([1, -6], dtype=torch.int8), want, torch.int8, k=100)


@pytest.mark.parametrize("compare", [lambda a, b: assert_close(a, b, torch.float32), assert_bitwise_equal])
def test_shapes_are_compared(compare):
    with pytest.raises(AssertionError, match=r"shape \(1, 3\), expected \(3,\)"):
        compare(torch.zeros(1, 3), torch.zeros(3))


def test_bitwise():
    a = torch.tensor([0.0, 1.0, math.nan])
    assert_bitwise_equal(a, a.clone())
    assert_bitwise_equal(a[::2], a[::2].clone())
    for position, value in ((0, -0.0), (1, 1.0000001), (2, 0.0)):
        b = a.clone()
        b[position] = value
        with pytest.raises(AssertionError, match=rf"1 of 3 elements are wrong \(every bit .*first at \({position},\)"):
            assert_bitwise_equal(b, a)
    with pytest.raises(AssertionError, match=r"dtype torch.float64, expected torch.float32"):
        assert_bitwise_equal(a.double(), a)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int64], ids=str)
def test_bitwise_of_every_dtype(dtype):
    a = random_tensor((4, 6), dtype, seed=3, rank=0, integers=True)
    assert_bitwise_equal(a, a.clone())
    with pytest.raises(AssertionError, match="are wrong"):
        assert_bitwise_equal(a, a.view(torch.int8).flip(1).view(dtype))
