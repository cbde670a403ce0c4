"""What a context needs from a world whose ranks share this process: host exchange, and the region behind the heap."""

from __future__ import annotations

import ctypes
import mmap
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from iris.errors import HeapExhausted, RankMismatch
from iris.runtime import scheduler as scheduling
from iris.runtime.bootstrap import Exchange
from iris.runtime.heap import ALIGNMENT, Region
from iris.runtime.tensors import tensor_from_ptr
from iris.runtime.world import World

if TYPE_CHECKING:
    from iris.runtime.context import Iris

# Addresses between the parts of two ranks, so that running off the end of one does not reach the next.
_GAP = 1 << 20
# Python has a name for it from 3.13 on.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


def current_world() -> World | None:
    """The world whose rank is running, None in a process that is a rank itself."""
    scheduler = scheduling.current()
    return scheduler if isinstance(scheduler, World) and scheduler.host is not None else None


def whole_card(ctx: Iris) -> int:
    """Let a rank that works while the others of its GPU do not choose as if it had all compute units; how many these
    are."""
    units = ctx.target.compute_units
    if ctx.target.compiled:
        units = torch.cuda.get_device_properties(ctx.get_device()).multi_processor_count
    ctx.target = replace(ctx.target, compute_units=units)
    return units


class LocalExchange(Exchange):
    """Host exchange between ranks of one process; values travel as copies, as they would between processes."""

    def __init__(self, world: World, name: str, timeout_s: float):
        super().__init__(None, name, world.rank(), world.size, timeout_s)
        self._world = world

    def introduce(self) -> list[tuple[str, str, int]]:
        return self.all_gather("iris.iris()", ("this process", "", 0))

    def all_gather(self, tag: str, value: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        members = tuple(ranks) if ranks is not None else tuple(range(self.world_size))
        if members == (self.rank,):
            return [value]
        number = self._counts.get(members, 0)
        self._counts[members] = number + 1
        self._faults().pop(self.rank, None)
        meetings = self._world.shared.setdefault(("meetings", self.name), {})
        posts = meetings.setdefault((members, number), {})
        posts[self.rank] = (tag, pickle.dumps(value))
        if len(posts) == len(members):
            del meetings[members, number]
            self._world.met(members, tag)
        self._world.run_until(lambda: len(posts) == len(members), f"{tag} of ranks {list(members)}")
        tags = {r: posts[r][0] for r in members}
        if len(set(tags.values())) > 1:
            where = "; ".join(f"rank {r} is in {t}" for r, t in tags.items())
            raise RankMismatch(f"the ranks are in different collective calls: {where}")
        return [value if r == self.rank else pickle.loads(posts[r][1]) for r in members]

    def post_fault(self, text: str) -> None:
        self._faults()[self.rank] = text

    def faults(self, ranks: Sequence[int] | None = None) -> dict[int, str]:
        wanted = ranks if ranks is not None else range(self.world_size)
        return {r: text for r, text in self._faults().items() if r in wanted and r != self.rank}

    def watch(self, _waited: float = 0.0) -> None:
        """Nothing: a rank of this process cannot die alone."""

    def _faults(self) -> dict[int, str]:
        return self._world.shared.setdefault(("faults", self.name), {})


class LocalRegion(Region):
    """Every rank's part of one piece of memory. Made by the first rank that asks; the others get theirs.

    Args:
        world: the world.
        name: of the context, the same on every rank.
        nbytes: size of each rank's part.
        device: the memory's device: the CPU, or the GPU that the ranks share.
    """

    def __init__(self, world: World, name: str, nbytes: int, device: torch.device):
        self.nbytes = nbytes
        self.device = device
        self.world = world
        self.rank = world.rank()
        stride = -(-(nbytes + _GAP) // mmap.PAGESIZE) * mmap.PAGESIZE
        key = ("region", name)
        if key not in world.shared:
            world.shared[key] = _reserve(stride * world.size, device)
        self._memory, start = world.shared[key]
        self.bases = [start + r * stride for r in range(world.size)]

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        return tensor_from_ptr(address, nbytes, torch.uint8, self.device, owner=owner)

    def allocated(self, address: int, nbytes: int, itemsize: int, site: str) -> None:
        watcher = self.world.memory_watcher
        if watcher is not None:
            everywhere = [address - self.bases[self.rank] + base for base in self.bases]
            watcher.allocated(self.rank, everywhere, nbytes, itemsize, site)

    def freed(self, address: int) -> None:
        watcher = self.world.memory_watcher
        if watcher is not None:
            watcher.freed(address)

    def note(self, tensor: torch.Tensor, label: str) -> None:
        watcher = self.world.memory_watcher
        if watcher is not None:
            watcher.noted(self.rank, tensor, label)


def _reserve(nbytes: int, device: torch.device) -> tuple[object, int]:
    """Memory for every rank and its first aligned address. Host pages are committed when they are first touched."""
    if device.type != "cpu":
        memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
        return memory, -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, nbytes, flags=flags)
    except OSError as error:
        raise HeapExhausted(
            f"the machine refuses {nbytes} bytes of address space for the heaps of all ranks: {error}. Take a smaller "
            "heap_size; only memory that is touched is used"
        ) from error
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))
