"""Bugs in the value of a flag, or in which flag is meant."""

import torch
import triton
import triton.language as tl

import iris

BLOCK = 32
LARGEST = 2**31 - 1


def numbers(rank, call=0):
    return torch.arange(BLOCK, dtype=torch.int32) + 100 * rank + 1000 * call


@triton.jit
def stale_flag_kernel(
    context, block, inbox, flag, received, epoch, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr
):
    """Sends a block to the next rank and receives one from the rank before.

    A flag that holds ``epoch`` says that this call's block is in the inbox. Nothing resets it, so every call must come
    with a greater epoch.
    """
    ctx = iris.DeviceContext.initialize(context, rank, world)
    peer = (rank + 1) % world
    offs = tl.arange(0, BLOCK)
    ctx.store(inbox + offs, tl.load(block + offs), to_rank=peer)
    ctx.notify(flag, epoch, peer)
    ctx.wait(flag, epoch, peer=(rank + world - 1) % world)
    tl.store(received + offs, tl.load(inbox + offs))


def stale_flag(ctx, constant):
    rank, world, calls = ctx.get_rank(), ctx.get_num_ranks(), 3
    inbox = ctx.full((BLOCK,), -1, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int32)
    received = torch.full((calls, BLOCK), -1, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    for call in range(calls):
        block = numbers(rank, call).to(ctx.get_device())
        epoch = 1 if constant else call + 1
        stale_flag_kernel[(1,)](
            ctx.get_device_context(), block, inbox, flag, received[call], epoch, rank, world, BLOCK=BLOCK
        )
        ctx.barrier()  # everyone has read its inbox
    sender = (rank - 1) % world
    assert torch.equal(received.cpu(), torch.stack([numbers(sender, call) for call in range(calls)]))


def stale_flag_faulty(ctx):
    stale_flag(ctx, constant=True)


def stale_flag_fixed(ctx):
    stale_flag(ctx, constant=False)


@triton.jit
def counter_wrap_kernel(
    context,
    block,
    inbox,
    flag,
    received,
    epoch,
    rank: tl.constexpr,
    world: tl.constexpr,
    DIFFERENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As ``stale_flag_kernel``, with a wait of its own. The epoch goes on from the largest int32 to the smallest."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    peer = (rank + 1) % world
    offs = tl.arange(0, BLOCK)
    ctx.store(inbox + offs, tl.load(block + offs), to_rank=peer)
    ctx.notify(flag, epoch, peer)
    if DIFFERENCE:
        while ctx.atomic_add(flag, 0, rank, sem="acquire", scope="sys") - epoch < 0:
            pass
    else:
        while ctx.atomic_add(flag, 0, rank, sem="acquire", scope="sys") < epoch:
            pass
    tl.store(received + offs, tl.load(inbox + offs))


def counter_wrap(ctx, difference):
    rank, world, calls = ctx.get_rank(), ctx.get_num_ranks(), 4
    epochs = [LARGEST - 1, LARGEST, -LARGEST - 1, -LARGEST]
    inbox = ctx.full((BLOCK,), -1, dtype=torch.int32)
    flag = ctx.full((1,), LARGEST - 2, dtype=torch.int32)
    received = torch.full((calls, BLOCK), -1, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    for call, epoch in enumerate(epochs):
        block = numbers(rank, call).to(ctx.get_device())
        counter_wrap_kernel[(1,)](
            ctx.get_device_context(),
            block,
            inbox,
            flag,
            received[call],
            epoch,
            rank,
            world,
            DIFFERENCE=difference,
            BLOCK=BLOCK,
        )
        ctx.barrier()  # everyone has read its inbox
    sender = (rank - 1) % world
    assert torch.equal(received.cpu(), torch.stack([numbers(sender, call) for call in range(calls)]))


def counter_wrap_faulty(ctx):
    counter_wrap(ctx, difference=False)


def counter_wrap_fixed(ctx):
    counter_wrap(ctx, difference=True)


@triton.jit
def wrong_flag_kernel(
    context, block, inbox, flags, received, sender, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr
):
    """Sends a block to the next rank. Flag r of a rank says that the block of rank r is in its inbox."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    peer = (rank + 1) % world
    offs = tl.arange(0, BLOCK)
    ctx.store(inbox + offs, tl.load(block + offs), to_rank=peer)
    ctx.notify(flags + rank, 1, peer)
    ctx.wait(flags + sender, 1, peer=sender)
    tl.store(received + offs, tl.load(inbox + offs))


def wrong_flag(ctx, step):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    block = numbers(rank).to(ctx.get_device())
    inbox = ctx.full((BLOCK,), -1, dtype=torch.int32)
    flags = ctx.zeros(world, dtype=torch.int32)
    received = torch.full((BLOCK,), -1, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    sender = (rank + step) % world
    wrong_flag_kernel[(1,)](ctx.get_device_context(), block, inbox, flags, received, sender, rank, world, BLOCK=BLOCK)
    ctx.barrier()
    assert torch.equal(received.cpu(), numbers((rank - 1) % world))


def wrong_flag_faulty(ctx):
    wrong_flag(ctx, step=1)


def wrong_flag_fixed(ctx):
    wrong_flag(ctx, step=-1)


@triton.jit
def overwritten_arrival_kernel(
    context, block, gathered, arrived, rank: tl.constexpr, world: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Gathers a block of every rank on rank 0, which waits until all the others have arrived at one flag."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.arange(0, BLOCK)
    ctx.store(gathered + rank * BLOCK + offs, tl.load(block + offs), to_rank=0)
    if rank == 0:
        ctx.wait(arrived, world - 1)
        total = tl.load(gathered + offs)
        for peer in range(1, world):
            total += tl.load(gathered + peer * BLOCK + offs)
        tl.store(block + offs, total)
    elif COUNT:
        ctx.notify_add(arrived, 1, 0)
    else:
        ctx.notify(arrived, 1, 0)


def overwritten_arrival(ctx, count):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    block = numbers(rank).to(ctx.get_device())
    gathered = ctx.full((world, BLOCK), -1, dtype=torch.int32)
    arrived = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    overwritten_arrival_kernel[(1,)](
        ctx.get_device_context(), block, gathered, arrived, rank, world, COUNT=count, BLOCK=BLOCK
    )
    ctx.barrier()
    expected = sum(numbers(r) for r in range(world)) if rank == 0 else numbers(rank)
    assert torch.equal(block.cpu(), expected)


def overwritten_arrival_faulty(ctx):
    overwritten_arrival(ctx, count=False)


def overwritten_arrival_fixed(ctx):
    overwritten_arrival(ctx, count=True)


@triton.jit
def lost_token_kernel(
    context, block, gathered, tokens, stride, total, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr
):
    """Gathers a block of every rank on rank 0, in rank order. Rank r sets token r (``stride`` apart) to r."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.arange(0, BLOCK)
    if rank > 0:
        ctx.store(gathered + rank * BLOCK + offs, tl.load(block + offs), to_rank=0)
        ctx.notify(tokens + rank * stride, rank, 0)
    else:
        acc = tl.load(block + offs)
        for peer in range(1, world):
            # Equality: a token that another has replaced before it was seen never comes back.
            while ctx.atomic_add(tokens + peer * stride, 0, 0, sem="acquire", scope="sys") != peer:
                pass
            acc += tl.load(gathered + peer * BLOCK + offs)
        tl.store(total + offs, acc)


def lost_token(ctx, stride):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    block = numbers(rank).to(ctx.get_device())
    gathered = ctx.full((world, BLOCK), -1, dtype=torch.int32)
    tokens = ctx.zeros(world, dtype=torch.int32)
    total = torch.full((BLOCK,), -1, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    lost_token_kernel[(1,)](ctx.get_device_context(), block, gathered, tokens, stride, total, rank, world, BLOCK=BLOCK)
    ctx.barrier()
    if rank == 0:
        assert torch.equal(total.cpu(), sum(numbers(r) for r in range(world)))


def lost_token_faulty(ctx):
    lost_token(ctx, stride=0)


def lost_token_fixed(ctx):
    lost_token(ctx, stride=1)
