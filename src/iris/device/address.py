"""Where a pointer into the own symmetric heap points on another rank."""

import triton
import triton.language as tl

from iris.device._compat import constexpr_function


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
    ``pointer``: it is added in elements, which keeps what the compiler knows about the pointer.
    """
    distance = tl.load(heap_bases + to_rank) - tl.load(heap_bases + from_rank)
    elements = distance // element_bytes(pointer.dtype)
    return pointer + tl.multiple_of(elements, 16)


@triton.jit
def hinted(pointer, hint: tl.constexpr):
    """``pointer`` with the caller's word that blocks of ``hint`` elements are contiguous and aligned."""
    if hint is None:
        return pointer
    else:
        return tl.max_contiguous(tl.multiple_of(pointer, hint), hint)
