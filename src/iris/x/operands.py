"""The host's side of :mod:`iris.x.gemm`: whether operands come by tensor descriptors or by pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from iris._target import Target

_ALIGNMENT = 16  # bytes; of addresses and strides that a tensor descriptor takes


def takes_descriptors(target: Target, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the target copies tiles by descriptors, and A and B lie so that it can."""
    if not target.descriptors or not a.numel() or not b.numel() or not describable(a):
        return False
    if b.stride(1) != 1:
        return describable(b.t())
    # Matrix units take other types than 16-bit ones along K only.
    return a.element_size() == 2 and describable(b)


def describable(matrix: torch.Tensor) -> bool:
    """Whether rows lie together, at addresses that a descriptor can name."""
    row = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and row % _ALIGNMENT == 0 and matrix.data_ptr() % _ALIGNMENT == 0


def describe_a(a: torch.Tensor, block_m: int, block_k: int) -> Any:
    """The descriptor of A, of tiles (block_m, block_k)."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(a, list(a.shape), list(a.stride()), [block_m, block_k])


def describe_b(b: torch.Tensor, block_n: int, block_k: int) -> Any:
    """The descriptor of B, of tiles (block_k, block_n); of its transpose when B's columns lie together."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if b.stride(1) != 1:
        b = b.t()
        return TensorDescriptor(b, list(b.shape), list(b.stride()), [block_n, block_k])
    return TensorDescriptor(b, list(b.shape), list(b.stride()), [block_k, block_n])
