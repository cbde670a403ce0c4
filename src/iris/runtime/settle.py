"""Which runtime this process uses. Settled when ``iris`` is imported, before any kernel is decorated."""

from __future__ import annotations

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
        if "triton" in sys.modules and _triton_interprets() != interpreted:
            raise RuntimeConflict(
                f"iris settles on the {runtime} runtime ({reason}), but Triton was imported for "
                f"{'compiled' if interpreted else 'interpreted'} kernels before it. Import iris before triton, or start "
                f"Python with TRITON_INTERPRET={'1' if interpreted else '0'}"
            )
        if interpreted:
            os.environ["TRITON_INTERPRET"] = "1"
            from iris.runtime.interpreter import install

            install()
        _settled = (runtime, reason)
    return _settled[0]


def settled() -> tuple[str, str]:
    """(runtime, why) as :func:`settle` chose."""
    settle()
    assert _settled is not None
    return _settled


def _triton_interprets() -> bool:
    import triton.language as tl

    # Triton decorates its own library when it is imported, in the mode of that moment.
    return type(tl.standard.softmax).__name__ == "InterpretedFunction"
