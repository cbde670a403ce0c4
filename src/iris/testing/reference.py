"""What the operations compute, written slowly and plainly in float64. Tests and benchmarks compare with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def all_gather_matmul(
    shards: Sequence[torch.Tensor], b: torch.Tensor, bias: torch.Tensor | None = None, gather_dim: int = 1
) -> torch.Tensor:
    """``cat(shards, gather_dim) @ b + bias`` in float64.

    Args:
        shards: every rank's A, in rank order.
        b: (K, N).
        bias: (N,) or two-dimensional, or None.
        gather_dim: 1 when the shards hold columns of A, 0 when rows.
    """
    a = torch.cat([shard.to(torch.float64) for shard in shards], dim=gather_dim)
    product = a @ b.to(torch.float64)
    return product if bias is None else product + bias.to(torch.float64)
