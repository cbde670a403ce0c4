"""What tuning tries for a GEMM beside a collective: splits and tiles, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from iris.concurrent import predictor
from iris.concurrent.predictor import Tile
from iris.concurrent.tuning_data import candidates_of, split_of
from iris.tuning.tiles import Tiles, fitted_tiles

if TYPE_CHECKING:
    from iris._target import Target

# For two-byte elements; those of other sizes are as many bytes deep. What does not fit a target is left out.
_TILES: tuple[Tile, ...] = (
    (256, 256, 64), (128, 256, 64), (256, 128, 64), (128, 128, 64), (256, 64, 64), (64, 256, 64), (64, 128, 64),
    (64, 64, 128), (32, 128, 128), (16, 128, 128), (16, 64, 256),
)  # fmt: skip
# Where nothing at all is known.
_SHARES = (0.5, 0.625, 0.75, 0.875, 1.0)
_SUMS_A_THREAD = 128  # that registers hold beside what else is needed
_DIFFERENT = 2  # tiles whose best splits come before the second best of a tile


@dataclass(frozen=True)
class Candidate:
    """A split and a tile.

    Attributes:
        gemm_wgs, gemm_block: of the operation.
        pred_ms: milliseconds that are predicted; None where nothing is.
    """

    gemm_wgs: int
    gemm_block: Tile
    pred_ms: float | None = None

    @property
    def way(self) -> tuple[int, Tile]:
        return self.gemm_wgs, self.gemm_block


@dataclass(frozen=True)
class Conditions:
    """Where and how a shape is computed.

    Attributes:
        target: the device. machine: what the predictor calls it; it may be one that it does not know.
        dtype: of A and B, as torch names it.
        itemsize: bytes of an element as it is multiplied. comm_itemsize: of the collective.
        num_wgs: programs. units: compute units of the rank.
        mode, comm_wgs, comm_block, comm_cap, num_stages, num_warps: of the operation, None for open ones.
        link_gbps: where ranks share memory.
    """

    target: Target
    machine: str
    dtype: str
    itemsize: int
    comm_itemsize: int
    num_wgs: int
    units: int
    mode: str = "fused"
    comm_wgs: int | None = None
    comm_block: tuple[int, int] | None = None
    comm_cap: int | None = None
    num_stages: int | None = None
    num_warps: int | None = None
    link_gbps: float | None = None

    @property
    def most(self) -> int:
        """The most programs that may begin with the GEMM: in mode ``"concurrent"`` one of them all exchanges."""
        return self.num_wgs if self.mode == "fused" else max(1, self.num_wgs - (self.comm_wgs or 1))


def tiles_for(shape: Mapping[str, Any], where: Conditions) -> list[Tile]:
    """Tiles that a target has room for, and of which a product does not leave more than half empty."""
    if not where.target.compiled:
        return []
    found = []
    for m, n, k in _TILES:
        deep = max(16, k * 2 // max(2, where.itemsize))
        own = fitted_tiles(
            where.target, shape["gemm_m"], shape["gemm_n"], shape["gemm_k"], where.itemsize, block=(m, n, deep),
            num_warps=where.num_warps, num_stages=where.num_stages,
        )  # fmt: skip
        useful = (m < 2 * shape["gemm_m"] or m == 16) and (n < 2 * shape["gemm_n"] or n == 64)
        if useful and _fits(where.target, own, where.itemsize):
            found.append((m, n, deep))
    return found


def _fits(target: Target, tiles: Tiles, itemsize: int) -> bool:
    """Whether a tile may be compiled, as far as can be told; the tuner finds out."""
    # A loop of two stages may have the operands of one of them in registers.
    buffers = max(1, tiles.num_stages - (tiles.num_stages == 2))
    room = tiles.block_k * (tiles.block_m + tiles.block_n) * itemsize * buffers
    sums = tiles.block_m * tiles.block_n
    # Kernels that exchange have eight warps at least.
    return room <= target.shared_memory_bytes and sums <= _SUMS_A_THREAD * max(8, tiles.num_warps) * target.warp_size


def candidates(
    shape: Mapping[str, Any],
    where: Conditions,
    default_block: Tile,
    tiles: Sequence[Tile] | None = None,
    splits: Sequence[int] | None = None,
    most: int = 8,
) -> list[Candidate]:
    """Those that were derived from measurements and the best by the predictor, in turn; where one of the two knows
    nothing of the device the other's; and where neither does a few splits of the default tile.

    Args:
        shape: as :mod:`iris.concurrent.predictor` has it.
        where: where and how it is computed.
        default_block: the tile without tuning.
        tiles: those to choose from; None for :func:`tiles_for` and the default one.
        splits: numbers of programs that begin with the GEMM, to choose from; None for any.
        most: how many there may be.
    """
    among = list(dict.fromkeys([default_block, *tiles_for(shape, where)] if tiles is None else tiles))
    sources = [derived(where, among, splits), predicted(shape, where, among, splits)]
    if not any(sources):
        sources = [heuristic(where, among[0] if tiles is not None else default_block, splits)]
    found: dict[tuple[int, Tile], Candidate] = {}
    for turn in zip_longest(*sources):
        for one in turn:
            if one is not None:
                found.setdefault(one.way, one)
    return list(found.values())[:most]


def predicted(
    shape: Mapping[str, Any], where: Conditions, tiles: Iterable[Tile], splits: Iterable[int] | None = None
) -> list[Candidate]:
    """All, the best by the predictor first, but for the best splits of the best tiles, which come before; none where
    it knows nothing of the device."""
    if not predictor.predicts(where.machine, where.dtype):
        return []
    possible = predictor.default_splits(where.num_wgs, where.mode) if splits is None else splits
    ranked = predictor.rank_splits(
        shape, tiles, [split for split in possible if split <= where.most], num_wgs=where.num_wgs,
        comm_wgs=where.comm_wgs, mode=where.mode, cb=where.comm_block, machine=where.machine, dtype=where.dtype,
        comm_dtype_bytes=where.comm_itemsize, units=where.units, link_gbps=where.link_gbps,
        num_stages=where.num_stages, comm_cap=where.comm_cap,
    )  # fmt: skip
    of_tile: dict[Tile, predictor.Split] = {}
    for one in ranked:
        of_tile.setdefault(one.mt, one)
    first = list(of_tile.values())[:_DIFFERENT]
    return [Candidate(one.gemm_wgs, one.mt, one.pred_ms) for one in (*first, *(o for o in ranked if o not in first))]


def derived(where: Conditions, tiles: Sequence[Tile], splits: Sequence[int] | None = None) -> list[Candidate]:
    """Those of the device's architecture in the candidate set whose tiles are among ``tiles``; none without any."""
    known = candidates_of(where.target.arch)
    if len(tiles) == 1:  # the caller's own, so only the splits are of use
        known = tuple((share, tiles[0]) for share in dict.fromkeys(share for share, _ in known))
    found = [Candidate(min(where.most, split_of(share, where.num_wgs)), tile) for share, tile in known if tile in tiles]
    found = [one for one in found if splits is None or one.gemm_wgs in splits]
    return list(dict.fromkeys(found))


def heuristic(where: Conditions, tile: Tile, splits: Sequence[int] | None = None) -> list[Candidate]:
    """A few splits of one tile, the fewest programs for the GEMM first."""
    if splits is None:
        splits = sorted({min(where.most, split_of(share, where.num_wgs)) for share in _SHARES})
    return [Candidate(split, tile) for split in splits if split <= where.most]


def default_split(num_wgs: int, mode: str, comm_wgs: int | None = None) -> int:
    """What the operations take for ``gemm_wgs`` when it is left open."""
    if mode == "fused":
        return num_wgs * 3 // 4 if comm_wgs is None else num_wgs - comm_wgs
    return max(1, num_wgs - (max(1, num_wgs // 8) if comm_wgs is None else comm_wgs))
