"""When a program waits. A look at flags may be one turn of a polling loop, and only what follows tells.

A look is a read-modify-write that changes nothing, or a volatile load of few elements. Looks at the same flags that
follow each other are one wait, which is over when the program does something else. It then has cost one access, or the
time until what the last look saw was visible.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from iris.sim.virtual_time import Release, VirtualTime


class ProgramName(NamedTuple):
    """What a program is called in spans: its place in the grid, x fastest, and the number of its launch."""

    kernel: str
    launch: int
    index: int


class Look(NamedTuple):
    """The last of the looks at some flags that follow each other."""

    addresses: list[int]
    owner: int
    where: str
    release: Release | None  # what it saw


@dataclass(eq=False, slots=True)
class Running:
    """A program that runs."""

    name: ProgramName
    rank: int
    looks: dict[int, Look] = field(default_factory=dict)  # by the first address
    looked_ns: float = 0.0  # time of its looks since something that it polls has changed


class Looks:
    """The looks of all programs, charged to ``time`` when they are over. Flags are (address, owning rank)."""

    def __init__(self, time: VirtualTime):
        self._time = time
        self._looking: dict[int, set[Running]] = {}  # by address

    def look(self, running: Running, flags: list[tuple[int, int]], where: str) -> None:
        """A program reads flags."""
        addresses, owner = [address for address, _ in flags], flags[0][1]
        found = [release for release in map(self._time.last_release, addresses) if release is not None]
        release = max(found, key=lambda r: r.visible_ns, default=None)
        running.looks[addresses[0]] = Look(addresses, owner, where, release)
        running.looked_ns += self._latency_ns(running, owner)
        for address in addresses:
            self._looking.setdefault(address, set()).add(running)

    def released(self, running: Running, flags: list[tuple[int, int]]) -> None:
        """A program's last access has set flags."""
        for address, owner in flags:
            self._time.released(running.name, address, owner=owner)
            for other in self._looking.get(address, ()):
                other.looked_ns = 0.0

    def end(self, running: Running) -> None:
        """A program does something else than to look again."""
        for address in list(running.looks):
            self._end(running, address)

    def end_late(self, running: Running) -> None:
        """A program asks for the time: it has waited for what was not visible yet when it looked."""
        for address, look in list(running.looks.items()):
            if self.is_late(running, look.release):
                self._end(running, address)

    def forget(self, running: Running, address: int) -> None:
        """The look at some flags, of which the first is at ``address``, goes on as something that is charged."""
        look = running.looks.pop(address, None)
        for each in look.addresses if look is not None else ():
            self._looking[each].discard(running)
        if not running.looks:
            running.looked_ns = 0.0

    def is_late(self, running: Running, release: Release | None, latency_ns: float = 0.0) -> bool:
        """Whether what a program saw becomes visible after an access of that latency would have ended."""
        if release is None or release.program == running.name:
            return False
        return release.visible_ns > self._time.now(running.name) + latency_ns

    def _end(self, running: Running, address: int) -> None:
        look = running.looks[address]
        self.forget(running, address)
        if self.is_late(running, look.release, self._latency_ns(running, look.owner)):
            self._time.waited(running.name, address, look.where, release=look.release)
        else:
            self._time.atomic(running.name, look.owner, look.where)

    def _latency_ns(self, running: Running, owner: int) -> float:
        machine = self._time.machine
        return machine.local_latency_ns if owner == running.rank else machine.remote_latency_ns
