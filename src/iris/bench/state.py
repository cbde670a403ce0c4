"""``State``: what a benchmark function reads its parameters from and hands over what is timed to."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from iris.bench.declare import check_role
from iris.errors import ArgumentError
from iris.runtime.numeric import assert_bitwise_equal, assert_close

MEETINGS = ("stream", "host")


class _SkipCombination(Exception):
    """Ends the function of a combination that is not to be measured."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Candidate:
    """One callable that is timed.

    Attributes:
        name: among those of its combination; empty when it is the only one.
        fn: what is timed.
        preamble_fn: what prepares each call, not timed.
        baseline: whether the others are compared with it.
        role: one of :data:`iris.bench.declare.ROLES`, or None.
        flops, nbytes: of a call; None takes those of the state.
    """

    name: str
    fn: Callable[[], Any]
    preamble_fn: Callable[[], Any] = _nothing
    baseline: bool = False
    role: str | None = None
    flops: float | None = None
    nbytes: float | None = None


@dataclass(frozen=True)
class Check:
    """One comparison with a reference, of what a call of a candidate leaves behind."""

    result: torch.Tensor | Callable[[], torch.Tensor]
    reference: torch.Tensor | Callable[[], torch.Tensor]
    dtype: torch.dtype | None
    k: int
    allowed: tuple[float, float] | None
    bitwise: bool
    poison: bool
    candidate: str | None

    def prepare(self) -> None:
        """Make the result wrong, so that a call that writes nothing shows."""
        if not self.poison or not isinstance(self.result, torch.Tensor):
            return
        dtype = self.result.dtype
        if dtype.is_floating_point or dtype.is_complex:
            self.result.fill_(float("nan"))
        elif dtype != torch.bool:
            self.result.fill_(torch.iinfo(dtype).min)

    def fault(self) -> str | None:
        """What is wrong with the result, with the first element; None when nothing is."""
        result = self.result if isinstance(self.result, torch.Tensor) else self.result()
        want = self.reference if isinstance(self.reference, torch.Tensor) else self.reference()
        try:
            if want.numel() > 1 and bool((want == want.flatten()[0]).all()):
                return (
                    f"the reference is {want.flatten()[0].item()!r} in all elements, so misplaced data would pass; "
                    "take random inputs (iris.bench.random_tensor)"
                )
            if self.bitwise:
                assert_bitwise_equal(result, want)
            else:
                assert_close(result, want, self.dtype or result.dtype, self.k, allowed=self.allowed)
        except AssertionError as error:
            return str(error)
        return None


class State:
    """One combination of a benchmark's parameters, given to its function. ``state["M"]`` is the value of axis M.

    The function is called on every rank and must make the same calls on each.
    """

    def __init__(self, params: Mapping[str, Any]):
        self.params = dict(params)
        self.flops: float | None = None
        self.nbytes: float | None = None
        self.counters: dict[str, float | str] = {}
        self.notes: list[str] = []
        self.timed_ranks: list[int] | None = None
        self.warmup: int | None = None
        self.repeat: int | None = None
        self.graph = False
        self.cold_cache: bool | None = None
        self.meeting: str | None = None
        self.candidates: list[Candidate] = []
        self.checks: list[Check] = []

    def __getitem__(self, name: str) -> Any:
        if name not in self.params:
            raise KeyError(f"no axis {name!r}; the axes are {', '.join(self.params) or '(none)'}")
        return self.params[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an axis; ``default`` when there is no such axis."""
        return self.params.get(name, default)

    def set_flops(self, flops: float) -> None:
        """Floating-point operations of a call on one rank; gives the column TFLOPS."""
        self.flops = _amount("flops", flops)

    def set_bytes(self, nbytes: float) -> None:
        """Bytes that a call moves; gives the column GB/s."""
        self.nbytes = _amount("bytes", nbytes)

    def add_counter(self, name: str, value: float | str) -> None:
        """A number or a word of your own, shown in a column of that name."""
        self.counters[str(name)] = value

    def add_note(self, text: str) -> None:
        """A sentence about the result, shown once below the table."""
        self.notes.append(text)

    def set_timed_ranks(self, ranks: Sequence[int]) -> None:
        """Let the times of these ranks alone count; the others take part."""
        self.timed_ranks = sorted({_count("timed_ranks", rank, 0) for rank in ranks})
        if not self.timed_ranks:
            raise ArgumentError("set_timed_ranks: no rank was given, so nothing would be timed")

    def set_warmup(self, calls: int) -> None:
        """Calls before the measured ones, after a first one that compiles. ``--n_warmup`` goes before it."""
        self.warmup = _count("warmup", calls, 0)

    def set_repeat(self, calls: int) -> None:
        """Measured calls. ``--n_repeat`` goes before it."""
        self.repeat = _count("repeat", calls, 1)

    def use_graph(self, wanted: bool = True) -> None:
        """Time replays of a captured graph instead of calls, so that no work of the host is in the time.

        Where the callable cannot be captured on every rank, or there is no GPU, calls are timed and the result says so.
        """
        self.graph = bool(wanted)

    def set_cold_cache(self, cold: bool) -> None:
        """Whether the caches are emptied before each call; they are by default. ``--cache`` goes before it."""
        self.cold_cache = bool(cold)

    def set_meeting(self, where: str) -> None:
        """Where the ranks meet before each call. ``--meet`` goes before it.

        ``"stream"``, the default on GPUs: in the stream, after the host has issued the whole call, so that its time
        is the GPU's. ``"host"``: on the host, so that the time of a short call is the host's.
        """
        if where not in MEETINGS:
            raise ArgumentError(f"set_meeting: {where!r} is not known; possible: {', '.join(MEETINGS)}")
        self.meeting = where

    def exec(self, fn: Callable[[], Any], *, preamble_fn: Callable[[], Any] | None = None) -> None:
        """Time ``fn()``, the only candidate of the combination. ``preamble_fn()`` runs before each call, not timed."""
        if self.candidates:
            raise ArgumentError("state.exec: something is timed already; name several with state.candidate")
        self.candidates.append(Candidate("", _callable("fn", fn), _callable("preamble_fn", preamble_fn or _nothing)))

    def candidate(
        self,
        name: str,
        fn: Callable[[], Any],
        *,
        preamble_fn: Callable[[], Any] | None = None,
        baseline: bool = False,
        role: str | None = None,
        flops: float | None = None,
        nbytes: float | None = None,
    ) -> None:
        """Time ``fn()`` in turns with the other candidates of the combination.

        Args:
            name: of the candidate.
            fn: what is timed.
            preamble_fn: runs before each call, not timed.
            baseline: compare the others with it.
            role: ``"compute"`` or ``"communication"``, one of the two alone, or ``"communication+compute"``, both one
                after the other; the others then say how much of the communication they hide.
            flops, nbytes: of a call; default those of :meth:`set_flops` and :meth:`set_bytes`.

        Raises:
            ArgumentError: the name is taken or empty, or the role is unknown.
        """
        if not name or any(other.name in (name, "") for other in self.candidates):
            taken = ", ".join(other.name or "that of exec" for other in self.candidates)
            raise ArgumentError(f"candidate {name!r}: names must differ and not be empty; taken: {taken or 'none'}")
        check_role(f"candidate {name}", role)
        preamble = _callable("preamble_fn", preamble_fn or _nothing)
        operations = None if flops is None else _amount("flops", flops)
        moved = None if nbytes is None else _amount("nbytes", nbytes)
        self.candidates.append(Candidate(name, _callable("fn", fn), preamble, baseline, role, operations, moved))

    def validate(
        self,
        result: torch.Tensor | Callable[[], torch.Tensor],
        reference: torch.Tensor | Callable[[], torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        k: int = 1,
        tolerance: tuple[float, float] | None = None,
        bitwise: bool = False,
        poison: bool = True,
        candidate: str | None = None,
    ) -> None:
        """Compare with a reference before anything is timed; a candidate with a wrong result is not timed.

        The result is filled with NaN (integers: the smallest), the ranks meet, the candidate is called once, preamble
        included, and the result is compared on every rank. A reference of equal elements is refused.

        Args:
            result: where a call leaves its result, or a function that returns it afterwards.
            reference: what it must be, in float64 where it can; or a function that returns it.
            dtype: the least precise dtype on the way; default that of the result.
            k: products in each sum; sets the tolerance together with ``dtype``.
            tolerance: (absolute, relative) error instead.
            bitwise: every bit must be equal.
            poison: False leaves the result as it is before the call.
            candidate: the candidate to check; default all of them.
        """
        self.checks.append(Check(result, reference, dtype, k, tolerance, bitwise, poison, candidate))

    def skip(self, reason: str = "") -> NoReturn:
        """End the function here: the combination is listed with the reason and not measured."""
        raise _SkipCombination(reason)


def _amount(name: str, value: float) -> float:
    if not value >= 0:
        raise ArgumentError(f"{name} must be at least 0, got {value!r}")
    return value


def _count(name: str, value: Any, least: int) -> int:
    number = operator.index(value)
    if number < least:
        raise ArgumentError(f"{name} must be at least {least}, got {value}")
    return number


def _callable(name: str, value: Any) -> Callable[[], Any]:
    if not callable(value):
        raise ArgumentError(f"{name} must be a function without arguments, got {value!r}")
    return value
