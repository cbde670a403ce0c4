"""What a multiplication takes on a share of a machine, by formulas: the library's kernel and the vendor's library."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

from iris._machine import Machine
from iris._target import KNOWN
from iris.errors import ArgumentError
from iris.tuning import _origami
from iris.tuning._calibration import Calibration, calibration

# Tiles that a vendor's library has, with the depth of a step.
_VENDOR_TILES = ((128, 256, 64), (256, 128, 64), (256, 256, 64), (128, 128, 64), (64, 128, 128), (64, 64, 128))
_VENDOR_GROUP, _VENDOR_STAGES = 16, 4
# As iris.ops.division has it: pieces of a divided tile, and what an exchange of sums takes at least and for a byte.
_MOST_SPLITS, _LEAST_BLOCKS = 8, 8
_EXCHANGE_S, _EXCHANGE_S_PER_BYTE = 1.5e-6, 4.5e-6 / (128 << 10)


class Place(NamedTuple):
    """A rank's share of a machine, for one dtype: rates in units a second, times in seconds."""

    machine: Machine
    family: str
    fit: Calibration
    dtype: str
    world: int
    units: int
    itemsize: int
    peak: float  # FLOP/s of the rank's units
    memory: float
    cache: float
    link: float  # into a rank from all peers together, and out of it
    program: float  # what a program loads from its own device
    latency: float
    flag: float  # one way to a peer
    own_flag: float
    remote_latency: float


class Product(NamedTuple):
    """A multiplication by one rank.

    Attributes:
        tiles, programs: how many there are.
        tile: seconds of a tile.
        rounds: tiles that a program multiplies, one after the other.
        compute, memory: seconds of either alone.
        seconds: of both, with the start of the kernel.
        model: whose model it is: ``"iris"`` or ``"origami"``.
    """

    tiles: int
    programs: int
    tile: float
    rounds: float
    compute: float
    memory: float
    seconds: float
    model: str


def counted(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ArgumentError(f"{name} must be a whole number above 0, got {value!r}")
    return value


@lru_cache(maxsize=256)
def place_of(machine: Machine, world: int, dtype: str, units: int | None, link_gbps: float | None) -> Place:
    """What a rank has of a machine: ``units`` of its compute units (None for all), and its links."""
    rate, itemsize = machine.rate(dtype)
    have = machine.compute_units if units is None else counted("units", units)
    if link_gbps is not None and not link_gbps > 0:
        raise ArgumentError(f"link_gbps must be above 0, got {link_gbps!r}")
    peers = max(1, world - 1)
    share = min(1.0, have / machine.compute_units)
    total = min(machine.link_total_bytes_per_s, machine.link_peer_bytes_per_s * peers) * machine.link_efficiency
    if link_gbps is not None:
        total = link_gbps * 1e9
    family = KNOWN[machine.name].family if machine.name in KNOWN else ""
    return Place(
        machine, family, calibration(machine.name, family), dtype, world, have, itemsize,
        peak=rate / machine.compute_units * have,
        memory=machine.memory_bytes_per_s * machine.memory_efficiency * share,
        cache=(machine.cache_bytes_per_s if machine.cache_bytes else math.inf) * share,
        link=total,
        program=machine.program_local_bytes_per_s,
        latency=machine.local_latency_ns * 1e-9,
        own_flag=machine.local_flag_latency_ns * 1e-9,
        flag=machine.remote_flag_latency_ns * 1e-9,
        remote_latency=machine.remote_latency_ns * 1e-9,
    )  # fmt: skip


def _tile_seconds(place: Place, m: int, n: int, step: int, depth: int, stages: int, efficiency: float, load: float):
    """Seconds that a program takes for a tile: as long as its matrix instructions or its loads."""
    rows, columns, _ = place.machine.matrix_tile
    flops = 2 * ceil_div(m, rows) * rows * ceil_div(n, columns) * columns * depth
    compute = flops / (place.peak / place.units * efficiency)
    width = (m + n) * place.itemsize
    # No more comes in a way to memory and back than is under way.
    rate = min(place.program * load, max(1, stages - 1) * width * step / place.latency)
    loads = width * depth / rate
    return compute + loads if stages == 1 else max(compute, loads)


def _traffic(place: Place, m: int, n: int, tiles_m: int, tiles_n: int, depth: int, programs: int, group: int) -> float:
    """Bytes that A and B bring from memory: once each, or what each round of tiles needs where the cache is smaller."""
    once = (tiles_m * m + tiles_n * n) * depth * place.itemsize
    if once <= place.machine.cache_bytes:
        return once
    tiles = tiles_m * tiles_n
    active = min(programs, tiles)
    rows = min(tiles_m, group)
    columns = min(tiles_n, ceil_div(active, rows))
    rows = min(tiles_m, max(rows, ceil_div(active, columns)))
    return max(once, (rows * m + columns * n) * depth * place.itemsize * tiles / active)


def rounds_of(tiles: float, programs: int, blocks: int, exchange: float) -> float:
    """Times of a tile until all are done, when those of the last, incomplete round may be divided along K.

    ``exchange``: what leaving the sum of a piece takes, and adding one, in times of a tile.
    """
    whole = int(tiles / programs)
    left = tiles - whole * programs
    if left <= 1e-9 * programs:
        return whole
    best = 1.0
    for splits in range(2, min(_MOST_SPLITS, blocks // _LEAST_BLOCKS) + 1):
        took = ceil_div(left * splits, programs) * (1 / splits + exchange) + exchange * (splits - 1)
        if took < best:
            best = took
    return whole + best


def own_product(place: Place, rows: int, columns: int, depth: int, owners: int, config: dict[str, Any]) -> Product:
    """The multiplication of ``rows`` rows for each of ``owners`` by the library's kernel, alone."""
    m, n, step = config["block_size_m"], config["block_size_n"], config["block_size_k"]
    programs = min(config["num_sms"] or place.units, place.units)
    tiles_m, tiles_n = ceil_div(rows, m), ceil_div(columns, n)
    tiles = owners * tiles_m * tiles_n
    tile = _tile_seconds(place, m, n, step, depth, config["num_stages"], place.fit.kernel_efficiency, 1.0)
    rounds = rounds_of(tiles, programs, ceil_div(depth, step), exchange_tiles(m, n, tile))
    compute, model = rounds * tile, "iris"
    if place.family in _origami.FAMILIES and place.units == place.machine.compute_units:
        other = _origami.product_seconds(place.machine, owners * rows, columns, depth, place.dtype, (m, n, step))
        if other is not None:
            compute, tile, model = other, other / rounds, "origami"
    nbytes = _traffic(place, m, n, owners * tiles_m, tiles_n, depth, programs, config["group_size_m"])
    memory = (nbytes + owners * rows * columns * place.itemsize) / place.memory
    compute = max(compute, tiles * (m + n) * depth * place.itemsize / place.cache)
    return Product(
        tiles, programs, tile, rounds, compute, memory, place.fit.kernel_s + both(compute, memory), model
    )  # fmt: skip


@lru_cache(maxsize=1024)
def vendor_product(place: Place, rows: int, columns: int, depth: int) -> float:
    """Seconds of the multiplication by the vendor's library: the best of its tiles."""
    best = math.inf
    for m, n, step in _VENDOR_TILES:
        tiles_m, tiles_n = ceil_div(rows, m), ceil_div(columns, n)
        tile = _tile_seconds(
            place, m, n, step, depth, _VENDOR_STAGES, place.fit.vendor_efficiency, place.fit.vendor_load
        )
        compute = tile * rounds_of(tiles_m * tiles_n, place.units, ceil_div(depth, step), exchange_tiles(m, n, tile))
        if place.family in _origami.FAMILIES and place.units == place.machine.compute_units:
            other = _origami.product_seconds(place.machine, rows, columns, depth, place.dtype, (m, n, step))
            compute = compute if other is None else other
        nbytes = _traffic(place, m, n, tiles_m, tiles_n, depth, place.units, _VENDOR_GROUP)
        best = min(best, both(compute, (nbytes + rows * columns * place.itemsize) / place.memory))
    return place.machine.launch_latency_ns * 1e-9 + best


def exchange_tiles(m: int, n: int, tile: float) -> float:
    """What leaving the sum of a piece of a tile takes, and adding one, in times of a tile of so many seconds."""
    return (_EXCHANGE_S + m * n * 4 * _EXCHANGE_S_PER_BYTE) / tile


def both(one: float, other: float) -> float:
    """Two things that go on side by side, neither of them evenly."""
    return math.hypot(one, other)


def vendor_collective(place: Place, nbytes: float, share: float) -> float:
    """Seconds of a collective of PyTorch that brings a rank so many bytes."""
    if place.world == 1 or not nbytes:
        return 0.0
    fit = place.fit
    rate = min(place.link * share, fit.vendor_most_bytes_per_s)
    return fit.vendor_collective_s * (1 + nbytes / (nbytes + fit.vendor_ramp_bytes)) + nbytes / rate


def ceil_div(value: float, unit: float) -> int:
    return -int(-value // unit)
