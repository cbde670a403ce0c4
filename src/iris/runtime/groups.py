"""Process groups, seen as a tuple of ranks in group order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from iris.errors import ArgumentError, NotAMemberError


@dataclass(frozen=True)
class Group:
    """Ranks of a group, in group order, and the caller's place among them.

    Attributes:
        ranks: ranks in the world, in group order.
        index: the caller's rank within the group.
    """

    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)


def resolve(group: Any, rank: int, world_size: int) -> Group:
    """The group meant by ``group``.

    Args:
        group: None for all ranks, a ``torch.distributed`` process group, or a sequence of distinct ranks.
        rank, world_size: the caller's place in the world.

    Raises:
        NotAMemberError: the caller is not in the group.
        ArgumentError: not a group, or ranks outside the world.
    """
    if group is None:
        return Group(tuple(range(world_size)), rank)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise NotAMemberError(f"rank {rank} is not a member of the process group it passed; only members may call")
    if isinstance(group, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(group))
    elif isinstance(group, Sequence) and all(isinstance(r, int) for r in group):
        ranks = tuple(group)
    else:
        raise ArgumentError(
            f"group must be None, a torch.distributed process group or a sequence of ranks, got {type(group).__name__}"
        )
    if len(set(ranks)) != len(ranks) or not ranks or not all(0 <= r < world_size for r in ranks):
        raise ArgumentError(f"a group's ranks must be distinct and in 0..{world_size - 1}, got {list(ranks)}")
    if rank not in ranks:
        raise NotAMemberError(f"rank {rank} is not a member of the group {list(ranks)}; only members may call")
    return Group(ranks, ranks.index(rank))
