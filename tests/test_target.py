"""Hardware facts: architecture names in any spelling, shares of a device, compile targets."""

import re
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace

import pytest
import torch

from iris import _target
from iris.errors import ArgumentError


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
        _target.detect.cache_clear()
        return _target.detect(0)

    monkeypatch.delenv("IRIS_GPU_ARCH", raising=False)
    yield detect
    _target.detect.cache_clear()


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
    assert (target.arch, target.name, target.chiplets) == ("sm_100", "NVIDIA H200", 2)


def test_names_of_compute_units():
    assert _target.KNOWN["h200"].unit_name(0, 131) == "SM131"
    assert _target.KNOWN["mi300x"].unit_name(7, 37) == "XCC7_CU37"
    assert _target.INTERPRETER.unit_name(0, 0) == "XCC0_CU0"
