"""Traces: recording what kernels did (``ctx.tracing``), files for Chrome's and Perfetto's viewers, figures, pictures.

What runs in kernels is :mod:`iris.device.tracing`; :func:`start` and :func:`end` are its functions for kernels without
a ``DeviceContext``. Reading and drawing need neither torch nor Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from iris._events import EVENT_NAMES

if TYPE_CHECKING:
    from iris.device.tracing import DeviceTracing, TraceEvent, end, start
    from iris.tracing.chrome import Span, Trace, read
    from iris.tracing.recorder import Tracing

__all__ = ["EVENT_NAMES", "DeviceTracing", "Span", "Trace", "TraceEvent", "Tracing", "end", "read", "start"]

_HOMES = {
    "DeviceTracing": "iris.device.tracing",
    "TraceEvent": "iris.device.tracing",
    "end": "iris.device.tracing",
    "start": "iris.device.tracing",
    "Span": "iris.tracing.chrome",
    "Trace": "iris.tracing.chrome",
    "read": "iris.tracing.chrome",
    "Tracing": "iris.tracing.recorder",
}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: `iris trace` reads files without torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'iris.tracing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
