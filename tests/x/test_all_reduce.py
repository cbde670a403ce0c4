"""All-reduce of tiles: right sums for any world, shape and dtype, the same bits where promised, calls in a row."""

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris.errors import WaitTimeout
from iris.testing import assert_bitwise_equal, assert_close, random_tensor
from iris.x import number_of_tiles

IN_RANK_ORDER = ("one_shot", "two_shot", "ring")
VARIANTS = ("atomic", "spinlock", *IN_RANK_ORDER)
WIDE = {torch.float64: torch.float64, torch.int64: torch.int64}


def wide(dtype):
    return WIDE.get(dtype, torch.float32 if dtype.is_floating_point else torch.int32)


@triton.jit
def all_reduce_kernel(
    context, data, src, dst, scratch, locks, M, N, stride_m, stride_n, generation, rank: tl.constexpr,
    world: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, VARIANT: tl.constexpr,
):  # fmt: skip
    """Each tile of ``data``, which is this rank's own, is summed over the ranks in ``dst``."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    own = iris.make_tensor_view(data, M, N, N, 1)
    src_view = iris.make_tensor_view(src, M, N, N, 1)
    dst_view = iris.make_tensor_view(dst, M, N, stride_m, stride_n)
    scratch_view = iris.make_tensor_view(scratch, M, N, N, 1)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for number in range(tl.program_id(0), own.number_of_tiles(BLOCK_M, BLOCK_N), tl.num_programs(0)):
        place = iris.TileView(number // tiles_n, number % tiles_n, BLOCK_M, BLOCK_N)
        ptrs, mask = own.tile_ptr(place)
        tile = iris.Tile(place.pid_m, place.pid_n, BLOCK_M, BLOCK_N, tl.load(ptrs, mask=mask))
        if VARIANT == "atomic":
            ctx.all_reduce_atomic(tile, dst_view)
        elif VARIANT == "spinlock":
            ctx.all_reduce_spinlock(tile, dst_view, locks)
        elif VARIANT == "one_shot":
            ctx.publish_tile(tile, src_view, locks, generation)
            ctx.all_reduce_one_shot(place, src_view, dst_view, locks, generation)
        elif VARIANT == "two_shot":
            ctx.publish_tile(tile, src_view, locks, generation)
            ctx.all_reduce_two_shot(tile, src_view, dst_view, locks, generation)
        else:
            ptrs, mask = src_view.tile_ptr(tile)
            tl.store(ptrs, tile.data, mask=mask)
            ctx.all_reduce_ring(tile, src_view, dst_view, locks, generation, scratch_view)
        if VARIANT == "one_shot" or VARIANT == "ring":  # complete at return, which the others are after a barrier
            tl.debug_barrier()
            ptrs, mask = dst_view.tile_ptr(place)
            complete = tl.load(ptrs, mask=mask)
            ptrs, mask = own.tile_ptr(place)
            tl.store(ptrs, complete, mask=mask)


def addition(inputs):
    """The sum in rank order, rounded once: what the variants in rank order must give, bit by bit."""
    total = inputs[0].to(wide(inputs[0].dtype))
    for value in inputs[1:]:
        total = total + value.to(total.dtype)
    return total.to(inputs[0].dtype)


def exact(inputs):
    kind = torch.float64 if inputs[0].dtype.is_floating_point else torch.int64
    return torch.stack([value.to(kind) for value in inputs]).sum(0)


def clean(ctx, dst, variant):
    """What the caller owes before a call: sums start from zero, the others may find anything."""
    adds = variant in ("atomic", "spinlock")
    dst.fill_(0 if adds else float("nan") if dst.dtype.is_floating_point else 99)


def check(got, inputs, variant):
    dtype = got.dtype
    if variant in IN_RANK_ORDER:
        assert_bitwise_equal(got, addition(inputs))
    if not dtype.is_floating_point:
        assert torch.equal(got.to(torch.int64).cpu(), exact(inputs).to(dtype).to(torch.int64))
    elif variant in IN_RANK_ORDER:
        assert_close(got, exact(inputs), dtype, k=len(inputs))
    else:
        # Rounded at each of the additions, of partial sums up to that size.
        bound = torch.finfo(dtype).eps * len(inputs) * torch.stack([i.double().abs() for i in inputs]).sum(0)
        assert ((got.cpu().double() - exact(inputs)).abs() <= bound).all()


def body(ctx, variant, cases):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    for dtype, (m, n), (block_m, block_n), calls, column_major in cases:
        src = ctx.zeros(m, n, dtype=dtype)
        dst = ctx.zeros(n, m, dtype=dtype).t() if column_major else ctx.zeros(m, n, dtype=dtype)
        scratch = ctx.zeros(m, n, dtype=wide(dtype))
        locks = ctx.zeros(number_of_tiles(m, n, block_m, block_n), dtype=torch.int32)
        for call in range(calls):
            inputs = [random_tensor((m, n), dtype, seed=call, rank=r) for r in range(world)]
            own = inputs[rank].to(ctx.get_device(), copy=True)
            clean(ctx, dst, variant)
            ctx.barrier()
            all_reduce_kernel[(2,)](
                ctx.get_device_context(), own, src, dst, scratch, locks, m, n,
                *dst.stride(), call + 1, rank, world, BLOCK_M=block_m, BLOCK_N=block_n, VARIANT=variant,
            )  # fmt: skip
            ctx.barrier()
            check(dst.cpu(), inputs, variant)
            if variant in ("one_shot", "ring"):
                assert_bitwise_equal(own.cpu(), dst.cpu())


RAGGED = ((37, 45), (32, 32))  # 2 x 2 tiles, the last row and column not full
SMALL = ((3, 5), (16, 16))  # one tile, larger than the matrix both ways
CASES = [(torch.float32, *RAGGED, 2, False), (torch.bfloat16, *SMALL, 2, True)]
OTHER_DTYPES = [
    (torch.float16, *SMALL, 1, False),
    (torch.int32, *SMALL, 1, False),
    (torch.float64, *SMALL, 1, True),
    (torch.int64, *SMALL, 1, False),
]
INT8 = (torch.int8, *SMALL, 1, False)  # has no atomics


@pytest.mark.parametrize("variant", VARIANTS)
def test_sums(ranks, world, variant):
    ranks(world).run(body, variant, CASES)


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sums_of_every_dtype(ranks, world, variant):
    ranks(world).run(body, variant, [*OTHER_DTYPES, *([] if variant == "atomic" else [INT8])])


@pytest.mark.parametrize("world", [5, 8])
@pytest.mark.parametrize("variant", IN_RANK_ORDER)
def test_sums_over_many_ranks(ranks, world, variant):
    ranks(world).run(body, variant, [(torch.bfloat16, (20, 33), (16, 32), 2, False), INT8])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("size", "block", "dtype"),
    [
        ((128, 64), (64, 32), torch.float16),
        ((128, 128), (64, 32), torch.bfloat16),
        ((256, 128), (64, 16), torch.float32),
        ((1024, 256), (128, 128), torch.bfloat16),
        ((2048, 2048), (256, 256), torch.float16),
        ((100, 100), (64, 64), torch.float32),
        ((256, 384), (128, 256), torch.float16),
    ],
)
def test_sums_of_large_matrices(ranks, world, variant, size, block, dtype):
    # Atomics of 16 bits go one by one here.
    dtype = torch.float32 if variant == "atomic" else dtype
    ranks(world).run(body, variant, [(dtype, size, block, 1, False)], context=1 << 27)


def body_one_rounding(ctx, variant):
    """bf16 holds 256 and 258, not 257: a sum that is rounded at every step stays at 256."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    data = torch.full((4, 4), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16, device=ctx.get_device())
    src, dst = (ctx.full((4, 4), float("nan"), dtype=torch.bfloat16) for _ in range(2))
    scratch, locks = ctx.zeros(4, 4), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    all_reduce_kernel[(1,)](
        ctx.get_device_context(), data, src, dst, scratch, locks, 4, 4, 4, 1, 1, rank, world, 16, 16, variant
    )
    ctx.barrier()
    assert set(dst.flatten().tolist()) == {float(torch.tensor(255.0 + world).bfloat16())}


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("variant", IN_RANK_ORDER)
def test_sums_are_rounded_once(ranks, world, variant):
    ranks(world).run(body_one_rounding, variant)


@triton.jit
def two_buffers_kernel(
    context, src, dst, locks, data, N, generation, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr
):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    view = iris.make_tensor_view(src + (generation & 1) * N, 1, N, N, 1)
    ptrs, mask = iris.x.tile_ptr(data, 1, N, N, 1, 0, tl.program_id(0), 1, BLOCK)
    tile = iris.Tile(0, tl.program_id(0), 1, BLOCK, tl.load(ptrs, mask=mask))
    ctx.publish_tile(tile, view, locks, generation)
    ctx.all_reduce_one_shot(tile, view, iris.make_tensor_view(dst, 1, N, N, 1), locks, generation)


def body_two_buffers(ctx, calls, first):
    rank, world, n = ctx.get_rank(), ctx.get_num_ranks(), 50
    src, locks = ctx.full((2, n), float("nan")), ctx.full((2,), first - 1, dtype=torch.int32)
    results = torch.full((calls, n), float("nan"), device=ctx.get_device())
    ctx.barrier()
    generation = first
    for call in range(calls):
        data = random_tensor((n,), torch.float32, seed=call, rank=rank).to(ctx.get_device())
        two_buffers_kernel[(2,)](
            ctx.get_device_context(), src, results[call], locks, data, n, generation, rank, world, BLOCK=32
        )
        generation = generation + 1 if generation < 2**31 - 1 else -(2**31)
    ctx.barrier()
    for call in range(calls):
        inputs = [random_tensor((n,), torch.float32, seed=call, rank=r) for r in range(world)]
        assert_bitwise_equal(results[call].cpu(), addition(inputs))


@pytest.mark.parametrize("first", [1, 2**31 - 3])
def test_two_buffers_that_take_turns_need_no_barrier(ranks, world, first):
    """Also where the generations wrap past the largest int32."""
    ranks(world).run(body_two_buffers, 6, first)


@triton.jit
def share_kernel(
    context, src, dst, locks, data, N, start, stride, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr
):
    heap_bases = context + 2
    ctx = iris.x.DeviceContext(rank, world, heap_bases)
    src_view = iris.make_tensor_view(src, 1, N, N, 1)
    dst_view = iris.make_tensor_view(dst, 1, N, N, 1)
    for pid_n in range(tl.cdiv(N, BLOCK)):
        ptrs, mask = iris.x.tile_ptr(data, 1, N, N, 1, 0, pid_n, 1, BLOCK)
        iris.x.publish_tile(iris.Tile(0, pid_n, 1, BLOCK, tl.load(ptrs, mask=mask)), src_view, locks, ctx)
    for pid_n in range(tl.cdiv(N, BLOCK)):
        tile = iris.TileView(0, pid_n, 1, BLOCK)
        iris.x.all_reduce_two_shot(tile, src_view, dst_view, locks, start, stride, ctx)


def body_shares(ctx):
    """The last rank takes the tiles 1, 3, 5 and rank 0 the tiles 2, 4: nobody takes tile 0."""
    rank, world, n = ctx.get_rank(), ctx.get_num_ranks(), 90
    src, dst = ctx.full((n,), float("nan")), ctx.full((n,), float("nan"))
    locks = ctx.zeros(6, dtype=torch.int32)
    inputs = [random_tensor((n,), torch.float32, seed=3, rank=r) for r in range(world)]
    start = {0: 2, world - 1: 1}.get(rank, 6)
    ctx.barrier()
    share_kernel[(1,)](
        ctx.get_device_context(), src, dst, locks, inputs[rank].to(ctx.get_device()), n, start, 2, rank, world, BLOCK=16
    )
    ctx.barrier()
    assert dst[:16].isnan().all()
    assert_bitwise_equal(dst[16:].cpu(), addition(inputs)[16:])


@pytest.mark.parametrize("world", [2, 3])
def test_two_shot_with_other_shares(ranks, world):
    ranks(world).run(body_shares)


@triton.jit
def contend_kernel(context, dst, locks, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    """Every program of every rank adds to the same tiles."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    view = iris.make_tensor_view(dst, BLOCK, 2 * BLOCK, 2 * BLOCK, 1)
    ones = tl.full((BLOCK, BLOCK), 1, tl.int32)
    for pid_n in range(2):
        ctx.all_reduce_spinlock(iris.Tile(0, pid_n, BLOCK, BLOCK, ones), view, locks)


def body_contention(ctx, programs, calls):
    world = ctx.get_num_ranks()
    dst, locks = ctx.zeros(8, 16, dtype=torch.int32), ctx.zeros(2, dtype=torch.int32)
    ctx.barrier()
    for _ in range(calls):
        contend_kernel[(programs,)](ctx.get_device_context(), dst, locks, ctx.get_rank(), world, BLOCK=8)
    ctx.barrier()
    assert dst.unique().tolist() == [world * programs * calls]
    assert locks.tolist() == [0, 0]


def test_no_sum_is_lost_under_the_lock(ranks, world):
    ranks(world).run(body_contention, 3, 3)


@pytest.mark.slow
def test_no_sum_is_lost_in_many_calls(ranks, world):
    ranks(world).run(body_contention, 4, 100)


def body_lock_held(rank, world_size):
    import os

    os.environ["IRIS_TIMEOUT"] = "2"
    ctx = iris.iris(1 << 20)
    dst = ctx.zeros(8, 16, dtype=torch.int32)
    locks = ctx.zeros(2, dtype=torch.int32).fill_(rank)  # nobody gives back the locks of rank 1
    ctx.barrier()

    def contend():
        contend_kernel[(1,)](ctx.get_device_context(), dst, locks, rank, world_size, BLOCK=8)
        ctx.barrier()

    with pytest.raises(WaitTimeout) as caught:
        contend()
    for record in caught.value.records:
        assert (record.wanted, record.seen, record.peer) == (0, 1, 1)
        assert "test_all_reduce.py:" in record.flag
    assert dst.unique().tolist() == [0 if rank == 1 else 2]
    os.environ.pop("IRIS_TIMEOUT")


@pytest.mark.processes("a wait that ends by its time limit; simulated ones end as deadlocks")
def test_a_lock_that_is_not_given_back_ends_as_an_error(ranks):
    ranks(2).run(body_lock_held, context=None)


@triton.jit
def config_kernel(context, src, dst, locks, generation, rank: tl.constexpr, world: tl.constexpr, CODE: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    src_view = iris.make_tensor_view(src, 8, 8, 8, 1)
    dst_view = iris.make_tensor_view(dst, 8, 8, 8, 1)
    tile = iris.Tile(0, 0, 8, 8, tl.full((8, 8), rank + 1, tl.int32))
    config = iris.AllReduceConfig(CODE, locks)
    if config.variant_code == 1:
        ptrs, mask = src_view.tile_ptr(tile)
        tl.store(ptrs, tile.data, mask=mask)
    else:
        ctx.publish_tile(tile, src_view, locks, generation)
    if config.variant_code == 4:  # locks of this one are 0 or 1
        config = iris.AllReduceConfig(CODE, locks + 1)
    ctx.all_reduce(tile, src_view, dst_view, config, generation)


def body_config(ctx, codes):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    for code in codes:
        src, dst = ctx.zeros(8, 8, dtype=torch.int32), ctx.zeros(8, 8, dtype=torch.int32)
        locks = ctx.zeros(2, dtype=torch.int32)
        ctx.barrier()
        config_kernel[(1,)](ctx.get_device_context(), src, dst, locks, 1, rank, world, CODE=code)
        ctx.barrier()
        assert dst.unique().tolist() == [world * (world + 1) // 2], code


def test_a_configuration_names_the_variant(ranks, world):
    ranks(world).run(body_config, [0, 1, "one_shot", "two_shot", 4])


def body_refused(ctx, variant, dtype, with_locks, message):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    dst, locks = ctx.zeros(8, 8, dtype=dtype), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    with pytest.raises(Exception) as caught:
        refused_kernel[(1,)](ctx.get_device_context(), dst, locks, rank, world, variant, with_locks)
    assert message in all_that_is_said(caught.value)
    ctx.barrier()


def all_that_is_said(error):
    """The texts of an error and of its causes: the compiler says in each which line it was at."""
    said = []
    while error is not None:
        said.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(said)


@triton.jit
def refused_kernel(
    context, dst, locks, rank: tl.constexpr, world: tl.constexpr, VARIANT: tl.constexpr, WITH_LOCKS: tl.constexpr
):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    view = iris.make_tensor_view(dst, 8, 8, 8, 1)
    ptrs, mask = view.tile_ptr(iris.TileView(0, 0, 8, 8))
    tile = iris.Tile(0, 0, 8, 8, tl.load(ptrs, mask=mask))
    if VARIANT == "atomic":
        ctx.all_reduce_atomic(tile, view)
    elif WITH_LOCKS:
        ctx.all_reduce_ring(tile, view, view, locks)
    else:
        ctx.all_reduce_ring(tile, view, view)


@pytest.mark.parametrize("world", [1])
@pytest.mark.parametrize(
    ("variant", "dtype", "with_locks", "message"),
    [
        ("atomic", torch.int8, True, "no atomic addition for the dtype of dst_view; possible: float16"),
        ("ring", torch.float32, False, "all_reduce_ring needs locks"),
        ("ring", torch.bfloat16, True, "partial sums need a scratch_view of float32"),
    ],
)
def test_what_cannot_be_done_is_said(ranks, world, variant, dtype, with_locks, message):
    ranks(world).run(body_refused, variant, dtype, with_locks, message)
