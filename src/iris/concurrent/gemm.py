"""A GEMM and an independent collective that share the device: ``C = A @ B``, and ``comm_dst`` from ``comm_src``.

The two have nothing to do with each other, as the product of one layer and the gradients of another. Where the
collective moves what the product makes or needs, :mod:`iris.ops` has operations that overlap the two.

``Mc`` and ``Nc`` are the sizes of ``comm_src``, ``w`` is the number of ranks; chunks of rows are those of
``torch.chunk``: ``ceil(Mc / w)`` rows each, the last ones shorter or empty.

| operation | comm_src on each rank | comm_dst on each rank | on the heap |
|---|---|---|---|
| ``all_gather`` | (Mc, Nc), its rows | (w Mc, Nc), the rows of all in group order | comm_dst |
| ``all_reduce`` | (Mc, Nc) | (Mc, Nc), the sum | both; they may be one |
| ``reduce_scatter`` | (Mc, Nc) | its chunk of the sum | comm_src |
| ``all_to_all`` | (Mc, Nc), a chunk for each rank | (w x rows of its chunk, Nc), what each rank has for it | comm_src |
| ``broadcast`` | (Mc, Nc), of ``root`` alone used | (Mc, Nc), that of the root | comm_dst |

An ``all_gather`` into a ``comm_dst`` whose rows ``w`` does not divide takes its chunk of them as each rank's
``comm_src``.

Modes. ``"fused"`` is one kernel with two queues, of tiles of the product and of tiles of the collective. ``gemm_wgs``
of its programs begin with the product and the others with the collective; who finds no more tiles helps with the other.
``"concurrent"`` is two kernels on two streams, which do not help each other.

Neither result depends on the mode, on the split or on the order in which programs run: bit by bit, whoever takes a tile
computes the same. Sums are kept in float32 (float64, int32 or int64 for such inputs), added in group order and rounded
once.

Protocol. Counters in memory of the device give out the tiles of both queues. A program that has taken its first tile of
the collective waits until every peer's kernel has begun (:mod:`iris.x.turn`): then what stood before the call in the
peers' streams has ended, so their ``comm_src`` may be read and their ``comm_dst`` written. A peer's kernel begins with
its first program, which waits for nothing, so every wait ends, in whatever order and however few at a time the programs
run. The last program of a rank to end tells its peers, waits until all have told it, and sets the counters back to 0.
Then nobody reads this rank's ``comm_src`` any more and its ``comm_dst`` is complete, so what follows in the stream
needs no barrier. Nothing is set by the host, so a captured graph replays. Calls of a context are put in order, also on
different streams, because two that wait for their peers may each fill the device; calls that are to overlap take
workspaces of their own (:func:`iris.concurrent.make_workspace`), which share no counter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris.concurrent import _call
from iris.concurrent._call import Asked

if TYPE_CHECKING:
    from iris.concurrent.workspace import Workspace
    from iris.runtime.context import Iris

_ARGUMENTS = """Collective over ``group``; no barrier is needed before or after. See :mod:`iris.concurrent.gemm`.

    Args:
        shmem: the context.
        A, B: (M, K) and (K, N) with any strides, anywhere on the device: float32, float16, bfloat16, int8 or fp8. They
            may differ from rank to rank.
        comm_src: {comm_src}
        C: (M, N), of another floating-point dtype if wanted; int32 for int8. None makes one, of A's dtype; bfloat16 for
            fp8.
        comm_dst: {comm_dst}
        mode: ``"fused"`` or ``"concurrent"``.
        num_wgs: programs, of both kernels together in mode ``"concurrent"``; by default the rank's compute units.
        gemm_wgs: those that begin with the product, from 0 to all; by default three quarters.
        comm_wgs: the others; mode ``"concurrent"`` takes an eighth by default, and the rest for the product.
        gemm_block: (rows, columns, K) of a tile of the product; by default what fits the sizes and the target.
        gemm_group_m, comm_group_m: rows of tiles that neighbouring programs share.
        comm_block: (rows, columns) of a tile of the collective; the same on every rank.
        num_stages, num_warps: launch options; by default what fits the tiles, and where a kernel exchanges alone 1024
            threads.
        comm_cap: the most programs that come to the collective, helpers and those that begin with it together; None for
            half of them in an all_reduce, which more slow down, and for no bound in the others. With ``"fused"`` alone.
        tune: find the split and the tile that are the fastest for this case on this machine, where that has not been
            done before (:mod:`iris.concurrent.autotune`), and take them. They are left open then, the product's sizes
            are the same on every rank, and the first such call is made outside of a graph.
        group: None for all ranks, a process group or a sequence of ranks.
        workspace: of :func:`iris.concurrent.make_workspace`, for calls that are to run beside other ones.{further}

    Returns:
        C and comm_dst.

    Raises:
        ArgumentError, NotSymmetricError, DeviceMismatch, UnsupportedError: on the rank that has it, before any launch.
        RankMismatch: on the other ranks then, and on all ranks whose collectives differ.
        NotAMemberError: the caller is not in ``group``.
        CaptureError: the first such call, while a graph is captured.
    """

_ON_HEAP = "on the symmetric heap; None makes one there, which all ranks of the world must do"


def _documented(function: Any, summary: str, comm_src: str, comm_dst: str, further: str = "") -> Any:
    function.__doc__ = f"{summary} {_ARGUMENTS.format(comm_src=comm_src, comm_dst=comm_dst, further=further)}"
    return function


def _operation(name: str, summary: str, comm_src: str, comm_dst: str):
    """The public function of a collective that has no root."""

    def operation(
        shmem: Iris,
        A: torch.Tensor,
        B: torch.Tensor,
        comm_src: torch.Tensor,
        *,
        C: torch.Tensor | None = None,
        comm_dst: torch.Tensor | None = None,
        mode: str = "fused",
        num_wgs: int | None = None,
        gemm_wgs: int | None = None,
        comm_wgs: int | None = None,
        gemm_block: tuple[int, int, int] | None = None,
        gemm_group_m: int | None = None,
        comm_block: tuple[int, int] | None = None,
        comm_group_m: int | None = None,
        num_stages: int | None = None,
        num_warps: int | None = None,
        comm_cap: int | None = None,
        tune: bool = False,
        group: Any = None,
        workspace: Workspace | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        asked = Asked(
            mode, num_wgs, gemm_wgs, comm_wgs, gemm_block, gemm_group_m, comm_block, comm_group_m, num_stages,
            num_warps, comm_cap, group, None, tune,
        )  # fmt: skip
        return _call.run(shmem, name, asked, A, B, comm_src, C, comm_dst, workspace)

    operation.__name__ = operation.__qualname__ = name
    _documented(operation, summary, comm_src, comm_dst)
    return operation


all_gather = _operation(
    "all_gather",
    "``C = A @ B`` beside an all-gather of rows.",
    "(Mc, Nc) of any dtype but complex128; this rank's rows.",
    f"(w Mc, Nc), {_ON_HEAP}.",
)
all_reduce = _operation(
    "all_reduce",
    "``C = A @ B`` beside a sum over the ranks, on every rank.",
    "(Mc, Nc) on the symmetric heap; floating-point but fp8, or integers.",
    f"(Mc, Nc), {_ON_HEAP}. It may be ``comm_src``.",
)
reduce_scatter = _operation(
    "reduce_scatter",
    "``C = A @ B`` beside a sum over the ranks, of which each rank has its chunk of rows.",
    "(Mc, Nc) on the symmetric heap; floating-point but fp8, or integers.",
    "(rows of this rank's chunk, Nc), anywhere on the device; None makes one.",
)
all_to_all = _operation(
    "all_to_all",
    "``C = A @ B`` beside an exchange in which every rank gives a chunk of rows to every rank.",
    "(Mc, Nc) on the symmetric heap, of any dtype but complex128; chunk p is for member p.",
    "(w times the rows of this rank's chunk, Nc), anywhere on the device; None makes one.",
)


def broadcast(
    shmem: Iris,
    A: torch.Tensor,
    B: torch.Tensor,
    comm_src: torch.Tensor,
    *,
    root: int = 0,
    C: torch.Tensor | None = None,
    comm_dst: torch.Tensor | None = None,
    mode: str = "fused",
    num_wgs: int | None = None,
    gemm_wgs: int | None = None,
    comm_wgs: int | None = None,
    gemm_block: tuple[int, int, int] | None = None,
    gemm_group_m: int | None = None,
    comm_block: tuple[int, int] | None = None,
    comm_group_m: int | None = None,
    num_stages: int | None = None,
    num_warps: int | None = None,
    comm_cap: int | None = None,
    tune: bool = False,
    group: Any = None,
    workspace: Workspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    asked = Asked(
        mode, num_wgs, gemm_wgs, comm_wgs, gemm_block, gemm_group_m, comm_block, comm_group_m, num_stages, num_warps,
        comm_cap, group, root, tune,
    )  # fmt: skip
    return _call.run(shmem, "broadcast", asked, A, B, comm_src, C, comm_dst, workspace)


_documented(
    broadcast,
    "``C = A @ B`` beside a broadcast of what one rank has.",
    "(Mc, Nc) of any dtype but complex128; that of ``root`` counts, the others' shape and dtype alone.",
    f"(Mc, Nc), {_ON_HEAP}.",
    "\n        root: the rank whose ``comm_src`` it is, as a rank of the world.",
)
