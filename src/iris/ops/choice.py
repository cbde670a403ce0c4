"""Which algorithm and tiles a fused operation takes when the caller leaves it open."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch

from iris.errors import ArgumentError, UnsupportedError
from iris.ops.arguments import Problem
from iris.ops.config import FusedConfig, HbmBufferConfig
from iris.runtime.links import link_of
from iris.tuning import Plan
from iris.tuning.steps import lookup

if TYPE_CHECKING:
    from iris._target import Target
    from iris.runtime.context import Iris

_OPERATION = "all_gather_matmul"
_STAGED = {"sm": "hbm_buffer", "copy_engine": "copy_engine"}  # algorithms with a staging buffer, by transport
ALGORITHMS = ("torch", "pull", "hbm_buffer", "copy_engine")
# Rows up to which A is read inside the K loop where PyTorch cannot do it: a staging buffer is one more way to go.
PULL_ROWS = 64
# Programs that fetch, and bytes that they bring for one flag: 20 of them bring 600 GB/s in pieces of 256 KiB.
_FETCHERS = 20
_FLAG_BYTES = 256 << 10
_STAGE_ROWS = 16  # of tiles, in a stage when A is sharded along M
# Tiles for problems of one round, from large to small: rows, columns, depth, stages, warps; measured on an H200.
_SMALLER_TILES = ((128, 128, 128, 3, 8), (64, 128, 128, 4, 8), (64, 64, 128, 6, 4))


def choose(ctx: Iris, problem: Problem, algorithm: str | None, config: FusedConfig | None, torch_refuses: str) -> Plan:
    """The plan of an all-gather + matmul.

    Args:
        ctx: the context.
        problem: what is asked.
        algorithm: the caller's algorithm, None when open.
        config: the caller's configuration, None when open.
        torch_refuses: why PyTorch's operations cannot do it; empty when they can.

    Raises:
        ArgumentError: the caller named an unknown algorithm, or a configuration that does not fit the machine.
        UnsupportedError: the caller named an algorithm that cannot do it.
    """
    wide = float64_plan(_OPERATION, ALGORITHMS, problem, algorithm, config, torch_refuses)
    if wide is not None:
        return wide
    if algorithm is not None or config is not None:
        return _as_asked(ctx, problem, algorithm, config, torch_refuses)
    target = ctx.target
    if not target.compiled:
        reason = "kernels run under the interpreter, so results matter and speed does not"
        return _plan("pull", fitted(target, problem), "heuristic", reason, problem)
    if torch_refuses:
        if problem.M <= PULL_ROWS or problem.world_size == 1:
            return _plan("pull", fitted(target, problem), "heuristic", torch_refuses, problem)
        return _plan("hbm_buffer", staged(ctx, problem, None), "heuristic", torch_refuses, problem)
    if problem.world_size == 1:
        return _plan("torch", None, "fallback", "one rank has nothing to gather, so PyTorch's matmul runs", problem)
    if problem.a_dtype.itemsize != 2:
        reason = "the library's kernels were measured with 16-bit types only, so PyTorch gathers and multiplies"
        return _plan("torch", None, "fallback", reason, problem)
    received = problem.M * problem.K * 2 * (problem.world_size - 1) // problem.world_size
    link = link_of(ctx)
    entry = lookup(_OPERATION, link, problem.world_size, received, gather_dim=str(problem.gather_dim))
    upper = "and more" if entry.bytes_to is None else f"to {entry.bytes_to}"
    reason = (
        f"a rank receives {received} bytes; the table has it for {entry.bytes_from} {upper}, {problem.world_size} "
        f"ranks, {link} ({entry.source})"
    )
    if entry.algorithm == "torch":
        return _plan("torch", None, "fallback", reason, problem)
    config = staged(ctx, problem, entry.algorithm)
    return _plan(entry.algorithm, config, "exact" if entry.measured else "heuristic", reason, problem)


def float64_plan(
    operation: str,
    algorithms: tuple[str, ...],
    problem: Problem,
    algorithm: str | None,
    config: FusedConfig | None,
    torch_refuses: str,
) -> Plan | None:
    """The plan of a product in float64, which PyTorch's operations alone compute; None where that is not the question.

    Raises:
        UnsupportedError: the caller named a kernel, or PyTorch cannot do it.
    """
    if problem.a_dtype != torch.float64 or algorithm == "torch" or algorithm not in (None, *algorithms):
        return None
    reason = "the library's kernels add in 32 bits, so float64 is for algorithm 'torch'"
    if algorithm is not None or config is not None:
        raise UnsupportedError(f"{operation}: {reason}")
    if torch_refuses:
        raise UnsupportedError(f"{operation}: {reason}, which cannot do this: {torch_refuses}")
    return Plan(operation, "torch", None, "fallback", reason, str(problem))


def fitted(target: Target, problem: Problem) -> FusedConfig:
    """Tiles that fit the problem and the target's shared memory, without a staging buffer."""
    rows = problem.M // (problem.world_size if problem.gather_dim == 0 else 1)
    depth = problem.K // (problem.world_size if problem.gather_dim == 1 else 1)
    if not target.compiled:
        # The interpreter's cost is by statement, not by element: few big tiles.
        m, n, k = _power(rows, 16, 128), _power(problem.N, 16, 128), _power(depth, 16, 128)
        return FusedConfig(m, n, k, group_size_m=4, num_warps=4, num_stages=1)
    m = _power(rows, 16, 128)
    # Wider tiles spill registers, except for two-byte dtypes.
    widest = 256 if problem.a_dtype.itemsize == 2 else 128
    n = _power(problem.N, 16, widest if m == 128 else 128 if m >= 64 else 64)
    k = {4: 32, 2: 64, 1: 128}[problem.a_dtype.itemsize]
    stages = 2 if target.vendor == "amd" else 4
    config = FusedConfig(m, n, k, group_size_m=8, num_warps=8 if m * n >= 128 * 128 else 4, num_stages=stages)
    while config.shared_memory_bytes(_operand_bytes(problem), _operand_bytes(problem)) > target.shared_memory_bytes:
        config = _smaller(config)
    return config


def tiles_for(ctx: Iris, problem: Problem, rows: int, owners: int) -> FusedConfig:
    """Tiles of a product of ``rows`` rows for each of ``owners``.

    What cannot keep all programs busy with tiles of the best shape takes the smallest that still are multiplied in one
    round, because more programs read B then; and with few rows, tiles that are deep, because B comes from memory.
    """
    target, programs = ctx.target, ctx.get_cu_count()
    config = fitted(target, replace(problem, M=rows))
    if target.vendor != "nvidia" or not target.compiled or problem.a_dtype.itemsize != 2 or not rows:
        return config
    if config.block_size_m <= 32:
        return replace(config, block_size_k=256, num_stages=4)
    for m, n, k, stages, warps in _SMALLER_TILES:
        tiles = owners * -(-rows // m) * -(-problem.N // n)
        if m <= config.block_size_m and n <= config.block_size_n and tiles <= programs:
            config = replace(config, block_size_m=m, block_size_n=n, block_size_k=k, num_stages=stages, num_warps=warps)
    return config


def check_fits(target: Target, config: FusedConfig, problem: Problem) -> None:
    """Raise ArgumentError when the K loop of a configuration cannot have the shared memory that it takes."""
    if target.vendor != "nvidia":
        return
    # A lower bound there. Other compilers reuse buffers, so what does not fit shows when the kernel is loaded.
    needed = config.shared_memory_bytes(_operand_bytes(problem), _operand_bytes(problem))
    if needed > target.shared_memory_bytes:
        raise ArgumentError(
            f"the configuration needs {needed} bytes of shared memory, {target.arch} has "
            f"{target.shared_memory_bytes}; make num_stages={config.num_stages}, "
            f"block_size_k={config.block_size_k} or the tile {config.block_size_m}x{config.block_size_n} smaller"
        )


def precision(target: Target, dtype: torch.dtype, config: FusedConfig | None) -> str:
    """``"tf32"`` when float32 inputs may use it on this target, else ``"ieee"``."""
    allowed = torch.get_float32_matmul_precision() != "highest"
    if config is not None and config.allow_tf32 is not None:
        allowed = config.allow_tf32
    return "tf32" if allowed and dtype == torch.float32 and target.vendor == "nvidia" else "ieee"


def _as_asked(
    ctx: Iris, problem: Problem, algorithm: str | None, config: FusedConfig | None, torch_refuses: str
) -> Plan:
    if algorithm not in (None, *ALGORITHMS):
        raise ArgumentError(f"algorithm {algorithm!r} is not known for {_OPERATION}; possible: {', '.join(ALGORITHMS)}")
    if algorithm == "torch":
        if config is not None:
            raise ArgumentError("algorithm 'torch' runs PyTorch's operations and takes no config")
        if torch_refuses:
            raise UnsupportedError(f"algorithm 'torch' cannot do this: {torch_refuses}; 'pull' can")
        return _plan("torch", None, "user", "the caller named it", problem)
    if config is None:
        config = fitted(ctx.target, problem) if algorithm == "pull" else staged(ctx, problem, algorithm)
        return _plan(algorithm or "pull", config, "user", "the caller named it; tiles fitted to the problem", problem)
    kernel = algorithm or (_STAGED[config.transport] if isinstance(config, HbmBufferConfig) else "pull")
    if isinstance(config, HbmBufferConfig):
        if kernel != _STAGED[config.transport]:
            raise ArgumentError(
                f"algorithm {kernel!r} does not go with an HbmBufferConfig of transport {config.transport!r}, which is "
                f"for {_STAGED[config.transport]!r}; 'pull' takes a FusedConfig"
            )
    elif kernel != "pull":
        config = staged(ctx, problem, kernel, config)
    reason = "the caller named it" if algorithm else "the caller gave a configuration, which is for the kernel"
    check_fits(ctx.target, config, problem)
    return _plan(kernel, config, "user", reason, problem)


def staged(ctx: Iris, problem: Problem, algorithm: str | None, tiles: FusedConfig | None = None) -> HbmBufferConfig:
    """A configuration with a staging buffer: ``tiles``, or tiles that fit the problem, and how shards are brought."""
    if tiles is None:
        tiles = fitted(ctx.target, problem)
        if tiles.block_size_m * tiles.block_size_n >= 128 * 256:
            tiles = replace(tiles, group_size_m=16)
    programs = tiles.num_sms or ctx.get_cu_count()
    rows = problem.M // (problem.world_size if problem.gather_dim == 0 else 1)
    tiles_m, tiles_n = -(-rows // tiles.block_size_m), -(-problem.N // tiles.block_size_n)
    # A stage is what one wave of programs multiplies. It has those rows of every part when A is sharded along M.
    parts = max(1, problem.world_size - 1) if problem.gather_dim == 0 else 1
    stage = max(1, programs // max(1, tiles_n * parts))
    if problem.gather_dim == 0:
        # The own shard is multiplied first, so a stage may be larger, and its tiles then share more of B.
        stage = max(stage, _STAGE_ROWS)
    fetchers = max(1, min(_FETCHERS, programs // 4))
    # Pieces as large as pays, but enough of them for all fetchers.
    depth = problem.K // (problem.world_size if problem.gather_dim == 1 else 1)
    blocks = tiles_m * -(-depth // tiles.block_size_k) * (problem.world_size - 1)
    block_bytes = tiles.block_size_m * tiles.block_size_k * problem.a_dtype.itemsize
    k_per_flag = min(_FLAG_BYTES // block_bytes, blocks // (2 * fetchers))
    given = {field.name: getattr(tiles, field.name) for field in fields(FusedConfig)}
    return HbmBufferConfig(
        **given,
        k_per_flag=max(1, k_per_flag),
        num_fetch_sms=fetchers,
        num_fetch_stages=max(1, -(-tiles_m // stage)),
        first_stage_fetch_sms=fetchers,
        transport="copy_engine" if algorithm == "copy_engine" else "sm",
    )


def _plan(algorithm: str, config: FusedConfig | None, source: str, reason: str, problem: Problem) -> Plan:
    return Plan(_OPERATION, algorithm, config, source, reason, str(problem))


def _operand_bytes(problem: Problem) -> int:
    # Two fp8 dtypes are widened to fp16 before they are multiplied.
    return 2 if problem.a_dtype != problem.b_dtype else problem.a_dtype.itemsize


def _smaller(config: FusedConfig) -> FusedConfig:
    if config.num_stages > 2:
        return replace(config, num_stages=config.num_stages - 1)
    if config.block_size_n > 64:
        return replace(config, block_size_n=config.block_size_n // 2)
    return replace(config, block_size_k=config.block_size_k // 2)


def _power(size: int, least: int, most: int) -> int:
    value = least
    while value < size and value < most:
        value *= 2
    return value
