"""Index arithmetic of tiles: who does which tile, and in which order. It is written here and nowhere else.

A persistent kernel over all tiles, whose programs on one chiplet share rows and columns:

    first = chiplet_program(tl.program_id(0), tl.num_programs(0), CHIPLETS)
    for tile in range(first, tiles_m * tiles_n, tl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)

Over the tiles that this rank owns, ``strided`` or in one piece, with or without a rest:

    for i in range(tl.program_id(0), strided_count(tiles, rank, world_size), tl.num_programs(0)):
        tile = strided_tile(i, rank, world_size)

    for i in range(tl.program_id(0), contiguous_count(tiles, rank, world_size), tl.num_programs(0)):
        tile = contiguous_first(tiles, rank, world_size) + i

Over ranks, so that not all ranks turn to the same one at once:

    for step in range(world_size):
        other = rotated_rank(rank, step, world_size)         # the own rank first
    for step in range(world_size - 1):
        peer = peer_rank(rank, step + tile, world_size)      # peers only; tiles begin with different ones

Where peers' parts of A are fetched in pieces (blocks of K for a row of tiles) while they are multiplied:

    for item in range(tiles_m * groups * parts):             # every piece once, stage by stage
        part, tile_m, group = fetched_piece(item, tiles_m, groups, parts, stage_m, ALONG_K)
        flag = piece_flag(part, tile_m, group, tiles_m, groups, parts, ALONG_K)

Every function is a permutation or a partition for any sizes of at least 1. Numbers may be blocks or scalars.
"""

import triton
import triton.language as tl


@triton.jit
def tile_number(tile_m, tile_n, tiles_n):
    """Number of the tile in row ``tile_m`` and column ``tile_n``, row by row."""
    return tile_m * tiles_n + tile_n


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of tile number ``tile`` in grouped order.

    Tiles are numbered through groups of ``GROUP_M`` rows of tiles, row fastest, so that programs with neighbouring
    numbers share columns of B and rows of A in the cache. The last group may have fewer rows. For ``tile`` in
    ``0..tiles_m * tiles_n - 1`` this is a permutation of all (row, column) pairs.

    Source: the grouped ordering of Triton's matrix multiplication tutorial.
    """
    per_group = GROUP_M * tiles_n
    group = tile // per_group
    first_m = group * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % per_group
    return first_m + within % rows, within // rows


@triton.jit
def staged_tile(tile, tiles_m, tiles_n, stage_m, GROUP_M: tl.constexpr):
    """Row and column of tile number ``tile``: stages of ``stage_m`` rows of tiles, in grouped order within each.

    The last stage, and the last group of each stage, may have fewer rows, so a group never reaches into the next stage.
    Whoever fetches stage by stage and whoever computes stage by stage thus name the same tiles.
    """
    per_stage = stage_m * tiles_n
    stage = tile // per_stage
    first_m = stage * stage_m
    row, column = grouped_tile(tile - stage * per_stage, tl.minimum(tiles_m - first_m, stage_m), tiles_n, GROUP_M)
    return first_m + row, column


@triton.jit
def chiplet_program(program, programs, CHIPLETS: tl.constexpr):
    """A number for ``program`` such that the programs of one chiplet have neighbouring numbers.

    The hardware deals programs out to the chiplets in turn: program p runs on chiplet ``p % CHIPLETS``. Caches are the
    chiplets' own. A permutation of ``0..programs - 1``, also where the chiplets get unequal numbers of programs.
    """
    chiplet = program % CHIPLETS
    return chiplet * (programs // CHIPLETS) + tl.minimum(chiplet, programs % CHIPLETS) + program // CHIPLETS


@triton.jit
def rotated_rank(rank, step, world_size):
    """The ``step``-th rank from ``rank`` on: for ``step`` in ``0..world_size - 1`` every rank once, the own first."""
    return (rank + step) % world_size


@triton.jit
def peer_rank(rank, step, world_size):
    """The ``step``-th peer: for ``world_size - 1`` steps in a row, from any number on, every rank but the own once.

    The steps go on modulo ``world_size - 1``. In each step the ranks turn to different peers. A world of one has no
    peers; any step gives the own rank there.
    """
    others = world_size - 1
    # A remainder by 0 is undefined.
    return (rank + (world_size > 1) + step % (others + (others == 0))) % world_size


@triton.jit
def strided_owner(tile, world_size):
    """The rank that owns ``tile`` when the ranks own every ``world_size``-th tile."""
    return tile % world_size


@triton.jit
def strided_count(tiles, rank, world_size):
    """Number of tiles that ``rank`` owns of ``tiles``, see :func:`strided_owner`; may be 0."""
    return (tiles + world_size - 1 - rank) // world_size


@triton.jit
def strided_tile(i, rank, world_size):
    """The ``i``-th tile of ``rank``, see :func:`strided_owner`."""
    return i * world_size + rank


@triton.jit
def strided_rounds(tiles, world_size):
    """Number of rounds in which each rank has one tile at most; in the last some ranks may have none.

    Where ranks go through rounds together, as in a ring, all must go through this many: in round ``i`` a rank has the
    tile :func:`strided_tile` if that is below ``tiles``, and otherwise takes part without one.
    """
    return (tiles + world_size - 1) // world_size


@triton.jit
def contiguous_owner(tile, tiles, world_size):
    """The rank that owns ``tile`` of ``tiles`` when each owns ``tiles // world_size`` in a row and the last the rest.

    With fewer tiles than ranks the last rank owns them all.
    """
    share = tiles // world_size
    in_last = tile >= share * (world_size - 1)
    # A quotient by 0 is undefined.
    return in_last * (world_size - 1) + (1 - in_last) * (tile // (share + (share == 0)))


@triton.jit
def contiguous_first(tiles, rank, world_size):
    """The first tile of ``rank``, see :func:`contiguous_owner`."""
    return rank * (tiles // world_size)


@triton.jit
def contiguous_count(tiles, rank, world_size):
    """Number of tiles that ``rank`` owns of ``tiles``, see :func:`contiguous_owner`; may be 0."""
    return tiles // world_size + (rank == world_size - 1) * (tiles % world_size)


@triton.jit
def balanced_first(tiles, rank, world_size):
    """The first tile of ``rank`` when each owns tiles in a row and the first ``tiles % world_size`` one more."""
    return rank * (tiles // world_size) + tl.minimum(rank, tiles % world_size)


@triton.jit
def balanced_count(tiles, rank, world_size):
    """Number of tiles that ``rank`` owns of ``tiles``, see :func:`balanced_first`; differs by 1 at most."""
    return tiles // world_size + (rank < tiles % world_size)


@triton.jit
def chunk_extent(extent, world_size):
    """Length of a rank's chunk of ``extent`` rows or columns, where there are so many: the last ones may be shorter."""
    return (extent + world_size - 1) // world_size


@triton.jit
def chunk_first(extent, rank, world_size):
    """Where the chunk of ``rank`` begins, see :func:`chunk_extent`; may be past ``extent``, the chunk is empty then."""
    return rank * ((extent + world_size - 1) // world_size)


@triton.jit
def fetched_piece(item, tiles_m, groups, parts, stage_m, ALONG_K: tl.constexpr):
    """Part, row of tiles and group of K blocks of the ``item``-th piece to fetch, of ``tiles_m * groups * parts``.

    Stage by stage of ``stage_m`` rows of tiles. A tile needs the pieces of its row one after the other, so within a
    stage all rows get their first piece before any gets its second. Pieces that are fetched side by side come from
    different peers: when A is sharded along K each row begins with another part, otherwise every part has rows.
    """
    stage = item // (stage_m * groups * parts)
    rows = tl.minimum(tiles_m - stage * stage_m, stage_m)
    within = item - stage * stage_m * groups * parts
    if ALONG_K:
        turn = within // rows
        tile_m = stage * stage_m + within - turn * rows
        return (turn + tile_m) % parts, tile_m, turn // parts
    else:
        piece = within // parts
        group = piece // rows
        return within - piece * parts, stage * stage_m + piece - group * rows, group


@triton.jit
def piece_flag(part, tile_m, group, tiles_m, groups, parts, ALONG_K: tl.constexpr):
    """Number of the flag of a piece. Pieces that one tile of the output needs in turn have flags in a row: within
    groups the parts from part ``tile_m % parts`` on when A is sharded along K, groups of one part otherwise."""
    if ALONG_K:
        return (tile_m * groups + group) * parts + (part + parts - tile_m % parts) % parts
    else:
        return (part * tiles_m + tile_m) * groups + group


@triton.jit
def gathered_block(i, blocks, parts, k_per_flag):
    """Turn, part and block within the part, of the ``i``-th of ``blocks * parts`` blocks of K that a tile goes through.

    A turn is a group of up to ``k_per_flag`` blocks of one part. The parts' first groups come first, then their second
    ones; the last group of a part may have fewer blocks. Parts are counted from the one that the tile begins with.
    """
    whole = blocks // k_per_flag * k_per_flag
    in_whole = i < whole * parts
    length = tl.where(in_whole, k_per_flag, tl.maximum(blocks - whole, 1))
    within = tl.where(in_whole, i, i - whole * parts)
    turn = within // length
    first = tl.where(in_whole, turn // parts * k_per_flag, whole)
    return tl.where(in_whole, turn, whole // k_per_flag * parts + turn), turn % parts, first + within - turn * length


@triton.jit
def turn_start(turn, blocks, parts, k_per_flag):
    """The number ``i`` of the first block of a turn, see :func:`gathered_block`."""
    turns = blocks // k_per_flag * parts
    return tl.minimum(turn, turns) * k_per_flag + tl.maximum(turn - turns, 0) * (blocks % k_per_flag)


@triton.jit
def gathered_tile(tile, tiles_m, tiles_n, parts, stage_m, GROUP_M: tl.constexpr):
    """Row shard (0: own, p + 1: part p), row within it and column of tile number ``tile``; A is sharded along M.

    The own shard's tiles come first. Those of the parts follow stage by stage of ``stage_m`` rows, part after part in
    each, which is the order in which :func:`fetched_piece` brings their rows.
    """
    own = tiles_m * tiles_n
    later = tl.maximum(tile - own, 0)
    stage = later // (stage_m * tiles_n * parts)
    rows = tl.minimum(tiles_m - stage * stage_m, stage_m)
    within = later - stage * stage_m * tiles_n * parts
    part = within // (rows * tiles_n)
    row, column = grouped_tile(within - part * rows * tiles_n, rows, tiles_n, GROUP_M)
    own_row, own_column = staged_tile(tl.minimum(tile, own - 1), tiles_m, tiles_n, stage_m, GROUP_M)
    first = tile < own
    return (
        tl.where(first, 0, part + 1),
        tl.where(first, own_row, stage * stage_m + row),
        tl.where(first, own_column, column),
    )


@triton.jit
def divided_tile(item, whole, splits):
    """Tile, and which of how many pieces of its K, for the ``item``-th piece of work.

    The first ``whole`` tiles are one piece each; each of the others is divided into ``splits`` pieces, so that the last
    tiles keep all programs busy.
    """
    later = item - whole
    divided = later >= 0
    return (
        tl.where(divided, whole + later // splits, item),
        tl.where(divided, later % splits, 0),
        tl.where(divided, splits, 1),
    )
