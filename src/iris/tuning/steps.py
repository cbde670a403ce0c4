"""Tables of algorithms by link, world size and bytes: ``data/<operation>.json``. Each says in its first lines how it is
read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Entry:
    """What a table says for some size.

    Attributes:
        algorithm: name of the algorithm.
        measured: whether it was measured on such a machine.
        reason: which row says so and where that comes from, in words.
    """

    algorithm: str
    measured: bool
    reason: str


@cache
def rows(table: str) -> list[dict[str, Any]]:
    """The rows of ``data/<table>.json``."""
    return json.loads(resources.files("iris.tuning").joinpath(f"data/{table}.json").read_text())["rows"]


@cache
def lookup(table: str, link: str, world: int, nbytes: int, machine: str, **keys: str) -> Entry | None:
    """What a table says; None where it has no row.

    Args:
        table: its name.
        link: one of :data:`iris.runtime.links.LINKS`.
        world: number of ranks, at least 2.
        nbytes: bytes, as the table counts them.
        machine: :attr:`iris._target.Target.product`. A row that was measured on another machine with the same link is
            a guess, and the reason says so.
        keys: further columns of the table; a row without one is for all values.
    """
    for row in rows(table):
        least, most = row["world"]
        fits = row["link"] == link and least <= world <= most
        if fits and all(row.get(name, value) == value for name, value in keys.items()):
            start = 0
            for step in row["steps"]:
                end = step.get("up_to_bytes")
                if end is None or nbytes <= end:
                    upper = "and more" if end is None else f"to {end}"
                    where = f"the table has {step['algorithm']} for {start} {upper} bytes, {world} ranks, {link}"
                    measured = row.get("machine")
                    guess = f"; a guess for {machine or 'this device'}" if measured not in (None, machine) else ""
                    return Entry(step["algorithm"], measured == machine, f"{where} ({row['source']}{guess})")
                start = end + 1
    return None
