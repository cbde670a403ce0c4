"""``Result``: what was measured for one candidate, and how it follows from the samples of the ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from iris.bench.declare import COMMUNICATION, COMPUTE, SEQUENCE


@dataclass
class Result:
    """One row of the output.

    Attributes:
        benchmark_name: the benchmark.
        params: values of its axes.
        gpu_time_ms: the headline: the median of the rank whose median is largest, of those in ``timed_ranks``. None
            when not measured.
        local_times_ms: the median of each of those ranks.
        min_time_ms: the least of them.
        skew_pct: ``(largest - least) / largest * 100`` of them.
        bandwidth_gbps: bytes of a call / 1e9 / seconds.
        tflops: operations of a call / 1e12 / seconds.
        counters: numbers and words that the benchmark added.
        skipped, skip_reason: whether, and why, the benchmark did not want the combination.
        world_size: number of ranks.
        candidate: its name when the combination has several.
        quartiles_ms: of the samples of the slowest rank: first quartile, median, third quartile.
        fastest_ms: the least sample of the slowest rank.
        speedups: for each baseline, its time divided by this one's.
        hidden_pct: ``(sequence - this) / (sequence - compute) * 100``: how much of the communication is hidden.
        hidden_of_possible_pct: ``(sequence - this) / (sequence - max(compute, communication)) * 100``: of what can be
            hidden, since nothing ends before the longer of the two.
        failure: ``"wrong"`` or ``"failed"``; empty when measured or skipped.
        error: what was wrong or what failed.
        validated: whether the result was compared with a reference.
        graph: whether replays of a graph were timed.
        note: what the benchmark says about it, and what differs from what was asked for.
        n_warmup, n_repeat: calls before the measured ones, and measured calls.
        cold_cache: whether caches were emptied before each call.
        meeting: where the ranks met before each call.
        index: place in the output.
        timed_ranks: the ranks whose times count; None for all.
    """

    benchmark_name: str
    params: dict[str, Any]
    gpu_time_ms: float | None
    local_times_ms: list[float]
    min_time_ms: float | None = None
    skew_pct: float | None = None
    bandwidth_gbps: float | None = None
    tflops: float | None = None
    counters: dict[str, float | str] = field(default_factory=dict)
    skipped: bool = False
    skip_reason: str = ""
    world_size: int = 1
    candidate: str = ""
    quartiles_ms: list[float] | None = None
    fastest_ms: float | None = None
    speedups: dict[str, float] = field(default_factory=dict)
    hidden_pct: float | None = None
    hidden_of_possible_pct: float | None = None
    failure: str = ""
    error: str = ""
    validated: bool = False
    graph: bool = False
    note: str = ""
    n_warmup: int = 0
    n_repeat: int = 0
    cold_cache: bool = True
    meeting: str = ""
    index: int = 0
    timed_ranks: list[int] | None = None

    def take_samples(self, samples: Sequence[Sequence[float]], flops: float | None, nbytes: float | None) -> None:
        """Fill in the times, given the milliseconds of every rank that counts."""
        medians = [statistics.median(own) for own in samples]
        slowest = max(range(len(medians)), key=medians.__getitem__)
        time_ms = medians[slowest]
        self.gpu_time_ms, self.local_times_ms, self.min_time_ms = time_ms, medians, min(medians)
        self.skew_pct = (time_ms - min(medians)) / time_ms * 100 if time_ms > 0 else 0.0
        self.quartiles_ms = [float(q) for q in np.quantile(samples[slowest], (0.25, 0.5, 0.75))]
        self.fastest_ms = min(samples[slowest])
        self.n_repeat = len(samples[slowest])
        if time_ms > 0:
            self.tflops = None if flops is None else flops / 1e12 / (time_ms / 1e3)
            self.bandwidth_gbps = None if nbytes is None else nbytes / 1e9 / (time_ms / 1e3)

    def record(self) -> dict[str, Any]:
        """The result as JSON has it: plain values, the original names first."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "benchmark_name"}
        shown = {"benchmark": self.benchmark_name, "world_size": self.world_size, **values}
        shown["params"] = {name: plain(value) for name, value in self.params.items()}
        shown["counters"] = {name: plain(value) for name, value in self.counters.items()}
        return shown


def from_record(record: dict[str, Any], params: dict[str, Any]) -> Result:
    """The result that :meth:`Result.record` gave, with the parameters as they were."""
    values = {name: value for name, value in record.items() if name != "benchmark"}
    return Result(record["benchmark"], **{**values, "params": params})


def compare(results: dict[str, Result], baselines: Sequence[str], roles: dict[str, str]) -> None:
    """Fill in speed-ups and hidden communication of what was measured in turns.

    Args:
        results: by the name under which they are compared.
        baselines: names that the others are compared with.
        roles: by name, for those that have one.
    """
    times = {name: result.gpu_time_ms for name, result in results.items() if result.gpu_time_ms}
    # The fastest of each, so that a slow one does not flatter the others.
    best = {
        role: min((times[name] for name, its in roles.items() if its == role and name in times), default=None)
        for role in (SEQUENCE, COMPUTE, COMMUNICATION)
    }
    sequence, compute, communication = best[SEQUENCE], best[COMPUTE], best[COMMUNICATION]
    for name, time_ms in times.items():
        results[name].speedups = {b: times[b] / time_ms for b in baselines if b in times}
        if name in roles or sequence is None or compute is None:
            continue
        if sequence > compute:
            results[name].hidden_pct = (sequence - time_ms) / (sequence - compute) * 100
        if communication is not None and sequence > max(compute, communication):
            possible = sequence - max(compute, communication)
            results[name].hidden_of_possible_pct = (sequence - time_ms) / possible * 100


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it; a dtype is its name."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
