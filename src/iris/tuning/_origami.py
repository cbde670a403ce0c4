"""Time of a product on AMD devices by ``origami``, the analytical GEMM model of ROCm, where it is installed.

Python's index has another package of that name, and the functions have changed with versions of ROCm. So every name
that is used is looked for, and where one is missing :func:`product_seconds` gives None and :func:`status` says why.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache, lru_cache
from typing import Any

from iris._machine import Machine

FAMILIES = ("gfx",)  # of devices that it models
_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
    "float8_e4m3fn": "f8", "float8_e4m3fnuz": "f8", "float8_e5m2": "bf8", "float8_e5m2fnuz": "bf8", "int8": "i8",
}  # fmt: skip
_NAMES = (
    "get_hardware_for_device", "problem_t", "config_t", "dim3_t", "transpose_t", "string_to_datatype", "select_config",
)  # fmt: skip
_HARDWARE = ("N_CU", "compute_clock_ghz")


def status() -> str:
    """Whether it is used, in words."""
    module, why = _module()
    return why if module is None else "origami models products on this machine's devices"


def product_seconds(machine: Machine, m: int, n: int, k: int, dtype: str, tile: tuple[int, int, int]) -> float | None:
    """Seconds of an [m, k] by [k, n] product in tiles of that size; None where origami cannot say.

    It speaks of the devices of this machine, so it cannot say for devices with another number of compute units.
    """
    module, _ = _module()
    if module is None or dtype not in _DTYPES:
        return None
    return _latency(machine.compute_units, m, n, k, _DTYPES[dtype], tile)


def forget() -> None:
    """Look for the module anew at the next call."""
    _module.cache_clear()
    _latency.cache_clear()


@cache
def _module() -> tuple[Any, str]:
    """The module and the hardware that it sees as a pair, or None; and why not."""
    try:
        module = importlib.import_module("origami")
    except ImportError:
        return None, "origami is not installed"
    missing = [name for name in _NAMES if not hasattr(module, name)]
    if missing:
        return None, f"the installed origami is another package or version: it has no {', '.join(missing)}"
    try:
        hardware = module.get_hardware_for_device(0)
    except (RuntimeError, ValueError, TypeError) as error:
        return None, f"origami sees no device: {error}"
    missing = [name for name in _HARDWARE if not hasattr(hardware, name)]
    if missing:
        return None, f"the hardware of the installed origami has no {', '.join(missing)}"
    return (module, hardware), ""


@lru_cache(maxsize=4096)
def _latency(units: int, m: int, n: int, k: int, dtype: str, tile: tuple[int, int, int]) -> float | None:
    (module, hardware), _ = _module()
    if units != hardware.N_CU:
        return None
    try:
        problem = module.problem_t()
        problem.size = module.dim3_t(m, n, k)
        problem.batch = 1
        problem.a_transpose = problem.b_transpose = module.transpose_t.N
        kind = module.string_to_datatype(dtype)
        for name in ("a_dtype", "b_dtype", "c_dtype", "d_dtype", "mi_dtype"):
            setattr(problem, name, kind)
        config = module.config_t()
        config.mt = module.dim3_t(*tile)
        config.mi = module.dim3_t(16, 16, 16)
        config.occupancy = 1
        cycles = module.select_config(problem, hardware, [config]).latency
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        warnings.warn(f"origami is not used: {type(error).__name__}: {error}", stacklevel=2)
        return None
    seconds = cycles / (hardware.compute_clock_ghz * 1e9)
    return seconds if seconds > 0 else None
