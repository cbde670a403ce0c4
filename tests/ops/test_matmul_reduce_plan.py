"""Plans of matmul + reduce-scatter and + all-reduce on targets that are not here, and the numbers of a call."""

import pytest
import torch

from iris import _target
from iris.errors import ArgumentError, UnsupportedError
from iris.ops import FusedConfig
from iris.ops._matmul_reduce_call import Asked, checked
from iris.ops.choice import fitted
from iris.runtime.groups import Group
from reduced_products import KERNELS, REDUCE, SCATTER

TARGETS = [_target.by_arch(arch) for arch in _target.compiled_archs()]
HALF = torch.bfloat16
target_parameter = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)


class _Context:
    """As much of a context as a plan takes."""

    def __init__(self, target, world, on_heap):
        self.target, self.num_ranks, self.cur_rank, self._on_heap = target, world, 0, on_heap

    def get_device(self):
        return torch.device("meta")

    def get_cu_count(self):
        return self.target.compute_units

    def is_symmetric(self, tensor):
        return self._on_heap


def call(
    operation, target=TARGETS[0], *, M=4096, N=4096, K=1024, dtype=HALF, out_dtype=None, world=8, index=0, on_heap=True,
    algorithm=None, config=None, ranks=None, group=None,
):  # fmt: skip
    out_dtype = out_dtype or (torch.int32 if dtype == torch.int8 else dtype)
    a, b = torch.empty(M, K, dtype=dtype, device="meta"), torch.empty(K, N, dtype=dtype, device="meta")
    chunk = -(-M // world)
    rows = max(0, min(M, (index + 1) * chunk) - index * chunk) if operation == SCATTER else M
    out = torch.empty(rows, N, dtype=out_dtype, device="meta")
    members = Group(ranks or tuple(range(world)), index)
    asked = Asked(operation, algorithm, config, "none", (None, None), group)
    return checked(_Context(target, world, on_heap), members, asked, out, a, b, None)


@target_parameter
@pytest.mark.parametrize("operation", [SCATTER, REDUCE])
def test_kernels_that_were_not_measured_run_when_asked_for(target, operation):
    plan = call(operation, target).plan
    assert (plan.algorithm, plan.source, plan.config) == ("torch", "fallback", None)
    assert "not been measured" in plan.reason
    one = call(operation, target, world=1).plan
    assert (one.algorithm, one.source) == ("torch", "fallback")
    assert "one rank" in one.reason
    for kernel in KERNELS[operation]:
        plan = call(operation, target, algorithm=kernel).plan
        assert (plan.algorithm, plan.source) == (kernel, "user")


@target_parameter
def test_what_torch_cannot_do(target):
    for given in ({"dtype": torch.int8}, {"ranks": (1, 0), "world": 2, "group": [1, 0]}):
        why = "int8" if "dtype" in given else "sequence of ranks"
        assert call(SCATTER, target, **given).plan.algorithm == "fused"
        for on_heap, kernel in ((True, "two_shot"), (False, "one_shot")):
            plan = call(REDUCE, target, on_heap=on_heap, **given).plan
            assert (plan.algorithm, plan.source) == (kernel, "heuristic")
            assert why in plan.reason
        with pytest.raises(UnsupportedError, match=why):
            call(REDUCE, target, algorithm="torch", **given)


def test_tiles_of_a_reduce_scatter_fit_the_rows_of_a_rank():
    few = call(SCATTER, M=128, algorithm="fused")
    assert few.plan.config.block_size_m == 16
    assert call(REDUCE, M=128, algorithm="two_shot").plan.config.block_size_m == 128
    whole = call(SCATTER, M=8 * 4096, algorithm="fused")
    assert whole.plan.config == fitted(TARGETS[0], whole.problem)


def test_a_configuration_that_does_not_fit_is_refused():
    for target in TARGETS:
        config = FusedConfig(256, 256, 128, num_stages=4)
        if target.vendor == "nvidia":
            with pytest.raises(ArgumentError, match=f"bytes of shared memory, {target.arch} has"):
                call(REDUCE, target, config=config)
        else:
            assert call(REDUCE, target, config=config).plan.config == config


@target_parameter
@pytest.mark.parametrize("world", [1, 2, 3, 8, 72])
@pytest.mark.parametrize("out_dtype", [torch.float32, HALF], ids=str)
def test_numbers_of_a_call(target, world, out_dtype):
    for operation in (SCATTER, REDUCE):
        for M, N in ((1, 1), (100, 300), (4096, 4096), (5000, 4097)):
            made = call(operation, target, M=M, N=N, world=world, out_dtype=out_dtype, algorithm=KERNELS[operation][0])
            s, config = made.schedule, made.plan.config
            m, n = config.block_size_m, config.block_size_n
            # Room for every tile of every owner, and no more.
            chunk = -(-M // world) if operation == SCATTER else M
            slots = -(-chunk // m) * -(-N // n) * (world if operation == SCATTER else 1)
            assert s.nbytes == slots * m * n * out_dtype.itemsize
            assert s.flags == slots * world
            assert s.grid == min(slots, target.compute_units)
            assert 1 <= s.reducers <= max(1, s.grid // 8)
            # Pieces divide a tile, and come to five eighths of the registers, unless they would be too narrow.
            assert m % s.reduce_rows == 0
            nbytes = s.reduce_rows * n * (world * out_dtype.itemsize + 4)
            limit = (20 << 10) * config.num_warps
            assert nbytes <= limit or s.reduce_rows == 8
            assert 2 * nbytes > limit or s.reduce_rows in (8, m)


@pytest.mark.parametrize("M", [1, 3, 8, 9, 100])
def test_rows_are_those_of_torch_chunk(M):
    for world in (1, 2, 3, 4, 8):
        got = [call(SCATTER, M=M, world=world, index=index) for index in range(world)]
        want = [part.tolist() for part in torch.arange(M).chunk(world)]
        want += [[]] * (world - len(want))
        assert [list(range(c.first, c.first + c.rows)) for c in got] == want
        assert {c.chunk for c in got} == {-(-M // world)}
