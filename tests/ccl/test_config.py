"""Config: what it refuses, in words; what stands for open."""

import dataclasses

import pytest
import torch.distributed as dist

from iris.ccl import Config, ReduceOp
from iris.ccl.config import VARIANTS, reduce_op
from iris.errors import ArgumentError, UnsupportedError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size_m": 48}, "block_size_m must be a power of two, got 48"),
        ({"block_size_n": 0}, "block_size_n must be a power of two, got 0"),
        ({"block_size_n": True}, "block_size_n must be a power of two, got True"),
        ({"block_size_m": 512, "block_size_n": 256}, "512 times block_size_n=256 is more than the 65536 elements"),
        ({"swizzle_size": 0}, "swizzle_size must be above 0, got 0"),
        ({"all_reduce_num_rings": -1}, "all_reduce_num_rings must be above 0, got -1"),
        ({"num_stages": 0}, "num_stages must be above 0"),
        ({"comm_sms": 0}, "comm_sms must be None or above 0, got 0"),
        ({"comm_sms": 1.5}, "comm_sms must be None or above 0, got 1.5"),
        ({"num_xcds": -8}, "num_xcds must be None or above 0"),
        ({"chunk_size": 0}, "chunk_size must be None or above 0"),
        ({"all_reduce_ring_slice_n": 48}, "divides block_size_n=64, got 48"),
        ({"all_reduce_ring_slice_n": 128}, "divides block_size_n=64, got 128"),
        ({"all_reduce_distribution": 2}, r"must be 0 \(every W-th\) or 1 \(contiguous\), got 2"),
        ({"reduce_scatter_distribution": None}, "reduce_scatter_distribution must be 0 .* got None"),
        ({"num_warps": 3}, "num_warps must be None, 1, 2, 4, 8, 16 or 32, got 3"),
        ({"threads_per_warp": 16}, "threads_per_warp must be None, 32 or 64, got 16"),
        ({"waves_per_eu": -1}, "waves_per_eu must be at least 0, got -1"),
        ({"use_gluon": True}, "no Gluon kernels"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ArgumentError, match=message):
        Config(**fields)


@pytest.mark.parametrize("operation", list(VARIANTS))
def test_variants(operation):
    field = f"{operation}_variant"
    assert Config().variant(operation) is None
    for variant in VARIANTS[operation]:
        assert Config(**{field: variant}).variant(operation) == variant
    with pytest.raises(
        ArgumentError, match=f"{field} must be None or one of {', '.join(VARIANTS[operation])}; got 'fast'"
    ):
        Config(**{field: "fast"})


def test_an_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="all_reduce_varient"):
        Config(all_reduce_varient="ring")  # pyright: ignore[reportCallIssue]


def test_configs_are_values():
    one, other = Config(comm_sms=4), Config(comm_sms=4)
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.comm_sms = 5  # pyright: ignore[reportAttributeAccessIssue]
    assert not Config().names_block
    assert Config(block_size_m=16).names_block


def test_operations_have_the_numbers_of_the_original_api():
    names = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"]
    assert [(op.name, int(op)) for op in ReduceOp] == [(name, number) for number, name in enumerate(names)]


@pytest.mark.parametrize("name", ["SUM", "PRODUCT", "MIN", "MAX", "AVG"])
def test_every_name_of_an_operation(name):
    for given in (ReduceOp[name], int(ReduceOp[name]), getattr(dist.ReduceOp, name)):
        assert reduce_op(given, floating=True) is ReduceOp[name]
    assert reduce_op(None, floating=True) is ReduceOp.SUM


def test_operations_that_are_refused():
    for given in (ReduceOp.BAND, 5, dist.ReduceOp.BXOR):
        with pytest.raises(UnsupportedError, match="not supported; possible: SUM, PRODUCT, MIN, MAX, AVG") as caught:
            reduce_op(given, floating=False)
        assert isinstance(caught.value, ValueError)
    for given in (8, -1, True, "SUM", 1.0, [0]):
        with pytest.raises(ArgumentError, match=r"op must be None or an iris\.ccl\.ReduceOp, got "):
            reduce_op(given, floating=True)
    with pytest.raises(UnsupportedError, match="AVG needs a floating-point dtype"):
        reduce_op(ReduceOp.AVG, floating=False)
