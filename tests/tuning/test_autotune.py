"""Tuning on ranks of the simulator, with times that the tests give: what is tried, what is left out, who decides."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from iris.errors import ArgumentError, RankMismatch, UnsupportedError, WaitTimeout
from iris.runtime.groups import Group
from iris.runtime.logs import logger
from iris.tuning import autotune, store
from iris.tuning.autotune import Candidate, params_of
from iris.tuning.query import Query, config_key
from simulated_ranks import SimulatedRanks

worlds = pytest.mark.parametrize("world", [1, 2, 4])


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(store, "_warned", set())
    return tmp_path / "tuned"


def query(ctx, **other):
    world, sizes = ctx.get_num_ranks(), (("M", 64), ("N", 64), ("K", 32))
    known = Query("all_gather_matmul", "", ctx.target.arch, "interpreted", world, 8, "float16", sizes)
    return replace(known, **other)


class Case:
    """Candidates with the times that they take, by rank, which may be an error; counts their calls."""

    def __init__(self, ctx, times, fails=None):
        self.ctx, self.times, self.fails, self.calls = ctx, times, fails or {}, dict.fromkeys(times, 0)

    def of(self, name, by_name):
        given = by_name.get(name)
        return given[self.ctx.get_rank()] if isinstance(given, list) else given

    def call(self, name):
        error = self.of(name, self.fails)
        if error is not None:
            raise error
        self.calls[name] += 1

    def candidates(self, names=None):
        return [
            Candidate(name, "torch" if name == "torch" else "pull", {} if name == "torch" else {"name": name},
                      lambda name=name: self.call(name))
            for name in names or self.times
        ]  # fmt: skip

    def timer(self, ctx, candidate):
        given = self.of(candidate.name, self.times)
        if isinstance(given, Exception):
            raise given
        return given() if callable(given) else given

    def tune(self, names=None, members=None):
        with autotune.timed_by(self.timer):
            return autotune.tune(
                self.ctx, members or self.ctx.resolve_group(None), query(self.ctx), self.candidates(names)
            )


def found(tuning):
    """What can leave a rank."""
    record = tuning.record
    trials = [(t.candidate.name, t.milliseconds, t.failure) for t in tuning.trials]
    return record.name, record.key, record.default_key, record.milliseconds, trials, str(tuning.path or ""), str(tuning)


def body(ctx, times, fails=None):
    case = Case(ctx, times, fails)
    ctx.service("tuned").forget()
    return found(case.tune()), case.calls


def run(world, function, *args):
    return SimulatedRanks(world, "sim").run(function, *args)


@worlds
def test_the_fastest_wins_on_every_rank_and_is_saved_once(world, place):
    answers = run(world, body, {"default": 2.0, "torch": 3.0, "wide": 1.0, "narrow": 1.5})
    for name, key, default_key, ms, trials, _, _ in (answer for answer, _ in answers):
        assert (name, ms) == ("wide", 1.0)
        assert key == config_key("pull", {"name": "wide"})
        assert default_key == config_key("pull", {"name": "default"})
        assert trials == [("default", 2.0, ""), ("torch", 3.0, ""), ("wide", 1.0, ""), ("narrow", 1.5, "")]
    paths = [answer[5] for answer, _ in answers]
    assert paths == [str(place / "all_gather_matmul.json"), *[""] * (world - 1)]
    (saved,) = store.read_all().values()
    assert (saved.name, saved.milliseconds, saved.torch_milliseconds, saved.speedup) == ("wide", 1.0, 3.0, 3.0)
    assert saved.default_milliseconds == 2.0
    assert saved.candidates == (("default", 2.0), ("torch", 3.0), ("wide", 1.0), ("narrow", 1.5))
    assert "ranks" in saved.source
    assert not saved.emulated


def test_every_candidate_is_called_in_compile_only_mode_and_once_for_real():
    # What PyTorch does cannot be compiled first, so it is called once.
    ((_, calls),) = run(1, body, {"default": 2.0, "torch": 3.0, "wide": 1.0})
    assert calls == {"default": 2, "torch": 1, "wide": 2}


@pytest.mark.parametrize(
    ("ms", "winner"), [(1.0, "default"), (0.9901, "default"), (0.9899, "other"), (2.0, "default"), (0.5, "other")]
)
def test_the_default_stays_unless_another_is_faster_by_more_than_the_noise(ms, winner):
    ((answer, _),) = run(1, body, {"default": 1.0, "torch": 4.0, "other": ms})
    assert answer[0] == winner


def test_the_unfused_way_may_win():
    ((answer, _),) = run(1, body, {"default": 2.0, "torch": 1.0, "other": 1.5})
    assert answer[:2] == ("torch", config_key("torch", {}))


def test_the_slowest_rank_decides():
    # On rank 0 alone "uneven" would win, on rank 1 "default" would.
    times = {"default": [3.0, 2.0], "torch": 9.0, "uneven": [1.0, 4.0], "even": [2.5, 2.5]}
    for answer, _ in run(2, body, times):
        assert answer[0] == "even"
        assert [ms for _, ms, _ in answer[4]] == [3.0, 9.0, 4.0, 2.5]


def test_the_median_counts_and_not_an_outlier():
    def jumping():
        values = iter([100.0, *([1.0, 1.0, 50.0] * 100)])
        return lambda: next(values)

    ((answer, _),) = run(1, body, {"default": 2.0, "torch": 3.0, "jumping": jumping()})
    assert answer[0] == "default"  # out after its first time
    values = iter([2.0, *([1.0, 1.0, 50.0] * 100)])
    ((answer, _),) = run(1, body, {"default": 2.1, "torch": 3.0, "jumping": lambda: next(values)})
    assert (answer[0], answer[3]) == ("jumping", 1.0)


def test_a_hopeless_candidate_is_timed_once_and_the_default_always():
    counts = {"default": 0, "slow": 0, "fast": 0}

    def counted(name, ms):
        def time():
            counts[name] += 1
            return ms

        return time

    run(1, body, {name: counted(name, ms) for name, ms in (("default", 100.0), ("slow", 4.0), ("fast", 1.0))})
    assert counts["slow"] == 1
    assert counts["default"] == counts["fast"] > autotune.LEAST_ROUNDS


@worlds
@pytest.mark.parametrize("error", [ArgumentError("too large"), RuntimeError("driver"), MemoryError("full")])
def test_what_fails_on_one_rank_is_dropped_on_all_with_the_reason(world, error):
    answers = run(world, body, {"default": 2.0, "torch": 3.0, "bad": 1.0}, {"bad": [None] * (world - 1) + [error]})
    for answer, _ in answers:
        assert answer[0] == "default"
        name, ms, failure = answer[4][2]
        assert (name, ms) == ("bad", None)
        assert failure == f"{'' if world == 1 else f'rank {world - 1}: '}{type(error).__name__}: {error}"
        assert failure in answer[6]
    (saved,) = store.read_all().values()
    assert dict(saved.candidates)["bad"] is None


@worlds
def test_what_fails_while_it_is_timed_on_one_rank_is_dropped_on_all(world):
    later = iter([1.0] * 3)
    times = {"default": 2.0, "torch": 3.0, "at first": [*[1.0] * (world - 1), RuntimeError("first")]}
    times["later"] = [*[1.0] * (world - 1), lambda: next(later)]
    for answer, _ in run(world, body, times):
        assert answer[0] == "default"
        assert [bool(failure) for _, _, failure in answer[4]] == [False, False, True, True]
        assert "first" in answer[4][2][2]
        assert "StopIteration" in answer[4][3][2]


def test_what_fails_alike_everywhere_is_said_once():
    for answer, _ in run(2, body, {"default": 2.0, "bad": 1.0}, {"bad": RuntimeError("no such instruction")}):
        assert answer[4][1][2] == "RuntimeError: no such instruction"


def test_the_default_may_fail():
    for answer, _ in run(2, body, {"default": 2.0, "torch": 3.0}, {"default": [None, RuntimeError("here")]}):
        assert answer[0] == "torch"
        assert answer[4][0][1] is None
    (saved,) = store.read_all().values()
    assert saved.default_milliseconds is None


def test_all_may_fail():
    outcomes = SimulatedRanks(2, "sim").run_expecting(
        body, {"default": 2.0}, {"default": RuntimeError("nothing works")}
    )
    for outcome in outcomes:
        assert isinstance(outcome.error, UnsupportedError)
        assert "default: RuntimeError: nothing works" in str(outcome.error)
    assert store.read_all() == {}


def test_a_wait_in_vain_ends_tuning():
    ((outcome),) = SimulatedRanks(1, "sim").run_expecting(
        body, {"default": 2.0, "stuck": 1.0}, {"stuck": WaitTimeout("a wait did not end", ())}
    )
    assert isinstance(outcome.error, WaitTimeout)


def body_meeting(ctx):
    """A candidate that fails on one rank while the others wait for it in the same call."""
    case = Case(ctx, {"default": 2.0, "torch": 3.0, "meets": 1.0, "last": 1.5})

    def meets():
        if ctx.get_rank() == 1:
            raise RuntimeError("not here")
        ctx.exchange.all_gather("a call", None)

    candidates = case.candidates()
    candidates[2] = Candidate("meets", "pull", {"name": "meets"}, meets)
    with autotune.timed_by(case.timer):
        tuning = autotune.tune(ctx, ctx.resolve_group(None), query(ctx), candidates)
    ctx.barrier()
    return found(tuning)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_wait_for_one_that_failed_learn_of_it(world):
    for answer in run(world, body_meeting):
        assert answer[0] == "last"
        assert "rank 1: RuntimeError: not here" in answer[4][2][2]


def body_twice(ctx, again):
    case = Case(ctx, {"default": 2.0, "wide": 1.0})
    first = case.tune()
    before = dict(case.calls)
    if again:
        ctx.service("tuned").forget()
    second = case.tune()
    return found(first)[:4], found(second)[:4], second.trials == (), case.calls == before, str(second)


@worlds
def test_a_case_that_was_tuned_is_not_tuned_again_unless_asked(world):
    for first, second, untried, uncalled, text in run(world, body_twice, False):
        assert first == second
        assert untried
        assert uncalled
        assert "as tuned before" in text
    for first, second, untried, uncalled, _ in run(world, body_twice, True):
        assert first == second
        assert not untried
        assert not uncalled


def body_cached(ctx):
    case = Case(ctx, {"default": 2.0, "wide": 1.0})
    return case.tune().trials == (), sum(case.calls.values())


@worlds
def test_a_later_context_finds_what_an_earlier_one_tuned(world):
    assert all(not hit for hit, _ in run(world, body_cached))
    assert run(world, body_cached) == [(True, 0)] * world


def body_other_default(ctx):
    case = Case(ctx, {"default": 2.0, "wide": 1.0, "new default": 1.5})
    case.tune(["default", "wide"])
    return found(case.tune(["new default", "wide"]))


def test_a_record_that_was_measured_against_another_default_does_not_count():
    (answer,) = run(1, body_other_default)
    assert answer[4][0][0] == "new default"
    assert answer[2] == config_key("pull", {"name": "new default"})


def body_split(ctx, knowing):
    """Ranks that know different things of a case, which a broken program or disk can bring about."""
    case = Case(ctx, {"default": 2.0, "wide": 1.0})
    members = ctx.resolve_group(None)
    if ctx.get_rank() in knowing:
        record = store.Record("wide", "pull", {"name": "wide"}, query(ctx).sizes, 1.0, None, None, "s")
        ctx.service("tuned")._learnt[members.ranks, query(ctx)] = store.as_record(record, case.candidates()[0].key)
    return len(case.tune().trials), sum(case.calls.values())


@pytest.mark.parametrize("knowing", [[0], [1], [0, 1]])
def test_all_ranks_tune_unless_all_know_the_same(knowing):
    hit = len(knowing) == 2
    assert run(2, body_split, knowing) == [(0, 0) if hit else (2, 4)] * 2


def body_different(ctx, what):
    case = Case(ctx, {"default": 2.0, "wide": 1.0, "narrow": 1.5})
    odd = ctx.get_rank() == 1
    with autotune.timed_by(case.timer):
        asked = query(ctx, units=9 if odd and what == "cases" else 8)
        names = ["default", "narrow" if odd and what == "candidates" else "wide"]
        autotune.tune(ctx, ctx.resolve_group(None), asked, case.candidates(names))


@pytest.mark.parametrize("what", ["cases", "candidates"])
def test_ranks_with_different_cases_or_candidates_are_told(what):
    for outcome in SimulatedRanks(2, "sim").run_expecting(body_different, what):
        assert isinstance(outcome.error, RankMismatch)
        assert f"different {what}" in str(outcome.error)


def body_groups(ctx):
    """Two groups tune the same case at the same time and come to different results."""
    rank = ctx.get_rank()
    members = ctx.resolve_group([0, 1] if rank < 2 else [2, 3])
    case = Case(ctx, {"default": 2.0, "first": [1.0, 1.0, 3.0, 3.0], "second": [3.0, 3.0, 1.0, 1.0]})
    tuning = case.tune(members=members)
    tuned = ctx.service("tuned")
    return (
        tuning.record.name,
        tuned.find(query(ctx), members).name,
        tuned.find(query(ctx), ctx.resolve_group(None)),
        bool(tuning.path),
    )


def test_groups_tune_by_themselves():
    first, second = ("first", "first", None), ("second", "second", None)
    assert run(4, body_groups) == [(*first, True), (*first, False), (*second, True), (*second, False)]


def body_forgetting(ctx):
    calls = ctx.service("ccl_calls")
    calls.remember(("key",), "call")
    before = calls.recall(("key",))
    Case(ctx, {"default": 2.0, "wide": 1.0}).tune()
    return before, calls.recall(("key",))


def test_remembered_calls_are_forgotten_when_something_was_learnt():
    assert run(1, body_forgetting) == [("call", None)]


def body_nowhere(ctx):
    return found(Case(ctx, {"default": 2.0, "wide": 1.0}).tune())[:6:5], ctx.service("tuned").find(
        query(ctx), ctx.resolve_group(None)
    ).name


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert run(2, body_nowhere) == [(("wide", ""), "wide")] * 2


def body_interpreted(ctx):
    reason = autotune.pointless(ctx)
    with autotune.timed_by(lambda ctx, candidate: 1.0):
        return reason, autotune.pointless(ctx)


def body_checked(ctx):
    """The result of a candidate is looked at after its first call, and one that is wrong is out on all ranks."""
    case = Case(ctx, {"default": 2.0, "wrong": 1.0, "right": 1.5})
    told, checked = [], []

    def check():
        called = [name for name, count in case.calls.items() if count == 2][len(checked)]
        checked.append(called)
        if called == "wrong" and ctx.get_rank() == 1:
            raise ArgumentError("element (0, 1) is 3, not 4")

    with autotune.using(check=check, told=told.append, budget_s=0.1):
        tuning = case.tune()
    return found(tuning), checked, told == [tuning]


def test_results_are_checked_when_a_check_is_given():
    for answer, checked, told in run(2, body_checked):
        assert answer[0] == "right"
        assert answer[4][1][2] == "rank 1: ArgumentError: element (0, 1) is 3, not 4"
        assert checked == ["default", "wrong", "right"]
        assert told


def test_nothing_is_tuned_under_the_interpreter_without_a_given_timer():
    assert run(2, body_interpreted) == [(autotune.INTERPRETED, "")] * 2


def test_a_report_names_each_candidate_its_time_or_fault_and_the_winner():
    ((answer, _),) = run(1, body, {"default": 2.0, "wide": 1.0, "bad": 1.0}, {"bad": RuntimeError("no luck")})
    lines = answer[6].splitlines()
    assert "all_gather_matmul 64x64x32 float16, 1 ranks of interpreter" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["default", "wide", "bad"]
    assert ["<- taken" in line for line in lines] == [False, False, True, False]
    assert "2.0000 ms" in lines[1]
    assert "no luck" in lines[3]


def test_the_first_rank_says_what_goes_on():
    lines = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: lines.append((record.iris_rank, record.getMessage()))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        run(2, body, {"default": 2.0, "wide": 1.0})
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    told = [text for rank, text in lines if "tun" in text]
    assert {rank for rank, text in lines if "tun" in text} == {0}
    assert "2 candidates" in told[0]
    assert "<- taken" in told[-1]


class Recorder:
    """A context and a device that write down what is asked of them."""

    runtime = "gpu"

    def __init__(self, monkeypatch):
        self.done = []
        self.ticks = iter(range(1000))
        monkeypatch.setattr(autotune, "GpuTimer", lambda device: self)
        monkeypatch.setattr(autotune.torch.cuda, "_sleep", lambda cycles: self.done.append(("sleep", cycles)))
        monkeypatch.setattr(autotune.torch.cuda, "Event", lambda enable_timing: Stamp(self))
        self.synchronize = partial(self.done.append, "synchronize")
        self.flush = partial(self.done.append, "flush")
        self.device_barrier = lambda ranks: self.done.append(("meet", ranks))

    def get_num_ranks(self):
        return 4

    def get_device(self):
        return "cuda:0"

    def current_stream(self):
        return "stream"


class Stamp:
    def __init__(self, device):
        self.device = device

    def record(self, stream):
        assert stream == "stream"
        self.tick = next(self.device.ticks)
        self.device.done.append("stamp")

    def elapsed_time(self, end):
        return end.tick - self.tick


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (3, 1)])
def test_a_call_is_timed_on_the_device_from_where_the_ranks_have_met(monkeypatch, ranks):
    device = Recorder(monkeypatch)
    candidate = Candidate("one", "pull", {}, lambda: device.done.append("call"))
    clock = autotune._Clock(device, Group(ranks, 0))
    clock.warm(candidate)
    met = ("meet", None if len(ranks) == 4 else ranks)
    assert device.done == [met, "call", "synchronize"] * 2
    device.done.clear()
    times = []
    clock.sample(candidate, times)
    assert times == [1]
    flush, (slept, cycles), *rest = device.done
    assert (flush, slept) == ("flush", "sleep")
    assert rest == [met, "stamp", "call", "stamp", "synchronize"]
    # The device sleeps while the host issues the call, also where that takes long, but not for ever.
    assert cycles >= 200 * 2000
    clock._busy_us["one"] = 1e9
    device.done.clear()
    clock.sample(candidate, times)
    assert cycles < device.done[1][1] < 1e9


def test_parameters_are_the_fields_without_their_defaults():
    @dataclass(frozen=True)
    class Config:
        a: int
        b: int = 2
        c: str = "x"

    assert params_of(None) == {}
    assert params_of(Config(1)) == {"a": 1}
    assert params_of(Config(1, 3, "x")) == {"a": 1, "b": 3}


def test_kernels_are_compiled_side_by_side_without_being_launched():
    worker = Path(__file__).with_name("_compile_worker.py")
    environment = {**os.environ, "IRIS_RUNTIME": "gpu"}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, str(worker)], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["launches"] == 5
    assert answer["references"] == ["_StandIn", "_StandIn", "int"]
    # The second kernel is wrong, and costs no other.
    for attempt in ("first", "again"):
        assert [bool(failure) for failure in answer[attempt]] == [False, True, False, False, False]
        assert "no_such_name" in answer[attempt][1]
    assert "needs 16384 bytes of shared memory, the device has 1024" in answer["small"][2]
    # By alignment; a kernel that is wanted twice is compiled once.
    assert answer["compiled"] == ["CompiledKernel"] * 2
    assert answer["kept"]
    assert answer["nothing"] == []
