"""Counts the GPUs that a child process would see, without opening one."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Gpus:
    """The GPUs that torch would see.

    Attributes:
        count: how many.
        vendor: ``"nvidia"``, ``"amd"``, or ``""`` without a GPU.
    """

    count: int
    vendor: str


def device_files() -> list[str]:
    """Device files of GPU drivers; without one there is no GPU, and torch need not be asked (and loaded)."""
    return sorted(glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/kfd") + glob.glob("/dev/dxg"))


def visible(environment: Mapping[str, str] = os.environ) -> Gpus:
    """GPUs visible to a process with this environment. No context is made on any of them."""
    if not device_files():
        return Gpus(0, "")
    if all(environment.get(name) == os.environ.get(name) for name in _VISIBILITY):
        import torch

        count, amd = torch.cuda.device_count(), torch.version.hip is not None
    else:
        # torch reads the variables of its own process.
        question = "import torch; print(torch.cuda.device_count(), int(torch.version.hip is not None))"
        answer = subprocess.check_output([sys.executable, "-c", question], env=dict(environment), text=True).split()
        count, amd = int(answer[0]), answer[1] == "1"
    return Gpus(count, ("amd" if amd else "nvidia") if count else "")
