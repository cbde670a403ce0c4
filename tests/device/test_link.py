"""The imitated links: which word a transfer takes, for how long, and how long it waits."""

import time

import pytest
import torch
import triton
import triton.language as tl

from iris.device import _asm, link
from iris.sim import pacing

WORLD, ME = 16, 3
FEMTOSECONDS = 20833  # a byte at 48 GB/s
pytestmark = pytest.mark.processes("links are turned on for a whole process")


@triton.jit
def charge_kernel(out, nbytes, peer, bases, ME: tl.constexpr):
    tl.store(out, link.charge(nbytes, ME, peer, bases))


@triton.jit
def wait_kernel(out, tick):
    link.carried(tick)
    tl.store(out, _asm.ticks())


@triton.jit
def pace_kernel(data, peer, bases, ME: tl.constexpr, BLOCK: tl.constexpr):
    pointers = data + tl.arange(0, BLOCK)
    link.pace_read(pointers, ME, peer, bases)
    link.pace_write(pointers, ME, peer, bases)


@triton.jit
def clock_kernel(out):
    tl.store(out, _asm.ticks())
    tl.store(out + 1, _asm.ticks_per_microsecond())


def clock(device):
    out = torch.zeros(2, dtype=torch.int64, device=device)
    clock_kernel[(1,)](out)
    return out.tolist()


def context(state, femtoseconds=FEMTOSECONDS):
    """A context tensor whose last words name the state of the links."""
    words = [ME, WORLD, *[0] * WORLD, *[0] * link._TRACE_WORDS.value, 0, 0, state.data_ptr(), femtoseconds]
    return torch.tensor(words, dtype=torch.int64, device=state.device)


def line(peer, per_peer, out):
    return link.LINE.value * (1 + peer * per_peer + WORLD * out)


def body_charge(ctx, per_peer):
    device = ctx.get_device()
    free = clock(device)[0] + 10**15  # far ahead, so that only what is booked moves the words
    ticks_per_us = clock(device)[1]
    pacing.set_paced(True)
    try:
        state = torch.full((link.state_words(WORLD),), free, dtype=torch.int64, device=device)
        state[0] = int(per_peer)
        bases = context(state)[2:]
        out = torch.zeros(1, dtype=torch.int64, device=device)
        want = state.clone()
        for peer, nbytes in ((0, 1 << 20), (7, 3_000_001), (15, 1 << 30), (7, 64), (ME, 1 << 20)):
            charge_kernel[(1,)](out, nbytes, peer, bases, ME=ME)
            if peer == ME:
                assert out.item() == 0
            else:
                want[line(peer, per_peer, False)] += nbytes * FEMTOSECONDS // 1000 * ticks_per_us // 10**6
                assert out.item() == want[line(peer, per_peer, False)].item(), (peer, nbytes)
            assert torch.equal(state, want), (peer, nbytes)
        # A link that has been free for long is taken from now on.
        state[line(5, per_peer, False)] = 0
        before = clock(device)[0]
        charge_kernel[(1,)](out, 1000, 5, bases, ME=ME)
        booked = 1000 * FEMTOSECONDS // 1000 * ticks_per_us // 10**6
        assert before + booked <= out.item() <= clock(device)[0] + booked
    finally:
        pacing.set_paced(False)
    state.zero_()
    charge_kernel[(1,)](out, 1000, 5, bases, ME=ME)
    assert out.item() == 0
    assert not state.any()


@pytest.mark.parametrize("per_peer", [False, True])
def test_a_charge_books_the_link_of_the_peer(ranks, per_peer):
    ranks(1).run(body_charge, per_peer)


def body_wait(ctx):
    device = ctx.get_device()
    out = torch.zeros(1, dtype=torch.int64, device=device)
    pacing.set_paced(True)
    try:
        wait_kernel[(1,)](out, 0)
        now, ticks_per_us = clock(device)
        wait_kernel[(1,)](out, now + 200_000 * ticks_per_us)
        assert out.item() >= now + 200_000 * ticks_per_us
        # One link in, one out, each for the bytes of the block and no other.
        nbytes, per_byte = 256 * 4, 10**8
        state = torch.zeros(link.state_words(WORLD), dtype=torch.int64, device=device)
        state[0] = 1
        data = torch.zeros(256, device=device)
        now = clock(device)[0]
        pace_kernel[(1,)](data, 9, context(state, per_byte)[2:], ME=ME, BLOCK=256)
        booked = nbytes * per_byte // 1000 * ticks_per_us // 10**6
        first, second = state[line(9, True, False)].item(), state[line(9, True, True)].item()
        assert now + booked <= first <= second - booked
        assert second <= clock(device)[0]
        assert state.count_nonzero().item() == 3
    finally:
        pacing.set_paced(False)


def test_reads_and_writes_wait_for_their_links(ranks):
    ranks(1).run(body_wait)


def body_carry(ctx):
    device = ctx.get_device()
    ticks_per_us = clock(device)[1]
    state = torch.zeros(link.state_words(WORLD), dtype=torch.int64, device=device)
    state[0] = 1
    now, start = clock(device)[0], time.perf_counter()
    until = torch.full((8,), -1, dtype=torch.int64, device=device)
    link.book_kernel[(8,)](state, until, 2_000_000, 0b10100010)
    link.await_kernel[(8,)](until)
    taken = [peer for peer in range(WORLD) if state[line(peer, True, False)].item()]
    assert taken == [1, 5, 7]
    assert [until[peer].item() for peer in taken] == [state[line(peer, True, False)].item() for peer in taken]
    assert until.count_nonzero().item() == 3
    assert all(state[line(peer, True, False)].item() >= now + 2000 * ticks_per_us for peer in taken)
    assert state.count_nonzero().item() == 4
    assert time.perf_counter() - start >= 2e-3


def test_a_copy_of_pytorch_takes_the_links_it_comes_over(ranks):
    ranks(1).run(body_carry)
