"""Which runtime this process uses. Settled when ``iris`` is imported, before any kernel is decorated."""

from __future__ import annotations

import gc
import os
import sys

from iris import _env
from iris.errors import RuntimeConflict

_ON = ("1", "true", "yes", "on", "y")
_settled: tuple[str, str] | None = None


def gpu_visible() -> bool:
    """Whether PyTorch sees a GPU. Does not create a device context, so a later fork may still use the GPU."""
    import torch

    return torch.cuda.device_count() > 0


def choose() -> tuple[str, str]:
    """The runtime (``gpu``, ``cpu`` or ``sim``) and why, from the environment and the machine."""
    wanted = _env.get("IRIS_RUNTIME")
    if wanted != "auto":
        return wanted, f"IRIS_RUNTIME={wanted}"
    if os.environ.get("TRITON_INTERPRET", "").strip().lower() in _ON:
        return "cpu", "TRITON_INTERPRET is set"
    if gpu_visible():
        return "gpu", "a GPU is visible"
    return "cpu", "no GPU is visible"


def settle() -> str:
    """Choose the runtime, make Triton agree with it, and return it. Later calls return the first answer.

    Raises:
        RuntimeConflict: Triton was imported, or TRITON_INTERPRET set, for the other kind of runtime.
        EnvironmentValueError: an IRIS_ variable has an unknown value.
    """
    global _settled
    if _settled is None:
        _env.check_all()
        runtime, reason = choose()
        interpreted = runtime != "gpu"
        in_environment = os.environ.get("TRITON_INTERPRET", "").strip().lower() in _ON
        if in_environment and not interpreted:
            raise RuntimeConflict(
                "IRIS_RUNTIME=gpu compiles kernels, but TRITON_INTERPRET is set. Unset TRITON_INTERPRET, or take "
                "IRIS_RUNTIME=cpu"
            )
        compiled_library = "triton" in sys.modules and not _triton_interprets()
        if interpreted:
            os.environ["TRITON_INTERPRET"] = "1"
            if compiled_library:
                _refuse_compiled_kernels(runtime, reason)
            from iris.runtime.interpreter import install, interpret_library

            install()
            if compiled_library:
                interpret_library()
        _settled = (runtime, reason)
    return _settled[0]


def settled() -> tuple[str, str]:
    """(runtime, why) as :func:`settle` chose."""
    settle()
    assert _settled is not None
    return _settled


def _refuse_compiled_kernels(runtime: str, reason: str) -> None:
    """Raise when a kernel was decorated before the runtime was settled, for the wrong kind of runtime."""
    from triton.runtime.jit import JITFunction

    names = sorted(
        f"{thing.fn.__module__}.{thing.fn.__qualname__}"
        for thing in gc.get_objects()
        if issubclass(type(thing), JITFunction) and not thing.fn.__module__.startswith("triton.")
    )
    if names:
        raise RuntimeConflict(
            f"iris settles on the {runtime} runtime ({reason}), which interprets kernels, but these were decorated "
            f"before iris was imported and are compiled: {', '.join(names[:5])}. Import iris above them, or start "
            "Python with TRITON_INTERPRET=1"
        )


def _triton_interprets() -> bool:
    import triton.language as tl

    # Triton decorates its own library when it is imported, in the mode of that moment.
    return type(tl.standard.softmax).__name__ == "InterpretedFunction"
