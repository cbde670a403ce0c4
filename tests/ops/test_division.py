"""How tiles are divided over programs: the closed forms against programs that take work one piece after the other."""

import heapq
import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from iris.ops import division

PROGRAMS = st.integers(1, 24)
EXCHANGE = st.sampled_from((0.0, 0.06, 0.3))
# Sums of these are exact. Where two programs become free at nearly the same time it is rounding that tells which takes
# the longer piece, and makespans differ by as much as the pieces do.
BUSY = st.integers(0, 9 * 16).map(lambda sixteenths: sixteenths / 16)


def one_by_one(programs, fetchers, busy, whole, divided, splits, exchange):
    """The makespan, piece by piece."""
    free = [0.0] * (programs - fetchers) + [busy] * fetchers
    pieces = [1 / splits + exchange] * (splits - 1) + [1 / splits + exchange * (splits - 1)]
    end = 0.0
    for length in itertools.chain(itertools.repeat(1.0, whole), *itertools.repeat(pieces, divided)):
        end = max(end, free[0] + length)
        heapq.heapreplace(free, free[0] + length)
    return end


@given(PROGRAMS, st.integers(0, 24), BUSY, st.integers(0, 200), st.integers(0, 60), st.integers(1, 8), EXCHANGE)
@example(4, 2, 3.0, 6, 0, 1, 0.0)
@example(4, 2, 2.5, 7, 3, 3, 0.06)
@example(4, 4, 2.5, 7, 0, 1, 0.0)
@example(1, 1, 1.0, 0, 0, 1, 0.0)
@settings(max_examples=300, deadline=None)
def test_a_makespan_is_that_of_pieces_taken_one_by_one(programs, fetchers, busy, whole, divided, splits, exchange):
    fetchers = min(fetchers, programs)
    got = division._makespan(programs, fetchers, busy, whole, divided, splits, exchange)
    assert got == pytest.approx(one_by_one(programs, fetchers, busy, whole, divided, splits, exchange), abs=1e-9)
    work = whole + divided * (1 + 2 * exchange * (splits - 1))
    assert division._least(programs, fetchers, busy, work) <= got + 1e-9


@given(
    st.integers(2, 24),
    st.integers(0, 23),
    st.sampled_from((0.0, 0.31, 1.77, 4.93, 8.11)),
    st.integers(1, 300),
    st.integers(1, 100),
    EXCHANGE,
)
@settings(max_examples=100, deadline=None)
def test_no_other_division_of_those_that_are_tried_ends_before(programs, fetchers, busy, tiles, blocks, exchange):
    fetchers = min(fetchers, programs - 1)
    factors = (0.7, 1.0, 1.4) if fetchers else (1.0,)

    def takes(whole, splits):
        ends = (one_by_one(programs, fetchers, busy * f, whole, tiles - whole, splits, exchange) for f in factors)
        return sum(ends)

    whole, splits = division.divided(tiles, programs, blocks, exchange, fetchers, busy)
    further = {0, fetchers, 2 * fetchers, programs // 3, programs // 2} if fetchers else {0}
    tried = itertools.product(further, range(1, max(1, min(8, blocks // 8)) + 1))
    least = min(takes(max(0, tiles - tiles % programs - more), parts) for more, parts in tried)
    assert takes(whole, splits) <= least + 1e-6
    assert 0 <= whole <= tiles
    assert splits == 1 or splits <= blocks // 8


@pytest.mark.parametrize("busy", [0.4, 33.5, 1781.5, 30000.0])
@pytest.mark.parametrize("tiles", [1, 669, 132161, 573440])
def test_it_does_not_take_longer_for_more_tiles(monkeypatch, busy, tiles):
    """Counted in steps, not in time: each is about a microsecond."""
    steps = []

    class Counted:
        heapify = staticmethod(heapq.heapify)
        heappush = staticmethod(heapq.heappush)

        @staticmethod
        def heappop(times):
            steps.append(1)
            return heapq.heappop(times)

    monkeypatch.setattr(division, "heapq", Counted)
    for programs, fetchers in ((132, 4), (132, 52), (304, 32), (304, 150)):
        steps.clear()
        whole, splits = division.divided(tiles, programs, 1024, division.EXCHANGE, fetchers, busy)
        assert len(steps) < 2500
        assert 0 <= whole <= tiles
        assert 1 <= splits <= 8
    assert math.isfinite(division._makespan(304, 32, busy, tiles, 0, 1, 0.06))
