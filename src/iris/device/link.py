"""A link of a given rate, imitated: what a rank reads from or writes to a peer waits until the link would be free.

Only ranks that share a GPU in one process ask for it (``iris.sim.run(..., on="gpu", link_gbps=...)``); everywhere else
the functions compile to nothing. A rank has a link in each direction, for all peers together or, with
``link_per_peer=True``, one for each peer. A word for each link says when it is free, in ticks of the GPU's clock; a
transfer takes the link for bytes / rate and goes on when its turn is over. ``link_context`` is the context tensor past
its first two words, as for ``heap_bases``.

State of a rank, int64, each word in a line of its own: how many lines lie between the links of two peers (0 when all
share one), then the incoming links by peer, then the outgoing ones.
"""

import triton
import triton.language as tl

from iris.device import _asm
from iris.device._compat import constexpr_function

LINK_PACED = tl.constexpr(False)
_TRACE_WORDS = tl.constexpr(17)
_LINK_WORD = tl.constexpr(2)  # behind the error slot's address and the time limit: link words, femtoseconds a byte
LINE = tl.constexpr(16)  # 128 bytes
_INCOMING = tl.constexpr(False)
_OUTGOING = tl.constexpr(True)


def state_words(world_size: int) -> int:
    """Words that the links of one rank take."""
    return LINE.value * (1 + 2 * world_size)


@constexpr_function
def _bytes(block):
    """Bytes that a pointer or a block of pointers addresses."""
    count = 1
    for extent in getattr(block, "shape", ()):
        count *= getattr(extent, "value", extent)
    return count * max(1, block.dtype.scalar.element_ty.primitive_bitwidth // 8)


@triton.jit
def _book(link, ticks):
    """Take a link for some ticks from when it is free; when it will have carried that."""
    tl.atomic_max(link, _asm.ticks(), sem="relaxed", scope="gpu")
    return tl.atomic_add(link, ticks, sem="relaxed", scope="gpu") + ticks


@triton.jit
def _take(nbytes, peer, link_context, OUT: tl.constexpr):
    world_size = tl.load(link_context - 1)
    tail = link_context + world_size + _TRACE_WORDS + _LINK_WORD
    state = tl.load(tail).to(tl.pointer_type(tl.int64))
    line = 1 + peer * tl.load(state)
    if OUT:
        line += world_size
    # A GPU of either vendor counts at most 1000 ticks a microsecond, so femtoseconds keep small transfers apart.
    ticks = (nbytes * tl.load(tail + 1) // 1000) * _asm.ticks_per_microsecond() // 1000000
    return _book(state + line * LINE, ticks)


@triton.jit
def charge(nbytes, me, peer, link_context):
    """Book bytes on the caller's incoming link from ``peer``. Does not wait.

    Args:
        nbytes: how many, an integer.
        me, peer: the own rank, and the one that they come from; nothing is booked when they are the same.
        link_context: see the module.

    Returns:
        The tick of the clock at which the link will have carried them, for :func:`carried`; 0 without an imitated link.
    """
    tick = tl.full((), 0, tl.int64)
    if LINK_PACED:
        if me != peer:
            tick = _take(nbytes, peer, link_context, _INCOMING)
    return tick


@triton.jit
def charge_write(nbytes, me, peer, link_context):
    """As :func:`charge`, for bytes that go to ``peer`` over the caller's outgoing link."""
    tick = tl.full((), 0, tl.int64)
    if LINK_PACED:
        if me != peer:
            tick = _take(nbytes, peer, link_context, _OUTGOING)
    return tick


@triton.jit
def carried(tick):
    """Wait until the clock has reached what :func:`charge` or :func:`charge_write` returned."""
    if LINK_PACED:
        while _asm.ticks() < tick:
            pass


@triton.jit
def pace_read(pointer, me, peer, link_context):
    """Wait for the caller's incoming link to have carried the block at ``pointer`` from ``peer``."""
    if LINK_PACED:
        carried(charge(_bytes(pointer), me, peer, link_context))


@triton.jit
def pace_write(pointer, me, peer, link_context):
    """Wait for the caller's outgoing link to have carried the block at ``pointer`` to ``peer``."""
    if LINK_PACED:
        carried(charge_write(_bytes(pointer), me, peer, link_context))


@triton.jit(do_not_specialize=["nanoseconds", "peers"])
def book_kernel(state, until, nanoseconds, peers):
    """Take incoming links for some time, for copies that no kernel of the library makes.

    Args:
        state: of the receiving rank.
        until: int64 for each program: when the link will have carried its copies, for :func:`await_kernel`.
        nanoseconds: for which each of the links is taken.
        peers: a bit for each program that is to take a link: program p that of peer p, or where all peers share one
            link, program 0 that one.
    """
    program = tl.program_id(0)
    tick = tl.full((), 0, tl.int64)
    if (tl.cast(peers, tl.int64) >> program) & 1 == 1:
        ticks = tl.cast(nanoseconds, tl.int64) * _asm.ticks_per_microsecond() // 1000
        tick = _book(state + (1 + program) * LINE, ticks)
    tl.store(until + program, tick)


@triton.jit
def await_kernel(until):
    """Wait until the links that :func:`book_kernel` took have carried what it booked; as many programs as it had."""
    tick = tl.load(until + tl.program_id(0))
    while _asm.ticks() < tick:
        pass
