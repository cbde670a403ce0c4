"""Tiles of other ranks as blocks: every dtype, edges read as 0, and waits for tiles that are published meanwhile."""

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris.testing import assert_bitwise_equal, random_tensor

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.int32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@triton.jit
def gather_kernel(
    context, src, out, M, N, stride_m, stride_n, rank: tl.constexpr, world: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """Row r of ``out``: whole blocks of rank r's tiles, one after another."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    view = iris.make_tensor_view(src, M, N, stride_m, stride_n)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = view.number_of_tiles(BLOCK_M, BLOCK_N)
    offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        place = iris.TileView(tile // tiles_n, tile % tiles_n, BLOCK_M, BLOCK_N)
        for source in tl.static_range(world):
            if HINT:
                block = iris.x.gather(place, view, source, ctx, hint=(1, 1))
            else:
                block = ctx.gather(place, view, source)
            tl.store(out + (source * tiles + tile) * BLOCK_M * BLOCK_N + offs, block)


def blocks(matrix, block_m, block_n):
    """The tiles of a matrix, filled up with zeros."""
    m, n = matrix.shape
    tiles_m, tiles_n = -(-m // block_m), -(-n // block_n)
    wide = torch.zeros(tiles_m * block_m, tiles_n * block_n, dtype=matrix.dtype)
    wide[:m, :n] = matrix
    return wide.view(tiles_m, block_m, tiles_n, block_n).transpose(1, 2).reshape(-1, block_m, block_n)


def body(ctx, cases):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    for number, (dtype, (m, n), (block_m, block_n), hint) in enumerate(cases):
        # With an element before it, so it is not aligned.
        src = ctx.zeros(m * n + 1, dtype=dtype)[1:].view(m, n)
        src.copy_(random_tensor((m, n), dtype, seed=number, rank=rank))
        tiles = iris.x.number_of_tiles(m, n, block_m, block_n)
        out = torch.full((world, tiles, block_m, block_n), 7, dtype=torch.float32).to(dtype).to(ctx.get_device())
        ctx.barrier()
        gather_kernel[(3,)](
            ctx.get_device_context(), src, out, m, n, *src.stride(), rank, world, block_m, block_n, hint
        )
        ctx.barrier()
        for source in range(world):
            want = blocks(random_tensor((m, n), dtype, seed=number, rank=source), block_m, block_n)
            assert_bitwise_equal(out[source].cpu(), want)


def test_blocks_of_every_rank(ranks, world):
    small = [(dtype, (5, 9), (8, 8), False) for dtype in DTYPES]
    ranks(world).run(
        body, [(torch.bfloat16, (37, 45), (32, 32), False), (torch.float32, (3, 40), (4, 64), True), *small]
    )


@pytest.mark.parametrize("world", [5, 8])
def test_blocks_of_many_ranks(ranks, world):
    ranks(world).run(body, [(torch.float16, (20, 33), (16, 16), False)])


@triton.jit
def published_kernel(context, data, src, out, locks, N, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    """Publishes tiles back to front and adds up those of all ranks as they come, without a barrier in between."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    own = iris.make_tensor_view(data, 1, N, N, 1)
    view = iris.make_tensor_view(src, 1, N, N, 1)
    result = iris.make_tensor_view(out, 1, N, N, 1)
    tiles = own.number_of_tiles(1, BLOCK)
    for step in range(tiles):
        place = iris.TileView(0, tiles - 1 - step, 1, BLOCK)
        ptrs, mask = own.tile_ptr(place)
        ctx.publish_tile(iris.Tile(0, place.pid_n, 1, BLOCK, tl.load(ptrs, mask=mask)), view, locks, 7)
    for pid_n in range(tiles):
        place = iris.TileView(0, pid_n, 1, BLOCK)
        total = tl.zeros((1, BLOCK), tl.int32)
        arrived = 1
        for source in range(world):
            arrived &= ctx.wait_tile(place, view, locks, source, 7)
            total += ctx.gather(place, view, source)
        ptrs, mask = result.tile_ptr(place)
        tl.store(ptrs, total * arrived, mask=mask)


def body_published(ctx):
    rank, world, n = ctx.get_rank(), ctx.get_num_ranks(), 70
    src, locks = ctx.full((n,), -1, dtype=torch.int32), ctx.full((5,), 6, dtype=torch.int32)
    out = torch.full((n,), -1, dtype=torch.int32, device=ctx.get_device())
    inputs = [random_tensor((n,), torch.int32, seed=5, rank=r) for r in range(world)]
    ctx.barrier()
    published_kernel[(1,)](
        ctx.get_device_context(), inputs[rank].to(ctx.get_device()), src, out, locks, n, rank, world, BLOCK=16
    )
    ctx.barrier()
    assert torch.equal(out.cpu(), torch.stack(inputs).sum(0).to(torch.int32))


def test_tiles_are_gathered_as_they_are_published(ranks, world):
    ranks(world).run(body_published)
