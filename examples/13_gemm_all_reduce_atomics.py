"""GEMM + all-reduce by atomics: every rank adds its tiles to the sums of every rank as soon as they are multiplied.

A and B are divided along K, C = sum over ranks of A @ B on every rank. The sums are float32 (int32 for int8) whatever
the datatype is, and are rounded to C once, at the end: atomics on fp16 would round at every rank.

Protocol. Each rank clears its sums in the stream before the kernel. *Ready* of `iris.x.turn`, set by the first program
of a rank that runs, says so; nobody adds to a rank's sums before. A kernel ends when all peers have added to its sums.

iris run -n 2 examples/13_gemm_all_reduce_atomics.py --validate
python examples/13_gemm_all_reduce_atomics.py -r 4 -m 300 -n 200 -k 512 --datatype bf16 --benchmark --validate
"""

import gemm_common
import triton
import triton.language as tl

import iris
from iris.x.schedule import grouped_tile, rotated_rank, tile_number
from iris.x.tile import tile_ptr
from iris.x.turn import begin_turn, wait_for_input


@triton.jit
def gemm_all_reduce_atomics(
    a, b, sums, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, flags, counters, members, context,
    rank: tl.constexpr, world: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
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

        ptrs, mask = tile_ptr(sums, M, N, N, 1, pid_m, pid_n, BLOCK_M, BLOCK_N)
        for step in range(world):
            peer = rotated_rank(rank, step, world)  # the own sums first, then not all ranks to the same one
            if peer != rank:
                span = ctx.tracing.record_event_start(iris.TraceEvent().wait, peer, 0, tile, step)
                wait_for_input(flags, counters, peer, context, 0)  # at once, when it has begun
                ctx.tracing.record_event_end(span)
            span = ctx.tracing.record_event_start(iris.TraceEvent().put, peer, ptrs, tile, step, mask=mask)
            ctx.atomic_add(ptrs, acc, peer, mask=mask, sem="relaxed", scope="sys")
            ctx.tracing.record_event_end(span)
    gemm_common.leave(flags, counters, members, ctx)


class Example(gemm_common.Gemm):
    kernel = gemm_all_reduce_atomics

    def prepare(self):
        self.sums = self.ctx.zeros(self.M, self.N, dtype=self.sum_dtype)

    def run(self, trace=False):
        self.sums.zero_()
        self.launch(trace)
        self.c.copy_(self.sums)

    def launch(self, trace):
        self.matmul(
            (min(self.tiles, self.args.gemm_sms),),
            self.a, self.b, self.sums, *self.sizes, *self.strides, *self.turn, self.ctx.get_device_context(),
            self.rank, self.world, *self.blocks, self.group_m, trace,
        )  # fmt: skip

    def owner(self, row, column, tile):
        return f"to which every rank adds; rounded by rank {self.rank}"


if __name__ == "__main__":
    gemm_common.main(Example, __doc__)
