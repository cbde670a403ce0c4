"""Streams and events of interpreted kernels, shaped like ``torch.cuda.Stream`` and ``torch.cuda.Event``.

The default stream runs a launch to its end before the launch returns. A launch on another stream starts after what
stands before it on that stream and moves whenever host code waits: in a launch on the default stream, a barrier, a
host exchange or ``synchronize``. Only kernels keep stream order; PyTorch operations on host tensors run at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from iris.runtime import scheduler as scheduling
from iris.runtime.observer import Observer
from iris.runtime.scheduler import Launch

_SILENT = Observer()


def _observer() -> Observer:
    return scheduling.current().observer or _SILENT


class _Mark:
    """A point of a stream's order that the stream has reached or will reach."""

    def __init__(self, reached: bool = False):
        self.reached = reached

    def __call__(self) -> bool:
        return self.reached


class _Wait:
    """Holds a stream until another stream has reached a mark."""

    def __init__(self, mark: _Mark):
        self.mark = mark


class Event:
    """A point of a stream's order."""

    def __init__(self) -> None:
        self.mark = _Mark(reached=True)

    def record(self, stream: Stream | None = None) -> None:
        """Mark everything issued to ``stream`` (default: the current one) so far."""
        self.mark = _Mark()
        (stream or current_stream()).issue(self.mark)

    def query(self) -> bool:
        """Whether everything before the event has ended."""
        scheduling.current().step()
        advance_all()
        if self.mark.reached:
            _observer().host_awaited(self.mark)
        return self.mark.reached

    def synchronize(self) -> None:
        """Return when everything before the event has ended."""
        mark = self.mark
        scheduling.current().run_until(lambda: advance_all() or mark.reached, "an event")
        _observer().host_awaited(mark)


class Stream:
    """An order of launches that overlaps with other streams.

    Attributes:
        error: the first that a kernel raised since somebody has waited for the stream.
    """

    def __init__(self) -> None:
        self._queue: deque[Launch | _Mark | _Wait] = deque()
        self._issued = 0
        self._ended = 0
        self.error: BaseException | None = None

    def pending(self) -> bool:
        """Whether the stream holds what has not ended."""
        return bool(self._queue)

    def marker(self) -> Callable[[], bool]:
        """A function that tells whether everything issued so far has ended."""
        issued = self._issued
        return lambda: self.advance() or self._ended >= issued

    def issue(self, item: Launch | _Mark | _Wait) -> None:
        """Append a launch, a mark to reach, or a wait for the mark of another stream."""
        if isinstance(item, Launch):
            _observer().launch_issued(item, self)
        self._queue.append(item)
        self._issued += 1
        _streams.busy.add(self)
        self.advance()

    def advance(self) -> None:
        """Start or retire what stands at the head of the queue."""
        observer = _observer()
        while self._queue:
            head = self._queue[0]
            if isinstance(head, Launch):
                if not head.done:
                    if head not in scheduling.current().active:
                        observer.launch_started(head, self)
                        scheduling.current().start(head)
                    return
                self.error = self.error or head.error
                observer.launch_ended(head, self)
            elif isinstance(head, _Mark):
                head.reached = True
                observer.event_recorded(head, self)
            else:
                if not head.mark.reached:
                    return
                observer.event_awaited(head.mark, self)
            self._queue.popleft()
            self._ended += 1
        self._rest()

    def _rest(self) -> None:
        if not self._queue and self.error is None:
            _streams.busy.discard(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let later launches of this stream start only after the event."""
        self.issue(_Wait(event.mark))

    def wait_stream(self, stream: Stream) -> None:
        """Let later launches of this stream start only after what ``stream`` holds now."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Return when the stream is empty; raises what a kernel on it raised."""
        self._drain()
        _observer().host_awaited(self)

    def _drain(self) -> None:
        ended = self.marker()
        scheduling.current().run_until(lambda: advance_all() or ended(), "its stream")
        error, self.error = self.error, None
        self._rest()
        if error is not None:
            raise error


class _DefaultStream(Stream):
    """Runs what it is given before it returns, so host code sees the results."""

    def issue(self, item: Launch | _Mark | _Wait) -> None:
        super().issue(item)
        # On a GPU the host would go on meanwhile, so this wait orders nothing.
        self._drain()


class Streams:
    """The streams of one rank.

    Attributes:
        default, current: the default stream; the streams that launches went to, the present one last.
        all: every stream that somebody holds.
        busy: those that hold launches, or an error that nobody has seen; they live on when nobody else holds them.
    """

    def __init__(self) -> None:
        self.default: Stream = _DefaultStream()
        self.current: list[Stream] = [self.default]
        self._count = itertools.count()
        self.all: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self.busy: set[Stream] = set()
        self.add(self.default)

    def add(self, stream: Stream) -> None:
        self.all[next(self._count)] = stream

    def advance(self) -> None:
        """Start what can start on every stream; what ends on one may let another go on."""
        held = list(self.all.values())
        ended = -1
        while ended != (ended := sum(stream._ended for stream in held)):
            for stream in held:
                stream.advance()

    def pending(self) -> bool:
        """Whether a stream holds what has not ended."""
        return any(stream.pending() for stream in self.busy)

    def error(self) -> BaseException | None:
        """What a kernel raised that nobody has waited for."""
        return next((stream.error for stream in self.busy if stream.error is not None), None)


_streams = Streams()


def use_rank(streams: Streams) -> Streams:
    """Let the functions of this module speak of another rank's streams from now on; returns those of before."""
    global _streams
    before, _streams = _streams, streams
    return before


def advance_all() -> None:
    """Start what can start on every stream."""
    _streams.advance()


def current_stream() -> Stream:
    """The stream that launches go to."""
    return _streams.current[-1]


def new_stream() -> Stream:
    """A stream that overlaps with the others."""
    stream = Stream()
    _streams.add(stream)
    return stream


@contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    """Send the launches of a ``with`` block to ``stream``."""
    current = _streams.current
    current.append(stream)
    try:
        yield
    finally:
        current.pop()


def synchronize() -> None:
    """Return when every stream is empty; raises the first error of a kernel."""
    for stream in list(_streams.all.values()):
        stream.synchronize()


def progress() -> None:
    """Give every active launch one turn; host code that waits for another process calls it."""
    advance_all()
    if scheduling.current().active:
        scheduling.current().step()


def submit(launch: Launch, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Issue ``launch`` to the current stream; ``before`` and ``after`` bracket the time that launches are active."""
    before()
    try:
        current_stream().issue(launch)
    finally:
        after()
