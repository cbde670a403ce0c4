"""How far the ranks' device clocks are apart.

Every rank reads its clock before and after a barrier in the stream, several times. A rank leaves a barrier after every
rank has come to it, so with ``c = clock of rank r - clock of rank 0``

    before_r - after_0  <=  c  <=  after_r - before_0

holds for every round. The tightest bounds of all rounds give ``c`` as their middle, and half their distance as the
uncertainty. Clocks drift, by some microseconds a second at most; the offset is that of the time of the export.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris.runtime import launch
from iris.tracing._clock_kernel import stamp_kernel

if TYPE_CHECKING:
    from iris.runtime.context import Iris

ROUNDS = 8
_KERNEL = launch.kernel_id("tracing: comparing clocks")


@dataclass(frozen=True)
class Alignment:
    """Clocks of all ranks against that of rank 0.

    Attributes:
        offset_ns: for each rank, what its clock shows minus what that of rank 0 shows.
        uncertainty_ns: for each rank, by how much the offset may be wrong.
        known: False when the clocks could not be compared; the rest is 0 then.
    """

    offset_ns: tuple[int, ...]
    uncertainty_ns: tuple[int, ...]
    known: bool = True


def clock_of(ctx: Iris) -> str:
    """A name of the clock that this rank's kernels read; the same for ranks that read the same one."""
    device: Any = ctx.get_device()
    if device.type == "cpu":
        return "host"
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", f"GPU {device.index} of rank {ctx.get_rank()}"))


def alignment(ctx: Iris) -> Alignment:
    """Compare the ranks' clocks. Collective; a handshake in the stream unless all read the same clock.

    After a wait that did not end waits end at once, those of the handshake too: nothing is known then.
    """
    ranks = ctx.get_num_ranks()
    if len(set(ctx.exchange.all_gather("tracing.export(): clocks", clock_of(ctx)))) == 1:
        return Alignment((0,) * ranks, (0,) * ranks)
    stamps = ctx.exchange.all_gather("tracing.export(): comparing clocks", handshake(ctx))
    if any(of_rank is None for of_rank in stamps):
        return Alignment((0,) * ranks, (0,) * ranks, known=False)
    return offsets(stamps)


def handshake(ctx: Iris) -> list[int] | None:
    """Clock before and after each of :data:`ROUNDS` barriers, in ns; None when a wait has failed. Collective."""
    stamps = torch.zeros(2 * ROUNDS, dtype=torch.int64, device=ctx.get_device())
    world = ctx.resolve_group(None)
    launch.start(
        ctx,
        stamp_kernel,
        (1,),
        stamps,
        ctx.barrier_flags,
        ctx.barrier_epochs,
        ctx.group_members(world),
        world.size,
        ctx.get_device_context(),
        ROUNDS=ROUNDS,
        KERNEL=_KERNEL,
        num_warps=1,
    )
    ctx._device_synchronize()
    if ctx._error_slot[0].item() != 0:
        return None
    return [tick * (1_000_000_000 // ctx.target.clock_hz) for tick in stamps.tolist()]


def offsets(stamps: Sequence[Sequence[int]]) -> Alignment:
    """Offsets from the stamps of all ranks, as :func:`handshake` gives them."""
    before, after = [rank[::2] for rank in stamps], [rank[1::2] for rank in stamps]
    middles, widths = [0], [0]
    for rank in range(1, len(stamps)):
        lowest = max(b - a for b, a in zip(before[rank], after[0], strict=True))
        highest = min(a - b for a, b in zip(after[rank], before[0], strict=True))
        middles.append((lowest + highest) // 2)
        widths.append(abs(highest - lowest + 1) // 2)
    return Alignment(tuple(middles), tuple(widths))
