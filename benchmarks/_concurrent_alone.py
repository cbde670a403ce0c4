"""A GEMM beside a collective on one rank with the whole card: the other ranks never call.

Between GPUs a rank has all compute units of its own. Ranks in one process share one card, so rank 0 alone works, with
all of it. The flags of its workspace are set to a value that no call reaches, so it waits for nobody, and its peers'
inputs are there from the beginning. What it writes of the collective is checked where it writes it, on the peers too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from _concurrent import Half, Shape, Together
from _ways import Way, idle, link_of_rank, whole_card

_NEVER_REACHED = 1 << 30  # calls; flags are compared in wrapping int32 arithmetic


class Alone(Together):
    """The ways of a problem where rank 0 alone works. Construction is collective."""

    def __init__(self, ctx: Any, shape: Shape):
        whole_card(ctx)
        super().__init__(ctx, shape)
        self._workspace = ctx.concurrent.make_workspace()
        self._workspace.flags.fill_(_NEVER_REACHED)
        want = self.payload.want
        if shape.collective == "all_gather":
            want = want.clone()
            want[shape.rows :].fill_(math.nan)
        elif shape.collective == "all_reduce":
            call = self.agreed()
            own = own_tiles(shape, call.comm_block, call.comm_group_m, ctx.get_num_ranks()).to(want.device)
            want = torch.where(own, want, math.nan)
        self._want = want
        self._carry, self._pushed = link_of_rank(), self._pushed_by_peers()
        ctx.synchronize()
        ctx.barrier()

    def _pushed_by_peers(self) -> dict[int, int]:
        """Bytes that the peers would write to rank 0 over the link that rank 0 reads by. With one direction for
        reading and the other for writing, the link of a rank that works alone would carry half of an all-reduce."""
        shape, world = self.shape, self.ctx.get_num_ranks()
        each = shape.rows * shape.columns * shape.dtype.itemsize // world
        return dict.fromkeys(range(1, world), each) if shape.collective == "all_reduce" else {}

    def before(self) -> None:
        if self._carry is not None and self._pushed:
            self._carry(0, self._pushed)

    def moved(self) -> Half:
        # Peers' outputs are on the heap alike where rank 0 writes them.
        return replace(self.payload.half(want=self._want), everywhere=self.agreed().collective.writes_peers)

    def way(self, call: Callable[[], Any], *halves: Half, note: str = "") -> Way:
        if self.ctx.get_rank() == 0:
            return super().way(call, *halves, note=note)
        theirs = [half for half in halves if half.everywhere]
        found = super().way(lambda: None, *theirs)
        # As many results as rank 0 has.
        found.results += idle(sum(len(half.results) for half in halves if not half.everywhere)).results
        return found


def own_tiles(shape: Shape, block: tuple[int, int], group_m: int, world: int) -> torch.Tensor:
    """Which elements of an all-reduce rank 0 adds up: those of each ``world``-th tile, from the first on, in grouped
    order."""
    (block_m, block_n), rows, columns = block, shape.rows, shape.columns
    tiles_m, tiles_n = -(-rows // block_m), -(-columns // block_n)
    tile = torch.arange(tiles_m * tiles_n)
    first = tile // (group_m * tiles_n) * group_m
    within, tall = tile % (group_m * tiles_n), (tiles_m - first).clamp(max=group_m)
    own = torch.empty(tiles_m, tiles_n, dtype=torch.bool)
    own[first + within % tall, within // tall] = tile % world == 0
    return own.repeat_interleave(block_m, 0)[:rows].repeat_interleave(block_n, 1)[:, :columns]
