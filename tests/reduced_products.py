"""Bodies of the tests of matmul + reduce-scatter and matmul + all-reduce, which differ in what a rank gets.

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
from iris._events import Event
from iris.errors import ArgumentError, CaptureError, DeviceMismatch, IrisError, RankMismatch, UnsupportedError
from iris.ops import FusedConfig
from iris.ops.config import HbmBufferConfig
from iris.testing import reference
from iris.testing.numeric import ROUNDING, assert_bitwise_equal, assert_close, random_tensor

SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
# Few programs and large tiles: the interpreter takes its time by statement and by program. One warp, so that a tile is
# added in several pieces.
TILES = FusedConfig(32, 128, 32, group_size_m=2, num_sms=3, num_warps=1, num_stages=1)
ALGORITHMS = {
    "auto": {},
    "torch": {"algorithm": "torch"},
    "fused": {"algorithm": "fused", "config": TILES},
    **{name: {"algorithm": name, "config": TILES} for name in ("two_shot", "atomic", "spinlock", "ring", "one_shot")},
}
# Sums in float32 that move between the ranks: partial products are not rounded.
MOVING = ("atomic", "spinlock", "ring")
KERNELS = {SCATTER: ("fused",), REDUCE: ("two_shot", *MOVING, "one_shot")}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def slow(*values):
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.timeout(400)])


def algorithms(operation, slow_ones=()):
    """The algorithms of an operation as parameters; with ``slow_ones`` those of them not by default."""
    names = ("torch", *KERNELS[operation])
    return pytest.mark.parametrize("algorithm", [slow(n) if n in slow_ones else n for n in names])


# What both kernels of the all-reduce do in the same way, and what PyTorch is trusted with.
ALIKE = ("torch", "one_shot")


def laid_out(tensor, letter):
    """The same values, with contiguous rows (N) or columns (T)."""
    return tensor if letter == "N" else tensor.t().contiguous().t()


def expected(operation, members, a, b, bias=None, activation="none", scales=(None, None), rounded=None, index=0):
    """What the ``index``-th of ``members`` gets, in float64; ``a`` and ``b`` are every rank's."""
    of = [a[r] for r in members], [b[r] for r in members]
    result = getattr(reference, operation)(*of, bias, activation, *scales, rounded=rounded)
    return result[index] if operation == SCATTER else result


def unwritten(ctx, operation, M, N, dtype, members=None, letter="N"):
    """An output that nobody has written: the own rows, or all of them, on the heap."""
    members = members or range(ctx.get_num_ranks())
    value = float("nan") if dtype.is_floating_point else -99
    if operation == REDUCE:
        # No barrier: peers write it when this rank's kernel runs, and not before.
        out = ctx.empty((M, N) if letter == "N" else (N, M), dtype=dtype).fill_(value)
    else:
        chunk = -(-M // len(members))
        first = min(M, list(members).index(ctx.get_rank()) * chunk)
        rows = min(M, first + chunk) - first
        out = torch.full((rows, N) if letter == "N" else (N, rows), value, dtype=dtype, device=ctx.get_device())
    return out if letter == "N" else out.t()


def problem(
    ctx, M, N, K, dtype=torch.float32, *, b_dtype=None, transpose="NN", seed=0, integers=True, operation=SCATTER,
    out_dtype=None, members=None, out=None,
):  # fmt: skip
    """Every rank's A and B on the host, the own ones on the device, and an unwritten output."""
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    a = [random_tensor((M, K), dtype, seed=seed, rank=r, integers=integers) for r in range(world)]
    b = [random_tensor((K, N), b_dtype or dtype, seed=seed + 1, rank=r, integers=integers) for r in range(world)]
    kind = out_dtype or {torch.int8: torch.int32}.get(dtype, torch.float16 if dtype.itemsize == 1 else dtype)
    return SimpleNamespace(
        all_a=a, all_b=b, a=laid_out(a[rank].to(device, copy=True), transpose[0]),
        b=laid_out(b[rank].to(device, copy=True), transpose[1]),
        out=unwritten(ctx, operation, M, N, kind, members) if out is None else out,
        members=members or tuple(range(world)), index=list(members or range(world)).index(rank), algorithm=None,
    )  # fmt: skip


def check(ctx, operation, p, **epilogue):
    """Integers: the partial products are rounded once, unless sums of float32 move, and the exact sum once more."""
    ctx.synchronize()
    rounded = p.out.dtype if p.out.is_floating_point() and p.algorithm not in MOVING else None
    want = expected(operation, p.members, p.all_a, p.all_b, index=p.index, rounded=rounded, **epilogue)
    assert tuple(p.out.shape) == tuple(want.shape)
    assert_bitwise_equal(p.out.cpu() + 0, want.to(p.out.dtype) + 0)


def call(ctx, operation, p, bias=None, **given):
    device = ctx.get_device()
    workspace = getattr(ctx.ops, operation)(p.out, p.a, p.b, None if bias is None else bias.to(device), **given)
    p.algorithm = workspace.plan.algorithm
    return workspace


def body_shapes(ctx, operation, algorithm, cases):
    for number, (M, N, K) in enumerate(cases):
        p = problem(ctx, M, N, K, torch.float16, operation=operation, seed=number)
        workspace = call(ctx, operation, p, **ALGORITHMS[algorithm])
        assert workspace.plan.algorithm == algorithm
        check(ctx, operation, p)
        ctx.barrier()


# One element, fewer rows than ranks, rows that do not come out even, several tiles.
SHAPES = [(1, 1, 1), (3, 140, 7), (70, 30, 33)]
MORE_SHAPES = [*itertools.product((1, 2, 9, 33, 64, 131), (1, 65, 128, 260), (1, 32, 65))]


def body_empty(ctx, operation, names):
    for M, N, K in [(0, 8, 4), (8, 0, 4), (8, 6, 0), (0, 0, 0)]:
        for name in names:
            p = problem(ctx, M, N, K, operation=operation)
            bias = torch.arange(N, dtype=torch.float32)
            call(ctx, operation, p, bias, **ALGORITHMS[name])
            check(ctx, operation, p, bias=bias)
            ctx.barrier()


PAIRS = [(d, d) for d in (torch.float32, torch.float16, torch.bfloat16, torch.int8, *FP8)] + [FP8]


def body_dtypes(ctx, operation, algorithm, every_output):
    for number, (a_dtype, b_dtype) in enumerate(PAIRS):
        outs = [torch.float32, torch.float16, torch.bfloat16]
        if a_dtype == torch.int8:
            outs = [torch.int32]
        for out_dtype in outs if every_output else outs[number % len(outs) :][:1]:
            p = problem(
                ctx, 40, 50, 24, a_dtype, b_dtype=b_dtype, out_dtype=out_dtype, operation=operation, seed=number
            )
            if a_dtype == torch.int8 and algorithm == "torch":
                with pytest.raises(UnsupportedError, match=f"int8.*'{KERNELS[operation][-1]}' can"):
                    call(ctx, operation, p, algorithm="torch")
                continue
            call(ctx, operation, p, **ALGORITHMS[algorithm])
            check(ctx, operation, p)
            ctx.barrier()


def body_random(ctx, operation, algorithm, dtypes):
    """Within what the rounding of float32 sums, partial products and the result may come to."""
    world = ctx.get_num_ranks()
    M, N, K = 40, 90, 64
    bias = random_tensor((N,), torch.float32, seed=5, rank=0)
    for dtype, activation in zip(dtypes, ("gelu", "silu", "relu"), strict=False):
        p = problem(ctx, M, N, K, dtype, seed=11, integers=False, operation=operation)
        call(ctx, operation, p, bias, activation=activation, **ALGORITHMS[algorithm])
        ctx.synchronize()
        want = expected(operation, p.members, p.all_a, p.all_b, bias, activation, index=p.index)
        largest = max((x.double() @ y.double()).abs().max().item() for x, y in zip(p.all_a, p.all_b, strict=True))
        # PyTorch rounds every sum.
        added = 2 * world if algorithm == "torch" else world
        allowed = 1.2 * (added * largest * ROUNDING[dtype] + 8 * ROUNDING[torch.float32] * K * world)
        assert_close(p.out.cpu(), want, dtype, allowed=(allowed, 1.001 * ROUNDING[dtype]))
        ctx.barrier()


def body_layouts(ctx, operation, algorithm):
    for number, transpose in enumerate(("NN", "NT", "TN", "TT")):
        p = problem(ctx, 37, 40, 35, torch.float16, transpose=transpose, operation=operation, seed=number)
        if number % 2:
            p.out = unwritten(ctx, operation, 37, 40, torch.float16, letter="T")
        workspace = call(ctx, operation, p, **ALGORITHMS[algorithm])
        assert f" {transpose}," in workspace.plan.problem
        check(ctx, operation, p)
        ctx.barrier()


def body_strides(ctx, operation, algorithm):
    p = problem(ctx, 20, 24, 17, operation=operation)
    device = ctx.get_device()
    a, b = torch.zeros(20, 34, device=device), torch.zeros(17, 72, device=device)
    a[:, ::2], b[:, 1::3] = p.a, p.b
    rows = p.out.shape[0]
    whole = ctx.full((2 * 20, 2 * 24), 7.0) if operation == REDUCE else torch.full((2 * rows, 48), 7.0, device=device)
    p.a, p.b, p.out = a[:, ::2], b[:, 1::3], whole[::2, 1::2]
    ctx.barrier()
    call(ctx, operation, p, **ALGORITHMS[algorithm])
    check(ctx, operation, p)
    assert (whole[1::2] == 7).all(), "written outside the output"
    assert (whole[:, ::2] == 7).all(), "written outside the output"
    ctx.barrier()


def body_bias(ctx, operation, algorithm):
    M, N = 35, 48
    for shape, dtype in [((N,), torch.float32), ((M, 1), torch.bfloat16), ((M, N), torch.float16)]:
        p = problem(ctx, M, N, 8, torch.float16, operation=operation)
        bias = torch.arange(torch.Size(shape).numel()).remainder(101).reshape(shape).to(dtype)
        call(ctx, operation, p, bias, **ALGORITHMS[algorithm])
        check(ctx, operation, p, bias=bias)
        ctx.barrier()


def body_square_bias(ctx, operation):
    # M == N: a 1-D bias goes along N.
    p = problem(ctx, 32, 32, 8, operation=operation)
    bias = torch.arange(32, dtype=torch.float32)
    call(ctx, operation, p, bias)
    check(ctx, operation, p, bias=bias)
    ctx.barrier()


def body_scales(ctx, operation, algorithm):
    """Powers of two, so that nothing is rounded. They are read when the operation runs."""
    device = ctx.get_device()
    scales = torch.tensor([0.5], device=device), torch.tensor(4.0, device=device)
    bias = torch.arange(50, dtype=torch.float32) - 20
    for pair, factor in ((FP8, 1), (FP8[:1] * 2, 2)):
        scales[0].mul_(factor)
        p = problem(ctx, 36, 50, 24, pair[0], b_dtype=pair[1], out_dtype=torch.float32, operation=operation)
        call(ctx, operation, p, bias, scale_a=scales[0], scale_b=scales[1], activation="relu", **ALGORITHMS[algorithm])
        host = tuple(scale.cpu() for scale in scales)
        check(ctx, operation, p, bias=bias, activation="relu", scales=host)
        ctx.barrier()


def body_reuse(ctx, operation, algorithm, preamble):
    """Calls that follow each other without the host in between, inputs changed; an error in between changes nothing."""
    p = problem(ctx, 40, 36, 8, operation=operation)
    how = ALGORITHMS[algorithm]
    make = getattr(iris.ops, f"{operation}_preamble")
    workspace = make(ctx, p.out, p.a, p.b, **how) if preamble else None
    if preamble:
        assert make(ctx, p.out, p.a, p.b, workspace=workspace, **how) is workspace
    outs = []
    first = p.a.clone()
    for number in range(1, 6):
        p.a.copy_(number * first)
        returned = call(ctx, operation, p, workspace=workspace, **how)
        assert workspace is None or returned is workspace
        # In stream order: peers write the output of the next call when this rank has begun it.
        outs.append(p.out.clone())
        if number == 3:
            with pytest.raises(ArgumentError):
                call(ctx, operation, p, torch.zeros(37), workspace=workspace, **how)
    want = expected(operation, p.members, p.all_a, p.all_b, index=p.index)
    for number, out in enumerate(outs, start=1):
        assert torch.equal(out.cpu().double(), number * want), number
    ctx.barrier()


def body_one_memory(ctx, operation, names):
    """Calls of growing and shrinking shapes over the context's memory, nothing cleared in between."""
    stream = ctx.new_stream()
    turns = [(20, 33, 9), (70, 140, 33), (5, 20, 8), (40, 60, 20), (70, 140, 33)]
    done = []
    problems = [problem(ctx, *sizes, seed=turn, operation=operation) for turn, sizes in enumerate(turns)]
    for turn, p in enumerate(problems):
        how = ALGORITHMS[names[turn % len(names)]]
        if turn == 2:
            # On another stream, which the calls' order follows too.
            with ctx.use_stream(stream):
                call(ctx, operation, p, async_op=True, **how).wait()
            ctx.current_stream().wait_stream(stream)
        else:
            workspace = call(ctx, operation, p, **how)
        done.append(p)
    for p in done:
        check(ctx, operation, p)
    ctx.barrier()
    return workspace.partials.sizes


def body_async(ctx, operation, algorithm):
    for number in range(3):
        p = problem(ctx, 40, 36, 16, operation=operation, seed=number)
        workspace = call(ctx, operation, p, async_op=True, **ALGORITHMS[algorithm])
        workspace.wait()
        check(ctx, operation, p)
        ctx.barrier()


def body_late_rank(ctx, operation, algorithm):
    """A rank that comes late: the others wait in the kernel."""
    for number in range(2):
        p = problem(ctx, 24, 16, 8, operation=operation, seed=number)
        if ctx.get_rank() == ctx.get_num_ranks() - 1:
            time.sleep(0.1)
        call(ctx, operation, p, **ALGORITHMS[algorithm])
        check(ctx, operation, p)


def body_groups(ctx, operation, names):
    """Two groups at once, of different problems, in an order that is not that of their ranks."""
    rank = ctx.get_rank()
    pairs = [(3, 1), (0, 2)]
    groups = [dist.new_group(list(members)) for members in pairs]
    mine = 0 if rank in pairs[0] else 1
    of_pair = pairs[mine]
    make = getattr(iris.ops, f"{operation}_preamble")
    for name in names:
        how = ALGORITHMS[name]
        for group in (groups[mine],) if name == "torch" else (groups[mine], list(of_pair)):
            members = tuple(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else of_pair
            M = 40 + 30 * mine
            # The groups' problems have different sizes; on the heap all ranks allocate the larger.
            out = unwritten(ctx, operation, M if operation == SCATTER else 70, 24, torch.float32, members)[:M]
            p = problem(ctx, M, 24, 16, operation=operation, seed=mine, members=members, out=out)
            workspace = make(ctx, p.out, p.a, p.b, group=group, **how)
            for _ in range(2):
                p.out.fill_(float("nan"))
                ctx.barrier()
                call(ctx, operation, p, group=group, workspace=workspace, **how)
                check(ctx, operation, p)
            if name == "torch":
                call(ctx, operation, p, group=group, **how)
            else:
                expect(ArgumentError, f"{operation}_preamble", "algorithm='torch'", str(list(members)))(
                    lambda p=p, group=group, how=how: call(ctx, operation, p, group=group, **how)
                )
            ctx.barrier()
    expect(ArgumentError, "not a member")(lambda: call(ctx, operation, p, group=groups[1 - mine]))
    if KERNELS[operation][0] in names:
        expect(UnsupportedError, "sequence of ranks")(
            lambda: call(ctx, operation, p, group=list(of_pair), algorithm="torch")
        )
    ctx.barrier()


def expect(kind, *parts):
    def verify(call):
        with pytest.raises(kind) as caught:
            call()
        for part in parts:
            assert part in str(caught.value), str(caught.value)

    return verify


def body_errors(ctx, operation):
    world, device = ctx.get_num_ranks(), ctx.get_device()
    op, module = getattr(ctx.ops, operation), getattr(iris.ops, operation)

    def t(*shape, dtype=torch.float32):
        return torch.zeros(*shape, dtype=dtype, device=device)

    p = problem(ctx, 40, 16, 32, operation=operation)
    out, a, b = p.out, p.a, p.b
    expect(ArgumentError, "A (40, 32)", "B (33, 16)")(lambda: op(out, a, t(33, 16)))
    expect(ArgumentError, "C must have shape", "(41, 16)")(lambda: op(t(41, 16), a, b))
    if operation == SCATTER and world > 1:
        expect(ArgumentError, f"{world} ranks share them as torch.chunk does")(lambda: op(t(40, 16), a, b))
    expect(ArgumentError, "float64")(lambda: op(out, a.double(), b.double()))
    expect(ArgumentError, "one dtype")(lambda: op(out, a, b.half()))
    expect(ArgumentError, "int32", "int8")(lambda: op(out, a.to(torch.int8), b.to(torch.int8)))
    expect(ArgumentError, "two dimensions")(lambda: op(out, a.reshape(-1), b))
    expect(ArgumentError, "tensor")(lambda: op(out, a, None))
    expect(ArgumentError, "N=16", "got 40", "bias[:, None]")(lambda: op(out, a, b, t(40)))
    expect(ArgumentError, "broadcast")(lambda: op(out, a, b, t(40, 3)))
    expect(ArgumentError, "'sigmoid'", "'gelu'")(lambda: op(out, a, b, activation="sigmoid"))
    expect(ArgumentError, "scale_b is not")(lambda: op(out, a, b, scale_a=t(1)))
    expect(ArgumentError, "fp8")(lambda: op(out, a, b, scale_a=t(1), scale_b=t(1)))
    expect(DeviceMismatch, "meta")(lambda: op(out, a, b.to("meta")))
    if out.numel():
        # A matrix that lies where the output begins.
        expect(ArgumentError, "C overlaps A")(lambda: op(out, out.as_strided(tuple(a.shape), (0, 0)), b))
    possible = ", ".join(("torch", *KERNELS[operation]))
    expect(ArgumentError, "'magic'", possible)(lambda: op(out, a, b, algorithm="magic"))
    other = KERNELS[REDUCE if operation == SCATTER else SCATTER][0]
    expect(ArgumentError, repr(other), possible)(lambda: op(out, a, b, algorithm=other))
    expect(ArgumentError, "block_size_m", "48")(lambda: op(out, a, b, config=FusedConfig(48)))
    expect(ArgumentError, "FusedConfig", "HbmBufferConfig")(lambda: op(out, a, b, config=HbmBufferConfig()))
    expect(ArgumentError, "takes no config")(lambda: op(out, a, b, algorithm="torch", config=TILES))
    expect(ArgumentError, "async_op", "Tensor", "bias=")(lambda: module(ctx, out, a, b, t(16)))
    expect(ArgumentError, "operation", SCATTER, REDUCE)(lambda: ctx.ops.explain("nothing"))
    how = ALGORITHMS[KERNELS[operation][0]]
    workspace = op(out, a, b, **how)
    expect(ArgumentError, "shape", str((40, 16, 31)))(lambda: op(out, a[:, :31], b[:31], workspace=workspace, **how))
    expect(ArgumentError, "variant is", "torch")(lambda: op(out, a, b, workspace=workspace, algorithm="torch"))
    # A workspace of its own has the memory that it was made with.
    preamble = getattr(iris.ops, f"{operation}_preamble")
    narrow = unwritten(ctx, operation, 40, 16, torch.bfloat16)
    a16, b16 = a.bfloat16(), b.bfloat16()
    fixed = preamble(ctx, narrow, a16, b16, **how)
    wide = unwritten(ctx, operation, 40, 16, torch.float32)
    expect(ArgumentError, "bytes of partial products", "C's dtype")(lambda: op(wide, a16, b16, workspace=fixed, **how))
    fixed.clear()
    expect(ArgumentError, "not prepared")(lambda: op(narrow, a16, b16, workspace=fixed, **how))
    # After every error the context and the operation still work.
    ctx.barrier()
    op(out, a, b)
    check(ctx, operation, p)
    ctx.barrier()


def body_disagreement(ctx, operation):
    rank, device = ctx.get_rank(), ctx.get_device()
    p = problem(ctx, 32, 24, 16, operation=operation)
    bias = torch.zeros(5 if rank == 1 else 24)
    with pytest.raises(IrisError) as caught:
        call(ctx, operation, p, bias)
    if rank == 1:
        assert isinstance(caught.value, ArgumentError)
        assert "N=24" in str(caught.value)
    else:
        assert isinstance(caught.value, RankMismatch)
        assert "rank 1 raised ArgumentError" in str(caught.value)
    op = getattr(ctx.ops, operation)
    depth = 16 if rank == 0 else 8
    with pytest.raises(RankMismatch, match=r"A is .*32, 16.* on rank 0, .*32, 8"):
        op(p.out, p.a[:, :depth], p.b[:depth])
    with pytest.raises(RankMismatch, match=r"activation is none on rank 0, relu on rank 1"):
        op(p.out, p.a, p.b, activation="relu" if rank else "none")
    if operation == REDUCE:
        # C at another place of the heap on one rank would be written to the wrong place.
        other = ctx.zeros(32, 24)
        with pytest.raises(RankMismatch, match="offset of C"):
            op(other if rank else p.out, p.a, p.b)
        with pytest.raises(RankMismatch, match=r"offset of C in the heap is \d+ on rank 0, not there on rank 1"):
            op(torch.zeros(32, 24, device=device) if rank else p.out, p.a, p.b)
        # With one_shot nobody writes it.
        mine = p.out
        p.out = torch.zeros(32, 24, device=device) if rank else mine
        op(p.out, p.a, p.b, **ALGORITHMS["one_shot"])
        check(ctx, operation, p)
        p.out = mine
    ctx.barrier()
    call(ctx, operation, p)
    check(ctx, operation, p)
    ctx.barrier()


def body_explain(ctx, operation):
    p = problem(ctx, 32, 32, 32, torch.float16, operation=operation)
    plan = ctx.ops.explain(operation, p.out, p.a, p.b)
    assert p.out.isnan().all(), "explain ran something"
    workspace = call(ctx, operation, p)
    assert workspace.plan == plan
    assert (plan.algorithm, plan.source) == (KERNELS[operation][0], "heuristic")
    assert plan.reason in str(plan)
    assert "gather_dim" not in plan.problem
    named = ctx.ops.explain(operation, p.out, p.a, p.b, algorithm="torch")
    assert (named.algorithm, named.source, named.config) == ("torch", "user", None)
    given = ctx.ops.explain(operation, p.out, p.a, p.b, None, TILES)
    assert (given.algorithm, given.source, given.config) == (KERNELS[operation][0], "user", TILES)
    ctx.barrier()


def body_bitwise(ctx, operation, algorithm):
    """Call after call the same bits; of an all-reduce also on every rank. The sums depend on the order of additions.

    What is added as it comes has the same bits on every rank only.
    """
    how = ALGORITHMS[algorithm]
    results = []
    for _ in range(2):
        p = problem(ctx, 50, 60, 40, seed=9, integers=False, operation=operation)
        # Another number of programs adds in the same order.
        if "config" in how:
            how = how | {"config": replace(how["config"], num_sms=2 + len(results))}
        call(ctx, operation, p, **how)
        ctx.synchronize()
        results.append(p.out.cpu().clone())
        ctx.barrier()
    if algorithm not in ("atomic", "spinlock"):
        assert_bitwise_equal(results[1], results[0])
    everyone = ctx.exchange.all_gather("test", results[0])
    if operation == REDUCE:
        for theirs in everyone:
            assert_bitwise_equal(theirs, results[0])
    # That there is something to depend on it: backwards it is another sum.
    backwards = sum((x @ y for x, y in reversed(list(zip(p.all_a, p.all_b, strict=True)))), torch.zeros(50, 60))
    forwards = sum((x @ y for x, y in zip(p.all_a, p.all_b, strict=True)), torch.zeros(50, 60))
    assert ctx.get_num_ranks() < 3 or not torch.equal(backwards, forwards)


def body_torch_compile(ctx, operation):
    def step(out, a, b, bias):
        getattr(ctx.ops, operation)(out, a, b, bias)
        return out * 2

    compiled = torch.compile(step, backend="eager")
    for M in (8, 24):
        p = problem(ctx, M, 12, 16, operation=operation)
        bias = torch.arange(12.0)
        doubled = compiled(p.out, p.a, p.b, bias.to(ctx.get_device()))
        check(ctx, operation, p, bias=bias)
        assert torch.equal(doubled, 2 * p.out)
        ctx.barrier()


def body_capture(ctx, operation):
    """A graph takes addresses, so what has to grow is refused."""
    p = problem(ctx, 32, 32, 8, operation=operation)
    ctx.capturing = lambda stream=None: True
    expect(CaptureError, "grow", "before the capture")(lambda: call(ctx, operation, p, **ALGORITHMS["auto"]))
    del ctx.capturing
    call(ctx, operation, p)
    check(ctx, operation, p)
    ctx.barrier()


def body_heap(ctx, operation):
    """The context's memory grows to the largest call; what it had before goes back to the heap."""
    how = ALGORITHMS[KERNELS[operation][0]]
    small, large = problem(ctx, 9, 20, 8, operation=operation), problem(ctx, 70, 140, 8, operation=operation)
    first = call(ctx, operation, small, **how)
    held = first.aux_buffer.numel()
    before = ctx.heap.used_bytes
    second = call(ctx, operation, large, **how)
    assert first.aux_buffer is None
    grown = second.aux_buffer.numel()
    assert grown > held
    assert before + grown - held <= ctx.heap.used_bytes < before + grown - held + 4096
    settled = ctx.heap.used_bytes
    for p in (small, large, small):
        assert call(ctx, operation, p, **how).partials is second.partials
        assert ctx.heap.used_bytes == settled
        check(ctx, operation, p)
    own = getattr(iris.ops, f"{operation}_preamble")(ctx, small.out, small.a, small.b, **how)
    assert own.partials.sizes[0] == held
    assert ctx.heap.used_bytes > settled
    own.clear()
    ctx.barrier()
    assert ctx.heap.used_bytes == settled
    ctx.barrier()


def body_traced(ctx, operation, algorithm):
    """A span for each tile that is multiplied, and for each that is added the wait and the sum."""
    world, (M, N, K) = ctx.get_num_ranks(), (70, 140, 20)
    ctx.tracing.enable(1000)
    p = problem(ctx, M, N, K, operation=operation)
    flags = call(ctx, operation, p, **ALGORITHMS[algorithm]).partials.sizes[1]
    ctx.synchronize()
    kinds = ctx.tracing.events()["event_id"].tolist()
    chunk = -(-M // world) if operation == SCATTER else M
    tiles = -(-chunk // TILES.block_size_m) * -(-N // TILES.block_size_n)
    multiplied = tiles * (world if operation == SCATTER else 1)
    owned = -(-tiles // world) if algorithm == "two_shot" else tiles
    assert algorithm in MOVING or flags == max(1, world - 1) * owned
    # The tiles that a rank owns; or whose sums begin there.
    own = len(range(ctx.get_rank(), tiles, world))
    added = own if algorithm == "two_shot" else tiles
    awaited = {"atomic": 0, "spinlock": 0, "ring": tiles - own}.get(algorithm, added)
    found = {event: kinds.count(int(event)) for event in (Event.COMPUTE, Event.WAIT, Event.REDUCE)}
    assert found == {Event.COMPUTE: multiplied, Event.WAIT: awaited, Event.REDUCE: added}
    assert ctx.tracing.dropped_events == 0
    check(ctx, operation, p)
    ctx.barrier()


def body_rounded_once(ctx):
    """Products of 257, which is no bfloat16: the sum of 3 is 771 and so 772, but 768 of products that were rounded."""
    world, device = ctx.get_num_ranks(), ctx.get_device()
    a = torch.tensor([256.0, 1.0], dtype=torch.bfloat16, device=device).repeat(20, 1)
    b = torch.ones(2, 24, dtype=torch.bfloat16, device=device)
    for name in MOVING:
        out = unwritten(ctx, REDUCE, 20, 24, torch.bfloat16)
        ctx.ops.matmul_all_reduce(out, a, b, algorithm=name)
        ctx.synchronize()
        assert_bitwise_equal(out.cpu(), torch.full((20, 24), 257.0 * world).bfloat16())
    ctx.barrier()


def body_many_calls(ctx, algorithm, calls, operation=REDUCE):
    """Calls that follow each other in one workspace, with changed inputs, the results kept for later."""
    config = replace(TILES, block_size_m=16, block_size_n=32, block_size_k=16)
    p = problem(ctx, 40, 40, 9, operation=operation, seed=8)
    how = {"algorithm": algorithm, "config": config}
    workspace = getattr(iris.ops, f"{operation}_preamble")(ctx, p.out, p.a, p.b, **how)
    first, sums = p.a.clone(), []
    for number in range(calls):
        p.a.copy_((number % 7 - 3) * first)
        call(ctx, operation, p, workspace=workspace, **how)
        sums.append(p.out.clone())
    ctx.synchronize()
    want = expected(operation, p.members, p.all_a, p.all_b, index=p.index)
    for number, out in enumerate(sums):
        assert torch.equal(out.cpu().double(), (number % 7 - 3) * want), number
    ctx.barrier()


def body_seeds(ctx, operation, algorithm, M, calls):
    """Calls that follow each other; inputs are overwritten in between."""
    config = replace(TILES, block_size_m=16, block_size_n=32, block_size_k=16, num_sms=3)
    p = problem(ctx, M, 20, 9, operation=operation, seed=8)
    want = expected(operation, p.members, p.all_a, p.all_b, index=p.index)
    first = p.a.clone()
    for factor in range(1, calls + 1):
        p.a.copy_(factor * first)
        call(ctx, operation, p, algorithm=algorithm, config=config)
        assert torch.equal(p.out.double(), factor * want), factor


def body_shapes_in_turn(ctx, operation, names):
    """Calls of changing shapes and algorithms over memory that does not grow, which the host does not wait for."""
    turns = [(24, 40, 9), (5, 20, 8), (24, 40, 9), (33, 20, 20), (24, 40, 9), (5, 20, 8), (9, 60, 4)]
    config = replace(TILES, block_size_m=16, block_size_n=32, num_sms=2)
    problems = [problem(ctx, *sizes, seed=turn, operation=operation) for turn, sizes in enumerate(turns)]
    for turn, p in enumerate(problems):
        call(ctx, operation, p, algorithm=names[turn % len(names)], config=config)
    for p in problems:
        check(ctx, operation, p)
    ctx.barrier()


def body_schedule(ctx, operation, algorithm, dtype, config, sizes, splits, calls=2):
    """Calls that use the same words again; ``splits``: into how many pieces the last tiles are divided."""
    state = ctx.service("matmul_reduce_state")
    p = problem(ctx, *sizes, dtype, operation=operation, seed=4)
    bias = None if dtype == torch.int8 else torch.arange(sizes[1], dtype=torch.float32) % 50
    for _ in range(calls):
        call(ctx, operation, p, bias, algorithm=algorithm, config=config)
        check(ctx, operation, p, bias=bias)
        p.out.fill_(-99)
        ctx.barrier()
    found = {c.schedule.splits for c in state._calls.values()}
    assert found == {splits} if isinstance(splits, int) else found <= splits
    ctx.barrier()


def body_one_program(ctx, operation, algorithm, sizes):
    """One program multiplies, and adds."""
    p = problem(ctx, *sizes, operation=operation)
    call(ctx, operation, p, algorithm=algorithm, config=replace(TILES, num_sms=1, block_size_m=16, block_size_n=32))
    check(ctx, operation, p)
    ctx.barrier()


def body_descriptors(ctx, operation, algorithm, cases):
    """As on targets that have a unit for it, which the interpreter stands for."""
    state = ctx.service("matmul_reduce_state")
    for dtype, transpose, sizes, described in cases:
        p = problem(ctx, *sizes, dtype, transpose=transpose, operation=operation)
        call(ctx, operation, p, **ALGORITHMS[algorithm])
        assert [c.schedule.descriptors for c in state._calls.values()][-1] == described, (dtype, transpose, sizes)
        check(ctx, operation, p)
        ctx.barrier()


# Rows of 16 bytes; a chunk of rows that a tile overhangs.
DESCRIBED = [
    (torch.float16, "NN", (41, 40, 40), True),
    (torch.bfloat16, "NT", (70, 33, 24), True),
    (torch.int8, "NT", (33, 20, 48), True),
    # float32 in full precision is no work for matrix units.
    (torch.float32, "NT", (33, 20, 48), False),
    (torch.int8, "NN", (33, 32, 48), False),
    (torch.float16, "TN", (33, 24, 48), False),
    (torch.float16, "NN", (33, 24, 7), False),
]
