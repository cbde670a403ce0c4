"""Predicted runs: times worked out by hand from the figures of a machine; waits, overlap and waves in the timeline."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

import iris
import iris.device.address
from iris import sim
from iris._machine import by_name
from iris.device import clock, signal
from iris.errors import ArgumentError
from iris.ops.config import FusedConfig
from iris.x.schedule import grouped_tile

MI300X, H200 = by_name("mi300x"), by_name("h200")
HEAP = 1 << 22


@triton.jit
def copy_kernel(source, target, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    for step in range(STEPS):
        offsets = (tl.program_id(0) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + offsets, tl.load(source + offsets))


def assert_product(out, a, b):
    """``out`` is a @ b within the rounding of float16 and of sums in float32."""
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=2**-10, atol=1e-4)


def launches(prediction, kernel):
    """(start, end) of the launches of a kernel, in the order of issue."""
    return [(entry.start_ns, entry.end_ns) for entry in prediction.timeline.launches if entry.kernel == kernel]


def spans(prediction, kind, rank):
    return [span for span in prediction.timeline.spans if (span.kind, span.rank) == (kind, rank) and span.slot >= 0]


@pytest.mark.parametrize("machine", [MI300X, H200], ids=lambda m: m.name)
def test_a_copy_takes_its_bytes_by_the_rate_and_the_latency_once_a_load(machine):
    def body(ctx):
        source = torch.arange(1 << 14, dtype=torch.float32)
        target = torch.zeros_like(source)
        copy_kernel[(1,)](source, target, BLOCK=1 << 12, STEPS=4)
        return torch.equal(source, target)

    prediction = sim.predict(body, 1, device=machine.name, heap_size=HEAP)
    assert prediction.results == [True]
    ((start, end),) = launches(prediction, "copy_kernel")
    assert start == machine.launch_latency_ns
    nbytes = 4 << 14
    assert end - start == pytest.approx(
        4 * machine.local_latency_ns + 2 * nbytes / machine.program_local_bytes_per_s * 1e9
    )
    assert prediction.summary.kernel_ns == {"copy_kernel": end - start}


def test_masked_lanes_move_no_bytes():
    @triton.jit
    def kernel(source, n, BLOCK: tl.constexpr):
        offsets = tl.arange(0, BLOCK)
        tl.load(source + offsets, mask=offsets < n)

    prediction = sim.predict(lambda ctx: kernel[(1,)](torch.ones(64), 40, BLOCK=64), 1, heap_size=HEAP)
    assert [span.nbytes for span in spans(prediction, "fetch", 0)] == [160]


@triton.jit
def delayed_put(source, target, flag, rank, peer, heap_bases, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    iris.store(target + offsets, tl.load(source + offsets), rank, peer, heap_bases)
    signal.notify(flag, 1, rank, peer, heap_bases)


@triton.jit
def wait_with_signal(flag, data, out, times, context, BLOCK: tl.constexpr):
    before = clock.ticks()
    signal.wait(flag, 1, context)
    tl.store(times, clock.ticks() - before)
    offsets = tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(data + offsets))


@triton.jit
def wait_with_volatile_loads(flag, data, out, times, context, BLOCK: tl.constexpr):
    before = clock.ticks()
    while tl.load(flag, volatile=True) != 1:
        pass
    tl.debug_barrier()
    tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.store(times, clock.ticks() - before)
    offsets = tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(data + offsets))


@triton.jit
def wait_with_swaps(flag, data, out, times, context, BLOCK: tl.constexpr):
    before = clock.ticks()
    while tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.store(times, clock.ticks() - before)
    offsets = tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(data + offsets))


def handshake(ctx, wait_kernel, block=1 << 14):
    rank = ctx.get_rank()
    data, flag = ctx.zeros(block, dtype=torch.float32), ctx.zeros(1, dtype=torch.int32)
    expected = torch.arange(block, dtype=torch.float32)
    ctx.barrier()
    if rank == 0:
        delayed_put[(1,)](expected, data, flag, rank, 1, ctx.get_heap_bases(), BLOCK=block)
        return None
    out, times = torch.zeros_like(expected), torch.zeros(1, dtype=torch.int64)
    wait_kernel[(1,)](flag, data, out, times, ctx.get_device_context(), BLOCK=block)
    return torch.equal(out, expected), times.item()


@pytest.mark.parametrize(
    "wait_kernel", [wait_with_signal, wait_with_volatile_loads, wait_with_swaps], ids=lambda k: k.__name__
)
@pytest.mark.parametrize("check", [(), sim.CHECKS], ids=["unchecked", "checked"])
def test_a_wait_names_the_writer_and_lasts_as_long_as_its_delay(wait_kernel, check):
    m = H200
    prediction = sim.predict(handshake, 2, wait_kernel, device="h200", check=check, heap_size=HEAP)
    ((writer_start, _),), ((start, _),) = (
        launches(prediction, "delayed_put"),
        launches(prediction, wait_kernel.__name__),
    )
    assert start == writer_start == m.host_exchange_latency_ns + m.launch_latency_ns
    # The writer reads its data, stores it on the peer, and finds the flag there; two heap bases each time.
    nbytes, bases = 4 << 14, 16
    sent = 2 * m.local_latency_ns + (nbytes + 2 * bases) / m.program_local_bytes_per_s * 1e9
    sent += nbytes / m.program_remote_bytes_per_s * 1e9
    visible = writer_start + sent + m.remote_flag_latency_ns
    (waited,) = spans(prediction, "wait", 1)
    rank, (kernel, _, index) = waited.writer
    assert (waited.peer, rank, kernel, index) == (0, 0, "delayed_put", 0)
    assert waited.end_ns == pytest.approx(visible, abs=0.1)
    # Before it waits, a compare-and-swap has cost an access, and `wait` a look and two reads; polling costs nothing.
    assert waited.start_ns - start < 2.1 * m.local_latency_ns
    assert prediction.summary.waited_ns[1] == {0: waited.duration_ns}
    right, ticks = prediction.results[1]
    assert right
    assert visible - start <= ticks + 1 <= visible - start + m.local_latency_ns + 2


def test_a_flag_that_was_set_long_ago_costs_one_access():
    def body(ctx):
        flag, out = ctx.full((1,), 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        ctx.barrier()
        wait_with_signal[(1,)](flag, out, out, out, ctx.get_device_context(), BLOCK=1)
        return out

    prediction = sim.predict(body, 1, heap_size=HEAP)
    assert not spans(prediction, "wait", 0)
    assert [span.duration_ns for span in spans(prediction, "other", 0)] == [MI300X.local_latency_ns]


def two_copies(ctx, streams):
    source = torch.ones(2 << 14)
    targets = [torch.zeros_like(source) for _ in range(2)]
    choices = [ctx.new_stream() for _ in range(streams)]
    for target, stream in zip(targets, choices * 2, strict=False):
        with ctx.use_stream(stream):
            copy_kernel[(1,)](source, target, BLOCK=1 << 14, STEPS=2)
    ctx.synchronize()
    return all(torch.equal(source, target) for target in targets)


@pytest.mark.parametrize("streams", [1, 2])
def test_streams_of_a_rank_overlap_and_one_stream_does_not(streams):
    prediction = sim.predict(two_copies, 1, streams, heap_size=HEAP)
    assert prediction.results == [True]
    (first_start, first_end), (start, end) = launches(prediction, "copy_kernel")
    if streams == 2:
        assert start == first_start
        assert {span.slot for span in spans(prediction, "fetch", 0)} == {0, 1}
    else:
        assert start == first_end
    (waited, *_) = (s for s in prediction.timeline.spans if s.slot < 0)
    assert waited.kind == "wait"
    assert max(s.end_ns for s in prediction.timeline.spans if s.slot < 0) == max(first_end, end)


def test_an_event_orders_two_streams():
    def body(ctx):
        source, target = torch.ones(1 << 12), torch.zeros(1 << 12)
        one, other = ctx.new_stream(), ctx.new_stream()
        one.wait_stream(ctx.current_stream())
        with ctx.use_stream(one):
            copy_kernel[(1,)](source, target, BLOCK=1 << 12, STEPS=1)
        other.wait_stream(one)
        with ctx.use_stream(other):
            copy_kernel[(1,)](target, source, BLOCK=1 << 12, STEPS=1)
        ctx.synchronize()

    (_, end), (start, _) = launches(sim.predict(body, 1, heap_size=HEAP, check=sim.CHECKS), "copy_kernel")
    assert start == end


@triton.jit
def matmul_kernel(
    a, b, out, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr
):
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        left = tl.load(a + rows[:, None] * K + (k + depth)[None, :], mask=(rows < M)[:, None], other=0.0)
        right = tl.load(b + (k + depth)[:, None] * N + columns[None, :], mask=(columns < N)[None, :], other=0.0)
        acc = tl.dot(left, right, acc)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], acc.to(out.dtype.element_ty), mask=mask)


def matmul(a, b, out, blocks):
    (m, k), n = a.shape, b.shape[1]
    block_m, block_n, block_k = blocks
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    matmul_kernel[grid](a, b, out, m, n, k, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=4)


def test_more_tiles_than_units_take_two_waves():
    def body(ctx, tiles):
        generator = torch.Generator().manual_seed(0)
        a = torch.randn(64 * tiles, 128, generator=generator).half()
        b = torch.randn(128, 64, generator=generator).half()
        out = torch.empty(64 * tiles, 64, dtype=torch.float16)
        matmul(a, b, out, (64, 64, 32))
        assert_product(out, a, b)

    times = []
    for tiles in (4, 5):
        prediction = sim.predict(body, 1, tiles, resident_programs=4, heap_size=HEAP)
        times.append(prediction.summary.kernel_ns["matmul_kernel"])
        assert {span.slot for span in prediction.timeline.spans if span.slot >= 0} == {0, 1, 2, 3}
    assert times[1] == pytest.approx(2 * times[0], rel=0.02)


@triton.jit
def pull_copy(source, target, rank, peer, heap_bases, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + offsets, iris.load(source + offsets, rank, peer, heap_bases))


def gather(ctx, programs=32, block=1 << 13):
    rank, peer = ctx.get_rank(), 1 - ctx.get_rank()
    source = ctx.full((programs * block,), float(rank), dtype=torch.float32)
    target = torch.empty(programs * block)
    ctx.barrier()
    pull_copy[(programs,)](source, target, rank, peer, ctx.get_heap_bases(), BLOCK=block)
    ctx.barrier()
    return bool((target == peer).all())


def test_twice_the_link_rate_shortens_a_gather_that_the_links_bound():
    fast = replace(MI300X, name="fast links", link_peer_bytes_per_s=2 * MI300X.link_peer_bytes_per_s)
    slow, quick = (sim.predict(gather, 2, device=machine, heap_size=HEAP) for machine in (MI300X, fast))
    assert slow.results == quick.results == [True, True]
    link_ns = (32 * 4 << 13) / (MI300X.link_peer_bytes_per_s * MI300X.link_efficiency) * 1e9
    assert slow.summary.kernel_ns["pull_copy"] > link_ns
    saved_ns = slow.summary.kernel_ns["pull_copy"] - quick.summary.kernel_ns["pull_copy"]
    assert saved_ns == pytest.approx(link_ns / 2, rel=0.1)
    assert "fast links" in str(quick)


def all_gather_matmul(ctx, m, n, k):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(m, k, generator=generator).half(), torch.randn(k, n, generator=generator).half()
    shard = ctx.as_symmetric(a.chunk(world, dim=1)[rank].contiguous())
    out = torch.full((m, n), float("nan"), dtype=torch.float16)
    ctx.ops.all_gather_matmul(out, shard, b, algorithm="pull")
    ctx.device_barrier()
    ctx.synchronize()
    assert_product(out, a, b)
    return rank


@pytest.mark.parametrize("device", ["mi300x", "h200"])
def test_all_gather_matmul_of_four_ranks(device, tmp_path):
    prediction = sim.predict(all_gather_matmul, 4, 64, 160, 256, device=device, check=sim.CHECKS, heap_size=HEAP)
    assert prediction.results == [0, 1, 2, 3]
    assert {"pull_kernel", "device_barrier_kernel"} == set(prediction.summary.kernel_ns)
    assert str(prediction).startswith(f"Predicted (cost model {device}, not measured)")
    for rank in range(4):
        peers = {span.peer for span in spans(prediction, "fetch", rank)}
        assert peers == {0, 1, 2, 3}
        assert prediction.summary.rank_link_ns[rank] > 0
    trace = json.loads(prediction.timeline.write(tmp_path / "trace.json").read_text())
    assert trace["metadata"]["predicted"] is True
    assert len(trace["traceEvents"]) == 4 + len(prediction.timeline.spans)
    assert all(event["ph"] == "M" or event["dur"] >= 0 for event in trace["traceEvents"])


@triton.jit
def gather_kernel(
    shard,
    whole,
    M,
    K_SHARD: tl.constexpr,
    rank,
    heap_bases,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    owner = (rank + tl.program_id(1)) % WORLD
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for first in range(0, K_SHARD, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        mask = (rows < M)[:, None] & (columns < K_SHARD)[None, :]
        block = iris.load(shard + rows[:, None] * K_SHARD + columns[None, :], rank, owner, heap_bases, mask=mask)
        tl.store(whole + rows[:, None] * (K_SHARD * WORLD) + (owner * K_SHARD + columns)[None, :], block, mask=mask)


def pull_or_gather_first(ctx, m, n, k, pull):
    """All-gather + matmul by the operation's kernel, or by a kernel that gathers and one that multiplies."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(m, k, generator=generator).half(), torch.randn(k, n, generator=generator).half()
    shard, out = ctx.as_symmetric(a.chunk(world, dim=1)[rank].contiguous()), torch.empty(m, n, dtype=torch.float16)
    blocks = (min(m, 128), 128, 128)
    ctx.barrier()
    if pull:
        ctx.ops.all_gather_matmul(out, shard, b, algorithm="pull", config=FusedConfig(*blocks))
    else:
        whole = torch.empty(m, k, dtype=torch.float16)
        ctx.device_barrier()
        grid, bases = (triton.cdiv(m, 16), world), ctx.get_heap_bases()
        gather_kernel[grid](shard, whole, m, k // world, rank, bases, WORLD=world, ROWS=16, COLUMNS=256)
        ctx.device_barrier()
        matmul(whole, b, out, blocks)
    ctx.barrier()
    assert_product(out, a, b)


@pytest.mark.parametrize(("m", "pull_wins"), [(16, True), (512, False)])
def test_pulling_wins_where_it_was_measured_to_win(m, pull_wins):
    """As in docs/performance.md, for smaller N and K and with Triton kernels in place of PyTorch's."""
    spent = []
    for pull in (True, False):
        prediction = sim.predict(pull_or_gather_first, 2, m, 2048, 512, pull, device="h200", heap_size=HEAP)
        own = [entry for entry in prediction.timeline.launches if entry.rank == 0]
        assert own[0].start_ns is not None
        spent.append(own[-1].end_ns - own[0].start_ns)
    assert (spent[0] < 0.9 * spent[1]) if pull_wins else (spent[0] > 1.1 * spent[1]), spent


def test_the_same_call_gives_the_same_timeline():
    first, second = (sim.predict(all_gather_matmul, 3, 32, 64, 96, seed=3, heap_size=HEAP) for _ in range(2))
    assert first.timeline.to_chrome() == second.timeline.to_chrome()
    assert first.summary == second.summary


def test_a_unit_runs_one_program_at_a_time():
    prediction = sim.predict(all_gather_matmul, 2, 64, 256, 64, resident_programs=3, heap_size=HEAP)
    by_slot = {}
    for span in prediction.timeline.spans:
        if span.slot >= 0:
            by_slot.setdefault((span.rank, span.slot), {}).setdefault((span.kernel, span.program), []).append(span)
    assert {slot for _, slot in by_slot} == {0, 1, 2}
    for programs in by_slot.values():
        stays = sorted((min(s.start_ns for s in p), max(s.end_ns for s in p)) for p in programs.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(stays))


def test_the_place_and_the_clock_of_a_program():
    @triton.jit
    def kernel(places, times, source):
        program = tl.program_id(0)
        tl.store(places + 2 * program, clock.compute_unit())
        tl.store(places + 2 * program + 1, clock.die())
        before = clock.ticks()
        tl.load(source + tl.arange(0, 1024))
        tl.store(times + program, clock.ticks() - before)

    def body(ctx):
        places, times = torch.zeros((10, 2), dtype=torch.int32), torch.zeros(10, dtype=torch.int64)
        kernel[(10,)](places, times, torch.ones(1024))
        return places.tolist(), times.tolist()

    ((places, times),) = sim.predict(body, 1, heap_size=HEAP).results
    assert places == [[program // 8, program % 8] for program in range(10)]
    assert times == [pytest.approx(MI300X.local_latency_ns + 4096 / 75, abs=1)] * 10
    ((places, _),) = sim.run(body, 1, heap_size=HEAP)
    assert places == [[0, 0]] * 10


def test_polling_that_touches_other_memory_holds_up_nobody():
    @triton.jit
    def poll(flags, turns, out):
        # More elements than a wait may have, and a counter that changes in every turn.
        offsets = tl.arange(0, 128)
        while tl.sum(tl.load(flags + offsets, volatile=True)) < 1:
            tl.atomic_add(turns, 1)
        tl.store(out, 1)

    def body(ctx):
        flags, turns, out = ctx.zeros(128, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
        ctx.barrier()
        if ctx.get_rank() == 0:
            delayed_put[(1,)](torch.ones(64), ctx.zeros(64), flags[5:], 0, 1, ctx.get_heap_bases(), BLOCK=64)
        else:
            ctx.zeros(64)
            poll[(1,)](flags, turns, out)
        return out.item()

    assert sim.predict(body, 2, heap_size=HEAP, step_limit=20_000).results == [0, 1]


def test_a_host_that_asks_an_event_again_and_again_sees_it():
    def body(ctx):
        stream = ctx.new_stream()
        with ctx.use_stream(stream):
            copy_kernel[(1,)](torch.ones(64), torch.zeros(64), BLOCK=64, STEPS=1)
        event = stream.record_event()
        while not event.query():
            pass
        return True

    prediction = sim.predict(body, 1, heap_size=HEAP)
    assert prediction.summary.host_waited_ns[0][0] == launches(prediction, "copy_kernel")[0][1]


def test_descriptors_move_in_bulk():
    @triton.jit
    def kernel(source, target, rank, peer, heap_bases, BLOCK: tl.constexpr):
        remote = iris.device.address.translate(source, rank, peer, heap_bases)
        block = tl.make_tensor_descriptor(remote, [BLOCK, BLOCK], [BLOCK, 1], [BLOCK, BLOCK]).load([0, 0])
        tl.make_tensor_descriptor(target, [BLOCK, BLOCK], [BLOCK, 1], [BLOCK, BLOCK]).store([0, 0], block)

    def body(ctx):
        source, target = ctx.full((64, 64), float(ctx.get_rank())), torch.zeros(64, 64)
        ctx.barrier()
        kernel[(1,)](source, target, ctx.get_rank(), 1 - ctx.get_rank(), ctx.get_heap_bases(), BLOCK=64)
        ctx.barrier()
        return target.mean().item()

    prediction = sim.predict(body, 2, device="h200", heap_size=HEAP)
    assert prediction.results == [1.0, 0.0]
    (remote,) = (span for span in spans(prediction, "fetch", 0) if span.peer == 1)
    assert remote.nbytes == 4 << 12
    extra_ns = H200.remote_latency_ns - H200.local_latency_ns
    assert remote.duration_ns == pytest.approx(extra_ns + (4 << 12) / H200.program_remote_bulk_bytes_per_s * 1e9)


def test_tiles_of_atomics_take_the_link():
    @triton.jit
    def kernel(tile, rank, peer, heap_bases, BLOCK: tl.constexpr):
        offsets = tl.arange(0, BLOCK)
        iris.atomic_add(tile + offsets, tl.full((BLOCK,), 1.0, tl.float32), rank, peer, heap_bases)

    def body(ctx):
        tile = ctx.zeros(4096, dtype=torch.float32)
        ctx.barrier()
        kernel[(3,)](tile, ctx.get_rank(), 1 - ctx.get_rank(), ctx.get_heap_bases(), BLOCK=4096)
        ctx.barrier()
        return tile.mean().item()

    prediction = sim.predict(body, 2, heap_size=HEAP)
    assert prediction.results == [3.0, 3.0]
    assert [span.nbytes for span in spans(prediction, "store", 0)] == [4 << 12] * 3


def test_a_kernel_that_raises_leaves_the_rest_as_it_is():
    @triton.jit
    def broken(source):
        tl.load(source)
        tl.static_assert(source.dtype == tl.int32, "no pointer is an int32")

    def body(ctx):
        with pytest.raises(InterpreterError):
            broken[(3,)](torch.ones(4))
        copy_kernel[(1,)](torch.ones(64), torch.zeros(64), BLOCK=64, STEPS=1)

    prediction = sim.predict(body, 1, heap_size=HEAP)
    (failed, copied) = prediction.timeline.launches
    assert failed.kernel == "broken"
    assert copied.start_ns >= failed.end_ns


def test_findings_name_the_call_that_repeats_them():
    @triton.jit
    def hang(flag):
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
            pass

    with pytest.raises(sim.DeadlockError, match=r"seed=4 of iris\.sim\.predict"):
        sim.predict(lambda ctx: hang[(1,)](ctx.zeros(1, dtype=torch.int32)), 1, seed=4, heap_size=HEAP)


def test_what_has_no_model_is_named():
    prediction = sim.predict(lambda ctx: torch.ones(4, 4) @ torch.ones(4, 4), 1, heap_size=HEAP)
    assert prediction.summary.unmodelled == ("aten.mm",)
    assert "took no time, for want of a model: aten.mm" in str(prediction)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "mi300"}, "machine 'mi300' is not known; possible: mi300x"),
        ({"resident_programs": 0}, "resident_programs is 0"),
        ({"check": "rases"}, "rases is not known"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        sim.predict(lambda ctx: None, 1, heap_size=HEAP, **options)
