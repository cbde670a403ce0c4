"""What a call of all-gather + matmul comes to before anything runs: checks, agreement of the ranks, plan, workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris.errors import ArgumentError, IrisError
from iris.ops import arguments
from iris.ops._hbm_buffer import Schedule, schedule
from iris.ops.arguments import Problem
from iris.ops.call import (
    FusedCall,
    given_facts,
    new_pair_flags,
    place_facts,
    plan_facts,
    tensor_facts,
    torch_refuses,
)
from iris.ops.choice import choose, fetched
from iris.ops.config import FusedConfig, HbmBufferConfig
from iris.ops.staging import Staging
from iris.ops.workspace import FusedWorkspace
from iris.runtime import checks
from iris.runtime.calls import Calls
from iris.runtime.groups import Group
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris

OPERATION = "all_gather_matmul"
_INPUTS = ("A_sharded", "B", "bias", "scale_a", "scale_b")


class Call(FusedCall):
    """A checked combination of arguments, its plan, and what every launch of it needs.

    Attributes:
        schedule: the numbers of the kernel with a staging buffer; None for other algorithms.
        in_graphs: those of programs that fetch, where the library has chosen copies: what runs while a graph is
            captured, which can hold no copies. Else None.
        ready_for_graphs: whether that kernel is loaded.
        grid: of the other kernel.
    """

    def __init__(self, ctx: Iris, problem: Problem, plan: Plan, out, a, b, bias, scales):
        inputs: dict[str, Any] = dict(zip(_INPUTS, (a, b, bias, *scales), strict=True))
        super().__init__(ctx, problem, plan, ("output_tensor", out), inputs)
        self.schedule: Schedule | None = None
        self.in_graphs: Schedule | None = None
        self.ready_for_graphs = False
        self.grid = (0,)
        if isinstance(plan.config, HbmBufferConfig):
            self.schedule = schedule(ctx, problem, plan.config, a, b)
            if self.schedule.copied and plan.source != "user":
                self.in_graphs = schedule(ctx, problem, fetched(ctx, problem, plan.config), a, b)
        elif plan.config is not None:
            self.grid = _grid(ctx, problem, plan.config)

    @property
    def staging(self) -> tuple[int, int, int, int]:
        """What :meth:`iris.ops.staging.Staging.get` takes, as much as whichever schedule needs: a capture after a call
        outside of it then finds enough."""
        assert self.schedule is not None, "the other algorithms stage nothing"
        needed = self.schedule.staging
        if self.in_graphs is None:
            return needed
        nbytes, flags, sums, partials = map(max, needed, self.in_graphs.staging)
        return nbytes, flags, sums, partials


class State(Calls[Call]):
    """What a context remembers of this operation: agreed calls, workspaces, reported plans."""

    def __init__(self, ctx: Iris):
        super().__init__(ctx)
        self.order = ctx.service("pair_order")
        self.staging = Staging(ctx)
        self._workspaces: dict[tuple, FusedWorkspace] = {}

    def agree(
        self, members, out, a, b, bias, activation, scales, algorithm, config, workspace, gather_dim, group,
        preamble=False, tune=False, allow_fallback=True,
    ) -> Call:  # fmt: skip
        """Check the arguments and compare them across the group. Collective over the group.

        ``scales``: those of A and B, each None when not given.

        Raises:
            IrisError: what is wrong here.
            RankMismatch: what is wrong on another rank, or what differs.
        """
        error: IrisError | None = None
        call = None
        try:
            call = checked(
                self._ctx, members, out, a, b, bias, activation, scales, algorithm, config, gather_dim, group
            )
            call.check_overlap(out, a, b, bias, *scales)
            if workspace is not None:
                call.require(workspace, members)
        except IrisError as caught:
            error = caught
        facts = _facts(
            self._ctx, out, a, b, bias, activation, scales, algorithm, config, workspace, gather_dim, preamble
        ) | plan_facts(call, tune, allow_fallback)
        self._ctx.agreement.reach(OPERATION, members, facts, error)
        assert call is not None  # reach() raises the error
        return call

    def workspace(self, call: Call, members: Group) -> FusedWorkspace:
        """The workspace for such calls over the context's own flags."""
        problem = call.problem
        key = (problem.M, problem.N, problem.K, problem.a_dtype, problem.gather_dim, members.ranks, call.plan.algorithm)
        if key not in self._workspaces:
            flags, counters = self._ctx.pair_flags, self._ctx.pair_counters
            self._workspaces[key] = _empty_workspace(call, members, flags, counters, self.staging)
        return self._workspaces[key]


def checked(
    ctx: Iris, members: Group, out, a, b, bias, activation, scales, algorithm, config, gather_dim, group
) -> Call:
    """The call that the arguments make. Local; raises what :func:`check` and the choice of a plan raise."""
    problem = check(ctx, out, a, b, bias, activation, scales, members.size, gather_dim)
    if config is not None:
        config.validate(members.size)
    apart = "" if a.is_contiguous() else f"rows of A that lie apart, with strides {tuple(a.stride())}"
    plan = choose(ctx, problem, algorithm, config, torch_refuses(problem, members, group, ctx), members, apart)
    if members.size > 1:
        checks.check_symmetric(ctx, "A_sharded", a)
    return Call(ctx, problem, plan, out, a, b, bias, scales)


def check(
    ctx: Iris,
    out: Any,
    a: Any,
    b: Any,
    bias: Any,
    activation: Any,
    scales: tuple[Any, Any],
    world_size: int,
    gather_dim: int,
) -> Problem:
    """The problem that the arguments pose.

    Raises:
        ArgumentError, DeviceMismatch, UnsupportedError: says what was wrong, what was given and what is possible.
    """
    if gather_dim not in (0, 1):
        raise ArgumentError(f"gather_dim must be 1 (A sharded along K) or 0 (A sharded along M), got {gather_dim!r}")
    for name, tensor in (("output_tensor", out), ("A_sharded", a), ("B", b)):
        checks.check_matrix(ctx, name, tensor)
    (rows, columns), (K, N) = a.shape, b.shape
    if gather_dim == 1 and columns * world_size != K:
        hint = "; A sharded along M is asked for with gather_dim=0" if columns == K else ""
        raise ArgumentError(
            f"A_sharded must be [M, K/world_size] with K = B.shape[0]; got K_local={columns}, world_size={world_size}, "
            f"K={K} (A_sharded {tuple(a.shape)}, B {tuple(b.shape)}){hint}"
        )
    if gather_dim == 0 and columns != K:
        raise ArgumentError(
            f"with gather_dim=0 A_sharded must be [M/world_size, K] with K = B.shape[0]; got {columns} columns, K={K} "
            f"(A_sharded {tuple(a.shape)}, B {tuple(b.shape)})"
        )
    M = rows * (world_size if gather_dim == 0 else 1)
    if tuple(out.shape) != (M, N):
        raise ArgumentError(f"output_tensor must have shape ({M}, {N}), got {tuple(out.shape)}")
    arguments.check_dtypes(ctx.target, a, b, out)
    arguments.check_bias(ctx, bias, M, N, out.dtype)
    arguments.check_activation(activation, out.dtype)
    scaled = arguments.check_scales(ctx, *scales, a.dtype)
    shape = tuple(bias.shape) if bias is not None else None
    transpose = arguments.letter(a) + arguments.letter(b)
    aligned = all(map(arguments.aligned, (a, b, out)))
    return Problem(
        M, N, K, a.dtype, b.dtype, out.dtype, world_size, gather_dim, shape, transpose, activation, scaled, aligned
    )


def make_workspace(ctx: Iris, call: Call, members: Group) -> FusedWorkspace:
    """A workspace with flags of its own for ``call``. Collective over the world: all ranks make the allocation."""
    flags, counters = new_pair_flags(ctx, OPERATION)
    staging = Staging(ctx)
    if call.schedule is not None:
        staging.get(*call.staging)
    # A peer may set a flag as soon as it launches, so the flags are zero on all ranks before any of them does. And the
    # first call may be on another stream than this one.
    ctx.synchronize()
    ctx.exchange.all_gather(f"{OPERATION}(): workspace ready", None)
    return _empty_workspace(call, members, flags, counters, staging)


def _empty_workspace(
    call: Call, members: Group, flags: torch.Tensor, counters: torch.Tensor, staging: Staging
) -> FusedWorkspace:
    return FusedWorkspace(
        **call.made_for(members),
        locks=flags,
        counters=counters,
        staging=staging,
        prepared=True,
    )


def _grid(ctx: Iris, problem: Problem, config: FusedConfig) -> tuple[int]:
    """One program for each tile of the output, up to as many as run at once."""
    shards = problem.world_size if problem.gather_dim == 0 else 1
    tiles = -(-(problem.M // shards) // config.block_size_m) * -(-problem.N // config.block_size_n) * shards
    return (min(tiles, config.num_sms or ctx.get_cu_count()),)


def _facts(
    ctx, out, a, b, bias, activation, scales, algorithm, config, workspace, gather_dim, preamble
) -> dict[str, Any]:
    """What must be the same on every rank, by name; A's place, too: peers read it through their own pointer."""
    facts = tensor_facts((("output_tensor", out), ("A_sharded", a), ("B", b), ("bias", bias)))
    facts |= place_facts(ctx, "A_sharded", a) | given_facts(activation, scales, algorithm, config)
    facts["workspace"] = "given" if workspace is not None else "none"
    facts["gather_dim"] = gather_dim
    facts["call"] = "all_gather_matmul_preamble" if preamble else "all_gather_matmul"
    return facts
