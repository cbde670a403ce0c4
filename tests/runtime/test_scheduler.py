"""The scheduler of interpreted programs by itself: order, residency, waits that cannot end, errors."""

import threading
import time

import numpy as np
import pytest

from iris.errors import RankLost, WaitTimeout
from iris.runtime.scheduler import Launch, Scheduler


def run(scheduler, launch):
    scheduler.start(launch)
    scheduler.run_until(lambda: launch.done)


def trace(seed, grid=(4, 1, 1), turns=3):
    """The order in which programs take their turns."""
    scheduler, order = Scheduler(seed), []

    def body():
        program = scheduler.current
        for turn in range(turns):
            order.append((program.index, turn))
            scheduler.pause(idle=False)

    run(scheduler, Launch("kernel", grid, body))
    return order


def test_every_program_runs_once_and_takes_turns():
    order = trace(0, (3, 2, 2))
    assert sorted(order) == sorted(
        ((x, y, z), t) for x in range(3) for y in range(2) for z in range(2) for t in range(3)
    )
    for turn in range(3):
        assert {t for _, t in order[turn * 12 : turn * 12 + 12]} == {turn}, (
            "all programs of a pass before the next pass"
        )


def test_the_seed_decides_the_order():
    assert trace(5) == trace(5)
    assert len({tuple(trace(seed)) for seed in range(8)}) > 1
    assert any(trace(seed)[0][0] != (0, 0, 0) for seed in range(8)), "nothing may lean on program 0 running first"


def test_the_program_is_announced_before_it_runs():
    scheduler, announced, seen = Scheduler(), [], []
    scheduler.on_resume = announced.append

    def body():
        for _ in range(3):
            assert announced[-1] is scheduler.current
            seen.append(scheduler.current)
            scheduler.pause(idle=False)

    run(scheduler, Launch("kernel", (4, 1, 1), body))
    assert scheduler.current is None
    assert len(seen) == 12


def test_a_wait_on_a_program_past_the_first_ones_ends():
    """More programs are admitted when those that run cannot go on."""
    scheduler, arrived = Scheduler(), []

    def body():
        (x, _, _) = scheduler.current.index
        if x == 999:
            arrived.append(x)
        while not arrived:
            scheduler.pause(idle=True, addresses=np.array([1]))

    launch = Launch("kernel", (1000, 1, 1), body)
    run(scheduler, launch)
    assert launch.done
    assert not scheduler.active


def test_few_programs_are_alive_at_a_time_when_none_waits():
    scheduler, alive = Scheduler(), []

    def body():
        alive.append(len(scheduler.current.launch.live))
        scheduler.pause(idle=False)

    run(scheduler, Launch("kernel", (1000, 1, 1), body))
    assert max(alive) <= 128


def test_launches_take_turns():
    scheduler, order = Scheduler(), []

    def body():
        for _ in range(3):
            order.append(scheduler.current.launch.name)
            scheduler.pause(idle=False)

    first, second = Launch("first", (1, 1, 1), body), Launch("second", (1, 1, 1), body)
    scheduler.start(first)
    run(scheduler, second)
    assert order == ["first", "second"] * 3


def test_a_wait_that_cannot_end_names_the_programs():
    scheduler = Scheduler()
    scheduler.time_limit_s = 0.2

    def body():
        while True:
            scheduler.pause(idle=True, addresses=np.array([0x1000 + scheduler.current.index[0]]))

    launch = Launch("ping", (11, 1, 1), body)
    start = time.monotonic()
    with pytest.raises(WaitTimeout) as caught:
        run(scheduler, launch)
    assert 0.2 <= time.monotonic() - start < 5
    text = str(caught.value)
    assert "limit 0.2 s, IRIS_TIMEOUT" in text
    assert "kernel ping, program (0, 0, 0) polls address 0x1000" in text
    assert text.endswith("; and 3 more")
    assert not scheduler.active
    assert not launch.live


def test_the_limit_counts_from_the_last_move():
    scheduler = Scheduler()
    scheduler.time_limit_s = 1.0
    flag = []

    def body():
        for step in range(4):
            while len(flag) <= step:
                scheduler.pause(idle=True, addresses=np.array([1]))
            scheduler.pause(idle=False)

    timers = [threading.Timer(0.35 * (step + 1), flag.append, (step,)) for step in range(4)]
    for timer in timers:
        timer.start()
    start = time.monotonic()
    run(scheduler, Launch("kernel", (1, 1, 1), body))
    assert time.monotonic() - start > 1.2, "longer than the limit in all"


def test_a_hook_can_end_the_wait():
    scheduler, waited = Scheduler(), []

    def hook(seconds):
        waited.append(seconds)
        if seconds > 0.1:
            raise RankLost("rank 1 has ended", (1,))

    scheduler.on_wait.append(hook)

    def body():
        while True:
            scheduler.pause(idle=True, addresses=np.array([1]))

    with pytest.raises(RankLost):
        run(scheduler, Launch("kernel", (1, 1, 1), body))
    assert waited[0] < 0.1 < waited[-1]
    assert waited == sorted(waited)
    scheduler.abandon()
    assert not scheduler.active


def test_an_error_ends_the_launch_and_unwinds_the_others():
    scheduler, unwound = Scheduler(), []

    def body():
        (x, _, _) = scheduler.current.index
        try:
            scheduler.pause(idle=False)
            if x == 2:
                raise ZeroDivisionError("in program 2")
            while True:
                scheduler.pause(idle=True, addresses=np.array([1]))
        finally:
            unwound.append(x)

    launch = Launch("kernel", (5, 1, 1), body, keep=object())
    run(scheduler, launch)
    assert isinstance(launch.error, ZeroDivisionError)
    assert sorted(unwound) == [0, 1, 2, 3, 4]
    assert launch.keep is None
    assert not scheduler.active


def test_what_a_launch_uses_lives_until_it_ends():
    scheduler, kept = Scheduler(), object()
    launch = Launch("kernel", (1, 1, 1), lambda: scheduler.pause(idle=False), keep=kept)
    scheduler.start(launch)
    assert scheduler.step()
    assert launch.keep is kept
    scheduler.run_until(lambda: launch.done)
    assert launch.keep is None


def test_a_program_may_not_wait_for_a_launch():
    scheduler = Scheduler()
    launch = Launch("kernel", (1, 1, 1), lambda: scheduler.run_until(lambda: True))
    run(scheduler, launch)
    assert isinstance(launch.error, RuntimeError)
    assert "only host code may" in str(launch.error)


def test_pausing_in_host_code_does_nothing():
    Scheduler().pause(idle=True, addresses=np.array([1]))


def test_an_empty_grid_is_done_at_once():
    scheduler = Scheduler()
    launch = Launch("kernel", (3, 0, 1), lambda: pytest.fail("there is no program"))
    run(scheduler, launch)
    assert launch.done
