"""``tune=True`` of the collectives, with times that the tests give; values are integers, so results are exact."""

import json
import os
from functools import partial

import pytest
import torch

from iris.ccl import Config, _candidates
from iris.ccl.choice import query_of
from iris.errors import ArgumentError, CaptureError, RankMismatch
from iris.tuning import autotune

OPERATIONS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast")
slow = partial(pytest.param, marks=pytest.mark.slow)
# So many that every algorithm has a place, in whatever order the cost model puts them.
MOST = {"all_gather": 8, "all_reduce": 6, "all_to_all": 6}
every_operation = pytest.mark.parametrize("operation", OPERATIONS)


def everyones(ctx, n):
    world = ctx.get_num_ranks()
    return [torch.arange(n * world, dtype=torch.float32) % 7 + r for r in range(world)]


def arguments(ctx, operation, n=48):
    """Output, input and what the output must be."""
    world, rank = ctx.get_num_ranks(), ctx.get_rank()
    all_inputs = everyones(ctx, n)
    inp = ctx.full((n * world,), 0.0)
    inp.copy_(all_inputs[rank])
    expected = {
        "all_gather": torch.cat(all_inputs),
        "all_reduce": sum(all_inputs),
        "reduce_scatter": sum(all_inputs)[rank * n : (rank + 1) * n],
        "all_to_all": torch.cat([one[rank * n : (rank + 1) * n] for one in all_inputs]),
        "broadcast": all_inputs[0],
    }[operation]
    return ctx.full(expected.shape, float("nan")), inp, expected


def call(ctx, operation, out, inp, **given):
    if operation == "broadcast":
        return ctx.ccl.broadcast_tensor(out, inp if ctx.get_rank() == 0 else None, 0, **given)
    return getattr(ctx.ccl, operation)(out, inp, **given)


def check(ctx, out, expected):
    ctx.synchronize()
    assert torch.equal(out.cpu(), expected)


class Times:
    """The best time to one candidate, by the order in which they are asked for."""

    def __init__(self, best):
        self.best, self.order = best, []

    def __call__(self, ctx, candidate):
        if candidate.name not in self.order:
            self.order.append(candidate.name)
        return 1.0 if self.order.index(candidate.name) == self.best else 2.0


def body_tune(ctx, operation, place, best):
    out, inp, expected = arguments(ctx, operation)
    os.environ["IRIS_CACHE_DIR"] = place
    told = []
    try:
        with autotune.using(timer=Times(best), told=told.append, candidates=MOST.get(operation, 4)):
            call(ctx, operation, out, inp, tune=True)
            check(ctx, out, expected)
            out.fill_(float("nan"))
            ctx.barrier()
            call(ctx, operation, out, inp, tune=True, async_op=True).wait()
            check(ctx, out, expected)
    finally:
        del os.environ["IRIS_CACHE_DIR"]
    (tuning,) = told
    tried = [(t.candidate.name, t.candidate.algorithm, dict(t.candidate.params), t.failure) for t in tuning.trials]
    return tried, ctx.service("tuned").find(tuning.query, ctx.resolve_group(None)).name


@pytest.mark.parametrize(
    ("world", "operation"),
    [
        *((2, operation) for operation in OPERATIONS),
        (4, "all_reduce"),
        (3, "all_gather"),
        *(slow(4, operation) for operation in OPERATIONS if operation != "all_reduce"),
    ],
)
def test_tuning_finds_the_best_and_the_result_is_right(ranks, world, operation, tmp_path):
    answers = ranks(world).run(body_tune, operation, str(tmp_path), 2)
    assert all(answer == answers[0] for answer in answers)
    tried, winner = answers[0]
    assert [failure for _, _, _, failure in tried] == [""] * len(tried)
    assert tried[0][2] == {}
    assert tried[1][1] == "torch"
    assert 4 <= len(tried) <= MOST.get(operation, 4)
    assert {algorithm for _, algorithm, _, _ in tried} == {"torch", *_candidates.VARIANTS[operation]}
    assert winner == tried[2][0]
    # What a later program makes a configuration of does not name the algorithm twice.
    for _, algorithm, params, _ in tried:
        assert Config(**params, **{f"{operation}_variant": algorithm})
        assert f"{operation}_variant" not in params
    (record,) = json.loads((tmp_path / "tuned" / f"{operation}.json").read_text())["records"].values()
    assert (record["name"], record["algorithm"]) == (winner, tried[2][1])


def body_in_place(ctx, place):
    """What is combined in place is not combined by the calls that are timed."""
    _, inp, expected = arguments(ctx, "all_reduce", n=40)
    n = expected.numel() // ctx.get_num_ranks()
    whole = ctx.full((expected.numel(),), 0.0)
    whole.copy_(inp)
    own = whole[ctx.get_rank() * n : (ctx.get_rank() + 1) * n]
    os.environ["IRIS_CACHE_DIR"] = place
    told = []
    try:
        with autotune.using(timer=Times(1), told=told.append, candidates=5):
            call(ctx, "all_reduce", inp, inp, tune=True)
            check(ctx, inp, expected)
            call(ctx, "reduce_scatter", own, whole, tune=True)
            check(ctx, own, expected[ctx.get_rank() * n : (ctx.get_rank() + 1) * n])
    finally:
        del os.environ["IRIS_CACHE_DIR"]
    return [{t.candidate.algorithm for t in tuning.trials} for tuning in told]


@pytest.mark.parametrize("world", [2])
def test_tensors_that_are_combined_in_place_keep_their_values_while_algorithms_are_timed(ranks, world, tmp_path):
    for reduced, scattered in ranks(world).run(body_in_place, str(tmp_path)):
        assert "one_shot" not in reduced  # it cannot work in place
        assert {"torch", "push", "two_shot"} <= reduced
        assert "two_shot" in scattered


def body_untuned(ctx, operation):
    ctx.service("tuned").forget()  # rank processes keep their context from test to test
    out, inp, expected = arguments(ctx, operation)
    reason = call(ctx, operation, out, inp, tune=True).plan.reason
    check(ctx, out, expected)
    return reason, call(ctx, operation, out, inp).plan.reason


@pytest.mark.interpreted("where kernels are compiled such calls are tuned")
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", *map(slow, ("all_gather", "all_to_all"))])
@pytest.mark.parametrize("world", [2])
def test_under_the_interpreter_nothing_is_tuned_and_the_plan_says_so(ranks, world, operation):
    for reason, usual in ranks(world).run(body_untuned, operation):
        assert autotune.INTERPRETED in reason
        assert autotune.INTERPRETED not in usual


def body_nothing(ctx):
    reasons = []
    with autotune.using(timer=Times(0)):
        empty = ctx.full((0,), 0.0)
        reasons.append(ctx.ccl.all_reduce(empty, empty, tune=True).plan.reason)
        tiles = ctx.full((32, 64), 1.0)
        reasons.append(ctx.ccl.reduce_scatter(ctx.full((32, 64), 0.0), tiles, tune=True).plan.reason)
        alone = ctx.full((8,), 1.0)
        reasons.append(ctx.ccl.all_reduce(alone, alone, group=[ctx.get_rank()], tune=True).plan.reason)
    ctx.barrier()
    return reasons


@pytest.mark.parametrize("world", [2])
def test_where_there_is_nothing_to_tune_the_plan_says_so(ranks, world):
    for empty, tiles, alone in ranks(world).run(body_nothing):
        assert "nothing to exchange" in empty
        assert "which tiles a rank owns" in tiles
        assert "nothing to exchange" in alone


def body_refused(ctx, operation):
    out, inp, _ = arguments(ctx, operation)
    with pytest.raises(ArgumentError, match=f"{operation}: tune=True finds the configuration"):
        call(ctx, operation, out, inp, config=Config(comm_sms=2), tune=True)
    ctx.capturing = lambda stream=None: True
    try:
        with pytest.raises(CaptureError):
            call(ctx, operation, out, inp, tune=True)
    finally:
        del ctx.capturing


@pytest.mark.parametrize("operation", ["all_gather", *map(slow, OPERATIONS[1:])])
@pytest.mark.parametrize("world", [2])
def test_a_configuration_or_a_capture_leaves_nothing_to_tune(ranks, world, operation):
    ranks(world).run(body_refused, operation)


def body_disagree(ctx):
    out, inp, _ = arguments(ctx, "all_gather", n=11)
    call(ctx, "all_gather", out, inp, tune=ctx.get_rank() == 0)


@pytest.mark.parametrize("world", [2])
def test_ranks_that_do_not_all_tune_are_told(ranks, world):
    for outcome in ranks(world).run_expecting(body_disagree):
        assert isinstance(outcome.error, RankMismatch)
        assert "tune is True on rank 0, False on rank 1" in str(outcome.error)


def body_candidates(ctx, operation, most):
    out, inp, _ = arguments(ctx, operation, n=4096)
    module = __import__(f"iris.ccl.{operation}", fromlist=["x"])
    inp = inp if operation != "broadcast" or ctx.get_rank() == 0 else None
    extra = {"all_gather": (0,), "all_to_all": (0,)}.get(operation, ())
    given = {"broadcast": (ctx, out, inp, 0, None, None)}.get(operation)
    if given is None and operation in ("all_reduce", "reduce_scatter"):
        given = (ctx, out, inp, None, None, None)
    request = module._request(*(given or (ctx, out, inp, None, None, *extra)))
    prepared = module._prepare(request)
    counted = out if operation in ("all_gather", "broadcast") else inp if inp is not None else out
    query = query_of(ctx, operation, request.members, counted.numel() * counted.element_size(), counted.dtype)
    ways = _candidates.candidates(request, module._prepare, prepared, query, most)
    return [(name, algorithm, config) for name, (algorithm, config) in ways.items()]


@every_operation
@pytest.mark.parametrize("most", [8, slow(2), slow(4)])
@pytest.mark.parametrize("world", [2])
def test_candidates_are_the_same_on_every_rank_and_no_more_than_asked_for(ranks, world, operation, most):
    first, second = ranks(world).run(body_candidates, operation, most)
    assert first == second
    assert len(first) <= most
    assert first[0][2] is None
    assert first[1][1] == "torch"
    assert len({name for name, _, _ in first}) == len(first)


def test_every_variant_that_repeats_its_bits_is_tried():
    from iris.ccl.config import VARIANTS

    for operation, variants in VARIANTS.items():
        assert set(variants) - {"torch", "atomic", "spinlock"} == set(_candidates.VARIANTS[operation])
