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


@pytest.mark.parametrize("how", [["--loopback"], []], ids=["loopback", "processes"])
def test_times_of_the_gpu(tmp_path, how):
    program, out = tmp_path / "program.py", tmp_path / "out.json"
    program.write_text(PROGRAM)
    ours = ("IRIS_", "TRITON_INTERPRET")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "_iris_command", "run", *how, "-n", "2", str(program)]
    options = ["--n_warmup=5", "--n_repeat=10", f"--benchmark_out={out}", "--heap_size=100000000"]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(out.read_text())
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
