"""What all collectives share: agreement, errors that every rank learns of, streams, workspaces, plans, memory."""

import logging
import os
import time

import pytest
import torch

import iris
from collective_data import Buffer, on_new_context, outcome
from iris.ccl import AllReduceWorkspace, Config
from iris.errors import ArgumentError, DeviceMismatch, IrisError, RankMismatch
from iris.testing import reference
from iris.testing.numeric import random_tensor

ONE = Config(comm_sms=1)


def body_disagreements(ctx):
    """U15: named with each rank's value on both; the context goes on."""
    rank = ctx.get_rank()

    def zeros(n, dtype=torch.float32):
        # The same allocations on both ranks, whatever they make of them.
        return ctx.zeros(12, dtype=torch.float32).view(dtype)[:n]

    cases = {
        r"input_tensor is \(\(8,\), torch.float32\) on rank 0, \(\(6,\), torch.float32\) on rank 1": lambda: (
            ctx.ccl.all_reduce(zeros(8 - 2 * rank), zeros(8 - 2 * rank))
        ),
        "torch.float16.* on rank 0, .*torch.bfloat16.* on rank 1": lambda: ctx.ccl.all_reduce(
            *[zeros(8, (torch.float16, torch.bfloat16)[rank]) for _ in range(2)]
        ),
        "op is 0 on rank 0, 3 on rank 1": lambda: ctx.ccl.all_reduce(zeros(8), zeros(8), (0, 3)[rank]),
        "config is .*comm_sms=1.* on rank 0, None on rank 1": lambda: ctx.ccl.all_gather(
            zeros(8), zeros(4), config=(ONE, None)[rank]
        ),
        "dim is 0 on rank 0, 1 on rank 1": lambda: ctx.ccl.all_to_all(
            zeros(4).view(2, 2), zeros(4).view(2, 2), dim=rank
        ),
        "dst is 0 on rank 0, 1 on rank 1": lambda: ctx.ccl.reduce(zeros(4), zeros(4), rank),
        "strides of output_tensor is .* on rank 0": lambda: ctx.ccl.all_gather(
            zeros(12)[: 4 << rank : 1 << rank], zeros(2)
        ),
        "offset of output_tensor in the heap is": lambda: ctx.ccl.all_gather(zeros(12)[rank : rank + 4], zeros(2)),
    }
    for message, call in cases.items():
        with pytest.raises(RankMismatch, match=message) as caught:
            call()
        assert "nothing was launched" in str(caught.value)
        check_all_reduce(ctx)


def check_all_reduce(ctx, n=5, **kwargs):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inputs = [random_tensor((n,), torch.float32, seed=n, rank=r, integers=True) for r in range(world)]
    inp, out = Buffer(ctx, (n,), torch.float32).set(inputs[rank]), Buffer(ctx, (n,), torch.float32)
    work = ctx.ccl.all_reduce(out.tensor, inp.tensor, **kwargs)
    ctx.synchronize()
    out.check(reference.all_reduce(inputs).to(torch.float32))
    return work


@pytest.mark.parametrize("world", [2])
def test_ranks_that_disagree(ranks, world):
    ranks(world).run(on_new_context, body_disagreements, context=None)


def body_wrong_on_one(ctx):
    """U16: the one gets its own error, the other learns which; nobody waits in a kernel."""
    rank = ctx.get_rank()
    x, y = ctx.zeros(8, dtype=torch.float32), ctx.zeros(8, dtype=torch.float32)
    meta = torch.zeros(8, device="meta")
    cases = [
        (ArgumentError, lambda: ctx.ccl.all_reduce(x, y if rank == 0 else "y")),
        (ArgumentError, lambda: ctx.ccl.all_reduce(x, y, "SUM" if rank else None)),
        (ArgumentError, lambda: ctx.ccl.all_reduce(x, y, [0] if rank else None)),
        (ArgumentError, lambda: ctx.ccl.all_reduce(x, y, config={"comm_sms": 1} if rank else None)),
        (ArgumentError, lambda: ctx.ccl.all_reduce(x, y, workspace="mine" if rank else None)),
        (ArgumentError, lambda: ctx.ccl.all_gather(x, y[:4], dim=[0] if rank else 0)),
        (ArgumentError, lambda: ctx.ccl.all_gather(x, y[: 4 + rank])),
        (DeviceMismatch, lambda: ctx.ccl.all_gather(x, meta[:4] if rank else y[:4])),
        (DeviceMismatch, lambda: ctx.ccl.broadcast(meta if rank else x)),
        (ArgumentError, lambda: ctx.ccl.reduce(y, x, "0" if rank else 0)),
        (ArgumentError, lambda: ctx.ccl.reduce_scatter(y[:4], None if rank else x)),
        (ArgumentError, lambda: ctx.ccl.scatter(None if rank else y[:4], x)),
    ]
    for number, (kind, call) in enumerate(cases):
        with pytest.raises(IrisError) as caught:
            call()
        if rank == 1:
            assert type(caught.value) is kind, (number, caught.value)
        else:
            assert type(caught.value) is RankMismatch, (number, caught.value)
            assert f"rank 1 raised {kind.__name__}: " in str(caught.value), number
    check_all_reduce(ctx)


@pytest.mark.parametrize("world", [2])
def test_an_error_on_one_rank_reaches_the_other(ranks, world):
    ranks(world).run(on_new_context, body_wrong_on_one, context=None)


def body_workspaces(ctx):
    """A workspace fits every shape, dtype and algorithm (U12, U13); calls with one follow calls without."""
    world = ctx.get_num_ranks()
    workspace = ctx.ccl.all_reduce_preamble(ctx.zeros(4, dtype=torch.float32), ctx.zeros(4, dtype=torch.float32))
    assert workspace.prepared
    assert workspace.channels is not None
    canary = ctx.full((64,), 5, dtype=torch.int32)
    for n, variant in ((5, "push"), (700, "two_shot"), (64, "ring"), (300, "spinlock"), (1, None), (33, "atomic")):
        got = check_all_reduce(ctx, n, config=Config(all_reduce_variant=variant, comm_sms=2), workspace=workspace)
        assert got is workspace
        assert got.shape == (n,)
        assert got.variant == got.plan.algorithm == (variant or "push" if world > 1 else "copy")
        check_all_reduce(ctx, n)
    assert ctx.ccl.all_reduce_preamble(ctx.zeros(9), ctx.zeros(9), workspace=workspace) is workspace
    # What an earlier call returned is one too, with the context's own channels.
    again = check_all_reduce(ctx)
    assert isinstance(again, AllReduceWorkspace)
    assert check_all_reduce(ctx, workspace=again) is again
    assert (canary == 5).all()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_workspaces_fit_every_call(ranks, world):
    ranks(world).run(body_workspaces)


def body_one_has_a_workspace(ctx):
    """U14: said at once, not found in the kernel."""
    x, y = ctx.zeros(13, dtype=torch.float32), ctx.zeros(13, dtype=torch.float32)
    workspaces = [ctx.ccl.all_reduce_preamble(y, x) for _ in range(2)]
    for given in ((workspaces[0], None), workspaces):
        with pytest.raises(RankMismatch, match="workspace"):
            ctx.ccl.all_reduce(y, x, workspace=given[ctx.get_rank()])
    check_all_reduce(ctx, workspace=workspaces[1])


@pytest.mark.parametrize("world", [2])
def test_one_rank_has_a_workspace(ranks, world):
    ranks(world).run(on_new_context, body_one_has_a_workspace, context=None)


def body_streams(ctx, turns):
    """On two streams: calls over the context's channels are in the order of the calls, with workspaces they overlap."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    streams = [ctx.new_stream() for _ in range(2)]
    inputs = [ctx.full((40,), 100.0 * s + rank, dtype=torch.float32) for s in range(2)]
    outs = [[ctx.zeros(40, dtype=torch.float32) for _ in range(turns)] for _ in range(2)]
    own = [ctx.ccl.all_reduce_preamble(outs[0][0], inputs[0]) for _ in range(2)]
    for workspaces in ((None, None), own):
        for turn in range(turns):
            # The order of the streams differs from turn to turn, not from rank to rank.
            for s in (turn % 2, 1 - turn % 2):
                with ctx.use_stream(streams[s]):
                    ctx.ccl.all_reduce(outs[s][turn], inputs[s], config=ONE, workspace=workspaces[s])
        ctx.synchronize()
        for s, turn in ((s, turn) for s in range(2) for turn in range(turns)):
            assert (outs[s][turn] == 100.0 * s * world + sum(range(world))).all(), (s, turn)
            outs[s][turn].fill_(float("nan"))
        ctx.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_two_streams(ranks, world):
    ranks(world).run(body_streams, 3)


def body_opposite_orders(ctx):
    """With a workspace for each stream, ranks may start the streams' calls in opposite orders."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    streams = [ctx.new_stream() for _ in range(2)]
    x = [ctx.full((30,), 10.0 * s + rank, dtype=torch.float32) for s in range(2)]
    y = [ctx.zeros(30, dtype=torch.float32) for _ in range(2)]
    own = [ctx.ccl.all_reduce_preamble(y[0], x[0]) for _ in range(2)]
    for s in range(2):  # agreed on in one order
        ctx.ccl.all_reduce(y[s], x[s], config=ONE, workspace=own[s])
    ctx.synchronize()
    for turn in range(3):
        for t in y:
            t.fill_(float("nan"))
        ctx.barrier()
        for s in (0, 1) if rank % 2 else (1, 0):
            with ctx.use_stream(streams[s]):
                ctx.ccl.all_reduce(y[s], x[s], config=ONE, workspace=own[s])
        ctx.synchronize()
        assert all((y[s] == 10.0 * s * world + sum(range(world))).all() for s in range(2)), turn
        ctx.barrier()


@pytest.mark.parametrize("world", [2])
def test_two_workspaces_on_two_streams(ranks, world):
    ranks(world).run(body_opposite_orders)


def body_beside(ctx):
    """U70: async_op returns at launch; wait() orders the current stream, once; a call without it needs none."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    total = sum(range(world))
    for turn in range(4):
        x = ctx.full((20,), rank + turn, dtype=torch.float32)
        y, whole = ctx.zeros(20, dtype=torch.float32), ctx.zeros(20 * world, dtype=torch.float32)
        first = ctx.ccl.all_reduce(y, x, async_op=True, config=ONE)
        second = ctx.ccl.all_gather(whole, x, async_op=True, config=ONE)
        for work in (second, first, first):
            work.wait()
        third = ctx.ccl.all_reduce(x, y, config=ONE)
        third.wait()
        ctx.synchronize()
        assert (y == total + turn * world).all()
        assert (x == world * (total + turn * world)).all()
        assert (whole.view(world, 20) == torch.arange(world, device=x.device)[:, None] + turn).all()
        assert first.plan.operation == "all_reduce"
        assert second.plan.operation == "all_gather"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_beside_the_stream(ranks, world):
    ranks(world).run(body_beside)


def body_every_one_beside(ctx):
    """Every collective takes async_op."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    x = ctx.full((2 * world,), float(rank), dtype=torch.float32)
    outs = [ctx.zeros(2 * world, dtype=torch.float32) for _ in range(7)]
    works = [
        ctx.ccl.all_gather(outs[0], x[:2], None, True),
        ctx.ccl.all_to_all(outs[1], x, None, True),
        ctx.ccl.reduce_scatter(outs[2][:2], x, None, None, True),
        ctx.ccl.broadcast_tensor(outs[3], x, 0, None, True),
        ctx.ccl.reduce(outs[4], x, 0, None, None, True),
        ctx.ccl.gather(outs[5], x[:2], 0, None, True),
        ctx.ccl.scatter(outs[6][:2], x, 0, None, True),
    ]
    for work in works:
        work.wait()
    ctx.synchronize()
    by_rank = torch.arange(float(world)).repeat_interleave(2)
    total = float(sum(range(world)))
    wants = [by_rank, by_rank, total, 0.0, total, by_rank, 0.0]
    for number, (out, want) in enumerate(zip(outs, wants, strict=True)):
        if number in (4, 5) and rank:
            continue
        got = out[:2] if number in (2, 6) else out
        assert (got.cpu() == want).all(), (number, got)


@pytest.mark.parametrize("world", [2])
def test_every_collective_beside_the_stream(ranks, world):
    ranks(world).run(body_every_one_beside)


def body_remembered(ctx):
    """The ranks compare once for each combination of arguments, and each is told apart from the others."""
    exchanged = []
    inner = ctx.exchange.all_gather

    def counted(tag, *args):
        exchanged.append(tag)
        return inner(tag, *args)

    ctx.exchange.all_gather = counted
    try:
        check_comparisons(ctx, exchanged)
    finally:
        ctx.exchange.all_gather = inner


def check_comparisons(ctx, exchanged):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    tensors = [ctx.zeros(8, dtype=torch.float32) for _ in range(3)]
    for value, t in enumerate(tensors):
        t.fill_(rank + 10.0 * value)
    out = ctx.zeros(8, dtype=torch.float32)
    for turn in range(3):
        for value, t in enumerate(tensors):
            for op, want in ((0, sum(range(world)) + 10.0 * value * world), (3, world - 1 + 10.0 * value)):
                out.fill_(float("nan"))
                ctx.ccl.all_reduce(out, t, op, config=ONE)
                assert (out.cpu() == want).all(), (turn, value, op)
    # Two operations; tensors off the list of what peers touch make no difference.
    assert len(exchanged) == (2 if world > 1 else 0), exchanged
    ctx.ccl.all_reduce(out[:4], tensors[0][:4], config=ONE)
    assert len(exchanged) == (3 if world > 1 else 0)


@pytest.mark.parametrize("world", [1, 2])
def test_calls_are_remembered(ranks, world):
    ranks(world).run(on_new_context, body_remembered, context=None)


def body_checked_always(ctx):
    """IRIS_CHECK=always compares every call."""
    rank = ctx.get_rank()
    x, y = ctx.zeros(8, dtype=torch.float32), ctx.zeros(8, dtype=torch.float32)
    for _ in range(2):
        ctx.ccl.all_reduce(y, x, config=ONE)
        ctx.ccl.sendrecv(x, y, 1 - rank, 1 - rank)
    with pytest.raises(RankMismatch, match="op is"):
        ctx.ccl.all_reduce(y, x, rank, config=ONE)
    # Agreed on before, on each rank with the other's arguments in between.
    for op in (0, 3):
        ctx.ccl.all_reduce(y, x, op, config=ONE)
    with pytest.raises(RankMismatch, match="op is"):
        ctx.ccl.all_reduce(y, x, 3 * rank, config=ONE)


@pytest.mark.parametrize("world", [2])
def test_every_call_can_be_compared(ranks, world):
    ranks(world).run(on_new_context, with_variable, "IRIS_CHECK", "always", body_checked_always, context=None)


def with_variable(ctx, name, value, body):
    """Run ``body`` with an environment variable set, which is the rank's own."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        body(ctx)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def body_unchecked(ctx):
    """IRIS_CHECK=off compares nothing."""
    rank = ctx.get_rank()
    x, y = ctx.full((8,), 1.0, dtype=torch.float32), ctx.zeros(8, dtype=torch.float32)
    inner, ctx.exchange.all_gather = ctx.exchange.all_gather, lambda *args: pytest.fail(f"compared: {args}")
    try:
        ctx.ccl.all_reduce(y, x, config=ONE)
        ctx.ccl.sendrecv(y, x, 1 - rank, 1 - rank)
    finally:
        ctx.exchange.all_gather = inner
    ctx.synchronize()
    assert (x == 2).all()


@pytest.mark.parametrize("world", [2])
def test_comparison_can_be_turned_off(ranks, world):
    ranks(world).run(with_variable, "IRIS_CHECK", "off", body_unchecked)


def body_explain(ctx):
    """What a call will do, without doing it and without the other ranks."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    x, y = ctx.zeros(2 * world, dtype=torch.float32), ctx.full((2 * world,), 7.0, dtype=torch.float32)
    calls = {
        "all_gather": (y, x[:2]), "all_to_all": (y, x), "all_reduce": (y, x), "reduce_scatter": (y[:2], x),
        "broadcast": (y,), "broadcast_tensor": (y, x), "reduce": (y, x), "gather": (y, x[:2]), "scatter": (y[:2], x),
    }  # fmt: skip
    plans = {}
    if rank == 0:
        for name, tensors in calls.items():
            plans[name] = ctx.ccl.explain(name, *tensors)
            assert plans[name].operation == name.removesuffix("_tensor")
            assert f"{world} ranks" in plans[name].problem
            assert plans[name].reason
            assert str(plans[name]).startswith(plans[name].operation)
        with pytest.raises(ArgumentError, match="no plan for 'sendrecv'; possible: all_gather, all_to_all"):
            ctx.ccl.explain("sendrecv", x, y)
        with pytest.raises(ArgumentError, match="must have the input's shape"):
            ctx.ccl.explain("all_reduce", y, x[:1])
    ctx.synchronize()
    assert (y == 7).all()
    ctx.barrier()
    # And the call does it.
    for name, tensors in calls.items():
        plan = getattr(ctx.ccl, name)(*tensors).plan
        assert rank or plan == plans[name]


@pytest.mark.parametrize("world", [1, 2])
def test_explain(ranks, world):
    ranks(world).run(body_explain)


def body_logged(ctx):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("iris")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        for _ in range(3):
            check_all_reduce(ctx, 3, config=ONE)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [line for line in lines if "all_reduce (3,)" in line]


@pytest.mark.processes("the logger is one for all ranks of a process")
@pytest.mark.parametrize("world", [2])
def test_a_plan_is_logged_once(ranks, world):
    for lines in ranks(world).run(body_logged):
        assert len(lines) <= 1
        assert all("push" in line for line in lines)


def body_missing(rank, world_size):
    """U16: a rank that never calls is named within the time limit, on the host."""
    os.environ["IRIS_TIMEOUT"] = "2"
    ctx = iris.iris(1 << 22)
    if rank == 1:
        time.sleep(4)
        return
    got = outcome(check_all_reduce, ctx)
    assert "all_reduce(): comparing arguments" in got
    assert "rank 1" in got


@pytest.mark.processes("an exchange that ends by its time limit; simulated ones end as deadlocks")
@pytest.mark.parametrize("world", [2])
def test_a_rank_that_never_calls_is_named(ranks, world):
    ranks(world).run(body_missing, context=None)
