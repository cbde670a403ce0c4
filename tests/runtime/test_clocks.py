"""Vector clocks of programs and streams, and the table of accesses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris.runtime.clocks import CTA, GPU, PLAIN, SYS, Actor, Clocks


def actors(clocks, ranks):
    return [Actor(clocks, clocks.new_slot(), rank, f"actor {i}", clocks.nothing()) for i, rank in enumerate(ranks)]


def access(actor, line=1, level=PLAIN):
    return actor.clocks.number(actor, "file.py", line, "load", level)


def unordered(actor, numbers, level=PLAIN):
    return actor.clocks.unordered(actor, np.array(numbers, dtype=np.int32), level).tolist()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40))
def test_order_is_what_was_passed_on(messages):
    """Each message goes from one actor to another after the sender has done something; sets say who knows of it."""
    clocks = Clocks()
    all_actors = actors(clocks, [0] * 6)
    knows = [set() for _ in all_actors]
    for sender, receiver in messages:
        number = access(all_actors[sender])
        knows[sender].add(number)
        all_actors[receiver].learn(all_actors[sender].publish())
        knows[receiver] |= knows[sender]
    numbers = list(range(1, clocks.count))
    for actor, known in zip(all_actors, knows, strict=True):
        assert unordered(actor, numbers) == [n not in known for n in numbers]


def test_what_an_actor_does_after_it_has_published_is_not_passed_on():
    clocks = Clocks()
    one, other = actors(clocks, [0, 0])
    before = access(one)
    message = one.publish()
    after = access(one)
    other.learn(message)
    assert before != after
    assert unordered(other, [before, after]) == [False, True]
    assert unordered(one, [before, after]) == [False, False]


def test_a_message_does_not_change_when_its_sender_or_reader_learns_more():
    clocks = Clocks()
    one, two, three = actors(clocks, [0, 0, 0])
    message = one.publish()
    copy = message.copy()
    access(two)
    one.learn(two.publish())
    three.learn(message)
    three.learn(two.publish())
    np.testing.assert_array_equal(message, copy)


def test_actors_that_share_what_they_know_at_first_learn_apart():
    clocks = Clocks()
    known = clocks.nothing()
    one = Actor(clocks, clocks.new_slot(), 0, "one", known)
    two = Actor(clocks, clocks.new_slot(), 0, "two", known)
    number = access(two)
    one.learn(two.publish())
    assert not known.any()
    assert unordered(one, [number]) == [False]
    three = Actor(clocks, clocks.new_slot(), 0, "three", known)
    assert unordered(three, [number]) == [True]


def test_the_next_actor_of_a_slot_is_later():
    clocks = Clocks()
    first, watcher = actors(clocks, [0, 0])
    old = access(first)
    watcher.learn(first.publish())
    second = Actor(clocks, first.slot, 0, "next", clocks.nothing())
    new = access(second)
    assert unordered(watcher, [old, new]) == [False, True]


def test_many_slots():
    clocks = Clocks()
    (first,) = actors(clocks, [0])
    message = first.publish()
    crowd = actors(clocks, [0] * 500)
    number = access(crowd[-1])
    first.learn(crowd[-1].publish())
    crowd[0].learn(message)
    assert unordered(first, [number]) == [False]
    assert unordered(crowd[0], [number]) == [True]
    assert len(message) < len(first.known())


def test_numbers():
    clocks = Clocks()
    (actor,) = actors(clocks, [3])
    first = access(actor)
    assert access(actor) == first
    assert access(actor, line=2) != first
    assert access(actor, level=GPU) != first
    for line in range(1000):
        access(actor, line=line)
    doing = clocks.doings[first]
    assert (doing.who, doing.file, doing.line, doing.what) == ("actor 0", "file.py", 1, "load")
    assert clocks.ranks[first] == 3


@pytest.mark.parametrize(
    ("rank", "other", "level", "theirs", "races"),
    [
        (0, 0, PLAIN, PLAIN, True),
        (0, 0, GPU, PLAIN, True),
        (0, 0, PLAIN, SYS, True),
        (0, 0, CTA, CTA, True),
        (0, 0, GPU, CTA, True),
        (0, 0, GPU, GPU, False),
        (0, 0, GPU, SYS, False),
        (0, 1, GPU, GPU, True),
        (0, 1, SYS, GPU, True),
        (0, 1, GPU, SYS, True),
        (0, 1, SYS, SYS, False),
    ],
)
def test_which_atomics_may_happen_side_by_side(rank, other, level, theirs, races):
    one, two = actors(Clocks(), [rank, other])
    assert unordered(one, [access(two, level=theirs)], level) == [races]


def test_access_0_is_before_everything():
    (actor,) = actors(Clocks(), [0])
    assert unordered(actor, [0]) == [False]


def test_sets_leave_out_what_is_ordered_before():
    clocks = Clocks()
    one, two, three = actors(clocks, [0, 0, 0])
    first, second = access(one), access(two)
    both = clocks.add(clocks.add(0, first, one), second, two)
    assert clocks.sets[both].tolist() == [first, second]
    assert clocks.add(both, second, two) == both
    three.learn(one.publish())
    third = access(three)
    assert clocks.sets[clocks.add(both, third, three)].tolist() == [second, third]
    assert clocks.add(clocks.add(0, second, two), first, one) == both


@pytest.mark.parametrize(("wide", "narrow", "kept"), [(SYS, GPU, False), (GPU, SYS, True), (GPU, PLAIN, False)])
def test_sets_keep_an_earlier_atomic_that_reaches_less_far(wide, narrow, kept):
    clocks = Clocks()
    (actor,) = actors(clocks, [0])
    first, second = access(actor, level=wide), access(actor, level=narrow)
    assert (first in clocks.sets[clocks.add(clocks.add(0, first, actor), second, actor)]) == kept


def test_numbers_of_sets_do_not_grow_when_readers_take_turns():
    clocks = Clocks()
    one, two = actors(clocks, [0, 0])
    first, second = access(one), access(two)
    members = clocks.add(0, first, one)
    for _ in range(100):
        members = clocks.add(clocks.add(members, second, two), first, one)
    assert len(clocks.sets) == 3
