"""Where compiled kernels are kept, and what of them; with made-up compiled kernels, so without a GPU."""

import hashlib
import json
from types import SimpleNamespace

import pytest
import torch

from iris.tracing import kernel_artifacts as artifacts

STAGES = {"ttir": "module {}", "ttgir": b"bytes", "ptx": ".version 8.7", "cubin": b"\x7fELF"}


class Kernel:
    """Stands for a ``@triton.jit`` function."""

    __name__ = "my_kernel"

    def __init__(self, compiled):
        self.compiled = compiled
        self.calls = []

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.calls.append((grid, args, kwargs))
            return self.compiled

        return launch


def compiled(asm=STAGES, **facts):
    return SimpleNamespace(asm=asm, metadata=SimpleNamespace(num_warps=8), **facts)


def test_a_launch_keeps_the_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("IRIS_KERNEL_ARTIFACTS_DIR", str(tmp_path / "kept"))
    kernel = Kernel(compiled())
    options = {"BLOCK_SIZE_M": 128, "block_size_n": 64, "BLOCK_K": 32, "scale": 0.5, "tensor": object()}
    result = artifacts.iris_launch(kernel, (3,), 1, 2, algorithm="one/shot", rank=1, dtype=torch.float16, **options)
    assert result is kernel.compiled
    assert kernel.calls == [((3,), (1, 2), options)]
    digest = hashlib.sha256(STAGES["ptx"].encode()).hexdigest()[:12]
    place = tmp_path / "kept" / "one_shot" / "my_kernel" / "rank_1" / "BM128_BN64_BK32_fp16_w8" / digest
    assert {path.name for path in place.iterdir()} == {"metadata.json", "kernel.ttir", "kernel.ttgir", "kernel.ptx"}
    assert (place / "kernel.ttir").read_text() == "module {}"
    assert (place / "kernel.ttgir").read_bytes() == b"bytes"
    facts = json.loads((place / "metadata.json").read_text())
    assert (facts["rank"], facts["algorithm"], facts["hash"]) == (1, "one/shot", digest)
    assert facts["stages"] == ["ttir", "ttgir", "ptx"]
    assert facts["constants"] == {"BLOCK_SIZE_M": 128, "block_size_n": 64, "BLOCK_K": 32, "scale": 0.5}

    # The same text again is left alone, another one has a place of its own.
    (place / "kernel.ttir").write_text("kept")
    artifacts.iris_launch(kernel, (3,), algorithm="one/shot", rank=1, dtype=torch.float16, **options)
    assert (place / "kernel.ttir").read_text() == "kept"
    other = Kernel(compiled({**STAGES, "ptx": ".version 9"}))
    artifacts.iris_launch(other, (3,), algorithm="one/shot", rank=1, dtype=torch.float16, **options)
    assert len(list(place.parent.iterdir())) == 2
    summary = json.loads(artifacts.write_summary(tmp_path / "kept").read_text())
    assert summary["num_kernels"] == 2
    assert digest in {kernel["hash"] for kernel in summary["kernels"]}


def test_nothing_is_kept_without_a_folder_or_a_compiled_kernel(tmp_path, monkeypatch):
    monkeypatch.delenv("IRIS_KERNEL_ARTIFACTS_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    assert artifacts.iris_launch(Kernel("anything"), (1,), algorithm="a", rank=0) == "anything"
    monkeypatch.setenv("IRIS_KERNEL_ARTIFACTS_DIR", str(tmp_path / "kept"))
    assert artifacts.iris_launch(Kernel(None), (1,), algorithm="a", rank=0) is None
    assert list(tmp_path.iterdir()) == []


def test_hashes():
    def sha(content):
        return hashlib.sha256(content).hexdigest()[:12]

    assert artifacts.kernel_hash(compiled({"amdgcn": "s_endpgm", "hsaco": b"1"})) == sha(b"s_endpgm")
    assert artifacts.kernel_hash(compiled({"amdgcn": b"s_endpgm"})) == sha(b"s_endpgm")
    assert artifacts.kernel_hash(compiled({"ttir": "x", "hsaco": b"1"})) == sha(b"1")
    assert artifacts.kernel_hash(compiled({}, hash="0123456789abcdef")) == "0123456789ab"
    assert artifacts.kernel_hash(compiled({})) == "unknown"
    assert artifacts.kernel_hash(object()) == "unknown"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float16, "fp16"),
        (torch.bfloat16, "bf16"),
        (torch.float32, "fp32"),
        ("float64", "fp64"),
        (torch.int8, "i8"),
        (torch.uint16, "u16"),
        (torch.float8_e4m3fn, "fp8e4m3fn"),
        (torch.float8_e4m3fnuz, "fp8e4m3"),
        (torch.float8_e5m2, "fp8e5m2"),
        ("own", "own"),
        (None, None),
    ],
)
def test_names_of_dtypes(dtype, name):
    assert artifacts.dtype_name(dtype) == name


def test_names_of_configurations():
    assert artifacts.configuration_name({"BLOCK_M": 16, "BLOCK_N": 32}, torch.int32, 4) == "BM16_BN32_i32_w4"
    assert artifacts.configuration_name({"n": 3}, None, 4) == "w4"
    assert artifacts.configuration_name({}) == "default"
