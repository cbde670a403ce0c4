"""all_reduce: every algorithm against exact sums, each other and the other ranks; layouts, aliases, many calls."""

import time

import pytest
import torch

from collective_data import (
    FLOATS,
    FP8,
    LAYOUTS,
    REDUCED,
    Buffer,
    assert_same,
    factors,
    movable,
    name_of,
    rounded,
    steps,
)
from iris.ccl import Config, ReduceOp
from iris.errors import ArgumentError, NotSymmetricError, UnsupportedError
from iris.testing import reference
from iris.testing.numeric import assert_bitwise_equal, assert_close, random_tensor

IN_ORDER = ("push", "one_shot", "two_shot")
EXACT = (*IN_ORDER, "ring")
OWN = (*EXACT, "atomic", "spinlock")
VARIANTS = (*OWN, "torch", None)
IN_PLACE = ("push", "two_shot", "ring", "atomic", "spinlock", "torch", None)

# The other algorithms share the kernels of these.
DIFFERENT = [
    variant
    if variant in ("push", "two_shot", "ring", "atomic", "torch")
    else pytest.param(variant, marks=pytest.mark.slow)
    for variant in VARIANTS
]

different_parameter = pytest.mark.parametrize("variant", DIFFERENT)


def config(variant, **fields):
    return Config(all_reduce_variant=variant, **fields)


def inputs_of(ctx, shape, dtype, seed, make=steps):
    return [make(shape, dtype, seed=seed, rank=r) for r in range(ctx.get_num_ranks())]


def body_shapes(ctx, variant, shapes, how):
    for seed, (shape, dtype) in enumerate(shapes):
        inputs = inputs_of(ctx, shape, dtype, seed)
        inp, out = Buffer(ctx, shape, dtype).set(inputs[ctx.get_rank()]), Buffer(ctx, shape, dtype)
        ctx.ccl.all_reduce(out.tensor, inp.tensor, config=config(variant, **how[seed % len(how)]))
        ctx.synchronize()
        out.check(rounded(reference.all_reduce(inputs), dtype))
        inp.check(inputs[ctx.get_rank()])


# Small blocks give small tensors several; one program gives them several rounds.
SHAPES = [((), torch.bfloat16), ((3, 5, 13), torch.float32), ((4, 0, 3), torch.float16), ((389,), torch.bfloat16)]
HOW = ({"comm_sms": 1}, {"block_size_m": 1}, {"comm_sms": 2, "block_size_m": 2, "num_warps": 8})


@pytest.mark.parametrize("variant", OWN)
@pytest.mark.parametrize("world", [1, 4])
def test_sums_of_any_shape(ranks, world, variant):
    ranks(world).run(body_shapes, variant, SHAPES, HOW)


@pytest.mark.parametrize("variant", EXACT)
@pytest.mark.parametrize("world", [5])
def test_five_ranks(ranks, world, variant):
    ranks(world).run(body_shapes, variant, [((301,), torch.float32), ((2, 3), torch.bfloat16)], HOW)


def body_dtypes(ctx, variant):
    for seed, dtype in enumerate(REDUCED):
        if variant == "torch" and dtype in (*FP8, torch.int16):
            continue  # test_what_torch_refuses has these
        inputs = inputs_of(ctx, (3, 13), dtype, seed)
        if variant == "torch" and dtype.is_floating_point:
            inputs = [value.remainder(64) for value in inputs]  # PyTorch's library may round every sum: all are exact
        inp, out = Buffer(ctx, (3, 13), dtype).set(inputs[ctx.get_rank()]), Buffer(ctx, (3, 13), dtype)
        ctx.ccl.all_reduce(out.tensor, inp.tensor, config=config(variant, comm_sms=1))
        ctx.synchronize()
        out.check(rounded(reference.all_reduce(inputs), dtype))


@different_parameter
@pytest.mark.parametrize("world", [3])
def test_dtypes(ranks, world, variant):
    ranks(world).run(body_dtypes, variant)


def body_large_and_small(ctx, variant):
    """A sum rounded at every step would stay at 256."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    kinds = [(torch.bfloat16, 256.0), (torch.float16, 2048.0), (torch.float8_e4m3fn, 16.0)]
    for dtype, large in kinds[: 1 if world > 4 else 3]:
        # The large value stands at another rank in every column.
        values = torch.eye(world) * (large - 1) + 1
        inp = Buffer(ctx, (3, world), dtype).set(values[rank].expand(3, world).to(dtype))
        out = Buffer(ctx, (3, world), dtype)
        ctx.ccl.all_reduce(out.tensor, inp.tensor, config=config(variant, comm_sms=1))
        ctx.synchronize()
        out.check(torch.full((3, world), large + world - 1).to(dtype))


@pytest.mark.parametrize(
    ("world", "variant"), [(3, variant) for variant in OWN] + [(8, variant) for variant in ("push", "two_shot", "ring")]
)
def test_sums_are_rounded_once(ranks, world, variant):
    ranks(world).run(body_large_and_small, variant)


def body_random(ctx, dtype, variants):
    """Every variant's result of one set of random numbers."""
    shape = (149,)
    inputs = inputs_of(ctx, shape, dtype, 7, movable)
    inp = Buffer(ctx, shape, dtype).set(inputs[ctx.get_rank()])
    results = {}
    for variant in variants:
        out = Buffer(ctx, shape, dtype)
        ctx.ccl.all_reduce(out.tensor, inp.tensor, config=config(variant, comm_sms=2, block_size_m=1))
        ctx.synchronize()
        # One addition a rank; inputs are about 1, so float32 errors are those of as many products.
        assert_close(out.tensor.cpu(), reference.all_reduce(inputs), dtype, k=ctx.get_num_ranks())
        results[variant] = out.tensor.cpu().clone()
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_and_variants_agree(ranks, world, dtype):
    every = ranks(world).run(body_random, dtype, OWN)
    for variant in OWN:
        for results in every[1:]:
            assert_bitwise_equal(results[variant], every[0][variant])
    for variant in IN_ORDER:
        assert_bitwise_equal(every[0][variant], every[0]["push"])
    # The same again, bit by bit.
    again = ranks(world).run(body_random, dtype, EXACT)
    for variant in EXACT:
        assert_bitwise_equal(again[0][variant], every[0][variant])


def body_ops(ctx, variant):
    cases = [(op, dtype) for op in ("SUM", "PRODUCT", "MIN", "MAX") for dtype in (torch.bfloat16, torch.int32)]
    cases += [("MAX", torch.float64), ("MIN", torch.uint8), ("PRODUCT", torch.int64), ("AVG", torch.float32)]
    cases += [("AVG", torch.bfloat16), ("MAX", torch.float8_e4m3fn), ("PRODUCT", torch.int8)]
    for seed, (op, dtype) in enumerate(cases):
        if variant in ("atomic", "spinlock") and op not in ("SUM", "AVG"):
            continue  # test_what_variants_refuse has these
        if variant == "torch" and (op == "AVG" or dtype in FP8):
            continue  # and these
        inputs = inputs_of(ctx, (37,), dtype, seed, factors)
        inp, out = Buffer(ctx, (37,), dtype).set(inputs[ctx.get_rank()]), Buffer(ctx, (37,), dtype)
        ctx.ccl.all_reduce(out.tensor, inp.tensor, ReduceOp[op], config=config(variant, comm_sms=1))
        ctx.synchronize()
        want = reference.all_reduce(inputs, op)
        if op == "AVG":
            # A sum that is exact is divided in float32, and rounded once more to a narrower type.
            total = reference.all_reduce(inputs).to(torch.float32)
            out.check((total / ctx.get_num_ranks()).to(dtype))
        else:
            out.check(rounded(want, dtype))


@different_parameter
@pytest.mark.parametrize("world", [3])
def test_operations(ranks, world, variant):
    ranks(world).run(body_ops, variant)


def body_every_name_of_an_operation(ctx):
    dist = torch.distributed
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inp, out = Buffer(ctx, (5,), torch.float32), Buffer(ctx, (5,), torch.float32)
    inp.set(torch.full((5,), rank + 1.0))
    total, last = float(sum(range(1, world + 1))), float(world)
    for op, want in (
        (None, total), (ReduceOp.SUM, total), (0, total), (dist.ReduceOp.SUM, total),
        (ReduceOp.MAX, last), (3, last), (dist.ReduceOp.MAX, last),
        (dist.ReduceOp.AVG, total / world), (dist.ReduceOp.MIN, 1.0),
    ):  # fmt: skip
        out.clear()
        ctx.ccl.all_reduce(out.tensor, inp.tensor, op)
        ctx.synchronize()
        out.check(torch.full((5,), want))


@pytest.mark.parametrize("world", [2])
def test_every_name_of_an_operation(ranks, world):
    ranks(world).run(body_every_name_of_an_operation)


def body_nan(ctx, variant):
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    for dtype in (torch.float32, torch.float16):
        inputs = inputs_of(ctx, (3 * world,), dtype, 1, movable)
        for r in range(world):
            inputs[r][3 * r] = float("nan")
            inputs[r][3 * r + 1] = float("inf") if r % 2 else float("-inf")
        inp = Buffer(ctx, (3 * world,), dtype).set(inputs[rank])
        for op in ("MIN", "MAX"):
            out = Buffer(ctx, (3 * world,), dtype)
            ctx.ccl.all_reduce(out.tensor, inp.tensor, ReduceOp[op], config=config(variant))
            ctx.synchronize()
            got, want = out.tensor.cpu(), reference.all_reduce(inputs, op).to(dtype)
            assert got.isnan().tolist() == [place % 3 == 0 for place in range(3 * world)]
            assert_same(got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0))


@pytest.mark.parametrize("variant", EXACT)
@pytest.mark.parametrize("world", [3])
def test_nan_wins_in_minimum_and_maximum(ranks, world, variant):
    ranks(world).run(body_nan, variant)


def body_layouts(ctx, variant, shape):
    for seed, layout in enumerate(LAYOUTS):
        other = LAYOUTS[(seed + 2) % len(LAYOUTS)]
        inputs = inputs_of(ctx, shape, torch.bfloat16, seed)
        inp = Buffer(ctx, shape, torch.bfloat16, layout).set(inputs[ctx.get_rank()])
        out = Buffer(ctx, shape, torch.bfloat16, other)
        ctx.ccl.all_reduce(out.tensor, inp.tensor, config=config(variant, block_size_m=1))
        ctx.synchronize()
        out.check(rounded(reference.all_reduce(inputs), torch.bfloat16))
        inp.check(inputs[ctx.get_rank()])


@pytest.mark.parametrize("variant", [v for v in DIFFERENT if v != "torch"])
@pytest.mark.parametrize("world", [3])
def test_layouts(ranks, world, variant):
    ranks(world).run(body_layouts, variant, (9, 17))


def body_in_place(ctx, variant):
    for seed, layout in enumerate(("plain", "columns", "transposed")):
        inputs = inputs_of(ctx, (11, 13), torch.float32, seed)
        both = Buffer(ctx, (11, 13), torch.float32, layout)
        for turn in range(2 if layout == "plain" else 1):
            both.set(inputs[ctx.get_rank()] + turn)
            if variant == "torch" and not both.tensor.is_contiguous():
                continue
            ctx.ccl.all_reduce(both.tensor, both.tensor, config=config(variant, comm_sms=2, block_size_m=1))
            ctx.synchronize()
            both.check(rounded(reference.all_reduce([i + turn for i in inputs]), torch.float32))
            ctx.barrier()


@pytest.mark.parametrize("variant", [v for v in IN_PLACE if v not in ("spinlock", None)])
@pytest.mark.parametrize("world", [1, 3])
def test_in_place(ranks, world, variant):
    ranks(world).run(body_in_place, variant)


def body_anywhere(ctx, variant, out_heap, inp_heap):
    shape = (300,)
    inputs = inputs_of(ctx, shape, torch.float16, 3)
    inp = Buffer(ctx, shape, torch.float16, heap=inp_heap).set(inputs[ctx.get_rank()])
    out = Buffer(ctx, shape, torch.float16, heap=out_heap)
    plan = ctx.ccl.all_reduce(out.tensor, inp.tensor, config=config(variant) if variant else None).plan
    ctx.synchronize()
    out.check(rounded(reference.all_reduce(inputs), torch.float16))
    return plan.algorithm


@pytest.mark.parametrize("variant", ["push", "ring", "torch", None])
@pytest.mark.parametrize("world", [1, 2])
def test_tensors_anywhere(ranks, world, variant):
    got = ranks(world).run(body_anywhere, variant, False, False)
    assert set(got) == {"copy" if world == 1 else variant or "push"}


@pytest.mark.parametrize(
    ("variant", "out_heap", "inp_heap"),
    [("one_shot", False, True), ("atomic", True, False), ("spinlock", True, False)],
)
@pytest.mark.parametrize("world", [2, 3])
def test_one_tensor_on_the_heap(ranks, world, variant, out_heap, inp_heap):
    assert set(ranks(world).run(body_anywhere, variant, out_heap, inp_heap)) == {variant}


NEEDED = {
    "one_shot": ["input_tensor"],
    "two_shot": ["input_tensor", "output_tensor"],
    "atomic": ["output_tensor"],
    "spinlock": ["output_tensor"],
}


def body_misplaced(ctx, variant, misplaced):
    heap = {name: name != misplaced for name in ("output_tensor", "input_tensor")}
    out = Buffer(ctx, (300,), torch.float32, heap=heap["output_tensor"]).tensor
    inp = Buffer(ctx, (300,), torch.float32, heap=heap["input_tensor"]).tensor
    with pytest.raises(NotSymmetricError, match=f"{misplaced} is .*ctx.as_symmetric"):
        ctx.ccl.all_reduce(out, inp, config=config(variant))
    # The context goes on.
    body_anywhere(ctx, variant, True, True)


@pytest.mark.parametrize(("variant", "misplaced"), [(v, name) for v, names in NEEDED.items() for name in names])
@pytest.mark.parametrize("world", [2])
def test_misplaced_tensors(ranks, world, variant, misplaced):
    ranks(world).run(body_misplaced, variant, misplaced)


def body_refusals(ctx):
    x, y = ctx.zeros(8, dtype=torch.float32), ctx.zeros(8, dtype=torch.float32)
    with pytest.raises(ArgumentError, match="one_shot cannot work in place"):
        ctx.ccl.all_reduce(x, x, config=config("one_shot"))
    for variant in ("atomic", "spinlock"):
        with pytest.raises(UnsupportedError, match=r"SUM and AVG, not MAX"):
            ctx.ccl.all_reduce(y, x, ReduceOp.MAX, config=config(variant))
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, torch.distributed.ReduceOp.BXOR):
        with pytest.raises(ValueError, match=r"B[A-Z]+ is not supported; possible: SUM, PRODUCT, MIN, MAX, AVG"):
            ctx.ccl.all_reduce(y, x, op)
    with pytest.raises(ArgumentError, match="'SUM'"):
        ctx.ccl.all_reduce(y, x, "SUM")
    whole = ctx.zeros(8, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="AVG needs a floating-point dtype"):
        ctx.ccl.all_reduce(ctx.zeros(8, dtype=torch.int32), whole, ReduceOp.AVG)
    for dtype in (torch.bool, torch.complex64):
        strange = ctx.zeros(8, dtype=dtype)
        with pytest.raises(UnsupportedError, match="cannot be reduced; possible: float64"):
            ctx.ccl.all_reduce(ctx.zeros(8, dtype=dtype), strange)


@pytest.mark.parametrize("world", [2])
def test_what_variants_refuse(ranks, world):
    ranks(world).run(body_refusals)


def body_torch_refuses(ctx):
    for dtype in (*FP8, torch.int16):
        out, inp = ctx.zeros(8, dtype=dtype), ctx.zeros(8, dtype=dtype)
        with pytest.raises(UnsupportedError, match=f"do not reduce torch.{name_of(dtype)}"):
            ctx.ccl.all_reduce(out, inp, config=config("torch"))
    x = ctx.zeros(8, 8, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="contiguous"):
        ctx.ccl.all_reduce(x[:, ::2], ctx.zeros(8, 4, dtype=torch.float32), config=config("torch"))
    with pytest.raises(UnsupportedError, match="sequence of ranks"):
        ctx.ccl.all_reduce(x, ctx.zeros(8, 8, dtype=torch.float32), group=[1, 0], config=config("torch"))


@pytest.mark.parametrize("world", [2])
def test_what_torch_refuses(ranks, world):
    ranks(world).run(body_torch_refuses)


def body_aliases(ctx):
    base = ctx.zeros(64, dtype=torch.float32)
    for out, inp in ((base[1:33], base[:32]), (base[:16].view(4, 4), base[:16].view(4, 4).t())):
        with pytest.raises(ArgumentError, match="overlap in memory"):
            ctx.ccl.all_reduce(out, inp)
    with pytest.raises(ArgumentError, match="expanded"):
        ctx.ccl.all_reduce(base[:1].expand(8), base[8:16])
    with pytest.raises(ArgumentError, match=r"shape \(8,\), got \(9,\)"):
        ctx.ccl.all_reduce(base[:9], base[16:24])
    holes = base.as_strided((2, 3, 4), (1, 3, 12), 20)
    with pytest.raises(ArgumentError, match=r"strides \(1, 3, 12\).*contiguous\(\)"):
        ctx.ccl.all_reduce(ctx.zeros(2, 3, 4, dtype=torch.float32), holes)
    ctx.ccl.all_reduce(base[:24].view(2, 3, 4)[:0], holes[:0])  # empty, so without strides


@pytest.mark.parametrize("world", [1, 2])
def test_aliases_and_layouts_that_are_refused(ranks, world):
    ranks(world).run(body_aliases)


def body_expanded_input(ctx):
    """An input whose elements share memory is only read."""
    world, rank = ctx.get_num_ranks(), ctx.get_rank()
    row = Buffer(ctx, (6,), torch.float32).set(torch.arange(6.0) + rank)
    for variant in EXACT:
        out = Buffer(ctx, (4, 6), torch.float32)
        ctx.ccl.all_reduce(out.tensor, row.tensor.expand(4, 6), config=config(variant))
        ctx.synchronize()
        out.check((torch.arange(6.0) * world + sum(range(world))).expand(4, 6))


@pytest.mark.parametrize("world", [2])
def test_expanded_inputs(ranks, world):
    ranks(world).run(body_expanded_input)


def body_many_calls(ctx, calls):
    """No host synchronisation between calls; each result is copied in the stream. Algorithms take turns."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inp, out = ctx.zeros(10, 3, dtype=torch.bfloat16), ctx.zeros(10, 3, dtype=torch.bfloat16)
    place = torch.arange(30, device=ctx.get_device()).view(10, 3) % 4
    results = []
    for call in range(calls):
        if (call + rank) % 17 == 5:
            time.sleep(0.003)
        inp.copy_(place + rank + call % 8)
        out.fill_(float("nan"))
        ctx.ccl.all_reduce(out, inp, config=config(VARIANTS[call % len(VARIANTS)]))
        results.append(out.clone())
    ctx.synchronize()
    for call, got in enumerate(results):
        want = world * (place + call % 8) + sum(range(world))
        assert torch.equal(got, want.to(torch.bfloat16)), call


@pytest.mark.parametrize("world", [2, 3])
def test_many_calls_in_a_row(ranks, world):
    ranks(world).run(body_many_calls, 50)


def body_late(ctx):
    """A rank comes late; then another does, when the first has gone on to change what it gave."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inp, out = ctx.zeros(70, dtype=torch.float32), ctx.zeros(70, dtype=torch.float32)
    for variant in OWN:
        for late in range(2):
            if rank == late % world:
                time.sleep(0.02)
            inp.fill_(rank + 10.0 * late)
            ctx.ccl.all_reduce(out, inp, config=config(variant, comm_sms=1))
            inp.fill_(float("nan"))
            assert (out.cpu() == sum(range(world)) + 10.0 * late * world).all(), variant


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_comes_late(ranks, world):
    ranks(world).run(body_late)


def body_sizes(ctx, variant):
    """Around the capacity of the slots of one program, and of two."""
    slot = ctx.channels.layout.slot_bytes // 4 * (1 if variant == "push" else ctx.get_num_ranks())
    for n, programs in ((slot, 1), (slot + 1, 1), (3 * slot + 5, 1), (2 * slot + 1, 2)):
        inputs = inputs_of(ctx, (n,), torch.float32, n)
        inp, out = Buffer(ctx, (n,), torch.float32).set(inputs[ctx.get_rank()]), Buffer(ctx, (n,), torch.float32)
        ctx.ccl.all_reduce(out.tensor, inp.tensor, config=config(variant, comm_sms=programs, block_size_m=64))
        ctx.synchronize()
        out.check(reference.all_reduce(inputs).to(torch.float32))


@pytest.mark.parametrize("variant", ["push", "ring", "atomic", "spinlock"])
@pytest.mark.parametrize("world", [2])
def test_messages_larger_than_the_slots(ranks, world, variant):
    ranks(world).run(body_sizes, variant)


def body_two_rings(ctx):
    for seed, n in enumerate((40, 1400)):
        inputs = inputs_of(ctx, (n,), torch.float32, seed)
        inp, out = Buffer(ctx, (n,), torch.float32).set(inputs[ctx.get_rank()]), Buffer(ctx, (n,), torch.float32)
        ctx.ccl.all_reduce(out.tensor, inp.tensor, config=config("ring", all_reduce_num_rings=2))
        ctx.synchronize()
        out.check(reference.all_reduce(inputs).to(torch.float32))


@pytest.mark.parametrize("world", [2, 3])
def test_two_rings(ranks, world):
    ranks(world).run(body_two_rings)


def body_module_form(ctx):
    import iris.ccl.all_reduce

    inputs = inputs_of(ctx, (6,), torch.float32, 1)
    inp, out = Buffer(ctx, (6,), torch.float32).set(inputs[ctx.get_rank()]), Buffer(ctx, (6,), torch.float32)
    work = iris.ccl.all_reduce.all_reduce(out.tensor, inp.tensor, ctx)
    ctx.synchronize()
    out.check(reference.all_reduce(inputs).to(torch.float32))
    assert (work.variant, work.shape, work.dtype) == (work.plan.algorithm, (6,), torch.float32)


def test_module_form(ranks, world):
    ranks(world).run(body_module_form)


def body_two_results(ctx):
    """The caller owns the outputs: a later call leaves an earlier one's result alone."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    outs = [ctx.zeros(40, dtype=torch.float32) for _ in range(2)]
    for turn, out in enumerate(outs):
        ctx.ccl.all_reduce(out, ctx.full((40,), rank + 10.0 * turn, dtype=torch.float32))
    ctx.synchronize()
    for turn, out in enumerate(outs):
        assert (out == sum(range(world)) + 10.0 * turn * world).all()


@pytest.mark.parametrize("world", [2])
def test_results_are_the_callers(ranks, world):
    ranks(world).run(body_two_results)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2], ids=name_of)
def test_ranks_and_variants_agree_in_other_types(ranks, world, dtype):
    test_ranks_and_variants_agree(ranks, world, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("variant", OWN)
@pytest.mark.parametrize("world", [7])
def test_seven_ranks(ranks, world, variant, dtype):
    ranks(world).run(body_shapes, variant, [((n,), dtype) for n in (1, 13, 700)], HOW)


def body_large(ctx, variant):
    """U45: changing random data through one workspace, tiles queueing behind few programs."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    inp, out = ctx.zeros(3000, dtype=torch.bfloat16), ctx.zeros(3000, dtype=torch.bfloat16)
    workspace = ctx.ccl.all_reduce_preamble(out, inp)
    for call in range(10):
        inputs = [random_tensor((3000,), torch.bfloat16, seed=call, rank=r) for r in range(world)]
        inp.copy_(inputs[rank])
        out.fill_(float("nan"))
        ctx.ccl.all_reduce(out, inp, config=config(variant, comm_sms=2, block_size_m=1), workspace=workspace)
        ctx.synchronize()
        assert_close(out.cpu(), reference.all_reduce(inputs), torch.bfloat16, k=world)


@pytest.mark.slow
@pytest.mark.parametrize("variant", OWN)
@pytest.mark.parametrize("world", [4])
def test_a_workspace_for_changing_data(ranks, world, variant):
    ranks(world).run(body_large, variant)
