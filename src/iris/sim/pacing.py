"""Turns the imitated link of :mod:`iris.device.link` on and off for kernels that are compiled from now on."""

from __future__ import annotations

import gc

import triton.language as tl

from iris.device import link


def set_paced(paced: bool) -> None:
    """Let kernels pace what they read from and write to peers, or not.

    Triton refuses to run a kernel whose globals have changed since it was compiled, so every kernel of the process is
    compiled anew (from Triton's cache on disk when it was compiled that way before).
    """
    from triton.runtime.jit import JITFunction

    if link.LINK_PACED.value == paced:
        return
    link.LINK_PACED = tl.constexpr(paced)
    for thing in gc.get_objects():
        if issubclass(type(thing), JITFunction):
            thing.hash = None
            thing.used_global_vals = {}
            thing.device_caches.clear()
