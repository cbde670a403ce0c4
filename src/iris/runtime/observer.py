"""What the interpreter and the streams tell a simulated world while kernels run; here every method does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from iris.runtime.scheduler import Launch, Program


class Observer:
    """Told of every access of the running program before it happens, and of the order that streams make.

    Addresses are arrays of any shape; ``mask`` is None, or says which elements are accessed.
    """

    def load(self, addresses: np.ndarray, mask: np.ndarray | None, itemsize: int, volatile: bool) -> None:
        """A load of ``itemsize`` bytes an address."""

    def store(self, addresses: np.ndarray, mask: np.ndarray | None, itemsize: int) -> None:
        """A store."""

    def before_atomic(self, addresses: np.ndarray, mask: np.ndarray | None, itemsize: int) -> None:
        """An atomic is about to happen; may raise to prevent it."""

    def atomic(
        self,
        name: str,
        addresses: np.ndarray,
        mask: np.ndarray | None,
        itemsize: int,
        sem: str,
        scope: str,
        changed: np.ndarray,
    ) -> None:
        """An atomic has happened: ``name`` (add, cas, ...), ``sem``, ``scope``, and where it changed memory."""

    def barrier(self) -> None:
        """``tl.debug_barrier``."""

    def dot(self, m: int, n: int, k: int, dtype: str) -> None:
        """A matrix product of an [m, k] and a [k, n] block of ``dtype``."""

    def program_started(self, program: Program) -> None:
        """A program takes its place; it has not run yet."""

    def program_ended(self, program: Program) -> None:
        """A program has ended."""

    def launch_issued(self, launch: Launch, stream: Any) -> None:
        """Host code has issued a launch to a stream."""

    def launch_started(self, launch: Launch, stream: Any) -> None:
        """Everything before the launch on its stream has ended."""

    def launch_ended(self, launch: Launch, stream: Any) -> None:
        """Every program of the launch has ended."""

    def event_recorded(self, mark: Any, stream: Any) -> None:
        """A stream has reached the mark of an event."""

    def event_awaited(self, mark: Any, stream: Any) -> None:
        """A stream has passed its wait for the mark of an event."""

    def host_awaited(self, what: Any) -> None:
        """Host code has waited for a stream, or for the mark of an event."""
