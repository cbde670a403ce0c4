"""Bugs in the order of stores, signals and loads. Every kernel sends one block to the next rank and receives one."""

import torch
import triton
import triton.language as tl

import iris

BLOCK = 32


def numbers(rank):
    return 7 * torch.arange(BLOCK, dtype=torch.int32) + 1000 * rank


def run(ctx, kernel, **modes):
    """Pass every rank's block to the next rank with ``kernel`` and compare what arrived."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    block = numbers(rank).to(ctx.get_device())
    inbox = ctx.full((BLOCK,), -1, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int32)
    received = torch.full((BLOCK,), -1, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    kernel[(1,)](ctx.get_device_context(), block, inbox, flag, received, rank, world, **modes, BLOCK=BLOCK)
    ctx.barrier()
    assert torch.equal(received.cpu(), numbers((rank - 1) % world))


@triton.jit
def weak_flag_kernel(
    context,
    block,
    inbox,
    flag,
    received,
    rank: tl.constexpr,
    world: tl.constexpr,
    SET_SEM: tl.constexpr,
    SET_SCOPE: tl.constexpr,
    WAIT_SEM: tl.constexpr,
    WAIT_SCOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sender sets the flag with a release, the receiver polls it with an acquire, both at the scope ``sys``."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    peer = (rank + 1) % world
    offs = tl.arange(0, BLOCK)
    ctx.store(inbox + offs, tl.load(block + offs), to_rank=peer)
    tl.debug_barrier()
    ctx.atomic_xchg(flag, 1, peer, sem=SET_SEM, scope=SET_SCOPE)
    while ctx.atomic_add(flag, 0, rank, sem=WAIT_SEM, scope=WAIT_SCOPE) == 0:
        pass
    tl.store(received + offs, tl.load(inbox + offs))


STRONG = {"SET_SEM": "release", "SET_SCOPE": "sys", "WAIT_SEM": "acquire", "WAIT_SCOPE": "sys"}


def strong_flag(ctx):
    run(ctx, weak_flag_kernel, **STRONG)


def set_at_gpu_scope(ctx):
    run(ctx, weak_flag_kernel, **{**STRONG, "SET_SCOPE": "gpu"})


def wait_at_gpu_scope(ctx):
    run(ctx, weak_flag_kernel, **{**STRONG, "WAIT_SCOPE": "gpu"})


def relaxed_set(ctx):
    run(ctx, weak_flag_kernel, **{**STRONG, "SET_SEM": "relaxed"})


def relaxed_wait(ctx):
    run(ctx, weak_flag_kernel, **{**STRONG, "WAIT_SEM": "relaxed"})


@triton.jit
def volatile_poll_kernel(
    context,
    block,
    inbox,
    flag,
    received,
    rank: tl.constexpr,
    world: tl.constexpr,
    ACQUIRE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The receiver polls with volatile loads, which order nothing, and then acquires once."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    peer = (rank + 1) % world
    offs = tl.arange(0, BLOCK)
    ctx.store(inbox + offs, tl.load(block + offs), to_rank=peer)
    ctx.notify(flag, 1, peer)
    while tl.load(flag, volatile=True) == 0:
        pass
    if ACQUIRE:
        ctx.atomic_add(flag, 0, rank, sem="acquire", scope="sys")
    tl.store(received + offs, tl.load(inbox + offs))


def volatile_poll_faulty(ctx):
    run(ctx, volatile_poll_kernel, ACQUIRE=False)


def volatile_poll_fixed(ctx):
    run(ctx, volatile_poll_kernel, ACQUIRE=True)


@triton.jit
def early_signal_kernel(
    context,
    block,
    inbox,
    flag,
    received,
    rank: tl.constexpr,
    world: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The flag says that the block is in the inbox, so it is set after the store."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    peer = (rank + 1) % world
    offs = tl.arange(0, BLOCK)
    if EARLY:
        ctx.notify(flag, 1, peer)
    ctx.store(inbox + offs, tl.load(block + offs), to_rank=peer)
    if not EARLY:
        ctx.notify(flag, 1, peer)
    ctx.wait(flag, 1)
    tl.store(received + offs, tl.load(inbox + offs))


def early_signal_faulty(ctx):
    run(ctx, early_signal_kernel, EARLY=True)


def early_signal_fixed(ctx):
    run(ctx, early_signal_kernel, EARLY=False)


@triton.jit
def early_load_kernel(
    context,
    block,
    inbox,
    flag,
    received,
    rank: tl.constexpr,
    world: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The receiver loads its inbox after the wait."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    peer = (rank + 1) % world
    offs = tl.arange(0, BLOCK)
    ctx.store(inbox + offs, tl.load(block + offs), to_rank=peer)
    ctx.notify(flag, 1, peer)
    if EARLY:
        arrived = tl.load(inbox + offs)
        ctx.wait(flag, 1)
    else:
        ctx.wait(flag, 1)
        arrived = tl.load(inbox + offs)
    tl.store(received + offs, arrived)


def early_load_faulty(ctx):
    run(ctx, early_load_kernel, EARLY=True)


def early_load_fixed(ctx):
    run(ctx, early_load_kernel, EARLY=False)


@triton.jit
def missing_debug_barrier_kernel(
    context,
    block,
    inbox,
    flag,
    received,
    rank: tl.constexpr,
    world: tl.constexpr,
    MEET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One thread releases for all, so the threads of the program meet between the store and the release."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    peer = (rank + 1) % world
    offs = tl.arange(0, BLOCK)
    ctx.store(inbox + offs, tl.load(block + offs), to_rank=peer)
    if MEET:
        tl.debug_barrier()
    ctx.atomic_xchg(flag, 1, peer, sem="release", scope="sys")
    ctx.wait(flag, 1)
    tl.store(received + offs, tl.load(inbox + offs))


def missing_debug_barrier_faulty(ctx):
    run(ctx, missing_debug_barrier_kernel, MEET=False)


def missing_debug_barrier_fixed(ctx):
    run(ctx, missing_debug_barrier_kernel, MEET=True)


@triton.jit
def unwaited_tile_kernel(
    context,
    tiles,
    flags,
    gathered,
    rank: tl.constexpr,
    world: tl.constexpr,
    TILES: tl.constexpr,
    PER_FLAG: tl.constexpr,
    WAIT_AT_START: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program 0 fills this rank's tiles; program 1 reads the next rank's, each ``PER_FLAG`` tiles behind one flag.

    The reader begins at another tile than 0, as many tiles further as it has a rank, to spread the load. Its first tile
    need not be the first of its flag.
    """
    ctx = iris.DeviceContext.initialize(context, rank, world)
    peer = (rank + 1) % world
    offs = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        for tile in range(TILES):
            tl.store(tiles + tile * BLOCK + offs, offs + 100 * tile + 1000 * rank)
            if (tile + 1) % PER_FLAG == 0:
                ctx.notify(flags + tile // PER_FLAG, 1, (rank + world - 1) % world)
    else:
        for step in range(TILES):
            tile = (rank + 1 + step) % TILES
            first = tile % PER_FLAG == 0
            if WAIT_AT_START:
                first = first | (step == 0)
            if first:
                ctx.wait(flags + tile // PER_FLAG, 1, peer=peer)
            ctx.get(tiles + tile * BLOCK + offs, gathered + tile * BLOCK + offs, from_rank=peer)


def unwaited_tile(ctx, wait_at_start):
    rank, world, count, per_flag = ctx.get_rank(), ctx.get_num_ranks(), 4, 2
    tiles = ctx.full((count, BLOCK), -1, dtype=torch.int32)
    flags = ctx.zeros(count // per_flag, dtype=torch.int32)
    gathered = torch.full((count, BLOCK), -1, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    unwaited_tile_kernel[(2,)](
        ctx.get_device_context(),
        tiles,
        flags,
        gathered,
        rank,
        world,
        TILES=count,
        PER_FLAG=per_flag,
        WAIT_AT_START=wait_at_start,
        BLOCK=BLOCK,
    )
    ctx.barrier()
    peer = (rank + 1) % world
    expected = torch.arange(BLOCK)[None, :] + 100 * torch.arange(count)[:, None] + 1000 * peer
    assert torch.equal(gathered.cpu().long(), expected)


def unwaited_tile_faulty(ctx):
    unwaited_tile(ctx, wait_at_start=False)


def unwaited_tile_fixed(ctx):
    unwaited_tile(ctx, wait_at_start=True)
