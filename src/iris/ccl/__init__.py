"""Collectives on tensors, for any group of ranks: ``ctx.ccl.all_reduce(output_tensor, input_tensor)`` and so on.

Each has a module form, which takes the context third: ``iris.ccl.all_reduce.all_reduce(output, input, ctx)``.
All of them meet their peers inside the stream, before they touch a peer's memory and after; a program needs no barrier
before or after them, and they can be captured in a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iris.ccl import all_gather as _all_gather
from iris.ccl import all_reduce as _all_reduce
from iris.ccl import all_to_all as _all_to_all
from iris.ccl import broadcast as _broadcast
from iris.ccl import gather as _gather
from iris.ccl import point_to_point as _point_to_point
from iris.ccl import reduce as _reduce
from iris.ccl import reduce_scatter as _reduce_scatter
from iris.ccl import scatter as _scatter
from iris.ccl._calls import Work
from iris.ccl.all_reduce import AllReduceWorkspace
from iris.ccl.config import Config, ReduceOp
from iris.errors import ArgumentError
from iris.tuning import Plan

if TYPE_CHECKING:
    import torch

    from iris.runtime.context import Iris

__all__ = ["AllReduceWorkspace", "CclNamespace", "Config", "Plan", "ReduceOp", "Work"]

# What ``explain`` knows, by the name of the method.
_EXPLAINED: dict[str, Any] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "broadcast_tensor": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
}


class CclNamespace:
    """The collectives of one context; ``ctx.ccl``. Each method's module form says all about it."""

    def __init__(self, ctx: Iris):
        self._ctx = ctx

    def all_gather(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
        config: Config | None = None,
        *,
        dim: int = 0,
        tune: bool = False,
    ) -> Work:
        """See :func:`iris.ccl.all_gather.all_gather`."""
        return _all_gather.all_gather(
            output_tensor, input_tensor, self._ctx, group, async_op, config, dim=dim, tune=tune
        )

    def all_to_all(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
        config: Config | None = None,
        *,
        dim: int = -1,
        tune: bool = False,
    ) -> Work:
        """See :func:`iris.ccl.all_to_all.all_to_all`."""
        return _all_to_all.all_to_all(
            output_tensor, input_tensor, self._ctx, group, async_op, config, dim=dim, tune=tune
        )

    def all_reduce_preamble(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        config: Config | None = None,
        workspace: AllReduceWorkspace | None = None,
    ) -> AllReduceWorkspace:
        """See :func:`iris.ccl.all_reduce.all_reduce_preamble`."""
        return _all_reduce.all_reduce_preamble(output_tensor, input_tensor, self._ctx, config, workspace)

    def all_reduce(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: Any = None,
        group: Any = None,
        async_op: bool = False,
        config: Config | None = None,
        workspace: AllReduceWorkspace | None = None,
        *,
        tune: bool = False,
    ) -> AllReduceWorkspace:
        """See :func:`iris.ccl.all_reduce.all_reduce`."""
        return _all_reduce.all_reduce(
            output_tensor, input_tensor, self._ctx, op, group, async_op, config, workspace, tune=tune
        )

    def reduce_scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: Any = None,
        group: Any = None,
        async_op: bool = False,
        config: Config | None = None,
        *,
        tune: bool = False,
    ) -> Work:
        """See :func:`iris.ccl.reduce_scatter.reduce_scatter`."""
        return _reduce_scatter.reduce_scatter(
            output_tensor, input_tensor, self._ctx, op, group, async_op, config, tune=tune
        )

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int = 0,
        group: Any = None,
        async_op: bool = False,
        config: Config | None = None,
        *,
        tune: bool = False,
    ) -> Work:
        """See :func:`iris.ccl.broadcast.broadcast`."""
        return _broadcast.broadcast(tensor, self._ctx, src, group, async_op, config, tune=tune)

    def broadcast_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor | None,
        src: int = 0,
        group: Any = None,
        async_op: bool = False,
        config: Config | None = None,
        *,
        tune: bool = False,
    ) -> Work:
        """See :func:`iris.ccl.broadcast.broadcast_tensor`."""
        return _broadcast.broadcast_tensor(
            output_tensor, input_tensor, self._ctx, src, group, async_op, config, tune=tune
        )

    def reduce(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor: torch.Tensor,
        dst: int = 0,
        op: Any = None,
        group: Any = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work:
        """See :func:`iris.ccl.reduce.reduce`."""
        return _reduce.reduce(output_tensor, input_tensor, self._ctx, dst, op, group, async_op, config)

    def gather(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor: torch.Tensor,
        dst: int = 0,
        group: Any = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work:
        """See :func:`iris.ccl.gather.gather`."""
        return _gather.gather(output_tensor, input_tensor, self._ctx, dst, group, async_op, config)

    def scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor | None,
        src: int = 0,
        group: Any = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work:
        """See :func:`iris.ccl.scatter.scatter`."""
        return _scatter.scatter(output_tensor, input_tensor, self._ctx, src, group, async_op, config)

    def send(
        self,
        tensor: torch.Tensor,
        dst: int,
        group: Any = None,
        tag: int = 0,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work:
        """See :func:`iris.ccl.point_to_point.send`."""
        return _point_to_point.send(tensor, self._ctx, dst, group, tag, async_op, config)

    def recv(
        self,
        tensor: torch.Tensor,
        src: int,
        group: Any = None,
        tag: int = 0,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work:
        """See :func:`iris.ccl.point_to_point.recv`."""
        return _point_to_point.recv(tensor, self._ctx, src, group, tag, async_op, config)

    def sendrecv(
        self,
        send_tensor: torch.Tensor,
        recv_tensor: torch.Tensor,
        dst: int,
        src: int,
        group: Any = None,
        tag: int = 0,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work:
        """See :func:`iris.ccl.point_to_point.sendrecv`."""
        return _point_to_point.sendrecv(send_tensor, recv_tensor, self._ctx, dst, src, group, tag, async_op, config)

    def barrier(self, group: Any = None) -> None:
        """Barrier in the stream; see :meth:`iris.Iris.device_barrier`."""
        self._ctx.device_barrier(group)

    def explain(self, operation: str, *args: Any, **kwargs: Any) -> Plan:
        """The plan that a collective would follow with these arguments; runs nothing. Local.

        Raises:
            ArgumentError: there is no such collective, or its arguments are wrong.
        """
        if operation not in _EXPLAINED:
            raise ArgumentError(f"there is no plan for {operation!r}; possible: {', '.join(_EXPLAINED)}")
        return _EXPLAINED[operation].explain(self._ctx, *args, **kwargs)
