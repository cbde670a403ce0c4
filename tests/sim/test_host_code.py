"""PyTorch operations of host code in the simulator: what they read and write, and what orders them."""

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris import errors, sim

N = 16


@triton.jit
def add_one_kernel(x, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + 1)


@triton.jit
def read_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def wait_kernel(flag):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
        pass


@triton.jit
def set_kernel(flag):
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@triton.jit
def push_kernel(context, x, flag, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    at = tl.arange(0, BLOCK)
    ctx.store(x + at, at.to(tl.float32), to_rank=1 - rank)
    iris.signal.notify(flag, 1, rank, 1 - rank, context + 2)
    iris.signal.wait(flag, 1, context)


def on_one_rank(body):
    return sim.run(body, 1)[0]


# What operations write and read: reads of the rest of the memory are found, reads of what was written are not.

WRITES = {
    "slice": lambda x: x[2:4].fill_(1),
    "strided view": lambda x: x[2:4].t().copy_(torch.ones(4, 2)),
    "index_put_": lambda x: x.__setitem__(torch.tensor([2, 3]), 1.0),
    "index_put_ with a mask": lambda x: x.__setitem__(torch.tensor([False, False, True, True]), torch.ones(2, 4)),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([3, 2]), 1.0),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([3, 2]), torch.ones(2, 4)),
    "scatter_": lambda x: x.scatter_(0, torch.tensor([[2] * 4, [3] * 4]), 1.0),
    "masked_fill_": lambda x: x.masked_fill_(torch.tensor([[0], [0], [1], [1]], dtype=torch.bool), 1.0),
    "put_": lambda x: x.put_(torch.arange(8, 16), torch.ones(8)),
    "out=": lambda x: torch.add(torch.ones(2, 4), 0, out=x[2:4]),
    "foreach": lambda x: torch._foreach_copy_([x[2], x[3]], [torch.ones(4)] * 2),
    "foreach zero": lambda x: torch._foreach_zero_([x[2], x[3]]),
    "in-place view": lambda x: x[2:4].t_().unsqueeze_(0).fill_(1),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_can_be_read_and_nothing_else(write):
    def body(ctx, *, rows):
        x = ctx.empty((4, 4), dtype=torch.float32)
        WRITES[write](x)
        return [x[row].sum().item() for row in rows]

    expected = 0 if write == "foreach zero" else 4
    assert sim.run(body, 1, rows=(2, 3)) == [[expected] * 2]
    for row in (0, 1):
        with pytest.raises(errors.UninitializedReadError, match=rf"\[{4 * row}\]|\[{row}, 0\]"):
            sim.run(body, 1, rows=(row,))


READS = {
    "index": lambda x: x[torch.tensor([2, 3])],
    "index with a mask": lambda x: x[torch.tensor([False, False, True, True])],
    "index of both axes": lambda x: x[torch.tensor([[2], [3]]), torch.arange(4)],
    "index behind an axis": lambda x: x.t()[:, torch.tensor([3, 2])],
    "index_select": lambda x: x.index_select(0, torch.tensor([3, 2])),
    "gather": lambda x: x.gather(0, torch.tensor([[2] * 4, [3] * 4])),
    "take": lambda x: x.take(torch.arange(8, 16)),
    "masked_select": lambda x: x.masked_select(torch.tensor([[False], [False], [True], [True]])),
    "embedding": lambda x: torch.nn.functional.embedding(torch.tensor([2, 3]), x),
    "expanded": lambda x: x[2].expand(2, 4).clone(),
    "out=": lambda x: torch.index_select(x, 0, torch.tensor([2, 3]), out=torch.empty(2, 4)),
}


@pytest.mark.parametrize("read", READS)
def test_operations_read_what_they_select(read):
    def body(ctx, rows):
        x = ctx.empty((4, 4), dtype=torch.float32)
        x[rows] = 1.0
        return READS[read](x).sum().item()

    assert sim.run(body, 1, slice(2, 4)) == [8]
    with pytest.raises(errors.UninitializedReadError):
        sim.run(body, 1, slice(3, 4) if read != "expanded" else slice(0, 2))


ACCUMULATE = {
    "index_put_": lambda x: x.index_put_((torch.tensor([1]),), torch.tensor(1.0), accumulate=True),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([1]), torch.ones(1)),
    "scatter_add_": lambda x: x.scatter_add_(0, torch.tensor([1]), torch.ones(1)),
    "scatter_ with reduce": lambda x: x.scatter_(0, torch.tensor([1]), 1.0, reduce="add"),
    "add_": lambda x: x.add_(1),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
}


@pytest.mark.parametrize("accumulate", ACCUMULATE)
def test_accumulation_reads(accumulate):
    with pytest.raises(errors.UninitializedReadError):
        on_one_rank(lambda ctx: ACCUMULATE[accumulate](ctx.empty(4, dtype=torch.float32)))
    on_one_rank(lambda ctx: ACCUMULATE[accumulate](ctx.zeros(4, dtype=torch.float32)))


@pytest.mark.parametrize("written", [3, 20])
def test_an_indexed_write_races_with_a_peer_that_reads_there(written):
    def body(ctx):
        x, out = ctx.zeros(2 * N, dtype=torch.float32), ctx.zeros(N, dtype=torch.float32)
        ctx.barrier()
        if ctx.get_rank() == 0:
            x[torch.tensor([written])] = 5.0
        pull_kernel[(1,)](ctx.get_device_context(), x, out, ctx.get_rank(), 2, BLOCK=N)
        ctx.barrier()

    if written < N:
        with pytest.raises(errors.RaceError, match=r"index_put_"):
            sim.run(body, 2)
    else:
        sim.run(body, 2)


@triton.jit
def pull_kernel(context, x, out, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    at = tl.arange(0, BLOCK)
    tl.store(out + at, ctx.load(x + at, from_rank=0))


LAYOUTS = {
    "offset": lambda x: x[4:].view(-1)[: 2 * N],
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[:, ::2],
    "expanded": lambda x: x[0].expand(4, 8),
    "detached": lambda x: x.detach().view(-1),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "bytes": lambda x: x.view(torch.uint8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank_waits", [True, False])
def test_views_are_the_memory_behind_them(layout, rank_waits):
    """A kernel writes all of a tensor on a side stream; a view is read by the host."""

    def body(ctx):
        x = ctx.zeros((8, 8), dtype=torch.float32)
        ctx.synchronize()
        side = ctx.new_stream()
        with ctx.use_stream(side):
            add_one_kernel[(4,)](x, BLOCK=N)
        if rank_waits:
            ctx.current_stream().wait_stream(side)
        return LAYOUTS[layout](x).clone().sum().item()

    if rank_waits:
        assert on_one_rank(body) > 0
    else:
        with pytest.raises(errors.RaceError, match="different streams"):
            sim.explore(body, 1, seeds=range(5))


# Streams and events.


def test_an_operation_comes_after_the_kernels_of_its_stream():
    def body(ctx):
        x = ctx.zeros(N, dtype=torch.float32)
        ctx.synchronize()
        side = ctx.new_stream()
        with ctx.use_stream(side):
            add_one_kernel[(1,)](x, BLOCK=N)
            y = x * 2
            add_one_kernel[(1,)](y, BLOCK=N)
            z = y + x
        side.synchronize()
        return z.tolist()

    assert sim.explore(body, 1, seeds=range(5)) == [[[4.0] * N]] * 5


def test_streams_overlap_and_events_order_them():
    """The second stream sets the flag for which the first one waits; a third comes after both."""

    def body(ctx):
        flag, x = ctx.zeros(1, dtype=torch.int32), ctx.zeros(N, dtype=torch.float32)
        ctx.synchronize()
        first, second, third = (ctx.new_stream() for _ in range(3))
        with ctx.use_stream(first):
            wait_kernel[(1,)](flag)
            add_one_kernel[(1,)](x, BLOCK=N)
        third.wait_event(first.record_event())
        with ctx.use_stream(third):
            add_one_kernel[(1,)](x, BLOCK=N)
        with ctx.use_stream(second):
            set_kernel[(1,)](flag)
        third.synchronize()
        return x.tolist()

    assert sim.explore(body, 1, seeds=range(10)) == [[[2.0] * N]] * 10


def test_a_stream_that_nobody_holds_runs_to_its_end():
    def body(ctx):
        flag, x = ctx.zeros(1, dtype=torch.int32), ctx.zeros(N, dtype=torch.float32)
        ctx.synchronize()
        first, second = ctx.new_stream(), ctx.new_stream()
        with ctx.use_stream(first):
            wait_kernel[(1,)](flag)
        second.wait_event(first.record_event())
        with ctx.use_stream(second):
            add_one_kernel[(1,)](x, BLOCK=N)
        del first, second
        with ctx.use_stream(ctx.new_stream()):
            set_kernel[(1,)](flag)
        ctx.synchronize()
        return x.tolist()

    assert on_one_rank(body) == [1.0] * N


@triton.jit
def relaxed_set_kernel(context, flag, rank: tl.constexpr, world: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    ctx.atomic_xchg(flag, 1, 1 - rank, sem="relaxed", scope="sys")


@triton.jit
def relaxed_wait_kernel(flag):
    while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") == 0:
        pass


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_that_first_waits_belongs_to_its_rank(seed):
    """Rank 1's stream passes its wait while no host runs; it must not come to know what rank 0's host does."""

    def body(ctx):
        x, flag = ctx.zeros(N, dtype=torch.float32), ctx.zeros(1, dtype=torch.int32)
        ctx.barrier()
        if ctx.get_rank() == 0:
            x.fill_(1)
            x.sum().item()
            relaxed_set_kernel[(1,)](ctx.get_device_context(), flag, 0, 2)
            ctx.barrier()
            return
        first, second = ctx.new_stream(), ctx.new_stream()
        with ctx.use_stream(first):
            relaxed_wait_kernel[(1,)](flag)
        second.wait_event(first.record_event())
        first.synchronize()
        with ctx.use_stream(second):
            pull_kernel[(1,)](ctx.get_device_context(), x, torch.zeros(N), 1, 2, BLOCK=N)
        ctx.barrier()

    with pytest.raises(errors.RaceError) as caught:
        sim.run(body, 2, seed=seed)
    assert {caught.value.report.first.rank, caught.value.report.second.rank} == {0, 1}


@pytest.mark.parametrize("read", ["item", "query"])
def test_host_code_that_asks_again_and_again(read):
    def body(ctx):
        flag = ctx.zeros(1, dtype=torch.int32)
        ctx.synchronize()
        side = ctx.new_stream()
        with ctx.use_stream(side):
            set_kernel[(1,)](flag)
        if read == "item":
            while flag.item() == 0:
                pass
        else:
            event = side.record_event()
            while not event.query():
                pass
            assert flag.item() == 1

    sim.run(body, 1, check="bounds" if read == "item" else sim.CHECKS)


@pytest.mark.parametrize("read", ["item", "query"])
def test_host_code_that_asks_for_ever(read):
    def body(ctx):
        flag, other = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
        ctx.synchronize()
        side = ctx.new_stream()
        with ctx.use_stream(side):
            wait_kernel[(1,)](flag)
        event = side.record_event()
        while other.item() == 0 if read == "item" else not event.query():
            pass

    with pytest.raises(errors.DeadlockError) as caught:
        sim.run(body, 1)
    report = caught.value.report
    assert report.hosts == ("rank 0, host: asks again and again whether something has happened",)
    assert [w.kernel for w in report.waiters] == ["wait_kernel"]


def test_host_code_may_ask_many_times_and_go_on():
    def body(ctx):
        flag = ctx.zeros(1, dtype=torch.int32)
        ctx.synchronize()
        first, second = ctx.new_stream(), ctx.new_stream()
        with ctx.use_stream(first):
            wait_kernel[(1,)](flag)
        event = first.record_event()
        for _ in range(1000):
            assert not event.query()
        with ctx.use_stream(second):
            set_kernel[(1,)](flag)
        event.synchronize()

    sim.run(body, 1)


def test_what_numpy_wrote_is_seen():
    def body(ctx):
        flag = ctx.zeros(1, dtype=torch.int32)
        ctx.synchronize()
        words = flag.numpy()
        side = ctx.new_stream()
        with ctx.use_stream(side):
            wait_kernel[(1,)](flag)
        event = side.record_event()
        for _ in range(100):
            event.query()
        words[0] = 1
        side.synchronize()

    sim.run(body, 1)


# The heap.


def test_a_peer_may_store_to_a_block_before_its_owner_has_allocated_it():
    """Allocation is the same arithmetic on every rank, so a block is known to all when one of them has it."""

    def body(ctx):
        flag = ctx.zeros(1, dtype=torch.int32)
        ctx.barrier()
        x = ctx.empty(N, dtype=torch.float32)
        push_kernel[(1,)](ctx.get_device_context(), x, flag, ctx.get_rank(), 2, BLOCK=N)
        return x.tolist()

    expected = [float(i) for i in range(N)]
    assert sim.explore(body, 2, seeds=range(20)) == [[expected] * 2] * 20


def test_a_late_fill_wipes_what_a_peer_has_stored():
    def body(ctx):
        flag = ctx.zeros(1, dtype=torch.int32)
        ctx.barrier()
        x = ctx.zeros(N, dtype=torch.float32)
        push_kernel[(1,)](ctx.get_device_context(), x, flag, ctx.get_rank(), 2, BLOCK=N)
        ctx.barrier()

    with pytest.raises(errors.RaceError, match="zeros"):
        sim.explore(body, 2, seeds=range(20))


def test_blocks_that_are_dropped_and_given_out_again():
    """Each turn's block lies where that of the turn before was, and nothing is known of it any more."""

    def body(ctx, barrier):
        flag = ctx.zeros(1, dtype=torch.int32)
        ctx.barrier()
        places = set()
        for turn in range(6):
            x = ctx.empty(N, dtype=torch.float32)
            places.add(x.data_ptr())
            push_turn_kernel[(1,)](ctx.get_device_context(), x, flag, turn, ctx.get_rank(), 2, BLOCK=N)
            assert x.tolist() == [turn + float(i) for i in range(N)]
            del x
            if barrier:
                ctx.barrier()
        return len(places)

    for seed in range(8):
        assert sim.run(body, 2, True, seed=seed) == [1, 1]
    assert sim.run(body, 2, False) == [6, 6]


@triton.jit
def push_turn_kernel(context, x, flag, turn, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    at = tl.arange(0, BLOCK)
    ctx.store(x + at, (at + turn).to(tl.float32), to_rank=1 - rank)
    iris.signal.notify(flag, turn + 1, rank, 1 - rank, context + 2)
    iris.signal.wait(flag, turn + 1, context)


def test_a_block_that_is_free_again_is_out_of_bounds():
    def body(ctx):
        x = ctx.zeros(N, dtype=torch.float32)
        address = torch.tensor([x.data_ptr()])
        del x
        ctx.barrier()
        table_kernel[(1,)](address, torch.zeros(N), BLOCK=N)

    with pytest.raises(errors.OutOfBoundsError):
        sim.run(body, 2)


@triton.jit
def table_kernel(table, out, BLOCK: tl.constexpr):
    x = tl.load(table).to(tl.pointer_type(tl.float32))
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: torch.nn.Parameter(x, requires_grad=False)])
def test_addresses_from_a_table(wrap):
    def body(ctx):
        x, out = wrap(torch.ones(N)), torch.zeros(N)
        table_kernel[(1,)](torch.tensor([x.data_ptr()]), out, BLOCK=N)
        return out.tolist()

    assert on_one_rank(body) == [1.0] * N
    before = torch.ones(N)  # made before the simulation, which has not seen it
    table = torch.tensor([wrap(before).data_ptr()])

    def from_outside(ctx):
        out = torch.zeros(N)
        table_kernel[(1,)](table, out, BLOCK=N)
        return out.tolist()

    assert on_one_rank(from_outside) == [1.0] * N


def test_as_symmetric_and_broadcast():
    def body(ctx):
        mine = torch.full((N,), float(ctx.get_rank()))
        x = ctx.as_symmetric(mine)
        first = ctx.broadcast(mine, 0)
        mine.fill_(7)  # no rank's copy changes with it, only the source of the broadcast
        out = ctx.zeros(N, dtype=torch.float32)
        ctx.barrier()
        pull_kernel[(1,)](ctx.get_device_context(), x, out, ctx.get_rank(), 2, BLOCK=N)
        ctx.barrier()
        return out.sum().item(), x.sum().item(), first.sum().item()

    assert sim.run(body, 2) == [(0, 0, 7 * N), (0, N, 0)]


@triton.jit
def descriptor_kernel(source, x, out, size: tl.constexpr, BLOCK: tl.constexpr):
    made = tl.make_tensor_descriptor(out, [size, size], [size, 1], [BLOCK, BLOCK])
    row = tl.program_id(0) * BLOCK
    made.store([row, 0], source.load([row, 0]))


def test_tensor_descriptors():
    from triton.tools.tensor_descriptor import TensorDescriptor

    def body(ctx, rows):
        x, out = ctx.empty((N, N), dtype=torch.float32), ctx.empty((N, N), dtype=torch.float32)
        x[:rows].copy_(torch.arange(rows * N).view(rows, N))
        descriptor_kernel[(N // 4,)](TensorDescriptor(x, [N, N], [N, 1], [4, 4]), x, out, N, BLOCK=4)
        return (out[:, :4] == x[:, :4]).all().item(), out[:, 4:].sum().item()

    with pytest.raises(errors.UninitializedReadError, match=r"out\[0, 4\]"):
        sim.run(body, 1, N)
    with pytest.raises(errors.UninitializedReadError, match=r"source\[12, 0\]|x\[12, 0\]"):
        sim.run(body, 1, N - 4)


# Accumulation by atomics.


@triton.jit
def accumulate_kernel(context, total, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    at = tl.arange(0, BLOCK)
    for peer in range(world):
        ctx.atomic_add(total + at, (at + rank).to(tl.float32), peer, sem="acq_rel", scope="sys")


@pytest.mark.parametrize("barrier", [True, False])
def test_what_many_programs_add_is_whole_after_a_barrier(barrier):
    def body(ctx):
        rank, world = ctx.get_rank(), ctx.get_num_ranks()
        total = ctx.zeros(N, dtype=torch.float32)
        ctx.barrier()
        accumulate_kernel[(3,)](ctx.get_device_context(), total, rank, world, BLOCK=N)
        if barrier:
            ctx.barrier()
        return total.tolist()

    if barrier:
        expected = [3.0 * (2 * i + 1) for i in range(N)]
        assert sim.explore(body, 2, seeds=range(5)) == [[expected] * 2] * 5
    else:
        with pytest.raises(errors.RaceError, match=r"atomic fadd \(acq_rel, sys\)"):
            sim.explore(body, 2, seeds=range(5))


def test_barriers_of_groups_and_of_the_world_order_what_they_should():
    """Ranks 0 and 1 push to each other; a barrier in the stream of the two is enough, one of others is not."""

    def body(ctx, pairs):
        rank = ctx.get_rank()
        x, out = ctx.zeros(N, dtype=torch.float32), ctx.zeros(N, dtype=torch.float32)
        ctx.device_barrier()
        add_one_kernel[(1,)](x, BLOCK=N)
        group = next(pair for pair in pairs if rank in pair)
        ctx.device_barrier(group=group)
        pull_kernel[(1,)](ctx.get_device_context(), x, out, rank, 4, BLOCK=N) if rank < 2 else None
        ctx.device_barrier()
        ctx.synchronize()
        return out.sum().item()

    for seed in range(5):
        assert sim.run(body, 4, [[0, 1], [2, 3]], seed=seed) == [N, N, 0, 0]
    with pytest.raises(errors.RaceError):
        sim.explore(body, 4, [[0, 2], [1, 3]], seeds=range(10))


def test_contexts_side_by_side():
    def body(ctx):
        other = iris.iris(1 << 20)
        x, y = ctx.zeros(N, dtype=torch.float32), other.full((N,), 2.0, dtype=torch.float32)
        out = other.zeros(N, dtype=torch.float32)
        ctx.barrier()
        pull_kernel[(1,)](other.get_device_context(), y, out, ctx.get_rank(), 2, BLOCK=N)
        add_one_kernel[(1,)](x, BLOCK=N)
        other.device_barrier()
        other.barrier()
        return out.sum().item(), x.sum().item()

    assert sim.run(body, 2) == [(2 * N, N)] * 2


def test_a_workspace_is_used_again_while_another_stream_computes():
    def body(ctx):
        rank, world = ctx.get_rank(), ctx.get_num_ranks()
        m, k, n = 32, 32, 16
        torch.manual_seed(0)
        a = [torch.randn(m, k) for _ in range(world)]
        b = [torch.randn(k, n) for _ in range(3)]
        shard = ctx.as_symmetric(a[rank])
        ctx.barrier()
        results = [torch.empty(m * world, n) for _ in b]
        for out, weights in zip(results, b, strict=True):
            ctx.ops.all_gather_matmul(out, shard, weights, async_op=True, gather_dim=0)
        ctx.barrier()
        for out, weights in zip(results, b, strict=True):
            torch.testing.assert_close(out, torch.cat(a) @ weights, rtol=1e-3, atol=1e-3)

    sim.explore(body, 2, seeds=range(2), resident_programs=16)


# Modes that turn checks off for what cannot be known.


def test_an_array_of_numpy_may_have_written():
    def body(ctx):
        x = ctx.empty(N, dtype=torch.float32)
        x.numpy()[:] = 1
        return x.sum().item()

    assert on_one_rank(body) == N


def test_results_of_operations_are_ordered_by_their_stream():
    def body(ctx, wait):
        side = ctx.new_stream()
        with ctx.use_stream(side):
            x = torch.ones(N)
        if wait:
            ctx.current_stream().wait_stream(side)
        add_one_kernel[(1,)](x, BLOCK=N)

    sim.run(body, 1, True)
    with pytest.raises(errors.RaceError, match=r"aten\.(ones|fill_)"):
        sim.run(body, 1, False)


def test_storage_that_moves_is_forgotten():
    def body(ctx):
        x = torch.empty(N)
        x.resize_(1 << 16)
        x.fill_(1)
        y = torch.empty(N)
        y.fill_(1)
        return x.sum().item(), y.sum().item()

    assert on_one_rank(body) == (1 << 16, N)


# Element types.

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int64, torch.bool]


@triton.jit
def copy_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_of_any_size(dtype):
    def body(ctx, programs=1, written=N):
        x, y = torch.empty(N, dtype=dtype), ctx.empty(N * dtype.itemsize, dtype=torch.uint8).view(dtype)
        x[:written] = torch.ones(written).to(dtype)
        copy_kernel[(programs,)](x, y, BLOCK=N)
        return y.float().sum().item()

    assert sim.run(body, 1) == [N]
    with pytest.raises(errors.UninitializedReadError, match=r"x\[15\]"):
        sim.run(body, 1, 1, N - 1)
    with pytest.raises(errors.RaceError, match=r"y\[0\] to y\[15\] \(16 elements\)"):
        sim.run(body, 1, 2)


@triton.jit
def count_kernel(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(x + at, tl.full((BLOCK,), 1, tl.int32).to(x.dtype.element_ty), mask=at < BLOCK - 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64], ids=str)
def test_atomics_on_elements_of_any_size(dtype):
    def body(ctx):
        x = ctx.zeros(N, dtype=dtype)
        count_kernel[(5,)](x, BLOCK=N)
        return x.tolist()

    assert on_one_rank(body) == [5.0] * (N - 1) + [0.0]


def test_a_step_of_training_gives_no_alarm():
    """Out-of-place, in-place, fused and foreach operations, views, backward, and what they leave for the host."""

    def body(ctx):
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU())
        torch.nn.init.orthogonal_(layers[0].weight)
        torch.nn.init.trunc_normal_(layers[0].bias)
        optimizer = torch.optim.AdamW(layers.parameters(), foreach=True)
        x = ctx.as_symmetric(torch.randn(4, 8))
        for _ in range(2):
            optimizer.zero_grad()
            heads = layers(x).view(1, 4, 2, 4).transpose(1, 2)
            loss = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).softmax(-1)[..., 0].sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
            optimizer.step()
        chosen = torch.cat([x.topk(2).values, x.sort().values[:, ::3], torch.where(x > 0, x, 0 * x)[:, 1:2]], dim=1)
        chosen[torch.arange(2)[:, None], torch.tensor([0, 1])] = 1.0
        return f"{loss:.3f}", chosen.unique().numel() > 1, repr(chosen), loss.detach().numpy().item()

    first, second = sim.run(body, 2)
    assert first == second
