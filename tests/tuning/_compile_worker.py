"""Compiles a few kernels through the compile-only mode, as tuning does, for a device that is not here; prints JSON.

A process of its own, because kernels are either compiled or interpreted, which is settled when iris is imported.
"""

import json
import os
import tempfile
from types import SimpleNamespace

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import triton
import triton.language as tl

import iris  # noqa: F401
from iris import _target
from iris.runtime import launch
from iris.runtime.compile import _Driver
from iris.tuning.autotune import compile_all


@triton.jit
def copy_kernel(source, target, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + offs, tl.load(source + offs, offs < n), offs < n)


@triton.jit
def product_kernel(a, b, c, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    place = at[:, None] * BLOCK + at[None, :]
    tl.store(c + place, tl.dot(tl.load(a + place), tl.load(b + place)))


@triton.jit
def wrong_kernel(source, BLOCK: tl.constexpr):
    tl.store(source, tl.arange(0, BLOCK) + no_such_name)  # noqa: F821


class Driver(_Driver):
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def main():
    target = _target.KNOWN["h200"]
    triton.runtime.driver.set_active(Driver(target.gpu_target()))
    ctx = SimpleNamespace(target=target, kept_launches=None)
    x = torch.zeros(4096, dtype=torch.float16)
    with launch.compiling(ctx) as launches:
        assert launch.start(ctx, copy_kernel, (4,), x, x, 4096, BLOCK=1024, num_warps=4, waves_per_eu=2) is None
        assert launch.start(ctx, wrong_kernel, (1,), x, BLOCK=16) is None
        launch.start(ctx, product_kernel, (1,), x, x, x.float(), BLOCK=64, num_warps=4)
        launch.start(ctx, copy_kernel, (8,), x, x, 4096, BLOCK=1024, num_warps=4)  # the first once more
        launch.start(ctx, copy_kernel, (4,), x[1:], x, 4096, BLOCK=1024, num_warps=4)  # not aligned
        launch.start(ctx, copy_kernel, (0,), x, x, 0, BLOCK=1024)  # nothing would be started
    first = compile_all(launches, target.shared_memory_bytes, load=False)
    again = compile_all(launches, target.shared_memory_bytes, load=False)
    small = compile_all(launches, 1024, load=False)
    (kernels,) = [caches[0] for device, caches in copy_kernel.device_caches.items() if device == 0]
    found = {
        "launches": len(launches),
        "references": [type(arg).__name__ for arg in launches[0].args],
        "first": first,
        "again": again,
        "small": small,
        "copies": len(kernels),
        "kept": ctx.kept_launches is None,
        "nothing": compile_all([], 1),
        "compiled": sorted(type(kernel).__name__ for kernel in kernels.values()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
