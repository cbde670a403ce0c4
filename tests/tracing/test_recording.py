"""What kernels record comes out as it was: values, times, ranks, counts; and nothing where nothing was asked for."""

import json
import logging
import time
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris.device import _asm
from iris.device.tracing import BUFFERS
from iris.errors import ArgumentError, WaitTimeout
from iris.tracing import clocks, recorder
from iris.tracing.chrome import read

LANES, ACTIVE = 128, 100


@triton.jit
def put_kernel(
    context, source, target, flags, n, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr, ON: tl.constexpr
):
    """Program p puts its part to the next rank inside of a `fetch` span, and waits for the part of the one before."""
    ctx = iris.DeviceContext.initialize(context, rank, world, tracing=ON)
    pid = tl.program_id(0)
    peer = (rank + 1) % world
    sender = (rank + world - 1) % world
    offs = tl.arange(0, BLOCK)
    target += pid * BLOCK
    whole = ctx.tracing.record_event_start(iris.TraceEvent().fetch, peer, source, pid, 2)
    span = ctx.tracing.record_event_start(iris.TraceEvent().put, peer, target + offs, pid, 10 + pid, mask=offs < n)
    ctx.put(source + pid * BLOCK + offs, target + offs, peer, mask=offs < n)
    ctx.tracing.record_event_end(span)
    ctx.notify(flags + 32 * pid, 1, peer)
    if ON:
        waited = iris.tracing.start(context, 3072, sender)
    ctx.wait(flags + 32 * pid, 1, sender)
    if ON:
        iris.tracing.end(context, waited)
    ctx.tracing.record_event_end(whole)


@triton.jit
def places_kernel(context, data, rows, columns, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    """One span for each way to name a place, in the order of their op_index."""
    ctx = iris.DeviceContext.initialize(context, rank, world, tracing=True)
    offs = tl.arange(0, BLOCK)
    block = data + 4 + offs[:, None] * 64 + offs[None, :]
    mask = (offs < rows)[:, None] & (offs < columns)[None, :]
    ctx.tracing.record_event_end(ctx.tracing.record_event_start(1030, 0, block, 0, 0, mask=mask))
    ctx.tracing.record_event_end(ctx.tracing.record_event_start(1, 0, block, 0, 0))
    ctx.tracing.record_event_end(ctx.tracing.record_event_start(1, 0, data + 9 - offs, 0, 0, mask=offs >= BLOCK - rows))
    ctx.tracing.record_event_end(ctx.tracing.record_event_start(1, 0, data + offs, 0, 0, mask=offs < 0))
    ctx.tracing.record_event_end(ctx.tracing.record_event_start(1, 0, data + 3, 0, 0, mask=rows > 0))
    ctx.tracing.record_event_end(ctx.tracing.record_event_start(1, 0, 0, 0, 0))
    ctx.tracing.record_event_end(ctx.tracing.record_event_start(1, 0, data, 0, 0))
    ctx.tracing.record_event_start(2048, -1, 0, 3, 4)  # has no end


class Warnings(logging.Handler):
    """What the library warns of on a rank while it is entered."""

    def __init__(self, ctx):
        super().__init__()
        self.rank = ctx.get_rank()

    def __enter__(self):
        self.texts = []
        iris.logger.addHandler(self)
        return self

    def __exit__(self, *error):
        iris.logger.removeHandler(self)

    def emit(self, record):
        if record.iris_rank == self.rank:
            self.texts.append(record.getMessage())


class Exchange:
    """The tensors of `put_kernel`, and its launch."""

    def __init__(self, ctx, programs):
        self.ctx, self.programs = ctx, programs
        self.source = torch.arange(programs * LANES, device=ctx.get_device()).to(torch.float16)
        self.target = ctx.full((programs * LANES,), -1, dtype=torch.float16)
        self.flags = ctx.zeros(programs * 32, dtype=torch.int32)
        ctx.barrier()

    def __call__(self, on=True):
        ctx = self.ctx
        put_kernel[(self.programs,)](
            ctx.get_device_context(), self.source, self.target, self.flags, ACTIVE, ctx.get_rank(), ctx.get_num_ranks(),
            BLOCK=LANES, ON=on,
        )  # fmt: skip
        ctx.barrier()
        lanes = torch.arange(LANES).repeat(self.programs) < ACTIVE
        assert torch.equal(self.target.cpu(), torch.where(lanes, self.source.cpu(), -1))
        self.flags.zero_()
        ctx.barrier()


def body_values(ctx, folder):
    programs = 2
    ctx.tracing.enable(100)
    exchange = Exchange(ctx, programs)
    exchange()
    events = {name: column.tolist() for name, column in ctx.tracing.events().items()}
    merged = ctx.tracing.export(Path(folder) / "trace.json", merge=True)
    return exchange.target.data_ptr(), exchange.source.data_ptr(), events, merged


def test_values(ranks, world, tmp_path):
    programs = 2
    of_ranks = ranks(world).run(body_values, str(tmp_path))
    merged = of_ranks[0][3]
    assert all(other[3] == {} for other in of_ranks[1:])
    assert json.loads((tmp_path / "trace.json").read_text()) == merged
    assert {p.name for p in tmp_path.iterdir()} == {"trace.json", *(f"trace_rank{r}.json" for r in range(world))}

    metadata = merged["metadata"]
    assert (metadata["schema_version"], metadata["time_unit"], metadata["aligned"]) == ("1.1", "us", True)
    assert (metadata["num_events"], metadata["total_events"]) == (3 * programs * world, 3 * programs * world)
    assert metadata["dropped_events"] == {str(rank): 0 for rank in range(world)}
    assert len(metadata["clock_uncertainty_us"]) == metadata["world_size"] == world
    named = [event for event in merged["traceEvents"] if event["ph"] == "M"]
    assert [(e["name"], e["pid"], e["args"]["name"]) for e in named] == [
        ("process_name", rank, f"Rank {rank}") for rank in range(world)
    ]
    spans = [event for event in merged["traceEvents"] if event["ph"] != "M"]
    assert min(event["ts"] for event in spans) == 0

    for rank, (target, source, columns, _) in enumerate(of_ranks):
        mine = [event for event in spans if event["pid"] == rank]
        assert len(mine) == 3 * programs
        by_index = {event["args"]["op_index"]: event for event in mine}
        assert sorted(by_index) == sorted(columns["op_index"]) == list(range(3 * programs))
        peer, sender = (rank + 1) % world, (rank - 1) % world
        seen = set()
        for i, index in enumerate(columns["op_index"]):
            event, args = by_index[index], by_index[index]["args"]
            program = args["program_id"]
            seen.add((event["name"], program))
            pid_m, pid_n, to, address, payload = {
                "put": (program, 10 + program, peer, target + 2 * LANES * program, 2 * ACTIVE),
                "fetch": (program, 2, peer, source, 0),
                "wait": (0, 0, sender, 0, 0),
            }[event["name"]]
            assert (args["pid_m"], args["pid_n"], args["target_rank"]) == (pid_m, pid_n, to)
            assert (int(args["address"], 16), args["payload_size"]) == (address, payload)
            # What is in the file is what is in the buffers.
            assert (columns["cur_rank"][i], columns["pid"][i]) == (rank, program)
            assert (event["cat"], event["ph"]) == ("iris", "X")
            ns = 10 if metadata["gpu_arch"].startswith("gfx") else 1
            assert event["dur"] == pytest.approx(columns["duration_cycles"][i] * ns / 1e3, abs=2e-3)
            first = columns["timestamp"][0]
            apart = (columns["timestamp"][i] - first) * ns / 1e3
            assert event["ts"] - by_index[columns["op_index"][0]]["ts"] == pytest.approx(apart, abs=2e-3)
            assert event["dur"] >= 0
        assert seen == {(kind, program) for kind in ("put", "fetch", "wait") for program in range(programs)}
        for program in range(programs):
            whole, put, wait = (
                next(e for e in mine if e["name"] == kind and e["args"]["program_id"] == program)
                for kind in ("fetch", "put", "wait")
            )
            assert whole["ts"] <= put["ts"] <= put["ts"] + put["dur"] <= wait["ts"] + 2e-3
            assert wait["ts"] + wait["dur"] <= whole["ts"] + whole["dur"] + 2e-3
            assert whole["tid"] == put["tid"] == wait["tid"]

    # The files of the ranks hold the same on the same clock.
    together = read(*(tmp_path / f"trace_rank{rank}.json" for rank in range(world)))
    one = read(tmp_path / "trace.json")
    assert together.ranks == one.ranks == tuple(range(world))
    assert together.aligned
    for a, b in zip(together.spans, one.spans, strict=True):
        assert (a.name, a.rank, a.track, a.target_rank, a.args) == (b.name, b.rank, b.track, b.target_rank, b.args)
        assert a.start_us == pytest.approx(b.start_us, abs=2e-2)


def body_places(ctx):
    ctx.tracing.enable(50)
    data = torch.zeros(64 * 64, dtype=torch.float32, device=ctx.get_device())
    places_kernel[(1,)](ctx.get_device_context(), data, 5, 3, ctx.get_rank(), ctx.get_num_ranks(), BLOCK=16)
    events = ctx.tracing.events()
    base = data.data_ptr()
    at = [a - base if a else None for a in events["address"].tolist()]
    # 16 rows and columns of which 5 and 3 are moved; lanes 11 to 15 of addresses that go down; none; one; no pointer.
    assert at == [16, 16, 4 * (9 - 15), None, 12, None, 0, None]
    assert events["payload_size"].tolist() == [4 * 15, 0, 4 * 5, 0, 4, 0, 0, 0]
    exported = ctx.tracing.export(Path(_folder(ctx)) / "places.json")
    spans = [event for event in exported["traceEvents"] if event["ph"] != "M"]
    assert [event["name"] for event in spans] == ["unknown_1030", *["store"] * 6, "compute"]
    assert [event["ph"] for event in spans] == [*"XXXXXXX", "i"]
    assert "dur" not in spans[-1]
    assert spans[-1]["s"] == "t"
    assert (spans[-1]["args"]["pid_m"], spans[-1]["args"]["pid_n"], spans[-1]["args"]["target_rank"]) == (3, 4, -1)
    assert exported["metadata"]["aligned"] is False


def _folder(ctx):
    import tempfile

    return tempfile.mkdtemp()


@pytest.mark.parametrize("world", [1])
def test_addresses_and_payloads(ranks, world):
    ranks(world).run(body_places)


def body_overflow(ctx, folder):
    programs, room = 3, 4
    ctx.tracing.enable(room)
    Exchange(ctx, programs)()
    assert ctx.tracing.trace_counter.item() == ctx.tracing.op_index_counter.item() == 3 * programs
    assert ctx.tracing.dropped_events == 3 * programs - room
    with Warnings(ctx) as warned:
        # Pieces of a few bytes, so that there are many.
        recorder._PIECE_BYTES, whole = 16, recorder._PIECE_BYTES
        try:
            merged = ctx.tracing.export(Path(folder) / "trace.json", merge=True)
        finally:
            recorder._PIECE_BYTES = whole
    [text] = warned.texts
    assert "5 of 9 events did not fit into max_events=4" in text
    assert "enable(max_events=9)" in text
    return merged


@pytest.mark.parametrize("world", [2])
def test_events_past_the_buffer_are_counted(ranks, world, tmp_path):
    merged = ranks(world).run(body_overflow, str(tmp_path))[0]
    assert merged["metadata"]["dropped_events"] == {"0": 5, "1": 5}
    assert merged["metadata"]["total_events"] == 8
    assert read(tmp_path / "trace.json").dropped == {0: 5, 1: 5}
    assert read(tmp_path / "trace_rank1.json").dropped == {1: 5}


def body_on_and_off(ctx, folder):
    world, context = ctx.get_num_ranks(), ctx.get_device_context()
    bases = ctx.get_heap_bases().tolist()
    block = context[2 + world : 2 + world + 17]
    behind = context[2 + world + 17 :].tolist()
    assert block.tolist() == [0] * 17
    exchange = Exchange(ctx, 1)
    with Warnings(ctx) as warned:
        exchange()  # traced, but the host has not asked for it
        assert ctx.tracing.export(Path(folder) / "none.json") == {}
        ctx.tracing.reset()
    assert len(warned.texts) == 2
    assert all("not enabled" in text for text in warned.texts)
    assert ctx.tracing.events() == {}

    for invalid in (0, -1, 2.0, True, 2**31):
        with pytest.raises(ArgumentError, match="max_events"):
            ctx.tracing.enable(invalid)
    for size in (7, 5, 5):
        ctx.tracing.enable(max_events=size)
        assert (ctx.tracing.enabled, ctx.tracing.max_events) == (True, size)
        assert ctx.get_device_context().data_ptr() == context.data_ptr()
        assert block[:2].tolist() == [1, size]
        assert block[2].item() == block[3].item() == ctx.tracing.trace_counter.data_ptr()
        assert list(ctx.tracing.trace_buffers) == list(BUFFERS)
        assert block[4:].tolist() == [tensor.data_ptr() for tensor in ctx.tracing.trace_buffers.values()]
        assert ctx.get_heap_bases().tolist() == bases
        assert context[2 + world + 17 :].tolist() == behind
        exchange(on=False)
        assert ctx.tracing.trace_counter.item() == 0
        exchange()
        assert ctx.tracing.trace_counter.item() == 3
    ctx.tracing.reset()
    assert (ctx.tracing.trace_counter.item(), ctx.tracing.enabled) == (0, True)
    exchange()
    ctx.tracing.disable()
    assert block.tolist() == [0] * 17
    exchange()
    assert (ctx.tracing.trace_counter.item(), ctx.tracing.enabled) == (3, False)
    assert ctx.tracing.export(Path(folder) / "kept.json")["metadata"]["num_events"] == 3
    ctx.barrier()
    names = {path.name for path in Path(folder).iterdir()}
    assert names == {f"kept_rank{r}.json" for r in range(world)}


@pytest.mark.parametrize("world", [2])
def test_on_and_off(ranks, world, tmp_path):
    ranks(world).run(body_on_and_off, str(tmp_path), context=3 << 20)  # a context that no test has traced with


def body_checked(ctx):
    # Known to the checker as any other memory, so that it looks at what tracing itself does.
    ctx.heap.region.note = lambda tensor, label: None
    try:
        ctx.tracing.enable(49)
    finally:
        del ctx.heap.region.note
    exchange = Exchange(ctx, 3)
    exchange()
    assert ctx.tracing.trace_counter.item() == 9
    ctx.tracing.reset()
    exchange()
    assert sorted(ctx.tracing.events()["op_index"].tolist()) == list(range(9))


@pytest.mark.parametrize("world", [2])
def test_tracing_has_no_races(ranks, world):
    ranks(world).run(body_checked)


SHIFT_NS = 10_000_000_000


def body_clocks(ctx, folder):
    rank = ctx.get_rank()
    before = _asm.clock_ns, clocks.clock_of
    _asm.clock_ns = lambda: time.perf_counter_ns() + rank * SHIFT_NS
    clocks.clock_of = lambda ctx: f"clock {rank}"
    try:
        ctx.tracing.enable(100)
        Exchange(ctx, 1)()
        found = clocks.alignment(ctx)
        merged = ctx.tracing.export(Path(folder) / "trace.json", merge=True)
    finally:
        _asm.clock_ns, clocks.clock_of = before
    return found, merged, ctx.target.compiled


@pytest.mark.processes("the ranks of one process share a clock")
@pytest.mark.parametrize("world", [3])
def test_clocks_of_ranks_are_aligned(ranks, world, tmp_path):
    of_ranks = ranks(world).run(body_clocks, str(tmp_path))
    found, merged, compiled = of_ranks[0]
    assert all(other[0] == found for other in of_ranks)
    assert found.offset_ns[0] == found.uncertainty_ns[0] == 0
    for rank in range(1, world):
        # The interpreter is slow, so its bounds are wide; a GPU's must be narrow.
        assert 0 < found.uncertainty_ns[rank] < (100_000 if compiled else SHIFT_NS // 10)
        if not compiled:
            assert abs(found.offset_ns[rank] - rank * SHIFT_NS) <= found.uncertainty_ns[rank]
    spans = [event for event in merged["traceEvents"] if event["ph"] != "M"]
    assert max(event["ts"] + event["dur"] for event in spans) < SHIFT_NS / 1e3
    trace = read(tmp_path / "trace.json")
    assert trace.aligned
    assert trace.uncertainty_us == max(merged["metadata"]["clock_uncertainty_us"]) > 0
    assert not read(tmp_path / "trace.json").predicted


def body_after_a_failed_wait(ctx, folder):
    rank = ctx.get_rank()
    ctx.tracing.enable(100)
    Exchange(ctx, 1)()
    if rank == 0:
        ctx._error_slot[0] = 2  # as a program leaves it whose wait expired
    before = clocks.clock_of, clocks.handshake
    clocks.clock_of = lambda ctx: f"clock {ctx.get_rank()}"
    clocks.handshake = lambda ctx: None if ctx.get_rank() == 0 else [0, 1]
    try:
        merged = ctx.tracing.export(Path(folder) / "trace.json", merge=True)
    finally:
        clocks.clock_of, clocks.handshake = before
    if rank == 0:
        with pytest.raises(WaitTimeout):
            ctx.synchronize()
    return merged


@pytest.mark.processes("the ranks of one process share a clock")
@pytest.mark.parametrize("world", [2])
def test_a_failed_wait_leaves_a_trace(ranks, world, tmp_path):
    merged = ranks(world).run(body_after_a_failed_wait, str(tmp_path), context=3 << 20)[0]
    assert (merged["metadata"]["num_events"], merged["metadata"]["aligned"]) == (6, False)
    assert not read(tmp_path / "trace.json").aligned


def test_offsets_from_stamps():
    """Rank 1 is 1000 ahead and rank 2 50 behind; each round leaves another side of the bounds loose."""
    true = [[(0, 10), (100, 104), (200, 230)], [(3, 9), (100, 105), (190, 225)], [(1, 11), (99, 104), (205, 226)]]
    stamps = [
        [tick + shift for pair in rounds for tick in pair] for rounds, shift in zip(true, (0, 1000, -50), strict=True)
    ]
    found = clocks.offsets(stamps)
    assert found.offset_ns[0] == found.uncertainty_ns[0] == 0
    for rank, shift in ((1, 1000), (2, -50)):
        assert abs(found.offset_ns[rank] - shift) <= found.uncertainty_ns[rank] <= 5


def test_programs_side_by_side_get_lanes_of_their_own():
    lanes = recorder._Lanes()
    # track, program, start, end -> lane
    for track, program, start, end, lane in (
        ("a", 0, 0, 10, 0),
        ("a", 0, 2, 8, 0),  # within
        ("a", 1, 3, 9, 1),  # another program at the same time
        ("b", 2, 3, 9, 0),
        ("a", 1, 4, 9, 1),
        ("a", 0, 9, 12, 1),  # overlaps a span of its own program: not within it
        ("a", 3, 12, 13, 0),
        ("a", 3, 13, 13, 0),
        ("a", 1, 14, 16, 1),  # its own, though another is free, too
    ):
        assert lanes.take(track, program, start, end) == lane, (track, program, start)
