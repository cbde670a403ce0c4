"""What rank processes on one machine need in their environment: a place, defaults, and a share of the GPUs.

Imported by the launcher without the package's own ``__init__``, so it must not need torch or Triton.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import uuid
from collections.abc import Mapping

from iris.runtime import gpus, mps


def defaults(environment: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """Variables that a run on one machine needs, where the caller has not set them."""
    cores = len(os.sched_getaffinity(0))
    values = {
        # Left alone, every rank would start a thread for each core of the machine.
        "OMP_NUM_THREADS": str(max(1, cores // num_ranks)),
        # Multicast objects outlive a rank that is killed and then block the device until its driver is reloaded.
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    # All ranks are here: gloo need not find its way through host names and firewalls.
    if "lo" in (name for _, name in socket.if_nameindex()):
        values["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in values.items() if name not in environment}


def share_gpus(stack: contextlib.ExitStack, environment: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """Prepare for several ranks on a GPU, if it comes to that; what is started for it ends with ``stack``."""
    if environment.get("IRIS_RUNTIME", "").strip().lower() in ("cpu", "sim"):
        return {}
    found = gpus.visible(environment)
    if not 0 < found.count < num_ranks:
        return {}
    ranks_per_gpu = -(-num_ranks // found.count)
    values = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "IRIS_RANKS_PER_GPU": str(ranks_per_gpu)}
    if found.vendor != "nvidia":
        return values
    trouble = f"{mps.CONTROL} is not on PATH (it comes with the NVIDIA driver)"
    if mps.binary(environment) is not None:
        try:
            return {**values, **stack.enter_context(mps.session(ranks_per_gpu, environment))}
        except RuntimeError as error:
            trouble = str(error)
    print(
        f"iris: {num_ranks} ranks share {found.count} GPU{'s' * (found.count > 1)} without NVIDIA MPS: {trouble}. "
        "Their kernels take turns in time slices, so a kernel that waits for a peer crawls.",
        file=sys.stderr,
        flush=True,
    )
    return values


def environments(environment: Mapping[str, str], num_ranks: int, port: int) -> list[dict[str, str]]:
    """The environment of each rank: the variables that torchrun sets."""
    run_id = uuid.uuid4().hex
    return [
        {
            **environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # The store is the launcher's: rank 0 connects to it like the others.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }
        for rank in range(num_ranks)
    ]
