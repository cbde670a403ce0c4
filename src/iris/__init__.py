"""Iris: multi-GPU Triton kernels over a symmetric heap, and fused GEMM + communication operations.

Importing ``iris`` settles the runtime (``gpu``, or ``cpu`` with Triton's interpreter) and makes Triton agree, so import
it before ``triton``. It creates no device context and starts no process group; ``iris.iris()`` does.
"""

from iris.runtime.settle import settle as _settle

_settle()

import typing as _typing  # noqa: E402
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError  # noqa: E402
from importlib.metadata import version as _version  # noqa: E402

from iris import ccl, concurrent, errors, hip, logging, ops, tracing  # noqa: E402
from iris.device import clock as device_utils  # noqa: E402
from iris.device import signal  # noqa: E402
from iris.device.atomics import (  # noqa: E402
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_sub,
    atomic_xchg,
    atomic_xor,
)
from iris.device.memory import copy, get, load, put, store  # noqa: E402
from iris.device.tracing import TraceEvent  # noqa: E402
from iris.errors import IrisError  # noqa: E402
from iris.runtime.context import Iris, get_device_id_for_rank, iris  # noqa: E402
from iris.runtime.logs import DEBUG, ERROR, INFO, WARNING, logger, set_logger_level  # noqa: E402
from iris.runtime.tensors import CUDAArrayInterface, tensor_from_ptr  # noqa: E402
from iris.runtime.timing import do_bench  # noqa: E402
from iris.x.context import DeviceContext  # noqa: E402
from iris.x.tile import AllReduceConfig, TensorView, Tile, TileView, make_tensor_view  # noqa: E402

if _typing.TYPE_CHECKING:
    from iris import bench, sim

Context = DeviceContext

Iris.services.update(
    device_barrier="iris.x.barrier:DeviceBarrier",
    ccl="iris.ccl:CclNamespace",
    ccl_calls="iris.runtime.calls:Calls",
    concurrent="iris.concurrent:ConcurrentNamespace",
    concurrent_state="iris.concurrent._call:State",
    ops="iris.ops:OpsNamespace",
    pair_order="iris.runtime.calls:StreamOrder",
    tracing="iris.tracing.recorder:Tracing",
    all_gather_matmul_state="iris.ops._all_gather_matmul_call:State",
    matmul_reduce_state="iris.ops._matmul_reduce_call:State",
    functional_passage="iris.functional._handles:Passage",
    matmul_all_gather_state="iris.ops._matmul_all_gather:State",
    tuned="iris.tuning.store:Tuned",
)
Iris.shared_at_start.update(tuned="iris.tuning.store:shared_at_start")


_LAZY = ("bench", "sim")


def __getattr__(name: str):
    # Loaded when they are first asked for: most programs have no use for them.
    if name in _LAZY:
        import importlib

        return importlib.import_module(f"iris.{name}")
    raise AttributeError(f"module 'iris' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


try:
    __version__ = _version("iris-kernels")
except _PackageNotFoundError:  # running from a source tree that is not installed
    __version__ = "0.0.0"

__all__ = [
    "DEBUG",
    "ERROR",
    "INFO",
    "WARNING",
    "AllReduceConfig",
    "CUDAArrayInterface",
    "Context",
    "DeviceContext",
    "Iris",
    "IrisError",
    "TensorView",
    "Tile",
    "TileView",
    "TraceEvent",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_sub",
    "atomic_xchg",
    "atomic_xor",
    "bench",
    "ccl",
    "concurrent",
    "copy",
    "device_utils",
    "do_bench",
    "errors",
    "get",
    "get_device_id_for_rank",
    "hip",
    "iris",
    "load",
    "logger",
    "logging",
    "make_tensor_view",
    "ops",
    "put",
    "set_logger_level",
    "signal",
    "sim",
    "store",
    "tensor_from_ptr",
    "tracing",
]
