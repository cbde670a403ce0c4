"""The kernel of :mod:`iris.tracing.clocks`."""

import triton
import triton.language as tl

from iris.device import _asm
from iris.x.barrier import device_barrier_kernel


@triton.jit
def stamp_kernel(stamps, flags, epochs, members, size, context, ROUNDS: tl.constexpr, KERNEL: tl.constexpr):
    """Read the clock before and after each of some barriers; one program."""
    for i in range(ROUNDS):
        tl.store(stamps + 2 * i, _asm.ticks())
        device_barrier_kernel(flags, epochs, members, size, context, KERNEL)
        tl.store(stamps + 2 * i + 1, _asm.ticks())
