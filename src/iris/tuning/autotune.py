"""Tuning: several ways to do one thing are compiled and timed on the ranks of a group, which agree on the best.

:func:`tune` is collective over the group. The ranks compare the case and its candidates, compile them (each rank a
share, which the others then load from Triton's cache), leave out what fails on any rank, time the rest in turns, and
decide by the slowest rank's median. What would run without tuning is always among the candidates and is kept unless
another is faster by more than the noise, so tuning makes nothing slower. All ranks see the same figures, so they decide
alike.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from iris.errors import CaptureError, RankLost, RankMismatch, SimulationError, UnsupportedError, WaitTimeout
from iris.runtime import launch
from iris.runtime.launch import Launch, compiling
from iris.runtime.links import link_of
from iris.runtime.timing import GpuTimer
from iris.tuning.query import Entry, Query, config_key
from iris.tuning.store import Record, as_record, versions

if TYPE_CHECKING:
    from iris.runtime.context import Iris
    from iris.runtime.groups import Group

NOISE = 0.01  # a candidate has to be faster than the default by more than this share of its time
LEAST_ROUNDS, MOST_ROUNDS = 5, 60
# A GPU sleeps so long, so that the host has issued a call before it begins: as iris.bench has it.
_HOLD_US, _CYCLES_A_MICROSECOND, _LONGEST_HOLD_US = 200.0, 2_500, 20_000.0
_LONGEST_REASON = 300
_MEETINGS = 8  # that a call may have in which a rank fails
INTERPRETED = "nothing is tuned under the interpreter, where times mean nothing"

Timer = Callable[["Iris", "Candidate"], float]


@dataclass(frozen=True)
class Candidate:
    """One way to do what is tuned.

    Attributes:
        name: how reports call it, of no other candidate.
        algorithm: the algorithm's name.
        params: fields of its configuration by name, without those that have their default.
        call: issues one call to the current stream. Collective over the group; the first call may allocate and compare.
    """

    name: str
    algorithm: str
    params: Mapping[str, Any]
    call: Callable[[], Any] = field(compare=False, repr=False)

    @property
    def key(self) -> str:
        return config_key(self.algorithm, self.params)


@dataclass
class Trial:
    """What came of a candidate.

    Attributes:
        candidate: the candidate.
        milliseconds: the slowest rank's median; None when it failed.
        failure: why it failed, and on which rank; empty when it did not.
        rounds: how often it was timed.
    """

    candidate: Candidate
    milliseconds: float | None = None
    failure: str = ""
    rounds: int = 0


@dataclass(frozen=True)
class Tuning:
    """What came of tuning a case.

    Attributes:
        query: the case.
        record: what was found.
        trials: the candidates, the default first; none when the case had been tuned before.
        path: the file that the record was saved in; None on all ranks but the first of the group, and when it could not
            be saved.
        seconds: what it took.
    """

    query: Query
    record: Record
    trials: tuple[Trial, ...] = ()
    path: Path | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        if not self.trials:
            return f"{self.query}: {self.record.algorithm}, as tuned before ({self.record.date})"
        width = max(len(trial.candidate.name) for trial in self.trials)
        lines = [f"{self.query}: tuned in {self.seconds:.1f} s"]
        for trial in self.trials:
            chosen = " <- taken" if trial.candidate.name == self.record.name else ""
            took = trial.failure if trial.milliseconds is None else f"{trial.milliseconds:9.4f} ms"
            lines.append(f"  {trial.candidate.name:{width}}  {took}{chosen}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Options:
    """How cases are tuned.

    Attributes:
        candidates: how many there may be, the default and PyTorch's operations among them.
        budget_s: seconds for the timed calls of a case.
        timer: gives the milliseconds of a call in place of a clock: ``timer(ctx, candidate)``, on this rank. Every
            candidate is still called, once. With it cases are tuned under the interpreter, too.
        check: called after the first call of every candidate; raises when the result is wrong.
        told: called with what came of tuning a case.
        kept: whether what is found is remembered and saved.
        hopeless: a candidate whose first call took so many times the best one's is out. No drift of a clock makes up
            for three.
    """

    candidates: int = 8
    budget_s: float = 6.0
    timer: Timer | None = None
    check: Callable[[], Any] | None = None
    told: Callable[[Tuning], Any] | None = None
    kept: bool = True
    hopeless: float = 3.0


_options: ContextVar[Options] = ContextVar("iris_tuning_options", default=Options())  # noqa: B039 - it is frozen


def options() -> Options:
    """Those of the block that the caller is in."""
    return _options.get()


@contextmanager
def using(**changes: Any) -> Iterator[None]:
    """Change :class:`Options` for a block, on this rank; all ranks have to."""
    token = _options.set(replace(_options.get(), **changes))
    try:
        yield
    finally:
        _options.reset(token)


def timed_by(timer: Timer) -> AbstractContextManager[None]:
    """Let ``timer(ctx, candidate)`` give the milliseconds of calls in a block; see :class:`Options`."""
    return using(timer=timer)


def pointless(ctx: Iris) -> str:
    """Why nothing can be tuned on this runtime; empty when it can."""
    return INTERPRETED if not ctx.target.compiled and options().timer is None else ""


def params_of(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that do not have their default, by name; none for None."""
    if config is None:
        return {}
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return {f.name: values[f.name] for f in fields(config) if values[f.name] != f.default}


def tune(
    ctx: Iris, members: Group, query: Query, candidates: Sequence[Candidate], default_key: str | None = None
) -> Tuning:
    """Find the best of several candidates for a case and remember it. Collective over ``members``.

    Args:
        ctx: the context.
        members: the group.
        query: the case.
        candidates: what to try. The first is what would run without tuning.
        default_key: what the record says that it was measured against; None for the key of the first candidate.

    Raises:
        CaptureError: a graph is being captured.
        RankMismatch: the ranks have different cases or candidates.
        UnsupportedError: all candidates fail.
        WaitTimeout: a kernel waited in vain for a peer; what the ranks know of each other is then not to be trusted.
    """
    if ctx.capturing():
        raise CaptureError(f"{query.operation}: tuning measures, which a graph cannot capture; tune before the capture")
    started = time.perf_counter()
    tuned = ctx.service("tuned")
    default_key = default_key or candidates[0].key
    found = tuned.find(query, members)
    if found is not None and found.default_key != default_key:
        found = None  # it was measured against another default
    known = _agree(ctx, members, query, candidates, found)
    if known is not None:
        tuned.settle(query, members, known)
        return _tell(Tuning(query, known))
    trials = [Trial(candidate) for candidate in candidates]
    with _Progress(ctx, members, query, len(trials)) as progress:
        _compile(ctx, members, trials, progress)
        _time(ctx, members, trials, progress)
    entry = _entry(ctx, query, trials)
    record = as_record(entry, default_key)
    path = tuned.learn(query, members, record, default_key) if options().kept else None
    # Calls that were remembered have the choice of before, those of the candidates never come again.
    ctx.agreement.forget_calls()
    tuning = Tuning(query, record, tuple(trials), path, time.perf_counter() - started)
    if members.index == 0:
        ctx.info(str(tuning))
    return _tell(tuning)


def _tell(tuning: Tuning) -> Tuning:
    told = options().told
    if told is not None:
        told(tuning)
    return tuning


def _agree(
    ctx: Iris, members: Group, query: Query, candidates: Sequence[Candidate], found: Record | None
) -> Record | None:
    """Compare the case and its candidates across the group; what all ranks know of it, None unless they all do."""
    listed = [(candidate.name, candidate.key) for candidate in candidates]
    mine = (str(query), hash_of(query), listed, found and found.key)
    posts = ctx.exchange.all_gather(f"tuning {query.operation}", mine, members.ranks)
    for what, place, shown in (("cases", 1, 0), ("candidates", 2, 2)):
        if any(post[place] != posts[0][place] for post in posts):
            values = "; ".join(
                f"rank {r} has {post[shown] if place == 1 else [name for name, _ in post[shown]]}"
                for r, post in zip(members.ranks, posts, strict=True)
            )
            raise RankMismatch(f"tuning {query.operation}: the ranks have different {what}: {values}")
    # Only what all ranks know and know alike counts: one that knows nothing would otherwise wait for the others.
    return found if all(post[3] == posts[0][3] for post in posts) else None


def hash_of(query: Query) -> str:
    """A short text that is the same for equal queries, in any process."""
    return config_key(query.operation, {f.name: getattr(query, f.name) for f in fields(query)})


def _compile(ctx: Iris, members: Group, trials: list[Trial], progress: _Progress) -> None:
    """Compile all candidates and load them; those that cannot be are marked."""
    kept: list[list[Launch]] = []
    for i, trial in enumerate(trials):
        progress.step(f"preparing {trial.candidate.name}")
        failed: dict[int, str] = {}
        with compiling(ctx) as launches:
            # Without a kernel of ours there is nothing to compile, and PyTorch's operations would run.
            if trial.candidate.algorithm != "torch":
                _attempt(failed, i, trial.candidate.call)
        kept.append(launches)
        _share(ctx, members, trials, failed, "preparing")
    if not ctx.target.compiled:
        return
    own = set(range(members.index, len(trials), members.size))
    for what, indices in (("compiling", own), ("loading what other ranks compiled", set(range(len(trials))) - own)):
        progress.step(what)
        wanted = [(i, one) for i in sorted(indices) if not trials[i].failure for one in kept[i]]
        failures = compile_all([one for _, one in wanted], ctx.target.shared_memory_bytes)
        failed = {i: failure for (i, _), failure in zip(wanted, failures, strict=True) if failure}
        _share(ctx, members, trials, failed, what)


def compile_all(launches: Sequence[Launch], shared_memory_bytes: int, load: bool = True) -> list[str]:
    """Compile kernels side by side; for each why it cannot run, empty when it can.

    Args:
        launches: what to compile.
        shared_memory_bytes: the most that a program may have.
        load: whether to load them on the device, too.
    """
    if not launches:
        return []
    from triton.runtime import _async_compile

    threads = max(2, len(os.sched_getaffinity(0)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    kernels: list[Any] = [None] * len(launches)
    failed: dict[int, str] = {}
    with ThreadPoolExecutor(min(threads, len(launches))) as pool, ExitStack() as stack:
        # Failures are looked at here, one by one, so the mode is not to raise the first of them.
        stack.enter_context(_async_compile.AsyncCompileMode(pool, ignore_errors=True))

        def start(i: int) -> None:
            kernels[i] = launches[i].compile()

        def finish(i: int) -> None:
            if isinstance(kernels[i], _async_compile.FutureKernel):
                kernels[i] = kernels[i].result()
            shared = kernels[i].metadata.shared
            if shared > shared_memory_bytes:
                raise UnsupportedError(f"needs {shared} bytes of shared memory, the device has {shared_memory_bytes}")
            if load:
                launch.load_kernel(kernels[i])

        for step in (start, finish):
            for i in range(len(launches)):
                if i not in failed:
                    _attempt(failed, i, partial(step, i))
    return [failed.get(i, "") for i in range(len(launches))]


def _time(ctx: Iris, members: Group, trials: list[Trial], progress: _Progress) -> None:
    """Time the candidates that have not failed, a call of each in turn."""
    chosen = options()
    clock: _Clock = _Clock(ctx, members) if chosen.timer is None else _GivenClock(ctx, chosen.timer)
    samples: dict[int, list[float]] = {}
    spent = 0.0
    for i, trial in enumerate(trials):
        if trial.failure:
            continue
        progress.step(f"warming up {trial.candidate.name}")
        failed: dict[int, str] = {}
        _attempt(failed, i, partial(clock.warm, trial.candidate))
        _share(ctx, members, trials, failed, "warming up")
        if not trial.failure and chosen.check is not None:
            _attempt(failed, i, chosen.check)
            _share(ctx, members, trials, failed, "checking")
        if trial.failure:
            continue
        began = time.perf_counter()
        _attempt(failed, i, partial(clock.sample, trial.candidate, samples.setdefault(i, [])))
        spent += time.perf_counter() - began
        _share(ctx, members, trials, failed, "timing")
    # From the slowest rank's, so that all go on alike.
    firsts = {i: times[0] for i, times in samples.items() if not trials[i].failure}
    posts = ctx.exchange.all_gather("tuning: first times", (firsts, spent), members.ranks)
    slowest = {i: max(post[0][i] for post in posts) for i in firsts}
    if not slowest:
        return
    rounds = chosen.budget_s / max(1e-9, *(post[1] for post in posts))
    rounds = round(min(MOST_ROUNDS, max(LEAST_ROUNDS, rounds)))
    best = min(slowest.values())
    going = [i for i, ms in slowest.items() if i == 0 or ms <= chosen.hopeless * best]
    for number in range(rounds):
        progress.step(f"round {number + 1} of {rounds}", (number + 1) / rounds)
        failed = {}
        # There and back again, so that none always comes first after a pause.
        for i in going if number % 2 == 0 else reversed(going):
            if not trials[i].failure and i not in failed:
                _attempt(failed, i, partial(clock.sample, trials[i].candidate, samples[i]))
        _share(ctx, members, trials, failed, "timing")
    # The first of each counts only where there is no other.
    mine = {i: statistics.median(times[1:] or times) for i, times in samples.items() if not trials[i].failure}
    everyone = ctx.exchange.all_gather("tuning: times", mine, members.ranks)
    for i in mine:
        trials[i].milliseconds = max(theirs[i] for theirs in everyone)
        trials[i].rounds = len(samples[i])


class _Clock:
    """Times calls on the device, from where all ranks have met in the stream."""

    def __init__(self, ctx: Iris, members: Group):
        self._ctx = ctx
        self._members = None if members.size == ctx.get_num_ranks() else members.ranks
        self._callers = members.size
        self._cache = GpuTimer(ctx.get_device())
        self._busy_us: dict[str, float] = {}

    def warm(self, candidate: Candidate) -> None:
        """Call a candidate for the first times, which may allocate."""
        for _ in range(2):
            self._ctx.device_barrier(self._members)
            began = time.perf_counter()
            candidate.call()
            self._busy_us[candidate.name] = (time.perf_counter() - began) * 1e6
            self._ctx.synchronize()

    def sample(self, candidate: Candidate, times: list[float]) -> None:
        """Add the milliseconds of one call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cache.flush()
        self._hold(candidate)
        self._ctx.device_barrier(self._members)
        start.record(self._ctx.current_stream())
        candidate.call()
        end.record(self._ctx.current_stream())
        self._ctx.synchronize()
        times.append(start.elapsed_time(end))

    def _hold(self, candidate: Candidate) -> None:
        """Keep the GPU asleep until the host has issued the call, so that nothing of the host is in its time."""
        # In loopback the ranks share the host: it issues the call of one after that of the other.
        sharing = self._callers if self._ctx.runtime == "loopback" else 1
        microseconds = min(max(_HOLD_US, 3 * self._busy_us[candidate.name]), _LONGEST_HOLD_US) * sharing
        torch.cuda._sleep(int(microseconds * _CYCLES_A_MICROSECOND))


class _GivenClock(_Clock):
    """Asks a function."""

    def __init__(self, ctx: Iris, timer: Timer):
        self._ctx, self._timer = ctx, timer

    def warm(self, candidate: Candidate) -> None:
        candidate.call()
        self._ctx.synchronize()

    def sample(self, candidate: Candidate, times: list[float]) -> None:
        times.append(float(self._timer(self._ctx, candidate)))


def _entry(ctx: Iris, query: Query, trials: list[Trial]) -> Entry:
    """The winner, from figures that are the same on all ranks."""
    timed = [trial for trial in trials if trial.milliseconds is not None]
    if not timed:
        shown = "; ".join(f"{trial.candidate.name}: {trial.failure}" for trial in trials)
        raise UnsupportedError(f"tuning {query.operation}: no candidate can run: {shown}")
    best = min(timed, key=_milliseconds)
    default = trials[0]
    if default.milliseconds is not None and _milliseconds(best) > (1 - NOISE) * default.milliseconds:
        best = default
    theirs = next((trial.milliseconds for trial in trials if trial.candidate.algorithm == "torch"), None)
    made_with = ", ".join(f"{name} {version}" for name, version in versions())
    return Record(
        name=best.candidate.name,
        algorithm=best.candidate.algorithm,
        params=best.candidate.params,
        sizes=query.sizes,
        milliseconds=best.milliseconds,
        torch_milliseconds=theirs,
        speedup=theirs / _milliseconds(best) if theirs is not None else None,
        source=f"tuned on {ctx.target.name}, {query.world} ranks, {link_of(ctx)}, {made_with}",
        emulated=ctx.runtime == "loopback",
        default_milliseconds=default.milliseconds,
        candidates=tuple((trial.candidate.name, trial.milliseconds) for trial in trials),
    )


def _milliseconds(trial: Trial) -> float:
    assert trial.milliseconds is not None
    return trial.milliseconds


def _attempt(failed: dict[int, str], i: int, function: Callable[[], Any]) -> None:
    """Call a function; why it failed goes to ``failed[i]``.

    Raises:
        WaitTimeout, RankLost, SimulationError: what no other candidate can be tried after.
    """
    try:
        function()
    except (WaitTimeout, RankLost, SimulationError):
        raise
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise anything; it is reported with the candidate
        # A compiler's error begins with the place and ends with the cause.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        failed[i] = f"{type(error).__name__}: {' ... '.join(dict.fromkeys(lines[:1] + lines[-1:]))}"[:_LONGEST_REASON]


def _share(ctx: Iris, members: Group, trials: list[Trial], failed: dict[int, str], doing: str) -> None:
    """Let what failed on any rank have failed on all."""
    posts: list[dict[int, str]] | None = None
    for meeting in range(_MEETINGS):
        try:
            posts = ctx.exchange.all_gather(f"tuning: {doing}", failed, members.ranks)
            break
        except RankMismatch:
            # A rank that failed early is here while the others are still in the call. They learn of it there, and come.
            if meeting == _MEETINGS - 1:
                raise
    assert posts is not None
    for i in sorted({i for post in posts for i in post}):
        theirs = {r: post[i] for r, post in zip(members.ranks, posts, strict=True) if i in post}
        texts = set(theirs.values())
        alike = len(theirs) == members.size and len(texts) == 1
        trials[i].failure = texts.pop() if alike else "; ".join(f"rank {r}: {text}" for r, text in theirs.items())


class _Progress:
    """Says on the group's first rank what goes on: a bar where standard error is a terminal, else lines of the log."""

    def __init__(self, ctx: Iris, members: Group, query: Query, count: int):
        self._ctx, self._query, self._count = ctx, query, count
        self._speaks = members.index == 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _Progress:
        if self._speaks and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = TextColumn(f"tuning {self._query}"), BarColumn(), TextColumn("{task.description}")
            self._bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=1.0)
        elif self._speaks:
            self._ctx.info(f"tuning {self._query}: {self._count} candidates")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, what: str, done: float | None = None) -> None:
        """Say what is done next, and which share of the timing is behind."""
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=done)
        elif self._speaks and done is None:
            self._ctx.debug(f"tuning {self._query.operation}: {what}")
