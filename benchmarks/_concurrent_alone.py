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
from _ways import Way, idle, whole_card

from iris.concurrent.tuning_data._alone import charge_of_peers, tiles_of_rank_0, workspace_alone


class Alone(Together):
    """The ways of a problem where rank 0 alone works. Construction is collective."""

    def __init__(self, ctx: Any, shape: Shape):
        whole_card(ctx)
        super().__init__(ctx, shape)
        self._workspace = workspace_alone(ctx)
        want = self.payload.want
        if shape.collective == "all_gather":
            want = want.clone()
            want[shape.rows :].fill_(math.nan)
        elif shape.collective == "all_reduce":
            call, world = self.agreed(), ctx.get_num_ranks()
            own = tiles_of_rank_0(shape.rows, shape.columns, call.comm_block, call.comm_group_m, world)
            want = torch.where(own.to(want.device), want, math.nan)
        self._want = want
        self._charge = charge_of_peers(shape.collective, self.payload.src.nbytes, ctx.get_num_ranks())
        ctx.synchronize()
        ctx.barrier()

    def before(self) -> None:
        self._charge()

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
