"""Reduce-scatter of tiles: each tile is summed on its owner and nowhere else, and the owner can be asked for."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import iris
from iris.testing import assert_bitwise_equal, random_tensor


@triton.jit
def reduce_scatter_kernel(
    context, data, src, dst, locks, M, N, stride_m, stride_n, generation, rank: tl.constexpr, world: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FUNCTION: tl.constexpr,
):  # fmt: skip
    """Publishes all tiles, then reduces: the programs need not go through the tiles in one order."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    own = iris.make_tensor_view(data, M, N, N, 1)
    src_view = iris.make_tensor_view(src, M, N, N, 1)
    dst_view = iris.make_tensor_view(dst, M, N, stride_m, stride_n)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = own.number_of_tiles(BLOCK_M, BLOCK_N)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        place = iris.TileView(number // tiles_n, number % tiles_n, BLOCK_M, BLOCK_N)
        ptrs, mask = own.tile_ptr(place)
        tile = iris.Tile(place.pid_m, place.pid_n, BLOCK_M, BLOCK_N, tl.load(ptrs, mask=mask))
        ctx.publish_tile(tile, src_view, locks, generation)
    for turn in range(tl.program_id(0), tiles, tl.num_programs(0)):
        number = tiles - 1 - turn if rank % 2 == 1 else turn
        place = iris.TileView(number // tiles_n, number % tiles_n, BLOCK_M, BLOCK_N)
        if FUNCTION:
            iris.x.reduce_scatter(place, src_view, dst_view, locks, ctx, generation)
        else:
            ctx.reduce_scatter(place, src_view, dst_view, locks, generation)


def wide_sum(inputs):
    kind = torch.float32 if inputs[0].dtype.is_floating_point else torch.int32
    kind = inputs[0].dtype if inputs[0].dtype.itemsize == 8 else kind
    total = inputs[0].to(kind)
    for value in inputs[1:]:
        total = total + value.to(kind)
    return total.to(inputs[0].dtype)


def owners(m, n, block_m, block_n, world):
    """The rule in loops: so many tiles in a row for each rank, and the rest for the last."""
    tiles_n, tiles = -(-n // block_n), -(-m // block_m) * -(-n // block_n)
    of_tile = [rank for rank in range(world) for _ in range(tiles // world)]
    of_tile += [world - 1] * (tiles - len(of_tile))
    return torch.tensor([[of_tile[r // block_m * tiles_n + c // block_n] for c in range(n)] for r in range(m)])


def body(ctx, cases):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    for number, (dtype, (m, n), (block_m, block_n), calls) in enumerate(cases):
        src = ctx.zeros(m, n, dtype=dtype)
        locks = ctx.zeros(iris.x.number_of_tiles(m, n, block_m, block_n), dtype=torch.int32)
        mine = owners(m, n, block_m, block_n, world) == rank
        for call in range(calls):
            inputs = [random_tensor((m, n), dtype, seed=call, rank=r) for r in range(world)]
            dst = torch.full((n, m) if number % 2 else (m, n), 77).to(dtype).to(ctx.get_device())
            dst = dst.t() if number % 2 else dst
            ctx.barrier()  # peers have read the source of the last call
            reduce_scatter_kernel[(2,)](
                ctx.get_device_context(), inputs[rank].to(ctx.get_device()), src, dst, locks, m, n, *dst.stride(),
                call + 1, rank, world, block_m, block_n, call == 1,
            )  # fmt: skip
            ctx.synchronize()
            want = torch.where(mine, wide_sum(inputs), torch.tensor(77).to(dtype))
            assert_bitwise_equal(dst.cpu(), want)


CASES = [
    (torch.bfloat16, (37, 45), (16, 16), 2),  # 9 tiles: a rest for 2, 4 and 5 ranks
    (torch.int8, (3, 5), (8, 8), 1),  # one tile, for the last rank
]
OTHERS = [
    (torch.float32, (9, 33), (8, 32), 1),
    (torch.float64, (4, 20), (4, 16), 1),
    (torch.float16, (16, 4), (8, 4), 1),
]


def test_tiles_are_summed_on_their_owners(ranks, world):
    ranks(world).run(body, CASES)


@pytest.mark.parametrize("world", [3])
def test_every_dtype(ranks, world):
    ranks(world).run(body, OTHERS)


@pytest.mark.parametrize("world", [5, 8])
def test_many_ranks(ranks, world):
    ranks(world).run(body, CASES)


@pytest.mark.slow
def test_large_matrices(ranks, world):
    large = [(torch.float16, (1024, 256), (128, 128), 2), (torch.float32, (512, 300), (256, 256), 1)]
    ranks(world).run(body, large, context=1 << 26)


@pytest.mark.parametrize("world", [2])
def test_which_part_a_rank_owns(ranks, world):
    """(128, 64) in tiles of 32: four tiles each, so the rows from 64 on are rank 1's."""
    assert owners(128, 64, 32, 32, world)[:, 0].tolist() == [0] * 64 + [1] * 64
    ranks(world).run(body, [(torch.float32, (128, 64), (32, 32), 1)])


@triton.jit
def owner_kernel(out, M, N, world, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    inside = offs < M * N
    owner = iris.x.reduce_scatter_owner(offs // N, offs % N, M, N, BLOCK_M, BLOCK_N, world)
    tl.store(out + offs, owner, mask=inside)


@pytest.fixture(scope="module")
def device(pytestconfig):
    return "cuda" if pytestconfig.getoption("--runtime") == "gpu" else "cpu"


@settings(deadline=None, max_examples=40)
@given(
    m=st.integers(1, 30),
    n=st.integers(1, 30),
    block=st.tuples(st.sampled_from([1, 4, 16]), st.sampled_from([2, 8, 32])),
    world=st.integers(1, 9),
)
def test_owners_in_kernels_and_on_the_host(device, m, n, block, world):
    out = torch.full((m, n), -1, dtype=torch.int32, device=device)
    owner_kernel[(1,)](out, m, n, world, *block, SIZE=triton.next_power_of_2(m * n))
    want = owners(m, n, *block, world)
    assert torch.equal(out.cpu(), want.to(torch.int32))
    for row, column in ((0, 0), (m - 1, n - 1), (m // 2, n // 3)):
        assert iris.x.owner_of_element(row, column, m, n, *block, world) == want[row, column]
