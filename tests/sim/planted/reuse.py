"""Bugs of memory that is used again: buffers, inputs, outputs and counters of the call before."""

import torch
import triton
import triton.language as tl

import iris

BLOCK = 16


def numbers(rank, call=0):
    return torch.arange(BLOCK, dtype=torch.int32) + 100 * rank + 1000 * call


@triton.jit
def unread_inbox_kernel(
    context,
    blocks,
    inbox,
    ready,
    consumed,
    received,
    rounds,
    rank: tl.constexpr,
    world: tl.constexpr,
    WAIT_CONSUMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program 0 sends a block each round to the next rank, program 1 reads what comes from the rank before.

    ``ready`` lies with the reader: "block number i is in your inbox". ``consumed`` lies with the sender: "I have read
    block number i, you may overwrite it".
    """
    ctx = iris.DeviceContext.initialize(context, rank, world)
    to = (rank + 1) % world
    sender = (rank + world - 1) % world
    offs = tl.arange(0, BLOCK)
    for i in range(1, rounds + 1):
        row = (i - 1) * BLOCK + offs
        if tl.program_id(0) == 0:
            if WAIT_CONSUMED:
                ctx.wait(consumed, i - 1, peer=to)
            ctx.store(inbox + offs, tl.load(blocks + row), to_rank=to)
            ctx.notify(ready, i, to)
        else:
            ctx.wait(ready, i, peer=sender)
            tl.store(received + row, tl.load(inbox + offs))
            ctx.notify(consumed, i, sender)


def unread_inbox(ctx, wait_consumed):
    rank, world, rounds = ctx.get_rank(), ctx.get_num_ranks(), 3
    blocks = torch.stack([numbers(rank, i) for i in range(rounds)]).to(ctx.get_device())
    inbox = ctx.full((BLOCK,), -1, dtype=torch.int32)
    ready, consumed = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    received = torch.full((rounds, BLOCK), -1, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    unread_inbox_kernel[(2,)](
        ctx.get_device_context(),
        blocks,
        inbox,
        ready,
        consumed,
        received,
        rounds,
        rank,
        world,
        WAIT_CONSUMED=wait_consumed,
        BLOCK=BLOCK,
    )
    ctx.barrier()
    sender = (rank - 1) % world
    assert torch.equal(received.cpu(), torch.stack([numbers(sender, i) for i in range(rounds)]))


def unread_inbox_faulty(ctx):
    unread_inbox(ctx, wait_consumed=False)


def unread_inbox_fixed(ctx):
    unread_inbox(ctx, wait_consumed=True)


@triton.jit
def pull_kernel(context, source, gathered, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    """Reads ``source`` of every rank: written there before anyone starts, left alone until everyone has ended."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.arange(0, BLOCK)
    for step in range(world):
        peer = (rank + step) % world
        ctx.get(source + offs, gathered + peer * BLOCK + offs, from_rank=peer)


def pull(ctx, calls, enter, leave):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    source = ctx.full((BLOCK,), -1, dtype=torch.int32)
    gathered = torch.full((calls, world, BLOCK), -1, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    for call in range(calls):
        source.copy_(numbers(rank, call))
        if enter:
            ctx.device_barrier()
        pull_kernel[(1,)](ctx.get_device_context(), source, gathered[call], rank, world, BLOCK=BLOCK)
        if leave:
            ctx.device_barrier()
    ctx.barrier()
    expected = torch.stack([torch.stack([numbers(r, call) for r in range(world)]) for call in range(calls)])
    assert torch.equal(gathered.cpu(), expected)


def no_entry_barrier_faulty(ctx):
    pull(ctx, calls=1, enter=False, leave=True)


def no_entry_barrier_fixed(ctx):
    pull(ctx, calls=1, enter=True, leave=True)


def no_exit_barrier_faulty(ctx):
    pull(ctx, calls=2, enter=True, leave=False)


def no_exit_barrier_fixed(ctx):
    pull(ctx, calls=2, enter=True, leave=True)


@triton.jit
def clear_kernel(out, BLOCK: tl.constexpr):
    """Sets ``out`` to 0."""
    tl.store(out + tl.arange(0, BLOCK), tl.zeros((BLOCK,), dtype=tl.int32))


@triton.jit
def add_kernel(context, block, out, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    """Adds ``block`` to ``out`` of every rank, which must be clear on all ranks before one of them adds."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.arange(0, BLOCK)
    value = tl.load(block + offs)
    for step in range(world):
        ctx.atomic_add(out + offs, value, (rank + step) % world, sem="relaxed", scope="sys")


def late_clear(ctx, by_kernel, barrier):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    block = numbers(rank).to(ctx.get_device())
    out = ctx.full((BLOCK,), 7, dtype=torch.int32)
    ctx.barrier()
    if by_kernel:
        clear_kernel[(1,)](out, BLOCK=BLOCK)
    else:
        out.zero_()
    if barrier:
        ctx.device_barrier()
    add_kernel[(1,)](ctx.get_device_context(), block, out, rank, world, BLOCK=BLOCK)
    ctx.barrier()
    assert torch.equal(out.cpu(), sum(numbers(r) for r in range(world)))


def late_host_clear_faulty(ctx):
    late_clear(ctx, by_kernel=False, barrier=False)


def late_host_clear_fixed(ctx):
    late_clear(ctx, by_kernel=False, barrier=True)


def late_kernel_clear_faulty(ctx):
    late_clear(ctx, by_kernel=True, barrier=False)


def late_kernel_clear_fixed(ctx):
    late_clear(ctx, by_kernel=True, barrier=True)


def fresh_zeros(ctx, barrier):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    block = numbers(rank).to(ctx.get_device())
    out = ctx.zeros(BLOCK, dtype=torch.int32)
    if barrier:
        ctx.barrier()
    add_kernel[(1,)](ctx.get_device_context(), block, out, rank, world, BLOCK=BLOCK)
    ctx.barrier()
    assert torch.equal(out.cpu(), sum(numbers(r) for r in range(world)))


def fresh_zeros_faulty(ctx):
    fresh_zeros(ctx, barrier=False)


def fresh_zeros_fixed(ctx):
    fresh_zeros(ctx, barrier=True)


@triton.jit
def last_arriver_kernel(blocks, partials, arrived, out, SEM: tl.constexpr, RESET: tl.constexpr, BLOCK: tl.constexpr):
    """Sums a block of each program. Who arrives last at the counter sees the partial results of all and adds them up.

    It is also the only one that may set the counter back for the next launch, since nobody else touches it any more.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    offs = tl.arange(0, BLOCK)
    if RESET == "first program":
        tl.store(arrived, 0, mask=pid == 0)
    tl.store(partials + pid * BLOCK + offs, 2 * tl.load(blocks + pid * BLOCK + offs))
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem=SEM, scope="gpu") == programs - 1:
        total = tl.zeros((BLOCK,), dtype=tl.int32)
        for program in range(programs):
            total += tl.load(partials + program * BLOCK + offs)
        tl.store(out + offs, total)
        if RESET == "last arriver":
            tl.store(arrived, 0)


def last_arriver(ctx, sem="acq_rel", reset="last arriver"):
    rank, programs, calls = ctx.get_rank(), 3, 2
    partials = torch.full((programs, BLOCK), -1, dtype=torch.int32, device=ctx.get_device())
    arrived = torch.zeros(1, dtype=torch.int32, device=ctx.get_device())
    out = torch.empty(calls, BLOCK, dtype=torch.int32, device=ctx.get_device())
    for call in range(calls):
        blocks = torch.stack([numbers(rank + program, call) for program in range(programs)]).to(ctx.get_device())
        last_arriver_kernel[(programs,)](blocks, partials, arrived, out[call], SEM=sem, RESET=reset, BLOCK=BLOCK)
    ctx.barrier()
    for call in range(calls):
        assert torch.equal(out[call].cpu(), 2 * sum(numbers(rank + program, call) for program in range(programs)))


def last_arriver_fixed(ctx):
    last_arriver(ctx)


def counter_not_reset_faulty(ctx):
    last_arriver(ctx, reset="never")


def counter_reset_early_faulty(ctx):
    last_arriver(ctx, reset="first program")


def relaxed_arrival_faulty(ctx):
    last_arriver(ctx, sem="relaxed")


@triton.jit
def one_flag_for_all_kernel(
    context,
    blocks,
    inbox,
    arrived,
    ready,
    received,
    rank: tl.constexpr,
    world: tl.constexpr,
    SEM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program sends a block to the next rank; the last to arrive signals for all of them, and receives for all.

    Its release covers the stores of the programs whose arrivals it has acquired.
    """
    ctx = iris.DeviceContext.initialize(context, rank, world)
    pid = tl.program_id(0)
    to = (rank + 1) % world
    offs = tl.arange(0, BLOCK)
    ctx.store(inbox + pid * BLOCK + offs, tl.load(blocks + pid * BLOCK + offs), to_rank=to)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem=SEM, scope="gpu") == tl.num_programs(0) - 1:
        ctx.notify(ready, 1, to)
        ctx.wait(ready, 1, peer=(rank + world - 1) % world)
        for program in range(tl.num_programs(0)):
            tl.store(received + program * BLOCK + offs, tl.load(inbox + program * BLOCK + offs))


def one_flag_for_all(ctx, sem):
    rank, world, programs = ctx.get_rank(), ctx.get_num_ranks(), 3
    blocks = torch.stack([numbers(rank, program) for program in range(programs)]).to(ctx.get_device())
    inbox = ctx.full((programs, BLOCK), -1, dtype=torch.int32)
    arrived = torch.zeros(1, dtype=torch.int32, device=ctx.get_device())
    ready = ctx.zeros(1, dtype=torch.int32)
    received = torch.full((programs, BLOCK), -1, dtype=torch.int32, device=ctx.get_device())
    ctx.barrier()
    one_flag_for_all_kernel[(programs,)](
        ctx.get_device_context(), blocks, inbox, arrived, ready, received, rank, world, SEM=sem, BLOCK=BLOCK
    )
    ctx.barrier()
    sender = (rank - 1) % world
    assert torch.equal(received.cpu(), torch.stack([numbers(sender, program) for program in range(programs)]))


def one_flag_for_all_faulty(ctx):
    one_flag_for_all(ctx, sem="relaxed")


def one_flag_for_all_fixed(ctx):
    one_flag_for_all(ctx, sem="acq_rel")
