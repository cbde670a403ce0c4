"""All-gather + matmul: ``out = act(scale_a * scale_b * gather(A) @ B + bias)``.

Layouts. ``gather_dim=1`` (default): every rank holds ``A_sharded`` (M, K/world), columns of A in group order, B (K, N)
and out (M, N). ``gather_dim=0``: ``A_sharded`` (M/world, K) holds rows of A. Every rank gets the whole out. Strides are
free: row- or column-major A, B and out. ``A_sharded`` is read by peers and lies on the symmetric heap, at the same
place on every rank; the rest may lie anywhere on the device. Scales, bias and activation are applied to the float32
sums, which are rounded once, at the end.

Algorithms:

``torch``
    all-gather and matmul of PyTorch, one after the other. Moves each peer's shard once.
``pull``
    One persistent kernel. Each output tile reads the tiles of A that it needs from their owners while it multiplies.
    Nothing is staged; each peer's shard is read once for every ``block_size_n`` columns of out.
``hbm_buffer``
    One kernel. Some programs fetch the peers' shards into a staging buffer in ordinary memory, piece by piece, and set
    a flag for each; the others, and the fetchers when all has been taken, multiply what has come, the own shard first.
    Moves each peer's shard once, while multiplication goes on. The buffer holds ``world - 1`` shards.
``copy_engine``
    The same kernel without fetchers: copies on further streams fill the buffer and set the flags.

Protocol between ranks, of all kernels. Two int32 flags for each pair of ranks, in lines of 128 bytes on the heap:
``ready[p]`` (rank p's A may be read) and ``consumed[p]`` (rank p has read mine). The first program of a rank to run
sets its ``ready`` on every peer; a program waits for ``ready[owner]`` before it reads the owner's shard. The last
program of a rank to end sets its ``consumed`` on every peer and waits for ``consumed`` of every peer, so that A may be
overwritten by whatever follows in the stream. ``ready`` waits for nothing. A flag holds how often the two ranks have
met in this workspace (an epoch, kept in device memory and advanced by the kernel), so nothing is reset, a captured
graph replays, and calls of any mixture of groups may share the flags.

Protocol within a rank, of ``hbm_buffer``. Programs get their roles by ticket, in the order in which they start, and
pieces of A and tiles of out from two queues. A flag of a piece holds the number of the call that has brought it, and a
counter the number of pieces that have come: who sees all of them looks at no flag any more. Pieces are fetched in the
order in which tiles need them. The last tiles are divided along K: all pieces of a tile but the last leave float32 (or
int32) sums and a flag each, the last adds them. A program waits for peers' ``ready``, for fetchers, or for sums that
were given out earlier to programs that wait for fetchers only: always for one that has started. So any order in which
programs start makes progress. Flags are never cleared: calls of all shapes are counted together, and an older number
means not yet.

Protocol of ``copy_engine``. ``inputs_kernel`` clears the flags of the copies, sets ``ready`` and waits for that of
every peer; behind it, a stream for each peer (one, where ranks share a card) copies chunks of rows and sets each one's
flag from 0 to 1. The kernel runs beside the copies. It cannot be captured: a graph does not promise that its branches
run side by side. Where the library has chosen it, ``hbm_buffer`` runs while a graph is captured. To its peers a rank
does the same in both, so some ranks may copy in a call in which others fetch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from iris.ops._all_gather_matmul_call import OPERATION, State, checked, make_workspace
from iris.ops._all_gather_matmul_kernel import pull_kernel
from iris.ops._candidates import tuner
from iris.ops._hbm_buffer import run_hbm_buffer
from iris.ops.arguments import ACTIVATIONS, Problem
from iris.ops.call import address, agreed, float32_matmul, issue_in_order, layout, outside_of_graphs
from iris.ops.config import FusedConfig
from iris.ops.workspace import FusedWorkspace
from iris.runtime import checks, launch
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.runtime.context import Iris

_KERNEL = launch.kernel_id(f"{OPERATION}/pull")
# PyTorch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather_matmul(
    ctx: Iris,
    output_tensor: torch.Tensor,
    A_sharded: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    async_op: bool = False,
    config: FusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
    *,
    algorithm: str | None = None,
    gather_dim: int = 1,
    group: Any = None,
    activation: str = "none",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    tune: bool = False,
    allow_fallback: bool = True,
) -> FusedWorkspace:
    """Gather A from all ranks, multiply it by B, add a bias, apply an activation. Collective over ``group``.

    Args:
        ctx: the context.
        output_tensor: (M, N), float32, float16 or bfloat16 (int32 for int8 inputs); written on every rank.
        A_sharded: this rank's part, (M, K/world) or with ``gather_dim=0`` (M/world, K), on the symmetric heap; float32,
            float16, bfloat16, int8 or fp8.
        B: (K, N) of A's dtype (two fp8 dtypes may mix).
        bias: (N,), added to every row, or two-dimensional and broadcast to (M, N); None for none.
        async_op: return at launch; ``workspace.wait()`` orders the current stream after the operation, and the tensors
            must live until then. Otherwise what follows in the current stream sees the result and may overwrite A.
        config: tiles and launch parameters of the kernel; None lets the operation choose.
        workspace: from :func:`all_gather_matmul_preamble` or an earlier call; None uses the context's own flags, which
            puts calls in order even when they are made on different streams. Calls that are to overlap need workspaces
            of their own.
        algorithm: ``"torch"``, ``"pull"``, ``"hbm_buffer"`` or ``"copy_engine"``; None lets the operation choose; with
            a config it takes the kernel that the config is for. Where it chooses ``"copy_engine"``, ``"hbm_buffer"``
            runs while a graph is captured, and the plan says so.
        gather_dim: 1 when A is sharded along K, 0 when along M.
        group: None for all ranks, a process group, or a sequence of ranks; shards are in group order.
        activation: ``"none"``, ``"relu"``, ``"gelu"`` (with erf) or ``"silu"``, applied after the bias.
        scale_a, scale_b: for fp8 inputs, both or neither: float32 tensors of one element that the sums are multiplied
            by, the scales of the whole A and of B. ``scale_a`` has the same value on every rank. They are read when
            the operation runs: a captured graph replays with what they hold then.
        tune: when nothing was tuned for the problem on this machine, measure several ways to compute it, which
            overwrites the output, and keep what was found for this and later programs; see :mod:`iris.tuning.autotune`.
        allow_fallback: False raises where PyTorch's operations would run without having been named.

    Returns:
        The workspace; ``workspace.plan`` says what ran and why.

    Raises:
        ArgumentError, NotSymmetricError, DeviceMismatch, UnsupportedError: on the rank that has it, before any launch.
        RankMismatch: on the other ranks then, and on all ranks whose arguments differ.
        UnsupportedError: on every rank, with ``allow_fallback=False`` where PyTorch's operations would run.
        CaptureError: something is to be tuned while a graph is captured, or copies that the caller has named run then,
            or the staging buffer has to grow.
        NotAMemberError: the caller is not in ``group``.
    """
    return outside_of_graphs(_all_gather_matmul)(
        ctx, output_tensor, A_sharded, B, bias, async_op, config, workspace, algorithm, gather_dim, group,
        activation, (scale_a, scale_b), tune, allow_fallback,
    )  # fmt: skip


def _all_gather_matmul(
    ctx, output_tensor, A_sharded, B, bias, async_op, config, workspace, algorithm, gather_dim, group,
    activation, scales, tune, allow_fallback,
) -> FusedWorkspace:  # fmt: skip
    members = ctx.resolve_group(group)
    state = _state(ctx)
    key = (
        *layout(output_tensor), *layout(A_sharded), *layout(B), *layout(bias),
        activation, *layout(scales[0]), *layout(scales[1]),
        address(A_sharded), algorithm, config, workspace is None, gather_dim, members.ranks, type(group),
        torch.get_float32_matmul_precision(), tune, allow_fallback,
    )  # fmt: skip
    tensors = (output_tensor, A_sharded, B, bias)

    def agree():
        return state.agree(
            members, *tensors, activation, scales, algorithm, config, workspace, gather_dim, group,
            tune=tune, allow_fallback=allow_fallback,
        )  # fmt: skip

    def tried(algorithm: str, config: Any) -> None:
        _all_gather_matmul(
            ctx, *tensors, False, config, None, algorithm, gather_dim, group, activation, scales, False, True
        )

    call, used = agreed(
        state, key, agree, (*tensors, *scales), workspace, members, allow_fallback,
        tuner(ctx, members, algorithm, config, workspace, group, tried) if tune else None,
    )  # fmt: skip
    _run(ctx, call, used, *tensors, scales, members, group, async_op)
    return used


def all_gather_matmul_preamble(
    ctx: Iris,
    A_sharded: torch.Tensor,
    B: torch.Tensor,
    config: FusedConfig | None = None,
    *,
    algorithm: str | None = None,
    output_dtype: torch.dtype | None = None,
    gather_dim: int = 1,
    group: Any = None,
    activation: str = "none",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> FusedWorkspace:
    """Make a workspace for :func:`all_gather_matmul`. Collective over the world: it allocates on the symmetric heap.

    Args:
        output_dtype: dtype of the output; default A's for floating-point inputs, float16 for fp8, int32 for int8.

    The other arguments are those of the call.
    """
    members = ctx.resolve_group(group)
    dtype = output_dtype or {torch.int8: torch.int32}.get(
        A_sharded.dtype, torch.float16 if A_sharded.dtype in checks.FP8 else A_sharded.dtype
    )
    rows = A_sharded.shape[0] * (members.size if gather_dim == 0 else 1)
    out = torch.empty((rows, B.shape[1] if B.dim() == 2 else 0), dtype=dtype, device=ctx.get_device())
    call = _state(ctx).agree(
        members, out, A_sharded, B, None, activation, (scale_a, scale_b), algorithm, config, None, gather_dim, group,
        preamble=True,
    )  # fmt: skip
    return make_workspace(ctx, call, members)


def explain(
    ctx: Iris,
    output_tensor: torch.Tensor,
    A_sharded: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    config: FusedConfig | None = None,
    *,
    algorithm: str | None = None,
    gather_dim: int = 1,
    group: Any = None,
    activation: str = "none",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> Plan:
    """The plan that :func:`all_gather_matmul` would follow with these arguments; runs nothing. Local."""
    members = ctx.resolve_group(group)
    return checked(
        ctx, members, output_tensor, A_sharded, B, bias, activation, (scale_a, scale_b), algorithm, config, gather_dim,
        group,
    ).plan  # fmt: skip


def _run(ctx, call, workspace, out, a, b, bias, scales, members, group, async_op) -> None:
    if out.numel() == 0:
        return
    order = _state(ctx).order if workspace.locks is ctx.pair_flags else None
    issue_in_order(
        ctx, workspace, order, async_op,
        lambda: _issue(ctx, call, workspace, out, a, b, bias, scales, members, group),
    )  # fmt: skip


def _issue(ctx, call, workspace, out, a, b, bias, scales, members, group) -> None:
    if call.plan.algorithm == "torch":
        _run_torch(call.problem, out, a, b, bias, scales, group)
    elif call.schedule is not None:
        run_hbm_buffer(ctx, call, workspace, out, a, b, bias, scales, members)
    else:
        _run_pull(ctx, call, workspace, out, a, b, bias, scales, members)


def _run_pull(ctx, call, workspace, out, a, b, bias, scales, members) -> None:
    problem, config = call.problem, call.plan.config
    wide = bias.expand(problem.M, problem.N) if bias is not None else out
    scale_a, scale_b = scales if problem.scaled else (out, out)
    launch.start(
        ctx, pull_kernel, call.grid,
        a, b, wide, out, scale_a, scale_b,
        a.shape[0], problem.N, problem.K, a.shape[1],
        *a.stride(), *b.stride(), *(wide.stride() if bias is not None else (0, 0)), *out.stride(),
        workspace.locks, workspace.counters, ctx.group_members(members), members.index, ctx.get_device_context(),
        WORLD=members.size,
        GATHER_DIM=problem.gather_dim,
        BLOCK_M=config.block_size_m,
        BLOCK_N=config.block_size_n,
        BLOCK_K=config.block_size_k,
        GROUP_M=config.group_size_m,
        HAS_BIAS=bias is not None,
        HAS_SCALES=problem.scaled,
        ACTIVATION=problem.activation,
        PRECISION=call.precision,
        KERNEL=_KERNEL,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def _run_torch(problem: Problem, out, a, b, bias, scales, group) -> None:
    a = _gathered(problem, a, group)
    if a.dtype in checks.FP8:
        # Both fp8 formats are exact in each of the output types.
        a, b = a.to(problem.out_dtype), b.to(problem.out_dtype)
    plain = problem.activation == "none" and not problem.scaled
    if plain and a.dtype == out.dtype and bias is None:
        torch.matmul(a, b, out=out)
    elif plain and bias is not None and a.dtype == out.dtype == bias.dtype:
        torch.addmm(bias, a, b, out=out)
    else:
        # In float32, so that the result is rounded once, at the end.
        product = float32_matmul(a, b)
        if problem.scaled:
            product *= (scales[0] * scales[1]).reshape(())
        if bias is not None:
            product += bias
        out.copy_(ACTIVATIONS[problem.activation](product))


def _gathered(problem: Problem, a: torch.Tensor, group: Any) -> torch.Tensor:
    if problem.world_size == 1:
        return a
    shards = torch.empty((problem.world_size, *a.shape), dtype=a.dtype, device=a.device)
    if a.numel():
        # As bytes: gloo and NCCL do not carry every dtype.
        whole, mine = (t.view(torch.uint8).flatten() for t in (shards, a.contiguous()))
        _all_gather(whole, mine, group=group if isinstance(group, dist.ProcessGroup) else None)
    return (shards.transpose(0, 1) if problem.gather_dim == 1 else shards).reshape(problem.M, problem.K)


def _state(ctx: Iris) -> State:
    return ctx.service("all_gather_matmul_state")
