"""reduce, gather and scatter: every root, shapes, dtypes, layouts, the own piece in place, arguments left out."""

import pytest
import torch

from collective_data import LAYOUTS, Buffer, factors, movable, on_new_context, rounded, steps
from iris.ccl import Config, ReduceOp
from iris.errors import ArgumentError, NotSymmetricError, RankMismatch
from iris.testing import reference

SMALL = Config(block_size_m=1, block_size_n=16)
ONE = Config(comm_sms=1)


def body_reduce(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    cases = [((), "SUM", torch.float32), ((5, 9), "MAX", torch.bfloat16), ((0, 3), "SUM", torch.float16)]
    cases += [((3, 4, 5), "PRODUCT", torch.int8), ((70,), "SUM", torch.float8_e4m3fn), ((70,), "MIN", torch.int64)]
    for seed, (shape, op, dtype) in enumerate(cases):
        dst = seed % world
        inputs = [(factors if op == "PRODUCT" else steps)(shape, dtype, seed=seed, rank=r) for r in range(world)]
        inp = Buffer(ctx, shape, dtype, LAYOUTS[seed % 5]).set(inputs[rank])
        out = Buffer(ctx, shape, dtype, LAYOUTS[(seed + 2) % 5], heap=False) if rank == dst else None
        given = out.tensor if out else (None, "not looked at")[seed % 2]
        work = ctx.ccl.reduce(given, inp.tensor, dst, ReduceOp[op], config=SMALL if seed % 2 else ONE)
        ctx.synchronize()
        assert work.plan.algorithm == ("pull" if world > 1 else "copy")
        if out:
            out.check(rounded(reference.all_reduce(inputs, op), dtype))
        inp.check(inputs[rank])


def test_reduce(ranks, world):
    ranks(world).run(body_reduce)


def body_reduce_large_and_small(ctx):
    """U19: a sum rounded at every step would stay at 256."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inp = ctx.full((4,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    ctx.ccl.reduce(inp, inp, 1)
    ctx.synchronize()
    assert (inp == (256.0 + world - 1 if rank == 1 else 256.0 if rank == 0 else 1.0)).all()


@pytest.mark.parametrize("world", [3])
def test_reduce_in_place_rounds_once(ranks, world):
    ranks(world).run(body_reduce_large_and_small)


def body_gather(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    for seed, (shape, dtype) in enumerate(
        [
            ((), torch.int64),
            ((3, 7), torch.bool),
            ((2, 3, 4), torch.complex64),
            ((0, 2), torch.int8),
            ((61,), torch.float16),
        ]
    ):
        dst = (seed + 1) % world
        inputs = [movable(shape, dtype, seed=seed, rank=r) for r in range(world)]
        inp = Buffer(ctx, shape, dtype, LAYOUTS[seed]).set(inputs[rank])
        want = reference.all_gather(inputs)
        out = Buffer(ctx, want.shape, dtype, LAYOUTS[-seed], heap=False) if rank == dst else None
        ctx.ccl.gather(out.tensor if out else None, inp.tensor, dst, config=SMALL if seed % 2 else ONE)
        ctx.synchronize()
        if out:
            out.check(want)
        inp.check(inputs[rank])


def test_gather(ranks, world):
    ranks(world).run(body_gather)


def body_scatter(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    for seed, (shape, dtype) in enumerate(
        [
            ((), torch.int64),
            ((3, 7), torch.bool),
            ((2, 3, 4), torch.float32),
            ((0, 2), torch.int8),
            ((61,), torch.bfloat16),
        ]
    ):
        src = (seed + 1) % world
        pieces = [movable(shape, dtype, seed=seed, rank=r) for r in range(world)]
        whole = reference.all_gather(pieces)
        inp = Buffer(ctx, whole.shape, dtype, LAYOUTS[-seed], heap=False).set(whole) if rank == src else None
        out = Buffer(ctx, shape, dtype, LAYOUTS[seed])
        ctx.ccl.scatter(out.tensor, inp.tensor if inp else None, src, config=SMALL if seed % 2 else ONE)
        ctx.synchronize()
        out.check(pieces[rank])
        if inp:
            inp.check(whole)


def test_scatter(ranks, world):
    ranks(world).run(body_scatter)


def body_own_pieces(ctx):
    """The root's piece may be the part of the whole that it stands for."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    values = torch.arange(world * 6.0).view(world * 3, 2)
    for root in range(world):
        whole = Buffer(ctx, (world * 3, 2), torch.float32)
        mine = whole.tensor[3 * root : 3 * root + 3]
        mine.copy_(values[3 * rank : 3 * rank + 3])
        ctx.ccl.gather(whole.tensor, mine, root)
        ctx.synchronize()
        if rank == root:
            whole.check(values)
        ctx.barrier()
        whole.set(values * 2)
        ctx.barrier()
        if rank != root:
            mine.fill_(float("nan"))
        ctx.ccl.scatter(mine, whole.tensor, root)
        ctx.synchronize()
        assert torch.equal(mine.cpu(), 2 * values[3 * rank : 3 * rank + 3])
        ctx.barrier()


@pytest.mark.parametrize("world", [1, 3])
def test_own_pieces_in_place(ranks, world):
    ranks(world).run(body_own_pieces)


def body_overwritten(ctx, calls):
    """Inputs may be overwritten and outputs read as soon as the call is in the stream."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    x, piece = ctx.zeros(5, dtype=torch.int32), ctx.zeros(5, dtype=torch.int32)
    whole = torch.zeros(world * 5, dtype=torch.int32, device=ctx.get_device())
    total = torch.zeros(5, dtype=torch.int32, device=ctx.get_device())
    seen = []
    for call in range(calls):
        root = call % world
        x.fill_(100 * rank + call)
        ctx.ccl.gather(whole, x, root)
        ctx.ccl.reduce(total, x, root)
        x.fill_(-1)
        piece.fill_(-1)
        ctx.ccl.scatter(piece, whole, root)
        seen.append((total.clone() if rank == root else None, piece.clone()))
        whole.fill_(-1)
    ctx.synchronize()
    for call, (sums, pieces) in enumerate(seen):
        assert (pieces == 100 * rank + call).all()
        assert sums is None or (sums == 100 * sum(range(world)) + world * call).all()


@pytest.mark.parametrize("world", [2, 3])
def test_many_calls_in_a_row(ranks, world):
    ranks(world).run(body_overwritten, 9)


def body_refusals(ctx):
    rank, device = ctx.get_rank(), ctx.get_device()
    x = ctx.zeros(4, 3, dtype=torch.float32)
    away = torch.zeros(4, 3, device=device)
    for name, call in (
        ("input_tensor", lambda: ctx.ccl.reduce(x, away)),
        ("input_tensor", lambda: ctx.ccl.gather(torch.zeros(8, 3, device=device), away)),
        ("output_tensor", lambda: ctx.ccl.scatter(away, torch.zeros(8, 3, device=device))),
    ):
        with pytest.raises(NotSymmetricError, match=f"{name} is .*ctx.as_symmetric"):
            call()
    # What only the root can have wrong.
    for message, call in (
        ("output_tensor must be a tensor, got NoneType", lambda: ctx.ccl.gather(None, x, 1)),
        (r"must have shape \(8, 3\)", lambda: ctx.ccl.gather(away, x, 1)),
        (r"must have the input's shape", lambda: ctx.ccl.reduce(away[:3], x, 1)),
        ("input_tensor must be a tensor, got NoneType", lambda: ctx.ccl.scatter(x, None, 1)),
        ("overlap in memory; the output may be the own piece", lambda: ctx.ccl.scatter(x[:2], x, 1)),
        ("not supported", lambda: ctx.ccl.reduce(away, x, 1, ReduceOp.BOR)),
    ):
        everywhere = message == "not supported"
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert isinstance(caught.value, RankMismatch) == (rank == 0 and not everywhere)
    for call in (ctx.ccl.reduce, ctx.ccl.gather, ctx.ccl.scatter):
        with pytest.raises(ArgumentError, match=r"must be a rank of the group \[0, 1\], got 2"):
            call(x, x, 2)


@pytest.mark.parametrize("world", [2])
def test_refusals(ranks, world):
    ranks(world).run(on_new_context, body_refusals, context=None)
