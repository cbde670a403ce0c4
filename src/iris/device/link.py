"""A link of a given rate, imitated: what a rank reads from or writes to a peer waits until the link would be free.

Only ranks that share a GPU in one process ask for it (``iris.sim.run(..., on="gpu", link_gbps=...)``); everywhere else
the functions compile to nothing. Each rank has a word for each direction that says when its link is free, in ticks of
the GPU's clock; a transfer takes the link for bytes / rate and goes on when its turn is over. ``link_context`` is the
context tensor past its first two words, as for ``heap_bases``.
"""

import triton
import triton.language as tl

from iris.device import _asm
from iris.device._compat import constexpr_function

LINK_PACED = tl.constexpr(False)
_TRACE_WORDS = tl.constexpr(17)
_LINK_WORD = tl.constexpr(2)  # behind the error slot's address and the time limit: link words, femtoseconds a byte
STATE_WORDS = 32
_IN = tl.constexpr(0)
_OUT = tl.constexpr(16)


@constexpr_function
def _bytes(block):
    """Bytes that a pointer or a block of pointers addresses."""
    count = 1
    for extent in getattr(block, "shape", ()):
        count *= getattr(extent, "value", extent)
    return count * max(1, block.dtype.scalar.element_ty.primitive_bitwidth // 8)


@triton.jit
def _take(link_context, nbytes, direction: tl.constexpr):
    world_size = tl.load(link_context - 1)
    tail = link_context + world_size + _TRACE_WORDS + _LINK_WORD
    word = tl.load(tail).to(tl.pointer_type(tl.int64)) + direction
    # A GPU of either vendor counts at most 1000 ticks a microsecond, so femtoseconds keep small transfers apart.
    ticks = (nbytes * tl.load(tail + 1) // 1000) * _asm.ticks_per_microsecond() // 1000000
    tl.atomic_max(word, _asm.ticks(), sem="relaxed", scope="gpu")
    free = tl.atomic_add(word, ticks, sem="relaxed", scope="gpu") + ticks
    while _asm.ticks() < free:
        pass


@triton.jit(do_not_specialize=["nanoseconds"])
def carry_kernel(word, nanoseconds):
    """Take a rank's incoming link for some time, for a copy that no kernel of the library makes; one program."""
    ticks = tl.cast(nanoseconds, tl.int64) * _asm.ticks_per_microsecond() // 1000
    tl.atomic_max(word, _asm.ticks(), sem="relaxed", scope="gpu")
    free = tl.atomic_add(word, ticks, sem="relaxed", scope="gpu") + ticks
    while _asm.ticks() < free:
        pass


@triton.jit
def pace_read(pointer, me, peer, link_context):
    """Wait for the caller's incoming link to have carried the block at ``pointer`` from ``peer``."""
    if LINK_PACED:
        if me != peer:
            _take(link_context, _bytes(pointer), _IN)


@triton.jit
def pace_write(pointer, me, peer, link_context):
    """Wait for the caller's outgoing link to have carried the block at ``pointer`` to ``peer``."""
    if LINK_PACED:
        if me != peer:
            _take(link_context, _bytes(pointer), _OUT)
