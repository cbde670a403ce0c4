"""Matmul + all-gather: ``output = rows of all ranks of act(scale_a * scale_b * A @ B + bias)``.

Layouts. Every rank has an A (M, K), of M rows on every rank, and a B (K, N), and gets the whole output (M * world, N):
the rows of rank r, by its place in the group, begin at ``r * M``. Strides are free: row- or column-major A, B and
output. A and B may lie anywhere on the device. Scales, bias and activation are a rank's own, applied to the float32
sums of its rows, which are rounded once, at the end.

Algorithms:

``fused``
    One persistent kernel. A tile is written to every rank's output as soon as it is multiplied, while programs multiply
    others. The output lies on the symmetric heap, at the same place on every rank; nothing is staged. A rank writes its
    rows of the output over the links world - 1 times.
``torch``
    matmul and all-gather of PyTorch, one after the other. The output may lie anywhere.

Protocol between ranks. As in :mod:`iris.x.turn`: the first program of a rank to run sets its *ready* flag on every
peer, which says here that the rank's output may be written. A program multiplies its first tile, waits for *ready* of
every peer, and writes: to the next rank first, so that the ranks write to different ones at a time. When all is
written, a program makes its stores visible to other devices. The last program to end sets *consumed* on every peer and
waits for that of every peer; then every output is complete, and may be read and overwritten by what follows in the
stream. Between the ranks nothing else is waited for, and *ready* waits for nothing, so any order in which programs
start makes progress.

Protocol within a rank. Programs take tiles from a queue, and wait for none of their own rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris.ops import _matmul_all_gather as _body
from iris.ops._matmul_all_gather import OPERATION
from iris.ops._matmul_reduce_call import Asked
from iris.ops.config import FusedConfig
from iris.ops.workspace import FusedWorkspace
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris


def matmul_all_gather(
    ctx: Iris,
    output: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    async_op: bool = False,
    config: FusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
    *,
    algorithm: str | None = None,
    group: Any = None,
    activation: str = "none",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    tune: bool = False,
    allow_fallback: bool = True,
) -> FusedWorkspace:
    """Multiply on every rank, add a bias, apply an activation, give the rows to all ranks. Collective over ``group``.

    Args:
        ctx: the context.
        output: (M * world, N) on every rank, float32, float16 or bfloat16 (int32 for int8 inputs, float64 for
            float64); on the symmetric heap for ``"fused"``.
        A: (M, K), this rank's rows; float32, float16, bfloat16, int8 or fp8, or float64 (see below). M is the same on
            every rank.
        B: (K, N) of A's dtype (two fp8 dtypes may mix).
        bias: (N,), added to every row, or two-dimensional and broadcast to (M, N); None for none. This rank's own.
            A value for each row, which the original API takes as a bias of length M, is ``bias[:, None]`` here.
        async_op: return at launch; ``workspace.wait()`` orders the current stream after the operation, and the tensors
            must live until then. Otherwise what follows in the current stream sees the result.
        config: tiles and launch parameters of the kernel; None lets the operation choose.
        workspace: from :func:`matmul_all_gather_preamble` or an earlier call; None uses the context's own flags, which
            puts calls in order even when they are made on different streams. Calls that are to overlap need workspaces
            of their own.
        algorithm: ``"torch"`` or ``"fused"``; None lets the operation choose, with a config the kernel.
        group: None for all ranks, a process group, or a sequence of ranks; rows are in group order.
        activation: ``"none"``, ``"relu"``, ``"gelu"`` (with erf) or ``"silu"``, applied after the bias.
        scale_a, scale_b: for fp8 inputs, both or neither: float32 tensors of one element that this rank's product is
            multiplied by. They are read when the operation runs.
        tune: when nothing was tuned for the problem on this machine, measure several ways to compute it, which
            overwrites the output, and keep what was found for this and later programs; see :mod:`iris.tuning.autotune`.
        allow_fallback: False raises where PyTorch's operations would run without having been named.

    float64 is for ``"torch"`` alone: the kernels of the library add in 32 bits.

    Returns:
        The workspace; ``workspace.plan`` says what ran and why.

    Raises:
        ArgumentError, NotSymmetricError, DeviceMismatch, UnsupportedError: on the rank that has it, before any launch.
        RankMismatch: on the other ranks then, and on all ranks whose arguments differ.
        UnsupportedError: on every rank, with ``allow_fallback=False`` where PyTorch's operations would run.
        NotAMemberError: the caller is not in ``group``.
    """
    asked = Asked(OPERATION, algorithm, config, activation, (scale_a, scale_b), group, tune, allow_fallback)
    return _body.matmul_all_gather(ctx, asked, output, A, B, bias, async_op, workspace)


def matmul_all_gather_preamble(
    ctx: Iris,
    output: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    config: FusedConfig | None = None,
    *,
    bias: torch.Tensor | None = None,
    algorithm: str | None = None,
    group: Any = None,
    activation: str = "none",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> FusedWorkspace:
    """Make a workspace for :func:`matmul_all_gather`. Collective over the world: it allocates on the symmetric heap.

    The arguments are those of the call, whose values are not read; with smaller groups every rank names its own.
    """
    asked = Asked(OPERATION, algorithm, config, activation, (scale_a, scale_b), group)
    return _body.prepare(ctx, asked, output, A, B, bias)


def explain(
    ctx: Iris,
    output: torch.Tensor,
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
    """The plan that :func:`matmul_all_gather` would follow with these arguments; runs nothing. Local."""
    asked = Asked(OPERATION, algorithm, config, activation, (scale_a, scale_b), group)
    return _body.checked(ctx, ctx.resolve_group(group), asked, output, A, B, bias).plan
