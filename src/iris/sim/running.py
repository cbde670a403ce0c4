"""``iris.sim.run`` and ``iris.sim.explore``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from iris import _env, _target
from iris.device import _asm
from iris.errors import ArgumentError, RuntimeConflict, SimulationError
from iris.runtime import scheduler as scheduling
from iris.runtime.context import iris
from iris.runtime.local_group import LocalDistributed
from iris.runtime.settle import settled
from iris.runtime.world import Host, World
from iris.sim._turns import turn
from iris.sim.deadlock import deadlock
from iris.sim.rank_state import Environment, FrameEvaluation, FunctionModes, GradMode, Precision, RandomState
from iris.sim.timing import Timing
from iris.sim.watcher import CHECKS, Watcher

if TYPE_CHECKING:
    from iris.sim.virtual_time import VirtualTime

HEAP_BYTES = 1 << 30
STEP_LIMIT = 20_000_000
# Hundreds of times what real kernels take, and a few seconds of the interpreter.
LOOP_LIMIT = 25_000


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    seed: int = 0,
    device: str = "mi300x",
    resident_programs: int | None = None,
    check: str | Sequence[str] = CHECKS,
    on: str = "cpu",
    link_gbps: float | None = None,
    link_per_peer: bool = False,
    heap_size: int = HEAP_BYTES,
    step_limit: int = STEP_LIMIT,
    loop_limit: int = LOOP_LIMIT,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(ctx, *args, **kwargs)`` once for each rank, all ranks in this process.

    Args:
        fn: what a rank does; ``ctx`` is its :class:`iris.Iris`.
        world_size: number of ranks.
        seed: of the order in which ranks and programs run; the same seed gives the same run.
        device: the device to stand for: its compute units and residency. Ignored with ``on="gpu"``.
        resident_programs: programs of a rank that run at a time; default one for each compute unit of ``device``.
        check: what to look for, names of :data:`CHECKS` as a sequence or joined by commas. Deadlocks are always found.
        on: ``"cpu"`` interprets the kernels under the checks; ``"gpu"`` compiles them and runs all ranks on the current
            GPU, each on a stream and with a share of the compute units of its own, without checks.
        link_gbps: with ``on="gpu"``, paces what a rank reads from and writes to its peers to so many GB/s a direction.
        link_per_peer: that rate is the one of each pair of ranks, whose links carry at once, as between GPUs that are
            joined one by one; by default it is the one of a rank to all its peers together, as through a switch.
        heap_size: bytes of symmetric heap on each rank; host memory is taken when it is touched.
        step_limit: polls and atomics of all programs after which the run is given up.
        loop_limit: turns of its loops that a program may take without touching memory before the run is given up.

    Returns:
        What ``fn`` returned on each rank, in rank order.

    Raises:
        DeadlockError, RaceError, OutOfBoundsError, UninitializedReadError, StepLimitError: what was found, with a
            ``report`` and the ``seed`` that repeats it.
        RuntimeConflict: kernels of this process are compiled, but ``on="cpu"``, or the other way round.
        Exception: whatever ``fn`` raised on the first rank that did.
    """

    def body() -> Any:
        return fn(iris(heap_size), *args, **kwargs)

    hosts = simulate(
        [body] * checked_size(world_size),
        seed=seed,
        device=device,
        resident_programs=resident_programs,
        check=check,
        on=on,
        link_gbps=link_gbps,
        link_per_peer=link_per_peer,
        step_limit=step_limit,
        loop_limit=loop_limit,
    )
    return [host.value for host in hosts]


def explore(
    fn: Callable[..., Any], world_size: int, *args: Any, seeds: Iterable[int] = range(100), **options: Any
) -> list[list[Any]]:
    """:func:`run` with one seed after another, up to the first that fails.

    Args:
        seeds: the seeds, in order.
        fn, world_size, args, options: as for :func:`run`.

    Returns:
        The results of each seed.

    Raises:
        Exception: what the first failing seed raised. A finding has the seed in its message, other errors in a note.
    """
    return [run(fn, world_size, *args, seed=seed, **options) for seed in seeds]


def simulate(
    bodies: Sequence[Callable[[], Any]],
    *,
    seed: int = 0,
    device: str = "mi300x",
    resident_programs: int | None = None,
    check: str | Sequence[str] = CHECKS,
    on: str = "cpu",
    link_gbps: float | None = None,
    link_per_peer: bool = False,
    step_limit: int = STEP_LIMIT,
    loop_limit: int = LOOP_LIMIT,
    all_outcomes: bool = False,
    switches: Sequence[Any] = (),
    time: VirtualTime | None = None,
) -> list[Host]:
    """Run one function for each rank; those that make a context with ``iris.iris()`` meet in one world.

    Args:
        all_outcomes: let the other ranks go on when one has raised, and return every outcome.
        switches: state of the process that is each rank's own, beside what every world has.
        time: kept while the ranks run. Its machine and its residency take the place of those of ``device``.
        bodies, others: as for :func:`run`.

    Returns:
        A host for each rank, with ``value`` and ``error``.
    """
    if on not in ("cpu", "gpu"):
        raise ArgumentError(f"on must be 'cpu' or 'gpu', got {on!r}")
    if link_gbps is not None and on != "gpu":
        raise ArgumentError("link_gbps paces a real GPU and needs on='gpu'; for a prediction see iris.sim.predict")
    if link_gbps is not None and not link_gbps > 0:
        raise ArgumentError(f"link_gbps must be above 0, got {link_gbps}")
    if link_per_peer and link_gbps is None:
        raise ArgumentError("link_per_peer needs the rate of a link: give link_gbps")
    _check_number("seed", seed, least=None)
    _check_number("step_limit", step_limit, least=1)
    _check_number("loop_limit", loop_limit, least=1)
    if resident_programs is not None:
        _check_number("resident_programs", resident_programs, least=1)
    checks = _checks(check)
    _check_runtime(on)
    if isinstance(scheduling.current(), World):
        raise RuntimeConflict("a rank of a simulation tried to start another one; call iris.sim outside of it")
    world = World(
        len(bodies),
        seed=seed,
        step_limit=step_limit,
        loop_limit=loop_limit,
        interpreted=on == "cpu",
        timeout_s=_env.get("IRIS_TIMEOUT"),
    )
    with ExitStack() as stack:
        hooks: dict[str, Callable[..., Any]] = {}
        if on == "cpu":
            if time is None:
                watcher = _watch(world, device, resident_programs, checks)
            else:
                watcher = _time(world, time, checks)
            hooks["order"] = _interpret(world, watcher, all_outcomes, stack)
        else:
            from iris.sim.loopback import share_gpu

            hooks["carry"] = share_gpu(world, link_gbps, link_per_peer, all_outcomes, stack)
        distributed = LocalDistributed(world.size, world.rank, world.run_until, **hooks)
        stack.callback(distributed.close)
        kinds = (Environment, GradMode, Precision, FunctionModes, FrameEvaluation)
        world.switches += [kind(world.size) for kind in kinds]
        world.switches += [distributed, *switches]
        try:
            return world.run(bodies, all_outcomes=all_outcomes)
        except BaseException as error:
            _add_seed(error, seed, "iris.sim.run" if time is None else "iris.sim.predict")
            raise


def _add_seed(error: BaseException, seed: int, caller: str) -> None:
    """Say with which seed an error came up: at the end of a finding's message, and in a note of any other error."""
    text = f"seed={seed} of {caller} repeats it"
    if isinstance(error, SimulationError):
        error.seed = seed
        error.args = (f"{error.args[0]}\n    {text}", *error.args[1:])
    else:  # as add_note of Python 3.11 does
        error.__notes__ = [*getattr(error, "__notes__", ()), text]  # pyright: ignore[reportAttributeAccessIssue]


def _watch(world: World, device: str, resident_programs: int | None, checks: tuple[str, ...]) -> Watcher:
    target = _device(device)
    _stand_for(world, target.name, target.compute_units, resident_programs or target.compute_units)
    return Watcher(world, checks)


def _time(world: World, time: VirtualTime, checks: tuple[str, ...]) -> Timing:
    _stand_for(world, time.machine.name, time.machine.compute_units, time.resident)
    timing = Timing(world, checks, time)
    world.clock = timing.now
    return timing


def _stand_for(world: World, device: str, compute_units: int, residency: int) -> None:
    world.residency = residency
    world.target = replace(_target.INTERPRETER, compute_units=compute_units, name=f"simulated {device}")


def _interpret(
    world: World, watcher: Watcher, all_outcomes: bool, stack: ExitStack
) -> Callable[[Sequence[int], str], None]:
    """Set a world up for interpreted kernels; returns what a collective of torch.distributed orders."""
    from iris.runtime.interpreter import leave_language
    from iris.sim.host_code import HostOperations, HostWaits

    world.turn = turn
    world.stuck = lambda: _stuck(world, watcher, all_outcomes)
    world.switches.append(RandomState(world.size))
    for name, hook in (("clock_ns", watcher.ticks), ("place", watcher.unit)):
        stack.callback(setattr, _asm, name, getattr(_asm, name))
        setattr(_asm, name, hook)
    stack.callback(leave_language)
    operations = HostOperations(watcher)
    stack.enter_context(HostWaits(watcher, operations))
    stack.enter_context(operations)
    return watcher.collective


def _stuck(world: World, watcher: Watcher, all_outcomes: bool) -> SimulationError | None:
    """The error for a world in which nothing moves; None when hosts that wait for ended ranks have been told so."""
    if all_outcomes and not world.active and world.fail_waiting():
        return None
    return deadlock(world, watcher)


def _checks(check: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(check, str):
        check = [name.strip() for name in check.split(",") if name.strip()]
    if not isinstance(check, Sequence):
        raise ArgumentError(f"check must be names out of {', '.join(CHECKS)}, got {check!r}")
    unknown = [str(name) for name in check if name not in CHECKS]
    if unknown:
        raise ArgumentError(f"check: {', '.join(unknown)} is not known; possible: {', '.join(CHECKS)}")
    return tuple(check)


def _check_number(name: str, value: Any, least: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        possible = "a whole number" if least is None else f"a whole number of at least {least}"
        raise ArgumentError(f"{name} must be {possible}, got {value!r}")


def _device(name: str) -> _target.Target:
    if name not in _target.KNOWN:
        raise ArgumentError(f"device {name!r} is not known; possible: {', '.join(_target.KNOWN)}")
    return _target.KNOWN[name]


def checked_size(world_size: int) -> int:
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ArgumentError(f"world_size must be a number of ranks above 0, got {world_size!r}")
    return world_size


def _check_runtime(on: str) -> None:
    runtime, reason = settled()
    if on == "cpu" and runtime == "gpu":
        raise RuntimeConflict(
            f"iris.sim interprets kernels, but those of this process are compiled ({reason}). Start Python with "
            "IRIS_RUNTIME=sim, or run on the GPU with on='gpu'"
        )
    if on == "gpu" and runtime != "gpu":
        raise RuntimeConflict(
            f"on='gpu' compiles kernels, but those of this process are interpreted ({reason}). Start Python with "
            "IRIS_RUNTIME=gpu on a machine with a GPU"
        )
