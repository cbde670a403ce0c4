"""What host code does to tensors: PyTorch operations count as accesses of the rank's current stream, as on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._C._dynamo import eval_frame
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
        "eye_",
    }
)
# They read those elements of their first argument that the others choose.
_READ_CHOSEN = frozenset({"index", "index_select", "gather", "take", "masked_select", "embedding"})
# They write those elements of their first argument that the others choose: how to mark these in a tensor of its shape.
_WRITE_CHOSEN: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("index_put_", "_index_put_impl_"), lambda mark, where, *_: mark.index_put_(where, _TRUE)),
    **dict.fromkeys(
        ("scatter_", "scatter_add_", "scatter_reduce_"), lambda mark, dim, where, *_: mark.scatter_(dim, where, True)
    ),
    **dict.fromkeys(
        ("index_copy_", "index_fill_", "index_add_", "index_reduce_"),
        lambda mark, dim, where, *_: mark.index_fill_(dim, where, True),
    ),
    **dict.fromkeys(("masked_fill_", "masked_scatter_"), lambda mark, where, *_: mark.masked_fill_(where, True)),
    "put_": lambda mark, where, *_: mark.put_(where, torch.ones_like(where, dtype=torch.bool)),
}
_TRUE = torch.tensor(True, device="cpu")
# Of these, the ones that read what they write; others do when they are told to accumulate or reduce.
_ACCUMULATE = frozenset({"scatter_add_", "scatter_reduce_", "index_add_", "index_reduce_"})
_ACCUMULATE_IF = {"index_put_": 3, "_index_put_impl_": 3, "put_": 3}  # argument that says so
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
# Functions that only look at what a tensor is, or make one, and do not wait for what makes its values.
_NO_VALUES = frozenset(
    {
        "__get__",
        "__len__",
        "__hash__",
        "as_strided",
        "data_ptr",
        "detach",
        "dim",
        "element_size",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "flatten",
        "get_device",
        "is_contiguous",
        "is_floating_point",
        "narrow",
        "new_empty",
        "numel",
        "permute",
        "size",
        "split",
        "squeeze",
        "storage_offset",
        "stride",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "untyped_storage",
        "view",
    }
)


@cache
def _roles(func: Any) -> tuple[str, bool, tuple[tuple[str, bool, bool], ...]]:
    """(name, whether it only makes a view, (argument, read, written) for each argument)."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    views = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    views |= torch.Tag.inplace_view in func.tags and name != "resize_"
    overwrites = name.removeprefix("_foreach_") in _OVERWRITE
    roles = []
    for argument in schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        is_out = written and argument.kwarg_only
        read = not written or (not is_out and name.endswith("_") and not overwrites)
        roles.append((argument.name, read, written))
    return name, views, tuple(roles)


class HostOperations(TorchDispatchMode):
    """Tells a watcher what PyTorch operations of the running host code read and write."""

    def __init__(self, watcher: Watcher):
        super().__init__()
        self._watcher = watcher

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # PyTorch would import torch.compile with the first operation, which takes a second, to keep this out of graphs.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Nothing can be compiled before torch.compile is imported.
        tell = self._tell_past_graphs if "torch._dynamo" in sys.modules else self._tell
        return tell(func, args, kwargs or {})

    @torch._disable_dynamo
    def _tell_past_graphs(self, func: Any, args: tuple, kwargs: dict) -> Any:
        return self._tell(func, args, kwargs)

    def _tell(self, func: Any, args: tuple, kwargs: dict) -> Any:
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
                chosen = _chosen(name, tensor, args, kwargs) if position == 0 and watcher.tracking else None
                if written and chosen is not None:
                    read = _accumulates(name, args, kwargs)
                self._access(actor, region, tensor, name, read, written, chosen)
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

    def _access(
        self,
        actor: Actor,
        region: MemoryRegion,
        tensor: Any,
        name: str,
        read: bool,
        written: bool,
        chosen: np.ndarray | None = None,
    ) -> None:
        """An access to all elements of a tensor, or to those at the byte offsets ``chosen``."""
        watcher = self._watcher
        if watcher.tracking:
            doing = (*place(), f"Tensor.{name}" if name in _UNSEEN else f"aten.{name}")
            start, itemsize = tensor.data_ptr(), tensor.element_size()
            if chosen is None:
                entries = region.select_strided(start, itemsize, tuple(tensor.shape), tuple(tensor.stride()))
            else:
                entries = region.select((chosen + start).astype(np.uint64), itemsize)
            if read:
                watcher.checker.plain(actor, region, entries, False, doing)
            if written:
                watcher.checker.plain(actor, region, entries, True, doing)
        if written:
            watcher.world.wake_all()


eval_frame.set_code_exec_strategy(
    HostOperations.__torch_dispatch__.__code__,
    eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT),
)


def _chosen(name: str, tensor: Any, args: tuple, kwargs: dict) -> np.ndarray | None:
    """Byte offsets of the elements that an operation accesses in its first argument; None for all of them."""
    if tensor.dim() == 0 or len(args) < 2:
        return None
    strides = [stride * tensor.element_size() for stride in tensor.stride()]
    if name in _WRITE_CHOSEN:
        mark = torch.zeros(tensor.shape, dtype=torch.bool, device="cpu")
        _WRITE_CHOSEN[name](mark, *args[1:])
        return mark.nonzero().numpy() @ np.array(strides, dtype=np.int64)
    if name not in _READ_CHOSEN:
        return None
    offsets = np.zeros((), dtype=np.int64)
    options = {key: value for key, value in kwargs.items() if key != "out"}
    for axis, (extent, stride) in enumerate(zip(tensor.shape, strides, strict=True)):
        positions = torch.arange(extent, device="cpu").view(-1, *(1,) * (tensor.dim() - axis - 1)).expand(tensor.shape)
        offsets = offsets + getattr(torch.ops.aten, name)(positions, *args[1:], **options).numpy() * stride
    return offsets.reshape(-1)


def _accumulates(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether an operation that writes chosen elements reads them too."""
    position = _ACCUMULATE_IF.get(name)
    if position is not None:
        return bool(args[position] if position < len(args) else kwargs.get("accumulate", False))
    return name in _ACCUMULATE or "reduce" in kwargs


class HostWaits(TorchFunctionMode):
    """Functions that give a tensor's values to the host wait for the current stream on a GPU, so they order here.

    Others wait too while that stream holds launches, but order nothing: on a GPU they would be launches behind these.
    """

    def __init__(self, watcher: Watcher, operations: HostOperations):
        super().__init__()
        self._watcher = watcher
        self._operations = operations

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        world = self._watcher.world
        if world.host is None or world.current is not None:
            return func(*args, **(kwargs or {}))
        stream = streams.current_stream()
        if stream.pending() and name not in _NO_VALUES:
            # An operation runs at once here, so what stands before it on its stream must have ended.
            world.run_until(stream.marker(), "its stream")
        reads = name in _HOST_FUNCTIONS
        if reads and name in _UNSEEN and args:
            self._operations.read_by_host(name, args[0])
        result = func(*args, **(kwargs or {}))
        if reads:
            self._watcher.host_awaited(stream)
            world.host_reads()
        return result
