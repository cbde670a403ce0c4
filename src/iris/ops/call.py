"""What calls of all fused operations have in common: checks, what ranks compare, the stream that they run in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from iris.errors import ArgumentError, UnsupportedError
from iris.ops.arguments import Problem
from iris.ops.choice import precision
from iris.ops.workspace import FusedWorkspace
from iris.runtime import checks
from iris.runtime.calls import StreamOrder
from iris.runtime.groups import Group
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris

_FLAG_STRIDE = 32


class FusedCall:
    """A checked combination of arguments and its plan.

    Args:
        ctx: the context.
        problem: what is asked.
        plan: what is done.
        out: name of the output, and the output.
        inputs: the inputs by name, None for those that are not given.
    """

    def __init__(
        self,
        ctx: Iris,
        problem: Problem,
        plan: Plan,
        out: tuple[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor | None],
    ):
        self.problem = problem
        self.plan = plan
        self.precision = precision(ctx.target, problem.a_dtype, plan.config)
        self._out_name = out[0]
        self._out_bytes = checks.span_bytes(out[1])
        self._inputs = [(name, checks.span_bytes(t) if t is not None else 0) for name, t in inputs.items()]

    def check_overlap(self, out: torch.Tensor, *inputs: torch.Tensor | None) -> None:
        """Raise ArgumentError when ``out`` shares memory with an input, which is still read while out is written."""
        if not self._out_bytes:
            return
        start = out.data_ptr()
        end = start + self._out_bytes
        for (name, nbytes), tensor in zip(self._inputs, inputs, strict=True):
            if nbytes and tensor is not None and tensor.data_ptr() < end and start < tensor.data_ptr() + nbytes:
                raise ArgumentError(f"{self._out_name} overlaps {name} in memory; give it memory of its own")

    def require(self, workspace: FusedWorkspace, members: Group) -> None:
        """Raise ArgumentError unless ``workspace`` was made for such a call."""
        workspace.require(**self.made_for(members))

    def made_for(self, members: Group) -> dict[str, Any]:
        """What a workspace for such calls says of itself, by field."""
        return {
            "operation": self.plan.operation,
            "shape": (self.problem.M, self.problem.N, self.problem.K),
            "dtype": self.problem.a_dtype,
            "world_size": members.size,
            "group": members,
            "variant": self.plan.algorithm,
        }


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which breaks the graph under ``torch.compile``: what it does on the host cannot be traced."""
    if not torch.compiler.is_compiling():
        return function
    disabled: Any = torch.compiler.disable(function)
    return disabled


def layout(tensor: Any) -> tuple:
    """What a call depends on of a tensor, besides its values and where it lies."""
    if isinstance(tensor, torch.Tensor):
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16
    return (type(tensor),)


def address(tensor: Any) -> int:
    """Address of a tensor's first element, 0 for anything else."""
    return tensor.data_ptr() if isinstance(tensor, torch.Tensor) else 0


def torch_lacks(problem: Problem) -> str:
    """Why PyTorch cannot multiply these types, wherever that is; empty when it can."""
    return "PyTorch has no int8 matmul with int32 results on every device" if problem.a_dtype == torch.int8 else ""


def torch_refuses(problem: Problem, members: Group, group: Any, ctx: Iris) -> str:
    """Why PyTorch's own operations cannot do this; empty when they can."""
    if torch_lacks(problem) or members.size == 1:
        return torch_lacks(problem)
    if not isinstance(group, dist.ProcessGroup) and members.ranks != tuple(range(ctx.num_ranks)):
        return "a sequence of ranks is no process group of torch.distributed"
    return ""


def tensor_facts(tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """What must be the same of these tensors on every rank, by name: shape and dtype."""
    return {name: (tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else type(t).__name__ for name, t in tensors}


def place_facts(ctx: Iris, name: str, tensor: Any) -> dict[str, Any]:
    """What must be the same of a tensor that peers reach through their own pointer: where it lies, and how."""
    if not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return {}
    offset = tensor.data_ptr() - ctx.heap.base if ctx.is_symmetric(tensor) else "not there"
    return {f"strides of {name}": tensor.stride(), f"offset of {name} in the heap": offset}


def given_facts(activation: Any, scales: tuple[Any, Any], algorithm: Any, config: Any) -> dict[str, Any]:
    """What must be the same on every rank of an epilogue without its bias, and of how it is to be done."""
    facts: dict[str, Any] = {"activation": activation if isinstance(activation, str) else type(activation).__name__}
    for name, scale in zip(("scale_a", "scale_b"), scales, strict=True):
        facts[name] = "given" if scale is not None else "none"
    facts["algorithm"] = algorithm
    facts["config"] = config
    facts["float32 precision"] = torch.get_float32_matmul_precision()
    return facts


def plan_facts(call: Any, tune: Any, allow_fallback: Any) -> dict[str, Any]:
    """What must be the same on every rank of what was chosen, and of what may be. ``call``: None when it is wrong."""
    facts = {"tune": tune, "allow_fallback": allow_fallback}
    return facts if call is None else {**facts, "plan": (call.plan.algorithm, call.plan.config)}


def agreed(
    state: Any,
    key: tuple,
    agree: Callable[[], Any],
    tensors: Iterable[Any],
    workspace: Any,
    members: Group,
    allow_fallback: bool = True,
    tune: Callable[[Any], str] | None = None,
) -> tuple[Any, Any]:
    """The call that the ranks agree on, and the workspace that it runs in.

    Args:
        state: what the context remembers of the operation.
        key: what makes calls the same; when the ranks have agreed on one, they need not again.
        agree: checks the arguments and compares them across the group; makes the call.
        tensors: output and inputs, which must not overlap.
        workspace: the caller's, None for the context's own.
        members: of the group.
        allow_fallback: whether PyTorch's operations may run without the caller having named them.
        tune: finds the best way for a call, after which the choice may be another; gives the reason where nothing was
            tuned. None where the caller does not ask for it.

    Raises:
        UnsupportedError: PyTorch's operations would run and may not. On every rank, before any launch.
    """
    call = state.recall(key)
    if call is None:
        call = agree()
        if tune is not None:
            untuned = tune(call)
            state.recall(key)  # what tuning has let it forget is gone
            if untuned:
                call.plan = replace(call.plan, reason=f"{call.plan.reason}; {untuned}")
            else:
                call = agree()
        state.remember(key, call)
    if not allow_fallback and call.plan.algorithm == "torch" and call.plan.source != "user":
        raise UnsupportedError(
            f"{call.plan.operation}: allow_fallback=False, and PyTorch's operations would run: {call.plan.reason}"
        )
    call.check_overlap(*tensors)
    if workspace is None:
        workspace = state.workspace(call, members)
    else:
        call.require(workspace, members)
    if workspace.plan is not call.plan:
        state.report(call.plan)
        workspace.plan = call.plan
    return call, workspace


def new_pair_flags(ctx: Iris, site: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Flags, on the heap, and counters for :mod:`iris.x.turn`, all zero. Collective over the world.

    A peer may set a flag as soon as it launches, so the ranks have to meet before any of them does.
    """
    flags = ctx.heap.allocate(2 * ctx.num_ranks * _FLAG_STRIDE, torch.int32, site=f"{site} flags").zero_()
    return flags, torch.zeros(ctx.num_ranks + 2, dtype=torch.int32, device=ctx.get_device())


def issue_in_order(
    ctx: Iris, workspace: FusedWorkspace, order: StreamOrder | None, async_op: bool, issue: Callable[[], None]
) -> None:
    """Issue a call to the current stream, or with ``async_op`` to the one beside it.

    Args:
        ctx: the context.
        workspace: what the call works in.
        order: of the calls that share the context's flags; None for a workspace with flags of its own.
        async_op: whether the current stream goes on; ``workspace.wait()`` then orders it after the call.
        issue: launches, in what is the current stream then.
    """
    stream = ctx.current_stream()
    if async_op:
        side = ctx.side_stream()
        side.wait_stream(stream)
        stream = side
    elif order is None:
        workspace.wait()
    with ctx.use_stream(stream) if async_op else nullcontext():
        if order is not None:
            order.follow_current()
        issue()
    if async_op:
        workspace._finish = lambda: ctx.current_stream().wait_stream(stream)


def float32_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in float32; of float64 in float64."""
    if a.dtype == torch.float64:
        return torch.matmul(a, b)
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.matmul(a.to(torch.float32), b.to(torch.float32))
