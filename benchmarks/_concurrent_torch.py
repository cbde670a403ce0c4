"""PyTorch's collectives for bench_concurrent.py: those of torch.distributed, of symmetric memory, and as copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _concurrent import Moving, Payload
from _ways import Refused, check_symmetric_memory, group_name, link_of_rank, torch_carries, tried

# PyTorch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_COPIED = (
    "torch's collective copies and adds within the card what it would bring the rank, while the link, if one is "
    "imitated, carries"
)


def distributed(ctx: Any, payload: Payload) -> Moving:
    """That of ``torch.distributed``, on the backend's own stream; as copies where ranks in one process share a GPU.

    Raises:
        Refused: the backend would take it through the host.
    """
    if ctx.runtime == "loopback":
        return copied(ctx, payload)
    if not torch_carries(ctx):
        raise Refused("gloo takes it through the host, and NCCL wants a GPU for each process")
    name, src, dst = payload.shape.collective, payload.src, payload.dst
    start = {
        "all_gather": lambda: _all_gather(dst, src, async_op=True),
        "all_reduce": lambda: dist.all_reduce(dst, async_op=True),
        "reduce_scatter": lambda: _reduce_scatter(dst, src, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(dst, src, async_op=True),
        "broadcast": lambda: dist.broadcast(dst, 0, async_op=True),
    }[name]
    in_place = name == "all_reduce" or (name == "broadcast" and payload.rank == 0)
    return Moving(lambda: start().wait, payload.half(prepare=lambda: dst.copy_(src)) if in_place else payload.half())


def symmetric_memory(ctx: Any, payload: Payload) -> Moving:
    """That of PyTorch's symmetric memory, on another stream. Collective.

    Raises:
        Refused: says why there is none here.
    """
    operation = "two_shot_all_reduce_"
    if payload.shape.collective != "all_reduce":
        raise Refused("of PyTorch's symmetric memory the all-reduce is taken")
    check_symmetric_memory(ctx, operation)
    import torch.distributed._symmetric_memory as symm_mem

    try:
        made = symm_mem.empty(*payload.src.shape, dtype=payload.src.dtype, device=payload.src.device)
        symm_mem.rendezvous(made, dist.group.WORLD)  # pyright: ignore[reportArgumentType]
    except RuntimeError as error:
        raise Refused(f"PyTorch refuses symmetric memory: {error}".splitlines()[0]) from error
    made.copy_(payload.src)
    flat, name = made.view(-1), group_name()

    def call() -> None:
        torch.ops.symm_mem.two_shot_all_reduce_(flat, "sum", name)

    tried(ctx, call)
    return Moving(beside(ctx, call), payload.half(made, prepare=lambda: made.copy_(payload.src)))


def copied(ctx: Any, payload: Payload) -> Moving:
    """What PyTorch's collective brings to a rank, over an imitated link if there is one, and the additions.

    An all-reduce adds up a part on each rank and gathers the parts; those of the peers are there beforehand.

    Raises:
        Refused: it brings nothing.
    """
    name, src, dst, rank = payload.shape.collective, payload.src, payload.dst, payload.rank
    peers, chunk = [(rank + step) % payload.world for step in range(1, payload.world)], -(-len(src) // payload.world)
    carry, received = link_of_rank(), dict.fromkeys(peers, 0)

    def part(of: int) -> slice:
        return slice(min(len(src), of * chunk), min(len(src), (of + 1) * chunk))

    def theirs(peer: int, rows: slice) -> torch.Tensor:
        """Rows of a peer's input, which it is to bring."""
        own = src[rows]
        received[peer] += own.nbytes
        if not own.numel():
            return own
        return ctx.heap.on_peer(own, peer)

    # Where to, and what is copied there first and then added.
    moves: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    if name == "all_gather":
        rows, whole = len(src), slice(None)
        moves = [(dst[peer * rows : (peer + 1) * rows], [theirs(peer, whole)]) for peer in peers]
        moves.append((dst[rank * rows : (rank + 1) * rows], [src]))
    elif name == "all_to_all":
        moves = [(dst[part(peer)], [theirs(peer, part(rank))]) for peer in peers]
        moves.append((dst[part(rank)], [src[part(rank)]]))
    elif name in ("reduce_scatter", "all_reduce"):
        target = dst if name == "reduce_scatter" else dst[part(rank)]
        moves = [(target, [src[part(rank)], *(theirs(peer, part(rank)) for peer in peers)])]
        for peer in peers if name == "all_reduce" else ():
            moves.append((dst[part(peer)], [payload.want[part(peer)]]))
            received[peer] += moves[-1][0].nbytes
    else:
        raise Refused(f"{name} has no copies in its place")

    def call() -> None:
        arrive = carry(rank, received) if carry is not None and received else None
        for target, (first, *others) in moves:
            target.copy_(first)
            for other in others:
                target.add_(other)
        if arrive is not None:
            arrive()

    return Moving(beside(ctx, call), payload.half(), _COPIED)


def beside(ctx: Any, call: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
    """Starts ``call`` on another stream, after what is in the current one; gives what lets the current one wait."""
    side = ctx.side_stream()

    def begin() -> Callable[[], Any]:
        side.wait_stream(ctx.current_stream())
        with ctx.use_stream(side):
            call()
        return lambda: ctx.current_stream().wait_stream(side)

    return begin
