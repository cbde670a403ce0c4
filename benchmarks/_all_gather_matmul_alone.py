"""One rank of all_gather_matmul with the whole card: the other ranks stand in for GPUs that have nothing else to do.

Between GPUs a rank has all compute units of its own and peers that are there. Ranks in one process share one card, so
rank 0 alone works, with all of it. The others only take part in the protocol of :mod:`iris.x.turn`: before each call
they say that their inputs may be read and that they have read rank 0's; after it they end their turn. They have ended
when rank 0 starts, so they take no compute unit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from _all_gather_matmul import (
    GATHER,
    OPERATION,
    Operands,
    Shape,
    copied_gather,
    copied_product,
    fetch,
    matmul,
    own_matmul,
    own_shard,
    product,
)
from _ways import (
    AUTO,
    MATMUL,
    OWN_MATMUL,
    TORCH,
    TORCH_FUSED,
    Refused,
    Way,
    explained,
    idle,
    link_of_rank,
    whole_card,
)

from iris.device import signal
from iris.ops import all_gather_matmul_preamble
from iris.runtime import launch
from iris.x.schedule import rotated_rank
from iris.x.turn import begin_turn, end_turn

_KERNEL = launch.kernel_id("all_gather_matmul/stand in")
_RESULTS = 2  # that a product has
_COLUMNS = 16  # of the B that a rank which stands in gives: its workspace is the same for all


@triton.jit
def announce_kernel(flags, counters, members, index, context, WORLD: tl.constexpr):
    """Begin a turn, and say at once that the peers' inputs have been read; one program. Waits for nothing."""
    begin_turn(flags, counters, members, index, context, WORLD)
    rank = tl.load(members + index)
    num_ranks = tl.load(context + 1).to(tl.int32)
    consumed = flags + num_ranks * signal.FLAG_STRIDE
    for step in range(1, WORLD):
        peer = tl.load(members + rotated_rank(index, step, WORLD))
        epoch = tl.load(counters + peer) + 1
        signal.notify(consumed + rank * signal.FLAG_STRIDE, epoch, rank, peer, context + 2)


@triton.jit
def leave_kernel(flags, counters, members, index, context, WORLD: tl.constexpr, KERNEL: tl.constexpr):
    """End the turn; one program."""
    end_turn(flags, counters, members, index, context, WORLD, KERNEL)


class StandIn:
    """The turns of a rank that does not work."""

    def __init__(self, ctx: Any, workspace: Any):
        self._ctx = ctx
        self._turn = (workspace.locks, workspace.counters, ctx.group_members(workspace.group), workspace.group.index)
        self._begun = False

    def announce(self) -> None:
        """End the turn before, if there is one, and begin the next; before each call of rank 0, with it and after it
        the ranks meet."""
        ctx, size = self._ctx, {"WORLD": self._ctx.get_num_ranks(), "num_warps": 1}
        if self._begun:
            launch.start(ctx, leave_kernel, (1,), *self._turn, ctx.get_device_context(), KERNEL=_KERNEL, **size)
        launch.start(ctx, announce_kernel, (1,), *self._turn, ctx.get_device_context(), **size)
        self._begun = True


class Alone:
    """The ways of a problem where rank 0 alone works.

    Attributes:
        work: the tensors of rank 0; None on the others, which have their shards only.
        units: compute units that rank 0 has.
    """

    def __init__(self, ctx: Any, shape: Shape):
        self._shape = shape
        self.work = Operands(ctx, shape) if ctx.get_rank() == 0 else None
        self._a = own_shard(ctx, shape) if self.work is None else self.work.a
        self.units = whole_card(ctx)

    def way(self, ctx: Any, algorithm: str, config: Any = None) -> Way:
        """The way of that name, with a configuration of its kernel if one is given. Collective.

        Raises:
            Refused: says why it does not exist here, on every rank.
        """
        found, reason = None, ""
        if self.work is not None:
            try:
                found = self._plain(ctx, self.work, algorithm, config)
            except Refused as refused:
                reason = str(refused)
        reason, results = ctx.broadcast((reason, len(found.results) if found is not None else 0))
        if reason:
            raise Refused(reason)
        if results == 0:
            return self._ours(ctx, algorithm, config)
        return found if found is not None else idle(results)

    def _plain(self, ctx: Any, work: Operands, algorithm: str, config: Any) -> Way | None:
        """A way without the library's kernels between ranks; None when it has them."""
        carry, takes = link_of_rank(), ""
        if algorithm == MATMUL:
            return matmul(work)
        if algorithm == OWN_MATMUL:
            return own_matmul(ctx, work)
        if algorithm == GATHER:
            return copied_gather(ctx, work, lambda: fetch(ctx, work, carry))
        if algorithm == TORCH_FUSED:
            raise Refused("PyTorch's operation needs all ranks")
        if algorithm != TORCH:
            plan = explained(ctx, OPERATION, work.out, work.a, work.b, **self._options(algorithm, config))
            takes = plan.algorithm if algorithm == AUTO else ""
        if TORCH in (algorithm, takes):
            return copied_product(ctx, work, lambda: fetch(ctx, work, carry), takes=takes)
        return None

    def _ours(self, ctx: Any, algorithm: str, config: Any) -> Way:
        shape, work = self._shape, self.work
        if work is None:
            b = torch.empty((shape.K, _COLUMNS), dtype=shape.dtype, device=ctx.get_device())
            workspace = all_gather_matmul_preamble(ctx, self._a, b, algorithm="pull", gather_dim=shape.gather_dim)
            return idle(_RESULTS, StandIn(ctx, workspace).announce)
        options = self._options(algorithm, config)
        workspace = all_gather_matmul_preamble(ctx, work.a, work.b, output_dtype=shape.dtype, **options)
        way = product(work, lambda: ctx.ops.all_gather_matmul(work.out, work.a, work.b, workspace=workspace, **options))
        if algorithm == AUTO:
            way.takes = workspace.variant
        return way

    def _options(self, algorithm: str, config: Any) -> dict[str, Any]:
        named = None if algorithm == AUTO else algorithm
        return {"algorithm": named, "config": config, "gather_dim": self._shape.gather_dim}
