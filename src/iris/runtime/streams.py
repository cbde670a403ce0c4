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

from iris.runtime.scheduler import Launch, scheduler


class Event:
    """A point of a stream's order."""

    def __init__(self) -> None:
        self._done: Callable[[], bool] = lambda: True

    def record(self, stream: Stream | None = None) -> None:
        """Mark everything issued to ``stream`` (default: the current one) so far."""
        self._done = (stream or current_stream()).marker()

    def query(self) -> bool:
        """Whether everything before the event has ended."""
        scheduler.step()
        return self._done()

    def synchronize(self) -> None:
        """Return when everything before the event has ended."""
        scheduler.run_until(self._done)


class Stream:
    """An order of launches that overlaps with other streams."""

    def __init__(self) -> None:
        self._queue: deque[Launch | Callable[[], bool]] = deque()
        self._issued = 0
        self._ended = 0
        self._error: BaseException | None = None

    def marker(self) -> Callable[[], bool]:
        """A function that tells whether everything issued so far has ended."""
        issued = self._issued
        return lambda: self.advance() or self._ended >= issued

    def issue(self, item: Launch | Callable[[], bool]) -> None:
        """Append a launch, or a condition that later items wait for."""
        self._queue.append(item)
        self._issued += 1
        self.advance()

    def advance(self) -> None:
        """Start or retire what stands at the head of the queue."""
        while self._queue:
            head = self._queue[0]
            if isinstance(head, Launch):
                if not head.done:
                    if head not in scheduler.active:
                        scheduler.start(head)
                    return
                self._error = self._error or head.error
            elif not head():
                return
            self._queue.popleft()
            self._ended += 1

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let later launches of this stream start only after the event."""
        self.issue(event._done)

    def wait_stream(self, stream: Stream) -> None:
        """Let later launches of this stream start only after what ``stream`` holds now."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Return when the stream is empty; raises what a kernel on it raised."""
        scheduler.run_until(self.marker())
        error, self._error = self._error, None
        if error is not None:
            raise error


class _DefaultStream(Stream):
    """Runs what it is given before it returns, so host code sees the results."""

    def issue(self, item: Launch | Callable[[], bool]) -> None:
        super().issue(item)
        self.synchronize()


default_stream = _DefaultStream()
_current: list[Stream] = [default_stream]
_count = itertools.count()
_all: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary({next(_count): default_stream})


def current_stream() -> Stream:
    """The stream that launches go to."""
    return _current[-1]


def new_stream() -> Stream:
    """A stream that overlaps with the others."""
    stream = Stream()
    _all[next(_count)] = stream
    return stream


@contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    """Send the launches of a ``with`` block to ``stream``."""
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


def synchronize() -> None:
    """Return when every stream is empty; raises the first error of a kernel."""
    for stream in list(_all.values()):
        stream.synchronize()


def progress() -> None:
    """Give every active launch one turn; host code that waits for another process calls it."""
    for stream in list(_all.values()):
        stream.advance()
    if scheduler.active:
        scheduler.step()


def submit(launch: Launch, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Issue ``launch`` to the current stream; ``before`` and ``after`` bracket the time that launches are active."""
    before()
    try:
        current_stream().issue(launch)
    finally:
        after()
