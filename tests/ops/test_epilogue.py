"""What all_gather_matmul does after the product: scales of fp8 inputs, bias, activation, one rounding."""

import math

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris.device import numeric
from iris.errors import ArgumentError, DeviceMismatch, RankMismatch
from iris.ops import FusedConfig, all_gather_matmul_preamble
from iris.ops.arguments import ACTIVATIONS
from iris.testing.numeric import ROUNDING, assert_bitwise_equal, assert_close, random_tensor
from iris.testing.reference import all_gather_matmul as reference

# Two programs: waiting ones cost the simulator as much as working ones.
TILES = FusedConfig(32, 64, 32, group_size_m=2, num_sms=2, num_warps=4)
ALGORITHMS = {
    "torch": {"algorithm": "torch"},
    "pull": {"algorithm": "pull", "config": TILES},
    "hbm_buffer": {"algorithm": "hbm_buffer", "config": TILES},
}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def slow(world):
    return pytest.param(world, marks=pytest.mark.slow)


def inputs(ctx, M, N, K, dtype, *, b_dtype=None, gather_dim=1, seed=0, integers=False):
    """(own shard on the heap, B, every rank's shard) of an A of (M, K)."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    shape = (M, K // world) if gather_dim == 1 else (M // world, K)
    shards = [random_tensor(shape, dtype, seed=seed, rank=r, integers=integers) for r in range(world)]
    b = random_tensor((K, N), b_dtype or dtype, seed=seed + 1, rank=0, integers=integers)
    return ctx.as_symmetric(shards[rank].to(ctx.get_device())), b.to(ctx.get_device()), shards


def unwritten(ctx, M, N, dtype):
    return torch.full((M, N), float("nan"), dtype=dtype, device=ctx.get_device())


def assert_rounded_once(actual, want, k):
    """Within the float32 sum's error of ``want``, and half a unit in the last place of the output."""
    allowed = 8 * ROUNDING[torch.float32] * k
    assert_close(actual.cpu(), want, actual.dtype, allowed=(allowed, 1.001 * ROUNDING[actual.dtype]))


def body_activations(ctx, algorithm, biased):
    world = ctx.get_num_ranks()
    M, N, K = 11 * world, 70, 24 * world
    bias = 2 * random_tensor((N,), torch.float32, seed=5, rank=0)
    for gather_dim in (0, 1):
        a, b, shards = inputs(ctx, M, N, K, torch.bfloat16, gather_dim=gather_dim, seed=gather_dim)
        for activation, added in zip(ACTIVATIONS, biased[gather_dim], strict=True):
            out = unwritten(ctx, M, N, torch.bfloat16 if added else torch.float16)
            ctx.ops.all_gather_matmul(
                out, a, b, bias.to(ctx.get_device()) if added else None, gather_dim=gather_dim, activation=activation,
                **ALGORITHMS[algorithm],
            )  # fmt: skip
            ctx.synchronize()
            want = reference(shards, b.cpu(), bias if added else None, gather_dim, activation)
            assert_rounded_once(out, want, K)
    ctx.barrier()


# Whether there is a bias, for each gather_dim and activation.
HALF = ((True, False, True, False), (False, True, False, True))


@pytest.mark.parametrize("world", [1, 2, slow(3), slow(4)])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_activations(ranks, world, algorithm):
    ranks(world).run(body_activations, algorithm, HALF)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_activations_with_and_without_the_other_biases(ranks, world, algorithm):
    ranks(world).run(body_activations, algorithm, HALF[::-1])


def body_scales(ctx, algorithm, pairs):
    world, device = ctx.get_num_ranks(), ctx.get_device()
    M, N, K = 20, 40, 16 * world
    bias = random_tensor((M, 1), torch.float32, seed=7, rank=0)
    scale_a, scale_b = torch.tensor([0.37]), torch.tensor(1.9)
    on_device = {"scale_a": scale_a.to(device), "scale_b": scale_b.to(device)}
    for pair, out_dtype in zip(pairs, FLOATS, strict=True):
        a, b, shards = inputs(ctx, M, N, K, pair[0], b_dtype=pair[1], seed=3)
        for activation, added in (("none", None), ("gelu", bias)):
            out = unwritten(ctx, M, N, out_dtype)
            ctx.ops.all_gather_matmul(
                out, a, b, None if added is None else added.to(device), activation=activation, **on_device,
                **ALGORITHMS[algorithm],
            )  # fmt: skip
            ctx.synchronize()
            want = reference(shards, b.cpu(), added, 1, activation, scale_a, scale_b)
            assert_rounded_once(out, want, K)
    ctx.barrier()


@pytest.mark.parametrize("world", [slow(1), 2, slow(3)])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_scales_of_fp8_inputs(ranks, world, algorithm):
    ranks(world).run(body_scales, algorithm, ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2)))


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_scales_with_the_other_outputs(ranks, world, algorithm, order):
    pairs = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2))
    ranks(world).run(body_scales, algorithm, pairs[order:] + pairs[:order])


def body_exact(ctx, algorithm):
    """Whole numbers and powers of two: nothing but the last rounding, and with it every bit is known."""
    world, device = ctx.get_num_ranks(), ctx.get_device()
    M, N, K = 40, 70, 16 * world
    a, b, shards = inputs(ctx, M, N, K, E4M3, b_dtype=E5M2, seed=9, integers=True)
    bias = torch.arange(N, dtype=torch.float32) - 300.25
    out = unwritten(ctx, M, N, torch.bfloat16)
    on_device = {"scale_a": torch.ones(1, device=device), "scale_b": torch.full((1, 1), 0.5, device=device)}
    workspace = all_gather_matmul_preamble(
        ctx, a, b, output_dtype=torch.bfloat16, activation="relu", **on_device, **ALGORITHMS[algorithm]
    )
    for factor in (4.0, 0.25, -64.0):
        # The ranks agree on the first of these calls alone.
        on_device["scale_a"].fill_(factor)
        out.fill_(float("nan"))
        iris.ops.all_gather_matmul(
            ctx, out, a, b, bias.to(device), workspace=workspace, activation="relu", **on_device,
            **ALGORITHMS[algorithm],
        )  # fmt: skip
        ctx.synchronize()
        want = reference(shards, b.cpu(), bias, 1, "relu", torch.tensor(factor), torch.tensor(0.5))
        assert_bitwise_equal(out.cpu() + 0, want.to(torch.bfloat16) + 0)
    assert want.any(), "the last scale is to leave something that is not zero"
    ctx.barrier()


@pytest.mark.parametrize("world", [2, slow(3)])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_scales_are_read_from_memory(ranks, world, algorithm):
    ranks(world).run(body_exact, algorithm)


def body_divided(ctx):
    """One tile and two programs, so each multiplies half of K: the epilogue comes once, after both halves."""
    device = ctx.get_device()
    M, N, K = 20, 40, 16 * TILES.block_size_k
    bias = random_tensor((N,), torch.float32, seed=4, rank=0)
    for dtype, activation in ((torch.bfloat16, "gelu"), (E4M3, "silu")):
        a, b, shards = inputs(ctx, M, N, K, dtype, seed=6)
        values = (torch.tensor(0.05), torch.tensor(0.9)) if dtype == E4M3 else (None, None)
        scale_a, scale_b = (value if value is None else value.to(device) for value in values)
        out = unwritten(ctx, M, N, torch.float32)
        ctx.ops.all_gather_matmul(
            out, a, b, bias.to(device), activation=activation, scale_a=scale_a, scale_b=scale_b,
            **ALGORITHMS["hbm_buffer"],
        )  # fmt: skip
        ctx.synchronize()
        assert_rounded_once(out, reference(shards, b.cpu(), bias, 1, activation, *values), K)
    ctx.barrier()


@pytest.mark.parametrize("world", [2])
def test_a_divided_tile_has_one_epilogue(ranks, world):
    ranks(world).run(body_divided)


def body_plan(ctx):
    world, device = ctx.get_num_ranks(), ctx.get_device()
    a, b, shards = inputs(ctx, 16, 16, 16 * world, E4M3)
    out = unwritten(ctx, 16, 16, torch.float32)
    scales = {"scale_a": torch.tensor(0.5, device=device), "scale_b": torch.tensor(0.25, device=device)}
    plain = ctx.ops.explain("all_gather_matmul", out, a, b)
    both = ctx.ops.explain("all_gather_matmul", out, a, b, activation="silu", **scales)
    assert both.problem == f"{plain.problem}, scaled, silu"
    assert out.isnan().all(), "explain ran something"
    # One workspace serves calls with any epilogue; each follows its own plan.
    workspace = ctx.ops.all_gather_matmul(out, a, b, activation="gelu")
    assert workspace.plan.problem == f"{plain.problem}, gelu"
    for activation in ("silu", "none"):
        out.fill_(float("nan"))
        ctx.ops.all_gather_matmul(out, a, b, workspace=workspace, activation=activation, async_op=True, **scales)
        workspace.wait()
        ctx.synchronize()
        want = reference(shards, b.cpu(), None, 1, activation, scales["scale_a"].cpu(), scales["scale_b"].cpu())
        assert_rounded_once(out, want, 16 * world)
    assert workspace.plan.problem == f"{plain.problem}, scaled"
    ctx.barrier()


@pytest.mark.parametrize("world", [1, 2])
def test_plan_names_the_epilogue(ranks, world):
    ranks(world).run(body_plan)


def expect(kind, call, *parts):
    with pytest.raises(kind) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def body_errors(ctx):
    world, device = ctx.get_num_ranks(), ctx.get_device()
    op = ctx.ops.all_gather_matmul
    one, b, out = torch.ones((), device=device), torch.zeros(16 * world, 16, device=device), torch.zeros(16, 16)
    out, a = out.to(device), ctx.zeros(16, 16)
    for wrong in ("tanh", None, torch.relu):
        expect(ArgumentError, lambda w=wrong: op(out, a, b, activation=w), "activation", "'relu'", "'gelu'", "'silu'")
    bytes_a, bytes_b = ctx.zeros(16, 16, dtype=torch.int8), b.to(torch.int8)
    sums = torch.zeros(16, 16, dtype=torch.int32, device=device)
    expect(ArgumentError, lambda: op(sums, bytes_a, bytes_b, activation="relu"), "int32", "'none'", "'relu'")
    expect(ArgumentError, lambda: op(out, a, b, scale_a=one, scale_b=one), "fp8", "float32", "leave")
    expect(ArgumentError, lambda: op(sums, bytes_a, bytes_b, scale_a=one, scale_b=one), "fp8", "int8")
    narrow, b8 = ctx.zeros(16, 16, dtype=E4M3), b.to(E4M3)
    expect(ArgumentError, lambda: op(out, narrow, b8, scale_a=one), "scale_a is given", "scale_b is not", "both")
    expect(ArgumentError, lambda: op(out, narrow, b8, scale_b=one), "scale_b is given", "scale_a is not")
    expect(ArgumentError, lambda: op(out, narrow, b8, scale_a=0.5, scale_b=one), "scale_a", "tensor", "float")
    expect(
        ArgumentError, lambda: op(out, narrow, b8, scale_a=one, scale_b=one.double()), "scale_b", "float32", "float64"
    )
    expect(ArgumentError, lambda: op(out, narrow, b8, scale_a=one.expand(2), scale_b=one), "one element", "(2,)")
    expect(DeviceMismatch, lambda: op(out, narrow, b8, scale_a=one, scale_b=one.to("meta")), "scale_b", "meta")
    expect(ArgumentError, lambda: op(out, narrow, b8, scale_a=out[1, :1], scale_b=one), "overlaps scale_a")
    expect(ArgumentError, lambda: all_gather_matmul_preamble(ctx, narrow, b8, scale_b=one), "scale_b is given", "both")
    expect(ArgumentError, lambda: ctx.ops.explain("all_gather_matmul", out, a, b, activation="tanh"), "'gelu'")
    # After every error the context and the operation still work.
    op(out.fill_(float("nan")), narrow, b8, activation="gelu", scale_a=one, scale_b=one)
    ctx.synchronize()
    assert (out == 0).all()
    ctx.barrier()


@pytest.mark.parametrize("world", [1, 2])
def test_bad_epilogues_are_refused(ranks, world):
    ranks(world).run(body_errors)


def body_disagree(ctx):
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    # A shape that no other test has: what ranks have agreed on once they do not compare again.
    a, b = ctx.zeros(19, 16, dtype=E4M3), torch.zeros(16 * world, 21, device=device).to(E4M3)
    out, one = torch.zeros(19, 21, device=device), torch.ones(1, device=device)
    with pytest.raises(RankMismatch, match="activation is gelu on rank 0, relu on rank 1"):
        ctx.ops.all_gather_matmul(out, a, b, activation="relu" if rank else "gelu")
    scales = {"scale_a": one, "scale_b": one} if rank == world - 1 else {}
    with pytest.raises(RankMismatch, match=r"scale_a is none on rank 0, .*scale_b is none on rank 0"):
        ctx.ops.all_gather_matmul(out, a, b, **scales)
    # One rank's error is every rank's.
    kind, text = (ArgumentError, "'tanh' is not known") if rank == 1 else (RankMismatch, "rank 1 raised ArgumentError")
    with pytest.raises(kind, match=text):
        ctx.ops.all_gather_matmul(out, a, b, activation="tanh" if rank == 1 else "relu")
    # Scales are known by their layout: other tensors of it need no new agreement.
    ctx.ops.all_gather_matmul(out, a, b, scale_a=one, scale_b=one)
    ctx.ops.all_gather_matmul(out, a, b, scale_a=one.clone(), scale_b=one + rank)
    ctx.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_disagree_all_learn_of_it(ranks, world):
    ranks(world).run(body_disagree)


@triton.jit
def activate_kernel(source, target, n, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    value = tl.load(source + offs, mask=offs < n, other=0.0)
    tl.store(target + offs, numeric.activate(value, ACTIVATION), mask=offs < n)


def body_activate(ctx):
    steps = torch.linspace(-12, 12, 1000, dtype=torch.float64)
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0, 3e38, -3e38, math.inf, math.nan])
    source = torch.cat([steps.to(torch.float32), special])
    for activation, function in ACTIVATIONS.items():
        target = torch.full_like(source, 7.0, device=ctx.get_device())
        activate_kernel[(1,)](source.to(ctx.get_device()), target, source.numel(), BLOCK=1024, ACTIVATION=activation)
        ctx.synchronize()
        got, want = target.cpu().to(torch.float64), function(source.to(torch.float64))
        assert got[-1].isnan(), activation
        assert torch.equal(got[-2:-1], want[-2:-1]), activation
        # 1 + erf(x) in float32: an error of a few units of 1, times x.
        error = (got - want)[:-2].abs() - 4 * ROUNDING[torch.float32] * source[:-2].double().abs().clamp(max=12)
        assert (error <= 2.0**-21 * want[:-2].abs()).all(), (activation, source[error.argmax()])


def test_activate_of_special_values(ranks):
    ranks(1).run(body_activate)
