"""The symmetric heap: one region a rank, of the same size, in which the ranks allocate in the same order.

Allocation is arithmetic on state that is the same on every rank, so it needs no communication. A tensor's memory is
given back in an order that the ranks agree on: a block is free once the tensors over it are gone on all ranks, which
they find out at the next barrier, or when an allocation does not fit. A running hash of the allocations is compared at
barriers, so ranks whose allocations differ get an error that names the first difference.
"""

from __future__ import annotations

import sys
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from iris.errors import ArgumentError, HeapExhausted, RankMismatch, UnsupportedError

ALIGNMENT = 1024


class Region:
    """Memory that every rank maps; ``bases[r]`` is the address of rank r's part in this process."""

    nbytes: int
    device: torch.device
    bases: list[int]

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        """uint8 tensor over the own part; its storage keeps ``owner`` alive."""
        raise NotImplementedError

    def allocated(self, address: int, nbytes: int, itemsize: int, site: str) -> None:
        """A block of the own part was given out; for whoever watches accesses."""

    def freed(self, address: int) -> None:
        """A block was given back."""

    def note(self, tensor: torch.Tensor, label: str) -> None:
        """``tensor`` is bookkeeping of the context that kernels reach by address."""


class Blocks:
    """First-fit allocation of ``total`` bytes in multiples of :data:`ALIGNMENT`; offsets only, no memory."""

    def __init__(self, total: int):
        self.total = total
        self._free: list[tuple[int, int]] = [(0, total)] if total else []

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    @property
    def largest(self) -> int:
        return max((size for _, size in self._free), default=0)

    def allocate(self, nbytes: int, alignment: int) -> int | None:
        """Offset of a block of ``nbytes``, or None when no free block holds it."""
        for i, (offset, size) in enumerate(self._free):
            start = -(-offset // alignment) * alignment
            if start + nbytes <= offset + size:
                rest = [(offset, start - offset), (start + nbytes, offset + size - start - nbytes)]
                self._free[i : i + 1] = [block for block in rest if block[1]]
                return start
        return None

    def free(self, offset: int, nbytes: int) -> None:
        """Give a block back and join it with its neighbours."""
        insort(self._free, (offset, nbytes))
        joined: list[tuple[int, int]] = []
        for start, size in self._free:
            if joined and joined[-1][0] + joined[-1][1] == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self._free = joined


@dataclass(frozen=True)
class Allocation:
    """One block: ``number`` counts allocations of the heap, ``site`` says where or for what it was made."""

    number: int
    offset: int
    nbytes: int
    dtype: torch.dtype
    num_elements: int
    site: str

    def __str__(self) -> str:
        return f"#{self.number} {self.num_elements} x {str(self.dtype).removeprefix('torch.')} at {self.site}"


class _Owner:
    """Lives as long as the storage over one block."""

    __slots__ = ("__weakref__", "region")

    def __init__(self, region: Region):
        self.region = region


class SymmetricHeap:
    """Allocates tensors from the own part of a region.

    Args:
        region: the memory.
        rank: the calling rank.
        reserved: bytes at the start of the region that belong to the context itself.
        nbytes: bytes behind them that allocations may use.
        reclaim: collective call that frees what is dead on all ranks; used when an allocation does not fit.

    Raises:
        UnsupportedError: the ranks' parts are not a multiple of :data:`ALIGNMENT` bytes apart in this process.
    """

    def __init__(self, region: Region, rank: int, reserved: int, nbytes: int, reclaim: Callable[[], None]):
        self.region = region
        self.rank = rank
        self.device = region.device
        self.base = region.bases[rank]
        apart = [base - self.base for base in region.bases]
        if any(distance % ALIGNMENT for distance in apart):
            # Device code adds them to addresses in units of that (iris.device.address).
            raise UnsupportedError(
                f"the ranks' heaps are mapped {apart} bytes from rank {rank}'s; the distances must be multiples of "
                f"{ALIGNMENT}"
            )
        self.reserved = reserved
        self._blocks = Blocks(nbytes)
        self._reclaim = reclaim
        self._live: dict[int, Allocation] = {}
        self._dead: deque[int] = deque()
        self._count = 0
        self._hash = 0
        self._recent: list[Allocation] = []
        self._anchor = region.tensor(self.base, ALIGNMENT, _Owner(region))

    @property
    def total_bytes(self) -> int:
        """Bytes that allocations may use."""
        return self._blocks.total

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks over which this rank still holds a tensor."""
        dead = set(self._dead)
        return sum(a.nbytes for a in self._live.values() if a.number not in dead)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of blocks that are not free yet; the same on every rank."""
        return self._blocks.total - self._blocks.free_bytes

    def allocate(
        self, num_elements: int, dtype: torch.dtype, alignment: int = ALIGNMENT, site: str | None = None
    ) -> torch.Tensor:
        """Uninitialised 1-D tensor on the heap. Collective in order; communicates only when the heap is full.

        Args:
            num_elements: at least 0; an empty tensor takes no memory.
            dtype: the element type.
            alignment: bytes, a power of two; at least 1024 is used.
            site: name for messages; default the caller's file and line.

        Raises:
            ArgumentError: a negative size, or an alignment that is no power of two.
            HeapExhausted: the heap cannot hold it; nothing changed.
        """
        if num_elements < 0:
            raise ArgumentError(f"num_elements must be at least 0, got {num_elements}")
        if alignment <= 0 or alignment & (alignment - 1):
            raise ArgumentError(f"alignment must be a power of two, got {alignment}")
        if num_elements == 0:
            return self._anchor[:0].view(dtype)
        wanted = num_elements * dtype.itemsize
        nbytes = -(-wanted // ALIGNMENT) * ALIGNMENT
        alignment = max(alignment, ALIGNMENT)
        site = site or _caller()
        offset = self._blocks.allocate(nbytes, alignment)
        if offset is None and nbytes <= self.total_bytes:
            self._reclaim()
            offset = self._blocks.allocate(nbytes, alignment)
        if offset is None:
            elsewhere = self.reserved_bytes - self.used_bytes
            dropped = f" ({elsewhere} of them dropped here but held by another rank)" if elsewhere else ""
            raise HeapExhausted(
                f"rank {self.rank}: cannot allocate {wanted} bytes ({num_elements} x {dtype}) on the symmetric heap: "
                f"{self.reserved_bytes} of {self.total_bytes} bytes are in use{dropped}, the largest free block has "
                f"{self._blocks.largest}. Make the context with a larger heap: iris.iris(heap_size=...)"
            )
        allocation = Allocation(self._count, offset, nbytes, dtype, num_elements, site)
        self._count += 1
        self._hash = _mix(self._hash, allocation)
        self._recent.append(allocation)
        self._live[allocation.number] = allocation
        self.region.allocated(self.base + self.reserved + offset, wanted, dtype.itemsize, site)
        owner = _Owner(self.region)
        weakref.finalize(owner, self._dead.append, allocation.number).atexit = False
        block = self.region.tensor(self.base + self.reserved + offset, wanted, owner)
        return block.view(dtype)

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies on this heap; an empty one does when it was allocated here or is a view of such."""
        if tensor.device != self.device:
            return False
        address = tensor.untyped_storage().data_ptr()
        return self.base <= address < self.base + self.region.nbytes

    def translate(self, address: int, from_rank: int, to_rank: int) -> int:
        """The address on ``to_rank`` of what ``address`` is on ``from_rank``, both as mapped in this process."""
        return address + self.region.bases[to_rank] - self.region.bases[from_rank]

    def on_peer(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """What ``tensor``, which is contiguous and on the own heap, is on another rank, as mapped in this process."""
        address = self.translate(tensor.data_ptr(), self.rank, peer)
        return self.region.tensor(address, tensor.nbytes, None).view(tensor.dtype).view(tensor.shape)

    def describe(self, address: int) -> str:
        """Which allocation an address on the own heap or, as mapped here, on a peer's lies in, for messages."""
        for rank, base in enumerate(self.region.bases):
            if rank != self.rank and base <= address < base + self.region.nbytes:
                return f"{self._describe(address - base, address)} on rank {rank}"
        return self._describe(address - self.base, address)

    def _describe(self, offset: int, address: int) -> str:
        offset -= self.reserved
        for a in self._live.values():
            if a.offset <= offset < a.offset + a.nbytes:
                return f"{a.site}[{(offset - a.offset) // a.dtype.itemsize}]"
        if -self.reserved <= offset < 0:
            return f"a flag of the context (byte {offset + self.reserved} of its reserved area)"
        return f"address {address:#x}"

    def state(self) -> dict:
        """What a barrier compares: how many allocations, their hash, and which are dead here."""
        return {"count": self._count, "hash": self._hash, "dead": tuple(self._dead)}

    def recent(self) -> list[str]:
        """The allocations since the last agreement, in words."""
        return [str(a) for a in self._recent]

    def settle(self, states: list[dict]) -> None:
        """Free what is dead on all ranks, given every rank's :meth:`state`, which agree on count and hash."""
        dead = set.intersection(*(set(state["dead"]) for state in states))
        # In the order of allocation, so that every rank's free list is built the same way.
        for number in sorted(dead):
            allocation = self._live.pop(number)
            self._blocks.free(allocation.offset, allocation.nbytes)
            self.region.freed(self.base + self.reserved + allocation.offset)
            self._dead.remove(number)  # in place: finalizers append to this very deque
        self._recent.clear()


def first_difference(logs: list[list[str]], ranks: list[int]) -> str:
    """The first allocation in which ranks differ, given each rank's list, in words."""
    for position in range(max(len(log) for log in logs)):
        entries = [log[position] if position < len(log) else "nothing" for log in logs]
        # The site may differ by path only; size and dtype are what must agree.
        if len({entry.split(" at ")[0] for entry in entries}) > 1:
            return "; ".join(f"rank {r} allocated {entry}" for r, entry in zip(ranks, entries, strict=True))
    return "the allocations differ before the last barrier"


def diverged(states: list[dict]) -> bool:
    """Whether ranks made different allocations, given every rank's :meth:`SymmetricHeap.state`."""
    return len({(state["count"], state["hash"]) for state in states}) > 1


def raise_for_divergence(logs: list[list[str]], ranks: list[int]) -> None:
    """Raise the error for ranks whose allocations differ.

    Raises:
        RankMismatch: always.
    """
    raise RankMismatch(
        "the ranks' symmetric heaps have diverged, every rank must make the same allocations in the same order: "
        + first_difference(logs, ranks)
    )


def _mix(state: int, allocation: Allocation) -> int:
    # FNV-1a over what must agree; Python's hash of a string differs between processes.
    for byte in f"{allocation.offset},{allocation.num_elements},{allocation.dtype};".encode():
        state = ((state ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return state


def _caller() -> str:
    frame = sys._getframe(1)
    while frame is not None and "/iris/" in frame.f_code.co_filename and "/tests/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown place"
