"""Fused operations that return new tensors, as operators of PyTorch, with gradients made of each other.

With A and B of every rank, C the result, dX the derivative of the sum of all ranks' losses with respect to a rank's X,
and sums over ranks:

``all_gather_matmul``, C = gather(A) @ B: dA = this rank's part of sum dC @ B^T, a matmul_reduce_scatter;
    dB = gather(A)^T @ dC, an all_gather_matmul of A^T, which is sharded along the other dimension.
``matmul_reduce_scatter``, C = this rank's rows of sum A @ B: dA = gather(dC) @ B^T, an all_gather_matmul;
    dB = A^T @ gather(dC), the transpose of an all_gather_matmul of dC^T.
``matmul_all_reduce``, C = sum A @ B: dA = (sum dC) @ B^T, dB = A^T @ (sum dC).
``matmul_all_gather``, C = rows A @ B of all ranks: with G, this rank's rows of sum dC, dA = G @ B^T, dB = A^T @ G.

A bias is a rank's own and gets the gradient of what it was added to: the own result, and with matmul_all_gather the own
rows of every rank's.
"""

from __future__ import annotations

from typing import Any

import torch

from iris.errors import ArgumentError
from iris.functional._collectives import _all_reduce, _reduce_scatter
from iris.functional._handles import Entry, entry, staged
from iris.runtime.checks import FP8

_SCHEMA = "(Tensor x, Tensor w, Tensor? bias, str handle, str? algorithm) -> Tensor"


def all_gather_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    handle: str,
    gather_dim: int = 1,
    algorithm: str | None = None,
) -> torch.Tensor:
    """``gather(x) @ w + bias``, (M, N) on every rank. Collective over the handle's group.

    Args:
        x: this rank's part, (M, K/world) or with ``gather_dim=0`` (M/world, K).
        w: (K, N) of x's dtype.
        bias: (N,), or two-dimensional and broadcast to (M, N); None for none.
        handle: from :func:`iris.functional.handle`.
        gather_dim: 1 when x is sharded along K, 0 when along M.
        algorithm: of :func:`iris.ops.all_gather_matmul.all_gather_matmul`; None lets the operation choose. Gradients
            always choose.

    The result has x's dtype (int8: int32, fp8: float16). float64 is computed by PyTorch's operations.

    Raises:
        ArgumentError, DeviceMismatch, UnsupportedError, RankMismatch: as the operation.
    """
    return _all_gather_matmul(x, w, bias, handle, gather_dim, algorithm)


def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    handle: str,
    algorithm: str | None = None,
) -> torch.Tensor:
    """``sum over ranks of x @ w + bias``, (M, N) on every rank. Collective over the handle's group.

    Args:
        x: (M, K), this rank's.
        w: (K, N), this rank's, of x's dtype.
        bias: (N,), or two-dimensional and broadcast to (M, N); None for none. Added once: the same on every rank.
        handle, algorithm: as for :func:`all_gather_matmul`. Groups smaller than the world take ``"torch"``.

    A rank's bias gets the gradient of the rank's own result; the sum over ranks is that of the bias that all share.
    """
    return _matmul_all_reduce(x, w, bias, handle, algorithm)


def matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    handle: str,
    algorithm: str | None = None,
) -> torch.Tensor:
    """This rank's rows of ``sum over ranks of x @ w + bias``, divided as ``torch.chunk`` does. Collective over the
    handle's group.

    The arguments are those of :func:`matmul_all_reduce`; a two-dimensional bias is given as a whole.
    """
    return _matmul_reduce_scatter(x, w, bias, handle, algorithm)


def matmul_all_gather(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    handle: str,
    algorithm: str | None = None,
) -> torch.Tensor:
    """The rows ``x @ w + bias`` of all ranks, (M * world, N) on every rank. Collective over the handle's group.

    Args:
        x: (M, K), this rank's rows; M is the same on every rank.
        w: (K, N), this rank's, of x's dtype.
        bias: (N,), or two-dimensional and broadcast to (M, N), this rank's; None for none.
        handle, algorithm: as for :func:`all_gather_matmul`.
    """
    return _matmul_all_gather(x, w, bias, handle, algorithm)


@torch.library.custom_op(
    "iris::all_gather_matmul",
    mutates_args=(),
    schema="(Tensor x, Tensor w, Tensor? bias, str handle, int gather_dim, str? algorithm) -> Tensor",
)
def _all_gather_matmul(x, w, bias, handle, gather_dim, algorithm):
    found = entry(handle)
    out = _empty(x, *_gathered(found, x, w, gather_dim))
    found.ctx.ops.all_gather_matmul(
        out, found.on_heap(x), w, bias, gather_dim=gather_dim, group=found.group, algorithm=algorithm
    )
    return out


@_all_gather_matmul.register_fake
def _(x, w, bias, handle, gather_dim, algorithm):
    return _empty(x, *_gathered(entry(handle), x, w, gather_dim))


def _gathered(found: Entry, x, w, gather_dim) -> tuple[Any, Any]:
    _check(x, w)
    return x.shape[0] * (found.members.size if gather_dim == 0 else 1), w.shape[1]


def _all_gather_matmul_backward(ctx, grad):
    x, w = ctx.saved_tensors
    grad_x = grad_w = None
    if ctx.needs_input_grad[0] and ctx.gather_dim == 0:
        grad_x = _matmul_reduce_scatter(grad, w.t(), None, ctx.handle, None)
    elif ctx.needs_input_grad[0]:
        grad_x = _matmul_reduce_scatter(w, grad.t(), None, ctx.handle, None).t()
    if ctx.needs_input_grad[1]:
        grad_w = _all_gather_matmul(x.t(), grad, None, ctx.handle, 1 - ctx.gather_dim, None)
    return grad_x, grad_w, _of_bias(ctx, grad), None, None, None


@torch.library.custom_op("iris::matmul_all_reduce", mutates_args=(), schema=_SCHEMA)
def _matmul_all_reduce(x, w, bias, handle, algorithm):
    found = entry(handle)
    algorithm = _for_group(found, algorithm)
    _check(x, w)
    shape = (x.shape[0], w.shape[1])
    heap = _staged(found, "matmul_all_reduce", shape, x, w, bias, algorithm)
    out = found.output(shape, _empty(x, 0, 0), heap)
    found.ctx.ops.matmul_all_reduce(out, x, w, bias, group=found.group, algorithm=algorithm)
    return found.result(out)


@_matmul_all_reduce.register_fake
def _(x, w, bias, handle, algorithm):
    entry(handle)
    _check(x, w)
    return _empty(x, x.shape[0], w.shape[1])


def _matmul_all_reduce_backward(ctx, grad):
    x, w = ctx.saved_tensors
    total = grad
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
        total = _all_reduce(grad, ctx.handle, "sum")
    return _of_product(ctx, x, w, total), _of_weight(ctx, x, total), _of_bias(ctx, grad), None, None


@torch.library.custom_op("iris::matmul_reduce_scatter", mutates_args=(), schema=_SCHEMA)
def _matmul_reduce_scatter(x, w, bias, handle, algorithm):
    found = entry(handle)
    _check(x, w)
    out = _empty(x, _own_rows(found, x.shape[0])[1], w.shape[1])
    found.ctx.ops.matmul_reduce_scatter(out, x, w, bias, group=found.group, algorithm=_for_group(found, algorithm))
    return out


@_matmul_reduce_scatter.register_fake
def _(x, w, bias, handle, algorithm):
    _check(x, w)
    return _empty(x, _own_rows(entry(handle), x.shape[0])[1], w.shape[1])


def _own_rows(found: Entry, M: Any) -> tuple[Any, Any]:
    """First row of this rank, and how many it has, by torch.chunk's rule."""
    world, index = found.members.size, found.members.index
    if M % world == 0:
        return index * (M // world), M // world
    chunk = -(-M // world)
    first = min(M, index * chunk)
    return first, min(M, first + chunk) - first


def _matmul_reduce_scatter_backward(ctx, grad):
    x, w = ctx.saved_tensors
    found = entry(ctx.handle)
    M, world = x.shape[0], found.members.size
    chunk = -(-M // world)
    # The last ranks may have fewer rows, and a gather wants as many of each.
    part = _with_rows(grad, chunk)
    grad_x = grad_w = None
    if ctx.needs_input_grad[0]:
        grad_x = _all_gather_matmul(part, w.t(), None, ctx.handle, 0, None)[:M]
    if ctx.needs_input_grad[1]:
        grad_w = _all_gather_matmul(part.t(), _with_rows(x, chunk * world), None, ctx.handle, 1, None).t()
    grad_bias = None
    if ctx.needs_input_grad[2] and len(ctx.bias_shape) == 2:
        first, rows = _own_rows(found, M)
        whole = torch.nn.functional.pad(grad, (0, 0, first, M - first - rows))
        grad_bias = whole.sum_to_size(ctx.bias_shape).to(ctx.bias_dtype)
    else:
        grad_bias = _of_bias(ctx, grad)
    return grad_x, grad_w, grad_bias, None, None


def _with_rows(matrix, rows):
    return matrix if matrix.shape[0] == rows else torch.nn.functional.pad(matrix, (0, 0, 0, rows - matrix.shape[0]))


@torch.library.custom_op("iris::matmul_all_gather", mutates_args=(), schema=_SCHEMA)
def _matmul_all_gather(x, w, bias, handle, algorithm):
    found = entry(handle)
    _check(x, w)
    shape = (x.shape[0] * found.members.size, w.shape[1])
    heap = _staged(found, "matmul_all_gather", shape, x, w, bias, algorithm)
    out = found.output(shape, _empty(x, 0, 0), heap)
    found.ctx.ops.matmul_all_gather(out, x, w, bias, group=found.group, algorithm=algorithm)
    return found.result(out)


@_matmul_all_gather.register_fake
def _(x, w, bias, handle, algorithm):
    _check(x, w)
    return _empty(x, x.shape[0] * entry(handle).members.size, w.shape[1])


def _matmul_all_gather_backward(ctx, grad):
    x, w = ctx.saved_tensors
    mine = _reduce_scatter(grad, ctx.handle, "sum")
    return _of_product(ctx, x, w, mine), _of_weight(ctx, x, mine), _of_bias(ctx, mine), None, None


def _of_product(ctx, x, w, grad):
    return torch.matmul(grad, w.t()) if ctx.needs_input_grad[0] else None


def _of_weight(ctx, x, grad):
    return torch.matmul(x.t(), grad) if ctx.needs_input_grad[1] else None


def _of_bias(ctx, grad):
    """The gradient of a bias that was added to what has the gradient ``grad``."""
    if not ctx.needs_input_grad[2]:
        return None
    summed = grad.sum(0) if len(ctx.bias_shape) == 1 else grad.sum_to_size(ctx.bias_shape)
    return summed.to(ctx.bias_dtype)


def _keep(ctx, inputs, output):
    x, w, bias, ctx.handle = inputs[:4]
    ctx.gather_dim = inputs[4] if len(inputs) == 6 else None
    ctx.bias_shape, ctx.bias_dtype = (bias.shape, bias.dtype) if bias is not None else (None, None)
    ctx.save_for_backward(x, w)


_BACKWARD: tuple[tuple[Any, Any], ...] = (
    (_all_gather_matmul, _all_gather_matmul_backward),
    (_matmul_all_reduce, _matmul_all_reduce_backward),
    (_matmul_reduce_scatter, _matmul_reduce_scatter_backward),
    (_matmul_all_gather, _matmul_all_gather_backward),
)
for _operator, _backward in _BACKWARD:
    _operator.register_autograd(_backward, setup_context=_keep)


def _check(x, w) -> None:
    """Raise ArgumentError where the shape of the result cannot be told; the operation checks the rest."""
    for name, matrix in (("x", x), ("w", w)):
        if matrix.dim() != 2:
            raise ArgumentError(f"{name} must have two dimensions, got shape {tuple(matrix.shape)}")


def _empty(x, rows, columns):
    """An output for inputs like ``x``."""
    dtype = torch.int32 if x.dtype == torch.int8 else torch.float16 if x.dtype in FP8 else x.dtype
    return x.new_empty((rows, columns), dtype=dtype)


def _for_group(found: Entry, algorithm: str | None) -> str | None:
    # The kernels keep partial products on the heap, which all ranks would have to allocate together.
    return "torch" if algorithm is None and not found.whole else algorithm


def _staged(found: Entry, operation: str, shape, x, w, bias, algorithm) -> bool:
    key = (x.shape, x.stride(), w.shape, w.stride(), None if bias is None else bias.shape, algorithm)
    return staged(found, operation, key, shape, _empty(x, 0, 0).dtype, x, w, bias, algorithm=algorithm)
