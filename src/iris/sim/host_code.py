"""What host code does to tensors: PyTorch operations count as accesses of the rank's current stream, as on a GPU."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from iris.runtime import streams
from iris.sim.watcher import Watcher, place

if TYPE_CHECKING:
    from iris.runtime.clocks import Actor
    from iris.runtime.memory_map import MemoryRegion

# In-place operations that do not read what they overwrite.
_OVERWRITE = frozenset(
    {
        "zero_",
        "fill_",
        "copy_",
        "normal_",
        "uniform_",
        "random_",
        "bernoulli_",
        "exponential_",
        "log_normal_",
        "geometric_",
        "cauchy_",
        "set_",
        "eye_",
    }
)
# They write elements that their other arguments choose.
_PARTIAL = frozenset(
    {
        "index_put_",
        "_index_put_impl_",
        "scatter_",
        "scatter_add_",
        "masked_scatter_",
        "index_copy_",
        "index_fill_",
    }
)
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_")
# They hand a value to the host, which on a GPU waits for the stream.
_HOST_READS = frozenset(
    {
        "_local_scalar_dense",
        "equal",
        "is_nonzero",
    }
)
_HOST_FUNCTIONS = frozenset(
    {
        "cpu",
        "tolist",
        "numpy",
        "item",
        "__array__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__repr__",
    }
)


@cache
def _roles(func: Any) -> tuple[str, bool, tuple[tuple[str, bool, bool], ...]]:
    """(name, whether it only makes a view, (argument, read, written) for each argument)."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    views = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    roles = []
    for argument in schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        is_out = written and argument.kwarg_only
        read = not written or (not is_out and name.endswith("_") and name not in _OVERWRITE and name not in _PARTIAL)
        roles.append((argument.name, read, written))
    return name, views, tuple(roles)


class HostOperations(TorchDispatchMode):
    """Tells a watcher what PyTorch operations of the running host code read and write."""

    def __init__(self, watcher: Watcher):
        super().__init__()
        self._watcher = watcher

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        world = self._watcher.world
        if world.host is None or world.current is not None:
            return func(*args, **kwargs)
        name, views, roles = _roles(func)
        if not views:
            self._watcher.host_operation(name)
            self._accesses(name, roles, args, kwargs)
        result = func(*args, **kwargs)
        if name in _EMPTY and isinstance(result, torch.Tensor) and result.device.type == "cpu":
            file, line = place()
            label = f"{file.rpartition('/')[2]}:{line}"
            self._watcher.memory.add_tensor(result, world.rank(), label, f"{file}:{line}", fresh=True)
        return result

    def _accesses(self, name: str, roles: tuple, args: tuple, kwargs: dict) -> None:
        actor: Actor | None = None
        watcher = self._watcher
        for position, (argument, read, written) in enumerate(roles):
            value = args[position] if position < len(args) else kwargs.get(argument)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                region = self._region(tensor)
                if region is None:
                    continue
                if actor is None:
                    actor = watcher.stream_actor(watcher.world.rank())
                self._access(actor, region, tensor, name, read, written)
        if name in _HOST_READS and actor is not None:
            watcher.host_awaited(streams.current_stream())

    def _region(self, tensor: Any) -> MemoryRegion | None:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or tensor.numel() == 0:
            return None
        if tensor.layout != torch.strided:
            return None
        region = self._watcher.memory.find(tensor.data_ptr())
        return None if region is None or region.internal else region

    def _access(self, actor: Actor, region: MemoryRegion, tensor: Any, name: str, read: bool, written: bool) -> None:
        watcher = self._watcher
        if not watcher.tracking:
            if written:
                watcher.world.wake_all()
            return
        doing = (*place(), f"aten.{name}")
        entries = region.select_strided(
            tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride())
        )
        if name in _PARTIAL and written:
            # Which elements is not known here: none is checked, and all count as written.
            assert region.writes is not None
            chosen = region.writes[entries]
            chosen[chosen == 0] = watcher.clocks.number(actor, *doing)
            region.writes[entries] = chosen
        else:
            if read:
                watcher.checker.plain(actor, region, entries, False, doing)
            if written:
                watcher.checker.plain(actor, region, entries, True, doing)
        if written:
            watcher.world.wake_all()


class HostWaits(TorchFunctionMode):
    """Functions that give a tensor's values to the host wait for the current stream on a GPU, so they order here."""

    def __init__(self, watcher: Watcher):
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _HOST_FUNCTIONS and self._watcher.world.host is not None:
            self._watcher.host_awaited(streams.current_stream())
        return result
