"""What a context remembers of an operation's calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from iris.runtime.context import Iris

Call = TypeVar("Call")


class Calls(Generic[Call]):
    """Calls that the ranks have agreed on, by what makes them the same, and plans that have been reported."""

    def __init__(self, ctx: Iris):
        self._ctx = ctx
        self._calls: dict[tuple, Call] = {}
        self._forgotten = 0
        self._reported: set[Any] = set()

    def recall(self, key: tuple) -> Call | None:
        """The call of these arguments, when the ranks have agreed on it and need not again."""
        agreement = self._ctx.agreement
        if self._forgotten != agreement.forgotten or len(self._calls) > 4 * agreement.KEPT:
            self._calls.clear()
            self._forgotten = agreement.forgotten
        return self._calls.get(key) if agreement.mode() != "always" else None

    def remember(self, key: tuple, call: Call) -> None:
        """Keep a call that the ranks have agreed on."""
        self._calls[key] = call

    def report(self, plan: Any) -> None:
        """Log a plan once."""
        if plan not in self._reported:
            self._reported.add(plan)
            self._ctx.info(str(plan))


class StreamOrder:
    """Puts calls that use the same flags in order when they are made on different streams."""

    def __init__(self, ctx: Iris):
        self._ctx = ctx
        self._latest: Any = None
        self._handle: int | None = None

    def follow_current(self) -> None:
        """Let the current stream go on after the latest call, wherever that was made; the next follows this one."""
        handle = self._ctx.stream_handle()
        if handle == self._handle:
            return
        stream = self._ctx.current_stream()
        # A capture begins with a synchronised device, and may not wait for a stream outside of it.
        if self._latest is not None and self._ctx.capturing() == self._ctx.capturing(self._latest):
            stream.wait_stream(self._latest)
        self._latest, self._handle = stream, handle
