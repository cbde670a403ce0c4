"""Tiles of a matrix product that fit a problem and a target, where nothing better is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from iris._target import Target

_LEAST, _MOST = 16, 128
_GROUP_M = 8


@dataclass(frozen=True)
class Tiles:
    """How a kernel multiplies.

    Attributes:
        block_m, block_n, block_k: tile of the output and step along K.
        group_m: rows of tiles that neighbouring programs share.
        num_warps, num_stages: launch options.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int

    def shared_memory_bytes(self, operand_bytes: int) -> int:
        """Shared memory that the pipelined K loop takes for operands of so many bytes an element."""
        return self.block_k * (self.block_m + self.block_n) * operand_bytes * max(1, self.num_stages)


def fitted_tiles(
    target: Target,
    rows: int,
    columns: int,
    depth: int,
    itemsize: int,
    *,
    operand_bytes: int | None = None,
    block: tuple[int, int, int] | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> Tiles:
    """Tiles of a product of ``rows`` x ``columns`` with ``depth`` columns of A.

    Args:
        target: what they run on.
        rows, columns, depth: of the product.
        itemsize: bytes of an element of A.
        operand_bytes: bytes of an element as it is multiplied, ``itemsize`` if None.
        block, num_warps, num_stages: the caller's; the rest is chosen for them.
    """
    m, n, k = block or _block(target, rows, columns, depth, itemsize)
    if not target.compiled:
        return Tiles(m, n, k, 4, num_warps or 4, num_stages or 1)
    warps = num_warps or (8 if m * n >= 128 * 128 else 4)
    tiles = Tiles(m, n, k, _GROUP_M, warps, num_stages or (2 if target.vendor == "amd" else 4))
    while tiles.shared_memory_bytes(operand_bytes or itemsize) > target.shared_memory_bytes:
        if tiles.num_stages > 2 and num_stages is None:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif block is not None:
            break  # the caller's own; the launch says what does not fit
        elif tiles.block_n > 64:
            tiles = replace(tiles, block_n=tiles.block_n // 2)
        else:
            tiles = replace(tiles, block_k=tiles.block_k // 2)
    return tiles


def _block(target: Target, rows: int, columns: int, depth: int, itemsize: int) -> tuple[int, int, int]:
    m = power_of_two(rows, _LEAST, _MOST)
    if not target.compiled:
        # The interpreter's cost is by statement, not by element: few big tiles.
        return m, power_of_two(columns, _LEAST, _MOST), power_of_two(depth, _LEAST, _MOST)
    # Wider tiles spill registers, except for two-byte dtypes.
    widest = 256 if itemsize == 2 else 128
    n = power_of_two(columns, _LEAST, widest if m == 128 else 128 if m >= 64 else 64)
    return m, n, {4: 32, 2: 64, 1: 128}[itemsize]


def power_of_two(size: int, least: int, most: int) -> int:
    """The smallest power of two from ``size`` on, but at least ``least`` and at most ``most``, powers themselves."""
    value = least
    while value < size and value < most:
        value *= 2
    return value


def float32_precision(target: Target, dtype: torch.dtype, allow_tf32: bool | None = None) -> str:
    """``"tf32"`` when float32 operands are multiplied in it on this target, else ``"ieee"``.

    ``allow_tf32``: the caller's word; None follows ``torch.get_float32_matmul_precision()``.
    """
    allowed = torch.get_float32_matmul_precision() != "highest" if allow_tf32 is None else allow_tf32
    return "tf32" if allowed and dtype == torch.float32 and target.vendor == "nvidia" else "ieee"
