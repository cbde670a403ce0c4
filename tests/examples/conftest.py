"""How the tests of the examples start the ranks of a program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 90


@pytest.fixture
def launch(request):
    """Runs ``iris run -n ranks [options] program arguments`` on the runtime of the test session, or with ``--sim``."""
    ours = ("IRIS_", "TORCHELASTIC_", "CUDA_MPS_", "TORCH_SYMM_MEM_")
    single = ("TRITON_INTERPRET", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in single}
    environment["IRIS_RUNTIME"] = request.config.getoption("--runtime")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))

    def start(
        ranks: int, program: Path, *arguments: object, options: tuple[object, ...] = ()
    ) -> subprocess.CompletedProcess:
        command = ["run", "-n", ranks, "--timeout", TIME_LIMIT_S, *options, program, *arguments]
        return subprocess.run(
            [sys.executable, "-m", "_iris_command", *map(str, command)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S + 20,
            stdin=subprocess.DEVNULL,
        )

    return start


@pytest.fixture
def run(launch):
    """Runs ``iris run -n ranks program arguments``, which must end well; returns the lines that it printed."""

    def start(*words: object, options: tuple[object, ...] = ()) -> list[str]:
        result = launch(*words, options=options)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout.splitlines()

    return start
