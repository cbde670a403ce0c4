"""What tuning tries for a collective, the same on every rank: algorithms, how many programs, how large their blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from iris.ccl._calls import Call, Request, relation
from iris.ccl.choice import Programs, query_of
from iris.ccl.config import Config
from iris.errors import ArgumentError, CaptureError, IrisError
from iris.runtime.links import incoming_rate
from iris.tuning import autotune, cost_model, tables
from iris.tuning.autotune import Candidate, params_of
from iris.tuning.query import Query
from iris.tuning.selection import packaged_key

if TYPE_CHECKING:
    from iris.runtime.context import Iris

# Left out: what adds in the order in which ranks come, so that last bits differ from call to call. It runs when named.
VARIANTS = {
    "all_reduce": ("push", "two_shot", "one_shot", "ring"),
    "all_gather": ("persistent", "partitioned", "copy_engine"),
    "reduce_scatter": ("two_shot",),
    "all_to_all": ("default",),
    "broadcast": ("direct", "scatter_allgather"),
}
_COUNTED_BY_OUTPUT = ("all_gather", "broadcast")
_MOST_ELEMENTS = 1 << 16  # of a block


def tune(request: Request, prepare: Callable[[Request], Call], call: Call, run: Callable[[Any], None]) -> str:
    """Tune a call that the ranks have agreed on; gives the reason where nothing was tuned, else an empty text.

    Args:
        request: the call.
        prepare: checks a request; local.
        call: what would run without tuning.
        run: issues a call with a configuration.

    Raises:
        ArgumentError: the call does not leave its configuration open.
        CaptureError: a graph is being captured.
    """
    ctx, members, operation = request.ctx, request.members, request.operation
    if request.facts["config"] is not None:
        raise ArgumentError(f"{operation}: tune=True finds the configuration, so none may be given")
    if ctx.capturing():
        raise CaptureError(f"{operation}: tuning measures, which a graph cannot capture; tune before the capture")
    if call.plan.source == "cache":
        return ""
    if call.issue is None or members.size == 1:
        return "there is nothing to exchange, so nothing was tuned"
    out, inp = request.tensors["output_tensor"], request.tensors.get("input_tensor")
    if operation == "reduce_scatter" and inp is not None and out.shape == inp.shape:
        return "the configuration says which tiles a rank owns, so nothing was tuned"
    reason = autotune.pointless(ctx)
    if reason:
        return reason
    counted = out if operation in _COUNTED_BY_OUTPUT or inp is None else inp
    query = query_of(ctx, operation, members, counted.numel() * counted.element_size(), counted.dtype)
    if ctx.service("tuned").settled(query, members):
        return ""
    ways = candidates(request, prepare, call, query, autotune.options().candidates)
    # What is combined in place would be combined again by every call.
    saved = inp.clone() if inp is not None and relation(out, inp) != "apart" else None
    try:
        listed = [_candidate(operation, name, way, run) for name, way in ways.items()]
        autotune.tune(ctx, members, query, listed, packaged_key(query) if tables.exact(query) else None)
    finally:
        if inp is not None and saved is not None:
            inp.copy_(saved)
    return ""


def candidates(
    request: Request, prepare: Callable[[Request], Call], call: Call, query: Query, most: int = 8
) -> dict[str, tuple[str, Config | None]]:
    """Ways to run a collective, by name: the default, PyTorch's, and the best of each algorithm by the cost model."""
    found: dict[str, tuple[str, Config | None]] = {call.plan.algorithm: (call.plan.algorithm, None)}

    def add(algorithm: str, config: Config) -> bool:
        name = described(algorithm, config)
        if name in found:
            return False
        try:
            prepare(replace(request, facts={**request.facts, "config": config}))
        except IrisError:
            return False
        found[name] = algorithm, config
        return True

    variants = VARIANTS[query.operation]
    add("torch", _named(query.operation, "torch"))
    share = max(1, -(-(most - len(found)) // len(variants)))
    taken: dict[str, int] = {}
    for algorithm, config in _ranked(request.ctx, query, list(_space(request.ctx, query, call))):
        if len(found) >= most:
            break
        if taken.get(algorithm, 0) < share and add(algorithm, config):
            taken[algorithm] = taken.get(algorithm, 0) + 1
    return found


def described(algorithm: str, config: Config | None) -> str:
    """A short name of a way."""
    text = algorithm
    if config is not None and config.comm_sms is not None:
        text += f" {config.comm_sms} programs"
    if config is not None and config.names_block:
        text += f" blocks of {config.block_size_m * config.block_size_n}"
    return text


def _candidate(operation: str, name: str, way: tuple[str, Config | None], run: Callable[[Any], None]) -> Candidate:
    algorithm, config = way
    params = params_of(config)
    params.pop(f"{operation}_variant", None)  # the algorithm says it
    return Candidate(name, algorithm, params, lambda: run(config))


def _named(operation: str, algorithm: str, **given: Any) -> Config:
    return Config(**{f"{operation}_variant": algorithm, **given})


def _space(ctx: Iris, query: Query, call: Call) -> Iterator[tuple[str, Config]]:
    """All ways that are worth a thought, those that are most like the library's own choice first."""
    lanes = min(ctx.channels.layout.lanes, ctx.get_cu_count())
    programs: list[dict[str, int]] = [{}, *({"comm_sms": lanes // part} for part in (2, 4, 8) if lanes >= part)]
    blocks: list[dict[str, int]] = [{}]
    if isinstance(call.plan.config, Programs):
        sizes = (2 * call.plan.config.block, call.plan.config.block // 2)
        blocks += [{"block_size_m": 1, "block_size_n": size} for size in sizes if 16 <= size <= _MOST_ELEMENTS]
    for block in blocks:
        for count in programs:
            for algorithm in VARIANTS[query.operation]:
                if algorithm == "copy_engine" and (count or block):
                    continue  # it has no programs
                yield algorithm, _named(query.operation, algorithm, **count, **block)


def _ranked(ctx: Iris, query: Query, ways: list[tuple[str, Config]]) -> list[tuple[str, Config]]:
    """Ways, the best by the cost model first; in the order given where it knows nothing of the machine."""
    link_gbps = incoming_rate(ctx, query.world - 1) / 1e9 if query.link == "shared" else None

    def seconds(way: tuple[str, Config]) -> float:
        algorithm, config = way
        params = {} if config.comm_sms is None else {"comm_sms": config.comm_sms}
        return cost_model.predict(
            query.operation, query.machine, dict(query.sizes), query.world, query.dtype, params,
            algorithm=algorithm, units=query.units, link_gbps=link_gbps,
        ).fused  # fmt: skip

    try:
        return sorted(ways, key=seconds)
    except IrisError:
        return ways
