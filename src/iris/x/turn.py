"""A kernel's turn at its peers' inputs: it says that its own may be read, waits until a peer's may, and ends when all
peers have read its own.

Protocol. Two int32 flags for each pair of ranks, in lines of 128 bytes on the heap: *ready* (the peer's input may be
read) and *consumed* (the peer has read mine). The first program of a rank to run sets *ready* on every peer; the last
to end sets *consumed* and waits for every peer's, so that the input may be overwritten by what follows in the stream.
A flag holds how often the two ranks have met (an epoch, kept in device memory and advanced by the last program), so
nothing is reset, a captured graph replays, and calls of any mixture of groups may share the flags.

``flags`` is int32[2][num_ranks][FLAG_STRIDE] on the heap, ``counters`` int32[num_ranks + 2] in ordinary memory: epochs,
programs started, programs ended.
"""

import triton
import triton.language as tl

from iris.device import _asm, signal
from iris.x.schedule import rotated_rank


@triton.jit
def begin_turn(flags, counters, members, index, context, WORLD: tl.constexpr):
    """To be called by every program before anything else. Waits for nothing."""
    rank = tl.load(members + index)
    num_ranks = tl.load(context + 1).to(tl.int32)
    if WORLD > 1:
        # The first program that runs, whichever it is, tells the peers that this rank's input may be read.
        if tl.atomic_add(counters + num_ranks, 1, sem="relaxed", scope="gpu") == 0:
            for step in range(1, WORLD):
                peer = tl.load(members + rotated_rank(index, step, WORLD))
                epoch = tl.load(counters + peer) + 1
                signal.notify(flags + rank * signal.FLAG_STRIDE, epoch, rank, peer, context + 2)


@triton.jit
def wait_for_input(flags, counters, peer, context, KERNEL: tl.constexpr):
    """Wait until the input of ``peer``, a rank other than the caller, may be read."""
    epoch = tl.load(counters + peer) + 1
    signal.wait(flags + peer * signal.FLAG_STRIDE, epoch, context, peer, KERNEL)


@triton.jit
def end_alone(counters, context):
    """As :func:`end_turn`, but waits for no peer and advances no epoch: whoever is last does."""
    num_ranks = tl.load(context + 1).to(tl.int32)
    started = counters + num_ranks
    _asm.complete_stores()
    tl.debug_barrier()
    last = tl.atomic_add(started + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    if last:
        # Every program has read the epochs and its peers' inputs.
        tl.store(started, 0)
        tl.store(started + 1, 0)
    return last


@triton.jit
def end_turn(flags, counters, members, index, context, WORLD: tl.constexpr, KERNEL: tl.constexpr):
    """To be called by every program after everything else. True for the last program of the rank, once all peers have
    read the rank's input; then no other program of the kernel does anything any more."""
    rank = tl.load(members + index)
    num_ranks = tl.load(context + 1).to(tl.int32)
    last = end_alone(counters, context)
    if last:
        if WORLD > 1:
            consumed = flags + num_ranks * signal.FLAG_STRIDE
            for step in range(1, WORLD):
                peer = tl.load(members + rotated_rank(index, step, WORLD))
                epoch = tl.load(counters + peer) + 1
                signal.notify(consumed + rank * signal.FLAG_STRIDE, epoch, rank, peer, context + 2)
            for step in range(1, WORLD):
                peer = tl.load(members + rotated_rank(index, step, WORLD))
                epoch = tl.load(counters + peer) + 1
                signal.wait(consumed + peer * signal.FLAG_STRIDE, epoch, context, peer, KERNEL)
                tl.store(counters + peer, epoch)
    return last
