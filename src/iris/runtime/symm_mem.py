"""The region of a world of GPUs: ``torch.distributed._symmetric_memory``, on CUDA and ROCm."""

from __future__ import annotations

import torch
import torch.distributed as dist

from iris.errors import IrisError
from iris.runtime.heap import ALIGNMENT, Region
from iris.runtime.tensors import tensor_from_ptr


class SymmetricMemoryRegion(Region):
    """GPU memory that every rank maps. Construction is collective.

    Args:
        nbytes: size of each rank's part.
        device: the GPU of the calling rank.
        rank, world_size: the caller's place in the default process group.

    Raises:
        IrisError: PyTorch cannot map the GPUs' memory into each other.
    """

    def __init__(self, nbytes: int, device: torch.device, rank: int, world_size: int):
        self.device = device
        self.nbytes = nbytes
        if world_size == 1:
            self._memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
            self.bases = [-(-self._memory.data_ptr() // ALIGNMENT) * ALIGNMENT]
            return
        import torch.distributed._symmetric_memory as symm_mem

        try:
            self._memory = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
            self._handle = symm_mem.rendezvous(self._memory, dist.group.WORLD)  # pyright: ignore[reportArgumentType]
        except RuntimeError as error:
            raise IrisError(
                f"rank {rank}: PyTorch symmetric memory could not map {nbytes} bytes of {world_size} ranks into each "
                f"other: {error}. The GPUs must reach each other (nvidia-smi topo -m); several ranks on one GPU need "
                "`iris run`"
            ) from error
        self.bases = [int(address) for address in self._handle.buffer_ptrs]

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        return tensor_from_ptr(address, nbytes, torch.uint8, self.device, owner=owner)
