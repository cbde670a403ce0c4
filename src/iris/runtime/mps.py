"""A private NVIDIA MPS daemon for the length of one run.

Without MPS, kernels of several processes on one GPU take turns, and a kernel that waits for a peer's flag waits for a
whole time slice. With it they run side by side.

A small guard process starts the daemon and ends it when its standard input closes. The kernel closes that pipe however
the launcher ends, SIGKILL included, so there is one path of cleaning up and it is always taken. The guard is this file,
run by path: it must not import the package (see ``_rank.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping

CONTROL = "nvidia-cuda-mps-control"
# A socket's path may have 107 bytes, and the daemon adds its own names to the folder's.
LONGEST_FOLDER = 60
START_SECONDS = 30.0
QUIT_SECONDS = 10.0
PR_SET_CHILD_SUBREAPER = 36


def binary(environment: Mapping[str, str] = os.environ) -> str | None:
    """Path of the MPS control program, or None when it is not on ``PATH``."""
    return shutil.which(CONTROL, path=environment.get("PATH"))


@contextlib.contextmanager
def session(ranks_per_gpu: int, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Run a private daemon while the block runs.

    Args:
        ranks_per_gpu: how many ranks share a GPU; each is limited to its share of the compute units.
        environment: the environment to find and start the daemon in.

    Yields:
        The variables that make a child process use the daemon.

    Raises:
        RuntimeError: the daemon did not start; the message holds what it printed.
    """
    guard = subprocess.Popen(
        [sys.executable, "-I", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,  # Ctrl-C in the terminal is for the launcher; the guard outlives it by a moment.
    )
    assert guard.stdin is not None
    assert guard.stdout is not None
    try:
        word, _, rest = guard.stdout.readline().decode().strip().partition(" ")
        if word != "ready":
            raise RuntimeError(f"{CONTROL} did not start: {rest or 'its guard process ended without a word'}")
        yield {**folders(rest), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(max(1, 100 // ranks_per_gpu))}
    finally:
        guard.stdin.close()
        guard.stdout.close()
        guard.wait()


def folders(root: str) -> dict[str, str]:
    """The variables that name a daemon's private folders."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": os.path.join(root, "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": os.path.join(root, "log"),
    }


def processes(pipe_directory: str) -> list[int]:
    """Process ids of the daemon and of the servers that belong to a pipe directory."""
    wanted = f"CUDA_MPS_PIPE_DIRECTORY={pipe_directory}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                command = file.read()
            with open(f"/proc/{entry}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            continue  # Ended meanwhile, or someone else's.
        if b"nvidia-cuda-mps" in command and wanted in variables:
            found.append(int(entry))
    return found


def _start(control: str, environment: dict[str, str]) -> str:
    """Start the daemon; an empty string, or what went wrong."""
    # The daemon writes on after it has detached, so its output goes to a file: a pipe would never reach its end.
    with open(os.path.join(environment["CUDA_MPS_LOG_DIRECTORY"], "start"), "w+") as output:
        try:
            code = subprocess.call(
                [control, "-d"], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                timeout=START_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no answer in {START_SECONDS:g} s"
        output.seek(0)
        return "" if code == 0 else f"exit code {code}: {' '.join(output.read().split())}"


def _end(control: str, environment: dict[str, str]) -> None:
    """Ask the daemon to quit, then end what is left of it."""
    pipe_directory = environment["CUDA_MPS_PIPE_DIRECTORY"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [control], env=environment, input=b"quit\n", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=QUIT_SECONDS, check=False,
        )  # fmt: skip
    for signum in (None, signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + QUIT_SECONDS / 2
        while not _gone(pipe_directory, signum):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        else:
            return


def _gone(pipe_directory: str, signum: int | None) -> bool:
    """Whether nothing of a daemon is left; what has ended is collected, and what has not is sent ``signum``."""
    running = processes(pipe_directory)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            if signum is not None:
                os.kill(pid, signum)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return not running
    return False


def _guard() -> int:
    """Start a daemon, say so, end it at the end of standard input."""
    # The daemon detaches itself. It becomes a child of this process then and not of process 1, which in many containers
    # collects nobody.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    control = binary()
    if control is None:
        print(f"error {CONTROL} is not on PATH", flush=True)
        return 1
    parent = tempfile.gettempdir()
    root = tempfile.mkdtemp(prefix="iris-mps-", dir=parent if len(parent) <= LONGEST_FOLDER else "/tmp")
    environment = {**os.environ, **folders(root)}
    # The daemon would number its GPUs by this list, and each client would then apply the list once more.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        for folder in folders(root).values():
            os.mkdir(folder, mode=0o700)
        trouble = _start(control, environment)
        print(f"error {trouble}" if trouble else f"ready {root}", flush=True)
        if not trouble:
            sys.stdin.buffer.read()
        return 1 if trouble else 0
    finally:
        _end(control, environment)
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(_guard())
