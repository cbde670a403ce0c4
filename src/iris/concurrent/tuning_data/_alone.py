"""A rank that calls while the others of its card do not: what it waits for, what its link carries, what it adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from iris.runtime.local import current_world

if TYPE_CHECKING:
    from iris.concurrent.workspace import Workspace
    from iris.runtime.context import Iris

# Calls that no flag will ever count; flags are compared in wrapping int32 arithmetic.
_NEVER_REACHED = 1 << 30


def workspace_alone(ctx: Iris) -> Workspace:
    """A workspace for one rank's calls, whose flags are set as if the peers had made every call. Collective."""
    made = ctx.concurrent.make_workspace()
    made.flags.fill_(_NEVER_REACHED)
    return made


def charge_of_peers(collective: str, nbytes: int, world: int) -> Callable[[], Any]:
    """Takes rank 0's incoming link for what its peers would write to it, to be called before it calls.

    With one direction for reading and the other for writing, the link of a rank that works alone would carry half of
    an all-reduce of ``nbytes``. Other collectives use one direction of it.
    """
    gpu = getattr(current_world(), "gpu", None)
    if gpu is None or collective != "all_reduce" or world == 1:
        return lambda: None
    pushed = dict.fromkeys(range(1, world), nbytes // world)
    return lambda: gpu.carry(0, pushed)


def tiles_of_rank_0(rows: int, columns: int, block: tuple[int, int], group_m: int, world: int) -> torch.Tensor:
    """Which elements of an all-reduce rank 0 adds up: those of each ``world``-th tile, from the first on, in grouped
    order. bool, (rows, columns), on the host."""
    block_m, block_n = block
    tiles_m, tiles_n = -(-rows // block_m), -(-columns // block_n)
    tile = torch.arange(tiles_m * tiles_n)
    first = tile // (group_m * tiles_n) * group_m
    within, tall = tile % (group_m * tiles_n), (tiles_m - first).clamp(max=group_m)
    own = torch.empty(tiles_m, tiles_n, dtype=torch.bool)
    own[first + within % tall, within // tall] = tile % world == 0
    return own.repeat_interleave(block_m, 0)[:rows].repeat_interleave(block_n, 1)[:, :columns]
