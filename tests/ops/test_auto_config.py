"""iris.ops.auto_config: what is selected for a problem, why, and what the caller can do with it."""

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import iris
from iris import _target
from iris.errors import ArgumentError, EnvironmentValueError, IrisError
from iris.ops import FusedConfig, auto_config, call, choice
from iris.ops.auto_config import (
    SUPPORTED_ARCHITECTURES,
    SUPPORTED_TRANSPOSES,
    AutoConfigResult,
    clear_config_cache,
    detect_gpu_arch,
    list_known_shapes,
    load_regression_sizes,
    select_ag_mm_config,
)
from iris.ops.config import HbmBufferConfig
from iris.tuning import cost_model, heuristics, selection, store, tables
from iris.tuning.query import Entry, config_key

G2 = (131072, 16384, 16384)
PIPELINE = ("k_per_flag", "num_fetch_sms", "num_fetch_stages", "first_stage_fetch_sms")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """No GPU, no variable, no user's cache, nothing remembered."""
    monkeypatch.delenv("IRIS_GPU_ARCH", raising=False)
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clear_config_cache()
    yield
    clear_config_cache()


@pytest.fixture
def device(monkeypatch):
    """Lets torch see a GPU with a name and an architecture."""

    def use(name, arch, units=304):
        hip = None if arch.startswith("sm_") else "7.0"
        major, minor = (int(arch[3:-1]), int(arch[-1])) if hip is None else (9, 4)
        properties = SimpleNamespace(
            name=name, gcnArchName=f"{arch}:sramecc+:xnack-", major=major, minor=minor, multi_processor_count=units
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.version, "hip", hip)
        clear_config_cache()

    return use


def select(M, N, K, world=8, transpose="NN", arch="mi300x", **others):
    return select_ag_mm_config(M, N, K, world, transpose, arch, **others)


# Measured cases.


def test_the_best_published_case():
    got = select_ag_mm_config(M=131072, N=16384, K=16384, world_size=8, arch="mi300x")
    assert (got.enabled, got.speedup, got.shape_key, got.machine) == (True, 1.343, "131072x16384x16384", "mi300x")
    assert (got.beats_torch, got.milliseconds, got.algorithm) == (True, 167.345, "hbm_buffer")
    assert got.config_params == {
        "block_size_m": 256, "block_size_n": 256, "block_size_k": 64, "group_size_m": 24, "num_xcds": 8,
        "allow_tf32": True, "num_warps": 8, "num_stages": 2,
    }  # fmt: skip
    assert got.hbm_buffer_params == {
        "k_per_flag": 32, "num_fetch_sms": 4, "num_fetch_stages": 64, "first_stage_fetch_sms": 52,
    }  # fmt: skip
    assert got.source.startswith("Exact match: mi300x ws8 NN 131072x16384x16384 [g2], measured 1.343x, 167.345 ms")
    assert "8x AMD Instinct MI300X" in got.reason


# What the published file has for 8 ranks: speed-up, k_per_flag, num_fetch_sms, num_fetch_stages, first_stage_fetch_sms.
PUBLISHED = {
    "g6": (262144, 8192, 8192, 1.2, 64, 52, 4, 52),
    "g2": (131072, 16384, 16384, 1.343, 32, 4, 64, 52),
    "g14": (147456, 28672, 4096, 1.288, 16, 59, 36, 52),
    "g16": (229376, 28672, 4096, 1.277, 16, 4, 56, 52),
    "g15": (327680, 28672, 4096, 1.284, 16, 4, 32, 52),
    "g5": (8192, 8192, 262144, 1.224, 32, 4, 8, 52),
    "g1": (16384, 16384, 131072, 1.136, 16, 16, 8, 52),
    "g9": (196608, 18432, 16384, 0.854, 32, 32, 1, 32),
    "g8": (262144, 28672, 8192, 0.857, 128, 32, 1, 32),
    "mixtral_gate": (4096, 14336, 4096, 0.703, 8, 16, 1, 64),
    "llama7b_gate": (4096, 11008, 4096, 0.551, 8, 16, 1, 64),
    "pow2_4k": (4096, 4096, 4096, 0.527, 8, 8, 1, 64),
}


@pytest.mark.parametrize("label", PUBLISHED)
def test_every_published_case_of_eight_ranks_has_its_own_figures(label):
    M, N, K, speedup, *pipeline = PUBLISHED[label]
    got = select(M, N, K)
    assert (got.speedup, f"[{label}]" in got.source) == (speedup, True)
    assert [got.hbm_buffer_params[name] for name in PIPELINE] == pipeline
    assert got.enabled is got.beats_torch is (speedup > 1)


def test_what_lost_to_torch_is_not_enabled_and_keeps_its_parameters():
    got = select(196608, 18432, 16384)
    assert (got.enabled, got.beats_torch, got.speedup) == (False, False, 0.854)
    assert got.source.startswith("Exact match")
    assert "measured 0.854x, 266.608 ms: PyTorch is faster" in got.source
    assert (got.config_params["block_size_m"], got.hbm_buffer_params["k_per_flag"]) == (256, 32)


def test_losers_are_treated_alike_however_they_are_found():
    exact, near = select(4096, 4096, 4096), select(4100, 4090, 4096)
    assert near.source.startswith("Nearest match")
    for got in (exact, near):
        assert (got.enabled, got.beats_torch, got.shape_key) == (False, False, "4096x4096x4096")
        assert "0.527x, 1.512 ms: PyTorch is faster" in got.source
        assert got.hbm_buffer_params["num_fetch_sms"] == 8


def test_a_near_case_that_wins_is_taken():
    got = select(130000, 16000, 16384)
    assert (got.enabled, got.shape_key, got.speedup) == (True, "131072x16384x16384", 1.343)
    assert got.source.startswith("Nearest match: mi300x ws8 NN 131072x16384x16384 [g2]")


def test_a_near_case_without_a_comparison_is_no_win(monkeypatch):
    record = {
        "name": "open", "link": "xgmi", "world": 8, "dtype": "16-bit", "options": {}, "algorithm": "hbm_buffer",
        "sizes": {"M": 1000, "N": 1000, "K": 1000}, "params": {}, "emulated": False,
        "measured": {"ms": 1.0, "torch_ms": None, "speedup": None},
    }  # fmt: skip
    data = {"schema": 1, "operation": "all_gather_matmul", "machine": "mi325x", "entries": [record]}
    table = tables.parse(data | {"provenance": {"x": {"hardware": "a", "source": "b"}}})
    monkeypatch.setattr(tables, "load", lambda operation, machine: table if machine == "mi325x" else None)
    exact, near = select(1000, 1000, 1000, arch="mi325x"), select(1001, 1000, 1000, arch="mi325x")
    assert (exact.enabled, exact.beats_torch) == (False, None)
    assert "not compared with PyTorch" in exact.source
    assert not near.source.startswith("Nearest match")


@pytest.mark.parametrize(
    ("M", "N", "K", "world", "speedup"),
    [
        (8192, 8192, 262144, 2, 0.887), (16384, 16384, 131072, 2, 0.772), (4096, 14336, 4096, 2, None),
        (262144, 8192, 8192, 4, 0.856), (4096, 4096, 4096, 4, 0.347), (1000, 1000, 1000, 4, None),
    ],
)  # fmt: skip
def test_sets_of_two_and_four_ranks_are_off(M, N, K, world, speedup):
    got = select(M, N, K, world)
    assert (got.enabled, got.speedup) == (False, speedup)
    assert got.source.startswith("Disabled by config: none of the shapes that were compared with PyTorch was faster")
    assert bool(got.config_params) is (M != 1000), "what was measured keeps its parameters"


def test_all_of_mi355x_lose():
    got = select(131072, 4096, 4096, arch="mi355x")
    assert (got.enabled, got.speedup, got.milliseconds) == (False, 0.878, 6.304)
    assert "[a3], measured 0.878x, 6.304 ms: PyTorch is faster" in got.source
    other = select(20000, 3000, 9000, arch="mi355x")
    assert (other.enabled, other.source) == (
        False, "Disabled by config: none of the 10 measured cases was faster than PyTorch (best 0.882x)",
    )  # fmt: skip
    # A published win that did not come again is no win here.
    assert not select(8192, 8192, 8192, arch="mi355x").enabled


# Rules and predictions.


def test_rules_of_the_machine_where_nothing_near_was_measured():
    got = select(5000, 5000, 5000)
    assert (got.enabled, got.beats_torch, got.speedup, got.shape_key) == (True, None, None, None)
    assert got.source == "Heuristic (no measured case near in mi300x ws8 NN)"
    assert (got.config_params["block_size_m"], got.config_params["group_size_m"]) == (128, 8)
    assert (got.hbm_buffer_params["k_per_flag"], got.hbm_buffer_params["num_fetch_sms"]) == (2, 32)


def test_rules_come_before_defaults_and_defaults_fill_the_rest():
    got = select(20000, 4000, 40960)
    # Rules: 640 blocks of K, 78 rows of tiles; the set's defaults have k_per_flag 8 and one stage.
    assert [got.hbm_buffer_params[name] for name in PIPELINE] == [64, 32, 2, 64]


@pytest.mark.parametrize("transpose", ["NT", "TN", "TT"])
def test_other_transposes_have_rules_and_no_measured_cases(transpose):
    got = select(*G2, transpose=transpose)
    assert (got.enabled, got.speedup, got.beats_torch) == (True, None, None)
    assert got.source == f"Heuristic (no measured case near in mi300x ws8 {transpose}), extrapolated from NN"
    for world in (2, 4):
        off = select(*G2, world=world, transpose=transpose)
        assert (off.enabled, off.config_params) == (False, {})
        assert off.source.startswith("Disabled by config: not measured; NN was slower than PyTorch")


@pytest.mark.parametrize("transpose", SUPPORTED_TRANSPOSES)
def test_every_supported_transpose_gives_a_configuration(transpose):
    got = select(*G2, transpose=transpose.lower())
    assert got.enabled
    got.to_fused_config().validate(8)


def test_sharding_along_m_has_no_measured_cases():
    got = select(*G2, gather_dim=0)
    assert got.source.startswith(
        "Predicted (nothing near was measured on mi300x for gather_dim=0, transpose=NN, float16): the cost model"
    )
    assert (got.speedup, got.beats_torch) == (None, None)


@pytest.mark.parametrize("world", [3, 5, 7])
def test_too_few_ranks_without_a_set(world):
    got = select(*G2, world=world)
    assert got.enabled is False
    assert got.source.startswith(f"world_size={world} < min_world_size=8")


def test_one_rank_has_nothing_to_gather():
    assert select(*G2, world=1).source.startswith("world_size=1 < min_world_size=8")
    got = select(*G2, world=1, arch="h100")
    assert (got.enabled, got.source) == (
        False, "world_size=1: one rank has nothing to gather, so PyTorch's matmul runs",
    )  # fmt: skip


@pytest.fixture
def expected(monkeypatch):
    """Lets the cost model expect a speed-up; gives what it was asked."""
    asked = []

    def use(speedup, otherwise=None):
        def predict(operation, machine, sizes, world, dtype, params, *, algorithm, **others):
            asked.append({"machine": machine, "world": world, "algorithm": algorithm, **others, "params": params})
            mine = "allow_tf32" not in params  # the published rules set it
            figure = speedup if otherwise is None or not mine else otherwise
            return SimpleNamespace(speedup=figure, fused=2e-3, algorithm=algorithm)

        monkeypatch.setattr(cost_model, "predict", predict)
        clear_config_cache()
        return asked

    return use


def test_more_ranks_than_any_table_has(expected):
    for speedup in (1.5, 1.25, 0.75):
        expected(speedup)
        got = select(*G2, world=16)
        assert got.source.startswith(
            "Predicted (no table for world_size=16 (there are 2, 4, 8)): the cost model expects"
        )
        assert (got.enabled, got.speedup, got.beats_torch) == (speedup > 1.4, None, None), "nothing was measured"
        assert f"to take 2 ms over xgmi, {speedup:.2f}x PyTorch" in got.source
        assert ("taken from 1.40x on, because of the model's error" in got.source) is (speedup < 1.4)
        assert got.config_params, "what was thought of, also where it is not worth it"


@pytest.mark.parametrize(("arch", "world"), [("mi355x", 4), ("mi325x", 8)])
def test_rules_without_a_measurement_are_left_to_the_cost_model(expected, arch, world):
    """A set of the machine's own that was never validated, and rules of another machine."""
    source = "unvalidated defaults: the cost model expects" if arch == "mi355x" else "Heuristic of mi300x, which has"
    # The rule is worth it; it is not, and neither is the library's own choice; that alone is.
    for by_rule, own, enabled in ((1.5, 9.0, True), (0.5, 0.6, False), (0.5, 1.5, True)):
        asked = expected(by_rule, own)
        asked.clear()
        got = select(32768, 4096, 4096, world=world, arch=arch)
        assert asked[0].items() >= {"machine": arch, "world": world, "algorithm": "hbm_buffer"}.items()
        assert asked[0]["units"] == _target.KNOWN[arch].compute_units
        assert asked[0]["params"]["allow_tf32"]
        assert len(asked) == (1 if by_rule > 1 else 2)
        assert got.enabled is enabled
        ruled = own < 1 or by_rule > 1
        assert (source in got.source, got.source.startswith("Predicted")) == (ruled, not ruled)
        assert ("allow_tf32" in got.config_params and got.config_params["allow_tf32"]) == (True if ruled else None)


# Machines.


@pytest.mark.parametrize("machine", [name for name in _target.KNOWN if name not in SUPPORTED_ARCHITECTURES])
@pytest.mark.parametrize("gather_dim", [0, 1])
def test_machines_without_a_table_borrow_none(machine, gather_dim):
    for M in (131072, 130000):
        got = select(M, 16384, 16384, arch=machine, gather_dim=gather_dim)
        assert (got.machine, got.speedup, got.milliseconds, got.shape_key) == (machine, None, None, None)
        assert got.source.startswith(("Predicted (no table for", "Heuristic"))
        if got.source.startswith("Heuristic (no measured case near in"):
            assert "as two H200 do" in got.source, "the row of the link says whose figures it has"
        assert got.config_params
        assert got.hbm_buffer_params
        HbmBufferConfig(**got.config_params, **got.hbm_buffer_params).validate(8)


def test_rules_of_a_machine_with_the_same_architecture_are_named_as_such():
    got = select(*G2, arch="mi325x")
    assert got.source.startswith("Heuristic of mi300x, which has the same architecture gfx942 (no table for mi325x)")
    own = heuristics.configuration(
        "mi300x", "all_gather_matmul", {"M": 131072, "N": 16384, "K": 16384, "world": 8, "gather_dim": "1",
                                        "dtype": "16-bit", "link": "xgmi"}
    )  # fmt: skip
    assert {**got.config_params, **got.hbm_buffer_params} == own
    assert select(*G2, arch="mi350x").source.startswith("Heuristic of mi355x, which has the same architecture gfx950")
    got = select(*G2, arch="mi350x", transpose="NT")
    assert got.source.startswith("Predicted"), "no machine with its architecture has rules for it"


@pytest.mark.parametrize(
    ("arch", "machine"),
    [
        ("mi300x", "mi300x"), ("MI300X", "mi300x"), (" Mi300x ", "mi300x"), ("gfx942", "mi300x"),
        ("gfx942:sramecc+:xnack-", "mi300x"), ("GFX950", "mi355x"), ("mi355x", "mi355x"), ("mi325x", "mi325x"),
        ("sm_90a", "h100"), ("h200", "h200"), ("10.0", "b200"),
    ],
)  # fmt: skip
def test_architectures_in_any_spelling(arch, machine):
    got = select(*G2, arch=arch)
    assert got.machine == machine
    if arch.strip().lower() != machine:
        assert f"({machine} is the first known product with {_target.KNOWN[machine].arch}" in got.source


@pytest.mark.parametrize("arch", ["gfx90a", "v100", "sm_75", "", "mi300", 942])
def test_unknown_architectures_are_refused(arch):
    with pytest.raises(ArgumentError, match=r"names no known device; possible: 'auto', a product \(mi300x, .*gfx942"):
        select(*G2, arch=arch)


def test_the_device_is_told_by_its_name(device):
    device("AMD Instinct MI325X", "gfx942")
    assert detect_gpu_arch() == "mi325x"
    assert select(*G2, arch=None).source.startswith("Heuristic of mi300x")
    assert select(*G2, arch="gfx942").machine == "mi325x", "a bare architecture keeps the product that is there"
    device("AMD Instinct MI300X", "gfx942")
    for arch in (None, "auto", " AUTO "):
        assert select(*G2, arch=arch).speedup == 1.343
    device("NVIDIA H200", "sm_90", 132)
    assert detect_gpu_arch() == "h200"
    assert select(*G2, arch=None).machine == "h200"


def test_a_part_of_a_device_is_taken_for_a_part(device):
    device("NVIDIA H100 MIG 1g.10gb", "sm_90", 16)
    part, whole = select(8192, 4096, 8192, arch=None), select(8192, 4096, 8192, arch="h100")
    assert part.machine == whole.machine == "h100"
    assert part.hbm_buffer_params["num_fetch_sms"] <= 4 < whole.hbm_buffer_params["num_fetch_sms"]


def test_a_device_that_is_not_known_gets_nothing(device):
    for name, arch in (("AMD Instinct MI300A", "gfx942"), ("Tesla T4", "sm_75")):
        device(name, arch)
        assert detect_gpu_arch() == arch
        got = select(*G2, arch=None)
        assert (got.enabled, got.config_params, got.machine) == (False, {}, "")
        assert got.source.startswith(f"Unknown device: nothing is known of {name} ({arch}); known: mi300x, ")


def test_a_machine_without_a_gpu_gets_nothing():
    assert detect_gpu_arch() == ""
    got = select(*G2, arch=None)
    assert (got.enabled, got.config_params, got.hbm_buffer_params) == (False, {}, {})
    assert got.source.startswith("No GPU: PyTorch sees none on this machine; name one with arch or IRIS_GPU_ARCH")


def test_the_variable_names_the_machine_and_is_seen_at_once(monkeypatch):
    assert not select(*G2, arch=None).enabled
    for text, machine in (("MI300X", "mi300x"), ("gfx942:sramecc+", "mi300x"), ("h200", "h200"), (" sm_90 ", "h100")):
        monkeypatch.setenv("IRIS_GPU_ARCH", text)
        assert detect_gpu_arch() == machine
        got = select(*G2, arch=None)
        assert got.machine == machine
        assert "IRIS_GPU_ARCH" in got.source
    monkeypatch.delenv("IRIS_GPU_ARCH")
    assert detect_gpu_arch() == ""
    assert not select(*G2, arch=None).enabled


def test_the_variable_comes_before_the_device(device, monkeypatch):
    device("NVIDIA H200", "sm_90", 132)
    monkeypatch.setenv("IRIS_GPU_ARCH", "mi300x")
    assert (detect_gpu_arch(), select(*G2, arch=None).speedup) == ("mi300x", 1.343)
    assert select(*G2, arch="sm_90").machine == "h200", "what the caller names comes before the variable"


def test_a_wrong_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("IRIS_GPU_ARCH", "gfx90a")
    for ask in (detect_gpu_arch, lambda: select(*G2, arch=None), lambda: list_known_shapes(8)):
        with pytest.raises(EnvironmentValueError, match="'gfx90a' names no known device; possible: a product"):
            ask()


def test_detection_asks_torch_and_starts_no_program(device, monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError(f"started {args}")

    device("AMD Instinct MI300X", "gfx942")
    monkeypatch.setattr(subprocess, "Popen", start)
    assert detect_gpu_arch() == "mi300x"
    assert "rocm" not in detect_gpu_arch.__doc__
    assert "PyTorch is asked" in detect_gpu_arch.__doc__


def test_clearing_forgets_the_device(device, monkeypatch):
    device("AMD Instinct MI300X", "gfx942")
    assert detect_gpu_arch() == "mi300x"
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append(1) or False)
    assert (detect_gpu_arch(), asked) == ("mi300x", []), "found once"
    clear_config_cache()
    assert (detect_gpu_arch(), asked) == ("", [1])
    assert not select(*G2, arch=None).enabled


def test_supported_architectures_are_those_with_a_table():
    assert {"mi300x", "mi355x"} <= set(SUPPORTED_ARCHITECTURES) <= set(_target.KNOWN)
    assert SUPPORTED_TRANSPOSES == ("NN", "NT", "TN", "TT")
    for machine in SUPPORTED_ARCHITECTURES:
        assert tables.cases("all_gather_matmul", machine)


# What M counts.


def test_rows_are_those_of_the_whole_product_unless_told():
    whole = select(8 * 4096, 4096, 8192, gather_dim=0, arch="h100")
    assert select(4096, 4096, 8192, gather_dim=0, rows="local", arch="h100") == whole
    assert select(8 * 4096, 4096, 8192, gather_dim=0, rows="global", arch="h100") is whole
    assert select(4096, 4096, 8192, gather_dim=0, arch="h100") != whole


def test_rows_of_a_shard_along_k_are_those_of_the_whole_product():
    assert select(*G2, rows="local") == select(*G2, rows="global")
    assert select(131072 // 8, 16384, 16384, rows="local").shape_key is None


# Arguments.


@pytest.mark.parametrize("name", ["M", "N", "K", "world_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None, True])
def test_sizes_are_whole_numbers_above_zero(name, value):
    given = {"M": 64, "N": 64, "K": 64, "world_size": 8, "arch": "mi300x"} | {name: value}
    with pytest.raises(ArgumentError, match=f"{name}={value!r} is not possible; possible: whole numbers above 0"):
        select_ag_mm_config(**given)


@pytest.mark.parametrize("transpose", ["", "N", "NNN", "XN", None, "CN"])
def test_unknown_transposes_are_refused(transpose):
    for ask in (lambda: select(*G2, transpose=transpose), lambda: list_known_shapes(8, transpose, "mi300x")):
        with pytest.raises(ArgumentError, match="possible: NN, NT, TN, TT"):
            ask()


def test_other_arguments_that_are_not_known_are_refused():
    with pytest.raises(ArgumentError, match="rows='all' is not known; possible: global, local"):
        select(*G2, rows="all")
    for dim in (2, -1, None, True):
        with pytest.raises(ArgumentError, match=rf"gather_dim={dim} is not known; possible: 0 .* 1 \(along K\)"):
            select(*G2, gather_dim=dim)
    for dtype in (torch.float64, torch.int64, "float16"):
        with pytest.raises(ArgumentError, match=r"is not possible; possible: torch.float16, torch.bfloat16, .*int8"):
            select(*G2, dtype=dtype)


def test_dtypes_of_two_bytes_are_one_and_others_have_no_measured_case():
    assert select(*G2, dtype=torch.bfloat16).speedup == 1.343
    for dtype in (torch.float32, torch.float8_e4m3fnuz):
        got = select(*G2, dtype=dtype)
        assert (got.speedup, got.enabled, got.config_params) == (None, False, {})
        assert got.source.startswith("Disabled by config: the library's kernels were measured with 16-bit types only")
    for M, algorithm in ((131072, "hbm_buffer"), (32, "pull")):
        got = select(M, 16384, 16384, dtype=torch.int8)
        assert (got.speedup, got.enabled, got.algorithm) == (None, True, algorithm)
        assert "PyTorch has no int8 matmul" in got.source


# What comes of a result.


@pytest.mark.parametrize("transpose", SUPPORTED_TRANSPOSES)
def test_a_result_gives_the_whole_configuration(transpose):
    for M in (131072, 5000):
        got = select(M, 16384, 16384, transpose=transpose)
        config = got.to_fused_config()
        assert isinstance(config, HbmBufferConfig)
        assert isinstance(config, FusedConfig)
        for name, value in {**got.config_params, **got.hbm_buffer_params}.items():
            assert getattr(config, name) == value
        assert {"num_warps", "num_stages"} <= set(got.config_params)
        assert set(got.config_params) <= {field.name for field in fields(FusedConfig)}
        assert set(got.hbm_buffer_params) == set(PIPELINE)


def test_tiles_of_the_kernel_without_a_staging_buffer_are_for_it_alone():
    got = AutoConfigResult(True, {"block_size_m": 64, "num_stages": 3}, algorithm="pull")
    assert got.to_fused_config() == FusedConfig(64, num_stages=3)
    assert type(got.to_fused_config()) is FusedConfig


@pytest.mark.parametrize("asked", [(*G2, 2), (*G2, 3), (196608, 18432, 16384, 8)])
def test_what_is_disabled_gives_no_configuration(asked):
    got = select(*asked)
    with pytest.raises(RuntimeError, match=r"is disabled: .*PyTorch's operations are the better choice") as caught:
        got.to_fused_config()
    assert isinstance(caught.value, IrisError)
    assert got.source in str(caught.value)
    with pytest.raises(RuntimeError, match="disabled: default"):
        AutoConfigResult().to_fused_config()


def test_results_cannot_be_changed():
    got = select(*G2)
    for params in (got.config_params, got.hbm_buffer_params):
        with pytest.raises(TypeError):
            params["k_per_flag"] = 1
    with pytest.raises(FrozenInstanceError):
        got.enabled = False
    shapes = list_known_shapes(8, arch="mi300x")
    shapes[0]["speedup"] = 99
    shapes.clear()
    assert list_known_shapes(8, arch="mi300x")[0]["speedup"] == 1.343
    sizes = load_regression_sizes()
    sizes[0]["M"] = 0
    assert load_regression_sizes()[0]["M"] == 131072
    given = {"block_size_m": 64}
    result = AutoConfigResult(config_params=given)
    given["block_size_m"] = 1
    assert result.config_params == {"block_size_m": 64}


def test_results_are_remembered_until_they_are_cleared():
    first = select(*G2)
    assert select(*G2) is first
    clear_config_cache()
    assert select(*G2) is not first
    assert select(*G2) == first


def test_there_is_no_end_to_what_may_be_asked(monkeypatch):
    monkeypatch.setattr(auto_config, "_MEMORY", 10)
    for M in range(1, 40):
        select(M, 64, 64)
    assert len(auto_config._results) <= 10


def test_every_regression_size_is_selected_as_expected():
    sizes = load_regression_sizes()
    assert len(sizes) == 9
    for size in sizes:
        got = select(size["M"], size["N"], size["K"], size["world_size"])
        assert (got.enabled, got.speedup) == (size["expected_enabled"], size["expected_speedup"]), size["name"]
    assert sum(size["tier"] == "champion" for size in sizes) == 7


def test_known_shapes_are_listed_best_first(monkeypatch):
    shapes = list_known_shapes(8, arch="mi300x")
    speedups = [shape["speedup"] for shape in shapes]
    assert len(shapes) == 12
    assert speedups == sorted(speedups, reverse=True)
    assert (shapes[0]["label"], shapes[0]["shape_key"], shapes[0]["n_trials"]) == ("g2", "131072x16384x16384", 102)
    assert [shapes[0][name] for name in "MNK"] == list(G2)
    assert sum(shape["beats_torch"] for shape in shapes) == 7
    assert "MI300X" in shapes[0]["source"]
    assert len(list_known_shapes(8, arch="mi355x")) == 10
    for absent in (2, 3, 4, 16):
        assert list_known_shapes(absent, arch="mi300x") == [], "the set is off, or is none"
    for transpose in ("NT", "TN", "TT"):
        assert list_known_shapes(8, transpose, "mi300x") == []
    assert list_known_shapes(8) == [], "this machine has no GPU"
    monkeypatch.setenv("IRIS_GPU_ARCH", "mi300x")
    assert list_known_shapes(8) == shapes
    assert list_known_shapes(8, arch="auto") == shapes


# Operations that are called without a configuration do the same.


def context(target, link, records=()):
    """As much of a context as a choice asks."""
    known = dict(records)
    service = SimpleNamespace(find=lambda query, members: known.get(query))
    return SimpleNamespace(
        runtime="gpu", target=target, get_cu_count=lambda: target.compute_units, service=lambda name: service, link=link
    )


def chosen(M, N, K, world, transpose, arch, gather_dim, dtype, records=()):
    """The plan of the operation on a whole machine, with matrices that lie together."""
    target = _target.KNOWN[arch]
    problem = auto_config._problem(M, N, K, world, transpose, gather_dim, dtype)
    return choice.choose(
        context(target, target.link, records), problem, None, None, call.torch_lacks(problem), object()
    )


def agree(got, plan):
    assert got.enabled == (plan.algorithm != "torch"), (got.source, plan)
    if got.enabled:
        assert (got.algorithm, got.to_fused_config()) == (plan.algorithm, plan.config), (got.source, plan)
        assert got.speedup == (plan.speedup if plan.source != "predicted" else None)


@pytest.fixture
def linked(monkeypatch):
    monkeypatch.setattr(choice, "link_of", lambda ctx: ctx.link)


@pytest.mark.parametrize("arch", _target.KNOWN)
@pytest.mark.parametrize("gather_dim", [0, 1])
def test_the_operation_does_what_is_selected(linked, arch, gather_dim):
    sizes = [G2, (196608, 18432, 16384), (5000, 5000, 5000), (64, 4096, 8192), (130000, 16000, 16384), (1, 64, 64)]
    sizes += [(case.entry.sizes[0][1], *(size for _, size in case.entry.sizes[1:]))
              for case in tables.cases("all_gather_matmul", arch)[::5]]  # fmt: skip
    outcomes = set()
    for shape in dict.fromkeys(sizes):
        for world in (1, 2, 3, 4, 8, 16):
            for transpose, dtype in (("NN", torch.bfloat16), ("NT", torch.float16), ("NN", torch.float32)):
                asked = (*shape, world, transpose, arch)
                got = select_ag_mm_config(*asked, gather_dim=gather_dim, dtype=dtype)
                agree(got, chosen(*asked, gather_dim, dtype))
                outcomes.add(got.enabled)
    assert False in outcomes


def test_the_operation_does_what_is_selected_for_types_that_only_kernels_multiply(linked):
    for M in (32, 5000):
        for world in (1, 8):
            for arch in ("mi300x", "h200"):
                got = select(M, 4096, 4096, world, arch=arch, dtype=torch.int8)
                agree(got, chosen(M, 4096, 4096, world, "NN", arch, 1, torch.int8))
                assert got.enabled


def test_the_operation_takes_what_was_tuned_as_it_is_selected(linked):
    for shape, default_key in ((G2, "another"), (G2, None), ((5000, 5000, 5000), "any"), ((4096, 4096, 4096), "any")):
        query = query_of(*shape)
        packaged = tables.exact(query)
        entry = entry_of(query, block_size_m=64, k_per_flag=3)
        key = packaged.key if default_key is None else default_key
        tuned(query, entry, key)
        records = store.read_all()
        got = select(*shape)
        agree(got, chosen(*shape, 8, "NN", "mi300x", 1, torch.float16, records))
        assert got.source.startswith("User cache") is (default_key is None or packaged is None)


MADE_UP = {
    "schema": 1, "operation": "all_gather_matmul", "machine": "b200", "arch": "sm_100",
    "provenance": {"x": {"hardware": "made up", "source": "a test"}},
    "where": {"link": "nvlink", "dtype": "16-bit"},
    "groups": [{"rules": [
        {"when": {"M": {"max": 1024}}, "then": {"algorithm": "torch"}},
        {"when": {"N": {"max": 1024}}, "then": {"algorithm": "pull", "block_size_m": 64, "num_stages": 3}},
        {"when": {"N": {"max": 4096}}, "then": {"algorithm": "hbm_buffer", "fetchers": 7, "stage": 0.5,
                                                "flag_bytes": 65536, "block_size_k": 128, "num_stages": 2}},
        {"when": {"N": {"max": 8192}}, "then": {"algorithm": "hbm_buffer", "block_size_k": 1024, "num_stages": 8}},
        {"then": {"algorithm": "copy_engine", "stage": 2.0}},
    ]}],
}  # fmt: skip


def test_a_rule_may_leave_the_numbers_to_the_problem(linked, monkeypatch):
    """Fields of choice.Bringing beside those of tiles, and an algorithm of each rule's own."""
    monkeypatch.setattr(heuristics, "_load", lambda operation, machine: MADE_UP if machine == "b200" else None)
    selection.select.cache_clear()
    try:
        for gather_dim in (0, 1):
            found = {}
            for N in (512, 4096, 8192, 16384):
                got = select(65536, N, 8192, arch="b200", gather_dim=gather_dim)
                agree(got, chosen(65536, N, 8192, 8, "NN", "b200", gather_dim, torch.float16))
                found[N] = got
            assert select(512, 4096, 8192, arch="b200", gather_dim=gather_dim).source == (
                "Heuristic (no measured case near in b200 ws8 NN): PyTorch's operations"
            )
            assert found[512].algorithm == "pull"
            assert found[512].to_fused_config() == FusedConfig(64, num_stages=3)
            ruled = found[4096]
            assert ruled.source == "Heuristic (no measured case near in b200 ws8 NN)"
            assert (ruled.hbm_buffer_params["num_fetch_sms"], ruled.config_params["num_stages"]) == (7, 2)
            # 64 KiB are two blocks of 128x128 elements of two bytes.
            assert (ruled.config_params["block_size_m"], ruled.config_params["block_size_k"]) == (128, 128)
            assert ruled.hbm_buffer_params["k_per_flag"] == 2
            # Half of the rows that a round of all programs multiplies; more where the own shard comes first.
            usual = choice.staged(
                choice.Place(_target.KNOWN["b200"], "nvlink"),
                auto_config._problem(65536, 4096, 8192, 8, "NN", gather_dim, torch.float16), "hbm_buffer", None,
                choice.Bringing(),
            )  # fmt: skip
            assert ruled.hbm_buffer_params["num_fetch_stages"] > usual.num_fetch_stages
            assert "as two H200 do" in found[8192].source, "it does not fit, so it is no rule for this problem"
            assert (found[16384].algorithm, found[16384].to_fused_config().transport) == ("copy_engine", "copy_engine")
    finally:
        selection.select.cache_clear()


def test_a_choice_without_a_context_has_the_link_and_the_units_of_its_place():
    problem = auto_config._problem(65536, 4096, 8192, 8, "NN", 1, torch.float16)
    for link, expected_rate in (("nvlink", None), ("pcie", "pcie")):
        place = choice.Place(_target.KNOWN["h100"], link)
        decision = choice.decide(place, problem, "")
        assert choice.query_of(place, "all_gather_matmul", problem).link == link
        assert (f"over {expected_rate}" in decision.plan.reason) is (expected_rate is not None)
    slow = choice.decide(choice.Place(_target.KNOWN["h100"], "pcie"), problem, "").expected
    fast = choice.decide(choice.Place(_target.KNOWN["h100"], "shared"), problem, "").plan.reason
    assert "ms over pcie" in slow
    assert fast != slow


# What was tuned on this machine.


def tuned(query, entry, default_key):
    store.write(query.operation, {query: store.as_record(entry, default_key)})
    clear_config_cache()


def entry_of(query, algorithm="hbm_buffer", speedup=1.6, **params):
    return Entry("tuned here", algorithm, params, query.sizes, 1.25, 1.25 * speedup, speedup, "this machine")


def query_of(M, N, K, world=8, arch="mi300x"):
    problem = auto_config._problem(M, N, K, world, "NN", 1, torch.float16)
    target = _target.KNOWN[arch]
    return choice.query_of(choice.Place(target, target.link), "all_gather_matmul", problem)


def test_the_users_cache_comes_before_near_cases_and_rules():
    for M in (5000, 130000, 4100):
        query = (
            query_of(M, 5000, 5000) if M == 5000 else query_of(M, *((16000, 16384) if M == 130000 else (4096, 4096)))
        )
        tuned(query, entry_of(query, block_size_m=64, k_per_flag=3), "whatever would have run")
        got = select(*(size for _, size in query.sizes))
        assert got.source.startswith("User cache: mi300x ws8 NN")
        assert (got.enabled, got.speedup, got.milliseconds, got.reason) == (True, 1.6, 1.25, "this machine")
        assert (got.config_params["block_size_m"], got.hbm_buffer_params["k_per_flag"]) == (64, 3)


def test_a_packaged_exact_case_loses_only_to_what_was_measured_against_it():
    query = query_of(*G2)
    tuned(query, entry_of(query, k_per_flag=5), "another default")
    assert select(*G2).source.startswith("Exact match")
    tuned(query, entry_of(query, k_per_flag=5), tables.exact(query).key)
    assert select(*G2).source.startswith("User cache")
    assert select(*G2).hbm_buffer_params["k_per_flag"] == 5


def test_a_set_that_is_off_loses_to_what_was_tuned_here():
    query = query_of(5000, 5000, 5000, world=2)
    tuned(query, entry_of(query), config_key("torch", {}))
    assert select(5000, 5000, 5000, world=2).source.startswith("User cache")
    # A measured case that lost stands for PyTorch's operations.
    lost = query_of(4096, 4096, 4096)
    tuned(lost, entry_of(lost), config_key("torch", {}))
    assert select(4096, 4096, 4096).source.startswith("User cache")


def test_what_was_tuned_for_another_problem_is_not_taken():
    query = query_of(5000, 5000, 5000)
    tuned(query, entry_of(query), "")
    for other in ({"dtype": torch.bfloat16}, {"transpose": "NT"}, {"gather_dim": 0}, {"world": 16}):
        assert not select(5000, 5000, 5000, **other).source.startswith("User cache"), other
    assert not select(5000, 5000, 5001).source.startswith("User cache")


def test_torch_as_the_winner_of_tuning_is_no_configuration():
    query = query_of(5000, 5000, 5000)
    tuned(query, entry_of(query, algorithm="torch", speedup=1.0), "")
    got = select(5000, 5000, 5000)
    assert (got.enabled, got.beats_torch, got.config_params, got.algorithm) == (False, False, {}, "torch")


def test_a_corrupt_cache_does_not_matter(tmp_path):
    folder = tmp_path / "cache" / "tuned"
    folder.mkdir(parents=True)
    (folder / "all_gather_matmul.json").write_text("{ not JSON")
    assert select(*G2).speedup == 1.343


# One source of the figures.


def test_there_is_one_table_and_one_set_of_rules():
    """What the package selects for a case is what its file says, and no other table says otherwise."""
    got = select(262144, 8192, 8192)
    assert [got.hbm_buffer_params[name] for name in PIPELINE] == [64, 52, 4, 52]
    modules = (auto_config, selection, tables, heuristics)
    source = "\n".join(Path(module.__file__).read_text() for module in modules)
    for figure in ("262144", "131072", "1.343", "16384"):
        assert figure not in source


def test_the_package_of_operations_has_it_and_loads_it_when_it_is_asked_for():
    code = (
        "import sys, iris, iris.ops; loaded = 'iris.ops.auto_config' in sys.modules; "
        "from iris.ops import AutoConfigResult, select_ag_mm_config; "
        "found = select_ag_mm_config(131072, 16384, 16384, 8, arch='mi300x'); "
        "print(loaded, type(found) is AutoConfigResult, found.speedup, "
        "{'AutoConfigResult', 'select_ag_mm_config'} <= set(dir(iris.ops)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True 1.343 True\n"
    with pytest.raises(AttributeError, match="has no attribute 'select_mm_config'"):
        iris.ops.select_mm_config  # noqa: B018


def test_looking_up_imports_nothing_heavy():
    """Beyond what iris.ops itself imports."""
    code = (
        "import sys, iris.ops.auto_config as a; before = set(sys.modules); "
        "a.select_ag_mm_config(131072, 16384, 16384, 8, arch='mi300x'); import json; "
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) - set(sys.stdlib_module_names) <= {"iris", "filelock"}, done.stdout
