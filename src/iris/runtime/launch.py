"""The one way the library starts a kernel: options that a target knows, names for messages, errors afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from iris.runtime.context import Iris

_AMD_ONLY = frozenset({"matrix_instr_nonkdim", "waves_per_eu", "kpack"})
_NVIDIA_ONLY = frozenset({"maxnreg", "num_ctas"})
_OPTIONS = _AMD_ONLY | _NVIDIA_ONLY | {"num_warps", "num_stages"}

_names: list[str] = [""]
_ids: dict[str, int] = {}


def kernel_id(name: str) -> int:
    """A number that stands for a kernel's name in the error slot; the same name gives the same number."""
    if name not in _ids:
        _ids[name] = len(_names)
        _names.append(name)
    return _ids[name]


def kernel_name(number: int) -> str:
    """The name behind :func:`kernel_id`; empty for a kernel that gave none."""
    return _names[number] if 0 <= number < len(_names) else _names[0]


def options_for(vendor: str, options: dict[str, Any]) -> dict[str, Any]:
    """The launch options among ``options`` that a vendor's compiler takes; none for the interpreter."""
    dropped = {"nvidia": _AMD_ONLY, "amd": _NVIDIA_ONLY, "cpu": _OPTIONS}[vendor]
    return {name: value for name, value in options.items() if name not in dropped and value is not None}


@dataclass(frozen=True)
class Launch:
    """A launch that :func:`compiling` has kept: what a kernel is to be compiled for.

    Attributes:
        kernel: a ``@triton.jit`` function.
        grid: of the launch.
        args, options: arguments, tensors as stand-ins that keep no memory alive, and launch options of the target.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self) -> Any:
        """The compiled kernel, from memory or Triton's cache on disk when it has been compiled before."""
        return self.kernel.warmup(*self.args, grid=self.grid, **self.options)


def load_kernel(kernel: Any) -> None:
    """Load a compiled kernel on the device. What takes too many registers or the like fails in that."""
    _ = kernel.run  # its handle is there then


class _StandIn:
    """What the compiler wants to know of a tensor: dtype, alignment, and on AMD how far offsets go."""

    def __init__(self, tensor: torch.Tensor):
        self.dtype = tensor.dtype
        self._address = tensor.data_ptr()
        self._nbytes = tensor.untyped_storage().nbytes()

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        return self._nbytes


@contextmanager
def compiling(ctx: Iris) -> Iterator[list[Launch]]:
    """Keep the launches of ``ctx`` in a block instead of making them; gives the list of them.

    Nothing is launched, so kernels communicate nothing either. Interpreted kernels are left out: there is nothing to
    compile.
    """
    kept: list[Launch] = []
    before, ctx.kept_launches = ctx.kept_launches, kept
    try:
        yield kept
    finally:
        ctx.kept_launches = before


def start(ctx: Iris, kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> Any:
    """Start ``kernel`` on the current stream.

    Args:
        ctx: the context whose ranks take part.
        kernel: a ``@triton.jit`` function.
        grid: number of programs along up to three axes; nothing is started when one of them is 0.
        args, meta: the kernel's arguments; ``meta`` also holds launch options of any vendor.

    Returns:
        The compiled kernel; None when it is interpreted or nothing was started, as within :func:`compiling`.

    Raises:
        ArgumentError: the kernel needs more shared memory or registers than the target has.
        UnsupportedError: the compiler fails on it.
        WaitTimeout: on the cpu runtime, when a program of the kernel waited in vain.
    """
    if 0 in grid:
        return None
    kept = getattr(ctx, "kept_launches", None)
    if kept is not None:
        if ctx.target.compiled:
            known = tuple(_StandIn(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
            kept.append(Launch(kernel, grid, known, options_for(ctx.target.vendor, meta)))
        return None
    import triton
    from triton.runtime.errors import OutOfResources

    try:
        compiled = kernel[grid](*args, **options_for(ctx.target.vendor, meta))
    except OutOfResources as error:
        # Found when the kernel is loaded, before anything runs, and on every rank alike.
        raise ArgumentError(
            f"{kernel.__name__} does not fit {ctx.target.arch}: {error}. Make num_stages={meta.get('num_stages')}, "
            "block_size_k or the tile smaller"
        ) from error
    except RuntimeError as error:
        if "PassManager" not in str(error):
            raise
        # A fault of the compiler, which has written what it was at to stderr; nothing has run.
        raise UnsupportedError(
            f"Triton {triton.__version__} fails to compile {kernel.__name__} for {ctx.target.arch} ({error}) with "
            f"num_warps={meta.get('num_warps')}, num_stages={meta.get('num_stages')}; another tile may compile"
        ) from error
    if not ctx.target.compiled:
        # On a further stream the kernel goes on, and whoever waits for it learns of a failed wait.
        if not ctx.current_stream().pending():
            ctx.raise_for_failed_waits()
        return None
    return compiled


def again(compiled: Any, kernel: Any, grid: tuple[int, ...], **meta: Any) -> Callable[..., None]:
    """A function that launches what :func:`start` returned once more, at a fraction of the cost on the host.

    It takes the handle of a stream and the arguments of :func:`start` before ``meta``, tensors as addresses. Nothing is
    checked: integers must be the same as in the first launch, and addresses as aligned.

    Args:
        compiled: from :func:`start`.
        kernel, grid, meta: those of the first launch; the kernel's constants are its last parameters.
    """
    from triton import knobs

    whole = (*grid, 1, 1)[:3]
    constants = tuple(meta[name] for name in kernel.arg_names if name in meta)
    watched, bare = compiled[whole], compiled.run
    function, packed = compiled.function, compiled.packed_metadata

    def launch(stream: int, *args: Any) -> None:
        if not _hooked(knobs.runtime.launch_enter_hook) and not _hooked(knobs.runtime.launch_exit_hook):
            bare(*whole, stream, function, packed, None, None, None, *args, *constants)
        else:  # a profiler wants to know
            watched(*args, *constants, stream=stream)

    return launch


def _hooked(hook: Any) -> bool:
    # A chain of hooks, or one or None, by the release of Triton.
    return bool(getattr(hook, "calls", hook))
