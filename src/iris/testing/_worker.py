"""A rank of a pool: takes test bodies from the parent, runs them, sends back what came of them."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

_PR_SET_PDEATHSIG = 1
_modules: dict[str, ModuleType] = {}
_contexts: dict[int, Any] = {}


def _module(path: str) -> ModuleType:
    if path not in _modules:
        name = f"iris_test_body_{len(_modules)}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Registered first: Triton and pickle look modules up by name.
        sys.modules[name] = module
        spec.loader.exec_module(module)
        _modules[path] = module
    return _modules[path]


def _context(heap_size: int) -> Any:
    import iris

    if heap_size not in _contexts:
        _contexts[heap_size] = iris.iris(heap_size)
    return _contexts[heap_size]


def _picklable(error: BaseException) -> BaseException | None:
    try:
        return pickle.loads(pickle.dumps(error))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def _run(path: str, name: str, args: tuple, kwargs: dict, heap_size: int | None) -> tuple:
    try:
        body = getattr(_module(path), name)
        if heap_size is None:
            value = body(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *args, **kwargs)
        else:
            value = body(_context(heap_size), *args, **kwargs)
        return "value", pickle.dumps(value), ""
    # Whatever a body raises belongs to the parent, pytest's own outcomes included.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return "error", pickle.dumps(_picklable(error)), traceback.format_exc()


def main() -> None:
    """Serve until the parent closes the connection."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = Connection(int(os.environ.pop("IRIS_POOL_DESCRIPTOR")))
    import torch

    if os.environ.get("IRIS_RUNTIME") == "cpu":
        torch.set_num_threads(1)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_run(*pickle.loads(message))))


if __name__ == "__main__":
    main()
