"""Where a pointer into the own symmetric heap points on another rank."""

import triton
import triton.language as tl

from iris.device._compat import constexpr_function

_GRAIN = tl.constexpr(1024)  # bytes


@constexpr_function
def element_bytes(pointer_dtype):
    """Bytes of the element that a pointer, or a block of pointers, points to."""
    element = pointer_dtype.scalar.element_ty
    return max(1, element.primitive_bitwidth // 8)


@triton.jit
def translate(pointer, from_rank, to_rank, heap_bases):
    """The address on ``to_rank`` of what ``pointer`` addresses on ``from_rank``.

    Args:
        pointer: pointer or block of pointers into the heap of ``from_rank``, as mapped in this process.
        from_rank, to_rank: ranks (int32 scalars).
        heap_bases: int64[world_size], the heaps' addresses as mapped in this process.

    The distance between two heaps is a multiple of 1024 bytes, so the result is as aligned and as contiguous as
    ``pointer``: it is added in elements, as a product of which the compiler knows a factor.
    """
    distance = tl.load(heap_bases + to_rank) - tl.load(heap_bases + from_rank)
    # A hint on a quotient is lost where that is by 1: elements of a byte were stored one by one.
    return pointer + distance // _GRAIN * (_GRAIN // element_bytes(pointer.dtype))


@constexpr_function
def _extents(hint):
    """Number of entries of a hint: 0 for None, 1 for an int."""
    if hint is None:
        return 0
    return 1 if isinstance(hint, int) else len(hint)


@constexpr_function
def _extent(hint, dimension):
    # A tuple is Triton's own type here in some releases, and so are its entries.
    extent = hint if isinstance(hint, int) else hint[dimension]
    return getattr(extent, "value", extent)


@triton.jit
def hinted(pointer, hint: tl.constexpr):
    """``pointer`` with the caller's word that blocks of ``hint`` elements are contiguous and aligned.

    Args:
        hint: None, an int for blocks of one dimension, or a tuple with an int for each of up to three dimensions.
    """
    extents: tl.constexpr = _extents(hint)
    tl.static_assert(extents <= 3, "hint must be None, an int, or a tuple of up to three ints")
    # Written out: Triton 3.6 does not take a constexpr tuple as a whole.
    if extents == 0:
        return pointer
    elif extents == 1:
        first: tl.constexpr = _extent(hint, 0)
        return tl.max_contiguous(tl.multiple_of(pointer, first), first)
    elif extents == 2:
        rows: tl.constexpr = _extent(hint, 0)
        columns: tl.constexpr = _extent(hint, 1)
        return tl.max_contiguous(tl.multiple_of(pointer, (rows, columns)), (rows, columns))
    else:
        one: tl.constexpr = _extent(hint, 0)
        two: tl.constexpr = _extent(hint, 1)
        three: tl.constexpr = _extent(hint, 2)
        return tl.max_contiguous(tl.multiple_of(pointer, (one, two, three)), (one, two, three))
