"""The symmetric heap: what is allocated, freed and refused, and that ranks agree."""

import gc
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import iris
from iris.device import address
from iris.errors import HeapExhausted, RankMismatch, UnsupportedError
from iris.runtime.heap import ALIGNMENT, Blocks, SymmetricHeap

MIB = 1 << 20


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.sampled_from([1024, 4096])), max_size=60))
def test_blocks_never_overlap_and_all_come_back(steps):
    blocks = Blocks(32 * ALIGNMENT)
    live = []
    for allocate, size, alignment in steps:
        if allocate or not live:
            offset = blocks.allocate(size * ALIGNMENT, alignment)
            if offset is None:
                assert blocks.largest < size * ALIGNMENT + alignment
                continue
            assert offset % alignment == 0
            assert 0 <= offset <= 32 * ALIGNMENT - size * ALIGNMENT
            for start, length in live:
                assert offset + size * ALIGNMENT <= start or start + length <= offset
            live.append((offset, size * ALIGNMENT))
        else:
            blocks.free(*live.pop(size % len(live)))
        assert blocks.free_bytes == 32 * ALIGNMENT - sum(length for _, length in live)
    for block in live:
        blocks.free(*block)
    assert blocks.largest == 32 * ALIGNMENT


def test_heaps_that_kernels_could_not_address_are_refused():
    assert ALIGNMENT % address._GRAIN.value == 0
    region = SimpleNamespace(device=torch.device("cpu"), bases=[ALIGNMENT, 2 * ALIGNMENT + 512])
    with pytest.raises(UnsupportedError, match=r"\[-1536, 0\] bytes from rank 1's; .* multiples of 1024"):
        SymmetricHeap(region, 1, 0, MIB, lambda: None)


def body_exhaustion(rank, world_size):
    ctx = iris.iris(heap_size=MIB)
    with pytest.raises(MemoryError) as caught:
        ctx.zeros(MIB, dtype=torch.float32)
    assert isinstance(caught.value, HeapExhausted)
    for part in (str(4 * MIB), "0 of", str(MIB), "heap_size"):
        assert part in str(caught.value), str(caught.value)
    kept = ctx.zeros(MIB // 8, dtype=torch.float32)
    with pytest.raises(HeapExhausted, match=f"{MIB // 2} of {MIB}"):
        ctx.zeros(MIB // 4 - 1024, dtype=torch.float32)
    again = ctx.zeros(16)
    assert (again == 0).all()
    assert (kept == 0).all()
    with pytest.raises(ValueError, match="-1"):
        ctx.zeros(-1)
    assert ctx.heap.used_bytes == MIB // 2 + 1024


def test_exhaustion_says_what_to_do(ranks, world):
    ranks(world).run(body_exhaustion, context=None)


def body_loop(ctx):
    gc.collect()  # what tests before it left in these processes
    ctx.barrier()
    before = ctx.heap.used_bytes
    for step in range(1000):
        tensor = ctx.zeros(2 * MIB, dtype=torch.bfloat16)
        if step % 250 == 0:
            tensor.fill_(step)
            assert (tensor == step).all()
        del tensor
    assert ctx.heap.used_bytes == before
    assert set(ctx.exchange.all_gather("test", ctx.heap.used_bytes)) == {before}
    ctx.barrier()


def test_a_loop_that_allocates_and_drops_runs_on(ranks, world):
    ranks(world).run(body_loop)


def body_views(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    gc.collect()
    ctx.barrier()
    before = ctx.heap.used_bytes
    view = ctx.zeros(1000)[10:20]
    gc.collect()
    assert ctx.heap.used_bytes == before + 4096, "a view must keep its block"
    # A block that one rank still holds is freed on no rank.
    mine = ctx.zeros(1000)
    address = mine.data_ptr()
    if rank == 0:
        del mine
    ctx.barrier()
    other = ctx.zeros(1000)
    if world > 1:
        assert other.data_ptr() != address
    places = ctx.exchange.all_gather("test", other.data_ptr() - ctx.heap.base)
    assert len(set(places)) == 1, "offsets diverged"
    mine = None
    ctx.barrier()
    del view, other
    ctx.barrier()
    assert ctx.heap.used_bytes == before
    assert ctx.heap.reserved_bytes == before
    ctx.barrier()


def test_memory_is_freed_when_all_ranks_are_done_with_it(ranks, world):
    ranks(world).run(body_views)


def body_symmetric(ctx):
    device = ctx.get_device()
    tensor = ctx.zeros(10)
    assert ctx.is_symmetric(tensor)
    assert ctx.is_symmetric(tensor[3:])
    assert ctx.is_symmetric(tensor[3:3])
    assert ctx.is_symmetric(ctx.zeros(0))
    assert ctx.is_symmetric(ctx.zeros(4, 0))
    assert not ctx.is_symmetric(torch.zeros(10, device=device))
    assert not ctx.is_symmetric(torch.empty(0, device=device))
    assert not ctx.is_symmetric(torch.empty(0, device="meta"))
    external = torch.arange(12.0, device=device)
    copy = ctx.as_symmetric(external)
    assert ctx.is_symmetric(copy)
    assert torch.equal(copy, external)
    copy.zero_()
    assert external[5] == 5
    with pytest.raises(RuntimeError, match="context"):
        ctx.as_symmetric(torch.zeros(3, device="meta"))
    with pytest.raises(iris.IrisError, match="contiguous"):
        ctx.as_symmetric(external[::2])
    for dtype in (torch.int8, torch.float64, torch.bool, torch.complex64):
        odd, next_one = ctx.zeros(3, dtype=torch.int8), ctx.zeros(5, dtype=dtype)
        assert odd.data_ptr() % 256 == 0
        assert next_one.data_ptr() % 256 == 0


def test_what_is_symmetric(ranks, world):
    ranks(world).run(body_symmetric)


def body_two_contexts(rank, world_size):
    first, second = iris.iris(MIB), iris.iris(2 * MIB)
    a, b = first.ones(8), second.zeros(8)
    assert first.is_symmetric(a)
    assert not second.is_symmetric(a)
    assert not first.is_symmetric(b)
    second.barrier()
    first.barrier()
    del first
    gc.collect()
    assert (a == 1).all(), "tensors outlive their context"
    second.barrier()


def test_contexts_are_independent(ranks, world):
    ranks(world).run(body_two_contexts, context=None)


def body_diverge(rank, world_size):
    ctx = iris.iris(MIB)
    same = ctx.zeros(16)
    different = ctx.zeros(32 if rank == 1 else 16, dtype=torch.float16)
    for _ in range(2):
        with pytest.raises(RankMismatch) as caught:
            ctx.barrier()
    text = str(caught.value)
    assert "16 x float16" in text
    assert "rank 1 allocated #1 32 x float16" in text
    assert same.numel() + different.numel() > 0


def body_extra(rank, world_size):
    ctx = iris.iris(MIB)
    kept = [ctx.zeros(4)] if rank == 0 else []
    with pytest.raises(RankMismatch, match=r"rank 0 allocated #0 4 x float32 at .*; rank 1 allocated nothing"):
        ctx.barrier()
    assert len(kept) == (rank == 0)


@pytest.mark.parametrize("body", [body_diverge, body_extra])
def test_diverging_allocations_name_the_first_difference(ranks, body):
    ranks(2).run(body, context=None)


def body_sizes(rank, world_size):
    with pytest.raises(RankMismatch, match=f"heap_size.*rank 0: {1 << 21}, rank 1: {MIB}"):
        iris.iris(1 << 21 if rank == 0 else MIB)


def test_different_heap_sizes_are_refused_on_all_ranks(ranks):
    ranks(2).run(body_sizes, context=None)


def body_bases(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    tensor, bases = ctx.allocate_symmetric(100, dtype=torch.float16)
    assert bases.dtype == torch.int64
    assert bases.shape == (world,)
    assert bases[rank].item() == tensor.data_ptr()
    assert len(set(bases.tolist())) == world
    heap = ctx.get_heap_bases()
    assert heap.dtype == torch.int64
    assert len(set((bases - heap).tolist())) == 1
    words = ctx.get_device_context()
    assert words.dtype == torch.int64
    assert words[:2].tolist() == [rank, world]
    assert torch.equal(words[2 : 2 + world], heap)
    assert words[2 + world : 2 + world + 17].eq(0).all()


def test_tables_of_addresses(ranks, world):
    ranks(world).run(body_bases)


def body_lazy(rank, world_size):
    """A heap far larger than the memory is touched only where it is used."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ctx = iris.iris(64 << 30)
    ctx.zeros(1 << 18).add_(1)
    ctx.barrier()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 * 1024, f"{grown_kib} KiB were committed"


@pytest.mark.processes("it reads what its process has committed")
def test_the_region_is_committed_lazily(ranks, pytestconfig):
    if pytestconfig.getoption("--runtime") == "gpu":
        pytest.skip("GPU memory is committed when it is allocated; only the cpu runtime commits lazily")
    ranks(2).run(body_lazy, context=None)


def body_descriptions(ctx):
    mine = ctx.zeros(100, dtype=torch.float32)
    address = mine[7].data_ptr()
    assert ctx.heap.describe(address).endswith("[7]"), ctx.heap.describe(address)
    peer = 1 - ctx.get_rank()
    there = ctx.heap.translate(address, ctx.get_rank(), peer)
    assert ctx.heap.describe(there) == f"{ctx.heap.describe(address)} on rank {peer}"
    assert "reserved area" in ctx.heap.describe(ctx.barrier_flags.data_ptr())
    assert ctx.heap.describe(64) == "address 0x40"


def test_an_address_is_told_by_its_allocation(ranks):
    ranks(2).run(body_descriptions)


def body_on_peer(ctx):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    peer = (rank + 1) % world
    whole = ctx.zeros(4, 6, dtype=torch.int32)
    there = ctx.heap.on_peer(whole[1:3], peer)
    assert (there.shape, there.dtype) == ((2, 6), torch.int32)
    ctx.barrier()
    there.copy_(torch.arange(12, dtype=torch.int32, device=ctx.get_device()).view(2, 6) + 100 * rank)
    ctx.barrier()
    want = torch.zeros(4, 6, dtype=torch.int32)
    want[1:3] = torch.arange(12).view(2, 6) + 100 * ((rank + world - 1) % world)
    assert torch.equal(whole.cpu(), want)
    ctx.barrier()


def test_what_a_tensor_is_on_another_rank(ranks, world):
    ranks(world).run(body_on_peer)
