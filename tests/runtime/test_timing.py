"""do_bench: what is measured, in which order things are called, and what the numbers are."""

import statistics
import time

import numpy as np
import pytest
import torch

from iris.errors import ArgumentError, UnsupportedError
from iris.runtime import timing
from iris.runtime.timing import do_bench


class Clock:
    """Stands in for the host's clock; ``fn`` moves it, so the samples are known exactly."""

    def __init__(self, seconds):
        self.now = 100.0
        self.durations = iter(seconds)
        self.log = []

    def perf_counter(self):
        return self.now

    def fn(self):
        self.log.append("fn")
        self.now += next(self.durations)

    def barrier(self):
        self.log.append("barrier")
        self.now += 7.0

    def preamble(self):
        self.log.append("preamble")
        self.now += 3.0


@pytest.fixture
def clocked(monkeypatch):
    def bench(seconds, n_warmup, n_repeat, **kw):
        clock = Clock(seconds)
        monkeypatch.setattr(timing.time, "perf_counter", clock.perf_counter)
        result = do_bench(clock.fn, clock.barrier, clock.preamble, n_warmup, n_repeat, device="cpu", **kw)
        return result, clock

    return bench


def test_slow_first_calls_are_excluded():
    calls = []

    def fn():
        calls.append(None)
        time.sleep(0.5 if len(calls) <= 3 else 0.001)

    samples = do_bench(fn, n_warmup=3, n_repeat=20, return_mode="all", device="cpu")
    assert len(calls) == 1 + 3 + 20
    assert len(samples) == 20
    assert 1.0 <= statistics.median(samples) < 20
    assert max(samples) < 400


@pytest.mark.parametrize("mode", ["mean", "median", "min", "max", "all"])
def test_modes(clocked, mode):
    samples = np.random.default_rng().uniform(0.001, 0.1, 9)
    result, _ = clocked([50.0] * 4 + list(samples), 3, 9, return_mode=mode)
    expected = {"mean": np.mean, "median": np.median, "min": np.min, "max": np.max, "all": list}[mode](samples * 1e3)
    assert result == pytest.approx(expected)
    assert isinstance(result, list if mode == "all" else float)


def test_quantiles_come_from_the_same_samples(clocked):
    samples = np.random.default_rng().uniform(0.001, 0.1, 11)
    seconds = [50.0] * 6 + list(samples)
    values, _ = clocked(seconds, 5, 11, quantiles=[0.5, 0.99, 0, 1], return_mode="mean")
    assert values == pytest.approx(np.quantile(samples * 1e3, [0.5, 0.99, 0, 1]))
    assert values[0] == pytest.approx(clocked(seconds, 5, 11, return_mode="median")[0])
    assert values[2] == pytest.approx(clocked(seconds, 5, 11, return_mode="min")[0])
    assert values[3] == pytest.approx(clocked(seconds, 5, 11, return_mode="max")[0])
    for one in ([0.25], (0.25,), 0.25):
        value, _ = clocked(seconds, 5, 11, quantiles=one)
        assert value == pytest.approx(np.quantile(samples * 1e3, 0.25))


@pytest.mark.parametrize(("n_warmup", "n_repeat"), [(0, 1), (2, 3), (25, 100)])
def test_order_of_calls(clocked, n_warmup, n_repeat):
    samples, clock = clocked([1.0] * 200, n_warmup, n_repeat, return_mode="all")
    first = ["barrier", "preamble", "fn", "barrier"]
    each = ["barrier", "preamble", "barrier", "fn"]
    assert clock.log == first + each * (n_warmup + n_repeat) + ["barrier"]
    assert samples == pytest.approx([1000.0] * n_repeat)


def test_defaults():
    calls = []
    result = do_bench(lambda: calls.append(None), device="cpu")
    assert len(calls) == 126
    assert isinstance(result, float)
    assert 0 <= result < 1


@pytest.mark.parametrize(
    ("kw", "text"),
    [
        ({"return_mode": "fastest"}, "return_mode 'fastest' is not known; possible: mean, median, min, max, all"),
        ({"return_mode": "mode", "quantiles": [0.5]}, "possible: mean, median, min, max, all"),
        ({"quantiles": [0.5, 1.5]}, r"quantile 1.5 is not possible; values in \[0, 1\] are"),
        ({"quantiles": [-0.1]}, "quantile -0.1"),
        ({"quantiles": [float("nan")]}, "quantile nan"),
        ({"quantiles": []}, "quantiles is empty"),
        ({"n_repeat": 0}, "n_repeat must be at least 1, got 0"),
        ({"n_warmup": -1}, "n_warmup must be at least 0, got -1"),
    ],
)
def test_errors_come_before_the_first_call(kw, text):
    def fail():
        raise AssertionError("called")

    with pytest.raises(ArgumentError, match=text):
        do_bench(fail, fail, fail, device="cpu", **kw)


def test_counts_and_devices_of_the_wrong_kind():
    with pytest.raises(TypeError):
        do_bench(lambda: None, n_repeat=2.5)
    with pytest.raises(UnsupportedError, match="possible: cuda and cpu"):
        do_bench(lambda: None, device="meta")


def test_an_error_of_the_function_comes_through():
    with pytest.raises(ZeroDivisionError):
        do_bench(lambda: 1 / 0, device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_time_is_the_time_of_the_function():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    slept = []

    def fn():
        a @ a

    def preamble():
        time.sleep(0.005)
        slept.append(None)

    samples = do_bench(fn, preamble_fn=preamble, n_warmup=5, n_repeat=20, return_mode="all")
    assert len(slept) == 26
    assert len(samples) == 20
    # 1.1 TFLOP: more than 0.3 ms on any GPU of today, and far from the 5 ms of the preamble on the large ones.
    assert 0.3 < statistics.median(samples) < 5
