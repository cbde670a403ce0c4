"""The order of tiles, their division along K and the limit of senders, in the kernel that adds up partial products."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import reduced_products as bodies
from iris.ops import FusedConfig, _matmul_reduce_call
from iris.ops._matmul_reduce_kernel import owned_tile
from reduced_products import REDUCE, SCATTER, slow

ALGORITHMS = [(SCATTER, "fused"), (REDUCE, "two_shot"), (REDUCE, "one_shot")]
algorithms = pytest.mark.parametrize(("operation", "algorithm"), ALGORITHMS, ids=lambda value: value)
# Several blocks of K in a piece, so K is long and tiles are small.
SMALL = FusedConfig(16, 32, 16, group_size_m=2, num_sms=3, num_warps=1, num_stages=1)


@triton.jit
def order_kernel(out, count, owned, ahead, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    positions = tl.arange(0, BLOCK)
    inside = positions < count
    distance, number = owned_tile(tl.where(inside, positions, 0), owned, ahead, WORLD)
    tl.store(out + positions, distance, mask=inside)
    tl.store(out + count + positions, number, mask=inside)


@triton.jit
def scalar_kernel(out, count, owned, ahead, WORLD: tl.constexpr):
    """One position at a time, as the kernel takes them."""
    for position in range(count):
        distance, number = owned_tile(position, owned, ahead, WORLD)
        tl.store(out + position, distance)
        tl.store(out + count + position, number)


def order(owned, ahead, world):
    """(distance, number) for each position; the same on every rank."""
    count = owned * world
    out = torch.full((2, count), -1, dtype=torch.int32)
    order_kernel[(1,)](out, count, owned, ahead, WORLD=world, BLOCK=triton.next_power_of_2(count))
    return list(zip(*out.tolist(), strict=True))


@settings(deadline=None, max_examples=40)
@given(owned=st.integers(1, 30), part=st.floats(0, 1), world=st.sampled_from([1, 2, 3, 4, 5, 8, 16]))
def test_peers_multiply_a_tile_before_its_owner_does(owned, part, world):
    ahead = round(part * owned)
    tiles = order(owned, ahead, world)
    assert sorted(tiles) == [(distance, number) for distance in range(world) for number in range(owned)]
    place = {tile: position for position, tile in enumerate(tiles)}
    for number in range(owned):
        # A rank ``distance`` before the owner has the tile at place[distance, number], the owner at place[0, number].
        assert all(place[distance, number] < place[0, number] for distance in range(1, world))
        assert [place[distance, number] for distance in range(1, world)] == sorted(
            place[distance, number] for distance in range(1, world)
        )
    for distance in range(world):
        numbers = [number for to, number in tiles if to == distance]
        assert numbers == sorted(numbers)
    if world > 1:
        # So many of each of the others come before the first own one.
        first = place[0, 0]
        assert first == min(ahead + 1, owned) * (world - 1) if ahead < owned else first == owned * (world - 1)


@pytest.mark.parametrize(("owned", "ahead", "world"), [(2, 0, 1), (3, 0, 2), (3, 1, 3), slow(3, 3, 3), slow(3, 1, 4)])
def test_scalars_and_blocks_agree(owned, ahead, world):
    count = owned * world
    out = torch.full((2, count), -1, dtype=torch.int32)
    scalar_kernel[(1,)](out, count, owned, ahead, WORLD=world)
    assert list(zip(*out.tolist(), strict=True)) == order(owned, ahead, world)


def scheduled(monkeypatch, ahead=None, senders=None, exchange=None):
    """Calls take another order, so many senders, or pieces that cost so much to exchange."""
    chosen = _matmul_reduce_call._schedule

    def schedule(ctx, problem, plan, chunk, *operands):
        s = chosen(ctx, problem, plan, chunk, *operands)
        config, world = plan.config, problem.world_size
        owned = -(-chunk // config.block_size_m) * -(-problem.N // config.block_size_n)
        owned = -(-owned // world) if plan.algorithm == "two_shot" else owned
        first = s.ahead if ahead is None else round(ahead * owned)
        return replace(s, ahead=first, senders=senders or s.senders)

    monkeypatch.setattr(_matmul_reduce_call, "_schedule", schedule)
    if exchange is not None:
        monkeypatch.setattr(_matmul_reduce_call, "exchange_time", lambda *given: exchange)


@pytest.mark.parametrize(("operation", "algorithm"), [*ALGORITHMS[:2], slow(*ALGORITHMS[2])], ids=lambda value: value)
@pytest.mark.sim(device="h200")
@pytest.mark.parametrize(("count", "ahead"), [(3, 1), slow(2, 0), slow(2, 1), slow(3, 0), slow(4, 0.5)])
def test_any_order_with_one_sender(sim, monkeypatch, operation, algorithm, count, ahead):
    scheduled(monkeypatch, ahead, senders=1)
    config = replace(SMALL, block_size_k=32, num_sms=2)
    sim.run(bodies.body_schedule, count, operation, algorithm, torch.float16, config, (40, 40, 20), 1)


@algorithms
@pytest.mark.sim(device="h200")
@pytest.mark.parametrize("count", [2, slow(1), slow(3), slow(4)])
def test_tiles_that_are_divided_along_k(sim, monkeypatch, operation, algorithm, count):
    """Blocks of K that do not come out even, in three pieces."""
    scheduled(monkeypatch, exchange=0.0)
    sizes = (16 * count, 20, 16 * 23 + 5) if operation == SCATTER else (16, 40, 16 * 23 + 5)
    config = replace(SMALL, num_sms=7 if count < 3 else 24)
    sim.run(bodies.body_schedule, count, operation, algorithm, torch.int8, config, sizes, 3)


@algorithms
@pytest.mark.sim(device="h200")
@pytest.mark.parametrize("count", [2, slow(1)])
def test_wide_tiles(sim, monkeypatch, operation, algorithm, count):
    """Sums go by halves of a tile of 256 columns; divided, with a bias, and columns that end in each half."""
    scheduled(monkeypatch, exchange=0.0)
    config = replace(SMALL, block_size_n=256, num_sms=8)
    sizes = (16 * count if operation == SCATTER else 32, 256 + 140, 16 * 17)
    sim.run(bodies.body_schedule, count, operation, algorithm, torch.float16, config, sizes, 2, calls=1)


@algorithms
@pytest.mark.sim(device="h200", resident_programs=1)
@pytest.mark.parametrize(("count", "ahead"), [(3, 0), slow(2, 1)])
def test_one_program_at_a_time(sim, monkeypatch, operation, algorithm, count, ahead):
    """Nobody waits for a piece or a tile that only a program that has not started would multiply."""
    scheduled(monkeypatch, ahead, 1, 0.0)
    sizes = (8 * count if operation == SCATTER else 16, 60, 16 * 16)
    config = replace(SMALL, num_sms=count + 1 if operation == SCATTER else 2 * count)
    sim.run(bodies.body_schedule, count, operation, algorithm, torch.float16, config, sizes, 2, calls=1)


@pytest.mark.slow
@algorithms
@pytest.mark.seeds(20)
@pytest.mark.sim(device="h200")
@pytest.mark.parametrize("count", [2, 3, 4])
def test_pieces_in_any_order(sim, monkeypatch, operation, algorithm, count):
    scheduled(monkeypatch, (0, 1, 0.5)[sim.seed % 3], 1 + sim.seed % 2, 0.0)
    sizes = (20 * count if operation == SCATTER else 40, 60, 16 * 16)
    splits = {1, 2}
    sim.run(bodies.body_schedule, count, operation, algorithm, torch.float16, replace(SMALL, num_sms=5), sizes, splits)


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ("one_shot",)), (3, ("two_shot", "one_shot", "one_shot")), slow(3, ("one_shot",)), slow(4, ("one_shot",)),
        slow(1, ("one_shot",)), slow(2, ("two_shot", "one_shot")),
    ],
    ids=lambda value: value if isinstance(value, int) else "-".join(value),
)  # fmt: skip
def test_two_buffers_in_turn(ranks, world, names):
    """A call by one_shot ends while peers may still be in it, and the next one of another shape begins."""
    ranks(world).run(bodies.body_shapes_in_turn, REDUCE, names)


@pytest.mark.slow
@pytest.mark.seeds(30)
@pytest.mark.sim(device="h200")
@pytest.mark.parametrize("count", [2, 3, 4])
def test_two_buffers_in_any_order(sim, count):
    sim.run(bodies.body_shapes_in_turn, count, REDUCE, ("one_shot",))


@pytest.mark.slow
@pytest.mark.timeout(900)
@algorithms
@pytest.mark.parametrize(("world", "calls"), [(2, 1000), (3, 200), (8, 6)])
def test_many_calls_in_one_workspace(ranks, world, operation, algorithm, calls):
    ranks(world).run(bodies.body_many_calls, algorithm, calls, operation, timeout=800)
