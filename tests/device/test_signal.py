"""Flags and waits: data is seen after a wait, epochs wrap, a wait that cannot end is an error on every rank."""

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris.device import signal
from iris.errors import WaitTimeout

STRIDE = 32


@triton.jit
def exchange_kernel(
    context, data, inbox, flags, epoch, n, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr
):
    """Program p sends its block to every rank and waits for the same block of every rank."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    flag = flags + (pid * world + rank) * 32
    for step in range(world):
        peer = (rank + step) % world
        ctx.store(inbox + rank * n + offs, tl.load(data + offs, mask=mask), to_rank=peer, mask=mask)
        ctx.notify(flag, epoch, peer)
    for step in range(world):
        ctx.wait(flags + (pid * world + step) * 32, epoch, peer=step)
        received = tl.load(inbox + step * n + offs, mask=mask)
        tl.store(data + (step + 1) * n + offs, received, mask=mask)


@triton.jit
def later_program_kernel(context, flag, result, rank: tl.constexpr, world: tl.constexpr):
    """Program 0 waits for the last program of its own grid."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    pid = tl.program_id(0)
    if pid == 0:
        arrived = ctx.wait(flag, 1)
        tl.store(result, arrived)
    if pid == tl.num_programs(0) - 1:
        ctx.notify(flag, 1, rank)


@triton.jit
def wait_kernel(
    context, flag, value, result, rank: tl.constexpr, world: tl.constexpr, PEER: tl.constexpr, APART: tl.constexpr
):
    if APART:
        slot, limit = signal.slot_and_limit(context)
        arrived = signal.wait_apart(flag, value, slot, limit, context, PEER)
    else:
        ctx = iris.DeviceContext.initialize(context, rank, world)
        arrived = ctx.wait(flag, value, peer=PEER)
    tl.store(result, arrived)


@triton.jit
def count_kernel(context, flag, rank: tl.constexpr, world: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    for peer in range(world):
        ctx.notify_add(flag, 1, peer)
    ctx.wait(flag, world * tl.num_programs(0))


def body_exchange(ctx, calls, first_epoch):
    rank, world, n, block, programs = ctx.get_rank(), ctx.get_num_ranks(), 90, 32, 3
    inbox = ctx.zeros(world, n, dtype=torch.float32)
    flags = ctx.zeros(programs * world * STRIDE, dtype=torch.int32).fill_(first_epoch - 1)
    data = torch.empty(world + 1, n, device=ctx.get_device())
    ctx.barrier()
    epoch = first_epoch
    for call in range(calls):
        data.fill_(float("nan"))
        data[0] = torch.arange(n) + 1000.0 * rank + 0.5 * call
        exchange_kernel[(programs,)](ctx.get_device_context(), data, inbox, flags, epoch, n, rank, world, BLOCK=block)
        ctx.barrier()  # the inbox is used again in the next call
        want = torch.stack([torch.arange(n) + 1000.0 * r + 0.5 * call for r in range(world)])
        assert torch.equal(data[1:].cpu(), want), f"call {call}"
        epoch = epoch + 1 if epoch < 2**31 - 1 else -(2**31)


def test_data_is_seen_after_the_wait(ranks, world):
    ranks(world).run(body_exchange, 5, 1)


def test_epochs_wrap_past_the_largest_int32(ranks, world):
    ranks(world).run(body_exchange, 4, 2**31 - 2)


def body_later_program(ctx, programs):
    flag, result = ctx.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    later_program_kernel[(programs,)](ctx.get_device_context(), flag, result, ctx.get_rank(), ctx.get_num_ranks())
    ctx.synchronize()
    assert result.item() == 1


@pytest.mark.parametrize("programs", [2, 100])
def test_wait_for_a_later_program_of_the_grid(ranks, programs):
    ranks(1).run(body_later_program, programs)


def body_count(ctx):
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    count_kernel[(4,)](ctx.get_device_context(), flag, ctx.get_rank(), ctx.get_num_ranks())
    ctx.barrier()
    assert flag.item() == 4 * ctx.get_num_ranks()


def test_counting_flag(ranks, world):
    ranks(world).run(body_count)


def body_already_set(ctx, apart):
    flag = ctx.full((1,), 7, dtype=torch.int32)
    result = torch.zeros(1, dtype=torch.int32, device=ctx.get_device())
    for value in (7, 6, -5):
        result.zero_()
        wait_kernel[(1,)](
            ctx.get_device_context(), flag, value, result, ctx.get_rank(), ctx.get_num_ranks(), PEER=0, APART=apart
        )
        ctx.synchronize()
        assert result.item() == 1, value


@pytest.mark.parametrize("apart", [False, True])
def test_wait_for_a_flag_that_is_set(ranks, apart):
    ranks(1).run(body_already_set, apart)


def body_timeout(rank, world_size, limit, apart):
    import os

    # Compiled before the short limit counts.
    warm = iris.iris(1 << 20)
    set_flag, result = (
        warm.full((1,), 9, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32, device=warm.get_device()),
    )
    for peer in {0, world_size - 1}:
        wait_kernel[(1,)](warm.get_device_context(), set_flag, 3, result, rank, world_size, PEER=peer, APART=apart)
    warm.barrier()
    os.environ["IRIS_TIMEOUT"] = str(limit)
    ctx = iris.iris(1 << 20)
    flag = ctx.heap.allocate(4, torch.int32, site="the test's flag").zero_()
    result = torch.full((1,), 5, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    message = ""
    try:
        if rank == 0:
            wait_kernel[(1,)](
                ctx.get_device_context(), flag[2:], 3, result, rank, world_size, PEER=world_size - 1, APART=apart
            )
        ctx.barrier()
    except WaitTimeout as error:
        message = str(error)
        records = error.records
    assert message, f"rank {rank} did not learn of the timeout"
    assert records[0].rank == 0
    assert records[0].wanted == 3
    assert records[0].seen == 0
    assert records[0].peer == world_size - 1
    for part in ("rank 0", "the test's flag[2]", "reach 3", "last saw 0", f"rank {world_size - 1}", "IRIS_TIMEOUT"):
        assert part in message, message
    # The context works on: the slot was reset on every rank.
    flag.fill_(9)
    ctx.barrier()
    wait_kernel[(1,)](ctx.get_device_context(), flag[2:], 3, result, rank, world_size, PEER=0, APART=apart)
    ctx.barrier()
    assert result.item() == 1
    os.environ.pop("IRIS_TIMEOUT")


@pytest.mark.processes("a wait that ends by its time limit; simulated ones end as deadlocks")
def test_a_wait_in_vain_is_an_error_on_every_rank(ranks, world):
    ranks(world).run(body_timeout, 2.0, False, context=None)


@pytest.mark.processes("a wait that ends by its time limit; simulated ones end as deadlocks")
@pytest.mark.parametrize("world", [2])
def test_a_wait_of_threads_in_vain_is_an_error_on_every_rank(ranks, world):
    ranks(world).run(body_timeout, 2.0, True, context=None)
