"""What the benchmarks of fused operations share: a way to do one, and what the ways of a problem have in common."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from iris import _env
from iris.errors import ArgumentError, UnsupportedError
from iris.runtime import launch
from iris.runtime.local import current_world
from iris.runtime.local import whole_card as whole_card

MATMUL, OWN_MATMUL = "matmul", "own matmul"
TORCH, TORCH_FUSED, AUTO = "torch", "torch_fused", "auto"
SAMPLED_ROWS, SAMPLED_COLUMNS = 64, 128  # of an output that are compared with float64
CHECKED_AT_ONCE = 1 << 28  # elements


class Refused(Exception):
    """A way that does not exist here; the message is the reason."""


@dataclass(frozen=True)
class Compared:
    """What must agree after a call.

    Attributes:
        result: gives what the call left behind.
        want: what it must be.
        allowed: (absolute, relative) error; None: every bit.
    """

    result: Callable[[], torch.Tensor]
    want: torch.Tensor
    allowed: tuple[float, float] | None = None


@dataclass
class Way:
    """One way to do it.

    Attributes:
        call: what is timed.
        prepare: runs before each call, not timed.
        results: what must agree after a call.
        takes: the algorithm, where it was left to the library.
        note: what is to be said about it.
    """

    call: Callable[[], Any]
    prepare: Callable[[], Any]
    results: list[Compared]
    takes: str = ""
    note: str = ""


def hand_over(state: Any, found: Way) -> None:
    """Give a way to the state of a benchmark, and what must agree after it."""
    if found.takes:
        state.add_counter("takes", found.takes)
    if found.note:
        state.add_note(found.note)
    for one in found.results:
        state.validate(one.result, one.want, tolerance=one.allowed, bitwise=one.allowed is None)
    state.exec(found.call, preamble_fn=found.prepare)


_latest: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def shared(ctx: Any, key: Any, make: Callable[[], Any]) -> Any:
    """What ``make()`` gives, kept until a context asks for another key: candidates of a problem share their tensors."""
    if ctx not in _latest or _latest[ctx][0] != key:
        _latest.pop(ctx, None)
        _latest[ctx] = key, make()
    return _latest[ctx][1]


def spread(extent: int, count: int) -> torch.Tensor:
    """At most ``count`` indices below ``extent``, the first and the last among them."""
    return torch.linspace(0, extent - 1, min(extent, count)).long()


def random_on_device(ctx: Any, size: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random values, the same on every rank. Made on the device, since large ones take the host minutes."""
    generator = torch.Generator(ctx.get_device()).manual_seed(seed)
    return torch.randn(size, dtype=dtype, device=ctx.get_device(), generator=generator)


def group_name() -> str:
    """PyTorch's name of the group of all ranks."""
    return dist.group.WORLD.group_name  # pyright: ignore[reportOptionalMemberAccess]


def torch_carries(ctx: Any) -> bool:
    """Whether torch.distributed moves tensors of the device without the host."""
    if ctx.runtime != "gpu" or ctx.get_num_ranks() == 1:
        return True
    return dist.group.WORLD._get_backend(ctx.get_device()).name() != "gloo"  # pyright: ignore[reportOptionalMemberAccess]


def check_symmetric_memory(ctx: Any, operation: str) -> None:
    """Whether there is an operation of ``torch.ops.symm_mem``.

    Raises:
        Refused: says why there is not.
    """
    if ctx.runtime != "gpu" or ctx.get_num_ranks() == 1:
        raise Refused(f"PyTorch has it for processes with GPUs; this is the {ctx.runtime} runtime")
    if not hasattr(torch.ops.symm_mem, operation):
        raise Refused(f"torch {torch.__version__} does not have it")


def tried(ctx: Any, call: Callable[[], Any]) -> None:
    """Make a first call of an operation of PyTorch.

    Raises:
        Refused: PyTorch's own reason.
    """
    try:
        call()
        ctx.synchronize()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, AssertionError) as error:
        raise Refused(f"PyTorch refuses: {error}".splitlines()[0]) from error


def explained(ctx: Any, operation: str, *tensors: torch.Tensor, **options: Any) -> Any:
    """The library's plan.

    Raises:
        Refused: the library's own reason.
    """
    try:
        return ctx.ops.explain(operation, *tensors, **options)
    except (ArgumentError, UnsupportedError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


def host_microseconds(ctx: Any, call: Callable[[], Any], repeats: int = 300) -> float:
    """Microseconds of the host in one call, the launch of its kernel left out. Collective."""
    call()
    ctx.barrier()
    real, launch.start = launch.start, lambda *args, **kwargs: None
    try:
        for _ in range(20):
            call()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats * 1e6
    finally:
        launch.start = real


def idle(results: int, prepare: Callable[[], Any] = lambda: None) -> Way:
    """What a rank does that does not work: nothing, with as many results as the rank that works has."""
    shown = torch.arange(2)
    return Way(lambda: None, prepare, [Compared(lambda: shown, shown)] * results)


def link_of_rank() -> Callable[[int, dict[int, int]], Callable[[], None]] | None:
    """What takes an imitated link for copies: see ``iris.sim.loopback.Gpu.carry``. None where ranks share no GPU."""
    gpu = getattr(current_world(), "gpu", None)
    return None if gpu is None else gpu.carry


def memory_beside_heap(ctx: Any, alone: bool = False) -> float:
    """Bytes that a rank may take beside its heap. The same on every rank."""
    world, on_gpu = ctx.get_num_ranks(), ctx.get_device().type == "cuda"
    if on_gpu:
        total = torch.cuda.get_device_properties(ctx.get_device()).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sharing = (_env.get("IRIS_RANKS_PER_GPU") or 1) if ctx.runtime == "gpu" else world
    # The host's memory is taken when it is touched, a GPU's when the heap is made.
    heaps = sharing * ctx.heap.total_bytes if on_gpu else 0
    return (0.92 * total - heaps) / (1 if alone else sharing)


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
