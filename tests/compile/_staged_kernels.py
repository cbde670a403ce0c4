"""The launches of all-gather + matmul with a staging buffer on a machine that is not here, for the compile matrix.

The call is prepared as it would be there, with the configuration that is chosen, and what it would launch is noted
down: so what is compiled is what runs.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import triton
import triton.language as tl
from _ccl_kernels import TYPES, Machine, kinds, noting

from iris.ops import _hbm_buffer
from iris.ops._all_gather_matmul_call import Call
from iris.ops._hbm_buffer_kernel import arrived_kernel, bring_kernel, carried_kernel, hbm_buffer_kernel, inputs_kernel
from iris.ops.arguments import Problem, letter
from iris.ops.choice import choose, staged
from iris.ops.staging import Staging
from iris.runtime.compile import compile_kernel
from iris.runtime.groups import Group

LARGE, SMALL = (8192, 4096, 8192), (200, 1000, 1040)


class _Machine(Machine):
    """As much of a context as a call takes. Tensors have sizes and no memory."""

    tracing = SimpleNamespace(enabled=False)

    def __init__(self, target, world):
        self.target, self.num_ranks, self.cur_rank = target, world, 0

    def get_device(self):
        return torch.device("meta")

    def capturing(self):
        return False


class NoDescriptors:
    """The target without its unit for descriptors."""

    def __init__(self, target):
        self._target = target

    descriptors = False

    def __getattr__(self, name):
        return getattr(self._target, name)


def tensor(M, N, transpose, dtype):
    if transpose == "T":
        return torch.empty(N, M, dtype=dtype, device="meta").t()
    return torch.empty(M, N, dtype=dtype, device="meta")


@contextmanager
def without_copies():
    """No copies and no streams for them: they launch nothing that depends on the problem."""
    with mock.patch.object(_hbm_buffer, "_copy"), mock.patch.object(Staging, "streams", return_value=[]):
        yield


def specialised(kernel, args, meta):
    """As :func:`_ccl_kernels.kinds`, with descriptors and what is left out."""
    arguments, options = kinds(kernel, [0 if _described(value) else value for value in args], meta)
    named = dict(zip(kernel.arg_names, args, strict=False))
    for name, value in named.items():
        if value is None:
            arguments[name] = None
        elif hasattr(value, "block_shape"):
            arguments[name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    return arguments, options


def _described(value):
    return value is None or hasattr(value, "block_shape")


def hbm(
    target,
    a_dtype,
    b_dtype,
    out_dtype,
    *,
    sizes=LARGE,
    world=8,
    gather_dim=1,
    transpose="NT",
    bias=False,
    scaled=False,
    activation="none",
    copied=False,
    tracing=False,
    descriptors=True,
    before=False,
):
    """What a call launches, with the configuration of :func:`iris.ops.choice.staged`; or what stands before copies."""
    machine = _Machine(target if descriptors else NoDescriptors(target), world)
    machine.tracing = SimpleNamespace(enabled=tracing)
    M, N, K = sizes
    rows, depth = (M, K // world) if gather_dim == 1 else (M // world, K)
    a, b = tensor(rows, depth, transpose[0], a_dtype), tensor(K, N, transpose[1], b_dtype)
    out = tensor(M, N, "N", out_dtype)
    added = torch.empty(N, dtype=torch.float32 if out_dtype != torch.int32 else out_dtype, device="meta")
    shape = (N,) if bias else None
    problem = Problem(
        M, N, K, a_dtype, b_dtype, out_dtype, world, gather_dim, shape, letter(a) + letter(b), activation, scaled
    )
    algorithm = "copy_engine" if copied else "hbm_buffer"
    plan = choose(machine, problem, algorithm, None, "")
    assert plan.config == staged(machine, problem, algorithm)
    scale = torch.empty(1, dtype=torch.float32, device="meta") if scaled else None
    call = Call(machine, problem, plan, out, a, b, added if bias else None, (scale, scale))
    members = Group(tuple(range(world)), 0)
    words = torch.empty(64, dtype=torch.int32)
    workspace = SimpleNamespace(staging=Staging(machine), locks=words, counters=words)
    with noting() as noted, without_copies():
        _hbm_buffer.run_hbm_buffer(
            machine, call, workspace, out, a, b, added if bias else None, (scale, scale), members
        )
    kernel, args, meta = noted[-1]
    assert kernel is hbm_buffer_kernel
    assert [kernel for kernel, *_ in noted[:-1]] == [inputs_kernel] * (copied and world > 1)
    arguments, options = specialised(kernel, args, meta)
    if before:
        kernel, args, meta = noted[0]
        return "staged inputs", kernel, *specialised(kernel, args, meta)
    config = plan.config
    tile = f"{config.block_size_m}x{config.block_size_n}x{config.block_size_k}"
    words = (
        f"dim={gather_dim}", f"world={world}", tile, f"warps={config.num_warps}", f"stages={config.num_stages}",
        "descriptors" if meta["DESCRIPTORS"] else "pointers", "copied" * meta["COPIED"], "bias" * bias,
        "scaled" * scaled, activation * (activation != "none"), "tracing" * tracing,
    )  # fmt: skip
    kind = f"{TYPES[a_dtype]}x{TYPES[b_dtype]}->{TYPES[out_dtype]} {transpose} {'x'.join(map(str, sizes))}"
    return f"staged {kind} {' '.join(filter(None, words))}", kernel, arguments, options


def helpers(target):
    """The kernels that stand around the copies."""
    one = {"num_warps": 1}
    half = torch.float16
    yield hbm(target, half, half, half, copied=True, before=True)
    yield "staged arrived", arrived_kernel, {"flag": "*i32"}, one
    pair = {"rank": "i32", "peer": "i32", "context": "*i64"}
    for kind in ("bf16", "i8"):
        brought = {"a_ptr": f"*{kind}", "staged_ptr": f"*{kind}", "count": "i32", "flag": "*i32", "BLOCK": 4096}
        yield f"staged bring {kind}", bring_kernel, brought | pair, {"num_warps": 4}
    yield "staged carried", carried_kernel, {"nbytes": "i32"} | pair, one


def paced_helpers():
    pair = {"rank": "i32", "peer": "i32", "context": "*i64"}
    yield "paced staged carried", carried_kernel, {"nbytes": "i32"} | pair, {"num_warps": 1}


def cover(target, more):
    """Few: what is chosen for a large problem; with ``more`` copies, another gather dimension, 8 bits, tracing."""
    yield from helpers(target)
    yield large(target)
    if more:
        half = torch.float16
        yield hbm(target, half, half, half, gather_dim=0, transpose="NN", copied=True, world=2)
        yield hbm(target, torch.int8, torch.int8, torch.int32, sizes=SMALL, tracing=True, descriptors=False)


def large(target, **given):
    return hbm(target, torch.bfloat16, torch.bfloat16, torch.bfloat16, bias=True, **given)


@triton.jit
def no_start(context, event_id: tl.constexpr, target_rank, pid_m, pid_n):
    tl.static_assert(False, "tracing is compiled in")


@triton.jit
def no_end(context, handle):
    tl.static_assert(False, "tracing is compiled in")


def without_tracing(target):
    """Whether the kernel compiles to the same where the functions of tracing do not compile, and what comes of it with
    tracing on."""
    (_, kernel, arguments, options), key = large(target), "ptx" if target.vendor == "nvidia" else "amdgcn"
    with_functions = compile_kernel(kernel, target, arguments, **options).asm[key]
    always = mock.patch.object(triton.knobs.compilation, "always_compile", True)
    with always, mock.patch.multiple("iris.device.tracing", start=no_start, end=no_end):
        same = compile_kernel(kernel, target, arguments, **options).asm[key] == with_functions
        causes = []
        try:
            compile_kernel(kernel, target, arguments | {"TRACING": True}, **options)
        except triton.CompilationError as raised:
            cause: BaseException | None = raised
            while cause is not None:
                causes.append(str(cause))
                cause = cause.__cause__
    return {"same": same, "errors": causes}


def product(target):
    """Every dtype with each transport and gather dimension, bfloat16 with every number of ranks; where there are
    descriptors both ways; odd sizes."""
    half = torch.bfloat16
    fp8 = [getattr(torch, name) for name in target.fp8]
    pairs = [(d, d) for d in (torch.float32, torch.float16, half, torch.int8, *fp8)] + ([tuple(fp8)] if fp8 else [])
    turn = 0
    for number, (a, b) in enumerate(pairs):
        for gather_dim in (0, 1):
            for world in (1, 2, 8) if a == half else ((2, 8)[(number + gather_dim) % 2],):
                turn += 1
                out = torch.int32 if a == torch.int8 else (half, torch.float16, torch.float32)[turn % 3]
                given = {
                    "world": world, "gather_dim": gather_dim, "transpose": "NN" if a.itemsize == 2 else "NT",
                    "bias": turn % 2 == 0, "copied": turn % 3 == 2, "tracing": turn % 4 == 1,
                    "scaled": a in fp8 and gather_dim == 0,
                    "activation": "none" if out == torch.int32 else ("none", "relu", "gelu", "silu")[turn % 4],
                }  # fmt: skip
                yield hbm(target, a, b, out, **given)
                if world == 2 and target.descriptors:
                    yield hbm(target, a, b, out, **given, descriptors=False)
        out = torch.int32 if a == torch.int8 else half
        yield hbm(target, a, b, out, sizes=SMALL, transpose=("TN", "TT")[number % 2], gather_dim=number % 2, bias=True)
