"""All-to-all of tiles: columns change places with ranks, also where a tile holds columns of several ranks."""

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris.errors import ArgumentError
from iris.testing import assert_bitwise_equal, random_tensor


@triton.jit
def all_to_all_kernel(
    context, src, dst, M, N, N_src, stride_m, stride_n, rank: tl.constexpr, world: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, N_PER_RANK: tl.constexpr, FUNCTION: tl.constexpr,
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, rank, world)
    src_view = iris.make_tensor_view(src, M, N_src, N_src, 1)
    dst_view = iris.make_tensor_view(dst, M, N, stride_m, stride_n)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for number in range(tl.program_id(0), dst_view.number_of_tiles(BLOCK_M, BLOCK_N), tl.num_programs(0)):
        place = iris.TileView(number // tiles_n, number % tiles_n, BLOCK_M, BLOCK_N)
        if FUNCTION:
            iris.x.all_to_all(place, src_view, dst_view, N_PER_RANK, ctx)
        else:
            ctx.all_to_all(place, src_view, dst_view, N_PER_RANK)


def body(ctx, cases):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    for number, (dtype, m, per_rank, (block_m, block_n), calls) in enumerate(cases):
        n = per_rank * world
        src = ctx.zeros(m, n, dtype=dtype)
        for call in range(calls):
            inputs = [random_tensor((m, n), dtype, seed=call, rank=r) for r in range(world)]
            src.copy_(inputs[rank])
            # Padded, or column by column; the padding must stay.
            whole = torch.full((m + 1, n + 1), 100.0).to(dtype).to(ctx.get_device())
            whole = whole if number % 2 == 0 else whole.t().contiguous().t()
            ctx.barrier()
            all_to_all_kernel[(2,)](
                ctx.get_device_context(), src, whole, m, n, n, *whole.stride(), rank, world, block_m, block_n,
                per_rank, call == 1,
            )  # fmt: skip
            ctx.barrier()
            mine = slice(rank * per_rank, (rank + 1) * per_rank)
            want = torch.cat([value.float()[:, mine] for value in inputs], dim=1).to(dtype)
            assert_bitwise_equal(whole[:m, :n].cpu(), want)
            around = torch.cat([whole[m].float(), whole[:, n].float()])
            assert around.unique().tolist() == [torch.tensor(100.0).to(dtype).float().item()]


CASES = [
    (torch.float32, 19, 13, (16, 16), 2),  # every tile reaches over two ranks
    (torch.bfloat16, 5, 3, (8, 32), 1),  # one tile holds the columns of all
    (torch.int8, 9, 32, (8, 16), 1),  # tiles end where ranks do
    (torch.float8_e5m2, 4, 1, (4, 4), 1),
    (torch.float16, 3, 50, (4, 16), 1),
]


def test_columns_change_places_with_ranks(ranks, world):
    ranks(world).run(body, CASES)


@pytest.mark.parametrize("world", [5, 8])
def test_many_ranks(ranks, world):
    ranks(world).run(body, CASES[:2])


@pytest.mark.slow
def test_large_matrices(ranks, world):
    ranks(world).run(body, [(torch.float16, 512, 200, (128, 128), 2)], context=1 << 26)


def test_columns_that_cannot_be_dealt_out():
    assert [iris.x.columns_per_rank(12, world) for world in (1, 2, 3, 4)] == [12, 6, 4, 3]
    with pytest.raises(ArgumentError, match=r"10 columns cannot be dealt out to 4 ranks.*such as 12"):
        iris.x.columns_per_rank(10, 4)
