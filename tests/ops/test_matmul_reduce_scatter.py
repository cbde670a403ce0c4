"""matmul_reduce_scatter against its float64 definition: algorithms, shapes, layouts, dtypes, errors on every rank."""

import pytest
import torch

import reduced_products as bodies
from iris import _target
from reduced_products import ALIKE, algorithms, slow
from reduced_products import SCATTER as OPERATION

KERNELS = bodies.KERNELS[OPERATION]
kernels = pytest.mark.parametrize("algorithm", KERNELS)


@algorithms(OPERATION)
@pytest.mark.parametrize("world", [1, 2, 3, slow(4)])
def test_ragged_shapes(ranks, world, algorithm):
    ranks(world).run(bodies.body_shapes, OPERATION, algorithm, bodies.SHAPES)


@pytest.mark.slow
@pytest.mark.timeout(400)
@kernels
def test_more_shapes(ranks, world, algorithm):
    ranks(world).run(bodies.body_shapes, OPERATION, algorithm, bodies.MORE_SHAPES, timeout=300)


@pytest.mark.parametrize("world", [3, slow(1), slow(2), slow(4)])
def test_empty_tensors(ranks, world):
    ranks(world).run(bodies.body_empty, OPERATION, ("torch", *KERNELS))


@algorithms(OPERATION, ("one_shot",))
@pytest.mark.parametrize(("world", "every_output"), [(2, False), slow(1, True), slow(3, True), slow(4, True)])
def test_dtypes(ranks, world, algorithm, every_output):
    """A product's dtypes, fp8 without scales among them; PyTorch refuses int8."""
    ranks(world).run(bodies.body_dtypes, OPERATION, algorithm, every_output)


@algorithms(OPERATION, ("one_shot",))
@pytest.mark.parametrize("world", [2, slow(3), slow(4)])
def test_random_data_within_tolerance(ranks, world, algorithm):
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    ranks(world).run(bodies.body_random, OPERATION, algorithm, dtypes)


@algorithms(OPERATION, ALIKE)
@pytest.mark.parametrize("world", [3, slow(2)])
def test_all_four_transposes(ranks, world, algorithm):
    ranks(world).run(bodies.body_layouts, OPERATION, algorithm)


@algorithms(OPERATION, ALIKE)
@pytest.mark.parametrize("world", [2, slow(1), slow(3), slow(4)])
def test_strided_views(ranks, world, algorithm):
    ranks(world).run(bodies.body_strides, OPERATION, algorithm)


@algorithms(OPERATION, ALIKE)
@pytest.mark.parametrize("world", [3, slow(1), slow(2), slow(4)])
def test_bias_axes(ranks, world, algorithm):
    ranks(world).run(bodies.body_bias, OPERATION, algorithm)


def test_bias_of_a_square_output_goes_along_the_columns(sim):
    sim.run(bodies.body_square_bias, 2, OPERATION)


@algorithms(OPERATION, ALIKE)
@pytest.mark.parametrize("world", [2, slow(3)])
def test_scales_of_fp8(ranks, world, algorithm):
    ranks(world).run(bodies.body_scales, OPERATION, algorithm)


@algorithms(OPERATION)
@pytest.mark.parametrize(
    ("world", "preamble"), [(2, True), slow(3, False), slow(4, True), slow(2, False), slow(1, True)]
)
def test_one_workspace_many_calls(ranks, world, algorithm, preamble):
    ranks(world).run(bodies.body_reuse, OPERATION, algorithm, preamble)


@pytest.mark.parametrize("world", [2, slow(1), slow(3), slow(4)])
def test_one_memory_for_all_shapes(ranks, world):
    sizes = ranks(world).run(bodies.body_one_memory, OPERATION, ("fused",))
    assert len(set(sizes)) == 1
    assert sizes[0][0] >= 70 * 140 * 4


@algorithms(OPERATION, ALIKE)
@pytest.mark.parametrize("world", [2, slow(1), slow(3), slow(4)])
def test_async_op_then_wait(ranks, world, algorithm):
    ranks(world).run(bodies.body_async, OPERATION, algorithm)


@kernels
@pytest.mark.parametrize("world", [2, slow(4)])
def test_no_barrier_of_the_caller_is_needed(ranks, world, algorithm):
    ranks(world).run(bodies.body_late_rank, OPERATION, algorithm)


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("names", [KERNELS[:1], slow(("torch", *KERNELS[1:]))], ids="-".join)
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


@algorithms(OPERATION)
@pytest.mark.parametrize("world", [3, slow(4)])
def test_same_bits(ranks, world, algorithm):
    ranks(world).run(bodies.body_bitwise, OPERATION, algorithm)


def test_under_torch_compile(sim):
    sim.run(bodies.body_torch_compile, 2, OPERATION)


@pytest.mark.parametrize("count", [2])
def test_memory_does_not_grow_in_a_capture(sim, count):
    sim.run(bodies.body_capture, count, OPERATION)


@pytest.mark.parametrize("count", [2])
def test_memory_goes_back_to_the_heap(sim, count):
    sim.run(bodies.body_heap, count, OPERATION)


@kernels
@pytest.mark.parametrize("count", [2])
def test_spans_of_a_trace(sim, algorithm, count):
    sim.run(bodies.body_traced, count, OPERATION, algorithm)


@pytest.mark.slow
@algorithms(OPERATION)
@pytest.mark.parametrize("count", [5, 8])
def test_more_ranks(ranks, count, algorithm):
    ranks(count).run(bodies.body_shapes, OPERATION, algorithm, [(5, 40, 9), (70, 130, 12)])


@kernels
@pytest.mark.parametrize("world", [3, slow(2)])
def test_one_program(ranks, world, algorithm):
    ranks(world).run(bodies.body_one_program, OPERATION, algorithm, (40, 40, 10))


@kernels
@pytest.mark.sim(device="h200", resident_programs=1)
def test_one_program_at_a_time_does_all(sim, algorithm):
    """Nobody waits for a tile that only a program that has not started would multiply."""
    sim.run(bodies.body_seeds, 3, OPERATION, algorithm, 40, 1)


@pytest.mark.seeds(4)
@pytest.mark.sim(device="h200")
@kernels
def test_in_any_order(sim, algorithm):
    count = (2, 3, 2, 3, 2, 1, 2, 3, 4, 2)[sim.seed % 10]
    sim.run(bodies.body_seeds, count, OPERATION, algorithm, 20, 1 + (sim.seed % 5 == 0))


@pytest.mark.slow
@pytest.mark.seeds(20)
@pytest.mark.sim(device="h200")
@kernels
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_in_any_order_with_any_ranks(sim, algorithm, count):
    sim.run(bodies.body_seeds, count, OPERATION, algorithm, 50, 3)


@kernels
@pytest.mark.parametrize(
    ("count", "cases"),
    [(2, bodies.DESCRIBED[:4]), slow(3, bodies.DESCRIBED), slow(1, bodies.DESCRIBED)],
    ids=lambda value: str(value) if isinstance(value, int) else f"{len(value)}cases",
)
def test_operands_by_descriptors(sim, monkeypatch, algorithm, count, cases):
    """As on targets that have a unit for it, which the interpreter stands for."""
    monkeypatch.setattr(_target.Target, "descriptors", True)
    sim.run(bodies.body_descriptors, count, OPERATION, algorithm, cases, device="h200")
