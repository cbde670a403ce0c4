"""Which configuration of all_gather_matmul is known to be the best for a problem on a machine.

:func:`select_ag_mm_config` asks, in this order: the package's table of measured configurations for just this problem,
what was tuned on this machine (``iris tune``), the nearest measured case that beat PyTorch, the machine's rules, and
the cost model. It neither runs anything nor needs a GPU. It asks what an operation asks that is called without a
configuration (:func:`iris.ops.choice.decide`), so both give the same.

A table speaks for its own machine. What was measured not to be faster than PyTorch's operations is not enabled,
whichever way it was found: its parameters are there, and ``source`` says by how much it lost.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import torch

from iris import _env, _target
from iris.errors import ArgumentError, IrisError
from iris.ops.arguments import ALIGNMENT, Problem
from iris.ops.call import torch_lacks
from iris.ops.choice import Decision, Place, decide, query_of
from iris.ops.config import FusedConfig, HbmBufferConfig
from iris.runtime.checks import FP8
from iris.tuning import store, tables
from iris.tuning.autotune import params_of
from iris.tuning.query import Query
from iris.tuning.selection import TORCH, lacking
from iris.tuning.store import Record

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "SUPPORTED_TRANSPOSES",
    "AutoConfigResult",
    "ConfigDisabledError",
    "clear_config_cache",
    "detect_gpu_arch",
    "list_known_shapes",
    "load_regression_sizes",
    "select_ag_mm_config",
]

_OPERATION = "all_gather_matmul"
# Of A and B, as in BLAS: T when the columns are contiguous. The kernels take all four.
SUPPORTED_TRANSPOSES = ("NN", "NT", "TN", "TT")
# Machines with a table of measured configurations; the cost model stands in for the others that are known.
SUPPORTED_ARCHITECTURES = tuple(machine for operation, machine in tables.names("tuned") if operation == _OPERATION)
_ROWS = ("global", "local")
# What the kernels multiply; PyTorch's operations alone take float64.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8, *FP8)
_TILES = tuple(field.name for field in fields(FusedConfig))
_PIPELINE = tuple(field.name for field in fields(HbmBufferConfig) if field.name not in _TILES)
# Fields that a result always has; the others where they differ from their defaults.
_ALWAYS = (
    "block_size_m", "block_size_n", "block_size_k", "group_size_m", "num_warps", "num_stages", "num_xcds", "allow_tf32",
    "k_per_flag", "num_fetch_sms", "num_fetch_stages", "first_stage_fetch_sms",
)  # fmt: skip
_MEMORY = 4096  # results that are remembered
_STARTS = {"exact": "Exact match", "cache": "User cache", "nearest": "Nearest match"}


class ConfigDisabledError(IrisError, RuntimeError):
    """There is no configuration that is known to be worth it."""


@dataclass(frozen=True)
class AutoConfigResult:
    """What was selected.

    Attributes:
        enabled: whether an operation that is called without a configuration takes this one: it is expected to beat
            PyTorch's all-gather and matmul, or those cannot do it.
        config_params: fields of :class:`FusedConfig`: tiles and launch options. Read-only.
        hbm_buffer_params: the further fields of :class:`iris.ops.config.HbmBufferConfig`. Read-only.
        source: where it comes from, beginning with ``Exact match``, ``User cache``, ``Nearest match``, ``Heuristic``,
            ``Predicted``, ``Disabled by config``, ``world_size=``, ``Unknown device`` or ``No GPU``.
        shape_key: ``"MxNxK"`` of the measured case; None when there is none.
        speedup: of the measured case over PyTorch's operations; None when that was not measured.
        beats_torch: whether the measured case beat PyTorch; None when that was not measured.
        milliseconds: what the measured case took; None when that is not known.
        machine: the product that it is for; empty for a device that is not known.
        algorithm: the algorithm that the parameters are for; ``"torch"`` for PyTorch's operations.
        reason: hardware, versions and origin of the figures, or why there are none.
    """

    enabled: bool = False
    config_params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    hbm_buffer_params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    source: str = "default"
    shape_key: str | None = None
    speedup: float | None = None
    beats_torch: bool | None = None
    milliseconds: float | None = None
    machine: str = ""
    algorithm: str = "torch"
    reason: str = ""

    def __post_init__(self) -> None:
        for name in ("config_params", "hbm_buffer_params"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def to_fused_config(self) -> FusedConfig:
        """The configuration with all its fields, launch options and pipeline included: a :class:`FusedConfig` that the
        operation takes as ``config``. What is given there is taken as it is: with ``transport="copy_engine"`` no graph
        can capture the call, and ``dataclasses.replace(config, transport="sm")`` gives one that can be captured.

        Raises:
            ConfigDisabledError: a RuntimeError; it is not enabled.
        """
        if not self.enabled:
            raise ConfigDisabledError(
                f"this configuration is disabled: {self.source}. PyTorch's operations are the better choice "
                "(algorithm='torch'); a FusedConfig or HbmBufferConfig of your own is taken as it is"
            )
        if self.algorithm == "pull":
            return FusedConfig(**self.config_params)
        return HbmBufferConfig(**self.config_params, **self.hbm_buffer_params)


def select_ag_mm_config(
    M: int,
    N: int,
    K: int,
    world_size: int,
    transpose: str = "NN",
    arch: str | None = None,
    *,
    gather_dim: int = 1,
    rows: str = "global",
    dtype: torch.dtype = torch.float16,
) -> AutoConfigResult:
    """The configuration for ``out = all_gather(A) @ B``. Local; results are remembered.

    Args:
        M, N, K: sizes of the whole product: gathered A is (M, K), B is (K, N). ``rows`` says which rows ``M`` counts.
        world_size: number of ranks.
        transpose: one of :data:`SUPPORTED_TRANSPOSES`.
        arch: a product (``"mi300x"``) or an architecture (``"gfx942:sramecc+"``, ``"sm_90"``) in any case; None or
            ``"auto"`` for this machine's (:func:`detect_gpu_arch`).
        gather_dim: 1 when A is sharded along K, 0 when along M.
        rows: ``"global"`` when ``M`` counts the rows of the whole product, ``"local"`` when those of one rank's
            ``A_sharded``: world_size times fewer with gather_dim 0, the same with gather_dim 1.
        dtype: of A and B.

    Raises:
        ArgumentError: an argument is not known; the message lists what is possible.
        EnvironmentValueError: ``IRIS_GPU_ARCH`` names no known device.
    """
    key = (M, N, K, world_size, transpose, arch, gather_dim, rows, dtype, _env.get("IRIS_GPU_ARCH"))
    found = _results.get(key)
    if found is None:
        if len(_results) >= _MEMORY:
            _results.clear()
        found = _results[key] = _select(M, N, K, world_size, transpose, arch, gather_dim, rows, dtype)
    return found


def list_known_shapes(world_size: int, transpose: str = "NN", arch: str | None = None) -> list[dict[str, Any]]:
    """The measured shapes of a machine, best speed-up first and those without one last; new objects at each call.

    Each has ``shape_key``, ``label``, ``M``, ``N``, ``K``, ``speedup``, ``milliseconds``, ``beats_torch``,
    ``n_trials``, ``gather_dim``, ``emulated`` and ``source``. None where there is no table, or its set is disabled.

    Args:
        world_size, transpose, arch: as for :func:`select_ag_mm_config`.
    """
    world_size, transpose = _positive("world_size", world_size), _transpose(transpose)
    place = _place(arch)
    found = []
    for case in tables.cases(_OPERATION, place.product):
        options, entry = case.options, case.entry
        if case.world != world_size or options.get("transpose", transpose) != transpose:
            continue
        asked = (("gather_dim", options.get("gather_dim", "1")), ("transpose", transpose))
        group = tables.group_of(
            Query(
                _OPERATION,
                place.product,
                place.arch,
                place.link,
                world_size,
                place.units,
                case.dtype,
                entry.sizes,
                asked,
            )
        )
        if group is not None and not group.enabled:
            continue
        found.append(
            {
                "shape_key": _shape_key(entry.sizes),
                "label": entry.name,
                **dict(entry.sizes),
                "speedup": entry.speedup,
                "milliseconds": entry.milliseconds,
                "beats_torch": case.beats_torch,
                "n_trials": case.trials,
                "gather_dim": int(options.get("gather_dim", "1")),
                "emulated": entry.emulated,
                "source": entry.source,
            }
        )
    return sorted(found, key=lambda shape: -(shape["speedup"] or 0.0))


def load_regression_sizes() -> list[dict[str, Any]]:
    """The shapes by which a change of the tables is watched, and what is expected of each; new objects at each call."""
    return json.loads(_regression_text())["entries"]


def clear_config_cache() -> None:
    """Forget results, and which GPU this machine has: both are found anew. What was tuned meanwhile is seen then."""
    _results.clear()
    _this_device.cache_clear()
    _user_records.cache_clear()
    _target.forget_devices()


def detect_gpu_arch() -> str:
    """This machine's product, ``"mi300x"`` for example.

    ``IRIS_GPU_ARCH`` comes first, at every call: a product, or an architecture, which keeps the GPU's own product when
    that has it and otherwise means the first known product that has. Else PyTorch is asked for the name and the
    architecture of the current GPU, once (see :func:`clear_config_cache`). A GPU that is not known gives its
    architecture, and a machine without a GPU ``""``.

    Raises:
        EnvironmentValueError: ``IRIS_GPU_ARCH`` names no known device.
    """
    place = _place(None)
    return place.product or place.arch


@dataclass(frozen=True)
class _Place:
    """The device that is asked about.

    ``how`` it came to that, why ``nothing`` is known of it where that is so, and its compute units where they are not
    the product's.
    """

    product: str
    arch: str
    how: str = ""
    nothing: str = ""
    own_units: int | None = None

    @property
    def link(self) -> str:
        return _target.KNOWN[self.product].link

    @property
    def units(self) -> int:
        return self.own_units or _target.KNOWN[self.product].compute_units


_results: dict[tuple, AutoConfigResult] = {}


@cache
def _this_device() -> _target.Target | None:
    """The current GPU; None when PyTorch sees none."""
    if not torch.cuda.is_available():
        return None
    return _target.device(torch.cuda.current_device())


def _place(arch: str | None) -> _Place:
    word = "auto" if arch is None else arch.strip().lower() if isinstance(arch, str) else ""
    if word in _target.KNOWN:
        return _Place(word, _target.KNOWN[word].arch)
    if word != "auto":
        device = _this_device()
        try:
            named = _target.product_of(word, device.product if device else "")
        except ArgumentError:
            raise ArgumentError(
                f"arch={arch!r} names no known device; possible: 'auto', {_target.possible_names()}"
            ) from None
        return _Place(named.product, named.arch, named.how)
    device = _this_device()
    named = _target.override(device.product if device else "")
    if named is not None:
        return _Place(named.product, named.arch, f"IRIS_GPU_ARCH{f': {named.how}' if named.how else ''}")
    if device is None:
        remedy = f"name one with arch or IRIS_GPU_ARCH: {_target.possible_names()}"
        nothing = f"No GPU: PyTorch sees none on this machine; {remedy}"
        return _Place("", "", nothing=nothing)
    if not device.product:
        nothing = (
            f"Unknown device: nothing is known of {device.name} ({device.arch}); known: {', '.join(_target.KNOWN)}"
        )
        return _Place("", device.arch, nothing=nothing)
    return _Place(device.product, device.arch, own_units=device.compute_units)


def _select(M, N, K, world_size, transpose, arch, gather_dim, rows, dtype) -> AutoConfigResult:
    M, N, K = (_positive(name, value) for name, value in (("M", M), ("N", N), ("K", K)))
    world_size, transpose = _positive("world_size", world_size), _transpose(transpose)
    if rows not in _ROWS:
        raise ArgumentError(f"rows={rows!r} is not known; possible: {', '.join(_ROWS)}")
    if isinstance(gather_dim, bool) or gather_dim not in (0, 1):
        raise ArgumentError(f"gather_dim={gather_dim!r} is not known; possible: 0 (A sharded along M), 1 (along K)")
    if dtype not in _DTYPES:
        raise ArgumentError(f"dtype={dtype!r} is not possible; possible: {', '.join(map(str, _DTYPES))}")
    if rows == "local" and gather_dim == 0:
        M *= world_size
    place = _place(arch)
    if place.nothing:
        return AutoConfigResult(source=place.nothing, reason=place.nothing)
    return _result(_problem(M, N, K, world_size, transpose, gather_dim, dtype), place)


def _problem(M: int, N: int, K: int, world: int, transpose: str, gather_dim: int, dtype: torch.dtype) -> Problem:
    """The problem without a bias and so on, with matrices that lie together."""
    out = torch.int32 if dtype == torch.int8 else torch.bfloat16 if dtype in FP8 else dtype
    depth = K // (world if gather_dim == 1 else 1)
    steps = [depth if transpose[0] == "N" else M // (1 if gather_dim == 1 else world)]
    steps.append(N if transpose[1] == "N" else K)
    aligned = all(step * dtype.itemsize % ALIGNMENT == 0 for step in steps) and N * out.itemsize % ALIGNMENT == 0
    return Problem(M, N, K, dtype, dtype, out, world, gather_dim, None, transpose, aligned=aligned)


def _result(problem: Problem, place: _Place) -> AutoConfigResult:
    """What an operation that the caller leaves open would do, as a result."""
    where = Place(replace(_target.KNOWN[place.product], compute_units=place.units), place.link, _user_records())
    apart = "columns of A that lie together" if problem.transpose[0] == "T" else ""
    decision = decide(where, problem, torch_lacks(problem), None, apart)
    query = query_of(where, _OPERATION, problem)
    found = decision.found
    entry = None if found is None else found.entry
    enabled = decision.plan.algorithm != TORCH
    algorithm, params = decision.plan.algorithm, {} if decision.config is None else params_of(decision.config)
    if not enabled and entry is not None:
        # What lost keeps its parameters.
        algorithm, params = entry.algorithm, entry.params
    elif not enabled and decision.config is not None:
        algorithm = "hbm_buffer" if found is None else found.algorithm
    tiles, pipeline = _params(params, algorithm)
    start = _source(decision, query, enabled)
    return AutoConfigResult(
        enabled=enabled,
        config_params=tiles,
        hbm_buffer_params=pipeline,
        source=f"{start} ({place.how})" if place.how else start,
        shape_key=None if entry is None else _shape_key(entry.sizes),
        speedup=None if entry is None else entry.speedup,
        beats_torch=None if entry is None else tables.beats_torch(entry),
        milliseconds=None if entry is None else entry.milliseconds,
        machine=query.machine,
        algorithm=algorithm,
        reason=(found.origin if found is not None else "") or decision.plan.reason,
    )


def _source(decision: Decision, query: Query, enabled: bool) -> str:
    """Where a decision comes from, in words that begin as :class:`AutoConfigResult` says."""
    found, reason = decision.found, decision.plan.reason
    where = f"{query.machine} ws{query.world} {dict(query.options)['transpose']}"
    if found is None and decision.expected:
        return f"Predicted ({lacking(query)}): {decision.expected}"
    if found is None:
        if query.world == 1 and not enabled:
            return f"world_size=1: {reason}"
        if not enabled and getattr(torch, query.dtype).itemsize != 2:
            return f"Disabled by config: {reason}"
        return f"Heuristic (no measured case near in {where}): {reason}"
    if found.rules_of:
        whose = f"{found.rules_of}, which has the same architecture {query.arch}"
        return f"Heuristic of {whose} ({lacking(query)}): {decision.expected}"
    if found.kind == "rule":
        group = tables.group_of(query)
        text = f"Heuristic (no measured case near in {where})"
        if group is not None and not group.measured:
            text += f", {group.evidence}"
        if decision.expected:
            return f"{text}: {decision.expected}"
        return text if enabled else f"{text}: PyTorch's operations"
    if found.kind == "disabled":
        return found.brief if found.brief.startswith("world_size=") else f"Disabled by config: {found.brief}"
    entry = found.entry
    assert entry is not None, "the other kinds are measured cases"
    figure = "not compared with PyTorch" if entry.speedup is None else f"measured {entry.speedup:.3f}x"
    taken = "" if entry.milliseconds is None else f", {entry.milliseconds:g} ms"
    imitated = ", over an imitated link" if entry.emulated else ""
    verdict = "" if enabled or entry.speedup is None else ": PyTorch is faster"
    case = f"{where} {_shape_key(entry.sizes)} [{entry.name}]"
    return f"{_STARTS[found.kind]}: {case}, {figure}{taken}{imitated}{verdict}"


def _params(params: Mapping[str, Any], algorithm: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters as a result has them: of tiles and launch, and of the pipeline. Those that are always there and those
    that are not the default."""
    if algorithm == "torch":
        return {}, {}
    config, usual = HbmBufferConfig(**params), HbmBufferConfig()
    wanted = [n for n in (*_TILES, *_PIPELINE) if n in _ALWAYS or getattr(config, n) != getattr(usual, n)]
    values = {name: getattr(config, name) for name in wanted}
    if algorithm == "copy_engine":
        values["transport"] = "copy_engine"
    pipeline = {} if algorithm == "pull" else {name: value for name, value in values.items() if name in _PIPELINE}
    return {name: value for name, value in values.items() if name in _TILES}, pipeline


@cache
def _user_records() -> Mapping[Query, Record]:
    """What was tuned on this machine."""
    return MappingProxyType(store.read_all())


def _shape_key(sizes: tuple[tuple[str, int], ...]) -> str:
    return "x".join(str(size) for _, size in sizes)


def _positive(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number <= 0:
        raise ArgumentError(f"{name}={value!r} is not possible; possible: whole numbers above 0")
    return number


def _transpose(text: Any) -> str:
    word = text.strip().upper() if isinstance(text, str) else ""
    if word not in SUPPORTED_TRANSPOSES:
        raise ArgumentError(f"transpose={text!r} is not known; possible: {', '.join(SUPPORTED_TRANSPOSES)}")
    return word


@cache
def _regression_text() -> str:
    return (resources.files("iris.tuning") / "data" / "regression_sizes.json").read_text(encoding="utf-8")
