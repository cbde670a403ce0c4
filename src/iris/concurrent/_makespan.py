"""When the programs of a kernel with two queues are done: :func:`schedule_makespan`.

A simulation of events, of groups of programs that are always free at one time, since they began alike. Between two
instants at which a group turns from one queue to the other nothing changes but the numbers of tiles that are left, so
all events in between are done at once. There are some tens of such instants, however many tiles there are.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from iris.errors import ArgumentError

# Times are whole numbers of picoseconds, so that what happens at one time does so exactly.
_TICKS_A_MS = 10**9


@dataclass
class _Group:
    """Programs ``first`` to ``last``, which are free at one time.

    Attributes:
        multiplies: which queue they take from.
        turned: whether that is the second they take from.
        free: when they have done what they took.
    """

    first: int
    last: int
    multiplies: bool
    turned: bool
    free: int = 0

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    def split(self, size: int) -> list[_Group]:
        """The first ``size`` of them, and the others; the empty ones of the two are left out."""
        middle = self.first + size
        parts = ((self.first, middle - 1), (middle, self.last))
        return [_Group(a, b, self.multiplies, self.turned, self.free) for a, b in parts if a <= b]


def schedule_makespan(
    n_gemm: int,
    Lg: float,
    n_comm: int,
    Lc_unit: float,
    num_wgs: int,
    gemm_wgs: int,
    c_atomic_gemm: float = 0.0,
    c_atomic_comm: float | None = None,
    comm_cap: int | None = None,
    comm_sat: int = 1,
    *,
    helps: bool = True,
) -> float:
    """Milliseconds until all tiles are done. Programs below ``gemm_wgs`` begin with the GEMM, the others with the
    collective; who finds no more tiles turns to the other queue.

    A tile of the collective takes ``max(active, comm_sat) * Lc_unit + c_atomic_comm``, where ``active`` counts the
    programs that have one when it begins, itself and those that begin at that instant among them: the rate of the links
    is shared by those who are there, and fewer than ``comm_sat`` do not reach it. Of programs that are free at one
    instant those with the lower numbers take first.

    Args:
        n_gemm, Lg: tiles of the GEMM, and milliseconds of one.
        n_comm, Lc_unit: tiles of the collective, and milliseconds of one at the rate of the links.
        num_wgs, gemm_wgs: programs, and those of them that begin with the GEMM.
        c_atomic_gemm, c_atomic_comm: milliseconds that taking a tile costs; None for as much as one of the GEMM.
        comm_cap: the most programs that come to the collective, as the operations have it; None for no bound.
        comm_sat: programs that reach the rate of the links together.
        helps: whether programs turn to the other queue; they do not where each queue has a kernel of its own.

    Raises:
        ArgumentError: a number is out of range.
    """
    for name, count, least in (
        ("n_gemm", n_gemm, 0), ("n_comm", n_comm, 0), ("num_wgs", num_wgs, 1), ("comm_sat", comm_sat, 1),
        ("comm_cap", 1 if comm_cap is None else comm_cap, 1),
    ):  # fmt: skip
        if count < least:
            raise ArgumentError(f"{name} must be at least {least}, got {count}")
    if not 0 <= gemm_wgs <= num_wgs:
        raise ArgumentError(f"gemm_wgs must be from 0 to num_wgs={num_wgs}, got {gemm_wgs}")
    if not helps and (gemm_wgs == 0 < n_gemm or (gemm_wgs == num_wgs and n_comm > 0)):
        raise ArgumentError(f"gemm_wgs={gemm_wgs} of num_wgs={num_wgs} leaves nobody for one of the queues")
    gemm_ticks = max(1, _ticks("Lg", Lg) + _ticks("c_atomic_gemm", c_atomic_gemm))
    item_ticks = _ticks("Lc_unit", Lc_unit)
    taking_ticks = _ticks("c_atomic_comm", c_atomic_gemm if c_atomic_comm is None else c_atomic_comm)

    groups = [_Group(0, gemm_wgs - 1, True, not helps), _Group(gemm_wgs, num_wgs - 1, False, not helps)]
    groups = [group for group in groups if group.size > 0]
    left, cap = {True: n_gemm, False: n_comm}, num_wgs if comm_cap is None else comm_cap
    come = 0  # to the collective
    for group in [group for group in groups if not group.multiplies]:
        come = min(group.size, cap)
        if come < group.size:
            groups.remove(group)
            groups += group.split(come)
            groups[-1].multiplies, groups[-1].turned = True, True
            if not helps:
                groups.pop()

    now = 0
    while groups:
        there = sum(group.size for group in groups if not group.multiplies)
        period = {True: gemm_ticks, False: max(1, max(there, comm_sat) * item_ticks + taking_ticks)}
        now = min(
            _first_refused([group for group in groups if group.multiplies is queue], left[queue], period[queue])
            for queue in {group.multiplies for group in groups}
        )
        # All that is taken before.
        for group in groups:
            if group.free < now:
                rounds = -((group.free - now) // period[group.multiplies])
                group.free += rounds * period[group.multiplies]
                left[group.multiplies] -= rounds * group.size
        # What is taken now, by the groups that are free.
        following, begun = [], []
        for group in sorted(groups, key=lambda group: group.first):
            if group.free > now:
                following.append(group)
                continue
            for _ in range(2):
                taken = min(group.size, left[group.multiplies])
                left[group.multiplies] -= taken
                parts = group.split(taken)
                if taken:
                    begun.append(parts.pop(0))
                if not parts or group.turned:
                    break
                (group,) = parts
                group.multiplies, group.turned = not group.multiplies, True
                if not group.multiplies:
                    coming = min(group.size, cap - come)
                    come += coming
                    if not coming:
                        break
                    group = group.split(coming)[0]
        there = sum(group.size for group in (*following, *begun) if not group.multiplies)
        for group in begun:
            took = gemm_ticks if group.multiplies else max(1, max(there, comm_sat) * item_ticks + taking_ticks)
            group.free = now + took
        groups = following + begun
    return now / _TICKS_A_MS


def _ticks(name: str, milliseconds: float) -> int:
    if not (math.isfinite(milliseconds) and milliseconds >= 0):
        raise ArgumentError(f"{name} must be finite and not negative, got {milliseconds!r}")
    return round(milliseconds * _TICKS_A_MS)


def _first_refused(groups: list[_Group], left: int, period: int) -> int:
    """When the first of these groups finds fewer tiles than it has programs, if all go on as they do."""
    size = sum(group.size for group in groups)
    soonest, latest = min(group.free for group in groups), max(group.free for group in groups)

    def asked(when: int) -> int:
        """Tiles that have been asked for until then."""
        return sum(group.size * ((when - group.free) // period + 1) for group in groups if group.free <= when)

    # Nobody is refused in so many rounds of all, and somebody is in so many rounds of those who are free last.
    least = soonest + max(0, left // size - 1) * period
    most = latest + (left // size + 1) * period
    return least + bisect_right(range(most - least + 1), left, key=lambda ticks: asked(least + ticks))
