"""How the tiles of a product are divided over programs, so that all are at work to the end."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iris.ops.config import FusedConfig

_MOST_SPLITS = 8
_LEAST_BLOCKS = 8  # of K in a piece of a divided tile: fewer do not pay for the exchange of sums
# What leaving a sum takes, and adding one, of the time for a tile: of 128x256, with K = 8192, in 16 bits, on an H200.
EXCHANGE = 0.06
# The same in seconds for any tile: what it takes at least, and for each byte.
_EXCHANGE_LEAST, _EXCHANGE_BYTE = 1.5e-6, 4.5e-6 / (128 << 10)
# 1-byte operations a second that a program multiplies, measured on an H200, and bytes a second that it reads.
_PROGRAM_FLOPS, _PROGRAM_BYTES = 12e12, 60e9


def tile_time(config: FusedConfig, depth: int, itemsize: int) -> float:
    """Seconds that a program takes to multiply a tile; an estimate.

    Args:
        config: the tiles. depth: elements of K. itemsize: bytes of an element.
    """
    flops = 2 * config.block_size_m * config.block_size_n * depth
    # With few rows a tile is as slow as its columns of B come.
    return max(flops * itemsize / _PROGRAM_FLOPS, config.block_size_n * depth * itemsize / _PROGRAM_BYTES)


def exchange_time(config: FusedConfig, depth: int, itemsize: int) -> float:
    """What leaving the sum of a piece takes, and adding one, in times that a tile takes; an estimate."""
    nbytes = config.block_size_m * config.block_size_n * 4
    return (_EXCHANGE_LEAST + nbytes * _EXCHANGE_BYTE) / tile_time(config, depth, itemsize)


def divided(
    tiles: int, programs: int, blocks: int, exchange: float, fetchers: int = 0, busy: float = 0.0
) -> tuple[int, int]:
    """How many tiles stay whole, and into how many pieces each of the others is divided.

    Dividing the last tiles along K, as stream-K does (Osama et al., 2023), keeps all programs at work to the end. The
    choice is the one of the least makespan when programs take work as they become free.

    Args:
        tiles: tiles of the output. programs: programs. blocks: blocks of K that a tile goes through.
        exchange: what leaving the sum of a piece takes, and adding one, in times that a tile takes.
        fetchers: programs that come to multiply later than the others, after ``busy`` times what a tile takes.
    """
    most = min(_MOST_SPLITS, blocks // _LEAST_BLOCKS)
    if tiles % programs == 0 and not fetchers:
        return tiles, 1
    best, chosen = math.inf, (tiles, 1)
    behind = tiles % programs
    for further in {0, fetchers, 2 * fetchers, programs // 3, programs // 2} if fetchers else {0}:
        whole = max(0, tiles - behind - further)
        for splits in range(1, most + 1):
            # What the fetchers take is an estimate, so the choice has to do for more and for less.
            took = sum(
                _makespan(programs, fetchers, busy * factor, whole, tiles - whole, splits, exchange)
                for factor in ((0.7, 1.0, 1.4) if fetchers else (1.0,))
            )
            if took < best:
                best, chosen = took, (whole, splits) if splits > 1 else (tiles, 1)
    return chosen


def _makespan(
    programs: int, fetchers: int, busy: float, whole: int, divided: int, splits: int, exchange: float
) -> float:
    """When the last program ends, in times that a tile takes."""
    # Whole rounds of whole tiles change nothing but the start, so only the last few are gone through.
    rounds = max(0, whole // programs - 1 - math.ceil(busy))
    free = [0.0] * (programs - fetchers) + [busy] * fetchers
    left = whole - rounds * programs
    pieces = [1 / splits + exchange] * (splits - 1) + [1 / splits + exchange * (splits - 1)]
    end = 0.0
    for length in itertools.chain(itertools.repeat(1.0, left), *itertools.repeat(pieces, divided)):
        # The heap holds when each program becomes free.
        end = max(end, free[0] + length)
        heapq.heapreplace(free, free[0] + length)
    return rounds + end
