"""What is called, in which order, how often, and what the figures are."""

import time
from types import SimpleNamespace

import pytest
import torch

from iris import bench
from iris.bench import _measure
from iris.bench._options import parse
from iris.bench._sweep import Sweep
from iris.bench.results import Result, compare
from iris.bench.state import Candidate, State
from iris.errors import ArgumentError
from iris.runtime import timing


def test_slow_first_calls_are_excluded(measure):
    calls = []

    @bench.register
    def slow_start(state, ctx):
        def fn():
            calls.append(None)
            time.sleep(0.2 if len(calls) <= 3 else 0.001)

        state.exec(fn)

    (result,) = measure("--n_warmup=3", "--n_repeat=9")
    assert len(calls) == 1 + 3 + 9
    assert 1.0 <= result.gpu_time_ms < 100
    assert result.quartiles_ms[2] < 100
    assert (result.n_warmup, result.n_repeat) == (3, 9)


def test_candidates_take_turns(measure):
    log = []

    @bench.register
    def three(state, ctx):
        for name in "ABC":
            state.candidate(
                name,
                lambda n=name: log.append(n),
                preamble_fn=lambda n=name: log.append(n.lower()),
                baseline=name == "B",
            )

    results = measure("--n_warmup=2", "--n_repeat=3")
    assert log == list("aAbBcC") * (1 + 2 + 3)
    assert [r.candidate for r in results] == ["A", "B", "C"]
    assert all(set(r.speedups) == {"B"} for r in results)
    assert results[1].speedups["B"] == 1.0
    assert results[0].speedups["B"] == pytest.approx(results[1].gpu_time_ms / results[0].gpu_time_ms)


def test_an_alternating_axis_takes_turns_and_keeps_the_order(measure, monkeypatch):
    log, seconds, now = [], {"torch": 0.02, "fused": 0.0125, "gemm": 0.01}, [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    @bench.register
    @bench.axis(
        "algorithm",
        ["torch", "fused", "gemm"],
        alternate=True,
        baseline=["torch", "gemm"],
        roles={"torch": "communication+compute", "gemm": "compute"},
    )
    @bench.axis("M", [1, 2])
    def op(state, ctx):
        def fn():
            log.append((state["M"], state["algorithm"]))
            now[0] += seconds[state["algorithm"]]

        state.set_flops(1e9)
        state.exec(fn)

    results = measure("--n_warmup=0", "--n_repeat=3")
    assert log == [(m, a) for m in (1, 2) for _ in range(1 + 3) for a in seconds]
    # The outermost axis is the slowest of the output all the same.
    assert [(r.params["algorithm"], r.params["M"]) for r in results] == [(a, m) for a in seconds for m in (1, 2)]
    for result in results[2:4]:
        assert result.gpu_time_ms == pytest.approx(12.5)
        assert result.speedups == pytest.approx({"torch": 1.6, "gemm": 0.8})
        assert result.hidden_pct == pytest.approx(75)
        assert result.tflops == pytest.approx(0.08)
    assert all(r.hidden_pct is None for r in results[:2] + results[4:])


def test_a_count_of_the_command_line_goes_before_the_scripts(measure):
    calls = []

    @bench.register
    def counted(state, ctx):
        state.set_warmup(4)
        state.set_repeat(5)
        state.exec(lambda: calls.append(None))

    bench.main(["--axis_num_ranks=1"])
    assert len(calls) == 1 + 4 + 5
    calls.clear()
    measure()
    assert len(calls) == 1 + 1 + 2


def test_figures_of_samples():
    result = Result("b", {}, None, [])
    result.take_samples([[4.0, 1.0, 2.0], [10.0, 5.0, 3.0], [4.0, 4.0, 4.0]], flops=5e12, nbytes=1e9)
    assert result.gpu_time_ms == 5.0
    assert result.local_times_ms == [2.0, 5.0, 4.0]
    assert result.min_time_ms == 2.0
    assert result.skew_pct == 60.0
    assert result.tflops == 1000.0
    assert result.bandwidth_gbps == 200.0
    assert result.quartiles_ms == [4.0, 5.0, 7.5]
    assert result.fastest_ms == 3.0


def test_hidden_communication_takes_the_best_of_each_role():
    times = {"slow gemm": 7.0, "gemm": 4.0, "sequence": 8.0, "slow sequence": 20.0, "fused": 5.0, "worse": 9.0}
    results = {name: Result("b", {}, t, [t], candidate=name) for name, t in times.items()}
    roles = {name: "compute" if "gemm" in name else "communication+compute" for name in list(times)[:4]}
    compare(results, ["sequence"], roles)
    assert results["fused"].hidden_pct == 75.0
    assert results["worse"].hidden_pct == -25.0
    assert results["gemm"].hidden_pct is None
    assert results["fused"].hidden_of_possible_pct is None
    assert results["fused"].speedups == {"sequence": 1.6}


def test_nothing_is_hidden_beyond_the_longer_of_the_two():
    for gather, wanted in ((6.0, 150.0), (3.0, 75.0), (8.0, None)):
        times = {"gather": gather, "slow gather": 30.0, "gemm": 4.0, "sequence": 8.0, "fused": 5.0}
        results = {name: Result("b", {}, t, [t], candidate=name) for name, t in times.items()}
        roles = {"gather": "communication", "slow gather": "communication", "gemm": "compute"}
        compare(results, [], roles | {"sequence": "communication+compute"})
        assert results["fused"].hidden_pct == 75.0
        assert results["fused"].hidden_of_possible_pct == wanted
        assert results["gather"].hidden_of_possible_pct is None


def test_the_times_of_some_ranks_count(measure):
    @bench.register
    @bench.axis("num_ranks", [3])
    def one_works(state, ctx):
        rank = ctx.get_rank()
        state.set_timed_ranks([1])
        state.add_note("rank 1 alone is timed")
        state.add_counter("takes", "a word")
        state.exec(lambda: time.sleep(0.03 if rank == 1 else 0.15 * (rank == 2)))

    (result,) = measure(world=3)
    assert 30 <= result.gpu_time_ms < 150
    assert len(result.local_times_ms) == 1
    assert (result.timed_ranks, result.note, result.counters) == ([1], "rank 1 alone is timed", {"takes": "a word"})

    @bench.register
    @bench.axis("num_ranks", [2])
    def too_far(state, ctx):
        state.set_timed_ranks([2])
        state.exec(lambda: None)

    (result,) = measure("--benchmark_filter=too_far", world=2, fails=True)
    assert "set_timed_ranks: [2] of 2 ranks" in result.error
    with pytest.raises(ArgumentError, match="nothing would be timed"):
        State({}).set_timed_ranks([])


def test_a_graph_without_a_gpu_is_said(measure):
    @bench.register
    def graphed(state, ctx):
        state.use_graph()
        state.exec(lambda: None)

    (result,) = measure()
    assert not result.graph
    assert result.note.startswith("not captured in a graph, calls are timed: rank 0: there is no GPU")


def test_what_a_state_refuses(measure):
    seen = []

    @bench.register
    @bench.axis("M", [3])
    def refused(state, ctx):
        assert state["M"] == 3
        assert state.get("K", 7) == 7
        for error, message, call in (
            (KeyError, "no axis 'N'; the axes are num_ranks, M", lambda: state["N"]),
            (ArgumentError, "flops must be at least 0", lambda: state.set_flops(-1)),
            (ArgumentError, "repeat must be at least 1", lambda: state.set_repeat(0)),
            (ArgumentError, "possible: stream, host", lambda: state.set_meeting("cafe")),
            (ArgumentError, "fn must be a function", lambda: state.exec(3)),
            (ArgumentError, "role 'x' is not known", lambda: state.candidate("a", print, role="x")),
            (ArgumentError, "not be empty", lambda: state.candidate("", print)),
        ):
            with pytest.raises(error, match=message):
                call()
            seen.append(message)
        state.exec(lambda: None)
        with pytest.raises(ArgumentError, match="name several"):
            state.exec(lambda: None)
        with pytest.raises(ArgumentError, match="taken: that of exec"):
            state.candidate("a", lambda: None)

    measure()
    assert len(seen) == 7


def test_nothing_to_time_is_an_error(measure):
    @bench.register
    def idle(state, ctx):
        pass

    with pytest.raises(RuntimeError, match="benchmark idle has not said what to time"):
        measure()


def test_tensors_of_a_combination_are_given_back(measure):
    used = []

    @bench.register
    @bench.axis("M", [1, 2, 3])
    def large(state, ctx):
        used.append(ctx.heap.reserved_bytes)
        tensor = ctx.zeros(1 << 16, dtype=torch.float32)
        state.exec(lambda: tensor.fill_(state["M"]))

    measure("--heap_size=300000")
    assert used == [0, 0, 0]


class FakeGpu:
    """A context and a timer that write down what is asked of them; the host needs 2 ms for a call."""

    runtime = "gpu"

    def __init__(self, monkeypatch):
        self.log, self.now = [], 0.0
        monkeypatch.setattr(_measure, "timer_of", lambda device: self)
        monkeypatch.setattr(_measure.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.log.append(f"sleep {cycles // 2500}"))

    def __getattr__(self, name):
        if name not in ("barrier", "device_barrier", "synchronize", "flush"):
            raise AttributeError(name)
        return lambda: self.log.append(name)

    def get_device(self):
        return torch.device("cuda:0")

    def get_num_ranks(self):
        return 4

    def measure(self, fn, keep):
        self.log.append("keep" if keep else "warm up")
        fn()
        self.now += 0.002

    def samples(self):
        return list(range(self.log.count("keep")))


def runner(log, name, **values):
    candidate = Candidate(name, lambda: log.append(name), lambda: log.append(f"prepare {name}"))
    return _measure.Runner(candidate, [], **values, call=candidate.fn)


def test_the_order_of_things_on_a_gpu(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    cold = runner(gpu.log, "a", cold_cache=True, meeting="stream")
    warm = runner(gpu.log, "b", cold_cache=False, meeting="host")
    told = []
    samples = _measure.sample(gpu, [cold, warm], 2, 3, told.append)
    assert samples == [[0, 2, 4], [1, 3, 5]]
    assert told == [0, 1] * 6

    def of_a(hold, kept):
        return ["barrier", "prepare a", "flush", f"sleep {hold}", "device_barrier", kept, "a", "synchronize"]

    def of_b(kept):
        return ["barrier", "prepare b", "barrier", kept, "b", "synchronize"]

    first = [step for x in "ab" for step in ("barrier", f"prepare {x}", "barrier", x, "synchronize")]
    warming = [*of_a(200, "warm up"), *of_b("warm up"), *of_a(6000, "warm up"), *of_b("warm up")]
    assert gpu.log == [*first, *warming, *(of_a(6000, "keep") + of_b("keep")) * 3, "barrier"]


def test_ranks_that_share_the_host_are_waited_for(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    gpu.runtime = "loopback"
    _measure.sample(gpu, [runner(gpu.log, "a", cold_cache=False, meeting="stream")], 1, 1, lambda _: None)
    assert [entry for entry in gpu.log if entry.startswith("sleep")] == ["sleep 800", "sleep 24000"]


def test_options_go_before_the_script_and_the_script_before_the_defaults():
    def ways(argv, *, interpreted=False, script=True):
        sweep, state = object.__new__(Sweep), State({})
        sweep.options, sweep.interpreted = parse(argv, []), interpreted
        if script:
            state.set_warmup(7)
            state.set_repeat(8)
            state.set_cold_cache(False)
            state.set_meeting("host")
        return sweep._warmup(state), sweep._repeat(state), sweep._cold(state), sweep._meeting(state)

    assert ways([], script=False) == (25, 100, True, "stream")
    assert ways([], script=False, interpreted=True) == (1, 3, True, "host")
    assert ways([]) == (7, 8, False, "host")
    assert ways(["--n_warmup=0", "--n_repeat=1", "--cache=cold", "--meet=stream"]) == (0, 1, True, "stream")
