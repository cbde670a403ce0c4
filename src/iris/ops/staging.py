"""The memory that peers' shards of A are fetched into. Ordinary memory: peers read the shards, not this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris.errors import CaptureError
from iris.ops._hbm_fetch import QUEUE_WORDS
from iris.runtime.copies import CopyStreams

if TYPE_CHECKING:
    from iris.runtime.context import Iris


class Staging:
    """A buffer with its flags, which grow to the largest call and are shared by calls that follow each other.

    Flags hold the number of the call that has filled a piece, and calls of all shapes are counted together, so nothing
    is cleared between calls, whatever their shapes. Flags that the host sets behind copies are the exception: those are
    0 or 1 and are cleared before the copies of a call begin.

    Attributes:
        buffer: uint8, the peers' shards.
        flags: int32, a flag for each piece that programs fetch. arrivals: int32, one for each that the host copies.
        partials: int32, a flag for each sum that a program leaves for another.
        queue: int32 words of the kernel: programs started, pieces and tiles given out, calls.
    """

    def __init__(self, ctx: Iris):
        self._ctx = ctx
        self._captured: list[Any] = []
        self._copy_streams = CopyStreams(ctx)
        empty = self._zeros(0)
        self.buffer = torch.empty(0, dtype=torch.uint8, device=ctx.get_device())
        self.flags = self.arrivals = self.partials = self._sums = empty
        self.queue = self._zeros(QUEUE_WORDS)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer and all that belongs to it."""
        return sum(t.nbytes for t in (self.buffer, self.flags, self.arrivals, self.partials, self._sums))

    def get(self, nbytes: int, flags: int, sums: int, partials: int) -> Staging:
        """Itself, of at least these sizes: bytes of the buffer, flags, 32-bit sums, flags of sums.

        Raises:
            CaptureError: it would have to grow while a graph is captured.
        """
        short = self.buffer.numel() < nbytes or self.flags.numel() < flags
        if short or self._sums.numel() < sums or self.partials.numel() < partials:
            self._grow(nbytes, flags, sums, partials)
        if self._ctx.capturing():
            # The graph holds their addresses.
            self._captured.append((self.buffer, self.flags, self.arrivals, self.partials, self._sums))
        return self

    def sums(self, dtype: torch.dtype) -> torch.Tensor:
        """The sums as float32 or int32."""
        return self._sums.view(dtype)

    def streams(self, copies: int) -> list[Any]:
        """As :meth:`iris.runtime.copies.CopyStreams.take`."""
        return self._copy_streams.take(copies)

    def _grow(self, nbytes: int, flags: int, sums: int, partials: int) -> None:
        if self._ctx.capturing():
            raise CaptureError(
                f"all_gather_matmul: the staging buffer has to grow to {nbytes} bytes, which a graph cannot capture; "
                "make the call once before the capture"
            )
        if self.flags.numel():
            # Calls on other streams may still use what is given back.
            self._ctx.synchronize()
        if self.buffer.numel() < nbytes:
            # Rows past the last one are read in whole tiles and have no effect.
            self.buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self._ctx.get_device())
        if self.flags.numel() < flags:
            # Flags of earlier calls are behind those to come, and so is 0.
            self.flags, self.arrivals = self._zeros(flags), self._zeros(flags)
        if self.partials.numel() < partials:
            self.partials = self._zeros(partials)
        if self._sums.numel() < sums:
            self._sums = torch.empty(sums, dtype=torch.int32, device=self._ctx.get_device())

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._ctx.get_device())
