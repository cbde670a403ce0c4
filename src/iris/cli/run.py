"""``iris run``: the ranks of a program on this machine.

The rank processes get the environment that torchrun gives them, so a program written for torchrun runs unchanged. They
are started here and not through torchrun's agent for three reasons. The launcher owns the listening socket of the
rendezvous store from before the first rank starts, so no port is guessed and runs that start together never collide.
The rank that failed *first* is told from those that only noticed, and its traceback is the last thing printed. And
whatever ends the launcher ends the ranks: they ask the kernel to be killed with it.

When fewer GPUs are visible than ranks, ranks share GPUs: on NVIDIA through a private MPS daemon that lives as long as
the run (:mod:`iris.runtime.mps`), on AMD as they are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from iris import _env
from iris.cli import _report
from iris.cli._supervise import Outcome, Supervisor
from iris.errors import ArgumentError
from iris.runtime import rank_processes


def launch(
    command: Sequence[str],
    num_ranks: int,
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    python: bool = True,
) -> int:
    """Run a program as ``num_ranks`` rank processes on this machine and wait for all of them.

    Standard output and standard error of the ranks go to the launcher's. When a rank fails, the others are ended within
    seconds and the failure that came first is printed to standard error.

    Args:
        command: ``["script.py", argument...]`` or ``["-m", "module", argument...]``.
        num_ranks: how many ranks, from 1.
        timeout: seconds after which all ranks are ended, with a report of where they were; None for no limit.
        env: environment variables for the ranks, besides those of the launcher.
        python: False if ``command`` is any program and not a Python script.

    Returns:
        0 if all ranks ended with 0. Otherwise the exit code of the rank that failed first (128 + N when signal N ended
        it), 124 when the time limit was reached, 128 + N when signal N was sent to the launcher.

    Raises:
        ArgumentError: the arguments or an ``IRIS_...`` variable cannot be used, found before anything is started.
    """
    kind, words = check_command(command, num_ranks, timeout, python)
    environment = {**os.environ, **(env or {})}
    with _signals() as received, contextlib.ExitStack() as stack:
        environment.update(rank_processes.defaults(environment, num_ranks))
        environment.update(rank_processes.share_gpus(stack, environment, num_ranks))
        store = stack.enter_context(_Store())
        supervisor = stack.enter_context(Supervisor(lambda: received[0] if received else 0))
        if received:
            outcome = Outcome([], signal=received[0])
        else:
            supervisor.start(kind, words, rank_processes.environments(environment, num_ranks, store.port))
            store.serve()
            outcome = supervisor.wait(timeout, store.check)
    _report.show(outcome, timeout)
    return _report.exit_code(outcome)


def check_command(command: Sequence[str], num_ranks: int, timeout: float | None, python: bool) -> tuple[str, list[str]]:
    """The kind of the command and its words, or an error that says what cannot be."""
    if num_ranks < 1:
        raise ArgumentError(f"num_ranks is {num_ranks}; possible: a whole number from 1")
    if timeout is not None and not timeout > 0:
        raise ArgumentError(f"timeout is {timeout:g}; possible: seconds, more than 0")
    _env.check_all()
    words = list(command)
    kind = "script" if python else "program"
    if python and words[:1] == ["-m"]:
        kind, words = "module", words[1:]
    if not words:
        raise ArgumentError(f"no program was given; a {kind} is needed, with its arguments after it")
    if kind == "script" and not os.path.exists(words[0]):
        raise ArgumentError(
            f"there is no script {words[0]!r} (seen from {os.getcwd()}); a module is run with -m, a program that is "
            "not Python with --no-python"
        )
    return kind, words


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that should end the run, in a list, instead of ending the launcher at once."""
    received: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    previous = {}
    # Only the main thread may set handlers; elsewhere the program that calls launch() keeps its own.
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # One that is ignored was ignored on purpose, by nohup or by a shell for its background jobs.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                previous[signum] = signal.signal(signum, handler)
    try:
        yield received
    finally:
        for signum, old in previous.items():
            signal.signal(signum, old)


class _Store:
    """The rendezvous store of the run. Its socket listens at once; torch, slow to load, is needed only to answer."""

    def __init__(self) -> None:
        # Queued connections wait in the backlog until the store answers, so it must hold all ranks.
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="iris-store")
        self._store: object = None
        self._error: BaseException | None = None

    def __enter__(self) -> _Store:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        self._store = None
        self._socket.close()

    def serve(self) -> None:
        """Answer from now on. Called after the ranks were started, so that all load torch at the same time."""
        self._thread.start()

    def check(self) -> None:
        """Raise what kept the store from answering."""
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        try:
            from torch.distributed import TCPStore

            # A copy of the descriptor: the store closes the one it is given.
            self._store = TCPStore(
                "127.0.0.1",
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=os.dup(self._socket.fileno()),
            )
        except BaseException as error:  # noqa: BLE001 - raised again by check() in the thread that waits
            self._error = error
