"""Compiles a kernel without tracing, with it turned off and with it turned on, and prints the texts as JSON.

    IRIS_RUNTIME=gpu python _compile_worker.py sm_90 gfx942

A process of its own, because kernels are either compiled or interpreted, which is settled when iris is imported.
"""

import json
import re
import sys

import triton
import triton.language as tl

import iris
from iris import _target
from iris.runtime.compile import compile_kernel
from iris.tracing._clock_kernel import stamp_kernel


@triton.jit
def plain_kernel(context, src, dst, flags, n, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for peer in range(world):
        ctx.put(src + offs, dst + offs, peer, mask=offs < n)
        ctx.notify_add(flags, 1, peer)
    ctx.wait(flags, world)


@triton.jit
def traced_kernel(
    context, src, dst, flags, n, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr, ON: tl.constexpr
):
    ctx = iris.DeviceContext.initialize(context, rank, world, tracing=ON)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for peer in range(world):
        mask = offs < n
        span = ctx.tracing.record_event_start(iris.TraceEvent().put, peer, dst + offs, tl.program_id(0), 7, mask=mask)
        ctx.put(src + offs, dst + offs, peer, mask=offs < n)
        ctx.tracing.record_event_end(span)
        ctx.notify_add(flags, 1, peer)
    if ON:
        waited = iris.tracing.start(context, 3072)
    ctx.wait(flags, world)
    if ON:
        iris.tracing.end(context, waited)


ARGUMENTS = {"context": "*i64", "src": "*fp16", "dst": "*fp16", "flags": "*i32", "n": "i32"}
ARGUMENTS |= {"rank": 1, "world": 3, "BLOCK": 1024}
STAMPS = {"stamps": "*i64", "flags": "*i32", "epochs": "*i32", "members": "*i32", "size": "i32", "context": "*i64"}
STAMPS |= {"ROUNDS": 8, "KERNEL": 1}


def text_of(kernel, target, arguments, num_warps=4):
    """The kernel's assembly without its name, and without what says on which lines of the source it stood."""
    compiled = compile_kernel(kernel, target, arguments, num_warps=num_warps)
    text = compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"].replace(kernel.__name__, "kernel")
    text = re.sub(r"(;|//).*", "", text)  # of PTX, everything after an instruction; of amdgcn, comments
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def main():
    found = {}
    for arch in sys.argv[1:]:
        target = _target.by_arch(arch)
        found[arch] = {
            "plain": text_of(plain_kernel, target, ARGUMENTS),
            "off": text_of(traced_kernel, target, ARGUMENTS | {"ON": False}),
            "on": text_of(traced_kernel, target, ARGUMENTS | {"ON": True}),
            "stamps": text_of(stamp_kernel, target, STAMPS, num_warps=1),
        }
    print(json.dumps(found))


main()
