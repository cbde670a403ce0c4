"""Who does which tile, and when: every function of the schedule is a permutation or a partition, whatever the sizes."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from iris.x import schedule
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


@triton.jit
def staged_kernel(rows, columns, tiles_m, tiles_n, STAGE_M: tl.constexpr, GROUP_M: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    inside = offs < tiles_m * tiles_n
    row, column = schedule.staged_tile(tl.where(inside, offs, 0), tiles_m, tiles_n, STAGE_M, GROUP_M)
    tl.store(rows + offs, row, mask=inside)
    tl.store(columns + offs, column, mask=inside)


@settings(deadline=None)
@given(sizes=sizes, stage=st.sampled_from([1, 2, 3, 5, 8, 12, 1000]), group=st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_stages_end_before_the_next_begins(device, sizes, stage, group):
    """Groups are clipped at the end of their stage, so stages hold each of their tiles once, for any group."""
    tiles_m, tiles_n = sizes
    count = tiles_m * tiles_n
    rows, columns = (torch.full((count,), -1, dtype=torch.int32, device=device) for _ in range(2))
    staged_kernel[(1,)](rows, columns, *sizes, stage, group, BLOCK=triton.next_power_of_2(count))
    want = [
        (first + row, column)
        for first in range(0, tiles_m, stage)
        for row, column in expected(min(stage, tiles_m - first), tiles_n, group)
    ]
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == want
    assert sorted(want) == [(row, column) for row in range(tiles_m) for column in range(tiles_n)]


@triton.jit
def chiplet_kernel(out, programs, CHIPLETS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out + offs, schedule.chiplet_program(offs, programs, CHIPLETS), mask=offs < programs)


@settings(deadline=None)
@given(programs=st.integers(1, 700), chiplets=st.integers(1, 40))
def test_programs_of_a_chiplet_are_neighbours(device, programs, chiplets):
    out = torch.full((programs,), -1, dtype=torch.int32, device=device)
    chiplet_kernel[(1,)](out, programs, chiplets, BLOCK=triton.next_power_of_2(programs))
    # Chiplet by chiplet, each with the programs that the hardware deals to it.
    order_of_chiplets = [p for chiplet in range(chiplets) for p in range(chiplet, programs, chiplets)]
    assert [order_of_chiplets.index(p) for p in range(programs)] == out.tolist()


@triton.jit
def rotation_kernel(ranks, peers, first, world, BLOCK: tl.constexpr):
    """Row r: the ranks in the order of rank r, and its peers from step ``first`` on."""
    steps = tl.arange(0, BLOCK)
    for rank in range(world):
        tl.store(ranks + rank * world + steps, schedule.rotated_rank(rank, steps, world), mask=steps < world)
        peer = schedule.peer_rank(rank, first + steps, world)
        tl.store(peers + rank * world + steps, peer, mask=steps < world - 1)


@settings(deadline=None, max_examples=50)
@given(world=st.integers(1, 20), first=st.integers(0, 10_000))
def test_ranks_take_turns(device, world, first):
    ranks, peers = (torch.full((world, world), -1, dtype=torch.int32, device=device) for _ in range(2))
    rotation_kernel[(1,)](ranks, peers, first, world, BLOCK=32)
    everyone = list(range(world))
    ranks, peers = ranks.tolist(), [row[: world - 1] for row in peers.tolist()]
    for rank in everyone:
        assert ranks[rank][0] == rank
        assert sorted(ranks[rank]) == everyone
        assert sorted(peers[rank]) == [r for r in everyone if r != rank]
    for step in everyone:  # nobody is everybody's at once
        assert sorted(row[step] for row in ranks) == everyone
    for step in range(world - 1):
        assert sorted(row[step] for row in peers) == everyone


@triton.jit
def alone_kernel(out):
    tl.store(out, schedule.peer_rank(0, 5, 1))


def test_a_rank_alone_has_itself(device):
    out = torch.full((1,), -1, dtype=torch.int32, device=device)
    alone_kernel[(1,)](out)
    assert out.item() == 0


@triton.jit
def shares_kernel(firsts, counts, owners, tiles, world, BLOCK: tl.constexpr):
    """Rows of ``firsts`` and ``counts``: strided, contiguous, balanced; of ``owners``: strided, contiguous."""
    rank = tl.arange(0, BLOCK)
    there = rank < world
    tl.store(firsts + rank, schedule.strided_tile(0, rank, world), mask=there)
    tl.store(firsts + BLOCK + rank, schedule.contiguous_first(tiles, rank, world), mask=there)
    tl.store(firsts + 2 * BLOCK + rank, schedule.balanced_first(tiles, rank, world), mask=there)
    tl.store(counts + rank, schedule.strided_count(tiles, rank, world), mask=there)
    tl.store(counts + BLOCK + rank, schedule.contiguous_count(tiles, rank, world), mask=there)
    tl.store(counts + 2 * BLOCK + rank, schedule.balanced_count(tiles, rank, world), mask=there)
    tl.store(counts + 3 * BLOCK, schedule.strided_rounds(tiles, world))
    tile = tl.arange(0, 1024)
    tl.store(owners + tile, schedule.strided_owner(tile, world), mask=tile < tiles)
    tl.store(owners + tiles + tile, schedule.contiguous_owner(tile, tiles, world), mask=tile < tiles)


@settings(deadline=None)
@given(tiles=st.integers(1, 1000), world=st.integers(1, 16))
def test_shares_are_a_partition(device, tiles, world):
    firsts, counts = (torch.zeros(4, 16, dtype=torch.int32, device=device) for _ in range(2))
    owners = torch.full((2, tiles), -1, dtype=torch.int32, device=device)
    shares_kernel[(1,)](firsts, counts, owners, tiles, world, BLOCK=16)
    firsts, counts, owners = firsts.tolist(), counts.tolist(), owners.tolist()
    strided = [list(range(firsts[0][r], firsts[0][r] + counts[0][r] * world, world)) for r in range(world)]
    contiguous = [list(range(firsts[1][r], firsts[1][r] + counts[1][r])) for r in range(world)]
    balanced = [list(range(firsts[2][r], firsts[2][r] + counts[2][r])) for r in range(world)]
    for shares in (strided, contiguous, balanced):
        assert sorted(tile for share in shares for tile in share) == list(range(tiles))
    assert owners[0] == [next(r for r in range(world) if tile in strided[r]) for tile in range(tiles)]
    assert owners[1] == [next(r for r in range(world) if tile in contiguous[r]) for tile in range(tiles)]
    assert {len(share) for share in contiguous[:-1]} <= {tiles // world}
    assert max(map(len, balanced)) - min(map(len, balanced)) <= 1
    # Everyone is through after that many rounds, and somebody has a tile in the last.
    assert counts[3][0] == max(map(len, strided))


@triton.jit
def persistent_kernel(
    visits, tiles_m, tiles_n, rank, world, CHIPLETS: tl.constexpr, STAGE_M: tl.constexpr, GROUP_M: tl.constexpr
):
    """The loops of the module's docstring, composed: a share of the tiles, by programs in the order of chiplets."""
    tiles = tiles_m * tiles_n
    first = schedule.chiplet_program(tl.program_id(0), tl.num_programs(0), CHIPLETS)
    for i in range(first, schedule.strided_count(tiles, rank, world), tl.num_programs(0)):
        tile = schedule.strided_tile(i, rank, world)
        row, column = schedule.staged_tile(tile, tiles_m, tiles_n, STAGE_M, GROUP_M)
        tl.atomic_add(visits + schedule.tile_number(row, column, tiles_n), 1)


@pytest.mark.parametrize(
    ("programs", "chiplets", "tiles_m", "tiles_n", "world", "stage", "group"),
    [
        (1, 1, 1, 1, 1, 1, 1),
        (5, 3, 7, 5, 3, 4, 3),
        (8, 4, 6, 7, 2, 2, 4),
        (7, 8, 1, 13, 5, 3, 2),
        (13, 6, 9, 1, 4, 8, 8),
    ],
)
def test_persistent_loops_of_all_ranks_visit_every_tile_once(
    device, programs, chiplets, tiles_m, tiles_n, world, stage, group
):
    visits = torch.zeros(tiles_m * tiles_n, dtype=torch.int32, device=device)
    for rank in range(world):
        persistent_kernel[(programs,)](visits, tiles_m, tiles_n, rank, world, chiplets, stage, group)
    assert visits.tolist() == [1] * (tiles_m * tiles_n)


def rows_of(kernel, columns, count, *args, device):
    """What a kernel stores for 0 to ``count - 1``: a tuple for each."""
    out = torch.full((columns, count), -1, dtype=torch.int32, device=device)
    kernel[(1,)](out, count, *args, BLOCK=triton.next_power_of_2(count))
    return list(zip(*out.tolist(), strict=True))


@triton.jit
def piece_kernel(out, count, tiles_m, groups, parts, STAGE_M: tl.constexpr, ALONG_K: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    inside = offs < count
    part, row, group = schedule.fetched_piece(tl.where(inside, offs, 0), tiles_m, groups, parts, STAGE_M, ALONG_K)
    tl.store(out + offs, part, mask=inside)
    tl.store(out + count + offs, row, mask=inside)
    tl.store(out + 2 * count + offs, group, mask=inside)
    flag = schedule.piece_flag(part, row, group, tiles_m, groups, parts, ALONG_K)
    tl.store(out + 3 * count + offs, flag, mask=inside)


few = st.integers(1, 9)


@settings(deadline=None)
@given(tiles_m=st.integers(1, 20), groups=few, parts=few, stage=st.sampled_from([1, 2, 3, 7, 20, 1000]))
@pytest.mark.parametrize("along_k", [True, False])
def test_every_piece_is_fetched_once_and_has_a_flag_of_its_own(device, tiles_m, groups, parts, stage, along_k):
    count = tiles_m * groups * parts
    pieces = rows_of(piece_kernel, 4, count, tiles_m, groups, parts, stage, along_k, device=device)
    everything = [(p, row, g) for p in range(parts) for row in range(tiles_m) for g in range(groups)]
    assert sorted(piece[:3] for piece in pieces) == sorted(everything)
    assert sorted(flag for *_, flag in pieces) == list(range(count)), "two pieces share a flag"
    # Stage after stage; within a stage all rows get a piece before any gets another one (of the same part along M).
    assert [row // stage for _, row, *_ in pieces] == sorted(row // stage for _, row, *_ in pieces)
    waits = {}
    for part, row, group, flag in pieces:
        waits.setdefault((row,) if along_k else (part, row), []).append((part, group, flag))
    for key, mine in waits.items():
        # What a tile needs one after the other comes in that order and has flags in a row, from its first one on.
        flags = [flag for *_, flag in mine]
        assert flags == list(range(flags[0], flags[0] + len(mine))), key
        assert [group for _, group, _ in mine] == sorted(group for _, group, _ in mine)
        if along_k:
            assert [part for part, *_ in mine] == [(key[0] + turn) % parts for turn in range(len(mine))]
    for item in range(0, count, parts):
        side_by_side = pieces[item : item + parts]
        if not along_k:
            assert {part for part, *_ in side_by_side} == set(range(parts)), "from different peers at a time"


@triton.jit
def block_kernel(out, count, blocks, parts, K_PER_FLAG: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    inside = offs < count
    turn, part, block = schedule.gathered_block(tl.where(inside, offs, 0), blocks, parts, K_PER_FLAG)
    tl.store(out + offs, turn, mask=inside)
    tl.store(out + count + offs, part, mask=inside)
    tl.store(out + 2 * count + offs, block, mask=inside)
    tl.store(out + 3 * count + offs, schedule.turn_start(turn, blocks, parts, K_PER_FLAG), mask=inside)
    tl.store(out + 4 * count + offs, schedule.turn_start(turn + 1, blocks, parts, K_PER_FLAG), mask=inside)


@settings(deadline=None)
@given(blocks=st.integers(1, 40), parts=few, k_per_flag=st.sampled_from([1, 2, 3, 5, 8, 40, 1 << 20]))
def test_blocks_go_by_turns(device, blocks, parts, k_per_flag):
    count = blocks * parts
    got = rows_of(block_kernel, 5, count, blocks, parts, k_per_flag, device=device)
    want, turn = [], 0
    for first in range(0, blocks, k_per_flag):
        for part in range(parts):
            want += [(turn, part, block) for block in range(first, min(first + k_per_flag, blocks))]
            turn += 1
    assert [row[:3] for row in got] == want
    # Where a turn begins, and where the next one does, is the inverse.
    for i, (number, _, _, start, following) in enumerate(got):
        assert start == next(j for j, row in enumerate(want) if row[0] == number)
        assert start <= i < following
        assert following == start + sum(row[0] == number for row in want)


@triton.jit
def beyond_kernel(out, count, turns, blocks, parts, K_PER_FLAG: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out + offs, schedule.turn_start(turns + offs, blocks, parts, K_PER_FLAG), mask=offs < count)


@settings(deadline=None, max_examples=30)
@given(blocks=st.integers(1, 40), parts=few, k_per_flag=st.sampled_from([1, 2, 3, 5, 8, 40]))
def test_turns_past_the_last_begin_at_the_end_or_later(device, blocks, parts, k_per_flag):
    """A program that has seen more flags than there are multiplies to the end and no further: it takes the minimum."""
    turns = -(-blocks // k_per_flag) * parts
    starts = rows_of(beyond_kernel, 1, 40, turns, blocks, parts, k_per_flag, device=device)
    assert starts[0] == (blocks * parts,)
    assert all(start >= blocks * parts for (start,) in starts)


@triton.jit
def shards_kernel(
    out, count, tiles_m, tiles_n, parts, STAGE_M: tl.constexpr, GROUP_M: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.arange(0, BLOCK)
    inside = offs < count
    shard, row, column = schedule.gathered_tile(tl.where(inside, offs, 0), tiles_m, tiles_n, parts, STAGE_M, GROUP_M)
    tl.store(out + offs, shard, mask=inside)
    tl.store(out + count + offs, row, mask=inside)
    tl.store(out + 2 * count + offs, column, mask=inside)


@settings(deadline=None)
@given(
    tiles_m=st.integers(1, 20), tiles_n=few, parts=few, stage=st.sampled_from([1, 2, 3, 7, 1000]),
    group=st.sampled_from([1, 2, 3, 8]),
)  # fmt: skip
def test_tiles_of_all_shards_follow_the_fetches(device, tiles_m, tiles_n, parts, stage, group):
    count = tiles_m * tiles_n * (1 + parts)
    tiles = rows_of(shards_kernel, 3, count, tiles_m, tiles_n, parts, stage, group, device=device)
    assert sorted(tiles) == [(s, m, n) for s in range(parts + 1) for m in range(tiles_m) for n in range(tiles_n)]
    own, later = tiles[: tiles_m * tiles_n], tiles[tiles_m * tiles_n :]
    assert {shard for shard, *_ in own} == {0}, "what needs no fetch comes first"
    # Stage by stage as the rows are fetched, and within a stage shard by shard.
    keys = [(row // stage, shard) for shard, row, _ in later]
    assert keys == sorted(keys)
    assert [row // stage for _, row, _ in own] == sorted(row // stage for _, row, _ in own)


@triton.jit
def pieces_of_tiles_kernel(out, count, whole, splits, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    inside = offs < count
    tile, piece, pieces = schedule.divided_tile(tl.where(inside, offs, 0), whole, splits)
    tl.store(out + offs, tile, mask=inside)
    tl.store(out + count + offs, piece, mask=inside)
    tl.store(out + 2 * count + offs, pieces, mask=inside)


@settings(deadline=None)
@given(whole=st.integers(0, 40), divided=st.integers(0, 20), splits=st.integers(1, 9))
def test_pieces_of_the_last_tiles(device, whole, divided, splits):
    count = whole + divided * splits
    if count == 0:
        return
    got = rows_of(pieces_of_tiles_kernel, 3, count, whole, splits, device=device)
    want = [(tile, 0, 1) for tile in range(whole)]
    want += [(whole + tile, piece, splits) for tile in range(divided) for piece in range(splits)]
    assert got == want
