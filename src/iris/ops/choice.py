"""Which algorithm and tiles a fused operation takes when the caller leaves it open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch

from iris._target import KNOWN
from iris.errors import ArgumentError, UnsupportedError
from iris.ops.arguments import Problem
from iris.ops.config import FusedConfig, HbmBufferConfig
from iris.runtime.links import imitated, link_of, rate_of
from iris.runtime.logs import logger
from iris.tuning import Plan, cost_model
from iris.tuning.autotune import params_of
from iris.tuning.query import Query
from iris.tuning.selection import TORCH, Selection, lacking, select, unproven
from iris.tuning.steps import lookup
from iris.tuning.store import Record
from iris.tuning.tiles import fitted_tiles, float32_precision

if TYPE_CHECKING:
    from iris._target import Target
    from iris.runtime.context import Iris
    from iris.runtime.groups import Group

_OPERATION = "all_gather_matmul"
_STAGING = ("k_per_flag", "num_fetch_sms", "num_fetch_stages", "first_stage_fetch_sms")
_STAGED = {"sm": "hbm_buffer", "copy_engine": "copy_engine"}  # algorithms with a staging buffer, by transport
ALGORITHMS = ("torch", "pull", "hbm_buffer", "copy_engine")
# Rows up to which A is read inside the K loop where PyTorch cannot do it: a staging buffer is one more way to go.
PULL_ROWS = 64
# Programs that fetch, and bytes that they bring for one flag: 20 of them bring 600 GB/s in pieces of 256 KiB.
_FETCHERS = 20
_FLAG_BYTES = 256 << 10
# By how much the cost model errs, by vendor of the machine: on AMD it was fitted to another kernel.
_ERROR_OF_MODEL = {"nvidia": 0.1, "amd": 0.4}
_STAGE_ROWS = 16  # of tiles, in a stage when A is sharded along M
# Where 128 x 256 tiles of all rows are about one round, those of the peers' shards run beside the own ones and wait. Of
# narrower ones the own are multiplied while the shards come: two H200, NVLink, gather_dim=0, 0.42 to 1.21 rounds, 4 to
# 15 % less time. The best of them had smaller pieces than the wide tiles have.
_FEW_ROUNDS = 1.25
_NARROWER = {"block_size_n": 128, "num_stages": 5}
_NARROWER_FLAG_BYTES = 64 << 10
# Tiles for problems of one round, from large to small: rows, columns, depth, stages, warps; measured on an H200.
_SMALLER_TILES = ((128, 128, 128, 3, 8), (64, 128, 128, 4, 8), (64, 64, 128, 6, 4))


@dataclass(frozen=True)
class Place:
    """As much of a context as a choice asks, where there is none.

    Attributes:
        target: the device, with the compute units that a rank has.
        link: between the ranks, one of :data:`iris.runtime.links.LINKS`.
        tuned: what was tuned there.
    """

    target: Target
    link: str
    tuned: Mapping[Query, Record] = field(default_factory=dict, hash=False)

    def get_cu_count(self) -> int:
        return self.target.compute_units


@dataclass(frozen=True)
class Decision:
    """A plan and what it follows from.

    Attributes:
        plan: what is to run.
        found: what was known of the problem, or the rule that the cost model was asked about; None when nothing was.
        expected: what the cost model says; empty where it was not asked.
        config: of the kernel that was thought of; None where none was, or PyTorch's operations are known to be better.
    """

    plan: Plan
    found: Selection | None = None
    expected: str = ""
    config: FusedConfig | None = None


def choose(
    ctx: Iris,
    problem: Problem,
    algorithm: str | None,
    config: FusedConfig | None,
    torch_refuses: str,
    members: Group | None = None,
    apart: str = "",
) -> Plan:
    """The plan of an all-gather + matmul.

    Args:
        ctx: the context.
        problem: what is asked.
        algorithm: the caller's algorithm, None when open.
        config: the caller's configuration, None when open.
        torch_refuses: why PyTorch's operations cannot do it; empty when they can.
        members: the group; None where what was tuned on this machine does not count.
        apart: how A lies, where copies cannot bring it; empty when its rows lie together.

    Raises:
        ArgumentError: the caller named an unknown algorithm, or a configuration that does not fit the machine.
        UnsupportedError: the caller named an algorithm that cannot do it.
    """
    wide = float64_plan(_OPERATION, ALGORITHMS, problem, algorithm, config, torch_refuses)
    if wide is not None:
        return wide
    if algorithm is not None or config is not None:
        return _as_asked(ctx, problem, algorithm, config, torch_refuses)
    return decide(ctx, problem, torch_refuses, members, apart).plan


def decide(
    place: Iris | Place, problem: Problem, torch_refuses: str, members: Group | None = None, apart: str = ""
) -> Decision:
    """The choice of an all-gather + matmul that the caller leaves open.

    Args:
        place: a context, or what stands for one.
        problem, torch_refuses, members, apart: as of :func:`choose`.
    """
    decision = _decided(place, problem, torch_refuses, members)
    plan = decision.plan
    if plan.algorithm != "copy_engine":
        return decision
    if not apart:
        reason = f"{plan.reason}; while a graph is captured hbm_buffer runs in its place, as a graph can hold no copies"
        return replace(decision, plan=replace(plan, reason=reason))
    config = fetched(place, problem, plan.config)
    reason = f"{plan.reason}; that has copy_engine, and copies cannot bring {apart}, so hbm_buffer runs"
    # What was measured are copies.
    plan = replace(plan, algorithm="hbm_buffer", config=config, source="heuristic", reason=reason, speedup=None)
    return replace(decision, plan=plan, config=config)


def _decided(place: Iris | Place, problem: Problem, torch_refuses: str, members: Group | None) -> Decision:
    """As :func:`decide`, whether or not copies can be made."""

    def decided(algorithm: str, config: FusedConfig | None, source: str, reason: str) -> Decision:
        return Decision(_plan(algorithm, config, source, reason, problem), None, "", config)

    target, found = place.target, _selected(place, _OPERATION, problem, members, bool(torch_refuses))
    plan = _followed(
        place, _OPERATION, problem, found, bool(torch_refuses), lambda one: configured(place, problem, one)
    )
    if plan is not None:
        return Decision(plan, found, "", plan.config)
    if not target.compiled:
        reason = "kernels run under the interpreter, so results matter and speed does not"
        return decided("pull", fitted(target, problem), "heuristic", reason)
    if torch_refuses:
        if problem.M <= PULL_ROWS or problem.world_size == 1:
            return decided("pull", fitted(target, problem), "heuristic", torch_refuses)
        return decided("hbm_buffer", staged(place, problem, None), "heuristic", torch_refuses)
    if problem.world_size == 1:
        return decided("torch", None, "fallback", "one rank has nothing to gather, so PyTorch's matmul runs")
    if problem.a_dtype.itemsize != 2:
        reason = "the library's kernels were measured with 16-bit types only, so PyTorch gathers and multiplies"
        return decided("torch", None, "fallback", reason)
    received = problem.M * problem.K * 2 * (problem.world_size - 1) // problem.world_size
    entry = lookup(
        _OPERATION, _link(place), problem.world_size, received, target.product, gather_dim=str(problem.gather_dim)
    )
    if entry is not None:
        reason = f"a rank receives {received} bytes; {entry.reason}"
        if entry.algorithm == "torch":
            return decided("torch", None, "fallback", reason)
        config = staged(place, problem, entry.algorithm)
        return decided(entry.algorithm, config, "exact" if entry.measured else "heuristic", reason)
    rule = unproven(query_of(place, _OPERATION, problem))
    by_rule = None
    if rule is not None:
        config = _fitting(place, problem, configured(place, problem, rule))
        if config is not None:
            by_rule = _predicted(place, _OPERATION, problem, [(rule.algorithm, config)], rule)
            if by_rule.plan.algorithm != TORCH:
                return by_rule
    own = _predicted(place, _OPERATION, problem, [("hbm_buffer", staged(place, problem, None))])
    return own if by_rule is None or own.plan.algorithm != TORCH else by_rule


def query_of(place: Iris | Place, operation: str, problem: Problem) -> Query:
    """What tables, rules and what was tuned on this machine are asked."""
    target, world = place.target, problem.world_size
    adds = operation in ("matmul_all_reduce", "matmul_reduce_scatter")
    options = (("transpose", problem.transpose),)
    if problem.gather_dim is not None:
        options = (("gather_dim", str(problem.gather_dim)), *options)
    named = {"B": problem.b_dtype, "out": problem.out_dtype, "bias": problem.bias, "activation": problem.activation}
    named |= {"scaled": problem.scaled, "aligned": problem.aligned}
    if not isinstance(place, Place) and (link := imitated(place)):
        named["imitated"] = link
    if problem.a_dtype == torch.float32:
        named["precision"] = torch.get_float32_matmul_precision()
    return Query(
        operation,
        target.product,
        target.arch,
        _link(place),
        world,
        place.get_cu_count(),
        str(problem.a_dtype).removeprefix("torch."),
        # Where products are added, each rank has a part of the K of the whole one.
        (("M", problem.M), ("N", problem.N), ("K", problem.K * (world if adds else 1))),
        options,
        tuple((name, str(value).removeprefix("torch.")) for name, value in named.items()),
    )


def known(
    ctx: Iris,
    operation: str,
    problem: Problem,
    members: Group | None,
    torch_refused: bool,
    configured: Callable[[Selection], FusedConfig],
) -> Plan | None:
    """The plan that follows from what was measured, tuned or derived for the problem; None when nothing is known of it.

    Args:
        ctx: the context.
        operation: its name.
        problem: what is asked.
        members: the group; None where what was tuned on this machine does not count.
        torch_refused: whether PyTorch's operations cannot do it, so that they are no answer.
        configured: the configuration of a kernel that was selected. Raises ArgumentError where it does not fit.
    """
    found = _selected(ctx, operation, problem, members, torch_refused)
    return _followed(ctx, operation, problem, found, torch_refused, configured)


def _selected(
    place: Iris | Place, operation: str, problem: Problem, members: Group | None, torch_refused: bool
) -> Selection | None:
    query = query_of(place, operation, problem)
    if isinstance(place, Place):
        record = place.tuned.get(query)
    else:
        record = None if members is None else place.service("tuned").find(query, members)
    if record is not None and not torch_refused and not _met_torch(record):
        record = None
    if record is not None and not _usable(place, problem, query, record):
        record = None
    return select(query, record)


def _usable(place: Iris | Place, problem: Problem, query: Query, record: Record) -> bool:
    """Whether a record of the user's cache names something that there is; others are passed over with a warning."""
    reason = ""
    if record.algorithm not in cost_model.ALGORITHMS[query.operation]:
        reason = f"it names the algorithm {record.algorithm!r}"
    elif record.algorithm != TORCH:
        kind = HbmBufferConfig if record.algorithm in _STAGED.values() else FusedConfig
        try:
            config = kind(**record.params)
            config.validate(problem.world_size)
            check_fits(place.target, config, problem)
        except (TypeError, ArgumentError) as error:
            reason = str(error)
    if reason:
        logger.warning("what was tuned for %s cannot be used and is passed over: %s", query, reason)
    return not reason


def _met_torch(record: Record) -> bool:
    """Whether PyTorch's operations were tried beside what was tuned. They are not where they cannot do it, as for a
    list of ranks, and then the record says nothing to a caller for whom they can."""
    return record.speedup is not None or TORCH in (record.algorithm, *dict(record.candidates))


def _followed(
    place: Iris | Place,
    operation: str,
    problem: Problem,
    found: Selection | None,
    torch_refused: bool,
    configured: Callable[[Selection], FusedConfig],
) -> Plan | None:
    if found is None or (found.algorithm == TORCH and torch_refused):
        return None
    if found.algorithm == TORCH:
        return Plan(operation, TORCH, None, found.source, found.reason, str(problem))
    config = configured(found)
    # A case or a rule for other sizes need not fit these.
    if found.kind in ("nearest", "rule") and _fitting(place, problem, config) is None:
        return None
    config.validate(problem.world_size)
    check_fits(place.target, config, problem)
    return Plan(operation, found.algorithm, config, found.source, found.reason, str(problem), found.speedup)


def _fitting(place: Iris | Place, problem: Problem, config: FusedConfig) -> FusedConfig | None:
    try:
        config.validate(problem.world_size)
        check_fits(place.target, config, problem)
    except ArgumentError:
        return None
    return config


def _link(place: Iris | Place) -> str:
    return place.link if isinstance(place, Place) else link_of(place)


def configured(place: Iris | Place, problem: Problem, found: Selection) -> FusedConfig:
    """The configuration of an all-gather + matmul that was selected.

    Args:
        place: a context, or what stands for one.
        problem: what is asked.
        found: what was selected. A rule may set fields of :class:`Bringing`: then the problem decides the numbers.
    """
    params = dict(found.params)
    bringing = {field.name: params.pop(field.name) for field in fields(Bringing) if field.name in params}
    if found.algorithm == "pull":
        return FusedConfig(**params)
    if found.kind != "rule" or any(name in params for name in _STAGING):
        if found.algorithm == "copy_engine":
            params["transport"] = "copy_engine"
        return HbmBufferConfig(**params)
    tiles = replace(staged_tiles(place, problem, found.algorithm), **params)
    return staged(place, problem, found.algorithm, tiles, Bringing(**bringing))


def predicted(ctx: Iris, operation: str, problem: Problem, ways: Iterable[tuple[str, FusedConfig]]) -> Plan:
    """The plan by the cost model: the best of ``ways`` where that is expected to beat PyTorch's operations by more than
    the model errs, and those otherwise."""
    return _predicted(ctx, operation, problem, ways).plan


def _predicted(
    place: Iris | Place,
    operation: str,
    problem: Problem,
    ways: Iterable[tuple[str, FusedConfig]],
    rule: Selection | None = None,
) -> Decision:
    """As :func:`predicted`. ``rule``: whose ways they are; None for the library's own choice."""
    target, shown = place.target, str(problem)
    query = query_of(place, operation, problem)
    if not all(size for _, size in query.sizes):
        reason = "there is nothing to multiply, so PyTorch's operations run"
        return Decision(Plan(operation, TORCH, None, "fallback", reason, shown), rule, reason)
    if target.product not in KNOWN:
        reason = f"nothing was measured for {target.name}, and the cost model does not know it, so PyTorch runs"
        return Decision(Plan(operation, TORCH, None, "fallback", reason, shown), rule, reason)
    configs = dict(ways)
    best = cost_model.rank(
        [(algorithm, params_of(config)) for algorithm, config in configs.items()],
        operation, target.product, dict(query.sizes), query.world, query.dtype,
        gather_dim=1 if problem.gather_dim is None else problem.gather_dim, units=query.units,
        # The model has the rate of the links that the machine's devices have of their own.
        link_gbps=None if query.link == target.link else rate_of(query.link, max(1, query.world - 1)) / 1e9,
    )[0]  # fmt: skip
    wanted, config, speedup = 1 + _ERROR_OF_MODEL[target.vendor], configs[best.algorithm], best.prediction.speedup
    expected = (
        f"the cost model expects {best.algorithm} to take {best.prediction.fused * 1e3:.3g} ms over {query.link}, "
        f"{speedup:.2f}x PyTorch"
    )
    if speedup < wanted:
        expected += f", and it is taken from {wanted:.2f}x on, because of the model's error"
    reason = f"{lacking(query)}; {'' if rule is None else f'{rule.reason}; '}{expected}"
    if speedup < wanted:
        return Decision(Plan(operation, TORCH, None, "fallback", reason, shown), rule, expected, config)
    plan = Plan(operation, best.algorithm, config, "predicted", reason, shown, speedup)
    return Decision(plan, rule, expected, config)


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
    tiles = fitted_tiles(
        target, rows, problem.N, depth, problem.a_dtype.itemsize, operand_bytes=_operand_bytes(problem)
    )
    return FusedConfig(
        tiles.block_m, tiles.block_n, tiles.block_k, tiles.group_m, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip


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
    return float32_precision(target, dtype, None if config is None else config.allow_tf32)


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


@dataclass(frozen=True)
class Bringing:
    """How shards are brought to a staging buffer, before a problem decides the numbers.

    Attributes:
        fetchers: programs that fetch; a quarter of the programs at most.
        stage: rows of tiles of a stage, in times of those that a round of all programs multiplies.
        flag_bytes: the most that is brought for one flag.
    """

    fetchers: int = _FETCHERS
    stage: float = 1.0
    flag_bytes: int = _FLAG_BYTES


def usual_bringing(problem: Problem) -> Bringing:
    """How shards are brought where no rule says."""
    # Of a stage every peer brings its rows, so with more peers fewer rows each: else the first tiles wait long for the
    # last peer's. A rank alone with an imitated link, 8 ranks, M=16384: a quarter of the rows takes 15 to 26 % less.
    if problem.gather_dim == 0:
        return Bringing(stage=2 / problem.world_size)
    # Of each flag's blocks every peer brings its own before a tile goes on: smaller pieces, 1 to 18 % less.
    return Bringing(flag_bytes=_FLAG_BYTES // 2)


def wide_tiles(ctx: Iris | Place, problem: Problem) -> FusedConfig:
    """Tiles that fit the problem where shards are staged and there are enough tiles for several rounds."""
    tiles = fitted(ctx.target, problem)
    return replace(tiles, group_size_m=16) if tiles.block_size_m * tiles.block_size_n >= 128 * 256 else tiles


def staged_tiles(ctx: Iris | Place, problem: Problem, algorithm: str | None = None) -> FusedConfig:
    """Tiles that fit the problem where shards are staged: narrower ones where the wide ones are few.

    ``algorithm``: who brings the shards. Copies keep the wide tiles, as nothing else was measured with them.
    """
    tiles = wide_tiles(ctx, problem)
    return replace(tiles, **_NARROWER) if _few(ctx, problem, tiles, algorithm) else tiles


def _few(ctx: Iris | Place, problem: Problem, wide: FusedConfig, algorithm: str | None) -> bool:
    """Whether narrower tiles than these are better: over a link and on targets like those where that was measured."""
    if (problem.world_size, problem.gather_dim) != (2, 0) or algorithm == "copy_engine" or not ctx.target.descriptors:
        return False
    # Only dtypes of two bytes have tiles of this shape.
    if (wide.block_size_m, wide.block_size_n, wide.block_size_k) != (128, 256, 64):
        return False
    tiles = problem.world_size * -(-problem.M // (problem.world_size * 128)) * -(-problem.N // 256)
    taken = replace(wide, **_NARROWER).shared_memory_bytes(_operand_bytes(problem), _operand_bytes(problem))
    if tiles > _FEW_ROUNDS * ctx.get_cu_count() or taken > ctx.target.shared_memory_bytes:
        return False
    return _link(ctx) == "nvlink"


def staged(
    ctx: Iris | Place,
    problem: Problem,
    algorithm: str | None,
    tiles: FusedConfig | None = None,
    bringing: Bringing | None = None,
) -> HbmBufferConfig:
    """A configuration with a staging buffer: ``tiles``, or tiles that fit the problem, and how shards are brought."""
    how = bringing or usual_bringing(problem)
    if tiles is None:
        tiles = wide_tiles(ctx, problem)
        if _few(ctx, problem, tiles, algorithm):
            tiles = replace(tiles, **_NARROWER)
            how = bringing or replace(how, flag_bytes=_NARROWER_FLAG_BYTES)
    programs = tiles.num_sms or ctx.get_cu_count()
    rows = problem.M // (problem.world_size if problem.gather_dim == 0 else 1)
    tiles_m, tiles_n = -(-rows // tiles.block_size_m), -(-problem.N // tiles.block_size_n)
    # A stage is what one wave of programs multiplies. It has those rows of every part when A is sharded along M.
    parts = max(1, problem.world_size - 1) if problem.gather_dim == 0 else 1
    stage = max(1, round(how.stage * (programs // max(1, tiles_n * parts))))
    if problem.gather_dim == 0:
        # The own shard is multiplied first, so a stage may be larger, and its tiles then share more of B.
        stage = max(stage, round(how.stage * _STAGE_ROWS))
    fetchers = max(1, min(how.fetchers, programs // 4))
    # Pieces as large as pays, but enough of them for all fetchers.
    depth = problem.K // (problem.world_size if problem.gather_dim == 1 else 1)
    blocks = tiles_m * -(-depth // tiles.block_size_k) * (problem.world_size - 1)
    block_bytes = tiles.block_size_m * tiles.block_size_k * problem.a_dtype.itemsize
    k_per_flag = min(how.flag_bytes // block_bytes, blocks // (2 * fetchers))
    given = {field.name: getattr(tiles, field.name) for field in fields(FusedConfig)}
    return HbmBufferConfig(
        **given,
        k_per_flag=max(1, k_per_flag),
        num_fetch_sms=fetchers,
        num_fetch_stages=max(1, -(-tiles_m // stage)),
        first_stage_fetch_sms=fetchers,
        transport="copy_engine" if algorithm == "copy_engine" else "sm",
    )


def fetched(ctx: Iris | Place, problem: Problem, copied: HbmBufferConfig) -> HbmBufferConfig:
    """The tiles of a configuration whose shards are copied, with programs that fetch."""
    return staged(ctx, problem, "hbm_buffer", copied)


def _plan(algorithm: str, config: FusedConfig | None, source: str, reason: str, problem: Problem) -> Plan:
    return Plan(_OPERATION, algorithm, config, source, reason, str(problem))


def _operand_bytes(problem: Problem) -> int:
    # Two fp8 dtypes are widened to fp16 before they are multiplied.
    return 2 if problem.a_dtype != problem.b_dtype else problem.a_dtype.itemsize
