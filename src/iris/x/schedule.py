"""Index arithmetic of tiles: the order in which programs take them."""

import triton
import triton.language as tl


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of tile number ``tile`` in grouped order.

    Tiles are numbered through groups of ``GROUP_M`` rows of tiles, row fastest, so that programs with neighbouring
    numbers share columns of B and rows of A in the cache. The last group may have fewer rows. For ``tile`` in
    ``0..tiles_m * tiles_n - 1`` this is a permutation of all (row, column) pairs.

    Source: the grouped ordering of Triton's matrix multiplication tutorial.
    """
    per_group = GROUP_M * tiles_n
    group = tile // per_group
    first_m = group * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % per_group
    return first_m + within % rows, within // rows
