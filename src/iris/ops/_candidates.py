"""What tuning tries for a fused operation, the same on every rank: :func:`candidates`. ``tune=True``: :func:`tuner`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from iris.errors import ArgumentError, IrisError
from iris.ops.arguments import Problem
from iris.ops.call import torch_refuses
from iris.ops.choice import check_fits, configured, fitted, query_of, staged
from iris.ops.config import FusedConfig, HbmBufferConfig
from iris.runtime.groups import Group
from iris.runtime.links import incoming_rate
from iris.tuning import autotune, cost_model, tables
from iris.tuning.autotune import Candidate, params_of
from iris.tuning.plan import Plan
from iris.tuning.query import Entry, Query
from iris.tuning.selection import packaged_key, rule_of

if TYPE_CHECKING:
    from iris._target import Target
    from iris.runtime.context import Iris

Way = tuple[str, Any]  # an algorithm and its configuration
# Kernels with tiles of their own choice, by operation. Left out is what adds in the order in which ranks come; it runs
# when it is named. And copy_engine, of which the plan's own is tried where that has it: a graph runs hbm_buffer in its
# place, and the model would have copies take all the room.
_KERNELS = {
    "all_gather_matmul": ("hbm_buffer", "pull"),
    "matmul_all_gather": ("fused",),
    "matmul_all_reduce": ("two_shot", "one_shot"),
    "matmul_reduce_scatter": ("fused",),
}
_WRITE_PEERS = {("matmul_all_gather", "fused"), ("matmul_all_reduce", "two_shot")}
# Rows, columns, depth for two-byte elements, and warps of tiles. What does not fit a target is left out.
_TILES = (
    (256, 256, 64, 8), (256, 256, 32, 8), (128, 256, 64, 8), (256, 128, 64, 8), (128, 128, 64, 8), (128, 128, 128, 8),
    (128, 128, 32, 4), (64, 256, 64, 4), (64, 128, 64, 4), (64, 128, 128, 8), (64, 64, 128, 4), (32, 128, 128, 4),
    (16, 128, 128, 4), (16, 128, 256, 4),
)  # fmt: skip
_GROUPS = (4, 8, 16)
_FETCHERS = (8, 20, 32, 52)
_OF_A_TILE = 3  # candidates that differ in other things than the tile
_SUMS_A_THREAD = 128  # that registers hold beside what else is needed


def tuner(
    ctx: Iris,
    members: Group,
    algorithm: Any,
    config: Any,
    workspace: Any,
    group: Any,
    run: Callable[[str, Any], None],
    written: torch.Tensor | None = None,
) -> Callable[[Any], str]:
    """What tunes a call that the ranks have agreed on; gives the reason where nothing was tuned, else an empty text.

    Args:
        ctx: the context.
        members: the group.
        algorithm, config, workspace, group: of the call, which leaves the first three open.
        run: issues a call with an algorithm and a configuration.
        written: the output, where kernels may write that of other ranks.

    Raises:
        ArgumentError: the call does not leave open what tuning decides.
    """
    if algorithm is not None or config is not None or workspace is not None:
        raise ArgumentError(
            "tune=True finds the algorithm, its configuration and its workspace, so none of them may be given; to keep "
            "a workspace, tune first, and make it or take what the call returns afterwards"
        )

    def tune(call: Any) -> str:
        problem, plan = call.problem, call.plan
        if plan.source == "cache":
            return ""
        if not problem.M or not problem.N:
            return "there is nothing to compute, so nothing was tuned"
        reason = autotune.pointless(ctx)
        if reason:
            return reason
        query = query_of(ctx, plan.operation, problem)
        if ctx.service("tuned").settled(query, members):
            return ""
        reachable = members.size == 1 or written is None or ctx.is_symmetric(written)
        refused = bool(torch_refuses(problem, members, group, ctx))
        ways = candidates(ctx, plan, problem, query, reachable, refused, autotune.options().candidates)
        if len(ways) < 2:
            return "there is nothing to choose from, so nothing was tuned"
        listed = [_candidate(name, way, run) for name, way in ways.items()]
        autotune.tune(ctx, members, query, listed, packaged_key(query) if tables.exact(query) else None)
        return ""

    return tune


def candidates(
    ctx: Iris, plan: Plan, problem: Problem, query: Query, reachable: bool, torch_refused: bool, most: int = 8
) -> dict[str, Way]:
    """Ways to compute a product, by name: the plan's own, PyTorch's, what was measured nearby, what rules say, and the
    best by the cost model.

    Args:
        ctx: the context.
        plan: what would run without tuning; comes first.
        problem, query: the problem.
        reachable: whether other ranks can write the output.
        torch_refused: whether PyTorch's operations cannot do it.
        most: how many there may be, the first two among them.
    """
    kernels = [k for k in _KERNELS[plan.operation] if reachable or (plan.operation, k) not in _WRITE_PEERS]
    if problem.a_dtype == torch.float64:
        kernels = []  # they add in 32 bits
    found: dict[str, Way] = {}
    keys: set[str] = set()

    def add(way: Way) -> bool:
        algorithm, config = way
        key = autotune.config_key(algorithm, params_of(config))
        if key in keys or not _runs(ctx.target, problem, config):
            return False
        keys.add(key)
        name, number = described(algorithm, config), 2
        while name in found:
            name, number = f"{described(algorithm, config)} #{number}", number + 1
        found[name] = way
        return True

    add((plan.algorithm, plan.config))
    if not torch_refused:
        add(("torch", None))
    for way in [*_from_tables(ctx, query), *_by_rule(ctx, problem, query)]:
        if way[0] in kernels and len(found) < most:
            add(way)
    ranked = _ranked(ctx, query, _space(ctx, plan.operation, problem, kernels))
    # The best of each of several tiles, for where the model errs in tiles, and then the best of what is left.
    of_tile = Counter(_tile(*way) for way in found.values() if way[1] is not None)
    # Kernels that stage differ in how they fetch, too.
    different = len(found) + (most - len(found)) // 2 if "hbm_buffer" in kernels else most
    for limit, until in ((1, different), (_OF_A_TILE, most)):
        for algorithm, config in ranked:
            if len(found) >= until:
                break
            tile = _tile(algorithm, config)
            if of_tile[tile] < limit and add((algorithm, config)):
                of_tile[tile] += 1
    return found


def _tile(algorithm: str, config: FusedConfig) -> tuple[Any, ...]:
    return algorithm, config.block_size_m, config.block_size_n, config.block_size_k


def described(algorithm: str, config: Any) -> str:
    """A short name of a way."""
    if config is None:
        return algorithm
    tile = f"{config.block_size_m}x{config.block_size_n}x{config.block_size_k}"
    text = f"{algorithm} {tile} w{config.num_warps} s{config.num_stages} g{config.group_size_m}"
    if isinstance(config, HbmBufferConfig) and config.transport == "sm":
        fetchers = f"f{config.num_fetch_sms}/{config.first_stage_fetch_sms}"
        text += f" k{config.k_per_flag} {fetchers} p{config.num_fetch_stages}"
    return text


def _candidate(name: str, way: Way, run: Callable[[str, Any], None]) -> Candidate:
    algorithm, config = way
    return Candidate(name, algorithm, params_of(config), lambda: run(algorithm, config))


def _runs(target: Target, problem: Problem, config: Any) -> bool:
    """Whether a configuration is one, and can be compiled as far as can be told beforehand."""
    if config is None:
        return True
    try:
        config.validate(problem.world_size)
        check_fits(target, config, problem)
    except IrisError:
        return False
    return True


def _from_tables(ctx: Iris, query: Query) -> Iterator[Way]:
    """What the package knows of this case and of those near to it."""
    entries: Iterable[Entry | None] = (tables.exact(query), tables.nearest(query))
    for entry in entries:
        if entry is not None and entry.algorithm != "torch":
            yield from _way(entry.algorithm, entry.params)


def _by_rule(ctx: Iris, problem: Problem, query: Query) -> Iterator[Way]:
    """What the package's rules for the machine say."""
    rule = rule_of(query, query.machine)
    if rule is None or rule.algorithm in ("torch", ""):
        return
    if query.operation == "all_gather_matmul":
        yield rule.algorithm, configured(ctx, problem, rule)
    else:
        yield from _way(rule.algorithm, rule.params)


def _way(algorithm: str, params: Any) -> Iterator[Way]:
    """An algorithm and parameters as a way; none where they are not of its configuration."""
    kind = HbmBufferConfig if algorithm in ("hbm_buffer", "copy_engine") else FusedConfig
    names = {field.name for field in fields(kind)}
    if params.keys() <= names:
        config = kind(**params)
        if algorithm in ("two_shot", "one_shot"):
            config = replace(config, all_reduce_variant=algorithm)
        yield algorithm, config


def _space(ctx: Iris, operation: str, problem: Problem, kernels: Sequence[str]) -> Iterator[Way]:
    """All ways that are worth a thought, those of the library's own choice first."""
    if not kernels:
        return
    target, world = ctx.target, problem.world_size
    # Rows that tiles are of: those of one rank where ranks have rows of their own.
    divided = problem.gather_dim == 0 or operation in ("matmul_all_gather", "matmul_reduce_scatter")
    rows = -(-problem.M // world) if divided else problem.M
    own = fitted(target, problem if problem.gather_dim is not None else replace(problem, M=rows))
    tiles = [own]
    # Where a loop has few stages more of them do not fit, or do not pay.
    depths = (own.num_stages,) if own.num_stages < 3 else (own.num_stages, 3, 6)
    for m, n, k, warps in _TILES if target.compiled else ():
        # Tiles of which more than half would be empty are for smaller problems.
        if (
            m * n <= _SUMS_A_THREAD * warps * target.warp_size
            and (m < 2 * rows or m == 16)
            and (n < 2 * problem.N or n == 64)
        ):
            deep = max(16, k * 2 // max(2, problem.a_dtype.itemsize))
            tile = replace(own, block_size_m=m, block_size_n=n, block_size_k=deep, num_warps=warps)
            tiles += [replace(tile, num_stages=stages) for stages in dict.fromkeys(depths)]
    tiles = [tile for tile in tiles if _runs(target, problem, tile)]
    for kernel in kernels:
        for tile in tiles:
            for grouped in (tile, *(replace(tile, group_size_m=group) for group in _GROUPS)):
                yield from _variants(ctx, problem, kernel, grouped)


def _variants(ctx: Iris, problem: Problem, kernel: str, tile: FusedConfig) -> Iterator[Way]:
    if kernel in ("two_shot", "one_shot"):
        yield kernel, replace(tile, all_reduce_variant=kernel)
        return
    if kernel != "hbm_buffer":
        yield kernel, tile
        return
    if problem.world_size == 1:
        return  # there is nothing to stage
    usual = staged(ctx, problem, kernel, tile)
    yield kernel, usual
    for fetchers in _FETCHERS:
        for blocks in dict.fromkeys((usual.k_per_flag, max(1, usual.k_per_flag // 2), 2 * usual.k_per_flag)):
            first = max(fetchers, usual.first_stage_fetch_sms)
            yield kernel, replace(usual, num_fetch_sms=fetchers, first_stage_fetch_sms=first, k_per_flag=blocks)


def _ranked(ctx: Iris, query: Query, ways: Iterable[Way]) -> list[Way]:
    """Ways, the best by the cost model first; in the order given where it knows nothing of the machine."""
    listed = list(ways)
    asked = [(algorithm, params_of(config)) for algorithm, config in listed]
    by_key = {autotune.config_key(*one): way for one, way in zip(asked, listed, strict=True)}
    gather_dim = int(dict(query.options).get("gather_dim", 1))
    # Where ranks share a card no link is in the way, or an imitated one.
    link_gbps = incoming_rate(ctx, query.world - 1) / 1e9 if query.link == "shared" and query.world > 1 else None
    try:
        ranked = cost_model.rank(
            asked, query.operation, query.machine, dict(query.sizes), query.world, query.dtype,
            gather_dim=gather_dim, units=query.units, link_gbps=link_gbps,
        )  # fmt: skip
    except IrisError:
        return listed
    return [by_key[autotune.config_key(one.algorithm, one.params)] for one in ranked]
