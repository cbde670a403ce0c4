"""A registry of a test's own, and ``bench.main`` in this process as one rank or as several simulated ones."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from iris import bench, sim
from iris.bench import declare
from iris.bench.results import from_record

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """The benchmarks that a test registers are the only ones."""
    monkeypatch.setattr(declare, "_benchmarks", [])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def records(tmp_path):
    """Runs the registered benchmarks; returns what the JSON file holds. More than one rank: in the simulator."""

    def run(*argv, world=1, fails=False, counts=("--n_warmup=1", "--n_repeat=2")):
        out = tmp_path / "results.json"
        words = [f"--axis_num_ranks={world}", f"--benchmark_out={out}", *counts, *argv]
        codes = []

        def body(_ctx=None):
            try:
                bench.main(words)
            except SystemExit as stop:
                codes.append(stop.code)

        body() if world == 1 else sim.run(body, world, heap_size=1 << 20)
        # The leading rank tells the launcher.
        assert codes.count(1) == fails, codes
        return json.loads(out.read_text())

    return run


@pytest.fixture
def measure(records):
    """As ``records``, but returns results."""

    def run(*argv, **options):
        found = records(*argv, **options)
        return [from_record({k: v for k, v in r.items() if k != "environment"}, r["params"]) for r in found]

    return run


class Script:
    """A benchmark script. Called, it runs ``python SCRIPT words`` or a command with the script and the words."""

    def __init__(self, path):
        ours = ("IRIS_", "TORCHELASTIC_")
        single = ("TRITON_INTERPRET", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        self.path = path
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in single}
        python_path = filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])
        self.environment["PYTHONPATH"] = os.pathsep.join(python_path)

    def __call__(self, *words, command=(), timeout=100):
        return subprocess.run(
            [sys.executable, *command, str(self.path), *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture
def script(tmp_path):
    """Writes a benchmark script."""

    def write(text):
        path = tmp_path / "bench_program.py"
        path.write_text(textwrap.dedent(text))
        return Script(path)

    return write


@pytest.fixture
def own_script():
    """A script of the folder benchmarks, by name."""
    return lambda name: Script(ROOT / "benchmarks" / name)
