"""The checker against a reference that keeps every access of every byte and compares it with full vector clocks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from iris.errors import MissingBarrierWarning, OutOfBoundsError, RaceError, SimulationError, UninitializedReadError
from iris.runtime.scheduler import Launch, Program
from iris.runtime.streams import Stream
from iris.runtime.world import ProgramState, World
from iris.sim.watcher import Watcher

RANKS = (0, 0, 1, 1)  # of the programs that run at a time
LEVELS = {"plain": 0, "cta": 1, "gpu": 2, "sys": 3}
BYTES = 32
START = 1 << 20


class Checked:
    """One program on each of some streams, told to a watcher as the interpreter and the streams would."""

    def __init__(self, ranks=RANKS, check=("races", "bounds", "uninitialized")):
        self.world = World(max(ranks) + 1)
        self.watcher = Watcher(self.world, check)
        self.streams = [Stream() for _ in ranks]
        self.ranks = ranks
        self.programs = [self._started(s) for s in range(len(ranks))]

    def allocate(self, start=START, nbytes=BYTES, rank=0, itemsize=1, label="memory"):
        everywhere = [start + (r - rank) * (1 << 30) for r in range(self.world.size)]
        self.watcher.allocated(rank, everywhere, nbytes, itemsize, label)

    def load(self, at, addresses, itemsize=4, volatile=False, mask=None):
        self._run(at)
        self.watcher.load(np.array(addresses, dtype=np.uint64), mask, itemsize, volatile)

    def store(self, at, addresses, itemsize=4, mask=None):
        self._run(at)
        self.watcher.store(np.array(addresses, dtype=np.uint64), mask, itemsize)

    def atomic(self, at, addresses, itemsize=4, *, name="add", sem="relaxed", scope="sys", changed=True, mask=None):
        self._run(at)
        where = np.array(addresses, dtype=np.uint64)
        self.watcher.atomic(name, where, mask, itemsize, sem, scope, np.broadcast_to(np.array(changed), where.shape))

    def barrier(self, at):
        self._run(at)
        self.watcher.barrier()

    def relaunch(self, at):
        """End the program of a stream; the next one starts behind it."""
        self._end(at)
        self.programs[at] = self._started(at)

    def event(self, at, other):
        """Let the next program of stream ``other`` start behind what stream ``at`` has done."""
        mark = SimpleNamespace()
        self._end(at)
        self.watcher.event_recorded(mark, self.streams[at])
        self._end(other)
        self.watcher.event_awaited(mark, self.streams[other])
        for stream in (at, other):
            self.programs[stream] = self._started(stream)

    def _started(self, at):
        launch, stream = Launch(f"kernel{at}", (1, 1, 1), lambda: None), self.streams[at]
        self.world.host = SimpleNamespace(rank=self.ranks[at])
        self.watcher.launch_issued(launch, stream)
        self.watcher.launch_started(launch, stream)
        self.world.host = None
        program = Program(launch, (0, 0, 0))
        program.state = ProgramState(self.ranks[at], 1.0)
        self.watcher.program_started(program)
        return program

    def _end(self, at):
        self.watcher.launch_ended(self.programs[at].launch, self.streams[at])

    def _run(self, at):
        self.world.current = self.programs[at]


@dataclass
class Byte:
    written: bool = False
    accesses: list = field(default_factory=list)  # (actor, index, rank, level, writes)
    messages: list = field(default_factory=list)  # (clock, rank, level)


class Reference:
    """The rules, spelled out."""

    def __init__(self, nbytes=BYTES):
        self.bytes = [Byte() for _ in range(nbytes)]
        self.actors = list(range(len(RANKS)))
        self.clocks = {a: {a: 0} for a in self.actors}
        self.stream_clocks = [{} for _ in RANKS]
        self.count = len(RANKS)

    def verdict(self, step):
        """What an access that has not happened yet must raise."""
        clock = self._clock_after_acquire(step)
        if step.reads() and not all(b.written for b, _ in self._touched(step)):
            return UninitializedReadError
        level, writes = step.level(), step.writes()
        for byte, lane in self._touched(step):
            for actor, index, rank, other, wrote in byte.accesses:
                if clock.get(actor, 0) >= index or not (wrote or writes[lane]):
                    continue
                both_system = level == other == LEVELS["sys"]
                one_gpu = rank == RANKS[step.at] and min(level, other) >= LEVELS["gpu"]
                if not (both_system or one_gpu):
                    return RaceError
        return None

    def do(self, step):
        actor, rank = self.actors[step.at], RANKS[step.at]
        clock = self.clocks[actor] = self._clock_after_acquire(step)
        clock[actor] += 1
        writes, level = step.writes(), step.level()
        for byte, lane in self._touched(step):
            byte.accesses.append((actor, clock[actor], rank, level, writes[lane]))
            byte.written |= writes[lane]
            if (level == LEVELS["plain"] and writes[lane]) or step.kind == "atomic store":
                byte.messages.clear()
        if step.sem in ("release", "acq_rel") and level >= LEVELS["gpu"]:
            for byte, lane in self._touched(step):
                if writes[lane] or step.kind not in ("cas", "atomic load"):
                    byte.messages.append((dict(clock), rank, level))

    def relaunch(self, at):
        self._end(at)
        self._start(at)

    def event(self, at, other):
        self._end(at)
        self._end(other)
        learn(self.stream_clocks[other], self.stream_clocks[at])
        self._start(at)
        self._start(other)

    def _end(self, at):
        learn(self.stream_clocks[at], self.clocks[self.actors[at]])

    def _start(self, at):
        actor = self.count
        self.count += 1
        self.actors[at] = actor
        self.clocks[actor] = {**self.stream_clocks[at], actor: 0}

    def _touched(self, step):
        for lane, offset in enumerate(step.offsets):
            for byte in self.bytes[offset : offset + step.itemsize]:
                yield byte, lane

    def _clock_after_acquire(self, step):
        clock = dict(self.clocks[self.actors[step.at]])
        if step.sem in ("acquire", "acq_rel") and step.level() >= LEVELS["gpu"]:
            for byte, _ in self._touched(step):
                for known, rank, level in byte.messages:
                    within = rank == RANKS[step.at]
                    if within or level == step.level() == LEVELS["sys"]:
                        learn(clock, known)
        return clock


def learn(clock, other):
    for actor, time in other.items():
        clock[actor] = max(clock.get(actor, 0), time)


@dataclass(frozen=True)
class Step:
    """An access: ``changed`` says which of its lanes an atomic changes."""

    at: int
    kind: str
    offsets: tuple[int, ...]
    itemsize: int
    changed: tuple[bool, ...] = ()
    sem: str = ""
    scope: str = "plain"

    def level(self):
        return LEVELS[self.scope]

    def reads(self):
        return self.kind not in ("store", "xchg", "atomic store")

    def writes(self):
        always = {"store": True, "xchg": True, "atomic store": True}
        never = {"load": False, "volatile": False, "atomic load": False}
        known = {**always, **never}.get(self.kind)
        return self.changed if known is None else (known,) * len(self.offsets)

    def tell(self, checked):
        addresses = [START + offset for offset in self.offsets]
        if self.kind in ("load", "volatile"):
            checked.load(self.at, addresses, self.itemsize, self.kind == "volatile")
        elif self.kind == "store":
            checked.store(self.at, addresses, self.itemsize)
        else:
            name = self.kind.removeprefix("atomic ")
            changed = self.writes() if self.kind != "xchg" else self.changed
            checked.atomic(
                self.at, addresses, self.itemsize, name=name, sem=self.sem, scope=self.scope, changed=changed
            )


stream = st.integers(0, len(RANKS) - 1)


loads_and_stores = st.sampled_from(["load", "store"])


@st.composite
def plain_steps(draw, at=stream, kind=loads_and_stores):
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    lanes = draw(st.sampled_from([1, 1, 2, 4]))
    stride = draw(st.sampled_from([itemsize, 2 * itemsize]))
    # Now and then at an address that is no multiple of the item, as in a view of bytes.
    unit = draw(st.sampled_from([itemsize, itemsize, 1]))
    # Mostly behind what atomics access.
    low = draw(st.sampled_from([BYTES // 2, BYTES // 2, BYTES // 2, 0]))
    first = draw(st.integers(low // unit, (BYTES - itemsize) // unit)) * unit
    offsets = tuple(o for o in range(first, first + lanes * stride, stride) if o + itemsize <= BYTES)
    return Step(draw(at), draw(kind), offsets, itemsize)


ORDERS = ("relaxed", "acquire", "release", "acq_rel")
KINDS = ("add", "add", "cas", "xchg", "atomic store", "atomic load", "volatile")
scopes = st.sampled_from(["cta", "gpu", "gpu", "sys", "sys", "sys"])


@st.composite
def atomic_steps(draw, at=stream, kinds=KINDS, orders=ORDERS):
    kind = draw(st.sampled_from(kinds))
    itemsize = draw(st.sampled_from([4, 4, 4, 8]))
    # Few places, so that releases and acquires meet.
    first = draw(st.sampled_from([0, 0, 0, 8])) + draw(st.sampled_from([0, 0, 4] if itemsize == 4 else [0]))
    lanes = draw(st.sampled_from([1, 1, 2]))
    offsets = tuple(first + lane * itemsize for lane in range(lanes))
    changed = tuple(draw(st.booleans()) for _ in offsets)
    if kind == "volatile":
        return Step(draw(at), kind, offsets, itemsize, changed, "relaxed", "sys")
    possible = {"atomic store": ("relaxed", "release"), "atomic load": ("relaxed", "acquire")}.get(kind, ORDERS)
    sem = draw(st.sampled_from([o for o in possible if o in orders] or possible))
    return Step(draw(at), kind, offsets, itemsize, changed, sem, draw(scopes))


@st.composite
def handovers(draw):
    """A writes, tells B by way of a flag, perhaps with others in between, and B accesses what A wrote."""
    a, b = draw(stream), draw(stream)
    write = draw(plain_steps(st.just(a), st.just("store")))
    steps = [write, draw(atomic_steps(st.just(a), orders=("release", "acq_rel")))]
    steps += draw(st.lists(st.one_of(atomic_steps(), plain_steps()), max_size=2))
    steps.append(draw(atomic_steps(st.just(b), kinds=("add", "cas", "atomic load"), orders=("acquire", "acq_rel"))))
    steps.append(replace(write, at=b, kind=draw(loads_and_stores)))
    return steps


# Whether an atomic that must not happen is left out, so that long traces come up which are right so far.
alone = st.one_of(plain_steps(), atomic_steps()).map(lambda step: [step])
relaunches = st.tuples(st.just("relaunch"), stream)
events = st.tuples(st.just("event"), stream, stream).filter(lambda e: e[1] != e[2])
traces = st.lists(
    st.one_of(
        st.tuples(handovers(), st.integers(0, 9).map(bool)),
        st.tuples(handovers(), st.integers(0, 9).map(bool)),
        st.tuples(alone, st.integers(0, 9).map(bool)),
        relaunches,
        events,
    ),
    min_size=4,
    max_size=16,
)


def both(written):
    """The checker and the reference; ``written``: all memory is, by program 0, before the others start."""
    checked, reference = Checked(), Reference()
    checked.allocate()
    if written:
        first = Step(0, "store", tuple(range(0, BYTES, 8)), 8)
        first.tell(checked)
        reference.do(first)
        for other in range(1, len(RANKS)):
            checked.event(0, other)
            reference.event(0, other)
    return checked, reference


# The third is ordered after neither of the others, and its scope reaches the second only.
ADDITIONS = [(0, "release", "sys"), (3, "acquire", "sys"), (2, "relaxed", "gpu")]


@settings(max_examples=300, deadline=None, print_blob=True)
@given(traces, st.booleans())
@example([([Step(at, "add", (0,), 4, (True,), sem, scope)], False) for at, sem, scope in ADDITIONS], True)
@pytest.mark.filterwarnings("ignore::iris.errors.MissingBarrierWarning")
def test_agrees_with_the_reference(trace, written):
    checked, reference = both(written)
    for entry in trace:
        if entry[0] in ("relaunch", "event"):
            getattr(checked, entry[0])(*entry[1:])
            getattr(reference, entry[0])(*entry[1:])
            continue
        steps, left_out = entry
        for step in steps:
            expected = reference.verdict(step)
            if expected is None:
                step.tell(checked)
                reference.do(step)
            elif step.scope == "plain":
                # Nothing has happened then, so the trace goes on.
                with pytest.raises(expected):
                    step.tell(checked)
            elif not left_out:
                with pytest.raises(expected):
                    step.tell(checked)
                return


PAST = [Step(0, kind, (16,), 4) for kind in ("load", "store")] + [
    Step(0, kind, (16,), 4, (True,), "relaxed", scope)
    for kind, scope in product(("add", "atomic load"), ("cta", "gpu", "sys"))
]


@pytest.mark.parametrize("between", [1, 2])
def test_what_a_later_access_hides(between):
    """Three accesses of each kind to one place; the second is ordered after the first, the third perhaps."""
    races = set()
    for first, second, third in product(PAST, repeat=3):
        for last in range(1, len(RANKS)):
            checked, reference = both(written=True)
            for step in (
                first,
                Step(0, "add", (0,), 4, (True,), "release", "sys"),
                Step(between, "add", (0,), 4, (True,), "acquire", "sys"),
                replace(second, at=between),
            ):
                assert reference.verdict(step) is None
                step.tell(checked)
                reference.do(step)
            step = replace(third, at=last)
            expected = reference.verdict(step)
            races.add(expected)
            try:
                step.tell(checked)
            except RaceError:
                assert expected is RaceError, (first, second, step)
            else:
                assert expected is None, (first, second, step)
    assert races == {None, RaceError}


FLAG, DATA = START, START + 16


@pytest.fixture
def checked():
    """Four programs, two on each rank; all memory is written and known to them."""
    result = Checked()
    result.allocate()
    result.store(0, range(START, START + BYTES, 4))
    for other in range(1, len(RANKS)):
        result.event(0, other)
    return result


def hand_over(checked, at, to, scope="sys", acquired="sys"):
    checked.store(at, [DATA])
    checked.atomic(at, [FLAG], name="xchg", sem="release", scope=scope)
    checked.atomic(to, [FLAG], sem="acquire", scope=acquired, changed=False)


@pytest.mark.parametrize(
    ("at", "to", "scope", "acquired", "ordered"),
    [
        (0, 1, "gpu", "gpu", True),
        (0, 1, "sys", "gpu", True),
        (0, 1, "gpu", "sys", True),
        (0, 1, "cta", "gpu", False),
        (0, 2, "sys", "sys", True),
        (0, 2, "gpu", "sys", False),
        (0, 2, "sys", "gpu", False),
    ],
)
def test_how_far_a_release_reaches(checked, at, to, scope, acquired, ordered):
    if ordered:
        hand_over(checked, at, to, scope, acquired)
        checked.load(to, [DATA])
    else:
        with pytest.raises(RaceError):
            hand_over(checked, at, to, scope, acquired)


def test_order_reaches_through_a_third_program(checked):
    hand_over(checked, 0, 2)
    checked.atomic(2, [FLAG + 4], sem="release", scope="gpu")
    checked.atomic(3, [FLAG + 4], sem="acquire", scope="gpu")
    checked.load(3, [DATA])
    with pytest.raises(RaceError):
        checked.load(1, [DATA])


@pytest.mark.parametrize("name", ["add", "xchg", "cas"])
def test_a_release_lasts_through_read_modify_writes_of_others(checked, name):
    checked.store(0, [DATA])
    checked.atomic(0, [FLAG], sem="release")
    checked.atomic(1, [FLAG], name=name, sem="relaxed")
    checked.atomic(2, [FLAG], name=name, sem="release")
    checked.atomic(3, [FLAG], sem="acquire")
    checked.load(3, [DATA])


def test_a_release_ends_at_an_atomic_store_of_another(checked):
    checked.store(0, [DATA])
    checked.atomic(0, [FLAG], sem="release")
    checked.atomic(1, [FLAG], name="store", sem="relaxed")
    checked.atomic(2, [FLAG], name="load", sem="acquire", changed=False)
    with pytest.raises(RaceError):
        checked.load(2, [DATA])


def test_a_release_is_over_when_its_memory_is_overwritten(checked):
    checked.store(0, [DATA])
    checked.atomic(0, [FLAG], sem="release")
    checked.store(0, [FLAG])
    with pytest.raises(RaceError, match="no atomic"):
        checked.atomic(1, [FLAG], sem="acquire")


def test_a_compare_and_swap_that_fails_releases_nothing(checked):
    checked.store(0, [DATA])
    checked.atomic(0, [FLAG], name="cas", sem="acq_rel", changed=False)
    checked.atomic(1, [FLAG], name="cas", sem="acq_rel", changed=True)
    with pytest.raises(RaceError):
        checked.load(1, [DATA])


def test_an_addition_of_nothing_releases(checked):
    checked.store(0, [DATA])
    checked.atomic(0, [FLAG], sem="release", changed=False)
    checked.atomic(1, [FLAG], sem="acquire", changed=False)
    checked.load(1, [DATA])


def test_an_exchange_is_a_write_also_when_the_value_stays(checked):
    checked.allocate(START + 4096)
    checked.atomic(0, [START + 4096], name="xchg", changed=False)
    checked.atomic(1, [START + 4096], changed=False)
    with pytest.raises(RaceError):
        checked.load(1, [START + 4096])


def test_a_wide_atomic_does_not_hide_a_narrow_one_of_another_rank(checked):
    """Rank 1's gpu-scope addition is ordered before program 0, not before program 1 of rank 0."""
    checked.atomic(2, [DATA], scope="gpu")
    checked.atomic(2, [FLAG], sem="release", scope="sys")
    checked.atomic(0, [FLAG], sem="acquire", scope="sys", changed=False)
    checked.atomic(0, [DATA], scope="gpu")
    with pytest.raises(RaceError) as caught:
        checked.atomic(1, [DATA], scope="gpu")
    assert caught.value.report.first.rank == 1


def test_an_atomic_does_not_hide_one_of_another_rank_before_it(checked):
    """Program 2's addition is ordered after program 0's; program 3's is after neither and reaches only program 2."""
    checked.atomic(0, [FLAG], sem="release", scope="sys")
    checked.atomic(2, [FLAG], sem="acquire", scope="sys")
    with pytest.raises(RaceError) as caught:
        checked.atomic(3, [FLAG], scope="gpu")
    report = caught.value.report
    assert (report.first.rank, report.second.rank) == (0, 1)
    assert "has gpu scope" in report.missing


def test_halves_of_a_flag_pass_on_their_own_releases_only(checked):
    checked.allocate(START + 4096, itemsize=8)
    wide = START + 4096
    checked.atomic(0, [wide], 8, name="xchg", sem="release")
    checked.store(0, [DATA])
    checked.atomic(0, [wide], 4, sem="release")  # now there is a shadow for each half
    checked.atomic(1, [wide + 4], 4, sem="acquire", changed=False)
    with pytest.raises(RaceError):
        checked.load(1, [DATA])


def test_the_next_program_of_a_stream_is_another_but_ordered(checked):
    checked.store(0, [DATA])
    checked.relaunch(0)
    checked.store(0, [DATA])
    with pytest.raises(RaceError):
        checked.store(1, [DATA])


def test_masked_lanes_access_nothing(checked):
    mask = np.array([True, False])
    checked.store(0, [DATA, DATA + 4], mask=mask)
    checked.store(1, [DATA + 4, DATA], mask=mask)
    checked.atomic(1, [DATA + 8, START - 4], mask=mask)
    with pytest.raises(RaceError):
        checked.store(1, [DATA + 4, DATA])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (([DATA], 4), ([DATA + 3], 1)),
        (([DATA + 3], 1), ([DATA], 8)),
        (([DATA, DATA + 8], 4), ([DATA + 8], 8)),
        (([DATA + 1], 2), ([DATA], 2)),
        (([DATA + 2], 2), ([DATA + 1], 2)),
    ],
)
def test_accesses_of_different_sizes_that_overlap(checked, first, second):
    checked.store(0, *first)
    with pytest.raises(RaceError):
        checked.load(1, *second)


@pytest.mark.parametrize(
    ("first", "second"),
    [(([DATA], 4), ([DATA + 4], 1)), (([DATA + 1], 1), ([DATA], 1)), (([DATA], 8), ([DATA - 4], 4))],
)
def test_accesses_of_different_sizes_side_by_side(checked, first, second):
    checked.store(0, *first)
    checked.store(1, *second)


TILE = [DATA, DATA + 4]


def warnings_of(checked, *steps):
    """How often the checker misses a barrier when program 0 stores a tile, does the steps, and program 1 reads it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checked.store(0, TILE)
        for step in steps:
            step()
        checked.atomic(1, [FLAG], sem="acquire", scope="gpu", changed=False)
        checked.load(1, TILE)
    checked.event(1, 0)
    assert all(w.category is MissingBarrierWarning for w in caught)
    return len(caught)


def test_a_release_of_stores_that_no_barrier_covers(checked):
    def release(**how):
        return lambda: checked.atomic(0, [FLAG], sem="release", scope="gpu", **how)

    def barrier():
        checked.barrier(0)

    assert warnings_of(checked, barrier, release()) == 0
    assert warnings_of(checked, release(), barrier, release()) == 0
    assert warnings_of(checked, release(name="cas", changed=False), barrier, release()) == 0
    assert warnings_of(checked, release(), barrier) == 1


def test_a_barrier_covers_no_stores_behind_it(checked):
    steps = (
        lambda: checked.atomic(0, [FLAG], name="cas", sem="acq_rel", scope="gpu", changed=False),
        lambda: checked.barrier(0),
        lambda: checked.store(0, TILE),
        lambda: checked.atomic(0, [FLAG], sem="release", scope="gpu"),
    )
    assert warnings_of(checked, *steps) == 1


def test_a_report_names_the_elements_that_both_accessed(checked):
    checked.allocate(START + 4096, 64, itemsize=4, label="tile")
    checked.store(0, range(START + 4096, START + 4096 + 32, 4))
    with pytest.raises(RaceError) as caught:
        checked.store(1, range(START + 4096 + 16, START + 4096 + 48, 4))
    report = caught.value.report
    assert report.second.elements == "tile[4] to tile[7] (4 elements)"
    assert (report.first.kernel, report.second.kernel) == ("kernel0", "kernel1")
    assert report.first.source.startswith("self.watcher.store(")


def test_reads_of_what_nothing_wrote():
    checked = Checked()
    checked.allocate(itemsize=4)
    checked.store(0, [START, START + 8])
    checked.load(0, [START, START + 8])
    checked.atomic(0, [START + 4], name="xchg", changed=False)
    checked.load(0, [START + 4])
    for access in (checked.load, checked.atomic):
        with pytest.raises(UninitializedReadError, match=r"memory\[3\]"):
            access(0, [START, START + 12])


@pytest.fixture
def two_blocks():
    """Blocks of 32 bytes side by side, then a gap of 64 bytes, then a third."""
    result = Checked(check=("races", "bounds"))
    for number, start in enumerate((START, START + 32, START + 128)):
        result.allocate(start, 32, itemsize=4, label=f"block{number}")
    return result


def test_a_tile_over_two_allocations(two_blocks):
    tile = range(START + 16, START + 48, 4)
    two_blocks.store(0, tile)
    for address in (START + 28, START + 32):
        with pytest.raises(RaceError):
            two_blocks.load(1, [address])
    two_blocks.store(1, [START + 12, START + 48])


@pytest.mark.parametrize(
    ("addresses", "itemsize", "where"),
    [
        ([START - 4], 4, "4 bytes before the start of block0"),
        ([START + 64], 4, "0 bytes past the end of block1"),
        ([START + 120], 4, "8 bytes before the start of block2"),
        ([START + 158], 4, "2 bytes across the end of block2"),
        ([START + 160], 4, "0 bytes past the end of block2"),
        ([START, START + 60, START + 64], 4, "0 bytes past the end of block1"),
        ([START, (1 << 64) - 4], 4, "past the end of block2"),
        ([0], 4, "before the start of block0"),
    ],
)
def test_addresses_outside(two_blocks, addresses, itemsize, where):
    for access in (two_blocks.load, two_blocks.store):
        with pytest.raises(OutOfBoundsError, match=where):
            access(0, addresses, itemsize)


def test_freed_memory_is_out_of_bounds_and_forgets_when_given_out_again(two_blocks):
    two_blocks.store(0, [START])
    two_blocks.watcher.freed(START)
    with pytest.raises(OutOfBoundsError):
        two_blocks.load(1, [START])
    two_blocks.allocate(START, 32)
    two_blocks.store(1, [START])


def test_each_check_alone():
    for check, error in (("races", RaceError), ("bounds", OutOfBoundsError), ("uninitialized", UninitializedReadError)):
        checked = Checked(check=(check,))
        checked.allocate()
        found = []
        for attempt in (
            lambda c=checked: c.load(0, [START + 4]),
            lambda c=checked: (c.store(0, [START]), c.store(1, [START])),
            lambda c=checked: c.store(0, [START + BYTES]),
        ):
            try:
                attempt()
            except SimulationError as finding:
                found.append(type(finding))
        assert found == [error]
