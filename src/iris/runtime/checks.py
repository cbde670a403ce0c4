"""Checks of tensor arguments that every operation makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from iris.errors import ArgumentError, DeviceMismatch, NotSymmetricError, UnsupportedError

if TYPE_CHECKING:
    from iris._target import Target
    from iris.runtime.context import Iris

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_tensor(ctx: Iris, name: str, tensor: object) -> torch.Tensor:
    """``tensor``, when it is a tensor on the context's device.

    Raises:
        ArgumentError: no tensor.
        DeviceMismatch: on another device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{name} must be a tensor, got {type(tensor).__name__}")
    check_device(ctx, name, tensor)
    return tensor


def check_device(ctx: Iris, name: str, tensor: torch.Tensor) -> None:
    """Raise DeviceMismatch unless ``tensor`` is on the context's device."""
    if tensor.device != ctx.get_device():
        raise DeviceMismatch(f"{name} is on {tensor.device}, the context is on {ctx.device}; move it there")


def check_symmetric(ctx: Iris, name: str, tensor: torch.Tensor, touched: str = "read") -> None:
    """Raise NotSymmetricError unless peers can reach ``tensor``; ``touched``: what they do with it."""
    if tensor.numel() and not ctx.is_symmetric(tensor):
        raise NotSymmetricError(
            f"{name} is {touched} by the other ranks, so it must be on the symmetric heap; create it with ctx.zeros, "
            "ctx.empty and so on, or copy it there with ctx.as_symmetric"
        )


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last; 0 when it is empty."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the memory between the first and the last elements of two tensors overlaps."""
    start, end = one.data_ptr(), one.data_ptr() + span_bytes(one)
    first, last = other.data_ptr(), other.data_ptr() + span_bytes(other)
    return start < last and first < end


def check_matrix(ctx: Iris, name: str, tensor: object) -> torch.Tensor:
    """``tensor``, when it is a 2-D tensor on the context's device.

    Raises:
        ArgumentError: no tensor, or not two dimensions.
        DeviceMismatch: on another device.
    """
    matrix = check_tensor(ctx, name, tensor)
    if matrix.dim() != 2:
        raise ArgumentError(f"{name} must have two dimensions, got shape {tuple(matrix.shape)}")
    return matrix


def check_product_dtypes(
    target: Target, a: torch.dtype, b: torch.dtype, float64: bool = False
) -> tuple[torch.dtype, ...]:
    """The dtypes that a product of A and B may have; the first one where nobody names another.

    ``float64``: whether they may be float64.

    Raises:
        ArgumentError: a combination that has no meaning here; the message lists those that have.
        UnsupportedError: an fp8 dtype that the target does not multiply.
    """
    if a in FP8 and b in FP8:
        for name, dtype in (("A", a), ("B", b)):
            short = str(dtype).removeprefix("torch.")
            if short not in target.fp8:
                able = ", ".join(target.fp8) or "no fp8 dtype"
                raise UnsupportedError(f"{name} is {short}, which {target.arch} does not multiply; it does: {able}")
        return (torch.bfloat16, torch.float16, torch.float32)
    if a != b:
        raise ArgumentError(f"A and B must have one dtype, or both an fp8 dtype; got {a} and {b}")
    if a in FLOATS:
        return (a, *(dtype for dtype in FLOATS if dtype != a))
    if a == torch.int8:
        return (torch.int32,)
    if a == torch.float64 and float64:
        return (a,)
    raise ArgumentError(f"A and B may be {'float64, ' * float64}float32, float16, bfloat16, int8 or fp8; got {a}")


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Raise ArgumentError when elements of ``tensor`` share memory, as those of an expanded one do."""
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride == 0 and tensor.numel():
            raise ArgumentError(f"{name} is written, so its elements must not share memory; it is an expanded tensor")


def integer_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integer type of the same size, for kernels that only move values.

    Raises:
        ArgumentError: there is none (complex128).
    """
    if dtype.itemsize not in _INTEGERS:
        raise ArgumentError(f"tensors of {dtype} are not moved; move torch.view_as_real(tensor)")
    return _INTEGERS[dtype.itemsize]
