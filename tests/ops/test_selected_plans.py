"""Plans of fused operations that follow from what was measured, tuned or derived, on targets that are not here."""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import iris
from iris import _target
from iris.errors import ArgumentError, UnsupportedError
from iris.ops import choice
from iris.ops._matmul_all_gather import OPERATION as GATHER
from iris.ops._matmul_all_gather import checked as checked_gather
from iris.ops._matmul_reduce_call import Asked
from iris.ops._matmul_reduce_call import checked as checked_reduce
from iris.ops.arguments import Problem
from iris.ops.choice import choose, query_of
from iris.ops.config import FusedConfig, HbmBufferConfig
from iris.runtime.groups import Group
from iris.tuning import store, tables
from iris.tuning.autotune import params_of
from iris.tuning.plan import SOURCES
from iris.tuning.query import config_key
from made_tables import case, forget, instead, record, tuned
from reduced_products import REDUCE, SCATTER

AG = "all_gather_matmul"
HALF = torch.float16
MI300X, MI325X, H200 = (_target.KNOWN[name] for name in ("mi300x", "mi325x", "h200"))
EIGHT = Group(tuple(range(8)), 0)
G2 = Problem(131072, 16384, 16384, HALF, HALF, HALF, 8, 1, None, "NN")


class Context:
    """As much of a context as a plan takes; ``known``: what was tuned there."""

    runtime, gpu_id, cur_rank = "gpu", 0, 0

    def __init__(self, target, known=(), runtime="gpu", on_heap=True, world=8):
        self.target, self.runtime, self.num_ranks, self._on_heap = target, runtime, world, on_heap
        self.service = tuned(*known)

    def get_cu_count(self):
        return self.target.compute_units

    def get_device(self):
        return torch.device("meta")

    def is_symmetric(self, tensor):
        return self._on_heap


@pytest.fixture(autouse=True)
def nvlink(monkeypatch):
    """Whatever this machine has."""
    monkeypatch.setattr("iris.runtime.links._nvlinks", lambda device: True)


@pytest.fixture
def files():
    """Nothing is shipped but a test's own."""
    with instead() as files:
        yield files


def planned(target, problem, refusal="", known=()):
    members = Group(tuple(range(problem.world_size)), 0)
    return choose(Context(target, known, world=problem.world_size), problem, None, None, refusal, members)


# What the package ships for MI300X.


@pytest.fixture
def shipped():
    forget()
    yield
    forget()


@pytest.mark.parametrize(
    "changed",
    [{}, {"a_dtype": torch.bfloat16, "b_dtype": torch.bfloat16}, {"bias": (16384,)}, {"bias": (131072,)},
     {"activation": "gelu"}, {"scaled": True}, {"out_dtype": torch.float32}, {"aligned": False}],
    ids=lambda changed: next(iter(changed), "plain"),
)  # fmt: skip
def test_a_published_case_is_the_plan(shipped, changed):
    plan = planned(MI300X, replace(G2, **changed))
    assert (plan.algorithm, plan.source, plan.speedup) == ("hbm_buffer", "exact", 1.343)
    (published,) = (
        one.entry for one in tables.cases(AG, "mi300x") if one.world == 8 and one.entry.sizes == query_of(
            Context(MI300X), AG, G2
        ).sizes
    )  # fmt: skip
    assert plan.config == HbmBufferConfig(**published.params)
    assert (plan.config.block_size_m, plan.config.block_size_n, plan.config.num_warps) == (256, 256, 8)
    assert plan.problem == str(replace(G2, **changed))


def test_a_relative_takes_nothing_of_it(shipped):
    plan = planned(MI325X, G2)
    assert MI325X.arch == MI300X.arch
    assert plan.source in ("predicted", "fallback")
    assert plan.speedup != 1.343
    assert "no table for mi325x" in plan.reason
    assert "cost model" in plan.reason


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_whose_set_is_off_run_torch(shipped, world):
    for problem in (replace(G2, world_size=world), replace(G2, world_size=world, M=1000)):
        plan = planned(MI300X, problem)
        assert (plan.algorithm, plan.source, plan.config, plan.speedup) == ("torch", "fallback", None, None)
        assert f"faster with {world} ranks" in plan.reason


def test_a_case_of_two_byte_types_is_not_for_others(shipped):
    wide = replace(G2, a_dtype=torch.float32, b_dtype=torch.float32, out_dtype=torch.float32)
    plan = planned(MI300X, wide)
    assert (plan.algorithm, plan.source) == ("torch", "fallback")
    assert "16-bit types" in plan.reason
    eight_bits = replace(G2, a_dtype=torch.float8_e4m3fnuz, b_dtype=torch.float8_e4m3fnuz)
    for problem in (wide, eight_bits):
        plan = planned(MI300X, problem, "PyTorch cannot")
        assert (plan.source, plan.reason) == ("heuristic", "PyTorch cannot")
    assert planned(MI300X, replace(G2, a_dtype=torch.float64)).reason.startswith("the library's kernels add in 32 bits")


def test_a_case_that_lost_is_left_to_torch_with_its_figure(shipped):
    plan = planned(MI300X, replace(G2, M=196608, N=18432))
    assert (plan.algorithm, plan.source) == ("torch", "fallback")
    assert "0.854x PyTorch" in plan.reason


@settings(deadline=None, max_examples=150)
@example(MI325X, "own", HALF, (0, 0, 0), 2, 0, "NN", "")
@given(
    target=st.sampled_from([*_target.KNOWN.values(), replace(H200, name="NVIDIA A999", product="")]),
    link=st.sampled_from(["own", "shared", "pcie"]),
    dtype=st.sampled_from([HALF, torch.bfloat16, torch.float32, torch.int8]),
    sizes=st.tuples(*[st.integers(0, 1 << 17) | st.sampled_from([4096, 8192, 16384])] * 3),
    world=st.integers(1, 9),
    gather_dim=st.sampled_from([0, 1]),
    transpose=st.sampled_from(["NN", "NT", "TN", "TT"]),
    refusal=st.sampled_from(["", "PyTorch cannot"]),
)
def test_every_problem_has_a_plan_that_fits(target, link, dtype, sizes, world, gather_dim, transpose, refusal):
    M, N, K = sizes
    problem = Problem(
        M * world if gather_dim == 0 else M, N, K * world if gather_dim == 1 else K, dtype, dtype,
        torch.int32 if dtype == torch.int8 else dtype, world, gather_dim, None, transpose,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if link == "pcie":
            patch.setattr("iris.runtime.links._nvlinks", lambda device: False)
        ctx = Context(target, runtime="loopback" if link == "shared" else "gpu", world=world)
        plan = choose(ctx, problem, None, None, refusal, Group(tuple(range(world)), 0))
        again = choose(ctx, problem, None, None, refusal, Group(tuple(range(world)), 0))
    assert plan == again
    assert plan.algorithm in choice.ALGORITHMS
    assert plan.source in SOURCES
    assert plan.source not in ("user", "cache")
    assert plan.reason
    assert (plan.config is None) == (plan.algorithm == "torch")
    assert not (refusal and plan.algorithm == "torch")
    if plan.config is not None:
        plan.config.validate(world)
        choice.check_fits(target, plan.config, problem)
        assert isinstance(plan.config, HbmBufferConfig) == (plan.algorithm != "pull")
    else:
        assert plan.source == "fallback"


# What follows from tables of a test's own.

SMALL = Problem(4096, 2048, 1024, HALF, HALF, HALF, 8, 1, None, "NN")
PARAMS = {"block_size_m": 128, "block_size_n": 128, "num_warps": 4, "k_per_flag": 2, "num_fetch_sms": 7}


def test_what_torch_cannot_do_runs_a_kernel_whatever_lost(files):
    """A list of ranks is no process group, for example."""
    for lost in (case(4096, 2048, 1024, 0.5), case(4096, 2048, 1024, 1.0, algorithm="torch")):
        files.table(AG, "mi300x", lost)
        assert planned(MI300X, SMALL).algorithm == "torch"
        plan = planned(MI300X, SMALL, "why")
        assert (plan.algorithm, plan.source, plan.reason) == ("hbm_buffer", "heuristic", "why")
    # What won is taken there, too.
    files.table(AG, "mi300x", case(4096, 2048, 1024, 1.5, params=PARAMS))
    plan = planned(MI300X, SMALL, "why")
    assert (plan.source, plan.config) == ("exact", HbmBufferConfig(**PARAMS))


def test_every_algorithm_of_a_case_has_its_configuration(files):
    for algorithm, params, config in (
        ("pull", {"block_size_m": 64, "num_warps": 4}, FusedConfig(block_size_m=64, num_warps=4)),
        ("hbm_buffer", PARAMS, HbmBufferConfig(**PARAMS)),
        ("copy_engine", {"num_fetch_stages": 3}, HbmBufferConfig(num_fetch_stages=3, transport="copy_engine")),
    ):
        files.table(AG, "mi300x", case(4096, 2048, 1024, 1.5, algorithm=algorithm, params=params))
        plan = planned(MI300X, SMALL)
        assert (plan.algorithm, plan.source, plan.config, plan.speedup) == (algorithm, "exact", config, 1.5)


def test_a_near_case_that_does_not_fit_is_no_answer(files):
    """It was measured for other sizes, so it is nobody's fault."""
    huge = {"block_size_m": 256, "block_size_n": 256, "block_size_k": 128, "num_stages": 4}
    files.table(AG, "h200", case(4096, 2048, 1024, 1.5, link="nvlink", params=huge))
    near = replace(SMALL, M=4104)
    assert near.M != SMALL.M
    plan = choose(Context(H200), near, None, None, "", EIGHT)
    assert plan.source not in ("nearest", "exact")
    with pytest.raises(ArgumentError, match="bytes of shared memory"):
        choose(Context(H200), SMALL, None, None, "", EIGHT)


def test_a_rule_may_set_the_numbers_or_how_they_are_found(files):
    ctx = Context(MI300X)
    whole = {**PARAMS, "num_fetch_stages": 5, "first_stage_fetch_sms": 9}
    files.rules(AG, "mi300x", whole, algorithm="hbm_buffer")
    plan = planned(MI300X, SMALL)
    assert (plan.algorithm, plan.source, plan.config) == ("hbm_buffer", "heuristic", HbmBufferConfig(**whole))
    assert "a rule of mi300x" in plan.reason
    assert plan.speedup is None
    # What a rule does not say the problem decides.
    files.rules(AG, "mi300x", {"fetchers": 3, "num_stages": 1}, algorithm="hbm_buffer")
    config = planned(MI300X, SMALL).config
    tiles = replace(choice.staged_tiles(ctx, SMALL), num_stages=1)
    assert config == choice.staged(ctx, SMALL, "hbm_buffer", tiles, choice.Bringing(fetchers=3))
    assert (config.num_fetch_sms, config.num_stages) == (3, 1)
    assert config != choice.staged(ctx, SMALL, None)
    files.rules(AG, "mi300x", {"algorithm": "torch"})
    assert (planned(MI300X, SMALL).algorithm, planned(MI300X, SMALL).source) == ("torch", "fallback")


def test_a_rule_that_does_not_fit_the_problem_is_no_answer(files):
    """Float32 takes twice the shared memory."""
    files.rules(
        AG,
        "h200",
        {"block_size_m": 128, "block_size_n": 256, "block_size_k": 64, "num_stages": 4, "fetchers": 3},
        algorithm="hbm_buffer",
    )
    assert choose(Context(H200), SMALL, None, None, "", EIGHT).source == "heuristic"
    wide = replace(SMALL, a_dtype=torch.float32, b_dtype=torch.float32, out_dtype=torch.float32)
    plan = choose(Context(H200), wide, None, None, "", EIGHT)
    assert (plan.algorithm, plan.source) == ("torch", "fallback")
    assert "16-bit types" in plan.reason


def test_what_was_tuned_here_is_the_plan(files):
    files.table(AG, "mi300x", case(4096, 2048, 1024, 1.25, params=PARAMS))
    query = query_of(Context(MI300X), AG, SMALL)
    usual = planned(MI300X, SMALL)
    met = config_key(usual.algorithm, params_of(usual.config))
    tiles = {"block_size_m": 32, "num_stages": 3}
    plan = planned(MI300X, SMALL, known=[(query, record(query, "pull", met, 1.75, **tiles))])
    assert (plan.algorithm, plan.source, plan.speedup) == ("pull", "cache", 1.75)
    assert plan.config == FusedConfig(**tiles)
    # Measured against something else.
    assert planned(MI300X, SMALL, known=[(query, record(query, "pull", "other", **tiles))]) == usual
    # For another epilogue, layout or dtype of the output it was not tuned.
    for changed in ({"activation": "relu"}, {"bias": (2048,)}, {"out_dtype": torch.float32}, {"aligned": False}):
        asked = replace(SMALL, **changed)
        assert planned(MI300X, asked, known=[(query, record(query, "pull", met, **tiles))]).source == "exact"
    other = replace(SMALL, transpose="NT")
    assert planned(MI300X, other, known=[(query, record(query, "pull", met, **tiles))]).source != "cache"


@pytest.mark.parametrize(
    ("algorithm", "params", "said"),
    [("hbm_buffer", {"gone_since": 3}, "gone_since"), ("hbm_buffer", {"num_warps": 5}, "num_warps"),
     ("hbm_buffer", {"num_stages": 40, "block_size_n": 256}, "shared memory"), ("gone", {}, "'gone'")],
)  # fmt: skip
def test_a_record_that_cannot_be_followed_is_passed_over(files, caplog, algorithm, params, said):
    usual = planned(H200, SMALL)
    query = query_of(Context(H200), AG, SMALL)
    with caplog.at_level("WARNING", logger="iris"):
        assert planned(H200, SMALL, known=[(query, record(query, algorithm, **params))]) == usual
    assert said in caplog.text


def test_torch_that_won_in_tuning_is_no_answer_where_it_cannot_do_it(files):
    query = query_of(Context(MI300X), AG, SMALL)
    known = [(query, record(query, "torch", speedup=1.0))]
    plan = planned(MI300X, SMALL, known=known)
    assert (plan.algorithm, plan.source, plan.config) == ("torch", "cache", None)
    assert planned(MI300X, SMALL, "why", known).reason == "why"


def test_what_was_tuned_without_torch_is_for_those_who_cannot_have_it(files):
    """A list of ranks and a process group of the same ranks ask the same, and PyTorch can serve one of them."""
    files.table(AG, "mi300x", case(4096, 2048, 1024, 0.5))
    query, met = query_of(Context(MI300X), AG, SMALL), config_key("torch", {})
    alone = record(query, "pull", met, speedup=None)
    assert planned(MI300X, SMALL, "why", [(query, alone)]).source == "cache"
    plan = planned(MI300X, SMALL, known=[(query, alone)])
    assert (plan.algorithm, plan.source) == ("torch", "fallback")
    assert "0.5x PyTorch" in plan.reason
    # PyTorch was tried and failed.
    failed = replace(alone, candidates=(("pull", 2.0), ("torch", None)))
    assert planned(MI300X, SMALL, known=[(query, failed)]).source == "cache"


def test_float32_that_was_tuned_is_for_its_precision(files):
    """Products in tf32 and in full precision take different times."""
    wide = replace(SMALL, a_dtype=torch.float32, b_dtype=torch.float32, out_dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        query = query_of(Context(MI300X), AG, wide)
        known = [(query, record(query, "pull"))]
        assert planned(MI300X, wide, known=known).source == "cache"
        torch.set_float32_matmul_precision("high")
        assert planned(MI300X, wide, known=known).source == "fallback"
    finally:
        torch.set_float32_matmul_precision(before)


def other_plan(operation, target=MI300X, known=(), on_heap=True, group=None, M=4096, N=2048, K=1024):
    """The plan of another fused operation on 8 ranks; M and K are those of the whole product."""
    ctx, adds = Context(target, known, on_heap=on_heap), operation in (SCATTER, REDUCE)
    rows = M // 8 if operation == GATHER else M
    a = torch.empty(rows, K // 8 if adds else K, dtype=HALF, device="meta")
    b = torch.empty(a.shape[1], N, dtype=HALF, device="meta")
    out = torch.empty(M // 8 if operation == SCATTER else M, N, dtype=HALF, device="meta")
    asked = Asked(operation, None, None, "none", (None, None), group)
    members = Group(tuple(range(8)) if group is None else tuple(group), 0)
    checked = checked_gather if operation == GATHER else checked_reduce
    call = checked(ctx, members, asked, out, a, b, None)
    return call.plan, query_of(ctx, operation, call.problem)


KERNEL = {GATHER: "fused", SCATTER: "fused", REDUCE: "one_shot"}
others = pytest.mark.parametrize("operation", list(KERNEL))


@others
def test_cases_of_every_operation_count(files, operation):
    """By the K of the whole product where products are added."""
    kernel, tiles = KERNEL[operation], {"block_size_m": 64, "block_size_n": 128, "num_warps": 4}
    files.table(operation, "mi300x", case(4096, 2048, 1024, 1.5, algorithm=kernel, params=tiles))
    plan, query = other_plan(operation)
    assert dict(query.sizes) == {"M": 4096, "N": 2048, "K": 1024}
    assert (plan.operation, plan.algorithm, plan.source, plan.speedup) == (operation, kernel, "exact", 1.5)
    more = {"all_reduce_variant": kernel} if operation == REDUCE else {}
    assert plan.config == FusedConfig(**tiles, **more)
    assert other_plan(operation, M=4160)[0].source == "nearest"
    files.table(operation, "mi300x", case(4096, 2048, 1024, 0.75, algorithm=kernel, params=tiles))
    plan, _ = other_plan(operation)
    assert (plan.algorithm, plan.source, plan.config) == ("torch", "fallback", None)
    assert "0.75x PyTorch" in plan.reason


@others
def test_what_was_tuned_counts_in_every_operation(files, operation):
    kernel = KERNEL[operation]
    usual, query = other_plan(operation)
    assert usual.source != "cache"
    plan, _ = other_plan(operation, known=[(query, record(query, kernel, block_size_n=128))])
    assert (plan.algorithm, plan.source, plan.config.block_size_n) == (kernel, "cache", 128)
    plan, _ = other_plan(operation, known=[(query, record(query, "torch"))])
    assert (plan.algorithm, plan.source, plan.config) == ("torch", "cache", None)


@others
def test_rules_count_in_every_operation(files, operation):
    kernel = KERNEL[operation]
    files.rules(operation, "mi300x", {"num_stages": 1, "block_size_n": 64}, algorithm=kernel)
    plan, _ = other_plan(operation)
    assert (plan.algorithm, plan.source) == (kernel, "heuristic")
    assert (plan.config.num_stages, plan.config.block_size_n) == (1, 64)
    assert plan.config.block_size_k == 64, "what the rule leaves open the problem decides"
    assert plan.config.group_size_m == 8


@pytest.mark.parametrize(("operation", "kernel"), [(GATHER, "fused"), (REDUCE, "two_shot")])
def test_a_kernel_that_cannot_write_its_output_is_not_taken(files, operation, kernel):
    files.table(operation, "mi300x", case(4096, 2048, 1024, 1.5, algorithm=kernel))
    _, query = other_plan(operation)
    for known in ((), [(query, record(query, kernel))]):
        assert other_plan(operation, known=known)[0].algorithm == kernel
        plan, _ = other_plan(operation, known=known, on_heap=False)
        assert plan.algorithm != kernel
        assert plan.source in ("fallback", "predicted", "heuristic")
    # One that writes nothing of the others.
    if operation == REDUCE:
        files.table(operation, "mi300x", case(4096, 2048, 1024, 1.5, algorithm="one_shot"))
        assert other_plan(operation, on_heap=False)[0].algorithm == "one_shot"


@others
def test_what_lost_to_torch_is_no_answer_for_a_list_of_ranks(files, operation):
    files.table(operation, "mi300x", case(4096, 2048, 1024, 0.5, algorithm=KERNEL[operation]))
    plan, _ = other_plan(operation, group=[1, 0, *range(2, 8)])
    assert plan.algorithm != "torch"
    assert (plan.source, plan.config is None) == ("heuristic", False)
    assert "sequence of ranks" in plan.reason


# With ranks: a record in the user's cache.

M, N, K = 24, 20, 16
# Few, so that the plan is none that the library would come upon by itself.
TILES = {"block_size_m": 32, "block_size_n": 32, "block_size_k": 16, "num_sms": 3, "num_warps": 1, "num_stages": 1}
WAYS = {
    AG: ("hbm_buffer", {**TILES, "k_per_flag": 1, "num_fetch_sms": 1, "first_stage_fetch_sms": 1}),
    GATHER: ("fused", TILES),
    SCATTER: ("fused", TILES),
    REDUCE: ("one_shot", TILES),
}


def integers(shape, seed):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


def arguments(ctx, operation):
    """Output and inputs, and what must come out; every rank computes with what all ranks have."""
    world, rank = ctx.get_num_ranks(), ctx.get_rank()
    every = [(integers((M, K), 2 * r), integers((K, N), 2 * r + 1)) for r in range(world)]
    a, b = every[rank]
    if operation == AG:
        b = integers((world * K, N), 99)
        expected = torch.cat([one.double() for one, _ in every], 1) @ b.double()
    elif operation == GATHER:
        expected = torch.cat([one.double() @ other.double() for one, other in every])
    else:
        expected = sum(one.double() @ other.double() for one, other in every)
        if operation == SCATTER:
            expected = expected.chunk(world)[rank]
    shared, out = ctx.zeros(a.shape, dtype=HALF), ctx.full(expected.shape, float("nan"), dtype=HALF)
    shared.copy_(a)
    return (out, shared, b.to(out.device)), expected.to(HALF)


def problem_of(operation, world):
    rows, depth = (M * world if operation == GATHER else M), (K * world if operation == AG else K)
    return Problem(rows, N, depth, HALF, HALF, HALF, world, 1 if operation == AG else None, None, "NN", aligned=False)


def body_recorded(ctx, operation, place):
    """A context finds what lies in the folder when it is made; another does not when there is nothing."""
    algorithm, params = WAYS[operation]
    query = query_of(ctx, operation, problem_of(operation, ctx.get_num_ranks()))
    os.environ["IRIS_CACHE_DIR"] = place
    try:
        if ctx.get_rank() == 0:
            store.write(operation, {query: record(query, algorithm, **params)})
        args, expected = arguments(ctx, operation)
        before = ctx.ops.explain(operation, *args)
        later = iris.iris(1 << 22)
        args, expected = arguments(later, operation)
        plan = later.ops.explain(operation, *args)
        assert args[0].isnan().all(), "explain ran something"
        ran = getattr(later.ops, operation)(*args).plan
        later.synchronize()
    finally:
        del os.environ["IRIS_CACHE_DIR"]
    assert torch.equal(args[0].cpu(), expected)
    assert ran == plan
    assert before.source == "heuristic"
    assert before.algorithm != plan.algorithm or before.config != plan.config
    named = later.ops.explain(operation, *args, algorithm="torch")
    assert (named.algorithm, named.source) == ("torch", "user")
    return plan.algorithm, plan.source, plan.speedup, params_of(plan.config), plan.reason


@pytest.mark.parametrize("operation", list(WAYS))
@pytest.mark.parametrize("world", [2])
def test_a_record_of_this_machine_is_explained_and_followed(ranks, world, operation, tmp_path):
    algorithm, params = WAYS[operation]
    config = (HbmBufferConfig if operation == AG else FusedConfig)(**params)
    if operation == REDUCE:
        config = replace(config, all_reduce_variant=algorithm)
    for taken, source, speedup, configured, reason in ranks(world).run(body_recorded, operation, str(tmp_path)):
        assert (taken, source, speedup) == (algorithm, "cache", 1.5)
        assert configured == params_of(config)
        assert "tuned on this machine: 2 ms" in reason


def body_torch_recorded(ctx, place):
    """PyTorch's operations, found by tuning, are still not what the caller named."""
    query = query_of(ctx, GATHER, problem_of(GATHER, ctx.get_num_ranks()))
    os.environ["IRIS_CACHE_DIR"] = place
    try:
        if ctx.get_rank() == 0:
            store.write(GATHER, {query: record(query, "torch", speedup=1.0)})
        later = iris.iris(1 << 22)
    finally:
        del os.environ["IRIS_CACHE_DIR"]
    args, expected = arguments(later, GATHER)
    with pytest.raises(UnsupportedError, match=r"allow_fallback=False.*tuned on this machine"):
        later.ops.matmul_all_gather(*args, allow_fallback=False)
    plan = later.ops.matmul_all_gather(*args).plan
    later.synchronize()
    assert torch.equal(args[0].cpu(), expected)
    return plan.algorithm, plan.source


@pytest.mark.parametrize("world", [2])
def test_torch_that_was_tuned_is_a_fallback_all_the_same(ranks, world, tmp_path):
    assert ranks(world).run(body_torch_recorded, str(tmp_path)) == [("torch", "cache")] * world
