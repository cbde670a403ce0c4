"""The comparison of a split matmul with float64: it must say no to what is wrong."""

import math

import pytest
import torch

from iris.demo import report
from iris.demo.split import Measured, Shares, compare, own_columns
from iris.ops import Plan

WORLD_SIZE = 2
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=str)
def problem(request):
    """Shards, B, bias and a result that is right, as PyTorch in float32 computes it. A few values are large."""
    generator = torch.Generator().manual_seed(5)
    a, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((37, 70), (50, 70), (50,)))
    a[:, 3] *= 20
    a, weight, bias = (tensor.to(request.param) for tensor in (a, weight, bias))
    out = (a.float() @ weight.float().t() + bias.float()).to(request.param)
    return [own_columns(a, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)], weight.t(), bias, out


def test_the_right_result_passes(problem):
    shards, b, bias, out = problem
    check = compare(out, shards, b, bias)
    assert check.passed
    assert 0 <= check.error <= check.largest
    assert check.severity <= 1


def test_swapped_shards_do_not_pass(problem):
    shards, b, bias, out = problem
    assert not compare(out, shards[::-1], b, bias).passed


def test_a_lost_bias_does_not_pass(problem):
    shards, b, bias, out = problem
    assert not compare(out, shards, b, torch.zeros_like(bias)).passed


def test_one_wrong_element_does_not_pass(problem):
    """Two units in the last place of a small element: less than what rounding explains of the large ones."""
    shards, b, bias, out = problem
    place = divmod(int(out.abs().argmin()), out.shape[1])
    wrong = out.clone()
    wrong[place] += {torch.float32: 1e-3}.get(out.dtype, 4 * torch.finfo(out.dtype).eps * float(out.abs().min()) + 1e-3)
    check = compare(wrong, shards, b, bias)
    assert not check.passed
    assert check.error <= check.largest


def test_a_column_not_added_does_not_pass(problem):
    shards, b, bias, out = problem
    a = torch.cat(shards, dim=1).float()
    lost = (a[:, :-1] @ b[:-1].float() + bias.float()).to(out.dtype)
    assert not compare(lost, shards, b, bias).passed


def test_nan_does_not_pass(problem):
    shards, b, bias, out = problem
    out[5, 7] = math.nan
    check = compare(out, shards, b, bias)
    assert math.isnan(check.error)
    assert not check.passed
    assert check.severity == math.inf


@pytest.mark.parametrize("world_size", [1, 2, 5, 7])
def test_columns_of_the_ranks(world_size):
    a = torch.arange(24.0).view(2, 12) + 1
    shards = [own_columns(a, rank, world_size) for rank in range(world_size)]
    assert {shard.shape for shard in shards} == {(2, -(-12 // world_size))}
    whole = torch.cat(shards, dim=1)
    assert torch.equal(whole[:, :12], a)
    assert not whole[:, 12:].any()


def measured(*checks) -> Measured:
    ranks = [Shares(rank, (37, 35), (70, 50), (37, 50), 1.0, 1.0, check) for rank, check in enumerate(checks)]
    return Measured("inner", 70, 0, Plan("all_gather_matmul", "pull", None, "user", "asked", ""), ranks)


def test_every_rank_counts(problem):
    shards, b, bias, out = problem
    right, wrong = compare(out, shards, b, bias), compare(out, shards[::-1], b, bias)
    yes = report.verdict([measured(right, right)])
    assert yes.startswith("all_gather_matmul on 2 ranks matches float64: yes (largest error ")
    no = report.verdict([measured(right, wrong), measured(right, right)])
    numbers = f"(largest error {wrong.error:.1e}, allowed {wrong.allowed:.1e})"
    assert no == f"all_gather_matmul on 2 ranks matches float64: no {numbers}"
