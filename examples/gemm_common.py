"""What the GEMM examples 13 to 17 share: arguments, matrices, the K loop, validation, timing, JSON, traces of tiles.

An example is its kernel and a class that says how to launch it:

    class Example(gemm_common.Gemm):
        split = "k"                                   # A and B are divided along K; or "n": B along N
        def prepare(self): ...                        # allocate what the kernel needs
        def launch(self, trace): ...                  # one call of the kernel
        def owner(self, row, column, tile): ...       # who stores an element, for messages

    if __name__ == "__main__":
        gemm_common.main(Example, __doc__)
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

import iris
from iris._events import Event
from iris.runtime.local import current_world
from iris.x.gemm import multiply_blocks
from iris.x.turn import end_turn

LAUNCH_FILE = Path(__file__).with_name("data") / "gemm_launch.json"
# Datatype of A and B, of C, of sums, and the rounding of C as a multiple of its elements.
DATATYPES = {
    "fp16": (torch.float16, torch.float16, torch.float32, 2.0**-11),
    "bf16": (torch.bfloat16, torch.bfloat16, torch.float32, 2.0**-8),
    "fp32": (torch.float32, torch.float32, torch.float32, 2.0**-24),
    "int8": (torch.int8, torch.int32, torch.int32, 0.0),
}
# What a span of a kernel says in the trace of tiles.
SPANS = {Event.COMPUTE: "gemm", Event.WAIT: "poll", Event.REDUCE: "op", Event.PUT: "comm"}


@triton.jit
def multiply_tile(
    a, b, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, pid_m, pid_n, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tile (pid_m, pid_n) of the product of this rank's A and B, in float32 (int32 for int8)."""
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    kind: tl.constexpr = tl.int32 if a.dtype.element_ty.is_int() else tl.float32
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=kind)
    return multiply_blocks(
        acc, None, a, 0, rows.to(tl.int64) * stride_am, rows < M, 0, 0, stride_ak,
        None, b, 0, columns.to(tl.int64) * stride_bn, columns < N, stride_bk,
        0, tl.cdiv(K, BLOCK_K), K, 0, 0, ctx.rank, ctx.rank, ctx.heap_bases, 1,
        1, 1, False, BLOCK_M, BLOCK_N, BLOCK_K, False, False, "ieee",
    )  # fmt: skip


@triton.jit
def leave(flags, counters, members, ctx):
    """End the kernel when all peers have ended theirs: what they stored here is there. True for the last program."""
    return end_turn(flags, counters, members, ctx.rank, ctx.context, ctx.world_size, 0)


class Matmul:
    """Calls a kernel and, with ``set_debug(True)``, remembers what it was compiled to."""

    def __init__(self, kernel: Any, options: dict[str, Any]):
        self._kernel, self._options = kernel, options
        self._debug, self._compiled, self._called = False, None, False

    def set_debug(self, debug: bool) -> None:
        self._debug = debug

    def __call__(self, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        compiled = self._kernel[grid](*args, **meta, **self._options)
        if self._debug:
            self._compiled, self._called = compiled, True

    def get_matmul_registers(self) -> int | None:
        """Registers of a thread; None under the interpreter, which compiles nothing."""
        return self._figure("registers", lambda compiled: compiled.n_regs)

    def get_matmul_spills(self) -> int | None:
        """Words of a thread that did not fit into registers; None under the interpreter."""
        return self._figure("spills", lambda compiled: compiled.n_spills)

    def get_matmul_shared(self) -> int | None:
        """Bytes of shared memory of a program; None under the interpreter."""
        return self._figure("shared memory", lambda compiled: compiled.metadata.shared)

    def _figure(self, name: str, read: Any) -> int | None:
        if not self._debug:
            raise RuntimeError(f"{name} are not kept: call set_debug(True) before the matmul")
        if not self._called:
            raise RuntimeError(f"there are no {name} yet: call the matmul first")
        return None if self._compiled is None else read(self._compiled)


class Gemm:
    """One rank of an example: its part of A and B, C, and how the kernel is launched. Examples derive from it.

    Attributes:
        M, N, K: sizes of the whole product.
        a, b: this rank's part, anywhere on the device. c: the result, (M, N), on the symmetric heap.
        sizes: of the part: M, N, K of ``a @ b``. strides: of ``a`` and ``b``.
        blocks: BLOCK_M, BLOCK_N, BLOCK_K. tiles_n: columns of tiles of C.
        turn: flags, counters and members for ``iris.x.turn`` and :func:`leave`.
    """

    split = "k"
    communicators = False  # whether some programs only communicate
    kernel: Any = None

    def __init__(self, ctx: iris.Iris, args: argparse.Namespace):
        self.ctx, self.args = ctx, args
        self.rank, self.world, self.device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
        self.M, self.N, self.K = args.m, args.n, args.k
        self.blocks, self.group_m = (args.BLK_M, args.BLK_N, args.BLK_K), args.gsize_m
        self.dtype, self.out_dtype, self.sum_dtype, self._rounding = DATATYPES[args.datatype]
        self.matmul = Matmul(self.kernel, args.options)
        # The same numbers on every rank, so that each can compute the whole product; each takes its part of them.
        generator = torch.Generator(self.device).manual_seed(123)
        self._whole_a, self._whole_b = (
            self._random(shape, generator) for shape in ((self.M, self.K), (self.K, self.N))
        )
        self.first, end = self._bounds(self.rank)
        if self.split == "k":
            self.a, self.b = self._whole_a[:, self.first : end], self._whole_b[self.first : end]
        else:
            self.a, self.b = self._whole_a, self._whole_b[:, self.first : end]
        self.sizes = (self.M, self.b.shape[1], self.a.shape[1])
        self.strides = (*self.a.stride(), *self.b.stride())
        self.c = ctx.empty(self.M, self.N, dtype=self.out_dtype)
        self.turn = (
            ctx.zeros(2, self.world, iris.signal.FLAG_STRIDE.value, dtype=torch.int32),
            torch.zeros(self.world + 3, dtype=torch.int32, device=self.device),
            torch.arange(self.world, dtype=torch.int32, device=self.device),
        )
        self.prepare()
        ctx.barrier()  # the flags are 0 everywhere before a kernel sets one

    def prepare(self) -> None:
        """Allocate further memory. Collective."""

    def launch(self, trace: bool) -> None:
        """Call the kernel once. Afterwards, in the stream, C is complete on this rank."""
        raise NotImplementedError

    def run(self, trace: bool = False) -> None:
        """The whole operation: :meth:`launch`, and what has to be done before and after it."""
        self.launch(trace)

    def owner(self, row: int, column: int, tile: int) -> str:
        """Who stores element (row, column) of C, which is in ``tile``."""
        raise NotImplementedError

    def owner_of_column(self, column: int) -> int:
        """The rank whose columns of B a column is of; the own rank where all have all columns."""
        if self.split == "k":
            return self.rank
        return next(rank for rank in range(self.world) if column < self._bounds(rank)[1])

    @property
    def tiles_n(self) -> int:
        return -(-self.sizes[1] // self.blocks[1])

    @property
    def tiles(self) -> int:
        """Number of tiles of this rank's product."""
        return -(-self.sizes[0] // self.blocks[0]) * self.tiles_n

    def wrong(self) -> str:
        """What is wrong in C of this rank: empty, or the first element that rounding does not explain."""
        a, b = self._whole_a.double(), self._whole_b.double()
        expected, got = a @ b, self.c.double()
        # Each of K sums in float32 rounds by up to 2^-24 of the sum of |a b|; the errors add up like a random walk.
        allowed = 3 * math.sqrt(self.K) * 2.0**-24 * (a.abs() @ b.abs()) + self._rounding * expected.abs()
        if self.dtype == torch.int8:
            allowed.zero_()
        bad = ~((got - expected).abs() <= allowed)  # NaN is bad, too
        count = int(bad.sum())
        if not count:
            return ""
        row, column = divmod(int(bad.flatten().int().argmax()), self.N)
        first, end = self._bounds(self.owner_of_column(column)) if self.split == "n" else (0, self.N)
        tile = row // self.blocks[0] * -(-(end - first) // self.blocks[1]) + (column - first) // self.blocks[1]
        values = f"{got[row, column]:.6g}, expected {expected[row, column]:.6g} give or take {allowed[row, column]:.3g}"
        return (
            f"{count} of {bad.numel()} elements of C are wrong, the first is C[{row}, {column}] = {values}; "
            f"tile {tile}, {self.owner(row, column, tile)}"
        )

    def tile_trace(self) -> list[dict[str, float]]:
        """One more run, with spans: begin and end of what was done for each tile, in us from the first on."""
        self.ctx.tracing.enable(max_events=8 * self.tiles * (self.world + 1))
        self.ctx.barrier()
        self.run(trace=True)
        self.ctx.barrier()
        events = {name: column.tolist() for name, column in self.ctx.tracing.events().items()}
        self.ctx.tracing.disable()
        ticks_per_us = self.ctx.target.clock_hz / 1e6
        tiles: dict[int, dict[str, float]] = {}
        first = min(events["timestamp"], default=0)
        columns = ("event_id", "pid_m", "timestamp", "duration_cycles")
        for event, tile, start, duration in zip(*(events[name] for name in columns), strict=True):
            entry = tiles.setdefault(tile, {"tile_id": tile})
            begin, end = f"{SPANS[event]}_begin", f"{SPANS[event]}_end"
            at = (start - first) / ticks_per_us
            entry[begin] = min(entry.get(begin, math.inf), at)
            entry[end] = max(entry.get(end, -math.inf), at + duration / ticks_per_us)
        return [tiles[tile] for tile in sorted(tiles)]

    def _bounds(self, rank: int) -> tuple[int, int]:
        """First index of a rank's part of what is divided, and where it ends."""
        extent = self.K if self.split == "k" else self.N
        return extent * rank // self.world, extent * (rank + 1) // self.world

    def _random(self, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
        if self.dtype == torch.int8:
            return torch.randint(-128, 128, shape, generator=generator, device=self.device).to(torch.int8)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)


def launch_defaults(target: Any) -> dict[str, Any]:
    """The entry of the architecture in data/gemm_launch.json, or of its vendor."""
    table = json.loads(LAUNCH_FILE.read_text())
    return table.get(target.arch.rstrip("a")) or table["interpreter" if target.vendor == "cpu" else target.vendor]


def _parser(description: str, kind: type[Gemm]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description.splitlines()[0],
        epilog="Without -v, -b and -t it validates. Started alone it starts its ranks itself; iris run can, too. "
        f"Sizes and tiles that are not given are those of the architecture in data/{LAUNCH_FILE.name}; there are as "
        "many programs as a GPU has compute units.",
    )
    parts = {"m": "rows of A and C", "n": "columns of B and C", "k": "columns of A and rows of B"}
    for name, meaning in parts.items():
        divided = ", divided among the ranks" if name == kind.split else ""
        parser.add_argument(f"-{name}", type=int, help=f"{meaning}{divided}")
    parser.add_argument(
        "--datatype",
        choices=DATATYPES,
        default="fp16",
        help="of A and B, and of C but for int8, where it is int32; default: %(default)s",
    )
    parser.add_argument("-r", "--num_ranks", type=int, help="ranks to start, when no launcher has; default: 2")
    parser.add_argument("-v", "--validate", action="store_true", help="compare all of C with float64, in two calls")
    parser.add_argument("-b", "--benchmark", action="store_true", help="time it, and write a JSON file")
    parser.add_argument(
        "-t",
        "--trace_tiles",
        "--trace-tiles",
        action="store_true",
        help="write when each tile was worked on, to a file for each rank beside the JSON file",
    )
    parser.add_argument("-d", "--debug", action="store_true", help="print registers, spills and shared memory")
    parser.add_argument(
        "--output_file", type=Path, metavar="FILE", default=Path("log.json"), help="the JSON file; default: %(default)s"
    )
    numbers = {
        "BLK_M": "rows of a tile",
        "BLK_N": "columns of a tile",
        "BLK_K": "step along K",
        "gsize_m": "rows of tiles that programs side by side share",
        "num_stages": "blocks of K that are loaded ahead; interpreted kernels load none",
        "gemm_sms": "programs that multiply" if kind.communicators else "programs",
        **({"comm_sms": "programs that only communicate; default: an eighth of all"} if kind.communicators else {}),
    }
    for name, meaning in numbers.items():
        parser.add_argument(f"--{name}", type=int, metavar="NUMBER", help=meaning)
    parser.add_argument(
        "--heap_size", type=int, metavar="BYTES", help="symmetric heap of a rank; default: what the matrices take"
    )
    return parser


def _complete(parser: argparse.ArgumentParser, args: argparse.Namespace, kind: type[Gemm], ctx: iris.Iris) -> None:
    """Fill what was left open from the table of the architecture, and refuse what cannot be."""
    world, defaults = ctx.get_num_ranks(), launch_defaults(ctx.target)
    blocks = defaults["blocks"][str(DATATYPES[args.datatype][0].itemsize)]
    programs = ctx.get_cu_count()
    share = max(1, programs // 8) if kind.communicators else 0
    given = {
        **dict(zip(("m", "n", "k"), defaults["shape"], strict=True)),
        **dict(zip(("BLK_M", "BLK_N", "BLK_K"), blocks, strict=True)),
        "gsize_m": defaults["gsize_m"],
        "gemm_sms": defaults.get("gemm_sms", programs - share),
    }
    if kind.communicators:
        given["comm_sms"] = defaults.get("comm_sms", share)
    for name, value in given.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
        if getattr(args, name) < 1:
            parser.error(f"{name} is {getattr(args, name)}; possible: from 1")
    args.options = dict(defaults["options"])
    if args.num_stages is None:
        args.num_stages = args.options.get("num_stages", 1)
    elif args.options:
        args.options["num_stages"] = args.num_stages
    for name in ("BLK_M", "BLK_N", "BLK_K"):
        value = getattr(args, name)
        if value < 16 or value & (value - 1):
            parser.error(f"--{name} is {value}; possible: powers of two from 16")
    if getattr(args, kind.split) < world:
        parser.error(f"-{kind.split} is {getattr(args, kind.split)} and is divided among {world} ranks; give one each")


def _start_ranks(num_ranks: int) -> None:
    """Become ``iris run`` with this program, which starts it once for each rank."""
    command = [sys.executable, "-m", "_iris_command", "run", "-n", str(num_ranks), *sys.argv]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def main(kind: type[Gemm], description: str) -> None:
    """Run an example as its command line asks. Without ``-v``, ``-b`` and ``-t`` it validates."""
    parser = _parser(description, kind)
    args = parser.parse_args()
    if "RANK" not in os.environ and current_world() is None:  # neither a process of a launcher nor simulated
        _start_ranks(args.num_ranks or 2)
    validate = args.validate or not (args.benchmark or args.trace_tiles)

    # C, sums in 32 bits and the rest that peers reach, for the shape that is given or a default one.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    m, n = (getattr(args, name) or (256 if interpreted else 8192) for name in ("m", "n"))
    ctx = iris.iris(heap_size=args.heap_size or ((1 << 26) if interpreted else (1 << 28)) + 12 * m * n)
    world, rank = ctx.get_num_ranks(), ctx.get_rank()
    if args.num_ranks not in (None, world):
        parser.error(f"--num_ranks is {args.num_ranks}, but the launcher has started {world}")
    args.num_ranks = world
    _complete(parser, args, kind, ctx)
    example = kind(ctx, args)
    example.matmul.set_debug(args.debug or args.benchmark)

    figures = _measured(example) if args.benchmark else {}
    if args.trace_tiles:
        path = args.output_file.with_name(f"{args.output_file.stem}_tiles_rank{rank}.json")
        path.write_text(json.dumps(example.tile_trace(), indent=1) + "\n")
    success = True
    if validate:
        for _ in range(2):  # the second call meets what the first one has left in flags and buffers
            example.c.fill_(float("nan") if example.out_dtype.is_floating_point else -(2**31))
            ctx.barrier()  # nobody clears what a peer has stored
            example.run()
            ctx.barrier()
            wrong = example.wrong()
            success = success and not wrong
            if wrong:
                print(f"rank {rank}: {wrong}", flush=True)
        success = all(ctx.exchange.all_gather("validation", success))
    if args.benchmark and rank == 0:
        _write(example, figures, success if validate else None)

    did = [f"{args.m}x{args.n}x{args.k} {args.datatype} in {example.tiles} tiles"]
    did += [f"validation {'passed' if success else 'failed'}"] if validate else []
    did += [f"{figures['total_ms']:.3f} ms"] if figures else []
    if args.debug:
        did.append(str(_resources(example)))
    print(f"rank {rank} of {world}: {', '.join(did)}", flush=True)
    ctx.barrier()  # everybody has said so before the first rank ends
    if not success:
        sys.exit(1)


def _measured(example: Gemm) -> dict[str, float]:
    """Times in milliseconds, those of the slowest rank."""
    ctx, compiled = example.ctx, example.ctx.target.compiled
    warmup, repeat = (25, 100) if compiled else (0, 2)
    figures: dict[str, float] = {}
    for name, call in (("total", example.run), ("gemm", lambda: example.launch(False))):
        mine = iris.do_bench(call, ctx.barrier, n_warmup=warmup, n_repeat=repeat)
        figures[f"{name}_ms"] = max(ctx.exchange.all_gather(f"{name}_ms", mine))
        figures[f"{name}_experiments"] = repeat
    figures["tflops"] = 2 * example.M * example.N * example.K / figures["total_ms"] * 1e-9
    return figures


def _resources(example: Gemm) -> dict[str, int | str | None]:
    matmul = example.matmul
    found: dict[str, int | str | None] = {
        "gemm_registers": matmul.get_matmul_registers(),
        "gemm_spills": matmul.get_matmul_spills(),
        "gemm_shared": matmul.get_matmul_shared(),
    }
    if found["gemm_registers"] is None:
        found["gemm_resources_missing"] = "the kernel was interpreted, not compiled"
    return found


def _write(example: Gemm, figures: dict[str, float], success: bool | None) -> None:
    """The JSON of a benchmark. ``success`` is None when nothing was validated."""
    args = {name: str(value) if isinstance(value, Path) else value for name, value in vars(example.args).items()}
    target = example.ctx.target
    record = {**args, "world_size": example.world, "success": success, "device": target.name, "arch": target.arch,
              **_resources(example), **figures}  # fmt: skip
    example.args.output_file.write_text(json.dumps(record, indent=2) + "\n")
