"""Timing of a function that all ranks call."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from iris.errors import ArgumentError, UnsupportedError

# More than the last-level cache of the targets holds, so that no iteration finds the data of the one before.
_FLUSH_BYTES = 256 << 20

_MODES: dict[str, Callable[[list[float]], Any]] = {
    "mean": lambda samples: float(np.mean(samples)),
    "median": lambda samples: float(np.median(samples)),
    "min": min,
    "max": max,
    "all": list,
}


def _nothing() -> None:
    pass


def do_bench(
    fn: Callable[[], Any],
    barrier_fn: Callable[[], Any] = _nothing,
    preamble_fn: Callable[[], Any] = _nothing,
    n_warmup: int = 25,
    n_repeat: int = 100,
    quantiles: float | Sequence[float] | None = None,
    return_mode: str = "mean",
    *,
    device: Any = None,
) -> Any:
    """Time of ``fn()`` in milliseconds. Collective when ``barrier_fn`` is.

    ``fn`` is called ``1 + n_warmup + n_repeat`` times; only the last ``n_repeat`` calls are measured. Before each call
    come ``barrier_fn()``, ``preamble_fn()``, on a GPU a write of 256 MiB that empties the caches, and ``barrier_fn()``
    again; none of them is in the time. A GPU is timed with events on the current stream, the CPU with the host's clock.

    Args:
        fn: what is timed.
        barrier_fn: brings the ranks together, such as ``ctx.barrier``.
        preamble_fn: prepares a call, such as clearing its flags.
        n_warmup: calls that are not measured, at least 0, after a first one that compiles.
        n_repeat: calls that are measured, at least 1.
        quantiles: values in [0, 1]; takes the place of ``return_mode``.
        return_mode: ``"mean"``, ``"median"``, ``"min"``, ``"max"`` or ``"all"``.
        device: the device that ``fn`` works on; default the current GPU, or the CPU when there is none.

    Returns:
        A float; a list of all samples for ``"all"``; with ``quantiles`` a list with one float for each, or the float
        itself when there is one. Quantiles between two samples are interpolated.

    Raises:
        ArgumentError: a count, quantile or mode is not possible.
        UnsupportedError: ``device`` is neither a GPU nor the CPU.
    """
    if return_mode not in _MODES:
        raise ArgumentError(f"return_mode {return_mode!r} is not known; possible: {', '.join(_MODES)}")
    wanted = None if quantiles is None else _quantiles(quantiles)
    n_warmup = _count("n_warmup", n_warmup, at_least=0)
    n_repeat = _count("n_repeat", n_repeat, at_least=1)
    timer = timer_of(device)

    barrier_fn()
    preamble_fn()
    fn()
    barrier_fn()
    for i in range(n_warmup + n_repeat):
        barrier_fn()
        preamble_fn()
        timer.flush()
        barrier_fn()
        timer.measure(fn, keep=i >= n_warmup)
    barrier_fn()
    samples = timer.samples()

    if wanted is None:
        return _MODES[return_mode](samples)
    values = [float(value) for value in np.quantile(samples, wanted)]
    return values[0] if len(values) == 1 else values


class HostTimer:
    """Times calls with the host's clock."""

    def __init__(self):
        self._samples: list[float] = []

    def flush(self) -> None:
        """Nothing: the host's clock does not resolve what a warm cache saves."""

    def measure(self, fn: Callable[[], Any], keep: bool) -> None:
        """Time one call; ``keep`` says whether it becomes a sample."""
        start = time.perf_counter()
        fn()
        elapsed = time.perf_counter() - start
        if keep:
            self._samples.append(elapsed * 1e3)

    def samples(self) -> list[float]:
        """Milliseconds of the kept calls, in order."""
        return self._samples


class GpuTimer:
    """Times calls with events on the current stream of a GPU."""

    def __init__(self, device: torch.device):
        self._device = device
        self._cache = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def flush(self) -> None:
        """Empty the caches, in the stream."""
        self._cache.zero_()

    def measure(self, fn: Callable[[], Any], keep: bool) -> None:
        """Issue one call between two events; ``keep`` says whether it becomes a sample."""
        # Warm-up calls record events too, so that measured calls find the same state of the stream.
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(torch.cuda.current_stream(self._device))
        fn()
        end.record(torch.cuda.current_stream(self._device))
        if keep:
            self._pairs.append((start, end))

    def samples(self) -> list[float]:
        """Milliseconds of the kept calls, in order; waits for them."""
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) for start, end in self._pairs]


def timer_of(device: Any = None) -> HostTimer | GpuTimer:
    """What times calls on ``device``; default the current GPU, or the CPU when there is none.

    Raises:
        UnsupportedError: ``device`` is neither a GPU nor the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cpu":
        return HostTimer()
    if device.type == "cuda":
        return GpuTimer(device)
    raise UnsupportedError(f"device {device} cannot be timed; possible: cuda and cpu")


def _count(name: str, value: Any, at_least: int) -> int:
    number = operator.index(value)
    if number < at_least:
        raise ArgumentError(f"{name} must be at least {at_least}, got {value}")
    return number


def _quantiles(quantiles: float | Sequence[float]) -> list[float]:
    values = [float(q) for q in (quantiles if isinstance(quantiles, Sequence) else [quantiles])]
    if not values:
        raise ArgumentError("quantiles is empty; give values in [0, 1], or None for return_mode")
    for value in values:
        if not 0 <= value <= 1:
            raise ArgumentError(f"quantile {value} is not possible; values in [0, 1] are")
    return values
