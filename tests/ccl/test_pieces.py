"""Where kernels find the elements of a tensor's pieces: as torch does, for any strides, cut and dimension."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iris.ccl._pieces import check_writable, integer_dtype, pieces
from iris.errors import ArgumentError


def addresses(layout, piece):
    """Offsets of a piece's elements in row-major order, by the arithmetic of ``elements`` in iris.ccl._elements."""
    columns, row, column = layout.strides
    for number in range(layout.count):
        if layout.flat:
            yield piece * layout.distance + number
        else:
            yield piece * layout.distance + (number // columns) * row + (number % columns) * column


def numbered(strides, shape, first=0):
    """A tensor whose elements hold their own offsets from the first."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    return torch.arange(-first, last + 1).as_strided(shape, strides, first)


@st.composite
def tensors(draw):
    """Tensors of one to four dimensions, strided by slices, permutations and expansion, and a cut."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    parts = draw(st.integers(1, 3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= parts
    base = [size * draw(st.integers(1, 2)) + draw(st.integers(0, 2)) for size in shape]
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), 1
    for place in reversed(order):
        strides[place] = step * draw(st.sampled_from([1, 1, 1, 2]))
        step *= (
            max(1, base[place] if draw(st.booleans()) else shape[place]) * 2
            if strides[place] > step
            else max(1, base[place] if draw(st.booleans()) else shape[place])
        )
    if draw(st.booleans()):
        strides[draw(st.integers(0, len(shape) - 1))] = 0
    return numbered(strides, shape), parts, dim


@settings(max_examples=400, deadline=None)
@given(tensors())
def test_elements_lie_where_torch_finds_them(case):
    tensor, parts, dim = case
    try:
        layout = pieces("x", tensor, parts, dim)
    except ArgumentError:
        # Only what no matrix describes: three dimensions that do not merge.
        assert len([size for size in tensor.shape if size > 1]) >= 3
        return
    cut = tensor.tensor_split(parts, dim)
    for number, piece in enumerate(cut):
        assert list(addresses(layout, number)) == piece.flatten().tolist()
    assert layout.count * parts == tensor.numel()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3), st.data())
def test_contiguous_pieces(shape, parts, data):
    """Cut along the first dimension they are flat; along any other they are matrices, and never refused."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] *= parts
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    layout = pieces("x", tensor, parts, dim)
    before = torch.Size(shape[:dim]).numel()
    if parts == 1 or before == 1:
        assert layout.flat
    assert [list(addresses(layout, p)) for p in range(parts)] == [
        piece.flatten().tolist() for piece in tensor.tensor_split(parts, dim)
    ]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.permutations(range(3)))
def test_permuted_tensors(a, b, c, order):
    """Two strides are enough for the orders that keep neighbours together."""
    tensor = torch.arange(a * b * c).view(a, b, c).permute(order)
    if tuple(order) in ((0, 1, 2), (1, 2, 0), (2, 0, 1)) or min(a, b, c) == 1:
        assert list(addresses(pieces("x", tensor), 0)) == tensor.flatten().tolist()
    else:
        with pytest.raises(ArgumentError, match=r"call \.contiguous\(\)"):
            pieces("x", tensor)


def test_large_tensors():
    """Sizes and distances past 2^31, which no memory is needed for."""
    tensor = torch.empty(6, 1 << 31, dtype=torch.int8, device="meta")
    layout = pieces("x", tensor, 3)
    assert (layout.count, layout.distance, layout.flat) == (1 << 32, 1 << 32, True)
    layout = pieces("x", tensor, 2, 1)
    assert (layout.count, layout.distance, layout.strides) == (6 << 30, 1 << 30, (1 << 30, 1 << 31, 1))


def test_refusals():
    with pytest.raises(
        ArgumentError, match=r"dimension 1 of x must be a multiple of the number of ranks, 3; got 4 \(shape"
    ):
        pieces("x", torch.empty(3, 4), 3, 1)
    with pytest.raises(ArgumentError, match="x is a scalar and cannot be cut into 2 parts"):
        pieces("x", torch.empty(()), 2)
    with pytest.raises(ArgumentError, match="x is written, so its elements must not share memory"):
        check_writable("x", torch.empty(1).expand(4))
    for writable in (torch.empty(4), torch.empty(1, 4).expand(1, 4), torch.empty(0, 1).expand(0, 4)):
        check_writable("x", writable)
    for dtype in (torch.bool, torch.bfloat16, torch.float64, torch.complex64):
        assert integer_dtype(dtype).itemsize == dtype.itemsize
        assert not integer_dtype(dtype).is_floating_point
    with pytest.raises(ArgumentError, match="view_as_real"):
        integer_dtype(torch.complex128)
