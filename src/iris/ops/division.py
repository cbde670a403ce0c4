"""How the tiles of a product are divided over programs, so that all are at work to the end."""

from __future__ import annotations

import heapq
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
_SAME = 1e-9  # makespans that differ by less are equal


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
    # What the fetchers take is an estimate, so the choice has to do for more and for less.
    starts = [busy * factor for factor in (0.7, 1.0, 1.4)] if fetchers else [busy]
    ways = []
    for further in {0, fetchers, 2 * fetchers, programs // 3, programs // 2} if fetchers else {0}:
        whole = max(0, tiles - behind - further)
        for splits in range(1, most + 1):
            work = whole + (tiles - whole) * (1 + 2 * exchange * (splits - 1))
            ways.append(([_least(programs, fetchers, start, work) for start in starts], whole, splits))
    # What cannot become the best is not gone through.
    for least, whole, splits in sorted(ways, key=lambda way: sum(way[0])):
        for number, start in enumerate(starts):
            if sum(least) > best - _SAME:
                break
            least[number] = _makespan(programs, fetchers, start, whole, tiles - whole, splits, exchange)
        if sum(least) < best - _SAME:
            best, chosen = sum(least), (whole, splits) if splits > 1 else (tiles, 1)
    return chosen


def _least(programs: int, fetchers: int, busy: float, work: float) -> float:
    """What no order ends before: when all programs are at work from their start to the end."""
    early = programs - fetchers
    if not work:
        return 0.0
    return work / early if early and work <= early * busy else (work + fetchers * busy) / programs


def _makespan(
    programs: int, fetchers: int, busy: float, whole: int, divided: int, splits: int, exchange: float
) -> float:
    """When the last program ends, in times that a tile takes."""
    if splits == 1:
        whole, divided = whole + divided, 0
    end, free = _after_whole(programs, fetchers, busy, whole)
    if not divided:
        return end
    piece, last = 1 / splits + exchange, 1 / splits + exchange * (splits - 1)
    done, pieces = 0, divided * splits
    times = list(free)
    heapq.heapify(times)
    while done < pieces:
        # All that become free at one time take the next pieces, of which every splits-th adds up the others.
        start = heapq.heappop(times)
        taking = min(free.pop(start), pieces - done)
        adding = (done + taking) // splits - done // splits
        done += taking
        for length, count in ((piece, taking - adding), (last, adding)):
            if count:
                time = start + length
                if time not in free:
                    heapq.heappush(times, time)
                free[time] = free.get(time, 0) + count
                end = max(end, time)
    return end


def _after_whole(programs: int, fetchers: int, busy: float, whole: int) -> tuple[float, dict[float, int]]:
    """When the last whole tile ends, and how many programs become free at which time."""
    early, rounds = programs - fetchers, math.ceil(busy)
    if whole <= rounds * early:
        # The fetchers come when all is done, or they get nothing.
        full, left = divmod(whole, early) if early else (0, 0)
        ends = [(full + 1.0, left), (float(full), early - left), (busy, fetchers)]
        end = full + 1.0 if left else full
    else:
        # From then on the fetchers, who wait the longest, and the others take turns.
        full, left = divmod(whole - rounds * early, programs)
        first, second = min(left, fetchers), max(0, left - fetchers)
        ends = [(busy + full + 1, first), (busy + full, fetchers - first)]
        ends += [(rounds + full + 1.0, second), (float(rounds + full), early - second)]
        end = rounds + full + 1.0 if second else busy + full + 1 if first else rounds + full if early else busy + full
    free: dict[float, int] = {}
    for time, count in ends:
        if count:
            free[time] = free.get(time, 0) + count
    return float(end), free
