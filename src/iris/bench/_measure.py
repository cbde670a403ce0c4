"""Checks and times the candidates of one combination on the ranks of a context. Every function here is collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris.bench.state import Candidate, Check
from iris.runtime.timing import timer_of

if TYPE_CHECKING:
    from iris.runtime.context import Iris

# More than any clock of the targets, so that a GPU sleeps at least as long as it is told to.
_CYCLES_A_MICROSECOND = 2_500
_SHORTEST_HOLD_US = 200.0
# A call that takes the host longer waits for the GPU itself.
_LONGEST_HOLD_US = 20_000.0


@dataclass
class Runner:
    """A candidate and what is called for it: its function, or the replay of its graph.

    Attributes:
        candidate: the candidate.
        checks: of its results.
        cold_cache: whether caches are emptied before each call.
        meeting: where the ranks meet before each call.
        call: what is timed.
        graph: the captured graph; None while there is none.
        note: why there is none although it was asked for.
        busy_us: microseconds that the host needs for a call.
    """

    candidate: Candidate
    checks: list[Check]
    cold_cache: bool
    meeting: str
    call: Callable[[], Any]
    graph: Any = None
    note: str = ""
    busy_us: float = 0.0


def check(ctx: Iris, runner: Runner) -> str | None:
    """Call the candidate once, and say what is wrong with its result here; None when nothing is."""
    for one in runner.checks:
        one.prepare()
    ctx.barrier()
    runner.candidate.preamble_fn()
    ctx.barrier()
    runner.call()
    ctx.synchronize()
    ctx.barrier()
    faults = [fault for one in runner.checks if (fault := one.fault()) is not None]
    ctx.barrier()
    return faults[0] if faults else None


def capture(ctx: Iris, runner: Runner) -> str | None:
    """Capture the candidate in a graph; the reason when it cannot be captured here."""
    if ctx.get_device().type != "cuda":
        return "there is no GPU"
    # What is compiled, allocated or agreed on at a first call cannot be captured.
    runner.candidate.preamble_fn()
    ctx.barrier()
    runner.candidate.fn()
    ctx.synchronize()
    ctx.barrier()
    runner.candidate.preamble_fn()
    ctx.barrier()
    graph, trouble = torch.cuda.CUDAGraph(), None
    try:
        # The outer `with` restores the stream, which a failed capture does not. NCCL's watchdog thread may query its
        # events meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            runner.candidate.fn()
        runner.graph = graph
    except RuntimeError as error:
        trouble = f"{type(error).__name__}: {error}".splitlines()[0]
    ctx.barrier()
    return trouble


def sample(
    ctx: Iris, runners: Sequence[Runner], n_warmup: int, n_repeat: int, doing: Callable[[int], None]
) -> list[list[float]]:
    """Milliseconds of the measured calls of each runner, one call of each in turn.

    Args:
        ctx: the context.
        runners: what is timed.
        n_warmup: calls before the measured ones, after a first one.
        n_repeat: measured calls.
        doing: told which runner is at work, by its place.
    """
    on_gpu = ctx.get_device().type == "cuda"
    timer = timer_of(ctx.get_device())
    for i, runner in enumerate(runners):
        doing(i)
        _prepare(ctx, runner)
        ctx.barrier()
        runner.call()
        ctx.synchronize()
    for turn in range(n_warmup + n_repeat):
        for i, runner in enumerate(runners):
            doing(i)
            _prepare(ctx, runner)
            if runner.cold_cache:
                timer.flush()
            if on_gpu and runner.meeting == "stream":
                _hold(ctx, runner)
                ctx.device_barrier()
            else:
                ctx.barrier()
            start = time.perf_counter()
            timer.measure(runner.call, keep=turn >= n_warmup)
            if turn < max(1, n_warmup):
                runner.busy_us = max(runner.busy_us, (time.perf_counter() - start) * 1e6)
            ctx.synchronize()
    ctx.barrier()
    samples = timer.samples()
    return [samples[i :: len(runners)] for i in range(len(runners))]


def _prepare(ctx: Iris, runner: Runner) -> None:
    """Meet before the preamble, because a peer may still be working on what it changes."""
    ctx.barrier()
    runner.candidate.preamble_fn()


def _hold(ctx: Iris, runner: Runner) -> None:
    """Keep the GPU asleep until the host has issued the call, so that nothing of the host is in its time."""
    # In loopback the ranks share the host: it issues the call of one after that of the other.
    sharing = ctx.get_num_ranks() if ctx.runtime == "loopback" else 1
    microseconds = min(max(_SHORTEST_HOLD_US, 3 * runner.busy_us), _LONGEST_HOLD_US) * sharing
    torch.cuda._sleep(int(microseconds * _CYCLES_A_MICROSECOND))
