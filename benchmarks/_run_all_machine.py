"""Writes what run_all.py measures on to a JSON file: GPUs, how they are joined, versions.

python benchmarks/_run_all_machine.py machine.json
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Whichever of them the machine has.
TOPOLOGY = (("nvidia-smi", "topo", "-m"), ("amd-smi", "topology"), ("rocm-smi", "--showtopo"))
DRIVER = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader")
SECONDS = 30


def said(command):
    """What a command prints, or why it says nothing."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end within {SECONDS} s"
    text = (done.stdout + done.stderr).rstrip()
    return text if done.returncode == 0 else f"{command[0]} ended with {done.returncode}: {text}"


def commit():
    text = said(("git", "-C", str(ROOT), "describe", "--always", "--dirty"))
    return text if " " not in text else "unknown"


def facts():
    import torch
    import triton

    count = torch.cuda.device_count()
    topology = {" ".join(command): said(command) for command in TOPOLOGY if shutil.which(command[0])}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if count and torch.version.hip is None else None
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "peers": [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)],
        "topology": topology or {"none": f"none of {', '.join(c[0] for c in TOPOLOGY)} is installed"},
        "driver": said(DRIVER) if "nvidia-smi topo -m" in topology else "",
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": nccl,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def main():
    found = facts()
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "topology"}, indent=1))
    for command, text in found["topology"].items():
        print(f"\n{command}\n{text}")


if __name__ == "__main__":
    main()
