"""One rank of matmul + reduction with the whole card: the other ranks have done their part beforehand.

Between GPUs a rank has all compute units of its own and peers that work as it does. Ranks in one process share one
card, so rank 0 alone works, with all of it. All ranks have made the same call before, so the peers' partial products
are there, and the flags that say so are set to a value that no call reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from _matmul_reduce import (
    ALL_REDUCE,
    UNFUSED,
    Operands,
    Reduction,
    Shape,
    matmul,
    own_matmul,
    reduction_alone,
    reduction_of,
    unfused,
)
from _ways import AUTO, MATMUL, OWN_MATMUL, TORCH, TORCH_FUSED, Refused, Way, explained, idle, link_of_rank, whole_card

from iris import ops

_NEVER_REACHED = 1 << 30  # calls; flags are compared in wrapping int32 arithmetic
# By algorithm, whether the peers write a part of the output. Others need what peers do in the same call.
PEERS_WRITE = {"fused": False, "one_shot": False, "two_shot": True}


class Alone:
    """The ways of a problem where rank 0 alone works.

    Attributes:
        work: the tensors of the rank.
        units: compute units that rank 0 has.
    """

    def __init__(self, ctx: Any, shape: Shape):
        self.work = Operands(ctx, shape)
        self.units = whole_card(ctx)

    def way(self, ctx: Any, algorithm: str, config: Any = None) -> Way:
        """The way of that name, with a configuration of its kernel if one is given. Collective.

        Raises:
            Refused: says why it does not exist here, on every rank.
        """
        work, takes = self.work, ""
        others = {name for names in UNFUSED.values() for name in names} - {TORCH}
        if algorithm in {TORCH_FUSED, *others, *map(reduction_of, others)}:
            raise Refused("it needs all ranks")
        if algorithm == MATMUL:
            found = matmul(work)
        elif algorithm == OWN_MATMUL:
            found = own_matmul(ctx, work)
        elif algorithm == reduction_of(TORCH):
            found = reduction_alone(work, copied(ctx, work))
        else:
            plan = None
            if algorithm != TORCH:
                named = None if algorithm == AUTO else algorithm
                plan = explained(ctx, work.shape.operation, work.out, work.a, work.b, algorithm=named, config=config)
                takes = plan.algorithm if algorithm == AUTO else ""
            if plan is None or plan.algorithm == TORCH:
                found = unfused(work, copied(ctx, work))
            else:
                found = self._ours(ctx, plan)
        found.takes = takes
        return found if ctx.get_rank() == 0 else idle(len(found.results))

    def _ours(self, ctx: Any, plan: Any) -> Way:
        if plan.algorithm not in PEERS_WRITE:
            raise Refused(f"{plan.algorithm} needs peers that work")
        work, operation = self.work, self.work.shape.operation
        tensors = work.out, work.a, work.b
        options = {"algorithm": plan.algorithm}
        options["workspace"] = workspace = getattr(ops, f"{operation}_preamble")(
            ctx, *tensors, config=plan.config, **options
        )
        run = getattr(ctx.ops, operation)
        # All of them at once, so each with its share of the card. The tiles are the same.
        share = max(1, self.units // ctx.get_num_ranks())
        # Twice, because one_shot has two memories for what peers send, which take turns.
        for _ in range(2):
            run(*tensors, config=replace(plan.config, num_sms=share), **options)
        ctx.synchronize()
        ctx.barrier()
        given = work.out.clone()
        for flags in (workspace.partials.arrived, workspace.locks):
            flags.fill_(_NEVER_REACHED)
        ctx.synchronize()
        ctx.barrier()

        def call() -> None:
            run(*tensors, config=plan.config, **options)

        theirs = torch.zeros(work.out.shape, dtype=torch.bool, device=work.out.device)
        if ctx.get_rank() == 0 and PEERS_WRITE[plan.algorithm]:
            work.out.fill_(math.nan)
            call()
            ctx.synchronize()
            theirs = work.out.isnan()
            if theirs.all():
                raise RuntimeError(f"{plan.algorithm} of rank 0 alone wrote nothing")
        ctx.barrier()

        def prepare() -> None:
            work.out.copy_(torch.where(theirs, given, math.nan))

        return Way(call, prepare, work.compared(lambda: work.out, 1))


def copied(ctx: Any, work: Operands) -> Reduction:
    """What PyTorch's reduction brings to rank 0, over an imitated link if there is one, and the additions. Collective.

    An all-reduce adds up a part on each rank and gathers the parts: rank 0 reads the peers' from their outputs.
    """
    world, shape = ctx.get_num_ranks(), work.shape
    torch.matmul(work.a, work.b, out=work.product)
    work.out.copy_(work.total)
    ctx.synchronize()
    ctx.barrier()
    part = -(-shape.M // world)
    carry = link_of_rank()

    def rows(tensor: torch.Tensor, peer: int, first: int, last: int) -> torch.Tensor:
        own = tensor[first:last]
        address = ctx.heap.translate(own.data_ptr(), 0, peer) if own.numel() else 0
        nbytes = own.nbytes
        return ctx.heap.region.tensor(address, nbytes, None).view(own.dtype).view(own.shape) if nbytes else own

    added, gathered, received = [], [], {}
    for peer in range(1, world) if ctx.get_rank() == 0 else ():
        added.append(rows(work.product, peer, 0, part))
        received[peer] = added[-1].nbytes
        if shape.operation == ALL_REDUCE:
            first, last = min(shape.M, peer * part), min(shape.M, (peer + 1) * part)
            gathered.append((work.out[first:last], rows(work.out, peer, first, last)))
            received[peer] += gathered[-1][1].nbytes

    def call() -> None:
        arrive: Callable[[], None] | None = carry(0, received) if carry is not None and received else None
        work.out[:part].copy_(work.product[:part])
        for theirs in added:
            work.out[:part].add_(theirs)
        for target, theirs in gathered:
            target.copy_(theirs)
        if arrive is not None:
            arrive()

    return Reduction(work.whole, call, work.out, world)
