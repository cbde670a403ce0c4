"""Runs the programs of interpreted kernels as coroutines of one thread.

:func:`current` is the scheduler of the process; a simulated world (:mod:`iris.runtime.world`) puts its own in its place
while it runs.

A program gives up control at every atomic and every volatile load (:meth:`Scheduler.pause`), so a program that waits
for a later program of its grid, for another launch, or for another process lets them run. The order in which the
programs of a pass run is drawn from a seed. When a whole pass moved nothing, the thread sleeps, a little longer each
time, so that waiting for other processes does not take their core.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from iris.errors import StepLimitError, WaitTimeout
from iris.runtime.observer import Observer
from iris.runtime.reports import StepLimitReport
from iris.runtime.source import place, source_line

_ADMIT = 64  # programs that run at a time before the scheduler sees that more are needed
_LONGEST_SLEEP_S = 1e-3


class Program:
    """One program of a launch: its coroutine and what it last did."""

    __slots__ = ("coroutine", "idle", "index", "launch", "polled", "state", "turns")

    def __init__(self, launch: Launch, index: tuple[int, int, int]):
        self.launch = launch
        self.index = index
        self.idle = False
        self.polled = 0  # address that the program last polled, 0 before the first poll
        self.turns = 0  # turns of loops since the program last touched memory
        self.state: Any = None  # what a simulated world knows of the program
        self.coroutine = greenlet(self._run)

    def _run(self) -> None:
        self.launch.body()

    def describe(self) -> str:
        return f"kernel {self.launch.name}, program {self.index}"


class Launch:
    """One started grid.

    Args:
        name: the kernel's name, for messages.
        grid: number of programs along x, y and z.
        body: runs one program; it reads the program's index from the interpreter.
        keep: the arguments by name; the tensors behind pointers stay alive until the launch has ended.
        num_warps: as the launch asked for, for what the interpreter cannot show.
    """

    def __init__(
        self,
        name: str,
        grid: tuple[int, int, int],
        body: Callable[[], None],
        keep: dict[str, Any] | None = None,
        num_warps: int = 4,
    ):
        self.num_warps = num_warps
        self.nth = 0  # which launch of the kernel by its rank it is, from 1, where somebody counts
        self.state: Any = None  # what a simulated world knows of the launch
        self.name = name
        self.grid = grid
        self.body = body
        self.keep = keep
        self.live: list[Program] = []
        x, y, z = (range(extent) for extent in grid)
        self.waiting: Iterator[tuple[int, int, int]] | None = product(x, y, z)
        self.residency = _ADMIT
        self.done = False
        self.error: BaseException | None = None

    def admit(self) -> None:
        """Start programs until as many run as may run at a time."""
        while self.waiting is not None and len(self.live) < self.residency:
            index = next(self.waiting, None)
            if index is None:
                self.waiting = None
            else:
                self.live.append(Program(self, index))

    def stop(self) -> None:
        """Unwind the programs that have not ended."""
        for program in self.live:
            if program.coroutine:
                program.coroutine.throw(GreenletExit)
        self.live.clear()
        self.waiting = None
        self.done = True
        self.keep = None


class Scheduler:
    """Every active launch of this process.

    Attributes:
        on_resume: called with a program just before it runs (the interpreter sets the program's index there).
        on_wait: called with the seconds waited so far whenever nothing has moved; may raise to end the wait.
        time_limit_s: longest time in which nothing moves before the launch fails.
        current: the program that is running, None in host code.
        loop_limit: turns of loops that a program may take between two accesses to memory; None for any number.
        observer: told of every access of a program; None costs nothing.
    """

    loop_limit: int | None = None
    observer: Observer | None = None
    on_resume: Callable[[Program], None] = staticmethod(lambda program: None)

    def __init__(self, seed: int = 0):
        self.active: list[Launch] = []
        self.current: Program | None = None
        self.on_wait: list[Callable[[float], None]] = []
        self.time_limit_s = 60.0
        self._random = random.Random(seed)
        self._hub: greenlet | None = None

    def pause(self, *, idle: bool, addresses: np.ndarray | None = None) -> None:
        """Let other programs run. Called by a program after an atomic or a volatile load.

        Args:
            idle: the access changed nothing, so the program may be polling.
            addresses: what it accessed.
        """
        program = self.current
        if program is None:
            return
        program.idle = idle
        program.polled = int(addresses.flat[0]) if idle and addresses is not None and addresses.size else 0
        assert self._hub is not None
        self._hub.switch()

    def loop_turn(self) -> None:
        """Count a turn of a loop of the running program.

        Raises:
            StepLimitError: the program has taken more turns without touching memory than ``loop_limit``.
        """
        program = self.current
        if program is not None:
            program.turns += 1
            if self.loop_limit is not None and program.turns > self.loop_limit:
                raise self.step_limit_error(
                    program,
                    f"has taken {program.turns - 1} turns of its loops without touching memory, so nothing that "
                    "another program does can end it",
                )

    @staticmethod
    def step_limit_error(program: Program, why: str) -> StepLimitError:
        """The error for the running program."""
        file, line = place()
        rank = getattr(program.state, "rank", None)
        report = StepLimitReport(rank, program.launch.name, program.index, file, line, source_line(file, line), why)
        return StepLimitError(str(report), report)

    def touched(self) -> None:
        """The running program accesses memory."""
        if self.current is not None:
            self.current.turns = 0

    def start(self, launch: Launch) -> None:
        """Make a launch active; it moves whenever :meth:`step` is called."""
        self.active.append(launch)

    def run_until(self, condition: Callable[[], bool], what: str = "a launch") -> None:
        """Run active launches until ``condition()``, which is asked after every pass.

        Args:
            condition: tells whether the wait is over.
            what: what the caller waits for, for messages.

        Raises:
            WaitTimeout: nothing moved for the time limit.
        """
        if self.current is not None:
            raise RuntimeError("a program tried to wait for a launch; only host code may")
        idle_since = None
        naps = 0
        while not condition():
            if self.step():
                idle_since, naps = None, 0
                continue
            now = time.monotonic()
            idle_since = idle_since or now
            for hook in self.on_wait:
                hook(now - idle_since)
            if now - idle_since > self.time_limit_s:
                self._give_up(now - idle_since)
            naps += 1
            if naps < 4:
                os.sched_yield()
            else:
                time.sleep(min(_LONGEST_SLEEP_S, 2e-5 * naps))

    def step(self) -> bool:
        """One pass over all active launches; True when at least one program moved."""
        moved = False
        for launch in list(self.active):
            moved |= self._pass(launch)
        return moved

    def abandon(self) -> None:
        """Stop every active launch, after an error."""
        for launch in self.active:
            launch.stop()
        self.active.clear()

    def _pass(self, launch: Launch) -> bool:
        launch.admit()
        moved = False
        order = list(launch.live)
        self._random.shuffle(order)
        for program in order:
            try:
                self._resume(program)
            except BaseException as error:  # noqa: BLE001 - whatever a program raised is raised where it is waited for
                launch.error = error
                launch.stop()
                self.active.remove(launch)
                return True
            if program.coroutine.dead:
                moved = True
            else:
                moved |= not program.idle
        launch.live = [program for program in launch.live if not program.coroutine.dead]
        if not launch.live and launch.waiting is None:
            launch.done = True
            launch.keep = None
            self.active.remove(launch)
            return True
        if not moved and launch.waiting is not None:
            launch.residency += _ADMIT
            return True
        return moved

    def _resume(self, program: Program) -> None:
        self._hub = getcurrent()
        program.coroutine.parent = self._hub
        self.current = program
        self.on_resume(program)
        try:
            program.coroutine.switch()
        finally:
            self.current = None

    def _give_up(self, waited: float) -> None:
        stuck = [program for launch in self.active for program in launch.live]
        shown = "; ".join(f"{p.describe()} polls address {p.polled:#x}" for p in stuck[:8])
        more = f"; and {len(stuck) - 8} more" if len(stuck) > 8 else ""
        self.abandon()
        raise WaitTimeout(
            f"no program has moved for {waited:.1f} s (limit {self.time_limit_s:.1f} s, IRIS_TIMEOUT): {shown}{more}"
        )


_stack: list[Scheduler] = [Scheduler()]


def current() -> Scheduler:
    """The scheduler that launches of this process go to."""
    return _stack[-1]


@contextmanager
def installed(scheduler: Scheduler) -> Iterator[None]:
    """Let ``scheduler`` be the current one for a ``with`` block."""
    _stack.append(scheduler)
    try:
        yield
    finally:
        _stack.remove(scheduler)
