"""Spans of a running kernel: what a program did, on which compute unit, from when to when.

    ctx = iris.DeviceContext.initialize(context, rank, world_size, tracing=True)
    span = ctx.tracing.record_event_start(iris.TraceEvent().put, peer, pointers, pid_m, pid_n, mask=mask)
    ctx.put(source, pointers, peer, mask=mask)
    ctx.tracing.record_event_end(span)

With ``tracing=False`` nothing of this is compiled. With ``tracing=True`` nothing is recorded unless the host has called
``ctx.tracing.enable()``; then a span costs an atomic and some stores, which lie outside of it. Kernels without a
``DeviceContext`` call :func:`start` and :func:`end`, under a ``tl.constexpr`` of their own.

The 17 words of tracing in the context tensor, after the heap bases: enabled, ``max_events``, address of the counter of
events, the same again as the counter of ``op_index``, addresses of the buffers in the order of :data:`BUFFERS`. Every
event takes a number from the counter; those from ``max_events`` on are counted and not stored.
"""

import triton
import triton.language as tl

from iris._events import EVENT_NAMES
from iris.device import _asm
from iris.device._compat import aggregate, compiled_constructor, constant, constexpr_function

# Buffers by name, and whether their elements have 64 bits instead of 32.
BUFFERS = {
    "event_id": False,
    "pid": False,
    "pid_m": False,
    "pid_n": False,
    "cur_rank": False,
    "target_rank": False,
    "xcc_id": False,
    "cu_id": False,
    "timestamp": True,
    "address": True,
    "duration_cycles": True,
    "op_index": False,
    "payload_size": False,
}
OPEN = -1  # in `duration_cycles`: the span has no end

_MAX_EVENTS = tl.constexpr(1)
_COUNTER = tl.constexpr(2)
_FIRST_BUFFER = tl.constexpr(4)
_OPEN = tl.constexpr(OPEN)
_LARGEST = tl.constexpr(2**63 - 1)


@triton.jit
def start(context, event_id: tl.constexpr, target_rank=-1, pid_m=0, pid_n=0, address=None, mask=None):
    """Begin a span. Returns its handle (int32 scalar) for :func:`end`; -1 when it is not recorded.

    Args:
        context: tensor of ``ctx.get_device_context()``.
        event_id: what the span is, from :class:`iris._events.Event` or a number of your own below 4096.
        target_rank: the rank whose memory is moved, or which is waited for; -1 for none.
        pid_m, pid_n: which tile; int32 scalars that mean what the kernel wants.
        address: pointer or block of pointers of what is moved; the lowest one is recorded.
        mask: which lanes of ``address`` are moved. Without it the payload is recorded as 0 bytes.
    """
    block = context + 2 + tl.load(context + 1)
    return _start(block, tl.load(context), event_id, target_rank, pid_m, pid_n, address, mask)


@triton.jit
def end(context, handle):
    """End the span that :func:`start` began: all threads of the program have come to here."""
    _end(context + 2 + tl.load(context + 1), handle)


@constexpr_function
def _element_bytes(address):
    """Bytes of what a pointer or a block of pointers points to; 0 for a plain number."""
    scalar = getattr(address, "dtype", None)
    element = getattr(getattr(scalar, "scalar", scalar), "element_ty", None)
    return 0 if element is None else max(1, element.primitive_bitwidth // 8)


@constexpr_function
def _is_block(value):
    return len(getattr(value, "shape", ())) > 0


@triton.jit
def _place(address, mask):
    """Lowest address (int64) and payload in bytes (int32) of the lanes that ``mask`` leaves on."""
    if address is None:
        return tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
    else:
        lanes = tl.cast(address, tl.int64)
        if mask is None:
            payload = tl.full((), 0, tl.int32)
        else:
            moved = tl.cast(mask, tl.int1)
            if _is_block(lanes):
                moved, lanes = tl.broadcast(moved, lanes)
            lanes = tl.where(moved, lanes, _LARGEST)
            payload = moved.to(tl.int32)
            if _is_block(payload):
                payload = tl.sum(payload)
            payload = payload * _element_bytes(address)
        if _is_block(lanes):
            lanes = tl.min(lanes)
        return tl.where(lanes == _LARGEST, 0, lanes), payload


@triton.jit
def _narrow(block, number: tl.constexpr, index, value):
    tl.store(tl.load(block + _FIRST_BUFFER + number).to(tl.pointer_type(tl.int32)) + index, value)


@triton.jit
def _wide(block, number: tl.constexpr):
    return tl.load(block + _FIRST_BUFFER + number).to(tl.pointer_type(tl.int64))


@triton.jit
def _start(block, rank, event_id: tl.constexpr, target_rank, pid_m, pid_n, address, mask):
    limit = tl.load(block + _MAX_EVENTS)
    handle = tl.full((), -1, tl.int32)
    if limit > 0:
        # Relaxed: tracing must not order what the kernel forgot to order.
        counter = tl.load(block + _COUNTER).to(tl.pointer_type(tl.int64))
        number = tl.atomic_add(counter, tl.full((), 1, tl.int64), sem="relaxed", scope="gpu")
        if number < limit:
            handle = number.to(tl.int32)
            program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
            lowest, payload = _place(address, mask)
            _narrow(block, 0, handle, event_id)
            _narrow(block, 1, handle, program)
            _narrow(block, 2, handle, pid_m)
            _narrow(block, 3, handle, pid_n)
            _narrow(block, 4, handle, rank)
            _narrow(block, 5, handle, target_rank)
            _narrow(block, 6, handle, _asm.die())
            _narrow(block, 7, handle, _asm.compute_unit())
            tl.store(_wide(block, 9) + handle, lowest)
            tl.store(_wide(block, 10) + handle, tl.full((), _OPEN, tl.int64))
            _narrow(block, 11, handle, handle)
            _narrow(block, 12, handle, payload)
            # Last, so that recording the span is no part of it.
            tl.store(_wide(block, 8) + handle, _asm.ticks())
    return handle


@triton.jit
def _end(block, handle):
    if handle >= 0:
        # The span is over when the last thread has come here.
        tl.debug_barrier()
        now = _asm.ticks()
        began = tl.load(_wide(block, 8) + handle)
        tl.store(_wide(block, 10) + handle, tl.maximum(now - began, 0))


@aggregate
class DeviceTracing:
    """``tracing`` of a :class:`iris.DeviceContext`: records spans of the running program.

    Attributes:
        enabled: whether recording is compiled in (constexpr).
        rank, world_size: as in the context (constexpr).
        context: the tensor of ``ctx.get_device_context()``.
    """

    enabled: tl.constexpr
    rank: tl.constexpr
    world_size: tl.constexpr
    context: tl.tensor

    @compiled_constructor
    def __init__(self, enabled, rank, world_size, context):
        self.enabled = constant(enabled)
        self.rank = constant(rank)
        self.world_size = constant(world_size)
        self.context = context

    @triton.jit
    def record_event_start(self, event_id: tl.constexpr, target_rank, address, pid_m, pid_n, mask=None):
        """Begin a span. Returns its handle for :meth:`record_event_end` (int32 scalar; -1 when it is not recorded).

        Args:
            event_id: what the span is, such as ``iris.TraceEvent().put``.
            target_rank: the rank whose memory is moved, or which is waited for; -1 for none.
            address: pointer or block of pointers of what is moved; the lowest one is recorded. 0 for none.
            pid_m, pid_n: which tile.
            mask: which lanes of ``address`` are moved. Without it the payload is recorded as 0 bytes.
        """
        if self.enabled:
            block = self.context + 2 + self.world_size
            return _start(block, self.rank, event_id, target_rank, pid_m, pid_n, address, mask)
        else:
            return tl.full((), -1, tl.int32)

    @triton.jit
    def record_event_end(self, handle):
        """End the span that :meth:`record_event_start` began: all threads of the program have come to here."""
        if self.enabled:
            _end(self.context + 2 + self.world_size, handle)


@aggregate
class TraceEvent:
    """Ids of the events of a trace, by name, for kernels: ``iris.TraceEvent().put``. The list is ``iris._events``."""

    __annotations__ = {name: tl.constexpr for name in EVENT_NAMES.values()}

    @compiled_constructor
    def __init__(self):
        for event_id, name in EVENT_NAMES.items():
            setattr(self, name, constant(event_id))
