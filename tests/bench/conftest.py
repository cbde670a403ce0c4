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

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """The benchmarks that a test registers are the only ones."""
    monkeypatch.setattr(declare, "_benchmarks", [])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def measure():
    """Runs the registered benchmarks; returns the results of rank 0. More than one rank: in the simulator."""

    def run(*argv, world=1, fails=False):
        words = [f"--axis_num_ranks={world}", "--n_warmup=1", "--n_repeat=2", *argv]
        found = []

        def body(ctx):
            if ctx is not None:
                del ctx
            try:
                found.append(bench.main(words))
            except SystemExit as stop:
                codes.append(stop.code)

        codes = []
        if world == 1:
            body(None)
        else:
            sim.run(body, world, heap_size=1 << 20)
        assert codes.count(1) == (1 if fails else 0), codes
        return found[0] if found else None

    return run


@pytest.fixture
def records(measure, tmp_path):
    """As ``measure``, but returns what the JSON file holds; for runs that leave with 1 too."""

    def run(*argv, **options):
        out = tmp_path / "results.json"
        measure(f"--benchmark_out={out}", *argv, **options)
        return json.loads(out.read_text())

    return run


@pytest.fixture
def script(tmp_path):
    """Writes a benchmark script and returns a function that runs ``python SCRIPT`` or the ``iris`` command with it."""

    def write(text):
        path = tmp_path / "bench_program.py"
        path.write_text(textwrap.dedent(text))

        def run(*words, command=(), timeout=100, **changes):
            ours = ("IRIS_", "TORCHELASTIC_")
            single = ("TRITON_INTERPRET", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
            environment = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in single}
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
            return subprocess.run(
                [sys.executable, *command, str(path), *words],
                env={**environment, **changes},
                capture_output=True,
                text=True,
                timeout=timeout,
                stdin=subprocess.DEVNULL,
            )

        return run

    return write
