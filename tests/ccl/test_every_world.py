"""Every collective and every algorithm once, on 5 and on 8 ranks: what only shows with many peers."""

import pytest
import torch

from iris.ccl import Config

ALL_REDUCE = ("push", "one_shot", "two_shot", "ring", "atomic", "spinlock")


def given(rank, n, seed):
    """What a rank gives: whole numbers that depend on rank and place."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-9, 10, (n,), generator=generator).to(torch.float32) + 20 * rank


def body_every(ctx, n):
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()

    def every(count, seed):
        return [given(r, count, seed).to(device) for r in range(world)]

    def heap(values):
        tensor = ctx.empty(values.numel(), dtype=torch.float32)
        tensor.copy_(values)
        return tensor

    def fresh(count, on_heap=True):
        if on_heap:
            return ctx.full((count,), float("nan"), dtype=torch.float32)
        return torch.full((count,), float("nan"), device=device)

    x = every(n, 0)
    mine = heap(x[rank])
    for variant in ALL_REDUCE:
        out = fresh(n)
        ctx.ccl.all_reduce(out, mine, config=Config(all_reduce_variant=variant))
        assert torch.equal(out, sum(x)), variant
    for variant in ("persistent", "partitioned", "copy_engine"):
        out = fresh(world * n)
        ctx.ccl.all_gather(out, x[rank], config=Config(all_gather_variant=variant))
        assert torch.equal(out, torch.cat(x)), variant
    for variant in ("direct", "scatter_allgather"):
        out = fresh(n)
        ctx.ccl.broadcast_tensor(out, x[rank], src=world - 1, config=Config(broadcast_variant=variant))
        assert torch.equal(out, x[-1]), variant

    wide = every(world * n, 1)
    part = slice(rank * n, (rank + 1) * n)
    out = fresh(n, on_heap=False)
    ctx.ccl.reduce_scatter(out, heap(wide[rank]))
    assert torch.equal(out, sum(wide)[part])
    out = fresh(world * n)
    ctx.ccl.all_to_all(out, wide[rank], dim=0)
    assert torch.equal(out, torch.cat([w[part] for w in wide]))
    out = fresh(n)
    ctx.ccl.scatter(out, wide[rank], src=1)
    assert torch.equal(out, wide[1][part])
    out = fresh(world * n, on_heap=False)
    ctx.ccl.gather(out, mine, dst=2)
    assert rank != 2 or torch.equal(out, torch.cat(x))
    out = fresh(n, on_heap=False)
    ctx.ccl.reduce(out, mine, dst=3)
    assert rank != 3 or torch.equal(out, sum(x))
    out = fresh(n, on_heap=False)
    ctx.ccl.sendrecv(x[rank], out, dst=(rank + 1) % world, src=(rank - 1) % world)
    assert torch.equal(out, x[rank - 1])
    ctx.barrier()


@pytest.mark.parametrize("n", [7, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", [5, 8])
def test_every_collective(ranks, world, n):
    ranks(world).run(body_every, n)
