"""What the ranks of ``iris tune`` run: ``python -m iris.cli._tune_rank REQUEST``.

Inputs are random. The result of every candidate is checked, before it is timed, against products in float64 of rows
from all over the output, or against the exact sums of a collective; one whose result is wrong is not taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import iris
from iris.cli.tune import PRODUCTS, Request, show
from iris.errors import IrisError, OutputError, UnsupportedError
from iris.tuning import autotune

if TYPE_CHECKING:
    from iris.runtime.context import Iris

_ROWS = 512  # that are computed in float64
_SLACK = 64 << 20
# By output dtype. Products of ranks are rounded before they are added, and PyTorch rounds every sum.
_TOLERANCE = {torch.float16: 0.02, torch.bfloat16: 0.1, torch.float32: 0.002}


def main(request: Request) -> int:
    """Tune everything that was asked for; returns the exit code."""
    ctx = iris.iris(_SLACK + max(_heap_bytes(request, sizes) for sizes in request.sizes))
    return run(ctx, request)


def run(ctx: Iris, request: Request) -> int:
    """Tune on the ranks of a context; returns the exit code.

    Raises:
        UnsupportedError: nothing can be tuned on this runtime.
    """
    reason = autotune.pointless(ctx)
    if reason:
        raise UnsupportedError(f"iris tune: {reason}; it needs a GPU (`iris doctor` says what is missing)")
    ctx.service("tuned").forget()  # who asks for it wants it measured again
    failed = 0
    for number, sizes in enumerate(request.sizes):
        shown = f"{request.operation} {'x'.join(map(str, sizes))}"
        if ctx.get_rank() == 0:
            print(f"{shown}: up to {request.candidates} candidates ({number + 1} of {len(request.sizes)})", flush=True)
        call, check = (_product if request.operation in PRODUCTS else _collective)(ctx, request, sizes, number)
        told: list[autotune.Tuning] = []
        text = ""
        try:
            with autotune.using(candidates=request.candidates, check=check, told=told.append):
                plan = call()
            ctx.synchronize()
            check()
            text = "" if told else plan.reason
        except UnsupportedError as error:
            text, failed = str(error), 1
        ctx.barrier()
        if ctx.get_rank() == 0:
            for tuning in told:
                show(tuning)
            if text:
                print(f"{shown}: {text}", flush=True)
    return failed


def _heap_bytes(request: Request, sizes: tuple[int, ...]) -> int:
    """Bytes that a problem takes of the heap. Those of the problems before it are free by then."""
    if request.operation not in PRODUCTS:
        return 3 * sizes[0]
    (M, N, K), ranks = sizes, request.ranks
    # A, the output, and for sums partial products of all ranks, twice.
    partials = 2 * ranks * M * N * 2 if request.operation in ("matmul_all_reduce", "matmul_reduce_scatter") else 0
    return 4 * (M * K + M * N) + partials


def _product(
    ctx: Iris, request: Request, sizes: tuple[int, ...], number: int
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """What runs a matrix operation with tune=True, and what raises when its output is wrong."""
    M, N, K = sizes
    world, rank, device = ctx.get_num_ranks(), ctx.get_rank(), ctx.get_device()
    dtype = getattr(torch, request.dtype)
    out_dtype = dtype if dtype.itemsize > 1 else torch.float16
    operation, gathered = request.operation, request.operation == "all_gather_matmul"
    adds = operation in ("matmul_all_reduce", "matmul_reduce_scatter")
    # A rank has rows of A, or columns and with them, where products are added, rows of B.
    by_rows = operation == "matmul_all_gather" or (gathered and request.gather_dim == 0)
    a_shape = (M // world, K) if by_rows else (M, K // world)
    b_shape = (a_shape[1], N) if adds else (K, N)

    def made(which: int, owner: int, shape: tuple[int, int], scale: float) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(1_000_003 * number + 1009 * which + owner)
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    def a_of(owner: int) -> torch.Tensor:
        return made(1, owner, a_shape, 1.0)

    def b_of(owner: int) -> torch.Tensor:
        return made(2, owner if adds else 0, b_shape, K**-0.5)

    a_t, b_t = (letter == "T" for letter in request.transpose)
    a = ctx.empty(*(a_shape[::-1] if a_t else a_shape), dtype=dtype)
    a = a.t() if a_t else a
    a.copy_(a_of(rank))
    b = b_of(rank)
    b = b.t().contiguous().t() if b_t else b
    chunk = -(-M // world) if operation == "matmul_reduce_scatter" else M
    first = min(M, rank * chunk) if operation == "matmul_reduce_scatter" else 0
    rows = min(M, first + chunk) - first
    # Kernels that write to other ranks find the output at the same place there.
    shared = operation in ("matmul_all_gather", "matmul_all_reduce")
    out = ctx.empty(rows, N, dtype=out_dtype) if shared else torch.empty(rows, N, dtype=out_dtype, device=device)
    picked = torch.linspace(0, max(0, rows - 1), min(rows, _ROWS), device=device).long()
    wanted = torch.zeros(len(picked), N, dtype=torch.float64, device=device)
    for owner in range(world):
        part = a_of(owner)
        if adds:
            wanted += part[first + picked].double() @ b_of(owner).double()
        elif not by_rows:
            depth = a_shape[1]
            wanted += part[picked].double() @ b[owner * depth : (owner + 1) * depth].double()
        else:
            own = (picked >= owner * a_shape[0]) & (picked < (owner + 1) * a_shape[0])
            wanted[own] = part[picked[own] - owner * a_shape[0]].double() @ b.double()
    tolerance = _TOLERANCE[out_dtype]
    out.fill_(float("nan"))

    def check() -> None:
        ctx.synchronize()
        missing = out.isnan()
        wrong = (out[picked].double() - wanted).abs() > tolerance * (1 + wanted.abs())
        bad = missing.nonzero() if missing.any() else wrong.nonzero()
        if len(bad):
            row, column = (int(i) for i in bad[0])
            if not missing.any():
                row = int(picked[row])
            raise OutputError(f"wrong at ({row}, {column}): {out[row, column]}; wrong elements: {len(bad)}")
        out.fill_(float("nan"))

    def call() -> Any:
        given = {"gather_dim": request.gather_dim} if gathered else {}
        return getattr(ctx.ops, operation)(out, a, b, tune=True, **given).plan

    return call, check


def _collective(
    ctx: Iris, request: Request, sizes: tuple[int, ...], number: int
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """What runs a collective with tune=True, and what raises when its output is wrong."""
    world, rank, device = ctx.get_num_ranks(), ctx.get_rank(), ctx.get_device()
    dtype, operation = getattr(torch, request.dtype), request.operation
    count = sizes[0] // dtype.itemsize
    n = count // world if operation == "all_gather" else count
    part = n // world

    def input_of(owner: int) -> torch.Tensor:
        # Whole numbers, so that sums are exact in any order.
        generator = torch.Generator(device).manual_seed(1_000_003 * number + owner)
        return torch.randint(-4, 5, (n,), generator=generator, device=device).to(dtype)

    inp = ctx.empty(n, dtype=dtype)
    inp.copy_(input_of(rank))
    size = {"all_gather": n * world, "reduce_scatter": part}.get(operation, n)
    out = ctx.empty(size, dtype=dtype)
    wanted = torch.zeros(size, dtype=dtype, device=device)
    for owner in range(world):
        theirs = input_of(owner)
        if operation == "all_gather":
            wanted[owner * n : (owner + 1) * n] = theirs
        elif operation == "all_to_all":
            wanted[owner * part : (owner + 1) * part] = theirs[rank * part : (rank + 1) * part]
        elif operation == "reduce_scatter":
            wanted += theirs[rank * part : (rank + 1) * part]
        elif operation == "all_reduce":
            wanted += theirs
        elif owner == 0:
            wanted.copy_(theirs)
    out.fill_(float("nan"))

    def check() -> None:
        ctx.synchronize()
        bad = (out != wanted).nonzero()
        if len(bad):
            at = int(bad[0])
            raise OutputError(f"wrong at {at}: {out[at]}, not {wanted[at]}; wrong elements: {len(bad)}")
        out.fill_(float("nan"))

    def call() -> Any:
        if operation == "broadcast":
            return ctx.ccl.broadcast_tensor(out, inp if rank == 0 else None, 0, tune=True).plan
        return getattr(ctx.ccl, operation)(out, inp, tune=True).plan

    return call, check


if __name__ == "__main__":
    try:
        code = main(Request.from_json(sys.argv[1]))
    except IrisError as error:
        sys.exit(f"iris: {error}")
    sys.exit(code)
