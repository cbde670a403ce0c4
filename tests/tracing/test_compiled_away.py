"""Tracing that is turned off leaves nothing in a kernel; turned on, it reads the device's clock. Without a GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("_compile_worker.py")
CLOCKS = {"sm_90": r"%globaltimer", "gfx942": r"s_memrealtime"}
COUNTERS = {"sm_90": r"atom\.global\.gpu\.relaxed\.add\.u64", "gfx942": r"global_atomic_add_x2"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "TRITON_"))}
    environment |= {"IRIS_RUNTIME": "gpu", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"
    command = [sys.executable, str(WORKER), *CLOCKS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("arch", CLOCKS)
def test_tracing_that_is_off_leaves_nothing(texts, arch):
    assert len(texts[arch]["plain"].splitlines()) > 50
    assert texts[arch]["off"] == texts[arch]["plain"]


@pytest.mark.parametrize("arch", CLOCKS)
def test_tracing_that_is_on_counts_and_reads_the_clock(texts, arch):
    """Two spans more than without: each takes a number once, and reads the clock when it begins and when it ends.

    A compiler may write the reading of the clock down twice, for threads that store it and for those that do not.
    """

    def more(rule):
        return len(re.findall(rule, texts[arch]["on"])) - len(re.findall(rule, texts[arch]["plain"]))

    assert more(COUNTERS[arch]) == 2
    assert 4 <= more(CLOCKS[arch]) <= 8


@pytest.mark.parametrize("arch", CLOCKS)
def test_the_clock_is_read_around_each_barrier(texts, arch):
    """The kernel that compares clocks: a reading, what tells the peers, what waits for them, a reading."""
    text = texts[arch]["stamps"]
    told = {"sm_90": r"atom\.global\.sys\.release\.add|red\.global\.sys\.release", "gfx942": r"global_atomic_add\b"}
    readings = [found.start() for found in re.finditer(CLOCKS[arch], text)]
    first = re.search(told[arch], text)
    assert first is not None
    assert readings[0] < first.start() < readings[-1]
