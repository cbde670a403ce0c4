"""The references, against loops over single numbers."""

import pytest
import torch

from iris.testing import reference
from iris.testing.numeric import random_tensor


@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_all_gather_matmul(gather_dim, bias):
    shards = [random_tensor((2, 3), torch.float16, seed=1, rank=r) for r in range(3)]
    rows, inner = (6, 3) if gather_dim == 0 else (2, 9)
    b = random_tensor((inner, 4), torch.float16, seed=2, rank=0)
    added = random_tensor((4,), torch.float32, seed=3, rank=0) if bias else None
    got = reference.all_gather_matmul(shards, b, added, gather_dim=gather_dim)
    assert got.dtype == torch.float64
    assert got.shape == (rows, 4)
    for m in range(rows):
        for n in range(4):
            total = float(added[n]) if added is not None else 0.0
            for k in range(inner):
                shard, row, column = (m // 2, m % 2, k) if gather_dim == 0 else (k // 3, m, k % 3)
                total += float(shards[shard][row, column]) * float(b[k, n])
            assert abs(got[m, n].item() - total) < 1e-12
