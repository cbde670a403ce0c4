"""Ranks and programs as coroutines: who runs when, who is set aside, and when the world is stuck."""

import numpy as np
import pytest

from iris.errors import IrisError, RankLost, StepLimitError
from iris.runtime import scheduler, streams
from iris.runtime.scheduler import Launch
from iris.runtime.world import LaunchState, World

FLAG = 1 << 20


class Stuck(IrisError):
    """The world of a test is stuck."""


@pytest.fixture
def lone():
    """A world of one rank."""
    return made_world()


def made_world(size=1, **options):
    world = World(size, **options)
    world.stuck = Stuck
    world.turn = lambda program: min(program.state.polled, default=0)  # programs that only poll go round
    return world


def launch(world, body, grid=(1, 1, 1), name="kernel"):
    """Start a grid as the streams do."""
    result = Launch(name, grid, body)
    result.state = LaunchState(world.rank())
    world.start(result)
    return result


def run_to_end(world, body, grid=(1, 1, 1)):
    started = launch(world, body, grid)
    world.run_until(lambda: started.done)
    return started


def poll(world, *addresses):
    world.pause(idle=True, addresses=np.array(addresses or [FLAG], dtype=np.uint64))


def act(world, address=FLAG):
    world.pause(idle=False, addresses=np.array([address], dtype=np.uint64))


def test_values_are_in_the_order_of_ranks():
    for seed in range(5):
        world = made_world(5, seed=seed)
        assert [h.value for h in world.run([lambda r=r: r * r for r in range(5)])] == [0, 1, 4, 9, 16]


def test_hosts_take_turns_where_they_wait():
    world = made_world(2)
    log = []

    def others_have_gone_on(here):
        return lambda: len(log) != here or len(log) == 6

    def body():
        for turn in range(3):
            log.append((world.rank(), turn))
            world.run_until(others_have_gone_on(len(log)))

    world.run([body, body])
    assert sorted(log) == [(r, t) for r in range(2) for t in range(3)]


def test_a_program_may_not_wait_for_a_launch(lone):
    def host():
        started = launch(lone, lambda: lone.run_until(lambda: True))
        lone.run_until(lambda: started.done)
        raise started.error

    with pytest.raises(RuntimeError, match="only host code may"):
        lone.run([host])


def test_a_program_that_polls_is_set_aside_until_the_place_changes(lone):
    log = []

    def waiter():
        while "set" not in log:
            log.append("poll")
            poll(lone)

    def setter():
        for _ in range(50):
            act(lone, FLAG + 4096)
            lone.changed(FLAG + 4096, FLAG + 4099)
        log.append("set")
        lone.changed(FLAG, FLAG + 3)
        act(lone)

    def host():
        first, second = launch(lone, waiter), launch(lone, setter)
        lone.run_until(lambda: first.done and second.done)

    lone.run([host])
    assert log.count("poll") == 2  # one to see the value, one to see that it has not changed


@pytest.mark.parametrize("tile", [1, 64, 65, 1000])
@pytest.mark.parametrize("changed", [0, -1])
def test_tiles_of_any_size_are_polled(lone, tile, changed):
    addresses = [FLAG + 4 * i for i in range(tile)]
    done = []

    def waiter():
        while not done:
            poll(lone, *addresses)

    def setter():
        for _ in range(10):
            act(lone, FLAG - 4096)
        done.append(True)
        lone.changed(addresses[changed], addresses[changed] + 3)

    def host():
        first, second = launch(lone, waiter), launch(lone, setter)
        lone.run_until(lambda: first.done and second.done)

    lone.run([host])


@pytest.mark.parametrize("tile", [1, 65])
def test_a_world_is_stuck_when_polls_go_round(lone, tile):
    polls = []

    def waiter():
        while True:
            polls.append(0)
            poll(lone, *[FLAG + 4 * i for i in range(tile)])

    with pytest.raises(Stuck):
        lone.run([lambda: run_to_end(lone, waiter, (3, 1, 1))])
    assert len(polls) <= 3 * 6


def test_a_world_is_stuck_when_polls_of_two_places_go_round(lone):
    def waiter():
        while True:
            poll(lone, FLAG)
            poll(lone, FLAG + 4)

    with pytest.raises(Stuck):
        lone.run([lambda: run_to_end(lone, waiter)])


@pytest.mark.parametrize("polls", [1, 10, 200, 2000])
def test_a_program_whose_variables_change_goes_on(lone, polls):
    counts = []
    lone.turn = lambda program: len(counts)

    def counter():
        for _ in range(polls):
            counts.append(0)
            poll(lone)

    lone.run([lambda: run_to_end(lone, counter)])
    assert len(counts) == polls


def test_a_program_that_counts_for_ever_is_given_up(lone):
    lone.turn = lambda program: object()

    def counter():
        while True:
            poll(lone)

    with pytest.raises(Stuck):
        lone.run([lambda: run_to_end(lone, counter)])


def test_a_program_that_goes_round_goes_on_when_memory_has_changed(lone):
    """The setter changes what the waiter does not poll, and then ends."""
    done = []

    def waiter():
        while not done:
            poll(lone)

    def setter():
        for _ in range(20):
            poll(lone, FLAG + 64)
        done.append(True)
        lone.changed(FLAG + 4096, FLAG + 4099)

    lone.turn = lambda program: len(done) if program.launch.name == "waiter" else object()

    def host():
        first, second = launch(lone, waiter, name="waiter"), launch(lone, setter)
        lone.run_until(lambda: first.done and second.done)

    lone.run([host])


def test_a_world_is_stuck_when_hosts_wait_for_nothing():
    world = made_world(2)
    with pytest.raises(Stuck):
        world.run([lambda: world.run_until(lambda: False, "Godot"), lambda: None])
    assert [h.describe() for h in world.hosts] == ["rank 0, host: waits for Godot", "rank 1, host: has returned"]


def test_a_world_is_stuck_when_hosts_only_ask(lone):
    def host():
        while True:
            lone.step()

    with pytest.raises(Stuck):
        lone.run([host])
    assert lone.hosts[0].describe() == "rank 0, host: asks again and again whether something has happened"


def test_hosts_that_ask_let_programs_go_on(lone):
    def program():
        for _ in range(10):
            act(lone)

    def host():
        started = launch(lone, program, (10, 1, 1))
        while not started.done:
            lone.step()

    lone.run([host])


def test_hosts_that_read_memory_over_and_over_let_programs_go_on(lone):
    def host():
        started = launch(lone, lambda: act(lone))
        while not started.done:
            lone.host_reads()

    lone.run([host])


def test_the_first_error_of_a_rank_ends_all():
    world = made_world(3)
    left = []

    def waits():
        try:
            world.run_until(lambda: False)
        finally:
            left.append(world.rank())

    def raises():
        raise ValueError("rank 1")

    with pytest.raises(ValueError, match="rank 1"):
        world.run([waits, raises, waits])
    assert set(left) <= {0, 2}
    assert all(not h.coroutine for h in world.hosts)


def test_all_outcomes():
    world = made_world(3)

    def raises():
        raise ValueError("rank 1")

    hosts = world.run([lambda: 0, raises, lambda: 2], all_outcomes=True)
    assert [h.value for h in hosts] == [0, None, 2]
    assert [type(h.error) for h in hosts] == [type(None), ValueError, type(None)]
    assert sorted(h.finished_at for h in hosts) == [1, 2, 3]


def test_a_waiting_host_can_be_told_to_fail():
    world = made_world(2)

    def stuck():
        world.fail_host(world.hosts[0], RankLost("gone"))

    world.stuck = stuck
    hosts = world.run([lambda: world.run_until(lambda: False), lambda: None], all_outcomes=True)
    assert [type(h.error) for h in hosts] == [RankLost, type(None)]


def test_hosts_that_wait_again_while_they_are_unwound():
    world = made_world(2)
    left = []

    def waits():
        try:
            world.run_until(lambda: False)
        finally:
            for again in (lambda: world.run_until(lambda: False), world.step):
                try:
                    again()
                except BaseException as error:
                    left.append(type(error).__name__)
                    if again is world.step:
                        raise

    with pytest.raises(Stuck):
        world.run([waits, lambda: None])
    assert left == ["GreenletExit", "GreenletExit"]
    assert not world.hosts[0].coroutine


def test_an_error_of_a_program_ends_its_launch_and_no_other(lone):
    def broken():
        act(lone)
        raise ValueError("broken")

    def fine():
        for _ in range(5):
            act(lone)
        return

    def host():
        first, second = launch(lone, broken, (4, 1, 1)), launch(lone, fine, (4, 1, 1))
        lone.run_until(lambda: first.done and second.done)
        return first.error, second.error, first.live

    (error, none, live) = lone.run([host])[0].value
    assert str(error) == "broken"
    assert (none, live) == (None, [])
    assert lone._resident == [0]


def test_programs_left_behind_run_to_their_end(lone):
    ended = []

    def program():
        for _ in range(5):
            act(lone)
        ended.append(1)

    lone.run([lambda: launch(lone, program, (3, 1, 1)) and None])
    assert len(ended) == 3


def test_step_limit():
    def program(world):
        while True:
            act(world)

    world = made_world(step_limit=30)
    with pytest.raises(StepLimitError, match="step_limit=30"):
        world.run([lambda: run_to_end(world, lambda: program(world))])
    assert world.steps == 31


@pytest.mark.parametrize("residency", [1, 2, 5, 100])
@pytest.mark.parametrize("size", [1, 3])
def test_residency(residency, size):
    world = made_world(size, residency=residency)
    running = [0] * size
    most = [0] * size

    def program():
        rank = world.current.state.rank
        running[rank] += 1
        most[rank] = max(most[rank], running[rank])
        for _ in range(100):
            act(world)
        running[rank] -= 1

    def host():
        first, second = launch(world, program, (5, 2, 1)), launch(world, program, (7, 1, 1))
        world.run_until(lambda: first.done and second.done)

    world.run([host] * size)
    assert most == [min(residency, 17)] * size


def test_an_empty_grid_ends_at_once(lone):
    assert lone.run([lambda: run_to_end(lone, lambda: None, (0, 1, 1)).done])[0].value


def order(seed, size=3):
    world = made_world(size, seed=seed)
    log = []

    def program():
        for _ in range(3):
            log.append((world.current.state.rank, world.current.index))
            act(world)

    world.run([lambda: run_to_end(world, program, (3, 1, 1))] * size)
    return log


def test_the_order_is_the_seeds():
    orders = [order(seed) for seed in range(6)]
    assert [order(seed) for seed in range(6)] == orders
    assert len({str(o) for o in orders}) == 6


class Mark:
    """Records whose turn it is."""

    def __init__(self):
        self.log = []

    def enter(self, rank):
        self.log.append(("enter", rank))

    def leave(self, rank):
        self.log.append(("leave", rank))


def test_switches_bracket_every_turn_of_a_host():
    world = made_world(2)
    outer, inner = Mark(), Mark()
    world.switches += [outer, inner]
    turns = []

    def body():
        for _ in range(3):
            assert outer.log[-1] == inner.log[-1] == ("enter", world.rank())
            turns.append(world.rank())
            world.step()

    world.run([body, body])
    assert len(turns) == 6
    assert [kind for kind, _ in outer.log] == ["enter", "leave"] * (len(outer.log) // 2)
    assert outer.log[::2] == [("enter", rank) for _, rank in outer.log[1::2]]


def test_each_rank_has_streams_of_its_own_and_the_process_gets_its_back():
    world = made_world(2)
    before = (streams.current_stream(), scheduler.current())

    def body():
        mine = streams.current_stream()
        world.step()
        assert streams.current_stream() is mine
        return mine

    values = [h.value for h in world.run([body, body])]
    assert len({*values, before[0]}) == 3
    assert (streams.current_stream(), scheduler.current()) == before
