"""The kernels of iris.concurrent compile for every architecture without a GPU, fit it, and keep to registers.

They are compiled in child processes, because this process may interpret them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from iris import _target

from .test_compile import ARCHS, QUICK, ends_after_its_stores, faults_of_wait, letters

WORKER = Path(__file__).with_name("_concurrent_worker.py")
# Where more addresses are kept over the loop over K than there are registers for them.
MOST_STACK = {"sm_100": 256, "gfx950": 256}
NAMES = {"all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast"}
arch_parameter = pytest.mark.parametrize(
    "arch", [arch if arch in QUICK else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHS]
)


def compiled(arch, selection, cache):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "TRITON_"))}
    environment |= {"IRIS_RUNTIME": "gpu", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(WORKER), arch, selection]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    records = json.loads(done.stdout.splitlines()[-1])["records"]
    wrong = {name: record["error"] for name, record in records.items() if record["error"]}
    assert not wrong, wrong
    limit = _target.by_arch(arch).shared_memory_bytes
    large = {name: record["shared"] for name, record in records.items() if record["shared"] > limit}
    assert not large, f"more than the {limit} bytes of {arch}: {large}"
    return records


@arch_parameter
@pytest.mark.timeout(300)
def test_large_products(arch, tmp_path):
    """With the tiles that are chosen for half precision and a collective of eight ranks."""
    records = compiled(arch, "cover", tmp_path)
    assert len(records) == 4
    assert {name.split()[0] for name in records} == {"both", "gemm", "comm"}
    how = "descriptors" if _target.by_arch(arch).descriptors else "pointers"
    spilled = {name: record["stack"] for name, record in records.items() if record["stack"] > MOST_STACK.get(arch, 64)}
    assert not spilled, spilled
    amd = _target.by_arch(arch).vendor == "amd"
    for name, record in records.items():
        text = letters(arch, record)
        assert ends_after_its_stores(arch, record), (name, record["ordering"])
        if name.startswith("gemm "):
            assert f" {how}" in name
            assert not set(text) & set("XRI"), f"{name}: who multiplies alone meets nobody"
            continue
        # Two flags for each peer, set at system scope and waited for there.
        assert text.count("X") == 2 * 7, (name, text)
        assert not faults_of_wait(arch, record), name
        assert amd or all(before == "B" for before in re.findall("(.)X", text)), (name, text)


@arch_parameter
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_more_dtypes_and_sizes(arch, tmp_path):
    records = compiled(arch, "product", tmp_path)
    assert {name.split()[1] for name in records if name.startswith("both ")} == NAMES
    assert len(records) >= 40
    # Odd sizes have narrow loads, which need more registers.
    large = {name: record["stack"] for name, record in records.items() if " 8192x" in name}
    spilled = {name: stack for name, stack in large.items() if stack > MOST_STACK.get(arch, 64)}
    assert not spilled, spilled
