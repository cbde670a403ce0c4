"""Ranks that share one GPU in one process: what only this runtime has. Run with ``-m gpu --runtime loopback``."""

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris import sim
from iris.ccl import Config
from iris.errors import DeadlockError, WaitTimeout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("config.option.runtime != 'loopback'", reason="for --runtime loopback"),
]

WORLDS = (1, 2, 3, 4, 8)


@triton.jit
def read_kernel(source, out, n, rank, peer, bases, BLOCK: tl.constexpr):
    for i in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offs = i * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + offs, iris.load(source + offs, rank, peer, bases, mask=offs < n), mask=offs < n)


def quickest(ctx, call, before=lambda: None):
    """Milliseconds of the quickest of three calls on this rank."""
    times = []
    for _ in range(3):
        ctx.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before()
        start.record()
        call()
        end.record()
        ctx.barrier()
        times.append(start.elapsed_time(end))
    return min(times)


def gathered(ctx, nbytes):
    """What the ranks' pieces, full of their numbers, come to."""
    ranks = torch.arange(ctx.get_num_ranks(), device=ctx.get_device(), dtype=torch.uint8)
    return ranks.repeat_interleave(nbytes)


def body_read(ctx, nbytes, remote):
    """Milliseconds that 4 programs take to read ``nbytes`` of the next rank, or of the own."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    n = nbytes // 4
    source = ctx.zeros(n, dtype=torch.int32)
    source.copy_(torch.arange(n, device=ctx.get_device(), dtype=torch.int32) + rank)
    out = torch.full((n,), -1, dtype=torch.int32, device=ctx.get_device())
    peer = (rank + 1) % world if remote else rank
    least = quickest(ctx, lambda: read_kernel[(4,)](source, out, n, rank, peer, ctx.get_heap_bases(), BLOCK=8192))
    want = torch.arange(n, device=ctx.get_device(), dtype=torch.int32) + peer
    assert torch.equal(out, want)
    return least


@pytest.mark.parametrize("world", [2, 4])
def test_a_paced_link_carries_no_more_than_its_rate(world):
    nbytes, gbps = 16 << 20, 20.0
    least = nbytes / gbps * 1e-6
    free = sim.run(body_read, world, nbytes, True, on="gpu")
    paced = sim.run(body_read, world, nbytes, True, on="gpu", link_gbps=gbps)
    own = sim.run(body_read, world, nbytes, False, on="gpu", link_gbps=gbps)
    assert min(paced) >= least, (paced, least)
    assert max(paced) < 2 * least, (paced, least)
    assert max(free) < least, (free, least)
    assert max(own) < least, (own, least)
    by_peer = sim.run(body_read, world, nbytes, True, on="gpu", link_gbps=gbps, link_per_peer=True)
    assert least <= min(by_peer) <= max(by_peer) < 2 * least, (by_peer, least)
    # Off again in the same process.
    assert max(sim.run(body_read, world, nbytes, True, on="gpu")) < least


def body_collective(ctx, nbytes):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    mine = torch.full((nbytes,), rank, dtype=torch.uint8, device=ctx.get_device())
    out = torch.empty(nbytes * world, dtype=torch.uint8, device=ctx.get_device())
    least = quickest(ctx, lambda: torch.distributed.all_gather_into_tensor(out, mine))
    assert torch.equal(out, gathered(ctx, nbytes))
    return least


def test_a_collective_of_torch_is_charged_to_the_link():
    nbytes, gbps = 8 << 20, 20.0
    least = 3 * nbytes / gbps * 1e-6
    paced = sim.run(body_collective, 4, nbytes, on="gpu", link_gbps=gbps)
    assert min(paced) >= 0.95 * least, (paced, least)
    # Links by peer carry at once what comes from the three others.
    by_peer = sim.run(body_collective, 4, nbytes, on="gpu", link_gbps=gbps, link_per_peer=True)
    assert min(by_peer) >= 0.95 * least / 3, (by_peer, least)
    assert min(by_peer) < 0.8 * least, (by_peer, least)
    # The host's turns are part of what a rank sees, so only the quickest tells.
    assert min(sim.run(body_collective, 4, nbytes, on="gpu")) < least


def body_copies(ctx, nbytes):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    mine = torch.full((nbytes,), rank, dtype=torch.uint8, device=ctx.get_device())
    out = ctx.zeros(nbytes * world, dtype=torch.uint8)
    config = Config(all_gather_variant="copy_engine")
    # The ranks meet in the stream, since the call waits for peers.
    least = quickest(ctx, lambda: ctx.ccl.all_gather(out, mine, config=config), ctx.device_barrier)
    assert torch.equal(out, gathered(ctx, nbytes))
    return least


def test_copies_of_a_collective_are_charged_to_the_link():
    nbytes, gbps = 8 << 20, 20.0
    least = 3 * nbytes / gbps * 1e-6
    paced = sim.run(body_copies, 4, nbytes, on="gpu", link_gbps=gbps)
    assert least * 0.95 <= min(paced) <= max(paced) < 2 * least, (paced, least)
    by_peer = sim.run(body_copies, 4, nbytes, on="gpu", link_gbps=gbps, link_per_peer=True)
    assert least / 3 * 0.95 <= min(by_peer) < 0.8 * least, (by_peer, least)
    assert min(sim.run(body_copies, 4, nbytes, on="gpu")) < least


@triton.jit
def ring_kernel(inbox, flags, value, rank: tl.constexpr, world: tl.constexpr, bases):
    # A loop of the reader's own, without a time limit.
    peer = (rank + 1) % world
    iris.store(inbox, value, rank, peer, bases)
    tl.debug_barrier()
    iris.atomic_xchg(flags, value, rank, peer, bases, sem="release", scope="sys")
    while tl.atomic_add(flags, 0, sem="acquire", scope="sys") != (rank + world - 1) % world + 1:
        pass


def body_ring(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inbox, flags = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    ring_kernel[(1,)](inbox, flags, rank + 1, rank, world, ctx.get_heap_bases())
    ctx.barrier()
    return inbox.item()


@pytest.mark.parametrize("world", WORLDS)
def test_kernels_of_all_ranks_run_at_once(world):
    for _ in range(3):
        assert sim.run(body_ring, world, on="gpu") == [(rank + world - 1) % world + 1 for rank in range(world)]


def body_waits(ctx):
    rank = ctx.get_rank()
    for turn in range(5):
        x = torch.full((4,), rank * 10 + turn, device=ctx.get_device())
        ctx.device_barrier()
        assert x.sum().item() == 4 * (rank * 10 + turn)
        assert x.tolist() == [rank * 10 + turn] * 4
        ctx.device_barrier()
        torch.cuda.synchronize()
    return torch.cuda.current_stream().cuda_stream


@pytest.mark.parametrize("world", WORLDS)
def test_host_code_waits_without_holding_up_the_others(world):
    assert len(set(sim.run(body_waits, world, on="gpu"))) == world


def body_one_waits(ctx, on_the_host):
    if ctx.get_rank() == 0:
        if not on_the_host:
            ctx.device_barrier()
            ctx.synchronize()
        ctx.barrier()


def test_a_rank_that_does_not_come_is_an_error(monkeypatch):
    monkeypatch.setenv("IRIS_TIMEOUT", "4")
    with pytest.raises(WaitTimeout, match="rank 1 was expected"):
        sim.run(body_one_waits, 2, False, on="gpu")
    with pytest.raises(DeadlockError, match="rank 1, host: has returned"):
        sim.run(body_one_waits, 2, True, on="gpu")
