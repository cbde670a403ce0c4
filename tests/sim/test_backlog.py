"""How far hosts run ahead of a GPU that they share, on an imagined one whose operations wait for all ranks."""

import pytest

from iris.runtime.world import World
from iris.sim.backlog import MOST, Backlog

HELD = 1000  # operations of a rank that CUDA holds


class Gpu:
    """The n-th operation of a rank ends when every rank has issued its own."""

    def __init__(self, size):
        self.issued = [0] * size
        self.furthest = 0

    def issue(self, rank):
        self.issued[rank] += 1
        ahead = self.issued[rank] - min(self.issued)
        assert ahead <= HELD, "the host waits in the driver, and no other rank ever runs"
        self.furthest = max(self.furthest, ahead)


class Mark:
    def __init__(self, gpu, position):
        self.gpu, self.position = gpu, position

    def query(self):
        return min(self.gpu.issued) >= self.position


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("weight", [1, 7, 40])
def test_a_thousand_calls_without_a_wait_find_a_place(size, weight):
    world, gpu = World(size, seed=size, interpreted=False, timeout_s=5.0), Gpu(size)
    backlog = Backlog(world, lambda: Mark(gpu, gpu.issued[world.rank()]))

    def body():
        for _ in range(3000 // weight):
            backlog.issued(weight)
            gpu.issue(world.rank())

    world.run([body] * size)
    assert gpu.issued == [3000 // weight] * size
    assert 1 < gpu.furthest * min(weight, 32) <= MOST + 64


def test_a_rank_that_is_not_far_ahead_waits_for_nobody():
    world, gpu = World(2, seed=0, interpreted=False, timeout_s=5.0), Gpu(2)
    backlog = Backlog(world, lambda: Mark(gpu, gpu.issued[world.rank()]))
    order = []

    def body():
        for _ in range(MOST):
            backlog.issued()
            gpu.issue(world.rank())
            order.append(world.rank())

    world.run([body] * 2)
    assert order in ([0] * MOST + [1] * MOST, [1] * MOST + [0] * MOST)


def test_what_is_captured_is_not_waited_for():
    """It runs when the graph is replayed."""
    world = World(2, seed=0, interpreted=False, timeout_s=5.0)
    backlog = Backlog(world, lambda: None)
    done = []

    def body():
        for _ in range(10 * MOST):
            backlog.issued()
        done.append(world.rank())

    world.run([body] * 2)
    assert sorted(done) == [0, 1]


def test_outside_of_ranks_nothing_is_counted():
    Backlog(World(2, seed=0, interpreted=False, timeout_s=5.0), pytest.fail).issued(10 * MOST)
