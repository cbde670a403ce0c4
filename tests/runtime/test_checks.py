"""Checks of tensors that every operation makes."""

from types import SimpleNamespace

import pytest
import torch

from iris.errors import NotSymmetricError
from iris.runtime import checks


@pytest.fixture
def ctx():
    """Of the context, what the checks ask: whether peers reach a tensor (those of ``symmetric``)."""
    symmetric = []
    return SimpleNamespace(is_symmetric=lambda tensor: any(tensor is known for known in symmetric), symmetric=symmetric)


def test_the_heap(ctx):
    inside, outside = torch.empty(3, 4), torch.empty(3, 4)
    ctx.symmetric.append(inside)
    checks.check_symmetric(ctx, "A_sharded", inside)
    with pytest.raises(NotSymmetricError, match=r"A_sharded is read by the other ranks.*ctx\.as_symmetric"):
        checks.check_symmetric(ctx, "A_sharded", outside)
    # Nobody reads a tensor without elements.
    checks.check_symmetric(ctx, "A_sharded", torch.empty(0, 4))


def test_the_span_is_that_of_the_elements():
    whole = torch.empty(10, 20, dtype=torch.float16)
    for view in (whole, whole.t(), whole[2:5, 3:7], whole[::3, ::2], whole[:1], whole[9:, 19:], whole[:, :1]):
        addresses = [view[i, j].data_ptr() for i in range(view.shape[0]) for j in range(view.shape[1])]
        assert checks.span_bytes(view) == max(addresses) - min(addresses) + 2
    assert checks.span_bytes(whole[:0]) == 0
    assert checks.span_bytes(torch.empty(1).expand(5)) == 4


def test_overlap_is_that_of_the_memory_between_the_ends():
    whole = torch.empty(10, 20)
    assert checks.overlap(whole[:5], whole[4:])
    assert checks.overlap(whole[:, 3], whole[5])
    assert not checks.overlap(whole[:5], whole[5:])
    assert not checks.overlap(whole[:5], whole[3:3])
    assert not checks.overlap(whole, torch.empty(10, 20))
