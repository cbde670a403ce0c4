"""What a call of matmul + all-gather comes to: checks, agreement, plan, workspace, and what it launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from iris.errors import ArgumentError, IrisError, UnsupportedError
from iris.ops import arguments
from iris.ops._candidates import tuner
from iris.ops._matmul_all_gather_kernel import QUEUE_WORDS, matmul_all_gather_kernel
from iris.ops._matmul_reduce_call import Asked
from iris.ops.arguments import ACTIVATIONS, Problem
from iris.ops.call import (
    FusedCall,
    address,
    agreed,
    float32_matmul,
    given_facts,
    issue_in_order,
    layout,
    new_pair_flags,
    outside_of_graphs,
    place_facts,
    plan_facts,
    tensor_facts,
    torch_refuses,
)
from iris.ops.choice import check_fits, fitted, float64_plan, known
from iris.ops.config import FusedConfig, HbmBufferConfig
from iris.ops.workspace import FusedWorkspace
from iris.runtime import checks, launch
from iris.runtime.calls import Calls
from iris.runtime.groups import Group
from iris.tuning import Plan
from iris.tuning.selection import Selection
from iris.x.operands import describe_a, describe_b, takes_descriptors

if TYPE_CHECKING:
    from iris.runtime.context import Iris

OPERATION = "matmul_all_gather"
ALGORITHMS = ("torch", "fused")
_INPUTS = ("A", "B", "bias", "scale_a", "scale_b")
_KERNEL = launch.kernel_id(f"{OPERATION}/fused")
# PyTorch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Workspace(FusedWorkspace):
    """A :class:`FusedWorkspace` of this operation.

    Attributes:
        queue: int32 words of the kernel, in ordinary memory.
    """

    queue: torch.Tensor | None = None

    def clear(self) -> None:
        """Mark as not prepared and give the buffers back."""
        super().clear()
        self.queue = None


class Call(FusedCall):
    """A checked combination of arguments, its plan, and what every launch of it needs.

    Attributes:
        grid: number of programs. descriptors: whether operands come by tensor descriptors.
    """

    def __init__(self, ctx: Iris, problem: Problem, plan: Plan, out, a, b, bias, scales):
        inputs: dict[str, Any] = dict(zip(_INPUTS, (a, b, bias, *scales), strict=True))
        super().__init__(ctx, problem, plan, ("output", out), inputs)
        self.grid, self.descriptors = 0, False
        if plan.config is not None:
            tiles = _ceil(a.shape[0], plan.config.block_size_m) * _ceil(problem.N, plan.config.block_size_n)
            self.grid = min(tiles, plan.config.num_sms or ctx.get_cu_count())
            # Without matrix units operands come from shared memory element by element, not as descriptors bring them.
            whole = a.dtype == torch.float32 and self.precision != "tf32"
            self.descriptors = takes_descriptors(ctx.target, a, b) and not whole


class State(Calls[Call]):
    """What a context remembers of this operation: agreed calls, workspaces, reported plans."""

    def __init__(self, ctx: Iris):
        super().__init__(ctx)
        self.queue = _new_queue(ctx)
        self._workspaces: dict[tuple, Workspace] = {}

    @property
    def order(self) -> Any:
        """The order of the calls that use the context's flags, those of other operations among them."""
        return self._ctx.service("pair_order")

    def agree(self, members: Group, asked: Asked, out, a, b, bias, workspace, preamble: bool = False) -> Call:
        """Check the arguments and compare them across the group. Collective over the group.

        Raises:
            IrisError: what is wrong here.
            RankMismatch: what is wrong on another rank, or what differs.
        """
        error: IrisError | None = None
        call = None
        try:
            call = checked(self._ctx, members, asked, out, a, b, bias)
            call.check_overlap(out, a, b, bias, *asked.scales)
            if workspace is not None:
                call.require(workspace, members)
        except IrisError as caught:
            error = caught
        facts = tensor_facts((("output", out), ("A", a), ("B", b), ("bias", bias)))
        if asked.algorithm != "torch":
            facts |= place_facts(self._ctx, "output", out)
        facts |= given_facts(asked.activation, asked.scales, asked.algorithm, asked.config)
        facts |= plan_facts(call, asked.tune, asked.allow_fallback)
        facts["workspace"] = "given" if workspace is not None else "none"
        facts["call"] = f"{OPERATION}_preamble" if preamble else OPERATION
        self._ctx.agreement.reach(OPERATION, members, facts, error)
        assert call is not None  # reach() raises the error
        return call

    def workspace(self, call: Call, members: Group) -> Workspace:
        """The workspace for such calls over the context's own flags."""
        problem = call.problem
        key = (problem.M, problem.N, problem.K, problem.a_dtype, members.ranks, call.plan.algorithm)
        if key not in self._workspaces:
            flags, counters = self._ctx.pair_flags, self._ctx.pair_counters
            self._workspaces[key] = _workspace_over(call, members, flags, counters, self.queue)
        return self._workspaces[key]


def matmul_all_gather(ctx: Iris, asked: Asked, out, a, b, bias, async_op: bool, workspace) -> FusedWorkspace:
    """The body of :func:`iris.ops.matmul_all_gather.matmul_all_gather`."""
    return outside_of_graphs(_matmul_all_gather)(ctx, asked, out, a, b, bias, async_op, workspace)


def prepare(ctx: Iris, asked: Asked, out: Any, a: Any, b: Any, bias: Any) -> FusedWorkspace:
    """The body of the preamble."""
    members = ctx.resolve_group(asked.group)
    call = _state(ctx).agree(members, asked, out, a, b, bias, None, preamble=True)
    flags, counters = new_pair_flags(ctx, OPERATION)
    # A peer may set a flag as soon as it launches, so the flags are zero on all ranks before any of them does. And the
    # first call may be on another stream than this one.
    queue = _new_queue(ctx)
    ctx.synchronize()
    ctx.exchange.all_gather(f"{OPERATION}(): workspace ready", None)
    return _workspace_over(call, members, flags, counters, queue)


def checked(ctx: Iris, members: Group, asked: Asked, out: Any, a: Any, b: Any, bias: Any) -> Call:
    """The call that the arguments make. Local.

    Raises:
        ArgumentError, NotSymmetricError, DeviceMismatch, UnsupportedError: says what was wrong, what was given and what
            is possible.
    """
    problem = _check(ctx, members, asked, out, a, b, bias)
    if asked.config is not None:
        if not isinstance(asked.config, FusedConfig) or isinstance(asked.config, HbmBufferConfig):
            raise ArgumentError(f"config must be a FusedConfig or None, got {type(asked.config).__name__}")
        asked.config.validate(members.size)
    reachable = members.size == 1 or not out.numel() or ctx.is_symmetric(out)
    plan = _choose(ctx, members, problem, asked, torch_refuses(problem, members, asked.group, ctx), reachable)
    if plan.algorithm == "fused" and not reachable:
        checks.check_symmetric(ctx, "output", out, "written")
    return Call(ctx, problem, plan, out, a, b, bias, asked.scales)


def _check(ctx: Iris, members: Group, asked: Asked, out: Any, a: Any, b: Any, bias: Any) -> Problem:
    for name, tensor in (("output", out), ("A", a), ("B", b)):
        checks.check_matrix(ctx, name, tensor)
    (rows, depth), (K, N) = a.shape, b.shape
    if depth != K:
        raise ArgumentError(
            f"A must be (M / world, K), this rank's rows, and B (K, N); got A {tuple(a.shape)} and B {tuple(b.shape)}"
        )
    M = rows * members.size
    if tuple(out.shape) != (M, N):
        raise ArgumentError(
            f"output must have shape ({M}, {N}), the {rows} rows of each of {members.size} ranks; "
            f"got {tuple(out.shape)}"
        )
    arguments.check_dtypes(ctx.target, a, b, out)
    arguments.check_bias(ctx, bias, rows, N, out.dtype)
    arguments.check_activation(asked.activation, out.dtype)
    scaled = arguments.check_scales(ctx, *asked.scales, a.dtype)
    return Problem(
        M, N, K, a.dtype, b.dtype, out.dtype, members.size, None, tuple(bias.shape) if bias is not None else None,
        arguments.letter(a) + arguments.letter(b), asked.activation, scaled,
        all(map(arguments.aligned, (a, b, out))),
    )  # fmt: skip


def _choose(ctx: Iris, members: Group, problem: Problem, asked: Asked, refusal: str, reachable: bool) -> Plan:
    """The plan. ``refusal``: why PyTorch cannot do it, or empty; ``reachable``: whether peers can write the output."""
    algorithm, config = asked.algorithm, asked.config
    if algorithm not in (None, *ALGORITHMS):
        raise ArgumentError(f"algorithm {algorithm!r} is not known for {OPERATION}; possible: {', '.join(ALGORITHMS)}")
    target = ctx.target
    wide = float64_plan(OPERATION, ALGORITHMS, problem, algorithm, config, refusal)
    if wide is not None:
        return wide

    def plan(taken: str, source: str, why: str) -> Plan:
        if taken == "torch":
            return Plan(OPERATION, taken, None, source, why, str(problem))
        # Tiles are of the own rows; the problem has those of all ranks.
        tiles = config or fitted(target, replace(problem, M=problem.M // problem.world_size))
        check_fits(target, tiles, problem)
        return Plan(OPERATION, taken, tiles, source, why, str(problem))

    if algorithm == "torch":
        if config is not None:
            raise ArgumentError("algorithm 'torch' runs PyTorch's operations and takes no config")
        if refusal:
            raise UnsupportedError(f"algorithm 'torch' cannot do this: {refusal}; 'fused' can")
        return plan("torch", "user", "the caller named it")
    if algorithm is not None:
        return plan("fused", "user", "the caller named it")
    if config is not None:
        return plan("fused", "user", "the caller gave a configuration, which is for the kernel")

    def selected(found: Selection) -> FusedConfig:
        usual = fitted(target, replace(problem, M=problem.M // problem.world_size))
        return replace(usual, **found.params) if found.kind == "rule" else FusedConfig(**found.params)

    found = known(ctx, OPERATION, problem, members, bool(refusal), selected)
    if found is not None and (reachable or found.algorithm == "torch"):
        return found
    if refusal:
        return plan("fused", "heuristic", refusal)
    if not reachable:
        reason = "the output is not on the symmetric heap, where other ranks could write it, so PyTorch gathers"
        return plan("torch", "fallback", reason)
    if not target.compiled:
        return plan("fused", "heuristic", "kernels run under the interpreter, so results matter and speed does not")
    if problem.world_size == 1:
        return plan("torch", "fallback", "one rank has nothing to gather, so PyTorch's matmul runs")
    reason = "neither the kernel nor the cost model of it was measured yet, so PyTorch multiplies and gathers"
    return plan("torch", "fallback", reason)


def _matmul_all_gather(ctx: Iris, asked: Asked, out, a, b, bias, async_op, workspace) -> FusedWorkspace:
    members = ctx.resolve_group(asked.group)
    state = _state(ctx)
    key = (
        *layout(out), *layout(a), *layout(b), *layout(bias), asked.activation, *layout(asked.scales[0]),
        *layout(asked.scales[1]), address(out), asked.algorithm, asked.config, workspace is None, members.ranks,
        type(asked.group), torch.get_float32_matmul_precision(), asked.tune, asked.allow_fallback,
    )  # fmt: skip

    def tried(algorithm: str, config: Any) -> None:
        one = replace(asked, algorithm=algorithm, config=config, tune=False, allow_fallback=True)
        _matmul_all_gather(ctx, one, out, a, b, bias, False, None)

    call, used = agreed(
        state, key, lambda: state.agree(members, asked, out, a, b, bias, workspace),
        (out, a, b, bias, *asked.scales), workspace, members, asked.allow_fallback,
        tuner(ctx, members, asked.algorithm, asked.config, workspace, asked.group, tried, out) if asked.tune else None,
    )  # fmt: skip
    if out.numel():
        issue_in_order(
            ctx, used, state.order if used.locks is ctx.pair_flags else None, async_op,
            lambda: _issue(ctx, call, used, out, a, b, bias, asked, members),
        )  # fmt: skip
    return used


def _issue(ctx, call: Call, workspace, out, a, b, bias, asked: Asked, members: Group) -> None:
    if call.plan.algorithm == "torch":
        _run_torch(call.problem, out, a, b, bias, asked)
    else:
        _run_kernel(ctx, call, workspace, out, a, b, bias, asked.scales, members)


def _run_kernel(ctx, call: Call, workspace, out, a, b, bias, scales, members: Group) -> None:
    problem, config = call.problem, call.plan.config
    wide = bias.expand(a.shape[0], problem.N) if bias is not None else out
    scale_a, scale_b = scales if problem.scaled else (out, out)
    descriptors = (None, None)
    if call.descriptors:
        descriptors = (
            describe_a(a, config.block_size_m, config.block_size_k),
            describe_b(b, config.block_size_n, config.block_size_k),
        )
    launch.start(
        ctx, matmul_all_gather_kernel, (call.grid,),
        *descriptors, a, b, wide, scale_a, scale_b, out, a.shape[0], problem.N, problem.K,
        *a.stride(), *b.stride(), *(wide.stride() if bias is not None else (0, 0)), *out.stride(),
        workspace.queue, workspace.locks, workspace.counters, ctx.group_members(members), members.index,
        ctx.get_device_context(),
        WORLD=members.size,
        BLOCK_M=config.block_size_m,
        BLOCK_N=config.block_size_n,
        BLOCK_K=config.block_size_k,
        GROUP_M=config.group_size_m,
        DESCRIPTORS=call.descriptors,
        B_TRANSPOSED=b.stride(1) != 1,
        HAS_BIAS=bias is not None,
        HAS_SCALES=problem.scaled,
        ACTIVATION=problem.activation,
        PRECISION=call.precision,
        TRACING=ctx.tracing.enabled,
        KERNEL=_KERNEL,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def _run_torch(problem: Problem, out, a, b, bias, asked: Asked) -> None:
    if a.dtype in checks.FP8:
        # Both fp8 formats are exact in each of the output types.
        a, b = a.to(out.dtype), b.to(out.dtype)
    plain = problem.activation == "none" and not problem.scaled and a.dtype == out.dtype
    if plain and bias is None:
        mine = torch.matmul(a, b)
    elif plain and bias is not None and bias.dtype == out.dtype:
        mine = torch.addmm(bias, a, b)
    else:
        # In float32, so that the result is rounded once, at the end.
        product = float32_matmul(a, b)
        if problem.scaled:
            product *= (asked.scales[0] * asked.scales[1]).reshape(())
        if bias is not None:
            product += bias
        mine = ACTIVATIONS[problem.activation](product).to(out.dtype)
    if problem.world_size == 1:
        out.copy_(mine)
        return
    whole = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    # As bytes: gloo and NCCL do not carry every dtype.
    to, source = (t.view(torch.uint8).flatten() for t in (whole, mine.contiguous()))
    _all_gather(to, source, group=asked.group if isinstance(asked.group, dist.ProcessGroup) else None)
    if whole is not out:
        out.copy_(whole)


def _workspace_over(call: Call, members: Group, flags, counters, queue) -> Workspace:
    return Workspace(**call.made_for(members), locks=flags, counters=counters, queue=queue, prepared=True)


def _new_queue(ctx: Iris) -> torch.Tensor:
    return torch.zeros(QUEUE_WORDS, dtype=torch.int32, device=ctx.get_device())


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit)


def _state(ctx: Iris) -> State:
    return ctx.service("matmul_all_gather_state")
