"""Messages between a pool and its ranks: pickles in which tensors travel as bytes on the CPU, and functions by file."""

from __future__ import annotations

import importlib.util
import io
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch


class _Pickler(pickle.Pickler):
    """A tensor's own pickle holds all of its storage; for a tensor on a symmetric heap, that is the whole heap."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            flat = obj.detach().cpu().contiguous().reshape(-1)
            return _tensor, (flat.view(torch.uint8).numpy().tobytes(), obj.dtype, tuple(obj.shape))
        return NotImplemented


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def dumps(value: Any) -> bytes:
    """Pickle ``value``; tensors in it become contiguous tensors on the CPU."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """The value that :func:`dumps` took."""
    return pickle.loads(data)


class Reference(NamedTuple):
    """Where another process finds a function."""

    module: str
    path: str
    qualname: str


def refer(function: Callable) -> Reference:
    """Where ``function`` is defined.

    Raises:
        ValueError: no other process can import it by name.
    """
    name = getattr(function, "__qualname__", repr(function))
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    path = getattr(module, "__file__", None)
    if module is None or path is None:
        raise ValueError(f"{name} cannot run on ranks: they import it from a file, and its module has none")
    if "<" in name:
        raise ValueError(
            f"{name} in {path} cannot run on ranks: they import it by name, and a lambda or a function inside another "
            "function has none. Define it at the top level of the module and pass what it needs as arguments"
        )
    if _attribute(module, name) is not function:
        raise ValueError(f"{name} cannot run on ranks: {path} has something else under that name")
    return Reference(module.__name__, path, name)


def resolve(reference: Reference) -> Callable:
    """The function itself; its module is imported by path where it has not been yet."""
    module = sys.modules.get(reference.module)
    if module is None or getattr(module, "__file__", None) != reference.path:
        module = _load(reference.module, reference.path)
    return _attribute(module, reference.qualname)


def _load(name: str, path: str) -> ModuleType:
    # As in multiprocessing: the parent's program, whose `if __name__ == "__main__"` must not run again.
    spec = importlib.util.spec_from_file_location("__mp_main__" if name == "__main__" else name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: Triton and pickle look modules up by name.
    sys.modules[spec.name] = sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # Half a module must not be found by the next body.
        for key in {spec.name, name}:
            del sys.modules[key]
        raise
    return module


def _attribute(module: ModuleType, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found
