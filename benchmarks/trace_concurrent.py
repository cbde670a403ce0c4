"""Draws the two queues of iris.concurrent over time, from a traced call: a GEMM beside a collective.

    iris run -n 2 benchmarks/trace_concurrent.py --out traces
    iris run -n 2 benchmarks/trace_concurrent.py --mode both --rank all --gemm-wgs 96 --out traces
    iris run --loopback --link-gbps 370 -n 8 benchmarks/trace_concurrent.py --alone --comm 8192x8192 --out traces
    iris run -n 2 benchmarks/trace_concurrent.py --small
    python benchmarks/trace_concurrent.py --from traces/fused.json --figure two_queues.svg

The call is made without tracing first: its results are checked, and it is timed. Then one call is traced, which takes
longer. In the upper panel is how many programs are in a tile of the GEMM, in a tile of the collective, and in neither;
in the middle how much of each queue has been taken; below what each program does, a line above those that begin with
the collective. A second file of the same name is a PNG.

``--alone`` is for ranks that share a card (iris run --loopback): rank 0 calls, with the whole card, and waits for
nobody. Tensors are random. Sampled rows of the product are compared with float64, the collective exactly.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _two_queues import FACTS, draw

from iris import _env
from iris.concurrent._candidates import default_split
from iris.concurrent._collectives import COLLECTIVES
from iris.concurrent.tuning_data._operands import TOLERANCE, Operands, Shape
from iris.errors import IrisError
from iris.runtime.links import imitated
from iris.runtime.local import current_world, whole_card
from iris.runtime.timing import do_bench, timer_of
from iris.tracing import chrome, gantt, read

_SLACK = 1 << 24  # bytes of the heap beside the tensors
MODES = ("fused", "concurrent")
SMALL = {"gemm": (96, 160, 32), "comm": (140, 300), "gemm_block": (32, 64, 32), "num_wgs": 4}


def sides(count: int) -> Callable[[str], tuple[int, ...]]:
    """A type of an argument: so many whole numbers with x between them."""

    def parse(text: str) -> tuple[int, ...]:
        found = tuple(int(word) for word in text.lower().split("x") if word.isdigit() and int(word))
        if len(found) != count:
            raise argparse.ArgumentTypeError(f"{text!r} is not {count} whole numbers above 0 with x between them")
        return found

    return parse


def ranks_of(text: str) -> list[int] | None:
    """``all``, or ranks with commas between them."""
    if text == "all":
        return None
    if not all(word.isdigit() for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'all' nor a list of ranks such as 0,1")
    return [int(word) for word in text.split(",")]


def parsed() -> argparse.Namespace:
    """The command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--collective", choices=tuple(COLLECTIVES), default="all_reduce", help="default: %(default)s")
    parser.add_argument("--gemm", type=sides(3), metavar="MxNxK", help="default: 8192x8192x8192")
    parser.add_argument(
        "--comm", type=sides(2), metavar="ROWSxCOLUMNS", help="of comm_src on each rank; default: 4096x8192"
    )
    parser.add_argument("--mode", choices=(*MODES, "both"), default="fused", help="default: %(default)s")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float16", help="default: %(default)s")
    parser.add_argument("--num-wgs", type=int, metavar="N", help="programs; default: the compute units")
    parser.add_argument("--gemm-wgs", type=int, metavar="N", help="of them for the GEMM; default: the library's")
    parser.add_argument("--gemm-block", type=sides(3), metavar="MxNxK", help="tile of the GEMM; default: the library's")
    parser.add_argument("--repeat", type=int, default=15, help="calls that are timed (default: %(default)s)")
    parser.add_argument("--rank", type=ranks_of, default=[0], help="ranks to draw: all, or 0,1 (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("traces"), help="folder of the traces (default: %(default)s)")
    parser.add_argument("--figure", type=Path, help="the picture; default: two_queues.svg in the folder")
    parser.add_argument("--from", dest="files", type=Path, nargs="+", metavar="TRACE", help="draw these, run nothing")
    parser.add_argument("--alone", action="store_true", help="rank 0 works, with the whole card (iris run --loopback)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try it without GPUs")
    given = parser.parse_args()
    usual: dict[str, Any] = {"gemm": (8192, 8192, 8192), "comm": (4096, 8192)}
    if given.small:
        usual = SMALL
        given.repeat = min(given.repeat, 2)
    for name, value in usual.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    given.figure = given.figure or given.out / "two_queues.svg"
    return given


def heap_bytes(given: argparse.Namespace, world: int, modes: int) -> int:
    """Enough for the tensors on the heap."""
    rows, columns = given.comm
    whole = rows * world if given.collective == "all_gather" else rows + world
    return _SLACK + modes * (rows + whole) * columns * getattr(torch, given.dtype).itemsize


def trace_mode(ctx: Any, given: argparse.Namespace, mode: str) -> Path:
    """Check, time and trace the call in one mode; returns where the trace is, which the leading rank has written."""
    rank, alone = ctx.get_rank(), given.alone
    total = given.num_wgs or ctx.get_cu_count()
    gemm = default_split(total, mode) if given.gemm_wgs is None else given.gemm_wgs
    how = {"num_wgs": total, "gemm_wgs": gemm, "gemm_block": given.gemm_block}
    operands = Operands(ctx, given.collective, Shape(*given.gemm, *given.comm), given.dtype, mode, 0, alone)
    ctx.synchronize()
    meet(ctx, "tensors are ready")
    path, times = given.out / f"{mode}.json", None
    if rank == 0 or not alone:
        times = measure(ctx, operands, how, given.repeat, (lambda: None) if alone else ctx.barrier)
        document = ctx.tracing.export(path, merge=not alone)
        ctx.tracing.disable()
    of_ranks = meet(ctx, "times", times)
    # Without `merge` the one rank's file has its number.
    path = path.with_name(f"{mode}_rank0.json") if alone else path
    if rank == 0:
        known = {str(number): found for number, found in enumerate(of_ranks) if found is not None}
        document["metadata"][FACTS] = {
            "mode": mode,
            "collective": given.collective,
            "gemm": given.gemm,
            "comm": given.comm,
            "dtype": given.dtype,
            "ranks": ctx.get_num_ranks(),
            "gemm_wgs": gemm,
            "comm_wgs": max(int(mode == "concurrent"), total - gemm),
            "repeats": given.repeat,
            "untraced_ms": {number: untraced for number, (untraced, _) in known.items()},
            "traced_ms": {number: traced for number, (_, traced) in known.items()},
            "alone": alone,
            "one_gpu": ctx.runtime == "loopback" or (_env.get("IRIS_RANKS_PER_GPU") or 1) > 1,
            "link": imitated(ctx),
        }
        chrome.write(path, document)
    meet(ctx, "the trace is written")
    return path


def measure(
    ctx: Any, operands: Operands, how: dict[str, Any], repeat: int, barrier: Callable[[], Any]
) -> tuple[float, float]:
    """Check the call, and leave one traced; milliseconds without tracing (median), and of the traced call."""
    device = ctx.get_device()
    operands.call(**how)
    operands.check()
    warmup = 3 if ctx.target.compiled else 0
    untraced = do_bench(
        lambda: operands.call(**how), barrier, n_warmup=warmup, n_repeat=repeat, return_mode="median", device=device
    )
    # With a buffer for one span, to compile the kernel with spans and to count them.
    ctx.tracing.enable(1)
    operands.call(**how)
    operands.check()
    ctx.tracing.enable(1 + 2 * ctx.tracing.dropped_events)
    timer = timer_of(device)
    barrier()
    timer.flush()
    barrier()
    timer.measure(lambda: operands.call(**how), keep=True)
    barrier()
    (traced,) = timer.samples()
    operands.check()
    return untraced, traced


def meet(ctx: Any, what: str, value: Any = None) -> list[Any]:
    """Every rank's value, on the host: nothing runs on a card that one rank has for itself."""
    return ctx.exchange.all_gather(f"trace_concurrent: {what}", value)


def run(given: argparse.Namespace) -> None:
    """Trace the call on the ranks that a launcher has started, and draw it on the leading one."""
    import iris

    if given.alone:
        if current_world() is None:
            raise IrisError("--alone is for ranks in one process: iris run --loopback")
        os.environ["IRIS_CHECK"] = "off"  # the ranks do not make the same calls
    modes = MODES if given.mode == "both" else (given.mode,)
    ctx = iris.iris(heap_bytes(given, int(os.environ.get("WORLD_SIZE", "1")), len(modes)))
    if given.alone:
        whole_card(ctx)
    paths = [trace_mode(ctx, given, mode) for mode in modes]
    if ctx.get_rank() == 0:
        picture(given, paths)


def picture(given: argparse.Namespace, paths: list[Path]) -> None:
    """Draw traces, and say what was written."""
    traces = [read(path) for path in paths]
    for path, trace in zip(paths, traces, strict=True):
        dropped = sum(trace.dropped.values())
        print(f"{path}: {len(trace.spans)} spans, {dropped} did not fit")
    print("picture:", *draw(traces, given.rank, given.figure))


def main() -> None:
    given = parsed()
    try:
        gantt.check_output(given.figure)
        if given.files:
            picture(given, given.files)
            return
    except IrisError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    run(given)


if __name__ == "__main__":
    main()
