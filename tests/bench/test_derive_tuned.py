"""The tables and rules that the package ships of the H200 are what the script derives from what was measured."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iris._target import KNOWN
from iris.ops.arguments import Problem
from iris.ops.choice import Place, check_fits, decide
from iris.ops.config import HbmBufferConfig
from iris.tuning import tables

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "derive_tuned.py"


@pytest.fixture(scope="module")
def derived():
    """What the script prints when it compares and writes nothing."""
    return subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=100)


def test_the_shipped_files_are_derived_byte_for_byte(derived):
    assert derived.returncode == 0, derived.stdout + derived.stderr


def test_rules_hold_on_cases_that_they_have_not_seen(derived):
    within = re.findall(r"held out: (\d+) cases\n.*?best way: (\d+)", derived.stdout)
    cases, near = (sum(map(int, column)) for column in zip(*within, strict=True))
    assert cases >= 20
    assert near >= 0.9 * cases, derived.stdout
    slower = re.findall(r"slower than PyTorch by more than 1 %: (\d+)", derived.stdout)
    assert slower
    assert set(slower) == {"0"}, derived.stdout


def test_a_real_link_comes_before_an_imitated_one():
    data = json.loads((ROOT / "benchmarks" / "data" / "h200_two.json").read_text())
    real = {
        (row["world"], row["gather_dim"], tuple(row["sizes"].values()))
        for row in data["rows"]
        if row["operation"] == "all_gather_matmul" and "torch_ms" in row
    }
    found = 0
    for case in tables.cases("all_gather_matmul", "h200"):
        key = (case.world, int(case.options["gather_dim"]), tuple(size for _, size in case.entry.sizes))
        assert case.entry.emulated == (key not in real), key
        found += key in real
    assert found >= 30


def test_copies_are_the_best_where_two_gpus_had_them_faster_by_more_than_noise():
    data = json.loads((ROOT / "benchmarks" / "data" / "h200_two.json").read_text())
    runs = {}  # a case was measured once or twice; by what PyTorch took in each run
    for row in data["rows"]:
        if row["operation"] == "all_gather_matmul" and "torch_ms" in row:
            key = (row["gather_dim"], *row["sizes"].values())
            runs.setdefault(key, {}).setdefault(row["algorithm"] == "copy_engine", []).append(
                row["ms"] / row["torch_ms"]
            )
    chosen = {}
    for case in tables.cases("all_gather_matmul", "h200"):
        if case.entry.emulated:
            assert case.entry.algorithm != "copy_engine", "nothing copies in the sweep"
            continue
        key = (int(case.options["gather_dim"]), *(size for _, size in case.entry.sizes))
        copies, others = min(runs[key][True]), min(1.0, *runs[key][False])
        assert (case.entry.algorithm == "copy_engine") == (copies < others * 0.99), (key, copies, others)
        chosen[key] = case.entry.algorithm
        assert case.world == 2
        if case.entry.algorithm == "copy_engine":
            assert case.entry.params["transport"] == "copy_engine"
    assert all(algorithm == "copy_engine" for (_, M, *_), algorithm in chosen.items() if M >= 4096)
    assert chosen[1, 256, 3584, 8192] == "hbm_buffer", "0.9 % slower than copies"


def test_few_rows_of_two_gpus_have_narrow_tiles():
    half = torch.bfloat16
    for M, N, fetchers in ((512, 3584, 28), (1024, 3584, 20), (1024, 5120, 12)):
        problem = Problem(M, N, 8192, half, half, half, 2, 0, None, "NN")
        plan = decide(Place(KNOWN["h200"], "nvlink"), problem, "").plan
        assert (plan.algorithm, plan.source) == ("hbm_buffer", "exact")
        config = plan.config
        assert (config.block_size_m, config.block_size_n, config.block_size_k) == (128, 128, 64)
        assert (config.num_stages, config.num_warps, config.num_fetch_sms) == (5, 8, fetchers)
        assert plan.speedup > 1.05


def test_a_measured_case_with_copies_is_the_plan_and_says_what_a_capture_has():
    half = torch.bfloat16
    for world, M, algorithm, source in ((2, 4096, "copy_engine", "exact"), (2, 2048, "hbm_buffer", "exact"),
                                        (2, 4200, "copy_engine", "nearest"), (2, 32768, "copy_engine", "exact"),
                                        (4, 16384, "hbm_buffer", "exact")):  # fmt: skip
        problem = Problem(M, 3584, 8192, half, half, half, world, 1, None, "NN")
        plan = decide(Place(KNOWN["h200"], "nvlink"), problem, "").plan
        assert (plan.algorithm, plan.source) == (algorithm, source), (M, plan)
        assert ("while a graph is captured hbm_buffer runs" in plan.reason) == (algorithm == "copy_engine")
        assert decide(Place(KNOWN["h200"], "shared"), problem, "").plan.algorithm != "copy_engine"


@settings(max_examples=60, deadline=None)
@given(
    world=st.integers(2, 8),
    gather_dim=st.sampled_from([0, 1]),
    rows=st.integers(1, 5000),
    N=st.integers(1, 30000),
    depth=st.integers(1, 2000),
)
def test_every_choice_for_an_h200_is_possible(world, gather_dim, rows, N, depth):
    M, K = (rows * world, depth) if gather_dim == 0 else (rows, depth * world)
    half = torch.bfloat16
    problem = Problem(M, N, K, half, half, half, world, gather_dim, None, "NN")
    plan = decide(Place(KNOWN["h200"], "nvlink"), problem, "").plan
    if plan.config is not None:
        assert isinstance(plan.config, HbmBufferConfig)
        plan.config.validate(world)
        check_fits(KNOWN["h200"], plan.config, problem)
        assert plan.config.num_fetch_stages <= max(1, -(-rows // plan.config.block_size_m))
    else:
        assert plan.algorithm == "torch"
        assert plan.source == "fallback"
