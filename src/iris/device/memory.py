"""Loads, stores and copies on the memory of any rank, from inside a kernel.

A pointer is always one into the caller's own symmetric heap; the functions address the same place on another rank.
Cache modifiers, ``volatile``, ``mask`` and ``other`` mean what they mean for ``tl.load`` and ``tl.store``; lanes that
``mask`` turns off are not touched and read as ``other`` (undefined without it). ``hint`` is an int (or a tuple for
blocks of several dimensions): the caller's word that so many elements are contiguous and aligned. It is rarely needed,
since translation keeps what the compiler knows.

Nothing here orders memory across ranks: pair stores with :mod:`iris.device.signal`.
"""

import triton
import triton.language as tl

from iris.device import link
from iris.device.address import hinted, translate


@triton.jit
def _load(pointer, mask, other, cache_modifier: tl.constexpr, volatile: tl.constexpr):
    modifier: tl.constexpr = "" if cache_modifier is None else cache_modifier
    return tl.load(pointer, mask=mask, other=other, cache_modifier=modifier, volatile=volatile)


@triton.jit
def _store(pointer, value, mask, cache_modifier: tl.constexpr):
    modifier: tl.constexpr = "" if cache_modifier is None else cache_modifier
    tl.store(pointer, value, mask=mask, cache_modifier=modifier)


@triton.jit
def load(
    pointer,
    to_rank,
    from_rank,
    heap_bases,
    mask=None,
    other=None,
    cache_modifier: tl.constexpr = None,
    volatile: tl.constexpr = False,
    hint: tl.constexpr = None,
):
    """Read from a rank's memory.

    Args:
        pointer: pointer or block into the heap of ``to_rank``.
        to_rank: the calling rank, whose address space ``pointer`` is in.
        from_rank: the rank to read from.
        heap_bases: int64[world_size] from ``ctx.get_heap_bases()``.

    Returns:
        The value or block read.
    """
    remote = hinted(translate(pointer, to_rank, from_rank, heap_bases), hint)
    link.pace_read(remote, to_rank, from_rank, heap_bases)
    return _load(remote, mask, other, cache_modifier, volatile)


@triton.jit
def store(
    pointer,
    value,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    hint: tl.constexpr = None,
    cache_modifier: tl.constexpr = None,
):
    """Write to a rank's memory.

    Args:
        pointer: pointer or block into the heap of ``from_rank``.
        value: value or block to write.
        from_rank: the calling rank.
        to_rank: the rank to write to.
        heap_bases: int64[world_size].
    """
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    link.pace_write(remote, from_rank, to_rank, heap_bases)
    _store(remote, value, mask, cache_modifier)


@triton.jit
def get(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Copy from a rank's memory to the caller's.

    Args:
        from_ptr: where to read, in the caller's heap addresses.
        to_ptr: where to write, in the caller's memory.
        from_rank: the calling rank (positional order of the original API).
        to_rank: the rank that is read. ``DeviceContext.get`` names it ``from_rank``.
        heap_bases: int64[world_size].
    """
    remote = hinted(translate(from_ptr, from_rank, to_rank, heap_bases), hint)
    link.pace_read(remote, from_rank, to_rank, heap_bases)
    value = _load(remote, mask, other, load_cache_modifier, False)
    _store(to_ptr, value, mask, store_cache_modifier)


@triton.jit
def put(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Copy from the caller's memory to a rank's.

    Args:
        from_ptr: where to read, in the caller's memory.
        to_ptr: where to write, in the caller's heap addresses.
        from_rank: the calling rank.
        to_rank: the rank to write to.
        heap_bases: int64[world_size].
    """
    value = _load(from_ptr, mask, other, load_cache_modifier, False)
    remote = hinted(translate(to_ptr, from_rank, to_rank, heap_bases), hint)
    link.pace_write(remote, from_rank, to_rank, heap_bases)
    _store(remote, value, mask, store_cache_modifier)


@triton.jit
def copy(
    src_ptr,
    dst_ptr,
    from_rank,
    to_rank,
    cur_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Copy from one rank's memory to another's; each may be the caller or a peer.

    Args:
        src_ptr, dst_ptr: where to read and write, both in the heap addresses of ``cur_rank``.
        from_rank: the rank to read from.
        to_rank: the rank to write to.
        cur_rank: the calling rank.
        heap_bases: int64[world_size].
    """
    source = hinted(translate(src_ptr, cur_rank, from_rank, heap_bases), hint)
    target = hinted(translate(dst_ptr, cur_rank, to_rank, heap_bases), hint)
    link.pace_read(source, cur_rank, from_rank, heap_bases)
    link.pace_write(target, cur_rank, to_rank, heap_bases)
    value = _load(source, mask, other, load_cache_modifier, False)
    _store(target, value, mask, store_cache_modifier)
