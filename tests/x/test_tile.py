"""Tiles and views: which elements a tile has, where they lie, for any strides, edges and offsets."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import iris
from iris.errors import ArgumentError
from iris.testing import assert_bitwise_equal, random_tensor


@pytest.fixture(scope="module")
def device(pytestconfig):
    return "cuda" if pytestconfig.getoption("--runtime") == "gpu" else "cpu"


@triton.jit
def copy_kernel(
    src, dst, M, N, stride_sm, stride_sn, stride_dm, stride_dn, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """Copies a matrix tile by tile; ``HOW`` says by which functions."""
    source = iris.make_tensor_view(src, M, N, stride_sm, stride_sn)
    target = iris.make_tensor_view(dst, M, N, stride_dm, stride_dn)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for number in range(source.number_of_tiles(BLOCK_M, BLOCK_N)):
        pid_m = number // tiles_n
        pid_n = number % tiles_n
        view = iris.TileView(pid_m, pid_n, BLOCK_M, BLOCK_N)
        if HOW == "views":
            ptrs, mask = source.tile_ptr(view)
            # Row by row, so this leads to the same tile.
            pid_m = source.tile_id(view) // tiles_n
            pid_n = source.tile_id(view) % tiles_n
            tile = iris.Tile(pid_m, pid_n, BLOCK_M, BLOCK_N, tl.load(ptrs, mask=mask))
            out, inside = target.tile_ptr(tile)
            tl.store(out, tile.data, mask=inside)
        elif HOW == "functions":
            ptrs, mask = iris.x.tile_ptr(src, M, N, stride_sm, stride_sn, pid_m, pid_n, BLOCK_M, BLOCK_N)
            out, inside = iris.x.tile_ptr(dst, M, N, stride_dm, stride_dn, pid_m, pid_n, BLOCK_M, BLOCK_N)
            tl.store(out, tl.load(ptrs, mask=mask), mask=inside)
        elif HOW == "indices":
            rm, rn, mask = view.layout(M, N)
            ptrs, inside = source.tile_ptr_from_indices(rm, rn, BLOCK_M, BLOCK_N)
            rm, rn = view.indices()
            out, inside = target.tile_ptr_from_indices(rm, rn)
            tl.store(out, tl.load(ptrs, mask=mask), mask=inside)
        else:
            # Row and column 1 on of both, so the last row and column of tiles loses one more; the mask is the source's.
            ptrs, mask = source.offset_tile_ptr(view, 1, 1)
            out, inside = target.offset(1, 1).tile_ptr(view)
            tl.store(out, tl.load(ptrs, mask=mask), mask=inside)
            out, inside = target.offset_tile_ptr(view, src_mask=source.tile_ptr(view)[1])
            corner = (view.indices()[0] == 0)[:, None] | (view.indices()[1] == 0)[None, :]
            tl.store(out, tl.load(source.tile_ptr(view)[0], mask=mask & corner), mask=inside & corner & mask)


def strided(m, n, layout, dtype, device):
    """An (m, n) tensor full of NaN, with elements around it that must stay so, and the whole that it lies in."""
    if layout == "row major, padded":
        whole = torch.full((m + 2, n + 3), float("nan"), dtype=dtype, device=device)
        return whole[1 : m + 1, 2 : n + 2], whole
    if layout == "column major":
        whole = torch.full((n + 1, m), float("nan"), dtype=dtype, device=device)
        return whole[:n].t(), whole
    whole = torch.full((2 * m + 1, 3 * n + 1), float("nan"), dtype=dtype, device=device)  # steps, odd offset
    return whole[1::2, 1::3], whole


LAYOUTS = ("row major, padded", "column major", "steps")


@settings(deadline=None, max_examples=25)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    block_m=st.sampled_from([1, 8, 16, 32]),
    block_n=st.sampled_from([4, 16, 64]),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    how=st.sampled_from(["views", "functions", "indices"]),
)
def test_every_element_and_no_other(device, m, n, block_m, block_n, layouts, how):
    source, _ = strided(m, n, layouts[0], torch.float32, device)
    target, whole = strided(m, n, layouts[1], torch.float32, device)
    values = random_tensor((m, n), torch.float32, seed=m, rank=n)
    source.copy_(values)
    copy_kernel[(1,)](source, target, m, n, *source.stride(), *target.stride(), block_m, block_n, how)
    assert_bitwise_equal(target.cpu(), values)
    assert int(whole.isnan().sum()) == whole.numel() - m * n


@pytest.mark.parametrize(("m", "n"), [(37, 29), (3, 5)])
def test_offsets_end_where_the_matrix_ends(device, m, n):
    source, _ = strided(m, n, "steps", torch.float32, device)
    target, whole = strided(m, n, "row major, padded", torch.float32, device)
    values = random_tensor((m, n), torch.float32, seed=1, rank=0)
    source.copy_(values)
    copy_kernel[(1,)](source, target, m, n, *source.stride(), *target.stride(), 16, 8, "offsets")
    got = target.cpu()
    assert_bitwise_equal(got[1:, 1:], values[1:, 1:])
    # Of the first row and column, what the mask of the shifted source leaves.
    assert_bitwise_equal(got[0, : n - 1], values[0, : n - 1])
    assert got[0, n - 1].isnan()
    assert got[m - 1, 0].isnan()
    assert int(whole.isnan().sum()) == whole.numel() - m * n + 2


@triton.jit
def address_kernel(out, base, stride_m, stride_n, BLOCK: tl.constexpr):
    """Addresses, in elements from ``base``, of a tile far out, by every function that computes some."""
    view = iris.make_tensor_view(base, 1 << 30, 1 << 30, stride_m, stride_n)
    place = iris.TileView(1 << 14, 1 << 13, BLOCK, BLOCK)
    offs = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    first, mask = view.tile_ptr(place)
    second, _ = view.offset_tile_ptr(iris.TileView(0, 0, BLOCK, BLOCK), (1 << 14) * BLOCK, (1 << 13) * BLOCK)
    third, _ = view.offset((1 << 14) * BLOCK, (1 << 13) * BLOCK).tile_ptr(iris.TileView(0, 0, BLOCK, BLOCK))
    start = base.to(tl.int64)
    tl.store(out + offs, (first.to(tl.int64) - start) // 4, mask=mask)
    tl.store(out + BLOCK * BLOCK + offs, (second.to(tl.int64) - start) // 4)
    tl.store(out + 2 * BLOCK * BLOCK + offs, (third.to(tl.int64) - start) // 4)


@pytest.mark.parametrize(("stride_m", "stride_n"), [(8192, 1), (1, 1 << 20), (70_001, 3)])
def test_offsets_past_two_billion_elements(device, stride_m, stride_n):
    block = 16
    out = torch.zeros(3, block, block, dtype=torch.int64, device=device)
    base = torch.zeros(1, device=device)
    address_kernel[(1,)](out, base, stride_m, stride_n, block)
    rows = (1 << 14) * block + torch.arange(block)
    columns = (1 << 13) * block + torch.arange(block)
    want = rows[:, None] * stride_m + columns[None, :] * stride_n
    assert want.max() > 2**31
    for got in out.cpu():
        assert torch.equal(got, want)


@triton.jit
def constants_kernel(src, dst):
    """Every number known when the kernel is compiled."""
    source = iris.make_tensor_view(src, 3, 5, 5, 1)
    tile = iris.Tile(0, 0, 4, 8, tl.full((4, 8), 7, tl.int32))
    ptrs, mask = source.tile_ptr(tile)
    kept = tl.load(ptrs, mask=mask, other=0)
    out, inside = iris.make_tensor_view(dst, 3, 5, 1, 3).offset(1, 0).offset_tile_ptr(tile, 0, 1)
    tl.store(out, kept + tile.data, mask=inside & mask)


def test_numbers_may_be_constants(device):
    src = torch.arange(15, dtype=torch.int32, device=device).view(3, 5)
    dst = torch.full((5, 3), -1, dtype=torch.int32, device=device)
    constants_kernel[(1,)](src, dst)
    want = torch.full((3, 5), -1, dtype=torch.int32)
    want[1:, 1:] = src.cpu()[:2, :4] + 7
    assert torch.equal(dst.t().cpu(), want)


@triton.jit
def config_kernel(out, locks, CODE: tl.constexpr):
    config = iris.AllReduceConfig(CODE, locks)
    tl.store(out, config.variant_code)
    tl.store(config.locks_ptr, 3)


@pytest.mark.parametrize(
    ("code", "number"), [("atomic", 0), ("ring", 1), ("one_shot", 2), ("two_shot", 3), ("spinlock", 4), (3, 3), (0, 0)]
)
def test_codes_and_names_of_variants(device, code, number):
    out, locks = (torch.full((1,), -1, dtype=torch.int32, device=device) for _ in range(2))
    config_kernel[(1,)](out, locks, code)
    assert (out.item(), locks.item()) == (number, 3)


@pytest.mark.parametrize("code", ["fast", 5, -1])
def test_unknown_variants_are_refused(device, code):
    out = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(Exception, match=rf"variant_code is {code!r}; possible: 0 or 'atomic', 1 or 'ring'"):
        config_kernel[(1,)](out, out, code)


def test_locks_are_counted():
    assert iris.x.number_of_tiles(2048, 1472, 64, 64) == 736
    assert iris.x.number_of_tiles(1, 1, 64, 64) == 1
    iris.x.check_locks(torch.zeros(736, dtype=torch.int32), 2048, 1472, 64, 64)
    with pytest.raises(ArgumentError, match=r"locks has 736 entries, and 2048x1472 in tiles of 32x64 needs 1472"):
        iris.x.check_locks(torch.zeros(736, dtype=torch.int32), 2048, 1472, 32, 64)
    for wrong in (torch.zeros(8, dtype=torch.int64), torch.zeros(16, dtype=torch.int32)[::2]):
        with pytest.raises(ArgumentError, match="contiguous int32"):
            iris.x.check_locks(wrong, 8, 8, 8, 8)
