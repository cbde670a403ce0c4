"""What the operations compute, written slowly and plainly. Tests and benchmarks compare with it.

Floating-point values are computed in float64, integers in int64, which wraps around as narrower integers do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


def all_gather_matmul(
    shards: Sequence[torch.Tensor],
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    gather_dim: int = 1,
    activation: str = "none",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """``act(scale_a * scale_b * cat(shards, gather_dim) @ b + bias)`` in float64.

    Args:
        shards: every rank's A, in rank order.
        b: (K, N).
        bias: (N,) or two-dimensional, or None.
        gather_dim: 1 when the shards hold columns of A, 0 when rows.
        activation: none, relu, gelu or silu.
        scale_a, scale_b: one element each; None for 1.
    """
    a = torch.cat([shard.to(torch.float64) for shard in shards], dim=gather_dim)
    return _epilogue(a @ b.to(torch.float64), bias, activation, scale_a, scale_b)


def matmul_all_reduce(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    activation: str = "none",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    rounded: torch.dtype | None = None,
) -> torch.Tensor:
    """``act(scale_a * scale_b * sum over ranks of a @ b + bias)`` in float64.

    Args:
        a, b: every rank's A and B, in rank order.
        bias: (N,) or two-dimensional, or None.
        activation: none, relu, gelu or silu.
        scale_a, scale_b: one element each; None for 1.
        rounded: the dtype that every rank's product is rounded to before it is added, None for no rounding.
    """
    products = [x.to(torch.float64) @ y.to(torch.float64) for x, y in zip(a, b, strict=True)]
    if rounded is not None:
        products = [product.to(rounded).to(torch.float64) for product in products]
    return _epilogue(all_reduce(products), bias, activation, scale_a, scale_b)


def matmul_reduce_scatter(a: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Each rank's rows of :func:`matmul_all_reduce`, which has the arguments; the last ranks may have none."""
    whole = matmul_all_reduce(a, *args, **kwargs)
    chunk = -(-whole.shape[0] // len(a))
    return [whole[rank * chunk : (rank + 1) * chunk] for rank in range(len(a))]


def matmul_all_gather(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor] | None = None,
    activation: str = "none",
    scale_a: Sequence[torch.Tensor] | None = None,
    scale_b: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Every rank's ``act(scale_a * scale_b * a @ b + bias)``, one below the other, in float64.

    Args:
        a, b, bias, scale_a, scale_b: every rank's, in rank order; None for no bias and no scales.
        activation: none, relu, gelu or silu.
    """
    rows = []
    for rank, (x, y) in enumerate(zip(a, b, strict=True)):
        own = [None if of is None else of[rank] for of in (bias, scale_a, scale_b)]
        rows.append(_epilogue(x.to(torch.float64) @ y.to(torch.float64), own[0], activation, own[1], own[2]))
    return torch.cat(rows)


def all_reduce(inputs: Sequence[torch.Tensor], op: str = "SUM") -> torch.Tensor:
    """All ranks' inputs combined in rank order, in float64 or int64; averages in float64.

    Args:
        inputs: every rank's, in rank order.
        op: SUM, PRODUCT, MIN, MAX or AVG; NaN wins over numbers in MIN and MAX.
    """
    total = _wide(inputs[0])
    for tensor in inputs[1:]:
        total = _COMBINE[op](total, _wide(tensor))
    return total.to(torch.float64) / len(inputs) if op == "AVG" else total


def reduce_scatter(inputs: Sequence[torch.Tensor], op: str = "SUM") -> list[torch.Tensor]:
    """Each rank's part of :func:`all_reduce`, cut along the first dimension."""
    return list(all_reduce(inputs, op).chunk(len(inputs)))


def all_gather(inputs: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """All ranks' inputs one after the other along ``dim``; scalars become a vector."""
    return torch.cat([tensor.reshape(tensor.shape or (1,)) for tensor in inputs], dim=dim)


def all_to_all(inputs: Sequence[torch.Tensor], dim: int = -1) -> list[torch.Tensor]:
    """What each rank gets when every rank cuts its input along ``dim`` and gives a piece to each."""
    world = len(inputs)
    pieces = [tensor.tensor_split(world, dim=dim) for tensor in inputs]
    return [torch.cat([pieces[sender][receiver] for sender in range(world)], dim=dim) for receiver in range(world)]


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": lambda x: x.clamp(min=0),
    # The complement of erf, because 1 + erf(x) has no digits left where x is far below zero.
    "gelu": lambda x: x * torch.special.erfc(-x / math.sqrt(2)) / 2,
    "silu": lambda x: x * torch.sigmoid(x),
}
_COMBINE = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def _epilogue(
    product: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
) -> torch.Tensor:
    for scale in (scale_a, scale_b):
        if scale is not None:
            product = product * scale.to(torch.float64).reshape(())
    if bias is not None:
        product = product + bias.to(torch.float64)
    return _ACTIVATIONS[activation](product)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64)
