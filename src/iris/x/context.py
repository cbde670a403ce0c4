"""``DeviceContext``: rank, world size and heap of the running kernel in one value, with the device API as methods.

    @triton.jit
    def kernel(context_tensor, data, rank: tl.constexpr, world_size: tl.constexpr):
        ctx = iris.DeviceContext.initialize(context_tensor, rank, world_size)
        value = ctx.load(data + tl.arange(0, 16), from_rank=(rank + 1) % world_size)

Pointers are always in the caller's own heap addresses. The methods do what the functions of the same name in
:mod:`iris.device.memory`, :mod:`iris.device.atomics`, :mod:`iris.device.signal` and ``iris.x`` do, without
``heap_bases`` and the context. The docstrings of those functions say what must have happened before, and what the
caller still owes."""

import triton
import triton.language as tl

from iris.device import atomics, memory, signal
from iris.device._compat import aggregate, compiled_constructor, constant
from iris.device.tracing import DeviceTracing
from iris.x.all_gather import all_gather as _all_gather
from iris.x.all_reduce import all_reduce_atomic as _all_reduce_atomic
from iris.x.all_reduce import all_reduce_one_shot as _all_reduce_one_shot
from iris.x.all_reduce import all_reduce_ring as _all_reduce_ring
from iris.x.all_reduce import all_reduce_spinlock as _all_reduce_spinlock
from iris.x.all_reduce import all_reduce_two_shot as _all_reduce_two_shot
from iris.x.all_to_all import all_to_all as _all_to_all
from iris.x.broadcast import broadcast as _broadcast
from iris.x.gather import gather as _gather
from iris.x.publish import publish_tile as _publish_tile
from iris.x.publish import wait_tile as _wait_tile
from iris.x.reduce_scatter import reduce_scatter as _reduce_scatter


@aggregate
class DeviceContext:
    """What a kernel knows of its rank; made by :meth:`initialize`.

    Attributes:
        rank: the rank that runs the kernel (constexpr).
        world_size: number of ranks (constexpr).
        heap_bases: int64[world_size], address of every rank's heap as mapped in this process.
        context: the tensor of ``ctx.get_device_context()``. May be left out where ``heap_bases`` is the tensor of
            ``ctx.get_heap_bases()``, which lies within it.
        tracing: records spans (:class:`iris.device.tracing.DeviceTracing`).
    """

    rank: tl.constexpr
    world_size: tl.constexpr
    heap_bases: tl.tensor
    context: tl.tensor
    tracing: DeviceTracing

    @compiled_constructor
    def __init__(self, rank, world_size, heap_bases, context=None, tracing=False, _semantic=None):
        self.rank = constant(rank)
        self.world_size = constant(world_size)
        self.heap_bases = heap_bases
        if getattr(context, "value", context) is None:
            context = heap_bases - 2 if _semantic is None else heap_bases.__sub__(2, _semantic=_semantic)
        self.context = context
        self.tracing = DeviceTracing(tracing, rank, world_size, context)

    @staticmethod
    @triton.jit
    def initialize(context_tensor, rank, world_size, tracing: tl.constexpr = False):
        """The context of this kernel.

        Args:
            context_tensor: from ``ctx.get_device_context()``.
            rank, world_size: the calling rank and the number of ranks (constexpr).
            tracing: compile in what ``tracing`` records; the host also has to call ``ctx.tracing.enable()``.
        """
        return DeviceContext(rank, world_size, context_tensor + 2, context_tensor, tracing)

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

    @triton.jit
    def publish_tile(self, tile, src_view, locks, generation=1):
        """Store a tile to the own source and tell every rank; see :func:`iris.x.publish.publish_tile`."""
        _publish_tile(tile, src_view, locks, self, generation)

    @triton.jit
    def wait_tile(self, tile, src_view, locks, from_rank, generation=1):
        """Wait until a rank has published a tile; see :func:`iris.x.publish.wait_tile`."""
        return _wait_tile(tile, src_view, locks, from_rank, self, generation)

    @triton.jit
    def gather(self, tile_view, src_view, source_rank, hint: tl.constexpr = None):
        """The block that a rank holds for a tile; see :func:`iris.x.gather.gather`."""
        return _gather(tile_view, src_view, source_rank, self, hint)

    @triton.jit
    def all_gather(self, tile, dst_view, dim: tl.constexpr):
        """Store a tile of the own shard on every rank; see :func:`iris.x.all_gather.all_gather`."""
        _all_gather(tile, dst_view, dim, self)

    @triton.jit
    def all_to_all(self, tile_view, src_view, dst_view, N_per_rank: tl.constexpr):
        """Fill a tile with what the ranks hold for this one; see :func:`iris.x.all_to_all.all_to_all`."""
        _all_to_all(tile_view, src_view, dst_view, N_per_rank, self)

    @triton.jit
    def broadcast(self, tile, dst_view, source_rank):
        """Store a tile of one rank on every rank; see :func:`iris.x.broadcast.broadcast`."""
        _broadcast(tile, dst_view, source_rank, self)

    @triton.jit
    def reduce_scatter(self, tile, src_view, dst_view, locks, generation=1):
        """Sum a tile on the rank that owns it; see :func:`iris.x.reduce_scatter.reduce_scatter`."""
        _reduce_scatter(tile, src_view, dst_view, locks, self, generation)

    @triton.jit
    def all_reduce(self, tile, src_view, dst_view, config, generation=1, scratch_view=None):
        """The all-reduce that ``config`` (:class:`iris.x.tile.AllReduceConfig`) names; see ``iris.x.all_reduce``.

        "atomic" and "spinlock" take the tile's data and leave ``src_view`` alone; ``scratch_view`` is for "ring".
        """
        if config.variant_code == 0:
            _all_reduce_atomic(tile, dst_view, self)
        elif config.variant_code == 1:
            _all_reduce_ring(tile, src_view, dst_view, self, config.locks_ptr, generation, scratch_view)
        elif config.variant_code == 2:
            _all_reduce_one_shot(tile, src_view, dst_view, config.locks_ptr, self, generation)
        elif config.variant_code == 3:
            _all_reduce_two_shot(
                tile, src_view, dst_view, config.locks_ptr, self.rank, self.world_size, self, generation
            )
        else:
            _all_reduce_spinlock(tile, dst_view, config.locks_ptr, self)

    @triton.jit
    def all_reduce_atomic(self, tile, dst_view):
        """Add a tile to every rank's by atomics; see :func:`iris.x.all_reduce.all_reduce_atomic`."""
        _all_reduce_atomic(tile, dst_view, self)

    @triton.jit
    def all_reduce_spinlock(self, tile, dst_view, locks):
        """Add a tile to every rank's under locks; see :func:`iris.x.all_reduce.all_reduce_spinlock`."""
        _all_reduce_spinlock(tile, dst_view, locks, self)

    @triton.jit
    def all_reduce_one_shot(self, tile, src_view, dst_view, locks, generation=1):
        """Read a tile of all ranks and sum; see :func:`iris.x.all_reduce.all_reduce_one_shot`."""
        _all_reduce_one_shot(tile, src_view, dst_view, locks, self, generation)

    @triton.jit
    def all_reduce_two_shot(self, tile, src_view, dst_view, locks, generation=1):
        """Sum a tile on rank ``tile_id % world_size``, which stores it on all; see
        :func:`iris.x.all_reduce.all_reduce_two_shot`."""
        _all_reduce_two_shot(tile, src_view, dst_view, locks, self.rank, self.world_size, self, generation)

    @triton.jit
    def all_reduce_ring(self, tile, src_view, dst_view, locks=None, generation=1, scratch_view=None):
        """Sum a tile along the ranks; see :func:`iris.x.all_reduce.all_reduce_ring`."""
        _all_reduce_ring(tile, src_view, dst_view, self, locks, generation, scratch_view)
