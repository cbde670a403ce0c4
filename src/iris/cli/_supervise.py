"""Starts the rank processes of one run, watches them, and ends them all when one fails.

Each rank leads a process group of its own, so ending a rank ends whatever it started. Two pipes come from each rank:
its standard error, passed through as it comes and its end kept, and the report that ``_rank.py`` writes. Standard
output is the launcher's own and is not touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_WRAPPER = str(Path(__file__).with_name("_rank.py"))
_STACK_SIGNAL = signal.SIGUSR2

POLL_SECONDS = 0.02
# After the first failure the other ranks may end by themselves and say why; then they are asked to, then made to.
SETTLE_SECONDS = 1.0
GRACE_SECONDS = 3.0
STACK_SECONDS = 0.5
KEPT_BYTES = 8192


@dataclass
class Rank:
    """One rank process and what is known about it.

    Attributes:
        index: its rank.
        process: the process; leader of its own process group.
        returncode: as in :class:`subprocess.Popen`; None while it runs.
        ended_at: when it was seen to have ended, in seconds since the epoch.
        ended_by_us: whether a signal was sent to it before it ended.
        failure: the record of the error that ended the program, if it wrote one.
        stacks: what :mod:`faulthandler` wrote: stacks at a crash, or those asked for at a time limit.
        stderr: the last bytes of its standard error.
    """

    index: int
    process: subprocess.Popen[bytes]
    returncode: int | None = None
    ended_at: float = 0.0
    ended_by_us: bool = False
    ready: bool = False
    failure: dict | None = None
    stacks: str = ""
    stderr: bytearray = field(default_factory=bytearray)
    _line: bytes = b""

    def take_report(self, data: bytes) -> None:
        """Sort what came through the report pipe into records and stacks."""
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"{"):
                self.stacks += line.decode(errors="replace") + "\n"
                continue
            fields = json.loads(line)
            if fields["kind"] == "ready":
                self.ready = True
            else:
                self.failure = fields

    def take_stderr(self, data: bytes) -> None:
        """Pass standard error on, and keep its end."""
        self.stderr += data
        del self.stderr[:-KEPT_BYTES]
        # Nobody may be reading any more (`iris run ... 2>&1 | head`); the ranks do not have to end for that.
        with contextlib.suppress(OSError):
            os.write(2, data)

    def signal(self, signum: int) -> None:
        """Send a signal to the rank and all that it started. Only before it is reaped: then the id may be another's."""
        self.ended_by_us = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signum)

    def reap(self) -> bool:
        """Whether the process has ended; if so collect it and end what is left of its group."""
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.ended_at = time.time()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.returncode = self.process.wait()
        return True

    @property
    def failed(self) -> bool:
        """Whether it ended, or is about to end, with an error of its own."""
        return self.failure is not None or (self.returncode not in (None, 0) and not self.ended_by_us)

    @property
    def failed_at(self) -> float:
        """When it failed, for finding out which rank was first."""
        if self.failure is not None:
            return self.failure["time"]
        # A killed process writes nothing down, and its peers may report the broken connection before we see it gone.
        # Not so with SIGABRT: that is how C++ code of a rank gives up, often because of a peer.
        return self.ended_at - (0.0 if self.returncode == -signal.SIGABRT else SETTLE_SECONDS)


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        ranks: all rank processes, ended.
        timed_out: whether the time limit ended it.
        signal: the signal to the launcher that ended it, or 0.
    """

    ranks: list[Rank]
    timed_out: bool = False
    signal: int = 0

    @property
    def failures(self) -> list[Rank]:
        """The ranks that failed of their own, the first one first."""
        return sorted((rank for rank in self.ranks if rank.failed), key=lambda rank: rank.failed_at)


class Supervisor:
    """Runs the ranks of one run to their end. Also a context manager: leaving it leaves no rank behind."""

    def __init__(self, received: Callable[[], int]) -> None:
        """``received`` gives the signal that the launcher was sent so far, or 0."""
        self.ranks: list[Rank] = []
        self._received = received
        self._selector = selectors.DefaultSelector()
        self._files: list[int] = []

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exception: object) -> None:
        running = self._running()
        for rank in running:
            rank.signal(signal.SIGKILL)
        while not all(rank.reap() for rank in self._running()):
            time.sleep(POLL_SECONDS)
        self._selector.close()
        for descriptor in self._files:
            os.close(descriptor)

    def start(self, kind: str, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        """Start one process a rank. ``kind`` is ``script``, ``module`` or ``program``."""
        for index, environment in enumerate(environments):
            report, report_writer = os.pipe()
            errors, errors_writer = os.pipe()
            self._files += [report, errors]
            try:
                process = subprocess.Popen(
                    [sys.executable, _WRAPPER, str(report_writer), str(os.getpid()), kind, *command],
                    env=dict(environment),
                    # One reader only: several would each get a part of the input.
                    stdin=None if index == 0 else subprocess.DEVNULL,
                    stderr=errors_writer,
                    pass_fds=[report_writer],
                    start_new_session=True,
                )
            finally:
                os.close(report_writer)
                os.close(errors_writer)
            rank = Rank(index, process)
            self.ranks.append(rank)
            for descriptor, take in ((report, rank.take_report), (errors, rank.take_stderr)):
                os.set_blocking(descriptor, False)
                self._selector.register(descriptor, selectors.EVENT_READ, take)

    def wait(self, timeout: float | None, check: Callable[[], None]) -> Outcome:
        """Watch until no rank is left.

        Args:
            timeout: seconds until all ranks are ended, None for no limit.
            check: called now and then; an exception of it ends the run.
        """
        outcome = Outcome(self.ranks)
        limit = time.monotonic() + timeout if timeout is not None else None
        # What to do next, and when: a run goes down these steps and never back up.
        steps: list[tuple[float, int]] = []
        while self._running():
            self._read(POLL_SECONDS)
            for rank in self._running():
                rank.reap()
            check()
            now = time.monotonic()
            if not outcome.signal and self._received():
                outcome.signal = self._received()
                steps = [(now, outcome.signal), (now + GRACE_SECONDS, signal.SIGKILL)]
            elif not steps and limit is not None and now >= limit:
                outcome.timed_out = True
                self._ask_for_stacks()
                steps = [(now + STACK_SECONDS, signal.SIGTERM), (now + STACK_SECONDS + GRACE_SECONDS, signal.SIGKILL)]
            elif not steps and any(rank.failed for rank in self.ranks):
                start = now + SETTLE_SECONDS
                steps = [(start, signal.SIGTERM), (start + GRACE_SECONDS, signal.SIGKILL)]
            while steps and now >= steps[0][0]:
                signum = steps[0][1]
                # The last step stays: it is repeated until nothing is left.
                steps = steps[1:] or [(now + GRACE_SECONDS, signum)]
                for rank in self._running():
                    rank.signal(signum)
        self._read(0)
        return outcome

    def _running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.returncode is None]

    def _ask_for_stacks(self) -> None:
        for rank in self._running():
            if rank.ready:
                os.kill(rank.process.pid, _STACK_SIGNAL)

    def _read(self, seconds: float) -> None:
        """Take what the pipes hold; wait ``seconds`` at most for something to come."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._selector.select(seconds):
            data = b""
            with contextlib.suppress(BlockingIOError):
                data = os.read(key.fd, 1 << 16)
            if data:
                key.data(data)
            else:
                self._selector.unregister(key.fd)
