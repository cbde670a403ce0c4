"""``torch.distributed`` for ranks that are coroutines of one thread.

``torch.distributed`` keeps one default group and one registry of groups a process. :class:`LocalDistributed` keeps one
a rank and puts it in place whenever that rank's host code runs, so a script written for ``torchrun`` sees its own rank,
whatever it imported and when. Outside of the ranks' host code everything is as it was.

What stands in while a rank runs: the registry object of ``distributed_c10d``; the helper that makes every group; the
body of ``init_process_group``, exchanged in the function object itself, because scripts bind that function by name.

Not possible is what waits inside of torch's C++ code, where the thread cannot be handed to another rank: functional
collectives, and with them ``DTensor``, and ``DistributedDataParallel`` raise.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d

from iris.errors import ArgumentError, RankMismatch, RuntimeConflict
from iris.runtime._local_collectives import LocalGroup
from iris.runtime._local_exchange import Channel, Host
from iris.runtime._local_store import LocalStore

_worlds = itertools.count()


def _nothing() -> None:
    pass


class LocalDistributed:
    """State of ``torch.distributed`` of every rank of one in-process world.

    Args:
        world_size: number of ranks.
        current_rank: the rank whose host code runs.
        wait_until: suspends that host code until the condition holds. The text says what it waits for. It raises when
            the world has been aborted or can no longer move.
        order: called with the ranks of a call (world ranks, group order) and a description, once all of them have
            posted it and before its data moves, and again when it has moved (one rank moves it for all). Everything
            they issued before comes before everything after.
        carry: called with a rank and the bytes that it is about to receive, by the rank that they come from; what it
            returns is called when the copies have been issued. Both on the receiver's stream for CUDA tensors.
    """

    _entered: ClassVar[LocalDistributed | None] = None

    def __init__(
        self,
        world_size: int,
        current_rank: Callable[[], int],
        wait_until: Callable[[Callable[[], bool], str], None],
        order: Callable[[Sequence[int], str], None] = lambda ranks, what: None,
        carry: Callable[[int, Mapping[int, int]], Callable[[], None]] = lambda rank, received: _nothing,
    ):
        self.world_size = world_size
        self._host = Host(current_rank, wait_until, order, carry)
        self._id = next(_worlds)
        self._ranks = [_Rank() for _ in range(world_size)]
        self._groups: dict[tuple[int, str, int], _Made] = {}
        self._stores: dict[int, LocalStore] = {}
        self._rank: _Rank | None = None
        self._init = inspect.unwrap(dist.init_process_group)
        seams = (
            (c10d, "_new_process_group_helper", self._new_group),
            (c10d, "_unregister_all_process_groups", self._forget),
            # These two ask NCCL about itself when a program has chosen it, and there may be none.
            (c10d, "_get_default_timeout", lambda backend: c10d.default_pg_timeout),
            (c10d_logger, "_get_msg_dict", lambda name, *args, **kwargs: {"func_name": name}),
        )
        self._seams = [(module.__dict__, name, ours) for module, name, ours in seams if hasattr(module, name)]
        self._outside: list[Any] = []

    def enter(self, rank: int) -> None:
        """Put ``rank``'s view of ``torch.distributed`` in place; called whenever its host code goes on."""
        if LocalDistributed._entered is not None:
            raise RuntimeConflict("another rank's view of torch.distributed is in place; leave() it first")
        LocalDistributed._entered = self
        self._rank = self._ranks[rank]
        self._outside = [self._init.__code__, self._init.__defaults__, c10d.__dict__["_world"]]
        for names, name, ours in self._seams:
            self._outside.append(names[name])
            names[name] = ours
        c10d.__dict__["_world"] = self._rank.view
        self._init.__code__, self._init.__defaults__ = _redirected.__code__, None

    def leave(self, rank: int) -> None:
        """Put ``rank``'s view away; called whenever its host code stops or ends."""
        if LocalDistributed._entered is not self or self._rank is not self._ranks[rank]:
            raise RuntimeConflict(f"rank {rank}'s view of torch.distributed is not in place")
        LocalDistributed._entered = None
        assert self._rank is not None
        self._rank.view = c10d.__dict__["_world"]
        self._init.__code__, self._init.__defaults__, c10d.__dict__["_world"], *outside = self._outside
        for (names, name, _), before in zip(self._seams, outside, strict=True):
            names[name] = before
        self._rank = None

    def close(self) -> None:
        """Drop every rank's groups and leave ``torch.distributed`` as it was before the world. May be called twice."""
        if LocalDistributed._entered is self and self._rank is not None:
            self.leave(self._ranks.index(self._rank))
        for rank in self._ranks:
            for name in rank.registered:
                _unregister_process_group(name)
        self._ranks = [_Rank() for _ in range(self.world_size)]
        self._groups.clear()
        self._stores.clear()
        # A rank that destroyed its groups has reset the rank that torch's C++ code shows in its messages.
        c10d._update_default_pg(c10d._world.default_pg)

    def pending(self) -> list[str]:
        """The calls that wait for a rank: what each is, who has arrived and who has not."""
        return [text for made in self._groups.values() for text in made.channel.pending()]

    def init_process_group(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        *_unused: object,
        **_ignored: object,
    ) -> None:
        """``torch.distributed.init_process_group`` of the calling rank. Does not wait for the others.

        Whatever says how and over what to communicate is accepted and not used.

        Raises:
            ArgumentError: the rank or the size is not the simulated one.
            ValueError: the rank has a default group already.
        """
        if c10d._world.default_pg is not None:
            raise ValueError("trying to initialize the default process group twice!")
        here = self._host.current_rank()
        for said_rank, said_size in ((rank, world_size), _of_url(init_method)):
            if said_rank not in (-1, None, here) or said_size not in (-1, None, self.world_size):
                raise ArgumentError(
                    f"init_process_group: rank {said_rank} and world size {said_size} were given, "
                    f"but this is rank {here} of a world of {self.world_size} ranks in one process"
                )
        state = self._ranks[here]
        state.epoch += 1
        store = self._stores.setdefault(state.epoch, LocalStore(self._host))
        name = c10d._process_group_name([], use_hashed_name=False)
        name_of_backend = "undefined" if backend is None else str(backend).lower()
        group = self._new_group(self.world_size, here, [], name_of_backend, store, name, group_desc="default_pg")[0]
        c10d._world.default_pg = group
        c10d._world.pg_group_ranks[group] = {r: r for r in range(self.world_size)}

    def _new_group(
        self,
        group_size: int,
        group_rank: int | None,
        ranks: Sequence[int],
        backend: str,
        store: dist.Store,
        group_name: Any,
        backend_options: object = None,
        timeout: object = None,
        pg_tag: str | None = None,
        device_id: object = None,
        group_desc: str | None = None,
        **_ignored: object,
    ) -> tuple[Any, dist.Store | None]:
        """Stands in for ``_new_process_group_helper``, with its arguments and its result (group, store)."""
        here = self._host.current_rank()
        state, view = self._ranks[here], c10d._world
        if pg_tag:
            existing = c10d._find_pg_by_ranks_and_tag(pg_tag, list(ranks))
            if existing is not None:
                return existing, view.pg_map[existing][1]
        members = tuple(ranks) or tuple(range(self.world_size))
        channel = self._channel(here, group_name, members)
        if here not in members:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        # torch's own registry of names is one for the process, so names differ between ranks there.
        name: Any = f"iris-{self._id}/rank{here}/{state.epoch}/{len(state.registered)}/{group_name}"
        group = LocalGroup(channel, members.index(here), name, group_desc or "undefined", str(backend))
        view.pg_map[group] = (backend, store)
        view.pg_names[group] = group_name
        view.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
        view.pg_backend_config[group] = backend if ":" in backend else f"cpu:{backend},cuda:{backend}"
        tag = f"user:{pg_tag}" if pg_tag else f"ptd:{group_name}"
        view.pg_to_tag[group] = tag
        for label in (tag,) if pg_tag else ("", tag):
            view.tags_to_pg.setdefault(label, []).append(group)
        _register_process_group(name, group)
        state.registered.append(name)
        return group, store

    def _channel(self, here: int, name: str, members: tuple[int, ...]) -> Channel:
        """What the members share: the same for the same name, in the order in which each rank has used that name."""
        state = self._ranks[here]
        key = (state.epoch, name, state.uses[state.epoch, name])
        state.uses[state.epoch, name] += 1
        made = self._groups.setdefault(key, _Made(here, Channel(self._host, members)))
        if made.channel.ranks != members:
            raise RankMismatch(
                "the ranks make different groups in the same call of new_group: "
                f"rank {made.by} gave ranks {list(made.channel.ranks)}, rank {here} gave ranks {list(members)}"
            )
        return made.channel

    def _forget(self) -> None:
        """Stands in for ``_unregister_all_process_groups``: of the calling rank only."""
        registered = self._ranks[self._host.current_rank()].registered
        for name in registered:
            _unregister_process_group(name)
        registered.clear()


class _View(c10d._World):
    """One rank's registry; torch's own class keeps these dictionaries in module globals, behind properties."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count: Any = 0

    def __init__(self) -> None:
        super().__init__()
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"):
            setattr(self, name, {})


@dataclass(eq=False)
class _Rank:
    """A rank's state.

    Attributes:
        view: its registry.
        epoch: how often it has initialised its default group.
        uses: how often it has used each group name in each epoch.
        registered: the names of its groups in torch's registry of the process.
    """

    view: Any = field(default_factory=_View)
    epoch: int = 0
    uses: Counter[tuple[int, str]] = field(default_factory=Counter)
    registered: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _Made:
    """A group, and the first rank that made it."""

    by: int
    channel: Channel


def _redirected(*args, **kwargs):
    # Runs with the globals of distributed_c10d, so it imports what it needs.
    from iris.runtime.local_group import LocalDistributed

    return LocalDistributed._entered.init_process_group(*args, **kwargs)  # pyright: ignore[reportOptionalMemberAccess]


def _of_url(url: str | None) -> tuple[int | None, int | None]:
    """The rank and world size that an ``init_method`` names, each None when it does not."""
    query = parse_qs(urlparse(url or "").query)
    rank, size = (int(query[name][0]) if name in query else None for name in ("rank", "world_size"))
    return rank, size
