"""The ``pull`` kernel of all-gather + matmul; its protocol is described in :mod:`iris.ops.all_gather_matmul`."""

import triton
import triton.language as tl

from iris.device import numeric
from iris.device.address import translate
from iris.x.epilogue import write_tile
from iris.x.gemm import multiply_blocks
from iris.x.schedule import grouped_tile, rotated_rank
from iris.x.turn import begin_turn, end_turn, wait_for_input


@triton.jit
def pull_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
    scale_a_ptr,
    scale_b_ptr,
    M,
    N,
    K,
    K_shard,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_biasm,
    stride_biasn,
    stride_om,
    stride_on,
    flags,
    counters,
    members,
    index,
    context,
    WORLD: tl.constexpr,
    GATHER_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """``out = act(scales * cat(A shards) @ B + bias)``; each tile of A is read from its owner when it is multiplied.

    ``M`` is the number of rows of one shard (``GATHER_DIM == 0``) or of A; ``K_shard`` the columns of one shard.
    """
    begin_turn(flags, counters, members, index, context, WORLD)
    rank = tl.load(members + index)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    shard_tiles = tiles_m * tiles_n
    row_shards: tl.constexpr = WORLD if GATHER_DIM == 0 else 1
    column_shards: tl.constexpr = 1 if GATHER_DIM == 0 else WORLD
    for tile in range(tl.program_id(0), shard_tiles * row_shards, tl.num_programs(0)):
        # Own rows come first, then the peers' in rank-rotated order.
        row_shard = rotated_rank(index, tile // shard_tiles, WORLD)
        tile_m, tile_n = grouped_tile(tile % shard_tiles, tiles_m, tiles_n, GROUP_M)
        offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = offs_m.to(tl.int64) * stride_am
        columns = offs_n.to(tl.int64) * stride_bn
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=numeric.accumulator_dtype(a_ptr.dtype.element_ty))

        for step in range(column_shards):
            owner = row_shard
            if GATHER_DIM == 1:
                owner = rotated_rank(index, step, WORLD)
            peer = tl.load(members + owner)
            if WORLD > 1:
                if owner != index:
                    wait_for_input(flags, counters, peer, context, KERNEL)
            acc = multiply_blocks(
                acc, None, translate(a_ptr, rank, peer, context + 2), 0, rows, offs_m < M, 0, 0, stride_ak,
                None, b_ptr, 0, columns, offs_n < N, stride_bk, 0, tl.cdiv(K_shard, BLOCK_K), K_shard, 0, owner,
                rank, peer, context + 2, 1, WORLD, 1, GATHER_DIM == 1, BLOCK_M, BLOCK_N, BLOCK_K, False, False,
                PRECISION,
            )  # fmt: skip

        out_m = offs_m
        if GATHER_DIM == 0:
            out_m = row_shard * M + offs_m
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        write_tile(
            acc, out_ptr, out_m, offs_n, mask, stride_om, stride_on, bias_ptr, stride_biasm, stride_biasn,
            scale_a_ptr, scale_b_ptr, HAS_BIAS, HAS_SCALES, ACTIVATION,
        )  # fmt: skip

    end_turn(flags, counters, members, index, context, WORLD, KERNEL)
