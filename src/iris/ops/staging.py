"""The memory that peers' shards of A are fetched into. Ordinary memory: peers read the shards, not this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris.errors import CaptureError
from iris.ops._hbm_buffer_kernel import QUEUE_WORDS

if TYPE_CHECKING:
    from iris.runtime.context import Iris


class Staging:
    """A buffer with its flags, which grow to the largest call and are shared by calls that follow each other.

    Flags hold the number of the call that has filled a piece, and calls of all shapes are counted together, so nothing
    is cleared between calls, whatever their shapes.

    Attributes:
        queue: int32 words of the kernel: programs started, pieces and tiles given out, calls.
    """

    def __init__(self, ctx: Iris):
        self._ctx = ctx
        self._buffer: torch.Tensor | None = None
        self._flags: torch.Tensor | None = None
        self._captured: list[Any] = []
        self.queue = torch.zeros(QUEUE_WORDS, dtype=torch.int32, device=ctx.get_device())

    @property
    def nbytes(self) -> int:
        """Bytes of buffer and flags."""
        return sum(t.nbytes for t in (self._buffer, self._flags) if t is not None)

    def get(self, nbytes: int, flags: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffer (uint8) and the flags (int32), of at least these sizes.

        Raises:
            CaptureError: they would have to grow while a graph is captured.
        """
        grows = self._buffer is None or self._buffer.numel() < nbytes
        more_flags = self._flags is None or self._flags.numel() < flags
        if (grows or more_flags) and self._ctx.capturing():
            raise CaptureError(
                f"all_gather_matmul: the staging buffer has to grow to {nbytes} bytes, which a graph cannot capture; "
                "make the call once before the capture"
            )
        device = self._ctx.get_device()
        if grows:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if more_flags:
            # Flags of earlier calls are behind those to come, and so is 0.
            self._flags = torch.zeros(flags, dtype=torch.int32, device=device)
        assert self._buffer is not None
        assert self._flags is not None
        if self._ctx.capturing():
            self._captured.append((self._buffer, self._flags))  # the graph holds their addresses
        return self._buffer, self._flags
