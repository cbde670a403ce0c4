"""A rank that never starts is named by those that did, within the time limit."""

import os
import subprocess
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from iris.runtime import rank_processes

PROGRAM = "import iris; iris.iris(1 << 20)"


def start(environment, **changes):
    environment = {**environment, **changes}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stderr=subprocess.PIPE, text=True)


def test_a_rank_that_never_starts_is_named():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    environments = rank_processes.environments(dict(os.environ), 3, store.port)
    begin = time.monotonic()
    running = [start(environments[rank], IRIS_TIMEOUT="4", IRIS_RUNTIME="cpu") for rank in (0, 2)]
    for process in running:
        error = process.communicate(timeout=100)[1]
        assert process.returncode != 0
        assert "RankLost: rank 1 did not arrive at the start of torch.distributed within 4 s (IRIS_TIMEOUT)" in error, (
            error
        )
    assert time.monotonic() - begin < 60


def test_a_store_that_nobody_hosts_is_an_error_in_time():
    environment = {
        **os.environ, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9",
    }  # fmt: skip
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    process = start(environment, IRIS_TIMEOUT="3", IRIS_RUNTIME="cpu")
    error = process.communicate(timeout=100)[1]
    assert process.returncode != 0
    assert "RankLost: rank 1 of 2 did not find the others within 3 s (IRIS_TIMEOUT) at 127.0.0.1:9" in error, error
