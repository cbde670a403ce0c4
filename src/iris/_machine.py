"""Figures of devices and their links, for models of time: :class:`Machine`.

The figures and the source of each are in ``_machines.json``; compute units come from :data:`iris._target.KNOWN`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from iris._target import KNOWN
from iris.errors import ArgumentError

# Name of a dtype's rate and bytes of an element, for each name that torch, Triton or NumPy gives the dtype.
_DTYPES: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("float64", "fp64"), ("float64", 8)),
    **dict.fromkeys(("float32", "fp32", "tf32"), ("float32", 4)),
    **dict.fromkeys(("float16", "fp16"), ("float16", 2)),
    **dict.fromkeys(("bfloat16", "bf16"), ("bfloat16", 2)),
    **dict.fromkeys(("float8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), ("float8", 1)),
    **dict.fromkeys(("fp8", "fp8e4nv", "fp8e4b8", "fp8e4b15", "fp8e5", "fp8e5b16"), ("float8", 1)),
    **dict.fromkeys(("int8", "uint8"), ("int8", 1)),
}


@dataclass(frozen=True)
class Machine:
    """A device and its links, as models of time see them.

    ``schema.fields`` of ``_machines.json`` says what each figure means, and ``docs/virtual-time.md`` how it is used.
    Units are in the names: rates a second, bytes, ns. ``name`` may be any for a machine of your own, ``compute_units``
    and ``chiplets`` are those of :class:`iris._target.Target`, and ``sources`` says where each figure comes from.
    """

    name: str
    compute_units: int
    chiplets: int
    matrix_flops_per_s: Mapping[str, float] = field(hash=False)
    matrix_efficiency: float
    matrix_tile: tuple[int, int, int]
    memory_bytes_per_s: float
    memory_efficiency: float
    cache_bytes: int
    cache_bytes_per_s: float
    link_peer_bytes_per_s: float
    link_total_bytes_per_s: float
    link_efficiency: float
    program_local_bytes_per_s: float
    program_remote_bytes_per_s: float
    program_remote_bulk_bytes_per_s: float
    launch_latency_ns: float
    host_exchange_latency_ns: float
    local_latency_ns: float
    remote_latency_ns: float
    local_flag_latency_ns: float
    remote_flag_latency_ns: float
    resident_programs_per_unit: int
    sources: Mapping[str, str] = field(hash=False, repr=False, default_factory=dict)

    def rate(self, dtype: str) -> tuple[float, int]:
        """Peak of the matrix units for a dtype, FLOP/s, and bytes of an element.

        Raises:
            ArgumentError: the machine has no rate for ``dtype``; the message lists those it has.
        """
        known = _DTYPES.get(dtype)
        if known is None or known[0] not in self.matrix_flops_per_s:
            possible = [name for name, (rate, _) in _DTYPES.items() if rate in self.matrix_flops_per_s]
            raise ArgumentError(f"{self.name} has no matrix rate for dtype {dtype!r}; possible: {', '.join(possible)}")
        return self.matrix_flops_per_s[known[0]], known[1]

    def dot_ns(self, m: int, n: int, k: int, dtype: str) -> float:
        """Time of an [m, k] by [k, n] product on one compute unit, each size rounded up to a matrix instruction.

        Raises:
            ArgumentError: as :meth:`rate`.
        """
        rate, itemsize = self.rate(dtype)
        rows, columns, k_bytes = self.matrix_tile
        steps = max(1, k_bytes // itemsize)
        flops = 2 * _round_up(m, rows) * _round_up(n, columns) * _round_up(k, steps)
        return flops / (rate * self.matrix_efficiency / self.compute_units) * 1e9


def by_name(name: str) -> Machine:
    """The machine of that name, any case, for example ``"h200"``.

    Raises:
        ArgumentError: there is none; the message lists the possible names.
    """
    machines = _load()
    machine = machines.get(name.lower()) if isinstance(name, str) else None
    if machine is None:
        raise ArgumentError(f"machine {name!r} is not known; possible: {', '.join(machines)}")
    return machine


def names() -> tuple[str, ...]:
    """The names that :func:`by_name` takes."""
    return tuple(_load())


@cache
def _load() -> dict[str, Machine]:
    content: dict[str, Any] = json.loads(Path(__file__).with_name("_machines.json").read_text(encoding="utf-8"))
    return {name: _machine(name, content["machines"][name]) for name in KNOWN}


def _machine(name: str, figures: dict[str, dict[str, Any]]) -> Machine:
    target = KNOWN[name]
    values = {figure: entry["value"] for figure, entry in figures.items()}
    values["matrix_flops_per_s"] = MappingProxyType(values["matrix_flops_per_s"])
    values["matrix_tile"] = tuple(values["matrix_tile"])
    sources = {figure: entry["source"] for figure, entry in figures.items()}
    for figure in ("compute_units", "chiplets"):
        sources[figure] = f"iris._target: published figures of {target.name}"
    return Machine(
        name=name,
        compute_units=target.compute_units,
        chiplets=target.chiplets,
        sources=MappingProxyType(sources),
        **values,
    )


def figure_names() -> tuple[str, ...]:
    """Names of the figures of a :class:`Machine`, all of which have a source."""
    return tuple(entry.name for entry in fields(Machine) if entry.name not in ("name", "sources"))


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
