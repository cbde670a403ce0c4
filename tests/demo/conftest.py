"""The model's files, and the demo as a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import _iris_command
from iris.demo import inputs
from iris.errors import IrisError

SRC = str(Path(_iris_command.__file__).parent)


@pytest.fixture(scope="session")
def folder() -> Path:
    """The folder of the model; skips with the reason where it is not installed."""
    try:
        return inputs.find_model()
    except IrisError as error:
        pytest.skip(str(error))


def environment(*first: object) -> dict[str, str]:
    """The environment for a demo, without what a launcher or the user has set; ``first`` leads PYTHONPATH."""
    foreign = ("IRIS_", "TORCHELASTIC_")
    single = ("TRITON_INTERPRET", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    values = {k: v for k, v in os.environ.items() if not k.startswith(foreign) and k not in single}
    values["PYTHONPATH"] = os.pathsep.join([*map(str, first), SRC, *filter(None, [os.environ.get("PYTHONPATH")])])
    return values


@pytest.fixture
def python(tmp_path):
    """Runs ``python`` with arguments, in a folder of its own."""

    def run(*arguments: object, path: tuple[object, ...] = ()) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            env=environment(*path),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
            stdin=subprocess.DEVNULL,
        )

    return run
