"""Which memory a simulated world knows: allocations of the heaps and other tensors, with a shadow of who touched them.

The shadow of a region has an entry for each granule, the smallest element that the region was accessed with so far.
Entries are int32: who wrote last, who has read since, which atomics happened since, what those atomics published.
Arrays are made when they are first needed and their pages when they are first touched, so memory grows with the memory
used: at most 16 bytes for each byte.
"""

from __future__ import annotations

import gc
import weakref
from bisect import bisect_right, insort

import numpy as np
import torch


class MemoryRegion:
    """A live allocation.

    Attributes:
        start, end: its addresses.
        rank: whose memory it is.
        label: what it is called in messages.
        site: where it was made, empty when unknown.
        everywhere: addresses of the same allocation on every rank; empty for memory that is on no heap.
        born_uninitialized: whether nothing had been written to it when it became known.
        born: number of the access that made it and wrote all of it; 0 when unknown.
        internal: part of the library's own bookkeeping, which reports leave out.
        shape, itemsize: for naming elements; the shape is that of the tensor a kernel was given.
    """

    def __init__(
        self,
        start: int,
        nbytes: int,
        rank: int,
        label: str,
        site: str = "",
        born_uninitialized: bool = False,
        internal: bool = False,
        itemsize: int = 1,
    ):
        self.start = start
        self.end = start + nbytes
        self.rank = rank
        self.label = label
        self.site = site
        self.everywhere: tuple[int, ...] = ()
        self.born_uninitialized = born_uninitialized
        self.internal = internal
        self.itemsize = itemsize
        self.shape: tuple[int, ...] | None = None
        self.born = 0
        self.granule = 0
        self.writes: np.ndarray | None = None
        self.reads: np.ndarray | None = None
        self.atomics: np.ndarray | None = None
        self.published: np.ndarray | None = None

    def prepare(self, granule: int) -> None:
        """Make the shadow fit accesses that start and end at multiples of ``granule`` bytes from the start."""
        if self.granule == 0:
            self.granule = granule
            self.writes = self.blank()
            self.reads = self.blank()
        elif granule < self.granule:
            finer = self.granule // granule
            self.granule = granule
            for name in ("writes", "reads", "atomics", "published"):
                entries = getattr(self, name)
                if entries is not None:
                    setattr(self, name, self._refined(entries, finer))

    def _refined(self, entries: np.ndarray, finer: int) -> np.ndarray:
        """The shadow with ``finer`` entries for each; pages of memory that nobody has accessed stay untouched."""
        result = self.blank()
        used = np.flatnonzero(entries)
        for part in range(finer):
            places = used * finer + part
            fits = places < len(result)
            result[places[fits]] = entries[used[fits]]
        return result

    def blank(self) -> np.ndarray:
        return np.zeros(self._entries(), dtype=np.int32)

    def need_atomics(self) -> None:
        if self.atomics is None:
            self.atomics, self.published = self.blank(), self.blank()

    def _entries(self) -> int:
        return -(-(self.end - self.start) // self.granule)

    def select(self, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """Indices of the shadow's entries for accesses of ``itemsize`` bytes at ``addresses`` (1-D, all inside)."""
        distance = addresses - np.uint64(self.start)
        granule = self.granule or itemsize
        if itemsize % granule or (granule > 1 and (distance & np.uint64(granule - 1)).any()):
            # A power of two that divides the item, the old granule and every distance.
            together = int(np.bitwise_or.reduce(distance)) | itemsize | granule
            granule = together & -together
        self.prepare(granule)
        entries = distance.view(np.int64) >> (granule.bit_length() - 1)
        if itemsize > granule:
            entries = (entries[:, None] + np.arange(itemsize // granule)).reshape(-1)
        return entries

    def select_strided(self, address: int, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...]):
        """As :meth:`select` for a tensor: a slice when it is contiguous."""
        count = int(np.prod(shape))
        expected = 1
        for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
            if extent != 1 and stride != expected:
                break
            expected *= extent
        else:
            granule = self.granule or itemsize
            if itemsize % granule == 0 and (address - self.start) % granule == 0:
                self.prepare(granule)
                first = (address - self.start) // granule
                return slice(first, first + count * (itemsize // granule))
        offsets = np.zeros(shape, dtype=np.int64)
        for axis, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
            steps = np.arange(extent, dtype=np.int64) * (stride * itemsize)
            offsets += steps.reshape((-1,) + (1,) * (len(shape) - axis - 1))
        return self.select((offsets.reshape(-1) + address).astype(np.uint64), itemsize)

    def element(self, address: int) -> str:
        """Name of the element at an address, such as ``flags[3]`` or ``out[2, 17]``."""
        index = (address - self.start) // self.itemsize
        if self.shape and len(self.shape) > 1 and index < int(np.prod(self.shape)):
            return f"{self.label}[{', '.join(str(int(i)) for i in np.unravel_index(index, self.shape))}]"
        return f"{self.label}[{index}]"

    def describe(self) -> str:
        """Label, owner and creation site."""
        made = f", made at {self.site}" if self.site and self.site != self.label else ""
        return f"{self.label} of rank {self.rank}{made}"


class MemoryMap:
    """The live regions of a world, found by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: dict[int, MemoryRegion] = {}
        self._last: MemoryRegion | None = None

    def add(self, region: MemoryRegion) -> MemoryRegion:
        if region.start in self._regions:
            self.remove(region.start)
        insort(self._starts, region.start)
        self._regions[region.start] = region
        return region

    def remove(self, start: int) -> None:
        region = self._regions.pop(start, None)
        if region is not None:
            self._starts.remove(start)
            if self._last is region:
                self._last = None

    def find(self, address: int) -> MemoryRegion | None:
        """The region that holds an address."""
        last = self._last
        if last is not None and last.start <= address < last.end:
            return last
        position = bisect_right(self._starts, address)
        if position:
            region = self._regions[self._starts[position - 1]]
            if address < region.end:
                self._last = region
                return region
        return None

    def nearest(self, address: int) -> MemoryRegion | None:
        """The region closest to an address that is in none."""
        position = bisect_right(self._starts, address)
        around = [self._regions[self._starts[p]] for p in (position - 1, position) if 0 <= p < len(self._starts)]
        return min(around, key=lambda r: min(abs(address - r.end), abs(r.start - address)), default=None)

    def add_tensor(
        self,
        tensor: torch.Tensor,
        rank: int,
        label: str,
        site: str = "",
        *,
        fresh: bool = False,
        internal: bool = False,
    ) -> MemoryRegion | None:
        """Make the storage behind a tensor known, until it is freed; what is known already stays."""
        storage = tensor.untyped_storage()
        start, nbytes = storage.data_ptr(), storage.nbytes()
        if not nbytes:
            return None
        known = self.find(start)
        if known is not None:
            return known
        region = MemoryRegion(
            start, nbytes, rank, label, site, fresh, internal=internal, itemsize=tensor.element_size()
        )
        weakref.finalize(storage, self._freed, start, region).atexit = False
        return self.add(region)

    def _freed(self, start: int, region: MemoryRegion) -> None:
        if self._regions.get(start) is region:
            self.remove(start)

    def search(self, address: int, rank: int) -> MemoryRegion | None:
        """A tensor that is in no list but alive: one whose address a kernel was given as a number."""
        for thing in gc.get_objects():
            if type(thing) not in (torch.Tensor, torch.nn.Parameter):
                continue
            if thing.device.type == "cpu" and thing.layout == torch.strided:
                storage = thing.untyped_storage()
                if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                    return self.add_tensor(thing, rank, "a tensor")
        return None
