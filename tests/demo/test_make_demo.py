"""What ``make demo`` runs, with and without the packages of the model."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = "run -n 2 examples/tensor_parallel_minilm.py --validate"
LAYER = "demo"
RANDOM = "run -n 4 examples/06_all_gather_matmul.py"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make on this machine")


@pytest.fixture
def make_demo(tmp_path):
    """Runs ``make demo`` with programs of its own for pip and ``iris``: ``python`` and ``iris`` are lines of shell."""

    def run(python: str, iris: str = "true") -> tuple[int, list[str], str]:
        venv = tmp_path / "venv"
        (venv / "bin").mkdir(parents=True)
        calls = tmp_path / "calls"
        for name, line in (("python", python), ("iris", f'echo "$@" >> {calls}\n{iris}')):
            (venv / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
            (venv / "bin" / name).chmod(0o755)
        (venv / ".base").touch()  # newer than pyproject.toml: made
        result = subprocess.run(
            ["make", "demo", f"VENV={venv}"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        return result.returncode, calls.read_text().splitlines(), result.stdout

    return run


def test_with_the_packages(make_demo):
    code, calls, printed = make_demo("true")
    assert (code, calls) == (0, [MODEL, LAYER])
    assert "No model" not in printed


def test_without_the_packages(make_demo):
    code, calls, printed = make_demo("false")
    assert (code, calls) == (0, [RANDOM])
    assert "No model: its packages could not be installed, 'make demo' tries again." in printed


def test_a_wrong_model_is_an_error(make_demo):
    code, calls, _ = make_demo("true", '[ "$1" = demo ]')
    assert code != 0
    assert calls == [MODEL]


def test_a_wrong_layer_is_an_error(make_demo):
    code, calls, _ = make_demo("true", '[ "$1" = run ]')
    assert code != 0
    assert calls == [MODEL, LAYER]


def test_a_wrong_product_of_random_numbers_is_an_error(make_demo):
    code, calls, _ = make_demo("false", "false")
    assert code != 0
    assert calls == [RANDOM]
