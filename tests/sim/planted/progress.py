"""Bugs that end in a wait for something that never comes."""

import torch
import triton
import triton.language as tl

import iris

BLOCK = 16


def numbers(rank, tile=0):
    return torch.arange(BLOCK, dtype=torch.int32) + 100 * rank + 1000 * tile


@triton.jit
def launch_order_kernel(
    context,
    blocks,
    staged,
    flags,
    ticket,
    out,
    rank: tl.constexpr,
    world: tl.constexpr,
    TILES: tl.constexpr,
    BY_TICKET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Roles ``0..TILES-1`` fetch a tile of the next rank each, the others wait for one of them and pass it on.

    Only some programs run at a time, and nothing says which. Who takes a ticket runs, so roles that are given out by
    ticket wait for roles that run already.
    """
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.arange(0, BLOCK)
    if BY_TICKET:
        role = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
    else:
        role = tl.program_id(0)
    tile = role % TILES
    if role < TILES:
        ctx.get(blocks + tile * BLOCK + offs, staged + tile * BLOCK + offs, from_rank=(rank + 1) % world)
        ctx.notify(flags + tile, 1, rank)
    else:
        ctx.wait(flags + tile, 1)
        tl.store(out + tile * BLOCK + offs, 2 * tl.load(staged + tile * BLOCK + offs))


def launch_order(ctx, by_ticket):
    rank, world, tiles = ctx.get_rank(), ctx.get_num_ranks(), 3
    blocks = ctx.as_symmetric(torch.stack([numbers(rank, tile) for tile in range(tiles)]).to(ctx.get_device()))
    staged = torch.full((tiles, BLOCK), -1, dtype=torch.int32, device=ctx.get_device())
    flags = ctx.zeros(tiles, dtype=torch.int32)
    ticket = torch.zeros(1, dtype=torch.int32, device=ctx.get_device())
    out = torch.full((tiles, BLOCK), -1, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    launch_order_kernel[(2 * tiles,)](
        ctx.get_device_context(),
        blocks,
        staged,
        flags,
        ticket,
        out,
        rank,
        world,
        TILES=tiles,
        BY_TICKET=by_ticket,
        BLOCK=BLOCK,
    )
    ctx.barrier()
    assert torch.equal(out.cpu(), 2 * torch.stack([numbers((rank + 1) % world, tile) for tile in range(tiles)]))


def launch_order_faulty(ctx):
    launch_order(ctx, by_ticket=False)


def launch_order_fixed(ctx):
    launch_order(ctx, by_ticket=True)


@triton.jit
def swap_kernel(context, block, inbox, peer, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    """Writes ``block`` into the inbox of ``peer``; a barrier of the two has to follow."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.arange(0, BLOCK)
    ctx.store(inbox + offs, tl.load(block + offs), to_rank=peer)


def group_barrier(ctx, group):
    """Ranks 0 and 1 swap a block; rank 2 has no part in it."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    block = numbers(rank).to(ctx.get_device())
    inbox = ctx.full((BLOCK,), -1, dtype=torch.int32)
    ctx.barrier()
    if rank < 2:
        swap_kernel[(1,)](ctx.get_device_context(), block, inbox, 1 - rank, rank, world, BLOCK=BLOCK)
        ctx.device_barrier(group)
        block.copy_(inbox)
    ctx.barrier()
    assert torch.equal(block.cpu(), numbers(1 - rank if rank < 2 else rank))


def group_barrier_faulty(ctx):
    group_barrier(ctx, group=None)


def group_barrier_fixed(ctx):
    group_barrier(ctx, group=[0, 1])


@triton.jit
def counting_barrier_kernel(
    context, counter, epoch, source, total, size, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr
):
    """A barrier of ranks ``0..size-1`` at a counter on rank 0 that is never reset, then the sum of their ``source``.

    Everyone arrives once at each barrier, so ``epoch`` barriers of ``size`` ranks are over when ``epoch * size`` have
    arrived, provided that no other barriers use the counter.
    """
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.arange(0, BLOCK)
    tl.debug_barrier()
    ctx.atomic_add(counter, 1, 0, sem="release", scope="sys")
    while ctx.atomic_add(counter, 0, 0, sem="acquire", scope="sys") - epoch * size < 0:
        pass
    acc = tl.zeros((BLOCK,), dtype=tl.int32)
    for peer in range(size):
        acc += ctx.load(source + offs, from_rank=peer)
    tl.store(total + offs, acc)


def counting_barrier(ctx, shared):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    sizes = [2, 3, 2]  # ranks 0 and 1, then all three, then ranks 0 and 1
    source = ctx.as_symmetric(numbers(rank).to(ctx.get_device()))
    counters = ctx.zeros(4, dtype=torch.int32)
    total = torch.full((len(sizes), BLOCK), -1, dtype=torch.int32, device=ctx.get_device())
    epochs = [0] * 4
    ctx.barrier()
    for call, size in enumerate(sizes):
        which = 0 if shared else size
        if rank < size:
            epochs[which] += 1
            counting_barrier_kernel[(1,)](
                ctx.get_device_context(),
                counters[which:],
                epochs[which],
                source,
                total[call],
                size,
                rank,
                world,
                BLOCK=BLOCK,
            )
    ctx.barrier()
    for call, size in enumerate(sizes):
        if rank < size:
            assert torch.equal(total[call].cpu(), sum(numbers(r) for r in range(size)))


def counting_barrier_faulty(ctx):
    counting_barrier(ctx, shared=True)


def counting_barrier_fixed(ctx):
    counting_barrier(ctx, shared=False)


@triton.jit
def ring_tail_kernel(
    context,
    data,
    inbox,
    flags,
    total,
    rank: tl.constexpr,
    world: tl.constexpr,
    TILES: tl.constexpr,
    PER_FLAG: tl.constexpr,
    SIGNAL_TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums ``data`` of all ranks: in each step a rank hands on what it received in the step before and adds it.

    Every step has its own row of the inbox and of the flags. One flag stands for ``PER_FLAG`` tiles; the last flag of a
    row may stand for fewer.
    """
    ctx = iris.DeviceContext.initialize(context, rank, world)
    to = (rank + 1) % world
    offs = tl.arange(0, BLOCK)
    groups: tl.constexpr = (TILES + PER_FLAG - 1) // PER_FLAG
    for tile in range(TILES):
        tl.store(total + tile * BLOCK + offs, tl.load(data + tile * BLOCK + offs))
    held = data
    for step in range(world - 1):
        arriving = inbox + step * TILES * BLOCK
        for tile in range(TILES):
            ctx.put(held + tile * BLOCK + offs, arriving + tile * BLOCK + offs, to)
            last = (tile + 1) % PER_FLAG == 0
            if SIGNAL_TAIL:
                last = last | (tile == TILES - 1)
            if last:
                ctx.notify(flags + step * groups + tile // PER_FLAG, 1, to)
        for group in range(groups):
            ctx.wait(flags + step * groups + group, 1, peer=(rank + world - 1) % world)
        for tile in range(TILES):
            place = tile * BLOCK + offs
            tl.store(total + place, tl.load(total + place) + tl.load(arriving + place))
        held = arriving


def ring_tail(ctx, signal_tail):
    rank, world, tiles, per_flag = ctx.get_rank(), ctx.get_num_ranks(), 3, 2
    data = torch.stack([numbers(rank, tile) for tile in range(tiles)]).to(ctx.get_device())
    inbox = ctx.full((world - 1, tiles, BLOCK), -1, dtype=torch.int32)
    flags = ctx.zeros((world - 1) * triton.cdiv(tiles, per_flag), dtype=torch.int32)
    total = torch.full((tiles, BLOCK), -1, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    ring_tail_kernel[(1,)](
        ctx.get_device_context(),
        data,
        inbox,
        flags,
        total,
        rank,
        world,
        TILES=tiles,
        PER_FLAG=per_flag,
        SIGNAL_TAIL=signal_tail,
        BLOCK=BLOCK,
    )
    ctx.barrier()
    expected = torch.stack([sum(numbers(r, tile) for r in range(world)) for tile in range(tiles)])
    assert torch.equal(total.cpu(), expected)


def ring_tail_faulty(ctx):
    ring_tail(ctx, signal_tail=False)


def ring_tail_fixed(ctx):
    ring_tail(ctx, signal_tail=True)
