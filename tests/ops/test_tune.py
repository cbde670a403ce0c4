"""``tune=True`` and ``allow_fallback=False`` of the fused operations, and what is tried on targets that are not here.

Times are given by the tests; results are those of integers, which are exact.
"""

import json
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import iris
from iris import _target
from iris.errors import ArgumentError, CaptureError, RankMismatch, UnsupportedError
from iris.ops import _candidates, choice
from iris.ops._candidates import candidates
from iris.ops.arguments import Problem
from iris.ops.config import FusedConfig, HbmBufferConfig
from iris.tuning import autotune, tables
from iris.tuning.plan import Plan
from iris.tuning.query import Query

OPERATIONS = ("all_gather_matmul", "matmul_all_gather", "matmul_all_reduce", "matmul_reduce_scatter")
slow = partial(pytest.param, marks=pytest.mark.slow)
every_operation = pytest.mark.parametrize("operation", OPERATIONS)
# Two of the three that have a body of their own.
some_operations = pytest.mark.parametrize("operation", [*OPERATIONS[::3], *map(slow, OPERATIONS[1:3])])


def integers(shape, seed):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(torch.float16)


def arguments(ctx, operation, M=40, N=24, K=16, dtype=torch.float16, out_on_heap=True):
    """Arguments of a call and what it must give; every rank computes with what all ranks have."""
    world, rank = ctx.get_num_ranks(), ctx.get_rank()
    device = ctx.get_device()
    everyones = [(integers((M, K), 2 * r), integers((K, N), 2 * r + 1)) for r in range(world)]
    a, b = everyones[rank]
    if operation == "all_gather_matmul":
        b = integers((world * K, N), 99)
        expected = torch.cat([of.double() for of, _ in everyones], 1) @ b.double()
    elif operation == "matmul_all_gather":
        expected = torch.cat([one.double() @ other.double() for one, other in everyones])
    else:
        expected = sum(one.double() @ other.double() for one, other in everyones)
        if operation == "matmul_reduce_scatter":
            rows = -(-M // world)
            expected = expected[rank * rows : (rank + 1) * rows]
    shared = ctx.full(a.shape, 0, dtype=dtype)
    shared.copy_(a)
    shape, nan = expected.shape, float("nan")
    out = ctx.full(shape, nan, dtype=dtype) if out_on_heap else torch.full(shape, nan, dtype=dtype, device=device)
    return (out, shared, b.to(device, dtype)), expected.to(dtype)


def call(ctx, operation, args, **given):
    return getattr(ctx.ops, operation)(*args, **given)


def check(ctx, args, expected):
    ctx.synchronize()
    assert torch.equal(args[0].cpu(), expected)


class Times:
    """Gives times to candidates in the order in which they are asked for, the best to one of them."""

    def __init__(self, best, ms=1.0, others=2.0):
        self.best, self.ms, self.others, self.order = best, ms, others, []

    def __call__(self, ctx, candidate):
        if candidate.name not in self.order:
            self.order.append(candidate.name)
        return self.ms if self.order.index(candidate.name) == self.best else self.others


def body_tune(ctx, operation, place, best):
    args, expected = arguments(ctx, operation)
    os.environ["IRIS_CACHE_DIR"] = place
    told = []
    try:
        with autotune.using(timer=Times(best), told=told.append, candidates=4):
            first = call(ctx, operation, args, tune=True).plan
            check(ctx, args, expected)
            args[0].fill_(float("nan"))
            ctx.barrier()
            second = call(ctx, operation, args, tune=True, async_op=True)
            second.wait()
            check(ctx, args, expected)
    finally:
        del os.environ["IRIS_CACHE_DIR"]
    (tuning,) = told
    tried = [(t.candidate.name, t.candidate.algorithm, t.failure) for t in tuning.trials]
    record = ctx.service("tuned").find(tuning.query, ctx.resolve_group(None))
    return tried, record.name, (first.algorithm, autotune.params_of(first.config), first.source), second.plan == first


@pytest.mark.parametrize(
    ("world", "operation"),
    [
        *((2, operation) for operation in OPERATIONS),
        (1, "all_gather_matmul"),
        (4, "all_gather_matmul"),
        (4, "matmul_all_reduce"),
        *(slow(1, operation) for operation in OPERATIONS[1:]),
        *(slow(4, operation) for operation in OPERATIONS[1::2]),
    ],
)
def test_tuning_finds_the_best_and_the_result_is_right(ranks, world, operation, tmp_path):
    answers = ranks(world).run(body_tune, operation, str(tmp_path), 2)
    assert all(answer == answers[0] for answer in answers)
    tried, winner, plan, same = answers[0]
    assert [failure for _, _, failure in tried] == [""] * len(tried)
    assert tried[1][1] == "torch"
    assert 3 <= len(tried) <= 4
    assert winner == tried[2][0]
    assert same
    assert (plan[0], plan[2]) == (tried[2][1], "cache")
    saved = store_of(tmp_path, operation)
    assert saved["params"] == plan[1]
    assert (saved["name"], saved["algorithm"]) == tried[2][:2]
    assert saved["candidates"] == {name: 1.0 if i == 2 else 2.0 for i, (name, _, _) in enumerate(tried)}


def store_of(place, operation):
    (record,) = json.loads((place / "tuned" / f"{operation}.json").read_text())["records"].values()
    return record


def body_later(ctx, place):
    """A context that is made afterwards takes what was tuned, without being asked to tune."""
    args, expected = arguments(ctx, "matmul_reduce_scatter", N=32)
    os.environ["IRIS_CACHE_DIR"] = place
    try:
        with autotune.using(timer=Times(2), candidates=3):
            plan = call(ctx, "matmul_reduce_scatter", args, tune=True).plan
        later = iris.iris(1 << 22)
        found = later.ops.explain("matmul_reduce_scatter", *args)
        ran = call(later, "matmul_reduce_scatter", args).plan
        check(ctx, args, expected)
    finally:
        del os.environ["IRIS_CACHE_DIR"]
    return plan.source, found.source, found.config == plan.config == ran.config, "tuned on this machine" in ran.reason


@pytest.mark.parametrize("world", [2])
def test_later_contexts_take_what_was_tuned(ranks, world, tmp_path):
    assert ranks(world).run(body_later, str(tmp_path)) == [("cache", "cache", True, True)] * world


def body_untuned(ctx, operation):
    args, expected = arguments(ctx, operation, N=20)
    plan = call(ctx, operation, args, tune=True).plan
    check(ctx, args, expected)
    return plan.reason, plan.source, call(ctx, operation, args).plan.reason


@pytest.mark.interpreted("where kernels are compiled such calls are tuned")
@some_operations
@pytest.mark.parametrize("world", [2])
def test_under_the_interpreter_nothing_is_tuned_and_the_plan_says_so(ranks, world, operation):
    for reason, source, usual in ranks(world).run(body_untuned, operation):
        assert autotune.INTERPRETED in reason
        assert source == "heuristic"
        assert autotune.INTERPRETED not in usual


def body_fails(ctx, place):
    """A candidate that cannot be timed on one rank, in an operation."""
    args, expected = arguments(ctx, "all_gather_matmul", N=28)
    os.environ["IRIS_CACHE_DIR"] = place

    def timer(ctx, candidate):
        if candidate.algorithm == "torch" and ctx.get_rank() == 1:
            raise RuntimeError("out of luck")
        return 1.0

    told = []
    try:
        with autotune.using(timer=timer, told=told.append, candidates=3):
            call(ctx, "all_gather_matmul", args, tune=True)
            check(ctx, args, expected)
    finally:
        del os.environ["IRIS_CACHE_DIR"]
    return [t.failure for t in told[0].trials]


@pytest.mark.parametrize("world", [2])
def test_a_candidate_that_fails_on_one_rank_costs_no_result(ranks, world, tmp_path):
    expected = ["", "rank 1: RuntimeError: out of luck", ""]
    assert ranks(world).run(body_fails, str(tmp_path)) == [expected] * 2


def body_named(ctx, operation):
    args, _ = arguments(ctx, operation)
    workspace = call(ctx, operation, args, algorithm="torch")
    for given in ({"algorithm": "torch"}, {"config": FusedConfig()}, {"workspace": workspace}):
        with pytest.raises(ArgumentError, match="tune=True finds the algorithm"):
            call(ctx, operation, args, tune=True, **given)


@some_operations
@pytest.mark.parametrize("world", [1])
def test_what_tuning_decides_cannot_be_given(ranks, world, operation):
    ranks(world).run(body_named, operation)


def body_capture(ctx):
    args, _ = arguments(ctx, "all_gather_matmul")
    ctx.capturing = lambda stream=None: True
    try:
        with autotune.using(timer=Times(0)), pytest.raises(CaptureError, match="tune before the capture"):
            call(ctx, "all_gather_matmul", args, tune=True)
    finally:
        del ctx.capturing


@pytest.mark.parametrize("world", [1])
def test_nothing_is_tuned_while_a_graph_is_captured(ranks, world):
    ranks(world).run(body_capture)


def body_nothing(ctx):
    with autotune.using(timer=Times(0)):
        empty, _ = arguments(ctx, "matmul_all_gather", M=0)
        # Only PyTorch computes float64.
        wide, expected = arguments(ctx, "matmul_all_gather", dtype=torch.float64)
        plans = [call(ctx, "matmul_all_gather", args, tune=True).plan.reason for args in (empty, wide)]
        check(ctx, wide, expected)
    return plans


@pytest.mark.parametrize("world", [2])
def test_where_there_is_nothing_to_tune_the_plan_says_so(ranks, world):
    for empty, wide in ranks(world).run(body_nothing):
        assert "nothing to compute" in empty
        assert "nothing to choose from" in wide


def body_fallback(ctx):
    here, expected = arguments(ctx, "matmul_all_gather", out_on_heap=False)
    errors = []
    for _ in range(2):  # at a call that is remembered, too
        with pytest.raises(UnsupportedError) as caught:
            call(ctx, "matmul_all_gather", here, allow_fallback=False)
        errors.append(str(caught.value))
    ctx.synchronize()
    assert here[0].isnan().all()  # nothing has run
    assert call(ctx, "matmul_all_gather", here).plan.source == "fallback"
    check(ctx, here, expected)
    # Who names PyTorch's operations has them.
    assert call(ctx, "matmul_all_gather", here, algorithm="torch", allow_fallback=False).plan.source == "user"
    kernel, expected = arguments(ctx, "matmul_all_gather")
    assert call(ctx, "matmul_all_gather", kernel, allow_fallback=False).plan.algorithm == "fused"
    check(ctx, kernel, expected)
    return errors


@pytest.mark.parametrize("world", [2, 4])
def test_without_fallback_no_operation_of_torch_runs_unasked(ranks, world):
    for errors in ranks(world).run(body_fallback):
        for text in errors:
            assert "allow_fallback=False" in text
            assert "not on the symmetric heap" in text


def body_wide(ctx, operation):
    args, _ = arguments(ctx, operation, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=f"{operation}: allow_fallback=False.*float64"):
        call(ctx, operation, args, allow_fallback=False)


@some_operations
@pytest.mark.parametrize("world", [2])
def test_without_fallback_every_operation_refuses_what_only_torch_does(ranks, world, operation):
    ranks(world).run(body_wide, operation)


def body_disagree(ctx, operation, option):
    # A shape of its own: combinations that ranks have agreed on before are not compared again.
    args, _ = arguments(ctx, operation, M=12, N=20 if option == "tune" else 28)
    call(ctx, operation, args, **{option: ctx.get_rank() == 0})


@some_operations
@pytest.mark.parametrize("option", ["tune", "allow_fallback"])
@pytest.mark.parametrize("world", [2])
def test_ranks_that_give_different_options_are_told(ranks, world, operation, option):
    for outcome in ranks(world).run_expecting(body_disagree, operation, option):
        assert isinstance(outcome.error, RankMismatch)
        assert f"{option} is True on rank 0, False on rank 1" in str(outcome.error)


def body_plans(ctx, operation):
    """Ranks that would take different tiles, which a difference between their packages could bring about."""
    args, _ = arguments(ctx, operation, M=12, N=36)
    fitted = choice.fitted

    def odd(target, problem):
        config = fitted(target, problem)
        return config if ctx.get_rank() == 0 else choice.replace(config, num_sms=3)

    modules = [choice, *(__import__(f"iris.ops.{m}", fromlist=["x"]) for m in ("_matmul_all_gather", "_candidates"))]
    for module in modules:
        module.fitted = odd if ctx.get_rank() == 1 else fitted
    try:
        call(ctx, operation, args)
    finally:
        for module in modules:
            module.fitted = fitted


@every_operation
@pytest.mark.processes("the functions of a module are replaced on one rank")
@pytest.mark.parametrize("world", [2])
def test_plans_are_compared_with_every_field(ranks, world, operation):
    for outcome in ranks(world).run_expecting(body_plans, operation):
        assert isinstance(outcome.error, RankMismatch)
        assert "num_sms=None" in str(outcome.error)
        assert "num_sms=3" in str(outcome.error)


def body_groups(ctx, place):
    """A group tunes what the world has not; the other ranks know nothing of it."""
    os.environ["IRIS_CACHE_DIR"] = place
    told = []
    try:
        if ctx.get_rank() < 2:
            world, rank = 2, ctx.get_rank()
            b = integers((32, 8), 5)
            a = ctx.full((8, 16), float(rank + 1), dtype=torch.float16)
            out = torch.empty(8, 8, dtype=torch.float16, device=ctx.get_device())
            with autotune.using(timer=Times(1), told=told.append):
                ctx.ops.all_gather_matmul(out, a, b.to(out.device), group=[0, 1], tune=True)
            ctx.synchronize()
            whole = torch.cat([torch.full((8, 16), r + 1.0) for r in range(world)], 1)
            assert torch.equal(out.cpu().float(), (whole.double() @ b.double()).float())
        else:
            ctx.full((8, 16), 0.0, dtype=torch.float16)
        ctx.barrier()
    finally:
        del os.environ["IRIS_CACHE_DIR"]
    return [[t.candidate.algorithm for t in tuning.trials] for tuning in told]


@pytest.mark.parametrize("world", [3])
def test_a_group_tunes_by_itself(ranks, world, tmp_path):
    first, second, third = ranks(world).run(body_groups, str(tmp_path))
    assert first == second
    assert third == []
    # A list of ranks is no process group.
    assert "torch" not in first[0]


# What is tried, on targets that are not here.

TARGETS = list(_target.KNOWN.values())


def problem(M=4096, N=4096, K=8192, dtype=torch.bfloat16, world=8, gather_dim=1):
    return Problem(M, N, K, dtype, dtype, dtype, world, gather_dim, None, "NN")


def tried(target, operation, posed, default=("torch", None), reachable=True, torch_refused=False, most=8, link=None):
    link = link or {"nvidia": "nvlink", "amd": "xgmi"}[target.vendor]
    ctx = SimpleNamespace(target=target, get_cu_count=lambda: target.compute_units, runtime="gpu")
    options = (
        (("transpose", "NN"),)
        if posed.gather_dim is None
        else (("gather_dim", str(posed.gather_dim)), ("transpose", "NN"))
    )
    query = Query(
        operation, target.product, target.arch, link, posed.world_size, target.compute_units,
        str(posed.a_dtype).removeprefix("torch."), (("M", posed.M), ("N", posed.N), ("K", posed.K)), options,
    )  # fmt: skip
    plan = Plan(operation, *default, "fallback", "", "")
    return candidates(ctx, plan, posed, query, reachable, torch_refused, most)


@every_operation
@pytest.mark.parametrize(
    "target",
    [t if t.product in ("h200", "mi300x") else slow(t) for t in TARGETS],
    ids=lambda t: t.product,
)
def test_candidates_begin_with_the_default_and_torch_and_all_are_valid(target, operation):
    posed = problem(gather_dim=1 if operation == "all_gather_matmul" else None)
    default = choice.fitted(target, posed)
    kernel = _candidates._KERNELS[operation][-1]
    ways = list(tried(target, operation, posed, (kernel, default)).items())
    assert [algorithm for _, (algorithm, _) in ways[:2]] == [kernel, "torch"]
    assert ways[0][1][1] == default
    assert len(ways) == 8
    keys = {autotune.config_key(algorithm, autotune.params_of(config)) for _, (algorithm, config) in ways}
    assert len(keys) == 8
    for _, (algorithm, config) in ways:
        if config is not None:
            config.validate(8)
            choice.check_fits(target, config, posed)
            assert isinstance(config, HbmBufferConfig) == (algorithm == "hbm_buffer")
            if operation == "matmul_all_reduce" and config is not default:
                assert config.all_reduce_variant == algorithm


@every_operation
def test_candidates_are_the_same_every_time(operation):
    posed = problem(gather_dim=0 if operation == "all_gather_matmul" else None)
    assert list(tried(TARGETS[0], operation, posed).items()) == list(tried(TARGETS[0], operation, posed).items())


@pytest.mark.parametrize("most", [1, 2, 3, 5, 20])
def test_no_more_candidates_than_asked_for_but_the_default_and_torch(most):
    config = FusedConfig(128, 128, 64)
    ways = tried(TARGETS[-1], "all_gather_matmul", problem(), ("pull", config), most=most)
    assert len(ways) == max(2, most)


def test_candidates_differ_in_their_tiles():
    ways = tried(_target.KNOWN["h200"], "all_gather_matmul", problem())
    tiles = {(c.block_size_m, c.block_size_n, c.block_size_k) for _, c in ways.values() if c is not None}
    assert len(tiles) >= 3


def test_what_was_measured_for_the_problem_is_tried():
    target = _target.KNOWN["mi300x"]
    case = next(c for c in tables.cases("all_gather_matmul", "mi300x") if c.world == 8 and not c.unfit)
    M, N, K = (size for _, size in case.entry.sizes)
    for rows in (M, M + M // 16):
        ways = tried(target, "all_gather_matmul", problem(M=rows, N=N, K=K))
        assert case.entry.key in {autotune.config_key(a, autotune.params_of(c)) for a, c in ways.values()}


def test_outputs_that_peers_cannot_reach_are_for_kernels_that_do_not_write_them():
    posed = problem(gather_dim=None)
    for target in TARGETS[:1] + TARGETS[-1:]:
        algorithms = {a for a, _ in tried(target, "matmul_all_reduce", posed, reachable=False).values()}
        assert algorithms == {"torch", "one_shot"}
        assert set(tried(target, "matmul_all_gather", posed, reachable=False)) == {"torch"}


def test_torch_is_not_tried_where_it_cannot_do_it():
    ways = tried(
        TARGETS[0],
        "matmul_all_reduce",
        problem(gather_dim=None),
        ("two_shot", FusedConfig(128, 128, 64)),
        torch_refused=True,
    )
    assert all(algorithm != "torch" for algorithm, _ in ways.values())


def test_float64_is_for_torch_alone():
    assert set(tried(TARGETS[0], "all_gather_matmul", problem(dtype=torch.float64))) == {"torch"}


@pytest.mark.parametrize("rows", [1, 17, 100])
def test_few_rows_have_small_tiles(rows, monkeypatch):
    # Published rules do not look at how many there are.
    monkeypatch.setattr(_candidates, "_by_rule", lambda ctx, problem, query: [])
    monkeypatch.setattr(_candidates, "_from_tables", lambda ctx, query: [])
    for target in TARGETS:
        for _, config in tried(target, "all_gather_matmul", problem(M=rows)).values():
            if config is not None:
                assert config.block_size_m < max(17, 2 * rows)


def test_one_rank_stages_nothing():
    ways = tried(_target.KNOWN["h200"], "all_gather_matmul", problem(world=1))
    assert {a for a, _ in ways.values()} == {"torch", "pull"}


def test_an_unknown_machine_has_candidates_too():
    target = _target.KNOWN["h200"]
    known = {name: getattr(target, name) for name in target.__dataclass_fields__}
    unknown = SimpleNamespace(**{**known, "product": "", "compiled": True})
    assert len(tried(unknown, "all_gather_matmul", problem())) == 8


def test_ranks_that_share_a_card_have_an_imitated_link_or_none(monkeypatch):
    rates = []
    monkeypatch.setattr(_candidates, "incoming_rate", lambda ctx, peers: rates.append(peers) or 5e10)
    slow = tried(_target.KNOWN["h200"], "all_gather_matmul", problem(), link="shared")
    assert rates == [7]
    assert len(slow) == 8
