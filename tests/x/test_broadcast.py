"""Broadcast of tiles: from every rank in turn, to all ranks."""

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris.testing import assert_bitwise_equal, random_tensor


@triton.jit
def broadcast_kernel(
    context, data, dst, M, N, source, rank: tl.constexpr, world: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, FUNCTION: tl.constexpr,
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, rank, world)
    own = iris.make_tensor_view(data, M, N, N, 1)
    dst_view = iris.make_tensor_view(dst, M, N, N, 1)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for number in range(tl.program_id(0), own.number_of_tiles(BLOCK_M, BLOCK_N), tl.num_programs(0)):
        place = iris.TileView(number // tiles_n, number % tiles_n, BLOCK_M, BLOCK_N)
        ptrs, mask = own.tile_ptr(place)
        tile = iris.Tile(place.pid_m, place.pid_n, BLOCK_M, BLOCK_N, tl.load(ptrs, mask=mask))
        if FUNCTION:
            iris.x.broadcast(tile, dst_view, source, ctx)
        else:
            ctx.broadcast(tile, dst_view, source)


def body(ctx, cases):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    for dtype, (m, n), (block_m, block_n) in cases:
        # With one row more, which must stay.
        dst = ctx.zeros(m + 1, n, dtype=dtype)
        dst.copy_(torch.full((m + 1, n), 100.0).to(dtype))
        for source in range(world):
            data = random_tensor((m, n), dtype, seed=source, rank=rank).to(ctx.get_device())
            ctx.barrier()
            broadcast_kernel[(2,)](
                ctx.get_device_context(), data, dst, m, n, source, rank, world, block_m, block_n, source == 0
            )
            ctx.barrier()
            assert_bitwise_equal(dst[:m].cpu(), random_tensor((m, n), dtype, seed=source, rank=source))
            assert dst[m].float().unique().tolist() == [torch.tensor(100.0).to(dtype).float().item()]
            ctx.barrier()


CASES = [
    (torch.float32, (19, 37), (16, 16)),
    (torch.bfloat16, (3, 5), (8, 8)),
    (torch.int8, (9, 4), (8, 16)),
    (torch.float8_e4m3fn, (5, 17), (4, 16)),
]


def test_the_tiles_of_one_rank_reach_all(ranks, world):
    ranks(world).run(body, CASES)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 5, 8])
def test_large_tiles(ranks, world):
    ranks(world).run(body, [(torch.float16, (1024, 256), (128, 128))])
