"""send, recv and sendrecv: sizes around the slots, layouts, dtypes, rings, oneself, order, errors on both sides."""

import pytest
import torch

from collective_data import LAYOUTS, MOVED, Buffer, movable, on_new_context, outcome
from iris.ccl import Config
from iris.errors import ArgumentError, RankMismatch

ONE = Config(comm_sms=1)


def sent(ctx, shape, dtype, src, dst, seed, sends="plain", receives="plain", config=None, tag=0):
    values = movable(shape, dtype, seed=seed, rank=src)
    if ctx.get_rank() == src:
        buffer = Buffer(ctx, shape, dtype, sends, heap=False).set(values)
        ctx.ccl.send(buffer.tensor, dst, tag=tag, config=config)
    elif ctx.get_rank() == dst:
        buffer = Buffer(ctx, shape, dtype, receives, heap=False)
        ctx.ccl.recv(buffer.tensor, src, tag=tag, config=config)
    else:
        return
    ctx.synchronize()
    buffer.check(values)


def body_messages(ctx):
    world, layout = ctx.get_num_ranks(), ctx.channels.layout
    slot = layout.slot_bytes // 4
    cases = [(1, None), (slot + 1, ONE), (3 * slot + 5, ONE), (layout.slot_lanes * slot + 1, None), (0, None)]
    for seed, (n, config) in enumerate(cases):
        sent(ctx, (n,), torch.int32, seed % world, (seed + 1) % world, seed, config=config, tag=seed)
    for seed, layout in enumerate(LAYOUTS):
        sent(ctx, (3, 7), torch.float16, 1, 0, seed, layout, LAYOUTS[(seed + 2) % 5])


@pytest.mark.parametrize("world", [2, 3])
def test_messages(ranks, world):
    ranks(world).run(body_messages)


def body_dtypes(ctx):
    for seed, dtype in enumerate(MOVED):
        sent(ctx, (5,), dtype, seed % 2, 1 - seed % 2, seed)


@pytest.mark.parametrize("world", [2])
def test_dtypes(ranks, world):
    ranks(world).run(body_dtypes)


def body_order(ctx, count):
    """Messages of two ranks arrive in the order of the calls, whatever their sizes; the senders reuse their memory."""
    rank = ctx.get_rank()
    x = torch.zeros(700, dtype=torch.int32, device=ctx.get_device())
    seen = []
    for call in range(count):
        part = x[: 1 + call * 97 % 700]
        if rank == call // 2 % 2:
            part.fill_(call)
            ctx.ccl.send(part, 1 - rank)
            part.fill_(-1)
        else:
            part.fill_(-2)
            ctx.ccl.recv(part, 1 - rank)
            seen.append((call, part.clone()))
    ctx.synchronize()
    assert len(seen) == count // 2
    for call, got in seen:
        assert (got == call).all(), call


@pytest.mark.parametrize("world", [2])
def test_messages_keep_their_order(ranks, world):
    ranks(world).run(body_order, 16)


def body_ring(ctx, turns):
    """Around the ring in both directions, with lengths that differ from rank to rank; inputs change places."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    lengths = [300 * r + 1 for r in range(world)]
    sources = [torch.zeros(lengths[rank], device=ctx.get_device()) for _ in range(2)]
    for turn in range(turns):
        step = 1 if turn % 2 == 0 else world - 1
        dst, src = (rank + step) % world, (rank + world - step) % world
        # Another tensor on one rank alone is nothing that the others need to know.
        source = sources[turn // 2 % 2 if rank == 1 else 0]
        source.copy_(torch.arange(float(lengths[rank])) + 1000 * rank + turn)
        out = torch.full((lengths[src],), float("nan"), device=ctx.get_device())
        ctx.ccl.sendrecv(source, out, dst, src, config=ONE if turn % 4 < 2 else None)
        ctx.synchronize()
        assert torch.equal(out.cpu(), torch.arange(float(lengths[src])) + 1000 * src + turn)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ring(ranks, world):
    ranks(world).run(body_ring, 8)


def body_pairs_and_oneself(ctx):
    """Two ranks exchange with each other, the last with itself; then all with themselves."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    partners = [1, 0, 2] if world == 3 else list(range(world))[::-1]
    for turn in range(2):
        mine = torch.full((20, 3), 10.0 * rank + turn, device=ctx.get_device())
        out = torch.full((60,), float("nan"), device=ctx.get_device())
        ctx.ccl.sendrecv(mine, out, partners[rank], partners[rank])
        ctx.synchronize()
        assert (out == 10.0 * partners[rank] + turn).all()
        partners = list(range(world))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_pairs_and_oneself(ranks, world):
    ranks(world).run(body_pairs_and_oneself)


def body_changed_message(ctx):
    """One pair changes the length of its message; the third rank's calls stay as they are."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    dst, src = (rank + 1) % world, (rank + world - 1) % world
    for length in (4, 4, 9):
        counts = [length, 5, 6]
        mine = torch.full((counts[rank],), float(rank + length), device=ctx.get_device())
        out = torch.full((counts[src],), float("nan"), device=ctx.get_device())
        ctx.ccl.sendrecv(mine, out, dst, src)
        ctx.synchronize()
        assert (out == src + length).all()


@pytest.mark.parametrize("world", [3])
def test_one_pair_changes_its_message(ranks, world):
    ranks(world).run(body_changed_message)


def body_disagreements(ctx):
    """U15: both learn of it, with both values, and can go on."""
    rank, device = ctx.get_rank(), ctx.get_device()
    for field, ours, theirs in (
        ("elements of tensor is 4 on rank 0, 5 on rank 1", {"n": 4}, {"n": 5}),
        ("dtype of tensor is torch.float16 on rank 0, torch.bfloat16 on rank 1",
         {"dtype": torch.float16}, {"dtype": torch.bfloat16}),
        ("tag is 1 on rank 0, 2 on rank 1", {"tag": 1}, {"tag": 2}),
        ("config is Config.* on rank 0, None on rank 1", {"config": ONE}, {}),
    ):  # fmt: skip
        mine = {"n": 4, "dtype": torch.float32, "tag": 0, "config": None} | (ours if rank == 0 else theirs)
        x = torch.zeros(mine["n"], dtype=mine["dtype"], device=device)
        with pytest.raises(RankMismatch, match=field):
            (ctx.ccl.send if rank == 0 else ctx.ccl.recv)(x, 1 - rank, tag=mine["tag"], config=mine["config"])
    sent(ctx, (4,), torch.float32, 0, 1, 1)
    x, y = torch.zeros(8, device=device), torch.zeros(8, device=device)
    with pytest.raises(RankMismatch, match="elements of the message is 4 on rank 0, 8 on rank 1"):
        ctx.ccl.sendrecv(x[:4] if rank == 0 else x, y, 1 - rank, 1 - rank)
    ctx.ccl.sendrecv(x, y, 1 - rank, 1 - rank)


@pytest.mark.parametrize("world", [2])
def test_disagreements(ranks, world):
    ranks(world).run(on_new_context, body_disagreements, context=None)


def body_wrong_partners(ctx):
    """Everybody wants to send to rank 0."""
    x, y = torch.zeros(4, device=ctx.get_device()), torch.zeros(4, device=ctx.get_device())
    dst = 1 if ctx.get_rank() == 0 else 0
    return outcome(ctx.ccl.sendrecv, x, y, dst, (ctx.get_rank() + 1) % 3)


@pytest.mark.parametrize("world", [3])
def test_partners_that_do_not_fit(ranks, world):
    for got in ranks(world).run(body_wrong_partners):
        assert "rank 0 sends to rank 1, which expects a message from rank 2" in got, got


def body_refusals(ctx):
    rank, device = ctx.get_rank(), ctx.get_device()
    x = torch.zeros(8, device=device)
    for call in (ctx.ccl.send, ctx.ccl.recv):
        with pytest.raises(ArgumentError, match="must be another rank than the caller"):
            call(x, rank)
        with pytest.raises(ArgumentError, match=r"must be a rank of the group \[0, 1\], got 2"):
            call(x, 2)
    with pytest.raises(ArgumentError, match="overlap in memory; give the received message its own memory"):
        ctx.ccl.sendrecv(x, x, 1 - rank, 1 - rank)
    with pytest.raises(ArgumentError, match="one dtype"):
        ctx.ccl.sendrecv(x, x.half(), 1 - rank, 1 - rank)
    with pytest.raises(ArgumentError, match="must both be the caller"):
        ctx.ccl.sendrecv(x, x.clone(), rank, 1 - rank)
    # Wrong on one side alone.
    if rank == 0:
        with pytest.raises(RankMismatch, match="rank 1 raised ArgumentError: tensor is written"):
            ctx.ccl.send(x, 1)
    else:
        with pytest.raises(ArgumentError, match="expanded"):
            ctx.ccl.recv(x[:1].expand(8), 0)


@pytest.mark.parametrize("world", [2])
def test_refusals(ranks, world):
    ranks(world).run(on_new_context, body_refusals, context=None)


def body_async(ctx):
    """Long messages in both directions, beside the stream."""
    rank, peer = ctx.get_rank(), 1 - ctx.get_rank()
    n = 5 * ctx.channels.layout.slot_bytes // 4
    x, y = torch.full((n,), rank + 1.0, device=ctx.get_device()), torch.zeros(n, device=ctx.get_device())
    works = [ctx.ccl.send(x, peer, async_op=True), ctx.ccl.recv(y, peer, async_op=True)] if rank == 0 else [
        ctx.ccl.recv(y, peer, async_op=True), ctx.ccl.send(x, peer, async_op=True)
    ]  # fmt: skip
    for work in works:
        work.wait()
    ctx.synchronize()
    assert (y == peer + 1.0).all()


@pytest.mark.parametrize("world", [2])
def test_beside_the_stream(ranks, world):
    ranks(world).run(body_async)


def body_waiting_messages(ctx, rounds):
    """Short messages wait in their slots: both ranks send first, and collectives that use slots come in between."""
    rank, peer, device = ctx.get_rank(), 1 - ctx.get_rank(), ctx.get_device()
    x, y = torch.zeros(70, device=device), torch.zeros(70, device=device)
    total = torch.zeros(70, device=device)
    # The ranks agree on both directions first.
    for src in (0, 1):
        ctx.ccl.send(x, peer) if rank == src else ctx.ccl.recv(y, peer)
    for turn in range(rounds):
        x.copy_(torch.arange(70, device=device) + 100 * rank + 1000 * turn)
        y.fill_(float("nan"))
        ctx.ccl.send(x, peer)
        x.fill_(-1.0)  # it has been copied
        for _ in range(turn % 3):
            ctx.ccl.all_reduce(total, y.fill_(rank + 1.0), config=Config(all_reduce_variant="push"))
            assert (total == 3.0).all()
        ctx.ccl.recv(y, peer)
        ctx.synchronize()
        assert torch.equal(y, torch.arange(70, device=device) + 100.0 * peer + 1000 * turn), turn


@pytest.mark.parametrize("world", [2])
def test_short_messages_wait_for_a_later_receiver(ranks, world):
    ranks(world).run(body_waiting_messages, 7)
