"""All-gather of tiles along either dimension: shards land in their place and nowhere else."""

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris.testing import assert_bitwise_equal, random_tensor


@triton.jit
def all_gather_kernel(
    context, shard, dst, m, n, M, N, stride_m, stride_n, rank: tl.constexpr, world: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, FUNCTION: tl.constexpr,
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, rank, world)
    own = iris.make_tensor_view(shard, m, n, n, 1)
    dst_view = iris.make_tensor_view(dst, M, N, stride_m, stride_n)
    tiles_n = tl.cdiv(n, BLOCK_N)
    for number in range(tl.program_id(0), own.number_of_tiles(BLOCK_M, BLOCK_N), tl.num_programs(0)):
        place = iris.TileView(number // tiles_n, number % tiles_n, BLOCK_M, BLOCK_N)
        ptrs, mask = own.tile_ptr(place)
        # What hangs over the shard is 1: it must not reach the next one.
        tile = iris.Tile(place.pid_m, place.pid_n, BLOCK_M, BLOCK_N, tl.load(ptrs, mask=mask, other=1.0))
        if FUNCTION:
            iris.x.all_gather(tile, dst_view, DIM, ctx)
        else:
            ctx.all_gather(tile, dst_view, DIM)


def empty(ctx, m, n, dtype, column_major):
    """An (m, n) tensor on the heap with a row and a column more than needed, full of 100."""
    whole = ctx.zeros(*((n + 1, m + 1) if column_major else (m + 1, n + 1)), dtype=dtype)
    whole = whole.t() if column_major else whole
    whole.copy_(torch.full(whole.shape, 100.0).to(dtype))
    return whole


def body(ctx, dim, cases):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    for number, (dtype, (m, n), (block_m, block_n), calls) in enumerate(cases):
        dst = empty(ctx, m, n, dtype, number % 2 == 1)
        for call in range(calls):
            want = random_tensor((m, n), dtype, seed=call, rank=0)
            extents = [iris.x.shard_extent((m, n)[dim], r, world) for r in range(world)]
            assert sum(extents) == (m, n)[dim]
            shard = want.float().split(extents, dim)[rank].to(dtype).contiguous().to(ctx.get_device())
            ctx.barrier()
            all_gather_kernel[(2,)](
                ctx.get_device_context(), shard, dst, *shard.shape, m, n, *dst.stride(), rank, world, block_m, block_n,
                dim, call == 1,
            )  # fmt: skip
            ctx.barrier()
            assert_bitwise_equal(dst[:m, :n].cpu(), want)
            around = torch.cat([dst[m].float(), dst[:, n].float()])
            assert around.unique().tolist() == [torch.tensor(100.0).to(dtype).float().item()]
            ctx.barrier()


CASES = [
    (torch.bfloat16, (46, 37), (32, 16), 2),  # the last shards are shorter
    (torch.float32, (12, 12), (8, 8), 1),  # shards of the same length
    (torch.int8, (33, 16), (8, 16), 1),
    (torch.float8_e5m2, (5, 17), (4, 16), 1),  # of four and five ranks one has nothing
    (torch.float8_e4m3fn, (5, 17), (4, 16), 1),
    (torch.int32, (1, 1), (4, 4), 1),  # one has all
    (torch.float16, (8, 16), (4, 8), 1),
]


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_land_in_their_place(ranks, world, dim):
    ranks(world).run(body, dim, CASES)


@pytest.mark.parametrize("world", [5, 8])
def test_many_shards(ranks, world):
    ranks(world).run(body, 1, CASES[:2])


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
def test_large_shards(ranks, world, dim):
    large = [(torch.float16, (1024, 256), (128, 128), 2), (torch.float32, (512, 300), (256, 256), 1)]
    ranks(world).run(body, dim, large, context=1 << 26)


def test_extents_of_shards():
    """As ``torch.chunk`` cuts."""
    for extent in range(1, 40):
        for world in range(1, 9):
            extents = [iris.x.shard_extent(extent, rank, world) for rank in range(world)]
            assert [e for e in extents if e] == [len(c) for c in torch.arange(extent).chunk(world)]
