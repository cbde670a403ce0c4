"""Many ranks in one process: the host code of each is a coroutine, and one scheduler runs hosts and programs of all.

Host code gives up control where it would wait: for a launch on the default stream, for ``synchronize``, for an event,
in an exchange between hosts. Programs give it up at atomics and volatile loads. Who goes next is drawn from a seed, and
each seed also makes some ranks and programs slow, so that different seeds try different orders.

A program that polls is set aside until something it polled has changed. When nothing can move, whoever was set aside
gets another turn unless it has been at the same place with the same variables since memory has last changed: a loop may
count its polls. When that moves nothing either, or after many turns, the world is stuck. It is also when all that
moves is host code that asks again and again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from iris.errors import IrisError, RankLost, SimulationError
from iris.runtime import streams
from iris.runtime.scheduler import Launch, Program, Scheduler, installed
from iris.runtime.streams import Streams

# Turns that programs which count their polls get once nothing moves: at least so many, and so many of all programs.
_PATIENCE = 256
_PATIENCE_OF_ALL = 8_000
# How often a program must be at one place to go round: what it last read of memory shows at the second time.
_SAME_TURNS = 2
# How often hosts may ask in vain whether something has happened while nothing else moves.
_QUESTIONS = 4096
# Reads of device memory by a host, without a wait in between, before each lets the others have a turn.
_READS = 16
_PAGE_BITS = 10  # allocations start at multiples of 1024 bytes
_MOST_POLLED = 64
_PACES = (1.0, 1.0, 1.0, 0.5, 0.1)
_WINDOW_NS = 200.0  # programs whose clocks are no further apart run in one round


class Switch(Protocol):
    """State of the process that belongs to the rank whose host code runs."""

    def enter(self, rank: int) -> None: ...

    def leave(self, rank: int) -> None: ...


class Host:
    """The host code of one rank."""

    def __init__(self, rank: int, body: Callable[[], Any]):
        self.rank = rank
        self.streams = Streams()
        self.condition: Callable[[], bool] | None = None
        self.waits_for = ""
        self.polls = False  # asks again and again whether something has happened
        self.reads = 0  # of device memory since it has last let the others have a turn
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.failure: IrisError | None = None  # to be raised where the host waits
        self.finished_at = 0
        self.pace = 1.0
        self.coroutine = greenlet(self._run)
        self._body = body

    def _run(self) -> None:
        try:
            self.value = self._body()
        except GreenletExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever host code raised is raised from the world's run
            self.error = error
        self.done = True

    def ready(self) -> bool:
        """Whether what the host waits for has come."""
        before = streams.use_rank(self.streams)
        try:
            return self.condition is None or self.condition()
        finally:
            streams.use_rank(before)

    def describe(self) -> str:
        """What the host does, for messages."""
        if self.error is not None:
            return f"rank {self.rank}, host: has raised {type(self.error).__name__}: {self.error}"
        if self.done:
            return f"rank {self.rank}, host: has returned"
        if self.polls:
            return f"rank {self.rank}, host: asks again and again whether something has happened"
        return f"rank {self.rank}, host: waits for {self.waits_for or 'its turn'}"


@dataclass
class ProgramState:
    """What a world knows of a program beyond its coroutine."""

    rank: int
    pace: float
    parked: bool = False
    retired: bool = False
    polled: set[int] = field(default_factory=set)
    tiles: set[tuple[int, int]] = field(default_factory=set)  # first and last address of what it polled by tiles
    turns: Counter[Any] = field(default_factory=Counter)  # how often it has been where ...
    turns_since: int = 0  # ... since this change of memory
    actor: Any = None
    unpublished: set[int] = field(default_factory=set)  # numbers of its stores since the last tl.debug_barrier
    accesses: int = 0  # plain loads and stores; the clock of a program when nothing models time


@dataclass
class LaunchState:
    """What a world knows of a launch."""

    rank: int
    waiting: list[tuple[int, int, int]] = field(default_factory=list)
    stream: Any = None
    issued: Any = None
    known: Any = None
    programs: list[Any] = field(default_factory=list)


class World(Scheduler):
    """Ranks as coroutines of this process.

    Args:
        size: number of ranks.
        seed: of every choice.
        residency: programs of a rank that run at a time.
        step_limit: accesses by polling or atomics after which the run is given up.
        loop_limit: turns of loops that a program may take between two accesses to memory.
        interpreted: kernels are interpreted here; otherwise the ranks share a GPU and only hosts are scheduled.
        timeout_s: longest wait on a GPU in which no host moves.
        clock: tells a program's time (ns), to run the earliest first; None draws the order from the seed.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        residency: int = 64,
        step_limit: int = 20_000_000,
        loop_limit: int | None = None,
        interpreted: bool = True,
        timeout_s: float = 60.0,
        clock: Callable[[Program], float] | None = None,
    ):
        super().__init__(seed)
        self.size = size
        self.seed = seed
        self.residency = residency
        self.step_limit = step_limit
        self.loop_limit = loop_limit
        self.interpreted = interpreted
        self.timeout_s = timeout_s
        self.clock = clock
        self.switches: list[Switch] = []
        self.hosts: list[Host] = []
        self.host: Host | None = None
        self.steps = 0
        self.stuck: Callable[[], BaseException | None] = lambda: None
        self.met: Callable[[Sequence[int], str], None] = lambda ranks, what: None
        self.gpu: Any = None  # the GPU that the ranks share, when they do
        self.target: Any = None  # what the ranks' contexts take for their device
        self.memory_watcher: Any = None  # told of the allocations of heaps
        self.shared: dict[Any, Any] = {}  # what the ranks' contexts share, by key
        self._resident = [0] * size
        self.turn: Callable[[Program], Any] = lambda program: object()  # where a program is, to see that it goes round
        self._watched: dict[int, dict[int, set[Program]]] = {}
        self._watching_tiles: set[Program] = set()
        self._changes = 0  # of memory, and of who runs
        self._patience = 0
        self._questions = 0
        self._until = 0.0  # programs up to this time run now, when there is a clock
        self._finished = 0
        self._unwinding = False  # what host code still wants to wait for will not come
        self._moved_at = time.monotonic()

    def rank(self) -> int:
        """The rank whose host code runs."""
        assert self.host is not None
        return self.host.rank

    def run(self, bodies: Sequence[Callable[[], Any]], *, all_outcomes: bool = False) -> list[Host]:
        """Run a function for each rank to its end, and every launch they leave behind.

        Args:
            bodies: what each rank does.
            all_outcomes: let the other ranks go on when one has raised.

        Returns:
            The hosts, with ``value`` and ``error``.

        Raises:
            BaseException: the first error of a rank, or of a kernel that nobody has waited for, unless
                ``all_outcomes``; the error that ``stuck`` makes.
        """
        self.hosts = [Host(rank, body) for rank, body in enumerate(bodies)]
        for host in self.hosts:
            host.pace = self._random.choice(_PACES)
        self._hub = getcurrent()
        with ExitStack() as stack:
            stack.enter_context(installed(self))
            stack.callback(self._unwind)
            while not self._finished_all():
                self._round()
                failed = [h for h in self.hosts if h.error is not None]
                if failed and not all_outcomes:
                    raise _first(failed)
            for host in self.hosts:
                host.error = host.error or host.streams.error()
                if host.error is not None and not all_outcomes:
                    raise host.error
        return self.hosts

    # What host code calls.

    def run_until(self, condition: Callable[[], bool], what: str = "a launch") -> None:
        """Suspend the calling host until ``condition()``."""
        if self.current is not None:
            raise RuntimeError("a program tried to wait for a launch; only host code may")
        host = self.host
        assert host is not None, "only the host code of a rank can wait"
        while not condition():
            if self._unwinding:
                raise GreenletExit
            host.condition, host.waits_for = condition, what
            self._leave_host(host)
            if host.failure is not None:
                failure, host.failure = host.failure, None
                raise failure
        host.condition, host.waits_for = None, ""

    def step(self) -> bool:
        """Let the others have a turn."""
        host = self.host
        if self._unwinding:
            raise GreenletExit
        if host is not None and self.current is None:
            host.polls = True
            self._leave_host(host)
            host.polls = False
        return True

    def host_reads(self) -> None:
        """The calling host has read device memory, perhaps to see whether it has changed."""
        assert self.host is not None
        self.host.reads += 1
        if self.host.reads > _READS:
            reads = self.host.reads
            self.step()
            self.host.reads = reads

    def _leave_host(self, host: Host) -> None:
        host.reads = 0
        assert self._hub is not None
        self._hub.switch()

    # What programs call.

    def pause(self, *, idle: bool, addresses: np.ndarray | None = None) -> None:
        program = self.current
        if program is None:
            return
        self.steps += 1
        if self.steps > self.step_limit:
            raise self.step_limit_error(
                program,
                f"did the last of {self.steps - 1} atomics and polls without an end (step_limit={self.step_limit})",
            )
        state: ProgramState = program.state
        program.idle = idle
        if not idle:
            self._progress()
            self._unwatch(program)
        elif addresses is not None and addresses.size <= _MOST_POLLED:
            self._poll(program, state, addresses.reshape(-1).tolist())
        elif addresses is not None:
            self._poll_tile(program, state, (int(addresses.min()), int(addresses.max())))
        assert self._hub is not None
        self._hub.switch()

    def give_way(self) -> None:
        """With a clock: suspend the running program until no other is earlier. Nothing of its polling changes."""
        program = self.current
        if program is not None and self.clock is not None and self.clock(program) > self._until:
            assert self._hub is not None
            self._hub.switch()

    def _poll(self, program: Program, state: ProgramState, addresses: list[int]) -> None:
        new = [a for a in addresses if a not in state.polled]
        if not new:
            # Everything in the loop was polled before and nothing of it has changed since.
            state.parked = True
        for address in new:
            state.polled.add(address)
            self._watched.setdefault(address >> _PAGE_BITS, {}).setdefault(address, set()).add(program)

    def _poll_tile(self, program: Program, state: ProgramState, tile: tuple[int, int]) -> None:
        state.parked = tile in state.tiles
        state.tiles.add(tile)
        self._watching_tiles.add(program)

    def _progress(self) -> None:
        self._changes += 1
        self._patience = self._questions = 0

    def _unwatch(self, program: Program) -> None:
        state: ProgramState = program.state
        if state.tiles:
            state.tiles.clear()
            self._watching_tiles.discard(program)
        for address in state.polled:
            page = self._watched.get(address >> _PAGE_BITS)
            if page and address in page:
                page[address].discard(program)
                if not page[address]:
                    del page[address]
                    if not page:
                        del self._watched[address >> _PAGE_BITS]
        state.polled.clear()
        state.parked = False

    def changed(self, low: int, high: int) -> None:
        """Memory between two addresses has changed: whoever polls there gets a turn."""
        self._changes += 1
        for program in list(self._watching_tiles):
            if any(first <= high and low - 16 < last for first, last in program.state.tiles):
                self._unwatch(program)
        first, last = low >> _PAGE_BITS, high >> _PAGE_BITS
        for number in [n for n in self._watched if first <= n <= last]:
            page = self._watched.get(number, {})
            for address in [a for a in page if low - 16 < a <= high]:
                for program in list(page.get(address, ())):
                    self._unwatch(program)

    def wake_all(self) -> None:
        """Memory has changed somewhere."""
        self._changes += 1
        for launch in self.active:
            for program in launch.live:
                self._unwatch(program)

    # Scheduling.

    def start(self, launch: Launch) -> None:
        state: LaunchState = launch.state
        x, y, z = (range(extent) for extent in launch.grid)
        if self.clock is None:
            state.waiting = list(product(x, y, z))
            self._random.shuffle(state.waiting)
        else:  # in the order of the hardware; the last is taken first
            state.waiting = [(i, j, k) for k, j, i in product(z, y, x)][::-1]
            launch.body = self._in_order(launch.body)
        launch.waiting = None
        self.active.append(launch)
        self._progress()
        if not state.waiting:
            self._end(launch)

    def _in_order(self, body: Callable[[], None]) -> Callable[[], None]:
        """Ends each program when it is the earliest, so that places become free in the order of time."""

        def run() -> None:
            body()
            self.give_way()

        return run

    def waiting_programs(self, launch: Launch) -> int:
        """How many programs of a launch have not started."""
        return len(launch.state.waiting)

    def _admit(self) -> None:
        open_launches = [launch for launch in self.active if launch.state.waiting]
        if self.clock is None:
            self._random.shuffle(open_launches)
        while open_launches:
            for launch in list(open_launches):
                state: LaunchState = launch.state
                if self._resident[state.rank] >= self.residency or not state.waiting:
                    open_launches.remove(launch)
                    continue
                program = Program(launch, state.waiting.pop())
                program.state = ProgramState(state.rank, self._random.choice(_PACES))
                launch.live.append(program)
                self._resident[state.rank] += 1
                self._progress()
                if self.observer is not None:
                    self.observer.program_started(program)

    def _finished_all(self) -> bool:
        return not self.active and all(host.done and not host.streams.pending() for host in self.hosts)

    def _round(self) -> None:
        for host in self.hosts:
            before = streams.use_rank(host.streams)
            host.streams.advance()
            streams.use_rank(before)
        self._admit()
        ready: list[Host | Program] = [h for h in self.hosts if not h.done and h.ready()]
        ready += [p for launch in self.active for p in launch.live if not p.state.parked]
        if not ready:
            if not self._finished_all():
                self._nothing_runs()
            return
        if self.interpreted and all(isinstance(e, Host) and e.polls for e in ready):
            self._questions += 1
            if self._questions > _QUESTIONS:
                self._nothing_runs()
                return
        if self.clock is None:
            self._random.shuffle(ready)
            chosen = [e for e in ready if self._random.random() < (e.pace if isinstance(e, Host) else e.state.pace)]
            chosen = chosen or ready[:1]
        else:
            chosen = self._earliest(ready, self.clock)
        for entity in chosen:
            if isinstance(entity, Host):
                self._resume_host(entity)
            elif not entity.state.parked and not entity.state.retired:
                self._resume_program(entity)
        for launch in list(self.active):
            launch.live = [p for p in launch.live if not p.state.retired]
            if not launch.live and not launch.state.waiting:
                self._end(launch)

    def _earliest(self, ready: list[Host | Program], clock: Callable[[Program], float]) -> list[Host | Program]:
        hosts: list[Host | Program] = [e for e in ready if isinstance(e, Host)]
        programs = [e for e in ready if isinstance(e, Program)]
        if not programs or not all(h.polls for h in hosts if isinstance(h, Host)):
            return hosts  # what hosts issue starts later than they do, so letting them go first loses nothing
        self._random.shuffle(programs)  # the seed decides between programs with one clock
        timed = sorted(((clock(p), i, p) for i, p in enumerate(programs)))
        self._until = timed[0][0] + _WINDOW_NS
        return hosts + [p for t, _, p in timed if t <= self._until]

    def _resume_host(self, host: Host) -> None:
        if not host.polls:
            self._progress()
        self._moved_at = time.monotonic()
        self._hub = getcurrent()
        self._as_rank(host, host.coroutine.switch)
        if host.done:
            self._finished += 1
            host.finished_at = self._finished

    def _resume_program(self, program: Program) -> None:
        try:
            self._resume(program)
        except SimulationError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a program raised is raised where its launch is waited for
            program.launch.error = program.launch.error or error
            program.launch.state.waiting.clear()
            for other in program.launch.live:
                self._retire(other)
                if other.coroutine:
                    other.coroutine.throw(GreenletExit)
            program.launch.live = []
            return
        if program.coroutine.dead:
            self._retire(program)
            if self.observer is not None:
                self.observer.program_ended(program)

    def _retire(self, program: Program) -> None:
        if program.state.retired:
            return
        program.state.retired = True
        self._unwatch(program)
        self._resident[program.state.rank] -= 1
        self._progress()

    def _end(self, launch: Launch) -> None:
        self.active.remove(launch)
        launch.done = True
        launch.keep = None

    def _nothing_runs(self) -> None:
        parked = [p for launch in self.active for p in launch.live]
        moving = [program for program in parked if self._moves(program)]
        if moving and self._patience < max(_PATIENCE, _PATIENCE_OF_ALL // len(moving)):
            self._patience += 1
            for program in moving:
                program.state.parked = False
            return
        if not self.interpreted and time.monotonic() - self._moved_at < self.timeout_s:
            time.sleep(2e-5)  # what the hosts wait for happens on the GPU
            return
        error = self.stuck()
        if error is not None:
            raise error
        self._progress()  # `stuck` has let a host go on

    def _moves(self, program: Program) -> bool:
        """Whether a program that was set aside is where it has hardly been since memory has last changed."""
        state: ProgramState = program.state
        if state.turns_since != self._changes:
            state.turns.clear()
            state.turns_since = self._changes
        turn = self.turn(program)
        state.turns[turn] += 1
        return state.turns[turn] <= _SAME_TURNS

    def fail_waiting(self) -> bool:
        """Raise in the hosts that wait when others have ended; whether any has ended.

        What is raised is RankLost, which names the ended ranks.
        """
        ended = "; ".join(host.describe() for host in self.hosts if host.done)
        if ended:
            for host in self.hosts:
                if not host.done:
                    text = f"rank {host.rank} waits for {host.waits_for}, but {ended}"
                    self.fail_host(host, RankLost(text))
        return bool(ended)

    def fail_host(self, host: Host, error: IrisError) -> None:
        """Raise an error in a waiting host."""

        host.failure = error
        host.condition = lambda: True

    def _unwind(self) -> None:
        self._unwinding = True
        for launch in list(self.active):
            for program in launch.live:
                if program.coroutine:
                    program.coroutine.throw(GreenletExit)
            launch.live = []
            launch.state.waiting = []
            self._end(launch)
        for host in self.hosts:
            if not host.done and host.coroutine:
                self._as_rank(host, lambda coroutine=host.coroutine: coroutine.throw(GreenletExit))

    def _as_rank(self, host: Host, resume: Callable[[], Any]) -> None:
        host.coroutine.parent = getcurrent()
        before = streams.use_rank(host.streams)
        for switch in self.switches:
            switch.enter(host.rank)
        self.host = host
        try:
            resume()
        finally:
            self.host = None
            for switch in reversed(self.switches):
                switch.leave(host.rank)
            streams.use_rank(before)


def _first(failed: list[Host]) -> BaseException:
    host = min(failed, key=lambda h: h.finished_at)
    assert host.error is not None
    return host.error
