"""broadcast and broadcast_tensor: every root, both algorithms, shapes, dtypes, layouts, inputs only the root has."""

import pytest
import torch

from collective_data import LAYOUTS, MOVED, Buffer, movable, on_new_context
from iris.ccl import Config
from iris.errors import ArgumentError, NotSymmetricError, RankMismatch

VARIANTS = ("direct", "scatter_allgather", "torch", None)
OWN = ("direct", "scatter_allgather")


def config(variant, **fields):
    return Config(broadcast_variant=variant, **fields)


def spread(ctx, shape, dtype, variant, src=0, seed=0, layout="plain", **how):
    values = movable(shape, dtype, seed=seed, rank=src)
    tensor = Buffer(ctx, shape, dtype, layout)
    if ctx.get_rank() == src:
        tensor.set(values)
    ctx.ccl.broadcast(tensor.tensor, src, config=config(variant, **how))
    ctx.synchronize()
    tensor.check(values)


def body_shapes(ctx, variant):
    """Shards of scatter_allgather are multiples of 128 elements: short, empty and whole ones occur."""
    world = ctx.get_num_ranks()
    for seed, shape in enumerate(((), (3, 5), (0, 2), (131,), (world * 128 + 7,))):
        how = {"comm_sms": 1} if seed % 2 else {"block_size_m": 1}
        spread(ctx, shape, torch.bfloat16, variant, seed % world, seed, **how)


@pytest.mark.parametrize(
    ("world", "variant"),
    [(1, None), (2, "torch"), (2, None), *((world, variant) for world in (3, 4) for variant in OWN)],
)
def test_shapes_and_roots(ranks, world, variant):
    ranks(world).run(body_shapes, variant)


def body_dtypes(ctx, variant):
    for seed, dtype in enumerate(MOVED):
        spread(ctx, (5, 3), dtype, variant, seed % ctx.get_num_ranks(), seed, comm_sms=1)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v])
@pytest.mark.parametrize("world", [2])
def test_dtypes(ranks, world, variant):
    ranks(world).run(body_dtypes, variant)


def body_layouts(ctx, variant):
    for seed, layout in enumerate(LAYOUTS):
        spread(ctx, (23, 13), torch.int32, variant, 1, seed, layout, comm_sms=2, block_size_m=1)


@pytest.mark.parametrize("variant", OWN)
@pytest.mark.parametrize("world", [3])
def test_layouts(ranks, world, variant):
    ranks(world).run(body_layouts, variant)


def body_tensor(ctx, variant):
    """The input may lie anywhere, is left as it is, and is not looked at on other ranks."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    src = world - 1
    values = movable((7, 30), torch.float32, seed=3, rank=src)
    source = Buffer(ctx, (7, 30), torch.float32, "plain" if variant == "torch" else "columns", heap=False).set(values)
    for elsewhere in (None, "not a tensor", torch.zeros(3, device=ctx.get_device())):
        out = Buffer(ctx, (7, 30), torch.float32)
        given = source.tensor if rank == src else elsewhere
        plan = ctx.ccl.broadcast_tensor(out.tensor, given, src, config=config(variant)).plan
        ctx.synchronize()
        out.check(values)
        source.check(values)
    return plan.algorithm


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("world", [1, 3])
def test_broadcast_tensor(ranks, world, variant):
    (algorithm,) = set(ranks(world).run(body_tensor, variant))
    assert algorithm == ("copy" if world == 1 else variant or "direct")


def body_refusals(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    x = ctx.zeros(6, dtype=torch.float32)
    for src in (world, -1, "0", True, None):
        with pytest.raises(ArgumentError, match=r"src must be a rank of the group \[0, 1\]"):
            ctx.ccl.broadcast(x, src)
    with pytest.raises(NotSymmetricError, match="output_tensor is written"):
        ctx.ccl.broadcast(torch.zeros(6, device=ctx.get_device()))
    # Wrong on the root alone, which the other rank learns.
    for given, message in (
        (None, "input_tensor must be a tensor, got NoneType"),
        (torch.zeros(5, device=ctx.get_device()), "output's shape"),
        (torch.zeros(6, dtype=torch.int32, device=ctx.get_device()), "one dtype"),
    ):
        error = ArgumentError if rank == 0 else RankMismatch
        with pytest.raises(error, match=message):
            ctx.ccl.broadcast_tensor(x, given)
    with pytest.raises(RankMismatch, match="src is 0 on rank 0, 1 on rank 1"):
        ctx.ccl.broadcast(x, rank)


@pytest.mark.parametrize("world", [2])
def test_refusals(ranks, world):
    ranks(world).run(on_new_context, body_refusals, context=None)


def body_many_calls(ctx, calls):
    """Roots and algorithms take turns; nothing on the host waits."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    x = ctx.zeros(40, dtype=torch.float32)
    results = []
    for call in range(calls):
        src = call % world
        x.fill_(1000.0 + call if rank == src else float("nan"))
        ctx.ccl.broadcast(x, src, config=config(OWN[call // 2 % 2], comm_sms=1))
        results.append(x.clone())
    ctx.synchronize()
    for call, got in enumerate(results):
        assert (got == 1000.0 + call).all(), call


@pytest.mark.parametrize("world", [3])
def test_many_calls_in_a_row(ranks, world):
    ranks(world).run(body_many_calls, 24)
