"""A GEMM beside each collective against plain definitions: both results, modes, splits, sizes, dtypes, layouts, order.

Every rank can make every rank's inputs, so tests know what to expect without communication.
"""

import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import iris
from collective_data import FP8, Buffer, assert_same, movable, rounded, steps
from iris import _target
from iris._events import Event
from iris.concurrent import _call
from iris.testing import reference
from iris.testing.numeric import ROUNDING, assert_bitwise_equal, assert_close, random_tensor

NAMES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast")
ADDING = ("all_reduce", "reduce_scatter")
# What peers read, and what they write.
READ, WRITTEN = (*ADDING, "all_to_all"), ("all_gather", "all_reduce", "broadcast")
# Few programs and few, large tiles: the interpreter takes its time by statement and by program.
TILES = {"gemm_block": (32, 64, 32), "comm_block": (16, 32), "num_warps": 4, "num_stages": 1}
FUSED = {"mode": "fused", "num_wgs": 3, **TILES}
CONCURRENT = {"mode": "concurrent", "gemm_wgs": 2, "comm_wgs": 2, **TILES}
NAN = float("nan")
both = pytest.mark.parametrize("how", [FUSED, CONCURRENT], ids=["fused", "concurrent"])


def slow(*values):
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.timeout(400)])


def chunks(tensor, world):
    """The rows of each of ``world`` ranks, as ``torch.chunk`` cuts them; the last ones may be empty."""
    size = -(-tensor.shape[0] // world)
    return [tensor[r * size : (r + 1) * size] for r in range(world)]


def expected_of(name, sources, index, root=0):
    """What member ``index`` gets of a collective, given every member's comm_src; sums are rounded once."""
    if name == "all_gather":
        return torch.cat(sources)
    if name == "broadcast":
        return sources[root]
    if name == "all_to_all":
        return torch.cat([chunks(source, len(sources))[index] for source in sources])
    total = rounded(reference.all_reduce(sources), sources[0].dtype)
    return total if name == "all_reduce" else chunks(total, len(sources))[index]


def laid_out(tensor, letter):
    """The same values, with contiguous rows (N) or columns (T)."""
    return tensor if letter == "N" else tensor.t().contiguous().t()


@dataclass
class Case:
    """A call's tensors, and what it has to give."""

    name: str
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    src: Buffer
    dst: Buffer
    product: torch.Tensor
    moved: torch.Tensor

    def call(self, ctx, **how):
        return getattr(ctx.concurrent, self.name)(
            self.a, self.b, self.src.tensor, C=self.c, comm_dst=self.dst.tensor, **how
        )

    def check(self, ctx):
        ctx.synchronize()
        assert_bitwise_equal(self.c.cpu() + 0, self.product.to(self.c.dtype) + 0)
        self.dst.check(self.moved)


def made(ctx, name, gemm, comm, dtype=torch.float16, moved=torch.float16, *, b_dtype=None, out=None, transpose="NN",
         layout="plain", seed=0, members=None, root=0):  # fmt: skip
    """A case whose outputs nobody has written. Whole numbers: the exact product is rounded once.

    No barrier: peers read and write when this rank's kernel runs, and not before.
    """
    (M, N, K), (rows, columns) = gemm, comm
    members = tuple(members or range(ctx.get_num_ranks()))
    index, device = members.index(ctx.get_rank()), ctx.get_device()
    # The product is each rank's own.
    a = random_tensor((M, K), dtype, seed=seed, rank=ctx.get_rank(), integers=True)
    b = random_tensor((K, N), b_dtype or dtype, seed=seed + 1, rank=ctx.get_rank(), integers=True)
    kind = out or (torch.int32 if dtype == torch.int8 else torch.bfloat16 if dtype.itemsize == 1 else dtype)
    make = steps if name in ADDING else movable
    sources = [make((rows, columns), moved, seed=seed, rank=r) for r in members]
    wanted = expected_of(name, sources, index, root)
    src = Buffer(ctx, (rows, columns), moved, layout, heap=name in READ)
    dst = Buffer(ctx, tuple(wanted.shape), moved, layout, heap=name in WRITTEN)
    src.set(sources[index])
    return Case(
        name, laid_out(a.to(device, copy=True), transpose[0]), laid_out(b.to(device, copy=True), transpose[1]),
        torch.full((M, N), NAN if kind.is_floating_point else -9, dtype=kind, device=device), src, dst,
        a.double() @ b.double(), wanted,
    )  # fmt: skip


def body_sizes(ctx, how, cases, names=NAMES):
    world = ctx.get_num_ranks()
    for number, (gemm, rows, columns) in enumerate(cases):
        for name in names:
            root = number % world
            case = made(ctx, name, gemm, (rows, columns), seed=number, root=root)
            case.call(ctx, **how, **({"root": root} if name == "broadcast" else {}))
            case.check(ctx)


# One row of A, and tails of both; chunks that are shorter or empty, and fewer rows than ranks.
SIZES = [((1, 70, 33), 35, 40), ((40, 30, 7), 1, 3)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ragged_sizes(ranks, world):
    ranks(world).run(body_sizes, FUSED, SIZES)


def test_ragged_sizes_of_two_kernels(sim):
    sim.run(body_sizes, 3, CONCURRENT, SIZES[:1])


@pytest.mark.parametrize("world", [1, 3])
def test_many_tiles_of_a_collective(sim, monkeypatch, world):
    """A ticket is for several of them, but for the last ones; tiles that none is for would stay NaN."""
    start, batches = _call._start, []

    def noting(ctx, call, *rest):
        batches.append((call.batches, call.items))
        start(ctx, call, *rest)

    monkeypatch.setattr(_call, "_start", noting)
    # With one program that begins with them, and with none.
    for how in (FUSED, FUSED | {"gemm_wgs": 3}):
        sim.run(body_sizes, world, how, [((16, 16, 16), 16 * 3 * world + 5, 65)])
    # All ranks have some, but those that receive a broadcast.
    assert [items for _, items in batches].count(0) == 2 * (world - 1)
    assert all(0 < 4 * several < items for several, items in batches if items)
    assert len(batches) == 2 * world * len(NAMES)


def test_fewer_rows_than_four_ranks(sim):
    sim.run(body_sizes, 4, FUSED, SIZES[1:])


@both
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_more_sizes(ranks, world, how):
    products = [(1, 1, 1), (33, 64, 32), (64, 129, 65), (100, 5, 70), (3, 200, 1)]
    rows = [2, 8, 17, 32, 65]
    ranks(world).run(body_sizes, how, [(p, r, c) for p, r, c in zip(products, rows, (1, 33, 64, 7, 100), strict=True)])


def body_empty(ctx, how, names):
    for name in names:
        for gemm, comm in (((0, 8, 4), (5, 6)), ((8, 6, 0), (0, 6)), ((5, 0, 3), (4, 0))):
            case = made(ctx, name, gemm, comm, torch.float32)
            case.call(ctx, **how)
            case.check(ctx)


@pytest.mark.parametrize(
    ("world", "how", "names"),
    [(3, FUSED, NAMES[:2]), (2, CONCURRENT, NAMES[1:2]), slow(1, CONCURRENT, NAMES), slow(2, FUSED, NAMES)],
    ids=["3", "2", "1-all", "2-all"],
)
def test_empty_tensors(ranks, world, how, names):
    ranks(world).run(body_empty, how, names)


def body_gemm_dtypes(ctx):
    same = [(d, d) for d in (torch.float32, torch.float16, torch.bfloat16, torch.int8, *FP8)]
    for number, (dtype, b_dtype) in enumerate([*same, FP8]):
        outs = [torch.int32] if dtype == torch.int8 else [torch.float32, torch.float16, torch.bfloat16]
        case = made(
            ctx, NAMES[number % 5], (33, 50, 24), (6, 16), dtype, b_dtype=b_dtype, out=outs[number % len(outs)],
            transpose=("NN", "NT", "TN", "TT")[number % 4],
        )  # fmt: skip
        case.call(ctx, **FUSED)
        case.check(ctx)
        if case.c.dtype == dtype or dtype.itemsize == 1:
            made_c, _ = getattr(ctx.concurrent, case.name)(case.a, case.b, case.src.tensor, **FUSED)
            wanted = {torch.int8: torch.int32}.get(dtype, torch.bfloat16 if dtype.itemsize == 1 else dtype)
            assert made_c.dtype == wanted
            assert torch.equal(made_c.cpu().double(), case.product.to(wanted).double())
    ctx.barrier()


@pytest.mark.parametrize("world", [2, slow(1), slow(3)])
def test_dtypes_of_the_product(ranks, world):
    ranks(world).run(body_gemm_dtypes)


# Sums that narrow types would round at each step, and integers that wrap around.
MOVED = (*FP8[:1], torch.bool, torch.complex64, torch.float64, torch.int16)
ADDED = (torch.float64, torch.bfloat16, torch.int8, torch.uint8, torch.int64)
MORE_ADDED = (torch.float32, torch.float16, torch.int16, torch.int32)


def body_comm_dtypes(ctx, moved, added):
    for name in NAMES:
        dtypes = added if name in ADDING else moved
        for number, dtype in enumerate(dtypes):
            case = made(ctx, name, (3, 16, 8), (9, 20), moved=dtype, layout=("plain", "odd", "rows")[number % 3],
                        seed=number)  # fmt: skip
            case.call(ctx, **FUSED)
            case.check(ctx)


@pytest.mark.parametrize(
    ("world", "moved", "added"), [(2, MOVED[:3], ADDED[:3]), (3, MOVED[3:], ADDED[3:]), slow(4, MOVED, MORE_ADDED)]
)
def test_dtypes_of_the_collective(ranks, world, moved, added):
    ranks(world).run(body_comm_dtypes, moved, added)


def body_layouts(ctx, how, every):
    for place, name in enumerate(NAMES):
        for number, layout in enumerate(("columns", "rows", "transposed")):
            if not every and number != place % 3:
                continue
            case = made(ctx, name, (35, 40, 37), (8, 20), layout=layout, transpose=("NT", "TN", "TT")[number])
            whole = torch.full((70, 80), 7.0, dtype=case.c.dtype, device=ctx.get_device())
            case.c = whole[::2, 1::2]
            case.call(ctx, **how)
            case.check(ctx)
            assert (whole[1::2] == 7).all(), "written outside of C"
            assert (whole[:, ::2] == 7).all(), "written outside of C"


@pytest.mark.parametrize(("world", "every"), [(2, False), slow(2, True), slow(3, True)])
def test_layouts_and_strided_views(ranks, world, every):
    ranks(world).run(body_layouts, FUSED, every)


def body_split(ctx, names):
    """The same bits for every mode and split; those of sums in float32, in group order, rounded once."""
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    a = random_tensor((40, 50), torch.float32, seed=1, rank=rank, device=device)
    b = random_tensor((50, 70), torch.float32, seed=2, rank=rank, device=device)
    sources = [random_tensor((33, 40), torch.float16, seed=3, rank=r) for r in range(world)]
    src = ctx.as_symmetric(sources[rank].to(device))
    total = sources[0].float()
    for source in sources[1:]:
        total = total + source.float()
    splits = [{**FUSED, "gemm_wgs": 0}, {**FUSED, "gemm_wgs": 1, "comm_cap": 1}, {**FUSED, "gemm_wgs": 3}]
    splits += [{**FUSED, "num_wgs": 1}, {**FUSED, "gemm_wgs": 2, "comm_wgs": 3, "num_wgs": None}, CONCURRENT]
    product = None
    for name in names:
        wanted = expected_of(name, sources, rank)
        if name in ADDING:
            wanted = total.half() if name == "all_reduce" else chunks(total.half(), world)[rank]
        for how in splits:
            c, dst = getattr(ctx.concurrent, name)(a, b, src, **how)
            ctx.synchronize()
            product = c if product is None else product
            assert_bitwise_equal(c, product)
            assert_bitwise_equal(dst, wanted)
            ctx.barrier()  # gives the outputs on the heap back
    assert_close(product.cpu(), a.cpu().double() @ b.cpu().double(), torch.float32, 50)


@pytest.mark.parametrize(
    ("world", "names"),
    [(2, NAMES[:1]), (3, NAMES[1:2]), slow(1, NAMES), slow(2, NAMES), slow(3, NAMES), slow(4, NAMES)],
)
def test_no_bit_depends_on_the_split(ranks, world, names):
    ranks(world).run(body_split, names)


def body_defaults(ctx):
    """Nothing but the inputs is given; outputs are made. Module and context forms are the same."""
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    a, b = torch.randn(20, 30, device=device), torch.randn(30, 40, device=device)
    sources = [steps((2 * world + 1, 5), torch.float32, seed=1, rank=r) for r in range(world)]
    src = ctx.as_symmetric(sources[rank].to(device))
    for name in NAMES:
        fused = getattr(ctx.concurrent, name)(a, b, src)
        concurrent = getattr(iris.concurrent.gemm, name)(ctx, a, b, src, mode="concurrent")
        ctx.synchronize()
        for c, dst in (fused, concurrent):
            assert_close(c.cpu(), a.cpu().double() @ b.cpu().double(), torch.float32, 30)
            assert_same(dst.cpu(), expected_of(name, sources, rank))
            assert world == 1 or ctx.is_symmetric(dst) == (name in WRITTEN)
        ctx.barrier()


@pytest.mark.parametrize("world", [2, slow(1), slow(3), slow(4)])
def test_defaults(ranks, world):
    ranks(world).run(body_defaults)


def body_random(ctx):
    """Random numbers, within what the rounding of float32 sums and of the result may come to."""
    for dtype in (torch.float16, torch.bfloat16):
        a, b = (random_tensor(shape, dtype, seed=4, rank=0) for shape in ((40, 64), (64, 90)))
        src = ctx.as_symmetric(a.to(ctx.get_device()))
        c, _ = ctx.concurrent.all_gather(src, b.to(ctx.get_device()), src, **FUSED)
        allowed = 16 * ROUNDING[torch.float32] * 64
        assert_close(c.cpu(), a.double() @ b.double(), dtype, allowed=(allowed, 1.001 * ROUNDING[dtype]))
        ctx.barrier()


@pytest.mark.parametrize("world", [1, slow(2)])
def test_random_data_within_tolerance(ranks, world):
    """A is comm_src as well: what is only read may be shared."""
    ranks(world).run(body_random)


def body_uneven_gather(ctx):
    """An output whose rows the ranks do not share evenly: each brings its chunk of them, and some bring none."""
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    a = torch.ones(4, 4, device=device)
    for rows in (2 * world + 1, world + 2, 1):
        whole = steps((rows, 12), torch.float32, seed=rows, rank=0)
        dst = Buffer(ctx, (rows, 12), torch.float32)
        own = chunks(whole, world)[rank].to(device)
        ctx.concurrent.all_gather(a, a, own, comm_dst=dst.tensor, **FUSED)
        ctx.synchronize()
        dst.check(whole)
    ctx.barrier()


@pytest.mark.parametrize("world", [3, slow(2), slow(4)])
def test_gather_of_uneven_shards(ranks, world):
    ranks(world).run(body_uneven_gather)


def body_in_place(ctx):
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    sources = [steps((37, 45), torch.bfloat16, seed=1, rank=r) for r in range(world)]
    data = ctx.as_symmetric(sources[rank].to(device))
    a = torch.ones(40, 40, device=device)
    for mode in (FUSED, CONCURRENT):
        data.copy_(sources[rank])
        c, dst = ctx.concurrent.all_reduce(a, a, data, comm_dst=data, **mode)
        ctx.synchronize()
        assert dst is data
        assert_same(data.cpu(), expected_of("all_reduce", sources, rank))
        assert (c == 40).all()


@pytest.mark.parametrize("world", [3, slow(2)])
def test_an_all_reduce_in_place(ranks, world):
    ranks(world).run(body_in_place)


def body_different_products(ctx):
    """The product is each rank's own: other sizes, tiles, modes and programs than its peers'."""
    rank = ctx.get_rank()
    case = made(ctx, "all_reduce", (10 + 30 * rank, 40, 20 + rank), (20, 30))
    case.call(ctx, **(FUSED if rank == 0 else CONCURRENT))
    case.check(ctx)
    case = made(ctx, "all_to_all", (10 + 100 * rank, 40, 20), (20, 30))
    case.call(ctx, num_wgs=2 + rank)
    case.check(ctx)


@pytest.mark.parametrize("world", [3])
def test_products_of_ranks_differ(ranks, world):
    ranks(world).run(body_different_products)


def body_groups(ctx):
    """Two groups at once, of different problems, in an order that is not that of their ranks."""
    pairs = [(3, 1), (0, 2)]
    groups = [dist.new_group(list(members)) for members in pairs]
    mine = 0 if ctx.get_rank() in pairs[0] else 1
    for place, name in enumerate(NAMES):
        for group in (groups[mine], list(pairs[mine]))[place % 2 :]:
            named = isinstance(group, dist.ProcessGroup)
            members = tuple(dist.get_process_group_ranks(group)) if named else pairs[mine]
            # All ranks allocate alike on the heap, so the outputs of both groups are parts of one size.
            case = made(ctx, name, (20, 24, 16), (12, 20), members=members, root=1, seed=mine)
            root = {"root": members[1]} if name == "broadcast" else {}
            case.call(ctx, group=group, **root, **(FUSED if mine else CONCURRENT))
            case.check(ctx)
    ctx.barrier()


@pytest.mark.parametrize("world", [4])
def test_groups_in_any_order_at_once(ranks, world):
    ranks(world).run(body_groups)


def body_late(ctx, how):
    """A rank that comes late: the others wait in the kernel, and its output is not touched before."""
    for name in NAMES:
        case = made(ctx, name, (24, 16, 8), (8, 16))
        if ctx.get_rank() == ctx.get_num_ranks() - 1:
            time.sleep(0.05)
            assert case.dst.tensor.isnan().all()
        case.call(ctx, **how)
        case.check(ctx)


@both
@pytest.mark.parametrize("world", [2, slow(4)])
def test_no_barrier_of_the_caller_is_needed(ranks, world, how):
    ranks(world).run(body_late, how)


def body_reuse(ctx, names, how, programs):
    """Calls that follow each other without the host in between, inputs changed; a refused one changes nothing."""
    for name in names:
        case = made(ctx, name, (20, 40, 9), (8, 20), torch.float32, torch.float32)
        given = how | ({"num_wgs": programs} if how["mode"] == "fused" else {})
        a, src, outs = case.a.clone(), case.src.tensor.clone(), []
        for factor in range(1, 4):
            case.a.copy_(factor * a)
            case.src.tensor.copy_(factor * src)
            case.call(ctx, **given)
            # In stream order: peers write the output of the next call when this rank has begun it.
            outs.append((case.c.clone(), case.dst.tensor.clone()))
            if factor == 2:
                with pytest.raises(iris.errors.ArgumentError):
                    case.call(ctx, **given, comm_group_m=0)
        for factor, (c, dst) in enumerate(outs, start=1):
            assert torch.equal(c.cpu().double(), factor * case.product), factor
            assert_same(dst.cpu(), factor * case.moved)


@pytest.mark.seeds(5)
@pytest.mark.sim(device="h200")
def test_in_any_order(sim):
    count = (2, 3, 2, 3, 3)[sim.seed % 5]
    sim.run(body_reuse, count, NAMES[sim.seed % 5 :][:1], CONCURRENT if sim.seed % 3 == 2 else FUSED, 3)


@both
@pytest.mark.slow
@pytest.mark.seeds(10)
@pytest.mark.sim(device="h200")
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_in_any_order_with_any_ranks(sim, count, how):
    sim.run(body_reuse, count, NAMES, how, 3)


@both
@pytest.mark.sim(device="h200", resident_programs=1)
def test_one_program_at_a_time_does_all(sim, how):
    """Nobody waits for a program that has not started."""
    sim.run(body_reuse, 3, ("all_reduce",), how, 3)


def body_two_streams(ctx, own, how):
    """Calls on two streams with nothing between them: each has its own results, again and again."""
    workspaces = [ctx.concurrent.make_workspace() if own else None for _ in range(2)]
    streams = [ctx.new_stream(), ctx.new_stream()]
    done = []
    for turn in range(3):
        for number in range(2):
            name = NAMES[(2 * turn + number) % 5]
            case = made(ctx, name, (33, 40 + turn, 9), (8, 20), seed=10 * turn + number)
            streams[number].wait_stream(ctx.current_stream())
            with ctx.use_stream(streams[number]):
                case.call(ctx, workspace=workspaces[number], **how)
            done.append(case)
    for stream in streams:
        ctx.current_stream().wait_stream(stream)
    for case in done:
        case.check(ctx)
    ctx.barrier()


@pytest.mark.parametrize("own", [True, False], ids=["own workspaces", "the context's"])
@pytest.mark.parametrize(("world", "how"), [(2, FUSED), slow(3, FUSED), slow(2, CONCURRENT)], ids=["2", "3", "streams"])
def test_calls_on_two_streams_do_not_meet(ranks, world, own, how):
    ranks(world).run(body_two_streams, own, how)


def body_mixed(ctx):
    """A fused operation over the context's flags in between, also on another stream, and nothing between the calls."""
    world, device, stream = ctx.get_num_ranks(), ctx.get_device(), ctx.new_stream()
    done = []
    for turn in range(2):
        case = made(ctx, NAMES[turn], (33, 40, 9), (8, 20), seed=turn)
        shards = [random_tensor((20, 9), torch.float32, seed=turn, rank=r, integers=True) for r in range(world)]
        b = torch.ones(9, 33, device=device)
        shard = ctx.as_symmetric(shards[ctx.get_rank()].to(device))
        gathered = torch.full((20 * world, 33), NAN, device=device)
        case.call(ctx, **FUSED)
        with ctx.use_stream(stream):
            ctx.ops.all_gather_matmul(gathered, shard, b, gather_dim=0, algorithm="pull")
        ctx.current_stream().wait_stream(stream)
        done.append((case, gathered, reference.all_gather_matmul(shards, b.cpu(), gather_dim=0), shard))
    for case, gathered, wanted, _ in done:
        case.check(ctx)
        assert torch.equal(gathered.cpu().double(), wanted)
    ctx.barrier()


@pytest.mark.parametrize("world", [2, slow(3)])
def test_flags_are_shared_with_other_operations(ranks, world):
    ranks(world).run(body_mixed)


def body_torch_compile(ctx):
    case = made(ctx, "all_gather", (32, 32, 32), (8, 20))

    def step(a, b, src, c, dst):
        iris.concurrent.gemm.all_gather(ctx, a, b, src, C=c, comm_dst=dst, **FUSED)
        return c * 2

    doubled = torch.compile(step, backend="eager")(case.a, case.b, case.src.tensor, case.c, case.dst.tensor)
    case.check(ctx)
    assert torch.equal(doubled, 2 * case.c)
    ctx.barrier()


@pytest.mark.slow
def test_under_torch_compile(sim):
    sim.run(body_torch_compile, 2)


def body_descriptors(ctx, cases):
    state = ctx.service("concurrent_state")
    for dtype, transpose, sizes, described in cases:
        case = made(ctx, "all_reduce", sizes, (8, 20), dtype, transpose=transpose)
        case.call(ctx, **FUSED)
        assert [c.descriptors for c in state._calls.values()][-1] == described, (dtype, transpose, sizes)
        case.check(ctx)


# Rows of 16 bytes; what descriptors cannot bring.
DESCRIBED = [
    (torch.float16, "NN", (41, 40, 40), True),
    (torch.bfloat16, "NT", (33, 33, 24), True),
    (torch.int8, "NT", (33, 20, 48), True),
    # float32 in full precision is no work for matrix units.
    (torch.float32, "NT", (33, 20, 48), False),
    (torch.float16, "TN", (33, 24, 48), False),
]


def test_operands_by_descriptors(sim, monkeypatch):
    """As on targets that have a unit for it, which the interpreter stands for."""
    monkeypatch.setattr(_target.Target, "descriptors", True)
    sim.run(body_descriptors, 2, DESCRIBED, device="h200")


def body_helpers(ctx, how):
    """Which programs have multiplied, and which have exchanged: a span for each tile."""
    ctx.tracing.enable(1000)
    case = made(ctx, "all_gather", (96, 140, 16), (70, 60))  # 9 tiles of each
    case.call(ctx, **how)
    case.check(ctx)
    events = ctx.tracing.events()
    assert ctx.tracing.dropped_events == 0
    ctx.tracing.disable()
    ctx.barrier()
    kinds, pids = events["event_id"].tolist(), events["pid"].tolist()
    return [
        [pid for kind, pid in zip(kinds, pids, strict=True) if kind == event] for event in (Event.COMPUTE, Event.STORE)
    ]


def spans(sim, **how):
    found = sim.run(body_helpers, 2, {**FUSED, **how}, device="h200")
    for multiplied, exchanged in found:
        assert len(multiplied) == 9
        assert len(exchanged) == 10
    return found


def test_who_has_no_tiles_left_helps(sim):
    """All is done wherever all begin; not more programs than the cap allows exchange; without helpers, none helps."""
    spans(sim, gemm_wgs=3)
    spans(sim, gemm_wgs=0)
    for _, exchanged in spans(sim, gemm_wgs=1, comm_cap=1):
        assert len(set(exchanged)) == 1, exchanged
    for multiplied, exchanged in spans(sim, mode="concurrent", num_wgs=None, gemm_wgs=2, comm_wgs=3):
        assert set(multiplied) <= {0, 1}
        assert set(exchanged) <= {0, 1, 2}
