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
        bytes_from, bytes_to: the sizes for which it says so; None for no upper bound.
        source: where the row comes from.
    """

    algorithm: str
    bytes_from: int
    bytes_to: int | None
    source: str

    @property
    def measured(self) -> bool:
        return not self.source.startswith("heuristic")


@cache
def rows(table: str) -> list[dict[str, Any]]:
    """The rows of ``data/<table>.json``."""
    return json.loads(resources.files("iris.tuning").joinpath(f"data/{table}.json").read_text())["rows"]


@cache
def lookup(table: str, link: str, world: int, nbytes: int, **keys: str) -> Entry:
    """What a table says.

    Args:
        table: its name.
        link: one of :data:`iris.runtime.links.LINKS`.
        world: number of ranks, at least 2.
        nbytes: bytes, as the table counts them.
        keys: further columns of the table; a row without one is for all values.

    Raises:
        KeyError: the table has no row; a fault of the table.
    """
    for row in rows(table):
        least, most = row["world"]
        fits = row["link"] == link and least <= world <= most
        if fits and all(row.get(name, value) == value for name, value in keys.items()):
            start = 0
            for step in row["steps"]:
                end = step.get("up_to_bytes")
                if end is None or nbytes <= end:
                    return Entry(step["algorithm"], start, end, row["source"])
                start = end + 1
    raise KeyError(f"data/{table}.json has no row for {link}, {world} ranks, {nbytes} bytes {keys or ''}")
