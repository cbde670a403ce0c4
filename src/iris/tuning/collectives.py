"""The table of algorithms of collectives: ``data/collectives.json``, which says in its first lines how it is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Entry:
    """What the table says for a collective of some size.

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
def rows() -> list[dict]:
    """The rows of the table."""
    return json.loads(resources.files("iris.tuning").joinpath("data/collectives.json").read_text())["rows"]


@cache
def lookup(operation: str, link: str, world: int, nbytes: int) -> Entry:
    """What the table says.

    Args:
        operation: all_reduce, all_gather, reduce_scatter, all_to_all or broadcast.
        link: one of :data:`iris.runtime.links.LINKS`.
        world: number of ranks, at least 2.
        nbytes: bytes of the operation, as the table counts them.

    Raises:
        KeyError: the table has no row; a fault of the table.
    """
    for row in rows():
        least, most = row["world"]
        if row["operation"] == operation and row["link"] == link and least <= world <= most:
            start = 0
            for step in row["steps"]:
                end = step.get("up_to_bytes")
                if end is None or nbytes <= end:
                    return Entry(step["algorithm"], start, end, row["source"])
                start = end + 1
    raise KeyError(f"data/collectives.json has no row for {operation}, {link}, {world} ranks, {nbytes} bytes")
