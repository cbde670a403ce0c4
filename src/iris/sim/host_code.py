"""What host code does to tensors: PyTorch operations count as accesses of the rank's current stream, as on a GPU."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from iris.runtime import streams
from iris.runtime.source import place
from iris.sim.watcher import Watcher

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
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
# They hand a value to the host, which on a GPU waits for the stream.
_HOST_READS = frozenset({"_local_scalar_dense", "equal", "is_nonzero"})
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
        "__format__",
        "__reduce_ex__",
    }
)
# Those that no PyTorch operation shows, and those after which NumPy has the memory too.
_UNSEEN = frozenset({"tolist", "numpy", "__array__", "__repr__", "__format__", "__reduce_ex__"})
_EXPOSES = frozenset({"numpy", "__array__"})


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
            if name == "resize_":
                self._forget(args[0])  # its memory may move
            else:
                self._accesses(name, roles, args, kwargs)
        result = func(*args, **kwargs)
        if not views:
            for tensor in result if isinstance(result, list | tuple) else (result,):
                self._born(name, tensor)
        return result

    def _forget(self, tensor: torch.Tensor) -> None:
        region = self._region(tensor)
        if region is not None and not region.everywhere:
            self._watcher.memory.remove(region.start)

    def _born(self, name: str, tensor: Any) -> None:
        """Make the memory of a result known that the operation has allocated."""
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        memory, rank = self._watcher.memory, self._watcher.world.rank()
        if not tensor.untyped_storage().nbytes() or memory.find(tensor.untyped_storage().data_ptr()) is not None:
            return
        file, line = place()
        label = f"{file.rpartition('/')[2]}:{line}"
        region = memory.add_tensor(tensor, rank, label, f"{file}:{line}", fresh=name in _EMPTY)
        if region is not None and name not in _EMPTY and self._watcher.tracking:
            actor = self._watcher.stream_actor(rank)
            region.born = self._watcher.clocks.number(actor, file, line, f"aten.{name}")

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

    def read_by_host(self, name: str, tensor: Any) -> None:
        """A function that reads a tensor's memory without an operation that could be seen here."""
        region = self._region(tensor)
        if region is None or self._watcher.world.current is not None:
            return
        if name in _EXPOSES and region.born_uninitialized:
            region.born_uninitialized = False  # whoever has the array may write to it unseen
        actor = self._watcher.stream_actor(self._watcher.world.rank())
        self._access(actor, region, tensor, name, read=True, written=False)

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
        doing = (*place(), f"Tensor.{name}" if name in _UNSEEN else f"aten.{name}")
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

    def __init__(self, watcher: Watcher, operations: HostOperations):
        super().__init__()
        self._watcher = watcher
        self._operations = operations

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        reads = name in _HOST_FUNCTIONS and self._watcher.world.host is not None
        if reads and name in _UNSEEN and args:
            self._operations.read_by_host(name, args[0])
        result = func(*args, **(kwargs or {}))
        if reads:
            self._watcher.host_awaited(streams.current_stream())
        return result
