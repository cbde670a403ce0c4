"""The benchmark of all_gather_matmul: what it hands over, refuses, skips, and does with ranks that stand in."""

import json
import math
import os
import sys

import pytest
import torch

from iris import bench

SCRIPT = "bench_all_gather_matmul.py"
SHAPE = ("--axis_M=33", "--axis_N=40", "--axis_K=96")
IRIS = ("-m", "_iris_command", "run")


@pytest.fixture
def helpers(monkeypatch, own_script):
    monkeypatch.syspath_prepend(str(own_script(SCRIPT).path.parent))
    import _all_gather_matmul

    yield _all_gather_matmul
    for name in ("_all_gather_matmul", "_ways"):
        sys.modules.pop(name)


@pytest.fixture
def rows(tmp_path, own_script):
    """Runs the script; returns the results by algorithm."""

    def run(*words, command=()):
        out = tmp_path / "out.json"
        done = own_script(SCRIPT)(*SHAPE, f"--benchmark_out={out}", "--n_repeat=2", *words, command=command)
        assert done.returncode == 0, done.stdout + done.stderr
        return {r["params"]["algorithm"]: r for r in json.loads(out.read_text())}

    return run


def test_every_algorithm_is_measured_or_says_why_not(rows):
    found = rows(
        "--axis_num_ranks=2", "--host_cost", "--axis_algorithm=torch,nonsense,auto,pull,torch_fused,matmul,gather"
    )
    measured = {name: r for name, r in found.items() if not r["skipped"]}
    assert set(found) - set(measured) == {"nonsense", "torch_fused"}
    assert "algorithm 'nonsense' is not known" in found["nonsense"]["skip_reason"]
    assert "processes with GPUs" in found["torch_fused"]["skip_reason"]
    for name, r in measured.items():
        assert r["validated"], name
        assert len(r["local_times_ms"]) == 2
        assert (r["tflops"] is None) == (name == "gather")
        assert (r["bandwidth_gbps"] is None) == (name == "matmul")
        assert (r["hidden_pct"] is not None) == (name in ("auto", "pull"))
        assert r["speedups"]["torch"] > 0
    assert found["auto"]["counters"] == {"takes": "pull"}
    assert found["pull"]["counters"]["host us"] > 0


def test_rank_0_alone_with_ranks_that_stand_in(rows):
    words = ("--alone", "--axis_num_ranks=3", "--axis_gather_dim=0", "--axis_algorithm=torch,pull,auto,matmul,gather")
    found = rows(*words, command=(*IRIS, "--sim", "-n", "3"))
    assert len(found) == 5
    for r in found.values():
        assert r["validated"]
        assert (r["timed_ranks"], len(r["local_times_ms"])) == ([0], 1)
        assert r["note"].startswith("Rank 0 alone is timed, with all 304 compute units")


def test_what_is_wrong_or_not_written_is_not_timed(records, helpers):
    import _ways as ways

    def swapped(ctx, work):
        order = work.whole.chunk(2, dim=work.shape.gather_dim)[::-1]
        torch.matmul(torch.cat(order, dim=work.shape.gather_dim), work.b, out=work.out)

    def partly(ctx, work):
        product = work.whole @ work.b
        work.out[:30].copy_(product[:30])

    def one_rank(ctx, work):
        torch.matmul(work.whole, work.b, out=work.out)
        if ctx.get_rank() == 1:
            work.out[work.rows[3], work.columns[7]] += 20

    def poisons(ctx, work):
        torch.matmul(work.whole, work.b, out=work.out)
        free = [i for i in range(256) if i not in work.rows.tolist()]
        work.out[free[9], free[5]] = math.nan

    faults = {f.__name__: f for f in (swapped, partly, one_rank, poisons)}

    @bench.register
    @bench.axis("num_ranks", [2])
    @bench.axis("gather_dim", [0, 1])
    @bench.axis("fault", ["none", *faults])
    def products(state, ctx):
        shape = helpers.Shape(256, 256, 32, torch.float32, state["gather_dim"])
        work = ways.shared(ctx, shape, lambda: helpers.Operands(ctx, shape))
        assert work.rows.max() == 255
        assert work.columns.max() == 255
        assert len(work.rows) == 64
        assert len(work.columns) == 128
        fault = faults.get(state["fault"], lambda ctx, work: torch.matmul(work.whole, work.b, out=work.out))
        way = helpers.product(work, lambda: fault(ctx, work))
        for one in way.results:
            state.validate(one.result, one.want, tolerance=one.allowed, bitwise=one.allowed is None)
        state.exec(way.call, preamble_fn=way.prepare)

    for record in records(world=2, fails=True):
        assert record["failure"] == ("" if record["params"]["fault"] == "none" else "wrong"), record


def test_problems_that_do_not_fit_are_named(helpers, monkeypatch):
    class Context:
        runtime = "loopback"
        heap = type("Heap", (), {"total_bytes": 1 << 30})

        def get_num_ranks(self):
            return 8

        def get_device(self):
            return torch.device("cpu")

    def trouble(M, N, K, gather_dim=1, alone=False):
        return helpers.Shape(M, N, K, torch.float16, gather_dim).trouble(Context(), alone)

    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 1 << 17}[name])
    assert trouble(4096, 3584, 8192) == ""
    assert trouble(4096, 3584, 8188) == "K=8188 is no multiple of 8 ranks"
    assert trouble(4095, 3584, 8192, gather_dim=0) == "M=4095 is no multiple of 8 ranks"
    assert "a shard of A takes 4.00 GiB of a heap of 1.00 GiB" in trouble(262144, 8192, 65536)
    assert "and 14.72 GiB are there" in trouble(131072, 16384, 16384)
    assert trouble(131072, 16384, 16384, alone=True) == ""


def test_the_published_shapes_are_a_benchmark_of_their_own(own_script):
    listed = own_script(SCRIPT)("--regression", "--shapes=mi300x", "--benchmark_list").stdout
    assert [line.split(":")[0] for line in listed.splitlines() if not line.startswith(" ")] == [
        f"{name}_{num_ranks}_ranks" for name in ("mi300x", "regression") for num_ranks in (2, 4, 8)
    ]
    shapes = [line.split(":")[1].split(",") for line in listed.splitlines() if line.startswith("  shape:")]
    assert list(map(len, shapes)) == [7, 9, 12, 1, 1, 7]
    assert all(" 8192x8192x262144" in own for own in (*shapes[:4], shapes[5]))
