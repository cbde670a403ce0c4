"""Compiles a kernel for a target without the device, for real figures of shared memory, registers and spills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from iris._target import Target
from iris.runtime.launch import options_for


class _Driver:
    """Stands for the driver of a device that is not there: kernels ask it which vendor they are compiled for."""

    def __init__(self, target: Any):
        self._target = target

    def get_current_target(self) -> Any:
        return self._target


@contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Let kernels that are compiled in the block see ``target`` as the machine's own."""
    from triton.runtime import driver

    # Not `driver.active`, which looks for a device, nor `reset_active()`, which needs one.
    before = driver._active
    driver.set_active(_Driver(target.gpu_target()))  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        driver.set_active(before)  # pyright: ignore[reportArgumentType]


def compile_kernel(kernel: Any, target: Target, arguments: Mapping[str, Any], **options: Any) -> Any:
    """Compile ``kernel`` for ``target``.

    Args:
        kernel: a ``@triton.jit`` function, decorated while kernels are compiled (the ``gpu`` runtime).
        target: what to compile for; the device need not be there.
        arguments: for each parameter either a type name (``"*fp16"``, ``"i32"``) or, for ``tl.constexpr`` parameters
            and those to be specialised, a value; a tensor descriptor is ``"tensordesc<fp16[128, 64]>"``.
            Pointers are taken to be aligned to 16 bytes and ``"i32:16"`` to be a
            multiple of 16, as the launcher finds them: without it loads are narrow and loops are not pipelined.
        options: launch options of any vendor.

    Returns:
        Triton's compiled kernel: ``.metadata.shared`` in bytes, ``.asm["ptx"]`` or ``.asm["amdgcn"]``.
    """
    import triton
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for position, name in enumerate(kernel.arg_names):
        given = arguments[name]
        kind = given.removesuffix(":16") if isinstance(given, str) else ""
        if kind.startswith("*") or kind in ("i32", "i64"):
            signature[name] = kind
            if kind.startswith("*") or given != kind:
                attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(given, str) and given.startswith("tensordesc<"):
            signature[name] = given
        else:
            signature[name] = "constexpr"
            constants[name] = given
    with compiling_for(target):
        source = ASTSource(kernel, signature, constants, attributes)
        return triton.compile(source, target=target.gpu_target(), options=options_for(target.vendor, options))
