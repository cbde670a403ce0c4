"""The ``hbm_buffer`` kernel of all-gather + matmul; its protocol is described in :mod:`iris.ops.all_gather_matmul`."""

import triton
import triton.language as tl

from iris.device import link, numeric, signal
from iris.device.address import translate
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
