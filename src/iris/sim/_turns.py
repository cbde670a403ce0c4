"""Where a suspended program is, to tell one that goes round from one that counts its turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from iris.runtime.scheduler import Program

_DEEPEST = 3  # of values within values


def turn(program: Program) -> int:
    """Stands for the place of a program and its variables: a program that comes back to them goes round.

    Memory is not part of it: whoever compares two of them knows that none has changed in between.
    """
    frame, parts = program.coroutine.gr_frame, []
    while frame is not None:
        if "_iris_loop_turn" in frame.f_globals and frame.f_globals is not vars(interpreter):  # a kernel's
            values = tuple((name, _content(value, 0)) for name, value in frame.f_locals.items())
            parts.append((id(frame.f_code), frame.f_lasti, values))
        frame = frame.f_back
    return hash(tuple(parts))


def _content(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, tl.tuple):  # those of Triton 3.6 raise a ValueError for an attribute that they do not have
        value = value.values
    if isinstance(value, list | tuple) and depth < _DEEPEST:
        return tuple(_content(v, depth + 1) for v in value)
    data = getattr(getattr(value, "handle", None), "data", None)
    if isinstance(data, np.ndarray):
        return data.tobytes()
    if hasattr(value, "__dict__") and depth < _DEEPEST and not callable(value):  # an aggregate, or a constexpr
        return tuple(_content(v, depth + 1) for v in vars(value).values())
    return id(value)
