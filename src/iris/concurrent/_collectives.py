"""The collectives that may run beside a GEMM: who has which rows, which tile function does it, who touches what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from iris.errors import ArgumentError
from iris.runtime.groups import Group
from iris.x.exchange import add_and_push_tile, add_tile, fetch_tile, push_tile
from iris.x.schedule import chunk_extent, chunk_first, strided_count


@dataclass(frozen=True)
class Part:
    """What a rank does of a collective.

    Attributes:
        rows: of the matrix that the rank's tiles divide.
        first: row at which the rank's part begins in what is whole on every member.
        chunk: rows of a member's part, as the first ones have it.
        dst_rows: rows of ``comm_dst``.
        whole: rows that must be the same on every rank.
        items: the rank's work items, given the number of tiles of ``rows``.
    """

    rows: int
    first: int
    chunk: int
    dst_rows: int
    whole: int
    items: Callable[[int], int]


@dataclass(frozen=True)
class Collective:
    """A collective.

    Attributes:
        name: of the operation.
        tile: of :mod:`iris.x.exchange`.
        adds: whether it adds, so that the dtype must be one of numbers.
        reads_peers, writes_peers: whether peers read ``comm_src`` and write ``comm_dst``, which then are on the heap.
        part: what a rank does, given the rows of ``comm_src``, those of a ``comm_dst`` that the caller gave (None for
            none), the group and the place of the root in it.
    """

    name: str
    tile: Any
    adds: bool
    reads_peers: bool
    writes_peers: bool
    part: Callable[[int, int | None, Group, int], Part]


def _tiles(tiles: int) -> int:
    return tiles


def _gathered(rows: int, given: int | None, members: Group, root: int) -> Part:
    whole = given if given is not None else rows * members.size
    first, own, chunk = _chunk(whole, members)
    if own != rows:
        raise ArgumentError(
            f"comm_src must have the rows that member {members.index} of {members.size} has of comm_dst's {whole}, as "
            f"torch.chunk cuts them: {own}; got {rows}"
        )
    return Part(rows, first, chunk, whole, whole, _tiles)


def _reduced(rows: int, given: int | None, members: Group, root: int) -> Part:
    return Part(rows, 0, rows, rows, rows, lambda tiles: strided_count.fn(tiles, members.index, members.size))


def _scattered(rows: int, given: int | None, members: Group, root: int) -> Part:
    first, own, chunk = _chunk(rows, members)
    return Part(own, first, chunk, own, rows, _tiles)


def _exchanged(rows: int, given: int | None, members: Group, root: int) -> Part:
    first, own, chunk = _chunk(rows, members)
    return Part(own, first, chunk, own * members.size, rows, lambda tiles: tiles * members.size)


def _broadcast(rows: int, given: int | None, members: Group, root: int) -> Part:
    return Part(rows, 0, rows, rows, rows, _tiles if root == members.index else lambda tiles: 0)


def _chunk(whole: int, members: Group) -> tuple[int, int, int]:
    """Where the caller's chunk begins, how long it is, and how long chunks are."""
    chunk = chunk_extent.fn(whole, members.size)
    first = min(whole, chunk_first.fn(whole, members.index, members.size))
    return first, min(chunk, whole - first), chunk


COLLECTIVES = {
    one.name: one
    for one in (
        Collective("all_gather", push_tile, False, False, True, _gathered),
        Collective("all_reduce", add_and_push_tile, True, True, True, _reduced),
        Collective("reduce_scatter", add_tile, True, True, False, _scattered),
        Collective("all_to_all", fetch_tile, False, True, False, _exchanged),
        Collective("broadcast", push_tile, False, False, True, _broadcast),
    )
}
