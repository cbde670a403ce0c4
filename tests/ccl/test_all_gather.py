"""all_gather: shapes, dtypes, dimensions, layouts, the own piece in place, where tensors lie, many calls."""

import time

import pytest
import torch

from collective_data import LAYOUTS, MOVED, Buffer, movable, on_new_context
from iris.ccl import Config
from iris.errors import ArgumentError, NotSymmetricError, RankMismatch, UnsupportedError
from iris.testing import reference

VARIANTS = ("persistent", "partitioned", "torch", None)
OWN = ("persistent", "partitioned")


def config(variant, **fields):
    return Config(all_gather_variant=variant, **fields)


def gathered(ctx, shape, dtype, dim, variant, seed=0, out_layout="plain", inp_layout="plain", inp_heap=True, **fields):
    """One checked all-gather; its plan."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inputs = [movable(shape, dtype, seed=seed, rank=r) for r in range(world)]
    want = reference.all_gather(inputs, dim)
    inp = Buffer(ctx, shape, dtype, inp_layout, heap=inp_heap).set(inputs[rank])
    out = Buffer(ctx, want.shape, dtype, out_layout)
    work = ctx.ccl.all_gather(out.tensor, inp.tensor, config=config(variant, **fields), dim=dim)
    ctx.synchronize()
    out.check(want)
    inp.check(inputs[rank])
    return work.plan


def body_shapes(ctx, variant):
    cases = [((), 0), ((1,), 0), ((7, 5), 0), ((7, 5), 1), ((2, 3, 5), -2), ((0, 4), 0), ((1, 1, 67), -1)]
    for seed, (shape, dim) in enumerate(cases):
        if variant == "torch" and any(size > 1 for size in shape[:dim]):
            continue
        how = {"comm_sms": 1} if seed % 2 else {"block_size_m": 1, "block_size_n": 16}
        gathered(ctx, shape, torch.bfloat16, dim, variant, seed, **how)


@pytest.mark.parametrize(
    ("world", "variant"), [(world, variant) for world in (1, 2, 4) for variant in OWN] + [(2, "torch"), (2, None)]
)
def test_shapes(ranks, world, variant):
    ranks(world).run(body_shapes, variant)


def body_dtypes(ctx, variant):
    for seed, dtype in enumerate(MOVED):
        gathered(ctx, (3, 5), dtype, 0, variant, seed, comm_sms=1)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v])
@pytest.mark.parametrize("world", [2])
def test_dtypes(ranks, world, variant):
    ranks(world).run(body_dtypes, variant)


def body_layouts(ctx, variant):
    for seed, layout in enumerate(LAYOUTS):
        other = LAYOUTS[(seed + 2) % len(LAYOUTS)]
        gathered(ctx, (6, 7), torch.int16, seed % 2, variant, seed, layout, other, block_size_m=1, comm_sms=2)


@pytest.mark.parametrize("variant", OWN)
@pytest.mark.parametrize("world", [3])
def test_layouts(ranks, world, variant):
    ranks(world).run(body_layouts, variant)


def body_own_piece(ctx, variant):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    for dim in (0, 1):
        inputs = [movable((5, 6), torch.float32, seed=dim, rank=r) for r in range(world)]
        out = Buffer(ctx, reference.all_gather(inputs, dim).shape, torch.float32)
        mine = out.tensor.tensor_split(world, dim=dim)[rank]
        mine.copy_(inputs[rank])
        ctx.ccl.all_gather(out.tensor, mine, config=config(variant), dim=dim)
        ctx.synchronize()
        out.check(reference.all_gather(inputs, dim))


@pytest.mark.parametrize("variant", [*OWN, None])
@pytest.mark.parametrize("world", [1, 3])
def test_the_own_piece_in_place(ranks, world, variant):
    ranks(world).run(body_own_piece, variant)


def body_input_anywhere(ctx):
    for variant in VARIANTS:
        gathered(ctx, (4, 9), torch.float16, 0, variant, inp_heap=False)


@pytest.mark.parametrize("world", [2])
def test_input_anywhere(ranks, world):
    ranks(world).run(body_input_anywhere)


def body_output_elsewhere(ctx, all_of_them):
    """U07: on every rank, or on one, while the other learns of it."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    elsewhere = all_of_them or rank == 1
    out = ctx.zeros(world * 4, 3, dtype=torch.float32)
    out = torch.zeros_like(out) if elsewhere else out
    expected = (NotSymmetricError, "output_tensor is written .*ctx.as_symmetric") if elsewhere else (
        RankMismatch, "rank 1 raised NotSymmetricError: output_tensor"
    )  # fmt: skip
    with pytest.raises(expected[0], match=expected[1]) as caught:
        ctx.ccl.all_gather(out, ctx.zeros(4, 3, dtype=torch.float32))
    assert isinstance(caught.value, ValueError)
    gathered(ctx, (4, 3), torch.float32, 0, None)


@pytest.mark.parametrize("all_of_them", [True, False])
@pytest.mark.parametrize("world", [2])
def test_output_elsewhere(ranks, world, all_of_them):
    ranks(world).run(on_new_context, body_output_elsewhere, all_of_them, context=None)


def body_refusals(ctx):
    world = ctx.get_num_ranks()
    out, inp = ctx.zeros(world * 4, 3, dtype=torch.float32), ctx.zeros(4, 3, dtype=torch.float32)
    for bad, message in (
        ({"dim": 2}, r"dim must be a dimension of the input of shape \(4, 3\), got 2"),
        ({"dim": True}, "got True"),
        ({"config": {"comm_sms": 1}}, "config must be None or an iris.ccl.Config, got"),
    ):
        with pytest.raises(ArgumentError, match=message):
            ctx.ccl.all_gather(out, inp, **bad)
    with pytest.raises(ArgumentError, match=rf"must have shape \(4, {4 * world}\).*got \({4 * world}, 3\)"):
        ctx.ccl.all_gather(out, ctx.zeros(4, 4, dtype=torch.float32), dim=1)
    with pytest.raises(ArgumentError, match="float16"):
        ctx.ccl.all_gather(out, inp.half())
    with pytest.raises(ArgumentError, match="NoneType"):
        ctx.ccl.all_gather(None, inp)
    with pytest.raises(ArgumentError, match="expanded"):
        ctx.ccl.all_gather(out[:1].expand(world * 4, 3), inp)
    moved = ctx.zeros(world * 4 * 3 + 1, dtype=torch.float32)
    with pytest.raises(ArgumentError, match="overlap in memory; the input may be the own piece"):
        ctx.ccl.all_gather(moved[1:].view(world * 4, 3), moved[:12].view(4, 3))
    if world > 1:
        with pytest.raises(UnsupportedError, match="sizes before dim must be 1"):
            ctx.ccl.all_gather(ctx.zeros(4, 3 * world, dtype=torch.float32), inp, dim=1, config=config("torch"))
        with pytest.raises(ArgumentError, match="view_as_real"):
            ctx.ccl.all_gather(ctx.zeros(world, dtype=torch.complex128), ctx.zeros(1, dtype=torch.complex128))


@pytest.mark.parametrize("world", [1, 2])
def test_refusals(ranks, world):
    ranks(world).run(on_new_context, body_refusals, context=None)


def body_many_calls(ctx, variant, calls):
    """U10: nothing on the host waits between the calls; each result is copied in the stream."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inp, out = ctx.zeros(10, 7, dtype=torch.bfloat16), ctx.zeros(world * 10, 7, dtype=torch.bfloat16)
    results = []
    for call in range(calls):
        if (call + rank) % 13 == 5:
            time.sleep(0.003)
        inp.fill_(rank * 64 + call)
        out.fill_(float("nan"))
        ctx.ccl.all_gather(out, inp, config=config(variant, comm_sms=2, block_size_m=1))
        results.append(out.clone())
    ctx.synchronize()
    for call, got in enumerate(results):
        for r in range(world):
            assert (got[r * 10 : (r + 1) * 10] == r * 64 + call).all(), (call, r)


@pytest.mark.parametrize(("variant", "calls"), [("persistent", 50), ("partitioned", 20)])
@pytest.mark.parametrize("world", [2])
def test_many_calls_in_a_row(ranks, world, variant, calls):
    ranks(world).run(body_many_calls, variant, calls)


def body_module_form(ctx):
    import iris.ccl.all_gather

    world, rank = ctx.get_num_ranks(), ctx.get_rank()
    out, inp = ctx.zeros(world, dtype=torch.int32), ctx.full((1,), rank + 5, dtype=torch.int32)
    assert iris.ccl.all_gather.all_gather(out, inp, ctx).plan.operation == "all_gather"
    ctx.synchronize()
    assert out.tolist() == list(range(5, world + 5))


@pytest.mark.parametrize("world", [1, 2])
def test_module_form(ranks, world):
    ranks(world).run(body_module_form)
