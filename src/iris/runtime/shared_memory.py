"""The region of a world on one machine without GPUs: memory files that every rank maps.

A memory file (``memfd_create``) has no name in any file system, so nothing can be left behind however a rank ends, and
it is not bounded by the size of ``/dev/shm``, which containers keep small. Its pages are committed when they are first
touched. Peers open it through ``/proc/<pid>/fd``, which needs the same user on the same machine.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from iris.errors import IrisError
from iris.runtime.bootstrap import Exchange
from iris.runtime.heap import Region
from iris.runtime.tensors import tensor_from_ptr


class SharedMemoryRegion(Region):
    """One memory file a rank, each mapped by all. Construction is collective.

    Args:
        nbytes: size of each rank's part.
        exchange: host exchange of the context.

    Raises:
        IrisError: a peer's memory file cannot be opened.
    """

    def __init__(self, nbytes: int, exchange: Exchange):
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.device = torch.device("cpu")
        rank = exchange.rank
        own = os.memfd_create(f"iris-heap-{rank}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(own, self.nbytes)
            places = exchange.all_gather("iris.iris(): mapping the heaps", (os.getpid(), own))
            self._maps = [self._map(own) if r == rank else self._map_peer(p, r) for r, p in enumerate(places)]
            # Peers open the file through this process's descriptor, so it stays until all have.
            exchange.all_gather("iris.iris(): heaps mapped", None)
        finally:
            os.close(own)
        self.bases = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self._maps]

    def _map(self, descriptor: int) -> mmap.mmap:
        return mmap.mmap(descriptor, self.nbytes, mmap.MAP_SHARED)

    def _map_peer(self, place: tuple[int, int], rank: int) -> mmap.mmap:
        pid, number = place
        try:
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError as error:
            raise IrisError(
                f"cannot open the heap of rank {rank} (process {pid}): {error}. The ranks of the cpu runtime must run "
                "on one machine, as one user, and see each other in /proc"
            ) from error
        try:
            return self._map(descriptor)
        finally:
            os.close(descriptor)

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        return tensor_from_ptr(address, nbytes, torch.uint8, self.device, owner=owner)
