"""What a call of a GEMM beside a collective comes to: checks, agreement of the ranks, and what it launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from iris.concurrent import autotune, predictor
from iris.concurrent._collectives import COLLECTIVES, Collective, Part
from iris.concurrent._two_queue_kernel import BATCH, two_queue_kernel
from iris.concurrent.workspace import Workspace
from iris.errors import ArgumentError, CaptureError, IrisError
from iris.runtime import checks, launch
from iris.runtime.calls import Calls
from iris.runtime.groups import Group
from iris.tuning.store import key_of
from iris.tuning.tiles import Tiles, fitted_tiles, float32_precision, power_of_two
from iris.x.operands import describe_a, describe_b, takes_descriptors
from iris.x.tile import number_of_tiles

if TYPE_CHECKING:
    from iris._target import Target
    from iris.runtime.context import Iris

MODES = ("fused", "concurrent")
ADDED = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
)  # fmt: skip
# Rows and columns of a tile of a collective where the interpreter runs, whose cost is by statement, not by element.
_INTERPRETED_COMM_BLOCK = (128, 256)
_SINGLE = 4  # tiles of a collective that are taken one at a time, for each program that begins with it
COMM_GROUP_M = 8
# So many have a tile of a collective in registers. The kernel that multiplies alone takes as many, so that it computes
# the same bits.
_WARPS = 8
# Of a kernel that exchanges alone: with so many 8 programs fill a link between H200 (benchmarks/bench_links.py).
_EXCHANGE_THREADS = 1024
_FEW_ROWS = (16, 128, 128)  # tile of a product of at most 16 rows of two-byte elements


@dataclass(frozen=True)
class Asked:
    """How the caller wants it done; fields are the keywords of :mod:`iris.concurrent.gemm`, None for open ones."""

    mode: Any = "fused"
    num_wgs: Any = None
    gemm_wgs: Any = None
    comm_wgs: Any = None
    gemm_block: Any = None
    gemm_group_m: Any = None
    comm_block: Any = None
    comm_group_m: Any = None
    num_stages: Any = None
    num_warps: Any = None
    comm_cap: Any = None
    group: Any = None
    root: Any = None
    tune: Any = False


@dataclass(frozen=True)
class Programs:
    """How many programs there are.

    Attributes:
        multiplying: those that begin with the GEMM, or that the kernel has which multiplies alone.
        exchanging: those that begin with the collective, or that the kernel has which exchanges alone.
        cap: the most that come to the collective.
    """

    multiplying: int
    exchanging: int
    cap: int


class Call:
    """A checked combination of arguments, and what every launch of it needs."""

    def __init__(self, ctx: Iris, name: str, asked: Asked, members: Group, a, b, src, c, dst):
        self.collective = COLLECTIVES[name]
        self.members = members
        self.mode = _choice("mode", asked.mode, MODES)
        autotune.check_open(name, asked, self.mode)
        self._kernel = launch.kernel_id(f"concurrent/{name}")
        self.c_shape, self.c_dtype = _check_product(ctx, a, b, c)
        root = 0 if name != "broadcast" else _place_of_root(asked.root, members)
        self.part = _check_collective(ctx, self.collective, members, root, src, dst)
        self.dst_shape, self.dst_dtype = (self.part.dst_rows, src.shape[1]), src.dtype
        _check_apart(self.collective, a, b, src, c, dst)
        self.integer = None if self.collective.adds else checks.integer_dtype(src.dtype)

        (M, N), K = self.c_shape, a.shape[1]
        operand_bytes = 2 if a.dtype != b.dtype else a.dtype.itemsize
        self.tiles = usual_tiles(
            ctx.target, M, N, K, a.dtype.itemsize, operand_bytes=operand_bytes,
            block=_block("gemm_block", asked.gemm_block, 3, 16), num_warps=_warps(asked.num_warps),
            num_stages=_count("num_stages", asked.num_stages),
        )  # fmt: skip
        self.tiles = replace(self.tiles, group_m=_count("gemm_group_m", asked.gemm_group_m) or self.tiles.group_m)
        self.exchange_warps = asked.num_warps or _EXCHANGE_THREADS // ctx.target.warp_size
        self.comm_block = _block("comm_block", asked.comm_block, 2, 1) or fitted_comm_block(
            ctx, name, members.size, self.part, src
        )
        self.comm_group_m = _count("comm_group_m", asked.comm_group_m) or COMM_GROUP_M
        self.items = self.part.items(number_of_tiles(self.part.rows, src.shape[1], *self.comm_block))
        products = number_of_tiles(M, N, self.tiles.block_m, self.tiles.block_n)
        self.programs = _programs(ctx, asked, self.mode, products, self.items, name, members.size)
        # The last tiles one at a time, so that programs end together.
        self.batches = max(0, self.items - _SINGLE * max(1, self.programs.exchanging)) // BATCH.value
        self.precision = float32_precision(ctx.target, a.dtype)
        # Without matrix units operands come from shared memory element by element, not as descriptors bring them.
        whole = a.dtype == torch.float32 and self.precision != "tf32"
        self.descriptors = takes_descriptors(ctx.target, a, b) and not whole

    def new_c(self, ctx: Iris) -> torch.Tensor:
        """An output of the product, in ordinary memory: peers do not touch it."""
        return torch.empty(self.c_shape, dtype=self.c_dtype, device=ctx.get_device())

    def new_dst(self, ctx: Iris) -> torch.Tensor:
        """An output of the collective; on the heap where peers write it."""
        rows, columns = self.dst_shape
        if not self.collective.writes_peers or self.members.size == 1:
            return torch.empty(rows, columns, dtype=self.dst_dtype, device=ctx.get_device())
        return ctx.heap.allocate(rows * columns, self.dst_dtype, site="comm_dst").view(rows, columns)


class State(Calls[Call]):
    """What a context remembers of these operations: agreed calls, and the workspace of those that have none."""

    def __init__(self, ctx: Iris):
        super().__init__(ctx)
        # The context's flags, which other operations use as well, in one order with this one's calls.
        self.workspace = Workspace(ctx, ctx.pair_flags, ctx.pair_counters, ctx.service("pair_order"))

    def agree(self, name: str, asked: Asked, members: Group, a, b, src, c, dst, workspace) -> Call:
        """Check the arguments and compare across the group what must be the same. Collective over the group.

        Raises:
            IrisError: what is wrong here.
            RankMismatch: what is wrong on another rank, or what differs.
        """
        ctx, error, call = self._ctx, None, None
        try:
            if workspace is not None and not isinstance(workspace, Workspace):
                raise ArgumentError(
                    f"workspace must come from iris.concurrent.make_workspace, got {type(workspace).__name__}"
                )
            call = Call(ctx, name, asked, members, a, b, src, c, dst)
            if dst is None and call.collective.writes_peers and members.size not in (1, ctx.num_ranks):
                raise ArgumentError(
                    f"comm_dst is on the symmetric heap, where all {ctx.num_ranks} ranks allocate together, and only "
                    f"{members.size} of them call; make it with ctx.empty on every rank and pass it"
                )
        except IrisError as caught:
            error = caught
        facts = _facts(ctx, asked, call, src, dst) | {"flags": _place(ctx, workspace), "tune": asked.tune}
        if asked.tune and call is not None:
            tensors = {"A": a, "B": b, "comm_src": src, "C": c, "comm_dst": dst}
            facts["case that is tuned"] = key_of(autotune.case_of(ctx, name, asked, call, tensors))
        ctx.agreement.reach(f"concurrent.{name}", members, facts, error)
        assert call is not None  # reach() raises the error
        return call


def run(ctx: Iris, name: str, asked: Asked, a, b, src, c, dst, workspace: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The body of the operations of :mod:`iris.concurrent.gemm`; returns C and comm_dst."""
    # What it does on the host cannot be traced: the graph breaks under torch.compile.
    function: Any = torch.compiler.disable(_run) if torch.compiler.is_compiling() else _run
    return function(ctx, name, asked, a, b, src, c, dst, workspace)


def _run(ctx: Iris, name: str, asked: Asked, a, b, src, c, dst, workspace: Any) -> tuple[torch.Tensor, torch.Tensor]:
    state: State = ctx.service("concurrent_state")
    members = ctx.resolve_group(asked.group)
    blocks = {"gemm_block": _tuple(asked.gemm_block), "comm_block": _tuple(asked.comm_block)}
    asked = replace(asked, **blocks, group=members.ranks)
    key: Any = (name, asked, _place(ctx, workspace), torch.get_float32_matmul_precision())
    key += tuple(_layout(tensor, place) for tensor, place in ((a, False), (b, False), (c, False)))
    key += tuple(_layout(tensor, True) for tensor in (src, dst))
    try:
        call = state.recall(key)
    except TypeError:  # a value that cannot be hashed, which is no argument that a call can be made with
        call, key = None, None
    if call is None:
        if ctx.capturing():
            raise CaptureError(
                f"concurrent.{name}: the ranks compare the arguments of the first such call, which a graph cannot "
                "capture; make the call once before the capture"
            )
        call = state.agree(name, asked, members, a, b, src, c, dst, workspace)
        state.remember(key, call)
    else:
        _check_apart(call.collective, a, b, src, c, dst)
    if asked.tune:
        tensors = {"A": a, "B": b, "comm_src": src, "C": c, "comm_dst": dst}

        def issue(one: Asked, outputs: Any) -> Any:
            return _run(ctx, name, one, a, b, src, outputs["C"], outputs["comm_dst"], workspace)

        asked = autotune.tuned(ctx, name, asked, call, tensors, issue)
        return _run(ctx, name, asked, a, b, src, c, dst, workspace)
    c = call.new_c(ctx) if c is None else c
    dst = call.new_dst(ctx) if dst is None else dst
    workspace = state.workspace if workspace is None else workspace
    workspace.order.follow_current()
    if call.mode == "fused":
        grid = call.programs.multiplying + call.programs.exchanging
        _start(ctx, call, workspace, a, b, src, c, dst, grid, True, True)
        return c, dst
    # The collective first, so that its programs have room before those that multiply take all.
    stream, current = workspace.stream(), ctx.current_stream()
    stream.wait_stream(current)
    with ctx.use_stream(stream):
        _start(ctx, call, workspace, a, b, src, c, dst, call.programs.exchanging, False, True)
    _start(ctx, call, workspace, a, b, src, c, dst, call.programs.multiplying, True, False)
    current.wait_stream(stream)
    return c, dst


def _start(
    ctx: Iris, call: Call, workspace: Workspace, a, b, src, c, dst, grid: int, multiplies: bool, exchanges: bool
) -> None:
    tiles, part, members = call.tiles, call.part, call.members
    descriptors = (None, None)
    if call.descriptors and multiplies:
        descriptors = (describe_a(a, tiles.block_m, tiles.block_k), describe_b(b, tiles.block_n, tiles.block_k))
    if call.integer is not None:
        src, dst = src.view(call.integer), dst.view(call.integer)
    launch.start(
        ctx, two_queue_kernel, (grid,),
        *descriptors, a, b, c, *c.shape, a.shape[1], *a.stride(), *b.stride(), *c.stride(),
        src, dst, part.rows, src.shape[1], part.first, *src.stride(), *dst.stride(),
        call.items, call.batches, call.programs.multiplying if exchanges and multiplies else grid * multiplies,
        call.programs.cap,
        workspace.queue, workspace.flags, workspace.counters if exchanges else workspace.alone,
        ctx.group_members(members), members.index, ctx.get_device_context(),
        TILE=call.collective.tile,
        WORLD=members.size,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP_M=tiles.group_m,
        TILE_M=call.comm_block[0],
        TILE_N=call.comm_block[1],
        TILE_GROUP_M=call.comm_group_m,
        MULTIPLIES=multiplies,
        EXCHANGES=exchanges,
        DESCRIPTORS=call.descriptors and multiplies,
        B_TRANSPOSED=b.stride(1) != 1,
        PRECISION=call.precision,
        TRACING=ctx.tracing.enabled,
        KERNEL=call._kernel,
        num_warps=tiles.num_warps if multiplies else call.exchange_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip


def _check_product(ctx: Iris, a: Any, b: Any, c: Any) -> tuple[tuple[int, int], torch.dtype]:
    """Shape and dtype of C."""
    for name, tensor in (("A", a), ("B", b)):
        checks.check_matrix(ctx, name, tensor)
    if a.shape[1] != b.shape[0]:
        raise ArgumentError(f"A must be (M, K) and B (K, N); got A {tuple(a.shape)} and B {tuple(b.shape)}")
    possible = checks.check_product_dtypes(ctx.target, a.dtype, b.dtype)
    shape = (a.shape[0], b.shape[1])
    if c is None:
        return shape, possible[0]
    checks.check_matrix(ctx, "C", c)
    if tuple(c.shape) != shape:
        raise ArgumentError(f"C must have shape {shape}, got {tuple(c.shape)}")
    if c.dtype not in possible:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in possible)
        raise ArgumentError(f"C may be {names} for A and B of {a.dtype}, got {c.dtype}")
    checks.check_writable("C", c)
    return shape, c.dtype


def _check_collective(ctx: Iris, collective: Collective, members: Group, root: int, src: Any, dst: Any) -> Part:
    checks.check_matrix(ctx, "comm_src", src)
    if collective.adds and src.dtype not in ADDED:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in ADDED)
        raise ArgumentError(f"{collective.name} adds {names}; comm_src is {src.dtype}")
    if dst is not None:
        checks.check_matrix(ctx, "comm_dst", dst)
        checks.check_writable("comm_dst", dst)
        if dst.dtype != src.dtype:
            raise ArgumentError(f"comm_dst must have the dtype of comm_src, {src.dtype}; got {dst.dtype}")
    part = collective.part(src.shape[0], None if dst is None else dst.shape[0], members, root)
    wanted = (part.dst_rows, src.shape[1])
    if dst is not None and tuple(dst.shape) != wanted:
        raise ArgumentError(
            f"comm_dst must have shape {wanted} on member {members.index} of {members.size} for comm_src "
            f"{tuple(src.shape)}; got {tuple(dst.shape)}"
        )
    if members.size > 1:
        if collective.reads_peers:
            checks.check_symmetric(ctx, "comm_src", src)
        if collective.writes_peers and dst is not None:
            checks.check_symmetric(ctx, "comm_dst", dst, "written")
    return part


def _check_apart(collective: Collective, a, b, src, c, dst) -> None:
    """Raise ArgumentError when an output shares memory with anything else, all of which is in use at one time."""
    inputs = (("A", a), ("B", b), ("comm_src", src))
    for name, output, others in (("C", c, (*inputs, ("comm_dst", dst))), ("comm_dst", dst, inputs)):
        for other, tensor in others:
            if output is None or tensor is None or not checks.overlap(output, tensor):
                continue
            # A tile of an all-reduce is read by nobody but who writes it afterwards.
            in_place = collective.reads_peers and collective.writes_peers and (name, other) == ("comm_dst", "comm_src")
            if in_place and output.data_ptr() == tensor.data_ptr() and output.stride() == tensor.stride():
                continue
            raise ArgumentError(f"{name} overlaps {other} in memory; give it memory of its own")


def _place_of_root(root: Any, members: Group) -> int:
    if not _is_int(root) or root not in members.ranks:
        raise ArgumentError(f"root must be one of the ranks {list(members.ranks)}, got {root!r}")
    return members.ranks.index(root)


def usual_tiles(
    target: Target, rows: int, columns: int, depth: int, itemsize: int, *, block: tuple[int, int, int] | None = None,
    num_warps: int | None = None, **given: Any,
) -> Tiles:  # fmt: skip
    """As :func:`iris.tuning.tiles.fitted_tiles`, with as many warps as tiles of a collective take, and where the grids
    of an H200 (docs/concurrent-tuning.md) have better tiles for products of few, with those."""
    given["num_warps"] = num_warps or _WARPS
    found = fitted_tiles(target, rows, columns, depth, itemsize, block=block, **given)
    if block is not None or not target.descriptors or itemsize != 2:
        return found
    m, n, k = found.block_m, found.block_n, found.block_k
    tiles = number_of_tiles(rows, columns, m, n)
    if m == 16 and columns >= 128:
        block = _FEW_ROWS
    elif (m, n) == (128, 256) and 2 * tiles <= target.compute_units:
        block = m, n // 2, k
    return found if block is None else fitted_tiles(target, rows, columns, depth, itemsize, block=block, **given)


def fitted_comm_block(ctx: Iris, name: str, world: int, part: Part, src: torch.Tensor) -> tuple[int, int]:
    """The tile of a collective that is left open: no larger than a rank's part, and the same on every rank, because it
    decides who adds which tile."""
    usual = predictor.usual_comm_block(ctx.target, name, world)
    rows, columns = usual if ctx.target.compiled else _INTERPRETED_COMM_BLOCK
    rows = max(16, rows * 2 // max(2, src.dtype.itemsize))
    return power_of_two(part.chunk, 16, rows), power_of_two(src.shape[1], 16, columns)


def _programs(ctx: Iris, asked: Asked, mode: str, products: int, items: int, name: str, world: int) -> Programs:
    """How many programs begin with what; no more of them than there is work."""
    total = _count("num_wgs", asked.num_wgs)
    least = 0 if mode == "fused" else 1
    gemm = _count("gemm_wgs", asked.gemm_wgs, least)
    comm = _count("comm_wgs", asked.comm_wgs, least)
    cap = _count("comm_cap", asked.comm_cap)
    if total is None:
        total = gemm + comm if gemm is not None and comm is not None else ctx.get_cu_count()
    if mode == "concurrent":
        if cap is not None:
            raise ArgumentError("comm_cap is for mode 'fused'; in mode 'concurrent' comm_wgs says how many programs")
        if comm is None:
            comm = max(1, total // 8 if gemm is None or asked.num_wgs is None else total - gemm)
        gemm = max(1, total - comm) if gemm is None else gemm
        if asked.num_wgs is not None and gemm + comm > max(2, total):
            raise ArgumentError(f"gemm_wgs={gemm} and comm_wgs={comm} are more than num_wgs={total}")
        return Programs(max(1, min(gemm, products)), max(1, min(comm, items)), comm)
    if gemm is None:
        gemm = total * 3 // 4 if comm is None else total - comm
    if not 0 <= gemm <= total or comm not in (None, total - gemm) or not total:
        shown = "" if comm is None else f" and comm_wgs={comm}"
        raise ArgumentError(
            f"gemm_wgs={gemm}{shown} do not divide num_wgs={total} programs; possible: at least one program, gemm_wgs "
            "from 0 to all of them, and comm_wgs the rest, or left out"
        )
    grid = min(total, max(1, products + items))
    multiplying = min(gemm, grid)
    if cap is None:
        cap = min(grid, predictor.usual_cap(name, world, total))
    return Programs(multiplying, grid - multiplying, cap)


def _facts(ctx: Iris, asked: Asked, call: Call | None, src: Any, dst: Any) -> dict[str, Any]:
    """What must be the same on every rank, by name. The GEMM is each rank's own."""
    known = isinstance(src, torch.Tensor)
    facts: dict[str, Any] = {"comm_src": src.dtype if known else type(src).__name__}
    facts["columns of comm_src"] = src.shape[1] if known and src.dim() == 2 else None
    facts["comm_dst"] = "none" if dst is None else "given"
    facts["root"] = repr(asked.root)
    if call is not None:
        facts["rows of the collective"] = call.part.whole
        facts["comm_block"], facts["comm_group_m"] = call.comm_block, call.comm_group_m
        touched = (("comm_src", src, call.collective.reads_peers), ("comm_dst", dst, call.collective.writes_peers))
        for touched_name, tensor, on_heap in touched:
            if on_heap and tensor is not None and call.part.whole and src.shape[1] and call.members.size > 1:
                facts[f"strides of {touched_name}"] = tensor.stride()
                facts[f"offset of {touched_name} in the heap"] = tensor.data_ptr() - ctx.heap.base
    return facts


def _place(ctx: Iris, workspace: Any) -> Any:
    """Where the flags of a workspace lie in the heap, which is the same on every rank."""
    if not isinstance(workspace, Workspace):
        return "the context's" if workspace is None else type(workspace).__name__
    return workspace.flags.data_ptr() - ctx.heap.base


def _choice(name: str, value: Any, possible: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in possible:
        raise ArgumentError(f"{name} must be one of {', '.join(map(repr, possible))}, got {value!r}")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(name: str, value: Any, least: int = 1) -> int | None:
    if value is not None and (not _is_int(value) or value < least):
        raise ArgumentError(f"{name} must be None or an int of at least {least}, got {value!r}")
    return value


def _warps(value: Any) -> int | None:
    if value is not None and (not _is_int(value) or value not in (1, 2, 4, 8, 16)):
        raise ArgumentError(f"num_warps must be None, 1, 2, 4, 8 or 16, got {value!r}")
    return value


def _block(name: str, value: Any, length: int, least: int) -> Any:
    """A block of so many powers of two; None when it is left open."""
    right = isinstance(value, tuple) and len(value) == length
    if value is not None and not (right and all(_is_int(v) and v >= least and v & (v - 1) == 0 for v in value)):
        raise ArgumentError(f"{name} must be None or {length} powers of two of at least {least}, got {value!r}")
    return value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _layout(tensor: Any, place: bool) -> tuple:
    """What a call depends on of a tensor; with ``place`` also where it lies, which peers must know."""
    if not isinstance(tensor, torch.Tensor):
        return (type(tensor),)
    address = tensor.data_ptr()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address if place else address % 16
