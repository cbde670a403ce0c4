"""The tables and rules that the package ships of the H200 are what the script derives from what was measured."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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
    files = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "data").glob("h200_*.json")]
    real = {
        (row["world"], row["gather_dim"], tuple(row["sizes"].values()))
        for data in files
        if not data["emulated"]
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


@pytest.fixture
def script(monkeypatch, tmp_path):
    """The script's module, with a folder of data of its own."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import derive_tuned

    monkeypatch.setattr(derive_tuned, "DATA", tmp_path)
    yield derive_tuned
    for name in ("derive_tuned", "_tuned"):
        sys.modules.pop(name, None)


def results(path, world=8, rate="", device="NVIDIA H200", **times):
    """A file as collect_tuned.py writes it, with milliseconds by candidate."""
    where = {"devices": [device] * world, "link": "nvlink", "emulated_link": rate, "torch": "1", "triton": "2"}
    where |= {"python": "3", "date": "2026-01-02", "command": "a command"}
    params = {"num_ranks": world, "layer": "n3584_k8192", "M": 4096, "gather_dim": 1, "dtype": "bfloat16"}
    row = {"benchmark": "all_gather_matmul", "params": params, "world_size": world, "environment": where}
    path.write_text(json.dumps([{**row, "candidate": name, "gpu_time_ms": ms} for name, ms in times.items()]))
    return path


def test_results_of_real_links_become_entries_of_the_table(script, tmp_path):
    place = SimpleNamespace(target=KNOWN["h200"], get_cu_count=lambda: 132, get_num_ranks=lambda: 8)
    shape = SimpleNamespace(M=4096, N=3584, K=8192, dtype=torch.bfloat16, gather_dim=1)
    import _tuned

    copies = _tuned.copies(place, shape)
    assert len({config for _, config in copies}) == len(copies) >= 2
    assert {(algorithm, config.transport) for algorithm, config in copies} == {("copy_engine", "copy_engine")}
    names = [_tuned.name_of(*one) for one in (*copies, *_tuned.variations(place, "all_gather_matmul", shape))]
    times = {**dict.fromkeys(names, 0.5), names[1]: 0.4, "torch": 0.8, "matmul": 0.3}
    file = results(tmp_path / "sweep.json", **times)
    assert script.add([file], tmp_path / "h200_eight.json") == ""
    (case,) = script.cases_of(script.over_real_links()["eight"], "eight")
    (entry,) = script.table("all_gather_matmul", [case], script.over_real_links())["entries"]
    assert (entry["world"], entry["algorithm"], entry["provenance"]) == (8, "copy_engine", "eight")
    assert HbmBufferConfig(**entry["params"]) == copies[1][1]
    assert entry["measured"]["speedup"] == 2.0
    assert "emulated" not in entry
    # A second time the rows are replaced, and what the file says of itself stays.
    (tmp_path / "h200_eight.json").write_text((tmp_path / "h200_eight.json").read_text().replace("a command", "mine"))
    assert script.add([results(file, **{**times, names[1]: 0.6})], tmp_path / "h200_eight.json") == ""
    data = json.loads((tmp_path / "h200_eight.json").read_text())
    assert (len(data["rows"]), data["command"]) == (len(names), "mine")
    assert script.cases_of(data)[0].best[2] == 0.5


def test_what_was_imitated_and_what_was_not_are_kept_apart(script, tmp_path):
    times = {"torch": 0.8, "matmul": 0.3, "hbm_buffer k_per_flag=4": 0.5}
    real, imitated = results(tmp_path / "real", **times), results(tmp_path / "imitated", rate="370 GB/s", **times)
    eight, sweep = tmp_path / "h200_eight.json", tmp_path / "h200_sweep.json"
    sweep.write_text(json.dumps({"emulated": True, "rows": []}))
    assert "only a file of real links is made" in script.add([imitated], eight)
    assert script.add([real], eight) == ""
    for files, into, kind in (([imitated], eight, "a real"), ([real], sweep, "an imitated")):
        before = into.read_text()
        assert f"is of {kind} link" in script.add(files, into)
        assert into.read_text() == before
    other = results(tmp_path / "other", device="NVIDIA B200", **times)
    assert "these results of NVIDIA B200" in script.add([other], eight)


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
