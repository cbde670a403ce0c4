"""The launches of iris.ccl on a machine that is not here, for the compile matrix.

Each collective is prepared as for a call, with the algorithm and programs that it chooses, and what it would launch is
noted down: so what is compiled is what runs.
"""

from contextlib import contextmanager

import torch

from iris.ccl import (
    Config,
    _copies,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    point_to_point,
    reduce,
    reduce_scatter,
    scatter,
)
from iris.ccl._calls import Request
from iris.runtime import channels, launch
from iris.runtime.groups import Group

TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8", torch.float8_e5m2fnuz: "fp8e5b16",
}  # fmt: skip
# Enough for the largest blocks, and for the smallest.
LARGE, SMALL = 1 << 22, 3000


class Machine:
    """As much of a context as preparing a call takes. Everything lies on its heap."""

    runtime = "gpu"
    gpu_id = 0

    def __init__(self, target, world):
        self.target = target
        self.num_ranks, self.cur_rank = world, 1
        layout = channels.layout(target, world)
        self.channels = channels.Channels(self, layout, torch.empty(layout.nbytes, dtype=torch.uint8))

    def resolve_group(self, group):
        return Group(tuple(range(self.num_ranks)), self.cur_rank)

    def group_members(self, members):
        return torch.empty(self.num_ranks, dtype=torch.int32)

    def get_device_context(self):
        return torch.empty(64, dtype=torch.int64)

    def get_device(self):
        return torch.device("cpu")

    def get_cu_count(self):
        return 304 if self.target.vendor == "amd" else 132

    def is_symmetric(self, tensor):
        return True


@contextmanager
def noting():
    """Launches are noted down instead: (kernel, arguments, meta) of each."""
    noted = []
    before = launch.start

    def start(ctx, kernel, grid, *args, **meta):
        noted.append((kernel, args, meta))

    launch.start = start
    try:
        yield noted
    finally:
        launch.start = before


def kinds(kernel, args, meta):
    """Arguments by name as the launcher specialises them, and launch options."""
    plain = {kernel.arg_names[i] if isinstance(i, int) else i for i in kernel.do_not_specialize or ()}
    named = dict(zip(kernel.arg_names, args, strict=False))
    arguments = {name: meta[name] for name in kernel.arg_names if name in meta}
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = "*" + TYPES[value.dtype]
        elif name in plain or (value not in (1,) and value % 16):
            arguments[name] = "i32"
        else:
            arguments[name] = 1 if value == 1 else "i32:16"
    return arguments, {name: value for name, value in meta.items() if name not in kernel.arg_names}


def launched(module, request, out, inp):
    """What a collective launches."""
    with noting() as noted:
        module(request).issue(request.ctx.channels, out, inp)
    (one,) = noted
    return one


def rings(target):
    """As :func:`launches`, the ring alone, of three ranks."""
    return [launch for launch in launches(target, 3) if " ring " in launch[0]]


def paced_helpers():
    arguments = {"nbytes": "i32", "members": "*i32", "index": "i32", "context": "*i64", "WORLD": 8}
    yield "paced all_gather copies", _copies.carried_kernel, arguments, {"num_warps": 1}


def launches(target, world, full=False):
    """(name, kernel, arguments, options) of what collectives of ``world`` ranks launch; with ``full`` of more types."""
    ctx = Machine(target, world)
    half, fp8 = torch.bfloat16, [getattr(torch, name) for name in target.fp8[:1]]

    def flat(n, dtype):
        return torch.empty(n, dtype=dtype)

    def strided(n, dtype):
        return torch.empty(n // 512, 1024, dtype=dtype)[:, :512]

    def one(name, prepare, request, out, inp):
        kernel, args, meta = launched(prepare, request, out, inp)
        arguments, options = kinds(kernel, args, meta)
        sizes = f"block={meta['BLOCK']} warps={meta['num_warps']}"
        return f"ccl {name} world={world} {sizes}", kernel, arguments, options

    def reducing(variant, dtype, make=flat, n=LARGE, op=None):
        out, inp = make(n, dtype), make(n, dtype)
        request = all_reduce._request(ctx, out, inp, op, None, Config(all_reduce_variant=variant))
        name = f"all_reduce {variant} {TYPES[dtype]} {make.__name__} {n}"
        return one(name, all_reduce._prepare, request, out, inp)

    # The largest that the table gives to push.
    yield reducing("push", half, n=1 << 17)
    yield reducing("push", half, n=SMALL)
    yield reducing("two_shot", half)
    yield reducing("two_shot", torch.float32, strided)
    yield reducing("one_shot", half, n=SMALL)
    if full or world < 8:  # where the steps of a large ring take seconds to compile
        yield reducing("ring", half)
    yield reducing("atomic", half)
    yield reducing("spinlock", torch.float32)
    if full:
        for dtype in (torch.float32, torch.float16, torch.int8, torch.int64, *fp8):
            # Those that read everything are for small tensors.
            for variant in ("push", "one_shot"):
                yield reducing(variant, dtype, n=(1 << 18) // dtype.itemsize)
            for variant in ("two_shot", "ring", "atomic", "spinlock"):
                yield reducing(variant, dtype)
        for variant, n in (("push", 1 << 17), ("two_shot", LARGE), ("ring", LARGE)):
            for op in (1, 3, 7):
                yield reducing(variant, half, strided, n, op)
    for dtype, variant, make in ((half, "persistent", flat), (torch.int8, "partitioned", strided)):
        inp = make(LARGE, dtype)
        out = torch.empty(world * inp.shape[0], *inp.shape[1:], dtype=dtype)
        request = all_gather._request(ctx, out, inp, None, Config(all_gather_variant=variant), 0)
        yield one(f"all_gather {variant} {TYPES[dtype]} {make.__name__}", all_gather._prepare, request, out, inp)
    with noting() as noted:
        _copies.meetings(ctx, "all_gather", ctx.resolve_group(None))(ctx.channels)
    ((kernel, args, meta),) = noted
    yield f"ccl all_gather copy_engine meeting world={world}", kernel, *kinds(kernel, args, meta)
    wide = torch.empty(4096, world * 512, dtype=half)
    request = all_to_all._request(ctx, torch.empty_like(wide), wide, None, Config(all_to_all_variant="default"), -1)
    yield one("all_to_all bf16 columns", all_to_all._prepare, request, *request.tensors.values())
    whole, part = flat(world * LARGE, half), flat(LARGE, half)
    request = reduce_scatter._request(ctx, part, whole, None, None, Config(reduce_scatter_variant="two_shot"))
    yield one("reduce_scatter bf16", reduce_scatter._prepare, request, part, whole)
    request = reduce_scatter._request(ctx, torch.empty_like(wide), wide, None, None, None)
    yield one("reduce_scatter tiles bf16", reduce_scatter._prepare, request, *request.tensors.values())
    for variant in ("direct", "scatter_allgather"):
        request = broadcast._request(ctx, part, part, 1, None, Config(broadcast_variant=variant))
        yield one(f"broadcast {variant} bf16", broadcast._prepare, request, part, part)
    request = reduce._request(ctx, torch.empty_like(part), part, 1, None, None, None)
    yield one("reduce bf16", reduce._prepare, request, *request.tensors.values())
    request = gather._request(ctx, whole, part, 1, None, None)
    yield one("gather bf16", gather._prepare, request, whole, part)
    request = scatter._request(ctx, part, whole, 1, None, None)
    yield one("scatter bf16", scatter._prepare, request, part, whole)
    tensors = {"output_tensor": None, "tensor": part}
    facts = point_to_point._facts(part, 1, 2, 0, None)
    request = Request(ctx, "send/recv", Group((1, 2), 0), None, tensors, facts, ())
    yield one("send bf16", point_to_point._prepare_pair, request, None, part)
