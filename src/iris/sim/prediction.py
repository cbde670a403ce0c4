"""``iris.sim.predict``: run ranks in the simulator and model how long a machine with GPUs would take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from iris._machine import Machine, by_name
from iris.runtime.context import iris
from iris.sim.running import HEAP_BYTES, STEP_LIMIT, checked_size, simulate
from iris.sim.timeline import Summary, Timeline
from iris.sim.virtual_time import VirtualTime


@dataclass(frozen=True)
class Prediction:
    """What a run returned, and how long it would have taken by the cost model; nothing of the latter was measured.

    Attributes:
        results: what ``fn`` returned on each rank.
        timeline: everything that took time; ``timeline.write(path)`` writes it as Chrome's and Perfetto's JSON.
        summary: the figures of the timeline.
    """

    results: list[Any]
    timeline: Timeline
    summary: Summary

    def __str__(self) -> str:
        return str(self.summary)


def predict(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str | Machine = "mi300x",
    seed: int = 0,
    resident_programs: int | None = None,
    check: str | Sequence[str] = (),
    heap_size: int = HEAP_BYTES,
    step_limit: int = STEP_LIMIT,
    **kwargs: Any,
) -> Prediction:
    """Run ``fn(ctx, *args, **kwargs)`` once for each rank, and predict how long it takes on a machine with GPUs.

    The kernels are interpreted, so results are real; times come from the cost model of ``docs/virtual-time.md``. Time
    begins when the ranks have their contexts. Programs run in the order of their clocks.

    Args:
        fn: what a rank does; ``ctx`` is its :class:`iris.Iris`.
        world_size: number of ranks.
        device: the device of every rank: a name of :func:`iris._machine.names`, or a machine of your own.
        seed: decides between programs whose clocks are equal.
        resident_programs: programs of a rank that run at a time; default what the device holds.
        check: as for :func:`iris.sim.run`, where everything is checked by default; here nothing is.
        heap_size, step_limit: as for :func:`iris.sim.run`.

    Returns:
        The results and the timeline. The same call gives the same timeline.

    Raises:
        ArgumentError: the device is not known, or has no rate for a dtype that a kernel multiplies.
        SimulationError: as for :func:`iris.sim.run`.
        Exception: whatever ``fn`` raised on the first rank that did.
    """
    machine = device if isinstance(device, Machine) else by_name(device)
    time = VirtualTime(machine, checked_size(world_size), resident_programs=resident_programs)

    def body() -> Any:
        return fn(iris(heap_size), *args, **kwargs)

    hosts = simulate([body] * world_size, seed=seed, check=check, step_limit=step_limit, time=time)
    timeline = Timeline(time)
    return Prediction([host.value for host in hosts], timeline, timeline.summary())
