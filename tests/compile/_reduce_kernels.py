"""The launches of matmul + reduce-scatter and + all-reduce on a machine that is not here, for the compile matrix.

The call is checked and planned as it would be there, with the tiles that are chosen, and what it would launch is noted
down: so what is compiled is what runs.
"""

from types import SimpleNamespace

import torch
from _ccl_kernels import TYPES, Machine, noting
from _staged_kernels import LARGE, SMALL, NoDescriptors, specialised, tensor

from iris.ops import _matmul_reduce, _moving_sums
from iris.ops._matmul_all_reduce_atomic_kernel import matmul_all_reduce_atomic_kernel
from iris.ops._matmul_all_reduce_ring_kernel import matmul_all_reduce_ring_kernel
from iris.ops._matmul_reduce_call import ALGORITHMS, ALL_REDUCE, REDUCE_SCATTER, Asked, checked
from iris.ops._matmul_reduce_kernel import matmul_reduce_kernel
from iris.runtime.groups import Group

VARIANTS = ("fused", "two_shot", "one_shot", *_moving_sums.ALGORITHMS)
_KERNELS = {
    "atomic": matmul_all_reduce_atomic_kernel,
    "spinlock": matmul_all_reduce_atomic_kernel,
    "ring": matmul_all_reduce_ring_kernel,
}


class _Machine(Machine):
    """As much of a context as a call takes. Tensors have sizes and no memory."""

    def __init__(self, target, world, tracing):
        self.target, self.num_ranks, self.cur_rank = target, world, 0
        self.tracing = SimpleNamespace(enabled=tracing)

    def get_device(self):
        return torch.device("meta")


def reduce(
    target, variant, a_dtype, b_dtype, out_dtype, *, sizes=LARGE, world=8, transpose="NT", bias=False, scaled=False,
    activation="none", tracing=False, descriptors=True,
):  # fmt: skip
    """What a call of rank 0 launches."""
    machine = _Machine(target if descriptors else NoDescriptors(target), world, tracing)
    members = Group(tuple(range(world)), 0)
    operation = REDUCE_SCATTER if variant == "fused" else ALL_REDUCE
    assert variant in ALGORITHMS[operation]
    M, N, K = sizes
    a, b = tensor(M, K, transpose[0], a_dtype), tensor(K, N, transpose[1], b_dtype)
    out = tensor(-(-M // world) if operation == REDUCE_SCATTER else M, N, "N", out_dtype)
    kind = torch.float32 if out_dtype != torch.int32 else out_dtype
    added = torch.empty(N, dtype=kind, device="meta") if bias else None
    scale = torch.empty(1, dtype=torch.float32, device="meta") if scaled else None
    asked = Asked(operation, variant, None, activation, (scale, scale), None)
    call = checked(machine, members, asked, out, a, b, added)
    words = torch.empty(64, dtype=torch.int32)
    memory = SimpleNamespace(arrived=words, queue=words, locks=words, counters=words)
    memory.buffer = torch.empty(call.schedule.nbytes, dtype=torch.uint8, device="meta")
    memory.sizes = (call.schedule.nbytes, call.schedule.flags)
    memory.get = lambda nbytes, flags: memory
    memory.sums = lambda count, flags, dtype: (torch.empty(count, dtype=dtype, device="meta"), words)
    workspace = SimpleNamespace(partials=memory)
    with noting() as noted:
        _matmul_reduce._issue(machine, call, workspace, out, a, b, added, asked, members)
    ((kernel, args, meta),) = noted
    assert kernel is _KERNELS.get(variant, matmul_reduce_kernel)
    config = call.plan.config
    words = (
        f"world={world}", f"{config.block_size_m}x{config.block_size_n}x{config.block_size_k}",
        f"warps={config.num_warps}", f"stages={config.num_stages}",
        "descriptors" if meta["DESCRIPTORS"] else "pointers", "bias" * bias, "scaled" * scaled,
        activation * (activation != "none"), "tracing" * tracing,
    )  # fmt: skip
    kind = f"{TYPES[a_dtype]}x{TYPES[b_dtype]}->{TYPES[out_dtype]} {transpose} {'x'.join(map(str, sizes))}"
    return f"reduce {variant} {kind} {' '.join(filter(None, words))}", kernel, *specialised(kernel, args, meta)


def cover(target, more):
    """Few, since each takes seconds: a large problem; with ``more`` the other kernels, pointers and odd sizes."""
    half = torch.bfloat16
    yield reduce(target, "fused", half, half, half, bias=True)
    if more:
        yield reduce(target, "ring", half, half, half, bias=True)
        yield reduce(target, "atomic", half, half, half, bias=True)
        yield reduce(target, "one_shot", torch.float16, torch.float16, torch.float16, sizes=SMALL, descriptors=False)
        yield reduce(target, "two_shot", torch.int8, torch.int8, torch.int32, sizes=SMALL, world=3, tracing=True)


def product(target):
    """Every dtype with each variant and number of ranks, and where there are descriptors both ways."""
    half = torch.bfloat16
    fp8 = [getattr(torch, name) for name in target.fp8]
    pairs = [(d, d) for d in (torch.float32, torch.float16, half, torch.int8, *fp8)] + ([tuple(fp8)] if fp8 else [])
    turn = 0
    for a, b in pairs:
        for variant in VARIANTS:
            for world in (1, 2, 8):
                turn += 1
                out = torch.int32 if a == torch.int8 else (half, torch.float16, torch.float32)[turn % 3]
                epilogue = {"bias": turn % 2 == 0, "tracing": turn % 4 == 1, "scaled": a in fp8 and turn % 2 == 1}
                if out != torch.int32:
                    epilogue["activation"] = ("none", "relu", "gelu", "silu", "none")[turn % 5]
                wide = a.itemsize == 2 and turn % 4 < 2
                given = epilogue | {"world": world, "transpose": "NN" if wide else "NT"}
                yield reduce(target, variant, a, b, out, **given)
                if world == 2 and target.descriptors:
                    yield reduce(target, variant, a, b, out, **given, descriptors=False)
        out = torch.int32 if a == torch.int8 else half
        yield reduce(target, VARIANTS[turn % 3], a, b, out, sizes=SMALL, world=3, transpose="TN", bias=True)
