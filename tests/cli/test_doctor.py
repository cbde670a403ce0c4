"""``iris doctor``, ``iris env`` and the help."""

import json
import subprocess
import sys
from importlib import metadata

import pytest

from iris import _env
from iris.cli import _probe
from iris.runtime import gpus

from .conftest import environment


def findings(result) -> dict[str, dict]:
    answer = json.loads(result.stdout)
    return {f["name"]: f for section in answer.values() if isinstance(section, list) for f in section}


def test_doctor_for_a_program(iris_command):
    result = iris_command("doctor", "--json", IRIS_TIMEOUT="7.5")
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout)["usable"] is True
    found = findings(result)
    for name in ("torch", "triton", "numpy", "greenlet"):
        assert metadata.version(name) in found[name]["value"]
    assert found["shared memory files"]["state"] == "ok"
    assert found["IRIS_TIMEOUT"]["value"] == "7.5"
    assert found["IRIS_CHECK"]["value"] == "first (default)"
    assert set(_env.VARIABLES) <= set(found)


@pytest.mark.skipif(bool(gpus.device_files()), reason="tells what a machine without a GPU is told")
def test_runtime_and_its_reason_without_a_gpu(iris_command):
    assert findings(iris_command("doctor", "--json"))["runtime"]["value"] == "cpu, because no GPU is visible"
    asked = iris_command("doctor", "--json", IRIS_RUNTIME="cpu")
    assert findings(asked)["runtime"]["value"] == "cpu, because IRIS_RUNTIME=cpu"
    wrong = iris_command("doctor", "--json", IRIS_RUNTIME="gpu")
    assert wrong.returncode == 1
    assert json.loads(wrong.stdout)["usable"] is False
    assert "unset IRIS_RUNTIME" in findings(wrong)["runtime"]["remedy"]


def test_doctor_for_a_person(iris_command):
    result = iris_command("doctor", IRIS_CHECK="perhaps")
    assert result.returncode == 1
    assert "problem  IRIS_CHECK" in result.stdout
    assert "possible: first, always or off" in " ".join(result.stdout.split())
    assert "Ranks cannot run here" in result.stdout
    assert "Ranks can run here" in iris_command("doctor").stdout


def test_doctor_tells_of_a_package_that_cannot_be_loaded(iris_command, tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so: cannot open shared object file')")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    result = iris_command("doctor", "--json", PYTHONPATH=path)
    assert result.returncode == 1, result.stderr
    assert findings(result)["torch"]["state"] == "problem"
    assert "libcudart.so" in findings(result)["torch"]["value"]


@pytest.mark.parametrize(
    ("version", "spec", "inside"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.11", ">=2.11,<2.14", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.9.1", ">=2.11,<2.14", False),
        ("3", "<4,>=3.0.0", True),
        ("1.2", "", True),
    ],
)
def test_ranges(version, spec, inside):
    assert _probe.within(version, spec) is inside


def test_a_range_that_is_not_understood():
    with pytest.raises(ValueError, match=r"'~=2\.0' is not understood"):
        _probe.within("2.0", "~=2.0")


def test_outside_of_the_tested_range_is_a_note(monkeypatch):
    monkeypatch.setattr(_probe, "tested_ranges", lambda: {"numpy": ">=99"})
    numpy = next(f for f in _probe.software() if f.name == "numpy")
    assert numpy.state == "note"
    assert "outside of the tested range >=99" in numpy.remedy


def test_memory_files_that_a_peer_cannot_open(monkeypatch):
    monkeypatch.setattr(_probe.os, "getpid", lambda: 1 << 30)
    assert "No such file or directory" in _probe.memory_file_trouble()
    finding = next(f for f in _probe.machine() if f.name == "shared memory files")
    assert finding.state == "problem"
    assert "hidepid" in finding.remedy


def test_env_lists_every_variable(iris_command):
    result = iris_command("env", COLUMNS="200", IRIS_CHECK="off")
    assert result.returncode == 0
    for name, variable in _env.VARIABLES.items():
        assert name in result.stdout
        assert variable.possible in result.stdout
    assert ["IRIS_CHECK", "off"] in [line.split()[:2] for line in result.stdout.splitlines()]


def test_help_names_the_commands_and_version_is_the_distributions(iris_command):
    result = iris_command("--help")
    assert result.returncode == 0
    for command in ("run", "doctor", "env", "demo"):
        assert command in result.stdout
        assert iris_command(command, "--help").returncode == 0
    version = iris_command("--version")
    try:
        assert version.stdout.strip() == f"iris {metadata.version('iris-kernels')}"
    except metadata.PackageNotFoundError:
        assert version.stdout.strip() == "iris (not installed)"


def test_help_loads_neither_torch_nor_triton():
    code = (
        "import sys, _iris_command\n"
        "sys.argv = ['iris', '--help']\n"
        "try:\n    _iris_command.main()\n"
        "except SystemExit:\n    print('loaded:', {'torch', 'triton', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert result.stdout.strip().endswith("loaded: set()"), result.stderr
