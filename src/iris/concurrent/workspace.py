"""``Workspace``: the flags and counters of calls that follow each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris.concurrent._two_queue_kernel import QUEUE_WORDS
from iris.device.signal import FLAG_STRIDE
from iris.runtime.calls import StreamOrder

if TYPE_CHECKING:
    from iris.runtime.context import Iris


class Workspace:
    """Made by :func:`make_workspace`, for any calls of any shapes and groups.

    Calls with one workspace are put in order, also on different streams; those with different ones are not.

    Attributes:
        flags, counters: of :mod:`iris.x.turn`; the flags are on the symmetric heap.
        alone: counters for the kernel that multiplies beside another one.
        queue: int32 words of the kernel, see :mod:`iris.concurrent._two_queue_kernel`.
        order: of the calls.
    """

    def __init__(self, ctx: Iris, flags: torch.Tensor, counters: torch.Tensor, order: StreamOrder):
        self._ctx = ctx
        self._stream: Any = None
        self.flags, self.counters, self.order = flags, counters, order
        self.alone = torch.zeros_like(counters)
        self.queue = torch.zeros(QUEUE_WORDS, dtype=torch.int32, device=counters.device)

    def stream(self) -> Any:
        """The stream that collectives of ``mode="concurrent"`` run on."""
        if self._stream is None:
            self._stream = self._ctx.new_stream()
        return self._stream


def make_workspace(ctx: Iris) -> Workspace:
    """A workspace with flags of its own, for calls that are to run beside others. Collective over the world.

    Calls that run at one time wait for their peers, so their programs must have room on the device together: give each
    a part of it with ``num_wgs``. Otherwise one rank may run the first while another runs the second, and both wait.
    """
    words = 2 * ctx.get_num_ranks() * FLAG_STRIDE.value
    flags = ctx.heap.allocate(words, torch.int32, site="concurrent flags").zero_()
    counters = torch.zeros(ctx.get_num_ranks() + 2, dtype=torch.int32, device=ctx.get_device())
    made = Workspace(ctx, flags, counters, StreamOrder(ctx))
    # A peer may set a flag as soon as it launches, so the flags are zero on all ranks before any of them does. And the
    # first call may be on another stream than this one.
    ctx.synchronize()
    ctx.exchange.all_gather("iris.concurrent.make_workspace(): workspace ready", None)
    return made
