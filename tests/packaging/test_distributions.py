"""The wheel and the source distribution have the package's data, and the installed wheel finds it.

They are built from a copy of the files that belong to the project, without the network: hatchling has to be installed.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "src" / "iris" / "tuning" / "data"
BUILD = "import sys, hatchling.build as build; print(getattr(build, f'build_{sys.argv[1]}')(sys.argv[2]))"
# What the installed package says of itself, from a folder where there is nothing else of it.
ASK = """
import json, iris
from iris._machine import names
from iris.ops.auto_config import load_regression_sizes, select_ag_mm_config
from iris.tuning import heuristics, tables
from iris.tuning.steps import rows
best = select_ag_mm_config(131072, 16384, 16384, 8, arch="mi300x")
print(json.dumps({
    "at": iris.__file__,
    "speedup": best.speedup,
    "tables": [[one.operation, one.machine, one.entries] for one in tables.files()],
    "rules": [list(one) for one in heuristics.files()],
    "regression": len(load_regression_sizes()),
    "by bytes": len(rows("collectives")),
    "machines": list(names()),
}))
"""

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed, so nothing can be built"
    ),
]


def built(kind, source, folder):
    done = subprocess.run([sys.executable, "-c", BUILD, kind, str(folder)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The source distribution, the wheel, and the wheel that is built from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    source.mkdir()
    for name in ("src", "tests", "docs", "examples", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"):
        shutil.copy(ROOT / name, source / name)
    sdist, wheel = built("sdist", source, folder), built("wheel", source, folder)
    with tarfile.open(sdist) as archive:
        # The argument of that name is missing in Python 3.11.3 and 3.10.11 and before.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    (folder / "again").mkdir()
    return sdist, wheel, built("wheel", unpacked, folder / "again")


def data_files():
    found = sorted(path.relative_to(ROOT / "src").as_posix() for path in DATA.rglob("*") if path.is_file())
    assert len([name for name in found if name.endswith(".json")]) >= 9
    assert any("/tuned/all_gather_matmul/mi300x.json" in name for name in found)
    return found


def test_every_data_file_is_in_the_wheel_and_the_sdist(distributions):
    sdist, wheel, again = distributions
    for one in (wheel, again):
        with zipfile.ZipFile(one) as archive:
            names = set(archive.namelist())
            assert not set(data_files()) - names, one
            for name in data_files():
                assert archive.read(name) == (ROOT / "src" / name).read_bytes()
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert not {f"src/{name}" for name in data_files()} - names


def test_the_wheel_has_the_package_and_nothing_else(distributions):
    _, wheel, again = distributions
    contents = []
    for one in (wheel, again):
        with zipfile.ZipFile(one) as archive:
            contents.append({name for name in archive.namelist() if ".dist-info/" not in name})
    assert contents[0] == contents[1], "the wheel from the source distribution is another one"
    assert {name.split("/")[0] for name in contents[0]} == {"iris", "_iris_command.py", "_iris_pytest.py"}


def test_the_installed_wheel_reads_its_data(distributions, tmp_path):
    _, wheel, _ = distributions
    place = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(place)]
    done = subprocess.run([*install, str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    hidden = ("PYTHON", "IRIS_", "TRITON_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {"PYTHONPATH": str(place), "IRIS_RUNTIME": "cpu", "IRIS_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert Path(said["at"]).is_relative_to(place)
    assert said["speedup"] == 1.343
    assert ["all_gather_matmul", "mi300x", 28] in said["tables"]
    assert ["all_gather_matmul", "mi355x", 10] in said["tables"]
    assert ["all_gather_matmul", "mi300x"] in said["rules"]
    assert (said["regression"], "h200" in said["machines"]) == (9, True)
    assert said["by bytes"] > 0
