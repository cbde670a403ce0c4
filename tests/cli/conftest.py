"""The ``iris`` command as a process, and programs for its ranks."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import _iris_command

SRC = str(Path(_iris_command.__file__).parent)


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment without anything of Iris or of another launcher in it; None removes a variable."""
    ours = ("IRIS_", "TORCHELASTIC_", "CUDA_MPS_", "TORCH_SYMM_MEM_", "NCCL_", "NVSHMEM_")
    single = ("TRITON_INTERPRET", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    values = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in single}
    path = os.environ.get("PYTHONPATH")
    values["PYTHONPATH"] = os.pathsep.join([SRC, path] if path else [SRC])
    for name, value in changes.items():
        values.pop(name, None)
        if value is not None:
            values[name] = value
    return values


class Command:
    """Runs ``iris`` with arguments."""

    words = (sys.executable, "-m", "_iris_command")

    def __call__(self, *arguments: object, timeout: float = 60, **changes: str | None) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*self.words, *map(str, arguments)],
            env=environment(**changes),
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    def start(self, *arguments: object, **changes: str | None) -> subprocess.Popen:
        return subprocess.Popen(
            [*self.words, *map(str, arguments)],
            env=environment(**changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture
def iris_command() -> Command:
    return Command()


@pytest.fixture
def script(tmp_path):
    """Writes a program for the ranks and returns its path."""

    def write(text: str, name: str = "program.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write
