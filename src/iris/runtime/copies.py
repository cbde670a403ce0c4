"""Streams for the host's copies between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iris.runtime.links import link_of

if TYPE_CHECKING:
    from iris.runtime.context import Iris


class CopyStreams:
    """Streams beside that of a call, the same ones for each call."""

    def __init__(self, ctx: Iris):
        self._ctx = ctx
        self._streams: list[Any] = []
        self._one: bool | None = None  # whether one is enough, once that is known

    def take(self, copies: int) -> list[Any]:
        """Streams for so many copies: one for each, so that all links carry at once. Where ranks share a card one for
        all: there are no links, and few hardware queues."""
        if self._one is None:
            self._one = link_of(self._ctx) == "shared"
        wanted = 1 if self._one else copies
        while len(self._streams) < wanted:
            self._streams.append(self._ctx.new_stream())
        return self._streams[:wanted]
