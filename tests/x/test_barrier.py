"""What the in-stream barrier rests on: counts of each pair that are never reset and may wrap, one set a context."""

import os
import time

import pytest
import torch

import iris
from iris.errors import WaitTimeout

LINE = 32  # int32 words between the flags of two ranks
LARGEST = 2**31 - 1


def counts(ctx):
    """How often each rank has arrived here, and how often this rank has met each."""
    ctx.synchronize()
    return ctx.barrier_flags[::LINE].cpu().clone(), ctx.barrier_epochs.cpu().clone()


def body_counts(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    ctx.barrier()
    flags, epochs = counts(ctx)
    ctx.barrier()  # everyone has read
    ctx.device_barrier()
    if rank > 0:
        ctx.device_barrier(list(range(1, world)))
    ctx.device_barrier()
    ctx.barrier()
    met = torch.tensor([0 if peer == rank else 3 if rank and peer else 2 for peer in range(world)], dtype=torch.int32)
    after = counts(ctx)
    assert torch.equal(after[0] - flags, met), "arrivals of each rank"
    assert torch.equal(after[1] - epochs, met), "barriers with each rank"
    lines = ctx.barrier_flags.cpu().view(world, LINE)
    assert not lines[:, 1:].any(), "nothing is written between the flags"
    ctx.barrier()


def test_each_pair_counts_the_barriers_of_both(ranks, world):
    ranks(world).run(body_counts)


def body_wrap(rank, world_size):
    ctx = iris.iris(1 << 20)
    ctx.barrier_flags[::LINE] = LARGEST - 2
    ctx.barrier_epochs.fill_(LARGEST - 2)
    ctx.barrier()
    for call in range(6):
        if call % world_size == rank:
            time.sleep(0.005)
        ctx.device_barrier()
    ctx.barrier()
    flags, epochs = counts(ctx)
    for peer in range(world_size):
        # Six steps from there, past the largest int32.
        want = LARGEST - 2 if peer == rank else -(2**31) + 3
        assert flags[peer] == epochs[peer] == want


def test_counts_wrap(ranks):
    ranks(3).run(body_wrap, context=None)


def body_two_contexts(rank, world_size):
    """A barrier of one context is none of another."""
    first, second = iris.iris(1 << 20), iris.iris(1 << 20)
    before = counts(first)
    second.device_barrier()
    second.barrier()
    after = counts(first)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert counts(second)[0][1 - rank] == 1


def test_contexts_count_for_themselves(ranks):
    ranks(2).run(body_two_contexts, context=None)


def body_no_host_between(ctx, calls):
    world, rank = ctx.get_num_ranks(), ctx.get_rank()
    ctx.barrier()
    start = counts(ctx)[1]
    ctx.barrier()
    for _ in range(calls):
        ctx.device_barrier()
    # Nobody has begun another one: the host barrier comes after this.
    flags, epochs = counts(ctx)
    for peer in range(world):
        if peer != rank:
            assert epochs[peer] - start[peer] == calls
            assert flags[peer] - start[peer] == calls
    ctx.barrier()


def test_many_in_a_row(ranks, world):
    ranks(world).run(body_no_host_between, 40)


def meet(ctx):
    ctx.device_barrier()
    ctx.synchronize()


def body_missing(rank, world_size):
    os.environ["IRIS_TIMEOUT"] = "2"
    ctx = iris.iris(1 << 20)
    if rank == 1:
        time.sleep(4)
        return
    with pytest.raises(WaitTimeout) as caught:
        meet(ctx)
    (record,) = caught.value.records
    assert (record.rank, record.kernel, record.peer, record.wanted, record.seen) == (rank, "device_barrier", 1, 1, 0)


@pytest.mark.processes("a wait that ends by its time limit; simulated ones end as deadlocks")
def test_a_rank_that_does_not_come_is_named(ranks):
    ranks(2).run(body_missing, context=None)
