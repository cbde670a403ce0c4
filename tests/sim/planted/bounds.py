"""Bugs of places and sizes: arrays that are too short, tiles that nobody or somebody else writes too."""

import torch
import triton
import triton.language as tl

import iris

BLOCK = 16


@triton.jit
def short_flags_kernel(
    context, data, inbox, flags, received, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr
):
    """Program p sends tile p to the next rank and receives tile p, with flag p for each tile."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    pid = tl.program_id(0)
    peer = (rank + 1) % world
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    ctx.store(inbox + offs, tl.load(data + offs), to_rank=peer)
    ctx.notify(flags + pid, 1, peer)
    ctx.wait(flags + pid, 1)
    tl.store(received + offs, tl.load(inbox + offs))


def short_flags(ctx, flags_for):
    """``flags_for`` is the tile size that the flags were made for."""
    rank, world, n = ctx.get_rank(), ctx.get_num_ranks(), 4 * BLOCK
    numbers = torch.arange(n, dtype=torch.int32) + 100 * torch.arange(world, dtype=torch.int32)[:, None]
    inbox = ctx.full((n,), -1, dtype=torch.int32)
    flags = ctx.zeros(n // flags_for, dtype=torch.int32)
    received = torch.full((n,), -1, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    data = numbers[rank].to(ctx.get_device())
    short_flags_kernel[(n // BLOCK,)](ctx.get_device_context(), data, inbox, flags, received, rank, world, BLOCK=BLOCK)
    ctx.barrier()
    assert torch.equal(received.cpu(), numbers[(rank - 1) % world])


def short_flags_faulty(ctx):
    short_flags(ctx, flags_for=2 * BLOCK)


def short_flags_fixed(ctx):
    short_flags(ctx, flags_for=BLOCK)


@triton.jit
def past_the_end_kernel(
    context, block, gathered, rank: tl.constexpr, world: tl.constexpr, SKIP_SELF: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes ``block`` to every peer, which has ``world - 1`` rows for its peers in rank order, none for itself."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.arange(0, BLOCK)
    for step in range(1, world):
        peer = (rank + step) % world
        row = rank
        if SKIP_SELF:
            row = tl.where(rank > peer, rank - 1, rank)
        ctx.put(block + offs, gathered + row * BLOCK + offs, peer)


def past_the_end(ctx, skip_self):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    numbers = torch.arange(BLOCK, dtype=torch.int32) + 100 * torch.arange(world, dtype=torch.int32)[:, None]
    gathered = ctx.full((world - 1, BLOCK), -1, dtype=torch.int32)
    block = numbers[rank].to(ctx.get_device())
    ctx.barrier()
    past_the_end_kernel[(1,)](ctx.get_device_context(), block, gathered, rank, world, SKIP_SELF=skip_self, BLOCK=BLOCK)
    ctx.barrier()
    assert torch.equal(gathered.cpu(), torch.cat([numbers[:rank], numbers[rank + 1 :]]))


def past_the_end_faulty(ctx):
    past_the_end(ctx, skip_self=False)


def past_the_end_fixed(ctx):
    past_the_end(ctx, skip_self=True)


@triton.jit
def unwritten_tile_kernel(context, source, out, n, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    """Program p copies tile p of the next rank's ``source``."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ctx.get(source + offs, out + offs, from_rank=(rank + 1) % world, mask=offs < n)


def unwritten_tile(ctx, programs):
    rank, world, n = ctx.get_rank(), ctx.get_num_ranks(), 2 * BLOCK + 5
    numbers = torch.arange(n, dtype=torch.int32) + 100 * torch.arange(world, dtype=torch.int32)[:, None]
    source = ctx.as_symmetric(numbers[rank].to(ctx.get_device()))
    out = ctx.empty(n, dtype=torch.int32)
    ctx.barrier()
    unwritten_tile_kernel[(programs(n),)](ctx.get_device_context(), source, out, n, rank, world, BLOCK=BLOCK)
    ctx.barrier()
    assert torch.equal(out.cpu(), numbers[(rank + 1) % world])


def unwritten_tile_faulty(ctx):
    unwritten_tile(ctx, programs=lambda n: n // BLOCK)


def unwritten_tile_fixed(ctx):
    unwritten_tile(ctx, programs=lambda n: triton.cdiv(n, BLOCK))


@triton.jit
def wrapped_tile_kernel(
    context, source, out, n, rank: tl.constexpr, world: tl.constexpr, WRAP: tl.constexpr, BLOCK: tl.constexpr
):
    """Program p adds tile p of the next rank's ``source`` to tile p of ``out``, which no other program touches."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WRAP:
        offs = offs % n  # from here on the mask keeps nothing out
    mask = offs < n
    value = ctx.load(source + offs, from_rank=(rank + 1) % world, mask=mask)
    tl.store(out + offs, tl.load(out + offs, mask=mask) + value, mask=mask)


def wrapped_tile(ctx, wrap):
    rank, world, n = ctx.get_rank(), ctx.get_num_ranks(), 2 * BLOCK + 5
    numbers = torch.arange(n, dtype=torch.int32) + 100 * torch.arange(world, dtype=torch.int32)[:, None]
    source = ctx.as_symmetric(numbers[rank].to(ctx.get_device()))
    out = torch.ones(n, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    wrapped_tile_kernel[(triton.cdiv(n, BLOCK),)](
        ctx.get_device_context(), source, out, n, rank, world, WRAP=wrap, BLOCK=BLOCK
    )
    ctx.barrier()
    assert torch.equal(out.cpu(), 1 + numbers[(rank + 1) % world])


def wrapped_tile_faulty(ctx):
    wrapped_tile(ctx, wrap=True)


def wrapped_tile_fixed(ctx):
    wrapped_tile(ctx, wrap=False)
