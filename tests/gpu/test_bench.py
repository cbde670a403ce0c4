"""``iris.bench`` where only a GPU shows: times of the GPU, graphs, cold caches, ranks that meet in the stream."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import time

import torch

import iris
from iris import bench

@bench.register
@bench.axis("meeting", ["stream", "host"])
@bench.axis("cache", ["cold", "warm"])
def reductions(state, ctx):
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    data = [bench.random_tensor((1 << 20,), torch.float32, seed=1, rank=r) for r in range(world)]
    mine, out = ctx.as_symmetric(data[rank].to(device)), ctx.zeros(1 << 20)
    state.set_bytes(mine.nbytes)
    state.set_meeting(state["meeting"])
    state.set_cold_cache(state["cache"] == "cold")
    state.use_graph()
    state.validate(out, sum(part.double() for part in data), k=world, candidate="iris")
    state.candidate("iris", lambda: ctx.ccl.all_reduce(out, mine), preamble_fn=lambda: out.fill_(float("nan")))
    state.candidate("on the host", lambda: out.copy_(mine).cpu())

@bench.register
@bench.axis("meeting", ["stream", "host"])
def late(state, ctx):
    tensor = torch.zeros(16, device=ctx.get_device())

    def fn():
        time.sleep(0.003)
        tensor.add_(1)

    state.set_meeting(state["meeting"])
    state.exec(fn)

bench.main()
"""


def measured(tmp_path, how, program, *options):
    """What a benchmark script measures on two ranks."""
    ours = ("IRIS_", "TRITON_INTERPRET")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "_iris_command", "run", *how, "-n", "2", str(program), *options]
    command += [f"--benchmark_out={out}", "--heap_size=100000000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("how", [["--loopback"], []], ids=["loopback", "processes"])
def test_times_of_the_gpu(tmp_path, how):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    records = measured(tmp_path, how, program, "--n_warmup=5", "--n_repeat=10")
    assert len(records) == 2 * 2 * 2 + 2
    for record in records:
        assert record["environment"]["clock"] == "gpu"
        assert "interpreted" not in record["environment"]["devices"][0]
        if record["benchmark"] == "late":
            # What the host loses is in the time, unless the GPU waits for the host before the call.
            assert (record["gpu_time_ms"] > 2.5) == (record["params"]["meeting"] == "host")
            continue
        assert record["cold_cache"] == (record["params"]["cache"] == "cold")
        if record["candidate"] == "iris":
            assert record["graph"]
            assert record["validated"]
            assert 0 < record["gpu_time_ms"] < 10
        else:
            assert not record["graph"]
            assert "not captured in a graph" in record["note"]


@pytest.mark.parametrize("alone", [False, True], ids=["all ranks", "alone"])
@pytest.mark.parametrize("how", [["--loopback"], ["--loopback", "--link-gbps", "10"], []], ids=["free", "paced", "mps"])
def test_the_benchmark_of_all_gather_matmul(tmp_path, how, alone):
    script = ROOT / "benchmarks" / "bench_all_gather_matmul.py"
    options = ["--axis_M=4096", "--axis_N=512", "--axis_K=512", "--axis_gather_dim=0,1", "--n_repeat=5"]
    records = measured(tmp_path, how, script, "--axis_num_ranks=2", *(["--alone"] if alone else []), *options)
    for record in records:
        name = record["params"]["algorithm"]
        if alone and not how:
            assert record["skip_reason"].startswith("--alone is for ranks in one process")
            continue
        if name not in ("torch_fused", "copy_engine"):
            assert not record["skipped"], record
        if record["skipped"]:
            continue
        assert record["validated"]
        assert record["timed_ranks"] == ([0] if alone else None)
        least_ms = 4096 * 512 / 10e9 * 1e3  # a shard, 2 bytes an element
        if "--link-gbps" in how:
            assert record["environment"]["emulated_link"] == "10 GB/s a direction for all peers together"
            if name not in ("matmul", "own matmul"):
                assert record["gpu_time_ms"] >= 0.95 * least_ms, record
        elif how:
            assert record["environment"]["emulated_link"] == ""
            if name == "gather":
                assert record["gpu_time_ms"] < least_ms, record


@pytest.mark.parametrize("alone", [False, True], ids=["all ranks", "alone"])
@pytest.mark.parametrize("how", [["--loopback"], ["--loopback", "--link-gbps", "10"], []], ids=["free", "paced", "mps"])
def test_the_benchmark_of_matmul_reduce(tmp_path, how, alone):
    script = ROOT / "benchmarks" / "bench_matmul_reduce.py"
    options = ["--axis_M=2048", "--axis_N=1024", "--axis_K=512", "--n_repeat=5"]
    records = measured(tmp_path, how, script, "--axis_num_ranks=2", *(["--alone"] if alone else []), *options)
    for record in records:
        name, operation = record["params"]["algorithm"], record["benchmark"]
        if alone and not how:
            assert record["skip_reason"].startswith("--alone is for ranks in one process")
            continue
        peers = ("torch_", "ccl") if alone else ("torch_",)
        if not name.startswith(peers) and name not in ("ring", "atomic", "spinlock"):
            assert not record["skipped"], record
        if record["skipped"]:
            continue
        assert record["validated"]
        assert record["timed_ranks"] == ([0] if alone else None)
        # Half of a product comes to a rank or goes from it, and of an all-reduce half of the sum.
        least_ms = 2048 * 1024 * (2 if operation == "matmul_all_reduce" else 1) / 10e9 * 1e3
        if "--link-gbps" in how and name not in ("matmul", "own matmul"):
            assert record["gpu_time_ms"] >= 0.9 * least_ms, record
