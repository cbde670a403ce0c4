"""Keeps hosts that share a GPU from running far ahead of it.

CUDA holds about a thousand operations of a stream. Whoever issues one more waits in the driver, out of Python's sight,
and with it all ranks of the process; what it waits for may be a kernel that waits for a rank whose host is to run yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from iris.runtime.world import World

# Operations: far fewer than CUDA holds, since one may come to several launches, and events and waits count there, too.
MOST = 256
_EVERY = 32


class Backlog:
    """What each rank has issued and the GPU has not done yet.

    Args:
        world: the world.
        mark: records an event in the current stream, which it returns; None while a graph is captured.
    """

    def __init__(self, world: World, mark: Callable[[], Any]):
        self._world = world
        self._mark = mark
        self._unmarked = [0] * world.size
        self._marks: list[deque[Any]] = [deque() for _ in range(world.size)]

    def issued(self, count: int = 1) -> None:
        """The running rank has issued so many operations; lets the others go on while too many are to be done."""
        host = self._world.host
        if host is None:
            return
        rank = host.rank
        self._unmarked[rank] += count
        if self._unmarked[rank] < _EVERY:
            return
        self._unmarked[rank] = 0
        mark = self._mark()
        if mark is None:
            return
        marks = self._marks[rank]
        marks.append(mark)
        while len(marks) > MOST // _EVERY:
            oldest = marks.popleft()
            if not oldest.query():
                self._world.run_until(oldest.query, "the GPU to do what it has issued")
