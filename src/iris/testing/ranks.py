"""A pool of rank processes that runs test bodies: starting processes is the cost, so one pool serves many tests.

def body(ctx, n):                       # at module level; runs on every rank
    assert ctx.zeros(n).sum() == 0

def test_zeros(ranks, world):           # fixtures of tests/conftest.py
    ranks(world).run(body, 100)
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import torch.distributed as dist

from iris.runtime import rank_processes

HEAP_BYTES = 64 << 20
_SHOWN_BYTES = 6000


@dataclass(frozen=True)
class Outcome:
    """What a body came to on one rank: a value, or an error (None when it could not be sent) and its traceback."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.traceback)


class RanksFailed(AssertionError):
    """A body failed on some rank. ``outcomes`` holds every rank's."""

    def __init__(self, message: str, outcomes: list[Outcome]):
        super().__init__(message)
        self.outcomes = outcomes


class RankPool:
    """``world_size`` processes that run bodies in step.

    Args:
        world_size: number of ranks.
        runtime: ``"cpu"`` or ``"gpu"``. Ranks that outnumber the GPUs share them under a private MPS daemon.
        env: further environment variables of the ranks.
        timeout: seconds that a body may take.
    """

    def __init__(
        self, world_size: int, *, runtime: str = "cpu", env: Mapping[str, str] | None = None, timeout: float = 90.0
    ):
        self.world_size = world_size
        self.runtime = runtime
        self.timeout = timeout
        self._env = dict(env or {})
        self._stack = contextlib.ExitStack()
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        self._logs: list[IO[bytes]] = []

    def run(
        self, body: Callable, *args: Any, context: int | None = HEAP_BYTES, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Run ``body(ctx, *args)`` on every rank.

        Args:
            body: a function at the top level of a module that pytest collected; it is imported by path in the ranks.
            context: heap size of the context, which bodies of the same size share; None calls
                ``body(rank, world_size, *args)`` for bodies that make their own.
            timeout: seconds, default the pool's.

        Returns:
            Each rank's result, in rank order.

        Raises:
            RanksFailed: with the traceback of every rank that failed; names ranks that died or did not end.
        """
        outcomes = self.run_expecting(body, *args, context=context, timeout=timeout, **kwargs)
        failed = [o for o in outcomes if o.failed]
        if failed:
            # Ranks may have stopped at different places, so the next body gets fresh ones.
            self.close()
            shown = "\n".join(f"--- rank {o.rank} of {self.world_size} ---\n{o.traceback}" for o in failed)
            raise RanksFailed(f"{body.__qualname__} failed on ranks {[o.rank for o in failed]}\n{shown}", outcomes)
        return [o.value for o in outcomes]

    def run_expecting(
        self, body: Callable, *args: Any, context: int | None = HEAP_BYTES, timeout: float | None = None, **kwargs: Any
    ) -> list[Outcome]:
        """As :meth:`run`, but errors of bodies are returned, for tests of errors."""
        if "<" in body.__qualname__ or "." in body.__qualname__:
            raise ValueError(f"a body must be a function at the top level of its module, got {body.__qualname__}")
        if not self._processes:
            self._start()
        message = pickle.dumps((body.__code__.co_filename, body.__qualname__, args, kwargs, context))
        for connection in self._connections:
            connection.send_bytes(message)
        return self._collect(body.__qualname__, timeout or self.timeout)

    def close(self) -> None:
        """End the ranks. The pool starts them again when it is used again."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + 5
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes, self._connections, self._logs = [], [], []
        self._stack.close()

    def _start(self) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._stack.callback(lambda: store)  # lives as long as the ranks
        common = {**os.environ, "IRIS_RUNTIME": self.runtime, **self._env}
        common.pop("TRITON_INTERPRET", None)
        common |= rank_processes.defaults(common, self.world_size)
        common |= rank_processes.share_gpus(self._stack, common, self.world_size)
        environments = rank_processes.environments(common, self.world_size, store.port)
        for rank in range(self.world_size):
            ours, theirs = socket.socketpair()
            log = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed with the pool
            environment = {**environments[rank], "IRIS_POOL_DESCRIPTOR": str(theirs.fileno())}
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "iris.testing._worker"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                )
            )
            theirs.close()
            self._connections.append(Connection(ours.detach()))
            self._logs.append(log)

    def _collect(self, name: str, timeout: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        pending = dict(enumerate(self._connections))
        outcomes: dict[int, Outcome] = {}
        died_at = None
        while pending and time.monotonic() < deadline:
            ready = wait(list(pending.values()), 0.1)
            for rank in [r for r, c in pending.items() if c in ready]:
                try:
                    kind, data, text = pickle.loads(pending[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    code = self._processes[rank].wait()
                    outcomes[rank] = Outcome(rank, None, None, f"the process ended with code {code}\n{self._log(rank)}")
                    died_at = died_at or time.monotonic()
                else:
                    value = pickle.loads(data)
                    outcomes[rank] = Outcome(rank, value) if kind == "value" else Outcome(rank, None, value, text)
                del pending[rank]
            if died_at is not None and time.monotonic() - died_at > 5:
                break  # the others wait for the one that died
        if pending:
            for rank in pending:
                self._processes[rank].send_signal(signal.SIGUSR1)
            time.sleep(0.3)
            for rank in pending:
                text = f"{name} did not end within {timeout:g} s; where it was:\n{self._log(rank)}"
                outcomes[rank] = Outcome(rank, None, None, text)
                self._processes[rank].kill()
        if pending or died_at is not None:
            self.close()
        return [outcomes[rank] for rank in range(self.world_size)]

    def _log(self, rank: int) -> str:
        log = self._logs[rank]
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - _SHOWN_BYTES))
        return log.read().decode(errors="replace")
