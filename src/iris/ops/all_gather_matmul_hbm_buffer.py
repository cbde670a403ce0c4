"""All-gather + matmul through a staging buffer, called with single parameters instead of a configuration.

``all_gather_matmul_hbm_buffer(ctx, out, A, B, ...)`` is :func:`iris.ops.all_gather_matmul.all_gather_matmul` with
``algorithm="hbm_buffer"`` and A sharded along K; formula, layouts and protocol are described there. Sizes are free: the
tile need not divide M, N or K, nor ``k_per_flag`` the blocks of K.

The configuration comes from ``config`` and the parameters beside it, in one way for the preamble and for the call:

- ``config=None``: what the operation would choose for these tensors.
- a :class:`FusedConfig`: its fields; 8 blocks a flag, 32 fetchers, 1 stage, 256 fetchers for the first stage.
- an :class:`iris.ops.config.HbmBufferConfig`: its fields.

A parameter that is not None, or for those with another default not that, replaces the field of its name.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from iris._events import Event
from iris.errors import ArgumentError, IrisError
from iris.ops._all_gather_matmul_call import OPERATION, checked
from iris.ops.all_gather_matmul import all_gather_matmul, all_gather_matmul_preamble, explain
from iris.ops.config import FusedConfig, HbmBufferConfig
from iris.ops.workspace import FusedWorkspace
from iris.runtime import checks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from iris.ops._hbm_buffer import Schedule
    from iris.runtime.context import Iris

_ALGORITHM = "hbm_buffer"
_LAYOUT, _WARPS, _STAGES = "k_contiguous", 8, 2
# Fields that a workspace is made for: tiles, what is announced by one flag, and how the buffer is laid out.
_MADE_FOR = ("block_size_m", "block_size_n", "block_size_k", "group_size_m", "k_per_flag", "staged_a_layout")


def all_gather_matmul_hbm_buffer(
    ctx: Iris,
    output_tensor: torch.Tensor,
    A_sharded: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    async_op: bool = False,
    config: FusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
    num_fetch_sms: int | None = None,
    k_per_flag: int | None = None,
    fetch_block_m: int | None = None,
    fetch_block_k: int | None = None,
    staged_a_layout: str = _LAYOUT,
    num_warps: int | None = _WARPS,
    num_stages: int | None = _STAGES,
    num_fetch_stages: int | None = None,
    first_stage_fetch_sms: int | None = None,
    trace: bool = False,
) -> FusedWorkspace:
    """Gather A, sharded along K, into a staging buffer while it is multiplied by B. Collective over all ranks.

    Args:
        ctx, output_tensor, A_sharded, B, bias, async_op: as for :func:`iris.ops.all_gather_matmul.all_gather_matmul`.
        config: tiles and launch parameters; None lets the operation choose.
        workspace: from :func:`all_gather_matmul_hbm_buffer_preamble` with the same tiles, ``k_per_flag`` and
            ``staged_a_layout``, or from an earlier call; None uses the context's own.
        num_fetch_sms, k_per_flag, staged_a_layout, num_fetch_stages, first_stage_fetch_sms: as in
            :class:`iris.ops.config.HbmBufferConfig`.
        fetch_block_m, fetch_block_k: None, or the tile's ``block_size_m`` and ``block_size_k``, in which fetchers work.
        num_warps, num_stages: launch options.
        trace: record what the programs did, wait for it, and leave the figures in ``workspace.trace_data``.

    ``workspace.trace_data`` is a dictionary. ``start``, ``end`` and ``wait`` (int64, ticks of the device's clock) and
    ``xcd`` (int32) have an element for each program of the grid: when it began its first span and ended its last, how
    long it waited for pieces of A, all waits together, and its die; ``start`` and ``end`` are -1 for a program without
    a span. Programs are not divided into those that fetch and those that multiply: one that fetches multiplies
    afterwards, so its ``start`` is that of fetching and its ``end`` that of multiplying. The numbers ``grid_size``,
    ``num_fetch_sms``, ``first_stage_fetch_sms``, ``num_fetch_stages``, ``num_m_tiles`` and ``num_tiles_n`` are those
    that the kernel ran with, ``total_fetch_wgs`` counts the programs that fetched, ``gemm_tiles_per_stage`` the tiles
    of the output in a full stage; ``first_stage_size`` and ``rest_stage_size`` are the programs that serve a stage, the
    whole grid. Without ``trace`` it is None.

    Returns:
        The workspace; ``workspace.plan`` says what ran.

    Raises:
        ArgumentError: a parameter that is not possible, or a workspace made for others; and what the operation raises.
        RankMismatch: on the other ranks then, and on all ranks whose arguments differ.
    """
    settled = _settled(
        ctx, output_tensor, A_sharded, B, bias, config,
        num_fetch_sms=num_fetch_sms, k_per_flag=k_per_flag, num_fetch_stages=num_fetch_stages,
        first_stage_fetch_sms=first_stage_fetch_sms,
        staged_a_layout=staged_a_layout if staged_a_layout != _LAYOUT else None,
        num_warps=num_warps if num_warps != _WARPS else None,
        num_stages=num_stages if num_stages != _STAGES else None,
    )  # fmt: skip
    _refuse_together(
        ctx,
        _wrong_config(config) or _wrong_fetch_blocks(settled, fetch_block_m, fetch_block_k)
        or _wrong_workspace(ctx, workspace, settled, A_sharded, B),
        {"fetch_block_m": fetch_block_m, "fetch_block_k": fetch_block_k},
    )  # fmt: skip
    was_on = trace and ctx.tracing.enabled
    schedule = _begin_trace(ctx, output_tensor, A_sharded, B, bias, settled) if trace and settled is not None else None
    workspace = all_gather_matmul(
        ctx, output_tensor, A_sharded, B, bias, async_op, settled, workspace, algorithm=_ALGORITHM
    )
    workspace.trace_data = None
    if schedule is not None and settled is not None:
        ctx.synchronize()
        workspace.trace_data = trace_data(
            ctx.tracing.events(), schedule.grid, schedule.fetchers, schedule.first_fetchers,
            _tiles(output_tensor, settled), schedule.stage_rows,
        )  # fmt: skip
        if not was_on:
            ctx.tracing.disable()
    return workspace


def all_gather_matmul_hbm_buffer_preamble(
    ctx: Iris,
    A_sharded: torch.Tensor,
    B: torch.Tensor,
    config: FusedConfig | None = None,
    k_per_flag: int | None = None,
    staged_a_layout: str = _LAYOUT,
) -> FusedWorkspace:
    """Make a workspace for :func:`all_gather_matmul_hbm_buffer`. Collective: it allocates on the symmetric heap.

    The arguments are those of the call; ``workspace.plan`` has the configuration that they come to.
    """
    out = _output(ctx, A_sharded, B)
    settled = _settled(
        ctx, out, A_sharded, B, None, config,
        k_per_flag=k_per_flag, staged_a_layout=staged_a_layout if staged_a_layout != _LAYOUT else None,
    )  # fmt: skip
    _refuse_together(ctx, _wrong_config(config), {"preamble": True})
    workspace = all_gather_matmul_preamble(ctx, A_sharded, B, settled, algorithm=_ALGORITHM)
    assert out is not None  # what has none was refused
    workspace.plan = explain(ctx, out, A_sharded, B, config=settled, algorithm=_ALGORITHM)
    return workspace


def trace_data(
    events: Mapping[str, torch.Tensor],
    grid: int,
    fetchers: int,
    first_fetchers: int,
    tiles: tuple[int, int],
    stage: int,
) -> dict[str, Any]:
    """What :func:`all_gather_matmul_hbm_buffer` leaves in ``workspace.trace_data``.

    Args:
        events: of ``ctx.tracing.events()``; those of other kinds than fetch, compute and wait are left out.
        grid: how many programs ran.
        fetchers, first_fetchers: how many of them fetched to the end, and the first stage.
        tiles: rows and columns of tiles of the output.
        stage: rows of tiles of a stage.
    """
    kind = events["event_id"]
    begin, length = events["timestamp"], events["duration_cycles"].clamp(min=0)  # -1 where the span has no end
    fetch, wait = kind == Event.FETCH, kind == Event.WAIT
    ours = fetch | wait | (kind == Event.COMPUTE)
    program = events["pid"].to(torch.int64)
    start, end = (torch.full((grid,), -1, dtype=torch.int64) for _ in range(2))
    start.scatter_reduce_(0, program[ours], begin[ours], "amin", include_self=False)
    end.scatter_reduce_(0, program[ours], (begin + length)[ours], "amax", include_self=False)
    waited = torch.zeros(grid, dtype=torch.int64).index_add_(0, program[wait], length[wait])
    xcd = torch.zeros(grid, dtype=torch.int32).scatter_(0, program[ours], events["xcc_id"][ours])
    return {
        "start": start,
        "end": end,
        "wait": waited,
        "xcd": xcd,
        "grid_size": grid,
        "num_fetch_sms": fetchers,
        "num_fetch_stages": -(-tiles[0] // stage),
        "total_fetch_wgs": program[fetch].unique().numel(),
        "num_m_tiles": tiles[0],
        "num_tiles_n": tiles[1],
        "first_stage_fetch_sms": first_fetchers,
        "first_stage_size": grid,
        "rest_stage_size": grid,
        "gemm_tiles_per_stage": stage * tiles[1],
    }


def _settled(
    ctx: Iris, out: Any, a: Any, b: Any, bias: Any, config: FusedConfig | None, **given: Any
) -> HbmBufferConfig | None:
    """The configuration that the arguments come to. None for tensors that the operation refuses: it says why."""
    if config is None:
        try:
            config = explain(ctx, out, a, b, bias, algorithm=_ALGORITHM).config
        except IrisError:
            return None
    if isinstance(config, FusedConfig) and not isinstance(config, HbmBufferConfig):
        config = HbmBufferConfig(**{field.name: getattr(config, field.name) for field in fields(FusedConfig)})
    if not isinstance(config, HbmBufferConfig):
        return None
    return replace(config, **{name: value for name, value in given.items() if value is not None})


def _wrong_config(config: Any) -> str:
    if config is None or isinstance(config, FusedConfig):
        return ""
    return f"config must be a FusedConfig or None, got {type(config).__name__}"


def _wrong_fetch_blocks(config: HbmBufferConfig | None, fetch_block_m: int | None, fetch_block_k: int | None) -> str:
    for name, value, field in (
        ("fetch_block_m", fetch_block_m, "block_size_m"),
        ("fetch_block_k", fetch_block_k, "block_size_k"),
    ):
        if config is not None and value is not None and value != getattr(config, field):
            return (
                f"{name} must be None or {field}={getattr(config, field)}, got {value}: "
                "fetchers move the tiles that are multiplied"
            )
    return ""


def _wrong_workspace(
    ctx: Iris, workspace: FusedWorkspace | None, config: HbmBufferConfig | None, a: Any, b: Any
) -> str:
    made = workspace.plan.config if workspace is not None and workspace.plan is not None else None
    if workspace is None or config is None or not isinstance(made, HbmBufferConfig):
        return ""
    if not workspace.matches(OPERATION, (a.shape[0], b.shape[1], b.shape[0]), a.dtype, ctx.get_num_ranks(), _ALGORITHM):
        return ""  # the operation says what differs
    differing = [
        f"{name} is {getattr(made, name)}, this call has {getattr(config, name)}"
        for name in _MADE_FOR
        if getattr(made, name) != getattr(config, name)
    ]
    return f"the workspace was made for something else: {'; '.join(differing)}" if differing else ""


def _refuse_together(ctx: Iris, wrong: str, facts: Mapping[str, Any]) -> None:
    """Raise what is wrong here, or that something is on another rank. Collective when ``facts`` are new."""
    error = ArgumentError(wrong) if wrong else None
    ctx.agreement.reach("all_gather_matmul_hbm_buffer", ctx.resolve_group(None), facts, error)


def _output(ctx: Iris, a: Any, b: Any) -> torch.Tensor | None:
    """An output for these inputs; None when they are no matrices."""
    if not all(isinstance(matrix, torch.Tensor) and matrix.dim() == 2 for matrix in (a, b)):
        return None
    dtype = {torch.int8: torch.int32}.get(a.dtype, torch.float16 if a.dtype in checks.FP8 else a.dtype)
    return torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=ctx.get_device())


def _begin_trace(ctx: Iris, out: Any, a: Any, b: Any, bias: Any, config: HbmBufferConfig) -> Schedule | None:
    """The numbers of the call, with buffers for its events; None for what the operation refuses."""
    members = ctx.resolve_group(None)
    try:
        call = checked(ctx, members, out, a, b, bias, "none", (None, None), _ALGORITHM, config, 1, None)
    except IrisError:
        return None
    schedule, (rows, columns) = call.schedule, _tiles(out, config)
    assert schedule is not None
    pieces = rows * -(-a.shape[1] // (config.block_size_k * config.k_per_flag)) * (members.size - 1)
    # A span for each piece that is fetched and each piece of work on the output, and a wait for each piece of A that a
    # tile needs, twice where a tile is divided between two groups.
    work = schedule.whole + (rows * columns - schedule.whole) * schedule.splits
    needed = pieces * (1 + columns) + 2 * work
    if ctx.tracing.enabled and ctx.tracing.max_events >= needed:
        ctx.tracing.reset()
    else:
        ctx.tracing.enable(needed)
    return schedule


def _tiles(out: torch.Tensor, config: HbmBufferConfig) -> tuple[int, int]:
    return -(-out.shape[0] // config.block_size_m), -(-out.shape[1] // config.block_size_n)
