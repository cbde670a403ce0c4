"""What loopback asks of CUDA's driver, and PyTorch does not pass on: how kernels are loaded, and memory for spills."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_LAZY = 2  # CUmoduleLoadingMode
_STACK = 0  # CUlimit
_WORD = 4  # bytes of what Triton counts as a spill
_AT_LEAST = 2048  # bytes a thread: more than CUDA starts with, since what it has promised it may still have to make


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:  # another platform
        return None


def loads_lazily() -> bool:
    """Whether CUDA, which runs, loads kernels when they are first used."""
    mode = ctypes.c_int()
    ask = getattr(_driver(), "cuModuleGetLoadingMode", None)  # absent from drivers of before there was a choice
    return ask is not None and ask(ctypes.byref(mode)) == 0 and mode.value == _LAZY


def stack_bytes() -> int | None:
    """Bytes of a thread's local memory that there is room for; None where the driver does not say."""
    size = ctypes.c_size_t()
    ask = getattr(_driver(), "cuCtxGetLimit", None)
    return size.value if ask is not None and ask(ctypes.byref(size), _STACK) == 0 else None


def set_stack_bytes(nbytes: int) -> None:
    """Have so many bytes of local memory for each thread; waits until the GPU is idle."""
    result = _driver().cuCtxSetLimit(_STACK, ctypes.c_size_t(nbytes))
    if result != 0:
        raise RuntimeError(f"CUDA gives a thread no {nbytes} bytes of local memory (error {result} of the driver)")


class Spills:
    """Room for the registers that kernels spill.

    CUDA makes it when it launches the first kernel that needs more, and waits for the kernels that run: for one that
    waits for this very launch until its time is up. So it is made when a kernel is loaded, while nothing runs.
    """

    def __init__(self) -> None:
        self._before = self._room = stack_bytes()
        self._need(_AT_LEAST)

    def make_room(self, kernel: Any) -> None:
        """Make room for a compiled kernel that is loaded."""
        self._need(_WORD * (getattr(kernel, "n_spills", None) or 0))

    def _need(self, needed: int) -> None:
        if self._room is not None and needed > self._room:
            set_stack_bytes(needed)
            self._room = stack_bytes()

    def give_back(self) -> None:
        """Have as much room as before."""
        if self._before is not None and self._room != self._before:
            set_stack_bytes(self._before)
            self._room = self._before
