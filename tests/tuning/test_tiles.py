"""Tiles that fit: the caller's own are kept, they fit the target, and they are those that the fused operations take."""

import itertools

import pytest
import torch

from iris import _target
from iris.ops.arguments import Problem
from iris.ops.choice import fitted, precision
from iris.tuning.tiles import fitted_tiles, float32_precision, power_of_two

TARGETS = [*_target.KNOWN.values(), _target.INTERPRETER]
SIZES = [(1, 1, 1), (16, 64, 32), (40, 300, 100), (100, 4096, 4096), (8192, 8192, 8192)]
each = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.product or target.arch)


@each
def test_tiles_are_those_of_fused_operations(target):
    dtypes = (torch.float32, torch.float16, torch.int8)
    for (M, N, K), dtype in itertools.product(SIZES, dtypes):
        config = fitted(target, Problem(M, N, K, dtype, dtype, torch.float32, 1, None, None, "NN"))
        tiles = fitted_tiles(target, M, N, K, dtype.itemsize)
        assert (tiles.block_m, tiles.block_n, tiles.block_k, tiles.group_m) == (
            config.block_size_m, config.block_size_n, config.block_size_k, config.group_size_m
        )  # fmt: skip
        assert (tiles.num_warps, tiles.num_stages) == (config.num_warps, config.num_stages)
        assert tiles.shared_memory_bytes(dtype.itemsize) <= target.shared_memory_bytes
        assert float32_precision(target, dtype) == precision(target, dtype, None)


@each
def test_what_the_caller_gives_is_kept(target):
    tiles = fitted_tiles(target, 4096, 4096, 4096, 2, block=(256, 256, 64), num_warps=4)
    assert (tiles.block_m, tiles.block_n, tiles.block_k, tiles.num_warps) == (256, 256, 64, 4)
    # What is open follows: fewer stages where such tiles take more shared memory.
    assert tiles.num_stages <= 4
    assert fitted_tiles(target, 4096, 4096, 4096, 2, num_stages=3).num_stages == 3


def test_precision_of_float32():
    nvidia, amd = _target.KNOWN["h200"], _target.KNOWN["mi300x"]
    assert float32_precision(nvidia, torch.float32, True) == "tf32"
    assert float32_precision(nvidia, torch.float32, False) == "ieee"
    assert float32_precision(nvidia, torch.float16, True) == "ieee"
    assert float32_precision(amd, torch.float32, True) == "ieee"


def test_powers_of_two():
    assert [power_of_two(size, 16, 128) for size in (0, 1, 16, 17, 64, 65, 1000)] == [16, 16, 16, 32, 64, 128, 128]
