"""Collectives that return new tensors, as operators of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from iris.ccl import ReduceOp
from iris.errors import ArgumentError, UnsupportedError
from iris.functional._handles import Entry, entry

_LINEAR = ("sum", "avg")  # reductions that have a gradient


def all_gather(x: torch.Tensor, *, handle: str, dim: int = 0) -> torch.Tensor:
    """The inputs of all ranks, one after the other along ``dim``. Collective over the handle's group.

    Gradient: the sum over ranks of the gradients of this rank's piece.

    Args:
        x: any shape and dtype, the same on every rank.
        handle: from :func:`iris.functional.handle`.
        dim: dimension along which the pieces lie.
    """
    return _all_gather(x, handle, dim)


def all_reduce(x: torch.Tensor, *, handle: str, op: str = "sum") -> torch.Tensor:
    """The inputs of all ranks combined, element by element, on every rank. Collective over the handle's group.

    Gradient: the gradients of all ranks, combined in the same way; for ``"sum"`` and ``"avg"``.

    Args:
        x: any shape, the same on every rank.
        handle: from :func:`iris.functional.handle`.
        op: ``"sum"``, ``"avg"``, ``"product"``, ``"min"`` or ``"max"``.
    """
    return _all_reduce(x, handle, op)


def reduce_scatter(x: torch.Tensor, *, handle: str, op: str = "sum") -> torch.Tensor:
    """This rank's part of the combined inputs, cut along the first dimension. Collective over the handle's group.

    Gradient: the gradients of all ranks, one after the other (divided by their number for ``"avg"``).

    Args:
        x: the same shape on every rank, of at least one dimension; the first is a multiple of the number of ranks.
        handle, op: as for :func:`all_reduce`.
    """
    return _reduce_scatter(x, handle, op)


def all_to_all(x: torch.Tensor, *, handle: str, dim: int = -1) -> torch.Tensor:
    """Pieces along ``dim`` that all ranks have for this one. Collective over the handle's group.

    Gradient: the pieces go back.

    Args:
        x: the same shape on every rank; the size along ``dim`` is a multiple of the number of ranks.
        handle: from :func:`iris.functional.handle`.
        dim: dimension that is cut.
    """
    return _all_to_all(x, handle, dim)


def broadcast(x: torch.Tensor, *, handle: str, src: int = 0) -> torch.Tensor:
    """The input of one rank, on every rank. Collective over the handle's group.

    Gradient: on ``src`` the sum of all ranks' gradients, elsewhere zero.

    Args:
        x: the same shape and dtype on every rank; its values count on ``src``.
        handle: from :func:`iris.functional.handle`.
        src: the rank of the world whose values all get.
    """
    return _broadcast(x, handle, src)


@torch.library.custom_op("iris::all_gather", mutates_args=(), schema="(Tensor x, str handle, int dim) -> Tensor")
def _all_gather(x, handle, dim):
    found = entry(handle)
    out = found.output(_gathered(found, x, dim), x)
    found.ctx.ccl.all_gather(out, x, found.group, dim=dim)
    return found.result(out)


@_all_gather.register_fake
def _(x, handle, dim):
    return x.new_empty(_gathered(entry(handle), x, dim))


def _gathered(found: Entry, x: torch.Tensor, dim: int) -> list[Any]:
    shape = list(x.shape) or [1]
    if not -len(shape) <= dim < len(shape):
        raise ArgumentError(f"dim must be a dimension of the input of shape {tuple(x.shape)}, got {dim}")
    shape[dim] = shape[dim] * found.members.size
    return shape


def _all_gather_backward(ctx, grad):
    part = _reduce_scatter(grad.movedim(ctx.dim, 0), ctx.handle, "sum").movedim(0, ctx.dim)
    return part if ctx.dims else part.reshape(()), None, None


@torch.library.custom_op("iris::all_reduce", mutates_args=(), schema="(Tensor x, str handle, str op) -> Tensor")
def _all_reduce(x, handle, op):
    found = entry(handle)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    found.ctx.ccl.all_reduce(out, x, _meant(op), found.group)
    return out


@_all_reduce.register_fake
def _(x, handle, op):
    _meant(op)
    entry(handle)
    return x.new_empty(x.shape)


def _all_reduce_backward(ctx, grad):
    return _all_reduce(grad, ctx.handle, ctx.op), None, None


@torch.library.custom_op("iris::reduce_scatter", mutates_args=(), schema="(Tensor x, str handle, str op) -> Tensor")
def _reduce_scatter(x, handle, op):
    found = entry(handle)
    out = torch.empty(_part(found, x), dtype=x.dtype, device=x.device)
    # One rank may not work in place, and a part of the size of the input would mean something else.
    found.ctx.ccl.reduce_scatter(out, found.on_heap(x), _meant(op), found.group)
    return out


@_reduce_scatter.register_fake
def _(x, handle, op):
    _meant(op)
    return x.new_empty(_part(entry(handle), x))


def _part(found: Entry, x: torch.Tensor) -> list[Any]:
    if not x.dim() or x.shape[0] % found.members.size:
        raise ArgumentError(
            f"the first dimension of x must be a multiple of {found.members.size} ranks, got shape {tuple(x.shape)}"
        )
    return [x.shape[0] // found.members.size, *x.shape[1:]]


def _reduce_scatter_backward(ctx, grad):
    whole = _all_gather(grad, ctx.handle, 0)
    return whole / entry(ctx.handle).members.size if ctx.op == "avg" else whole, None, None


@torch.library.custom_op("iris::all_to_all", mutates_args=(), schema="(Tensor x, str handle, int dim) -> Tensor")
def _all_to_all(x, handle, dim):
    found = entry(handle)
    out = found.output(x.shape, x)
    found.ctx.ccl.all_to_all(out, x, found.group, dim=dim)
    return found.result(out)


@_all_to_all.register_fake
def _(x, handle, dim):
    entry(handle)
    return x.new_empty(x.shape)


def _all_to_all_backward(ctx, grad):
    return _all_to_all(grad, ctx.handle, ctx.dim), None, None


@torch.library.custom_op("iris::broadcast", mutates_args=(), schema="(Tensor x, str handle, int src) -> Tensor")
def _broadcast(x, handle, src):
    found = entry(handle)
    out = found.output(x.shape, x)
    found.ctx.ccl.broadcast_tensor(out, x, src, found.group)
    return found.result(out)


@_broadcast.register_fake
def _(x, handle, src):
    entry(handle)
    return x.new_empty(x.shape)


def _broadcast_backward(ctx, grad):
    return _sum_at(grad, ctx.handle, ctx.src), None, None


# One operator for all ranks: where a rank did not use the sum, its compiler would drop the call that the others make.
@torch.library.custom_op("iris::sum_at", mutates_args=(), schema="(Tensor x, str handle, int dst) -> Tensor")
def _sum_at(x, handle, dst):
    """The sum of all ranks' inputs on ``dst``, zeros elsewhere."""
    found = entry(handle)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    found.ctx.ccl.reduce(out if found.ctx.get_rank() == dst else None, found.on_heap(x), dst, None, found.group)
    return out


@_sum_at.register_fake
def _(x, handle, dst):
    entry(handle)
    return x.new_empty(x.shape)


def _sum_at_backward(ctx, grad):
    return _broadcast(grad, ctx.handle, ctx.src), None, None


def _keep_dim(ctx, inputs, output):
    x, ctx.handle, ctx.dim = inputs
    ctx.dims = x.dim()


def _keep_op(ctx, inputs, output):
    _, ctx.handle, ctx.op = inputs
    if ctx.needs_input_grad[0] and ctx.op not in _LINEAR:
        raise UnsupportedError(f"op {ctx.op!r} has no gradient; with gradients there are: {', '.join(_LINEAR)}")


def _keep_src(ctx, inputs, output):
    _, ctx.handle, ctx.src = inputs


_all_gather.register_autograd(_all_gather_backward, setup_context=_keep_dim)
_all_reduce.register_autograd(_all_reduce_backward, setup_context=_keep_op)
_reduce_scatter.register_autograd(_reduce_scatter_backward, setup_context=_keep_op)
_all_to_all.register_autograd(_all_to_all_backward, setup_context=_keep_dim)
_broadcast.register_autograd(_broadcast_backward, setup_context=_keep_src)
_sum_at.register_autograd(_sum_at_backward, setup_context=_keep_src)


def _meant(op: str) -> ReduceOp:
    names = [member.name.lower() for member in ReduceOp]
    if op not in names:
        raise ArgumentError(f"op must be one of {', '.join(names)}, got {op!r}")
    return ReduceOp[op.upper()]
