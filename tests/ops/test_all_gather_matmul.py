"""all_gather_matmul against its float64 definition: algorithms, shapes, layouts, dtypes, errors on every rank."""

import itertools
import os
from dataclasses import replace

import pytest
import torch

import iris
from gathered_products import (
    ALGORITHMS,
    COPIED,
    FETCHED,
    SLOW,
    SMALL,
    STAGED,
    assert_same,
    check,
    expect,
    problem,
    refuse_strided,
    slow,
    staged_parameter,
)
from iris import _target
from iris.errors import ArgumentError, DeviceMismatch, IrisError, NotSymmetricError, RankMismatch, UnsupportedError
from iris.ops import FusedConfig
from iris.ops._all_gather_matmul_call import checked
from iris.testing.numeric import assert_bitwise_equal, random_tensor, tolerance
from iris.testing.reference import all_gather_matmul as reference


def body_shapes(ctx, algorithm, cases):
    for (M, N, K), gather_dim in cases:
        out, a, b, shards, b_host = problem(ctx, M, N, K, torch.bfloat16, gather_dim=gather_dim, integers=True)
        # Sums of integers in [-2, 2] stay exact in float32 and are rounded once.
        ctx.ops.all_gather_matmul(out, a, b, **ALGORITHMS[algorithm], gather_dim=gather_dim)
        ctx.synchronize()
        want = reference(shards, b_host, None, gather_dim).to(torch.bfloat16)
        assert_same(out.cpu(), want)
        ctx.barrier()


@pytest.mark.parametrize("algorithm", ["auto", "pull", "torch", *SLOW])
def test_ragged_shapes(ranks, world, algorithm):
    sizes = [(1, 1), (7, 96), (100, 33), (65, 70)]
    depths = [1 * world, 16 * world, 33 * world]
    cases = [((m, n, k), 1) for (m, n), k in itertools.product(sizes, depths)]
    cases += [((m * world, n, k), 0) for (m, n), k in zip(sizes, [5, 33, 64, 31], strict=True)]
    ranks(world).run(body_shapes, algorithm, cases)


def body_dtypes(ctx, pair, algorithm):
    a_dtype, b_dtype = pair
    how = ALGORITHMS[algorithm]
    outs = [torch.int32] if a_dtype == torch.int8 else [torch.float32, torch.float16, torch.bfloat16]
    for out_dtype in outs:
        out, a, b, shards, b_host = problem(
            ctx, 40, 50, 24 * ctx.get_num_ranks(), a_dtype, b_dtype=b_dtype, out_dtype=out_dtype, integers=True
        )
        ctx.ops.all_gather_matmul(out, a, b, **how)
        ctx.synchronize()
        want = reference(shards, b_host).to(out_dtype)
        assert_same(out.cpu(), want)
        ctx.barrier()


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PAIRS = [(d, d) for d in (torch.float32, torch.float16, torch.bfloat16, torch.int8, *FP8)] + [FP8]


@pytest.mark.parametrize("algorithm", ["pull", "torch", *SLOW])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(str(d).removeprefix("torch.") for d in pair))
def test_dtypes(ranks, world, pair, algorithm):
    if pair[0] == torch.int8 and algorithm == "torch":
        pytest.skip(
            "PyTorch multiplies no int8 matrices into int32; test_named_algorithm_that_cannot covers the refusal"
        )
    ranks(world).run(body_dtypes, pair, algorithm)


def body_random(ctx, dtype, algorithm):
    out, a, b, shards, b_host = problem(ctx, 70, 90, 64 * ctx.get_num_ranks(), dtype, seed=11)
    bias = random_tensor((90,), torch.float32, seed=5, rank=0)
    ctx.ops.all_gather_matmul(out, a, b, bias.to(ctx.get_device()), **ALGORITHMS[algorithm])
    check(ctx, out, shards, b_host, bias)


@pytest.mark.parametrize("algorithm", ["pull", "torch", *SLOW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_random_data_within_tolerance(ranks, world, dtype, algorithm):
    ranks(world).run(body_random, dtype, algorithm)


def body_transposes(ctx, algorithm):
    for transpose, gather_dim in itertools.product(("NN", "NT", "TN", "TT"), (0, 1)):
        world = ctx.get_num_ranks()
        M, N, K = 34 * world, 45, 48 * world
        out, a, b, shards, b_host = problem(
            ctx, M, N, K, torch.float16, transpose=transpose, gather_dim=gather_dim, integers=True
        )
        column_major = torch.full((N, M), float("nan"), dtype=torch.float16, device=ctx.get_device()).t()
        if algorithm == "copy_engine" and transpose[0] == "T" and world > 1:
            refuse_strided(ctx, out, a, b, gather_dim)
            continue
        for target in (out, column_major):
            workspace = ctx.ops.all_gather_matmul(target, a, b, **ALGORITHMS[algorithm], gather_dim=gather_dim)
            check(ctx, target, shards, b_host, None, gather_dim, integers=True)
        assert f" {transpose}," in workspace.plan.problem
        ctx.barrier()


@pytest.mark.parametrize("algorithm", ["pull", "torch", *SLOW])
@pytest.mark.parametrize("world", [1, 2, slow(3), slow(4)])
def test_all_four_transposes(ranks, world, algorithm):
    ranks(world).run(body_transposes, algorithm)


def body_strides(ctx, algorithm):
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    M, N, K_local = 20, 24, 17
    whole = [random_tensor((M, 2 * K_local), torch.float16, seed=1, rank=r, integers=True) for r in range(world)]
    a = ctx.as_symmetric(whole[rank].to(device))[:, ::2]
    b_whole = random_tensor((K_local * world, 3 * N), torch.float16, seed=2, rank=0, integers=True)
    b = b_whole.to(device)[:, 1::3]
    out = torch.full((2 * M, 2 * N), 7.0, dtype=torch.float16, device=device)
    if algorithm == "copy_engine" and world > 1:
        refuse_strided(ctx, torch.full((M, N), float("nan"), dtype=torch.float16, device=device), a, b)
        a = ctx.as_symmetric(a.contiguous())
    ctx.ops.all_gather_matmul(out[::2, 1::2], a, b, **ALGORITHMS[algorithm])
    check(ctx, out[::2, 1::2], [w[:, ::2] for w in whole], b_whole[:, 1::3], integers=True)
    assert (out[1::2] == 7).all(), "written outside the output"
    assert (out[:, ::2] == 7).all(), "written outside the output"
    ctx.barrier()


@pytest.mark.parametrize("algorithm", ["pull", "torch", *SLOW])
def test_strided_views(ranks, world, algorithm):
    ranks(world).run(body_strides, algorithm)


def body_odd_offset(ctx, algorithm):
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    M, K_local, N = 33, 16, 32
    shards = [random_tensor((M, K_local), torch.bfloat16, seed=4, rank=r, integers=True) for r in range(world)]
    a = ctx.zeros(M * K_local + 1, dtype=torch.bfloat16)[1:].view(M, K_local)
    a.copy_(shards[rank])
    b = random_tensor((K_local * world, N), torch.bfloat16, seed=5, rank=0, integers=True)
    out = torch.full((M, N), float("nan"), dtype=torch.float32, device=device)
    ctx.ops.all_gather_matmul(out, a, b.to(device), **ALGORITHMS[algorithm])
    check(ctx, out, shards, b, integers=True)
    ctx.barrier()


@pytest.mark.parametrize("algorithm", ["pull", *SLOW])
def test_a_view_at_an_odd_offset(ranks, world, algorithm):
    ranks(world).run(body_odd_offset, algorithm)


def body_bias(ctx, algorithm, gather_dim):
    world, device = ctx.get_num_ranks(), ctx.get_device()
    M, N = 16 * world, 48
    for shape, dtype in [
        ((N,), torch.float32),
        ((N,), torch.float16),
        ((M, 1), torch.float32),
        ((1, N), torch.bfloat16),
        ((M, N), torch.float16),
        ((1, 1), torch.float32),
    ]:
        out, a, b, shards, b_host = problem(ctx, M, N, 8 * world, torch.float16, gather_dim=gather_dim, integers=True)
        bias = torch.arange(torch.Size(shape).numel()).remainder(101).reshape(shape).to(dtype)
        ctx.ops.all_gather_matmul(out, a, b, bias.to(device), **ALGORITHMS[algorithm], gather_dim=gather_dim)
        check(ctx, out, shards, b_host, bias, gather_dim, integers=True)
        ctx.barrier()


@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("algorithm", ["pull", "torch", *SLOW])
def test_bias_axes(ranks, world, algorithm, gather_dim):
    ranks(world).run(body_bias, algorithm, gather_dim)


def body_square_bias(ctx):
    # M == N: a 1-D bias goes along N.
    out, a, b, shards, b_host = problem(ctx, 32, 32, 8 * ctx.get_num_ranks(), torch.float32, integers=True)
    bias = torch.arange(32, dtype=torch.float32)
    ctx.ops.all_gather_matmul(out, a, b, bias.to(ctx.get_device()))
    check(ctx, out, shards, b_host, bias, integers=True)


def test_bias_of_a_square_output_goes_along_the_columns(ranks):
    ranks(2).run(body_square_bias)


def body_empty(ctx):
    world, device = ctx.get_num_ranks(), ctx.get_device()
    for M, N, K_local in [(0, 8, 4), (8, 0, 4), (8, 6, 0), (0, 0, 0)]:
        for how in ALGORITHMS.values():
            a, b = ctx.zeros(M, K_local), torch.zeros(K_local * world, N, device=device)
            out = torch.full((M, N), float("nan"), device=device)
            ctx.ops.all_gather_matmul(out, a, b, **how)
            ctx.synchronize()
            assert torch.equal(out.cpu(), torch.zeros(M, N)), (M, N, K_local)


def test_empty_sizes(ranks, world):
    ranks(world).run(body_empty)


def body_reuse(ctx, algorithm):
    """One workspace, calls that follow each other without the host in between, A overwritten after each."""
    world, rank, device = ctx.get_num_ranks(), ctx.get_rank(), ctx.get_device()
    M, N, K_local = 40, 36, 32
    how = ALGORITHMS[algorithm]
    a, b = ctx.zeros(M, K_local, dtype=torch.float32), torch.ones(K_local * world, N, device=device)
    workspace = iris.ops.all_gather_matmul_preamble(ctx, a, b, **how)
    outs = []
    for call in range(1, 6):
        a.fill_(rank + call)
        out = torch.full((M, N), float("nan"), device=device)
        returned = ctx.ops.all_gather_matmul(out, a, b, workspace=workspace, **how)
        assert returned is workspace
        outs.append(out)
        if call == 3:
            with pytest.raises(ArgumentError):
                ctx.ops.all_gather_matmul(out, a, b, torch.zeros(N + 1, device=device), **how)
    ctx.synchronize()
    for call, out in enumerate(outs, start=1):
        want = K_local * sum(r + call for r in range(world))
        assert (out == want).all(), f"call {call}: wanted {want}, got {out.unique().tolist()}"
    ctx.barrier()


@pytest.mark.parametrize("algorithm", ["pull", "torch", *SLOW])
def test_one_workspace_many_calls(ranks, world, algorithm):
    ranks(world).run(body_reuse, algorithm)


def body_ownership(ctx):
    out1, a, b, *_ = problem(ctx, 20, 20, 16 * ctx.get_num_ranks(), torch.float32, integers=True)
    out2 = torch.full_like(out1, float("nan"))
    ctx.ops.all_gather_matmul(out1, a, b)
    first = out1.clone()
    ctx.synchronize()
    ctx.barrier()
    a.mul_(2)
    ctx.ops.all_gather_matmul(out2, a, b)
    ctx.synchronize()
    assert torch.equal(out1, first)
    assert torch.equal(out2, 2 * first)


def test_an_earlier_result_stays(ranks):
    ranks(2).run(body_ownership)


def body_async(ctx, algorithm):
    how = ALGORITHMS[algorithm]
    out, a, b, shards, b_host = problem(ctx, 40, 36, 32 * ctx.get_num_ranks(), torch.float32, integers=True)
    for _ in range(3):
        out.fill_(float("nan"))
        workspace = ctx.ops.all_gather_matmul(out, a, b, async_op=True, **how)
        workspace.wait()
        check(ctx, out, shards, b_host, integers=True)
    ctx.barrier()


@pytest.mark.parametrize("algorithm", ["pull", "torch", *SLOW])
def test_async_op_then_wait(ranks, world, algorithm):
    ranks(world).run(body_async, algorithm)


def body_late_rank(ctx, late, algorithm):
    """A rank that comes late: the others wait in the kernel and read what it wrote at the last moment."""
    import time

    world, rank, device = ctx.get_num_ranks(), ctx.get_rank(), ctx.get_device()
    a, b = ctx.zeros(24, 16), torch.ones(16 * world, 8, device=device)
    out = torch.empty(24, 8, device=device)
    how = ALGORITHMS[algorithm]
    ctx.ops.all_gather_matmul(out, a, b, **how)
    for call in range(3):
        if rank == late % world:
            time.sleep(0.15)
        a.fill_(rank + call)
        out.fill_(float("nan"))
        ctx.ops.all_gather_matmul(out, a, b, **how)
        ctx.synchronize()
        assert (out == 16 * sum(r + call for r in range(world))).all()


@pytest.mark.parametrize("algorithm", ["pull", *SLOW])
def test_no_barrier_of_the_caller_is_needed(ranks, world, algorithm):
    ranks(world).run(body_late_rank, world - 1, algorithm)


def body_groups(ctx, algorithm):
    import torch.distributed as dist

    rank, device = ctx.get_rank(), ctx.get_device()
    pairs = [[3, 1], [0, 2]]
    groups = [dist.new_group(ranks) for ranks in pairs]
    mine = 0 if rank in pairs[0] else 1
    a, out = ctx.zeros(8, 4), torch.empty(8, 6, device=device)
    a.fill_(rank + 1)
    b = torch.arange(8.0, device=device)[:, None].expand(8, 6).contiguous()
    for group in (groups[mine], pairs[mine]):
        out.fill_(float("nan"))
        ctx.ops.all_gather_matmul(out, a, b, group=group, **ALGORITHMS[algorithm])
        ctx.synchronize()
        # Shards follow the order of the group: rank 3's columns meet B's first rows.
        order = (
            list(dist.get_process_group_ranks(groups[mine])) if isinstance(group, dist.ProcessGroup) else pairs[mine]
        )
        want = (order[0] + 1) * (0 + 1 + 2 + 3) + (order[1] + 1) * (4 + 5 + 6 + 7)
        assert (out == want).all(), (group, want, out.unique())
    with pytest.raises(ArgumentError, match="not a member"):
        ctx.ops.all_gather_matmul(out, a, b, group=groups[1 - mine])
    ctx.barrier()


@pytest.mark.parametrize("algorithm", ["pull", *SLOW])
def test_groups_in_any_order_at_once(ranks, algorithm):
    ranks(4).run(body_groups, algorithm)


def body_errors(ctx):
    world, device = ctx.get_num_ranks(), ctx.get_device()
    op = ctx.ops.all_gather_matmul

    def t(*shape, dtype=torch.float32):
        return torch.zeros(*shape, dtype=dtype, device=device)

    a, b, out = ctx.zeros(64, 32), t(32 * world, 16), t(64, 16)
    if world > 1:
        rows = ctx.zeros(64, 32 * world)
        expect(ValueError, "[M, K/world_size]", f"K_local={32 * world}", f"world_size={world}", "gather_dim=0")(
            lambda: op(t(64 * world, 16), rows, b)
        )
        expect(NotSymmetricError, "A_sharded", "as_symmetric")(lambda: op(out, t(64, 32), b))
    expect(ArgumentError, "output_tensor", "(64, 16)", "(63, 16)")(lambda: op(t(63, 16), a, b))
    expect(ArgumentError, "float64")(lambda: op(out, ctx.zeros(64, 32, dtype=torch.float64), b.double()))
    expect(ArgumentError, "one dtype")(lambda: op(out, a, b.half()))
    expect(ArgumentError, "int32", "int8")(
        lambda: op(t(64, 16, dtype=torch.int8), ctx.zeros(64, 32, dtype=torch.int8), b.to(torch.int8))
    )
    expect(ArgumentError, "two dimensions")(lambda: op(out, a.view(-1), b))
    expect(ArgumentError, "tensor")(lambda: op(out, a, None))
    expect(ArgumentError, "N=16", "got 64", "bias[:, None]")(lambda: op(out, a, b, t(64)))
    expect(ArgumentError, "N=16", "got 3")(lambda: op(out, a, b, t(3)))
    expect(ArgumentError, "broadcast")(lambda: op(out, a, b, t(64, 3)))
    expect(ArgumentError, "gather_dim")(lambda: op(out, a, b, gather_dim=2))
    expect(DeviceMismatch, "meta")(lambda: op(out, a, b.to("meta")))
    expect(ArgumentError, "overlaps A_sharded")(lambda: op(a[:, :16], a, b))
    expect(ArgumentError, "algorithm", "torch, pull, hbm_buffer, copy_engine")(lambda: op(out, a, b, algorithm="magic"))
    expect(ArgumentError, "block_size_m", "48")(lambda: op(out, a, b, config=FusedConfig(48)))
    expect(ArgumentError, "'hbm_buffer'", "'copy_engine'", "transport")(
        lambda: op(out, a, b, algorithm="hbm_buffer", config=COPIED)
    )
    expect(ArgumentError, "'pull'", "'hbm_buffer'", "FusedConfig")(
        lambda: op(out, a, b, algorithm="pull", config=FETCHED)
    )
    expect(ArgumentError, "staged_a_layout", "'k_contiguous'", "'m_contiguous'")(
        lambda: op(out, a, b, config=replace(COPIED, staged_a_layout="m_contiguous"))
    )
    expect(ArgumentError, "operation", "all_gather_matmul")(lambda: ctx.ops.explain("nothing"))
    workspace = op(out, a, b)
    other = ctx.zeros(32, 32)
    expect(ArgumentError, "shape", str((64, 16, 32 * world)))(lambda: op(t(32, 16), other, b, workspace=workspace))
    # After every error the context and the operation still work.
    op(out.fill_(float("nan")), a, b)
    ctx.barrier()
    assert (out == 0).all()


def test_bad_arguments_are_refused_on_every_rank(ranks, world):
    ranks(world).run(body_errors)


def body_cannot(ctx):
    a, b = (
        ctx.zeros(16, 16, dtype=torch.int8),
        torch.zeros(16 * ctx.get_num_ranks(), 16, dtype=torch.int8, device=ctx.get_device()),
    )
    out = torch.zeros(16, 16, dtype=torch.int32, device=ctx.get_device())
    with pytest.raises(UnsupportedError, match="int8"):
        ctx.ops.all_gather_matmul(out, a, b, algorithm="torch")
    turned = torch.full((16, 16), float("nan"), device=ctx.get_device())
    refuse_strided(ctx, turned, ctx.zeros(16, 16).t(), b.float())
    # What peers read lies elsewhere then; the context and the operation still work.
    ctx.ops.all_gather_matmul(turned, ctx.zeros(16, 16), b.float(), **ALGORITHMS["copy_engine"])
    ctx.synchronize()
    assert (turned == 0).all()


def test_named_algorithm_that_cannot(ranks):
    ranks(2).run(body_cannot)


def body_one_rank_wrong(ctx):
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    a, b, out = ctx.zeros(16, 16), torch.zeros(16 * world, 24, device=device), torch.zeros(16, 24, device=device)
    bias = torch.zeros(5 if rank == 1 else 24, device=device)
    with pytest.raises(IrisError) as caught:
        ctx.ops.all_gather_matmul(out, a, b, bias)
    if rank == 1:
        assert isinstance(caught.value, ArgumentError)
        assert "N=24" in str(caught.value)
    else:
        assert isinstance(caught.value, RankMismatch)
        assert "rank 1 raised ArgumentError" in str(caught.value)
    # Different dtypes of the same size, and different shapes.
    dtype = torch.float16 if rank == 0 else torch.bfloat16
    half = ctx.zeros(16, 16, dtype=torch.float16).view(dtype)
    with pytest.raises(RankMismatch, match=r"A_sharded is .*float16.* on rank 0, .*bfloat16.* on rank 1"):
        ctx.ops.all_gather_matmul(out.to(dtype), half, b.to(dtype))


def body_shape_mismatch(ctx):
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    rows = 32 if rank == 0 else 16
    buffer = ctx.zeros(32, 16)
    b = torch.zeros(16 * world, 8, device=device)
    with pytest.raises(RankMismatch, match=r"output_tensor is .*32, 8.* on rank 0, .*16, 8"):
        ctx.ops.all_gather_matmul(torch.zeros(rows, 8, device=device), buffer[:rows], b)
    # A at another place of the heap on one rank would be read from the wrong place.
    with pytest.raises(RankMismatch, match="offset of A_sharded"):
        ctx.ops.all_gather_matmul(torch.zeros(16, 8, device=device), buffer[16:] if rank else buffer[:16], b)
    workspace = ctx.ops.all_gather_matmul(torch.zeros(32, 8, device=device), buffer, b)
    given = workspace if rank == 0 else None
    view = buffer.view(16, 32)[:, :16]
    with pytest.raises(IrisError):
        ctx.ops.all_gather_matmul(torch.zeros(16, 8, device=device), view, b, workspace=given)


@pytest.mark.parametrize("body", [body_one_rank_wrong, body_shape_mismatch])
def test_ranks_that_disagree_all_learn_of_it(ranks, world, body):
    if world == 1:
        pytest.skip("one rank cannot disagree with itself")
    ranks(world).run(body)


def body_known_call_checks(ctx):
    """IRIS_CHECK=always compares again; a rank whose later call differs is an error at once."""
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    a, b = ctx.zeros(16, 16), torch.zeros(16 * world, 8, device=device)
    small, big = torch.zeros(16, 8, device=device), torch.zeros(16, 16, device=device)
    wide = torch.zeros(16 * world, 16, device=device)
    ctx.ops.all_gather_matmul(small, a, b)
    ctx.ops.all_gather_matmul(big, a, wide)
    os.environ["IRIS_CHECK"] = "always"
    try:
        with pytest.raises(RankMismatch, match="disagree"):
            ctx.ops.all_gather_matmul(*((small, a, b) if rank == 0 else (big, a, wide)))
    finally:
        del os.environ["IRIS_CHECK"]


def test_check_always(ranks):
    ranks(2).run(body_known_call_checks)


def body_explain(ctx):
    out, a, b, *_ = problem(ctx, 32, 32, 32 * ctx.get_num_ranks(), torch.float16)
    plan = ctx.ops.explain("all_gather_matmul", out, a, b)
    assert out.isnan().all(), "explain ran something"
    workspace = ctx.ops.all_gather_matmul(out, a, b)
    assert workspace.plan == plan
    assert plan.source in iris.ops.Plan.__init__.__globals__["SOURCES"]
    assert plan.algorithm in str(plan)
    assert plan.reason in str(plan)
    named = ctx.ops.explain("all_gather_matmul", out, a, b, algorithm="torch")
    assert (named.algorithm, named.source) == ("torch", "user")
    ctx.barrier()


def test_explain_tells_what_runs(ranks, world):
    ranks(world).run(body_explain)


def body_bitwise(ctx):
    """All ranks hold the same bits, call after call."""
    out, a, b, *_ = problem(ctx, 50, 60, 40 * ctx.get_num_ranks(), torch.bfloat16, seed=9)
    results = []
    for _ in range(3):
        out.fill_(float("nan"))
        ctx.ops.all_gather_matmul(out, a, b, algorithm="torch")
        ctx.synchronize()
        results.append(out.cpu().clone())
    everyone = ctx.exchange.all_gather("test", results)
    for theirs in everyone:
        for result in theirs:
            assert_bitwise_equal(result, results[0])


def test_same_bits_on_every_rank(ranks, world):
    ranks(world).run(body_bitwise)


def body_float32_precision(ctx):
    out, a, b, shards, b_host = problem(ctx, 64, 64, 1024 * ctx.get_num_ranks(), torch.float32, seed=2)
    before = torch.get_float32_matmul_precision()
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        for allow in (None, False):
            out.fill_(float("nan"))
            config = FusedConfig(32, 32, 32, num_warps=4, allow_tf32=allow)
            ctx.ops.all_gather_matmul(out, a, b, config=config)
            ctx.synchronize()
            error = (out.cpu().double() - reference(shards, b_host)).abs().max().item()
            # tf32 keeps 10 bits of each factor: errors of about 2**-11 * sqrt(K), far above float32's.
            exact = precision == "highest" or allow is False
            limit = tolerance(torch.float32, b_host.shape[0])[0] if exact else 0.2
            assert error < limit, (precision, allow, error)
    torch.set_float32_matmul_precision(before)


def test_float32_follows_the_precision_of_torch(ranks):
    ranks(2).run(body_float32_precision)


def body_eight(ctx, ways):
    world = ctx.get_num_ranks()
    for gather_dim, algorithm in ways:
        M = 33 if gather_dim == 1 else 9 * world
        out, a, b, shards, b_host = problem(
            ctx, M, 40, 12 * world, torch.bfloat16, gather_dim=gather_dim, integers=True, out_dtype=torch.float32
        )
        ctx.ops.all_gather_matmul(out, a, b, gather_dim=gather_dim, **ALGORITHMS[algorithm])
        check(ctx, out, shards, b_host, None, gather_dim, integers=True)
        ctx.barrier()


@pytest.mark.parametrize("count", [5, 8])
def test_more_ranks(ranks, count):
    ranks(count).run(body_eight, ((1, "pull"), (0, "pull"), (1, "torch")))


@pytest.mark.slow
@pytest.mark.timeout(400)
@staged_parameter
@pytest.mark.parametrize("count", [5, 8])
def test_more_ranks_staged(ranks, count, algorithm):
    ranks(count).run(body_eight, ((1, algorithm), (0, algorithm)))


def body_far_apart(ctx, algorithm):
    """Rows 2**31 elements apart: offsets do not fit in 32 bits. Only the pages that are touched cost memory."""
    rank, world, device, far = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device(), 2**31
    whole = ctx.empty(far + 64, dtype=torch.int8)
    a = whole.as_strided((2, 16), (far, 1))
    shards = [random_tensor((2, 16), torch.int8, seed=3, rank=r) for r in range(world)]
    a.copy_(shards[rank].to(device))
    b = torch.empty(far + 16 * world, dtype=torch.int8, device=device).as_strided((16 * world, 2), (1, far))
    b_host = random_tensor((16 * world, 2), torch.int8, seed=4, rank=0)
    b.copy_(b_host.to(device))
    out = torch.empty(far + 64, dtype=torch.int32, device=device).as_strided((2, 2), (far, 1))
    out.fill_(-1)
    ctx.ops.all_gather_matmul(out, a, b, **ALGORITHMS[algorithm])
    check(ctx, out, shards, b_host, integers=True)
    ctx.barrier()


@pytest.mark.parametrize("algorithm", ["pull", slow("hbm_buffer")])
@pytest.mark.parametrize("count", [1, 2])
def test_offsets_past_the_largest_int32(ranks, count, algorithm):
    ranks(count).run(body_far_apart, algorithm, context=(2 << 30) + (1 << 20))


def body_torch_compile(ctx):
    def step(a, b, bias):
        out = torch.empty(a.shape[0], b.shape[1], device=a.device)
        ctx.ops.all_gather_matmul(out, a, b, bias)
        return out * 2

    compiled = torch.compile(step, backend="eager")
    for M in (8, 8, 24):
        _out, a, b, shards, b_host = problem(ctx, M, 12, 16 * ctx.get_num_ranks(), torch.float32, integers=True)
        bias = torch.arange(12.0, device=ctx.get_device())
        got = compiled(a, b, bias)
        ctx.synchronize()
        assert_same(got.cpu().double(), 2 * reference(shards, b_host, bias.cpu()))
        ctx.barrier()


def test_under_torch_compile(ranks):
    ranks(2).run(body_torch_compile)


def body_other_workspace(ctx):
    device, world = ctx.get_device(), ctx.get_num_ranks()
    a, b = ctx.zeros(32, 16, dtype=torch.float32), torch.zeros(16 * world, 16, device=device)
    workspace = iris.ops.all_gather_matmul_preamble(ctx, a, b, SMALL)
    half = ctx.zeros(32, 16, dtype=torch.float16)

    def call(out_dtype, a_given, b_given, **kwargs):
        out = torch.zeros(32, 16, dtype=out_dtype, device=device)
        return lambda: ctx.ops.all_gather_matmul(out, a_given, b_given, workspace=workspace, **kwargs)

    expect(ArgumentError, "dtype is torch.float32", "torch.float16")(call(torch.float16, half, b.half(), config=SMALL))
    for algorithm in ("torch", *STAGED):
        expect(ArgumentError, "variant is pull", algorithm)(call(torch.float32, a, b, **ALGORITHMS[algorithm]))
    call(torch.float32, a, b, config=SMALL)()
    workspace.clear()
    expect(ArgumentError, "not prepared")(call(torch.float32, a, b, config=SMALL))
    ctx.barrier()


def test_a_workspace_of_another_kind_is_refused(ranks, world):
    ranks(world).run(body_other_workspace)


def body_one_has_a_workspace(rank, world_size):
    """One rank gives a workspace and the other does not: an error on both, in time."""
    os.environ["IRIS_TIMEOUT"] = "3"
    try:
        ctx = iris.iris(1 << 20)
        a, b = ctx.zeros(16, 16), torch.zeros(32, 8, device=ctx.get_device())
        out = torch.zeros(16, 8, device=ctx.get_device())
        workspace = iris.ops.all_gather_matmul_preamble(ctx, a, b)
        with pytest.raises(IrisError, match="workspace is given on rank 0, none on rank 1"):
            ctx.ops.all_gather_matmul(out, a, b, workspace=workspace if rank == 0 else None)
        ctx.barrier()
    finally:
        del os.environ["IRIS_TIMEOUT"]


def test_a_workspace_on_one_rank_only(ranks):
    ranks(2).run(body_one_has_a_workspace, context=None)


def schedule_of(ctx, out, a, b, algorithm, config, gather_dim):
    """The numbers of a call: that it is the case that a test is about."""
    call = checked(
        ctx, ctx.resolve_group(None), out, a, b, None, "none", (None, None), algorithm, config, gather_dim, None
    )
    return call.schedule


def body_staged(ctx, algorithm, cases):
    """Calls of many kinds one after the other: one staging buffer that grows, flags that are never cleared between."""
    world, device = ctx.get_num_ranks(), ctx.get_device()
    for number, case in enumerate(cases):
        gather_dim, dtype, transpose = case.get("gather_dim", 1), case.get("dtype", torch.float16), case["transpose"]
        M, N, K = case["sizes"]
        M, K = (M, K * world) if gather_dim == 1 else (M * world, K)
        config = replace(ALGORITHMS[algorithm]["config"], **case.get("config", {}))
        out, a, b, shards, b_host = problem(
            ctx, M, N, K, dtype, gather_dim=gather_dim, transpose=transpose, integers=True, seed=number,
            b_dtype=case.get("b_dtype"), out_dtype=case.get("out_dtype"),
        )  # fmt: skip
        kind = torch.int32 if dtype == torch.int8 else torch.float32
        bias = (torch.arange(M * N).remainder(37).reshape(M, N) - 9).to(kind) if case.get("bias") else None
        s = schedule_of(ctx, out, a, b, algorithm, config, gather_dim)
        assert s.copied == (algorithm == "copy_engine" and world > 1)
        assert s.descriptors == case.get("descriptors", False)
        divided = ("all" if s.whole == 0 else "some") if s.splits > 1 else "none"
        assert divided == case.get("divided", "none"), s
        for _ in range(case.get("calls", 1)):
            workspace = ctx.ops.all_gather_matmul(
                out, a, b, None if bias is None else bias.to(device), gather_dim=gather_dim, algorithm=algorithm,
                config=config,
            )  # fmt: skip
            ctx.synchronize()
            want = reference(shards, b_host, bias, gather_dim)
            assert_same(out.cpu().to(torch.float64), want.to(out.dtype).to(torch.float64))
            out.fill_(-77)
        assert workspace.plan.algorithm == algorithm
        ctx.barrier()


# Few blocks, because a block costs the interpreter some 50 statements.
SELECTION = [
    # More stages than rows of tiles, and blocks of K that k_per_flag does not divide.
    {"sizes": (40, 33, 70), "transpose": "NT", "bias": True, "config": {"num_fetch_stages": 9}},
    {"sizes": (37, 20, 61), "transpose": "NN", "gather_dim": 0, "dtype": torch.bfloat16, "bias": True},
    # One program fetches, multiplies and writes. Twice: the flags of the first call are no longer true in the second.
    {"sizes": (9, 24, 33), "transpose": "NN", "dtype": torch.int8, "config": {"num_sms": 1}, "calls": 2},
    {
        "sizes": (18, 17, 31), "transpose": "NT", "gather_dim": 0, "dtype": FP8[0], "b_dtype": FP8[1],
        "out_dtype": torch.float32,
    },
]  # fmt: skip


@staged_parameter
@pytest.mark.parametrize("world", [2, slow(1), slow(3), slow(4)])
def test_staged_selection(ranks, world, algorithm):
    ranks(world).run(body_staged, algorithm, SELECTION)


LAYOUTS = [
    {"sizes": (40, 33, 70), "transpose": transpose, "gather_dim": gather_dim, "config": config, "bias": True}
    for (transpose, gather_dim), config in zip(
        itertools.product(("NN", "TN", "TT"), (0, 1)),
        itertools.cycle([{"staged_a_layout": "m_contiguous"}, {"k_per_flag": 1}, {"k_per_flag": 3, "num_sms": 1}]),
        strict=False,
    )
]


@pytest.mark.parametrize("world", [slow(2), slow(3)])
def test_staged_layouts(ranks, world):
    """Rows or columns of the staged shards together, for each transpose of A that copies would not take."""
    ranks(world).run(body_staged, "hbm_buffer", LAYOUTS)


# The last tiles are divided along K into pieces that begin within what one flag announces.
NARROW = {"block_size_k": 16, "k_per_flag": 3}
DIVIDED = [
    {"sizes": (30, 20, 8 * 16 - 5), "transpose": "NN", "bias": True, "calls": 2, "config": NARROW, "divided": "all"},
    {
        "sizes": (20, 30, 16 * 16 - 5), "transpose": "NT", "gather_dim": 0, "dtype": torch.int8, "divided": "all",
        "config": {**NARROW, "num_sms": 8},
    },
]  # fmt: skip
SOME_DIVIDED = [
    {
        "sizes": (150, 20, 8 * 16), "transpose": "NN", "bias": True, "calls": 2, "divided": "some",
        "config": {**NARROW, "num_sms": 4},
    },
]  # fmt: skip


@staged_parameter
@pytest.mark.parametrize("world", [2, slow(3)])
def test_staged_divided_tiles(ranks, world, algorithm):
    ranks(world).run(body_staged, algorithm, DIVIDED)


@pytest.mark.slow
@staged_parameter
@pytest.mark.parametrize("world", [2, 3])
def test_staged_last_tiles_are_divided(ranks, world, algorithm):
    ranks(world).run(body_staged, algorithm, SOME_DIVIDED)


@pytest.mark.sim(device="h200", resident_programs=1)
def test_one_program_at_a_time_does_all(sim):
    """No program waits for what only a program that has not started would do, such as the other pieces of its tile."""
    sim.run(body_staged, 2, "hbm_buffer", DIVIDED[:1])


def body_seeds(ctx, algorithm, gather_dim, M, calls):
    """Calls that follow each other; A is overwritten in between."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    N, K_local = 16, 29
    config = replace(
        ALGORITHMS[algorithm]["config"], block_size_m=16, block_size_n=16, block_size_k=16, k_per_flag=1,
        num_fetch_sms=1, first_stage_fetch_sms=2, num_sms=2 if M <= 16 else 3,
    )  # fmt: skip
    shards = [random_tensor((M, K_local), torch.float32, seed=8, rank=r, integers=True) for r in range(world)]
    b = random_tensor((K_local * (world if gather_dim == 1 else 1), N), torch.float32, seed=9, rank=0, integers=True)
    a = ctx.as_symmetric(shards[rank])
    want = reference(shards, b, None, gather_dim)
    for factor in range(1, calls + 1):
        a.copy_(factor * shards[rank])
        out = torch.full((want.shape[0], N), float("nan"))
        ctx.ops.all_gather_matmul(out, a, b, config=config, gather_dim=gather_dim)
        assert_same(out.double(), factor * want)


@pytest.mark.seeds(20)
@pytest.mark.sim(device="h200")
@staged_parameter
@pytest.mark.parametrize("gather_dim", [0, 1])
def test_staged_in_any_order(sim, algorithm, gather_dim):
    sim.run(
        body_seeds, (2, 2, 2, 3, 2, 1, 2, 2, 4, 2)[sim.seed % 10], algorithm, gather_dim, 9, 1 + (sim.seed % 5 == 0)
    )


@pytest.mark.slow
@pytest.mark.seeds(20)
@pytest.mark.sim(device="h200")
@staged_parameter
@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_staged_in_any_order_with_any_ranks(sim, algorithm, gather_dim, count):
    sim.run(body_seeds, count, algorithm, gather_dim, 20, 2)


def body_descriptors(ctx, algorithm, cases):
    for gather_dim, dtype, transpose, sizes in cases:
        body_staged(ctx, algorithm, [{
            "descriptors": True, "gather_dim": gather_dim, "dtype": dtype, "transpose": transpose, "sizes": sizes,
            "bias": True,
        }])  # fmt: skip


# Rows of 16 bytes. Along K the tile divides a shard's columns; along M a descriptor ends where the columns do.
DESCRIBED = [
    (1, torch.float16, "NN", (40, 40, 64)),
    (0, torch.bfloat16, "NT", (20, 33, 40)),
    (0, torch.int8, "NT", (33, 20, 48)),
]
DESCRIBED_TOO = [
    (0, torch.float16, "NN", (65, 72, 8)),
    (1, torch.float32, "NT", (70, 40, 32)),
    (1, FP8[0], "NT", (7, 9, 96)),
]


@staged_parameter
@pytest.mark.parametrize(
    ("count", "cases"),
    [(2, DESCRIBED), slow(3, DESCRIBED), slow(1, DESCRIBED), slow(2, DESCRIBED_TOO), slow(4, DESCRIBED_TOO)],
    ids=lambda value: str(value) if isinstance(value, int) else f"{len(value)}cases",
)
def test_operands_by_descriptors(sim, monkeypatch, count, cases, algorithm):
    """As on targets that have a unit for it, which the interpreter stands for."""
    monkeypatch.setattr(_target.Target, "descriptors", True)
    sim.run(body_descriptors, count, algorithm, cases, device="h200")


def body_not_described(ctx):
    """What a descriptor cannot name is multiplied all the same."""
    world, device = ctx.get_num_ranks(), ctx.get_device()
    whole = ctx.zeros(32, 65, dtype=torch.float16)
    b = torch.zeros(64 * world, 32, dtype=torch.float16, device=device)
    out = torch.zeros(32, 32, dtype=torch.float16, device=device)
    wide = torch.zeros(64 * world, 33, dtype=torch.float16, device=device)
    good = ctx.zeros(32, 64, dtype=torch.float16)

    def takes(a, b, gather_dim=1, config=FETCHED, out=out):
        return schedule_of(ctx, out, a, b, "hbm_buffer", config, gather_dim).descriptors

    assert takes(good, b)
    assert not takes(whole[:, :64], b), "rows of 130 bytes"
    assert not takes(whole.view(-1)[1 : 32 * 64 + 1].view(32, 64), b), "an odd address"
    assert not takes(good.t(), b[: 32 * world], out=torch.zeros(64, 32, dtype=torch.float16)), "columns together"
    assert not takes(good, b, config=replace(FETCHED, staged_a_layout="m_contiguous"))
    assert not takes(good, wide[:, :32]), "rows of B of 66 bytes"
    assert takes(good[:, :48], b[: 48 * world], config=replace(FETCHED, block_size_k=16))
    divided = takes(good[:, :48], b[: 48 * world])
    assert divided == (world == 1), "the tile's 32 columns of K do not divide the 48 of a shard"
    wide_types = torch.zeros(64 * world, 32, device=device)
    assert not takes(ctx.zeros(32, 64), wide_types, out=torch.zeros(32, 32)), "float32 needs B's columns together"
    assert takes(ctx.zeros(32, 64), wide_types.t().contiguous().t(), out=torch.zeros(32, 32))
    empty = torch.zeros(0, 32, dtype=torch.float16)
    assert not takes(ctx.zeros(32, 0, dtype=torch.float16), empty)


@pytest.mark.parametrize("count", [1, 2])
def test_what_descriptors_cannot_name(sim, monkeypatch, count):
    sim.run(body_without_descriptors, count)
    monkeypatch.setattr(_target.Target, "descriptors", True)
    sim.run(body_not_described, count)


def body_without_descriptors(ctx):
    a, b = ctx.zeros(32, 64, dtype=torch.float16), torch.zeros(64 * ctx.get_num_ranks(), 32, dtype=torch.float16)
    out = torch.zeros(32, 32, dtype=torch.float16)
    assert not schedule_of(ctx, out, a, b, "hbm_buffer", FETCHED, 1).descriptors, "the interpreter has no such unit"


def body_one_buffer(ctx, preamble):
    """Calls of growing and shrinking shapes, of both transports and dtypes, in one buffer; inputs change without the
    host in between. A flag of an earlier call of another shape must not pass for one of this call."""
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    stream = ctx.new_stream()
    done = []
    made = {}
    for turn, (M, K_local, algorithm) in enumerate(
        [(20, 33, "hbm_buffer"), (40, 33, "copy_engine"), (40, 70, "hbm_buffer"), (20, 33, "hbm_buffer"),
         (40, 33, "copy_engine")]
    ):  # fmt: skip
        shape = (M, K_local, algorithm)
        a, b, workspace = made.get(shape, (None, None, None))
        if a is None:
            a = ctx.zeros(M, K_local, dtype=torch.float32)
            b = (torch.arange(K_local * world * 16) % 5 - 2).view(-1, 16).to(device, torch.float32)
            how = ALGORITHMS[algorithm]
            workspace = iris.ops.all_gather_matmul_preamble(ctx, a, b, **how) if preamble else None
            made[shape] = a, b, workspace
        values = [random_tensor((M, K_local), torch.float32, seed=turn, rank=r, integers=True) for r in range(world)]
        a.copy_(values[rank])
        out = torch.full((M, 16), float("nan"), device=device)
        used = out
        if turn == 2:
            # On another stream, which the calls' order follows too; the inputs come from this one.
            stream.wait_stream(ctx.current_stream())
            with ctx.use_stream(stream):
                returned = ctx.ops.all_gather_matmul(
                    out, a, b, workspace=workspace, async_op=True, **ALGORITHMS[algorithm]
                )
                returned.wait()
            ctx.current_stream().wait_stream(stream)
        else:
            returned = ctx.ops.all_gather_matmul(out, a, b, workspace=workspace, **ALGORITHMS[algorithm])
        assert returned is workspace or not preamble
        done.append((used, reference(values, b.cpu())))
    ctx.synchronize()
    for turn, (out, want) in enumerate(done):
        assert (out.cpu().double() == want).all(), turn
    ctx.barrier()
    return returned.staging.nbytes


@pytest.mark.parametrize("world", [2, slow(1), slow(3), slow(4)])
@pytest.mark.parametrize("preamble", [False, slow(True)])
def test_staging_buffer_serves_all_shapes(ranks, world, preamble):
    ranks(world).run(body_one_buffer, preamble)


def body_workspace_elsewhere(ctx, algorithm):
    """A workspace may be used on another stream at once: making it waits for what it is made of."""
    out, a, b, shards, b_host = problem(ctx, 20, 16, 33 * ctx.get_num_ranks(), torch.float32, integers=True)
    workspace = iris.ops.all_gather_matmul_preamble(ctx, a, b, **ALGORITHMS[algorithm])
    with ctx.use_stream(ctx.new_stream()):
        ctx.ops.all_gather_matmul(out, a, b, workspace=workspace, **ALGORITHMS[algorithm])
        check(ctx, out, shards, b_host, integers=True)
    ctx.barrier()


@pytest.mark.parametrize("algorithm", ["pull", "hbm_buffer", "copy_engine"])
@pytest.mark.parametrize("world", [2, slow(1), slow(3)])
def test_a_new_workspace_on_another_stream(ranks, world, algorithm):
    ranks(world).run(body_workspace_elsewhere, algorithm)
