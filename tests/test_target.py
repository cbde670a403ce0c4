"""Hardware facts: architecture names in any spelling, shares of a device, compile targets."""

import re
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace

import pytest
import torch

from iris import _target
from iris.errors import ArgumentError, EnvironmentValueError
from iris.runtime.links import LINKS


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("amdgcn-amd-amdhsa--gfx950", "gfx950"),
        ("GFX90A", "gfx90a"),
        ("sm_90", "sm_90"),
        ("sm_90a", "sm_90"),
        (" SM100 ", "sm_100"),
        ("9.0", "sm_90"),
        ("(9, 0)", "sm_90"),
        ("10.0", "sm_100"),
        ("", ""),
        (None, ""),
        ("Tesla", ""),
        ("9", ""),
    ],
)
def test_normalize_arch(text, arch):
    assert _target.normalize_arch(text) == arch


def test_by_arch_gives_the_facts_of_the_architecture():
    for arch in _target.compiled_archs():
        assert _target.by_arch(arch).arch == arch
    assert _target.by_arch("gfx942:xnack-") is _target.KNOWN["mi300x"]
    for wrong in ("gfx1100", "sm_75", "", "cpu"):
        with pytest.raises(ArgumentError, match="not known; known: gfx942, gfx950, sm_90, sm_100"):
            _target.by_arch(wrong)


def test_compiled_archs_are_each_listed_once():
    archs = _target.compiled_archs()
    assert len(set(archs)) == len(archs) < len(_target.KNOWN)
    assert set(archs) == {target.arch for target in _target.KNOWN.values()}


@pytest.mark.parametrize("name", list(_target.KNOWN))
def test_known_targets_are_sound(name):
    target = _target.KNOWN[name]
    assert target.compiled
    assert _target.normalize_arch(target.arch) == target.arch
    assert target.compute_units > 0
    assert 64 << 10 <= target.shared_memory_bytes < 256 << 10
    assert target.warp_size == {"amd": 64, "nvidia": 32}[target.vendor]
    assert target.compute_units % target.chiplets == 0
    assert all(getattr(torch, dtype).itemsize == 1 for dtype in target.fp8)
    compiler = target.gpu_target()
    assert (compiler.backend, compiler.warp_size) == ({"amd": "hip", "nvidia": "cuda"}[target.vendor], target.warp_size)
    assert str(compiler.arch) == re.sub("^sm_", "", target.arch)


def test_links_by_vendor():
    links = {name: target.link for name, target in _target.KNOWN.items()}
    assert (links["mi300x"], links["h200"], _target.INTERPRETER.link) == ("xgmi", "nvlink", "interpreted")
    assert {*links.values(), "interpreted"} < set(LINKS)


def test_a_family_is_the_letters_of_the_architecture():
    assert {target.arch: target.family for target in _target.KNOWN.values()} == {
        "gfx942": "gfx", "gfx950": "gfx", "sm_90": "sm", "sm_100": "sm",
    }  # fmt: skip
    assert replace(_target.KNOWN["h200"], arch="sm_90a").family == "sm"
    assert replace(_target.KNOWN["mi300x"], arch="gfx90a").family == "gfx"
    assert _target.INTERPRETER.family == "interpreter"


def test_nothing_is_compiled_for_the_interpreter():
    assert not _target.INTERPRETER.compiled
    with pytest.raises(ArgumentError, match="is interpreted; compiled targets: gfx942"):
        _target.INTERPRETER.gpu_target()


def test_a_share_has_fewer_compute_units_and_all_else():
    whole = _target.KNOWN["h200"]
    for ranks, units in ((1, 132), (2, 66), (8, 16), (132, 1), (1000, 1), (0, 132)):
        assert whole.share(ranks) == replace(whole, compute_units=units)
    with pytest.raises(FrozenInstanceError):
        whole.compute_units = 1


@pytest.fixture
def device(monkeypatch):
    """Lets torch report a device; ``device(hip, ...)`` gives what is detected."""

    def detect(hip=None, **properties):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))
        monkeypatch.setattr(torch.version, "hip", hip)
        _target.forget_devices()
        return _target.detect(0)

    monkeypatch.delenv("IRIS_GPU_ARCH", raising=False)
    yield detect
    _target.forget_devices()


H200 = {
    "name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132,
    "shared_memory_per_block_optin": 232448, "warp_size": 32,
}  # fmt: skip
MI300X = {
    "name": "AMD Instinct MI300X", "gcnArchName": "gfx942:sramecc+:xnack-", "multi_processor_count": 304,
    "warp_size": 64, "shared_memory_per_block_optin": 65536,
}  # fmt: skip


def test_detection_agrees_with_the_known_figures(device):
    assert device(**H200) == _target.KNOWN["h200"]
    assert device(hip="7.0", **MI300X) == _target.KNOWN["mi300x"]


def test_what_torch_reports_wins_over_the_known_figures(device):
    # A part of a device, as under MPS or MIG.
    assert device(**H200 | {"multi_processor_count": 16}).compute_units == 16
    assert device(**H200 | {"shared_memory_per_block_optin": 101376}).shared_memory_bytes == 101376


def test_what_torch_does_not_report_is_the_known_figure(device):
    few = {name: value for name, value in H200.items() if name not in ("shared_memory_per_block_optin", "warp_size")}
    assert device(**few) == _target.KNOWN["h200"]


def test_an_unknown_device_is_taken_as_it_is(device):
    target = device(**H200 | {"name": "GPU", "major": 7, "minor": 5, "shared_memory_per_block_optin": 0})
    assert (target.arch, target.shared_memory_bytes, target.fp8, target.chiplets) == ("sm_75", 64 << 10, (), 1)


def test_the_variable_overrides_the_architecture(device, monkeypatch):
    monkeypatch.setenv("IRIS_GPU_ARCH", "SM_100a")
    target = device(**H200)
    assert (target.arch, target.product, target.name, target.chiplets) == ("sm_100", "b200", "NVIDIA H200", 2)


def test_the_variable_is_read_at_every_detection(device, monkeypatch):
    assert device(**H200).product == "h200"
    monkeypatch.setenv("IRIS_GPU_ARCH", "h100")
    assert _target.detect(0).product == "h100"
    monkeypatch.delenv("IRIS_GPU_ARCH")
    assert _target.detect(0) == _target.KNOWN["h200"]


def test_a_bare_architecture_keeps_the_product_that_is_there(device, monkeypatch):
    monkeypatch.setenv("IRIS_GPU_ARCH", "gfx942:sramecc+:xnack-")
    mi325x = MI300X | {"name": "AMD Instinct MI325X"}
    assert device(hip="7.0", **mi325x) == _target.KNOWN["mi325x"]
    monkeypatch.setenv("IRIS_GPU_ARCH", "MI300X")
    assert device(hip="7.0", **mi325x).product == "mi300x"


def test_the_variable_refuses_what_is_not_known(device, monkeypatch):
    for wrong in ("gfx90a", "rtx", "cpu", "sm_75"):
        monkeypatch.setenv("IRIS_GPU_ARCH", wrong)
        with pytest.raises(
            EnvironmentValueError, match=rf"'{wrong}' names no known device; possible: .*mi300x.*gfx942"
        ):
            device(**H200)
    monkeypatch.setenv("IRIS_GPU_ARCH", "mi300x")
    with pytest.raises(EnvironmentValueError, match=r"kernels run on NVIDIA H200 \(sm_90\); possible: .* of nvidia"):
        device(**H200)


@pytest.mark.parametrize(
    ("name", "arch", "product"),
    [
        ("AMD Instinct MI300X", "gfx942", "mi300x"),
        ("AMD Instinct MI300X VF", "gfx942", "mi300x"),
        ("AMD Instinct MI325X", "gfx942", "mi325x"),
        ("AMD Instinct MI355X", "gfx950", "mi355x"),
        ("NVIDIA H100 80GB HBM3", "sm_90", "h100"),
        ("NVIDIA H200 MIG 1g.18gb", "sm_90", "h200"),
        # Other products with the same architecture.
        ("AMD Instinct MI300A", "gfx942", ""),
        ("AMD Instinct MI308X", "gfx942", ""),
        ("NVIDIA GH200 480GB", "sm_90", ""),
        ("NVIDIA H20", "sm_90", ""),
        # Names that tell nothing.
        ("AMD Radeon Graphics", "gfx942", "mi300x"),
        ("", "gfx950", "mi355x"),
        ("NVIDIA Graphics Device", "sm_75", ""),
        # A name and an architecture that do not go together.
        ("NVIDIA H200", "sm_75", ""),
    ],
)
def test_products_that_share_an_architecture_are_told_apart_by_name(name, arch, product):
    assert _target.product_named(name, arch) == product


@pytest.mark.parametrize(
    ("text", "own", "product", "how"),
    [
        ("MI300X", "mi325x", "mi300x", "^$"),
        (" h200 ", "", "h200", "^$"),
        ("gfx942:sramecc+:xnack-", "", "mi300x", "mi300x is the first known product with gfx942, before mi325x"),
        ("gfx942", "mi325x", "mi325x", "gfx942 is the architecture of this machine's mi325x"),
        ("sm_90a", "b200", "h100", "h100 is the first known product with sm_90, before h200"),
        ("SM_90A", "h200", "h200", "this machine's h200"),
        ("10.0", "", "b200", "b200 is the first known product with sm_100$"),
    ],
)
def test_a_text_names_a_product_and_says_how(text, own, product, how):
    named = _target.product_of(text, own)
    assert (named.product, named.arch) == (product, _target.KNOWN[product].arch)
    assert re.search(how, named.how), named.how


@pytest.mark.parametrize("text", ["", "gfx90a", "sm_75", "gpu", "mi300", "cpu"])
def test_a_text_that_names_nothing_lists_what_is_possible(text):
    with pytest.raises(
        ArgumentError, match=r"possible: a product \(mi300x, .*h200.*\) or an architecture \(gfx942, .*sm_90"
    ):
        _target.product_of(text)


def test_products_are_the_names_of_known_targets():
    assert {name: target.product for name, target in _target.KNOWN.items()} == {name: name for name in _target.KNOWN}
    assert _target.INTERPRETER.product == ""
    assert _target.KNOWN["h200"].share(4).product == "h200"


def test_names_of_compute_units():
    assert _target.KNOWN["h200"].unit_name(0, 131) == "SM131"
    assert _target.KNOWN["mi300x"].unit_name(7, 37) == "XCC7_CU37"
    assert _target.INTERPRETER.unit_name(0, 0) == "XCC0_CU0"
