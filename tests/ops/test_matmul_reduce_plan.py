"""Plans of matmul + reduce-scatter and + all-reduce on targets that are not here, and the numbers of a call."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iris import _target
from iris.errors import ArgumentError, UnsupportedError
from iris.ops import FusedConfig, _matmul_reduce_call, choice, division
from iris.ops._matmul_reduce_call import Asked, checked
from iris.ops.choice import fitted
from iris.runtime.groups import Group
from iris.runtime.links import LINKS
from iris.tuning import cost_model, steps
from made_tables import SLOW, WANTED, instead, tuned, unmeasured
from reduced_products import KERNELS, REDUCE, SCATTER

TARGETS = [_target.by_arch(arch) for arch in _target.compiled_archs()]
H200 = _target.KNOWN["h200"]
HALF = torch.bfloat16
target_parameter = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)


@pytest.fixture(autouse=True)
def nvlink(monkeypatch):
    linked(monkeypatch, "nvlink")


def linked(monkeypatch, link):
    for module in (_matmul_reduce_call, choice):
        monkeypatch.setattr(module, "link_of", lambda ctx: link)


@pytest.fixture(autouse=True)
def files():
    """No measured cases and no rules: here is what follows without them."""
    with instead() as files:
        yield files


class _Context:
    """As much of a context as a plan takes."""

    runtime, gpu_id, service = "gpu", 0, staticmethod(tuned())

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


# The first and the last size of each step that the table has for two ranks.
MEASURED = [
    (operation, nbytes, step["algorithm"])
    for operation in (SCATTER, REDUCE)
    for row in steps.rows(operation)
    if row["link"] == "nvlink" and row["world"] == [2, 2]
    for step, begin in zip(
        row["steps"], [1, *(s.get("up_to_bytes", 0) + 1 for s in row["steps"])], strict=False
    )
    for nbytes in (begin, step.get("up_to_bytes", 1 << 30))
]  # fmt: skip


@pytest.mark.parametrize(("operation", "nbytes", "algorithm"), MEASURED)
def test_bytes_of_the_sum_decide(operation, nbytes, algorithm):
    """2 bytes an element; the rows are few or many, the table does not care."""
    M, N = (2, -(-nbytes // 4)) if nbytes % 4 in (0, 1) else (1, nbytes // 2)
    got = call(operation, H200, M=M, N=N, world=2).plan
    assert (got.algorithm, got.source) == (algorithm, "fallback" if algorithm == "torch" else "exact")
    assert f"the sum has {2 * M * N} bytes" in got.reason
    assert "two NVIDIA H200" in got.reason
    assert (got.config is None) == (algorithm == "torch")
    if operation == REDUCE and got.config is not None:
        assert got.config.all_reduce_variant == algorithm


def test_steps_of_the_tables():
    """What was measured on two ranks: kernels whenever there is enough to hide, and one_shot for small sums."""
    taken = {
        operation: [algorithm for o, _, algorithm in MEASURED if o == operation] for operation in (SCATTER, REDUCE)
    }
    assert taken[SCATTER][-1] == "fused"
    assert (taken[REDUCE][0], taken[REDUCE][-1]) == ("one_shot", "two_shot")
    for operation in (SCATTER, REDUCE):
        for row in steps.rows(operation):
            assert row["link"] in LINKS
            assert 2 <= row["world"][0] <= row["world"][1]
            bounds = [step.get("up_to_bytes") for step in row["steps"]]
            assert bounds[-1] is None
            assert bounds[:-1] == sorted(set(bounds[:-1]))
            assert {step["algorithm"] for step in row["steps"]} <= {"torch", *KERNELS[operation]}
            assert row["source"]
            assert row.get("machine", "h200") in _target.KNOWN
            # What was measured says where, and nothing else does.
            assert ("machine" in row) != row["source"].startswith("heuristic")
        for world in (2, 3, 8, 64):
            for link in ("nvlink", "shared"):
                assert steps.lookup(operation, link, world, 1, "h200").algorithm in ("torch", *KERNELS[operation])
            # Nothing was measured there, and the cost model decides.
            for link in ("pcie", "xgmi"):
                assert steps.lookup(operation, link, world, 1, "h200") is None


def test_more_ranks_than_were_measured():
    got = call(REDUCE, H200, M=8192, N=4096, world=8).plan
    assert (got.algorithm, got.source) == ("two_shot", "heuristic")
    assert "8 ranks" in got.reason


@target_parameter
@pytest.mark.parametrize("operation", [SCATTER, REDUCE])
def test_ranks_that_share_a_card_take_the_kernel(monkeypatch, target, operation):
    """PyTorch's group is gloo there, which goes through the host."""
    linked(monkeypatch, "shared")
    for M in (1, 1024, 65536):
        plan = call(operation, target, M=M).plan
        source = "exact" if target.product == "h200" else "heuristic"
        assert (plan.algorithm, plan.source) == ("fused" if operation == SCATTER else "two_shot", source)
        assert ("a guess for" in plan.reason) == (target.product != "h200")


@unmeasured
@pytest.mark.parametrize("operation", [SCATTER, REDUCE])
def test_links_without_measurements_follow_the_cost_model(monkeypatch, target, link, operation):
    linked(monkeypatch, link)
    for M in (8, 1024, 65536):
        for on_heap in (True, False) if operation == REDUCE else (True,):
            ways = ["fused"] if operation == SCATTER else ["two_shot", "one_shot"] if on_heap else ["one_shot"]
            configs = {way: call(operation, target, M=M, algorithm=way).plan.config for way in ways}
            # The K of the whole product is that of 8 ranks.
            expected = {
                way: cost_model.predict(
                    operation, target.product, {"M": M, "N": 4096, "K": 8 * 1024}, 8, "bfloat16",
                    choice.params_of(config), algorithm=way, link_gbps=SLOW.get(link),
                )
                for way, config in configs.items()
            }  # fmt: skip
            best = min(ways, key=lambda way: expected[way].fused)
            plan = call(operation, target, M=M, on_heap=on_heap).plan
            assert link in plan.reason
            assert f"expects {best}" in plan.reason
            assert f"{expected[best].speedup:.2f}x PyTorch" in plan.reason
            if expected[best].speedup < WANTED[target.vendor]:
                assert (plan.algorithm, plan.source, plan.config) == ("torch", "fallback", None)
                assert f"{WANTED[target.vendor]:.2f}x" in plan.reason
            else:
                assert (plan.algorithm, plan.source, plan.config) == (best, "predicted", configs[best])
                assert plan.speedup == expected[best].speedup


@unmeasured
@pytest.mark.parametrize("operation", [SCATTER, REDUCE])
def test_a_prediction_must_exceed_its_error(monkeypatch, target, link, operation):
    linked(monkeypatch, link)
    real, wanted = cost_model.rank, WANTED[target.vendor]
    for speedup, source in ((wanted - 1e-6, "fallback"), (wanted, "predicted")):

        def rank(*given, speedup=speedup, **named):
            best = real(*given, **named)[0]
            return [best._replace(prediction=replace(best.prediction, unfused=best.prediction.fused * speedup))]

        monkeypatch.setattr(cost_model, "rank", rank)
        plan = call(operation, target).plan
        assert plan.source == source
        assert (plan.algorithm == "torch") == (plan.config is None) == (source == "fallback")


@target_parameter
@pytest.mark.parametrize("operation", [SCATTER, REDUCE])
def test_the_caller_decides(target, operation):
    for kernel in KERNELS[operation]:
        plan = call(operation, target, algorithm=kernel).plan
        assert (plan.algorithm, plan.source) == (kernel, "user")


@target_parameter
@pytest.mark.parametrize("operation", [SCATTER, REDUCE])
def test_one_rank_multiplies_with_torch(target, operation):
    plan = call(operation, target, world=1).plan
    assert (plan.algorithm, plan.source) == ("torch", "fallback")
    assert "one rank" in plan.reason


@pytest.mark.parametrize("operation", [SCATTER, REDUCE])
def test_types_that_were_not_measured_are_left_to_torch(operation):
    for dtype, reason in ((torch.float32, "16-bit types"), (torch.float64, "in 32 bits")):
        plan = call(operation, H200, M=16384, dtype=dtype, world=2).plan
        assert (plan.algorithm, plan.source, plan.config) == ("torch", "fallback", None)
        assert reason in plan.reason


def test_an_output_that_peers_cannot_write():
    """The table has two_shot for large sums, and it is one_shot then."""
    for on_heap, algorithm, source in ((True, "two_shot", "exact"), (False, "one_shot", "heuristic")):
        plan = call(REDUCE, H200, M=8192, N=8192, world=2, on_heap=on_heap).plan
        assert (plan.algorithm, plan.source) == (algorithm, source)
    assert "not on the symmetric heap" in plan.reason
    # For others it does not matter.
    small = [call(REDUCE, H200, M=16, N=8192, world=2, on_heap=on_heap).plan for on_heap in (True, False)]
    assert small[0] == small[1]
    assert small[0].algorithm == "one_shot"


@target_parameter
def test_what_torch_cannot_do(target):
    for asked in ({"dtype": torch.int8}, {"ranks": (1, 0), "world": 2, "group": [1, 0]}):
        why = "int8" if "dtype" in asked else "sequence of ranks"
        assert call(SCATTER, target, **asked).plan.algorithm == "fused"
        for on_heap, kernel in ((True, "two_shot"), (False, "one_shot")):
            plan = call(REDUCE, target, on_heap=on_heap, **asked).plan
            assert (plan.algorithm, plan.source) == (kernel, "heuristic")
            assert why in plan.reason
        with pytest.raises(UnsupportedError, match=why):
            call(REDUCE, target, algorithm="torch", **asked)


def tiles_of(target=H200, operation=REDUCE, world=2, **sizes):
    algorithm = "fused" if operation == SCATTER else "two_shot"
    made = call(operation, target, world=world, algorithm=algorithm, **sizes)
    return made.plan.config, made.problem


def fits(target, problem, operation):
    config = fitted(target, problem)
    return config if operation == SCATTER else replace(config, all_reduce_variant="two_shot")


def test_tiles_of_a_reduce_scatter_fit_the_rows_of_a_rank():
    few = call(SCATTER, M=128, algorithm="fused")
    assert few.plan.config.block_size_m == 16
    assert call(REDUCE, M=128, algorithm="two_shot").plan.config.block_size_m == 128
    whole = call(SCATTER, M=8 * 4096, algorithm="fused")
    assert whole.plan.config == fitted(TARGETS[0], whole.problem)


def test_tiles_are_the_smallest_of_one_round():
    """132 programs; tiles of 128x256 unless smaller ones come out in one round."""
    for M, N, rows, columns in (
        (512, 2048, 64, 128),  # 128 of them
        (256, 2048, 64, 64),  # 128 of them
        (1024, 2048, 128, 128),  # 128 of them
        (1024, 2176, 128, 256),  # 136 of 128x128
        (16384, 4096, 128, 256),
    ):
        # A reduce-scatter has as many tiles when each rank has half of the rows.
        for operation in (REDUCE, SCATTER):
            config, problem = tiles_of(M=M, N=N, operation=operation)
            assert (config.block_size_m, config.block_size_n) == (rows, columns), (M, N)
            if (rows, columns) == (128, 256):
                assert config == fits(H200, problem, operation)


def test_tiles_of_few_rows_are_deep():
    for M in (1, 16, 32):
        config, problem = tiles_of(M=M)
        assert (config.block_size_k, config.num_stages) == (256, 4)
        assert config.block_size_m == max(16, M)
        assert config.block_size_n == fitted(H200, problem).block_size_n
    assert tiles_of(M=33)[0].block_size_k < 256


def test_other_tiles_are_those_that_fit():
    for target in TARGETS:
        for asked in ({"dtype": torch.float32, "M": 16}, {"dtype": torch.int8, "M": 256, "N": 2048}):
            config, problem = tiles_of(target, **asked)
            assert config == fits(target, problem, REDUCE)
        if target.vendor == "amd":
            config, problem = tiles_of(target, M=16)
            assert config == fits(target, problem, REDUCE)


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
def test_numbers_of_a_call(target, world):
    for algorithm in ("fused", "two_shot", "one_shot"):
        operation = SCATTER if algorithm == "fused" else REDUCE
        for (M, N), K, out_dtype in zip(
            ((1, 1), (100, 300), (4096, 4096), (5000, 4097)), (8192, 0, 64, 4096),
            (HALF, torch.float32, HALF, torch.float32), strict=True,
        ):  # fmt: skip
            made = call(operation, target, M=M, N=N, K=K, world=world, out_dtype=out_dtype, algorithm=algorithm)
            s, config = made.schedule, made.plan.config
            m, n = config.block_size_m, config.block_size_n
            tiles = -(-made.chunk // m) * -(-N // n)
            owned = -(-tiles // world) if algorithm == "two_shot" else tiles
            positions = {"fused": tiles * world, "two_shot": owned * world, "one_shot": tiles}[algorithm]
            # Room for a product of each peer for every tile that the rank adds up, and no more.
            assert s.flags == max(1, world - 1) * owned
            assert s.nbytes == s.flags * m * n * out_dtype.itemsize * (2 if algorithm == "one_shot" else 1)
            assert 0 <= s.ahead <= owned
            assert 0 <= s.whole <= positions
            pieces = (positions - s.whole) * (s.splits - 1)
            assert (s.sums, s.summed) == (max(1, pieces * m * n), max(1, pieces))
            assert s.grid == min(target.compute_units, positions + pieces)
            assert s.senders == (24 if algorithm != "one_shot" and positions > target.compute_units else
                                 target.compute_units)  # fmt: skip
            if K < 1024:
                assert s.splits == 1


def test_tiles_of_others_that_come_first():
    """Half a round of them, to have something to add early; all in a long reduce-scatter, which sends no sums."""
    for algorithm, M, ahead in (("two_shot", 1 << 15, 66), ("fused", 1 << 12, 66), ("fused", 1 << 15, 128 * 16)):
        operation = SCATTER if algorithm == "fused" else REDUCE
        made = call(operation, H200, M=M, N=4096, world=2, algorithm=algorithm)
        assert made.schedule.ahead == ahead
    assert call(REDUCE, H200, M=1 << 15, N=4096, world=8, algorithm="two_shot").schedule.ahead == 10


blocks_of_k = st.integers(0, 300)


def time_of(tiles, programs, exchange, whole, splits):
    """When the last of ``programs`` ends that take pieces in order, from loops."""
    free = [0.0] * programs
    for tile in range(tiles):
        pieces = splits if tile >= whole else 1
        for piece in range(pieces):
            first = free.index(min(free))
            free[first] += 1 / pieces + (exchange * (1 if piece < pieces - 1 else pieces - 1) if pieces > 1 else 0)
    return max(free)


@settings(deadline=None, max_examples=200)
@given(
    tiles=st.integers(1, 120), programs=st.integers(1, 40), blocks=blocks_of_k,
    exchange=st.floats(0, 1, allow_subnormal=False),
)  # fmt: skip
def test_tiles_are_divided_where_that_pays(tiles, programs, blocks, exchange):
    whole, splits = division.divided(tiles, programs, blocks, exchange)
    assert 0 <= whole <= tiles
    assert 1 <= splits <= 8
    # Pieces that are too short for what it costs, or none at all, are not made.
    assert splits == 1 or blocks // splits >= 8
    assert (splits == 1) == (whole == tiles)
    # The rest of the last round is divided, and nothing else.
    assert whole in (tiles, tiles // programs * programs)
    assert time_of(tiles, programs, exchange, whole, splits) <= time_of(tiles, programs, exchange, tiles, 1) + 1e-9


def test_a_division():
    # 66 tiles of 132 programs leave half of them idle; two pieces take half as long and an exchange.
    assert division.divided(66, 132, 64, 0.06) == (0, 2)
    assert division.divided(132 + 66, 132, 64, 0.06) == (132, 2)
    assert division.divided(132 * 3, 132, 64, 0.06) == (132 * 3, 1)
    assert division.divided(131, 132, 64, 0.06) == (131, 1)
    assert division.divided(66, 132, 15, 0.06) == (66, 1), "15 blocks are no two pieces of 8"
    assert division.divided(66, 132, 64, 0.6) == (66, 1), "the exchange takes more than is gained"


@pytest.mark.parametrize("M", [1, 3, 8, 9, 100])
def test_rows_are_those_of_torch_chunk(M):
    for world in (1, 2, 3, 4, 8):
        got = [call(SCATTER, M=M, world=world, index=index) for index in range(world)]
        want = [part.tolist() for part in torch.arange(M).chunk(world)]
        want += [[]] * (world - len(want))
        assert [list(range(c.first, c.first + c.rows)) for c in got] == want
        assert {c.chunk for c in got} == {-(-M // world)}
