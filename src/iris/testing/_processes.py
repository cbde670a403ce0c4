"""The processes of a pool: how they start, where they write, how they end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch.distributed as dist

from iris.runtime import rank_processes
from iris.testing import _messages

START_SECONDS = 120.0
END_SECONDS = 5.0
_SHOWN_BYTES = 16_000
# Test modules import these; with them imported before the fork, each rank need not.
_PRELOAD = ("pytest", "hypothesis", "numpy.testing")


class Request(NamedTuple):
    """Run this body."""

    body: _messages.Reference
    arguments: bytes
    heap_bytes: int | None


class Reply(NamedTuple):
    """What a body came to.

    Attributes:
        payload: pickle of its value or of its exception, None for an exception that cannot be pickled.
        finished_at: ``time.monotonic()``, the same clock in all processes.
        intact: whether the process group is still there for the next body.
    """

    rank: int
    returned: bool
    payload: bytes | None
    error_name: str
    traceback: str
    finished_at: float
    intact: bool


@dataclass(frozen=True)
class Start:
    """What a worker needs to know.

    Attributes:
        world_size: number of ranks.
        ranks: for each rank that this worker is to become, the descriptor of its socket.
        gpus: number of GPUs to use, 0 for none; without them the worker forks its ranks.
        folder: where ranks write.
        parent: process id of the pool's process.
        path: the pool's ``sys.path``.
        preload: modules to import before the fork.
    """

    world_size: int
    ranks: dict[int, int]
    gpus: int
    folder: str
    parent: int
    path: tuple[str, ...]
    preload: tuple[str, ...]


def output_file(folder: str, rank: int | None) -> str:
    return os.path.join(folder, "output" if rank is None else f"output.{rank}")


def stack_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"stack.{rank}")


def status_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"status.{rank}")


class RankProcesses:
    """Running ranks. They end when this process ends, however it does.

    The kernel counts the thread that made the ranks as their parent, so call from a thread that outlives them.

    Args:
        world_size: number of ranks.
        gpus: number of GPUs to spread them over, 0 to run without.
        env: environment variables, on top of this process's.
    """

    def __init__(self, world_size: int, gpus: int, env: Mapping[str, str]):
        self.world_size = world_size
        self.connections: list[Connection] = []
        self._pids: list[int] = []
        self._popens: list[subprocess.Popen] = []
        self._stack = contextlib.ExitStack()
        try:
            self._spawn(gpus, env)
            self._await_ready()
        except BaseException:
            self.kill()
            raise

    def _spawn(self, gpus: int, env: Mapping[str, str]) -> None:
        self.folder = tempfile.mkdtemp(prefix="iris-ranks-")
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        # This process hosts the store, so no port has to be found and passed on.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5)
        )
        environments = self._environments(gpus, env)
        theirs: dict[int, int] = {}
        try:
            for rank in range(self.world_size):
                here, there = socket.socketpair()
                self.connections.append(Connection(here.detach()))
                theirs[rank] = there.detach()
            # A GPU's driver does not survive a fork.
            for ranks in [{rank: fd} for rank, fd in theirs.items()] if gpus else [theirs]:
                self._popens.append(self._launch(ranks, gpus, environments[min(ranks)]))
        finally:
            # Only the ranks hold their ends, so that the end of a rank shows as the end of its socket.
            for fd in theirs.values():
                os.close(fd)

    def _environments(self, gpus: int, env: Mapping[str, str]) -> list[dict[str, str]]:
        values = {**os.environ, **env}
        if "TRITON_INTERPRET" not in env:
            # `import iris` sets it in this process, perhaps for another runtime than the ranks', and again in theirs.
            values.pop("TRITON_INTERPRET", None)
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        if os.path.basename(root) != "site-packages":  # A source tree that is not installed.
            values["PYTHONPATH"] = os.pathsep.join(filter(None, [root, values.get("PYTHONPATH")]))
        if not gpus and "OMP_NUM_THREADS" not in env:
            values["OMP_NUM_THREADS"] = "1"
        values |= rank_processes.defaults(values, self.world_size)
        if gpus and "CUDA_MPS_PIPE_DIRECTORY" in values:
            values |= self._share_under_running_daemon(gpus)
        elif gpus:
            values |= rank_processes.share_gpus(self._stack, values, self.world_size)
        return rank_processes.environments(values, self.world_size, self._store.port)

    def _share_under_running_daemon(self, gpus: int) -> dict[str, str]:
        ranks_per_gpu = -(-self.world_size // gpus)
        if ranks_per_gpu == 1:
            return {}
        return {
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(max(1, 100 // ranks_per_gpu)),
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
            "IRIS_RANKS_PER_GPU": str(ranks_per_gpu),
        }

    def _launch(self, ranks: dict[int, int], gpus: int, environment: dict[str, str]) -> subprocess.Popen:
        preload = tuple(name for name in _PRELOAD if name in sys.modules)
        start = Start(self.world_size, ranks, gpus, self.folder, os.getpid(), tuple(sys.path), preload)
        path = os.path.join(self.folder, f"start.{min(ranks)}")
        with open(path, "wb") as file:
            file.write(_messages.dumps(start))
        with open(output_file(self.folder, None), "ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "iris.testing._worker", path],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=tuple(ranks.values()),
                # Ctrl-C is for this process, which then ends the ranks; and one group holds all there is to kill.
                start_new_session=True,
            )

    def _await_ready(self) -> None:
        """Wait until every rank has joined the process group."""
        deadline = time.monotonic() + START_SECONDS
        for step in ("start", "join the process group"):
            for rank, connection in enumerate(self.connections):
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    trouble = f"rank {rank} did not {step} within {START_SECONDS:g} s\n{self.stacks([rank])[rank]}"
                    raise RuntimeError(trouble + self.output(rank))
                try:
                    word = _messages.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    trouble = f"rank {rank} ended with {self.status(rank)} before it could {step}\n"
                    raise RuntimeError(trouble + self.output(None) + self.output(rank)) from None
                if isinstance(word, int):
                    self._pids.append(word)

    def idle(self) -> bool:
        """Whether every rank is alive and waits for a request. An ended rank's socket is readable: its end is there."""
        return not any(connection.poll() for connection in self.connections)

    def status(self, rank: int) -> str:
        """How the process of an ended rank ended."""
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            if len(self._popens) > 1:
                code = self._popens[rank].poll()
            else:
                text = _read(status_file(self.folder, rank))
                code = int(text) if text else None
            if code is not None:
                return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            if len(self._popens) == 1 and self._popens[0].poll() is not None:
                break  # It would have written the status.
            time.sleep(0.005)
        return "unknown status"

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """The Python stacks of running ranks, of all their threads."""
        asked = [rank for rank in ranks if rank < len(self._pids)]
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        deadline, before = time.monotonic() + 2, None
        while time.monotonic() < deadline:
            time.sleep(0.1)
            found = [_read(stack_file(self.folder, rank)) for rank in asked]
            if found == before and all(found):
                break
            before = found
        texts = {rank: _read(stack_file(self.folder, rank)) for rank in asked}
        return {rank: texts.get(rank) or "no stack: it did not answer SIGUSR1\n" for rank in ranks}

    def marks(self) -> list[int]:
        """How much each rank has written so far."""
        return [_size(output_file(self.folder, rank)) for rank in range(self.world_size)]

    def output(self, rank: int | None, mark: int = 0) -> str:
        """The end of what a rank has written since ``mark``; None for what it wrote before it was a rank."""
        path = output_file(self.folder, rank)
        mark = max(mark, _size(path) - _SHOWN_BYTES)
        return _read(path, mark)

    def close(self) -> None:
        """Ask the ranks to end, and end those that do not within some seconds."""
        for connection in self.connections:
            connection.close()
        deadline = time.monotonic() + END_SECONDS
        with contextlib.suppress(subprocess.TimeoutExpired):
            for popen in self._popens:
                popen.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the ranks at once and remove what they left."""
        for popen in self._popens:
            # The group holds forked ranks, and processes that bodies started, also where its leader has ended.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
        for connection in self.connections:
            if not connection.closed:
                _await_end(connection)
                connection.close()
        self._popens, self.connections, self._pids = [], [], []
        self._stack.close()


def _await_end(connection: Connection) -> None:
    """Wait until the process at the other end is gone; the kernel then closes its socket."""
    with contextlib.suppress(EOFError, ConnectionResetError):
        while connection.poll(END_SECONDS):
            connection.recv_bytes()


def _read(path: str, start: int = 0) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0
