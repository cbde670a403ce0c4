"""The benchmark of a GEMM beside a collective: what it hands over, what it finds wrong, and what is made of it."""

import json
import math
import sys

import pytest
import torch

from iris import bench, sim
from iris.concurrent.tuning_data._alone import tiles_of_rank_0
from iris.errors import ArgumentError

SCRIPT = "bench_concurrent.py"
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
MODULES = ("_concurrent", "_concurrent_alone", "_concurrent_torch", "_ways", "bench_concurrent")


@pytest.fixture(autouse=True)
def scripts(monkeypatch, own_script):
    """Modules of the folder of benchmarks can be imported, each test's anew."""
    monkeypatch.syspath_prepend(str(own_script(SCRIPT).path.parent))
    yield
    for name in (*MODULES, "report_concurrent_speed"):
        sys.modules.pop(name, None)


def by_problem(path):
    """Rows by collective and candidate."""
    found = {}
    for row in json.loads(path.read_text()):
        found.setdefault(row["params"]["collective"], {})[row["candidate"]] = row
    return found


def test_rows_between_processes(own_script, tmp_path):
    import report_concurrent_speed as report

    out = tmp_path / "concurrent.json"
    words = ("--small", "--axis_num_ranks=2", "--axis_collective=all_reduce", "--candidates=1")
    words += (f"--benchmark_out={out}", "--n_warmup=0", "--n_repeat=1")
    done = own_script(SCRIPT)(*words, command=("-m", "_iris_command", "run", "-n", "2"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = by_problem(out)
    assert tuple(found) == ("all_reduce",)
    for name, rows in found.items():
        known = ["matmul", "own matmul", f"own {name}", f"torch {name}", "torch", "fused", "concurrent"]
        assert list(rows)[:-1] == known
        assert list(rows)[-1].startswith("fused ")
        assert all(row["validated"] and row["gpu_time_ms"] > 0 for row in rows.values())
        assert all(row["speedups"]["torch"] > 0 for row in rows.values())
        assert "PyTorch has it for processes with GPUs" in rows["fused"]["note"]
        for label, row in rows.items():
            assert (row["tflops"] is None) == (label in (f"own {name}", f"torch {name}"))
            assert (row["bandwidth_gbps"] is None) == (label in ("matmul", "own matmul"))
            if row["tflops"]:
                assert row["tflops"] * row["gpu_time_ms"] * 1e9 == pytest.approx(2 * 48 * 40 * 32)
    text = report.report("two", json.loads(out.read_text()))
    assert "2 ranks (cpu)" in text
    assert "kernels were interpreted: times mean nothing" in text
    assert len(report.problems(json.loads(out.read_text()))) == 1


@pytest.fixture
def simulated(tmp_path, monkeypatch):
    """Runs the script's ``main`` in the simulator; returns the rows by collective and candidate."""
    import bench_concurrent

    def run(world, *words):
        out = tmp_path / "out.json"
        more = [f"--axis_num_ranks={world}", f"--benchmark_out={out}", "--n_warmup=0", "--n_repeat=1"]
        monkeypatch.setattr(sys, "argv", [SCRIPT, "--small", *more, *words])
        sim.run(lambda _ctx: bench_concurrent.main(), world, heap_size=1 << 20)
        return by_problem(out)

    return run


@pytest.mark.parametrize(
    ("world", "collectives"),
    [
        (2, "all_gather,all_reduce"),
        pytest.param(3, "all_gather,all_reduce,reduce_scatter,all_to_all,broadcast", marks=pytest.mark.slow),
    ],
)
def test_rank_0_alone(simulated, monkeypatch, world, collectives):
    import bench_concurrent

    monkeypatch.setenv("IRIS_CHECK", "off")  # the script sets it too, and the test puts it back
    monkeypatch.setattr(bench_concurrent, "BOUND_SHARES", (3 / 4,))
    monkeypatch.setattr(bench_concurrent, "FEWER", (16, 8))
    words = ("--alone", "--bound", "--candidates=0", f"--axis_collective={collectives}")
    for name, rows in simulated(world, *words).items():
        theirs = [] if name == "broadcast" else [f"torch {name}", "torch"]
        known = ["matmul", "own matmul", f"own {name}", *theirs, "fused", "concurrent", "concurrent 285"]
        assert list(rows) == [*known, "own matmul on 228", f"own {name} on 76"]
        for row in rows.values():
            assert row["validated"]
            assert (row["timed_ranks"], len(row["local_times_ms"])) == ([0], 1)
            assert "Rank 0 alone is timed, with all 304 compute units" in row["note"]
        if name == "broadcast":
            assert "broadcast has no copies in its place" in rows["fused"]["note"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_together(simulated, world):
    for name, rows in simulated(world, f"--axis_collective={','.join([*COLLECTIVES, 'broadcast'])}").items():
        assert {"torch", "fused", "concurrent", f"own {name}"} <= rows.keys()
        assert all(row["validated"] for row in rows.values())


def test_what_is_wrong_is_not_timed(records, monkeypatch):
    import _concurrent
    import _concurrent_alone
    import _concurrent_torch
    import _ways

    monkeypatch.setenv("IRIS_CHECK", "off")

    def of_rank(rank, change):
        return lambda work: change(work) if work.ctx.get_rank() == rank else None

    def not_sampled(work):
        row = next(r for r in range(200) if r not in work.product._rows.tolist())
        work.product.c[row, 0] = math.nan

    def one_off(work):
        work.payload.dst[-1, -1] += 1

    def moved_on(work):
        work.payload.dst.copy_(work.payload.dst.roll(1, dims=0))

    def not_multiplied(work):
        work.product.c.zero_()

    faults = {"none": lambda work: None, "missing": of_rank(1, not_sampled), "off": of_rank(1, one_off)}
    faults |= {"moved": of_rank(0, moved_on), "zero": of_rank(0, not_multiplied)}

    def one_more(work):
        """A tile that rank 0 does not add up, written to its peer."""
        there = work.ctx.heap.translate(work.payload.dst.data_ptr(), 0, 1)
        theirs = work.ctx.heap.region.tensor(there, work.payload.dst.nbytes, None).view(torch.float16)
        theirs.copy_(work.payload.want.flatten())

    alone = {"none": lambda work: None, "own": lambda work: work.payload.dst.fill_(0), "more": one_more}

    @bench.register
    @bench.axis("num_ranks", [2])
    @bench.axis("how", [*(f"together, {name}" for name in faults), *(f"alone, {name}" for name in alone)])
    def both(state, ctx):
        how, fault = state["how"].split(", ")
        shape = _concurrent.sized("all_reduce", "200x40x32", 0, torch.float16, 264, 2, 16)
        if how == "alone":
            work = _concurrent_alone.Alone(ctx, shape)
            way, after = work.own_collective(4), alone[fault]
        else:
            work = _concurrent.Together(ctx, shape)
            way, after = work.torch_both(_concurrent_torch.distributed(ctx, work.payload)), faults[fault]
        call = way.call

        def faulty():
            call()
            if how == "together" or ctx.get_rank() == 0:
                after(work)

        way.call = faulty
        _ways.hand_over(state, way)

    for record in records(world=2, fails=True, counts=("--n_warmup=0", "--n_repeat=1")):
        good = record["params"]["how"].endswith(" none")
        assert record["failure"] == ("" if good else "wrong"), record


def test_the_tiles_of_rank_0():
    """Ranks add up every second tile in grouped order: down two rows of tiles, then to the next column."""
    own = tiles_of_rank_0(48, 40, (16, 16), 2, 2)
    assert own.shape == (48, 40)
    # Tiles 0, 2, 4 are the first row, 6 and 8 of the last group of one row.
    want = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)
    assert (own[::16, ::16] == want).all()
    assert (own[15::16, 15::16] == want[:, :2]).all()


def test_problems():
    import _concurrent

    assert _concurrent.sides("8x16x32") == (8, 16, 32)
    for text in ("8x16", "8x16x0", "8x16x32x", "axbxc", "1e3x2x2"):
        with pytest.raises(ArgumentError, match="is not MxNxK"):
            _concurrent.sides(text)
    with pytest.raises(ArgumentError, match="possible: all_gather"):
        _concurrent.sized("gather", "8x8x8", 0, torch.float16, 64, 2)
    for name in COLLECTIVES:
        for world in (2, 3, 8):
            shape = _concurrent.sized(name, "8x8x8", 3e8, torch.float16, 4096, world)
            assert shape.moved(world) == pytest.approx(3e8, rel=0.05)
            assert shape.rows % (256 * world if name in ("reduce_scatter", "all_to_all") else 256) == 0
            assert shape.rows % world == 0 or name == "all_gather" or world == 3
            assert _concurrent.sized(name, "8x8x8", 0, torch.float16, 4096, world).rows <= 256 * world


def rows_of(collective, share, units=8, **times):
    """Rows as the benchmark writes them, given milliseconds by candidate, ``_`` for a space; None: not measured."""
    params = {"num_ranks": 2, "collective": collective, "gemm": "64x64x64", "share": share, "dtype": "float16"}
    where = {"devices": ["card"] * 2, "runtime": "gpu", "link": "nvlink", "clock": "gpu", "emulated_link": ""}
    common = {"benchmark": "concurrent", "params": params, "counters": {"units": units}, "environment": where}
    return [
        {**common, "candidate": name.replace("_", " ").replace("all gather", "all_gather"), "gpu_time_ms": ms}
        for name, ms in times.items()
    ]


def test_what_is_made_of_it(tmp_path, capsys):
    import report_concurrent_speed as report

    even = rows_of(
        "all_gather", 1.0, matmul=1.1, own_matmul=1.0, own_all_gather=0.9, torch_all_gather=0.8, torch=1.3,
        torch_symm_mem=None, fused=1.2, concurrent=1.5, fused_4_64x64x32=1.05, own_matmul_on_6=1.02,
        own_all_gather_on_2=1.08, own_matmul_on_4=1.6, own_all_gather_on_4=0.9, own_matmul_on_5=0.5,
    )  # fmt: skip
    uneven = rows_of("all_gather", 0.2, matmul=1.0, own_all_gather=0.2, torch=1.1, fused=1.15, concurrent=None)
    lonely = rows_of("all_gather", 0.5, matmul=1.0, own_all_gather=0.5, fused=1.25)
    first, second, third = found = report.problems([*even, {"benchmark": "another"}, *uneven, *lonely])
    assert (first.gemm, first.comm, first.longer, first.ratio) == (1.0, 0.8, 1.0, 0.8)
    assert first.best == ("fused 4 64x64x32", 1.05)
    assert (first.default, first.theirs, first.bound) == (1.2, 1.3, 1.08)
    assert first.over_longer(first.best_ms) == pytest.approx(1.05)
    assert first.speedup(first.best_ms) == pytest.approx(1.8 / 1.05)
    assert first.against_theirs == pytest.approx(1.3 / 1.05)
    assert (second.bound, second.best, third.theirs, third.against_theirs) == (None, ("fused", 1.15), None, None)
    *ours, theirs = report.goals(found)
    assert ours == [
        "our best at most 1.10 times the longer of the two alone: 1 of 3, 1.05 to 1.25",
        "the default at most 1.10 times the longer of the two alone: 0 of 3, 1.15 to 1.25",
        "our best at most 1.10 times the longer of the two alone, where the bound is: 1 of 1, 1.05 to 1.05",
        "speed-up of our best at least 1.25, comm / GEMM from 0.5 to 2.0: 1 of 2, 1.20 to 1.71",
    ]
    assert theirs == (
        "our best at least as fast as torch on two streams, 90% wanted (missed): 1 of 2, 0.96 to 1.24; 1 have no figure"
    )
    assert "90% wanted (reached): 1 of 1" in report.goals([first])[-1]
    assert report.goals([])[-1].endswith("(nothing to compare): 0 of 0")

    path = tmp_path / "two.json"
    path.write_text(json.dumps([*even, *uneven, *lonely]))
    assert report.main([str(path), "--markdown"]) == 0
    page = capsys.readouterr().out
    assert "2 ranks (gpu) on card; link nvlink" in page
    line = "| 2 | all_gather | 64x64x64 | 1.000 | float16 | 1.000 | 0.800 | 0.800 | fused 4 64x64x32 | 1.050 | 1.200 |"
    assert f"{line} 1.300 | 1.050 | 1.200 | 1.080 | 1.714 | 1.385 | 1.238 |" in page
    assert report.main([str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[4].split()[:3] == ["ranks", "collective", "GEMM"]


def test_in_the_summary_of_run_all(tmp_path):
    import _run_all_report
    from _run_all_steps import table

    (tmp_path / "data").mkdir()
    path = tmp_path / "data/concurrent.json"
    more = {"skew_pct": 0.0, "bandwidth_gbps": None, "tflops": None, "speedups": {}, "hidden_pct": None}
    more |= {"validated": True, "error": "", "skip_reason": ""}
    rows = rows_of("all_gather", 1.0, matmul=1.0, own_all_gather=0.8, torch=1.3, fused=1.2)
    path.write_text(json.dumps([row | more for row in rows]))
    _run_all_report.write(tmp_path, table(2), {"ranks": 2, "steps": {}})
    page = (tmp_path / "summary.md").read_text()
    assert "## A GEMM beside a collective" in page
    assert "speed-up of our best at least 1.25, comm / GEMM from 0.5 to 2.0: 1 of 1, 1.50 to 1.50" in page
    for name in ("_run_all_report", "_run_all_goals", "_run_all_steps", "_run_all_tests"):
        sys.modules.pop(name, None)
