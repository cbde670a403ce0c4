"""How every collective runs: check, agree with the other ranks, remember, put in order with the stream, launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from iris.errors import ArgumentError, CaptureError, IrisError
from iris.runtime import checks
from iris.runtime.calls import Calls
from iris.runtime.channels import Channels
from iris.runtime.groups import Group
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris


@dataclass
class Work:
    """What a collective returns.

    Attributes:
        plan: what ran and why.
    """

    plan: Plan | None = None
    _event: Any = field(default=None, repr=False)
    _ctx: Any = field(default=None, repr=False)

    def wait(self) -> None:
        """Order the current stream after a call with ``async_op=True``; nothing to do after other calls."""
        if self._event is not None:
            event, self._event = self._event, None
            self._ctx.current_stream().wait_event(event)


@dataclass
class Call:
    """A checked combination of arguments, and what every launch of it needs.

    Attributes:
        plan: the plan.
        issue: launches it in the current stream, given the channels and the tensors; None when there is nothing to do.
        touched: names of the tensors that peers touch, whose place on the heap must be the same on every rank.
        verify: a further comparison of the ranks, None for none. It takes whether the group has just been compared,
            which is the same on every rank, and may compare the whole group then. Calls with one differ in their plans.
        reported: whether the plan has been logged.
    """

    plan: Plan
    issue: Callable[..., None] | None
    touched: tuple[str, ...] = ()
    verify: Callable[[bool], None] | None = None
    reported: bool = False


@dataclass(frozen=True)
class Request:
    """A call as the caller made it.

    Attributes:
        ctx: the context.
        operation: name of the operation.
        members: the group, as ranks.
        group: the group, as the caller gave it.
        tensors: the tensors by argument name, None where the caller may leave one out.
        facts: what else must be the same on every rank, by name.
        shared: names of the tensors whose shape and dtype must be the same on every rank.
    """

    ctx: Iris
    operation: str
    members: Group
    group: Any
    tensors: dict[str, Any]
    facts: dict[str, Any]
    shared: tuple[str, ...]


def run(
    ctx: Iris,
    given: tuple[Any, ...],
    tensors: tuple[Any, ...],
    request: Callable[[], Request],
    prepare: Callable[[Request], Call],
    *,
    async_op: bool,
    work: Work,
    channels: Channels | None = None,
    tune: bool = False,
) -> None:
    """Run a collective: in the current stream, or with ``async_op`` beside it.

    Args:
        ctx: the context.
        given: the operation's name, the group and the configuration as they were given, and everything else that a call
            depends on.
        tensors: output and input.
        request: makes the :class:`Request`; only called when the ranks have not agreed on such a call.
        prepare: checks the request and makes a :class:`Call` of it, without launching anything; local.
        async_op: return at launch; ``work.wait()`` orders the current stream after it.
        work: the handle to fill in.
        channels: those to use, None for the context's own.
        tune: find the best algorithm first, when that has not been done for such a call.

    Raises:
        IrisError: what ``prepare`` raises, before any launch.
        RankMismatch: on the other ranks then, and on all ranks whose arguments differ.
        CaptureError: the first call of a combination of arguments, while a graph is captured.
    """
    known: Calls[Call] = ctx.service("ccl_calls")
    key = (*given, *map(type, given), tune, *_layouts(ctx, *tensors))
    try:
        call = known.recall(key)
    except TypeError:  # a value that cannot be hashed: a list of ranks, or no argument that a call can be made with
        key = (*map(repr, given), tune, *_layouts(ctx, *tensors))
        call = known.recall(key)
    if call is None:
        if ctx.capturing():
            raise CaptureError(
                f"{given[0]}: the ranks compare the arguments of the first such call, which a graph cannot capture; "
                "make the call once before the capture"
            )
        call = agree(request(), prepare, tune)
        if tune:
            untuned = _tune(ctx, given, tensors, request(), prepare, call, channels)
            known.recall(key)  # what tuning has let it forget is gone
            if untuned:
                call.plan = replace(call.plan, reason=f"{call.plan.reason}; {untuned}")
            else:
                call = agree(request(), prepare, tune)
        known.remember(key, call)
    if not call.reported:
        known.report(call.plan)
        call.reported = True
    work.plan = call.plan
    if call.issue is None:
        return
    channels = channels or ctx.channels
    if not async_op:
        channels.order.follow_current()
        call.issue(channels, *tensors)
        return
    side = ctx.side_stream()
    side.wait_stream(ctx.current_stream())
    with ctx.use_stream(side):
        channels.order.follow_current()
        call.issue(channels, *tensors)
    work._event, work._ctx = side.record_event(), ctx


def _tune(
    ctx: Iris,
    given: tuple[Any, ...],
    tensors: tuple[Any, ...],
    request: Request,
    prepare: Callable[[Request], Call],
    call: Call,
    channels: Channels | None,
) -> str:
    """Find the best algorithm for a call that the ranks have agreed on; the reason where nothing was tuned."""
    from iris.ccl._candidates import tune

    def run_with(config: Any) -> None:
        facts = {**request.facts, "config": config}
        one = replace(request, facts=facts)
        run(
            ctx, (*given[:2], config, *given[3:]), tensors, lambda: one, prepare,
            async_op=False, work=Work(), channels=channels,
        )  # fmt: skip

    return tune(request, prepare, call, run_with)


def agree(request: Request, prepare: Callable[[Request], Call], tune: bool = False) -> Call:
    """Prepare a call and compare it across the group. Collective over the group.

    ``tune``: whether the caller wants it to be tuned, which must be the same on every rank, too.

    Raises:
        IrisError: what is wrong here.
        RankMismatch: what is wrong on another rank, or what differs.
    """
    ctx = request.ctx
    error: IrisError | None = None
    call = None
    try:
        call = prepare(request)
    except IrisError as caught:
        error = caught
    facts: dict[str, Any] = {}
    for name in request.shared:
        tensor = request.tensors[name]
        known = isinstance(tensor, torch.Tensor)
        facts[name] = (tuple(tensor.shape), tensor.dtype) if known else type(tensor).__name__
    facts |= _facts(request) | {"tune": tune}
    if call is not None:
        if call.verify is None:
            facts["algorithm"] = call.plan.algorithm
            facts["programs"] = call.plan.config
        for name in call.touched:
            tensor = request.tensors[name]
            if not tensor.numel():
                continue  # nothing is launched, and it may lie anywhere
            facts[f"strides of {name}"] = tensor.stride()
            facts[f"offset of {name} in the heap"] = tensor.data_ptr() - ctx.heap.base
    compared = not ctx.agreement.known(request.operation, request.members, facts)
    ctx.agreement.reach(request.operation, request.members, facts, error)
    assert call is not None  # reach() raises the error
    if call.verify is not None:
        call.verify(compared)
    return call


def relation(*tensors: Any) -> str:
    """How the first tensor lies to the second in memory: apart, same (equal first elements), or overlapping."""
    if len(tensors) < 2 or not all(isinstance(t, torch.Tensor) for t in tensors[:2]):
        return "apart"
    one, other = tensors[:2]
    if one.data_ptr() == other.data_ptr():
        return "same" if one.numel() and other.numel() else "apart"
    return "overlapping" if checks.overlap(one, other) else "apart"


def check_alias(request: Request, allowed: bool, what: str) -> None:
    """Raise ArgumentError when output and input overlap in another way than the operation allows.

    Args:
        request: the call.
        allowed: whether the tensors lie to each other as the operation allows.
        what: what it allows, in words.
    """
    if not allowed and relation(*request.tensors.values()) != "apart":
        names = " and ".join(request.tensors)
        raise ArgumentError(f"{request.operation}: {names} overlap in memory; {what}")


def _facts(request: Request) -> dict[str, Any]:
    # What cannot be hashed is no argument that a call can be made with; it is refused, and the others learn of it.
    return {name: repr(fact) if type(fact).__hash__ is None else fact for name, fact in request.facts.items()}


def _layouts(ctx: Iris, out: Any, inp: Any) -> tuple:
    """What tells apart calls that differ in their tensors."""
    one, other = _layout(ctx, out), _layout(ctx, inp)
    # On the heap the addresses are part of the layouts.
    return one, other, relation(out, inp) if one[-1] < 0 and other[-1] < 0 else ""


def _layout(ctx: Iris, tensor: Any) -> tuple:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor), 0
    address = tensor.data_ptr()
    offset = address - ctx.heap.base
    # Off the heap only the alignment counts, which decides how kernels are compiled.
    place = offset if 0 <= offset < ctx.heap.region.nbytes else -1 - address % 16
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, place


def alone(operation: str, problem: str) -> Plan:
    """The plan of a group of one rank."""
    return Plan(operation, "copy", None, "heuristic", "one rank has nobody to meet", problem)


def copy_alone(channels: Channels, out: torch.Tensor, inp: torch.Tensor) -> None:
    """What a collective of one rank comes to."""
    if out.data_ptr() != inp.data_ptr():
        out.copy_(inp.view(out.shape) if inp.is_contiguous() else inp.reshape(out.shape))
