"""The benchmark of matmul_all_reduce and matmul_reduce_scatter: what it hands over, refuses, and finds wrong."""

import json
import math
import os
import sys

import pytest
import torch
import torch.distributed as dist

from iris import bench, sim

SCRIPT = "bench_matmul_reduce.py"
OPERATIONS = ("matmul_all_reduce", "matmul_reduce_scatter")
PAIRS, PRODUCTS = ("torch", "ccl"), ("matmul", "own matmul")


@pytest.fixture
def helpers(monkeypatch, own_script):
    monkeypatch.syspath_prepend(str(own_script(SCRIPT).path.parent))
    import _matmul_reduce

    yield _matmul_reduce
    modules = ("_matmul_reduce", "_matmul_reduce_alone", "_ways", "bench_matmul_reduce")
    for name in (*modules, "_run_all_report", "_run_all_goals", "_run_all_steps"):
        sys.modules.pop(name, None)


@pytest.fixture
def rows(tmp_path, monkeypatch, helpers):
    """Runs the script's ``main`` in the simulator; returns the results by benchmark and algorithm."""
    import bench_matmul_reduce

    def run(world, *words):
        out = tmp_path / "out.json"
        more = [f"--axis_num_ranks={world}", f"--benchmark_out={out}", "--n_warmup=0", "--n_repeat=1"]
        monkeypatch.setattr(sys, "argv", [SCRIPT, "--small", *more, *words])
        sim.run(lambda _ctx: bench_matmul_reduce.main(), world, heap_size=1 << 20)
        found = {}
        for row in json.loads(out.read_text()):
            found.setdefault(row["benchmark"], {})[row["params"]["algorithm"]] = row
        return found

    return run


def test_every_way_is_measured_or_says_why_not(rows, helpers):
    found = rows(2)
    assert tuple(found) == OPERATIONS
    for operation, own in found.items():
        peers = [*helpers.SYMMETRIC_MEMORY[operation], "torch_fused"]
        skipped = {name for name, row in own.items() if row["skipped"]}
        wanted = {"auto", "matmul", "own matmul", "torch", "ccl", "reduction", "ccl reduction"}
        assert own.keys() - skipped == wanted | set(helpers.KERNELS[operation])
        for name in skipped:
            assert name.removesuffix(" reduction") in peers
            assert "processes with GPUs; this is the sim runtime" in own[name]["skip_reason"]
        pair, product = (min(own[n]["gpu_time_ms"] for n in names) for names in (PAIRS, PRODUCTS))
        longer = pair > product  # as nearly always
        for name, row in own.items():
            if name in skipped:
                continue
            assert row["validated"], name
            assert len(row["local_times_ms"]) == 2
            assert (row["tflops"] is None) == name.endswith("reduction")
            assert (row["bandwidth_gbps"] is None) == name.endswith("matmul")
            assert row["speedups"]["torch"] > 0
            assert (row["hidden_pct"] is not None) == (longer and name in (*helpers.KERNELS[operation], "auto"))
            ms = row["gpu_time_ms"] / 1e3
            if row["bandwidth_gbps"]:
                assert row["bandwidth_gbps"] * ms * 1e9 == pytest.approx((1 + ("all" in operation)) * 33 * 40)
            if row["tflops"]:
                assert row["tflops"] * ms * 1e12 == pytest.approx(2 * 33 * 40 * 96 / 2)
        assert own["auto"]["counters"]["takes"] in helpers.KERNELS[operation]


@pytest.mark.slow
def test_fewer_rows_than_ranks_and_ways_that_are_not_known(rows):
    words = ("--axis_M=1", "--shapes=llama70b", "--axis_algorithm=torch,ccl,fused,two_shot,auto,own matmul,nonsense")
    found = rows(3, *words)
    assert tuple(found) == tuple(f"{operation}_llama70b" for operation in OPERATIONS)
    for operation, own in found.items():
        kernel = "fused" if "scatter" in operation else "two_shot"
        assert {name for name, row in own.items() if row["skipped"]} == {"nonsense", "fused", "two_shot"} - {kernel}
        assert "algorithm 'nonsense' is not known" in own["nonsense"]["skip_reason"]
        assert all(row["validated"] for row in own.values() if not row["skipped"])


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_rank_0_alone(rows, helpers, monkeypatch, world):
    import _matmul_reduce_alone

    monkeypatch.setenv("IRIS_CHECK", "off")  # the script sets it too, and the test puts it back
    alone = _matmul_reduce_alone.PEERS_WRITE.keys()
    for operation, own in rows(world, "--alone", "--axis_M=70").items():
        measured = {name: row for name, row in own.items() if not row["skipped"]}
        assert all(" needs " in row["skip_reason"] for name, row in own.items() if name not in measured)
        kernels = alone & set(helpers.KERNELS[operation])
        assert measured.keys() == {"torch", "auto", "matmul", "own matmul", "reduction"} | kernels
        for row in measured.values():
            assert row["validated"]
            assert (row["timed_ranks"], len(row["local_times_ms"])) == ([0], 1)
            assert row["note"].startswith("Rank 0 alone is timed, with all 304 compute units")


def test_operations_of_symmetric_memory(rows, helpers, monkeypatch):
    """With stand-ins: what they are given, and where their results are looked for."""

    def add(tensor, op, group):
        assert (op, group) == ("sum", "everyone")
        dist.all_reduce(tensor)
        return tensor

    def add_out(tensor, op, group, out):
        out.copy_(add(tensor.clone(), op, group))

    def scatter(tensor, group, split_last_dim, out):
        assert not split_last_dim
        out.copy_(add(tensor.clone(), "sum", group).chunk(2)[dist.get_rank()])
        tensor.fill_(math.nan)  # it may change its input

    def fused(a, b, op, scatter_dim, group):
        assert scatter_dim == 0
        return add(a @ b, op, group).chunk(2)[dist.get_rank()]

    stand_ins = {"one_shot_all_reduce_out": add_out, "two_shot_all_reduce_": add, "reduce_scatter_out": scatter}
    for name, function in {**stand_ins, "fused_matmul_reduce_scatter": fused}.items():
        monkeypatch.setattr(torch.ops.symm_mem, name, function, raising=False)
    monkeypatch.setattr(helpers, "check_symmetric_memory", lambda ctx, operation: None)
    monkeypatch.setattr(helpers, "group_name", lambda: "everyone")
    monkeypatch.setattr(helpers.Operands, "symmetric", lambda self: torch.zeros_like(self.whole))
    peers = {name for names in helpers.SYMMETRIC_MEMORY.values() for name in names}
    words = ",".join(["torch", "matmul", "torch_fused", *peers, *(f"{name} reduction" for name in peers)])
    found = rows(2, "--axis_M=33,34", f"--axis_algorithm={words}")
    for operation, own in found.items():
        measured = helpers.SYMMETRIC_MEMORY[operation].keys() | ({"torch_fused"} if "scatter" in operation else set())
        for name in peers | {"torch_fused"}:
            assert own[name]["skipped"] == (name not in measured), own[name]
            assert own[name]["validated"] == (name in measured)
    assert "no fused" in found["matmul_all_reduce"]["torch_fused"]["skip_reason"]
    assert "torch_one_shot is no part of matmul_reduce_scatter" in str(found)


def test_what_is_wrong_is_not_timed(records, helpers):
    import _ways as ways

    def missing(ctx, work):
        if ctx.get_rank() == 1:
            work.product.zero_()

    def one_element(ctx, work):
        # Neither its row nor its column is in the sample.
        row, column = (
            sorted(set(range(extent)) - set(sampled.tolist()))[5]
            for extent, sampled in zip(work.out.shape, (work.picked, work.columns), strict=True)
        )
        return row, column

    def off(ctx, work):
        if ctx.get_rank() == 1:
            work.out[one_element(ctx, work)] += 4

    def not_written(ctx, work):
        work.out[one_element(ctx, work)] = math.nan

    def exchanged(ctx, work):
        work.out.copy_(work.out.roll(1, dims=0))

    before, after = {"missing": missing}, {f.__name__: f for f in (off, not_written, exchanged)}

    @bench.register
    @bench.axis("num_ranks", [2])
    @bench.axis("operation", list(OPERATIONS))
    @bench.axis("fault", ["none", *before, *after])
    def sums(state, ctx):
        shape = helpers.Shape(state["operation"], 200, 256, 64, torch.bfloat16)
        work = ways.shared(ctx, shape, lambda: helpers.Operands(ctx, shape))
        pair = helpers.reduction(ctx, work, "torch")

        def call():
            torch.matmul(work.a, work.b, out=work.product)
            before.get(state["fault"], lambda ctx, work: None)(ctx, work)
            if pair.source is not work.whole:
                pair.source.copy_(work.whole)
            pair.call()
            after.get(state["fault"], lambda ctx, work: None)(ctx, work)

        found = ways.Way(call, lambda: pair.result.fill_(math.nan), work.compared(lambda: pair.result, pair.roundings))
        ways.hand_over(state, found)

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

    def trouble(M, N, K, operation="matmul_all_reduce"):
        return helpers.Shape(operation, M, N, K, torch.float16).trouble(Context())

    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 1 << 17}[name])
    assert trouble(4096, 3584, 8192) == ""
    assert trouble(4096, 3584, 8188) == "K=8188 is no multiple of 8 ranks"
    assert "of a heap of 1.00 GiB: give --heap_size" in trouble(65536, 8192, 8192)
    assert "and 14.72 GiB are there" in trouble(8192, 8192, 1 << 20)


def test_shapes_and_names(helpers, own_script):
    import _run_all_report

    assert set(_run_all_report.PAIRS) == {name for names in helpers.UNFUSED.values() for name in names}
    import bench_matmul_reduce

    assert bench_matmul_reduce.chosen("llama7b, mixtral") == ["llama7b", "mixtral"]
    with pytest.raises(bench_matmul_reduce.argparse.ArgumentTypeError, match="possible: llama7b, llama70b, mixtral"):
        bench_matmul_reduce.chosen("llama7b,llama8b")
