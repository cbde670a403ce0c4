"""The order of loads and first launches on an imagined GPU, on which a load while something runs takes for ever."""

import itertools

import pytest

from iris.runtime.world import World
from iris.sim.first_launches import QUIET_S, FirstLaunches


class Gpu:
    """A kernel ends when every rank has launched its part, or after some looks at it when it waits for nobody."""

    def __init__(self, world):
        self.world = world
        self.launched = {}  # name -> ranks
        self.ends_by_itself = {}  # name -> looks left
        self.loads = []
        self.time = 0.0

    def now(self):
        self.time += QUIET_S / 50
        return self.time

    def running(self):
        for name in list(self.ends_by_itself):
            self.ends_by_itself[name] -= 1
            if self.ends_by_itself[name] <= 0:
                del self.ends_by_itself[name]
        waiting = [name for name, ranks in self.launched.items() if len(ranks) < self.world.size]
        return waiting + list(self.ends_by_itself)

    def idle(self):
        return not self.running()

    def load(self, name):
        rank = self.world.rank()
        waits = [n for n, ranks in self.launched.items() if len(ranks) < self.world.size]
        # A load takes until what runs has ended; that never comes when what runs waits for the rank that loads.
        assert not waits, f"rank {rank} loads {name} while {waits} wait"
        self.loads.append((rank, name))

    def launch(self, name):
        self.launched.setdefault(name, set()).add(self.world.rank())

    def finished(self, name):
        return len(self.launched.get(name, ())) == self.world.size


def world_of(size, seed):
    world = World(size, seed=seed, interpreted=False, timeout_s=5.0)
    gpu = Gpu(world)
    return world, gpu, FirstLaunches(world, gpu.idle, gpu.now)


@pytest.mark.parametrize(("size", "seed"), [*itertools.product((1, 2, 3, 5, 8), range(20))])
def test_several_kernels_in_a_row_without_a_wait_between(size, seed):
    world, gpu, first = world_of(size, seed)

    def body():
        for name in ("a", "b", "c"):
            first.load(lambda name=name: gpu.load(name))
            gpu.launch(name)
        world.run_until(lambda: gpu.finished("c"), "the kernels")

    world.run([body] * size)
    assert gpu.idle()
    assert len(gpu.loads) == 3 * size


@pytest.mark.parametrize(("size", "seed"), [*itertools.product((2, 4), range(20))])
def test_work_that_ends_by_itself_is_waited_for(size, seed):
    world, gpu, first = world_of(size, seed)

    def body():
        gpu.ends_by_itself[f"fill {world.rank()}"] = 5 * (world.rank() + 1)
        first.load(lambda: gpu.load("a"))
        gpu.launch("a")
        world.run_until(lambda: gpu.finished("a"), "the kernel")
        copy = f"copy {world.rank()}"
        gpu.ends_by_itself[copy] = 10
        world.run_until(lambda: copy not in gpu.running(), "the copy")

    world.run([body] * size)
    assert gpu.idle()


@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_waits_on_the_host_holds_nobody_up(seed):
    world, gpu, first = world_of(3, seed)
    arrived = []

    def body():
        if world.rank() == 2:
            # It launches its part only when another rank has launched its own.
            world.run_until(lambda: len(gpu.launched.get("a", ())) == 2, "the others")
            gpu.launch("a")
        else:
            first.load(lambda: gpu.load("a"))
            gpu.launch("a")
        world.run_until(lambda: gpu.finished("a"), "the kernel")
        arrived.append(world.rank())

    world.run([body] * 3)
    assert sorted(arrived) == [0, 1, 2]


@pytest.mark.parametrize(("size", "seed"), [*itertools.product((2, 3, 4), range(5))])
def test_a_rank_that_waits_for_work_of_its_own_loads_before_others_launch(size, seed):
    """It is about to load, once its work is done: whoever launches before holds up the load, and that the launch."""
    world, gpu, first = world_of(size, seed)

    def body():
        rank = world.rank()
        if rank:
            world.run_until(lambda: (0, "a") in gpu.loads, "rank 0, which is about to launch")
            gpu.ends_by_itself[f"fill {rank}"] = 10 * rank
            world.run_until(lambda: f"fill {rank}" not in gpu.running(), "its work")
        first.load(lambda: gpu.load("a"))
        gpu.launch("a")
        world.run_until(lambda: gpu.finished("a"), "the kernel")

    world.run([body] * size)
    assert gpu.idle()
    assert len(gpu.loads) == size
