"""Compiles the kernels of iris.concurrent for one architecture and prints what came of it as JSON; no GPU is needed.

    IRIS_RUNTIME=gpu python _concurrent_worker.py gfx942 cover

A call is checked as it would be on such a machine, with the tiles that are chosen there, and what it would launch is
noted down: so what is compiled is what runs. ``cover`` is every collective once, ``product`` more dtypes and sizes.
"""

import json
import sys
from types import SimpleNamespace

import torch
import triton
from _ccl_kernels import TYPES, Machine, noting
from _compile_worker import ordering, stack_bytes
from _staged_kernels import LARGE, SMALL, NoDescriptors, specialised, tensor

from iris import _target
from iris.concurrent import _call
from iris.concurrent._call import Asked, Call
from iris.concurrent._collectives import COLLECTIVES
from iris.concurrent._two_queue_kernel import two_queue_kernel
from iris.runtime.compile import compile_kernel
from iris.runtime.groups import Group

HALF = torch.bfloat16


class _Machine(Machine):
    """As much of a context as a call takes. Tensors have sizes and no memory."""

    def __init__(self, target, world, tracing=False):
        self.target, self.num_ranks, self.cur_rank = target, world, min(1, world - 1)
        self.tracing = SimpleNamespace(enabled=tracing)

    def get_device(self):
        return torch.device("meta")


def launched(
    target, name, dtype=HALF, moved=HALF, *, sizes=LARGE, comm=(4096, 4096), world=8, transpose="NT", mode="fused",
    tracing=False, descriptors=True,
):  # fmt: skip
    """(name, kernel, arguments, options) of what a rank launches."""
    machine = _Machine(target if descriptors else NoDescriptors(target), world, tracing)
    M, N, K = sizes
    a, b = tensor(M, K, transpose[0], dtype), tensor(K, N, transpose[1], dtype)
    src = tensor(*comm, "N", moved)
    members = Group(tuple(range(world)), machine.cur_rank)
    call = Call(machine, name, Asked(mode=mode, root=0), members, a, b, src, None, None)
    c, dst = call.new_c(machine), tensor(*call.dst_shape, "N", moved)
    words = torch.empty(64, dtype=torch.int32)
    workspace = SimpleNamespace(queue=words, flags=words, counters=words, alone=words)
    with noting() as noted:
        if mode == "fused":
            grid = call.programs.multiplying + call.programs.exchanging
            _call._start(machine, call, workspace, a, b, src, c, dst, grid, True, True)
        else:
            _call._start(machine, call, workspace, a, b, src, c, dst, call.programs.exchanging, False, True)
            _call._start(machine, call, workspace, a, b, src, c, dst, call.programs.multiplying, True, False)
    for kernel, args, meta in noted:
        assert kernel is two_queue_kernel
        half = "both" if meta["MULTIPLIES"] and meta["EXCHANGES"] else "gemm" if meta["MULTIPLIES"] else "comm"
        tile = f"{meta['BLOCK_M']}x{meta['BLOCK_N']}x{meta['BLOCK_K']}"
        comm_tile = f"{meta['TILE_M']}x{meta['TILE_N']}"
        words = (
            half, name, TYPES[dtype], transpose, "x".join(map(str, sizes)), f"moves {TYPES[moved]}", f"world={world}",
            tile, comm_tile, f"warps={meta['num_warps']}", f"stages={meta['num_stages']}",
            "descriptors" if meta["DESCRIPTORS"] else "pointers", "tracing" * tracing,
        )  # fmt: skip
        yield " ".join(filter(None, words)), kernel, *specialised(kernel, args, meta)


def cover(target):
    """Few, since each takes seconds: what adds and pushes, what fetches, and two kernels."""
    yield from launched(target, "all_reduce")
    yield from launched(target, "all_to_all", torch.float16)
    yield from launched(target, "all_gather", mode="concurrent")


def product(target):
    fp8 = [getattr(torch, name) for name in target.fp8]
    for name in COLLECTIVES:
        for moved in (torch.float32, torch.float64, torch.int8):
            yield from launched(target, name, moved=moved, world=3, sizes=SMALL, comm=(1001, 333), tracing=True)
        yield from launched(target, name)
        yield from launched(target, name, mode="concurrent")
    for dtype in (torch.float32, torch.float16, torch.int8, *fp8):
        yield from launched(target, "all_reduce", dtype)
        yield from launched(target, "all_reduce", dtype, sizes=SMALL, transpose="TN", world=2)
        yield from launched(target, "all_gather", dtype, sizes=(1, 4096, 4096), world=1)
        if target.descriptors:
            yield from launched(target, "reduce_scatter", dtype, descriptors=False)


def main(arch, selection):
    target = _target.by_arch(arch)
    records = {}
    for name, kernel, arguments, options in (cover if selection == "cover" else product)(target):
        record = records[name] = {"error": ""}
        try:
            compiled = compile_kernel(kernel, target, arguments, **options)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the finding
            record["error"] = f"{type(error).__name__}: {error}"[-2000:]
            continue
        record["shared"] = compiled.metadata.shared
        record["stack"] = stack_bytes(target, compiled)
        record["ordering"] = ordering(target, compiled) if selection == "cover" else []
    print(json.dumps({"triton": triton.__version__, "arch": arch, "records": records}))


if __name__ == "__main__":
    main(*sys.argv[1:])
