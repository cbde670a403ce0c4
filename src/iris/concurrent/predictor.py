"""What a GEMM beside an independent collective takes, by formulas, and which split and tile are best.

The GEMM's time is that of :mod:`iris.tuning.cost_model` (of ``origami`` where that can say), the collective's follows
from its bytes, the links and how many programs it takes to fill them, and each slows the other down. From the times of
a tile of either :func:`schedule_makespan` says when the programs of the kernel are done.

The hardware is an argument, ``machine``: a name of :func:`iris._machine.names` or a
:class:`iris._machine.Machine`. What was measured is in :mod:`iris.concurrent._calibration`.
``docs/concurrent-tuning.md`` has the formulas, and how far predictions are off: ``benchmarks/report_concurrent.py``.

A *shape* is a mapping with ``gemm_m``, ``gemm_n``, ``gemm_k``, ``comm_m`` and ``comm_n`` (rows and columns of
``comm_src``), ``collective`` and ``world``. Times are in milliseconds. ``mt`` is a tile of the GEMM, (rows, columns,
K), ``cb`` one of the collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from iris._machine import Machine, by_name, names
from iris._target import KNOWN, Target
from iris.concurrent._calibration import Calibration, calibration
from iris.concurrent._makespan import schedule_makespan
from iris.errors import ArgumentError
from iris.tuning import cost_model

__all__ = [
    "COLLECTIVES",
    "Split",
    "comm_full_ms",
    "comm_remote_bytes_per_rank",
    "comm_sat_channels",
    "default_splits",
    "gemm_full_ms",
    "gemm_tile_ms",
    "gemm_tile_ms_fused",
    "n_comm_tiles",
    "predict_split",
    "predicts",
    "rank_splits",
    "schedule_makespan",
    "usual_cap",
    "usual_comm_block",
]

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast")
MODES = ("fused", "concurrent")
SHAPE = ("gemm_m", "gemm_n", "gemm_k", "comm_m", "comm_n", "collective", "world")
_ADDING = ("all_reduce", "reduce_scatter")
DEFAULT_TILE, DEFAULT_COMM_TILE = (256, 256, 64), (256, 64)
_LARGER_COMM_TILE = (512, 64)
_GROUP_M = 8
_STAGES = {"gfx": 2, "": 4}  # of the K loop, by family; fewer where they do not fit

Tile = tuple[int, int, int]


@dataclass(frozen=True)
class Split:
    """A split and a tile, and what is expected of them.

    Attributes:
        gemm_wgs: programs that begin with the GEMM.
        mt: tile of the GEMM.
        pred_ms: milliseconds until all is done.
    """

    gemm_wgs: int
    mt: Tile
    pred_ms: float


class _Gemm(NamedTuple):
    """A GEMM alone: tiles, milliseconds of one and of all."""

    tiles: int
    tile: float
    full: float


class _Place(NamedTuple):
    machine: Machine
    family: str
    fit: Calibration
    units: int


def predicts(machine: str, dtype: str = "float16") -> bool:
    """Whether there are figures of a machine of that name, for products of that dtype."""
    if machine not in names():
        return False
    try:
        by_name(machine).rate(dtype)
    except ArgumentError:
        return False
    return True


# --- the GEMM --------------------------------------------------------------------------------------------------------


def gemm_full_ms(
    M: int, N: int, K: int, mt: Tile = DEFAULT_TILE, *, machine: str | Machine = "mi300x", dtype: str = "float16",
    units: int | None = None, num_stages: int | None = None,
) -> float:  # fmt: skip
    """A product alone, by a kernel that divides no tiles.

    Args:
        M, N, K: its sizes.
        mt: its tiles.
        machine: what it runs on.
        dtype: of A and B, as torch names it.
        units: compute units that the rank has; None for all.
        num_stages: of the K loop; None for what the operations take.
    """
    return _gemm(_place(machine, units), M, N, K, _tile(mt), dtype, num_stages).full


def gemm_tile_ms(
    M: int, N: int, K: int, mt: Tile = DEFAULT_TILE, *, machine: str | Machine = "mi300x", dtype: str = "float16",
    units: int | None = None, num_stages: int | None = None,
) -> float:  # fmt: skip
    """A tile of a product alone. The arguments are those of :func:`gemm_full_ms`."""
    return _gemm(_place(machine, units), M, N, K, _tile(mt), dtype, num_stages).tile


def gemm_tile_ms_fused(
    M: int, N: int, K: int, num_wgs: int, gemm_wgs: int, comm_intensity: float = 0.0, mt: Tile = DEFAULT_TILE, *,
    machine: str | Machine = "mi300x", dtype: str = "float16", units: int | None = None,
    num_stages: int | None = None, fused_mult: float | None = None, alpha: float | None = None,
) -> float:  # fmt: skip
    """A tile of a product beside a collective.

    Args:
        M, N, K, mt, machine, dtype, units, num_stages: as of :func:`gemm_full_ms`.
        num_wgs, gemm_wgs: programs, and those of them that begin with the GEMM.
        comm_intensity: time of the collective in times of the GEMM's, each alone; more than 1 counts as 1.
        fused_mult: how many times as long a tile takes in the kernel with two queues; None for the machine's.
        alpha: by what share it takes longer while all are in the collective; None for the machine's.
    """
    place = _place(machine, units)
    _split("gemm_wgs", gemm_wgs, num_wgs)
    tile = _gemm(place, M, N, K, _tile(mt), dtype, num_stages).tile
    return tile * _slowed(place, (num_wgs - gemm_wgs) / num_wgs, comm_intensity, fused_mult, alpha)


def _slowed(
    place: _Place, share: float, intensity: float, fused_mult: float | None, alpha: float | None, fused: bool = True
) -> float:
    """How many times as long a tile of the GEMM takes when a share of the programs is in the collective."""
    scale = (place.fit.fused_scale if fused_mult is None else fused_mult) if fused else 1.0
    return scale * (1 + (place.fit.interference if alpha is None else alpha) * share * min(1.0, intensity))


@lru_cache(maxsize=4096)
def _gemm(place: _Place, M: int, N: int, K: int, mt: Tile, dtype: str, num_stages: int | None) -> _Gemm:
    m, n, k = mt
    _, itemsize = place.machine.rate(dtype)
    stages = _stages(place, mt, itemsize) if num_stages is None else num_stages
    params = {
        "block_size_m": m, "block_size_n": n, "block_size_k": k, "num_stages": stages, "group_size_m": _GROUP_M,
    }  # fmt: skip
    one = cost_model.product(place.machine, {"M": M, "N": N, "K": K}, dtype, params, units=place.units)
    # The last tiles are not divided, as those of other operations may be.
    rounds = math.ceil(one.tiles / one.programs)
    start = one.seconds - math.hypot(one.compute, one.memory)
    if one.model == "origami":
        busy = place.fit.origami_scale * one.compute
    else:
        tile = place.fit.tile_scale * one.tile + (m + n) * K * itemsize / place.fit.load_bytes_per_s
        # Where the cache is the limit, the time of the tiles is shorter than that of all.
        cache = one.compute if one.compute > one.rounds * one.tile else 0.0
        busy = math.hypot(max(rounds * tile, cache), one.memory)
    return _Gemm(one.tiles, busy / rounds * 1e3, (start + busy) * 1e3)


def _stages(place: _Place, mt: Tile, itemsize: int) -> int:
    """As many as :func:`iris.tuning.tiles.fitted_tiles` finds room for."""
    most = _STAGES.get(place.family, _STAGES[""])
    if place.machine.name not in KNOWN:
        return most
    m, n, k = mt
    room = KNOWN[place.machine.name].shared_memory_bytes // ((m + n) * k * itemsize)
    return max(2, min(most, room))


# --- the collective --------------------------------------------------------------------------------------------------


def n_comm_tiles(collective: str, comm_m: int, comm_n: int, world: int, cb: Sequence[int] = DEFAULT_COMM_TILE) -> int:
    """Tiles that a rank has to do of a collective: the root of a broadcast, the rank with most of others."""
    rows, copies, _ = _work(collective, comm_m, world)
    tiles = _tiles(rows, comm_n, cb) * copies
    return _ceil(tiles, world) if collective == "all_reduce" else tiles


def comm_remote_bytes_per_rank(
    collective: str, comm_m: int, comm_n: int, world: int, cb: Sequence[int] = DEFAULT_COMM_TILE, dtype_bytes: int = 2
) -> float:
    """Bytes that a rank reads from peers or writes to them, the rank that has most. All algorithms are one-shot: each
    part goes straight from its owner to whoever wants it.

    Args:
        collective, comm_m, comm_n, world: of a shape.
        cb: tile of the collective: those of an ``all_reduce`` are dealt to the ranks as a whole.
        dtype_bytes: bytes of an element.
    """
    rows, copies, moves = _work(collective, comm_m, world)
    nbytes = rows * comm_n * dtype_bytes
    if collective == "all_reduce":
        tiles = _tiles(rows, comm_n, cb)
        nbytes *= _ceil(tiles, world) / tiles
    if collective == "all_to_all":
        copies = world - 1  # of its chunks but the own one
    return nbytes * copies * moves


def comm_full_ms(
    collective: str, comm_m: int, comm_n: int, world: int, wgs: int | None = None,
    cb: Sequence[int] | None = None, dtype_bytes: int = 2, *, machine: str | Machine = "mi300x",
    units: int | None = None, link_gbps: float | None = None, comm_sat: int | None = None,
) -> float:  # fmt: skip
    """A collective beside a GEMM, which takes nothing of its programs.

    Args:
        collective, comm_m, comm_n, world: of a shape.
        wgs: programs that do it; None for enough to reach the rate of the links.
        cb: tile of the collective; None for :func:`usual_comm_block`.
        dtype_bytes: bytes of an element.
        machine, units: as of :func:`gemm_full_ms`.
        link_gbps: GB/s that a rank receives from all peers together, in place of the machine's; ``math.inf`` where
            ranks share memory.
        comm_sat: programs that reach the rate of the links; None for :func:`comm_sat_channels`.
    """
    place = _place(machine, units)
    cb = cb or _comm_block(place, collective, world)
    nbytes = comm_remote_bytes_per_rank(collective, comm_m, comm_n, world, cb, dtype_bytes)
    took = nbytes / _link(place, world, link_gbps)
    if wgs is not None:
        enough = comm_sat or _channels(place, collective, world, None, None, link_gbps)
        took *= max(1.0, enough / _counted("wgs", wgs))
    return (place.fit.comm_start_s + took) * 1e3


def usual_comm_block(target: Target | None, collective: str, world: int) -> tuple[int, int]:
    """Rows and columns of a tile of a collective of two-byte elements when ``comm_block`` is left open.

    Args:
        target: the device; None for one that is not known.
        collective, world: of a shape.
    """
    # 64 KiB under way: a program moves 1.4 to 1.7 times as much between two H200 as with half of it. A sum of more than
    # two ranks' tiles has no registers for that: it holds two of them and the sum, in float32.
    if target is None or not target.descriptors or (_named(collective) in _ADDING and world > 2):
        return DEFAULT_COMM_TILE
    return _LARGER_COMM_TILE


def _comm_block(place: _Place, collective: str, world: int) -> tuple[int, int]:
    return usual_comm_block(KNOWN.get(place.machine.name), collective, world)


def comm_sat_channels(
    collective: str, world: int, base: int | None = None, num_wgs: int | None = None, *,
    machine: str | Machine = "mi300x", units: int | None = None, link_gbps: float | None = None,
) -> int:  # fmt: skip
    """Programs that reach the rate of the links together, so that fewer leave some of it.

    Args:
        collective, world: of a shape; one rank has no links.
        base: of an ``all_reduce``, which needs a multiple of it at least; None for the machine's.
        num_wgs: programs that there are; the answer is no more.
        machine, units, link_gbps: as of :func:`comm_full_ms`.
    """
    return _channels(_place(machine, units), collective, world, base, num_wgs, link_gbps)


def _channels(
    place: _Place, collective: str, world: int, base: int | None, num_wgs: int | None, link_gbps: float | None
) -> int:
    if world == 1:
        return 1
    channels = max(1, math.ceil(_link(place, world, link_gbps) / place.fit.program_bytes_per_s))
    if _named(collective) == "all_reduce":
        least = (place.fit.channels if base is None else base) * place.fit.channels_all_reduce
        channels = max(channels, round(least))
    return channels if num_wgs is None else min(channels, num_wgs)


def _work(collective: str, comm_m: int, world: int) -> tuple[int, int, int]:
    """Rows that a rank's tiles divide, how often, and how often each of its elements goes over a link."""
    chunk = _ceil(comm_m, world)
    return {
        "all_gather": (comm_m, 1, world - 1),
        "broadcast": (comm_m, 1, world - 1),
        "all_reduce": (comm_m, 1, 2 * (world - 1)),
        "reduce_scatter": (chunk, 1, world - 1),
        "all_to_all": (chunk, world, 1),
    }[_named(collective)]


def _link(place: _Place, world: int, link_gbps: float | None) -> float:
    """Bytes a second of a rank's collective beside a GEMM. A copy within a device reads and writes its memory."""
    machine = place.machine
    if link_gbps is not None and not link_gbps > 0:
        raise ArgumentError(f"link_gbps must be above 0, got {link_gbps!r}")
    total = min(machine.link_total_bytes_per_s, machine.link_peer_bytes_per_s * max(1, world - 1))
    attained = total * machine.link_efficiency if link_gbps is None else link_gbps * 1e9
    memory = machine.memory_bytes_per_s * machine.memory_efficiency / 2
    return min(attained, memory * min(1.0, place.units / machine.compute_units)) * place.fit.comm_share


# --- splits ----------------------------------------------------------------------------------------------------------


def usual_cap(collective: str, world: int, num_wgs: int) -> int:
    """The most programs that come to a collective when ``comm_cap`` is left open. An all-reduce is slower with more:
    its reads and its writes meet on the links (between two H200 by 14 % with all units, to half of them)."""
    return max(2, (num_wgs + 1) // 2) if _named(collective) == "all_reduce" and world > 1 else num_wgs


def default_splits(num_wgs: int, mode: str = "fused") -> list[int]:
    """Numbers of programs that begin with the GEMM which are worth a thought: from an eighth of all, in steps of 8."""
    least = max(1, min(max(16, num_wgs // 8), num_wgs))
    found = sorted({*range(least, num_wgs + 1, 8), num_wgs})
    # Each of two kernels has programs of its own.
    return found if mode == "fused" else [split for split in found if split < num_wgs] or [max(1, num_wgs - 1)]


def rank_splits(
    shape: Mapping[str, Any],
    tiles: Iterable[Tile] = (DEFAULT_TILE,),
    splits: Iterable[int] | None = None,
    *,
    num_wgs: int | None = None,
    comm_wgs: int | None = None,
    mode: str = "fused",
    cb: Sequence[int] | None = None,
    machine: str | Machine = "mi300x",
    dtype: str = "float16",
    comm_dtype_bytes: int | None = None,
    units: int | None = None,
    link_gbps: float | None = None,
    num_stages: int | None = None,
    comm_cap: int | None = None,
    comm_sat: int | None = None,
    c_atomic_gemm: float | None = None,
    c_atomic_comm: float | None = None,
    fused_mult: float | None = None,
    alpha: float | None = None,
) -> list[Split]:
    """Every tile with every split, the best first; equal ones stay in the order given.

    Args:
        shape: what is asked.
        tiles: of the GEMM.
        splits: numbers of programs that begin with the GEMM; None for :func:`default_splits`.
        num_wgs: programs; None for one a compute unit. Those that find no unit wait until others have ended.
        comm_wgs: of ``mode="concurrent"``, programs of the collective; None for those that the split leaves.
        mode: ``"fused"``, where programs turn to the other queue in the end, or ``"concurrent"``, where they do not.
        cb: tile of the collective; None for :func:`usual_comm_block`.
        machine, dtype, units, num_stages: as of :func:`gemm_full_ms`.
        comm_dtype_bytes: bytes of an element of the collective; None for as many as ``dtype`` has.
        link_gbps: as of :func:`comm_full_ms`.
        comm_cap, c_atomic_gemm, c_atomic_comm: as of :func:`schedule_makespan`; None for :func:`usual_cap` and the
            machine's.
        comm_sat: ``base`` of :func:`comm_sat_channels`; None for the machine's.
        fused_mult, alpha: as of :func:`gemm_tile_ms_fused`.

    Raises:
        ArgumentError: says what is not known or not possible, and what is.
    """
    if mode not in MODES:
        raise ArgumentError(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
    asked = checked_shape(shape)
    place = _place(machine, units)
    total = place.units if num_wgs is None else _counted("num_wgs", num_wgs)
    nbytes = place.machine.rate(dtype)[1] if comm_dtype_bytes is None else comm_dtype_bytes
    about = asked["collective"], asked["comm_m"], asked["comm_n"], asked["world"]
    cb = cb or _comm_block(place, asked["collective"], asked["world"])
    items = n_comm_tiles(*about, cb=cb)
    comm = comm_full_ms(*about, cb=cb, dtype_bytes=nbytes, machine=place.machine, units=place.units,
                        link_gbps=link_gbps)  # fmt: skip
    takes = place.fit.take_tile_s * 1e3 if c_atomic_gemm is None else c_atomic_gemm
    takes_item = place.fit.take_item_s * 1e3 if c_atomic_comm is None else c_atomic_comm
    resident = place.units * place.machine.resident_programs_per_unit
    fused = mode == "fused"
    chosen = default_splits(total, mode) if splits is None else list(splits)
    cap = usual_cap(asked["collective"], asked["world"], total) if comm_cap is None else comm_cap
    found = []
    for mt in tiles:
        gemm = _gemm(place, asked["gemm_m"], asked["gemm_n"], asked["gemm_k"], _tile(mt), dtype, num_stages)
        for split in chosen:
            _split("gemm_wgs", split, total)
            theirs = total - split if fused or comm_wgs is None else comm_wgs
            # As the operations have it: no more programs than tiles, and those of the GEMM come first.
            grid = min(split + theirs, resident, max(1, gemm.tiles + items))
            own = min(split, grid)
            if not fused:
                own, theirs = max(1, min(split, gemm.tiles, resident)), max(1, min(theirs, items))
                grid = own + theirs
            slower = _slowed(place, (grid - own) / grid, comm / gemm.full, fused_mult, alpha, fused)
            enough = _channels(place, about[0], about[3], comm_sat, grid, link_gbps)
            ms = schedule_makespan(
                gemm.tiles, gemm.tile * slower, items, comm / items, grid, own, takes, takes_item,
                cap if fused else None, enough, helps=fused,
            )  # fmt: skip
            found.append(Split(split, _tile(mt), ms))
    return sorted(found, key=lambda one: one.pred_ms)


def predict_split(
    shape: Mapping[str, Any],
    num_wgs: int | None = None,
    candidates: Iterable[int] | None = None,
    mt: Tile = DEFAULT_TILE,
    cb: Sequence[int] | None = None,
    *,
    mt_candidates: Iterable[Tile] | None = None,
    mt_prefer: Tile | None = None,
    mt_margin: float | None = None,
    machine: str | Machine = "mi300x",
    dtype: str = "float16",
    units: int | None = None,
    num_stages: int | None = None,
    comm_dtype_bytes: int | None = None,
    link_gbps: float | None = None,
    mode: str = "fused",
    **further: Any,
) -> dict[str, Any]:
    """The best split of a shape, and with ``mt_candidates`` the tile to go with it.

    Args:
        shape: what is asked.
        num_wgs, cb, mode, machine, dtype, units, num_stages, comm_dtype_bytes, link_gbps: as of :func:`rank_splits`.
        candidates: numbers of programs that begin with the GEMM; None for :func:`default_splits`.
        mt: the tile, where there is no choice.
        mt_candidates: tiles to choose from.
        mt_prefer: the tile that is kept unless another is faster by more than ``mt_margin``; None for ``mt``.
        mt_margin: that share; None for the machine's.
        further: the other keywords of :func:`rank_splits`.

    Returns:
        ``gemm_wgs``, ``mt``, ``pred_ms``; ``T_gemm`` and ``T_comm``, the two alone; ``n_gemm``, ``Lg``, ``n_comm`` and
        ``Lc``, tiles of either and times of one; and ``curve``: of each split its number, the GEMM's time with so many
        programs, the collective's, and both together.
    """
    place = _place(machine, units)
    asked = checked_shape(shape)
    total = place.units if num_wgs is None else num_wgs
    tiles = [_tile(mt)] if mt_candidates is None else [_tile(one) for one in mt_candidates]
    if not tiles:
        raise ArgumentError("mt_candidates is empty; it takes tiles, as (rows, columns, K)")
    ranked = rank_splits(
        asked, tiles, candidates, num_wgs=total, cb=cb, mode=mode, machine=place.machine, dtype=dtype, units=units,
        num_stages=num_stages, comm_dtype_bytes=comm_dtype_bytes, link_gbps=link_gbps, **further,
    )  # fmt: skip
    if not ranked:
        raise ArgumentError("candidates is empty; it takes numbers of programs that begin with the GEMM")
    best = ranked[0]
    usual = next((one for one in ranked if one.mt == _tile(mt_prefer or mt)), best)
    if best.pred_ms >= usual.pred_ms * (1 - (place.fit.tile_margin if mt_margin is None else mt_margin)):
        best = usual
    sizes = asked["gemm_m"], asked["gemm_n"], asked["gemm_k"]
    gemm = _gemm(place, *sizes, best.mt, dtype, num_stages)
    about = asked["collective"], asked["comm_m"], asked["comm_n"], asked["world"]
    nbytes = place.machine.rate(dtype)[1] if comm_dtype_bytes is None else comm_dtype_bytes
    cb = cb or _comm_block(place, asked["collective"], asked["world"])
    comm = comm_full_ms(*about, cb=cb, dtype_bytes=nbytes, machine=place.machine, units=place.units,
                        link_gbps=link_gbps)  # fmt: skip
    items = n_comm_tiles(*about, cb=cb)
    slowing = {name: further.get(name) for name in ("fused_mult", "alpha")}

    def tile_ms(split: int) -> float:
        return gemm.tile * _slowed(place, (total - split) / total, comm / gemm.full, **slowing, fused=mode == "fused")

    curve = [
        (
            one.gemm_wgs,
            _ceil(gemm.tiles, one.gemm_wgs) * tile_ms(one.gemm_wgs) if one.gemm_wgs else math.inf,
            comm,
            one.pred_ms,
        )
        for one in sorted(ranked, key=lambda one: one.gemm_wgs)
        if one.mt == best.mt
    ]
    return {
        "gemm_wgs": best.gemm_wgs, "mt": best.mt, "pred_ms": best.pred_ms, "T_gemm": gemm.full, "T_comm": comm,
        "n_gemm": gemm.tiles, "Lg": tile_ms(best.gemm_wgs), "n_comm": items, "Lc": comm / items, "curve": curve,
    }  # fmt: skip


# --- arguments -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _place(machine: str | Machine, units: int | None) -> _Place:
    known = machine if isinstance(machine, Machine) else by_name(machine)
    family = KNOWN[known.name].family if known.name in KNOWN else ""
    have = known.compute_units if units is None else _counted("units", units)
    return _Place(known, family, calibration(known.name, family), have)


def checked_shape(shape: Mapping[str, Any]) -> dict[str, Any]:
    """A shape's numbers.

    Raises:
        ArgumentError: what is missing, not known or no such number.
    """
    if set(shape) != set(SHAPE):
        raise ArgumentError(f"a shape has {', '.join(SHAPE)}; got {', '.join(map(str, shape)) or 'none'}")
    _named(shape["collective"])
    return {name: value if name == "collective" else _counted(name, value) for name, value in shape.items()}


def _named(collective: Any) -> str:
    if collective not in COLLECTIVES:
        raise ArgumentError(f"collective must be one of {', '.join(COLLECTIVES)}; got {collective!r}")
    return collective


def _counted(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{name} must be a whole number above 0, got {value!r}")
    return value


def _split(name: str, value: Any, total: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= total:
        raise ArgumentError(f"{name} must be a whole number from 0 to num_wgs={total}, got {value!r}")


def _tile(mt: Sequence[int]) -> Tile:
    if len(mt) != 3:
        raise ArgumentError(f"a tile of the GEMM is (rows, columns, K), got {mt!r}")
    m, n, k = (_counted("a side of a tile", side) for side in mt)
    return m, n, k


def _tiles(rows: int, columns: int, cb: Sequence[int]) -> int:
    height, width = cb
    return _ceil(rows, height) * _ceil(columns, width)


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit)
