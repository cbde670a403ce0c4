"""Whole tiles of all-gather + matmul where copies bring the shards: the end of one and the start of the next overlap.

Each program has every so many-th tile, so it knows its next one beforehand, and the compiler makes one loop of the
loops over tiles and over K (``flatten``): the first blocks of the next tile are on their way while a tile is written.
What is in that loop may not loop itself, so it waits in one instruction (:func:`iris.device.signal.wait_apart`). A
program waits for copies alone, which wait for no program.
"""

import triton
import triton.language as tl

from iris.device import numeric, signal
from iris.ops._finish import finish_tile
from iris.x.gemm import multiply_block, multiply_blocks
from iris.x.schedule import gathered_tile, piece_flag, rotated_rank, staged_tile


@triton.jit
def multiply_whole_tiles(
    a_desc,
    staged_desc,
    b_desc,
    a_ptr,
    staged_ptr,
    b_ptr,
    bias_ptr,
    scale_a_ptr,
    scale_b_ptr,
    out_ptr,
    M,
    N,
    K_shard,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_biasm,
    stride_biasn,
    stride_om,
    stride_on,
    part_rows,
    stride_part,
    fetched,
    sums_ptr,
    whole,
    stage_rows,
    flag_rows,
    members,
    index,
    context,
    WORLD: tl.constexpr,
    GATHER_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """The first ``whole`` tiles; the arguments are those of :func:`iris.ops._hbm_buffer_kernel.hbm_buffer_kernel`.

    A tile waits once when A is sharded along M, and before each part when it is sharded along K. The own shard and the
    staged ones have the same strides.
    """
    rank = tl.load(members + index)
    parts: tl.constexpr = WORLD - 1
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    flags = tl.cdiv(tiles_m, flag_rows)  # of a part
    blocks = tl.cdiv(K_shard, BLOCK_K)
    slot, limit = signal.slot_and_limit(context)
    for tile in tl.range(tl.program_id(0), whole, tl.num_programs(0), flatten=True):
        row_shard = tl.full((), 0, tl.int32)
        if GATHER_DIM == 0:
            row_shard, tile_m, tile_n = gathered_tile(tile, tiles_m, tiles_n, parts, stage_rows, GROUP_M)
        else:
            tile_m, tile_n = staged_tile(tile, tiles_m, tiles_n, stage_rows, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        a_rows = rows.to(tl.int64) * stride_am
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        b_columns = columns.to(tl.int64) * stride_bn
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=numeric.accumulator_dtype(a_ptr.dtype.element_ty))
        if GATHER_DIM == 0:
            part = tl.maximum(row_shard - 1, 0)
            from_desc, from_ptr = a_desc, a_ptr
            if row_shard > 0:
                from_desc, from_ptr = staged_desc, staged_ptr
                flag = fetched + piece_flag(part, tile_m // flag_rows, 0, flags, 1, parts, False)
                peer = tl.load(members + rotated_rank(index, row_shard, WORLD))
                signal.wait_apart(flag, 1, slot, limit, context, peer, KERNEL)
            acc = multiply_blocks(
                acc, from_desc, from_ptr, tile_m * BLOCK_M, a_rows, rows < M, part_rows, stride_part, stride_ak,
                b_desc, b_ptr, tile_n * BLOCK_N, b_columns, columns < N, stride_bk,
                0, blocks, K_shard, part, index, rank, rank, context + 2,
                1, WORLD, 1, False, BLOCK_M, BLOCK_N, BLOCK_K, B_TRANSPOSED, DESCRIPTORS, PRECISION,
            )  # fmt: skip
        else:
            # One loop for the own shard and all parts, which is what makes one loop of it and that over tiles.
            for i in range(blocks * WORLD):
                turn = i // blocks
                k = (i - turn * blocks) * BLOCK_K
                from_desc, from_ptr, row, member = a_desc, a_ptr, tile_m * BLOCK_M, index
                if turn > 0:
                    part = (tile_m // flag_rows + turn - 1) % parts
                    from_desc, from_ptr = staged_desc, staged_ptr + tl.cast(part, tl.int64) * stride_part
                    row += part * part_rows
                    member = rotated_rank(index, 1 + part, WORLD)
                    if k == 0:
                        flag = fetched + piece_flag(part, tile_m // flag_rows, 0, flags, 1, parts, True)
                        signal.wait_apart(flag, 1, slot, limit, context, tl.load(members + member), KERNEL)
                acc = multiply_block(
                    acc, from_desc, from_ptr, row, a_rows, rows < M, stride_ak,
                    b_desc, b_ptr, tile_n * BLOCK_N, b_columns, columns < N, stride_bk,
                    k, member * K_shard + k, K_shard, rank, rank, context + 2,
                    BLOCK_K, B_TRANSPOSED, DESCRIPTORS, PRECISION,
                )  # fmt: skip
        out_rows = rows
        if GATHER_DIM == 0:
            out_rows = rotated_rank(index, row_shard, WORLD) * M + rows
        finish_tile(
            acc, sums_ptr, 0, out_ptr, rows < M, out_rows, tile_n * BLOCK_N, N, stride_om, stride_on,
            bias_ptr, stride_biasm, stride_biasn, scale_a_ptr, scale_b_ptr,
            BLOCK_M, BLOCK_N, HAS_BIAS, HAS_SCALES, ACTIVATION,
        )  # fmt: skip
