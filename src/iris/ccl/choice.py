"""Which algorithm a collective takes, and with how many programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from iris.ccl.config import VARIANTS, Config, ReduceOp
from iris.errors import ArgumentError, IrisError, UnsupportedError
from iris.runtime.checks import FP8
from iris.runtime.groups import Group
from iris.runtime.links import imitated, link_of
from iris.runtime.logs import logger
from iris.tuning import Plan
from iris.tuning.query import Query
from iris.tuning.selection import Selection, select
from iris.tuning.steps import lookup

if TYPE_CHECKING:
    from iris.runtime.context import Iris


# A program is as large as a compute unit can run, since there is one of them on each: while some of its warps wait for
# what they read, the others write.
_THREADS = 1024
_BLOCK_BYTES = 32768
_WARP_BYTES = 512


@dataclass(frozen=True)
class Programs:
    """How a kernel runs.

    Attributes:
        count: programs.
        block: elements that a program handles at a time.
        num_warps: warps of a program.
    """

    count: int
    block: int
    num_warps: int

    def __str__(self) -> str:
        return f"{self.count} programs, blocks of {self.block} elements, {self.num_warps} warps"

    @property
    def registers(self) -> int:
        """Those that a thread may take at most, so that a program fits a compute unit of NVIDIA, which has 65,536."""
        return min(255, 2048 // self.num_warps)


@dataclass(frozen=True)
class Choice:
    """An algorithm and why: the part of a plan that does not depend on the kernel.

    ``config``: how its kernel runs, the caller's or what was found with the algorithm; None leaves it to the operation.
    """

    algorithm: str
    source: str
    reason: str
    config: Config | None = None
    speedup: float | None = None


def choose(
    ctx: Iris,
    operation: str,
    members: Group,
    group: Any,
    nbytes: int,
    named: str | None,
    obstacles: dict[str, IrisError | None],
    preference: tuple[str, ...],
    dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> Choice:
    """The algorithm of a collective.

    Args:
        ctx: the context.
        operation: name of the operation, one of the table's.
        members: the group.
        group: the group, as the caller gave it.
        nbytes: bytes of the operation, as the table counts them.
        named: the algorithm that the caller named, None when open.
        obstacles: for each algorithm the error that naming it raises, None when it can be taken.
        preference: what to take instead when the table's algorithm has an obstacle, the best first.
        dtype: of the elements. config: the caller's configuration, None when open.

    Raises:
        IrisError: the obstacle of the named algorithm, or when all have one that of the most preferred.
    """
    if named is not None:
        obstacle = obstacles[named]
        if obstacle is not None:
            raise obstacle
        return Choice(named, "user", "the caller named it", config)

    def obstacle_of(algorithm: str) -> IrisError | None:
        if obstacles[algorithm] is None and algorithm == "torch" and not nccl(group):
            return UnsupportedError("the process group has no NCCL, so PyTorch would copy through the host")
        return obstacles[algorithm]

    if config is None:
        query = query_of(ctx, operation, members, nbytes, dtype)
        found = select(query, ctx.service("tuned").find(query, members))
        # What was tuned was timed through the same group, with or without NCCL.
        if found is not None and found.kind == "cache" and not _usable(operation, found):
            found = select(query)
        if found is not None and (obstacles.get if found.kind == "cache" else obstacle_of)(found.algorithm) is None:
            given = None if found.algorithm == "torch" else Config(**found.params)
            return Choice(found.algorithm, found.source, found.reason, given, found.speedup)
    entry = lookup("collectives", link_of(ctx), members.size, nbytes, ctx.target.product, operation=operation)
    assert entry is not None, "data/collectives.json has a row for every link"
    obstacle = obstacle_of(entry.algorithm)
    if obstacle is None:
        source = "fallback" if entry.algorithm == "torch" else "exact" if entry.measured else "heuristic"
        return Choice(entry.algorithm, source, f"it has {nbytes} bytes; {entry.reason}", config)
    for algorithm in preference:
        if obstacles[algorithm] is None:
            reason = f"the table has {entry.algorithm}, which cannot be taken: {obstacle}"
            return Choice(algorithm, "heuristic", reason, config)
    first = obstacles[preference[0]]
    assert first is not None
    raise first


def _usable(operation: str, found: Selection) -> bool:
    """Whether a record of the user's cache names something that there is; others are passed over with a warning."""
    try:
        Config(**found.params)
        if found.algorithm in VARIANTS[operation]:
            return True
        reason = f"it names the algorithm {found.algorithm!r}"
    except (TypeError, ArgumentError) as error:
        reason = str(error)
    logger.warning("what was tuned for %s cannot be used and is passed over: %s", operation, reason)
    return False


def query_of(ctx: Iris, operation: str, members: Group, nbytes: int, dtype: torch.dtype | None) -> Query:
    """What tables, rules and what was tuned on this machine are asked."""
    target = ctx.target
    named = "any" if dtype is None else str(dtype).removeprefix("torch.")
    return Query(
        operation, target.product, target.arch, link_of(ctx), members.size, ctx.get_cu_count(), named,
        (("bytes", nbytes),), details=(("imitated", link),) if (link := imitated(ctx)) else (),
    )  # fmt: skip


def torch_obstacle(
    ctx: Iris, members: Group, group: Any, tensors: tuple[torch.Tensor, ...], op: ReduceOp | None = None
) -> str:
    """Why PyTorch's own collective cannot be taken; empty when it can. ``op``: that of one that reduces."""
    if not isinstance(group, dist.ProcessGroup) and members.ranks != tuple(range(ctx.num_ranks)):
        return "a sequence of ranks is no process group of torch.distributed"
    if not all(t.is_contiguous() for t in tensors):
        return "PyTorch's collectives take contiguous tensors"
    if op is not None and tensors[0].dtype in (*FP8, torch.int16):
        return f"PyTorch's collectives do not reduce {tensors[0].dtype}"
    if op == ReduceOp.AVG and tensors[0].device.type == "cpu":
        return "gloo does not average"
    return ""


def nccl(group: Any) -> bool:
    """Whether PyTorch's collectives on GPU tensors run on the GPU (NCCL, RCCL); gloo copies through the host."""
    chosen = group if isinstance(group, dist.ProcessGroup) else None
    return "nccl" in str(dist.get_backend_config(chosen)) if dist.is_initialized() else False


def programs(
    ctx: Iris,
    config: Config | None,
    count: int,
    itemsize: int,
    most_lanes: int,
    most_block: int,
    streams: bool = True,
) -> Programs:
    """Programs for a kernel that goes through ``count`` elements.

    Args:
        ctx: the context.
        config: the caller's configuration, None when open.
        count: elements.
        itemsize: bytes an element.
        most_lanes: lanes that may take part.
        most_block: elements that a block may have, a power of two.
        streams: the kernel goes through memory at the rate that it can; otherwise it waits for peers at every block.
    """
    compiled = ctx.target.compiled
    most = min(most_lanes, ctx.get_cu_count())
    if config is not None and config.comm_sms is not None:
        most = min(most, config.comm_sms)
    if config is not None and config.names_block:
        block = min(config.block_size_m * config.block_size_n, most_block)
    else:
        # Enough bytes in flight for the memory, and for few elements as many programs as there are; but where programs
        # wait for peers at every block, no more blocks than programs.
        block = min(most_block, (_BLOCK_BYTES if compiled else 4096) // itemsize)
        least = min(block, (2048 if compiled else 512) // itemsize)
        while block > least and (-(-count // block) < most if streams else -(-2 * count // block) <= most):
            block //= 2
    warps = min(max(4, block * itemsize // _WARP_BYTES), _THREADS // ctx.target.warp_size)
    if config is not None and config.num_warps is not None:
        warps = config.num_warps
    return Programs(max(1, min(most, -(-count // block))), block, warps)


def most_block(world: int, dtype: torch.dtype) -> int:
    """Elements that a program may combine at a time: those of all ranks, and the wide ones, must fit its registers."""
    # Of the registers that a thread of the largest program may take, what addresses leave.
    registers = 48
    of_element = (world * dtype.itemsize + 2 * wide_dtype(dtype).itemsize) / 4
    block = _THREADS
    while 2 * block * dtype.itemsize <= _BLOCK_BYTES and 2 * block / _THREADS * of_element <= registers:
        block *= 2
    return block


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that reductions of ``dtype`` are computed in; see :func:`iris.device.numeric.wide_dtype`."""
    if dtype.itemsize == 8:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int32


def plan(operation: str, choice: Choice, programs: Programs | None, problem: str) -> Plan:
    """The plan of a choice."""
    return Plan(operation, choice.algorithm, programs, choice.source, choice.reason, problem, choice.speedup)
