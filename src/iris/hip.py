"""Questions about the visible GPUs, under the names of the original API. Answers come from PyTorch, on any vendor."""

from __future__ import annotations

import torch

from iris import _target


def count_devices() -> int:
    """Number of visible GPUs."""
    return torch.cuda.device_count()


def set_device(index: int) -> None:
    """Make a GPU the current one."""
    torch.cuda.set_device(index)


def get_device_id() -> int:
    """Index of the current GPU."""
    return torch.cuda.current_device()


def _detect(device_id: int | None) -> _target.Target:
    return _target.detect(get_device_id() if device_id is None else device_id)


def get_cu_count(device_id: int | None = None) -> int:
    """Compute units (streaming multiprocessors) of a GPU, by default the current one."""
    return _detect(device_id).compute_units


def get_arch_string(device_id: int | None = None) -> str:
    """``"gfx942"``, ``"sm_90"`` and so on."""
    return _detect(device_id).arch


def get_num_xcc(device_id: int | None = None) -> int:
    """Dies that have an L2 cache of their own; 1 on most GPUs."""
    return _detect(device_id).chiplets


def get_wall_clock_rate(device_id: int) -> int:
    """Rate in kHz of the clock that kernels read."""
    return _detect(device_id).clock_hz // 1000


def get_rocm_version() -> tuple[int, int]:
    """(major, minor) of the ROCm that PyTorch was built for; (-1, -1) without."""
    version = torch.version.hip
    if version is None:
        return -1, -1
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
