"""Tuning of a GEMM beside a collective on ranks of the simulator, with times that the tests give."""

import pytest
import torch

from iris.concurrent import autotune as concurrent_tuning
from iris.concurrent._call import Asked, Call
from iris.concurrent.predictor import COLLECTIVES
from iris.concurrent.tuning_data import collect, derive
from iris.errors import ArgumentError, RankMismatch
from iris.tuning import autotune, store
from simulated_ranks import SimulatedRanks

TILE = (32, 64, 32)
SHAPE = {"gemm_m": 96, "gemm_n": 128, "gemm_k": 64, "comm_m": 40, "comm_n": 24, "collective": "all_reduce", "world": 2}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(store, "_warned", set())
    return tmp_path / "tuned"


def run(world, body, *args):
    return SimulatedRanks(world, "sim").run(body, *args)


def operands(ctx):
    generator = torch.Generator().manual_seed(ctx.get_rank())
    a = torch.randint(-3, 4, (96, 64), generator=generator).float()
    b = torch.randint(-3, 4, (64, 128), generator=torch.Generator().manual_seed(99)).float()
    src = ctx.empty(40, 24, dtype=torch.float32)
    src.copy_(torch.randint(-9, 10, src.shape, generator=generator))
    return a, b, src


def wanted(ctx, name, rows=40):
    """The collective's result, whose inputs are whole numbers."""
    world, rank = ctx.get_num_ranks(), ctx.get_rank()
    sources = []
    for peer in range(world):
        generator = torch.Generator().manual_seed(peer)
        torch.randint(-3, 4, (96, 64), generator=generator)
        sources.append(torch.randint(-9, 10, (rows, 24), generator=generator).float())
    chunk = -(-rows // world)
    mine = slice(rank * chunk, (rank + 1) * chunk)
    return {
        "all_gather": lambda: torch.cat(sources),
        "all_reduce": lambda: sum(sources),
        "reduce_scatter": lambda: sum(sources)[mine],
        "all_to_all": lambda: torch.cat([source[mine] for source in sources]),
        "broadcast": lambda: sources[0],
    }[name]()


def best_of(split):
    """A timer: ``split`` is the fastest; what runs without tuning takes 5."""

    def timer(ctx, candidate):
        return 5.0 if not candidate.params else 1 + abs(candidate.params["gemm_wgs"] - split) / 100

    return timer


def body_tuned(ctx, name, mode, calls):
    a, b, src = operands(ctx)
    told, found = [], []
    with autotune.using(timer=best_of(60), told=told.append):
        for _ in range(calls):
            c, dst = getattr(ctx.concurrent, name)(a, b, src, mode=mode, tune=True)
            found.append((torch.equal(c, a @ b), torch.equal(dst, wanted(ctx, name))))
    record = told[0].record
    names = [trial.candidate.name for trial in told[0].trials]
    return len(told), dict(record.params), record.milliseconds, names, found


@pytest.mark.parametrize(("name", "mode"), [*((name, "fused") for name in COLLECTIVES), ("all_reduce", "concurrent")])
def test_a_call_is_tuned_once_and_its_results_are_right(name, mode, place):
    for count, params, ms, names, found in run(2, body_tuned, name, mode, 2):
        assert count == 1
        # 66 of 132 programs is the nearest of a few shares, since nothing is known of the interpreter.
        assert params["gemm_wgs"] == 66
        assert params.get("comm_wgs") == (66 if mode == "concurrent" else None)
        assert ms == pytest.approx(1.06)
        assert names[0].startswith("99 " if mode == "fused" else "116 ")
        assert names[0].endswith("(default)")
        assert found == [(True, True)] * 2
    (saved,) = store.saved_records()
    assert saved.query.operation == f"concurrent.{name}"
    assert concurrent_tuning.cache_path(name) == place / f"concurrent.{name}.json"
    assert (place / f"concurrent.{name}.json").exists()


def body_default(ctx):
    """Nothing is faster than the default by more than the noise."""
    a, b, src = operands(ctx)
    told = []
    with autotune.using(timer=lambda ctx, candidate: 1.0 if not candidate.params else 0.995, told=told.append):
        ctx.concurrent.all_reduce(a, b, src, tune=True)
    return dict(told[0].record.params), told[0].record.default_milliseconds


def test_what_runs_without_tuning_stays_unless_another_is_faster():
    assert run(2, body_default) == [({}, 1.0)] * 2


def body_again(ctx, **given):
    a, b, src = operands(ctx)
    told, timed = [], []

    def timer(ctx, candidate):
        timed.append(candidate.name)
        return best_of(60)(ctx, candidate)

    with autotune.using(timer=timer, told=told.append):
        ctx.concurrent.all_reduce(a, b, src, tune=True, **given)
    return len(told), len(told[0].trials), len(timed)


def test_what_was_tuned_before_is_not_measured_again():
    assert all(trials > 2 and timed for _, trials, timed in run(2, body_again))
    # Another program, whose context knows what is in the files.
    assert run(2, body_again) == [(1, 0, 0)] * 2


DECIDED = (
    {"mode": "concurrent"}, {"num_wgs": 20}, {"gemm_block": TILE}, {"comm_block": (16, 32)}, {"comm_group_m": 3},
    {"gemm_group_m": 3}, {"num_stages": 3}, {"num_warps": 8}, {"comm_cap": 3}, {"mode": "concurrent", "comm_wgs": 9},
)  # fmt: skip


def body_cases(ctx):
    """The cases of calls that differ, and of one call with other values at other places."""
    a, b, src = operands(ctx)
    dst = ctx.empty(40, 24, dtype=torch.float32)
    turned, half = b.t().contiguous().t(), torch.empty(96, 128, dtype=torch.float16)
    calls = [((a, b, src, None, None), given) for given in ({}, *DECIDED)]
    calls += [((a, turned, src, None, None), {}), ((a.half(), b.half(), src, None, None), {})]
    calls += [((a, b, src, half, None), {}), ((a, b, src, None, src), {}), ((a, b[:, :64], src, None, None), {})]
    calls += [((a, b, src[:20], None, None), {}), ((a, b, src.t(), None, None), {})]
    calls += [((a, b, src.to(torch.int32), None, None), {})]
    same = ((a + 1, b.clone(), src, torch.empty(96, 128), dst), {})

    def case(tensors, given):
        asked = Asked(**{"group": (0,), "tune": True, **given})
        call = Call(ctx, "all_reduce", asked, ctx.resolve_group(None), *tensors)
        named = dict(zip(("A", "B", "comm_src", "C", "comm_dst"), tensors, strict=True))
        return store.key_of(concurrent_tuning.case_of(ctx, "all_reduce", asked, call, named))

    return [case(*one) for one in calls], case(*same)


def test_whatever_a_kernel_depends_on_is_a_case_of_its_own():
    ((cases, same),) = run(1, body_cases)
    assert len(set(cases)) == len(cases) == 19
    assert same == cases[0]


def body_in_place(ctx):
    a, b, src = operands(ctx)
    with autotune.using(timer=best_of(60)), concurrent_tuning.trying([(7, TILE)]):
        _, dst = ctx.concurrent.all_reduce(a, b, src, comm_dst=src, tune=True)
    return dst.data_ptr() == src.data_ptr(), torch.equal(dst, wanted(ctx, "all_reduce"))


def test_a_sum_in_its_own_place_is_added_once():
    assert run(2, body_in_place) == [(True, True)] * 2


def body_failing(ctx):
    """On rank 1 all splits but two cannot be timed."""
    a, b, src = operands(ctx)
    told = []

    def timer(ctx, candidate):
        if ctx.get_rank() == 1 and candidate.params and candidate.params["gemm_wgs"] not in (82, 132):
            raise RuntimeError("planted")
        return best_of(60)(ctx, candidate)

    with autotune.using(timer=timer, told=told.append):
        c, _ = ctx.concurrent.all_gather(a, b, src, tune=True)
    failed = sorted(t.candidate.params["gemm_wgs"] for t in told[0].trials if t.failure)
    return dict(told[0].record.params)["gemm_wgs"], failed, torch.equal(c, a @ b)


def test_what_fails_on_one_rank_is_out_on_all():
    assert run(2, body_failing) == [(82, [66, 116], True)] * 2


def body_known_differently(ctx):
    """Rank 0 alone has forgotten what was tuned, as with a home of its own; all tune then."""
    a, b, src = operands(ctx)
    told = []
    ways = concurrent_tuning.trying([(66, TILE), (82, TILE)])
    with autotune.using(timer=best_of(60)), ways:
        ctx.concurrent.all_reduce(a, b, src, tune=True)
    if ctx.get_rank() == 0:
        ctx.service("tuned").forget()
    else:
        ctx.service("tuned")._learnt.clear()
        ctx.agreement.forget_calls()
    with autotune.using(timer=best_of(90), told=told.append), concurrent_tuning.trying([(66, TILE), (82, TILE)]):
        ctx.concurrent.all_reduce(a, b, src, tune=True)
    return len(told[0].trials) > 2, told[0].record.params["gemm_wgs"]


def test_ranks_that_know_different_things_tune_together():
    assert run(2, body_known_differently) == [(True, 82), (True, 82)]


def body_refused(ctx, given, rank):
    a, b, src = operands(ctx)
    own = given if rank is None or ctx.get_rank() == rank else {}
    rows = own.pop("rows", 96)
    with autotune.using(timer=best_of(60)):
        ctx.concurrent.all_reduce(a[:rows], b, src, **{"tune": True, **own})


@pytest.mark.parametrize(
    ("given", "rank", "text"),
    [
        ({"gemm_wgs": 50}, None, "tune=True finds gemm_wgs"),
        ({"comm_wgs": 50}, None, "with mode='fused', comm_wgs"),
        ({"tune": 1}, None, "tune must be True or False, got 1"),
        ({"gemm_wgs": 50}, 1, "tune=True finds gemm_wgs"),
        ({"tune": False}, 1, "tune"),
        ({"rows": 50}, 1, "case that is tuned"),
    ],
)
def test_what_ranks_may_not_ask(given, rank, text):
    outcomes = SimulatedRanks(2, "sim").run_expecting(body_refused, given, rank)
    for outcome in outcomes:
        assert isinstance(outcome.error, ArgumentError | RankMismatch)
        assert text in str(outcome.error)


def body_split_of_the_caller(ctx):
    a, b, src = operands(ctx)
    told = []
    with autotune.using(timer=best_of(60), told=told.append), concurrent_tuning.trying([(100, TILE), (50, TILE)]):
        c, dst = ctx.concurrent.all_reduce(a, b, src, mode="concurrent", comm_wgs=32, tune=True)
    params = [dict(trial.candidate.params) for trial in told[0].trials]
    return params, torch.equal(c, a @ b), torch.equal(dst, wanted(ctx, "all_reduce"))


def test_programs_of_the_collective_that_the_caller_gave_are_kept():
    listed = [{}, *({"gemm_wgs": split, "gemm_block": list(TILE)} for split in (100, 50))]
    assert run(2, body_split_of_the_caller) == [(listed, True, True)] * 2


def body_without_a_clock(ctx):
    a, b, src = operands(ctx)
    c, dst = ctx.concurrent.all_reduce(a, b, src, tune=True)
    empty, _ = ctx.concurrent.all_reduce(a[:0], b, src, tune=True)
    return torch.equal(c, a @ b), torch.equal(dst, wanted(ctx, "all_reduce")), tuple(empty.shape)


def test_nothing_is_tuned_under_the_interpreter_without_a_clock():
    assert run(2, body_without_a_clock) == [(True, True, (0, 128))] * 2
    assert not store.saved_records()


def body_function(ctx, **given):
    """A function of one's own, and what it was called with."""
    called = []

    def call(split, tile):
        called.append((split, tile))

    with autotune.using(timer=best_of(60)):
        first = concurrent_tuning.tune_config(ctx, run=call, shape=SHAPE, default_gemm_block=TILE, **given)
        count = len(called)
        second = concurrent_tuning.tune_config(ctx, run=call, shape=SHAPE, default_gemm_block=TILE, **given)
        third = concurrent_tuning.tune_config(
            ctx, run=call, shape=SHAPE, default_gemm_block=TILE, extra_key={"x": 1}, **given
        )
        forced = concurrent_tuning.tune_config(ctx, run=call, shape=SHAPE, default_gemm_block=TILE, force=True, **given)
    return first, second, third["cached"], forced["cached"], sorted(set(called[:count]))


def test_a_function_of_ones_own_is_tuned():
    for first, second, third, forced, called in run(2, body_function):
        assert first == {
            "gemm_wgs": 66, "gemm_block": TILE, "measured_ms": pytest.approx(1.06), "pred_ms": None, "cached": False,
        }  # fmt: skip
        assert second == {**first, "cached": True}
        assert not third
        assert not forced
        assert called == [(split, TILE) for split in (66, 82, 99, 116, 132)]


def test_candidates_of_a_function_may_be_given():
    given = {"candidates": [(70, TILE), (10, (64, 64, 32))], "num_wgs": 80, "default_gemm_wgs": 33}
    for first, _, _, _, called in SimulatedRanks(2, "sim").run(body_function, **given):
        assert (first["gemm_wgs"], first["gemm_block"]) == (70, TILE)
        assert called == [(10, (64, 64, 32)), (33, TILE), (70, TILE)]


def test_what_was_tuned_is_listed_and_removed(place):
    run(2, body_again)
    ((key, found),) = concurrent_tuning.load_db().items()
    assert key.startswith("concurrent.all_reduce machine= arch=interpreter link=interpreted world=2 units=132 ")
    for detail in ("dtype=float32", "M=96", "comm_n=24", "mode=fused", "num_wgs=132", "comm_block=", "order of B=N"):
        assert detail in key
    assert found["config"]["gemm_wgs"] == 66
    assert found["n_candidates"] == len(found["candidates_ms"]) == 5
    assert concurrent_tuning.clear() == 1
    assert concurrent_tuning.load_db() == {}
    assert not (place / "concurrent.all_reduce.json").exists()
    with pytest.raises(ArgumentError, match="one of all_gather"):
        concurrent_tuning.cache_path("gather")


@pytest.mark.parametrize(("command", "text"), [(derive, "--least-cases"), (collect, "--budget-s")])
def test_commands_say_what_they_take(command, text, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    assert text in capsys.readouterr().out
