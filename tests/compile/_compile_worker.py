"""Compiles the package's kernels for one architecture and prints what came of it as JSON; no GPU is needed.

    IRIS_RUNTIME=gpu python _compile_worker.py gfx942 cover

``cover`` is the device API, the barrier, the functions of tiles, what collectives of eight ranks launch (where
:data:`COLLECTIVES` has the architecture), a selection of ``pull`` kernels in which every dtype, transpose, gather
dimension and shipped configuration occurs, a few with a staging buffer and a few that reduce or gather products;
``product`` is every dtype with every configuration and gather dimension. A process of its own, because kernels are
either compiled or interpreted, which is settled when iris is imported.
"""

import json
import re
import subprocess
import sys
import tempfile

import _gather_kernels as gathering
import _reduce_kernels as reducing
import _staged_kernels as staging
import torch
import triton
import triton.language as tl
from _ccl_kernels import launches, paced_helpers, rings
from _tile_kernels import tiles

import iris
from iris import _target
from iris.device import link
from iris.ops._all_gather_matmul_kernel import pull_kernel
from iris.ops.arguments import Problem
from iris.ops.choice import fitted, precision
from iris.runtime.compile import compile_kernel
from iris.sim import pacing
from iris.x.barrier import device_barrier_kernel

WORLD, N, K = 8, 4096, 8192
# One of each vendor; the slow tests have all.
COLLECTIVES = ("sm_90", "gfx942")
ROWS = (1, 16, 64, 128, 4096)
TRANSPOSES = ("NN", "NT", "TN", "TT")
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2fnuz: "fp8e5b16",
}
LOAD_MODIFIERS = (None, ".ca", ".cg", ".cv")
STORE_MODIFIERS = (None, ".wb", ".cg", ".cs", ".wt")


@triton.jit
def memory_kernel(source, target, n, rank, peer, bases, BLOCK: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    value = iris.load(source + offs, rank, peer, bases, mask, 0, LOAD, False, 16)
    iris.store(target + offs, value, rank, peer, bases, mask, None, STORE)
    iris.get(source + n + offs, target + n + offs, rank, peer, bases, mask, 0, LOAD, STORE)
    iris.put(source + 2 * n + offs, target + 2 * n + offs, rank, peer, bases, mask, 0, LOAD, STORE, 8)
    iris.copy(source + 3 * n + offs, target + 3 * n + offs, peer, rank, rank, bases, mask, 0, LOAD, STORE)
    tl.store(target + 4 * n + offs, iris.load(source + offs, rank, peer, bases, mask, 0, None, True), mask=mask)


@triton.jit
def whole_kernel(source, target, rank, peer, bases, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    iris.store(target + offs, iris.load(source + offs, rank, peer, bases), rank, peer, bases)


@triton.jit
def charge_kernel(ticks, nbytes, rank, peer, bases):
    tick = link.charge(nbytes, rank, peer, bases)
    link.carried(tick)
    tl.store(ticks, tick)


@triton.jit
def integer_atomics_kernel(cells, old, n, rank, peer, bases, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    value = (offs + 1).to(cells.dtype.element_ty)
    kept = iris.atomic_add(cells + offs, value, rank, peer, bases, mask)
    kept += iris.atomic_sub(cells + offs, value, rank, peer, bases, mask, "acquire")
    kept += iris.atomic_xchg(cells + offs, value, rank, peer, bases, mask, "release")
    kept += iris.atomic_xor(cells + offs, value, rank, peer, bases, mask, "relaxed")
    kept += iris.atomic_and(cells + offs, value, rank, peer, bases, mask, "acq_rel", "gpu")
    kept += iris.atomic_or(cells + offs, value, rank, peer, bases, mask, None, "cta")
    kept += iris.atomic_min(cells + offs, value, rank, peer, bases, mask, None, "sys")
    kept += iris.atomic_max(cells + offs, value, rank, peer, bases, mask)
    one = tl.full((), 1, cells.dtype.element_ty)
    kept += iris.atomic_cas(cells, one, one + one, rank, peer, bases)
    tl.store(old + offs, kept, mask=mask)


@triton.jit
def float_atomics_kernel(cells, old, n, rank, peer, bases, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    value = (offs + 1).to(cells.dtype.element_ty)
    kept = iris.atomic_add(cells + offs, value, rank, peer, bases, mask)
    kept += iris.atomic_sub(cells + offs, value, rank, peer, bases, mask, "relaxed")
    kept += iris.atomic_xchg(cells + offs, value, rank, peer, bases, mask, "release")
    kept += iris.atomic_min(cells + offs, value, rank, peer, bases, mask)
    kept += iris.atomic_max(cells + offs, value, rank, peer, bases, mask)
    tl.store(old + offs, kept, mask=mask)


@triton.jit
def block_cas_kernel(cells, old, n, rank, peer, bases, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    value = (offs + 1).to(cells.dtype.element_ty)
    tl.store(old + offs, iris.atomic_cas(cells + offs, value, value + value, rank, peer, bases), mask=offs < n)


@triton.jit
def half_add_kernel(cells, old, n, rank, peer, bases, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    value = (offs + 1).to(cells.dtype.element_ty)
    kept = iris.atomic_add(cells + offs, value, rank, peer, bases, mask)
    kept += iris.atomic_sub(cells + offs, value, rank, peer, bases, mask, "relaxed")
    tl.store(old + offs, kept, mask=mask)


@triton.jit
def context_kernel(context, data, cells, flags, n, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    peer = (rank + 1) % world
    value = ctx.load(data + offs, peer, mask=mask, other=0, cache_modifier=".cg")
    ctx.store(data + n + offs, value, peer, mask=mask)
    ctx.get(data + offs, data + 2 * n + offs, peer, mask=mask, other=0)
    ctx.put(data + offs, data + 3 * n + offs, peer, mask=mask)
    ctx.copy(data + offs, data + 4 * n + offs, peer, rank, mask=mask)
    count = offs + 1
    kept = ctx.atomic_add(cells + offs, count, peer, mask=mask)
    kept += ctx.atomic_sub(cells + offs, count, peer, mask=mask, sem="relaxed")
    kept += ctx.atomic_xchg(cells + offs, count, peer, mask=mask, sem="release", scope="sys")
    kept += ctx.atomic_xor(cells + offs, count, peer, mask=mask)
    kept += ctx.atomic_and(cells + offs, count, peer, mask=mask)
    kept += ctx.atomic_or(cells + offs, count, peer, mask=mask)
    kept += ctx.atomic_min(cells + offs, count, peer, mask=mask)
    kept += ctx.atomic_max(cells + offs, count, peer, mask=mask)
    kept += ctx.atomic_cas(cells, 1, 2, peer)
    tl.store(cells + n + offs, kept, mask=mask)
    ctx.notify(flags, 1, peer)
    before = ctx.notify_add(flags + 32, 1, peer)
    arrived = ctx.wait(flags, 1, peer, 0)
    tl.store(cells + 2 * n, before + arrived)


@triton.jit
def machine_kernel(out):
    tl.store(out, iris.device_utils.ticks())
    tl.store(out + 1, iris.device_utils.ticks_per_microsecond())
    tl.store(out + 2, iris.device_utils.compute_unit().to(tl.int64))
    tl.store(out + 3, iris.device_utils.die().to(tl.int64))


@triton.jit
def notify_kernel(data, flag, value, n, rank, peer, bases, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    iris.store(data + offs, tl.full((BLOCK,), 1.0, tl.float32), rank, peer, bases, offs < n)
    iris.signal.notify(flag, value, rank, peer, bases)


@triton.jit
def notify_add_kernel(data, flag, value, n, rank, peer, bases, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    iris.store(data + offs, tl.full((BLOCK,), 1.0, tl.float32), rank, peer, bases, offs < n)
    tl.store(data + n, iris.signal.notify_add(flag, value, rank, peer, bases))


@triton.jit
def wait_kernel(data, flag, value, context, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    arrived = iris.signal.wait(flag, value, context, 1, 0)
    tl.store(data + BLOCK + offs, tl.load(data + offs) + arrived)


@triton.jit
def planted_notify_kernel(
    data,
    flag,
    value,
    n,
    rank,
    peer,
    bases,
    BLOCK: tl.constexpr,
    BARRIER: tl.constexpr,
    SEM: tl.constexpr,
    SCOPE: tl.constexpr,
):
    """What ``notify`` must not be: no barrier, an order too weak, a scope too narrow, or stores still on their way."""
    offs = tl.arange(0, BLOCK)
    iris.store(data + offs, tl.full((BLOCK,), 1.0, tl.float32), rank, peer, bases, offs < n)
    if BARRIER:
        tl.debug_barrier()
    iris.atomic_xchg(flag, value, rank, peer, bases, None, SEM, SCOPE)


@triton.jit
def planted_wait_kernel(data, flag, value, BLOCK: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr):
    """What ``wait`` must not be."""
    offs = tl.arange(0, BLOCK)
    seen = tl.atomic_add(flag, 0, sem=SEM, scope=SCOPE)
    while seen - value < 0:
        seen = tl.atomic_add(flag, 0, sem=SEM, scope=SCOPE)
    tl.debug_barrier()
    tl.store(data + BLOCK + offs, tl.load(data + offs))


def as_launched(value):
    """How the launcher specialises an integer argument."""
    return 1 if value == 1 else "i32:16" if value % 16 == 0 else "i32"


def api(target):
    """(name, kernel, arguments, launch options) of kernels that call the whole device API."""
    remote = {"n": "i32", "rank": "i32", "peer": "i32", "bases": "*i64", "BLOCK": 1024}
    wide = {"num_warps": 4}
    for load, store in zip((*LOAD_MODIFIERS, None), STORE_MODIFIERS, strict=True):
        arguments = {"source": "*fp16", "target": "*fp16", "LOAD": load, "STORE": store} | remote
        yield f"memory load={load} store={store}", memory_kernel, arguments, wide
    for kind in ("i8", "fp32"):
        arguments = {"source": f"*{kind}", "target": f"*{kind}", "LOAD": None, "STORE": None} | remote
        yield f"memory {kind}", memory_kernel, arguments, wide
    for kind in ("i8", "fp16", "fp32", "fp64"):
        arguments = {"source": f"*{kind}:16", "target": f"*{kind}:16"} | remote
        arguments = {name: value for name, value in arguments.items() if name != "n"} | {"BLOCK": 8192}
        yield f"whole {kind}", whole_kernel, arguments, wide
    for kernel, kinds in (
        (integer_atomics_kernel, ("i32", "i64")),
        (float_atomics_kernel, ("fp32",)),
        (half_add_kernel, ("fp16", "bf16")),
        (block_cas_kernel, ("i32", "i64", "fp32")),
    ):
        for kind in kinds:
            name = "block cas" if kernel is block_cas_kernel else "atomics"
            yield f"{name} {kind}", kernel, {"cells": f"*{kind}", "old": f"*{kind}"} | remote, wide
    arguments = {"context": "*i64", "data": "*fp32", "cells": "*i32", "flags": "*i32", "n": "i32"}
    yield "context methods", context_kernel, arguments | {"rank": 1, "world": 3, "BLOCK": 512}, wide
    yield "machine", machine_kernel, {"out": "*i64"}, {"num_warps": 1}

    signalled = {"data": "*fp32", "flag": "*i32", "value": "i32"} | remote
    yield "notify", notify_kernel, signalled, wide
    yield "notify_add", notify_add_kernel, signalled, wide
    yield "wait", wait_kernel, {"data": "*fp32", "flag": "*i32", "value": "i32", "context": "*i64", "BLOCK": 1024}, wide
    planted = ((True, "release", "gpu"), (True, "relaxed", "sys"), (False, "release", "sys"), (True, "release", "sys"))
    for barrier, sem, scope in planted:
        arguments = signalled | {"BARRIER": barrier, "SEM": sem, "SCOPE": scope}
        yield f"planted notify barrier={barrier} {sem} {scope}", planted_notify_kernel, arguments, wide
    for sem, scope in (("acquire", "gpu"), ("relaxed", "sys")):
        arguments = {"data": "*fp32", "flag": "*i32", "value": "i32", "BLOCK": 1024, "SEM": sem, "SCOPE": scope}
        yield f"planted wait {sem} {scope}", planted_wait_kernel, arguments, wide

    lists = {"flags": "*i32", "epochs": "*i32", "members": "*i32", "size": "i32", "context": "*i64", "KERNEL": 1}
    yield "device_barrier", device_barrier_kernel, lists, {"num_warps": 1}


def paced():
    """Kernels with an imitated link compiled in."""
    remote = {"n": "i32", "rank": "i32", "peer": "i32", "bases": "*i64", "BLOCK": 512}
    arguments = {"source": "*fp16", "target": "*fp16", "LOAD": None, "STORE": None} | remote
    yield "paced memory", memory_kernel, arguments, {"num_warps": 4}
    booked = {"state": "*i64", "until": "*i64", "nanoseconds": "i32", "peers": "i32"}
    yield "paced copy", link.book_kernel, booked, {"num_warps": 4}
    yield "paced copy, its end", link.await_kernel, {"until": "*i64"}, {"num_warps": 4}
    ticks = {"ticks": "*i64", "nbytes": "i32", "rank": "i32", "peer": "i32", "bases": "*i64"}
    yield "paced charge", charge_kernel, ticks, {"num_warps": 4}
    yield "paced charge of one peer", charge_kernel, ticks | {"rank": 0, "peer": 1}, {"num_warps": 4}
    yield "charge without pace", charge_kernel, ticks, {"num_warps": 4}


def pull(
    target,
    a_dtype,
    b_dtype,
    rows,
    gather_dim,
    transpose,
    bias,
    out_dtype,
    *,
    world=WORLD,
    ragged=False,
    tf32=False,
    scaled=False,
    activation="none",
):
    """One ``pull`` kernel with the configuration that is chosen for the problem, arguments specialised as launched."""
    n, k = (N - 1, K - world) if ragged else (N, K)
    m = rows * (world if gather_dim == 0 else 1)
    shape = (n,) if bias else None
    config = fitted(target, Problem(m, n, k, a_dtype, b_dtype, out_dtype, world, gather_dim, shape, transpose))
    depth = k // (world if gather_dim == 1 else 1)
    a_strides = (depth, 1) if transpose[0] == "N" else (1, rows)
    b_strides = (n, 1) if transpose[1] == "N" else (1, k)
    names = (
        "M",
        "N",
        "K",
        "K_shard",
        "stride_am",
        "stride_ak",
        "stride_bk",
        "stride_bn",
        "stride_biasm",
        "stride_biasn",
    )
    values = (rows, n, k, depth, *a_strides, *b_strides, 0, 1 if bias else 0)
    arguments = {name: as_launched(value) for name, value in zip(names, values, strict=True)}
    arguments |= {
        "a_ptr": "*" + TYPES[a_dtype], "b_ptr": "*" + TYPES[b_dtype],
        "bias_ptr": "*" + TYPES[out_dtype], "out_ptr": "*" + TYPES[out_dtype],
        **dict.fromkeys(("scale_a_ptr", "scale_b_ptr"), "*" + ("fp32" if scaled else TYPES[out_dtype])),
        "stride_om": as_launched(n), "stride_on": 1,
        "flags": "*i32", "counters": "*i32", "members": "*i32", "index": "i32", "context": "*i64",
        "WORLD": world, "GATHER_DIM": gather_dim, "GROUP_M": config.group_size_m,
        "BLOCK_M": config.block_size_m, "BLOCK_N": config.block_size_n, "BLOCK_K": config.block_size_k,
        "HAS_BIAS": bias, "HAS_SCALES": scaled, "ACTIVATION": activation,
        "PRECISION": "tf32" if tf32 else precision(target, a_dtype, config), "KERNEL": 1,
    }  # fmt: skip
    tiles = f"{config.block_size_m}x{config.block_size_n}x{config.block_size_k}"
    name = (
        f"pull {TYPES[a_dtype]}x{TYPES[b_dtype]}->{TYPES[out_dtype]} {transpose} rows={rows} dim={gather_dim} "
        f"world={world} {tiles} warps={config.num_warps} stages={config.num_stages}"
    )
    name += "".join(
        f" {word}" for word, on in (("bias", bias), ("ragged", ragged), ("tf32", tf32), ("scaled", scaled)) if on
    )
    name += "" if activation == "none" else f" {activation}"
    return name, pull_kernel, arguments, {"num_warps": config.num_warps, "num_stages": config.num_stages}


def pairs(target):
    """The pairs of dtypes of A and B that the target multiplies."""
    fp8 = [getattr(torch, name) for name in target.fp8]
    return [(d, d) for d in (torch.float32, torch.float16, torch.bfloat16, torch.int8, *fp8)] + (
        [tuple(fp8)] if fp8 else []
    )


def out_dtype(a_dtype, turn):
    return torch.int32 if a_dtype == torch.int8 else (torch.bfloat16, torch.float16, torch.float32)[turn % 3]


def pull_cover(target):
    """Few kernels in which every dtype, number of rows, transpose and gather dimension, and each epilogue occurs."""
    for turn, (a, b) in enumerate(pairs(target)):
        rows = ROWS[(2 * turn + 3) % len(ROWS)]
        yield pull(target, a, b, rows, turn % 2, TRANSPOSES[turn % 4], turn % 2 == turn // 2 % 2, out_dtype(a, turn))
    half = torch.bfloat16
    yield pull(target, half, half, 64, 1, "NN", True, half)
    yield pull(target, half, half, 100, 1, "TN", True, half, ragged=True, activation="relu")
    yield pull(target, half, half, 128, 0, "NN", False, half, world=1)
    yield pull(target, torch.float16, torch.float16, 4096, 1, "NT", True, torch.float16, activation="silu")
    for name in target.fp8[:1]:
        fp8 = getattr(torch, name)
        yield pull(target, fp8, fp8, 4096, 1, "NT", True, half, scaled=True, activation="gelu")
    if target.vendor == "nvidia":
        yield pull(target, torch.float32, torch.float32, 128, 1, "NN", False, torch.float32, tf32=True)


def pull_product(target):
    """Every dtype with every number of rows and gather dimension; transposes, bias and outputs take turns."""
    for i, (a, b) in enumerate(pairs(target)):
        for j in (0, 1):
            for r, rows in enumerate(ROWS):
                if rows == 16 and j == 1:
                    continue  # the same tiles as for one row
                turn = i + 2 * j + r
                yield pull(target, a, b, rows, j, TRANSPOSES[turn % 4], (i + j + r // 2) % 2 == 0, out_dtype(a, turn))
        yield pull(target, a, b, 100, i % 2, TRANSPOSES[(i + 1) % 4], i % 2 == 1, out_dtype(a, i), ragged=True)
        if a == torch.float32 and target.vendor == "nvidia":
            for rows in ROWS:
                yield pull(target, a, b, rows, 1, "NN", False, a, tf32=True)


def stack_bytes(target, compiled):
    """Bytes of memory that a thread needs besides registers: spilled registers and the like."""
    if target.vendor == "amd":
        return int(re.search(r"\.private_segment_fixed_size:\s*(\d+)", compiled.asm["amdgcn"])[1])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


# The instructions that decide who sees what when, besides plain loads.
ORDERING = re.compile(
    r"(atom|red|ld\.global\S*\.acquire|st\.global|bar\.sync|fence|membar"  # PTX
    r"|buffer_wbl2|buffer_inv|s_waitcnt|s_barrier|(global|flat)_(store|atomic)|global_load\S*.* sc1)"
)


def ordering(target, compiled):
    """The assembly's instructions that order memory, one a line, without predicates and comments."""
    text = compiled.asm["ptx" if target.vendor == "nvidia" else "amdgcn"]
    lines = [re.sub(r"^@!?%p\d+\s+", "", line.strip()) for line in text.splitlines()]
    return [line.split(";")[0].strip() for line in lines if ORDERING.match(line)]


def accesses(target, compiled):
    """The names of the assembly's loads and stores of global memory that move 16 bytes, and of those that move one."""
    text = compiled.asm["ptx" if target.vendor == "nvidia" else "amdgcn"]
    found = re.findall(r"(?:ld|st)\.global\S*|(?:global|flat|buffer)_(?:load|store)_\w+", text)
    wide = [name for name in found if re.search(r"v4\.b32|v2\.b64|dwordx4|b128", name)]
    return {"wide": wide, "bytes": [name for name in found if re.search(r"\.[bu]8$|byte", name)]}


def main(arch, selection):
    target = _target.by_arch(arch)
    wanted = [*api(target), *tiles(), *pull_cover(target)] if selection == "cover" else list(pull_product(target))
    records = {}
    if selection == "cover":
        wanted += [*paced(), *paced_helpers()]
        if arch in COLLECTIVES:
            wanted += [*launches(target, 8), *rings(target)]
        wanted += [*staging.cover(target, arch in COLLECTIVES), *staging.paced_helpers()]
        wanted += reducing.cover(target, arch in COLLECTIVES)
        wanted += gathering.cover(target, arch in COLLECTIVES)
    else:
        wanted += [*staging.product(target), *reducing.product(target), *gathering.product(target)]
        wanted += [launch for world in (3, 8) for launch in launches(target, world, full=True)]
    for name, kernel, arguments, options in wanted:
        pacing.set_paced(name.startswith("paced"))
        record = records[name] = {"error": "", "pull": kernel is pull_kernel}
        try:
            compiled = compile_kernel(kernel, target, arguments, **options)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the finding
            record["error"] = f"{type(error).__name__}: {error}"[-2000:]
            continue
        record["shared"] = compiled.metadata.shared
        record["stack"] = stack_bytes(target, compiled)
        record["ordering"] = ordering(target, compiled) if selection == "cover" else []
        if name.startswith("whole "):
            record["accesses"] = accesses(target, compiled)
    answer = {"triton": triton.__version__, "arch": arch, "records": records}
    if selection == "cover" and arch in COLLECTIVES:
        answer["without tracing"] = staging.without_tracing(target)
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
