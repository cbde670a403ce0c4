"""Measures combinations one after another on the ranks of this run.

The ranks agree after every step, so a failure on one of them ends the combination on all, with the same text, and the
sweep goes on. Two exchanges serve for that. The context's own brings a rank back that waits in a collective call for
one that has failed: both learn that they are in different calls. What the ranks then decide goes through an exchange of
the sweep's own, which stays in step whatever happened to the context. After a failure that may have left the context
different on the ranks, it is made anew.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from iris import _env
from iris.bench import _measure
from iris.bench._options import Combination, Options
from iris.bench.results import Result, compare, plain
from iris.bench.state import Candidate, State, _SkipCombination
from iris.errors import (
    ArgumentError,
    HeapExhausted,
    IrisError,
    RankLost,
    RankMismatch,
    SimulationError,
    UnsupportedError,
    WaitTimeout,
)
from iris.runtime.bootstrap import Exchange, initialize_distributed
from iris.runtime.context import Iris
from iris.runtime.local import LocalExchange, current_world
from iris.runtime.settle import settled

_FAILURES = (IrisError, MemoryError, TimeoutError, torch.OutOfMemoryError, OutOfResources, CompilationError)
# Raised before anything is launched: if all ranks raise the same, they still agree on the context.
_HARMLESS = (ArgumentError, UnsupportedError, HeapExhausted)
# Raised because of what happened to another rank, the likely one first.
_NOTICED = (WaitTimeout, RankMismatch, RankLost)
# How often ranks that have failed meet ranks that are in a collective call.
_MEETINGS = 1000


@dataclass
class Post:
    """What a rank tells the others after a step.

    Attributes:
        kind: empty, ``"skipped"`` or ``"failed"``.
        text: why.
        type: of the error.
        harmless: see :data:`_HARMLESS`.
        noticed: place from 1 among :data:`_NOTICED`; 0 for an error of the rank's own.
        in_step: whether the context's exchange is in step with the other ranks'.
        at: place of the runner that was at work.
        value: what the step gave.
    """

    kind: str = ""
    text: str = ""
    type: str = ""
    harmless: bool = False
    noticed: int = 0
    in_step: bool = True
    at: int = 0
    value: Any = None


@dataclass
class Verdict:
    """What the ranks make of a step; ``usable`` is whether they still agree on the context."""

    kind: str
    text: str
    usable: bool
    at: int
    values: list[Any] = field(default_factory=list)


class Sweep:
    """Measures combinations on the ranks of this run. Construction is collective."""

    def __init__(self, options: Options):
        self.options = options
        self._heap_bytes = options.given.heap_size or _default_heap()
        self.ctx = Iris(self._heap_bytes)
        self._referee = _referee(self.ctx)
        self.interpreted = not self.ctx.target.compiled

    def run(self, combinations: Sequence[Combination]) -> Iterator[list[Result]]:
        """The results of the combinations, group after group of those that are measured in turns."""
        with _quick_collections():
            for group in _groups(combinations):
                found: dict[tuple[int, str | None], Result] = {}
                self._order: dict[tuple[int, str | None], int] = {}
                pending = list(group)
                while pending:
                    pending, usable = self._attempt(pending, found)
                    self._settle(usable)
                yield [found[key] for key in sorted(found, key=lambda key: (key[0], self._order.get(key, -1)))]

    def _attempt(
        self, pending: list[Combination], found: dict[tuple[int, str | None], Result]
    ) -> tuple[list[Combination], bool]:
        """Measure what has no result yet. Gives what is left to do and whether the context can still be used."""
        ready: list[tuple[Combination, State, _measure.Runner]] = []
        remaining = list(pending)
        for combination in pending:
            state = State(combination.params)
            verdict = self._step("set-up", lambda _, c=combination, s=state: self._set_up(c, s))
            if not verdict.kind and len(set(map(str, verdict.values))) > 1:
                shown = "; ".join(f"rank {r}: {value}" for r, value in enumerate(verdict.values))
                verdict = Verdict("failed", f"the ranks disagree on what is measured: {shown}", False, 0)
            if verdict.kind:
                found[combination.index, None] = self._unmeasured(combination, state, None, verdict.kind, verdict.text)
                remaining.remove(combination)
                if not verdict.usable:
                    return remaining, False
                continue
            for place, candidate in enumerate(state.candidates):
                self._order[combination.index, candidate.name] = place
                if (combination.index, candidate.name) in found:
                    continue
                runner, failed, usable = self._make_ready(state, candidate)
                if failed is not None:
                    result = self._unmeasured(combination, state, candidate, *failed)
                    found[combination.index, candidate.name] = result
                else:
                    ready.append((combination, state, runner))
                if not usable:
                    return remaining, False
        if not ready:
            return [], True
        runners = [runner for _, _, runner in ready]
        n_warmup = max(self._warmup(state) for _, state, _ in ready)
        n_repeat = max(self._repeat(state) for _, state, _ in ready)
        verdict = self._step("timing", lambda doing: _measure.sample(self.ctx, runners, n_warmup, n_repeat, doing))
        if verdict.kind:
            combination, state, runner = ready[verdict.at]
            result = self._unmeasured(combination, state, runner.candidate, verdict.kind, verdict.text)
            found[combination.index, runner.candidate.name] = result
            return remaining, False
        measured = {}
        for i, (combination, state, runner) in enumerate(ready):
            result = self._result(combination, state, runner.candidate)
            flops, nbytes = runner.candidate.flops, runner.candidate.nbytes
            samples = [of_rank[i] for r, of_rank in enumerate(verdict.values) if r in (state.timed_ranks or [r])]
            result.take_samples(
                samples, state.flops if flops is None else flops, state.nbytes if nbytes is None else nbytes
            )
            result.n_warmup, result.graph = n_warmup, runner.graph is not None
            result.note = "; ".join(filter(None, [*state.notes, runner.note]))
            result.validated = bool(runner.checks)
            found[combination.index, runner.candidate.name] = result
            measured[_label(combination, runner.candidate)] = result
        compare(measured, *_comparisons(ready))
        return [], True

    def _set_up(self, combination: Combination, state: State) -> Any:
        combination.benchmark.fn(state, self.ctx)
        name = combination.benchmark.name
        if not state.candidates:
            raise RuntimeError(
                f"benchmark {name} has not said what to time: call state.exec(fn), state.candidate(name, fn) or "
                "state.skip(reason)"
            )
        names = [candidate.name for candidate in state.candidates]
        for check in state.checks:
            if check.candidate is not None and check.candidate not in names:
                raise ArgumentError(f"state.validate: there is no candidate {check.candidate!r}; there are {names}")
        facts = {"candidates": names, "checks": len(state.checks), "graph": state.graph}
        counts = {"warm-up": self._warmup(state), "repeat": self._repeat(state)}
        beyond = [rank for rank in state.timed_ranks or () if rank >= self.ctx.get_num_ranks()]
        if beyond:
            raise ArgumentError(f"state.set_timed_ranks: {beyond} of {self.ctx.get_num_ranks()} ranks")
        how = {"cold cache": self._cold(state), "meeting": self._meeting(state), "timed ranks": state.timed_ranks}
        return {**facts, **counts, **how}

    def _make_ready(self, state: State, candidate: Candidate) -> tuple[_measure.Runner, tuple[str, str] | None, bool]:
        """A checked candidate; what is wrong with it, as (kind, text); whether the context can still be used."""
        checks = [check for check in state.checks if check.candidate in (None, candidate.name)]
        runner = _measure.Runner(candidate, checks, self._cold(state), self._meeting(state), candidate.fn)
        failed, usable = self._check(runner)
        if failed is not None or not state.graph:
            return runner, failed, usable
        verdict = self._step("capture", lambda _: _measure.capture(self.ctx, runner))
        if verdict.kind:
            return runner, (verdict.kind, verdict.text), verdict.usable
        troubles = [f"rank {r}: {trouble}" for r, trouble in enumerate(verdict.values) if trouble is not None]
        if troubles:
            runner.graph, runner.note = None, f"not captured in a graph, calls are timed: {troubles[0]}"
            return runner, None, True
        runner.call = runner.graph.replay
        return runner, *self._check(runner)

    def _check(self, runner: _measure.Runner) -> tuple[tuple[str, str] | None, bool]:
        if not runner.checks:
            return None, True
        verdict = self._step("validation", lambda _: _measure.check(self.ctx, runner))
        if verdict.kind:
            return (verdict.kind, verdict.text), verdict.usable
        faults = [f"rank {r}: {fault}" for r, fault in enumerate(verdict.values) if fault is not None]
        return (("wrong", faults[0]) if faults else None), True

    def _step(self, what: str, action: Callable[[Callable[[int], None]], Any]) -> Verdict:
        """Run a part of a combination and agree on how it went. Collective.

        Args:
            what: the part, for messages.
            action: does it; it is given a function to tell which runner is at work, by its place.
        """
        post = Post()

        def doing(place: int) -> None:
            post.at = place

        try:
            post.value = action(doing)
        except _SkipCombination as skipped:
            post.kind, post.text = "skipped", str(skipped)
        except SimulationError:
            raise
        except _FAILURES as error:
            post.kind, post.text = "failed", f"{type(error).__name__} in the {what}: {error}"
            post.type, post.harmless = type(error).__name__, isinstance(error, _HARMLESS)
            post.noticed = next((i for i, kind in enumerate(_NOTICED, 1) if isinstance(error, kind)), 0)
        post.in_step = self._meet(what)
        return _verdict(self._referee.all_gather(f"benchmark: end of {what}", post), what)

    def _meet(self, what: str) -> bool:
        """Meet in the context's exchange; False when a rank did not come, which leaves the exchange out of step."""
        for _ in range(_MEETINGS):
            try:
                self.ctx.exchange.all_gather(f"benchmark: end of {what}", None)
                return True
            except RankMismatch:
                continue  # another rank was in a collective call, and learns now that this one is not
            except RankLost:
                return False
        return False

    def _settle(self, usable: bool) -> None:
        """Give back what a group took; make the context anew when the ranks no longer agree on it."""
        gc.collect()
        if usable:
            usable = self._step("clean-up", lambda _: self.ctx.barrier()).kind == ""
        if not usable:
            del self.ctx
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self.ctx = Iris(self._heap_bytes)

    def _unmeasured(
        self, combination: Combination, state: State, candidate: Candidate | None, kind: str, text: str
    ) -> Result:
        result = self._result(combination, state, candidate)
        if kind == "skipped":
            result.skipped, result.skip_reason = True, text
        else:
            result.failure, result.error = kind, text
        return result

    def _result(self, combination: Combination, state: State, candidate: Candidate | None) -> Result:
        return Result(
            combination.benchmark.name,
            combination.params,
            None,
            [],
            counters=dict(state.counters),
            world_size=self.ctx.get_num_ranks(),
            candidate=candidate.name if candidate is not None else "",
            cold_cache=self._cold(state) and not self.interpreted,
            meeting=self._meeting(state),
            index=combination.index,
            timed_ranks=state.timed_ranks,
        )

    def _warmup(self, state: State) -> int:
        default = 1 if self.interpreted else 25
        return _first(self.options.given.n_warmup, state.warmup, default)

    def _repeat(self, state: State) -> int:
        default = 3 if self.interpreted else 100
        return _first(self.options.given.n_repeat, state.repeat, default)

    def _cold(self, state: State) -> bool:
        given = self.options.given.cache
        return _first(None if given is None else given == "cold", state.cold_cache, True)

    def _meeting(self, state: State) -> str:
        return "host" if self.interpreted else _first(self.options.given.meet, state.meeting, "stream")


def _verdict(posts: list[Post], what: str) -> Verdict:
    in_step = all(post.in_step for post in posts)
    kinds = {post.kind for post in posts}
    if "failed" not in kinds:
        if len(kinds) > 1:
            shown = ", ".join(f"rank {r} {'skipped' if p.kind else 'did not'}" for r, p in enumerate(posts))
            return Verdict("failed", f"the ranks disagree on skipping: {shown}", False, 0)
        if not in_step:
            return Verdict(
                "failed", f"a rank came to the end of the {what} later than IRIS_TIMEOUT allows", False, posts[0].at
            )
        return Verdict(posts[0].kind, posts[0].text, True, 0, [post.value for post in posts])
    # The reason, rather than what the other ranks noticed of it.
    ranks = [r for r, post in enumerate(posts) if post.kind == "failed"]
    first = min(ranks, key=lambda r: (posts[r].noticed, r))
    alike = len(ranks) == len(posts) and len({post.type for post in posts}) == 1
    text = posts[first].text if len({post.text for post in posts}) == 1 else f"rank {first}: {posts[first].text}"
    usable = in_step and alike and posts[0].harmless and what == "set-up"
    return Verdict("failed", text, usable, posts[first].at)


def _groups(combinations: Sequence[Combination]) -> list[list[Combination]]:
    """Combinations that differ in the axis that alternates only, together."""
    groups: dict[Any, list[Combination]] = {}
    for combination in combinations:
        turns = [axis.name for axis in combination.benchmark.axes if axis.alternate]
        rest = tuple((name, str(value)) for name, value in combination.params.items() if name not in turns)
        groups.setdefault((combination.benchmark.name, rest), []).append(combination)
    return list(groups.values())


def _label(combination: Combination, candidate: Candidate) -> str:
    """The name under which a candidate is compared with the others of its group."""
    turns = [str(plain(combination.params[axis.name])) for axis in combination.benchmark.axes if axis.alternate]
    return "/".join([*turns, *([candidate.name] if candidate.name else [])])


def _comparisons(
    ready: list[tuple[Combination, State, _measure.Runner]],
) -> tuple[list[str], dict[str, str]]:
    """The baselines and the roles of what was measured in turns, by label."""
    baselines, roles = [], {}
    for combination, _, runner in ready:
        label = _label(combination, runner.candidate)
        axis = next((axis for axis in combination.benchmark.axes if axis.alternate), None)
        value = combination.params[axis.name] if axis is not None else None
        if runner.candidate.baseline or (axis is not None and value in axis.baseline):
            baselines.append(label)
        role = runner.candidate.role or (axis.roles.get(value) if axis is not None and axis.roles else None)
        if role is not None:
            roles[label] = role
    return baselines, roles


@contextlib.contextmanager
def _quick_collections() -> Iterator[None]:
    """Keep the garbage collector, which runs after each group, from going through all that was there before."""
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _default_heap() -> int:
    world = current_world()
    if settled()[0] != "gpu":
        return 1 << 30
    sharing = world.size if world is not None else _env.get("IRIS_RANKS_PER_GPU") or 1
    return (1 << 34) // sharing


def _referee(ctx: Iris) -> Exchange:
    """An exchange of its own, which waits for ranks that first wait in vain elsewhere."""
    timeout_s = 4 * ctx.timeout_s
    world = current_world()
    if world is not None:
        return LocalExchange(world, "iris/bench", timeout_s)
    store, rank, size, _ = initialize_distributed("gloo", timeout_s)  # the context has done it
    referee = Exchange(store, "iris/bench", rank, size, timeout_s)
    referee.introduce()
    return referee
