"""The memory of operations that add up what the ranks have multiplied: partial products on the symmetric heap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris.errors import CaptureError
from iris.ops._matmul_all_reduce_ring_kernel import RING_WORDS
from iris.ops._matmul_reduce_kernel import QUEUE_WORDS
from iris.ops.call import new_pair_flags

if TYPE_CHECKING:
    from iris.runtime.context import Iris

_SITE = "partial products"


class Partials:
    """Room for the partial products that come to a rank and their flags, for calls of one group that follow each other.

    Where partial products are exchanged, flags hold how often the ranks have met here. All members meet in every call,
    so the number is the same between any two, calls of all shapes are counted together, and nothing is cleared between
    calls: an older number, whatever it stood for, means not yet. Kernels whose sums move use their words in another
    way, so each has a memory of its own.

    Attributes:
        fixed: whether it cannot grow, because growing is collective over the world and its calls are not.
        zeroed: whether the buffer is zero when a kernel finds it for the first time.
        buffer: uint8 on the heap: partial products of the peers, sums of the tiles that the rank owns, or slots.
        arrived: int32 on the heap, the flags. locks, counters: those of :mod:`iris.x.turn`.
        queue: int32 words of the kernel, in ordinary memory.
    """

    def __init__(self, ctx: Iris, fixed: bool = False, zeroed: bool = False):
        self._ctx = ctx
        self._captured: list[Any] = []
        self.fixed = fixed
        self.zeroed = zeroed
        self.buffer: torch.Tensor | None = None
        self.arrived: torch.Tensor | None = None
        self.locks: torch.Tensor | None = None
        self.counters: torch.Tensor | None = None
        self.queue = torch.zeros(max(QUEUE_WORDS, RING_WORDS), dtype=torch.int32, device=ctx.get_device())
        self.sizes = (0, 0)
        # Sums that programs leave for another of the same rank, of tiles divided along K, and a flag for each.
        self._sums = self._summed = torch.zeros(0, dtype=torch.int32, device=ctx.get_device())

    def holds(self, nbytes: int, flags: int) -> bool:
        """Whether there is room for so many bytes of partial products and so many flags."""
        return flags == 0 or (nbytes <= self.sizes[0] and flags <= self.sizes[1])

    def get(self, nbytes: int, flags: int) -> Partials:
        """Itself, of at least these sizes. Collective over the world when it has to grow.

        Raises:
            CaptureError: it would have to grow while a graph is captured.
            HeapExhausted: the heap has no room.
        """
        if not self.holds(nbytes, flags):
            self._grow(max(nbytes, self.sizes[0]), max(flags, self.sizes[1]))
        if self._ctx.capturing():
            # The graph holds their addresses.
            self._captured.append((self.buffer, self.arrived))
        return self

    def sums(self, count: int, flags: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for so many sums of a 32-bit type, in ordinary memory, and for their flags. Local.

        Raises:
            CaptureError: it would have to grow while a graph is captured.
        """
        if self._sums.numel() < count or self._summed.numel() < flags:
            self._refuse_capture(f"{4 * count} bytes of sums")
            if self._sums.numel():
                # Calls on other streams may still use what is given back.
                self._ctx.synchronize()
            count, flags = max(count, self._sums.numel()), max(flags, self._summed.numel())
            self._sums = torch.empty(count, dtype=torch.int32, device=self._sums.device)
            # The number of a call is above 0.
            self._summed = torch.zeros(flags, dtype=torch.int32, device=self._sums.device)
        if self._ctx.capturing():
            self._captured.append((self._sums, self._summed))
        return self._sums.view(dtype), self._summed

    def _refuse_capture(self, wanted: str) -> None:
        if self._ctx.capturing():
            raise CaptureError(
                f"the memory for partial products has to grow to {wanted}, which a graph cannot capture; make the call "
                "once before the capture"
            )

    def _grow(self, nbytes: int, flags: int) -> None:
        self._refuse_capture(f"{nbytes} bytes")
        # A kernel of this rank ends when the peers have read what it left here.
        self._ctx.synchronize()
        # What they hold stays: some algorithms count on through all calls.
        before = self.arrived.clone() if self.arrived is not None else None
        self.buffer = self.arrived = None
        self.sizes = (0, 0)
        heap = self._ctx.heap
        if self.locks is None:
            self.locks, self.counters = new_pair_flags(self._ctx, _SITE)
        buffer = heap.allocate(nbytes, torch.uint8, site=_SITE)
        self.buffer = buffer.zero_() if self.zeroed else buffer
        # Flags of calls to come are above those of earlier calls, and so above 0.
        self.arrived = arrived = heap.allocate(flags, torch.int32, site=f"flags of {_SITE}").zero_()
        if before is not None:
            arrived[: before.numel()].copy_(before)
        self.sizes = (nbytes, flags)
        # A peer may set a flag as soon as it launches, so the flags are there on all ranks before any of them does.
        self._ctx.synchronize()
        self._ctx.exchange.all_gather(f"{_SITE}: ready", None)
