"""What is global to a process and must be each rank's own while its host code runs."""

from __future__ import annotations

import ctypes
import os
import random
import sys
from typing import Any

import numpy as np
import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

# The state of the Mersenne twister: 624 words and the position.
_MT19937_BYTES = 625 * 4


class _NumpyState:
    """The global generator of NumPy. Reading and setting it is slow, so both are left out while nothing is drawn."""

    def __init__(self) -> None:
        generator = np.random.mtrand._rand._bit_generator
        self._address = int(generator.ctypes.state_address)
        self._ahead = False  # whether the state that was read last had a number drawn ahead

    def _raw(self) -> bytes:
        return ctypes.string_at(self._address, _MT19937_BYTES)

    def get(self, known: Any = None) -> tuple[Any, bytes]:
        """The state and its raw form; ``known`` when it is still that."""
        raw = self._raw()
        if known is not None and known[1] == raw and not known[0]["has_gauss"]:
            return known
        state = np.random.get_state(legacy=False)
        self._ahead = bool(state["has_gauss"])
        return state, raw

    def set(self, state: tuple[Any, bytes]) -> None:
        # A second normal number that was drawn ahead is not part of the raw form.
        if state[0]["has_gauss"] or self._ahead or state[1] != self._raw():
            np.random.set_state(state[0])


class RandomState:
    """Random numbers of PyTorch, NumPy and Python: every rank starts from the state of the process."""

    def __init__(self, size: int, cuda: bool = False):
        self._cuda = cuda
        self._numpy = _NumpyState()
        self._outside = self._get(None)
        self._states = [self._outside] * size

    def enter(self, rank: int) -> None:
        self._outside = self._get(self._outside)
        self._set(self._states[rank])

    def leave(self, rank: int) -> None:
        self._states[rank] = self._get(self._states[rank])
        self._set(self._outside)

    def _get(self, known: tuple[Any, ...] | None) -> tuple[Any, ...]:
        cuda = torch.cuda.get_rng_state() if self._cuda else None
        numpy = self._numpy.get(known[1] if known else None)
        return random.getstate(), numpy, torch.default_generator.get_state(), cuda

    def _set(self, state: tuple[Any, ...]) -> None:
        random.setstate(state[0])
        self._numpy.set(state[1])
        torch.default_generator.set_state(state[2])
        if state[3] is not None:
            torch.cuda.set_rng_state(state[3])


class GradMode:
    """Whether autograd records: ``torch.no_grad()`` or ``inference_mode()`` of one rank is not that of the others."""

    def __init__(self, size: int):
        self._modes = [torch.is_grad_enabled()] * size
        self._outside = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        # Of a rank that has left the inference mode of the process: the guard that holds back its own.
        self._held_back: list[Any] = [None] * size

    def enter(self, rank: int) -> None:
        self._outside = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        guard, self._held_back[rank] = self._held_back[rank], None
        if guard is not None:
            guard.__exit__(None, None, None)
        torch._C._set_grad_enabled(self._modes[rank])

    def leave(self, rank: int) -> None:
        self._modes[rank] = torch.is_grad_enabled()
        grad, inference = self._outside
        if torch.is_inference_mode_enabled() != inference:
            guard = self._held_back[rank] = torch._C._InferenceMode(inference)
            guard.__enter__()
        torch._C._set_grad_enabled(grad)


class FrameEvaluation:
    """What ``torch.compile`` does with the frames of Python: on in a rank that runs what is compiled, off in another
    that has left a graph."""

    def __init__(self, size: int):
        self._callbacks: list[Any] = [None] * size
        self._outside: Any = None

    def enter(self, rank: int) -> None:
        self._outside = set_eval_frame(self._callbacks[rank])

    def leave(self, rank: int) -> None:
        self._callbacks[rank] = set_eval_frame(self._outside)


class Precision:
    """The default dtype, and ``torch.autocast``."""

    def __init__(self, size: int):
        self._outside = self._get()
        self._states = [self._outside] * size

    def enter(self, rank: int) -> None:
        self._outside = self._get()
        self._set(self._outside, self._states[rank])

    def leave(self, rank: int) -> None:
        self._states[rank] = self._get()
        self._set(self._states[rank], self._outside)

    @staticmethod
    def _get() -> tuple[Any, ...]:
        autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
        return torch.get_default_dtype(), torch.is_autocast_cache_enabled(), autocast

    @staticmethod
    def _set(now: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
        if now == wanted:
            return
        default, cached, autocast = wanted
        torch.set_default_dtype(default)
        torch.set_autocast_cache_enabled(cached)
        for device, (enabled, dtype) in zip(("cpu", "cuda"), autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


class FunctionModes:
    """Modes of PyTorch's functions that are on: ``with torch.device(...)`` of one rank is not that of the others.

    A mode is off while it handles a call, so a call that lets other ranks go on would leave them without it.
    """

    def __init__(self, size: int):
        self._modes = [_get_current_function_mode_stack()] * size
        self._outside = self._modes[0]

    def enter(self, rank: int) -> None:
        self._outside = _get_current_function_mode_stack()
        self._set(self._outside, self._modes[rank])

    def leave(self, rank: int) -> None:
        self._modes[rank] = _get_current_function_mode_stack()
        self._set(self._modes[rank], self._outside)

    @staticmethod
    def _set(now: list[Any], wanted: list[Any]) -> None:
        if len(now) == len(wanted) and all(a is b for a, b in zip(now, wanted, strict=True)):
            return
        for _ in now:
            _pop_mode()
        for mode in wanted:
            _push_mode(mode)


class Environment:
    """Environment variables: those by which a launcher tells a process its rank, and whatever a rank changes."""

    def __init__(self, size: int):
        self._changes: list[dict[bytes, bytes | None]] = [
            {
                b"RANK": str(rank).encode(),
                b"WORLD_SIZE": str(size).encode(),
                b"LOCAL_RANK": str(rank).encode(),
                b"LOCAL_WORLD_SIZE": str(size).encode(),
                b"MASTER_ADDR": b"localhost",
                b"MASTER_PORT": b"29500",
            }
            for rank in range(size)
        ]
        self._outside: dict[bytes, bytes] = {}

    def enter(self, rank: int) -> None:
        self._outside = self._read()
        self._apply(self._changes[rank])

    def leave(self, rank: int) -> None:
        now, before = self._read(), self._outside
        changes: dict[bytes, bytes | None] = {name: value for name, value in now.items() if before.get(name) != value}
        changes.update(dict.fromkeys(before.keys() - now.keys()))
        self._changes[rank] = changes
        self._apply({name: before.get(name) for name in changes})

    @staticmethod
    def _read() -> dict[bytes, bytes]:
        # What os.environ keeps; to read it through os.environ would decode all of it at every switch.
        return os.environ._data.copy()  # pyright: ignore[reportAttributeAccessIssue]

    @staticmethod
    def _apply(changes: dict[bytes, bytes | None]) -> None:
        for name, value in changes.items():
            if value is None:
                os.environb.pop(name, None)
            else:
                os.environb[name] = value


class MainModules:
    """The ``__main__`` of each rank of a script."""

    def __init__(self, modules: list[Any]):
        self._modules = modules
        self._outside = sys.modules["__main__"]

    def enter(self, rank: int) -> None:
        self._outside = sys.modules["__main__"]
        sys.modules["__main__"] = self._modules[rank]

    def leave(self, rank: int) -> None:
        sys.modules["__main__"] = self._outside


class CudaStreams:
    """The current stream of each rank on the GPU that they share."""

    def __init__(self, size: int, device: int):
        self.own = [torch.cuda.Stream(device) for _ in range(size)]
        self._streams = list(self.own)
        self._outside: Any = None

    def enter(self, rank: int) -> None:
        self._outside = torch.cuda.current_stream()
        torch.cuda.set_stream(self._streams[rank])

    def leave(self, rank: int) -> None:
        self._streams[rank] = torch.cuda.current_stream()
        torch.cuda.set_stream(self._outside)
