"""Bugs of spin locks. Every rank adds its block to a sum on rank 0, under a lock on rank 0 (0 free, 1 taken)."""

import torch
import triton
import triton.language as tl

import iris

BLOCK = 16


def numbers(rank):
    return torch.arange(BLOCK, dtype=torch.int32) + 100 * rank


def run(ctx, kernel, mode):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    block = numbers(rank).to(ctx.get_device())
    total = ctx.zeros(BLOCK, dtype=torch.int32)
    lock = ctx.zeros(1, dtype=torch.int32)
    turn = ctx.zeros(1, dtype=torch.int32)
    if rank == 0:
        turn.fill_(1)
    ctx.barrier()
    kernel[(1,)](ctx.get_device_context(), block, total, lock, turn, rank, world, mode, BLOCK=BLOCK)
    ctx.barrier()
    if rank == 0:
        assert torch.equal(total.cpu(), sum(numbers(r) for r in range(world)))


@triton.jit
def take(ctx, lock):
    """Take the lock on rank 0."""
    while ctx.atomic_cas(lock, 0, 1, 0, sem="acquire", scope="sys") == 1:
        pass


@triton.jit
def add(ctx, block, total, offs):
    """Add to the sum on rank 0; only under the lock, since it reads and writes."""
    ctx.store(total + offs, ctx.load(total + offs, from_rank=0) + tl.load(block + offs), to_rank=0)


@triton.jit
def relaxed_unlock_kernel(
    context, block, total, lock, turn, rank: tl.constexpr, world: tl.constexpr, SEM: tl.constexpr, BLOCK: tl.constexpr
):
    """The lock is given back with a release, so that the next to take it sees the sum."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    take(ctx, lock)
    add(ctx, block, total, tl.arange(0, BLOCK))
    tl.debug_barrier()
    ctx.atomic_xchg(lock, 0, 0, sem=SEM, scope="sys")


def relaxed_unlock_faulty(ctx):
    run(ctx, relaxed_unlock_kernel, "relaxed")


def relaxed_unlock_fixed(ctx):
    run(ctx, relaxed_unlock_kernel, "release")


@triton.jit
def wait_under_lock_kernel(
    context,
    block,
    total,
    lock,
    turn,
    rank: tl.constexpr,
    world: tl.constexpr,
    LOCK_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Ranks add in rank order: rank r waits for its turn, which rank r - 1 gives it after it has added.

    Who holds the lock may not wait for anything that another rank does under the lock.
    """
    ctx = iris.DeviceContext.initialize(context, rank, world)
    if LOCK_FIRST:
        take(ctx, lock)
        ctx.wait(turn, 1)
    else:
        ctx.wait(turn, 1)
        take(ctx, lock)
    add(ctx, block, total, tl.arange(0, BLOCK))
    tl.debug_barrier()
    ctx.atomic_xchg(lock, 0, 0, sem="release", scope="sys")
    if rank + 1 < world:
        ctx.notify(turn, 1, rank + 1)


def wait_under_lock_faulty(ctx):
    run(ctx, wait_under_lock_kernel, True)


def wait_under_lock_fixed(ctx):
    run(ctx, wait_under_lock_kernel, False)
