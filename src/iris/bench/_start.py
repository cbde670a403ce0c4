"""Starts the ranks of a benchmark script: ``iris run`` with the same script, once for each number of ranks.

The two sides share a file, named in ``IRIS_BENCH_RUN``. Its first line is what to measure; rank 0 adds a line with the
environment and one with the results of each group as it goes, so that a run that ends early leaves what it had.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from iris import _env
from iris.bench._options import Combination
from iris.bench.results import Result, from_record
from iris.errors import ArgumentError
from iris.runtime.settle import settled

VARIABLE = "IRIS_BENCH_RUN"
_WITHOUT_GPU = 2
_POLL_SECONDS = 0.2


def default_num_ranks() -> int:
    """How many ranks a benchmark without the axis ``num_ranks`` has: one for each GPU, 2 without GPUs."""
    return torch.cuda.device_count() if settled()[0] == "gpu" else _WITHOUT_GPU


def asked() -> tuple[Path, set[int]] | None:
    """For a rank that another process of the script started: the shared file and the places of what it measures."""
    path = _env.get(VARIABLE)
    if path is None:
        return None
    with open(path) as file:
        return Path(path), set(json.loads(file.readline())["indices"])


def add(path: Path, **line: Any) -> None:
    """Add a line to the shared file."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def run_ranks(
    combinations: Sequence[Combination], num_ranks: int, progress: Callable[[int], None]
) -> tuple[dict[str, Any] | None, list[Result], int]:
    """Measure combinations on ranks of their own.

    Args:
        combinations: what to measure.
        num_ranks: how many ranks.
        progress: told now and then how many combinations have results.

    Returns:
        The environment, None when the ranks did not get so far; the results; the exit code of the run.
    """
    with tempfile.TemporaryDirectory(prefix="iris-bench-") as folder:
        path = Path(folder, "results.jsonl")
        add(path, indices=[combination.index for combination in combinations])
        command = [sys.executable, "-m", "_iris_command", "run", "-n", str(num_ranks), *_program()]
        with _started([*command, *sys.argv[1:]], {**os.environ, VARIABLE: str(path)}) as process:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
                lines = _lines(path)
                progress(len({r["index"] for line in lines for r in line.get("results", ())}))
                if process.returncode is not None:
                    break
        lines = _lines(path)
    params = {combination.index: combination.params for combination in combinations}
    results = [from_record(r, params[r["index"]]) for line in lines for r in line.get("results", ())]
    return next((line["environment"] for line in lines if "environment" in line), None), results, process.returncode


@contextlib.contextmanager
def _started(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with this one, also when a signal ends it."""

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    previous = {}
    if threading.current_thread() is threading.main_thread():  # elsewhere no handler can be set
        for signum in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is signal.SIG_DFL:
                previous[signum] = signal.signal(signum, leave)
    process = subprocess.Popen(command, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        for signum, old in previous.items():
            signal.signal(signum, old)


def _lines(path: Path) -> list[dict[str, Any]]:
    # The last line may still be being written.
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.split("\n")]


def _program() -> list[str]:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]
    file = getattr(main, "__file__", None)
    if file is None:
        raise ArgumentError(
            "iris.bench starts ranks by running a script again, and this program has none: put the benchmarks into a "
            "file, or ask for one rank with --axis_num_ranks=1"
        )
    return [file]
