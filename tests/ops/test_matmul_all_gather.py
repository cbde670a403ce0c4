"""matmul_all_gather against its float64 definition: algorithms, shapes, layouts, dtypes, errors on every rank.

Every rank can make every rank's inputs, so tests know what to expect without communication.
"""

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import iris
from iris import _target
from iris._events import Event
from iris.errors import (
    ArgumentError,
    DeviceMismatch,
    IrisError,
    NotAMemberError,
    NotSymmetricError,
    RankMismatch,
    UnsupportedError,
)
from iris.ops import FusedConfig
from iris.ops.config import HbmBufferConfig
from iris.testing import reference
from iris.testing.numeric import ROUNDING, assert_bitwise_equal, assert_close, random_tensor

# Few programs and large tiles: the interpreter takes its time by statement and by program.
TILES = FusedConfig(32, 128, 32, group_size_m=2, num_sms=3, num_warps=1, num_stages=1)
FUSED, TORCH = {"algorithm": "fused", "config": TILES}, {"algorithm": "torch"}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NAN = float("nan")
both = pytest.mark.parametrize("how", [FUSED, TORCH], ids=["fused", "torch"])


def slow(*values):
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.timeout(400)])


def laid_out(tensor, letter):
    """The same values, with contiguous rows (N) or columns (T)."""
    return tensor if letter == "N" else tensor.t().contiguous().t()


def problem(ctx, M, N, K, dtype=torch.float32, *, b_dtype=None, out_dtype=None, transpose="NN", out="N", seed=0,
            integers=True, members=None):  # fmt: skip
    """Every rank's A (M rows each) and B on the host, the own ones on the device, and an output that nobody wrote."""
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    a = [random_tensor((M, K), dtype, seed=seed, rank=r, integers=integers) for r in range(world)]
    b = [random_tensor((K, N), b_dtype or dtype, seed=seed + 1, rank=r, integers=integers) for r in range(world)]
    members = tuple(members or range(world))
    kind = out_dtype or {torch.int8: torch.int32}.get(dtype, torch.float16 if dtype.itemsize == 1 else dtype)
    shape = (M * len(members), N)
    # No barrier: peers write it when this rank's kernel runs, and not before.
    unwritten = ctx.empty(shape if out == "N" else shape[::-1], dtype=kind).fill_(NAN if kind.is_floating_point else -9)
    return SimpleNamespace(
        all_a=a, all_b=b, a=laid_out(a[rank].to(device, copy=True), transpose[0]),
        b=laid_out(b[rank].to(device, copy=True), transpose[1]), out=unwritten if out == "N" else unwritten.t(),
        members=members,
    )  # fmt: skip


def expected(p, bias=None, activation="none", scales=(None, None)):
    """``bias`` and ``scales`` are every rank's."""
    of = [[every[r] for r in p.members] if every is not None else None for every in (p.all_a, p.all_b, bias, *scales)]
    return reference.matmul_all_gather(*of[:3], activation, *of[3:])


def check(ctx, p, **epilogue):
    """Integers: the exact product is rounded once."""
    ctx.synchronize()
    assert_bitwise_equal(p.out.cpu() + 0, expected(p, **epilogue).to(p.out.dtype) + 0)


def call(ctx, p, bias=None, **given):
    """``bias``: every rank's."""
    own = None if bias is None else bias[ctx.get_rank()].to(ctx.get_device())
    return ctx.ops.matmul_all_gather(p.out, p.a, p.b, own, **given)


def body_shapes(ctx, how, cases):
    for number, (M, N, K) in enumerate(cases):
        p = problem(ctx, M, N, K, torch.float16, seed=number)
        assert call(ctx, p, **how).plan.algorithm == how["algorithm"]
        check(ctx, p)


@pytest.mark.parametrize(
    ("world", "how"),
    [(2, FUSED), (3, FUSED), (4, FUSED), (1, FUSED), (2, TORCH), slow(3, TORCH), slow(4, TORCH), slow(1, TORCH)],
    ids=lambda value: value["algorithm"] if isinstance(value, dict) else str(value),
)
def test_ragged_shapes(ranks, world, how):
    ranks(world).run(body_shapes, how, [(1, 1, 1), (3, 140, 7), (40, 30, 33)])


@pytest.mark.slow
@pytest.mark.timeout(400)
@both
def test_more_shapes(ranks, world, how):
    cases = [*itertools.product((1, 2, 9, 33, 64, 131), (1, 65, 128, 260), (1, 32, 65))]
    ranks(world).run(body_shapes, how, cases, timeout=300)


@pytest.mark.slow
@both
@pytest.mark.parametrize("count", [5, 8])
def test_more_ranks(ranks, count, how):
    ranks(count).run(body_shapes, how, [(5, 40, 9), (40, 130, 12)])


def body_empty(ctx):
    for M, N, K in [(0, 8, 4), (8, 0, 4), (8, 6, 0), (0, 0, 0)]:
        for how in (FUSED, TORCH):
            p = problem(ctx, M, N, K)
            bias = [torch.arange(N, dtype=torch.float32) + r for r in range(ctx.get_num_ranks())]
            call(ctx, p, bias, **how)
            check(ctx, p, bias=bias)


@pytest.mark.parametrize("world", [2, slow(1), slow(3)])
def test_empty_tensors(ranks, world):
    ranks(world).run(body_empty)


def body_dtypes(ctx, how, every_output):
    same = [(d, d) for d in (torch.float32, torch.float16, torch.bfloat16, torch.int8, *FP8)]
    for number, (a_dtype, b_dtype) in enumerate([*same, FP8]):
        outs = [torch.int32] if a_dtype == torch.int8 else [torch.float32, torch.float16, torch.bfloat16]
        for out_dtype in outs if every_output else outs[number % len(outs) :][:1]:
            p = problem(ctx, 33, 50, 24, a_dtype, b_dtype=b_dtype, out_dtype=out_dtype, seed=number)
            if a_dtype == torch.int8 and how == TORCH:
                with pytest.raises(UnsupportedError, match=r"int8.*'fused' can"):
                    call(ctx, p, **how)
                continue
            call(ctx, p, **how)
            check(ctx, p)


@both
@pytest.mark.parametrize(("world", "every_output"), [(2, False), slow(1, True), slow(3, True)])
def test_dtypes(ranks, world, how, every_output):
    """fp8 without scales among them."""
    ranks(world).run(body_dtypes, how, every_output)


def body_random(ctx, how):
    """Within what the rounding of float32 sums and of the result may come to; each activation."""
    M, N, K, world = 40, 90, 64, ctx.get_num_ranks()
    bias = [random_tensor((N,), torch.float32, seed=5, rank=r) for r in range(world)]
    for dtype, activation in zip((torch.float32, torch.float16, torch.bfloat16), ("gelu", "silu", "relu"), strict=True):
        p = problem(ctx, M, N, K, dtype, seed=11, integers=False)
        call(ctx, p, bias, activation=activation, **how)
        ctx.synchronize()
        allowed = 16 * ROUNDING[torch.float32] * K
        assert_close(p.out.cpu(), expected(p, bias, activation), dtype, allowed=(allowed, 1.001 * ROUNDING[dtype]))


@both
@pytest.mark.parametrize("world", [1, slow(2), slow(3)])
def test_random_data_within_tolerance(ranks, world, how):
    ranks(world).run(body_random, how)


def body_layouts(ctx, how):
    for number, (transpose, out) in enumerate((("NN", "N"), ("NT", "T"), ("TN", "N"), ("TT", "T"))):
        p = problem(ctx, 35, 40, 37, torch.float16, transpose=transpose, out=out, seed=number)
        assert f" {transpose}," in call(ctx, p, **how).plan.problem
        check(ctx, p)
    # Views with gaps, all around which nothing may be written.
    p = problem(ctx, 20, 24, 17)
    device, rows = ctx.get_device(), 20 * ctx.get_num_ranks()
    a, b = torch.zeros(20, 34, device=device), torch.zeros(17, 72, device=device)
    a[:, ::2], b[:, 1::3] = p.a, p.b
    whole = ctx.full((2 * rows, 48), 7.0)
    p.a, p.b, p.out = a[:, ::2], b[:, 1::3], whole[::2, 1::2]
    call(ctx, p, **how)
    check(ctx, p)
    assert (whole[1::2] == 7).all(), "written outside the output"
    assert (whole[:, ::2] == 7).all(), "written outside the output"


@both
@pytest.mark.parametrize("world", [2, slow(1), slow(3)])
def test_layouts_and_strided_views(ranks, world, how):
    ranks(world).run(body_layouts, how)


def body_bias(ctx, how):
    """Every rank has a bias of its own, for its rows."""
    M, N, world = 35, 48, ctx.get_num_ranks()
    for shape, dtype in [((N,), torch.float32), ((M, 1), torch.bfloat16), ((M, N), torch.float16)]:
        p = problem(ctx, M, N, 8, torch.float16)
        count = torch.Size(shape).numel()
        bias = [(torch.arange(count) * (r + 3)).remainder(101).reshape(shape).to(dtype) for r in range(world)]
        call(ctx, p, bias, **how)
        check(ctx, p, bias=bias)


@both
@pytest.mark.parametrize("world", [3, slow(1), slow(2)])
def test_bias_of_the_own_rows(ranks, world, how):
    ranks(world).run(body_bias, how)


def body_scales(ctx, how):
    """A rank's own; powers of two, so that nothing is rounded. They are read when the operation runs."""
    world, device = ctx.get_num_ranks(), ctx.get_device()
    scales = [[torch.tensor([0.5 * 2.0**r]) for r in range(world)], [torch.tensor(4.0) for _ in range(world)]]
    bias = [torch.arange(50, dtype=torch.float32) - 20 * r for r in range(world)]
    own = [every[ctx.get_rank()].to(device, copy=True) for every in scales]
    for pair, factor in ((FP8, 1), (FP8[:1] * 2, 2)):
        own[0].mul_(factor)
        everyone = [[scale * factor for scale in scales[0]], scales[1]]
        p = problem(ctx, 36, 50, 24, pair[0], b_dtype=pair[1], out_dtype=torch.float32)
        call(ctx, p, bias, scale_a=own[0], scale_b=own[1], activation="relu", **how)
        check(ctx, p, bias=bias, activation="relu", scales=everyone)


@both
@pytest.mark.parametrize("world", [2, slow(3)])
def test_scales_of_fp8(ranks, world, how):
    ranks(world).run(body_scales, how)


def body_reuse(ctx, how, preamble, async_op):
    """Calls that follow each other without the host in between, inputs changed; an error in between changes nothing."""
    p = problem(ctx, 40, 36, 8)
    workspace = iris.ops.matmul_all_gather_preamble(ctx, p.out, p.a, p.b, **how) if preamble else None
    outs, first = [], p.a.clone()
    for number in range(1, 5):
        p.a.copy_(number * first)
        returned = call(ctx, p, workspace=workspace, async_op=async_op, **how)
        assert workspace is None or returned is workspace
        returned.wait()
        # In stream order: peers write the output of the next call when this rank has begun it.
        outs.append(p.out.clone())
        if number == 3:
            with pytest.raises(ArgumentError):
                call(ctx, p, [torch.zeros(37)] * ctx.get_num_ranks(), workspace=workspace, **how)
    for number, out in enumerate(outs, start=1):
        assert torch.equal(out.cpu().double(), number * expected(p)), number


@both
@pytest.mark.parametrize(
    ("world", "preamble", "async_op"), [(2, True, True), (2, False, False), slow(3, False, True), slow(3, True, False)]
)
def test_one_workspace_many_calls(ranks, world, how, preamble, async_op):
    ranks(world).run(body_reuse, how, preamble, async_op)


def body_mixed(ctx):
    """Another operation over the context's flags in between, also on another stream, and nothing between the calls."""
    world, device = ctx.get_num_ranks(), ctx.get_device()
    stream = ctx.new_stream()
    done = []
    for turn in range(3):
        p = problem(ctx, 20, 33, 9, seed=turn)
        q = problem(ctx, 20, 33, 9, seed=turn + 50)
        shard, gathered = ctx.as_symmetric(q.a), torch.full((20 * world, 33), NAN, device=device)
        call(ctx, p, **FUSED)
        with ctx.use_stream(stream):
            ctx.ops.all_gather_matmul(gathered, shard, q.b, gather_dim=0, algorithm="pull", config=TILES)
        ctx.current_stream().wait_stream(stream)
        done.append((p, q, gathered, shard))
    for p, q, gathered, _ in done:
        check(ctx, p)
        want = reference.all_gather_matmul(q.all_a, q.all_b[ctx.get_rank()], gather_dim=0)
        assert torch.equal(gathered.cpu().double(), want)
    ctx.barrier()


@pytest.mark.parametrize("world", [2, slow(3)])
def test_flags_are_shared_with_other_operations(ranks, world):
    ranks(world).run(body_mixed)


def body_late(ctx):
    """A rank that comes late: the others wait in the kernel, and its output is not touched before."""
    for number in range(2):
        p = problem(ctx, 24, 16, 8, seed=number)
        if ctx.get_rank() == ctx.get_num_ranks() - 1:
            time.sleep(0.1)
            assert p.out.isnan().all()
        call(ctx, p, **FUSED)
        check(ctx, p)


@pytest.mark.parametrize("world", [2, slow(4)])
def test_no_barrier_of_the_caller_is_needed(ranks, world):
    ranks(world).run(body_late)


def body_groups(ctx):
    """Two groups at once, of different problems, in an order that is not that of their ranks."""
    pairs = [(3, 1), (0, 2)]
    groups = [dist.new_group(list(members)) for members in pairs]
    mine = 0 if ctx.get_rank() in pairs[0] else 1
    M = 20 + 15 * mine
    for how in (FUSED, TORCH):
        for group in (groups[mine],) if how == TORCH else (groups[mine], list(pairs[mine])):
            named = isinstance(group, dist.ProcessGroup)
            members = tuple(dist.get_process_group_ranks(group)) if named else pairs[mine]
            # All ranks allocate alike on the heap, so the outputs of both groups are parts of one size.
            whole = ctx.empty(70, 24).fill_(NAN)
            rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
            a = [random_tensor((M, 16), torch.float32, seed=mine, rank=r, integers=True) for r in range(world)]
            b = [random_tensor((16, 24), torch.float32, seed=7, rank=r, integers=True) for r in range(world)]
            p = SimpleNamespace(
                all_a=a, all_b=b, a=a[rank].to(device), b=b[rank].to(device), out=whole[: 2 * M], members=members
            )
            for workspace in (None, iris.ops.matmul_all_gather_preamble(ctx, p.out, p.a, p.b, group=group, **how)):
                p.out.fill_(NAN)
                call(ctx, p, group=group, workspace=workspace, **how)
                check(ctx, p)
                assert whole[2 * M :].isnan().all()
    with pytest.raises(NotAMemberError):
        call(ctx, p, group=groups[1 - mine])
    with pytest.raises(UnsupportedError, match="sequence of ranks"):
        call(ctx, p, group=list(members), algorithm="torch")
    ctx.barrier()


@pytest.mark.parametrize("world", [4])
def test_groups_in_any_order_at_once(ranks, world):
    ranks(world).run(body_groups)


def expect(kind, *parts):
    def verify(function):
        with pytest.raises(kind) as caught:
            function()
        for part in parts:
            assert part in str(caught.value), str(caught.value)

    return verify


def body_errors(ctx):
    world, device = ctx.get_num_ranks(), ctx.get_device()
    op = ctx.ops.matmul_all_gather

    def t(*shape, dtype=torch.float32):
        return torch.zeros(*shape, dtype=dtype, device=device)

    p = problem(ctx, 40, 16, 32)
    out, a, b = p.out, p.a, p.b
    expect(ArgumentError, "A (40, 32)", "B (33, 16)", "this rank's rows")(lambda: op(out, a, t(33, 16)))
    expect(ArgumentError, f"output must have shape ({40 * world}, 16)", "(41, 16)")(lambda: op(t(41, 16), a, b))
    expect(ArgumentError, "float64")(lambda: op(out, a.double(), b.double()))
    expect(ArgumentError, "one dtype")(lambda: op(out, a, b.half()))
    expect(ArgumentError, "int32", "int8")(lambda: op(out, a.to(torch.int8), b.to(torch.int8)))
    expect(ArgumentError, "two dimensions")(lambda: op(out, a.reshape(-1), b))
    expect(ArgumentError, "tensor")(lambda: op(out, a, None))
    expect(ArgumentError, "N=16", "got 40", "bias[:, None]")(lambda: op(out, a, b, t(40)))
    expect(ArgumentError, "broadcast", "(40, 16)")(lambda: op(out, a, b, t(40, 3)))
    expect(ArgumentError, "'sigmoid'", "'gelu'")(lambda: op(out, a, b, activation="sigmoid"))
    expect(ArgumentError, "scale_b is not")(lambda: op(out, a, b, scale_a=t(1)))
    expect(ArgumentError, "fp8")(lambda: op(out, a, b, scale_a=t(1), scale_b=t(1)))
    expect(DeviceMismatch, "meta")(lambda: op(out, a, b.to("meta")))
    # Inputs that lie where the output begins.
    expect(ArgumentError, "output overlaps A")(lambda: op(out, out.as_strided((40, 32), (0, 0)), b))
    expect(ArgumentError, "output overlaps bias")(lambda: op(out, a, b, out[0]))
    expect(ArgumentError, "'magic'", "torch, fused")(lambda: op(out, a, b, algorithm="magic"))
    expect(ArgumentError, "block_size_m", "48")(lambda: op(out, a, b, config=FusedConfig(48)))
    expect(ArgumentError, "FusedConfig", "HbmBufferConfig")(lambda: op(out, a, b, config=HbmBufferConfig()))
    expect(ArgumentError, "takes no config")(lambda: op(out, a, b, algorithm="torch", config=TILES))
    expect(UnsupportedError, "float64", "'torch'")(lambda: op(out.double(), a.double(), b.double(), algorithm="fused"))
    anywhere = t(40 * world, 16)
    if world > 1:
        expect(NotSymmetricError, "output is written by the other ranks", "ctx.zeros")(
            lambda: op(anywhere, a, b, algorithm="fused")
        )
        # PyTorch does it then.
        p.out = anywhere
        assert op(anywhere, a, b).plan.algorithm == "torch"
        check(ctx, p)
        p.out = out
    workspace = op(out, a, b, **FUSED)
    expect(ArgumentError, "shape", str((40 * world, 16, 31)))(
        lambda: op(out, a[:, :31], b[:31], workspace=workspace, **FUSED)
    )
    expect(ArgumentError, "variant is", "torch")(lambda: op(out, a, b, workspace=workspace, algorithm="torch"))
    fixed = iris.ops.matmul_all_gather_preamble(ctx, out, a, b, **FUSED)
    fixed.clear()
    expect(ArgumentError, "not prepared")(lambda: op(out, a, b, workspace=fixed, **FUSED))
    # After every error the context and the operation still work.
    out.fill_(NAN)
    op(out, a, b)
    check(ctx, p)
    # float64 is computed by PyTorch, exactly enough to tell.
    wide = problem(ctx, 5, 6, 7, torch.float64, integers=False)
    bias = [torch.linspace(0, 1, 6, dtype=torch.float64) + r for r in range(world)]
    assert call(ctx, wide, bias, activation="gelu").plan.algorithm == "torch"
    assert (wide.out.cpu() - expected(wide, bias, "gelu")).abs().max() < 1e-12
    ctx.barrier()


@pytest.mark.parametrize("world", [1, 2, slow(3)])
def test_bad_arguments_are_refused_on_every_rank(ranks, world):
    ranks(world).run(body_errors)


def body_disagreement(ctx):
    rank, device = ctx.get_rank(), ctx.get_device()
    p = problem(ctx, 32, 24, 16)
    with pytest.raises(IrisError) as caught:
        call(ctx, p, [torch.zeros(5 if rank == 1 else 24)] * 4)
    if rank == 1:
        assert isinstance(caught.value, ArgumentError)
        assert "N=24" in str(caught.value)
    else:
        assert isinstance(caught.value, RankMismatch)
        assert "rank 1 raised ArgumentError" in str(caught.value)
    op = ctx.ops.matmul_all_gather
    depth = 16 if rank == 0 else 8
    with pytest.raises(RankMismatch, match=r"A is .*32, 16.* on rank 0, .*32, 8"):
        op(p.out, p.a[:, :depth], p.b[:depth])
    with pytest.raises(RankMismatch, match=r"activation is none on rank 0, relu on rank 1"):
        op(p.out, p.a, p.b, activation="relu" if rank else "none")
    # Every rank has as many rows.
    with pytest.raises((RankMismatch, ArgumentError), match=r"A is .*32, 16|must have shape"):
        op(p.out[: 32 * ctx.get_num_ranks()], p.a if rank == 0 else p.a[:16], p.b)
    # An output at another place of the heap on one rank would be written to the wrong place.
    other = ctx.zeros(*p.out.shape)
    with pytest.raises(RankMismatch, match="offset of output"):
        op(other if rank else p.out, p.a, p.b)
    with pytest.raises(RankMismatch, match=r"offset of output in the heap is \d+ on rank 0, not there on rank 1"):
        op(torch.zeros(*p.out.shape, device=device) if rank else p.out, p.a, p.b)
    mine, p.out = p.out, torch.full(p.out.shape, NAN, device=device) if rank else p.out
    call(ctx, p, **TORCH)
    check(ctx, p)
    p.out = mine.fill_(NAN)
    call(ctx, p)
    check(ctx, p)
    ctx.barrier()


@pytest.mark.parametrize("world", [2, slow(3)])
def test_ranks_that_disagree_all_learn_of_it(ranks, world):
    ranks(world).run(body_disagreement)


def body_explain(ctx):
    p = problem(ctx, 32, 32, 32, torch.float16)
    plan = ctx.ops.explain("matmul_all_gather", p.out, p.a, p.b)
    assert p.out.isnan().all(), "explain ran something"
    assert call(ctx, p).plan == plan
    assert (plan.algorithm, plan.source) == ("fused", "heuristic")
    assert plan.reason in str(plan)
    named = ctx.ops.explain("matmul_all_gather", p.out, p.a, p.b, algorithm="torch")
    assert (named.algorithm, named.source, named.config) == ("torch", "user", None)
    given = ctx.ops.explain("matmul_all_gather", p.out, p.a, p.b, None, TILES)
    assert (given.algorithm, given.source, given.config) == ("fused", "user", TILES)
    check(ctx, p)
    ctx.barrier()


def test_explain_tells_what_runs(sim):
    sim.run(body_explain, 2)


def body_torch_compile(ctx):
    p = problem(ctx, 32, 32, 32, torch.float16)

    def step(out, a, b):
        ctx.ops.matmul_all_gather(out, a, b)
        return out * 2

    doubled = torch.compile(step, backend="eager")(p.out, p.a, p.b)
    check(ctx, p)
    assert torch.equal(doubled, 2 * p.out)
    ctx.barrier()


@pytest.mark.slow
def test_under_torch_compile(sim):
    sim.run(body_torch_compile, 2)


def body_descriptors(ctx, cases):
    state = ctx.service("matmul_all_gather_state")
    for dtype, transpose, sizes, described in cases:
        p = problem(ctx, *sizes, dtype, transpose=transpose)
        call(ctx, p, **FUSED)
        assert [c.descriptors for c in state._calls.values()][-1] == described, (dtype, transpose, sizes)
        check(ctx, p)


# Rows of 16 bytes; a chunk of rows that a tile overhangs.
DESCRIBED = [
    (torch.float16, "NN", (41, 40, 40), True),
    (torch.bfloat16, "NT", (33, 33, 24), True),
    (torch.int8, "NT", (33, 20, 48), True),
    # float32 in full precision is no work for matrix units.
    (torch.float32, "NT", (33, 20, 48), False),
    (torch.float16, "TN", (33, 24, 48), False),
]


@pytest.mark.parametrize(("count", "cases"), [(2, DESCRIBED[:4]), slow(3, DESCRIBED)], ids=["2", "3"])
def test_operands_by_descriptors(sim, monkeypatch, count, cases):
    """As on targets that have a unit for it, which the interpreter stands for."""
    monkeypatch.setattr(_target.Target, "descriptors", True)
    sim.run(body_descriptors, count, cases, device="h200")


def body_traced(ctx):
    """A span for each tile that is multiplied, and one for each that is written."""
    ctx.tracing.enable(1000)
    p = problem(ctx, 40, 140, 20)
    call(ctx, p, **FUSED)
    ctx.synchronize()
    kinds = ctx.tracing.events()["event_id"].tolist()
    assert {event: kinds.count(int(event)) for event in (Event.COMPUTE, Event.STORE)} == {
        Event.COMPUTE: 4,
        Event.STORE: 4,
    }
    assert ctx.tracing.dropped_events == 0
    check(ctx, p)


def test_spans_of_a_trace(sim):
    sim.run(body_traced, 2)


def body_seeds(ctx, calls, programs=3):
    """Calls that follow each other; inputs are overwritten in between."""
    config = replace(TILES, block_size_m=16, block_size_n=32, block_size_k=16, num_sms=programs)
    p = problem(ctx, 20, 40, 9, seed=8)
    first = p.a.clone()
    for factor in range(1, calls + 1):
        p.a.copy_(factor * first)
        call(ctx, p, algorithm="fused", config=config)
        assert torch.equal(p.out.double(), factor * expected(p)), factor


@pytest.mark.seeds(6)
@pytest.mark.sim(device="h200")
def test_in_any_order(sim):
    count = (2, 3, 2, 3, 2, 2)[sim.seed % 6]
    sim.run(body_seeds, count, 1 + (sim.seed % 4 == 0))


@pytest.mark.slow
@pytest.mark.seeds(20)
@pytest.mark.sim(device="h200")
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_in_any_order_with_any_ranks(sim, count):
    sim.run(body_seeds, count, 3)


@pytest.mark.sim(device="h200", resident_programs=1)
def test_one_program_at_a_time_does_all(sim):
    """Nobody waits for a program that has not started."""
    sim.run(body_seeds, 3, 2)


@pytest.mark.parametrize("world", [3])
def test_one_program(ranks, world):
    ranks(world).run(body_seeds, 1, 1)
