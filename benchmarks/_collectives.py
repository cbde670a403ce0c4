"""What bench_collectives.py times: inputs that every rank can compute, buffers, the candidates of each operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from iris.ccl import Config
from iris.testing.numeric import ROUNDING, random_tensor, tolerance

VARIANTS = {
    "all_reduce": ("push", "one_shot", "two_shot", "ring", "atomic", "spinlock", "auto"),
    "all_gather": ("persistent", "partitioned", "copy_engine", "auto"),
    "reduce_scatter": ("two_shot", "auto"),
    "all_to_all": ("default", "auto"),
    "broadcast": ("direct", "scatter_allgather", "auto"),
}
# By operation: how a peer is shown, and its name in torch.ops.symm_mem. Those that need multicast are left out.
SYMMETRIC_MEMORY = {
    "all_reduce": {"torch one_shot": "one_shot_all_reduce_out", "torch two_shot": "two_shot_all_reduce_"},
    "all_gather": {"torch low_contention": "_low_contention_all_gather"},
    "reduce_scatter": {
        "torch reduce_scatter": "reduce_scatter_out",
        "torch low_contention": "_low_contention_reduce_scatter",
    },
}
SUMS = ("all_reduce", "reduce_scatter")
# Those without programs, for which neither blocks nor bounds on compute units mean anything.
NO_PROGRAMS = ("copy_engine",)
# A prime, so that no shift by whole tiles, slots or pages maps the data onto itself.
PERIOD = 1_048_573
SHIFT = 7_919
PIECE = 1 << 24


class Data:
    """Element i of rank r's input in buffer set s is ``blocks[r][(i + s * SHIFT) % PERIOD]``, random numbers."""

    def __init__(self, world: int, dtype: torch.dtype, device: torch.device):
        self.world, self.dtype, self.device = world, dtype, device
        blocks = [random_tensor((PERIOD,), dtype, seed=1, rank=rank) for rank in range(world)]
        self.blocks = torch.stack(blocks).to(device)
        self.total = self.blocks.double().sum(dim=0)
        self.magnitude = self.blocks.double().abs().sum(dim=0)

    def _positions(self, start: int, count: int, which: int) -> torch.Tensor:
        return (torch.arange(start, start + count, device=self.device) + which * SHIFT) % PERIOD

    def fill(self, tensor: torch.Tensor, rank: int, which: int) -> None:
        for at in range(0, tensor.numel(), PIECE):
            piece = tensor[at : at + PIECE]
            piece.copy_(self.blocks[rank][self._positions(at, piece.numel(), which)])

    def segments(self, operation: str, rank: int, numel: int) -> list[tuple[int, int, int | None, int]]:
        """The result in pieces: where it starts, its length, whose input (None: the sum of all), from which element."""
        part = numel // self.world
        return {
            "all_reduce": [(0, numel, None, 0)],
            "all_gather": [(r * part, part, r, 0) for r in range(self.world)],
            "reduce_scatter": [(0, part, None, rank * part)],
            "all_to_all": [(r * part, part, r, rank * part) for r in range(self.world)],
            "broadcast": [(0, numel, 0, 0)],
        }[operation]

    def fault(self, operation: str, have: torch.Tensor, rank: int, numel: int, which: int, often: bool) -> str | None:
        """What is wrong with a result; None if nothing. ``often``: every addition was rounded, not only the last."""
        absolute, relative = tolerance(self.dtype, self.world) if operation in SUMS else (0.0, 0.0)
        for start, length, source, first in self.segments(operation, rank, numel):
            for at in range(0, length, PIECE):
                positions = self._positions(first + at, min(PIECE, length - at), which)
                want = (self.total if source is None else self.blocks[source])[positions].double()
                got = have[start + at : start + at + positions.numel()].double()
                allowed = absolute + relative * want.abs()
                if often and source is None:
                    allowed += self.world * ROUNDING[self.dtype] * self.magnitude[positions]
                wrong = ~((got - want).abs() <= allowed)  # so that NaN is wrong
                count = int(wrong.sum())
                if count:
                    i = int(wrong.nonzero()[0])
                    return (
                        f"element {start + at + i} is {got[i].item()}, expected {want[i].item()} "
                        f"({count} of {wrong.numel()} around it are wrong)"
                    )
        return None


class Buffers:
    """Sets of buffers that calls take in turn, so that a call does not find the data of the one before in the cache.

    Set i is as large as the largest size that has more than i sets; smaller sizes use its beginning.

    Attributes:
        inputs, outputs: on the symmetric heap.
        peers: PyTorch's symmetric memory, empty where it is not used.
    """

    def __init__(self, ctx: Any, data: Data, numels: list[int], peers: bool):
        self.inputs = [ctx.empty(numel, dtype=data.dtype, device=data.device) for numel in numels]
        self.outputs = [ctx.empty(numel, dtype=data.dtype, device=data.device) for numel in numels]
        for which, tensor in enumerate(self.inputs):
            data.fill(tensor, ctx.get_rank(), which)
        self.peers: list[torch.Tensor] = []
        if peers:
            import torch.distributed._symmetric_memory as symm_mem

            for numel in numels:
                tensor = symm_mem.empty(numel, dtype=data.dtype, device=data.device)
                symm_mem.rendezvous(tensor, dist.group.WORLD)  # pyright: ignore[reportArgumentType]
                self.peers.append(tensor)


@dataclass(frozen=True)
class Candidate:
    """One way to do an operation.

    Attributes:
        variant: of ours, or the peer's name.
        block: elements that a program of ours handles at a time, None where the operation or a peer decides.
        peer: whether it is not ours.
        call: does the operation on a buffer set.
        result: where a call leaves its result.
        start: puts a set into its state before a call: inputs filled, outputs NaN.
        once: whether a second call without ``start`` computes something else.
        sms: compute units that it takes at most; None: what the operation or a peer decides.
    """

    variant: str
    block: int | None
    peer: bool
    call: Callable[[int], Any]
    result: Callable[[int], torch.Tensor]
    start: Callable[[int], Any]
    once: bool = False
    sms: int | None = None

    @property
    def name(self) -> str:
        block = "" if self.block is None else f"/{self.block}"
        return f"{self.variant}{block}" + ("" if self.sms is None else f", {self.sms} SMs")


def peers_here(ctx: Any) -> tuple[str | None, bool]:
    """The backend of torch.distributed that is a peer here, and whether PyTorch's symmetric memory is."""
    if ctx.runtime not in ("gpu", "cpu") or not dist.is_initialized() or ctx.get_num_ranks() == 1:
        return None, False
    backend = dist.group.WORLD._get_backend(ctx.get_device()).name()  # pyright: ignore[reportOptionalMemberAccess]
    on_gpu = ctx.get_device().type == "cuda"
    # gloo carries GPU tensors through the host: no peer.
    return None if on_gpu and backend != "nccl" else backend, on_gpu


def configuration(operation: str, variant: str, block: int, num_warps: int) -> Any:
    """The ``iris.ccl.Config`` of a variant with blocks of so many elements."""
    rows = min(32, block)
    chosen: dict[str, Any] = {f"{operation}_variant": variant}
    return Config(block_size_m=rows, block_size_n=block // rows, num_warps=num_warps, **chosen)


def candidates(
    ctx: Any,
    operation: str,
    variants: list[str],
    blocks: list[int],
    comm_sms: list[int],
    buffers: Buffers,
    numel: int,
    sets: int,
) -> tuple[list[Candidate], Any]:
    """The candidates of an operation, and the plan that ``auto`` has for it.

    Args:
        ctx: the context.
        operation: its name.
        variants: of ours.
        blocks: elements of a block, for each variant but ``auto``; empty: as in the plan of ``auto``.
        comm_sms: bounds on compute units, for each variant but ``auto`` once more. Neither is for those without
            programs.
        buffers: what they work on.
        numel: elements of the larger tensor.
        sets: how many buffer sets are used.
    """
    world, rank = ctx.get_num_ranks(), ctx.get_rank()
    part = numel // world
    taken = part if operation == "all_gather" else numel
    given = part if operation == "reduce_scatter" else numel
    inputs = [tensor[:taken] for tensor in buffers.inputs[:sets]]
    outputs = [tensor[:given] for tensor in buffers.outputs[:sets]]
    shared = [tensor[:taken] for tensor in buffers.peers[:sets]]

    def poison(which):
        outputs[which].fill_(math.nan)

    def root_only(which):
        outputs[which].copy_(inputs[which]) if rank == 0 else poison(which)

    def in_place(which):
        outputs[which].copy_(inputs[which])

    if operation == "broadcast":
        operands, more, start = lambda which: (outputs[which],), {"src": 0}, root_only
    else:
        operands, more, start = lambda which: (outputs[which], inputs[which]), {}, poison
        if operation == "all_to_all":
            more = {"dim": 0}  # rows, as PyTorch's all_to_all_single
    ours = getattr(ctx.ccl, operation)
    plan = ctx.ccl.explain(operation, *operands(0), **more)
    itemsize = inputs[0].element_size()
    ways: list[tuple[str, int | None, Any, int | None]] = []
    for variant in variants:
        if variant == "auto":
            ways.append((variant, None, None, None))
        elif variant in NO_PROGRAMS:
            named: dict[str, Any] = {f"{operation}_variant": variant}
            ways.append((variant, None, Config(**named), None))
        elif blocks:
            # More warps for more bytes, as the operations do it.
            warps = {
                block: 4 if block * itemsize <= 4096 else 8 if block * itemsize <= 8192 else 16 for block in blocks
            }
            ways += [(variant, block, configuration(operation, variant, block, warps[block]), None) for block in blocks]
        else:
            # What a plan without a kernel of ours would have is not known: the defaults of Config.
            block, warps = getattr(plan.config, "block", 2048), getattr(plan.config, "num_warps", 4)
            ways.append((variant, None, configuration(operation, variant, block, warps), None))
        for most in comm_sms if variant not in ("auto", *NO_PROGRAMS) else ():
            chosen: dict[str, Any] = {f"{operation}_variant": variant}
            ways.append((variant, None, Config(comm_sms=most, **chosen), most))
    found = []
    for variant, block, config, most in ways:
        # Bound here, so that the time of an eager call holds next to nothing of the benchmark's.
        calls = [partial(ours, *operands(which), config=config, **more) for which in range(sets)]
        call = lambda which, calls=calls: calls[which]()  # noqa: E731
        found.append(Candidate(variant, block, False, call, outputs.__getitem__, start, sms=most))

    backend, symmetric = peers_here(ctx)
    if backend is not None:
        call, begin, once = {
            "all_reduce": (lambda which: dist.all_reduce(outputs[which]), in_place, True),
            "all_gather": (lambda which: dist.all_gather_into_tensor(outputs[which], inputs[which]), poison, False),
            "reduce_scatter": (lambda which: dist.reduce_scatter_tensor(outputs[which], inputs[which]), poison, False),
            "all_to_all": (lambda which: dist.all_to_all_single(outputs[which], inputs[which]), poison, False),
            "broadcast": (lambda which: dist.broadcast(outputs[which], 0), root_only, False),
        }[operation]
        found.append(Candidate(backend, None, True, call, outputs.__getitem__, begin, once))
    if symmetric:
        found += _symmetric_memory(operation, inputs, outputs, shared)
    return found, plan


def _symmetric_memory(operation, inputs, outputs, shared) -> list[Candidate]:
    ops, name = torch.ops.symm_mem, dist.group.WORLD.group_name  # pyright: ignore[reportOptionalMemberAccess]
    returned: dict[int, torch.Tensor] = {}

    def start(which):
        # Refilled, because the candidates of an operation share these buffers and some leave their results there.
        shared[which].copy_(inputs[which])
        outputs[which].fill_(math.nan)
        # Operations that return their result take the memory that the one before gave back.
        returned.setdefault(which, torch.empty_like(outputs[which])).fill_(math.nan)

    def one_shot(which):
        ops.one_shot_all_reduce_out(shared[which], "sum", name, outputs[which])

    def two_shot(which):
        ops.two_shot_all_reduce_(shared[which], "sum", name)

    def reduce_scatter(which):
        ops.reduce_scatter_out(shared[which], name, False, outputs[which])

    def low_contention_all_gather(which):
        returned.pop(which, None)
        result = ops._low_contention_all_gather(shared[which], name)
        returned[which] = torch.ops._c10d_functional.wait_tensor(result)

    def low_contention_reduce_scatter(which):
        returned.pop(which, None)
        result = ops._low_contention_reduce_scatter(shared[which], "sum", name)
        returned[which] = torch.ops._c10d_functional.wait_tensor(result)

    there, here, back = outputs.__getitem__, shared.__getitem__, returned.__getitem__
    ways = {
        "one_shot_all_reduce_out": (one_shot, there),
        "two_shot_all_reduce_": (two_shot, here),
        "_low_contention_all_gather": (low_contention_all_gather, back),
        "reduce_scatter_out": (reduce_scatter, there),
        "_low_contention_reduce_scatter": (low_contention_reduce_scatter, back),
    }
    return [
        Candidate(shown, None, True, ways[op][0], ways[op][1], start, once=op == "two_shot_all_reduce_")
        for shown, op in SYMMETRIC_MEMORY.get(operation, {}).items()
        if hasattr(ops, op)
    ]


def absent(operation: str) -> list[str]:
    """The peers in torch.ops.symm_mem that this version of torch does not have."""
    return [op for op in SYMMETRIC_MEMORY.get(operation, {}).values() if not hasattr(torch.ops.symm_mem, op)]
