"""Matmul + reduce-scatter: ``C = rows of act(scale_a * scale_b * sum over ranks of A @ B + bias)``.

Layouts. Every rank has an A (M, K) and a B (K, N) of its own, its part of the K of a larger product for example, and
gets its rows of the sum: ceil(M / world) of them, the last ranks fewer or none where that does not come out even, as
``torch.chunk`` divides. Strides are free: row- or column-major A, B and C. All tensors may lie anywhere on the device.
Scales, bias and activation are applied once, to the float32 sum, which is rounded once, at the end: give every rank the
same ones, a two-dimensional bias as a whole.

Rounding. A rank's partial product is computed in float32 (int8: int32) and rounded once to C's dtype before it is
added; the sum is in float32 again and in the order of the group. With a float32 C nothing is rounded on the way. That
is how much PyTorch rounds at least; it may round after every addition.

Algorithms:

``fused``
    One persistent kernel. Programs store the tiles of other ranks' rows in the owners' memory while others still
    multiply; a program that multiplies a tile of the own rows adds what has come for it. A rank receives
    (world - 1)/world of an (M, N) matrix over the links.
``torch``
    matmul and reduce-scatter of PyTorch, one after the other. It alone computes float64.

Protocol. As ``two_shot`` in :mod:`iris.ops.matmul_all_reduce`; the owner of rows is the one who adds, and keeps the
result. The rows of every owner are divided into tiles of their own; programs take tiles of the owners in turn, from the
next rank on, so that the ranks store to different ones at a time. Where there are many rounds of tiles, all of the
other ranks' come first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris.ops._matmul_reduce import matmul_reduce, plan_of, prepare
from iris.ops._matmul_reduce_call import REDUCE_SCATTER, Asked
from iris.ops.config import FusedConfig
from iris.ops.workspace import FusedWorkspace
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris


def matmul_reduce_scatter(
    ctx: Iris,
    C: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    async_op: bool = False,
    config: FusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
    *,
    bias: torch.Tensor | None = None,
    algorithm: str | None = None,
    group: Any = None,
    activation: str = "none",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    tune: bool = False,
    allow_fallback: bool = True,
) -> FusedWorkspace:
    """Multiply on every rank, add the products of all, bias, activation; keep the own rows. Collective over ``group``.

    Args:
        ctx: the context.
        C: the output, this rank's rows of the (M, N) sum, float32, float16 or bfloat16 (int32 for int8 inputs).
        A: (M, K), this rank's; float32, float16, bfloat16, int8 or fp8.
        B: (K, N), this rank's, of A's dtype (two fp8 dtypes may mix).
        async_op: return at launch; ``workspace.wait()`` orders the current stream after the operation, and the tensors
            must live until then. Otherwise what follows in the current stream sees the result.
        config: tiles and launch parameters of the kernel; None lets the operation choose.
        workspace: from :func:`matmul_reduce_scatter_preamble` or an earlier call; None uses the context's own, which
            grows to the largest call of all ranks and puts calls in order even when they are made on different
            streams. Calls that are to overlap, and calls of a smaller group that run the kernel, need workspaces of
            their own.
        bias: (N,), added to every row, or two-dimensional and broadcast to (M, N); None for none. Added once, to the
            sum; the same on every rank.
        algorithm: ``"torch"`` or ``"fused"``; None lets the operation choose, with a config the kernel.
        group: None for all ranks, a process group, or a sequence of ranks; rows are in group order.
        activation: ``"none"``, ``"relu"``, ``"gelu"`` (with erf) or ``"silu"``, applied after the bias.
        scale_a, scale_b: for fp8 inputs, both or neither: float32 tensors of one element that the sum is multiplied
            by, the same on every rank. They are read when the operation runs.
        tune: when nothing was tuned for the problem on this machine, measure several ways to compute it, which
            overwrites the output, and keep what was found for this and later programs; see :mod:`iris.tuning.autotune`.
        allow_fallback: False raises where PyTorch's operations would run without having been named.

    Returns:
        The workspace; ``workspace.plan`` says what ran and why.

    Raises:
        ArgumentError, DeviceMismatch, UnsupportedError: on the rank that has it, before any launch.
        RankMismatch: on the other ranks then, and on all ranks whose arguments differ.
        UnsupportedError: on every rank, with ``allow_fallback=False`` where PyTorch's operations would run.
        NotAMemberError: the caller is not in ``group``.
        CaptureError: the context's memory would have to grow in a captured graph, or something to be tuned.
        HeapExhausted: the heap has no room for the partial products.
    """
    asked = Asked(REDUCE_SCATTER, algorithm, config, activation, (scale_a, scale_b), group, tune, allow_fallback)
    return matmul_reduce(ctx, asked, C, A, B, bias, async_op, workspace)


def matmul_reduce_scatter_preamble(
    ctx: Iris,
    C: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    config: FusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
    *,
    bias: torch.Tensor | None = None,
    algorithm: str | None = None,
    group: Any = None,
    activation: str = "none",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> FusedWorkspace:
    """Make a workspace for :func:`matmul_reduce_scatter`. Collective over the world: it allocates on the heap.

    Args:
        workspace: one that was made earlier: it is returned when it serves for these arguments, and refused otherwise.

    The other arguments are those of the call, whose values are not read; with smaller groups every rank names its own.
    """
    asked = Asked(REDUCE_SCATTER, algorithm, config, activation, (scale_a, scale_b), group)
    return prepare(ctx, asked, C, A, B, bias, workspace)


def explain(
    ctx: Iris,
    C: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    config: FusedConfig | None = None,
    *,
    algorithm: str | None = None,
    group: Any = None,
    activation: str = "none",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> Plan:
    """The plan that :func:`matmul_reduce_scatter` would follow with these arguments; runs nothing. Local."""
    asked = Asked(REDUCE_SCATTER, algorithm, config, activation, (scale_a, scale_b), group)
    return plan_of(ctx, asked, C, A, B, bias)
