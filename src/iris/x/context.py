"""``DeviceContext``: rank, world size and heap of the running kernel in one value, with the device API as methods.

    @triton.jit
    def kernel(context_tensor, data, rank: tl.constexpr, world_size: tl.constexpr):
        ctx = iris.DeviceContext.initialize(context_tensor, rank, world_size)
        value = ctx.load(data + tl.arange(0, 16), from_rank=(rank + 1) % world_size)

Pointers are always in the caller's own heap addresses. The methods do what the functions of the same name in
:mod:`iris.device.memory`, :mod:`iris.device.atomics` and :mod:`iris.device.signal` do, without ``heap_bases``.
"""

import triton
import triton.language as tl

from iris.device import atomics, memory, signal
from iris.device._compat import aggregate, constant, constexpr_function


@aggregate
class DeviceContext:
    """What a kernel knows of its rank; made by :meth:`initialize`.

    Attributes:
        rank: the rank that runs the kernel (constexpr).
        world_size: number of ranks (constexpr).
        heap_bases: int64[world_size], address of every rank's heap as mapped in this process.
        context: the tensor of ``ctx.get_device_context()``.
    """

    rank: tl.constexpr
    world_size: tl.constexpr
    heap_bases: tl.tensor
    context: tl.tensor

    @constexpr_function
    def __init__(self, rank, world_size, heap_bases, context):
        self.rank = constant(rank)
        self.world_size = constant(world_size)
        self.heap_bases = heap_bases
        self.context = context

    @staticmethod
    @triton.jit
    def initialize(context_tensor, rank, world_size, tracing: tl.constexpr = False):
        """The context of this kernel. ``context_tensor`` comes from ``ctx.get_device_context()``."""
        return DeviceContext(rank, world_size, context_tensor + 2, context_tensor)

    @triton.jit
    def load(
        self,
        pointer,
        from_rank,
        mask=None,
        other=None,
        cache_modifier: tl.constexpr = None,
        volatile: tl.constexpr = False,
        hint: tl.constexpr = None,
    ):
        """Read from ``from_rank``."""
        return memory.load(pointer, self.rank, from_rank, self.heap_bases, mask, other, cache_modifier, volatile, hint)

    @triton.jit
    def store(self, pointer, value, to_rank, mask=None, cache_modifier: tl.constexpr = None, hint: tl.constexpr = None):
        """Write to ``to_rank``."""
        memory.store(pointer, value, self.rank, to_rank, self.heap_bases, mask, hint, cache_modifier)

    @triton.jit
    def get(
        self,
        from_ptr,
        to_ptr,
        from_rank,
        mask=None,
        other=None,
        load_cache_modifier: tl.constexpr = None,
        store_cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Copy from ``from_rank``'s memory to the caller's."""
        memory.get(
            from_ptr,
            to_ptr,
            self.rank,
            from_rank,
            self.heap_bases,
            mask,
            other,
            load_cache_modifier,
            store_cache_modifier,
            hint,
        )

    @triton.jit
    def put(
        self,
        from_ptr,
        to_ptr,
        to_rank,
        mask=None,
        other=None,
        load_cache_modifier: tl.constexpr = None,
        store_cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Copy from the caller's memory to ``to_rank``'s."""
        memory.put(
            from_ptr,
            to_ptr,
            self.rank,
            to_rank,
            self.heap_bases,
            mask,
            other,
            load_cache_modifier,
            store_cache_modifier,
            hint,
        )

    @triton.jit
    def copy(
        self,
        src_ptr,
        dst_ptr,
        from_rank,
        to_rank,
        mask=None,
        other=None,
        load_cache_modifier: tl.constexpr = None,
        store_cache_modifier: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """Copy from ``from_rank``'s memory to ``to_rank``'s."""
        memory.copy(
            src_ptr,
            dst_ptr,
            from_rank,
            to_rank,
            self.rank,
            self.heap_bases,
            mask,
            other,
            load_cache_modifier,
            store_cache_modifier,
            hint,
        )

    @triton.jit
    def atomic_add(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """See :func:`iris.device.atomics.atomic_add`."""
        return atomics.atomic_add(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_sub(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """See :func:`iris.device.atomics.atomic_sub`."""
        return atomics.atomic_sub(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_xchg(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """See :func:`iris.device.atomics.atomic_xchg`."""
        return atomics.atomic_xchg(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_xor(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """See :func:`iris.device.atomics.atomic_xor`."""
        return atomics.atomic_xor(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_and(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """See :func:`iris.device.atomics.atomic_and`."""
        return atomics.atomic_and(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_or(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """See :func:`iris.device.atomics.atomic_or`."""
        return atomics.atomic_or(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_min(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """See :func:`iris.device.atomics.atomic_min`."""
        return atomics.atomic_min(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_max(
        self,
        pointer,
        val,
        to_rank,
        mask=None,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """See :func:`iris.device.atomics.atomic_max`."""
        return atomics.atomic_max(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_cas(
        self,
        pointer,
        cmp,
        val,
        to_rank,
        sem: tl.constexpr = None,
        scope: tl.constexpr = None,
        hint: tl.constexpr = None,
    ):
        """See :func:`iris.device.atomics.atomic_cas`."""
        return atomics.atomic_cas(pointer, cmp, val, self.rank, to_rank, self.heap_bases, sem, scope, hint)

    @triton.jit
    def notify(self, flag_ptr, value, to_rank):
        """Set a flag on ``to_rank`` after this program's stores; see :func:`iris.device.signal.notify`."""
        signal.notify(flag_ptr, value, self.rank, to_rank, self.heap_bases)

    @triton.jit
    def notify_add(self, flag_ptr, value, to_rank):
        """Add to a flag on ``to_rank`` after this program's stores; see :func:`iris.device.signal.notify_add`."""
        return signal.notify_add(flag_ptr, value, self.rank, to_rank, self.heap_bases)

    @triton.jit
    def wait(self, flag_ptr, value, peer=-1, kernel=0):
        """Wait until the own flag reached ``value``; see :func:`iris.device.signal.wait`."""
        return signal.wait(flag_ptr, value, self.context, peer, kernel)
