"""The plan of an all-gather + matmul on targets that are not here: algorithm, tiles that fit, reasons."""

from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iris import _target
from iris.errors import ArgumentError, UnsupportedError
from iris.ops import choice
from iris.ops.arguments import FLOATS, Problem
from iris.ops.choice import ALGORITHMS, PULL_ROWS, choose, fitted, precision
from iris.ops.config import FusedConfig, HbmBufferConfig
from iris.runtime.links import LINKS
from iris.tuning import steps
from iris.tuning.plan import SOURCES

TARGETS = [_target.by_arch(arch) for arch in _target.compiled_archs()]
REFUSAL = "PyTorch has no int8 matmul"
HALF = torch.bfloat16
H200 = _target.KNOWN["h200"]


def problem(M=64, N=4096, K=8192, a=HALF, b=None, out=HALF, world=8, gather_dim=1):
    return Problem(M, N, K, a, b or a, out, world, gather_dim, None, "NN")


def context(target):
    return SimpleNamespace(target=target, get_cu_count=lambda: target.compute_units)


def plan(target=TARGETS[0], algorithm=None, config=None, refuses="", **sizes):
    return choose(context(target), problem(**sizes), algorithm, config, refuses)


@pytest.fixture(autouse=True)
def nvlink(monkeypatch):
    monkeypatch.setattr(choice, "link_of", lambda ctx: "nvlink")


def test_bytes_that_a_rank_receives_decide():
    # 2 ranks receive M * K bytes of 16-bit elements.
    for M, gather_dim, algorithm, source in (
        (128, 1, "torch", "fallback"),
        (256, 1, "hbm_buffer", "exact"),
        (512, 0, "torch", "fallback"),
        (1024, 0, "hbm_buffer", "exact"),
        (16384, 0, "hbm_buffer", "exact"),
        (16384, 1, "hbm_buffer", "exact"),
    ):
        got = plan(H200, M=M, N=3584, world=2, gather_dim=gather_dim)
        assert (got.algorithm, got.source) == (algorithm, source)
        assert f"receives {M * 8192} bytes" in got.reason
        assert "two NVIDIA H200" in got.reason
        assert (got.config is None) == (algorithm == "torch")
    assert plan(H200, M=1024).algorithm == "torch"
    assert (plan(H200, M=4096).algorithm, plan(H200, M=4096).source) == ("hbm_buffer", "heuristic")


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.arch)
@pytest.mark.parametrize("link", [link for link in LINKS if link not in ("interpreted", "nvlink")])
def test_links_without_measurements_leave_it_to_torch(monkeypatch, target, link):
    monkeypatch.setattr(choice, "link_of", lambda ctx: link)
    for M in (1, 1024, 65536):
        got = plan(target, M=M)
        assert (got.algorithm, got.source, got.config) == ("torch", "fallback", None)
        assert link in got.reason


def test_types_that_were_not_measured_are_left_to_torch():
    got = plan(H200, M=16384, a=torch.float32, out=torch.float32)
    assert got.algorithm == "torch"
    assert "16-bit types" in got.reason


def test_rows_of_the_table_are_in_order():
    for row in steps.rows("all_gather_matmul"):
        least, most = row["world"]
        assert row["link"] in LINKS
        assert 2 <= least <= most
        bounds = [step.get("up_to_bytes") for step in row["steps"]]
        assert bounds[-1] is None
        assert bounds[:-1] == sorted(set(bounds[:-1]))
        assert {step["algorithm"] for step in row["steps"]} <= {"torch", "hbm_buffer"}
        assert row["source"]
    for link in set(LINKS) - {"interpreted"}:
        for world in (2, 3, 8, 64):
            assert steps.lookup("all_gather_matmul", link, world, 1).algorithm == "torch"


def test_what_torch_cannot_do_is_done_by_a_kernel():
    few, many = plan(M=PULL_ROWS, refuses=REFUSAL), plan(M=PULL_ROWS + 1, refuses=REFUSAL)
    assert (few.algorithm, many.algorithm) == ("pull", "hbm_buffer")
    for got in (few, many):
        assert (got.source, got.reason) == ("heuristic", REFUSAL)
        assert got.config is not None


def test_one_rank_multiplies_with_torch():
    assert plan(world=1).algorithm == "torch"
    assert plan(world=1, refuses=REFUSAL).algorithm == "pull"


def test_the_interpreter_runs_the_kernel():
    """What is tested without a GPU is the kernel that runs on one."""
    for sizes in ({"M": 1}, {"M": 4096}, {"world": 1}):
        got = plan(_target.INTERPRETER, **sizes)
        assert got.algorithm == "pull"
        assert "interpreter" in got.reason


def test_the_caller_decides():
    mine = FusedConfig(64, 64, 32, num_warps=4)
    assert plan(algorithm="torch", M=1).algorithm == "torch"
    assert plan(algorithm="pull", M=4096).config == fitted(TARGETS[0], problem(M=4096))
    for algorithm in (None, "pull"):
        got = plan(algorithm=algorithm, config=mine, M=4096)
        assert (got.algorithm, got.config, got.source) == ("pull", mine, "user")
    assert plan(algorithm="torch").source == plan(algorithm="pull").source == "user"


def test_every_plan_says_for_what_and_why():
    plans = [plan(), plan(M=4096), plan(world=1), plan(algorithm="pull"), plan(algorithm="torch"), plan(refuses="why")]
    for got in plans:
        assert got.operation == "all_gather_matmul"
        assert got.algorithm in ALGORITHMS
        assert got.source in SOURCES
        assert got.reason
        assert "x4096x8192 bfloat16" in got.problem
        assert got.speedup is None, "nothing was measured"


def test_what_the_caller_cannot_have():
    with pytest.raises(
        ArgumentError, match="algorithm 'ring' is not known for all_gather_matmul; possible: torch, pull"
    ):
        plan(algorithm="ring")
    with pytest.raises(ArgumentError, match="takes no config"):
        plan(algorithm="torch", config=FusedConfig())
    with pytest.raises(UnsupportedError, match=f"{REFUSAL}; 'pull' can"):
        plan(algorithm="torch", refuses=REFUSAL)


def test_a_configuration_that_is_too_big_for_the_machine():
    big = FusedConfig(256, 256, 64, num_stages=4)
    with pytest.raises(ArgumentError) as caught:
        plan(_target.KNOWN["h200"], config=big)
    text = str(caught.value)
    for part in ("needs 262144 bytes", "sm_90 has 232448", "num_stages=4", "block_size_k=64", "256x256"):
        assert part in text
    assert plan(_target.KNOWN["h200"], config=replace(big, num_stages=3)).config.num_stages == 3
    # AMD's compiler reuses buffers, so the loader has the last word there (iris.runtime.launch).
    assert plan(_target.KNOWN["mi300x"], config=big).config == big
    # The interpreter has no such limit.
    assert plan(_target.INTERPRETER, config=big).config == big


@given(
    target=st.sampled_from(TARGETS + [_target.INTERPRETER]),
    a=st.sampled_from([*FLOATS, torch.int8, torch.float8_e4m3fn]),
    mixed=st.booleans(),
    sizes=st.tuples(st.integers(0, 1 << 16), st.integers(0, 1 << 16), st.integers(0, 1 << 16)),
    world=st.integers(1, 9),
    gather_dim=st.sampled_from([0, 1]),
    shared=st.sampled_from([None, 48 << 10]),
)
def test_fitted_tiles_are_valid_and_fit(target, a, mixed, sizes, world, gather_dim, shared):
    if shared is not None and target.compiled:
        target = replace(target, shared_memory_bytes=shared)
    b = torch.float8_e5m2 if mixed and a == torch.float8_e4m3fn else a
    M, N, K = sizes
    asked = problem(M * world if gather_dim == 0 else M, N, K * world if gather_dim == 1 else K, a, b, world=world)
    asked = replace(asked, gather_dim=gather_dim)
    config = fitted(target, asked)
    config.validate(world)
    # Two fp8 dtypes are widened to fp16 on their way.
    width = 2 if a != b else a.itemsize
    assert config.shared_memory_bytes(width, width) <= target.shared_memory_bytes
    # No more than half of a tile's rows are wasted, down to the least that a matrix instruction takes.
    assert config.block_size_m == 16 or config.block_size_m < 2 * M
    assert config.block_size_n <= 64 or config.block_size_n < 2 * N
    # Each group of warps has work.
    assert config.block_size_m * config.block_size_n >= 64 * config.num_warps or not target.compiled or N <= 16


def test_less_shared_memory_costs_stages_first():
    """A tile that is smaller reads A more often; a stage less hides a little less of one read."""
    whole = fitted(_target.KNOWN["h200"], problem(M=4096))
    less = replace(_target.KNOWN["h200"], shared_memory_bytes=whole.shared_memory_bytes(2, 2) - 1)
    assert fitted(less, problem(M=4096)) == replace(whole, num_stages=whole.num_stages - 1)


def test_rows_are_those_of_a_shard():
    """Gathered along M, no tile crosses two shards."""
    whole = fitted(TARGETS[2], problem(M=128, gather_dim=1))
    shard = fitted(TARGETS[2], problem(M=128, gather_dim=0))
    assert (whole.block_size_m, shard.block_size_m) == (128, 16)


@pytest.mark.parametrize(
    ("setting", "allowed", "wanted"),
    [
        ("highest", None, "ieee"),
        ("high", None, "tf32"),
        ("medium", None, "tf32"),
        ("highest", True, "tf32"),
        ("high", False, "ieee"),
    ],
)
def test_float32_follows_torch_unless_the_configuration_says(setting, allowed, wanted):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        config = FusedConfig(allow_tf32=allowed)
        assert precision(_target.KNOWN["h200"], torch.float32, config) == wanted
        if allowed is None:
            assert precision(_target.KNOWN["h200"], torch.float32, None) == wanted
        # Only NVIDIA's matrix units have it, and only for float32.
        assert precision(_target.KNOWN["mi300x"], torch.float32, config) == "ieee"
        assert precision(_target.INTERPRETER, torch.float32, config) == "ieee"
        assert precision(_target.KNOWN["h200"], HALF, config) == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


@given(
    target=st.sampled_from(TARGETS + [_target.INTERPRETER]),
    a=st.sampled_from([*FLOATS, torch.int8, torch.float8_e4m3fn]),
    sizes=st.tuples(st.integers(0, 1 << 16), st.integers(0, 1 << 16), st.integers(0, 1 << 16)),
    world=st.integers(1, 9),
    gather_dim=st.sampled_from([0, 1]),
    algorithm=st.sampled_from(["hbm_buffer", "copy_engine"]),
    own=st.sampled_from([None, FusedConfig(32, 64, 32, num_sms=3), FusedConfig(256, 16, 64, num_warps=4)]),
)
def test_configurations_with_a_staging_buffer_are_valid_and_fit(target, a, sizes, world, gather_dim, algorithm, own):
    M, N, K = sizes
    asked = problem(M * world if gather_dim == 0 else M, N, K * world if gather_dim == 1 else K, a, world=world)
    asked = replace(asked, gather_dim=gather_dim)
    config = choice.staged(context(target), asked, algorithm, own)
    config.validate(world)
    assert config.transport == {"hbm_buffer": "sm", "copy_engine": "copy_engine"}[algorithm]
    assert config.shared_memory_bytes(a.itemsize, a.itemsize) <= target.shared_memory_bytes or own is not None
    if own is not None:
        assert {f.name: getattr(config, f.name) for f in fields(FusedConfig)} == asdict(own)
    # Some programs are left to multiply from the beginning, except for a handful of programs.
    programs = config.num_sms or target.compute_units
    assert config.num_fetch_sms <= max(1, programs // 4)
    assert config.first_stage_fetch_sms <= max(1, programs // 4)
    # Every fetcher has two pieces where there are so many blocks, and no stage is empty.
    tiles_m, blocks = -(-M // config.block_size_m), -(-K // config.block_size_k)
    pieces = tiles_m * -(-blocks // config.k_per_flag) * (world - 1)
    assert pieces >= min(2 * config.num_fetch_sms, tiles_m * blocks * (world - 1))
    assert config.num_fetch_stages <= max(1, tiles_m)


def test_the_caller_decides_how_shards_are_brought():
    tiles = FusedConfig(64, 64, 32, num_warps=4)
    for algorithm, transport in (("hbm_buffer", "sm"), ("copy_engine", "copy_engine")):
        mine = HbmBufferConfig(64, 64, 32, num_warps=4, k_per_flag=3, transport=transport)
        for given_algorithm in (None, algorithm):
            got = plan(algorithm=given_algorithm, config=mine, M=4096)
            assert (got.algorithm, got.config, got.source) == (algorithm, mine, "user")
        # Tiles alone: the rest is chosen.
        got = plan(algorithm=algorithm, config=tiles, M=4096)
        assert got.algorithm == algorithm
        assert got.config == choice.staged(context(TARGETS[0]), problem(M=4096), algorithm, tiles)
        assert got.config.transport == transport
        assert plan(algorithm=algorithm, M=4096).config == choice.staged(
            context(TARGETS[0]), problem(M=4096), algorithm
        )
        for wrong in {"pull", "hbm_buffer", "copy_engine"} - {algorithm}:
            with pytest.raises(ArgumentError) as caught:
                plan(algorithm=wrong, config=mine)
            for part in (repr(wrong), repr(transport), repr(algorithm), "FusedConfig"):
                assert part in str(caught.value)
