"""The ``pull`` kernel of all-gather + matmul; its protocol is described in :mod:`iris.ops.all_gather_matmul`."""

import triton
import triton.language as tl

from iris.device import link, numeric, signal
from iris.device.address import translate
from iris.x.schedule import grouped_tile


@triton.jit
def pull_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
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
    PRECISION: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """``out = cat(A shards) @ B + bias``; each tile of A is read from its owner when it is multiplied.

    ``M`` is the number of rows of one shard (``GATHER_DIM == 0``) or of A; ``K_shard`` the columns of one shard.
    """
    rank = tl.load(members + index)
    num_ranks = tl.load(context + 1).to(tl.int32)
    ready = flags
    consumed = flags + num_ranks * signal.FLAG_STRIDE
    epochs = counters
    started = counters + num_ranks
    ended = started + 1
    if WORLD > 1:
        # The first program that runs, whichever it is, tells the peers that this rank's A may be read.
        if tl.atomic_add(started, 1, sem="relaxed", scope="gpu") == 0:
            for step in range(1, WORLD):
                peer = tl.load(members + (index + step) % WORLD)
                epoch = tl.load(epochs + peer) + 1
                signal.notify(ready + rank * signal.FLAG_STRIDE, epoch, rank, peer, context + 2)

    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    shard_tiles = tiles_m * tiles_n
    row_shards: tl.constexpr = WORLD if GATHER_DIM == 0 else 1
    column_shards: tl.constexpr = 1 if GATHER_DIM == 0 else WORLD
    for tile in range(tl.program_id(0), shard_tiles * row_shards, tl.num_programs(0)):
        # Own rows come first, then the peers' in rank-rotated order.
        row_shard = (index + tile // shard_tiles) % WORLD
        tile_m, tile_n = grouped_tile(tile % shard_tiles, tiles_m, tiles_n, GROUP_M)
        offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K)
        rows = offs_m.to(tl.int64) * stride_am
        columns = offs_n.to(tl.int64) * stride_bn
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=numeric.accumulator_dtype(a_ptr.dtype.element_ty))

        for step in range(column_shards):
            if GATHER_DIM == 0:
                owner = row_shard
                first_k = 0
            else:
                owner = (index + step) % WORLD
                first_k = owner * K_shard
            peer = tl.load(members + owner)
            if WORLD > 1:
                if owner != index:
                    epoch = tl.load(epochs + peer) + 1
                    signal.wait(ready + peer * signal.FLAG_STRIDE, epoch, context, peer, KERNEL)
            a_shard = translate(a_ptr, rank, peer, context + 2)
            a_ptrs = a_shard + rows[:, None] + (offs_k.to(tl.int64) * stride_ak)[None, :]
            b_ptrs = b_ptr + ((first_k + offs_k).to(tl.int64) * stride_bk)[:, None] + columns[None, :]
            for k in range(0, K_shard, BLOCK_K):
                inside = offs_k < K_shard - k
                link.pace_read(a_ptrs, rank, peer, context + 2)
                a = tl.load(a_ptrs, mask=(offs_m < M)[:, None] & inside[None, :], other=0.0)
                b = tl.load(b_ptrs, mask=inside[:, None] & (offs_n < N)[None, :], other=0.0)
                acc = numeric.mma(a, b, acc, PRECISION)
                a_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_ak
                b_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_bk

        out_m = offs_m
        if GATHER_DIM == 0:
            out_m = row_shard * M + offs_m
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        if HAS_BIAS:
            bias_ptrs = (
                bias_ptr + (out_m.to(tl.int64) * stride_biasm)[:, None] + (offs_n.to(tl.int64) * stride_biasn)[None, :]
            )
            acc += tl.load(bias_ptrs, mask=mask, other=0.0).to(acc.dtype)
        out_ptrs = out_ptr + (out_m.to(tl.int64) * stride_om)[:, None] + (offs_n.to(tl.int64) * stride_on)[None, :]
        tl.store(out_ptrs, numeric.narrow(acc, out_ptr.dtype.element_ty), mask=mask)

    if WORLD > 1:
        tl.debug_barrier()
        if tl.atomic_add(ended, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
            # Every program has read the epochs and its peers' A. Later work of this stream may overwrite the own A only
            # when the peers have read it too, so the kernel ends after that.
            tl.store(started, 0)
            tl.store(ended, 0)
            for step in range(1, WORLD):
                peer = tl.load(members + (index + step) % WORLD)
                epoch = tl.load(epochs + peer) + 1
                signal.notify(consumed + rank * signal.FLAG_STRIDE, epoch, rank, peer, context + 2)
            for step in range(1, WORLD):
                peer = tl.load(members + (index + step) % WORLD)
                epoch = tl.load(epochs + peer) + 1
                signal.wait(consumed + peer * signal.FLAG_STRIDE, epoch, context, peer, KERNEL)
                tl.store(epochs + peer, epoch)
