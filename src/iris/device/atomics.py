"""Atomic read-modify-writes on the memory of any rank, from inside a kernel. Each returns the old value.

``sem`` is ``"relaxed"``, ``"acquire"``, ``"release"`` or ``"acq_rel"`` (the default). ``scope`` is ``"cta"``, ``"gpu"``
or ``"sys"``. The default is ``"sys"``, because a narrower scope does not order another GPU; give ``"gpu"`` only for
words that no peer reads or writes.
"""

import triton
import triton.language as tl

from iris.device.address import hinted, translate


@triton.jit
def atomic_add(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Add ``val`` to what ``pointer`` (in the caller's heap, ``from_rank``) addresses on ``to_rank``."""
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    within: tl.constexpr = "sys" if scope is None else scope
    return tl.atomic_add(remote, val, mask=mask, sem=sem, scope=within)


@triton.jit
def atomic_sub(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Subtract ``val`` from what ``pointer`` (in the caller's heap, ``from_rank``) addresses on ``to_rank``."""
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    within: tl.constexpr = "sys" if scope is None else scope
    return tl.atomic_add(remote, -val, mask=mask, sem=sem, scope=within)


@triton.jit
def atomic_xchg(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Replace by ``val`` what ``pointer`` (in the caller's heap, ``from_rank``) addresses on ``to_rank``."""
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    within: tl.constexpr = "sys" if scope is None else scope
    return tl.atomic_xchg(remote, val, mask=mask, sem=sem, scope=within)


@triton.jit
def atomic_xor(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Exclusive-or ``val`` into what ``pointer`` (in the caller's heap, ``from_rank``) addresses on ``to_rank``."""
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    within: tl.constexpr = "sys" if scope is None else scope
    return tl.atomic_xor(remote, val, mask=mask, sem=sem, scope=within)


@triton.jit
def atomic_and(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """And ``val`` into what ``pointer`` (in the caller's heap, ``from_rank``) addresses on ``to_rank``."""
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    within: tl.constexpr = "sys" if scope is None else scope
    return tl.atomic_and(remote, val, mask=mask, sem=sem, scope=within)


@triton.jit
def atomic_or(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Or ``val`` into what ``pointer`` (in the caller's heap, ``from_rank``) addresses on ``to_rank``."""
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    within: tl.constexpr = "sys" if scope is None else scope
    return tl.atomic_or(remote, val, mask=mask, sem=sem, scope=within)


@triton.jit
def atomic_min(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Keep the smaller of ``val`` and what ``pointer`` (in the caller's heap) addresses on ``to_rank``."""
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    within: tl.constexpr = "sys" if scope is None else scope
    return tl.atomic_min(remote, val, mask=mask, sem=sem, scope=within)


@triton.jit
def atomic_max(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Keep the larger of ``val`` and what ``pointer`` (in the caller's heap) addresses on ``to_rank``."""
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    within: tl.constexpr = "sys" if scope is None else scope
    return tl.atomic_max(remote, val, mask=mask, sem=sem, scope=within)


@triton.jit
def atomic_cas(
    pointer,
    cmp,
    val,
    from_rank,
    to_rank,
    heap_bases,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Replace by ``val``, where it is ``cmp``, what ``pointer`` (in the caller's heap) addresses on ``to_rank``.

    For AMD, Triton 3.6 compiles it for the own device alone, whatever ``sem`` and ``scope``: there it orders nothing
    for other ranks. To take a lock use :func:`iris.device.signal.lock`.
    """
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    within: tl.constexpr = "sys" if scope is None else scope
    return tl.atomic_cas(remote, cmp, val, sem=sem, scope=within)
