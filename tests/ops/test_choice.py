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
from iris.runtime.groups import Group
from iris.runtime.links import LINKS
from iris.tuning import cost_model, steps
from iris.tuning.plan import SOURCES
from made_tables import SLOW, WANTED, instead, record, tuned, unmeasured

TARGETS = [_target.by_arch(arch) for arch in _target.compiled_archs()]
REFUSAL = "PyTorch has no int8 matmul"
HALF = torch.bfloat16
H200 = _target.KNOWN["h200"]


def problem(M=64, N=4096, K=8192, a=HALF, b=None, out=HALF, world=8, gather_dim=1):
    return Problem(M, N, K, a, b or a, out, world, gather_dim, None, "NN")


def context(target):
    return SimpleNamespace(
        target=target, runtime="gpu", gpu_id=0, get_cu_count=lambda: target.compute_units, service=tuned()
    )


def plan(target=TARGETS[0], algorithm=None, config=None, refuses="", **sizes):
    return choose(context(target), problem(**sizes), algorithm, config, refuses)


@pytest.fixture(autouse=True)
def nvlink(monkeypatch):
    monkeypatch.setattr(choice, "link_of", lambda ctx: "nvlink")


@pytest.fixture(autouse=True)
def files():
    """No measured cases and no rules but a test's own: here is what follows without them."""
    with instead() as files:
        yield files


def test_bytes_that_a_rank_receives_decide():
    # 2 ranks receive M * K bytes of 16-bit elements.
    for M, gather_dim, algorithm, source in (
        (128, 1, "torch", "fallback"),
        (256, 1, "hbm_buffer", "exact"),
        (510, 0, "torch", "fallback"),
        (512, 0, "hbm_buffer", "exact"),
        (1024, 0, "hbm_buffer", "exact"),
        (4095, 0, "hbm_buffer", "exact"),
        (4095, 1, "hbm_buffer", "exact"),
        (4096, 0, "copy_engine", "exact"),
        (4096, 1, "copy_engine", "exact"),
        (16384, 0, "copy_engine", "exact"),
        (16384, 1, "copy_engine", "exact"),
    ):
        got = plan(H200, M=M, N=3584, world=2, gather_dim=gather_dim)
        assert (got.algorithm, got.source) == (algorithm, source)
        assert f"receives {M * 8192} bytes" in got.reason
        assert "two NVIDIA H200" in got.reason
        assert (got.config is None) == (algorithm == "torch")
    assert plan(H200, M=1024).algorithm == "torch"
    assert (plan(H200, M=4096).algorithm, plan(H200, M=4096).source) == ("hbm_buffer", "heuristic")


def staged(target=H200, algorithm="hbm_buffer", **sizes):
    sizes = {"M": 1024, "N": 3584, "world": 2, "gather_dim": 0, **sizes}
    return choice.staged(context(target), problem(**sizes), algorithm)


def shape(config):
    return config.block_size_m, config.block_size_n, config.block_size_k, config.num_stages, config.num_warps


WIDE, NARROW = (128, 256, 64, 4, 8), (128, 128, 64, 5, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_few_rows_of_two_ranks_have_narrow_tiles(dtype):
    """Two H200 took 4 to 15 % less time with them, at 56, 112 and 160 wide tiles for 132 programs."""
    for M, N in ((512, 3584), (1024, 3584), (1024, 5120)):
        config = staged(M=M, N=N, a=dtype)
        assert shape(config) == NARROW
        assert (config.group_size_m, config.num_fetch_sms, config.first_stage_fetch_sms) == (16, 20, 20)
        assert (config.k_per_flag, config.num_fetch_stages) == (4, 1)
        assert staged(M=M, N=N, a=dtype, algorithm=None) == config
        choice.check_fits(H200, config, problem(M=M, N=N, world=2, gather_dim=0))
        assert config.shared_memory_bytes(2, 2) == 160 << 10
        # It is what runs where nothing was measured.
        assert plan(H200, M=M, N=N, a=dtype, out=dtype, world=2, gather_dim=0).config == config


def test_the_narrow_tiles_end_at_five_quarters_of_a_round():
    # 8 rows of wide tiles: 165 tiles are the most that 132 programs have.
    assert shape(staged(N=20 * 256)) == NARROW
    assert shape(staged(N=20 * 256 + 1)) == WIDE
    # Tiles end with a shard: one row more of each rank is a row of tiles more of each.
    assert shape(staged(M=1280, N=4096)) == NARROW
    assert shape(staged(M=1282, N=4096)) == WIDE
    # A rank with half of the units has half as much for a round.
    assert shape(staged(H200.share(2), M=512, N=5120)) == NARROW
    assert shape(staged(H200.share(2))) == WIDE
    # Tiles of fewer rows than 128 are as before.
    assert staged(M=128).block_size_m == 64


def test_many_rows_more_ranks_copies_and_sharded_columns_keep_wide_tiles():
    for sizes in ({"M": 2048}, {"M": 16384}, {"N": 28672}, {"gather_dim": 1}, {"algorithm": "copy_engine"}):
        config = staged(**sizes)
        assert shape(config) == WIDE, sizes
        assert config.group_size_m == 16
    for world in range(3, 9):
        config = staged(M=512 * world, world=world)
        assert shape(config) == WIDE
        assert config.k_per_flag == 16
    # Copies keep theirs, and what is fetched in their place while a graph is captured keeps them too.
    copied = staged(algorithm="copy_engine")
    fetched = choice.fetched(context(H200), problem(M=1024, N=3584, world=2, gather_dim=0), copied)
    assert shape(fetched) == WIDE
    # So do tiles of the caller.
    mine = FusedConfig(128, 256, 64, num_stages=4)
    assert shape(choice.staged(context(H200), problem(M=1024, world=2, gather_dim=0), None, mine)) == WIDE


def test_other_links_targets_and_dtypes_keep_their_tiles(monkeypatch):
    for target in _target.KNOWN.values():
        few, sharded = staged(target), staged(target, gather_dim=1)
        if target.descriptors:
            assert shape(few) == NARROW
        else:
            assert shape(few) == shape(sharded), target
    assert shape(staged(replace(H200, arch="sm_80"))) == WIDE
    # Without room for five stages there are as many of the wide tile as fit.
    assert shape(staged(replace(H200, shared_memory_bytes=160 << 10))) == NARROW
    assert shape(staged(replace(H200, shared_memory_bytes=(160 << 10) - 1))) == (*WIDE[:3], 3, 8)
    for dtype in (torch.float32, torch.int8):
        assert shape(staged(a=dtype)) == shape(staged(a=dtype, gather_dim=1))
    for link in sorted(set(LINKS) - {"nvlink"}):
        monkeypatch.setattr(choice, "link_of", lambda ctx, link=link: link)
        assert shape(staged()) == WIDE


def test_what_other_machines_measured_is_a_guess():
    other = _target.KNOWN["h100"]
    got = plan(other, M=256, world=2)
    assert (got.algorithm, got.source) == ("hbm_buffer", "heuristic")
    assert "two NVIDIA H200" in got.reason
    assert "a guess for h100" in got.reason
    assert got.config == plan(H200, M=256, world=2).config
    assert "guess" not in plan(H200, M=256, world=2).reason


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.arch)
def test_ranks_that_share_a_card_leave_it_to_torch(monkeypatch, target):
    monkeypatch.setattr(choice, "link_of", lambda ctx: "shared")
    for M in (1, 1024, 65536):
        got = plan(target, M=M)
        assert (got.algorithm, got.source, got.config) == ("torch", "fallback", None)
        assert "shared" in got.reason


@unmeasured
def test_links_without_measurements_follow_the_cost_model(monkeypatch, target, link):
    monkeypatch.setattr(choice, "link_of", lambda ctx: link)
    wanted = WANTED[target.vendor]
    for M in (1, 1024, 65536):
        for gather_dim in (0, 1):
            sizes = {"M": M * 8, "gather_dim": gather_dim}
            config = choice.staged(context(target), problem(**sizes), None)
            expected = cost_model.predict(
                "all_gather_matmul", target.product, {"M": M * 8, "N": 4096, "K": 8192}, 8, "bfloat16",
                choice.params_of(config), gather_dim=gather_dim, link_gbps=SLOW.get(link),
            )  # fmt: skip
            got = plan(target, **sizes)
            assert link in got.reason
            assert target.product in got.reason
            assert f"{expected.speedup:.2f}x PyTorch" in got.reason
            if expected.speedup < wanted:
                assert (got.algorithm, got.source, got.config, got.speedup) == ("torch", "fallback", None, None)
                assert f"{wanted:.2f}x" in got.reason
            else:
                assert (got.algorithm, got.source, got.config) == ("hbm_buffer", "predicted", config)
                assert got.speedup == expected.speedup


@unmeasured
def test_a_prediction_must_exceed_its_error(monkeypatch, target, link):
    """From 1.1 times PyTorch on where the model was fitted to this kernel, from 1.4 times on where it was not."""
    monkeypatch.setattr(choice, "link_of", lambda ctx: link)
    real, wanted = cost_model.rank, WANTED[target.vendor]
    for speedup, algorithm, source in (
        (0.5, "torch", "fallback"),
        (wanted - 1e-6, "torch", "fallback"),
        (wanted, "hbm_buffer", "predicted"),
        (3.0, "hbm_buffer", "predicted"),
    ):

        def rank(*given, speedup=speedup, **named):
            best = real(*given, **named)[0]
            faster = replace(best.prediction, unfused=best.prediction.fused * speedup)
            return [best._replace(prediction=faster)]

        monkeypatch.setattr(cost_model, "rank", rank)
        got = plan(target, M=4096)
        assert (got.algorithm, got.source) == (algorithm, source), speedup
        assert "the cost model expects hbm_buffer" in got.reason
        assert got.speedup == (pytest.approx(speedup) if algorithm != "torch" else None)


def test_a_device_that_is_not_known_has_no_prediction(monkeypatch):
    monkeypatch.setattr(choice, "link_of", lambda ctx: "pcie")
    for product in ("", "a999"):
        strange = replace(H200, name="NVIDIA A999", product=product)
        got = plan(strange, M=65536)
        assert (got.algorithm, got.source, got.config) == ("torch", "fallback", None)
        assert "NVIDIA A999" in got.reason
        assert "cost model does not know it" in got.reason


def test_what_was_tuned_counts_for_the_group_that_asks():
    """Without a group nothing that was tuned is looked for, as in tuning itself."""
    ctx, asked, members = context(H200), problem(M=4096), Group(tuple(range(8)), 0)
    query = choice.query_of(ctx, "all_gather_matmul", asked)
    ctx.service = tuned((query, record(query, "pull", block_size_m=64)))
    got = choose(ctx, asked, None, None, "", members)
    assert (got.algorithm, got.source, got.speedup) == ("pull", "cache", 1.5)
    assert got.config == FusedConfig(block_size_m=64)
    assert choose(ctx, asked, None, None, "").source == "heuristic"
    assert choose(ctx, replace(asked, activation="relu"), None, None, "", members).source == "heuristic"


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
        algorithms = [step["algorithm"] for step in row["steps"]]
        assert set(algorithms) <= {"torch", "hbm_buffer", "copy_engine"}
        # Copies were measured with 2 ranks over NVLink.
        assert "copy_engine" not in algorithms or (row["link"], most) == ("nvlink", 2)
        assert row["source"]
        assert row.get("machine", "h200") in _target.KNOWN
        # What was measured says where, and nothing else does.
        assert ("machine" in row) != row["source"].startswith("heuristic")
    for world in (2, 3, 8, 64):
        for link in ("nvlink", "shared"):
            assert steps.lookup("all_gather_matmul", link, world, 1, "h200").algorithm == "torch"
        # Nothing was measured there, and the cost model decides.
        for link in ("pcie", "xgmi"):
            assert steps.lookup("all_gather_matmul", link, world, 1, "h200") is None


COPIES = {"M": 4096, "N": 3584, "world": 2}


@pytest.mark.parametrize("gather_dim", [0, 1])
def test_a_plan_with_copies_says_what_runs_in_a_capture(gather_dim):
    got = plan(H200, **COPIES, gather_dim=gather_dim)
    assert (got.algorithm, got.source) == ("copy_engine", "exact")
    assert got.config == choice.staged(context(H200), problem(a=HALF, **COPIES, gather_dim=gather_dim), "copy_engine")
    assert got.reason.endswith("while a graph is captured hbm_buffer runs in its place, as a graph can hold no copies")
    assert got.reason in str(got)
    assert "captured" not in plan(H200, **{**COPIES, "M": 2048}, gather_dim=gather_dim).reason
    # What the caller names has nothing in its place.
    assert plan(H200, algorithm="copy_engine", **COPIES).reason == "the caller named it; tiles fitted to the problem"


def test_more_ranks_and_other_links_have_no_copies(monkeypatch):
    for world in (3, 4, 8):
        assert plan(H200, M=65536 * world, K=8192 * world, world=world).algorithm == "hbm_buffer"
    for link in sorted(set(LINKS) - {"nvlink"}):
        monkeypatch.setattr(choice, "link_of", lambda ctx, link=link: link)
        for target in TARGETS:
            assert plan(target, **{**COPIES, "M": 65536}).algorithm in ("torch", "hbm_buffer")


def test_rows_that_lie_apart_are_fetched_by_programs():
    copies = plan(H200, **COPIES)
    got = choose(context(H200), problem(**COPIES), None, None, "", None, "rows like these")
    assert (got.algorithm, got.source, got.speedup) == ("hbm_buffer", "heuristic", None)
    assert got.config == choice.fetched(context(H200), problem(**COPIES), copies.config)
    assert "copies cannot bring rows like these, so hbm_buffer runs" in got.reason
    assert "captured" not in got.reason
    # How A lies is nothing to other plans, nor to who names copies.
    few = {**COPIES, "M": 2048}
    assert choose(context(H200), problem(**few), None, None, "", None, "rows") == plan(H200, **few)
    named = choose(context(H200), problem(**COPIES), "copy_engine", None, "", None, "rows")
    assert named.algorithm == "copy_engine"


def test_programs_fetch_with_the_tiles_of_the_copies():
    asked = problem(**COPIES)
    for copied in (
        plan(H200, **COPIES).config,
        HbmBufferConfig(64, 64, 32, num_warps=4, num_stages=3, num_sms=16, transport="copy_engine"),
    ):
        config = choice.fetched(context(H200), asked, copied)
        assert config.transport == "sm"
        for field in fields(FusedConfig):
            assert getattr(config, field.name) == getattr(copied, field.name)
        # The fields about fetchers mean nothing beside copies, and are those of the library's own choice.
        tiles = FusedConfig(**{field.name: getattr(copied, field.name) for field in fields(FusedConfig)})
        assert config == choice.staged(context(H200), asked, "hbm_buffer", tiles)


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
