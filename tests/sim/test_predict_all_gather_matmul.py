"""What benchmarks/predict_all_gather_matmul.py tells the cost model is what the kernel does."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from iris._machine import by_name
from iris._target import INTERPRETER
from iris.ops.config import HbmBufferConfig

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "predict_all_gather_matmul.py"
# Few programs, so that they take several tiles each and the last tiles are divided.
SMALL = replace(by_name("mi325x"), compute_units=5)
TILE = HbmBufferConfig(128, 128, 64)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("predict_all_gather_matmul", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("world_size", "config"),
    [
        (1, TILE),
        (2, replace(TILE, k_per_flag=3, num_fetch_sms=1, first_stage_fetch_sms=2, num_fetch_stages=2)),
        (3, replace(TILE, k_per_flag=2, num_fetch_sms=9, group_size_m=2, staged_a_layout="m_contiguous")),
    ],
    ids=["alone", "few fetch and the others wait", "all fetch first"],
)
def test_the_replay_takes_as_long_as_the_interpreted_kernel(script, world_size, config):
    machine, sizes, config = script.divided(SMALL, (280, 200, 1000 * world_size), config, 4)
    replay = script.Replay(machine, world_size, *sizes, config, target=INTERPRETER)
    told = replay.run()
    assert told == pytest.approx(script.interpreted(machine, world_size, sizes, config), rel=0.02)
    assert (replay.waits > 0) == (world_size == 2)
    assert replay.s.splits > 1
