"""Atomics on peers' memory. Every rank and program contributes a different value, so a lost or doubled one shows."""

import pytest
import torch
import triton
import triton.language as tl

import iris

SEMS = (None, "relaxed", "acquire", "release", "acq_rel")
SCOPES = (None, "cta", "gpu", "sys")


@triton.jit
def arithmetic_kernel(
    context,
    cells,
    n,
    rank: tl.constexpr,
    world: tl.constexpr,
    SEM: tl.constexpr,
    SCOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Cells, each a block of n: add, sub, min, max of every rank's and program's value, on every rank.
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    mine = (rank * 3 + tl.program_id(0) + offs).to(cells.dtype.element_ty)
    for peer in range(world):
        ctx.atomic_add(cells + offs, mine, peer, mask=mask, sem=SEM, scope=SCOPE)
        ctx.atomic_sub(cells + BLOCK + offs, mine, peer, mask=mask, sem=SEM, scope=SCOPE)
        ctx.atomic_min(cells + 2 * BLOCK + offs, mine, peer, mask=mask, sem=SEM, scope=SCOPE)
        ctx.atomic_max(cells + 3 * BLOCK + offs, mine, peer, mask=mask, sem=SEM, scope=SCOPE)


@triton.jit
def add_kernel(cells, n, rank, world, bases, SEM: tl.constexpr, SCOPE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    # Small enough for the sum of all to be exact in bf16.
    mine = ((rank * 3 + tl.program_id(0) + offs) % 8).to(cells.dtype.element_ty)
    for peer in range(world):
        iris.atomic_add(cells + offs, mine, rank, peer, bases, offs < n, SEM, SCOPE)


@triton.jit
def bits_kernel(context, cells, rank: tl.constexpr, world: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    bit = (tl.full((), 1, cells.dtype.element_ty) << rank).to(cells.dtype.element_ty)
    for peer in range(world):
        ctx.atomic_or(cells, bit, peer)
        ctx.atomic_xor(cells + 1, bit, peer)
        ctx.atomic_and(cells + 2, ~bit, peer)


@triton.jit
def swap_kernel(context, cells, old, rank: tl.constexpr, world: tl.constexpr):
    # Everyone swaps a token into rank 0's cell; the tokens and the first content are handed on, none is lost.
    ctx = iris.DeviceContext.initialize(context, rank, world)
    token = tl.full((), rank + 1, cells.dtype.element_ty)
    tl.store(old, ctx.atomic_xchg(cells, token, 0))
    # The first rank to find zero wins the second cell.
    zero = tl.full((), 0, cells.dtype.element_ty)
    tl.store(old + 1, ctx.atomic_cas(cells + 1, zero, token, 0))


@triton.jit
def lock_kernel(context, lock, total, turns, rank: tl.constexpr, world: tl.constexpr):
    # A spin lock from raw compare-and-swap around a plain read and write of rank 0's counter.
    ctx = iris.DeviceContext.initialize(context, rank, world)
    for _ in range(turns):
        while ctx.atomic_cas(lock, 0, 1, 0, sem="acquire", scope="sys") == 1:
            pass
        count = ctx.load(total, from_rank=0, volatile=True)
        ctx.store(total, count + 1, to_rank=0)
        tl.debug_barrier()
        ctx.atomic_xchg(lock, 0, 0, sem="release", scope="sys")


@triton.jit
def work_queue_kernel(counter, done, total):
    # Programs take work from one counter until it is used up.
    item = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    while item < total:
        tl.atomic_add(done + item, 1, sem="relaxed", scope="gpu")
        item = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")


def body_arithmetic(ctx, sem, scope, programs):
    rank, world, n, block = ctx.get_rank(), ctx.get_num_ranks(), 13, 16
    given = torch.stack([torch.arange(n) + r * 3 + p for r in range(world) for p in range(programs)])
    for dtype in (torch.int32, torch.int64, torch.float32):
        cells = ctx.zeros(4, block, dtype=dtype)
        cells[2].fill_(1000)
        cells[3].fill_(-1000)
        ctx.barrier()
        arithmetic_kernel[(programs,)](
            ctx.get_device_context(), cells, n, rank, world, SEM=sem, SCOPE=scope, BLOCK=block
        )
        ctx.barrier()
        got = cells.cpu().to(torch.int64)
        want = torch.stack([given.sum(0), -given.sum(0), given.min(0).values, given.max(0).values])
        assert torch.equal(got[:, :n], want), (dtype, sem, scope)
        assert got[:, n:].unique().tolist() == [-1000, 0, 1000], "masked lanes changed"
        ctx.barrier()
    for dtype in (torch.float16, torch.bfloat16, torch.int32):
        cells = ctx.zeros(block, dtype=dtype)
        ctx.barrier()
        add_kernel[(programs,)](cells, n, rank, world, ctx.get_heap_bases(), SEM=sem, SCOPE=scope, BLOCK=block)
        ctx.barrier()
        assert torch.equal(cells[:n].cpu().to(torch.int64), (given % 8).sum(0)), (dtype, sem, scope)
        ctx.barrier()


@pytest.mark.parametrize("sem", SEMS)
def test_sums_and_bounds_hold_every_contribution(ranks, world, sem):
    ranks(world).run(body_arithmetic, sem, None, 2)


def body_scopes(ctx):
    # Narrow scopes are for one rank's own words: programs of one grid add to them, but "cta" is for one program alone.
    for scope in SCOPES:
        programs = 1 if scope == "cta" else 3
        cells = ctx.zeros(16, dtype=torch.int32)
        ctx.barrier()
        add_kernel[(programs,)](
            cells, 16, 0, 1, ctx.get_heap_bases()[ctx.get_rank() :], SEM=None, SCOPE=scope, BLOCK=16
        )
        ctx.barrier()
        want = sum((torch.arange(16) + program) % 8 for program in range(programs))
        assert torch.equal(cells.cpu(), want.to(torch.int32)), scope


def test_scopes_on_own_memory(ranks, world):
    ranks(world).run(body_scopes)


def body_bits(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    for dtype in (torch.int32, torch.int64):
        cells = ctx.zeros(3, dtype=dtype)
        cells[2] = -1
        ctx.barrier()
        bits_kernel[(1,)](ctx.get_device_context(), cells, rank, world)
        ctx.barrier()
        full = (1 << world) - 1
        assert cells.tolist() == [full, full, ~full], dtype
        ctx.barrier()


def test_bitwise(ranks, world):
    ranks(world).run(body_bits)


def body_swap(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    for dtype in (torch.int32, torch.int64):
        cells, old = ctx.zeros(2, dtype=dtype), torch.full((2,), -7, dtype=dtype, device=ctx.get_device())
        ctx.barrier()
        swap_kernel[(1,)](ctx.get_device_context(), cells, old, rank, world)
        ctx.barrier()
        everyone = ctx.exchange.all_gather("test", old.tolist())
        last, winner = cells.tolist() if rank == 0 else (None, None)
        last, winner = ctx.broadcast((last, winner), src=0)
        assert sorted([o[0] for o in everyone] + [last]) == list(range(world + 1)), "a token was lost"
        assert [o[1] for o in everyone].count(0) == 1, "exactly one rank finds the cell empty"
        assert everyone[winner - 1][1] == 0
        ctx.barrier()


def test_exchange_and_compare_and_swap(ranks, world):
    ranks(world).run(body_swap)


def body_lock(ctx, turns):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    lock, total = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    lock_kernel[(2,)](ctx.get_device_context(), lock, total, turns, rank, world)
    ctx.barrier()
    if rank == 0:
        assert total.item() == 2 * turns * world, "an update was lost"
    ctx.barrier()


def test_spin_lock_loses_no_update(ranks, world):
    ranks(world).run(body_lock, 10)


def body_work_queue(ctx):
    for total in (0, 1, 300):
        counter = torch.zeros(1, dtype=torch.int32, device=ctx.get_device())
        done = torch.zeros(max(1, total), dtype=torch.int32, device=ctx.get_device())
        work_queue_kernel[(5,)](counter, done, total)
        ctx.synchronize()
        assert done.tolist() == ([1] * total if total else [0])
        assert counter.item() == total + 5


def test_work_queue_gives_each_item_once(ranks):
    ranks(1).run(body_work_queue)
