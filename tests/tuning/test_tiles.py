"""Tiles that fit: the target's shared memory is respected, and what the caller gives is kept."""

import itertools

import pytest
import torch

from iris import _target
from iris.tuning.tiles import Tiles, fitted_tiles, float32_precision, power_of_two

TARGETS = [*_target.KNOWN.values(), _target.INTERPRETER]
SIZES = [(1, 1, 1), (16, 64, 32), (40, 300, 100), (100, 4096, 4096), (8192, 8192, 8192)]
each = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.product or target.arch)


@pytest.mark.parametrize(
    ("product", "sizes", "itemsize", "wanted"),
    [
        ("h200", (8192, 8192, 8192), 2, (128, 256, 64, 8, 8, 4)),
        ("h200", (8192, 8192, 8192), 4, (128, 128, 32, 8, 8, 4)),
        ("h200", (64, 4096, 4096), 1, (64, 128, 128, 8, 4, 4)),
        ("mi300x", (8192, 8192, 8192), 2, (128, 128, 64, 8, 8, 2)),  # what its shared memory holds
        ("mi355x", (8192, 8192, 8192), 2, (128, 256, 64, 8, 8, 2)),
        ("mi300x", (1, 4096, 4096), 2, (16, 64, 64, 8, 4, 2)),
    ],
)
def test_tiles_of_known_devices(product, sizes, itemsize, wanted):
    assert fitted_tiles(_target.KNOWN[product], *sizes, itemsize) == Tiles(*wanted)


@each
def test_tiles_fit(target):
    for sizes, dtype in itertools.product(SIZES, (torch.float32, torch.float16, torch.int8)):
        tiles = fitted_tiles(target, *sizes, dtype.itemsize)
        assert tiles.shared_memory_bytes(dtype.itemsize) <= target.shared_memory_bytes
        for block in (tiles.block_m, tiles.block_n, tiles.block_k):
            assert block >= 16
            assert block & (block - 1) == 0


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
