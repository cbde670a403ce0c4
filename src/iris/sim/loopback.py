"""Many ranks on one GPU in one process: compiled kernels, a stream a rank, host code as coroutines.

Where host code would wait for the GPU it lets the other ranks go on instead, because what its kernels wait for may be a
kernel that another rank has yet to launch. That covers the waits of contexts, ``torch.cuda.synchronize``,
``Stream.synchronize``, ``Event.synchronize`` and the functions that read a tensor on the host
(:data:`_HOST_FUNCTIONS`). A PyTorch operation that waits for the GPU out of sight of Python still blocks every rank.

A kernel is loaded when it is launched for the first time, which takes a second; before such a launch the rank waits
until the others are as far, so that no kernel spins while its peer's is being compiled.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from iris.device import link
from iris.errors import ArgumentError, DeadlockError, RankLost, RuntimeConflict
from iris.runtime.reports import DeadlockReport
from iris.runtime.world import World
from iris.sim import pacing
from iris.sim.rank_state import CudaStreams, RandomState

# Streams beyond the number of hardware queues run one after another, and a kernel that waits would hold up its peer.
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_WANTED_QUEUES = 32
_DEFAULT_QUEUES = 8

_HOST_FUNCTIONS = frozenset(
    {"cpu", "tolist", "numpy", "item", "to", "copy_", "equal", "allclose", "nonzero", "is_nonzero", "unique"}
    | {"masked_select", "__array__", "__bool__", "__int__", "__float__", "__index__", "__repr__", "__format__"}
    | {"__contains__", "__getitem__", "__setitem__"}
)


class Gpu:
    """The GPU that the ranks of a world share.

    Attributes:
        world: the world.
        index: the GPU.
    """

    def __init__(self, world: World):
        self.world = world
        self.index = torch.cuda.current_device()
        self.current = CudaStreams(world.size, self.index)
        self._streams: list[weakref.WeakSet[Any]] = [weakref.WeakSet() for _ in range(world.size)]

    def new_stream(self, rank: int) -> torch.cuda.Stream:
        """A further stream of a rank."""
        stream = torch.cuda.Stream(self.index)
        self._streams[rank].add(stream)
        return stream

    def synchronize(self, *_: Any, **__: Any) -> None:
        """Wait for all streams of the running rank, as ``torch.cuda.synchronize`` does for all of a process."""
        rank = self.world.rank()
        streams = {torch.cuda.current_stream(self.index), self.current.own[rank], *self._streams[rank]}
        self.wait([stream.record_event() for stream in streams], "its GPU work")

    def wait(self, events: list[Any], what: str) -> None:
        """Let the other ranks go on until the GPU has reached some events."""
        if not all(event.query() for event in events):
            self.world.run_until(lambda: all(event.query() for event in events), what)

    def wait_for_stream(self) -> None:
        """Wait for the current stream, unless it is being captured."""
        if not torch.cuda.is_current_stream_capturing():
            self.wait([torch.cuda.current_stream(self.index).record_event()], "its stream")


class _HostReads(TorchFunctionMode):
    """Waits for the current stream before a function hands values of a GPU tensor to the host."""

    def __init__(self, gpu: Gpu):
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        reads = getattr(func, "__name__", "") in _HOST_FUNCTIONS and self._gpu.world.host is not None
        if reads and any(isinstance(a, torch.Tensor) and a.is_cuda for a in args):
            # The mode is off while it handles a call; the ranks that run meanwhile need it.
            with self:
                self._gpu.wait_for_stream()
        return func(*args, **(kwargs or {}))


def share_gpu(world: World, link_gbps: float | None, all_outcomes: bool, stack: ExitStack) -> None:
    """Set a world up for ranks that share the current GPU."""
    if link_gbps is not None and not link_gbps > 0:
        raise ArgumentError(f"link_gbps must be above 0, got {link_gbps}")
    _provide_queues(world.size)
    gpu = Gpu(world)
    world.gpu = gpu
    world.link_gbps = link_gbps
    world.switches += [RandomState(world.size, cuda=True), gpu.current]
    world.stuck = lambda: _stuck(world, all_outcomes)
    stack.callback(pacing.set_paced, link.LINK_PACED.value)
    pacing.set_paced(link_gbps is not None)
    _replace(stack, torch.cuda, "synchronize", gpu.synchronize)
    _replace(stack, torch.cuda.Stream, "synchronize", lambda stream: gpu.wait([stream.record_event()], "a stream"))
    _replace(stack, torch.cuda.Event, "synchronize", lambda event: gpu.wait([event], "an event"))
    _hold_first_launches(stack, world)
    stack.enter_context(_HostReads(gpu))


def _provide_queues(ranks: int) -> None:
    wanted = 2 * ranks + 1
    if not torch.cuda.is_initialized():
        os.environ.setdefault(_QUEUES, str(_WANTED_QUEUES))
    queues = int(os.environ.get(_QUEUES, _DEFAULT_QUEUES))
    if queues < min(wanted, _WANTED_QUEUES):
        raise RuntimeConflict(
            f"{ranks} ranks on one GPU need about {wanted} hardware queues, but {_QUEUES} gives {queues} and the GPU "
            f"is already in use. Start Python with {_QUEUES}={_WANTED_QUEUES}"
        )


def _replace(stack: ExitStack, owner: Any, name: str, value: Callable[..., Any]) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _hold_first_launches(stack: ExitStack, world: World) -> None:
    from triton.compiler.compiler import CompiledKernel

    load = CompiledKernel._init_handles
    arrived: set[int] = set()

    def ready() -> bool:
        others = (h for h in world.hosts if h.rank not in arrived and not h.done)
        return all(h.condition is not None for h in others)

    def load_and_meet(kernel: Any) -> None:
        first = kernel.module is None
        load(kernel)
        if not first or world.host is None or torch.cuda.is_current_stream_capturing():
            return
        arrived.add(world.rank())
        try:
            world.run_until(ready, "the other ranks to load their kernels")
        finally:
            arrived.discard(world.rank())

    _replace(stack, CompiledKernel, "_init_handles", load_and_meet)


def _stuck(world: World, all_outcomes: bool) -> DeadlockError | None:
    """The error when no host has moved for the time limit."""
    ended = [h for h in world.hosts if h.done]
    if all_outcomes and ended:
        names = "; ".join(h.describe() for h in ended)
        for host in (h for h in world.hosts if not h.done):
            world.fail_host(host, RankLost(f"rank {host.rank} waits for {host.waits_for}, but {names}"))
        return None
    report = DeadlockReport((), tuple(h.describe() for h in world.hosts), ())
    return DeadlockError(f"nothing has moved for {world.timeout_s:g} s (IRIS_TIMEOUT)\n{report}", report)
