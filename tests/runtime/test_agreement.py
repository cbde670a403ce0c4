"""Ranks compare the arguments of a collective operation. Ranks are threads over one store."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from iris.errors import ArgumentError, RankLost, RankMismatch
from iris.runtime.agreement import Agreement
from iris.runtime.bootstrap import Exchange
from iris.runtime.groups import Group

FACTS = {"shape of A": (4, 8), "config": None}


@pytest.fixture(autouse=True)
def _default_check(monkeypatch):
    monkeypatch.delenv("IRIS_CHECK", raising=False)


class Ranks:
    """Agreements of some ranks. Calls run in one thread a rank; an error stands for the result of its rank."""

    def __init__(self, world, timeout_s=20.0):
        store = dist.HashStore()
        self.world = world
        self.exchanges = [Exchange(store, "test", rank, world, timeout_s) for rank in range(world)]
        self.agreements = [Agreement(SimpleNamespace(exchange=exchange)) for exchange in self.exchanges]

    def group(self, rank, members=None):
        members = members or tuple(range(self.world))
        return Group(members, members.index(rank))

    def reach(self, facts, errors=(), ranks=None, members=None):
        facts = facts if isinstance(facts, list) else [facts] * self.world
        errors = dict(errors)

        def call(rank):
            try:
                return self.agreements[rank].reach("matmul", self.group(rank, members), facts[rank], errors.get(rank))
            except Exception as error:  # noqa: BLE001 - the error is the result
                return error

        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(call, ranks if ranks is not None else members or range(self.world)))

    def known(self, rank, facts=FACTS):
        return self.agreements[rank].known("matmul", self.group(rank), facts)


def test_what_was_agreed_once_is_not_compared_again():
    ranks = Ranks(3)
    assert not ranks.known(0)
    assert ranks.reach(FACTS) == [None] * 3
    assert all(ranks.known(rank) for rank in range(3))
    # One rank alone returns: nobody is waited for.
    assert ranks.reach(FACTS, ranks=[1]) == [None]


@pytest.mark.parametrize(
    "other", [FACTS | {"config": "x"}, FACTS | {"shape of A": (4, 9)}, {"shape of A": None, "config": (4, 8)}]
)
def test_other_facts_are_another_combination(other):
    ranks = Ranks(2)
    ranks.reach(FACTS)
    assert not ranks.known(0, other)
    assert not ranks.agreements[0].known("another operation", ranks.group(0), FACTS)
    assert not ranks.agreements[0].known("matmul", Group((1, 0), 1), FACTS)


def test_a_group_agrees_by_itself():
    ranks = Ranks(4)
    assert ranks.reach(FACTS, members=(3, 1)) == [None, None]
    assert not ranks.known(1), "the world has not agreed"


def test_differing_facts_are_named_with_each_ranks_values():
    ranks = Ranks(3)
    facts = [FACTS, FACTS | {"shape of A": (4, 9), "config": 7}, FACTS]
    for error in ranks.reach(facts):
        assert isinstance(error, RankMismatch)
        assert str(error) == (
            "matmul: the ranks disagree, nothing was launched: shape of A is (4, 8) on rank 0, (4, 9) on rank 1, "
            "(4, 8) on rank 2; config is None on rank 0, 7 on rank 1, None on rank 2"
        )
    assert not any(ranks.known(rank, facts[rank]) for rank in range(3)), "nothing was agreed"
    assert ranks.reach(FACTS) == [None] * 3, "the ranks are in step"


def test_the_rank_in_error_raises_its_own_and_the_others_learn_of_it():
    ranks = Ranks(3)
    mine = ArgumentError("B must be a tensor, got int")
    got = ranks.reach(FACTS, {1: mine})
    assert got[1] is mine
    for error in (got[0], got[2]):
        assert isinstance(error, RankMismatch)
        assert str(error) == (
            "matmul: nothing was launched, because rank 1 raised ArgumentError: B must be a tensor, got int"
        )
    assert not ranks.known(0)


def test_every_rank_in_error_raises_its_own():
    errors = {rank: ArgumentError(f"wrong on {rank}") for rank in range(3)}
    assert Ranks(3).reach(FACTS, errors) == list(errors.values())


def test_an_error_in_a_known_call_is_left_for_those_who_wait():
    """The others do not compare, so they learn of it when they miss the rank."""
    ranks = Ranks(2, timeout_s=0.5)
    ranks.reach(FACTS)
    error = ArgumentError("output overlaps A")
    assert ranks.reach(FACTS, {1: error}, ranks=[1]) == [error]
    with pytest.raises(RankLost, match="rank 1 reported: ArgumentError: output overlaps A"):
        ranks.exchanges[0].all_gather("barrier()", None)


def test_a_rank_alone_compares_with_nobody():
    ranks = Ranks(1)
    assert ranks.known(0)
    assert ranks.reach(FACTS) == [None]
    error = ArgumentError("wrong")
    assert ranks.reach(FACTS, {0: error}) == [error]


def test_always_compares_every_call(monkeypatch):
    monkeypatch.setenv("IRIS_CHECK", "always")
    ranks = Ranks(2, timeout_s=0.5)
    assert ranks.reach(FACTS) == [None] * 2
    assert not ranks.known(0)
    assert isinstance(ranks.reach(FACTS, ranks=[0])[0], RankLost), "rank 1 is waited for"


def test_off_compares_nothing(monkeypatch):
    monkeypatch.setenv("IRIS_CHECK", "off")
    ranks = Ranks(2)
    assert ranks.reach([FACTS, FACTS | {"config": 7}]) == [None] * 2
    error = ArgumentError("wrong")
    assert ranks.reach(FACTS, {0: error}, ranks=[0]) == [error], "own errors are still raised"


def test_the_oldest_combinations_are_forgotten_on_every_rank(monkeypatch):
    monkeypatch.setattr(Agreement, "KEPT", 3)
    ranks = Ranks(2)
    combinations = [FACTS | {"config": number} for number in range(5)]
    for facts in combinations:
        assert ranks.reach(facts) == [None] * 2
    for rank in range(2):
        assert [ranks.known(rank, facts) for facts in combinations] == [False, False, True, True, True]
        assert ranks.agreements[rank].forgotten == 2
