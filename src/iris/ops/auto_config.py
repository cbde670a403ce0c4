"""Which configuration of all_gather_matmul is known to be the best for a problem on a machine.

:func:`select_ag_mm_config` asks, in this order: the package's table of measured configurations for just this problem,
what was tuned on this machine (``iris tune``), the nearest measured case that beat PyTorch, the machine's rules, and
the cost model. It neither runs anything nor needs a GPU; operations called without a configuration choose by the same
data.

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
from iris.ops.config import FusedConfig, HbmBufferConfig
from iris.runtime.checks import FP8
from iris.tuning import heuristics, tables
from iris.tuning.query import Entry, Query, config_key

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


class ConfigDisabledError(IrisError, RuntimeError):
    """There is no configuration that is known to be worth it."""


@dataclass(frozen=True)
class AutoConfigResult:
    """What was selected.

    Attributes:
        enabled: whether the configuration is expected to beat PyTorch's all-gather and matmul.
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
        operation takes as ``config``.

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
        sizes = dict(entry.sizes)
        group = tables.group_of(_query(place, sizes, world_size, transpose, options.get("gather_dim", "1"), case.dtype))
        if group is not None and not group.enabled:
            continue
        found.append(
            {
                "shape_key": _shape_key(entry.sizes),
                "label": entry.name,
                **sizes,
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
    sizes = {"M": M, "N": N, "K": K}
    query = _query(place, sizes, world_size, transpose, str(gather_dim), str(dtype).removeprefix("torch."))
    return _known(query, place) or _ruled(query, place, _rules(query)) or _by_relative(query, place)


def _query(place: _Place, sizes: Mapping[str, int], world: int, transpose: str, gather_dim: str, dtype: str) -> Query:
    return Query(
        _OPERATION,
        place.product,
        place.arch,
        place.link,
        world,
        place.units,
        dtype,
        tuple(sizes.items()),
        (("gather_dim", gather_dim), ("transpose", transpose)),
    )


def _known(query: Query, place: _Place) -> AutoConfigResult | None:
    """What was measured, here or for the package, at this size or near it, or is known of all sizes."""
    entry, group = tables.exact(query), tables.group_of(query)
    off = group is not None and not group.enabled
    packaged = entry.key if entry is not None and tables.beats_torch(entry) and not off else config_key("torch", {})
    record = next((one for asked, one in _user_records().items() if _same(asked, query)), None)
    if record is not None and (entry is None or record.default_key == packaged):
        return _of_entry(record, query, place, "User cache")
    if off:
        assert group is not None
        return _of_entry(entry, query, place, f"Disabled by config: {group.reason}", enabled=False, source=group.source)
    if entry is not None:
        return _of_entry(entry, query, place, "Exact match")
    near = tables.nearest(query)
    if near is not None:
        return _of_entry(near, query, place, "Nearest match")
    slower = tables.nearest_slower(query)
    if slower is not None:
        return _of_entry(slower, query, place, "Nearest match")
    against = tables.disabled(query)
    if against:
        source = group.source if group is not None else ""
        start = "" if against.startswith("world_size=") else "Disabled by config: "
        return _of_entry(None, query, place, f"{start}{against}", enabled=False, source=source)
    if query.world == 1:
        return _of_entry(None, query, place, "world_size=1: one rank has nothing to gather", enabled=False)
    return None


def _of_entry(
    entry: Entry | None, query: Query, place: _Place, start: str, enabled: bool | None = None, source: str = ""
) -> AutoConfigResult:
    """A result with what was measured. ``start`` alone is the source where ``enabled`` is settled already."""
    if entry is None:
        return AutoConfigResult(False, source=_with_how(start, place), machine=query.machine, reason=source or start)
    beats = tables.beats_torch(entry)
    text = start
    if enabled is None:
        enabled = beats is True
        figure = "not compared with PyTorch" if entry.speedup is None else f"measured {entry.speedup:.3f}x"
        taken = "" if entry.milliseconds is None else f", {entry.milliseconds:g} ms"
        verdict = "" if enabled or entry.speedup is None else ": PyTorch is faster"
        imitated = ", over an imitated link" if entry.emulated else ""
        where = f"{query.machine} ws{query.world} {dict(query.options)['transpose']}"
        text = f"{start}: {where} {_shape_key(entry.sizes)} [{entry.name}], {figure}{taken}{imitated}{verdict}"
    tiles, pipeline = _params(entry.params, entry.algorithm)
    return AutoConfigResult(
        enabled=enabled,
        config_params=tiles,
        hbm_buffer_params=pipeline,
        source=_with_how(text, place),
        shape_key=_shape_key(entry.sizes),
        speedup=entry.speedup,
        beats_torch=beats,
        milliseconds=entry.milliseconds,
        machine=query.machine,
        algorithm=entry.algorithm,
        reason=entry.source,
    )


def _rules(query: Query, machine: str = "") -> dict[str, Any] | None:
    return heuristics.configuration(machine or query.machine, _OPERATION, heuristics.features_of(query))


def _ruled(query: Query, place: _Place, params: dict[str, Any] | None) -> AutoConfigResult | None:
    """What the machine's own rules give; None without rules for the problem."""
    if params is None:
        return None
    group = tables.group_of(query)
    where = f"{query.machine} ws{query.world} {dict(query.options)['transpose']}"
    text, enabled = f"Heuristic (no measured case near in {where})", True
    if group is not None:
        params = {**(group.defaults or {}), **params}
        if not group.measured:
            text += f", {group.evidence}"
    if params.get("algorithm") == "torch":
        text += ": PyTorch's operations"
    elif group is not None and group.evidence.startswith("unvalidated"):
        # Nothing that was measured speaks for it.
        enabled, text = _predicted(query, params, text)
    return _of_params(params, query, place, enabled, text, heuristics.source(query.machine, _OPERATION))


def _by_relative(query: Query, place: _Place) -> AutoConfigResult:
    """What the rules of another machine with the same architecture give, or the library's own choice of tiles; the cost
    model says whether it is worth it."""
    worlds = sorted({group.world for group in _groups(query.machine)})
    lacking = f"no table for {query.machine}"
    if worlds:
        lacking = f"no table for world_size={query.world} (there are {', '.join(map(str, worlds))})"
        if query.world in worlds:
            lacking = f"nothing near was measured on {query.machine} for gather_dim={dict(query.options)['gather_dim']}"
            lacking += f", {query.dtype}"
    for machine, target in _target.KNOWN.items():
        if target.arch != query.arch or machine == query.machine:
            continue
        params = _rules(query, machine)
        if params is not None:
            start = f"Heuristic of {machine}, which has the same architecture {query.arch} ({lacking})"
            enabled, text = _predicted(query, params, start)
            return _of_params(params, query, place, enabled, text, heuristics.source(machine, _OPERATION))
    params = _own_choice(query)
    enabled, text = _predicted(query, params, "")
    return _of_params(params, query, place, enabled, f"Predicted ({lacking}){text}", "the cost model, iris.tuning")


def _groups(machine: str) -> tuple[tables.Group, ...]:
    table = tables.load(_OPERATION, machine)
    return table.groups if table else ()


def _of_params(
    params: Mapping[str, Any], query: Query, place: _Place, enabled: bool, source: str, reason: str
) -> AutoConfigResult:
    algorithm = heuristics.algorithm(query.machine, _OPERATION) or "hbm_buffer"
    given = dict(params)
    algorithm = given.pop("algorithm", algorithm)
    tiles, pipeline = _params(given, algorithm)
    return AutoConfigResult(
        enabled=enabled and algorithm != "torch",
        config_params=tiles,
        hbm_buffer_params=pipeline,
        source=_with_how(source, place),
        machine=query.machine,
        algorithm=algorithm,
        reason=reason,
    )


def _predicted(query: Query, params: Mapping[str, Any], start: str) -> tuple[bool, str]:
    """Whether the cost model expects the parameters to beat PyTorch, and ``start`` with what it expects."""
    from iris.tuning import cost_model

    given = dict(params)
    algorithm = given.pop("algorithm", "hbm_buffer")
    prediction = cost_model.predict(
        query.operation,
        query.machine,
        query.sizes,
        query.world,
        query.dtype,
        given,
        algorithm=algorithm,
        units=query.units,
        gather_dim=int(dict(query.options)["gather_dim"]),
    )
    wins = prediction.speedup > 1.0
    verdict = "" if wins else ", so PyTorch's operations are the better choice"
    expected = f"the cost model expects {prediction.speedup:.2f}x PyTorch, {prediction.fused * 1e3:.3g} ms"
    return wins, f"{start}: {expected}{verdict}"


def _own_choice(query: Query) -> dict[str, Any]:
    """The tiles and pieces that the operation itself would take on the machine."""
    from iris.ops.arguments import Problem
    from iris.ops.choice import staged

    sizes, options, dtype = dict(query.sizes), dict(query.options), getattr(torch, query.dtype)
    problem = Problem(
        sizes["M"], sizes["N"], sizes["K"], dtype, dtype, dtype, query.world, int(options["gather_dim"]), None,
        options["transpose"],
    )  # fmt: skip
    device: Any = _Device(replace(_target.KNOWN[query.machine], compute_units=query.units))
    config = staged(device, problem, "hbm_buffer")
    return {field.name: getattr(config, field.name) for field in fields(config)}


@dataclass(frozen=True)
class _Device:
    """As much of a context as a choice of tiles asks."""

    target: _target.Target

    def get_cu_count(self) -> int:
        return self.target.compute_units


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
def _user_records() -> Mapping[Query, Any]:
    """What was tuned on this machine, newest first."""
    from iris.tuning import store

    records = store.read_all().items()
    return dict(sorted(records, key=lambda item: item[1].date, reverse=True))


def _same(asked: Query, query: Query) -> bool:
    """Whether a tuned case is this problem, whatever its strides, epilogue and other details."""
    names = ("operation", "machine", "link", "world", "units", "dtype", "sizes")
    if any(getattr(asked, name) != getattr(query, name) for name in names):
        return False
    options = dict(asked.options)
    return all(options.get(name, value) == value for name, value in query.options)


def _with_how(source: str, place: _Place) -> str:
    return f"{source} ({place.how})" if place.how else source


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
