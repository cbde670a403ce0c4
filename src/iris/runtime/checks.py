"""Checks of tensor arguments that every operation makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from iris.errors import ArgumentError, DeviceMismatch, NotSymmetricError

if TYPE_CHECKING:
    from iris.runtime.context import Iris

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


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
