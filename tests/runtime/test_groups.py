"""What may name a group, in which order its ranks are, and who may call."""

import pytest
import torch.distributed as dist

from iris.errors import ArgumentError, NotAMemberError
from iris.runtime.groups import Group, resolve


def test_none_is_the_world():
    group = resolve(None, 2, 4)
    assert (group.ranks, group.index, group.size) == ((0, 1, 2, 3), 2, 4)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_sequence_keeps_its_order(kind):
    assert resolve(kind([3, 0, 2]), 0, 4) == Group((3, 0, 2), 1)
    assert resolve(range(1, 4), 3, 4) == Group((1, 2, 3), 2)
    assert resolve([1], 1, 4).size == 1


@pytest.mark.parametrize("group", [[], [0, 0], [0, 4], [-1, 0], [0, 1, 2, 3, 4]])
def test_ranks_must_be_distinct_and_of_the_world(group):
    with pytest.raises(ArgumentError, match=r"distinct and in 0\.\.3, got \["):
        resolve(group, 0, 4)


@pytest.mark.parametrize("group", [5, "01", {0, 1}, [0, "1"], [0, 1.0], object()])
def test_other_things_are_no_groups(group):
    with pytest.raises(ArgumentError, match=f"sequence of ranks, got {type(group).__name__}"):
        resolve(group, 0, 4)


def test_only_members_may_call():
    with pytest.raises(NotAMemberError, match=r"rank 1 is not a member of the group \[0, 2\]"):
        resolve([0, 2], 1, 4)
    with pytest.raises(NotAMemberError, match="rank 1 is not a member of the process group"):
        resolve(dist.GroupMember.NON_GROUP_MEMBER, 1, 4)


def body_process_groups(rank, world_size):
    assert resolve(dist.group.WORLD, rank, world_size) == resolve(None, rank, world_size)
    pair = dist.new_group([2, 0])
    if rank == 1:
        with pytest.raises(NotAMemberError):
            resolve(pair, rank, world_size)
    else:
        group = resolve(pair, rank, world_size)
        assert group.ranks == tuple(dist.get_process_group_ranks(pair))
        assert group.index == dist.get_rank(pair)
        assert group.ranks[group.index] == rank


def test_process_groups_are_in_group_order(ranks):
    ranks(3).run(body_process_groups, context=None)
