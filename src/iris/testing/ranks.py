"""A pool of rank processes that runs test bodies. Starting processes is the cost, so one pool serves many tests.

    def body(ctx, n):                       # at the top level of its module; runs on every rank
        assert ctx.zeros(n).sum() == 0
        return ctx.get_rank()

    def test_zeros(ranks, world):           # fixtures of tests/conftest.py
        assert ranks(world).run(body, 100) == list(range(world))

A body that fails on some rank fails the test with the traceback of every rank. A rank that dies or does not end is
named, with its Python stack and what it printed, and the next body gets fresh processes.
"""

from __future__ import annotations

import atexit
import pickle
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from iris.testing import _messages
from iris.testing._processes import RankProcesses, Reply, Request

HEAP_BYTES = 64 << 20
# How long the other ranks may go on once one has failed: most then wait in vain for it.
GRACE_SECONDS = 5.0


class RankDied(RuntimeError):
    """The process of a rank ended during a body."""


class RankHung(TimeoutError):
    """A rank had not ended a body when its time was over."""


@dataclass(frozen=True)
class Outcome:
    """What a body came to on one rank.

    Attributes:
        rank: the rank.
        value: what the body returned.
        error: what it raised; the name of the class where the exception cannot be pickled; :class:`RankDied` or
            :class:`RankHung` when it did neither. None when it returned.
        traceback: the error as text, with the rank's output.
        finished_at: when it ended, on the clock of ``time.monotonic()``.
    """

    rank: int
    value: Any = None
    error: BaseException | str | None = None
    traceback: str = ""
    finished_at: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the body did not return."""
        return self.error is not None


class RanksFailed(AssertionError):
    """A body failed on some rank.

    Attributes:
        outcomes: of every rank, in rank order.
        errors: the errors of the failed ranks by rank, the first to fail first.
    """

    def __init__(self, message: str, outcomes: Sequence[Outcome] = ()):
        super().__init__(message)
        self.outcomes = list(outcomes)
        failed = sorted((o for o in outcomes if o.failed), key=lambda o: o.finished_at)
        self.errors = {o.rank: o.error for o in failed}


class RankPool:
    """``world_size`` processes that run bodies in step. They start with the first body.

    Use a pool from one thread, which must outlive it: the processes end with the thread that made them.

    Args:
        world_size: number of ranks.
        runtime: ``"cpu"`` or ``"gpu"``. On GPUs, ranks that outnumber them share them under a private MPS daemon, or
            under the one that this process already uses.
        env: further environment variables of the ranks.
        timeout: seconds that a body may take unless :meth:`run` says otherwise.
    """

    def __init__(
        self, world_size: int, *, runtime: str = "cpu", env: Mapping[str, str] | None = None, timeout: float = 60.0
    ):
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"world_size must be a number of ranks above 0, got {world_size!r}")
        if runtime not in ("cpu", "gpu"):
            raise ValueError(f"unknown runtime {runtime!r}; possible: 'cpu' or 'gpu'")
        self.world_size = world_size
        self.runtime = runtime
        self.timeout = timeout
        self._env = {"IRIS_RUNTIME": runtime, **(env or {})}
        self._processes: RankProcesses | None = None
        _pools.add(self)

    def run(
        self, body: Callable, *args: Any, context: int | None = HEAP_BYTES, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Run ``body(ctx, *args, **kwargs)`` on every rank.

        Args:
            body: a function at the top level of a module with a file; the ranks import that file.
            context: heap size in bytes of ``ctx``, an Iris context that all bodies with the same heap size share; None
                calls ``body(rank, world_size, *args, **kwargs)``, for bodies that make their own.
            timeout: seconds the body may take, default the pool's.

        Returns:
            What each rank returned, in rank order; tensors are on the CPU.

        Raises:
            RanksFailed: with the traceback of every rank that raised, the first first; names ranks that died or did not
                end, and where those were.
        """
        __tracebackhide__ = True
        outcomes = self._run(body, args, kwargs, context, timeout, GRACE_SECONDS)
        if any(o.failed for o in outcomes):
            # Ranks may have stopped at different places, so the next body gets fresh ones.
            self.kill()
            raise RanksFailed(_report(body, outcomes), outcomes)
        return [o.value for o in outcomes]

    def run_expecting(
        self, body: Callable, *args: Any, context: int | None = HEAP_BYTES, timeout: float | None = None, **kwargs: Any
    ) -> list[Outcome]:
        """As :meth:`run`, for tests of errors: ranks may raise or die, and each rank's outcome is returned.

        The ranks stay when all of them returned or all of them raised; otherwise the next body gets fresh ones.

        Raises:
            RanksFailed: a rank did not end in time.
        """
        __tracebackhide__ = True
        outcomes = self._run(body, args, kwargs, context, timeout, None)
        alike = len({o.failed for o in outcomes}) == 1
        if not alike or any(isinstance(o.error, RankDied | RankHung) for o in outcomes):
            self.kill()
        if any(isinstance(o.error, RankHung) for o in outcomes):
            raise RanksFailed(_report(body, outcomes), outcomes)
        return outcomes

    def close(self) -> None:
        """End the ranks. The pool starts them again when it is used again."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    def kill(self) -> None:
        """As :meth:`close`, without asking the ranks first."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.kill()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        body: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        heap_bytes: int | None,
        timeout: float | None,
        grace: float | None,
    ) -> list[Outcome]:
        request = _messages.dumps(Request(_messages.refer(body), _messages.dumps((args, kwargs)), heap_bytes))
        if self._processes is not None and not self._processes.idle():
            self.kill()  # A rank has died between two bodies.
        if self._processes is None:
            self._processes = RankProcesses(self.world_size, self._gpus(), self._env)
        marks = self._processes.marks()
        try:
            for connection in self._processes.connections:
                connection.send_bytes(request)
            outcomes, intact = self._collect(self._processes, marks, timeout or self.timeout, grace)
        except BaseException:  # Ctrl-C, or the test's own time limit: the ranks are in the middle of something.
            self.kill()
            raise
        if not intact:
            self.kill()
        return outcomes

    def _gpus(self) -> int:
        if self.runtime == "cpu":
            return 0
        import torch

        count = torch.cuda.device_count()
        if not count:
            raise RuntimeError("a pool with runtime='gpu' needs a GPU, and torch sees none; possible here: 'cpu'")
        return count

    def _collect(
        self, processes: RankProcesses, marks: list[int], timeout: float, grace: float | None
    ) -> tuple[list[Outcome], bool]:
        deadline = time.monotonic() + timeout
        limit = f"within {timeout:g} s"
        pending = dict(enumerate(processes.connections))
        outcomes: dict[int, Outcome] = {}
        intact = True
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(pending.values()), left)
            for rank in [r for r, c in pending.items() if c in ready]:
                try:
                    reply: Reply = _messages.loads(pending.pop(rank).recv_bytes())
                except (EOFError, ConnectionResetError):
                    outcome = _died(rank, processes.status(rank), processes.output(rank, marks[rank]))
                else:
                    intact = intact and reply.intact
                    outcome = _outcome(reply, lambda r=rank: processes.output(r, marks[r]))
                outcomes[rank] = outcome
                if outcome.failed and grace is not None and time.monotonic() + grace < deadline:
                    deadline = time.monotonic() + grace
                    limit = f"within {grace:g} s after rank {rank} had failed"
        stacks = processes.stacks(pending) if pending else {}
        for rank in pending:
            text = f"rank {rank} did not end {limit}; its stack:\n{stacks[rank]}"
            error = RankHung(f"rank {rank} did not end {limit}")
            output = _output(rank, processes.output(rank, marks[rank]))
            outcomes[rank] = Outcome(rank, None, error, text + output, time.monotonic())
        return [outcomes[rank] for rank in range(self.world_size)], intact


def _outcome(reply: Reply, output: Callable[[], str]) -> Outcome:
    if reply.returned:
        assert reply.payload is not None
        try:
            return Outcome(reply.rank, _messages.loads(reply.payload), finished_at=reply.finished_at)
        # A class of the value that this process cannot import or rebuild.
        except (pickle.UnpicklingError, ImportError, AttributeError, TypeError, ValueError) as error:
            text = f"rank {reply.rank} returned a value that cannot be read here: {error!r}\n"
            return Outcome(reply.rank, None, error, text, reply.finished_at)
    error = reply.error_name if reply.payload is None else _messages.loads(reply.payload)
    return Outcome(reply.rank, None, error, reply.traceback + _output(reply.rank, output()), reply.finished_at)


def _died(rank: int, status: str, output: str) -> Outcome:
    text = f"the process of rank {rank} ended with {status}"
    return Outcome(rank, None, RankDied(text), f"{text}\n{_output(rank, output)}", time.monotonic())


def _output(rank: int, output: str) -> str:
    return f"output of rank {rank}:\n{output.rstrip()}\n" if output.strip() else ""


def _report(body: Callable, outcomes: Sequence[Outcome]) -> str:
    failed = sorted((o for o in outcomes if o.failed), key=lambda o: o.finished_at)
    returned = [o.rank for o in outcomes if not o.failed]
    lines = [f"{body.__qualname__} failed on {_names([o.rank for o in failed])} of {len(outcomes)}"]
    if returned:
        lines[0] += f"; {_names(returned)} returned"
    shown: dict[str, int] = {}
    for o in failed:
        lines.append(f"--- rank {o.rank} ---")
        first = shown.setdefault(o.traceback, o.rank)
        lines.append(o.traceback.rstrip() if first == o.rank else f"the same as on rank {first}")
    return "\n".join(lines)


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_pools):
        pool.kill()
