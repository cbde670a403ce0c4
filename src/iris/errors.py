"""The errors Iris raises.

One class for each kind of fault. Every class is an :class:`IrisError` and also the builtin exception that a caller
who has never heard of Iris would expect, so both ``except IrisError`` and ``except ValueError`` work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class IrisError(Exception):
    """Base of every error that Iris raises on purpose."""


class ArgumentError(IrisError, ValueError):
    """An argument cannot be used: the message says which one, what was given and what is possible."""


class NotSymmetricError(ArgumentError):
    """A tensor that a peer reads or writes does not live on the symmetric heap."""


class NotAMemberError(ArgumentError):
    """The calling rank is not in the process group it passed."""


class EnvironmentValueError(ArgumentError):
    """An environment variable holds a value that Iris does not know."""


class RankMismatch(IrisError, ValueError):
    """The ranks of a collective call disagree; raised on all of them with each rank's values."""


class HeapExhausted(IrisError, MemoryError):
    """The symmetric heap cannot hold an allocation. The context stays usable."""


class DeviceMismatch(IrisError, RuntimeError):
    """A tensor or device argument does not belong to the context's device."""


class OutputError(IrisError, RuntimeError):
    """An ``out=`` tensor has the wrong size, dtype or place."""


class RuntimeConflict(IrisError, RuntimeError):
    """The runtime was settled one way and something now needs it another way."""


class CaptureError(IrisError, RuntimeError):
    """A call that needs the host was made while a graph was being captured."""


class UnsupportedError(IrisError, NotImplementedError):
    """A feature does not exist for this runtime, dtype or machine; the message names what does."""


class RankLost(IrisError, RuntimeError):
    """A rank died, raised, or did not arrive within the time limit. ``ranks`` names the missing ones."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.ranks = ranks


@dataclass(frozen=True)
class WaitRecord:
    """What a program saw when its wait ran out of time.

    Attributes:
        rank: the rank whose program gave up.
        kernel: name of the kernel, empty when it gave none.
        flag: name of the tensor that holds the flag and the element index, or an address.
        wanted: the value the program waited for.
        seen: the last value it read.
        peer: the rank expected to write the flag, -1 when the kernel did not say.
        program: linear program id within the grid.
    """

    rank: int
    kernel: str
    flag: str
    wanted: int
    seen: int
    peer: int
    program: int

    def __str__(self) -> str:
        kernel = f"kernel {self.kernel}" if self.kernel else "a kernel of the program"
        writer = f"rank {self.peer}" if self.peer >= 0 else "a peer"
        return (
            f"rank {self.rank}, {kernel}, program {self.program}: waited for {self.flag} to reach "
            f"{self.wanted}, last saw {self.seen}; {writer} was expected to write it"
        )


class WaitTimeout(IrisError, TimeoutError):
    """A device-side wait ran out of time. Results of the kernels since the last barrier are not valid."""

    def __init__(self, message: str, records: tuple[WaitRecord, ...] = ()):
        super().__init__(message)
        self.records = records


class SimulationError(IrisError, AssertionError):
    """The simulator found a fault of the program.

    Attributes:
        report: what was found, as an object of :mod:`iris.sim`; None when there is nothing but the message.
        seed: the seed that repeats it.
    """

    def __init__(self, message: str, report: Any = None):
        super().__init__(message)
        self.report = report
        self.seed: int | None = None


class DeadlockError(SimulationError):
    """Nothing can move: every program and every host waits for something that nobody left will do."""


class RaceError(SimulationError):
    """Two accesses to the same memory are not ordered, and one of them writes."""


class OutOfBoundsError(SimulationError, IndexError):
    """A kernel touched memory outside any live allocation of the rank that it addressed."""


class UninitializedReadError(SimulationError):
    """Memory was read that nothing had written."""


class StepLimitError(SimulationError):
    """A program took more turns than any that ends would."""


class MissingBarrierWarning(UserWarning):
    """A program released without ``tl.debug_barrier`` after its stores: other warps' stores need not be visible."""
