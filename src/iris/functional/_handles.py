"""Strings that stand for a context and a group: what an operator of PyTorch can take where it cannot take a context.

And the part of the symmetric heap that tensors of such operators are copied through: see :class:`Passage`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from iris.errors import ArgumentError, CaptureError, IrisError, UnsupportedError
from iris.runtime.calls import StreamOrder
from iris.runtime.groups import Group

if TYPE_CHECKING:
    from iris.runtime.context import Iris

_SITE = "tensors of iris.functional"
# Algorithms of products that write the own output alone, wherever it lies.
_WRITE_OWN = ("torch", "one_shot")
_KEPT = 4096  # shapes of which it is remembered
_numbers = itertools.count()
_entries: dict[str, Entry] = {}


@dataclass
class Entry:
    """What a handle stands for.

    Attributes:
        name: the handle.
        group: as the caller gave it. members: the same as ranks.
        staged: whether calls write their output to the heap first, by what decides it.
    """

    name: str
    group: Any
    members: Group
    context: weakref.ref[Iris]
    staged: dict[tuple, bool] = field(default_factory=dict)

    @property
    def ctx(self) -> Iris:
        """The context.

        Raises:
            ArgumentError: it is gone.
        """
        ctx = self.context()
        if ctx is None:
            raise _gone(self.name)
        return ctx

    @property
    def passage(self) -> Passage:
        """That of the context."""
        return self.ctx.service("functional_passage")

    @property
    def whole(self) -> bool:
        """Whether all ranks of the world take part."""
        return self.members.size == self.ctx.num_ranks

    def on_heap(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor where peers can read them, until the next call.

        What no operation takes is returned as it is, so that the operation refuses it on all ranks.
        """
        if self.members.size == 1 or tensor.device != self.ctx.get_device() or not tensor.numel():
            return tensor
        return self.passage.place(tuple(tensor.shape), tensor.dtype, self.members).copy_(tensor)

    def output(self, shape: Sequence[int], like: torch.Tensor, staged: bool = True) -> torch.Tensor:
        """An output of ``like``'s dtype where peers can write it, until the next call; not ``staged``: anywhere."""
        device = self.ctx.get_device()
        if self.members.size == 1 or not staged or like.device != device or 0 in shape:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        return self.passage.place(tuple(shape), like.dtype, self.members)

    def result(self, output: torch.Tensor) -> torch.Tensor:
        """What the caller gets of an output: memory of its own."""
        return output.clone() if self.ctx.is_symmetric(output) else output


class Passage:
    """A buffer on the symmetric heap of a context, through which tensors are copied that peers read or write.

    It serves one call after the other, in the order of the calls, also when they are made on different streams: every
    operation ends when its peers are done with this rank's memory. It grows to the largest call and stays.
    """

    def __init__(self, ctx: Iris):
        self._ctx = ctx
        self._order = StreamOrder(ctx)
        self._captured: list[torch.Tensor] = []
        # Not empty, so that a plan may be asked for before the memory is needed.
        self.buffer = ctx.heap.allocate(1024, torch.uint8, site=_SITE)
        self.names: dict[tuple, str] = {}

    def place(self, shape: tuple[int, ...], dtype: torch.dtype, members: Group) -> torch.Tensor:
        """An uninitialised tensor in the buffer, at its start. Collective over the world when it has to grow.

        Raises:
            ArgumentError: it would have to grow, and the call is not of all ranks.
            CaptureError: it would have to grow while a graph is captured.
            HeapExhausted: the heap has no room.
        """
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes > self.buffer.numel():
            if members.size < self._ctx.num_ranks:
                raise ArgumentError(
                    f"the call needs {nbytes} bytes of the symmetric heap, which all ranks allocate together, and is "
                    f"of ranks {list(members.ranks)} alone; there are {self.buffer.numel()}: let every rank make its "
                    f"handle with iris.functional.handle(ctx, group, heap_bytes={nbytes}) or more"
                )
            self.grow(nbytes)
        if self._ctx.capturing():
            # The graph holds the address.
            self._captured.append(self.buffer)
        self._order.follow_current()
        return self.buffer[:nbytes].view(dtype).view(shape)

    def grow(self, nbytes: int) -> None:
        """Let the buffer have so many bytes at least. Collective over the world.

        Raises:
            CaptureError: a graph is being captured.
            RankMismatch: the ranks ask for different sizes.
            HeapExhausted: the heap has no room.
        """
        if nbytes <= self.buffer.numel():
            return
        if self._ctx.capturing():
            raise CaptureError(
                f"{_SITE}: their memory on the heap has to grow to {nbytes} bytes, which a graph cannot capture; make "
                "the call once before the capture"
            )
        self._ctx.agreement.reach(_SITE, self._ctx.resolve_group(None), {"bytes on the heap": nbytes})
        # Calls on other streams may still use what is given back.
        self._ctx.synchronize()
        self.buffer = self._ctx.heap.allocate(nbytes, torch.uint8, site=_SITE)


def handle(ctx: Iris, group: Any = None, heap_bytes: int = 0) -> str:
    """A string that stands for a context and a group, for the functions of this package. Collective over the world.

    Every rank makes the same number of handles in the same order, each of its own group. The same context and group
    give the same handle again. A handle keeps no context alive.

    Args:
        ctx: the context.
        group: None for all ranks, a process group, or a sequence of ranks.
        heap_bytes: bytes of the symmetric heap to keep ready for tensors that peers read or write, the same on every
            rank. A call of all ranks gets what is missing itself; calls of a smaller group need the bytes of their
            largest such tensor here.

    Raises:
        UnsupportedError: the ranks are coroutines of one process: PyTorch keeps state of a running operator for each
            thread, so two of them cannot be in one at a time.
        NotAMemberError: the caller is not in ``group``.
        ArgumentError: not a group, or not a number of bytes.
    """
    if ctx.runtime in ("sim", "loopback") and ctx.num_ranks > 1:
        raise UnsupportedError(
            f"iris.functional needs a process for each rank (iris run, torchrun), and here {ctx.num_ranks} ranks "
            f"share one ({ctx.runtime}); ctx.ops and ctx.ccl run there"
        )
    if isinstance(heap_bytes, bool) or not isinstance(heap_bytes, int) or heap_bytes < 0:
        raise ArgumentError(f"heap_bytes must be a number of bytes, got {heap_bytes!r}")
    members = ctx.resolve_group(group)
    passage: Passage = ctx.service("functional_passage")
    passage.grow(heap_bytes)
    key = (group if isinstance(group, dist.ProcessGroup) else None, members.ranks)
    if key not in passage.names:
        # PyTorch keeps what it has compiled on disk, by the graph. Shapes and gradients depend on the group and on the
        # place in it, so they are in the graph with the handle: no rank, and no other world, takes what is not its own.
        name = f"iris:{next(_numbers)} rank {ctx.get_rank()} of {','.join(map(str, members.ranks))}"
        _entries[name] = Entry(name, group, members, weakref.ref(ctx))
        weakref.finalize(ctx, _entries.pop, name, None).atexit = False
        passage.names[key] = name
    return passage.names[key]


def entry(name: Any) -> Entry:
    """What a handle stands for.

    Raises:
        ArgumentError: no handle, or its context is gone.
    """
    if not isinstance(name, str):
        raise ArgumentError(
            f"handle must be what iris.functional.handle(ctx, group) returned, a string; got {type(name).__name__}"
        )
    found = _entries.get(name)
    if found is None:
        raise _gone(name)
    return found


def staged(
    found: Entry, operation: str, key: tuple, shape: tuple[int, ...], dtype: torch.dtype, *args: Any, **given: Any
) -> bool:
    """Whether a fused operation lets peers write its output, if that lies on the heap.

    Args:
        found: the handle's entry.
        operation: its name. key: what the plan depends on.
        shape, dtype: of the output.
        args, given: the other arguments of ``ctx.ops.explain``.
    """
    if found.members.size == 1:
        return False
    key = (operation, shape, dtype, *key)
    if key not in found.staged:
        somewhere = found.passage.buffer[: dtype.itemsize].view(dtype).expand(shape)
        try:
            plan = found.ctx.ops.explain(operation, somewhere, *args, group=found.group, **given)
        except IrisError:
            return False  # the operation itself says so, on all ranks
        if len(found.staged) >= _KEPT:
            found.staged.clear()
        found.staged[key] = plan.algorithm not in _WRITE_OWN
    return found.staged[key]


def _gone(name: str) -> ArgumentError:
    return ArgumentError(
        f"handle {name!r} stands for no context of this process: the context is gone, or there never was one; make a "
        "handle with iris.functional.handle(ctx, group) and keep the context"
    )
