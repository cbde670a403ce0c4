"""The options and fixtures of ``tests/conftest.py``, in a pytest of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from iris.runtime.settle import gpu_visible

CONFTEST = Path(__file__).parents[1] / "conftest.py"
PROGRAM = """
    import os
    import pytest

    def body(rank, world_size):
        return world_size, os.environ["IRIS_RUNTIME"]

    def test_any(ranks, world):
        assert ranks(world).run(body, context=None) == [(world, os.environ.get("WANTED"))] * world

    @pytest.mark.parametrize("world", [5, 2])
    def test_own(world):
        assert world in (2, 5)

    def test_last(ranks, world):
        assert world

    @pytest.mark.gpu
    def test_gpu():
        pass

    def test_plain():
        assert os.environ["TRITON_INTERPRET"] == "1"
        assert "IRIS_RUNTIME" not in os.environ
"""


@pytest.fixture
def pytest_in(tmp_path):
    """Runs pytest on :data:`PROGRAM` and returns its exit code and what it printed."""
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\nmarkers = gpu: needs a GPU\n")
    (tmp_path / "test_it.py").write_text(re.sub("^    ", "", PROGRAM, flags=re.MULTILINE))

    def run(*arguments, **variables):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "PYTEST_", "TRITON_"))}
        environment = kept | variables | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "test_it.py"]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        return done.returncode, done.stdout + done.stderr

    return run


def test_worlds_follow_each_other(pytest_in):
    code, text = pytest_in("--collect-only", "--worlds", "3,2")
    assert code == 0, text
    assert re.findall(r"::(\S+)", text) == [
        "test_plain", "test_any[2]", "test_last[2]", "test_own[2]", "test_any[3]", "test_last[3]", "test_own[5]",
    ]  # fmt: skip
    assert "tests that need a GPU are left out, 1 here: run them with -m gpu" in text


def test_a_plain_run_is_on_the_cpu(pytest_in):
    code, text = pytest_in("--worlds", "1,2", WANTED="cpu")
    assert code == 0, text
    assert "7 passed, 1 deselected" in text


def test_a_failure_is_a_failure(pytest_in):
    code, text = pytest_in("--worlds", "2", "-k", "any", WANTED="other")
    assert code == 1, text
    assert "1 failed" in text


@pytest.mark.skipif(gpu_visible(), reason="shows what happens without a GPU")
@pytest.mark.parametrize("options", [("-m", "gpu"), ("-m", "gpu", "--runtime", "gpu")])
def test_asking_for_gpu_tests_without_a_gpu_is_no_success(pytest_in, options):
    code, text = pytest_in(*options)
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED, text
    # test_gpu, and test_any and test_last with four worlds each.
    assert "tests that need a GPU are left out, 9 here: no GPU is visible" in text


def test_bad_options_are_refused(pytest_in):
    code, text = pytest_in("--worlds", "two")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--worlds=two: expected numbers such as 1,2,4" in text
