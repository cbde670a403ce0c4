"""In which order ranks that share a GPU load kernels and launch them for the first time.

CUDA loads no kernel while another runs. A kernel that waits for its peers must therefore not be launched before every
peer has loaded what it will launch, or the peer's load waits for the kernel and the kernel for the peer.

- A rank that has to load waits until the GPU is idle. When it stays busy although no other rank can do anything, what
  runs there waits for the ranks that load, so they go on all the same.
- A rank that has loaded launches when every other rank has loaded too or waits for something, and nothing runs: what a
  rank waits for may be done in a moment, and then it loads. While another still has to load, it lets that one go first;
  but when the GPU stays busy, what runs there may wait for this very launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from iris.runtime.world import World

# Work that waits for no rank and takes longer than this is taken for a kernel that waits.
QUIET_S = 0.2


class FirstLaunches:
    """Holds the ranks of a world.

    Args:
        world: the world.
        idle: whether nothing runs on the GPU.
        now: the clock, in seconds.
    """

    def __init__(self, world: World, idle: Callable[[], bool], now: Callable[[], float] = time.monotonic):
        self._world = world
        self._idle = idle
        self._now = now
        self._loading: set[int] = set()
        self._loaded: set[int] = set()
        self._quiet_since = [0.0] * world.size

    def load(self, load: Callable[[], object]) -> None:
        """Have the calling rank load a kernel; returns when it may launch it."""
        rank = self._world.rank()
        self._quiet_since[rank] = self._now()
        try:
            self._loading.add(rank)
            self._world.run_until(lambda: self._may_load(rank), "the GPU to be idle, to load a kernel")
            load()
            self._loading.discard(rank)
            self._loaded.add(rank)
            self._quiet_since[rank] = self._now()
            self._world.run_until(lambda: self._may_launch(rank), "the other ranks to load their kernels")
        finally:
            self._loading.discard(rank)
            self._loaded.discard(rank)

    def _may_load(self, rank: int) -> bool:
        return self._idle() or self._quiet(rank, bool(self._loaded))

    def _may_launch(self, rank: int) -> bool:
        if self._someone_moves():
            return self._quiet(rank, True)
        idle = self._idle()
        if idle and not self._loading:
            # What somebody waited for may have been done since he was asked.
            return not self._someone_moves()
        return self._quiet(rank, idle)

    def _someone_moves(self) -> bool:
        held = self._loading | self._loaded
        return any(h.rank not in held and not h.done and h.ready() for h in self._world.hosts)

    def _quiet(self, rank: int, hopeful: bool) -> bool:
        """Whether for some time nothing but the calling rank could have changed anything; ``hopeful`` when it can."""
        if hopeful or self._someone_moves():
            self._quiet_since[rank] = self._now()
        return self._now() - self._quiet_since[rank] > QUIET_S
