"""Bugs of the host: launches, streams and events that it takes for ordered."""

import torch
import triton
import triton.language as tl

import iris

BLOCK = 32


def numbers(rank, call=0):
    return torch.arange(BLOCK, dtype=torch.int32) + 100 * rank + 1000 * call


@triton.jit
def push_kernel(context, block, inbox, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    """Writes ``block`` into the inbox of the next rank, which may read it when it knows that this kernel has ended."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.arange(0, BLOCK)
    ctx.store(inbox + offs, tl.load(block + offs), to_rank=(rank + 1) % world)


def push(ctx, meet):
    """Push on a second stream, ``meet(ctx, stream)`` with the other ranks, then read the inbox on the host."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    block = numbers(rank).to(ctx.get_device())
    inbox = ctx.full((BLOCK,), -1, dtype=torch.int32)
    stream = ctx.new_stream()
    ctx.barrier()
    with ctx.use_stream(stream):
        push_kernel[(1,)](ctx.get_device_context(), block, inbox, rank, world, BLOCK=BLOCK)
    meet(ctx, stream)
    received = inbox.clone()
    ctx.barrier()
    assert torch.equal(received.cpu(), numbers((rank - 1) % world))


def exchange(ctx, stream):
    ctx.broadcast("go")  # the ranks meet, their streams do not


def synchronize_and_exchange(ctx, stream):
    stream.synchronize()
    ctx.broadcast("go")


def late_exchange_faulty(ctx):
    push(ctx, exchange)


def late_exchange_fixed(ctx):
    push(ctx, synchronize_and_exchange)


def barrier_of_current_stream(ctx, stream):
    ctx.barrier(ctx.current_stream())


def barrier_of_stream(ctx, stream):
    ctx.barrier(stream)


def barrier_of_other_stream_faulty(ctx):
    push(ctx, barrier_of_current_stream)


def barrier_of_other_stream_fixed(ctx):
    push(ctx, barrier_of_stream)


@triton.jit
def reverse_kernel(block, workspace, out, BLOCK: tl.constexpr):
    """``out`` is ``block`` in reverse order, by way of ``workspace``, which no other launch may use meanwhile."""
    offs = tl.arange(0, BLOCK)
    tl.store(workspace + offs, tl.load(block + offs))
    tl.debug_barrier()
    tl.store(out + offs, tl.load(workspace + BLOCK - 1 - offs))


def shared_workspace(ctx, ordered):
    rank, calls = ctx.get_rank(), 2
    blocks = torch.stack([numbers(rank, call) for call in range(calls)]).to(ctx.get_device())
    workspace = torch.full((BLOCK,), -1, dtype=torch.int32, device=ctx.get_device())
    out = torch.full((calls, BLOCK), -1, dtype=torch.int32, device=ctx.get_device())
    streams = [ctx.new_stream(), ctx.new_stream()]
    ctx.barrier()
    for call, stream in enumerate(streams):
        if ordered and call > 0:
            stream.wait_stream(streams[call - 1])
        with ctx.use_stream(stream):
            reverse_kernel[(1,)](blocks[call], workspace, out[call], BLOCK=BLOCK)
    ctx.barrier()
    assert torch.equal(out.cpu(), blocks.cpu().flip(1))


def shared_workspace_faulty(ctx):
    shared_workspace(ctx, ordered=False)


def shared_workspace_fixed(ctx):
    shared_workspace(ctx, ordered=True)


@triton.jit
def scale_kernel(block, out, factor, BLOCK: tl.constexpr):
    """``out = factor * block``"""
    offs = tl.arange(0, BLOCK)
    tl.store(out + offs, factor * tl.load(block + offs))


def early_event(ctx, early):
    rank = ctx.get_rank()
    block = numbers(rank).to(ctx.get_device())
    scaled = torch.full((BLOCK,), -1, dtype=torch.int32, device=ctx.get_device())
    out = torch.full((BLOCK,), -1, dtype=torch.int32, device=ctx.get_device())
    first, second = ctx.new_stream(), ctx.new_stream()
    ctx.barrier()
    if early:
        event = first.record_event()
    with ctx.use_stream(first):
        scale_kernel[(1,)](block, scaled, 3, BLOCK=BLOCK)
    if not early:
        event = first.record_event()
    second.wait_event(event)
    with ctx.use_stream(second):
        scale_kernel[(1,)](scaled, out, 5, BLOCK=BLOCK)
    ctx.barrier()
    assert torch.equal(out.cpu(), 15 * numbers(rank))


def early_event_faulty(ctx):
    early_event(ctx, early=True)


def early_event_fixed(ctx):
    early_event(ctx, early=False)


def read_too_soon(ctx, wait):
    rank = ctx.get_rank()
    block = numbers(rank).to(ctx.get_device())
    out = torch.full((BLOCK,), -1, dtype=torch.int32, device=ctx.get_device())
    stream = ctx.new_stream()
    ctx.barrier()
    with ctx.use_stream(stream):
        scale_kernel[(1,)](block, out, 3, BLOCK=BLOCK)
    if wait:
        ctx.current_stream().wait_stream(stream)
    result = out.clone()
    ctx.barrier()
    assert torch.equal(result.cpu(), 3 * numbers(rank))


def read_too_soon_faulty(ctx):
    read_too_soon(ctx, wait=False)


def read_too_soon_fixed(ctx):
    read_too_soon(ctx, wait=True)


def unordered_input(ctx, wait):
    rank = ctx.get_rank()
    block = torch.empty(BLOCK, dtype=torch.int32, device=ctx.get_device())
    out = torch.full((BLOCK,), -1, dtype=torch.int32, device=ctx.get_device())
    stream = ctx.new_stream()
    ctx.barrier()
    block.copy_(numbers(rank))
    if wait:
        stream.wait_stream(ctx.current_stream())
    with ctx.use_stream(stream):
        scale_kernel[(1,)](block, out, 3, BLOCK=BLOCK)
    ctx.barrier()
    assert torch.equal(out.cpu(), 3 * numbers(rank))


def unordered_input_faulty(ctx):
    unordered_input(ctx, wait=False)


def unordered_input_fixed(ctx):
    unordered_input(ctx, wait=True)
