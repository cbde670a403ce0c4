"""Loads, stores and copies on peers' memory: data depends on rank and position, and targets are poisoned first."""

import pytest
import torch
import triton
import triton.language as tl

import iris

DTYPES = (torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
MODIFIERS = {"load": (None, ".ca", ".cg", ".cv"), "store": (None, ".wb", ".cg", ".cs", ".wt")}


def values(rank, n, dtype):
    """Values of rank ``rank``: small integers, exact in every dtype, different for every rank and position."""
    return ((torch.arange(n) * 7 + rank * 13) % 61 - 30).to(dtype)


def poison(tensor):
    return tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 99)


@triton.jit
def load_kernel(
    source, result, n, rank, peer, bases, BLOCK: tl.constexpr, MODIFIER: tl.constexpr, VOLATILE: tl.constexpr
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    got = iris.load(source + offs, rank, peer, bases, offs < n, 0, MODIFIER, VOLATILE)
    tl.store(result + offs, got, mask=offs < n)


@triton.jit
def store_kernel(source, target, n, rank, peer, bases, BLOCK: tl.constexpr, MODIFIER: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    iris.store(target + offs, tl.load(source + offs, mask=offs < n), rank, peer, bases, offs < n, None, MODIFIER)


@triton.jit
def get_kernel(source, result, n, rank, peer, bases, BLOCK: tl.constexpr, HINT: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    iris.get(source + offs, result + offs, rank, peer, bases, mask=offs < n, other=0, hint=HINT)


@triton.jit
def put_kernel(source, target, n, rank, peer, bases, BLOCK: tl.constexpr, HINT: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    iris.put(source + offs, target + offs, rank, peer, bases, mask=offs < n, hint=HINT)


@triton.jit
def copy_kernel(source, target, n, src_rank, dst_rank, rank, bases, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    iris.copy(source + offs, target + offs, src_rank, dst_rank, rank, bases, mask=offs < n)


@triton.jit
def context_kernel(
    context, source, pulled, pushed, copied, n, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr
):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    left = (rank + world - 1) % world
    right = (rank + 1) % world
    value = ctx.load(source + offs, from_rank=right, mask=mask, other=0)
    tl.store(pulled + offs, value, mask=mask)
    ctx.get(source + offs, pulled + n + offs, from_rank=left, mask=mask)
    ctx.store(pushed + offs, tl.load(source + offs, mask=mask), to_rank=right, mask=mask)
    ctx.put(source + offs, pushed + n + offs, to_rank=left, mask=mask)
    ctx.copy(source + offs, copied + offs, from_rank=rank, to_rank=right, mask=mask)


def body_functions(ctx, block, n):
    rank, world, bases = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_heap_bases()
    peer, giver = (rank + 1) % world, (rank - 1) % world
    grid = (triton.cdiv(n, block),)
    for dtype in DTYPES:
        source = ctx.zeros(n, dtype=dtype)
        source.copy_(values(rank, n, dtype))
        result, target = poison(ctx.empty(n, dtype=dtype)), poison(ctx.empty(n, dtype=dtype))
        ctx.barrier()
        load_kernel[grid](source, result, n, rank, peer, bases, BLOCK=block, MODIFIER=None, VOLATILE=False)
        assert torch.equal(result.cpu(), values(peer, n, dtype)), f"load {dtype}"
        get_kernel[grid](source, poison(result), n, rank, peer, bases, BLOCK=block, HINT=None)
        assert torch.equal(result.cpu(), values(peer, n, dtype)), f"get {dtype}"
        store_kernel[grid](source, target, n, rank, peer, bases, BLOCK=block, MODIFIER=None)
        ctx.barrier()
        assert torch.equal(target.cpu(), values(giver, n, dtype)), f"store {dtype}"
        poison(target)
        ctx.barrier()
        put_kernel[grid](source, target, n, rank, peer, bases, BLOCK=block, HINT=None)
        ctx.barrier()
        assert torch.equal(target.cpu(), values(giver, n, dtype)), f"put {dtype}"
        poison(target)
        ctx.barrier()
        copy_kernel[grid](source, target, n, rank, peer, rank, bases, BLOCK=block)
        ctx.barrier()
        assert torch.equal(target.cpu(), values(giver, n, dtype)), f"copy out {dtype}"
        poison(target)
        copy_kernel[grid](source, target, n, peer, rank, rank, bases, BLOCK=block)
        ctx.barrier()
        assert torch.equal(target.cpu(), values(peer, n, dtype)), f"copy in {dtype}"
        ctx.barrier()


@pytest.mark.parametrize("block", [1, 8, 32])
def test_functions_reach_the_right_rank(ranks, world, block):
    ranks(world).run(body_functions, block, 3 * block - (block > 1))


def body_context(ctx, n, block):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    left, right = (rank - 1) % world, (rank + 1) % world
    for dtype in DTYPES:
        source = ctx.zeros(n, dtype=dtype)
        source.copy_(values(rank, n, dtype))
        pulled, pushed, copied = (poison(ctx.empty(size, dtype=dtype)) for size in (2 * n, 2 * n, n))
        ctx.barrier()
        grid = (triton.cdiv(n, block),)
        context_kernel[grid](ctx.get_device_context(), source, pulled, pushed, copied, n, rank, world, BLOCK=block)
        ctx.barrier()
        assert torch.equal(pulled[:n].cpu(), values(right, n, dtype)), f"load {dtype}"
        assert torch.equal(pulled[n:].cpu(), values(left, n, dtype)), f"get {dtype}"
        assert torch.equal(pushed[:n].cpu(), values(left, n, dtype)), f"store {dtype}"
        assert torch.equal(pushed[n:].cpu(), values(right, n, dtype)), f"put {dtype}"
        assert torch.equal(copied.cpu(), values(left, n, dtype)), f"copy {dtype}"
        ctx.barrier()


def test_device_context_methods(ranks, world):
    ranks(world).run(body_context, 45, 16)


def body_modifiers(ctx):
    rank, world, bases = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_heap_bases()
    peer, giver, n = (rank + 1) % world, (rank - 1) % world, 64
    source = ctx.zeros(n, dtype=torch.float32)
    source.copy_(values(rank, n, torch.float32))
    result, target = ctx.empty(n, dtype=torch.float32), ctx.empty(n, dtype=torch.float32)
    ctx.barrier()
    for modifier in MODIFIERS["load"]:
        for volatile in (False, True) if modifier is None else (False,):
            load_kernel[(1,)](
                source, poison(result), n, rank, peer, bases, BLOCK=n, MODIFIER=modifier, VOLATILE=volatile
            )
            assert torch.equal(result.cpu(), values(peer, n, torch.float32)), modifier
    for modifier in MODIFIERS["store"]:
        poison(target)
        ctx.barrier()
        store_kernel[(1,)](source, target, n, rank, peer, bases, BLOCK=n, MODIFIER=modifier)
        ctx.barrier()
        assert torch.equal(target.cpu(), values(giver, n, torch.float32)), modifier
        ctx.barrier()


def test_cache_modifiers_keep_the_values(ranks, world):
    ranks(world).run(body_modifiers)


def body_hint(ctx):
    rank, world, bases = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_heap_bases()
    peer, n = (rank + 1) % world, 64
    source = ctx.zeros(n, dtype=torch.float16)
    source.copy_(values(rank, n, torch.float16))
    result = ctx.empty(n, dtype=torch.float16)
    ctx.barrier()
    for hint in (None, 8, (16,)):
        get_kernel[(2,)](source, poison(result), n, rank, peer, bases, BLOCK=32, HINT=hint)
        assert torch.equal(result.cpu(), values(peer, n, torch.float16)), hint
    ctx.barrier()


def test_hint_changes_nothing_but_speed(ranks, world):
    ranks(world).run(body_hint)


def body_masked_off(ctx):
    rank, world, bases = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_heap_bases()
    peer, n = (rank + 1) % world, 16
    source, target = ctx.full((n,), rank + 1.0, dtype=torch.float32), ctx.full((n,), -5.0, dtype=torch.float32)
    ctx.barrier()
    load_kernel[(1,)](source, target, 0, rank, peer, bases, BLOCK=n, MODIFIER=None, VOLATILE=False)
    put_kernel[(1,)](source, target, 0, rank, peer, bases, BLOCK=n, HINT=None)
    ctx.barrier()
    assert torch.equal(target.cpu(), torch.full((n,), -5.0))
    ctx.barrier()
    # A mask that is off for part of the lanes touches nothing there.
    put_kernel[(1,)](source, target, 5, rank, peer, bases, BLOCK=n, HINT=None)
    ctx.barrier()
    giver = (rank - 1) % world
    assert target.cpu().tolist() == [giver + 1.0] * 5 + [-5.0] * 11
    ctx.barrier()


def test_masked_lanes_are_not_touched(ranks, world):
    ranks(world).run(body_masked_off)


def body_odd_offset(ctx):
    rank, world, bases = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_heap_bases()
    peer, n = (rank + 1) % world, 100
    base = ctx.zeros(n + 1, dtype=torch.bfloat16)
    view = base[1:]
    view.copy_(values(rank, n, torch.bfloat16))
    result = poison(ctx.empty(n + 3, dtype=torch.bfloat16))
    ctx.barrier()
    get_kernel[(4,)](view, result[3:], n, rank, peer, bases, BLOCK=32, HINT=None)
    assert torch.equal(result[3:].cpu(), values(peer, n, torch.bfloat16))
    assert result[:3].isnan().all()
    ctx.barrier()


def test_views_at_odd_offsets(ranks, world):
    ranks(world).run(body_odd_offset)
