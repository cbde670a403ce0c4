"""The order of tiles: every tile once, in groups of rows, whatever the sizes."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from iris.x.schedule import grouped_tile

MOST = 4096


@triton.jit
def order_kernel(rows, columns, tiles_m, tiles_n, GROUP_M: tl.constexpr, BLOCK: tl.constexpr):
    """All tiles at once: the function takes blocks as it takes scalars."""
    offs = tl.arange(0, BLOCK)
    inside = offs < tiles_m * tiles_n
    row, column = grouped_tile(tl.where(inside, offs, 0), tiles_m, tiles_n, GROUP_M)
    tl.store(rows + offs, row, mask=inside)
    tl.store(columns + offs, column, mask=inside)


@triton.jit
def scalar_kernel(rows, columns, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """One tile a program, as kernels do."""
    row, column = grouped_tile(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    tl.store(rows + tl.program_id(0), row)
    tl.store(columns + tl.program_id(0), column)


@pytest.fixture(scope="module")
def device(pytestconfig):
    return "cuda" if pytestconfig.getoption("--runtime") == "gpu" else "cpu"


def order(tiles_m, tiles_n, group, device):
    count = tiles_m * tiles_n
    rows, columns = (torch.full((count,), -1, dtype=torch.int32, device=device) for _ in range(2))
    order_kernel[(1,)](rows, columns, tiles_m, tiles_n, GROUP_M=group, BLOCK=triton.next_power_of_2(count))
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def expected(tiles_m, tiles_n, group):
    """The same order from loops."""
    return [
        (row, column)
        for first in range(0, tiles_m, group)
        for column in range(tiles_n)
        for row in range(first, min(first + group, tiles_m))
    ]


sizes = st.tuples(st.integers(1, 200), st.integers(1, 200)).filter(lambda s: s[0] * s[1] <= MOST)


@settings(deadline=None)
@given(sizes=sizes, group=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 64, 1000]))
def test_every_tile_once_in_groups_of_rows(device, sizes, group):
    tiles = order(*sizes, group, device)
    assert sorted(tiles) == [(row, column) for row in range(sizes[0]) for column in range(sizes[1])]
    assert tiles == expected(*sizes, group)


@pytest.mark.parametrize(("tiles_m", "tiles_n", "group"), [(1, 1, 8), (5, 3, 2), (3, 5, 8), (7, 1, 4), (1, 7, 4)])
def test_scalars_and_blocks_agree(device, tiles_m, tiles_n, group):
    count = tiles_m * tiles_n
    rows, columns = (torch.full((count,), -1, dtype=torch.int32, device=device) for _ in range(2))
    scalar_kernel[(count,)](rows, columns, tiles_m, tiles_n, GROUP_M=group)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == order(tiles_m, tiles_n, group, device)


def test_neighbours_share_rows_and_columns(device):
    """What the order is for: 16 tiles in a row touch 4 rows and 4 columns, not 1 and 16."""
    tiles = order(8, 16, 4, device)
    for start in range(0, len(tiles), 16):
        touched = tiles[start : start + 16]
        assert (len({row for row, _ in touched}), len({column for _, column in touched})) == (4, 4)
