"""``Iris``, the context of a rank: its place, its part of the symmetric heap, tensors on it, barriers, broadcast."""

from __future__ import annotations

import importlib
import itertools
import os
import weakref
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from iris import _env, _target
from iris.errors import (
    ArgumentError,
    CaptureError,
    DeviceMismatch,
    IrisError,
    RankMismatch,
    RuntimeConflict,
    WaitRecord,
    WaitTimeout,
)
from iris.runtime import channels, groups, launch, logs, streams
from iris.runtime import scheduler as scheduling
from iris.runtime.agreement import Agreement
from iris.runtime.bootstrap import Exchange, initialize_distributed
from iris.runtime.heap import ALIGNMENT, Region, SymmetricHeap, diverged, raise_for_divergence
from iris.runtime.local import LocalExchange, LocalRegion, current_world
from iris.runtime.settle import settled
from iris.runtime.tensors import TensorFactory

_ALLOCATORS = ("torch", "vmem", "vmem_chunked")
_TRACE_WORDS = 17
_SLOT_WORDS = 16
_FLAG_BYTES = 128
_context_numbers = itertools.count()


class Iris(TensorFactory):
    """A rank's context. Made by :func:`iris`; construction is collective over the world.

    Attributes:
        cur_rank, num_ranks: the caller's rank and the number of ranks.
        device: the device as a string, ``"cuda:0"`` or ``"cpu"``.
        heap: the symmetric heap (:class:`iris.runtime.heap.SymmetricHeap`).
        heap_size: bytes of the heap that allocations may use.
        heap_bases: int64[num_ranks] on the device, every rank's heap address as mapped in this process.
        target: what kernels run on (:class:`iris._target.Target`), with this rank's share of the compute units.
        exchange: host exchange between the ranks.
        barrier_flags, barrier_epochs: state of the in-stream barrier, see :mod:`iris.x.barrier`.
        pair_flags: int32 flags on the heap, two lines of 128 bytes for each rank (ready, consumed), for operations.
        pair_counters: int32[num_ranks + 2], how often an operation met each rank, programs started, programs ended.
        channels: what collective kernels meet through (:class:`iris.runtime.channels.Channels`).
        shared: what rank 0 had to share when the context was made, by the name in ``shared_at_start``.
    """

    # Services of higher layers, as "module:callable"; called with the context at first use. Filled by the package.
    services: ClassVar[dict[str, str]] = {}
    # What rank 0 shares when a context is made, so that all ranks know the same: as "module:callable", called with the
    # context on rank 0 alone. Filled by the package.
    shared_at_start: ClassVar[dict[str, str]] = {}
    # Launches that are kept instead of made, see iris.runtime.launch.compiling().
    kept_launches: list[launch.Launch] | None = None

    def __init__(self, heap_size: int = 1 << 30, allocator_type: str = "torch", copy_engine: str | None = None):
        self._check_arguments(heap_size, _env.get("IRIS_ALLOCATOR") or allocator_type, copy_engine)
        self.runtime, self.runtime_reason = settled()
        self._local_world = current_world()
        if self._local_world is not None:
            self.runtime = "sim" if self._local_world.interpreted else "loopback"
            self.runtime_reason = "iris.sim runs the ranks in this process"
        elif self.runtime == "sim":
            raise RuntimeConflict(
                "IRIS_RUNTIME=sim, but no simulation is running: call iris.iris() from what iris.sim.run runs, start "
                "the script with `iris run --sim -n 4 script.py`, or take IRIS_RUNTIME=cpu"
            )
        self._torch_device = self._choose_device()
        self.device = str(self._torch_device)
        on_gpu = self._torch_device.type == "cuda"
        self.gpu_id = self._torch_device.index if on_gpu else None
        self.timeout_s: float = _env.get("IRIS_TIMEOUT")
        self.exchange = self._make_exchange(on_gpu)
        self.cur_rank, self.num_ranks = self.exchange.rank, self.exchange.world_size
        self.target = self._choose_target(on_gpu)
        # Shorter than the host's, so that the record of a wait in vain reaches ranks that wait on the host.
        self.wait_limit_s = 0.75 * self.timeout_s
        self._agree_on_construction(heap_size)
        flags = -(-3 * self.num_ranks * _FLAG_BYTES // ALIGNMENT) * ALIGNMENT
        lanes = channels.layout(self.target, self.num_ranks)
        reserved = flags + lanes.nbytes
        self.heap_size = -(-heap_size // ALIGNMENT) * ALIGNMENT
        region = self._make_region(reserved + self.heap_size)
        self.heap = SymmetricHeap(region, self.cur_rank, reserved, self.heap_size, self._reclaim)
        self._make_flags(flags, lanes)
        self._make_device_context()
        self._services: dict[str, Any] = {}
        self.agreement = Agreement(self)
        self._world = groups.resolve(None, self.cur_rank, self.num_ranks)
        self._side_stream: Any = None
        self._group_members: dict[tuple[int, ...], torch.Tensor] = {}
        if not on_gpu and self._local_world is None:
            scheduler = scheduling.current()
            scheduler.time_limit_s = self.timeout_s
            scheduler.on_wait.append(self.exchange.watch)
            weakref.finalize(self, scheduler.on_wait.remove, self.exchange.watch).atexit = False
        offered = {name: _load(path)(self) for name, path in self.shared_at_start.items()} if not self.cur_rank else {}
        self.shared: dict[str, Any] = self.exchange.all_gather("iris.iris(): context ready", offered)[0]

    @staticmethod
    def _check_arguments(heap_size: int, allocator_type: str, copy_engine: str | None) -> None:
        if allocator_type not in _ALLOCATORS:
            raise ArgumentError(f"Unknown allocator type: {allocator_type!r}; possible: {', '.join(_ALLOCATORS)}")
        if copy_engine not in (None, "sdma"):
            raise ArgumentError(f"Unsupported copy engine: {copy_engine!r}; possible: None or 'sdma'")
        if copy_engine == "sdma":
            raise ImportError("copy_engine='sdma' needs the package that iris[sdma] would install; it is not available")
        if isinstance(heap_size, bool) or not isinstance(heap_size, int) or heap_size <= 0:
            raise ArgumentError(f"heap_size must be a number of bytes above 0, got {heap_size!r}")

    def _make_exchange(self, on_gpu: bool) -> Exchange:
        if self._local_world is not None:
            if not dist.is_initialized():
                dist.init_process_group()
            numbers = self._local_world.shared.setdefault(("contexts", self._local_world.rank()), itertools.count())
            return LocalExchange(self._local_world, f"iris/{next(numbers)}", self.timeout_s)
        store, rank, world_size, owns_group = initialize_distributed(_backend(on_gpu), self.timeout_s)
        if owns_group:
            weakref.finalize(_process_group_owner, _destroy_process_group)
        name = f"iris/{next(_context_numbers)}"
        return Exchange(store, name, rank, world_size, self.timeout_s, streams.progress)

    def _choose_device(self) -> torch.device:
        if self.runtime in ("cpu", "sim"):
            return torch.device("cpu")
        count = torch.cuda.device_count()
        if count == 0:
            raise RuntimeConflict(
                f"the gpu runtime was settled ({self.runtime_reason}) but PyTorch sees no GPU; "
                "`iris doctor` says what is missing, IRIS_RUNTIME=cpu runs without one"
            )
        if "LOCAL_RANK" in os.environ and self._local_world is None:
            torch.cuda.set_device(get_device_id_for_rank(int(os.environ["LOCAL_RANK"])))
        return torch.device("cuda", torch.cuda.current_device())

    def _choose_target(self, on_gpu: bool) -> _target.Target:
        if not on_gpu:
            return (self._local_world and self._local_world.target) or _target.INTERPRETER
        target = _target.detect(self._torch_device.index)
        if self._local_world is not None:
            return target.share(self.num_ranks)
        # Under MPS the device itself reports the share that the process was given.
        limited = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in os.environ
        return target if limited else target.share(_env.get("IRIS_RANKS_PER_GPU") or 1)

    def _agree_on_construction(self, heap_size: int) -> None:
        places = self.exchange.introduce()
        facts = self.exchange.all_gather("iris.iris()", (heap_size, self._torch_device.type))
        for what, values in zip(("heap_size", "device type"), zip(*facts, strict=True), strict=True):
            if len(set(values)) > 1:
                shown = ", ".join(f"rank {r}: {v}" for r, v in enumerate(values))
                raise RankMismatch(f"iris.iris(): every rank must give the same {what}; got {shown}")
        hosts = [place[0] for place in places]
        if len(set(hosts)) > 1:
            raise IrisError(
                f"iris.iris(): the symmetric heap is for the ranks of one machine; got ranks on {set(hosts)}"
            )

    def _make_region(self, nbytes: int) -> Region:
        if self._local_world is not None:
            return LocalRegion(self._local_world, self.exchange.name, nbytes, self._torch_device)
        if self._torch_device.type == "cpu":
            from iris.runtime.shared_memory import SharedMemoryRegion

            return SharedMemoryRegion(nbytes, self.exchange)
        from iris.runtime.symm_mem import SymmetricMemoryRegion

        return SymmetricMemoryRegion(nbytes, self._torch_device, self.cur_rank, self.num_ranks)

    def _make_flags(self, flags: int, lanes: channels.Layout) -> None:
        region, device = self.heap.region, self._torch_device
        region.allocated(self.heap.base, flags, 4, "flags of the context")
        area = region.tensor(self.heap.base, flags, region)
        area.zero_()
        lines = area.view(torch.int32)
        self.barrier_flags = lines[: self.num_ranks * _FLAG_BYTES // 4]
        self.barrier_epochs = torch.zeros(self.num_ranks, dtype=torch.int32, device=device)
        self.pair_flags = lines[self.num_ranks * _FLAG_BYTES // 4 :]
        self.pair_counters = torch.zeros(self.num_ranks + 2, dtype=torch.int32, device=device)
        start = self.heap.base + flags
        region.allocated(start, lanes.all_flag_bytes, 4, "channel flags of the context")
        region.allocated(start + lanes.all_flag_bytes, lanes.all_slots_bytes, 1, "channel slots of the context")
        area = region.tensor(start, lanes.nbytes, region)
        area[: lanes.all_flag_bytes].zero_()
        self.channels = channels.Channels(self, lanes, area)

    def _make_device_context(self) -> None:
        region, device = self.heap.region, self._torch_device
        self._error_slot = torch.zeros(_SLOT_WORDS, dtype=torch.int64, device=device)
        words = [self.cur_rank, self.num_ranks, *region.bases, *([0] * _TRACE_WORDS)]
        words += [self._error_slot.data_ptr(), int(self.wait_limit_s * 1e6), *self._link_words()]
        self._device_context = torch.tensor(words, dtype=torch.int64, device=device)
        region.note(self._error_slot, "error slot of the context")
        self.heap_bases = self._device_context[2 : 2 + self.num_ranks]
        self._device_synchronize()

    def write_trace_words(self, words: list[int]) -> None:
        """Set the words of tracing in the device context; the rank's launches have ended.

        In place: launches that were prepared with the tensor, and captured graphs, follow.
        """
        self._refuse_capture("turning tracing on or off", "do it before the capture")
        self._device_synchronize()
        start = 2 + self.num_ranks
        block = self._device_context[start : start + _TRACE_WORDS]
        block.copy_(torch.tensor(words, dtype=torch.int64, device=self._torch_device))
        self._device_synchronize()

    def _link_words(self) -> list[int]:
        """Where an imitated link keeps its state, and its femtoseconds a byte (:mod:`iris.device.link`)."""
        gpu = self._local_world.gpu if self._local_world is not None else None
        return [*gpu.link_words(self.cur_rank)] if gpu is not None else [0, 0]

    def get_rank(self) -> int:
        """The caller's rank, 0 to ``get_num_ranks() - 1``."""
        return self.cur_rank

    def get_num_ranks(self) -> int:
        """Number of ranks in the world."""
        return self.num_ranks

    def get_device(self) -> torch.device:
        """The device that the rank's tensors and kernels are on."""
        return self._torch_device

    def get_device_id(self) -> int | None:
        """Index of the rank's GPU; None on the cpu runtime."""
        return self.gpu_id

    def get_cu_count(self) -> int:
        """Compute units (streaming multiprocessors) that the rank may use."""
        return self.target.compute_units

    def get_heap_bases(self) -> torch.Tensor:
        """int64[num_ranks] on the device: every rank's heap address as mapped in this process."""
        return self.heap_bases

    def get_device_context(self) -> torch.Tensor:
        """int64 tensor for ``DeviceContext.initialize``: ``[rank, num_ranks, bases, tracing, error slot, limit]``."""
        return self._device_context

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether peers can reach ``tensor``: it lies on this context's heap. Empty tensors: when made there."""
        return self.heap.is_symmetric(tensor)

    def as_symmetric(self, external_tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor on the symmetric heap, with storage of its own. Collective in order.

        Raises:
            DeviceMismatch: the tensor is on another device.
            ArgumentError: the tensor is not contiguous.
        """
        if external_tensor.device != self._torch_device:
            raise DeviceMismatch(
                f"as_symmetric: the tensor is on {external_tensor.device}, the context on {self.device}"
            )
        if not external_tensor.is_contiguous():
            raise ArgumentError("as_symmetric: only contiguous tensors can be imported; call .contiguous() first")
        copy = self.heap.allocate(external_tensor.numel(), external_tensor.dtype).view(external_tensor.shape)
        copy.copy_(external_tensor)
        return copy

    def resolve_group(self, group: Any) -> groups.Group:
        """``group`` as ranks in group order; raises NotAMemberError when the caller is not in it."""
        if group is None:
            return self._world
        return groups.resolve(group, self.cur_rank, self.num_ranks)

    def synchronize(self) -> None:
        """Wait for everything this rank has launched. Local.

        Raises:
            WaitTimeout: a program of a kernel waited in vain for a peer.
        """
        self._device_synchronize()
        self.raise_for_failed_waits()

    def barrier(self, stream: Any = None, group: Any = None) -> None:
        """Wait for the rank's launches (of ``stream``, default all), then for the other ranks of ``group``. Collective.

        Memory of tensors that are gone on all ranks is free afterwards, when the group is the world and ``stream`` is
        None.

        Raises:
            CaptureError: a graph is being captured; ``device_barrier`` can be captured.
            NotAMemberError: the caller is not in ``group``.
            WaitTimeout: on every rank of the group, when a kernel of one of them waited in vain.
            RankMismatch: the ranks are in different calls, or have allocated differently.
            RankLost: a rank did not arrive in time or has ended.
        """
        self._refuse_capture("barrier()", "use ctx.device_barrier(), which runs in the stream")
        members = self.resolve_group(group)
        if stream is not None:
            stream.synchronize()
        else:
            self._device_synchronize()
        # A block may be given out again only when no kernel of any stream can still use it.
        self._meet("barrier()", members.ranks, frees=stream is None)

    def device_barrier(self, group: Any = None) -> None:
        """Barrier in the stream, without the host: what the ranks launch after it sees what they launched before it.

        Can be captured in a graph; allocates nothing. Collective over ``group``.

        Raises:
            NotAMemberError: the caller is not in ``group``.
        """
        self.service("device_barrier")(self.resolve_group(group))

    def group_members(self, group: groups.Group) -> torch.Tensor:
        """int32 tensor of a group's ranks on the device, kept for later calls."""
        if group.ranks not in self._group_members:
            self._refuse_capture("the first use of a group", "call it once before the capture")
            self._group_members[group.ranks] = torch.tensor(group.ranks, dtype=torch.int32, device=self._torch_device)
        return self._group_members[group.ranks]

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """The value that rank ``src`` passed, on every rank, of the type that it had there. Collective.

        Args:
            value: anything picklable; a tensor comes back as a tensor on the caller's device. Ignored on other ranks.
            src: the rank whose value is taken.

        Raises:
            ArgumentError: ``src`` is no rank.
        """
        if not 0 <= src < self.num_ranks:
            raise ArgumentError(f"broadcast: src must be a rank in 0..{self.num_ranks - 1}, got {src}")
        mine = value if self.cur_rank == src else None
        on_device = False
        if isinstance(mine, torch.Tensor) and mine.device.type != "cpu":
            on_device, mine = True, mine.cpu()
        payload = (on_device, mine)
        on_device, result = self.exchange.all_gather("broadcast()", payload)[src]
        if self.cur_rank == src:
            return value
        return result.to(self._torch_device) if on_device else result

    def debug(self, message: str) -> None:
        """Log at DEBUG with the rank."""
        self._log(logs.DEBUG, message)

    def info(self, message: str) -> None:
        """Log at INFO with the rank."""
        self._log(logs.INFO, message)

    def warning(self, message: str) -> None:
        """Log at WARNING with the rank."""
        self._log(logs.WARNING, message)

    def error(self, message: str) -> None:
        """Log at ERROR with the rank."""
        self._log(logs.ERROR, message)

    def service(self, name: str) -> Any:
        """The context's instance of a service of a higher layer, made at first use."""
        if name not in self._services:
            self._services[name] = _load(self.services[name])(self)
        return self._services[name]

    @property
    def ccl(self) -> Any:
        """The collectives on tensors: ``ctx.ccl.all_reduce(...)``."""
        return self.service("ccl")

    @property
    def ops(self) -> Any:
        """The fused operations: ``ctx.ops.all_gather_matmul(...)``."""
        return self.service("ops")

    @property
    def concurrent(self) -> Any:
        """A GEMM beside an independent collective: ``ctx.concurrent.all_reduce(...)``."""
        return self.service("concurrent")

    @property
    def tracing(self) -> Any:
        """Recording of what kernels do: ``ctx.tracing.enable()``, ``ctx.tracing.export("trace.json")``."""
        return self.service("tracing")

    def current_stream(self) -> Any:
        """The stream that launches go to: ``torch.cuda.current_stream()``, or that of the cpu runtime."""
        if self._torch_device.type == "cuda":
            return torch.cuda.current_stream(self._torch_device)
        return streams.current_stream()

    def stream_handle(self) -> int:
        """A number that tells the current stream from others; cheaper than :meth:`current_stream`."""
        if self._torch_device.type == "cuda":
            return torch._C._cuda_getCurrentRawStream(self._torch_device.index)
        return id(streams.current_stream())

    def new_stream(self) -> Any:
        """A stream that overlaps with the others: ``torch.cuda.Stream()``, or its like on the cpu runtime."""
        if self._torch_device.type != "cuda":
            return streams.new_stream()
        if self._local_world is not None:
            return self._local_world.gpu.new_stream(self.cur_rank)
        return torch.cuda.Stream(self._torch_device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Send the launches of a ``with`` block to ``stream``."""
        return torch.cuda.stream(stream) if self._torch_device.type == "cuda" else streams.use_stream(stream)

    def side_stream(self) -> Any:
        """The stream that operations with ``async_op=True`` run on."""
        if self._side_stream is None:
            self._side_stream = self.new_stream()
        return self._side_stream

    def raise_for_failed_waits(self) -> None:
        """Raise when a program of this rank waited in vain since the last check; resets the error slot.

        Raises:
            WaitTimeout: with the record of the first program.
        """
        record = self._take_record()
        if record is not None:
            self.exchange.post_fault(str(record))
            self._raise_wait_timeout([record])

    def _take_record(self) -> WaitRecord | None:
        words = self._error_slot.tolist()
        if words[0] == 0:
            return None
        self._error_slot[0] = 0
        kernel, program, flag, wanted, seen, peer = words[1:7]
        return WaitRecord(
            self.cur_rank, launch.kernel_name(kernel), self.heap.describe(flag), wanted, seen, peer, program
        )

    def _raise_wait_timeout(self, records: list[WaitRecord]) -> None:
        others = "".join(f"; rank {r} reported: {text}" for r, text in self.exchange.faults().items())
        limit = f"within {self.wait_limit_s:g} s (three quarters of IRIS_TIMEOUT)"
        raise WaitTimeout(f"a wait did not end {limit}: " + "; ".join(map(str, records)) + others, tuple(records))

    def _meet(self, tag: str, ranks: tuple[int, ...], frees: bool = True) -> None:
        posts = self.exchange.all_gather(tag, (self.heap.state(), self._take_record()), ranks)
        records = [record for _, record in posts if record is not None]
        states = [state for state, _ in posts]
        if diverged(states):
            raise_for_divergence(
                self.exchange.all_gather(f"{tag}: comparing heaps", self.heap.recent(), ranks), list(ranks)
            )
        if frees and len(ranks) == self.num_ranks:
            self.heap.settle(states)
        if records:
            self._raise_wait_timeout(records)

    def _reclaim(self) -> None:
        self._refuse_capture("an allocation that does not fit", "make it before the capture")
        self._device_synchronize()
        self._meet("an allocation on a full heap", tuple(range(self.num_ranks)))

    def capturing(self, stream: Any = None) -> bool:
        """Whether ``stream``, by default the current one, is being captured in a graph."""
        if self._torch_device.type != "cuda":
            return False
        if stream is None:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()

    def _refuse_capture(self, what: str, remedy: str) -> None:
        if self.capturing():
            raise CaptureError(f"{what} needs the host and cannot be captured in a graph; {remedy}")

    def _device_synchronize(self) -> None:
        if self._local_world is not None and self._local_world.gpu is not None:
            self._local_world.gpu.synchronize()
        elif self._torch_device.type == "cuda":
            torch.cuda.synchronize(self._torch_device)
        else:
            streams.synchronize()

    def _log(self, level: int, message: str) -> None:
        logs.log_rank(level, message, rank=self.cur_rank, num_ranks=self.num_ranks, stacklevel=3)


def iris(heap_size: int = 1 << 30, allocator_type: str = "torch", copy_engine: str | None = None) -> Iris:
    """Make the context of this rank. Collective over the world.

    ``torch.distributed`` is initialised from the environment (``torchrun``, ``iris run``) when the program has not done
    so, and left alone when it has; without a launcher the world is one rank.

    Args:
        heap_size: bytes of symmetric heap on each rank, the same on all.
        allocator_type: ``"torch"``, ``"vmem"`` or ``"vmem_chunked"``, names of the original API; one allocator serves
            all three.
        copy_engine: None. ``"sdma"`` of the original API is not available.

    Raises:
        ArgumentError: an unknown allocator, copy engine or size.
        RankMismatch: the ranks give different sizes.
        RuntimeConflict: the gpu runtime was asked for and there is no GPU.
    """
    return Iris(heap_size, allocator_type, copy_engine)


def get_device_id_for_rank(local_rank: int) -> int:
    """Index of the GPU of a rank: its local rank modulo the number of visible GPUs; 0 without GPUs."""
    return local_rank % max(1, torch.cuda.device_count())


def _load(path: str) -> Any:
    """What ``"module:attribute"`` names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


class _Owner:
    """Lives as long as the process; its finaliser ends the process group that this package made."""


_process_group_owner = _Owner()


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _backend(on_gpu: bool) -> str:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    # NCCL refuses two ranks on one GPU.
    return "cpu:gloo,cuda:nccl" if on_gpu and ranks_here <= torch.cuda.device_count() else "gloo"
