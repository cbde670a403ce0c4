"""What was measured, as the package ships it: ``data/tuned/<operation>/<machine>.json``, see ``data/SCHEMA.md``.

A table speaks for its own machine. Nothing here looks into the table of another, whatever they have in common.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from iris.tuning.query import Entry, Query

SCHEMA = 1
# How far, relative to its own, a size may be from that of a measured case that is taken for near.
TOLERANCE = 0.15
_TWO_BYTES = "16-bit"
# What :class:`Entry` leaves out: the defaults of the configurations of fused operations. A file has them in full, so
# that it means the same whatever the defaults are.
FUSED_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "block_size_m": 256,
        "block_size_n": 64,
        "block_size_k": 64,
        "group_size_m": 1,
        "num_sms": None,
        "num_xcds": 1,
        "chunk_size": 1,
        "cache_modifier_a": ".ca",
        "cache_modifier_b": ".ca",
        "allow_tf32": None,
        "all_reduce_variant": "two_shot",
        "all_reduce_num_rings": 1,
        "num_warps": 8,
        "num_stages": 2,
        "k_per_flag": 8,
        "num_fetch_sms": 32,
        "num_fetch_stages": 1,
        "first_stage_fetch_sms": 256,
        "staged_a_layout": "k_contiguous",
        "transport": "sm",
    }
)


@dataclass(frozen=True)
class Case:
    """A case of a table, with where it was measured.

    Attributes:
        link, world, dtype: as in a :class:`Query`; ``dtype`` may be a class of them (:func:`dtype_class`) or ``"any"``.
        options: those that it is for; others may have any value.
        units: compute units that each rank had, None for all of the machine's.
        entry: what was measured.
        tflops: of a rank, None when it is not known.
        trials: configurations that were tried, None when it is not known.
        unfit: why this library's kernel cannot run it on the machine; empty when it can.
    """

    link: str
    world: int
    dtype: str
    options: Mapping[str, str] = field(hash=False)
    units: int | None
    entry: Entry
    tflops: float | None
    trials: int | None
    unfit: str

    @property
    def beats_torch(self) -> bool | None:
        return beats_torch(self.entry)


@dataclass(frozen=True)
class Group:
    """What a table says of all sizes of a link, a world and options.

    Attributes:
        enabled: whether the library's kernel is worth it at all. reason: why not; empty when it is.
        evidence: what that rests on: ``"measured"``, or in words what else.
        defaults: parameters for sizes that nothing else is known of; None when there are none.
        source: where it comes from, in a sentence.
    """

    link: str
    world: int
    dtype: str
    options: Mapping[str, str] = field(hash=False)
    enabled: bool
    reason: str
    evidence: str
    defaults: Mapping[str, Any] | None = field(hash=False)
    source: str

    @property
    def measured(self) -> bool:
        return self.evidence == "measured"


@dataclass(frozen=True)
class Shipped:
    """A file of the package.

    Attributes:
        operation, machine: what it is for.
        entries: number of measured cases.
        worlds: numbers of ranks that it says something of.
        links: between the ranks.
        source: where its figures come from, in a sentence.
    """

    operation: str
    machine: str
    entries: int
    worlds: tuple[int, ...]
    links: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Table:
    """One file, read."""

    operation: str
    machine: str
    cases: tuple[Case, ...]
    groups: tuple[Group, ...]
    least_world: int
    source: str
    by_sizes: Mapping[tuple, tuple[Case, ...]] = field(hash=False, repr=False)


def exact(query: Query) -> Entry | None:
    """The measured case of just this problem, whether it beats PyTorch or not; None when there is none."""
    case = _exact(query)
    return None if case is None or case.unfit else case.entry


def nearest(query: Query) -> Entry | None:
    """The measured case nearest to the problem among those that were faster than PyTorch.

    Each size is within :data:`TOLERANCE` of the case's own; the least distance in logarithms of sizes is taken, and
    the first of equal ones. A case without a time of PyTorch is not known to be faster.
    """
    return _nearest(query, True)


def nearest_slower(query: Query) -> Entry | None:
    """The measured case nearest to the problem, as near as :func:`nearest` asks, where PyTorch was at least as fast and
    no near case was faster; None otherwise."""
    return None if _nearest(query, True) else _nearest(query, False)


def disabled(query: Query) -> str:
    """Why PyTorch's operations are to be preferred where just this problem was not measured; empty when nothing is
    known against the library's kernel.

    It was slower for all sizes with these ranks and options, or for those near to these, or it does not run.
    """
    table = load(query.operation, query.machine)
    if table is None:
        return ""
    case = _exact(query)
    if case is not None and case.unfit:
        return case.unfit
    group = group_of(query)
    if group is None:
        if query.world < table.least_world:
            return f"world_size={query.world} < min_world_size={table.least_world}, and nothing was measured for it"
        return ""
    if not group.enabled:
        return group.reason
    known = [case.entry for case in table.cases if _fits(case, query) and case.entry.speedup is not None]
    if known and not any(beats_torch(entry) for entry in known):
        most = max(entry.speedup or 0.0 for entry in known)
        shapes = f"none of the {len(known)} measured cases" if len(known) > 1 else "the only measured case"
        verb = "was" if len(known) > 1 else "was not"
        return f"{shapes} {verb} faster than PyTorch (best {most:g}x)"
    slower = nearest_slower(query)
    return "" if slower is None else f"the nearest measured case, {slower.name}, was not faster than PyTorch"


def group_of(query: Query) -> Group | None:
    """What the machine's table says of all sizes with the problem's link, ranks, dtype and options."""
    table = load(query.operation, query.machine)
    return next((group for group in table.groups if _fits(group, query)), None) if table else None


def beats_torch(entry: Entry) -> bool | None:
    """Whether it was measured to be faster than PyTorch's operations; None when that was not measured."""
    if entry.algorithm == "torch":
        return False
    return None if entry.speedup is None else entry.speedup > 1.0


def dtype_class(dtype: str) -> str:
    """Dtypes that tables do not tell apart have one name: ``"16-bit"`` for float16 and bfloat16."""
    return _TWO_BYTES if dtype in ("float16", "bfloat16") else dtype


def cases(operation: str, machine: str) -> tuple[Case, ...]:
    """All cases of a table; none when there is no table."""
    table = load(operation, machine)
    return table.cases if table else ()


@cache
def files() -> tuple[Shipped, ...]:
    """What is shipped, by operation and machine."""
    shipped = []
    for operation, machine in names("tuned"):
        table = load(operation, machine)
        assert table is not None
        places = (*table.cases, *table.groups)
        worlds = tuple(sorted({place.world for place in places}))
        links = tuple(dict.fromkeys(place.link for place in places))
        shipped.append(Shipped(operation, machine, len(table.cases), worlds, links, table.source))
    return tuple(shipped)


@cache
def names(kind: str) -> tuple[tuple[str, str], ...]:
    """Operations and machines that ``data/<kind>`` has a file of."""
    folder = resources.files("iris.tuning") / "data" / kind
    found = [
        (operation.name, file.name.removesuffix(".json"))
        for operation in folder.iterdir()
        if operation.is_dir()
        for file in operation.iterdir()
        if file.name.endswith(".json")
    ]
    return tuple(sorted(found))


@cache
def load(operation: str, machine: str) -> Table | None:
    """The table of an operation on a machine; None when there is none."""
    data = read("tuned", operation, machine)
    return None if data is None else parse(data)


def read(kind: str, operation: str, machine: str) -> dict[str, Any] | None:
    """The file ``data/<kind>/<operation>/<machine>.json``; None when there is none."""
    if not machine:
        return None
    file = resources.files("iris.tuning") / "data" / kind / operation / f"{machine}.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def parse(data: Mapping[str, Any]) -> Table:
    """A table from what its file holds.

    Raises:
        ValueError: the file has another schema; a fault of the package.
    """
    if data["schema"] != SCHEMA:
        raise ValueError(f"the table of {data['operation']} on {data['machine']} has schema {data['schema']}")
    sources = {name: sentence(provenance) for name, provenance in data["provenance"].items()}
    first = next(iter(sources.values()))
    found = tuple(_case(data, record, sources.get(record.get("provenance"), first)) for record in data["entries"])
    groups = tuple(_group(record, sources.get(record.get("provenance"), first)) for record in data.get("sets", ()))
    # What was measured over a real link comes first.
    found = tuple(sorted(found, key=lambda case: case.entry.emulated))
    by_sizes: dict[tuple, list[Case]] = {}
    for case in found:
        by_sizes.setdefault(case.entry.sizes, []).append(case)
    return Table(
        data["operation"],
        data["machine"],
        found,
        groups,
        data.get("least_world", 1),
        "; ".join(sources.values()),
        {sizes: tuple(same) for sizes, same in by_sizes.items()},
    )


def sentence(provenance: Mapping[str, Any]) -> str:
    """Where figures come from, in a sentence."""
    software = provenance.get("software") or "versions not published"
    date = provenance.get("date") or "no date"
    kernel = f"; {provenance['kernel']}" if provenance.get("kernel") else ""
    return f"{provenance['hardware']}, {software}, {date}; {provenance['source']}{kernel}"


def _case(data: Mapping[str, Any], record: Mapping[str, Any], source: str) -> Case:
    measured, earlier = record["measured"], record.get("earlier") or {}
    speedup = measured.get("speedup")
    if speedup is None and earlier.get("speedup") is not None:
        speedup = earlier["speedup"]
        source += "; the comparison with PyTorch is of an earlier measurement"
    entry = Entry(
        name=record["name"],
        algorithm=record["algorithm"],
        params=_without_defaults(data["operation"], record["params"]),
        sizes=tuple(record["sizes"].items()),
        milliseconds=measured.get("ms"),
        torch_milliseconds=measured.get("torch_ms"),
        speedup=speedup,
        source=source,
        emulated=record.get("emulated", False),
    )
    return Case(
        link=record["link"],
        world=record["world"],
        dtype=record["dtype"],
        options=_options(record),
        units=record.get("units"),
        entry=entry,
        tflops=measured.get("tflops") or earlier.get("tflops"),
        trials=measured.get("trials"),
        unfit="" if record.get("fits", True) else record["why"],
    )


def _group(record: Mapping[str, Any], source: str) -> Group:
    defaults = record.get("defaults")
    return Group(
        link=record["link"],
        world=record["world"],
        dtype=record["dtype"],
        options=_options(record),
        enabled=record["enabled"],
        reason=record.get("reason") or "",
        evidence=record["evidence"],
        defaults=None if defaults is None else MappingProxyType(dict(defaults)),
        source=source,
    )


def _options(record: Mapping[str, Any]) -> Mapping[str, str]:
    options = {name: str(value) for name, value in record.get("options", {}).items()}
    return MappingProxyType(options)


def _without_defaults(operation: str, params: Mapping[str, Any]) -> dict[str, Any]:
    if "matmul" not in operation:
        return dict(params)
    return {
        name: value for name, value in params.items() if name not in FUSED_DEFAULTS or value != FUSED_DEFAULTS[name]
    }


def _exact(query: Query) -> Case | None:
    table = load(query.operation, query.machine)
    if table is None:
        return None
    return next((case for case in table.by_sizes.get(query.sizes, ()) if _fits(case, query)), None)


def _nearest(query: Query, faster: bool) -> Entry | None:
    """The nearest case whose :func:`beats_torch` is ``faster``."""
    table = load(query.operation, query.machine)
    best, least = None, math.inf
    for case in table.cases if table else ():
        if beats_torch(case.entry) is not faster or case.unfit or not _fits(case, query):
            continue
        distance = _distance(query.sizes, case.entry.sizes)
        if distance < least:
            best, least = case.entry, distance
    return best


def _fits(place: Case | Group, query: Query) -> bool:
    """Whether a case or a group was measured where the problem runs; sizes do not matter here."""
    if place.link != query.link or place.world != query.world:
        return False
    if place.dtype not in ("any", query.dtype, dtype_class(query.dtype)):
        return False
    if isinstance(place, Case) and place.units not in (None, query.units):
        return False
    asked = dict(query.options)
    return all(asked.get(name) == value for name, value in place.options.items())


def _distance(sizes: tuple[tuple[str, int], ...], measured: tuple[tuple[str, int], ...]) -> float:
    """How far sizes are from those of a case; infinite when one of them is too far."""
    if len(sizes) != len(measured):
        return math.inf
    total = 0.0
    for (name, size), (own_name, own) in zip(sizes, measured, strict=True):
        if name != own_name or own <= 0 or size <= 0 or abs(size - own) > TOLERANCE * own:
            return math.inf
        total += math.log(size / own) ** 2
    return math.sqrt(total)
