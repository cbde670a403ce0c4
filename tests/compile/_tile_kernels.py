"""Kernels that call every function of tiles, for the compile matrix."""

import triton
import triton.language as tl

import iris
from iris.x import schedule

WORLD = 4


@triton.jit
def movement_kernel(
    context, src, dst, M, N, stride_sm, stride_sn, stride_dm, stride_dn, rank: tl.constexpr, world: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """gather, all-gather, broadcast and all-to-all, with every method of the views."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    source = iris.make_tensor_view(src, M, N, stride_sm, stride_sn)
    target = iris.make_tensor_view(dst, M, N, stride_dm, stride_dn)
    place = iris.TileView(tl.program_id(0), tl.program_id(1), BLOCK_M, BLOCK_N)
    block = ctx.gather(place, source, (rank + 1) % world)
    tile = iris.Tile(place.pid_m, place.pid_n, BLOCK_M, BLOCK_N, block)
    if PART == 0:
        ctx.all_gather(tile, target, 0)
        ctx.broadcast(tile, target.offset(M, 0), 3)
    elif PART == 1:
        ctx.all_gather(tile, target, 1)
        ptrs, mask = source.offset_tile_ptr(place, 1, 2)
        tl.store(ptrs, iris.x.gather(tile, source, 2, ctx, hint=(1, 16)), mask=mask)
    else:
        ctx.all_to_all(place, source, target, 96)
        rm, rn, mask = iris.x.tile_layout(place.pid_m, place.pid_n, M, N, BLOCK_M, BLOCK_N)
        moved = iris.x.offset_ptr(dst, stride_dm, stride_dn, M, 0)
        ptrs, mask = iris.x.tile_ptr(moved, M, N, stride_dm, stride_dn, place.pid_m, place.pid_n, BLOCK_M, BLOCK_N)
        tl.store(ptrs, block, mask=mask & (rn >= 0)[None, :] & (rm >= 0)[:, None])


@triton.jit
def reduction_kernel(
    context, src, dst, scratch, locks, M, N, stride_m, stride_n, generation, rank: tl.constexpr, world: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, VARIANT: tl.constexpr, CHIPLETS: tl.constexpr,
):  # fmt: skip
    """Each all-reduce, through the configuration, and the reduce-scatter, in a persistent loop."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    source = iris.make_tensor_view(src, M, N, stride_m, stride_n)
    target = iris.make_tensor_view(dst, M, N, stride_m, stride_n)
    partial = iris.make_tensor_view(scratch, M, N, stride_m, stride_n)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first = schedule.chiplet_program(tl.program_id(0), tl.num_programs(0), CHIPLETS)
    for turn in range(first, tiles_m * tiles_n, tl.num_programs(0)):
        pid_m, pid_n = schedule.staged_tile(turn, tiles_m, tiles_n, 16, 4)
        ptrs, mask = target.tile_ptr(iris.TileView(pid_m, pid_n, BLOCK_M, BLOCK_N))
        tile = iris.Tile(pid_m, pid_n, BLOCK_M, BLOCK_N, tl.load(ptrs, mask=mask))
        if VARIANT != "atomic" and VARIANT != "ring":
            ctx.publish_tile(tile, source, locks, generation)
        if VARIANT == "reduce_scatter":
            ctx.reduce_scatter(tile, source, target, locks, generation)
            tl.store(locks, iris.x.reduce_scatter_owner(pid_m, pid_n, M, N, BLOCK_M, BLOCK_N, world))
        else:
            ctx.all_reduce(tile, source, target, iris.AllReduceConfig(VARIANT, locks), generation, partial)


@triton.jit
def schedule_kernel(out, tiles, rank, world):
    """What the others leave out."""
    value = schedule.peer_rank(rank, tiles, world) + schedule.rotated_rank(rank, tiles, world)
    value += schedule.strided_owner(tiles, world) + schedule.strided_count(tiles, rank, world)
    value += schedule.strided_tile(tiles, rank, world) + schedule.strided_rounds(tiles, world)
    value += schedule.contiguous_first(tiles, rank, world) + schedule.contiguous_count(tiles, rank, world)
    value += schedule.balanced_first(tiles, rank, world) + schedule.balanced_count(tiles, rank, world)
    tl.store(out, value)


def tiles():
    """(name, kernel, arguments, launch options); those whose name has "flags" signal and wait."""
    ranks = {"context": "*i64", "rank": 1, "world": WORLD, "M": "i32", "N": "i32:16"}
    strides = {"stride_sm": "i32:16", "stride_sn": 1, "stride_dm": "i32:16", "stride_dn": 1}
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64}
    for kind, part in (("fp16", 0), ("i8", 1), ("fp8e5", 2)):
        arguments = ranks | strides | blocks | {"src": f"*{kind}", "dst": f"*{kind}", "PART": part}
        yield f"tile movement {part} {kind}", movement_kernel, arguments, {"num_warps": 8}
    for variant, kind, wide in (
        ("atomic", "bf16", "fp32"),
        ("spinlock flags", "fp16", "fp32"),
        ("one_shot flags", "bf16", "fp32"),
        ("two_shot flags", "fp32", "fp32"),
        ("ring flags", "fp16", "fp32"),
        ("reduce_scatter flags", "i8", "i32"),
    ):
        arguments = ranks | blocks | {"src": f"*{kind}", "dst": f"*{kind}", "scratch": f"*{wide}", "locks": "*i32"}
        arguments |= {"stride_m": "i32:16", "stride_n": 1, "generation": "i32", "CHIPLETS": WORLD}
        arguments |= {"VARIANT": variant.split()[0]}
        yield f"tile {variant} {kind}", reduction_kernel, arguments, {"num_warps": 8}
    yield "schedule", schedule_kernel, {"out": "*i32", "tiles": "i32", "rank": "i32", "world": "i32"}, {"num_warps": 1}
