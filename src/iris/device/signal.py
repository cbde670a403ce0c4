"""Flags: how a program tells another rank that something happened, and waits to be told.

A flag is an int32 that only grows (an epoch, or a count); a wait ends when ``flag - value >= 0`` in wrapping int32
arithmetic, so the values may wrap and nothing is reset between calls. *Ready* ("you may read") and *consumed* ("you may
overwrite") are two flags. Where many programs poll, give each flag a line of its own (:data:`FLAG_STRIDE` elements).

Every wait has a time limit (three quarters of ``IRIS_TIMEOUT``). A program whose wait expires writes one record to the
context's error slot and goes on, so that the kernel ends; the other waits of the context end as well, and the host
raises :class:`iris.errors.WaitTimeout` at the next barrier, synchronise or blocking operation. What such a launch
computed is never handed out as a result.

``context`` is the tensor of ``ctx.get_device_context()``: int64 ``[rank, world_size, heap bases (world_size), 17 words
of tracing, address of the error slot, time limit in microseconds, 2 words of :mod:`iris.device.link`]``.
"""

import triton
import triton.language as tl

from iris.device import _asm
from iris.device.address import translate

FLAG_STRIDE = tl.constexpr(32)  # int32 elements between flags that different programs poll: one 128-byte line
TRACE_WORDS = tl.constexpr(17)

# The error slot is int64: state (0 free, 1 being written, 2 complete), then the record, then a clock that only grows.
SLOT_STATE = tl.constexpr(0)
SLOT_RECORD = tl.constexpr(1)  # kernel, program, flag address, wanted, seen, peer; _asm.await_flag writes it, too
SLOT_CLOCK = tl.constexpr(8)
SLOT_WORDS = tl.constexpr(16)


@triton.jit
def notify(flag_ptr, value, from_rank, to_rank, heap_bases):
    """Set a flag on ``to_rank`` to ``value`` after every store of this program, by all its threads.

    Guarantee: who waits for ``value`` with :func:`wait` sees those stores, on any rank.
    The caller must not let two programs set the same flag to values that can arrive out of order.

    Args:
        flag_ptr: the flag (int32), in the heap of ``from_rank``.
        value: the value to set (int32 scalar).
        from_rank: the calling rank.
        to_rank: the rank whose flag is set.
        heap_bases: int64[world_size].
    """
    _asm.complete_stores()
    tl.debug_barrier()
    tl.atomic_xchg(translate(flag_ptr, from_rank, to_rank, heap_bases), value, sem="release", scope="sys")


@triton.jit
def notify_add(flag_ptr, value, from_rank, to_rank, heap_bases):
    """Add ``value`` to a flag on ``to_rank``, ordered as :func:`notify`; to count. Returns the old value."""
    _asm.complete_stores()
    tl.debug_barrier()
    return tl.atomic_add(translate(flag_ptr, from_rank, to_rank, heap_bases), value, sem="release", scope="sys")


@triton.jit
def publish(flag_ptr, value):
    """Set an own flag, in any memory of the device, after every store of this program, for programs of this device.

    Guarantee: who waits for ``value`` with :func:`wait` on the same device sees those stores.
    """
    _asm.complete_stores()
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, value, sem="release", scope="gpu")


@triton.jit
def notify_all(flag_ptr, values, mask, from_rank, to_ranks, heap_bases):
    """Set the same flag on several ranks, each to its own value, ordered as :func:`notify`.

    Args:
        flag_ptr: the flag (int32), in the heap of ``from_rank``.
        values: block of values to set (int32), one for each rank.
        mask: block, which of them to set.
        from_rank: the calling rank.
        to_ranks: block of ranks (int32); where ``mask`` is off any rank, for example the caller.
        heap_bases: int64[world_size].
    """
    _asm.complete_stores()
    tl.debug_barrier()
    flags = translate(flag_ptr, from_rank, to_ranks, heap_bases)
    tl.atomic_xchg(flags, values, mask=mask, sem="release", scope="sys")


@triton.jit
def wait(flag_ptr, value, context, peer=-1, kernel=0):
    """Wait until the own flag reached ``value`` (``flag - value >= 0``), then acquire at system scope.

    Guarantee: when 1 is returned, the stores before the matching :func:`notify` are visible to all threads.
    0 is returned when the time limit passed or another wait of the context had failed; the caller may go on, the host
    raises.

    Args:
        flag_ptr: the flag (int32), in the caller's own memory.
        value: the value to reach (int32 scalar).
        context: tensor of ``ctx.get_device_context()``.
        peer: the rank expected to set the flag, for the message.
        kernel: id from ``iris.runtime.launch.kernel_id``, for the message; 0 when unknown.
    """
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    arrived = 1
    if seen - value < 0:
        arrived = _wait(flag_ptr, value, context, peer, kernel)
    # Ends a wait for all threads at once: the threads of the cheap poll leave it apart.
    tl.debug_barrier()
    return arrived


@triton.jit
def wait_all(flag_ptrs, values, context, peers, kernel=0):
    """Wait until each of several own flags reached its value, with the guarantees of :func:`wait`.

    Costs little more than one wait: the flags are read side by side. A lane that has nothing to wait for takes a flag
    that nobody writes, and the value that it holds.

    Args:
        flag_ptrs: block of flags (int32), in the caller's own memory.
        values: block of values to reach (int32).
        context: tensor of ``ctx.get_device_context()``.
        peers: block of ranks expected to set them, for the message.
        kernel: id from ``iris.runtime.launch.kernel_id``, for the message; 0 when unknown.
    """
    arrived = _asm.arrived(flag_ptrs, values)
    if arrived == 0:
        arrived = _wait_all(flag_ptrs, values, context, peers, kernel)
    return arrived


@triton.jit
def wait_apart(flag_ptr, value, slot, limit, context, peer=-1, kernel=0):
    """As :func:`wait`, but on NVIDIA every thread waits by itself, and the compiler takes it for one instruction.

    So a loop that waits is pipelined. Loads by tensor descriptors that follow come after what was acquired.

    Args:
        flag_ptr, value, context, peer, kernel: as for :func:`wait`.
        slot, limit: of :func:`slot_and_limit`.
    """
    if _asm.awaits_flags():
        return _asm.await_flag(flag_ptr, value, slot, limit, peer, kernel, _program())
    else:
        return wait(flag_ptr, value, context, peer, kernel)


@triton.jit
def _program():
    return tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))


@triton.jit
def slot_and_limit(context):
    """Where a failed wait is reported, and ticks that a wait may take."""
    world_size = tl.load(context + 1)
    tail = context + 2 + world_size + TRACE_WORDS
    slot = tl.load(tail).to(tl.pointer_type(tl.int64))
    return slot, tl.load(tail + 1) * _asm.ticks_per_microsecond()


@triton.jit
def _wait_all(flag_ptrs, values, context, peers, kernel):
    # As in _wait, everything that decides how often this loop turns has one value for all threads.
    slot, limit = slot_and_limit(context)
    _now(slot)
    start = _now(slot)
    arrived = 0
    waiting = 1
    while waiting == 1:
        arrived = _asm.arrived(flag_ptrs, values)
        if arrived == 1:
            waiting = 0
        else:
            failed = tl.atomic_add(slot + SLOT_STATE, 0, sem="relaxed", scope="gpu")
            if failed != 0:
                waiting = 0
            else:
                if _now(slot) - start > limit:
                    waiting = 0
                    # The missing peer of the lowest rank stands for all.
                    seen = tl.atomic_add(flag_ptrs, tl.zeros_like(values), sem="acquire", scope="sys")
                    behind = seen - values < 0
                    peer = tl.min(tl.where(behind, peers, 2147483647))
                    first = behind & (peers == peer)
                    flag = tl.max(tl.where(first, flag_ptrs.to(tl.int64), 0))
                    # Several lanes may wait for one flag.
                    wanted = tl.max(tl.where(first, values, -2147483648))
                    _report(slot, flag, wanted, tl.max(tl.where(first, seen, -2147483648)), peer, kernel)
    return arrived


@triton.jit
def _wait(flag_ptr, value, context, peer, kernel):
    # Every quantity that decides how often this loop turns comes from an atomic, which gives all threads one value.
    slot, limit = slot_and_limit(context)
    _now(slot)  # puts the present into the clock word, so that the next reading is not an old one
    start = _now(slot)
    arrived = 0
    waiting = 1
    while waiting == 1:
        _asm.poll(flag_ptr, value)
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        if seen - value >= 0:
            arrived = 1
            waiting = 0
        else:
            failed = tl.atomic_add(slot + SLOT_STATE, 0, sem="relaxed", scope="gpu")
            if failed != 0:
                waiting = 0
            else:
                if _now(slot) - start > limit:
                    waiting = 0
                    _report(slot, flag_ptr.to(tl.int64), value, seen, peer, kernel)
    return arrived


@triton.jit
def lock(lock_ptr, from_rank, to_rank, context, kernel=0):
    """Take the lock of that word on ``to_rank``: 0 when free, 1 when taken. Bounded as :func:`wait` is.

    Guarantee: when 1 is returned, the stores that earlier holders made before :func:`unlock` are visible to all
    threads. 0 is returned when the time limit passed, or another wait of the context had failed; the host raises.

    Args:
        lock_ptr: the lock (int32), in the heap of ``from_rank``.
        from_rank: the calling rank.
        to_rank: the rank whose lock is taken.
        context: tensor of ``ctx.get_device_context()``.
        kernel: id from ``iris.runtime.launch.kernel_id``, for the message; 0 when unknown.
    """
    word = translate(lock_ptr, from_rank, to_rank, context + 2)
    taken = 1
    # An exchange takes a lock as well as a compare-and-swap does. For AMD, Triton 3.6 compiles the latter for the
    # own device alone, whatever its scope.
    if tl.atomic_xchg(word, 1, sem="acquire", scope="sys") != 0:
        taken = _lock(word, lock_ptr, to_rank, context, kernel)
    tl.debug_barrier()
    return taken


@triton.jit
def unlock(lock_ptr, from_rank, to_rank, context):
    """Give the lock back after every store of this program; see :func:`lock`."""
    _asm.complete_stores()
    tl.debug_barrier()
    tl.atomic_xchg(translate(lock_ptr, from_rank, to_rank, context + 2), 0, sem="release", scope="sys")


@triton.jit
def _lock(word, lock_ptr, to_rank, context, kernel):
    slot, limit = slot_and_limit(context)
    _now(slot)
    start = _now(slot)
    taken = 0
    waiting = 1
    while waiting == 1:
        seen = tl.atomic_xchg(word, 1, sem="acquire", scope="sys")
        if seen == 0:
            taken = 1
            waiting = 0
        else:
            failed = tl.atomic_add(slot + SLOT_STATE, 0, sem="relaxed", scope="gpu")
            if failed != 0:
                waiting = 0
            else:
                if _now(slot) - start > limit:
                    waiting = 0
                    _report(slot, lock_ptr.to(tl.int64), 0, seen, to_rank, kernel)
    return taken


@triton.jit
def _now(slot):
    # The largest clock value that the rank's programs had published before: one value for all threads of this program.
    return tl.atomic_max(slot + SLOT_CLOCK, _asm.ticks(), sem="relaxed", scope="gpu")


@triton.jit
def _report(slot, flag, wanted, seen, peer, kernel):
    first = tl.atomic_cas(
        slot + SLOT_STATE, tl.full((), 0, tl.int64), tl.full((), 1, tl.int64), sem="relaxed", scope="gpu"
    )
    if first == 0:
        record = slot + SLOT_RECORD
        tl.store(record, kernel)
        tl.store(record + 1, _program())
        tl.store(record + 2, flag)
        tl.store(record + 3, wanted)
        tl.store(record + 4, seen)
        tl.store(record + 5, peer)
        tl.debug_barrier()
        tl.atomic_xchg(slot + SLOT_STATE, tl.full((), 2, tl.int64), sem="release", scope="sys")
