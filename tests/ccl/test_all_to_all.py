"""all_to_all: columns as the original API cuts them, rows as torch does; shapes, dtypes, layouts, refusals."""

import pytest
import torch

from collective_data import LAYOUTS, MOVED, Buffer, movable
from iris.ccl import Config
from iris.errors import ArgumentError, NotSymmetricError, UnsupportedError
from iris.testing import reference

VARIANTS = ("default", "torch", None)


def config(variant, **fields):
    return Config(all_to_all_variant=variant, **fields)


def exchanged(ctx, shape, dtype, dim, variant, seed=0, out_layout="plain", inp_layout="plain", inp_heap=True, **fields):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inputs = [movable(shape, dtype, seed=seed, rank=r) for r in range(world)]
    inp = Buffer(ctx, shape, dtype, inp_layout, heap=inp_heap).set(inputs[rank])
    out = Buffer(ctx, shape, dtype, out_layout)
    ctx.ccl.all_to_all(out.tensor, inp.tensor, config=config(variant, **fields), dim=dim)
    ctx.synchronize()
    out.check(reference.all_to_all(inputs, dim)[rank])
    inp.check(inputs[rank])


def body_shapes(ctx, variant):
    world = ctx.get_num_ranks()
    cases = [((world,), -1), ((5, 3 * world), -1), ((2 * world, 7), 0), ((2, world, 5), 1), ((0, world), -1)]
    for seed, (shape, dim) in enumerate(cases):
        if variant == "torch" and any(size > 1 for size in shape[:dim]):
            continue
        how = {"comm_sms": 1} if seed % 2 else {"block_size_m": 1, "block_size_n": 16}
        exchanged(ctx, shape, torch.float16, dim, variant, seed, **how)


@pytest.mark.parametrize(("world", "variant"), [(1, None), (2, "torch"), (2, None), (3, "default"), (4, "default")])
def test_shapes(ranks, world, variant):
    ranks(world).run(body_shapes, variant)


def body_dtypes(ctx, variant):
    for seed, dtype in enumerate(MOVED):
        exchanged(ctx, (ctx.get_num_ranks(), 3), dtype, 0, variant, seed, comm_sms=1)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v])
@pytest.mark.parametrize("world", [2])
def test_dtypes(ranks, world, variant):
    ranks(world).run(body_dtypes, variant)


def body_layouts(ctx):
    world = ctx.get_num_ranks()
    for seed, layout in enumerate(LAYOUTS):
        other = LAYOUTS[(seed + 2) % len(LAYOUTS)]
        shape, dim = ((6, 2 * world), 1) if seed % 2 else ((2 * world, 5), 0)
        exchanged(ctx, shape, torch.int32, dim, "default", seed, layout, other, inp_heap=seed % 2 == 0, comm_sms=2)


@pytest.mark.parametrize("world", [2, 3])
def test_layouts(ranks, world):
    ranks(world).run(body_layouts)


def body_against_torch(ctx):
    """dim=0 is all_to_all_single."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inp = ctx.zeros(2 * world, 3, dtype=torch.float32)
    inp.copy_(movable((2 * world, 3), torch.float32, seed=1, rank=rank))
    out, theirs = ctx.zeros(2 * world, 3, dtype=torch.float32), torch.empty_like(inp)
    ctx.ccl.all_to_all(out, inp, dim=0, config=config("default"))
    torch.distributed.all_to_all_single(theirs, inp.clone())
    ctx.synchronize()
    assert torch.equal(out, theirs)


@pytest.mark.parametrize("world", [2, 3])
def test_rows_are_exchanged_as_torch_does(ranks, world):
    ranks(world).run(body_against_torch)


def body_refusals(ctx):
    world = ctx.get_num_ranks()
    out, inp = ctx.zeros(16, 10, dtype=torch.float32), ctx.zeros(16, 10, dtype=torch.float32)
    if world > 1:
        with pytest.raises(ArgumentError, match="multiple of the number of ranks, 4; got 10"):
            ctx.ccl.all_to_all(out, inp)
        with pytest.raises(ArgumentError, match="scalar"):
            ctx.ccl.all_to_all(ctx.zeros((), dtype=torch.float32), ctx.zeros((), dtype=torch.float32))
        with pytest.raises(ArgumentError, match="overlap in memory; pieces would be overwritten"):
            ctx.ccl.all_to_all(inp, inp, dim=0)
        with pytest.raises(NotSymmetricError, match="output_tensor is written"):
            ctx.ccl.all_to_all(torch.zeros(16, 10, device=ctx.get_device()), inp, dim=0)
        wide = ctx.zeros(2, 16, 8, dtype=torch.float32)
        with pytest.raises(UnsupportedError, match="contiguous pieces"):
            ctx.ccl.all_to_all(wide[0], wide[1], config=config("torch"))
    with pytest.raises(ArgumentError, match=r"input's shape \(16, 10\), got \(16, 9\)"):
        ctx.ccl.all_to_all(out[:, :9], inp, dim=0)
    if world == 1:  # a square that is its own transpose in memory is not in place
        with pytest.raises(ArgumentError, match="overlap in memory; a single rank may work in place"):
            ctx.ccl.all_to_all(out[:10], out[:10].t())


@pytest.mark.parametrize("world", [1, 4])
def test_refusals(ranks, world):
    ranks(world).run(body_refusals)


def body_alone(ctx):
    x = ctx.zeros(4, 4, dtype=torch.float32)
    values = torch.arange(16.0).view(4, 4)
    x.copy_(values)
    assert ctx.ccl.all_to_all(x, x).plan.algorithm == "copy"
    assert torch.equal(x.cpu(), values)


@pytest.mark.parametrize("world", [1])
def test_a_single_rank_works_in_place(ranks, world):
    ranks(world).run(body_alone)
