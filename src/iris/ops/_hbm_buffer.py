"""What the host does for the kernel with a staging buffer: sizes, copies between ranks, the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris.device import link
from iris.errors import CaptureError, UnsupportedError
from iris.ops._hbm_buffer_kernel import arrived_kernel, bring_kernel, carried_kernel, hbm_buffer_kernel, inputs_kernel
from iris.ops.config import HbmBufferConfig
from iris.ops.division import EXCHANGE, divided, tile_time
from iris.runtime import launch
from iris.runtime.links import incoming_rate, link_of
from iris.x.operands import describe_a, describe_b, takes_descriptors

if TYPE_CHECKING:
    from iris.ops.arguments import Problem
    from iris.runtime.context import Iris
    from iris.runtime.groups import Group

_KERNEL = launch.kernel_id("all_gather_matmul/hbm_buffer")
_COPIES = launch.kernel_id("all_gather_matmul/copy_engine")
# Flags that a program reads at once, to see how much has come.
_AHEAD = 32
# All of a part's K at once: what copies bring.
_WHOLE = 1 << 24
# Bytes a second that a program fetches: measured on an H200.
_FETCHER_RATE = 30e9
_UNDER_WAY = 32 << 10  # bytes that a fetcher reads at once; with those that it writes they take half its registers
_ALIGNMENT = 16  # bytes; of rows of the staging buffer, for tensor descriptors


@dataclass(frozen=True)
class Schedule:
    """The numbers of one call, from its problem and configuration alone.

    Attributes:
        config: the configuration.
        grid: number of programs.
        fetchers: programs that fetch to the end. first_fetchers: those that fetch the first stage.
        whole: tiles of the output in one piece. splits: pieces along K of each of the others.
        stage_rows: rows of tiles of a stage. flag_rows: rows of tiles that share a flag.
        k_per_flag: blocks of K that share a flag. fetch_k: columns that a fetcher has under way at once.
        part_rows, part_stride, row_stride, column_stride: layout of the staging buffer, in rows and elements.
        buffer_bytes, flags, sums, partials: sizes of the staging buffer, its flags, the sums of divided tiles
            (elements) and their flags.
        descriptors: whether operands come by tensor descriptors.
        copied: whether the host's copies bring the shards.
    """

    config: HbmBufferConfig
    grid: int
    fetchers: int
    first_fetchers: int
    whole: int
    splits: int
    stage_rows: int
    flag_rows: int
    k_per_flag: int
    fetch_k: int
    part_rows: int
    part_stride: int
    row_stride: int
    column_stride: int
    buffer_bytes: int
    flags: int
    sums: int
    partials: int
    descriptors: bool
    copied: bool

    @property
    def staging(self) -> tuple[int, int, int, int]:
        """What :meth:`iris.ops.staging.Staging.get` takes."""
        return self.buffer_bytes, self.flags, self.sums, self.partials


def schedule(ctx: Iris, problem: Problem, config: HbmBufferConfig, a: torch.Tensor, b: torch.Tensor) -> Schedule:
    """The schedule of a call.

    Raises:
        UnsupportedError: the copy engine cannot bring A's rows as they lie.
    """
    rows, depth = a.shape
    parts = problem.world_size - 1
    copied = config.transport == "copy_engine" and parts > 0 and a.numel() > 0
    if copied and not a.is_contiguous():
        raise UnsupportedError(
            "the copy engine brings rows of A that lie together in memory; A_sharded has strides "
            f"{tuple(a.stride())} and shape {tuple(a.shape)}: pass A_sharded.contiguous(), or transport='sm'"
        )
    blocks, tiles_m = _ceil(depth, config.block_size_k), _ceil(rows, config.block_size_m)
    tiles = tiles_m * _ceil(problem.N, config.block_size_n) * (problem.world_size if problem.gather_dim == 0 else 1)
    stage_rows = _ceil(tiles_m, min(config.num_fetch_stages, max(1, tiles_m)))
    flag_rows = stage_rows if copied else 1
    k_per_flag = _WHOLE if copied else config.k_per_flag
    groups = _ceil(blocks, k_per_flag)

    programs = config.num_sms or ctx.get_cu_count()
    if copied and config.num_sms is None and link_of(ctx) == "shared":
        # Copies within one GPU are done by its compute units, so some must stay free.
        programs = max(1, programs - max(2, programs // 8))
    pieces = tiles_m * groups * parts
    fetchers = 0 if copied or not pieces else min(config.num_fetch_sms, programs, pieces)
    first = 0 if copied or not pieces else min(config.first_stage_fetch_sms, programs, pieces)
    whole, splits = divided(
        tiles,
        programs,
        blocks * (problem.world_size if problem.gather_dim == 1 else 1),
        exchange=EXCHANGE,
        fetchers=fetchers if fetchers < programs else 0,
        busy=_fetch_time(ctx, problem, config, fetchers, a.numel() * a.element_size() * parts),
    )
    work = whole + (tiles - whole) * splits

    descriptors = _takes_descriptors(ctx, problem, config, a, b)
    itemsize = a.element_size()
    # Whole tiles, so that a descriptor never reaches into the next part.
    part_rows = tiles_m * config.block_size_m
    width = depth if copied else _ceil(depth * itemsize, _ALIGNMENT) * _ALIGNMENT // itemsize
    layout = (width, 1) if config.staged_a_layout == "k_contiguous" else (1, part_rows)
    part_stride = part_rows * width
    return Schedule(
        config=config,
        grid=min(programs, work + max(fetchers, first)),
        fetchers=fetchers,
        first_fetchers=first,
        whole=whole,
        splits=splits,
        stage_rows=max(1, stage_rows),
        flag_rows=max(1, flag_rows),
        k_per_flag=k_per_flag,
        fetch_k=_fetch_columns(config, itemsize),
        part_rows=part_rows,
        part_stride=part_stride,
        row_stride=layout[0],
        column_stride=layout[1],
        # At least one of each: one rank has no peers, and empty tensors have no address.
        buffer_bytes=max(1, parts * part_stride) * itemsize,
        flags=max(1, _ceil(tiles_m, max(1, flag_rows)) * groups * parts),
        sums=max(1, (tiles - whole) * (splits - 1) * config.block_size_m * config.block_size_n),
        partials=max(1, (tiles - whole) * (splits - 1)),
        descriptors=descriptors,
        copied=copied,
    )


def run_hbm_buffer(
    ctx: Iris,
    call: Any,
    workspace: Any,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scales: tuple[Any, Any],
    members: Group,
) -> None:
    """Issue one call to the current stream.

    Raises:
        CaptureError: a graph is being captured, and copies, which the caller has named, are to bring the shards.
    """
    capturing = ctx.capturing()
    s = call.schedule if call.in_graphs is None or not capturing else call.in_graphs
    if s.copied and capturing:
        raise CaptureError(
            "all_gather_matmul: a graph does not promise that copies run beside the kernel that waits for them, so "
            "algorithm 'copy_engine' cannot be captured; 'hbm_buffer' can"
        )
    tensors = out, a, b, bias, scales
    _issue(ctx, call, s, workspace, *tensors, members)
    if call.in_graphs is not None and not call.ready_for_graphs and not capturing:
        # A kernel cannot be loaded while a graph is captured, and no call has launched this one before.
        with launch.compiling(ctx) as kept:
            _issue(ctx, call, call.in_graphs, workspace, *tensors, members)
        for one in kept:
            launch.load_kernel(one.compile())
        call.ready_for_graphs = True


def _issue(ctx: Iris, call: Any, s: Schedule, workspace, out, a, b, bias, scales, members: Group) -> None:
    problem, config = call.problem, s.config
    wide = bias.expand(problem.M, problem.N) if bias is not None else out
    scale_a, scale_b = scales if problem.scaled else (out, out)
    staging = workspace.staging.get(*call.staging)
    workspace.aux_buffer = staging.buffer
    staged = staging.buffer[: s.buffer_bytes].view(a.dtype)
    accumulator = torch.int32 if problem.a_dtype == torch.int8 else torch.float32
    turn = workspace.locks, workspace.counters, ctx.group_members(members), members.index, ctx.get_device_context()
    if s.copied:
        launch.start(
            ctx, inputs_kernel, (1,), staging.arrivals, s.flags, *turn,
            WORLD=members.size, BLOCK=128, KERNEL=_COPIES, num_warps=1,
        )  # fmt: skip
        _copy(ctx, s, problem, config, staging, staged, a, members)
    rows, depth = a.shape
    b_transposed = b.stride(1) != 1
    overlapped = _overlaps(ctx, s)
    descriptors = (None, None, None)
    if s.descriptors:
        descriptors = _descriptors(config, s, staged, a, b, members.size)
    launch.start(
        ctx, hbm_buffer_kernel, (s.grid,),
        *descriptors, a, staged, b, wide, scale_a, scale_b, out,
        rows, problem.N, depth,
        *a.stride(), *b.stride(), *(wide.stride() if bias is not None else (0, 0)), *out.stride(),
        s.part_rows, s.part_stride, s.row_stride, s.column_stride,
        staging.arrivals if s.copied else staging.flags, staging.partials, staging.sums(accumulator),
        staging.queue, s.fetchers, s.first_fetchers, s.whole, s.splits,
        s.stage_rows, s.k_per_flag, s.flag_rows, *turn,
        WORLD=members.size,
        GATHER_DIM=problem.gather_dim,
        BLOCK_M=config.block_size_m,
        BLOCK_N=config.block_size_n,
        BLOCK_K=config.block_size_k,
        FETCH_K=s.fetch_k,
        GROUP_M=config.group_size_m,
        AHEAD=_AHEAD,
        COPIED=s.copied,
        OVERLAPPED=overlapped,
        DESCRIPTORS=s.descriptors,
        B_TRANSPOSED=b_transposed,
        HAS_BIAS=bias is not None,
        HAS_SCALES=problem.scaled,
        ACTIVATION=problem.activation,
        PRECISION=call.precision,
        TRACING=ctx.tracing.enabled,
        KERNEL=_KERNEL,
        num_warps=config.num_warps,
        # What is written while the next blocks arrive takes shared memory of its own.
        num_stages=config.num_stages - overlapped,
    )  # fmt: skip
    if s.copied:
        for stream in staging.streams(members.size - 1):
            ctx.current_stream().wait_stream(stream)


def _overlaps(ctx: Iris, s: Schedule) -> bool:
    """Whether the kernel starts a tile while it writes the one before; see :mod:`iris.ops._whole_tiles_kernel`."""
    if not s.copied or s.config.num_stages < 3 or ctx.tracing.enabled:
        return False  # of tiles that overlap events would say little
    return s.descriptors or not ctx.target.compiled  # nothing is gained without descriptors; the simulator checks it


def _copy(ctx: Iris, s: Schedule, problem: Problem, config: HbmBufferConfig, staging, staged, a, members) -> None:
    """Issue the copies of the peers' shards, and behind each what sets its flag.

    Chunk by chunk of rows and, within one, peer by peer from the next rank on, so that the ranks read from different
    peers. The first tiles multiply the own shard meanwhile.
    """
    rows, depth = a.shape
    parts = members.size - 1
    chunk = s.flag_rows * config.block_size_m
    chunks = _ceil(rows, chunk)
    start = ctx.current_stream()
    streams = staging.streams(parts)
    for stream in streams:
        stream.wait_stream(start)
    for number in range(chunks):
        first, last = number * chunk, min(rows, (number + 1) * chunk)
        for turn in range(parts):
            # As iris.x.schedule.piece_flag has it.
            part = (number + turn) % parts
            place = number * parts + turn if problem.gather_dim == 1 else part * chunks + number
            stream = streams[part % len(streams)]
            peer = members.ranks[(members.index + 1 + part) % members.size]
            target = staged[part * s.part_stride + first * depth : part * s.part_stride + last * depth]
            with ctx.use_stream(stream):
                _bring(ctx, a[first:last].view(-1), target, peer, staging.arrivals[place : place + 1])


def _bring(ctx: Iris, mine: torch.Tensor, target: torch.Tensor, peer: int, flag: torch.Tensor) -> None:
    """Copy what the peer has in the place of ``mine`` and set the flag, in the current stream."""
    context, rank = ctx.get_device_context(), ctx.cur_rank
    if not ctx.target.compiled:
        # There is no engine but a program of the interpreter.
        launch.start(ctx, bring_kernel, (1,), mine, target, mine.numel(), flag, rank, peer, context, BLOCK=4096)
        return
    if link.LINK_PACED.value:
        launch.start(ctx, carried_kernel, (1,), mine.numel() * mine.element_size(), rank, peer, context, num_warps=1)
    target.view(torch.uint8).copy_(ctx.heap.on_peer(mine.view(torch.uint8), peer))
    write_value = getattr(torch.ops.symm_mem, "stream_write_value32_", None)
    if write_value is not None:
        write_value(flag.view(torch.uint32), 0, 1)
    else:
        launch.start(ctx, arrived_kernel, (1,), flag, num_warps=1)


def _fetch_time(ctx: Iris, problem: Problem, config: HbmBufferConfig, fetchers: int, nbytes: int) -> float:
    """How long the fetchers need for so many bytes, in times that a tile takes; an estimate."""
    if not fetchers:
        return 0.0
    rate = min(fetchers * _FETCHER_RATE, incoming_rate(ctx, problem.world_size - 1))
    return nbytes / rate / tile_time(config, problem.K, problem.a_dtype.itemsize)


def _fetch_columns(config: HbmBufferConfig, itemsize: int) -> int:
    """Columns that a fetcher reads at once: as many bytes as it has under way, or a whole piece if that is less."""
    columns = config.block_size_k
    while (
        columns < config.block_size_k * config.k_per_flag and 2 * columns * config.block_size_m * itemsize <= _UNDER_WAY
    ):
        columns *= 2
    return columns


def _takes_descriptors(ctx: Iris, problem: Problem, config: HbmBufferConfig, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the target copies tiles by descriptors, and the operands and the staging buffer lie so that it can."""
    if config.staged_a_layout != "k_contiguous":
        return False
    if problem.gather_dim == 1 and problem.world_size > 1 and a.shape[1] % config.block_size_k:
        return False  # the last block of a part would meet rows of B that belong to the next
    return takes_descriptors(ctx.target, a, b)


def _descriptors(config, s: Schedule, staged, a, b, world_size: int) -> tuple[Any, Any, Any]:
    """Descriptors of A, of all staged parts, and of B or its transpose."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    m, n, k = config.block_size_m, config.block_size_n, config.block_size_k
    parts = max(1, world_size - 1)
    whole = staged if world_size > 1 else a
    return (
        describe_a(a, m, k),
        TensorDescriptor(whole, [parts * s.part_rows, a.shape[1]], [s.row_stride, 1], [m, k]),
        describe_b(b, n, k),
    )


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit)
