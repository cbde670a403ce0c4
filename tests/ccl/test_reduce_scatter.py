"""reduce_scatter: torch's parts and the original API's tiles, exact and rounded once, layouts, aliases."""

import pytest
import torch

from collective_data import LAYOUTS, REDUCED, Buffer, assert_same, factors, rounded, steps
from iris.ccl import Config, ReduceOp
from iris.ccl.reduce_scatter import owner_of
from iris.errors import ArgumentError, NotSymmetricError, UnsupportedError
from iris.testing import reference


def config(variant, **fields):
    return Config(reduce_scatter_variant=variant, **fields)


def scattered(
    ctx,
    shape,
    dtype,
    variant,
    op="SUM",
    seed=0,
    make=steps,
    out_layout="plain",
    inp_layout="plain",
    out_heap=True,
    **how,
):
    """One checked reduce-scatter of an input of ``shape``."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inputs = [make(shape, dtype, seed=seed, rank=r) for r in range(world)]
    part = (shape[0] // world, *shape[1:])
    inp = Buffer(ctx, shape, dtype, inp_layout).set(inputs[rank])
    out = Buffer(ctx, part, dtype, out_layout, heap=out_heap)
    ctx.ccl.reduce_scatter(out.tensor, inp.tensor, ReduceOp[op], config=config(variant, **how))
    ctx.synchronize()
    if op == "AVG":
        total = reference.reduce_scatter(inputs)[rank].to(torch.float32)
        out.check((total / world).to(dtype))
    else:
        out.check(rounded(reference.reduce_scatter(inputs, op)[rank], dtype))
    inp.check(inputs[rank])


def body_shapes(ctx, variant):
    world = ctx.get_num_ranks()
    for seed, shape in enumerate(((world,), (3 * world, 11), (world, 2, 5), (0, 3), (20 * world, 7))):
        if not shape[0]:
            out, inp = ctx.zeros(0, 3, dtype=torch.float32), ctx.zeros(0, 3, dtype=torch.float32)
            ctx.ccl.reduce_scatter(out, inp, config=config(variant))
            continue
        how = {"comm_sms": 1} if seed % 2 else {"block_size_m": 1, "block_size_n": 16}
        scattered(ctx, shape, torch.bfloat16, variant, seed=seed, **how)


@pytest.mark.parametrize(("world", "variant"), [(1, None), (2, None), (3, "two_shot"), (4, "two_shot")])
def test_shapes(ranks, world, variant):
    ranks(world).run(body_shapes, variant)


def body_dtypes(ctx):
    for seed, dtype in enumerate(REDUCED):
        scattered(ctx, (ctx.get_num_ranks() * 2, 5), dtype, "two_shot", seed=seed, comm_sms=1)


@pytest.mark.parametrize("world", [3])
def test_dtypes(ranks, world):
    ranks(world).run(body_dtypes)


def body_ops(ctx):
    cases = [(op, dtype) for op in ("PRODUCT", "MIN", "MAX") for dtype in (torch.bfloat16, torch.int8)]
    for seed, (op, dtype) in enumerate([*cases, ("AVG", torch.float32), ("AVG", torch.float16)]):
        scattered(ctx, (ctx.get_num_ranks() * 3, 5), dtype, "two_shot", op, seed, factors, comm_sms=1)


@pytest.mark.parametrize("world", [3])
def test_operations(ranks, world):
    ranks(world).run(body_ops)


def body_layouts(ctx):
    for seed, layout in enumerate(LAYOUTS):
        other = LAYOUTS[(seed + 2) % len(LAYOUTS)]
        shape = (2 * ctx.get_num_ranks(), 7)
        scattered(
            ctx, shape, torch.float16, "two_shot", seed=seed, out_layout=layout, inp_layout=other,
            out_heap=seed % 2 == 0, comm_sms=2, block_size_m=1,
        )  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
def test_layouts(ranks, world):
    ranks(world).run(body_layouts)


def body_against_torch(ctx):
    """By the rows, with PyTorch's own variant: the same parts."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inputs = [steps((2 * world, 3), torch.float32, seed=1, rank=r) for r in range(world)]
    inp = ctx.zeros(2 * world, 3, dtype=torch.float32)
    inp.copy_(inputs[rank])
    out = torch.full((2, 3), float("nan"), device=ctx.get_device())
    plan = ctx.ccl.reduce_scatter(out, inp, config=config("torch")).plan
    ctx.synchronize()
    assert plan.algorithm == "torch"
    assert_same(out.cpu(), reference.reduce_scatter(inputs)[rank].to(torch.float32))


@pytest.mark.parametrize("world", [2])
def test_torch(ranks, world):
    ranks(world).run(body_against_torch)


def body_own_part(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inputs = [steps((3 * world, 5), torch.float32, seed=1, rank=r) for r in range(world)]
    both = Buffer(ctx, (3 * world, 5), torch.float32).set(inputs[rank])
    ctx.ccl.reduce_scatter(both.tensor[3 * rank : 3 * rank + 3], both.tensor)
    ctx.synchronize()
    want = inputs[rank].clone()
    want[3 * rank : 3 * rank + 3] = reference.reduce_scatter(inputs)[rank]
    both.check(want)


@pytest.mark.parametrize("world", [1, 3])
def test_the_own_part_in_place(ranks, world):
    ranks(world).run(body_own_part)


TILES = [
    {"block_size_m": 16, "block_size_n": 16},
    {"block_size_m": 16, "block_size_n": 32, "reduce_scatter_distribution": 0, "swizzle_size": 2},
    {"block_size_m": 32, "block_size_n": 16, "comm_sms": 2, "swizzle_size": 1, "reduce_scatter_distribution": 0},
]


def body_tiles(ctx, how, shape):
    """Each rank gets the elements that owner_of gives it, at their places, and nothing else is written."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inputs = [steps(shape, torch.bfloat16, seed=2, rank=r) for r in range(world)]
    inp = Buffer(ctx, shape, torch.bfloat16, "rows").set(inputs[rank])
    out = Buffer(ctx, shape, torch.bfloat16, "transposed")
    plan = ctx.ccl.reduce_scatter(out.tensor, inp.tensor, config=Config(**how)).plan
    ctx.synchronize()
    assert plan.algorithm == "two_shot"
    owners = torch.tensor(
        [[owner_of(m, n, shape, world, Config(**how)) for n in range(shape[1])] for m in range(shape[0])]
    )
    want = reference.all_reduce(inputs).to(torch.float32).to(torch.bfloat16)
    untouched = torch.full(shape, -1, dtype=torch.int16).view(torch.bfloat16)
    got = out.tensor.cpu().contiguous()
    assert_same(got[owners == rank], want[owners == rank])
    assert torch.equal(got.view(torch.int16)[owners != rank], untouched.view(torch.int16)[owners != rank])
    return owners


@pytest.mark.parametrize("how", TILES, ids=lambda how: "-".join(map(str, how.values())))
@pytest.mark.parametrize("world", [2, 3])
def test_tiles_have_owners(ranks, world, how):
    """U68: the parts of all ranks are disjoint and make up the whole."""
    owners = ranks(world).run(body_tiles, how, (70, 45))
    assert all(torch.equal(owners[0], other) for other in owners)
    assert set(owners[0].flatten().tolist()) == set(range(world))


def test_owners_of_tiles():
    """Contiguous and in turn, in grouped order: two rows of tiles together, then column by column."""
    by_hand = [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11], [12, 13, 14]]
    for distribution in (0, 1):
        how = Config(block_size_m=2, block_size_n=4, swizzle_size=2, reduce_scatter_distribution=distribution)
        for row in range(10):
            for column in range(12):
                tile = by_hand[row // 2][column // 4]
                want = tile % 4 if distribution == 0 else tile // 4
                assert owner_of(row, column, (10, 12), 4, how) == want
    with pytest.raises(ArgumentError, match=r"\(10, 0\) is not in a tensor of shape \(10, 12\)"):
        owner_of(10, 0, (10, 12), 4)


def body_refusals(ctx):
    world = ctx.get_num_ranks()
    inp = ctx.zeros(2 * world + 1, 4, dtype=torch.float32)
    even = inp[: 2 * world]
    with pytest.raises(ArgumentError, match=f"divided by {world} ranks"):
        ctx.ccl.reduce_scatter(ctx.zeros(2, 4, dtype=torch.float32), inp)
    with pytest.raises(ArgumentError, match=rf"got \(3, 4\), input \({2 * world}, 4\)"):
        ctx.ccl.reduce_scatter(ctx.zeros(3, 4, dtype=torch.float32), even)
    with pytest.raises(ArgumentError, match="overlap in memory; the output may be the own part"):
        ctx.ccl.reduce_scatter(inp.view(-1)[1:9].view(2, 4), even)
    with pytest.raises(NotSymmetricError, match="input_tensor is read"):
        ctx.ccl.reduce_scatter(ctx.zeros(2, 4, dtype=torch.float32), torch.zeros(2 * world, 4, device=ctx.get_device()))
    with pytest.raises(UnsupportedError, match="contiguous part"):
        ctx.ccl.reduce_scatter(ctx.zeros(2 * world, 4, dtype=torch.float32), even, config=config("torch"))
    for op in (ReduceOp.BAND, ReduceOp.BXOR):
        with pytest.raises(ValueError, match="not supported"):
            ctx.ccl.reduce_scatter(ctx.zeros(2, 4, dtype=torch.float32), even, op)


@pytest.mark.parametrize("world", [2])
def test_refusals(ranks, world):
    ranks(world).run(body_refusals)
