"""Where figures come from: machine, versions, date and command, for every output."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from typing import TYPE_CHECKING, Any

import torch
import triton

from iris.runtime.links import link_of
from iris.runtime.local import current_world

if TYPE_CHECKING:
    from iris.runtime.context import Iris

NO_TIMES = "Kernels are interpreted: times are those of the host's clock and mean nothing, only the results do."


def environment(ctx: Iris, command: str) -> dict[str, Any]:
    """What a run of ranks was measured on, as JSON has it. Collective."""
    on_gpu = ctx.get_device().type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, interpreted"
    return {
        "world_size": ctx.get_num_ranks(),
        "devices": ctx.exchange.all_gather("benchmark: devices", name),
        "compute_units": ctx.get_cu_count(),
        "link": link_of(ctx),
        "emulated_link": _emulated(),
        "runtime": ctx.runtime,
        "clock": "gpu" if ctx.target.compiled else "host, interpreted",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "iris": _version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
    }


def describe(environment: dict[str, Any]) -> str:
    """An environment in one sentence."""
    devices = environment["devices"]
    names = " and ".join(f"{devices.count(name)} x {name}" for name in sorted(set(devices)))
    ranks = f"{environment['world_size']} rank{'s' * (environment['world_size'] != 1)}"
    emulated = environment.get("emulated_link")
    link = environment["link"] + (f", EMULATED: {emulated}" if emulated else "")
    return (
        f"{ranks} ({environment['runtime']}) on {names}, {environment['compute_units']} compute units a rank, link "
        f"{link}; Iris {environment['iris']}, torch {environment['torch']}, Triton "
        f"{environment['triton']}, Python {environment['python']}; {environment['date']}"
    )


def _emulated() -> str:
    """The rate of an imitated link, in words; empty without one."""
    world = current_world()
    gpu = world.gpu if world is not None else None
    if gpu is None or not gpu.link_gbps:
        return ""
    return f"{gpu.link_gbps:g} GB/s a direction {'from each peer' if gpu.link_per_peer else 'for all peers together'}"


def _version() -> str:
    try:
        return importlib.metadata.version("iris-kernels")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"  # a source tree that is not installed
