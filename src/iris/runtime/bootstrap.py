"""Host exchange between ranks: small Python values over the store of ``torch.distributed``; names who is missing.

An exchange is collective over a list of ranks. Each rank posts its value under the exchange's number and reads the
others'. The number and a tag travel with the value, so ranks that are in different calls learn which call each is in.
A rank that does not arrive within the time limit, or whose process has ended, is named in the error.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from iris.errors import RankLost, RankMismatch

_LONGEST_SLEEP_S = 2e-3
_WATCH_EVERY_S = 0.25


class Exchange:
    """Host exchange of one context.

    Args:
        store: a ``torch.distributed.Store`` that every rank reaches; None for a world of one.
        name: prefix of the keys, the same on all ranks and of no other context.
        rank, world_size: the caller's place.
        timeout_s: longest wait for a peer.
        progress: called while waiting, so that kernels of this process which a peer waits for go on.
    """

    def __init__(
        self,
        store: dist.Store | None,
        name: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        progress: Callable[[], None] = lambda: None,
    ):
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.progress = progress
        self._store = store
        self.name = name
        self._counts: dict[tuple[int, ...], int] = {}
        self._places: dict[int, tuple[str, str, int]] = {}
        self._fault_posted = False
        self._last_watch = 0.0

    def introduce(self) -> list[tuple[str, str, int]]:
        """Tell every rank where this one runs: (host, process-id namespace, process id), in rank order. Collective."""
        places = self.all_gather("iris.iris()", (socket.gethostname(), _pid_namespace(), os.getpid()))
        self._places = dict(enumerate(places))
        return places

    def all_gather(self, tag: str, value: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Every rank's ``value``, in the order of ``ranks`` (default: all ranks). Collective over ``ranks``.

        Args:
            tag: what the caller is doing, in words that mean something to the user.

        Raises:
            RankMismatch: a rank is in another call.
            RankLost: a rank did not arrive in time or its process has ended.
        """
        members = tuple(ranks) if ranks is not None else tuple(range(self.world_size))
        if members == (self.rank,) or self._store is None:
            return [value]
        number = self._counts.get(members, 0)
        self._counts[members] = number + 1
        prefix = f"{self.name}/{'-'.join(map(str, members))}"
        self._withdraw_fault()
        post = pickle.dumps((tag, value))
        # Stores take bytes, whatever the stub says.
        self._store_call(lambda s: s.set(f"{prefix}/{number}/{self.rank}", post))  # pyright: ignore[reportArgumentType]
        self._await(tag, {r: f"{prefix}/{number}/{r}" for r in members if r != self.rank})
        posts = {self.rank: (tag, value)}
        for r in members:
            if r != self.rank:
                posts[r] = pickle.loads(self._store_call(lambda s, r=r: s.get(f"{prefix}/{number}/{r}")))
        if number:
            # Everyone who posted this number has read the number before it.
            self._store_call(lambda s: s.delete_key(f"{prefix}/{number - 1}/{self.rank}"))
        tags = {r: posts[r][0] for r in members}
        if len(set(tags.values())) > 1:
            where = "; ".join(f"rank {r} is in {t}" for r, t in tags.items())
            raise RankMismatch(f"the ranks are in different collective calls: {where}")
        return [posts[r][1] for r in members]

    def post_fault(self, text: str) -> None:
        """Leave a sentence about an error of this rank, for the messages of ranks that wait in vain for it."""
        if self._store is not None:
            self._store_call(lambda s: s.set(f"{self.name}/fault/{self.rank}", text))
            self._fault_posted = True

    def faults(self, ranks: Sequence[int] | None = None) -> dict[int, str]:
        """The sentences that other ranks have left."""
        found = {}
        if self._store is None:
            return found
        for r in ranks if ranks is not None else range(self.world_size):
            key = f"{self.name}/fault/{r}"
            if r != self.rank and self._exist(key):
                found[r] = self._store_call(lambda s, key=key: s.get(key)).decode()
        return found

    def watch(self, _waited: float = 0.0) -> None:
        """Raise when the process of another rank has ended; called while waiting.

        Raises:
            RankLost: names the ranks whose processes are gone.
        """
        now = time.monotonic()
        if now - self._last_watch < _WATCH_EVERY_S:
            return
        self._last_watch = now
        self._raise_for_ended(self._ended(self._places))

    def _ended(self, ranks) -> tuple[int, ...]:
        here = (socket.gethostname(), _pid_namespace())
        return tuple(
            r for r in ranks if r in self._places and self._places[r][:2] == here and _ended(self._places[r][2])
        )

    def _raise_for_ended(self, ended: tuple[int, ...]) -> None:
        if ended:
            names = ", ".join(f"rank {r} (process {self._places[r][2]})" for r in ended)
            raise RankLost(f"{names} has ended while rank {self.rank} was waiting for it", ended)

    def _await(self, tag: str, keys: dict[int, str]) -> None:
        start = time.monotonic()
        missing = dict(keys)
        pause = 0.0
        watched = start
        while missing:
            if self._exist(*missing.values()):
                return
            self.progress()
            now = time.monotonic()
            if now - watched > _WATCH_EVERY_S or now - start > self.timeout_s:
                watched = now
                missing = {r: k for r, k in missing.items() if not self._exist(k)}
                self._raise_for_ended(self._ended(missing))
                if missing and now - start > self.timeout_s:
                    self._raise_for_late(tag, tuple(missing))
            time.sleep(pause)
            pause = min(_LONGEST_SLEEP_S, pause * 1.5 + 1e-5)

    def _raise_for_late(self, tag: str, late: tuple[int, ...]) -> None:
        names = ", ".join(f"rank {r}" for r in late)
        faults = "".join(f"; rank {r} reported: {text}" for r, text in self.faults(late).items())
        raise RankLost(
            f"{names} did not arrive at {tag} within {self.timeout_s:g} s (IRIS_TIMEOUT), "
            f"rank {self.rank} waited there{faults}",
            late,
        )

    def _exist(self, *keys: str) -> bool:
        return self._store_call(lambda s: s.check(list(keys)))

    def _withdraw_fault(self) -> None:
        if self._fault_posted:
            self._store_call(lambda s: s.delete_key(f"{self.name}/fault/{self.rank}"))
            self._fault_posted = False

    def _store_call(self, call: Callable[[dist.Store], Any]) -> Any:
        assert self._store is not None
        try:
            return call(self._store)
        except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
            raise RankLost(
                "the store of torch.distributed is gone, so the process that hosts it (rank 0, or the launcher) has "
                f"ended: {error}",
                (0,),
            ) from error


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


def _ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The state follows the command name, which may itself hold spaces and parentheses.
            return stat.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except FileNotFoundError:
        return os.path.isdir("/proc/self")
    except OSError:
        return False


def initialize_distributed(backend: str, timeout_s: float) -> tuple[dist.Store | None, int, int, bool]:
    """The store, rank and world size of ``torch.distributed``, which is initialised from the environment when needed.

    Without a launcher (no ``RANK`` and ``WORLD_SIZE``) the world is one rank and ``torch.distributed`` stays untouched.

    Args:
        backend: of the default group, when it has to be made.
        timeout_s: longest wait for the other ranks to start.

    Returns:
        (store or None, rank, world_size, whether this call initialised the default group)

    Raises:
        RankLost: a rank did not start in time; names it when the store is reached.
    """
    made = False
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None, 0, 1, False
        _join(backend, timeout_s)
        made = True
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store() if world_size > 1 else None
    return store, rank, world_size, made


def _join(backend: str, timeout_s: float) -> None:
    """Make the default group, once every rank is known to be there: torch.distributed would not say who is missing."""
    try:
        store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise RankLost(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} did not find the others within {timeout_s:g} s "
            f"(IRIS_TIMEOUT) at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {error}"
        ) from error
    exchange = Exchange(dist.PrefixStore("iris/start", store), "start", rank, world_size, timeout_s)
    exchange.all_gather("the start of torch.distributed", None)
    store.set_timeout(default_pg_timeout)  # as torch.distributed does, for the group's own use of the store
    dist.init_process_group(backend, store=dist.PrefixStore("default_pg", store), rank=rank, world_size=world_size)
