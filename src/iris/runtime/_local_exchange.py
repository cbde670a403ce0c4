"""What ranks of one process share: calls that each of them posts, and messages.

Members of a group share a :class:`Channel`. A rank's n-th collective of the group joins the channel's n-th
:class:`Call`; a send and a recv join a call of two, by source, destination and tag, in the order of issue. Posting
never waits. The last rank to arrive compares what the ranks posted and then copies between their tensors with ordinary
torch operations. ``wait()`` hands the thread to the other ranks until that has happened.

CUDA tensors: a post records an event on the poster's current stream. The mover's stream waits for all of them, and
every poster's stream waits for the end of the copies, so what a rank does next with its tensors comes after them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from iris.errors import RankLost, RankMismatch


@dataclass(frozen=True)
class Host:
    """What calls ask of the world they run in: the arguments of :class:`iris.runtime.local_group.LocalDistributed`."""

    current_rank: Callable[[], int]
    wait_until: Callable[[Callable[[], bool], str], None]
    order: Callable[[Sequence[int], str], None]
    carry: Callable[[int, Mapping[int, int]], Callable[[], None]]


@dataclass(frozen=True)
class Transfer:
    """A copy from a tensor of one member to one of another, members given by their place in the group.

    Attributes:
        combined: for a tensor that was made of all members' ones, how many times its size the receiver's links carry.
    """

    src: int
    source: torch.Tensor
    dst: int
    target: torch.Tensor
    combined: float = 0.0

    def carried(self, members: int) -> dict[int, int]:
        """Bytes that come to the receiver over its links, by the place of the member that they come from."""
        nbytes = self.source.numel() * self.source.element_size()
        if not self.combined:
            return {self.src: nbytes} if self.src != self.dst and nbytes else {}
        # Of a sum every other member has a part.
        share = round(self.combined * nbytes / max(1, members - 1))
        return {place: share for place in range(members) if place != self.dst and share}


@dataclass(frozen=True)
class Post:
    """One rank's part of a call.

    Attributes:
        name: of the operation, the same on all ranks.
        agree: what all ranks must have alike: for each thing, the value to compare and the value to show.
        inputs, outputs: the rank's tensors.
        plan: the copies of the call, from all posts in group order.
        mark: for CUDA tensors, the rank's stream and an event on it.
    """

    name: str
    agree: dict[str, tuple[object, str]]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    plan: Callable[[list[Post]], list[Transfer]]
    mark: tuple[torch.cuda.Stream, Any] | None


class Call:
    """A collective, or a send with its recv, from its first post until its data has moved."""

    def __init__(self, host: Host, ranks: tuple[int, ...], what: str):
        self.host = host
        self.ranks = ranks
        self.what = what
        self.done = False
        self.error: tuple[type[Exception], str] | None = None
        self.end: Any = None
        self.posts: dict[int, Post] = {}

    def join(self, place: int, post: Post) -> None:
        """Post for the member at ``place``; moves the data when all are there."""
        self.posts[place] = post
        if len(self.posts) < len(self.ranks):
            return
        posts = [self.posts[i] for i in range(len(self.ranks))]
        try:
            fault = self._disagreement(posts) or self._move(posts)
            self.error = (RankMismatch, fault) if fault else None
        except BaseException as error:
            rank = self.ranks[place]
            self.error = (RankLost, f"rank {rank} failed while it moved the data of {self.what}: {error!r}")
            raise
        finally:
            self.done = True
            self.posts.clear()

    def __str__(self) -> str:
        arrived = [rank for place, rank in enumerate(self.ranks) if place in self.posts]
        missing = [rank for place, rank in enumerate(self.ranks) if place not in self.posts]
        return f"{self.what}: ranks {arrived} arrived, ranks {missing} did not"

    def _disagreement(self, posts: list[Post]) -> str:
        """What the ranks do not agree on, with each rank's value; empty when they agree."""
        names = [post.name for post in posts]
        if len(set(names)) > 1:
            return f"the ranks are in different calls of a group: {self._each('is in', names)}"
        faults = []
        for key in posts[0].agree:
            values = [post.agree[key] for post in posts]
            if any(value[0] != values[0][0] for value in values):
                faults.append(f"{key}: {self._each('has', [shown for _, shown in values])}")
        return f"the ranks disagree in {self.what}: {'; '.join(faults)}" if faults else ""

    def _each(self, verb: str, values: list[str]) -> str:
        return ", ".join(f"rank {rank} {verb} {value}" for rank, value in zip(self.ranks, values, strict=True))

    def _move(self, posts: list[Post]) -> str:
        """Copy the data; the pairs that do not fit, if there are any, and then nothing has been copied."""
        self.host.order(list(dict.fromkeys(self.ranks)), self.what)
        marks = [post.mark for post in posts if post.mark is not None]
        here = torch.cuda.current_stream(marks[0][0].device) if marks else None
        for _, posted in marks:
            assert here is not None
            here.wait_event(posted)
        with torch.no_grad():
            transfers = posts[0].plan(posts)
            faults = [
                f"rank {self.ranks[t.src]} gives {describe([t.source])} to rank {self.ranks[t.dst]}, "
                f"which takes {describe([t.target])}"
                for t in transfers
                if t.source.numel() != t.target.numel() or t.source.dtype != t.target.dtype
            ]
            if faults:
                return f"tensors do not fit in {self.what}: {'; '.join(faults)}"
            planned = here.record_event() if here is not None else None
            for dst in dict.fromkeys(t.dst for t in transfers):
                mark = posts[dst].mark
                if mark is None or planned is None:
                    self._receive(dst, transfers)
                    continue
                # On the receiver's own stream, so that the ranks' copies run side by side.
                with torch.cuda.stream(mark[0]):
                    mark[0].wait_event(planned)
                    self._receive(dst, transfers)
        # The copies were made by one rank for all of them.
        self.host.order(list(dict.fromkeys(self.ranks)), self.what)
        if here is not None:
            for stream, _ in marks:
                here.wait_event(stream.record_event())
            self.end = here.record_event()
            for stream, _ in marks:
                stream.wait_event(self.end)
        return ""

    def _receive(self, dst: int, transfers: list[Transfer]) -> None:
        own = [t for t in transfers if t.dst == dst]
        received: Counter[int] = Counter()
        for t in own:
            received.update({self.ranks[place]: n for place, n in t.carried(len(self.ranks)).items()})
        arrive = self.host.carry(self.ranks[dst], received) if received else None
        for t in own:
            # copy_ would broadcast a source of another shape.
            t.target.detach().copy_(t.source.detach().reshape(t.target.shape))
        if arrive is not None:
            arrive()


class Channel:
    """What the members of one group share.

    Args:
        host: the world.
        ranks: the members' ranks in the world, in group order.
    """

    def __init__(self, host: Host, ranks: tuple[int, ...]):
        self.host = host
        self.ranks = ranks
        self._open: dict[int, Call] = {}
        self._mail: dict[tuple[int, int, int], deque[Call]] = {}

    def join(self, number: int, place: int, what: str, post: Post) -> Call:
        """Post to the group's collective ``number``."""
        call = self._open.setdefault(number, Call(self.host, self.ranks, what))
        if len(call.posts) + 1 == len(self.ranks):
            del self._open[number]
        call.join(place, post)
        return call

    def meet(self, src: int, dst: int, tag: int, role: int, post: Post) -> Call:
        """Post a send (``role`` 0) or a recv (1) to the oldest call that lacks it."""
        waiting = self._mail.setdefault((src, dst, tag), deque())
        if waiting and role not in waiting[0].posts:
            call = waiting.popleft()
        else:
            ranks = (self.ranks[src], self.ranks[dst])
            call = Call(self.host, ranks, f"send from rank {ranks[0]} to rank {ranks[1]} with tag {tag}")
            waiting.append(call)
        call.join(role, post)
        return call

    def pending(self) -> list[str]:
        """The calls that some rank has posted and some rank has not."""
        return [str(call) for call in [*self._open.values(), *(c for queue in self._mail.values() for c in queue)]]


class LocalWork:
    """A rank's handle on one or more calls it has posted, with the methods of ``torch.distributed.Work``.

    It says that it is a ``Work`` and is none, so that C++ code cannot get hold of it: a wait there would switch to
    another rank in the middle of a C++ call, and interleaved C++ calls of one thread end the process.
    """

    def __init__(self, calls: list[Call], why: str, outputs: list[torch.Tensor]):
        self._calls = calls
        self._why = why
        self._outputs = outputs

    @property
    def __class__(self) -> type:
        return dist.Work

    def wait(self, timeout: object = None) -> bool:
        """Let other ranks run until the data has moved; CUDA work only orders the current stream behind it.

        ``timeout`` is not used: the world ends a wait that cannot end.
        """
        for call in self._calls:
            if not call.done:
                call.host.wait_until(lambda call=call: call.done, self._why)
            if call.error is not None:
                kind, text = call.error
                raise kind(text)
            if call.end is not None:
                torch.cuda.current_stream().wait_event(call.end)
        return True

    def is_completed(self) -> bool:
        """Whether the data has moved. A False comes after the other ranks had a turn, so a polling loop ends."""
        if not self._moved():
            asked = iter((False,))
            self._calls[0].host.wait_until(lambda: self._moved() or next(asked, True), self._why)
        return self._moved() and all(call.end is None or call.end.query() for call in self._calls)

    def is_success(self) -> bool:
        """Whether the data has moved and no rank disagreed."""
        return self._moved() and all(call.error is None for call in self._calls)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        """A future that is done: waiting for an open one would block the thread of all ranks."""
        self.wait()
        future = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    @classmethod
    def together(cls, works: list[LocalWork]) -> LocalWork:
        """One handle for several."""
        calls = [call for work in works for call in work._calls]
        return cls(calls, works[0]._why, [tensor for work in works for tensor in work._outputs])

    def _moved(self) -> bool:
        return all(call.done for call in self._calls)


def mark(tensors: list[torch.Tensor], barrier: bool) -> tuple[torch.cuda.Stream, Any] | None:
    """The current stream and an event on it, for CUDA tensors and for a barrier of a program that uses CUDA."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None and not (barrier and torch.cuda.is_initialized()):
        return None
    stream = torch.cuda.current_stream(device)
    return stream, stream.record_event()


def describe(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{name_of(tensor.dtype)} {tuple(tensor.shape)}" for tensor in tensors)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
