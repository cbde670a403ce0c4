"""The references, against loops over single numbers."""

import itertools
import math

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


OPERATORS = {
    "SUM": sum,
    "PRODUCT": math.prod,
    "MIN": min,
    "MAX": max,
    "AVG": lambda values: sum(values) / len(values),
}


@pytest.mark.parametrize("op", list(OPERATORS))
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
def test_all_reduce(op, dtype):
    inputs = [random_tensor((3, 4), dtype, seed=4, rank=r) for r in range(3)]
    got = reference.all_reduce(inputs, op)
    for index in itertools.product(range(3), range(4)):
        want = OPERATORS[op]([tensor[index].item() for tensor in inputs])
        assert abs(got[index].item() - want) <= 1e-15 * abs(want)


def test_integers_wrap_around():
    inputs = [torch.tensor([2**62, 100]), torch.tensor([2**62, 100])]
    assert reference.all_reduce(inputs).tolist() == [-(2**63), 200]
    assert reference.all_reduce([t.to(torch.int8) for t in inputs]).to(torch.int8).tolist() == [0, -56]


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_nan_wins(op):
    one, other = torch.tensor([float("nan"), 1.0, 1.0]), torch.tensor([1.0, float("nan"), 2.0])
    got = reference.all_reduce([one, other], op)
    assert got.isnan().tolist() == [True, True, False]
    assert got[2] == (1.0 if op == "MIN" else 2.0)


def test_movements():
    """By the position of each element."""
    world, M, N = 3, 2, 6
    inputs = [torch.arange(M * N).reshape(M, N) + 100 * r for r in range(world)]
    rows, columns = reference.all_gather(inputs), reference.all_gather(inputs, dim=1)
    across, down = reference.all_to_all(inputs), reference.all_to_all([t.t() for t in inputs], dim=0)
    for r, m, n in itertools.product(range(world), range(M), range(N)):
        value = 100 * r + N * m + n
        assert rows[r * M + m, n] == columns[m, r * N + n] == value
        receiver, place = n // 2, r * 2 + n % 2
        assert across[receiver][m, place] == down[receiver][place, m] == value
    assert reference.all_gather([torch.tensor(4), torch.tensor(5)]).tolist() == [4, 5]


def test_reduce_scatter():
    inputs = [torch.arange(12).reshape(6, 2) * (r + 1) for r in range(3)]
    parts = reference.reduce_scatter(inputs)
    for r, m, n in itertools.product(range(3), range(2), range(2)):
        assert parts[r][m, n] == 6 * (2 * (2 * r + m) + n)


@pytest.mark.parametrize("rounded", [None, torch.bfloat16])
def test_matmul_all_reduce(rounded):
    a = [random_tensor((5, 3), torch.float16, seed=1, rank=r) for r in range(4)]
    b = [random_tensor((3, 2), torch.float16, seed=2, rank=r) for r in range(4)]
    bias = random_tensor((2,), torch.float32, seed=3, rank=0)
    scales = torch.tensor(2.0), torch.tensor([0.25])
    got = reference.matmul_all_reduce(a, b, bias, "relu", *scales, rounded=rounded)
    assert got.dtype == torch.float64
    below = 0
    for m, n in itertools.product(range(5), range(2)):
        total = 0.0
        for r in range(4):
            product = sum(float(a[r][m, k]) * float(b[r][k, n]) for k in range(3))
            total += float(torch.tensor(product, dtype=rounded)) if rounded else product
        below += total / 2 + float(bias[n]) < 0
        assert abs(got[m, n].item() - max(0.0, total / 2 + float(bias[n]))) < 1e-12
    assert 0 < below < 10, "relu has something to do"


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_matmul_reduce_scatter(world):
    """5 rows: 3 and 2; 2, 2 and 1; 2, 2, 1 and none; one each and two without."""
    a = [random_tensor((5, 3), torch.float16, seed=1, rank=r) for r in range(world)]
    b = [random_tensor((3, 2), torch.float16, seed=2, rank=r) for r in range(world)]
    bias = random_tensor((5, 1), torch.float32, seed=3, rank=0)
    parts = reference.matmul_reduce_scatter(a, b, bias)
    whole = reference.matmul_all_reduce(a, b, bias)
    rows = {1: [5], 2: [3, 2], 3: [2, 2, 1], 4: [2, 2, 1, 0], 7: [1, 1, 1, 1, 1, 0, 0]}[world]
    assert [part.shape[0] for part in parts] == rows
    assert torch.equal(torch.cat(parts), whole)
