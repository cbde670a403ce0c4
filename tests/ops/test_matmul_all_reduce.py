"""matmul_all_reduce against its float64 definition: algorithms, shapes, layouts, dtypes, errors on every rank."""

from dataclasses import replace

import pytest
import torch

import iris
import reduced_products as bodies
from iris import _target
from iris.errors import ArgumentError, NotSymmetricError
from iris.ops import FusedConfig, _moving_sums
from reduced_products import ALIKE, MOVING, algorithms, slow
from reduced_products import REDUCE as OPERATION

KERNELS = bodies.KERNELS[OPERATION]
kernels = pytest.mark.parametrize("algorithm", KERNELS)
moving = pytest.mark.parametrize("algorithm", MOVING)
# Those whose sums move without an order do the rest as a ring does.
fewer_kernels = pytest.mark.parametrize(
    "algorithm", [slow(name) if name in ("atomic", "spinlock") else name for name in KERNELS]
)
exchanged = pytest.mark.parametrize("algorithm", [name for name in KERNELS if name not in MOVING])


@algorithms(OPERATION, MOVING)
@pytest.mark.parametrize("world", [1, 2, 3, slow(4)])
def test_ragged_shapes(ranks, world, algorithm):
    ranks(world).run(bodies.body_shapes, OPERATION, algorithm, bodies.SHAPES)


@moving
@pytest.mark.parametrize("world", [2, 3])
def test_ragged_shapes_with_sums_that_move(ranks, world, algorithm):
    ranks(world).run(bodies.body_shapes, OPERATION, algorithm, bodies.SHAPES[1:])


@pytest.mark.slow
@pytest.mark.timeout(400)
@kernels
def test_more_shapes(ranks, world, algorithm):
    ranks(world).run(bodies.body_shapes, OPERATION, algorithm, bodies.MORE_SHAPES, timeout=300)


@pytest.mark.parametrize("world", [3, slow(1), slow(2), slow(4)])
def test_empty_tensors(ranks, world):
    ranks(world).run(bodies.body_empty, OPERATION, ("torch", *KERNELS))


@algorithms(OPERATION, ("one_shot", *MOVING))
@pytest.mark.parametrize(("world", "every_output"), [(2, False), slow(1, True), slow(3, True), slow(4, True)])
def test_dtypes(ranks, world, algorithm, every_output):
    """A product's dtypes, fp8 without scales among them; PyTorch refuses int8."""
    ranks(world).run(bodies.body_dtypes, OPERATION, algorithm, every_output)


@algorithms(OPERATION, ("one_shot", "atomic", "spinlock"))
@pytest.mark.parametrize("world", [2, slow(3), slow(4)])
def test_random_data_within_tolerance(ranks, world, algorithm):
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    ranks(world).run(bodies.body_random, OPERATION, algorithm, dtypes)


@algorithms(OPERATION, (*ALIKE, *MOVING))
@pytest.mark.parametrize("world", [3, slow(2)])
def test_all_four_transposes(ranks, world, algorithm):
    ranks(world).run(bodies.body_layouts, OPERATION, algorithm)


@algorithms(OPERATION, (*ALIKE, *MOVING))
@pytest.mark.parametrize("world", [2, slow(1), slow(3), slow(4)])
def test_strided_views(ranks, world, algorithm):
    ranks(world).run(bodies.body_strides, OPERATION, algorithm)


@algorithms(OPERATION, (*ALIKE, *MOVING))
@pytest.mark.parametrize("world", [3, slow(1), slow(2), slow(4)])
def test_bias_axes(ranks, world, algorithm):
    ranks(world).run(bodies.body_bias, OPERATION, algorithm)


def test_bias_of_a_square_output_goes_along_the_columns(sim):
    sim.run(bodies.body_square_bias, 2, OPERATION)


@algorithms(OPERATION, (*ALIKE, "atomic", "spinlock"))
@pytest.mark.parametrize("world", [2, slow(3)])
def test_scales_of_fp8(ranks, world, algorithm):
    ranks(world).run(bodies.body_scales, OPERATION, algorithm)


@algorithms(OPERATION, ("atomic", "spinlock"))
@pytest.mark.parametrize(
    ("world", "preamble"), [(2, True), slow(3, False), slow(4, True), slow(2, False), slow(1, True)]
)
def test_one_workspace_many_calls(ranks, world, algorithm, preamble):
    ranks(world).run(bodies.body_reuse, OPERATION, algorithm, preamble)


@pytest.mark.parametrize("world", [2, slow(1), slow(3), slow(4)])
@pytest.mark.parametrize(
    "names",
    [("two_shot", "one_shot"), slow(("ring",)), slow(("atomic",)), slow(("spinlock",)), slow(KERNELS)],
    ids="-".join,
)
def test_one_memory_for_all_shapes(ranks, world, names):
    sizes = ranks(world).run(bodies.body_one_memory, OPERATION, names)
    assert len(set(sizes)) == 1
    assert sizes[0][0] >= 70 * 140 * 4 // (1 if names[-1] == "one_shot" else world)


@algorithms(OPERATION, (*ALIKE, *MOVING))
@pytest.mark.parametrize("world", [2, slow(1), slow(3), slow(4)])
def test_async_op_then_wait(ranks, world, algorithm):
    ranks(world).run(bodies.body_async, OPERATION, algorithm)


@fewer_kernels
@pytest.mark.parametrize("world", [2, slow(4)])
def test_no_barrier_of_the_caller_is_needed(ranks, world, algorithm):
    ranks(world).run(bodies.body_late_rank, OPERATION, algorithm)


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("names", [KERNELS[:1], slow(("torch", *KERNELS[1:3])), slow(KERNELS[3:])], ids="-".join)
def test_groups_in_any_order_at_once(ranks, world, names):
    ranks(world).run(bodies.body_groups, OPERATION, names)


@pytest.mark.parametrize("world", [1, 2, slow(3), slow(4)])
def test_bad_arguments_are_refused_on_every_rank(ranks, world):
    ranks(world).run(bodies.body_errors, OPERATION)


@pytest.mark.parametrize("world", [2, slow(3)])
def test_ranks_that_disagree_all_learn_of_it(ranks, world):
    ranks(world).run(bodies.body_disagreement, OPERATION)


@pytest.mark.parametrize("world", [1, 2])
def test_explain_tells_what_runs(ranks, world):
    ranks(world).run(bodies.body_explain, OPERATION)


@algorithms(OPERATION, ("atomic", "spinlock"))
@pytest.mark.parametrize("world", [3, slow(4)])
def test_same_bits(ranks, world, algorithm):
    ranks(world).run(bodies.body_bitwise, OPERATION, algorithm)


def test_under_torch_compile(sim):
    sim.run(bodies.body_torch_compile, 2, OPERATION)


@pytest.mark.parametrize("count", [slow(2)])
def test_memory_does_not_grow_in_a_capture(sim, count):
    sim.run(bodies.body_capture, count, OPERATION)


@pytest.mark.parametrize("count", [slow(2)])
def test_memory_goes_back_to_the_heap(sim, count):
    sim.run(bodies.body_heap, count, OPERATION)


@fewer_kernels
@pytest.mark.parametrize("count", [2])
def test_spans_of_a_trace(sim, algorithm, count):
    sim.run(bodies.body_traced, count, OPERATION, algorithm)


@pytest.mark.slow
@algorithms(OPERATION)
@pytest.mark.parametrize("count", [5, 8])
def test_more_ranks(ranks, count, algorithm):
    ranks(count).run(bodies.body_shapes, OPERATION, algorithm, [(5, 40, 9), (70, 130, 12)])


@fewer_kernels
@pytest.mark.parametrize("world", [3, slow(2)])
def test_one_program(ranks, world, algorithm):
    ranks(world).run(bodies.body_one_program, OPERATION, algorithm, (40, 40, 10))


@pytest.mark.slow
@pytest.mark.timeout(400)
@moving
@pytest.mark.parametrize(("world", "calls"), [(2, 200), (3, 100), (4, 12), (8, 6)])
def test_many_calls_in_one_workspace(ranks, world, algorithm, calls):
    ranks(world).run(bodies.body_many_calls, algorithm, calls, timeout=300)


@pytest.mark.parametrize("world", [3, slow(2), slow(4), slow(8)])
def test_sums_that_move_are_rounded_once(ranks, world):
    ranks(world).run(bodies.body_rounded_once)


@pytest.mark.sim(device="h200")
def body_larger_tiles(ctx):
    for rows in (16, 32, 16, 64):
        p = bodies.problem(ctx, 3 * rows, 80, 20, operation=OPERATION, seed=rows)
        config = FusedConfig(rows, 32, 32, num_sms=3, num_warps=1, num_stages=1)
        bodies.call(ctx, OPERATION, p, algorithm="ring", config=config)
        bodies.check(ctx, OPERATION, p)


def test_a_ring_counts_on_when_its_memory_has_grown(sim, monkeypatch):
    # More messages than slots before it grows: then who waits for a free slot needs what was counted before.
    monkeypatch.setattr(_moving_sums, "RING_SLOTS", 2)
    sim.run(body_larger_tiles, 2)


@pytest.mark.parametrize(("count", "slots"), [(3, 1), slow(2, 2), slow(3, 2), slow(4, 1), slow(8, 4)])
def test_a_ring_with_few_slots(sim, monkeypatch, count, slots):
    """A slot is used again within a call, when the next rank has read it."""
    monkeypatch.setattr(_moving_sums, "RING_SLOTS", slots)
    sim.run(bodies.body_many_calls, count, "ring", 2)


@pytest.mark.slow
@pytest.mark.seeds(20)
@pytest.mark.sim(device="h200", resident_programs=1)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_ring_with_one_slot_and_one_program_at_a_time(sim, monkeypatch, count):
    monkeypatch.setattr(_moving_sums, "RING_SLOTS", 1)
    sim.run(bodies.body_many_calls, count, "ring", 2)


@kernels
@pytest.mark.sim(device="h200", resident_programs=1)
def test_one_program_at_a_time_does_all(sim, algorithm):
    """Nobody waits for a tile that only a program that has not started would multiply."""
    sim.run(bodies.body_seeds, 3, OPERATION, algorithm, 40, 1)


@pytest.mark.seeds(4)
@pytest.mark.sim(device="h200")
@exchanged
def test_in_any_order(sim, algorithm):
    count = (2, 3, 2, 3, 2, 1, 2, 3, 4, 2)[sim.seed % 10]
    sim.run(bodies.body_seeds, count, OPERATION, algorithm, 20, 1 + (sim.seed % 5 == 0))


@pytest.mark.seeds(2)
@pytest.mark.sim(device="h200")
@moving
def test_sums_that_move_in_any_order(sim, algorithm):
    sim.run(bodies.body_seeds, (3, 2)[sim.seed % 2], OPERATION, algorithm, 20, 2)


@pytest.mark.slow
@pytest.mark.seeds(20)
@pytest.mark.sim(device="h200")
@kernels
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_in_any_order_with_any_ranks(sim, algorithm, count):
    sim.run(bodies.body_seeds, count, OPERATION, algorithm, 50, 3)


@fewer_kernels
@pytest.mark.parametrize(
    ("count", "cases"),
    [(2, bodies.DESCRIBED[:4]), slow(3, bodies.DESCRIBED), slow(1, bodies.DESCRIBED)],
    ids=lambda value: str(value) if isinstance(value, int) else f"{len(value)}cases",
)
def test_operands_by_descriptors(sim, monkeypatch, algorithm, count, cases):
    """As on targets that have a unit for it, which the interpreter stands for."""
    monkeypatch.setattr(_target.Target, "descriptors", True)
    sim.run(bodies.body_descriptors, count, OPERATION, algorithm, cases, device="h200")


def body_where_c_lies(ctx):
    """The kernel is chosen by whether peers can write C; two_shot cannot do without."""
    p = bodies.problem(ctx, 20, 24, 8, operation=OPERATION)
    anywhere = torch.full((20, 24), float("nan"), device=ctx.get_device())
    on_heap = ctx.get_num_ranks() == 1
    chosen = ctx.ops.explain(OPERATION, anywhere, p.a, p.b).algorithm
    assert chosen == ("two_shot" if on_heap else "one_shot")
    if not on_heap:
        for how in (*({"algorithm": name} for name in ("two_shot", *MOVING)), {"config": bodies.TILES}):
            bodies.expect(NotSymmetricError, "C is written", how.get("algorithm", "two_shot"), "'one_shot'")(
                lambda how=how: ctx.ops.matmul_all_reduce(anywhere, p.a, p.b, **how)
            )
    p.out = anywhere
    assert bodies.call(ctx, OPERATION, p).plan.algorithm == chosen
    bodies.check(ctx, OPERATION, p)
    ctx.barrier()


@pytest.mark.parametrize("world", [1, 2, slow(3)])
def test_where_c_lies(ranks, world):
    ranks(world).run(body_where_c_lies)


def body_variants(ctx):
    """A configuration names the algorithm, unless the caller does."""
    p = bodies.problem(ctx, 20, 24, 8, operation=OPERATION)
    for variant in KERNELS:
        config = iris.ops.FusedConfig(32, 64, 32, all_reduce_variant=variant)
        plan = ctx.ops.explain(OPERATION, p.out, p.a, p.b, None, config)
        assert (plan.algorithm, plan.source, plan.config) == (variant, "user", config)
        plan = ctx.ops.explain(OPERATION, p.out, p.a, p.b, None, config, algorithm="one_shot")
        assert (plan.algorithm, plan.config.all_reduce_variant) == ("one_shot", "one_shot")
    workspace = ctx.ops.matmul_all_reduce(p.out, p.a, p.b, config=replace(bodies.TILES, all_reduce_variant="ring"))
    assert (workspace.variant, workspace.plan.algorithm) == ("ring", "ring")
    bodies.check(ctx, OPERATION, p)
    ctx.barrier()


def test_variants_of_a_configuration(sim):
    sim.run(body_variants, 2)


def body_ring_of_three(ctx):
    """A configuration for a ring divides its columns among the ranks; the algorithm takes any tile."""
    p = bodies.problem(ctx, 20, 24, 8, operation=OPERATION)
    config = iris.ops.FusedConfig(32, 64, 32, all_reduce_variant="ring", num_sms=2)
    bodies.expect(ArgumentError, "block_size_n=64", "world_size=3")(
        lambda: ctx.ops.matmul_all_reduce(p.out, p.a, p.b, config=config)
    )
    bodies.call(ctx, OPERATION, p, algorithm="ring", config=replace(config, all_reduce_variant="two_shot"))
    bodies.check(ctx, OPERATION, p)
    ctx.barrier()


def test_a_ring_of_three(sim):
    sim.run(body_ring_of_three, 3)
