"""The ``hbm_buffer`` kernel of all-gather + matmul; its protocol is described in :mod:`iris.ops.all_gather_matmul`."""

import triton
import triton.language as tl

from iris.device import link, numeric, signal
from iris.device.address import translate
from iris.x.epilogue import write_tile
from iris.x.gemm import multiply_shards
from iris.x.schedule import rotated_rank, staged_tile
from iris.x.turn import begin_turn, end_turn, wait_for_input

# Words of ``queue``, int32 in ordinary memory.
ROLES = tl.constexpr(0)  # programs that have started
FETCHES = tl.constexpr(1)  # pieces of A that a program has taken to fetch
TILES = tl.constexpr(2)  # tiles of the output that a program has taken
EPOCH = tl.constexpr(3)  # calls before this one
QUEUE_WORDS = 4


@triton.jit
def fetch_item(item, tiles_m, groups, parts, STAGE_M: tl.constexpr, PARTS_FIRST: tl.constexpr):
    """Part, row of tiles and group of K blocks of the ``item``-th piece to fetch.

    Stage by stage of ``STAGE_M`` rows of tiles, and within a stage part by part; with ``PARTS_FIRST`` part by part, and
    within a part stage by stage. Within a stage of a part groups outermost, rows innermost, so that all rows of a stage
    get their first group before any gets its second. A permutation of all pieces.
    """
    if PARTS_FIRST:
        of_part = tiles_m * groups
        part = item // of_part
        within = item - part * of_part
        stage = within // (STAGE_M * groups)
        rows = tl.minimum(tiles_m - stage * STAGE_M, STAGE_M)
        within -= stage * STAGE_M * groups
    else:
        stage = item // (STAGE_M * parts * groups)
        rows = tl.minimum(tiles_m - stage * STAGE_M, STAGE_M)
        within = item - stage * STAGE_M * parts * groups
        part = within // (rows * groups)
        within -= part * rows * groups
    group = within // rows
    return part, stage * STAGE_M + within - group * rows, group


@triton.jit(do_not_specialize=["index", "fetchers", "first_fetchers"])
def hbm_buffer_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
    scale_a_ptr,
    scale_b_ptr,
    staged_ptr,
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
    stride_part,
    stride_sm,
    stride_sk,
    fetched,
    queue,
    fetchers,
    first_fetchers,
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
    STAGE_M: tl.constexpr,
    K_PER_FLAG: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """``out = act(scales * cat(A shards) @ B + bias)``: some programs fetch peers' shards, all multiply what has come.

    ``M`` is the number of rows of one shard (``GATHER_DIM == 0``) or of A; ``K_shard`` the columns of one shard. Part p
    of ``staged_ptr`` is the shard of member ``index + 1 + p``. ``fetched`` has a flag for each row of tiles, part and
    group of ``K_PER_FLAG`` blocks: the number of the call that has brought it.
    """
    begin_turn(flags, counters, members, index, context, WORLD)
    rank = tl.load(members + index)
    epoch = tl.load(queue + EPOCH) + 1
    parts: tl.constexpr = WORLD - 1
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    blocks = tl.cdiv(K_shard, BLOCK_K)
    groups = tl.cdiv(blocks, K_PER_FLAG)
    offsets_m = tl.arange(0, BLOCK_M)
    offsets_n = tl.arange(0, BLOCK_N)
    offsets_k = tl.arange(0, BLOCK_K)

    if WORLD > 1:
        # Roles go to programs in the order in which they start, so those that fetch are running.
        role = tl.atomic_add(queue + ROLES, 1, sem="relaxed", scope="gpu")
        items = tiles_m * groups * parts
        of_first_stage = tl.minimum(STAGE_M, tiles_m) * groups
        if GATHER_DIM == 1:
            of_first_stage *= parts
        fetching = role < tl.maximum(fetchers, first_fetchers)
        while fetching:
            item = tl.atomic_add(queue + FETCHES, 1, sem="relaxed", scope="gpu")
            fetching = item < items
            if fetching:
                part, tile_m, group = fetch_item(item, tiles_m, groups, parts, STAGE_M, GATHER_DIM == 0)
                peer = tl.load(members + rotated_rank(index, 1 + part, WORLD))
                wait_for_input(flags, counters, peer, context, KERNEL)
                rows = tile_m * BLOCK_M + offsets_m
                shard = translate(a_ptr, rank, peer, context + 2) + (rows.to(tl.int64) * stride_am)[:, None]
                stage = staged_ptr + tl.cast(part, tl.int64) * stride_part + (rows.to(tl.int64) * stride_sm)[:, None]
                for block in range(group * K_PER_FLAG, tl.minimum((group + 1) * K_PER_FLAG, blocks)):
                    k = block * BLOCK_K + offsets_k
                    inside = (rows < M)[:, None] & (k < K_shard)[None, :]
                    source = shard + (k.to(tl.int64) * stride_ak)[None, :]
                    link.pace_read(source, rank, peer, context + 2)
                    value = tl.load(source, mask=inside)
                    tl.store(stage + (k.to(tl.int64) * stride_sk)[None, :], value, mask=inside)
                signal.publish(fetched + (tile_m * parts + part) * groups + group, epoch)
                # Programs that only help at the start leave with the first stage, or one piece after it.
                fetching = (role < fetchers) | (item < of_first_stage)

    row_shards: tl.constexpr = WORLD if GATHER_DIM == 0 else 1
    tiles = tiles_m * tiles_n
    tile = tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")
    while tile < tiles * row_shards:
        # Own rows come first, then the peers' in the order in which they are fetched.
        row_shard = tile // tiles
        tile_m, tile_n = staged_tile(tile - row_shard * tiles, tiles_m, tiles_n, STAGE_M, GROUP_M)
        rows = tile_m * BLOCK_M + offsets_m
        columns = tile_n * BLOCK_N + offsets_n
        b_columns = columns.to(tl.int64) * stride_bn
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=numeric.accumulator_dtype(a_ptr.dtype.element_ty))
        own = blocks
        group = 0
        end = groups * parts
        if GATHER_DIM == 0:
            own = tl.where(row_shard == 0, blocks, 0)
            group = tl.maximum(row_shard - 1, 0) * groups
            end = row_shard * groups
        acc = multiply_shards(
            acc, a_ptr, 0, rows.to(tl.int64) * stride_am, rows < M, stride_ak, b_ptr, b_columns, columns < N, stride_bk,
            0, own, K_shard, index, rank, rank, context + 2, WORLD, GATHER_DIM == 1, BLOCK_K, PRECISION,
        )  # fmt: skip
        if WORLD > 1:
            a_rows = rows.to(tl.int64) * stride_sm
            lanes = tl.arange(0, AHEAD)
            while group < end:
                # As many groups in a row as have come, at least the next one: while data still arrives the loop waits
                # between groups, afterwards it goes through the rest without a stop. The reads are atomic because those
                # give all threads of the program one number.
                flag = fetched + tile_m * (parts * groups) + tl.minimum(group + lanes, end - 1)
                seen = tl.atomic_add(flag, tl.zeros((AHEAD,), tl.int32), sem="relaxed", scope="gpu")
                come = tl.min(tl.where(seen - epoch < 0, lanes, AHEAD))
                come = tl.minimum(tl.maximum(come, 1), end - group)
                flag = fetched + tile_m * (parts * groups) + group + tl.minimum(lanes, come - 1)
                signal.wait_all(flag, tl.full((AHEAD,), 0, tl.int32) + epoch, context, lanes, KERNEL)
                first = (group // groups) * blocks + (group % groups) * K_PER_FLAG
                group += come
                last = (group // groups) * blocks + (group % groups) * K_PER_FLAG
                acc = multiply_shards(
                    acc, staged_ptr, stride_part, a_rows, rows < M, stride_sk, b_ptr, b_columns, columns < N, stride_bk,
                    first, last, K_shard, index + 1, rank, rank, context + 2,
                    WORLD, GATHER_DIM == 1, BLOCK_K, PRECISION,
                )  # fmt: skip

        out_rows = rows
        if GATHER_DIM == 0:
            out_rows = rotated_rank(index, row_shard, WORLD) * M + rows
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        write_tile(
            acc, out_ptr, out_rows, columns, mask, stride_om, stride_on, bias_ptr, stride_biasm, stride_biasn,
            scale_a_ptr, scale_b_ptr, HAS_BIAS, HAS_SCALES, ACTIVATION,
        )  # fmt: skip
        tile = tl.atomic_add(queue + TILES, 1, sem="relaxed", scope="gpu")

    if end_turn(flags, counters, members, index, context, WORLD, KERNEL):
        tl.store(queue + ROLES, 0)
        tl.store(queue + FETCHES, 0)
        tl.store(queue + TILES, 0)
        tl.store(queue + EPOCH, epoch)
