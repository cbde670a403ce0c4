"""The context: its facts, barriers, broadcast, groups, and errors that name who is missing."""

import os
import time

import numpy as np
import pytest
import torch

import iris
from iris.errors import ArgumentError, NotAMemberError, RankLost, RankMismatch


def body_facts(ctx):
    assert ctx.get_num_ranks() == int(os.environ["WORLD_SIZE"])
    assert ctx.get_rank() == int(os.environ["RANK"]) == ctx.cur_rank
    assert str(ctx.get_device()) == ctx.device
    assert ctx.zeros(1).device == ctx.get_device()
    assert ctx.get_cu_count() > 0
    assert ctx.heap_size % 1024 == 0


def test_facts(ranks, world):
    ranks(world).run(body_facts)


PLAIN = [5, 2.5, True, "text", None, {"a": [1, 2]}, [1, 2, 3], (1, "x"), b"bytes"]


def body_broadcast(ctx):
    world = ctx.get_num_ranks()
    for src in range(world):
        for value in PLAIN:
            got = ctx.broadcast(value if ctx.get_rank() == src else "ignored", src=src)
            assert got == value
            assert type(got) is type(value)
    array = ctx.broadcast(np.arange(6).reshape(2, 3) if ctx.get_rank() == 0 else None)
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    mine = torch.arange(5, dtype=torch.bfloat16, device=ctx.get_device()) if ctx.get_rank() == world - 1 else None
    tensor = ctx.broadcast(mine, src=world - 1)
    assert tensor.dtype == torch.bfloat16
    assert tensor.device == ctx.get_device()
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ArgumentError, match=f"0..{world - 1}"):
        ctx.broadcast(1, src=world)


def test_broadcast_gives_back_what_went_in(ranks, world):
    ranks(world).run(body_broadcast)


def body_barrier(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    for late in range(world):
        if rank == late:
            time.sleep(0.05)
        start = time.monotonic()
        ctx.barrier()
        ends = ctx.exchange.all_gather("test", (start, time.monotonic()))
        assert max(s for s, _ in ends) <= min(e for _, e in ends), "a rank left before the last one came"


def test_barrier_waits_for_the_last(ranks, world):
    ranks(world).run(body_barrier)


def body_outsider(ctx):
    rank = ctx.get_rank()
    for call in (ctx.barrier, ctx.device_barrier):
        if rank == 2:
            with pytest.raises(NotAMemberError, match=r"rank 2 is not a member of the group \[0, 1\]"):
                call(group=[0, 1])
        else:
            call(group=[0, 1])
    for wrong in ([0, 0], [0, 9], "01", 5):
        with pytest.raises(ArgumentError):
            ctx.barrier(group=wrong)
    ctx.barrier()


def test_only_members_of_a_group_may_call(ranks):
    ranks(3).run(body_outsider)


def body_device_barrier(ctx):
    """Pairs, the world and other pairs in turn; each rank's write before the barrier is seen after it."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    cells = ctx.zeros(world, dtype=torch.int32)
    ctx.barrier()
    groups = [None, list(range(world)), list(range(world))[::-1], None]
    if world >= 4:
        groups += [
            [0, 1] if rank < 2 else [2, 3],
            None,
            [0, 3] if rank in (0, 3) else [1, 2],
            [0, 1] if rank < 2 else [3, 2],
        ]
    for step, group in enumerate(groups, start=1):
        if rank == step % world:
            time.sleep(0.02)
        members = group if group is not None else list(range(world))
        for peer in members:
            from iris.runtime.tensors import tensor_from_ptr

            base = ctx.get_heap_bases()[peer].item() + cells.data_ptr() - ctx.heap.base
            tensor_from_ptr(base + 4 * rank, 1, torch.int32, ctx.get_device()).fill_(step)
        ctx.device_barrier(group)
        seen = cells.clone()
        ctx.device_barrier(group)
        ctx.synchronize()
        assert all(seen[peer].item() == step for peer in members), (step, group, seen.tolist())
    ctx.barrier()


def test_device_barrier_in_any_mixture_of_groups(ranks, world):
    ranks(world).run(body_device_barrier)


def body_different_calls(ctx):
    call = ctx.barrier if ctx.get_rank() == 0 else lambda: ctx.broadcast(1)
    with pytest.raises(RankMismatch, match=r"rank 0 is in barrier\(\); rank 1 is in broadcast\(\)"):
        call()
    ctx.barrier()


def test_ranks_in_different_calls_learn_which(ranks):
    ranks(2).run(body_different_calls)


def body_never_arrives(rank, world_size):
    os.environ["IRIS_TIMEOUT"] = "1.5"
    try:
        ctx = iris.iris(1 << 20)
        if rank == 1:
            time.sleep(4)
            return
        with pytest.raises(
            RankLost, match=r"rank 1 did not arrive at barrier\(\) within 1.5 s \(IRIS_TIMEOUT\)"
        ) as caught:
            ctx.barrier()
        assert caught.value.ranks == (1,)
    finally:
        del os.environ["IRIS_TIMEOUT"]


@pytest.mark.processes("it ends by a time limit, and one rank returns early")
def test_a_rank_that_never_arrives_is_named(ranks):
    ranks(3).run(body_never_arrives, context=None)


def body_bad_arguments(rank, world_size):
    for arguments in ({"allocator_type": "magic"}, {"copy_engine": "magic"}, {"heap_size": 0}, {"heap_size": "big"}):
        with pytest.raises(ValueError, match=r"possible|above 0"):
            iris.iris(**arguments)
    with pytest.raises(ImportError, match="sdma"):
        iris.iris(copy_engine="sdma")
    for allocator in ("vmem", "vmem_chunked", "torch"):
        assert iris.iris(1 << 20, allocator).is_symmetric is not None


def test_bad_arguments_of_the_factory(ranks):
    ranks(2).run(body_bad_arguments, context=None)
