"""The in-stream barrier.

Protocol. Each pair of ranks counts the barriers that both took part in, so barriers of any mixture of groups are
counted right. ``barrier_flags`` holds one line for each rank, on every rank: line p of rank r counts how often p has
arrived at a barrier with r. A rank adds 1 to its line on every peer of the group (release at system scope, after all
earlier work of its stream), then waits until every peer's line here reached the number that this rank expects
(``barrier_epochs``, advanced by the kernel itself, so that captured graphs replay). Nothing is reset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from iris.device import signal
from iris.runtime import launch
from iris.runtime.groups import Group

if TYPE_CHECKING:
    from iris.runtime.context import Iris

_KERNEL = launch.kernel_id("device_barrier")


@triton.jit
def device_barrier_kernel(flags, epochs, members, size, context, KERNEL: tl.constexpr):
    """Barrier of ``size`` ranks listed in ``members``; one program."""
    rank = tl.load(context).to(tl.int32)
    for i in range(size):
        peer = tl.load(members + i)
        if peer != rank:
            signal.notify_add(flags + rank * signal.FLAG_STRIDE, 1, rank, peer, context + 2)
    for i in range(size):
        peer = tl.load(members + i)
        if peer != rank:
            epoch = tl.load(epochs + peer) + 1
            signal.wait(flags + peer * signal.FLAG_STRIDE, epoch, context, peer, KERNEL)
            tl.store(epochs + peer, epoch)


class DeviceBarrier:
    """The barrier of one context; ``ctx.device_barrier(group)`` calls it."""

    def __init__(self, ctx: Iris):
        self._ctx = ctx

    def __call__(self, group: Group) -> None:
        ctx = self._ctx
        if group.size == 1:
            return
        launch.start(
            ctx,
            device_barrier_kernel,
            (1,),
            ctx.barrier_flags,
            ctx.barrier_epochs,
            ctx.group_members(group),
            group.size,
            ctx.get_device_context(),
            KERNEL=_KERNEL,
            num_warps=1,
        )
