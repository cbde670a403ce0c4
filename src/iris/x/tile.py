"""Tiles: where a block of a matrix lies, which of its elements exist, and what it holds.

    tile = iris.Tile(pid_m, pid_n, BLOCK_M, BLOCK_N, acc)          # block (pid_m, pid_n) of the tile grid, and its data
    view = iris.make_tensor_view(ptr, M, N, stride_m, stride_n)    # an (M, N) matrix with any strides
    ptrs, mask = view.tile_ptr(tile)
    tl.store(ptrs, tile.data.to(ptr.dtype.element_ty), mask=mask)

Offsets are computed in 64 bits. Edges are masked: a tile may hang over the matrix, or be larger than it. Nothing is
claimed of alignment; what the compiler knows of pointer and strides reaches the access by itself.
"""

import triton
import triton.language as tl

from iris.device._compat import aggregate, compiled_constructor, constant
from iris.errors import ArgumentError
from iris.x.schedule import tile_number


def _value(number, _semantic):
    """A field that is a value at run time, whatever it was made from."""
    return number if _semantic is None or isinstance(number, tl.tensor) else _semantic.to_tensor(number)


@triton.jit
def tile_layout(pid_m, pid_n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows, columns and mask of a tile of an (M, N) matrix: blocks (BLOCK_M,), (BLOCK_N,), (BLOCK_M, BLOCK_N).

    Rows and columns past the matrix are masked off and keep their numbers.
    """
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    return rm, rn, (rm < M)[:, None] & (rn < N)[None, :]


@triton.jit
def _pointers(ptr, rm, rn, stride_m, stride_n):
    rows = rm.to(tl.int64) * stride_m
    columns = rn.to(tl.int64) * stride_n
    return ptr + rows[:, None] + columns[None, :]


@triton.jit
def tile_ptr(ptr, M, N, stride_m, stride_n, pid_m, pid_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers and mask of a tile of an (M, N) matrix."""
    rm, rn, mask = tile_layout(pid_m, pid_n, M, N, BLOCK_M, BLOCK_N)
    return _pointers(ptr, rm, rn, stride_m, stride_n), mask


@triton.jit
def offset_ptr(ptr, stride_m, stride_n, offset_m, offset_n):
    """``ptr`` moved by ``offset_m`` rows and ``offset_n`` columns; of a pointer or a block of pointers."""
    return ptr + (tl.cast(offset_m, tl.int64) * stride_m + tl.cast(offset_n, tl.int64) * stride_n)


@aggregate
class TileView:
    """A place in the tile grid of a matrix.

    Attributes:
        pid_m, pid_n: row and column in the tile grid.
        block_m, block_n: extents of a tile (constexpr, powers of two).
    """

    pid_m: tl.tensor
    pid_n: tl.tensor
    block_m: tl.constexpr
    block_n: tl.constexpr

    @compiled_constructor
    def __init__(self, pid_m, pid_n, block_m, block_n, _semantic=None):
        self.pid_m = _value(pid_m, _semantic)
        self.pid_n = _value(pid_n, _semantic)
        self.block_m = constant(block_m)
        self.block_n = constant(block_n)

    @triton.jit
    def layout(self, M, N):
        """Rows, columns and mask in an (M, N) matrix; see :func:`tile_layout`."""
        return tile_layout(self.pid_m, self.pid_n, M, N, self.block_m, self.block_n)

    @triton.jit
    def indices(self):
        """Rows and columns, also those past the matrix."""
        rm = self.pid_m * self.block_m + tl.arange(0, self.block_m)
        rn = self.pid_n * self.block_n + tl.arange(0, self.block_n)
        return rm, rn


@aggregate
class Tile:
    """A place in the tile grid of a matrix, and a block of values that belongs there.

    Attributes:
        pid_m, pid_n, block_m, block_n: as in :class:`TileView`.
        data: block (block_m, block_n), of any dtype; what is past the matrix is never used.
    """

    pid_m: tl.tensor
    pid_n: tl.tensor
    block_m: tl.constexpr
    block_n: tl.constexpr
    data: tl.tensor

    @compiled_constructor
    def __init__(self, pid_m, pid_n, block_m, block_n, data, _semantic=None):
        self.pid_m = _value(pid_m, _semantic)
        self.pid_n = _value(pid_n, _semantic)
        self.block_m = constant(block_m)
        self.block_n = constant(block_n)
        self.data = data

    layout = TileView.layout
    indices = TileView.indices


@aggregate
class TensorView:
    """An (M, N) matrix in memory; make it with :func:`make_tensor_view`.

    Attributes:
        ptr: pointer to element (0, 0).
        M, N: extents.
        stride_m, stride_n: elements from a row, a column, to the next; any sign, in any order.
    """

    ptr: tl.tensor
    M: tl.tensor
    N: tl.tensor
    stride_m: tl.tensor
    stride_n: tl.tensor

    @compiled_constructor
    def __init__(self, ptr, M, N, stride_m, stride_n, _semantic=None):
        self.ptr = ptr
        self.M = _value(M, _semantic)
        self.N = _value(N, _semantic)
        self.stride_m = _value(stride_m, _semantic)
        self.stride_n = _value(stride_n, _semantic)

    @triton.jit
    def tile_ptr(self, tile):
        """Pointers and mask of ``tile`` (:class:`Tile` or :class:`TileView`) here."""
        return tile_ptr(
            self.ptr,
            self.M,
            self.N,
            self.stride_m,
            self.stride_n,
            tile.pid_m,
            tile.pid_n,
            tile.block_m,
            tile.block_n,
        )

    @triton.jit
    def tile_ptr_from_indices(self, rm, rn, block_m: tl.constexpr = None, block_n: tl.constexpr = None):
        """Pointers and mask of rows ``rm`` and columns ``rn``, blocks of any indices of at least 0.

        ``block_m`` and ``block_n`` are their extents, as far as they are given.
        """
        if block_m is not None:
            tl.static_assert(rm.shape[0] == block_m, "rm must have block_m elements")
        if block_n is not None:
            tl.static_assert(rn.shape[0] == block_n, "rn must have block_n elements")
        mask = (rm < self.M)[:, None] & (rn < self.N)[None, :]
        return _pointers(self.ptr, rm, rn, self.stride_m, self.stride_n), mask

    @triton.jit
    def offset_tile_ptr(self, tile, offset_m=0, offset_n=0, src_mask=None):
        """Pointers and mask of ``tile`` moved by ``offset_m`` rows and ``offset_n`` columns.

        ``src_mask``, the mask of the same tile in another view, masks further elements off.
        """
        rm, rn = tile.indices()
        ptrs, mask = self.tile_ptr_from_indices(rm + offset_m, rn + offset_n)
        if src_mask is not None:
            mask = mask & src_mask
        return ptrs, mask

    @triton.jit
    def offset(self, offset_m=0, offset_n=0):
        """The part of this matrix from row ``offset_m`` and column ``offset_n`` (of at least 0) on."""
        ptr = offset_ptr(self.ptr, self.stride_m, self.stride_n, offset_m, offset_n)
        return TensorView(ptr, self.M - offset_m, self.N - offset_n, self.stride_m, self.stride_n)

    @triton.jit
    def number_of_tiles(self, block_m: tl.constexpr, block_n: tl.constexpr):
        """Number of tiles of that size, those at the edges included."""
        return tl.cdiv(self.M, block_m) * tl.cdiv(self.N, block_n)

    @triton.jit
    def tile_id(self, tile):
        """Number of ``tile``, and index of its lock: ``pid_m * cdiv(N, block_n) + pid_n``."""
        return tile_number(tile.pid_m, tile.pid_n, tl.cdiv(self.N, tile.block_n))


@triton.jit
def make_tensor_view(ptr, M, N, stride_m, stride_n):
    """The (M, N) matrix at ``ptr``. Sizes and strides may be compile-time numbers, as arguments of 1 are."""
    return TensorView(ptr, tl.cast(M, tl.int32), tl.cast(N, tl.int32), _wide(stride_m), _wide(stride_n))


@triton.jit
def _wide(stride):
    return tl.cast(stride, tl.int64)


_VARIANTS = {"atomic": 0, "ring": 1, "one_shot": 2, "two_shot": 3, "spinlock": 4}


@aggregate
class AllReduceConfig:
    """Which all-reduce of tiles to use, and its locks; for ``DeviceContext.all_reduce``.

    Attributes:
        variant_code: 0 or "atomic", 1 or "ring", 2 or "one_shot", 3 or "two_shot", 4 or "spinlock" (constexpr; kept as
            the number).
        locks_ptr: the locks, int32 on the heap, one for each tile; "atomic" takes any int32 pointer.
    """

    variant_code: tl.constexpr
    locks_ptr: tl.tensor

    @compiled_constructor
    def __init__(self, variant_code, locks_ptr, _semantic=None):
        code = getattr(variant_code, "value", variant_code)
        code = _VARIANTS.get(code, code)
        if code not in _VARIANTS.values():
            possible = ", ".join(f"{number} or {name!r}" for name, number in _VARIANTS.items())
            raise ArgumentError(f"variant_code is {code!r}; possible: {possible}")
        self.variant_code = constant(code)
        self.locks_ptr = locks_ptr


def number_of_tiles(M: int, N: int, block_m: int, block_n: int) -> int:
    """On the host: number of tiles of an (M, N) matrix, which is the number of locks that its collectives take."""
    return -(-M // block_m) * -(-N // block_n)


def check_locks(locks, M: int, N: int, block_m: int, block_n: int) -> None:
    """On the host, before a launch: ``locks`` has an entry for each tile.

    Raises:
        ArgumentError: it has fewer, or is not a contiguous int32 tensor.
    """
    needed = number_of_tiles(M, N, block_m, block_n)
    if locks.numel() < needed:
        raise ArgumentError(
            f"locks has {locks.numel()} entries, and {M}x{N} in tiles of {block_m}x{block_n} needs {needed}: one for "
            "each tile"
        )
    if str(locks.dtype) != "torch.int32" or not locks.is_contiguous():
        raise ArgumentError(f"locks must be a contiguous int32 tensor, got {locks.dtype} with strides {locks.stride()}")
