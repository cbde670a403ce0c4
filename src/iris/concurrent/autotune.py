"""Tuning the split and the tile of a GEMM beside a collective, on the machine that it runs on.

``tune=True`` of the operations of :mod:`iris.concurrent.gemm` goes through :func:`tuned`; :func:`tune_config` is for a
function of one's own. What is tried are the best by :mod:`iris.concurrent.predictor` and those that were derived from
measurements, and always what would run without tuning, which stays unless another is faster. Ranks agree on all of it:
what is known, what is tried, what fails, and what is fastest (:mod:`iris.tuning.autotune`), and what was found is kept
where all that is tuned is (:mod:`iris.tuning.store`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from iris._target import KNOWN
from iris.concurrent import predictor
from iris.concurrent._candidates import Candidate, Conditions, candidates, default_split
from iris.concurrent.predictor import Tile
from iris.errors import ArgumentError, CaptureError
from iris.runtime.checks import overlap
from iris.runtime.groups import Group
from iris.runtime.links import incoming_rate, link_of
from iris.tuning import autotune as tuner
from iris.tuning import store
from iris.tuning.query import Query

if TYPE_CHECKING:
    from iris.concurrent._call import Asked, Call
    from iris.runtime.context import Iris

__all__ = ["cache_path", "clear", "load_db", "topk_configs", "trying", "tune_config"]

Tensors = Mapping[str, Any]
Way = tuple[int, Tile]  # programs that begin with the GEMM, and its tile
_PREFIX = "concurrent."
_given: ContextVar[tuple[Way, ...] | None] = ContextVar("iris_concurrent_ways", default=None)


@contextmanager
def trying(ways: Sequence[Way]) -> Iterator[None]:
    """Let tuning try these splits and tiles in a block, beside what would run without it; all ranks have to."""
    token = _given.set(tuple(ways))
    try:
        yield
    finally:
        _given.reset(token)


def topk_configs(
    shape: Mapping[str, Any],
    num_wgs: int | None = None,
    k: int = 8,
    *,
    machine: str = "mi300x",
    default_gemm_block: Tile = predictor.DEFAULT_TILE,
    mt_candidates: Sequence[Tile] | None = None,
    mode: str = "fused",
    dtype: str = "float16",
    comm_block: tuple[int, int] | None = None,
) -> list[dict[str, Any]]:
    """The splits and tiles that tuning would try on a machine, the most promising first; what runs without tuning is
    tried beside them.

    Args:
        shape: as :mod:`iris.concurrent.predictor` has it.
        num_wgs: programs; None for one a compute unit.
        k: how many there may be.
        machine: a name of :data:`iris._target.KNOWN`.
        default_gemm_block: the tile without tuning.
        mt_candidates: tiles to choose from; None for what the machine has room for.
        mode, comm_block: of the operation.
        dtype: of A, B and the collective, as torch names it.

    Returns:
        Each with ``gemm_wgs``, ``gemm_block`` and ``pred_ms``, which is None where nothing is predicted.
    """
    if machine not in KNOWN:
        raise ArgumentError(f"machine {machine!r} is not known; possible: {', '.join(KNOWN)}")
    target = KNOWN[machine]
    itemsize = getattr(torch, dtype).itemsize
    where = Conditions(
        target, machine, dtype, itemsize, itemsize, target.compute_units if num_wgs is None else num_wgs,
        target.compute_units, mode, comm_block=comm_block,
    )  # fmt: skip
    found = candidates(shape, where, default_gemm_block, mt_candidates, most=k)
    return [{"gemm_wgs": one.gemm_wgs, "gemm_block": one.gemm_block, "pred_ms": one.pred_ms} for one in found]


def tune_config(
    ctx: Iris,
    *,
    run: Callable[[int | None, Tile | None], Any],
    shape: Mapping[str, Any],
    mode: str = "fused",
    num_wgs: int | None = None,
    default_gemm_block: Tile = predictor.DEFAULT_TILE,
    default_gemm_wgs: int | None = None,
    dtype: str = "float16",
    comm_dtype: str | None = None,
    comm_block: tuple[int, int] | None = None,
    k: int | None = None,
    candidates: Sequence[Way] | None = None,
    mt_candidates: Sequence[Tile] | None = None,
    extra_key: Mapping[str, Any] | None = None,
    force: bool = False,
    group: Any = None,
) -> dict[str, Any]:
    """Find the fastest split and tile for a function. Collective over ``group``, whose ranks give the same.

    Args:
        ctx: the context.
        run: issues a call with a split and a tile to the current stream; collective, too. Calls of the library's
            kernels alone: before they are timed they are compiled, and nothing is launched.
        shape: as :mod:`iris.concurrent.predictor` has it.
        mode, num_wgs, comm_block: of the call.
        default_gemm_block, default_gemm_wgs: what runs without tuning; None for the split of the operations.
        dtype, comm_dtype: as torch names them; None for the same.
        k: how many are tried beside the default; None for what :class:`iris.tuning.autotune.Options` says.
        candidates: those to try; None for the best by what is known.
        mt_candidates: tiles to choose from; None for what the device has room for.
        extra_key: what else the call depends on.
        force: whether to measure what has been tuned before.
        group: None for all ranks, a process group or a sequence of ranks.

    Returns:
        ``gemm_wgs`` and ``gemm_block``; ``measured_ms`` of the slowest rank; ``pred_ms`` or None; ``cached``, whether
        it had been tuned before.

    Raises:
        ArgumentError: the shape is none.
        CaptureError, RankMismatch, UnsupportedError, WaitTimeout: as :func:`iris.tuning.autotune.tune` has it.
    """
    predictor.checked_shape(shape)
    members = ctx.resolve_group(group)
    reason = tuner.pointless(ctx)
    total = ctx.get_cu_count() if num_wgs is None else num_wgs
    default = default_split(total, mode) if default_gemm_wgs is None else default_gemm_wgs, default_gemm_block
    names = dtype, dtype if comm_dtype is None else comm_dtype
    where = _conditions(ctx, members, *names, total, mode=mode, comm_block=comm_block)
    asked = {name: value for name, value in shape.items() if name not in ("collective", "world")}
    if reason:
        return _answer(default, None, where, shape, False)
    given = {"default": default, **(extra_key or {})}
    query = _query(ctx, members, str(shape["collective"]), tuple(asked.items()), dtype, {
        "mode": mode, "num_wgs": total, "comm": names[1], "comm_block": comm_block, "called": "tune_config", **given,
    })  # fmt: skip
    if force:
        ctx.service("tuned").forget()
    found = ctx.service("tuned").find(query, members) if ctx.service("tuned").settled(query, members) else None
    if found is not None:
        return _answer(_way(found.params, default), found.milliseconds, where, shape, True)
    most = tuner.options().candidates if k is None else k + 1
    listed = _listed(shape, where, default, most, mt_candidates, candidates)
    tuning = tuner.tune(ctx, members, query, [
        tuner.Candidate(name, mode, params, lambda way=way: run(*way)) for name, params, way in listed
    ])  # fmt: skip
    record = tuning.record
    return _answer(_way(record.params, default), record.milliseconds, where, shape, not tuning.trials)


def cache_path(collective: str) -> Path | None:
    """The file of what was tuned for a collective, which need not exist; None without a cache folder."""
    return store.file_of(_PREFIX + _known(collective))


def load_db() -> dict[str, dict[str, Any]]:
    """What was tuned and is valid with the versions here, of any machine, by the key of its file."""
    return {
        store.key_of(query): {
            "config": dict(record.params), "measured_ms": record.milliseconds, "n_candidates": len(record.candidates),
            "candidates_ms": dict(record.candidates), "date": record.date,
        }
        for query, record in store.read_all().items()
        if query.operation.startswith(_PREFIX)
    }  # fmt: skip


def clear(ctx: Iris | None = None) -> int:
    """Remove what was tuned from the files, and with ``ctx`` from what it knows, which every rank does alike.

    Returns:
        How many records there were in the files.
    """
    if ctx is not None:
        ctx.service("tuned").forget()
    return sum(store.clear(_PREFIX + collective) for collective in predictor.COLLECTIVES)


def tuned(
    ctx: Iris, name: str, asked: Asked, call: Call, tensors: Tensors, run: Callable[[Asked, Tensors], Any]
) -> Asked:
    """The arguments of a call that the ranks have agreed on, with the split and the tile that are the fastest for it.

    Collective over the group where the case was not tuned before. Under the interpreter, and where there is nothing to
    choose from, nothing is tuned.

    Args:
        ctx: the context.
        name: of the operation.
        asked: its arguments, which leave the split open (:func:`check_open`).
        call: what they come to without tuning.
        tensors: ``A``, ``B``, ``comm_src``, ``C`` and ``comm_dst``, of which the last two may be None. They are
            overwritten; ``comm_src`` keeps its values, also where ``comm_dst`` is in the same memory.
        run: issues a call with other arguments, and both outputs.

    Raises:
        CaptureError: a graph is being captured, and the case was not tuned before.
    """
    asked = replace(asked, tune=False)
    if tuner.pointless(ctx) or not all(size for _, size in _sizes(name, call, tensors)):
        return asked
    members, known, query = call.members, ctx.service("tuned"), case_of(ctx, name, asked, call, tensors)
    if known.settled(query, members):
        return _with(asked, known.find(query, members).params)
    if ctx.capturing():
        raise CaptureError(f"concurrent.{name}: tuning measures, which a graph cannot capture; tune before the capture")
    a, b, src = (tensors[place] for place in ("A", "B", "comm_src"))
    total = ctx.get_cu_count() if asked.num_wgs is None else asked.num_wgs
    where = _conditions(
        ctx, members, _named(a.dtype), _named(src.dtype), total, mode=call.mode, comm_wgs=asked.comm_wgs,
        comm_block=call.comm_block, comm_cap=asked.comm_cap, num_stages=asked.num_stages, num_warps=asked.num_warps,
    )  # fmt: skip
    where = replace(where, itemsize=2 if a.dtype != b.dtype else where.itemsize)
    sizes = (size for _, size in query.sizes)
    shape: dict[str, Any] = dict(zip(predictor.SHAPE, (*sizes, name, members.size), strict=True))
    own = call.tiles.block_m, call.tiles.block_n, call.tiles.block_k
    default = default_split(total, call.mode, asked.comm_wgs), own
    tiles = None if asked.gemm_block is None else [asked.gemm_block]
    listed = _listed(shape, where, default, tuner.options().candidates, tiles, _given.get())
    if len(listed) < 2:
        return asked
    made = (("C", call.new_c), ("comm_dst", call.new_dst))
    outputs = {place: make(ctx) if tensors[place] is None else tensors[place] for place, make in made}
    # A sum in its own place would be added again by every call.
    saved = src.clone() if overlap(src, outputs["comm_dst"]) else None
    try:
        tuning = tuner.tune(ctx, members, query, [
            tuner.Candidate(shown, call.mode, params, lambda params=params: run(_with(asked, params), outputs))
            for shown, params, _ in listed
        ])  # fmt: skip
    finally:
        if saved is not None:
            src.copy_(saved)
    return _with(asked, tuning.record.params)


def check_open(name: str, asked: Asked, mode: str) -> None:
    """Raise ArgumentError when a call that is to be tuned does not leave open what tuning finds."""
    if not isinstance(asked.tune, bool):
        raise ArgumentError(f"tune must be True or False, got {asked.tune!r}")
    if asked.tune and (asked.gemm_wgs is not None or (mode == "fused" and asked.comm_wgs is not None)):
        raise ArgumentError(
            f"concurrent.{name}: tune=True finds gemm_wgs, so that may not be given, nor, with mode='fused', comm_wgs, "
            f"which is the rest; got gemm_wgs={asked.gemm_wgs}, comm_wgs={asked.comm_wgs}"
        )


def _listed(
    shape: Mapping[str, Any],
    where: Conditions,
    default: Way,
    most: int,
    tiles: Sequence[Tile] | None,
    given: Sequence[Way] | None,
) -> list[tuple[str, dict[str, Any], Way]]:
    """Name, parameters and way of what is tried: the default, which has no parameters, and others."""
    if given is not None:
        found: list[Candidate] = [Candidate(split, (block[0], block[1], block[2])) for split, block in given]
    else:
        # With the default among them, so that there are enough without it.
        splits = [where.most] if where.comm_wgs is not None else None
        found = candidates(shape, where, default[1], tiles, splits, most)
    listed: list[tuple[str, dict[str, Any], Way]] = [(f"{shown(*default)} (default)", {}, default)]
    for one in found:
        if one.way not in (way for _, _, way in listed):
            params: dict[str, Any] = {"gemm_wgs": one.gemm_wgs, "gemm_block": list(one.gemm_block)}
            if where.mode == "concurrent" and where.comm_wgs is None:
                params["comm_wgs"] = max(1, where.num_wgs - one.gemm_wgs)
            listed.append((shown(*one.way), params, one.way))
    return listed if given is not None else listed[:most]


def shown(split: int, block: Tile) -> str:
    """A split and a tile as reports call them."""
    return f"{split} {'x'.join(map(str, block))}"


def _with(asked: Asked, params: Mapping[str, Any]) -> Asked:
    """The arguments with those that were found; what is tuned is no more open then."""
    found = dict(params)
    if "gemm_block" in found:
        found["gemm_block"] = tuple(found["gemm_block"])
    return replace(asked, **found)


def _way(params: Mapping[str, Any], default: Way) -> Way:
    if not params:
        return default
    m, n, k = params["gemm_block"]
    return params["gemm_wgs"], (m, n, k)


def _answer(way: Way, ms: float | None, where: Conditions, shape: Mapping[str, Any], cached: bool) -> dict[str, Any]:
    predicted = None
    if predictor.predicts(where.machine, where.dtype):
        (one,) = predictor.rank_splits(
            shape, [way[1]], [way[0]], num_wgs=where.num_wgs, mode=where.mode, cb=where.comm_block,
            machine=where.machine, dtype=where.dtype, comm_dtype_bytes=where.comm_itemsize, units=where.units,
            link_gbps=where.link_gbps,
        )  # fmt: skip
        predicted = one.pred_ms
    return {"gemm_wgs": way[0], "gemm_block": way[1], "measured_ms": ms, "pred_ms": predicted, "cached": cached}


def _conditions(ctx: Iris, members: Group, dtype: str, comm_dtype: str, total: int, **further: Any) -> Conditions:
    shared = link_of(ctx) == "shared" and members.size > 1
    link_gbps = incoming_rate(ctx, members.size - 1) / 1e9 if shared else None
    itemsize, comm_itemsize = (getattr(torch, name).itemsize for name in (dtype, comm_dtype))
    return Conditions(
        ctx.target, ctx.target.product, dtype, itemsize, comm_itemsize, total, ctx.get_cu_count(),
        link_gbps=link_gbps, **further,
    )  # fmt: skip


def case_of(ctx: Iris, name: str, asked: Asked, call: Call, tensors: Tensors) -> Query:
    """The case of a call, the same on every rank: all that a kernel is compiled for, and all that the caller has
    decided."""
    details: dict[str, Any] = {"mode": call.mode, "num_wgs": asked.num_wgs or ctx.get_cu_count()}
    decided = ("comm_wgs", "gemm_block", "gemm_group_m", "num_stages", "num_warps", "comm_cap", "root")
    details |= {field: getattr(asked, field) for field in decided}
    details |= {"comm_block": call.comm_block, "comm_group_m": call.comm_group_m, "precision": call.precision}
    src, dst = tensors["comm_src"], tensors["comm_dst"]
    details |= {"B": _named(tensors["B"].dtype), "C": _named(call.c_dtype), "comm": _named(src.dtype)}
    details |= {f"order of {place}": _order(tensor) for place, tensor in tensors.items()}
    details |= {"descriptors": call.descriptors, "in place": dst is not None and overlap(src, dst)}
    sizes = _sizes(name, call, tensors)
    return _query(ctx, call.members, name, sizes, _named(tensors["A"].dtype), details)


def _sizes(name: str, call: Call, tensors: Tensors) -> tuple[tuple[str, int], ...]:
    """Names and sizes of a call; ``comm_m`` are the rows of the rank that has most."""
    (M, N), K = call.c_shape, tensors["A"].shape[1]
    rows = call.part.chunk if name == "all_gather" else call.part.whole
    return ("M", M), ("N", N), ("K", K), ("comm_m", rows), ("comm_n", tensors["comm_src"].shape[1])


def _query(ctx: Iris, members: Group, collective: str, sizes: tuple, dtype: str, details: Mapping[str, Any]) -> Query:
    return Query(
        _PREFIX + _known(collective), ctx.target.product, ctx.target.arch, link_of(ctx), members.size,
        ctx.get_cu_count(), dtype, sizes, (), tuple((name, str(value)) for name, value in details.items()),
    )  # fmt: skip


def _order(tensor: torch.Tensor | None) -> str:
    """Which elements lie side by side: those of a row (N), of a column (T), or neither."""
    if tensor is None or tensor.stride(1) == 1:
        return "N"
    return "T" if tensor.stride(0) == 1 else "strided"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _known(collective: str) -> str:
    if collective not in predictor.COLLECTIVES:
        raise ArgumentError(f"collective must be one of {', '.join(predictor.COLLECTIVES)}; got {collective!r}")
    return collective
