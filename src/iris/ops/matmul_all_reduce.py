"""Matmul + all-reduce: ``C = act(scale_a * scale_b * sum over ranks of A @ B + bias)``, the same bits on every rank.

Layouts. Every rank has an A (M, K) and a B (K, N) of its own, its part of the K of a larger product for example, and
gets the whole C (M, N). Strides are free: row- or column-major A, B and C. A and B may lie anywhere on the device.
Scales, bias and activation are applied once, to the float32 sum, which is rounded once, at the end: give every rank the
same ones.

Rounding. A rank's partial product is computed in float32 (int8: int32). ``two_shot`` and ``one_shot`` round it once to
C's dtype before it is added; the sum is in float32 again and in the order of the group, whoever adds. That is how much
PyTorch rounds at least; it may round after every addition. ``ring``, ``atomic`` and ``spinlock`` keep it in float32.
The last two add in the order in which the ranks come, so their last bits differ from call to call; in a call all ranks
have the same ones.

Algorithms:

``two_shot``
    One persistent kernel. A tile of C has an owner. The others store their partial products of it in the owner's
    memory; the owner adds them up and stores the result on every rank. C lies on the symmetric heap, at the same place
    on every rank. A rank receives (world - 1)/world of C's bytes over the links twice.
``one_shot``
    The same kernel, every rank adds every tile. A rank receives world - 1 times the bytes of C, waits for one exchange
    in place of two, and does not wait for the others' end, so it is for small C. C may lie anywhere.
``ring``
    A kernel in which the float32 sum of a tile goes from rank to rank; each adds its product when it has it, and the
    last one stores the result on every rank. Needs memory for a fixed number of tiles. C lies on the symmetric heap.
``atomic``, ``spinlock``
    A kernel in which every rank adds its product of a tile to a float32 sum on the tile's owner, by atomics or under a
    lock; the last one to add stores the result on every rank. C lies on the symmetric heap.
``torch``
    matmul and all-reduce of PyTorch, one after the other. It alone computes float64.

Protocol. Partial products of the peers lie on the symmetric heap of whoever adds them, with an int32 flag for each peer
and tile. The programs of the kernel take tiles by ticket and multiply them. A tile that another rank adds is stored in
that rank's memory, then its flag is set there with a release at system scope. A tile that the rank itself adds stays in
the registers of its program, which waits for the tile's flags of all peers, acquires, and adds. A flag holds how often
the ranks have met in this memory, so nothing is reset, whatever the shapes of the calls. A tile that has come says that
its rank's kernel runs, so its C may be written.

Every rank multiplies a tile earlier in its own order than the tile's owner does in his. So of all programs that wait,
on all ranks, the one that is first in its order waits for tiles whose programs run and do not wait, in whatever order
programs start.

``two_shot`` ends by :mod:`iris.x.turn`: when all peers have ended, so then C is complete on every rank, and the partial
products may be overwritten. ``one_shot`` ends by itself, when the own tiles are done. It has two sets of partial
products, for calls in turn: a rank that has ended the next call has received something of it from every peer, so this
call has ended there, and what it has received may be overwritten by the call after the next.
``docs/protocols/matmul_reduce.md`` has more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris.ops._matmul_reduce import matmul_reduce, plan_of, prepare
from iris.ops._matmul_reduce_call import ALL_REDUCE, Asked
from iris.ops.config import FusedConfig
from iris.ops.workspace import FusedWorkspace
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris


def matmul_all_reduce(
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
    """Multiply on every rank, add the products of all, then a bias, apply an activation. Collective over ``group``.

    Args:
        ctx: the context.
        C: the output, (M, N) on every rank, float32, float16 or bfloat16 (int32 for int8 inputs); on the symmetric heap
            for kernels other than ``"one_shot"``.
        A: (M, K), this rank's; float32, float16, bfloat16, int8 or fp8.
        B: (K, N), this rank's, of A's dtype (two fp8 dtypes may mix).
        async_op: return at launch; ``workspace.wait()`` orders the current stream after the operation, and the tensors
            must live until then. Otherwise what follows in the current stream sees the result.
        config: tiles and launch parameters of the kernel; None lets the operation choose. Its ``all_reduce_variant``
            names the algorithm unless ``algorithm`` does; with ``"ring"`` the ranks divide ``block_size_n``.
        workspace: from :func:`matmul_all_reduce_preamble` or an earlier call; None uses the context's own, which grows
            to the largest call of all ranks and puts calls in order even when they are made on different streams.
            Calls that are to overlap, and calls of a smaller group that run the kernel, need workspaces of their own.
        bias: (N,), added to every row, or two-dimensional and broadcast to (M, N); None for none. Added once, to the
            sum; the same on every rank.
        algorithm: ``"torch"``, ``"two_shot"``, ``"one_shot"``, ``"ring"``, ``"atomic"`` or ``"spinlock"``; None lets
            the operation choose.
        group: None for all ranks, a process group, or a sequence of ranks.
        activation: ``"none"``, ``"relu"``, ``"gelu"`` (with erf) or ``"silu"``, applied after the bias.
        scale_a, scale_b: for fp8 inputs, both or neither: float32 tensors of one element that the sum is multiplied
            by, the same on every rank. They are read when the operation runs.
        tune: when nothing was tuned for the problem on this machine, measure several ways to compute it, which
            overwrites the output, and keep what was found for this and later programs; see :mod:`iris.tuning.autotune`.
        allow_fallback: False raises where PyTorch's operations would run without having been named.

    Returns:
        The workspace; ``workspace.plan`` says what ran and why.

    Raises:
        ArgumentError, NotSymmetricError, DeviceMismatch, UnsupportedError: on the rank that has it, before any launch.
        RankMismatch: on the other ranks then, and on all ranks whose arguments differ.
        UnsupportedError: on every rank, with ``allow_fallback=False`` where PyTorch's operations would run.
        NotAMemberError: the caller is not in ``group``.
        CaptureError: the context's memory would have to grow in a captured graph, or something to be tuned.
        HeapExhausted: the heap has no room for the partial products.
    """
    asked = Asked(ALL_REDUCE, algorithm, config, activation, (scale_a, scale_b), group, tune, allow_fallback)
    return matmul_reduce(ctx, asked, C, A, B, bias, async_op, workspace)


def matmul_all_reduce_preamble(
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
    """Make a workspace for :func:`matmul_all_reduce`. Collective over the world: it allocates on the symmetric heap.

    Args:
        workspace: one that was made earlier: it is returned when it serves for these arguments, and refused otherwise.

    The other arguments are those of the call, whose values are not read; with smaller groups every rank names its own.
    """
    asked = Asked(ALL_REDUCE, algorithm, config, activation, (scale_a, scale_b), group)
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
    """The plan that :func:`matmul_all_reduce` would follow with these arguments; runs nothing. Local."""
    asked = Asked(ALL_REDUCE, algorithm, config, activation, (scale_a, scale_b), group)
    return plan_of(ctx, asked, C, A, B, bias)
