"""Scripts as users start them: alone, through ``iris bench``, ``iris run`` and with ranks that are processes."""

import argparse
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from iris import bench
from iris.bench import _options
from iris.cli import bench as command
from iris.cli._app import app
from iris.errors import ArgumentError

IRIS = ("-m", "_iris_command")

SWEEP = """
    \"\"\"Sums.\"\"\"
    import time

    import torch
    import triton
    import triton.language as tl

    import iris
    from iris import bench

    @triton.jit
    def wait_for_nobody(context, flag, rank: tl.constexpr, world: tl.constexpr):
        iris.DeviceContext.initialize(context, rank, world).wait(flag, 1, peer=0)

    @bench.register
    @bench.axis("num_ranks", [1, 2])
    @bench.axis("case", ["first", "one rank", "waits", "late", "last"])
    def sums(state, ctx):
        rank, world, case = ctx.get_rank(), ctx.get_num_ranks(), state["case"]
        if world == 1 and case != "last":
            state.skip("one rank alone")
        if case == "one rank" and rank == 1:
            raise torch.OutOfMemoryError("planted")
        data = [bench.random_tensor((8,), torch.float32, seed=1, rank=r) for r in range(world)]
        out, flag = ctx.as_symmetric(data[rank]), ctx.zeros(1, dtype=torch.int32)
        context = ctx.get_device_context().clone()
        context[-3] = 300_000  # microseconds that a wait may take
        ctx.barrier()
        if case == "late":
            ctx.exchange.timeout_s = 1.0
            time.sleep(0 if rank else 2.5)

        def fn():
            if case == "waits" and rank == 1:
                wait_for_nobody[(1,)](context, flag, rank, world)
            ctx.ccl.all_reduce(out, out)

        state.validate(out, sum(part.double() for part in data), k=world, poison=False)
        state.exec(fn, preamble_fn=lambda: out.copy_(data[rank]))

    if __name__ == "__main__":
        bench.main()
"""


def test_ranks_are_started_for_each_number_and_a_sweep_outlives_failures(script, tmp_path):
    out = tmp_path / "out.json"
    result = script(SWEEP)("--n_repeat=2", f"--benchmark_out={out}")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "3 of 10 were not measured: 0 wrong, 3 failed" in result.stderr
    records = json.loads(out.read_text())
    cases = ["first", "one rank", "waits", "late", "last"]
    assert [(r["world_size"], r["params"]["case"]) for r in records] == [(w, c) for w in (1, 2) for c in cases]
    by_case = {(r["world_size"], r["params"]["case"]): r for r in records}
    assert [by_case[1, case]["skip_reason"] for case in cases[:4]] == ["one rank alone"] * 4
    for world, case in ((1, "last"), (2, "first"), (2, "last")):
        assert by_case[world, case]["gpu_time_ms"] > 0
        assert by_case[world, case]["validated"]
        assert len(by_case[world, case]["local_times_ms"]) == world
    assert by_case[2, "one rank"]["error"] == "rank 1: OutOfMemoryError in the set-up: planted"
    assert by_case[2, "waits"]["error"].startswith("rank 1: WaitTimeout in the validation: a wait did not end")
    assert by_case[2, "late"]["error"] == "a rank came to the end of the set-up later than IRIS_TIMEOUT allows"
    assert {r["environment"]["runtime"] for r in records} == {"cpu"}
    assert {r["environment"]["command"].split()[1] for r in records} == {"--n_repeat=2"}
    assert "GPU Time (ms)" in result.stdout


SMALL = """
    \"\"\"Copies.\"\"\"
    import iris
    import torch
    from iris import bench

    @bench.register
    @bench.axis("num_ranks", [2, 5])
    def copy(state, ctx):
        source = bench.random_tensor((64,), torch.float32, seed=1, rank=ctx.get_rank())
        target = torch.empty(64)
        state.validate(target, source)
        state.exec(lambda: target.copy_(source))

    bench.main()
    print("after", file=__import__("sys").stderr)
"""


@pytest.mark.parametrize("how", ["sim", pytest.param("run", marks=pytest.mark.slow)])
def test_ranks_of_a_launcher_measure_in_place(script, how):
    options = ("--sim",) if how == "sim" else ()
    result = script(SMALL)("--benchmark_format=csv", command=(*IRIS, "run", *options, "-n", "2"))
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = csv.DictReader(io.StringIO(result.stdout))
    assert (row["benchmark"], row["world_size"], row["runtime"]) == ("copy", "2", "cpu" if how == "run" else "sim")
    assert "warning: this run has 2 ranks; left out: num_ranks 5" in result.stderr
    assert result.stderr.count("after") == 2


SLEEPS = """
    import os
    import time
    from iris import bench

    @bench.register
    @bench.axis("num_ranks", [2])
    def sleeps(state, ctx):
        print(os.getpid(), flush=True)
        state.exec(lambda: time.sleep(0.5))

    bench.main()
"""


@pytest.mark.slow
def test_a_signal_ends_the_ranks(script):
    run = script(SLEEPS)
    command = [sys.executable, str(run.path), "--n_repeat=1000"]
    started = subprocess.Popen(command, env=run.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks = [int(started.stdout.readline()) for _ in range(2)]
    started.terminate()
    started.communicate(timeout=60)
    assert started.returncode == 128 + signal.SIGTERM
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]


def test_iris_bench_becomes_the_script(script):
    program = "import os, sys; print(os.getppid(), __name__, sys.argv[1:]); sys.exit(3)"
    result = script(program)("--axis_M=1", "-n", "--help", command=(*IRIS, "bench"))
    assert result.returncode == 3, result.stderr
    assert result.stdout == f"{os.getpid()} __main__ ['--axis_M=1', '-n', '--help']\n"


def test_iris_bench_lists_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command.bench(None, [])
    assert "no benchmark script in" in capsys.readouterr().out
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "copy.py").write_text(
        '"""Copies.\n\nMore."""\nfrom iris import bench\n@bench.register\ndef f(s, c): ...\n'
    )
    (folder / "helper.py").write_text("raise SystemExit('this ran')\n")
    (folder / "torn.py").write_text("def (")
    command.bench(None, [])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "benchmarks/copy.py  Copies."
    assert lines[1].startswith("benchmarks/torn.py  (cannot be read: ")
    assert lines[3] == "Run one with: iris bench benchmarks/copy.py"


def test_iris_bench_refuses(tmp_path):
    with pytest.raises(ArgumentError, match="there is no script"):
        command.bench(tmp_path / "none.py", [])
    with pytest.raises(ArgumentError, match="is a folder; name the script that --x is for"):
        command.bench(tmp_path, ["--x"])


def test_the_help_of_iris_bench():
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0
    assert "iris bench SCRIPT --help" in " ".join(result.output.split())


def test_the_example_of_the_page(script):
    page = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text()
    (program,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    result = script(program)("--axis_M=64", "--n_warmup=0", "--n_repeat=1", command=(*IRIS, "run", "-n", "2"))
    assert result.returncode == 0, result.stdout + result.stderr
    rows = result.stdout.splitlines()
    heading = next(line for line in rows if "GPU Time (ms)" in line)
    assert "x gather, then matmul" in heading
    assert sum(line.endswith("yes") for line in rows) == 3


def test_the_options_of_the_page_are_those_of_the_parser():
    page = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text()
    table = page.partition("## Options")[2].partition("VALUES:")[0]
    wanted = {name for action in _options._parser(None)._actions for name in action.option_strings} - {"-h", "--help"}
    assert set(re.findall(r"--[a-z_]+", table)) - {"--axis_", "--skip_"} == wanted


def test_options_of_the_script(capsys, registry):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--deep", action="store_true", help="look deeper")

    @bench.register
    def dives(state, ctx):
        state.add_counter("deep", str(own.parse_known_args(["--deep"])[0].deep))
        state.exec(lambda: None)

    (result,) = bench.main(["--axis_num_ranks=1", "--deep"], parser=own)
    assert result.counters == {"deep": "True"}
    with pytest.raises(SystemExit):
        bench.main(["--deeper"], parser=own)
    assert "unrecognized arguments: --deeper" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["--help"], parser=own)
    said = capsys.readouterr().out
    assert "look deeper" in said
    assert "--benchmark_filter" in said
