"""The use of ROCm's model of products, with a small stand-in for it: the package itself is for AMD devices only."""

import math
import sys
from types import SimpleNamespace

import pytest

from iris._machine import by_name
from iris.tuning import _origami, _product
from iris.tuning.cost_model import predict

MI300X = by_name("mi300x")
SIZES = {"M": 4096, "N": 4096, "K": 4096}
PARAMS = {"block_size_m": 256, "block_size_n": 256, "k_per_flag": 8}


class Holder:
    """Takes any attributes, as the module's structures do."""


def stand_in(units=304, cycles=2_100_000, clock_ghz=2.1, seen=None):
    """A module with the names that are used; a product takes so many cycles, whatever its size."""

    def select_config(problem, hardware, configs):
        if seen is not None:
            seen.append((problem, configs[0]))
        return SimpleNamespace(latency=cycles)

    return SimpleNamespace(
        get_hardware_for_device=lambda index: SimpleNamespace(N_CU=units, compute_clock_ghz=clock_ghz),
        problem_t=Holder,
        config_t=Holder,
        dim3_t=lambda *sizes: sizes,
        transpose_t=SimpleNamespace(N="N", T="T"),
        string_to_datatype=lambda name: name,
        select_config=select_config,
    )


@pytest.fixture
def install(monkeypatch):
    """Puts a module in place of origami, None for no such package."""

    def put(module):
        monkeypatch.setitem(sys.modules, "origami", module)
        _origami.forget()
        _product.vendor_product.cache_clear()

    yield put
    monkeypatch.undo()
    _origami.forget()
    _product.vendor_product.cache_clear()


def test_it_is_not_required(install):
    install(None)
    assert _origami.product_seconds(MI300X, 4096, 4096, 4096, "float16", (256, 256, 64)) is None
    assert _origami.status() == "origami is not installed"
    assert predict("all_gather_matmul", "mi300x", SIZES, 8, "float16", PARAMS).model == "iris"


def test_another_package_of_that_name_is_not_used(install):
    install(SimpleNamespace(fold=lambda paper: paper, select_config=None))
    assert _origami.product_seconds(MI300X, 4096, 4096, 4096, "float16", (256, 256, 64)) is None
    assert "another package or version: it has no get_hardware_for_device, problem_t" in _origami.status()
    assert "select_config" not in _origami.status()


def test_its_time_is_taken_where_it_has_the_names(install):
    seen = []
    install(stand_in(seen=seen))
    # 2.1 million cycles at 2.1 GHz.
    assert _origami.product_seconds(MI300X, 512, 1024, 2048, "bfloat16", (256, 128, 64)) == pytest.approx(1e-3)
    (problem, config) = seen[0]
    assert problem.size == (512, 1024, 2048)
    assert (problem.a_dtype, problem.d_dtype) == ("bf16", "bf16")
    assert config.mt == (256, 128, 64)
    assert "models products" in _origami.status()


def test_a_prediction_says_whose_model_it_used(install):
    install(None)
    own = predict("all_gather_matmul", "mi300x", SIZES, 8, "float16", PARAMS)
    install(stand_in(cycles=42_000_000))
    theirs = predict("all_gather_matmul", "mi300x", SIZES, 8, "float16", PARAMS)
    assert (own.model, theirs.model) == ("iris", "origami")
    # 20 ms of products are longer than whatever goes on beside them.
    assert theirs.gemm == pytest.approx(20e-3, rel=0.01)
    assert theirs.fused == pytest.approx(20e-3, rel=0.1)
    assert own.fused < 3e-3
    assert theirs.unfused > own.unfused
    assert predict("all_gather_matmul", "mi300x", SIZES, 8, "float16", {}, algorithm="torch").fused == theirs.unfused


def test_it_is_not_asked_for_other_devices(install):
    seen = []
    install(stand_in(units=256, seen=seen))
    assert predict("all_gather_matmul", "mi300x", SIZES, 8, "float16", PARAMS).model == "iris"
    assert predict("all_gather_matmul", "h200", SIZES, 8, "float16", PARAMS).model == "iris"
    # Half a device is another device, too.
    assert predict("all_gather_matmul", "mi355x", SIZES, 8, "float16", PARAMS, units=128).model == "iris"
    assert seen == []
    assert predict("all_gather_matmul", "mi355x", SIZES, 8, "float16", PARAMS).model == "origami"
    assert predict("all_gather_matmul", "mi355x", SIZES, 8, "float32", PARAMS).model == "origami"


def test_a_machine_without_a_device_falls_back(install):
    def no_device(index):
        raise RuntimeError("no ROCm-capable device is detected")

    module = stand_in()
    module.get_hardware_for_device = no_device
    install(module)
    assert predict("matmul_all_reduce", "mi300x", SIZES, 8, "float16").model == "iris"
    assert "no ROCm-capable device" in _origami.status()


def test_hardware_without_its_figures_falls_back(install):
    module = stand_in()
    module.get_hardware_for_device = lambda index: SimpleNamespace(N_CU=304)
    install(module)
    assert _origami.product_seconds(MI300X, 64, 64, 64, "float16", (64, 64, 64)) is None
    assert "no compute_clock_ghz" in _origami.status()


def test_functions_that_take_something_else_fall_back_with_a_warning(install):
    module = stand_in()
    module.select_config = lambda problem: None
    install(module)
    with pytest.warns(UserWarning, match="origami is not used: TypeError"):
        assert _origami.product_seconds(MI300X, 64, 64, 64, "float16", (64, 64, 64)) is None


@pytest.mark.parametrize("cycles", [0, -5, math.nan])
def test_a_time_that_is_none_is_not_taken(install, cycles):
    install(stand_in(cycles=cycles))
    assert _origami.product_seconds(MI300X, 64, 64, 64, "float16", (64, 64, 64)) is None
