"""The launches of matmul + all-gather on a machine that is not here, for the compile matrix.

The call is checked and planned as it would be there, with the tiles that are chosen, and what it would launch is noted
down: so what is compiled is what runs.
"""

from types import SimpleNamespace

import torch
from _ccl_kernels import TYPES, Machine, noting
from _staged_kernels import LARGE, SMALL, NoDescriptors, specialised, tensor

from iris.ops import _matmul_all_gather
from iris.ops._matmul_all_gather import OPERATION, checked
from iris.ops._matmul_all_gather_kernel import matmul_all_gather_kernel
from iris.ops._matmul_reduce_call import Asked
from iris.runtime.groups import Group


class _Machine(Machine):
    """As much of a context as a call takes. Tensors have sizes and no memory."""

    def __init__(self, target, world, tracing):
        self.target, self.num_ranks, self.cur_rank = target, world, 0
        self.tracing = SimpleNamespace(enabled=tracing)

    def get_device(self):
        return torch.device("meta")


def gather(
    target, a_dtype, b_dtype, out_dtype, *, sizes=LARGE, world=8, transpose="NT", bias=False, scaled=False,
    activation="none", tracing=False, descriptors=True,
):  # fmt: skip
    """What a call of rank 0 launches; ``sizes`` are those of the product of all ranks."""
    machine = _Machine(target if descriptors else NoDescriptors(target), world, tracing)
    members = Group(tuple(range(world)), 0)
    M, N, K = sizes
    rows = M // world
    a, b = tensor(rows, K, transpose[0], a_dtype), tensor(K, N, transpose[1], b_dtype)
    out = tensor(rows * world, N, "N", out_dtype)
    kind = torch.float32 if out_dtype != torch.int32 else out_dtype
    added = torch.empty(N, dtype=kind, device="meta") if bias else None
    scale = torch.empty(1, dtype=torch.float32, device="meta") if scaled else None
    asked = Asked(OPERATION, "fused", None, activation, (scale, scale), None)
    call = checked(machine, members, asked, out, a, b, added)
    words = torch.empty(64, dtype=torch.int32)
    workspace = SimpleNamespace(queue=words, locks=words, counters=words)
    with noting() as noted:
        _matmul_all_gather._run_kernel(machine, call, workspace, out, a, b, added, (scale, scale), members)
    ((kernel, args, meta),) = noted
    assert kernel is matmul_all_gather_kernel
    config = call.plan.config
    words = (
        f"world={world}", f"{config.block_size_m}x{config.block_size_n}x{config.block_size_k}",
        f"warps={config.num_warps}", f"stages={config.num_stages}",
        "descriptors" if meta["DESCRIPTORS"] else "pointers", "bias" * bias, "scaled" * scaled,
        activation * (activation != "none"), "tracing" * tracing,
    )  # fmt: skip
    kind = f"{TYPES[a_dtype]}x{TYPES[b_dtype]}->{TYPES[out_dtype]} {transpose} {'x'.join(map(str, sizes))}"
    return f"gather {kind} {' '.join(filter(None, words))}", kernel, *specialised(kernel, args, meta)


def cover(target, more):
    """Few, since each takes seconds: a large problem; with ``more`` odd sizes, 8 bits, tracing."""
    half = torch.bfloat16
    yield gather(target, half, half, half, bias=True)
    if more:
        yield gather(target, torch.int8, torch.int8, torch.int32, sizes=SMALL, world=3, tracing=True)


def product(target):
    """Every dtype with every number of ranks, and where there are descriptors both ways."""
    half = torch.bfloat16
    fp8 = [getattr(torch, name) for name in target.fp8]
    pairs = [(d, d) for d in (torch.float32, torch.float16, half, torch.int8, *fp8)] + ([tuple(fp8)] if fp8 else [])
    turn = 0
    for a, b in pairs:
        for world in (1, 2, 8):
            turn += 1
            out = torch.int32 if a == torch.int8 else (half, torch.float16, torch.float32)[turn % 3]
            epilogue = {"bias": turn % 2 == 0, "tracing": turn % 4 == 1, "scaled": a in fp8 and turn % 2 == 1}
            if out != torch.int32:
                epilogue["activation"] = ("none", "relu", "gelu", "silu", "none")[turn % 5]
            wide = a.itemsize == 2 and turn % 4 < 2
            given = epilogue | {"world": world, "transpose": "NN" if wide else "NT"}
            yield gather(target, a, b, out, **given)
            if world == 2 and target.descriptors:
                yield gather(target, a, b, out, **given, descriptors=False)
        out = torch.int32 if a == torch.int8 else half
        yield gather(target, a, b, out, sizes=SMALL, world=3, transpose="TN", bias=True)
