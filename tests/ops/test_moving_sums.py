"""The numbers of a matmul + all-reduce whose sums move, on targets that are not here."""

import pytest
import torch

from iris import _target
from iris.ops import FusedConfig, _moving_sums
from iris.ops.arguments import Problem
from iris.ops.choice import fitted
from iris.tuning import Plan

TARGETS = [_target.by_arch(arch) for arch in _target.compiled_archs()]


class _Context:
    def __init__(self, target):
        self.target = target

    def get_cu_count(self):
        return self.target.compute_units


def numbers(target, algorithm, M, N, world, config):
    half = torch.bfloat16
    a, b = torch.empty(M, 64, dtype=half, device="meta"), torch.empty(64, N, dtype=half, device="meta")
    problem = Problem(M, N, 64, half, half, half, world, None, None, "NN")
    plan = Plan("matmul_all_reduce", algorithm, config, "user", "", str(problem))
    return _moving_sums.schedule(_Context(target), problem, plan, a, b, "ieee")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
@pytest.mark.parametrize("world", [1, 3, 8])
def test_memory_of_a_call(target, world):
    config = FusedConfig(128, 64, num_sms=4)
    for M, N in ((1, 1), (128, 64), (129, 65), (5000, 4097)):
        tiles = -(-M // 128) * -(-N // 64)
        for algorithm in _moving_sums.ALGORITHMS:
            s = numbers(target, algorithm, M, N, world, config)
            owned = -(-tiles // world)
            assert s.nbytes == (64 if algorithm == "ring" else owned) * 128 * 64 * 4
            assert s.flags == (2 * 64 if algorithm == "ring" else owned) * 32
            assert s.grid == min(4, tiles)
            assert 128 % s.reduce_rows == 0
    for M, N in ((0, 5), (5, 0)):
        s = numbers(target, "ring", M, N, world, config)
        assert (s.grid, s.nbytes, s.flags) == (0, 0, 0)


def test_slots_are_a_power_of_two():
    """The number of a message overflows, and its slot must not jump then."""
    assert _moving_sums.RING_SLOTS & (_moving_sums.RING_SLOTS - 1) == 0


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_tiles_leave_room_for_a_sum(target):
    half = torch.bfloat16
    chosen = fitted(target, Problem(4096, 4096, 1024, half, half, half, 8, None, None, "NT"))
    assert _moving_sums.narrowed(chosen).block_size_n == min(128, chosen.block_size_n)
    small = FusedConfig(16, 32)
    assert _moving_sums.narrowed(small) is small
