"""Who fetches, announces, awaits and multiplies what in all_gather_matmul's kernel with a staging buffer.

Whatever the sizes: each block of K of each peer is fetched once and multiplied once by each tile; each flag that a tile
waits for is set by one piece, the one that brings what the tile reads next; each tile of the output has one writer.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from iris.x.schedule import (
    divided_tile,
    fetched_piece,
    gathered_block,
    gathered_tile,
    piece_flag,
    staged_tile,
    turn_start,
)


@triton.jit
def pieces_kernel(
    out, count, tiles_m, groups, parts, STAGE_M: tl.constexpr, ALONG_K: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < count
    part, row, group = fetched_piece(tl.where(inside, offs, 0), tiles_m, groups, parts, STAGE_M, ALONG_K)
    flag = piece_flag(part, row, group, tiles_m, groups, parts, ALONG_K)
    tl.store(out + offs, part, mask=inside)
    tl.store(out + count + offs, row, mask=inside)
    tl.store(out + 2 * count + offs, group, mask=inside)
    tl.store(out + 3 * count + offs, flag, mask=inside)


@triton.jit
def flags_kernel(out, count, tiles_m, groups, parts, ALONG_K: tl.constexpr, BLOCK: tl.constexpr):
    """Where the flags begin that a tile of row ``row`` and part ``part`` waits for."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, part = offs % tiles_m, offs // tiles_m
    if ALONG_K:
        part = row % parts  # the one that the row begins with
    first = piece_flag(part, row, 0, tiles_m, groups, parts, ALONG_K)
    tl.store(out + offs, first, mask=offs < count)


@triton.jit
def blocks_kernel(out, count, blocks, parts, K_PER_FLAG: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < count
    turn, part, block = gathered_block(tl.where(inside, offs, 0), blocks, parts, K_PER_FLAG)
    tl.store(out + offs, turn, mask=inside)
    tl.store(out + count + offs, part, mask=inside)
    tl.store(out + 2 * count + offs, block, mask=inside)


@triton.jit
def turns_kernel(out, count, blocks, parts, K_PER_FLAG: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offs, turn_start(offs, blocks, parts, K_PER_FLAG), mask=offs < count)


@triton.jit
def staged_kernel(out, count, tiles_m, tiles_n, STAGE_M: tl.constexpr, GROUP_M: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < count
    row, column = staged_tile(tl.where(inside, offs, 0), tiles_m, tiles_n, STAGE_M, GROUP_M)
    tl.store(out + offs, row, mask=inside)
    tl.store(out + count + offs, column, mask=inside)


@triton.jit
def gathered_kernel(
    out, count, tiles_m, tiles_n, parts, STAGE_M: tl.constexpr, GROUP_M: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < count
    shard, row, column = gathered_tile(tl.where(inside, offs, 0), tiles_m, tiles_n, parts, STAGE_M, GROUP_M)
    tl.store(out + offs, shard, mask=inside)
    tl.store(out + count + offs, row, mask=inside)
    tl.store(out + 2 * count + offs, column, mask=inside)


@triton.jit
def divided_kernel(out, count, whole, splits, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < count
    tile, piece, pieces = divided_tile(tl.where(inside, offs, 0), whole, splits)
    tl.store(out + offs, tile, mask=inside)
    tl.store(out + count + offs, piece, mask=inside)
    tl.store(out + 2 * count + offs, pieces, mask=inside)


def table(kernel, columns, count, *args, **constants):
    """The functions' values for 0 to ``count - 1``: ``columns`` arrays."""
    out = torch.full((columns, max(count, 1)), -1, dtype=torch.int32)
    block = min(triton.next_power_of_2(max(count, 1)), 1 << 16)
    if count:
        kernel[(triton.cdiv(count, block),)](out, count, *args, **constants, BLOCK=block)
    return out.numpy()[:, :count]


class Case(NamedTuple):
    """A problem and a configuration, as the kernel's launch sees them."""

    M: int
    N: int
    K: int
    world: int
    block_m: int
    block_n: int
    block_k: int
    group: int
    k_per_flag: int
    stages: int
    gather_dim: int

    def sizes(self):
        """Rows and columns of tiles of one shard's product, blocks of K of a shard, groups, parts, rows of a stage."""
        rows = self.M if self.gather_dim == 1 else self.M // self.world
        depth = self.K // self.world if self.gather_dim == 1 else self.K
        tiles_m, tiles_n = triton.cdiv(rows, self.block_m), triton.cdiv(self.N, self.block_n)
        blocks = triton.cdiv(depth, self.block_k)
        stage = triton.cdiv(tiles_m, min(self.stages, tiles_m))
        return tiles_m, tiles_n, blocks, triton.cdiv(blocks, self.k_per_flag), self.world - 1, stage


def is_permutation(*columns_and_extents):
    """Whether the columns, each with its extent, name every combination exactly once."""
    number, count = np.int64(0), 1
    for column, extent in columns_and_extents:
        if ((column < 0) | (column >= extent)).any():
            return False
        number = number * extent + column.astype(np.int64)
        count *= extent
    return len(number) == count and (np.bincount(number, minlength=count) == 1).all()


def check_fetches(case):
    """Returns the number of the piece (its row of the table) that sets each flag."""
    tiles_m, _, _, groups, parts, stage = case.sizes()
    count = tiles_m * groups * parts
    along_k = case.gather_dim == 1
    part, row, group, flag = table(pieces_kernel, 4, count, tiles_m, groups, parts, STAGE_M=stage, ALONG_K=along_k)
    assert is_permutation((part, parts), (row, tiles_m), (group, groups)), "a piece is fetched twice, or never"
    assert is_permutation((flag, count)), "a flag has two setters, or none"
    assert (np.diff(row // stage) >= 0).all(), "a stage is fetched before the one before it is given out"
    setter = np.empty(count, np.int64)
    setter[flag] = np.arange(count)
    return part[setter], row[setter], group[setter]


def check_waits(case):
    """Each block of K comes once for each tile, after the tile's wait for the piece that has it."""
    tiles_m, _, blocks, groups, parts, _ = case.sizes()
    part_of, row_of, group_of = check_fetches(case)
    along_k = case.gather_dim == 1
    sequence = parts if along_k else 1
    turn, part, block = table(blocks_kernel, 3, blocks * sequence, blocks, sequence, K_PER_FLAG=case.k_per_flag)
    assert is_permutation((part, sequence), (block, blocks)), "a block of K is multiplied twice, or never"
    assert set(np.diff(turn)) <= {0, 1}
    turns = groups * sequence
    assert (turn[0], turn[-1]) == (0, turns - 1)
    (start,) = table(turns_kernel, 1, turns + 1, blocks, sequence, K_PER_FLAG=case.k_per_flag)
    assert (start[:-1] == np.searchsorted(turn, np.arange(turns))).all(), "a turn begins elsewhere"
    assert start[-1] == blocks * sequence
    # For each row of tiles (and, along M, each part that it can be of) the flags from its first one on.
    owners = 1 if along_k else parts
    (first,) = table(flags_kernel, 1, owners * tiles_m, tiles_m, groups, parts, ALONG_K=along_k)
    flag = first.reshape(owners, tiles_m, 1) + np.arange(turns)
    begins = block[start[:-1]]
    assert (row_of[flag] == np.arange(tiles_m)[None, :, None]).all()
    assert (group_of[flag] == begins // case.k_per_flag).all()
    if along_k:
        begins_with = np.arange(tiles_m)[:, None] % parts
        assert (part_of[flag] == (part[start[:-1]] + begins_with) % parts).all()
    else:
        assert (part_of[flag] == np.arange(parts)[:, None, None]).all()
    # All blocks of a turn are of the piece that was awaited.
    assert (block // case.k_per_flag == (begins // case.k_per_flag)[turn]).all()


def check_tiles(case):
    tiles_m, tiles_n, _, _, parts, stage = case.sizes()
    if case.gather_dim == 1 or parts == 0:
        count = tiles_m * tiles_n
        row, column = table(staged_kernel, 2, count, tiles_m, tiles_n, STAGE_M=stage, GROUP_M=case.group)
        assert is_permutation((row, tiles_m), (column, tiles_n)), "a tile has two writers, or none"
        assert (np.diff(row // stage) >= 0).all(), "a group reaches into the next stage"
        return
    count = tiles_m * tiles_n * (parts + 1)
    shard, row, column = table(gathered_kernel, 3, count, tiles_m, tiles_n, parts, STAGE_M=stage, GROUP_M=case.group)
    assert is_permutation((shard, parts + 1), (row, tiles_m), (column, tiles_n)), "a tile has two writers, or none"
    own = shard == 0
    assert own[: tiles_m * tiles_n].all(), "the own rows do not come first"
    assert (np.diff(row[own] // stage) >= 0).all()
    assert (np.diff(row[~own] // stage) >= 0).all(), "a tile of a later stage comes before one of an earlier stage"


def check(case):
    check_tiles(case)
    if case.world > 1:
        check_waits(case)


cases = st.builds(
    Case,
    M=st.integers(1, 700),
    N=st.integers(1, 300),
    K=st.integers(1, 900),
    world=st.integers(1, 9),
    block_m=st.sampled_from([16, 32, 128]),
    block_n=st.sampled_from([16, 64, 256]),
    block_k=st.sampled_from([16, 64]),
    group=st.sampled_from([1, 2, 3, 5, 8, 24]),
    k_per_flag=st.sampled_from([1, 2, 3, 5, 7, 8, 16, 64, 1000]),
    stages=st.sampled_from([1, 2, 3, 4, 7, 36, 1000]),
    gather_dim=st.sampled_from([0, 1]),
)


@settings(deadline=None, max_examples=60)
@given(case=cases)
def test_any_problem_and_configuration(case):
    # The sharded size is a multiple of the ranks.
    sharded = {"K": case.K * case.world} if case.gather_dim == 1 else {"M": case.M * case.world}
    check(case._replace(**sharded))


# Configurations that were tuned for upstream's kernel on MI300X and MI355X, of which several left flags unset there:
# M, N, K, ranks, tile (with 64 along K), group_size_m, k_per_flag, num_fetch_stages.
TUNED = [
    ("g5", 8192, 8192, 262144, 2, 128, 256, 8, 32, 8),
    ("g1", 16384, 16384, 131072, 2, 128, 256, 16, 16, 8),
    ("mixtral_gate", 4096, 14336, 4096, 2, 128, 256, 8, 8, 1),
    ("llama7b_gate", 4096, 11008, 4096, 2, 128, 256, 8, 8, 1),
    ("pow2_4k", 4096, 4096, 4096, 2, 128, 256, 8, 8, 1),
    ("llama13b_gate", 5120, 13824, 5120, 2, 128, 256, 8, 8, 1),
    ("llama7b_down", 4096, 4096, 11008, 2, 128, 256, 8, 8, 1),
    ("g6", 262144, 8192, 8192, 4, 256, 256, 24, 64, 4),
    ("g5", 8192, 8192, 262144, 4, 128, 256, 8, 32, 8),
    ("g2", 131072, 16384, 16384, 4, 256, 256, 24, 32, 64),
    ("g1", 16384, 16384, 131072, 4, 128, 256, 16, 16, 8),
    ("mixtral_gate", 4096, 14336, 4096, 4, 128, 256, 8, 8, 1),
    ("llama7b_gate", 4096, 11008, 4096, 4, 128, 256, 8, 8, 1),
    ("pow2_4k", 4096, 4096, 4096, 4, 128, 256, 8, 8, 1),
    ("llama13b_gate", 5120, 13824, 5120, 4, 128, 256, 8, 8, 1),
    ("llama7b_down", 4096, 4096, 11008, 4, 128, 256, 8, 8, 1),
    ("g6", 262144, 8192, 8192, 8, 256, 256, 24, 64, 4),
    ("g2", 131072, 16384, 16384, 8, 256, 256, 24, 32, 64),
    ("g14", 147456, 28672, 4096, 8, 256, 256, 24, 16, 36),
    ("g16", 229376, 28672, 4096, 8, 256, 256, 24, 16, 56),
    ("g15", 327680, 28672, 4096, 8, 256, 256, 24, 16, 32),
    ("g5", 8192, 8192, 262144, 8, 128, 256, 8, 32, 8),
    ("g1", 16384, 16384, 131072, 8, 128, 256, 16, 16, 8),
    ("g9", 196608, 18432, 16384, 8, 256, 256, 1, 32, 1),
    ("g8", 262144, 28672, 8192, 8, 256, 256, 1, 128, 1),
    ("mixtral_gate", 4096, 14336, 4096, 8, 128, 256, 1, 8, 1),
    ("llama7b_gate", 4096, 11008, 4096, 8, 128, 128, 1, 8, 1),
    ("pow2_4k", 4096, 4096, 4096, 8, 128, 256, 1, 8, 1),
    ("g6", 262144, 8192, 8192, 8, 256, 256, 2, 16, 1),
    ("a3", 131072, 4096, 4096, 8, 256, 256, 16, 8, 1),
    ("f4", 65536, 8192, 28672, 8, 256, 256, 8, 16, 1),
    ("l1", 32768, 8192, 8192, 8, 256, 256, 2, 16, 1),
    ("a2", 65536, 8192, 4096, 8, 256, 256, 2, 8, 2),
    ("f2", 32768, 4096, 14336, 8, 256, 256, 1, 16, 1),
    ("a1", 32768, 4096, 4096, 8, 256, 256, 4, 8, 1),
    ("f3", 65536, 28672, 8192, 8, 256, 256, 8, 16, 1),
    ("m2", 16384, 28672, 4096, 8, 256, 256, 2, 8, 1),
    ("f1", 32768, 14336, 4096, 8, 256, 256, 8, 16, 1),
    ("g6", 262144, 8192, 8192, 8, 256, 256, 24, 64, 128),
]


@pytest.mark.parametrize("gather_dim", [0, 1])
def test_tuned_configurations(gather_dim):
    for name, M, N, K, world, block_m, block_n, group, k_per_flag, stages in TUNED:
        case = Case(M, N, K, world, block_m, block_n, 64, group, k_per_flag, stages, gather_dim)
        try:
            check(case)
        except AssertionError as error:
            raise AssertionError(f"{name}, {case}: {error}") from error


@settings(deadline=None, max_examples=40)
@given(whole=st.integers(0, 50), divided=st.integers(0, 20), splits=st.integers(1, 9), blocks=st.integers(0, 40))
def test_divided_tiles(whole, divided, splits, blocks):
    """Tiles that several programs share: each piece of work once, and the pieces of a tile have each block once."""
    tile, piece, pieces = table(divided_kernel, 3, whole + divided * splits, whole, splits)
    assert (pieces == np.where(tile < whole, 1, splits)).all()
    works = sorted(zip(tile.tolist(), piece.tolist(), strict=True))
    assert works == [(t, p) for t in range(whole + divided) for p in range(1 if t < whole else splits)]
    # The last piece, which waits for the others, is given out after them.
    assert all((np.diff(piece[tile == t]) == 1).all() for t in range(whole, whole + divided))
    bounds = [blocks * p // splits for p in range(splits + 1)]
    assert bounds[0] == 0
    assert bounds[-1] == blocks
    assert bounds == sorted(bounds)
