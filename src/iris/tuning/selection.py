"""What is known of a problem: :func:`select`. Fused operations, collectives and :mod:`iris.ops.auto_config` ask it.

The order: what the package measured for just this problem, what was tuned on this machine, the nearest measured case
that beat PyTorch, the machine's rules. A record of this machine was measured against what the package had then; where
that is still the package's choice the record comes first, and it comes after a packaged case that it has never met.
What was measured not to be faster than PyTorch's operations is never taken: then those run, and the reason says so.
Where nothing is known :func:`select` gives None, and the cost model (:mod:`iris.tuning.cost_model`) is left; a rule for
which no measurement speaks is one way for it to consider (:func:`unproven`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from iris._target import KNOWN
from iris.tuning import heuristics, tables
from iris.tuning.query import Entry, Query, config_key
from iris.tuning.store import Record

TORCH = "torch"
_REMEMBERED = 4096


@dataclass(frozen=True)
class Selection:
    """What was found, and what follows.

    Attributes:
        kind: ``"exact"``, ``"cache"``, ``"nearest"``, ``"rule"``, or ``"disabled"`` where all sizes, or those near, are
            known not to be worth it.
        algorithm: what is to run; ``"torch"`` for PyTorch's operations.
        params: fields of its configuration, or what a rule sets. Read-only.
        entry: the case; None where a rule or a whole set speaks.
        reason: why, in a sentence, and where the figures come from.
        speedup: over PyTorch's operations, as measured; None when it is not known.
        origin: where the figures come from, in a sentence.
        rules_of: whose rule it is, where that is another machine with the same architecture; else empty.
    """

    kind: str
    algorithm: str
    params: Mapping[str, Any] = field(hash=False)
    entry: Entry | None
    reason: str
    speedup: float | None = None
    origin: str = ""
    rules_of: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))

    @property
    def brief(self) -> str:
        """The reason without the origin of the figures."""
        return self.reason.removesuffix(f" ({self.origin})")

    @property
    def source(self) -> str:
        """What a :class:`iris.tuning.Plan` calls it."""
        if self.kind == "cache":
            return "cache"
        if self.algorithm == TORCH:
            return "fallback"
        return "heuristic" if self.kind == "rule" else self.kind


@lru_cache(maxsize=_REMEMBERED)
def select(query: Query, record: Record | None = None) -> Selection | None:
    """What is known of a problem; None when nothing is.

    Args:
        query: the problem.
        record: what was tuned for it on this machine, None when it was not.
    """
    exact, group = tables.exact(query), tables.group_of(query)
    off = group is not None and not group.enabled
    if record is not None and (exact is None or record.default_key == packaged_key(query)):
        return Selection(
            "cache", record.algorithm, record.params, record, _tuned(record), record.speedup, record.source
        )
    if off:
        assert group is not None
        return _torch("disabled", exact, group.reason, group.source)
    if exact is not None:
        return _of_entry("exact", exact, "measured for just this problem")
    near = tables.nearest(query)
    if near is not None:
        return _of_entry("nearest", near, "measured for sizes near to these")
    slower = tables.nearest_slower(query)
    if slower is not None:
        return _of_entry("nearest", slower, "measured for sizes near to these")
    against = tables.disabled(query)
    if against:
        return _torch("disabled", None, against, "" if group is None else group.source)
    return None if group is not None and _unvalidated(group) else rule_of(query, query.machine)


@lru_cache(maxsize=_REMEMBERED)
def unproven(query: Query) -> Selection | None:
    """A rule that nothing which was measured speaks for: the cost model says whether it is worth it. None without one.

    It is the machine's own, of a set that was never validated, or that of another machine with the same architecture.
    Asked for a problem of which :func:`select` knows nothing.
    """
    relatives = [name for name, target in KNOWN.items() if target.arch == query.arch and name != query.machine]
    found = (rule_of(query, machine) for machine in (query.machine, *relatives))
    return next((rule for rule in found if rule is not None and rule.algorithm != TORCH), None)


def lacking(query: Query) -> str:
    """What the machine's tables lack where :func:`select` knows nothing, in words."""
    table = tables.load(query.operation, query.machine)
    if table is None:
        return f"no table for {query.machine}"
    worlds = sorted({place.world for place in (*table.groups, *table.cases)})
    if query.world not in worlds:
        return f"no table for world_size={query.world} (there are {', '.join(map(str, worlds))})"
    options = "".join(f"{name}={value}, " for name, value in query.options)
    return f"nothing near was measured on {query.machine} for {options}{query.dtype}"


def packaged_key(query: Query) -> str:
    """:func:`config_key` of what the package's tables have for just this problem; PyTorch's operations where those were
    at least as fast."""
    exact, group = tables.exact(query), tables.group_of(query)
    off = group is not None and not group.enabled
    if exact is not None and tables.beats_torch(exact) and not off:
        return exact.key
    return config_key(TORCH, {})


def _of_entry(kind: str, entry: Entry, how: str) -> Selection:
    link = ", over an imitated link" if entry.emulated else ""
    taken = "" if entry.milliseconds is None else f", {entry.milliseconds:.4g} ms"
    if tables.beats_torch(entry):
        figure = "" if entry.speedup is None else f", {entry.speedup:.3g}x PyTorch"
        reason = f"{how} ({entry.name}{figure}{taken}{link}; {entry.source})"
        return Selection(kind, entry.algorithm, entry.params, entry, reason, entry.speedup, entry.source)
    if entry.speedup is None and entry.algorithm != TORCH:
        return _torch(kind, entry, f"{how} ({entry.name}), but never compared with PyTorch's operations", entry.source)
    figure = "PyTorch's operations were the fastest"
    if entry.algorithm != TORCH:
        figure = f"{entry.speedup:.3g}x PyTorch, so PyTorch's operations run"
    return _torch(kind, entry, f"{how} ({entry.name}{link}): {figure}", entry.source)


def rule_of(query: Query, machine: str) -> Selection | None:
    """What a machine's rules have for the problem; None when they are for others."""
    params = heuristics.configuration(machine, query.operation, heuristics.features_of(query))
    if params is None:
        return None
    algorithm = params.pop("algorithm", None) or heuristics.algorithm(machine, query.operation)
    origin = heuristics.source(machine, query.operation)
    if machine != query.machine:
        whose = f"{machine}, which has the same architecture {query.arch},"
        reason = f"a rule of {whose} has {algorithm} ({origin})"
        return Selection("rule", algorithm, params, None, reason, None, origin, machine)
    group = tables.group_of(query)
    if group is not None:
        params = {**(group.defaults or {}), **params}
        if not group.measured:
            origin = f"{group.evidence}; {origin}"
    reason = f"no measured case is near; a rule of {machine} has {algorithm} ({origin})"
    return Selection("rule", algorithm, {} if algorithm == TORCH else params, None, reason, None, origin)


def _unvalidated(group: tables.Group) -> bool:
    return group.evidence.startswith("unvalidated")


def _torch(kind: str, entry: Entry | None, why: str, origin: str) -> Selection:
    return Selection(kind, TORCH, {}, entry, f"{why} ({origin})" if origin else why, None, origin)


def _tuned(record: Entry) -> str:
    taken = "" if record.milliseconds is None else f": {record.milliseconds:.4g} ms"
    return f"tuned on this machine{taken} ({record.source})"
