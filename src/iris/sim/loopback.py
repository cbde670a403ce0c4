"""Many ranks on one GPU in one process: compiled kernels, a stream a rank, host code as coroutines.

Where host code would wait for the GPU it lets the other ranks go on instead, because what its kernels wait for may be a
kernel that another rank has yet to launch. That covers the waits of contexts, ``torch.cuda.synchronize``,
``Stream.synchronize``, ``Event.synchronize``, the functions that read a tensor on the host (:data:`_HOST_FUNCTIONS`),
and launches that would find no place in CUDA's queues (:mod:`iris.sim.backlog`). A PyTorch operation that waits for the
GPU out of sight of Python still blocks every rank.

CUDA loads a kernel when it is launched for the first time, and loads nothing while another kernel runs (seen on an
H200, also with CUDA_MODULE_LOADING=EAGER, which does spare PyTorch's own kernels): :mod:`iris.sim.first_launches` keeps
the ranks in an order in which that does no harm. Nor does it make room for spilled registers while a kernel runs, so
that is made when a kernel is loaded (:mod:`iris.sim.driver`).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from iris.device import link
from iris.errors import DeadlockError, RuntimeConflict
from iris.runtime import launch
from iris.runtime.logs import logger
from iris.runtime.reports import DeadlockReport
from iris.runtime.world import World
from iris.sim import driver, pacing
from iris.sim.backlog import Backlog
from iris.sim.first_launches import FirstLaunches
from iris.sim.rank_state import CudaStreams, RandomState

# Streams beyond the number of hardware queues run one after another, and a kernel that waits would hold up its peer.
_QUEUES, _LOADING = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"
_WANTED_QUEUES = 32
_DEFAULT_QUEUES = 8
_OF_A_GRAPH = 4  # operations that a replay counts as
_CUDA_SETTINGS = {_QUEUES: str(_WANTED_QUEUES), _LOADING: "EAGER"}

_HOST_FUNCTIONS = frozenset(
    {"cpu", "tolist", "numpy", "item", "to", "copy_", "equal", "allclose", "nonzero", "is_nonzero", "unique"}
    | {"masked_select", "__array__", "__bool__", "__int__", "__float__", "__index__", "__repr__", "__format__"}
    | {"__contains__", "__getitem__", "__setitem__"}
)
# They may copy from the host's memory, for which PyTorch waits for the stream.
_COPIES = frozenset({"tensor", "as_tensor", "to", "cuda", "copy_", "__setitem__"})


class Gpu:
    """The GPU that the ranks of a world share.

    Attributes:
        world: the world.
        index: the GPU.
        link_gbps: rate of the imitated links in each direction, None without them.
        link_per_peer: whether each pair of ranks has links of its own.
    """

    def __init__(self, world: World, link_gbps: float | None, link_per_peer: bool):
        self.world = world
        self.index = torch.cuda.current_device()
        self.current = CudaStreams(world.size, self.index)
        self.link_gbps = link_gbps
        self.link_per_peer = link_per_peer
        self._links = torch.zeros(world.size, link.state_words(world.size), dtype=torch.int64, device="cuda")
        self._links[:, 0] = int(link_per_peer)
        # Kept as long as the world: with torch 2.11 a weak set of them gave an event for a stream, and processes
        # crashed in garbage collection.
        self._streams: list[set[Any]] = [set() for _ in range(world.size)]
        self.backlog = Backlog(world, self._mark)

    def _mark(self) -> Any:
        capturing = torch.cuda.is_current_stream_capturing()
        return None if capturing else torch.cuda.current_stream(self.index).record_event()

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

    def link_words(self, rank: int) -> tuple[int, int]:
        """Where the imitated links of a rank keep their state, and their femtoseconds a byte; zeros without them."""
        return (self._links[rank].data_ptr(), round(1e6 / self.link_gbps)) if self.link_gbps else (0, 0)

    def carry(self, rank: int, received: Mapping[int, int]) -> Callable[[], None]:
        """Take a rank's links, in the current stream, for what PyTorch's copies are about to bring it.

        Args:
            rank: the receiver.
            received: bytes by the rank that they come from.

        Returns:
            To be called when the copies have been issued: the stream then waits until the links have carried them.
        """
        if not self.link_gbps:
            return _nothing
        programs, nanoseconds, peers = carriage(received, self.link_gbps, self.link_per_peer)
        until = torch.empty(programs, dtype=torch.int64, device="cuda")
        link.book_kernel[(programs,)](self._links[rank], until, nanoseconds, peers)

        def arrive() -> None:
            link.await_kernel[(programs,)](until)

        return arrive

    def idle(self) -> bool:
        """Whether no rank's stream has work left."""
        streams = {*self.current.own, *(stream for own in self._streams for stream in own)}
        return all(stream.query() for stream in streams)

    def wait(self, events: list[Any], what: str) -> None:
        """Let the other ranks go on until the GPU has reached some events."""
        if not all(event.query() for event in events):
            self.world.run_until(lambda: all(event.query() for event in events), what)

    def wait_for_stream(self) -> None:
        """Wait for the current stream, unless it is being captured."""
        if not torch.cuda.is_current_stream_capturing():
            self.wait([torch.cuda.current_stream(self.index).record_event()], "its stream")


def _nothing() -> None:
    pass


def carriage(received: Mapping[int, int], gbps: float, per_peer: bool) -> tuple[int, int, int]:
    """What a collective takes of the receiver's links: programs of the kernel, nanoseconds, and the peers as bits.

    With links by peer all carry at once, and each is taken for as long as the one with most bytes.
    """
    # GB/s are bytes a nanosecond.
    if not per_peer:
        return 1, round(sum(received.values()) / gbps), 1
    return 1 + max(received), round(max(received.values()) / gbps), sum(1 << peer for peer in received)


def waits_for_stream(name: str, args: Sequence[Any]) -> bool:
    """Whether PyTorch waits for the stream in a function of that name, or hands values of a GPU tensor to the host."""
    on_gpu = [isinstance(argument, torch.Tensor) and argument.is_cuda for argument in args]
    if name == "copy_" and on_gpu[:2] == [True, True]:
        return False
    if name in ("tensor", "as_tensor") and hasattr(args[0], "__cuda_array_interface__"):
        return False  # memory that is there already
    if name in ("__getitem__", "__setitem__") and on_gpu[0] and _places_alone(args[1]):
        # A view; what is written to it comes from a number or another tensor of the GPU.
        return name == "__setitem__" and isinstance(args[2], torch.Tensor) and not on_gpu[2]
    return name in _COPIES or (name in _HOST_FUNCTIONS and any(on_gpu))


def _places_alone(index: Any) -> bool:
    """Whether an index selects by numbers and slices; PyTorch counts the elements that a mask selects on the host."""
    every = index if isinstance(index, tuple) else (index,)
    return all(one is None or one is ... or type(one) in (int, slice) for one in every)


class _HostReads(TorchFunctionMode):
    """Waits for the current stream before a function hands values of a GPU tensor to the host, and counts what is
    issued."""

    def __init__(self, gpu: Gpu):
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if self._gpu.world.host is not None and name != "__get__":  # attributes
            self._gpu.backlog.issued()
            if waits_for_stream(name, args):
                self._gpu.wait_for_stream()
        return func(*args, **(kwargs or {}))


def share_gpu(
    world: World, link_gbps: float | None, link_per_peer: bool, all_outcomes: bool, stack: ExitStack
) -> Callable[[int, Mapping[int, int]], Callable[[], None]]:
    """Set a world up for ranks that share the current GPU; returns what charges a collective to a rank's links."""
    _provide_queues(world.size)
    _load_libraries()
    gpu = Gpu(world, link_gbps, link_per_peer)
    world.gpu = gpu
    world.switches += [RandomState(world.size, cuda=True), gpu.current]
    world.stuck = lambda: _stuck(world, all_outcomes)
    stack.callback(_give_back)
    stack.callback(pacing.set_paced, link.LINK_PACED.value)
    pacing.set_paced(link_gbps is not None)
    _replace(stack, torch.cuda, "synchronize", gpu.synchronize)
    _replace(stack, torch.cuda.Stream, "synchronize", lambda stream: gpu.wait([stream.record_event()], "a stream"))
    _replace(stack, torch.cuda.Event, "synchronize", lambda event: gpu.wait([event], "an event"))
    empty_cache = torch.cuda.empty_cache
    # Memory is given back when no kernel runs: CUDA would wait for kernels that may wait for what this rank has yet to
    # launch, until their time is up. Every capture of a graph begins with that.
    _replace(stack, torch.cuda, "empty_cache", lambda: empty_cache() if gpu.idle() else None)
    _hold_first_launches(stack, world, gpu)
    _count_launches(stack, gpu)
    stack.enter_context(_HostReads(gpu))
    return gpu.carry


def settle_cuda() -> None:
    """Put into the environment what CUDA must find when it starts; what is there stays."""
    for name, value in _CUDA_SETTINGS.items():
        os.environ.setdefault(name, value)


def _provide_queues(ranks: int) -> None:
    wanted = 2 * ranks + 1
    if not torch.cuda.is_initialized():
        settle_cuda()
    elif driver.loads_lazily():
        logger.warning(
            "CUDA was started without %s=EAGER, so it loads a kernel of PyTorch when that is first used, and waits for "
            "the kernels that run then: a rank may wait there for one that waits for it, until the time limit. Start "
            "Python with %s", _LOADING, " ".join(f"{name}={value}" for name, value in _CUDA_SETTINGS.items()),
        )  # fmt: skip
    queues = int(os.environ.get(_QUEUES, _DEFAULT_QUEUES))
    if queues < min(wanted, _WANTED_QUEUES):
        raise RuntimeConflict(
            f"{ranks} ranks on one GPU need about {wanted} hardware queues, but {_QUEUES} gives {queues} and the GPU "
            f"is already in use. Start Python with {_QUEUES}={_WANTED_QUEUES}"
        )


def _give_back() -> None:
    """Free what PyTorch keeps of the run's memory: it keeps it by stream, and the next run has other streams."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


@cache
def _load_libraries() -> None:
    """Have cuBLAS and the driver load their kernels, of products and copies, while nothing runs on the GPU: they do so
    when they first need them in a process."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        matrix = torch.zeros(16, 16, dtype=dtype, device="cuda")
        torch.matmul(matrix, matrix)
    source, target = torch.zeros(2, 1 << 24, dtype=torch.uint8, device="cuda")
    for first, nbytes in ((0, 1 << 24), (0, 1 << 20), (0, 4096), (16, 80), (1, 7)):
        target[first : first + nbytes].copy_(source[first : first + nbytes])
    torch.cuda.synchronize()


def _replace(stack: ExitStack, owner: Any, name: str, value: Callable[..., Any]) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _hold_first_launches(stack: ExitStack, world: World, gpu: Gpu) -> None:
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    known: list[set[Any]] = [set() for _ in range(world.size)]
    first = FirstLaunches(world, gpu.idle)
    spills, load_kernel = driver.Spills(), launch.load_kernel
    stack.callback(spills.give_back)

    def load(kernel: Any) -> None:
        if kernel is not None:
            load_kernel(kernel)
            spills.make_room(kernel)

    def load_and_launch(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        rank = world.host.rank if world.host is not None else None
        if warmup or rank is None:
            return run(function, *args, grid=grid, warmup=warmup, **kwargs)
        # All values count, not only what the compiler specializes on: then ranks that call alike meet alike.
        key = (function, tuple(map(_value, args)), tuple((name, _value(v)) for name, v in kwargs.items()))
        if key not in known[rank] and not torch.cuda.is_current_stream_capturing():
            kernel = run(function, *args, grid=grid, warmup=True, **kwargs)
            first.load(lambda: load(kernel))
            known[rank].add(key)
        gpu.backlog.issued()
        return run(function, *args, grid=grid, warmup=False, **kwargs)

    _replace(stack, JITFunction, "run", load_and_launch)

    def load_for_later(kernel: Any) -> None:
        if world.host is None:
            load_kernel(kernel)
        else:
            first.load(lambda: load(kernel))

    _replace(stack, launch, "load_kernel", load_for_later)


def _count_launches(stack: ExitStack, gpu: Gpu) -> None:
    """Count the launches that neither Triton's own way nor PyTorch's functions see."""
    again, replay = launch.again, torch.cuda.CUDAGraph.replay

    def counted_again(*args: Any, **meta: Any) -> Callable[..., None]:
        start = again(*args, **meta)

        def counted(stream: int, *args: Any) -> None:
            gpu.backlog.issued()
            start(stream, *args)

        return counted

    def counted_replay(graph: torch.cuda.CUDAGraph) -> None:
        gpu.backlog.issued(_OF_A_GRAPH)
        replay(graph)

    _replace(stack, launch, "again", counted_again)
    _replace(stack, torch.cuda.CUDAGraph, "replay", counted_replay)


def _value(argument: Any) -> Any:
    """What tells apart two launches that may be compiled differently."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if hasattr(argument, "block_shape"):  # a tensor descriptor, whose repr would print its tensor
        return argument.base.dtype, tuple(argument.shape), tuple(argument.strides), tuple(argument.block_shape)
    return argument if isinstance(argument, int | float | str | bool | type(None)) else repr(argument)


def _stuck(world: World, all_outcomes: bool) -> DeadlockError | None:
    """The error when no host has moved for the time limit."""
    if all_outcomes and world.fail_waiting():
        return None
    report = DeadlockReport((), tuple(h.describe() for h in world.hosts), ())
    return DeadlockError(f"nothing has moved for {world.timeout_s:g} s (IRIS_TIMEOUT)\n{report}", report)
