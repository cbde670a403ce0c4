"""A tensor as kernels see it: pieces of equal size, each a matrix of elements with two strides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from iris.errors import ArgumentError
from iris.runtime.checks import check_writable as check_writable
from iris.runtime.checks import integer_dtype as integer_dtype


@dataclass(frozen=True)
class Pieces:
    """Where the elements of a tensor's pieces lie, in elements.

    Attributes:
        count: elements of a piece.
        distance: from the first element of a piece to that of the next.
        columns, row, column: a piece is a matrix of so many columns, with these strides.
        flat: its elements lie one after the other.
    """

    count: int
    distance: int
    columns: int
    row: int
    column: int
    flat: bool

    @property
    def strides(self) -> tuple[int, int, int]:
        """Arguments of kernels: columns, stride of rows, stride of columns."""
        return (1, 0, 0) if self.flat else (self.columns, self.row, self.column)


def pieces(name: str, tensor: torch.Tensor, parts: int = 1, dim: int = 0) -> Pieces:
    """``tensor`` cut into ``parts`` along ``dim``.

    Args:
        name: the argument's name.
        tensor: its size along ``dim`` must be a multiple of ``parts``.
        parts: number of pieces.
        dim: the dimension that is cut.

    Raises:
        ArgumentError: a size that cannot be cut, or strides that no matrix has.
    """
    shape, strides = list(tensor.shape), list(tensor.stride())
    distance = 0
    if parts > 1:
        if not shape:
            raise ArgumentError(f"{name} is a scalar and cannot be cut into {parts} parts")
        if shape[dim] % parts:
            raise ArgumentError(
                f"dimension {dim} of {name} must be a multiple of the number of ranks, {parts}; got {shape[dim]} "
                f"(shape {tuple(shape)})"
            )
        shape[dim] //= parts
        distance = shape[dim] * strides[dim]
    count = 1
    for size in shape:
        count *= size
    merged: list[list[int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = [merged[-1][0] * size, stride]
        else:
            merged.append([size, stride])
    if count == 0 or not merged:
        return Pieces(count, distance, 1, 0, 0, flat=True)
    if len(merged) == 1:
        (size, stride) = merged[0]
        return Pieces(count, distance, size, 0, stride, flat=stride == 1)
    if len(merged) == 2:
        (_, row), (columns, column) = merged
        return Pieces(count, distance, columns, row, column, flat=False)
    raise ArgumentError(
        f"{name} of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} must be contiguous, or strided in "
        "at most two dimensions after neighbouring ones are merged; call .contiguous()"
    )


def is_piece(part: torch.Tensor, of_part: Pieces, whole: torch.Tensor, of_whole: Pieces, place: int) -> bool:
    """Whether ``part`` is the piece of ``whole`` at ``place``, element by element."""
    start = whole.data_ptr() + place * of_whole.distance * whole.element_size()
    return part.data_ptr() == start and of_part.strides == of_whole.strides
