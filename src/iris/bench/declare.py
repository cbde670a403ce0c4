"""What a benchmark script declares: functions, and the values that their axes take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from iris.errors import ArgumentError

COMPUTE = "compute"
COMMUNICATION = "communication"
SEQUENCE = "communication+compute"
ROLES = (SEQUENCE, COMPUTE, COMMUNICATION)
NUM_RANKS = "num_ranks"

_AXES = "__iris_bench_axes__"
_REGISTERED = "__iris_bench_registered__"
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class AxisDef:
    """One parameter of a benchmark.

    Attributes:
        name: of the parameter; ``num_ranks`` is how many ranks run.
        values: what it takes, in order.
        alternate: whether its values are measured in turns, in one run.
        baseline: values that the others are compared with; needs ``alternate``.
        roles: what a value stands for, one of :data:`ROLES`; needs ``alternate``.
    """

    name: str
    values: Sequence[Any]
    alternate: bool = False
    baseline: tuple[Any, ...] = ()
    roles: Mapping[Any, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class BenchmarkDef:
    """One benchmark: ``fn(state, ctx)`` prepares a combination of the values of ``axes``, the slowest axis first."""

    name: str
    fn: Callable[..., Any]
    axes: tuple[AxisDef, ...]


# One for the process: where ranks are coroutines, each of them adds the benchmarks of its own `__main__`.
_benchmarks: list[BenchmarkDef] = []


def axis(
    name: str,
    values: Sequence[Any],
    *,
    alternate: bool = False,
    baseline: Any = None,
    roles: Mapping[Any, str] | None = None,
) -> Callable[[_Function], _Function]:
    """Decorator that gives a benchmark a parameter. Of several, the outermost varies slowest.

    Args:
        name: a Python name; ``num_ranks`` is how many ranks run.
        values: what it takes, in order; at least one.
        alternate: measure all values of the axis together, one call of each in turn, so that whatever drifts meets all
            of them alike. Their inputs exist at the same time. One axis of a benchmark may alternate.
        baseline: a value, or a list of values, that the others are compared with.
        roles: ``"compute"``, ``"communication"`` and ``"communication+compute"`` for the values that are one of the
            two alone, and the two one after the other: the others then say how much of the communication they hide.

    Raises:
        ArgumentError: what is given cannot be an axis.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ArgumentError(f"axis {name!r}: the name must be a Python name, such as M")
    chosen = list(values)
    if isinstance(values, str) or not chosen:
        raise ArgumentError(f"axis {name}: values must be a list of at least one, got {values!r}")
    bases = tuple(baseline) if isinstance(baseline, list | tuple) else () if baseline is None else (baseline,)
    known = dict(roles or {})
    for what, named in (("baseline", bases), ("roles", tuple(known))):
        if named and not alternate:
            raise ArgumentError(f"axis {name}: {what} compares values of one run; it needs alternate=True")
        for value in named:
            if value not in chosen:
                raise ArgumentError(f"axis {name}: {what} has {value!r}, which is no value of it: {chosen}")
    for role in known.values():
        check_role(f"axis {name}", role)
    if alternate and name == NUM_RANKS:
        raise ArgumentError(f"axis {NUM_RANKS}: each of its values is a run of its own, so it cannot alternate")
    if name == NUM_RANKS:
        for value in chosen:
            check_num_ranks(value)
    made = AxisDef(name, tuple(chosen), alternate, bases, MappingProxyType(known))

    def decorate(fn: _Function) -> _Function:
        if getattr(fn, _REGISTERED, False):
            raise ArgumentError(f"axis {name}: put @bench.register above every @bench.axis of {fn.__name__}")
        axes = getattr(fn, _AXES, ())
        if any(other.name == name for other in axes):
            raise ArgumentError(f"benchmark {fn.__name__} has two axes {name}")
        if alternate and any(other.alternate for other in axes):
            raise ArgumentError(f"benchmark {fn.__name__} has two axes that alternate; one may")
        setattr(fn, _AXES, (made, *axes))
        return fn

    return decorate


def register(fn: _Function) -> _Function:
    """Decorator, above every :func:`axis`, that makes ``fn(state, ctx)`` a benchmark of that name.

    ``fn`` runs once for each combination of values and is not timed: it makes inputs, says how many operations and
    bytes a call has, and hands over what is timed (:meth:`iris.bench.State.exec`).
    """
    definition = BenchmarkDef(fn.__name__, fn, getattr(fn, _AXES, ()))
    setattr(fn, _REGISTERED, True)
    place = (fn.__module__, fn.__qualname__, id(fn.__globals__))
    # A module that is executed again replaces its benchmarks.
    _benchmarks[:] = [b for b in _benchmarks if (b.fn.__module__, b.fn.__qualname__, id(b.fn.__globals__)) != place]
    _benchmarks.append(definition)
    return fn


def registered() -> list[BenchmarkDef]:
    """The benchmarks of this program, in the order of their registration.

    Raises:
        ArgumentError: two have the same name.
    """
    main = vars(sys.modules["__main__"])
    # Another rank's `__main__` is another program.
    found = [b for b in _benchmarks if b.fn.__module__ != "__main__" or b.fn.__globals__ is main]
    names = [b.name for b in found]
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(f"two benchmarks have the name {name}; give the functions different names")
    return found


def check_role(where: str, role: str | None) -> None:
    """Refuse an unknown role.

    Raises:
        ArgumentError: lists the possible ones.
    """
    if role is not None and role not in ROLES:
        raise ArgumentError(f"{where}: role {role!r} is not known; possible: {', '.join(map(repr, ROLES))}")


def check_num_ranks(value: Any) -> None:
    """Refuse what is no number of ranks.

    Raises:
        ArgumentError: says what was given.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"axis {NUM_RANKS}: {value!r} is no number of ranks; possible: whole numbers from 1")


def power_of_two(start: int, end: int) -> list[int]:
    """``[2**start, ..., 2**end]``, both ends included.

    Raises:
        ArgumentError: an exponent is negative, or the first is the larger one.
    """
    if not 0 <= start <= end:
        raise ArgumentError(f"power_of_two({start}, {end}): the exponents must be 0 <= start <= end")
    return [2**i for i in range(start, end + 1)]


def linear_range(start: int, end: int, step: int) -> list[int]:
    """``[start, start + step, ...]`` up to and including ``end`` where a step meets it.

    Raises:
        ArgumentError: the step is not above 0, or the start is above the end.
    """
    if step <= 0 or start > end:
        raise ArgumentError(f"linear_range({start}, {end}, {step}): the step must be above 0 and start <= end")
    return list(range(start, end + 1, step))
