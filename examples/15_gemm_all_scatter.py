"""GEMM + all-scatter: every rank multiplies some columns of C and stores each tile on every rank when it is done.

B is divided along N, A is whole on every rank: C = A @ (B of all ranks side by side), on every rank.

Protocol. A rank's C may be overwritten when its kernel runs, because what came before in its stream has ended then:
*ready* of `iris.x.turn` says so. A kernel ends when all peers have stored their columns.

iris run -n 2 examples/15_gemm_all_scatter.py --validate
"""

import gemm_common
import triton
import triton.language as tl

import iris
from iris.x.schedule import grouped_tile, rotated_rank, tile_number
from iris.x.tile import tile_layout
from iris.x.turn import begin_turn, wait_for_input


@triton.jit
def gemm_all_scatter(
    a, b, c, first, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    flags, counters, members, context,
    rank: tl.constexpr, world: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """``N`` are the columns of this rank, from column ``first`` of C on."""
    ctx = iris.DeviceContext.initialize(context, rank, world, tracing=TRACE)
    begin_turn(flags, counters, members, rank, context, world)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for position in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        pid_m, pid_n = grouped_tile(position, tiles_m, tiles_n, GROUP_M)
        tile = tile_number(pid_m, pid_n, tiles_n)
        span = ctx.tracing.record_event_start(iris.TraceEvent().compute, -1, 0, tile, 0)
        acc = gemm_common.multiply_tile(
            a, b, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, pid_m, pid_n, ctx, BLOCK_M, BLOCK_N, BLOCK_K
        )
        ctx.tracing.record_event_end(span)

        rows, columns, mask = tile_layout(pid_m, pid_n, M, N, BLOCK_M, BLOCK_N)
        ptrs = c + rows.to(tl.int64)[:, None] * stride_cm + (first + columns)[None, :]
        result = acc.to(c.dtype.element_ty)
        for step in range(world):
            peer = rotated_rank(rank, step, world)  # the own C first, then not all ranks to the same one
            if peer != rank:
                span = ctx.tracing.record_event_start(iris.TraceEvent().wait, peer, 0, tile, step)
                wait_for_input(flags, counters, peer, context, 0)  # at once, when it has begun
                ctx.tracing.record_event_end(span)
            span = ctx.tracing.record_event_start(iris.TraceEvent().put, peer, ptrs, tile, step, mask=mask)
            ctx.store(ptrs, result, peer, mask=mask)
            ctx.tracing.record_event_end(span)
    gemm_common.leave(flags, counters, members, ctx)


class Example(gemm_common.Gemm):
    kernel = gemm_all_scatter
    split = "n"

    def launch(self, trace):
        self.matmul(
            (min(self.tiles, self.args.gemm_sms),),
            self.a, self.b, self.c, self.first, *self.sizes, *self.strides, self.N, *self.turn,
            self.ctx.get_device_context(), self.rank, self.world, *self.blocks, self.group_m, trace,
        )  # fmt: skip

    def owner(self, row, column, tile):
        return f"stored by rank {self.owner_of_column(column)}"


if __name__ == "__main__":
    gemm_common.main(Example, __doc__)
