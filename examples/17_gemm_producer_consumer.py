"""GEMM + all-scatter by producers and consumers: some programs multiply, others send what has been multiplied.

B is divided along N, A is whole on every rank: C = A @ (B of all ranks side by side), on every rank. The programs that
multiply go on while links are busy, unlike those of `15_gemm_all_scatter.py`, which store to peers themselves.

Protocol. A producer stores a tile in the own C and sets the tile's flag to the number of the call. A consumer waits for
it, reads the tile and stores it on every peer whose kernel runs (*ready* of `iris.x.turn`). A kernel ends when all
peers' have: then C is complete.

Progress. Roles are given out in the order in which programs start, so producers have started before a consumer waits
for one, and producers wait for nobody.

iris run -n 2 examples/17_gemm_producer_consumer.py --validate
"""

import gemm_common
import torch
import triton
import triton.language as tl

import iris
from iris.x.schedule import grouped_tile, rotated_rank, tile_number
from iris.x.tile import tile_ptr
from iris.x.turn import begin_turn, wait_for_input


@triton.jit
def produce(
    a, b, own_c, made, epoch, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, first, programs, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for position in range(first, tiles_m * tiles_n, programs):
        pid_m, pid_n = grouped_tile(position, tiles_m, tiles_n, GROUP_M)
        tile = tile_number(pid_m, pid_n, tiles_n)
        span = ctx.tracing.record_event_start(iris.TraceEvent().compute, -1, 0, tile, 0)
        acc = gemm_common.multiply_tile(
            a, b, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, pid_m, pid_n, ctx, BLOCK_M, BLOCK_N, BLOCK_K
        )
        ptrs, mask = tile_ptr(own_c, M, N, stride_cm, 1, pid_m, pid_n, BLOCK_M, BLOCK_N)
        tl.store(ptrs, acc.to(own_c.dtype.element_ty), mask=mask)
        ctx.tracing.record_event_end(span)
        iris.signal.publish(made + tile, epoch)  # after the stores of all threads of this program


@triton.jit
def consume(
    own_c, made, epoch, M, N, stride_cm, first, programs, flags, counters, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for position in range(first, tiles_m * tiles_n, programs):
        pid_m, pid_n = grouped_tile(position, tiles_m, tiles_n, GROUP_M)
        tile = tile_number(pid_m, pid_n, tiles_n)
        span = ctx.tracing.record_event_start(iris.TraceEvent().wait, ctx.rank, 0, tile, 0)
        ctx.wait(made + tile, epoch, peer=ctx.rank)
        ctx.tracing.record_event_end(span)
        ptrs, mask = tile_ptr(own_c, M, N, stride_cm, 1, pid_m, pid_n, BLOCK_M, BLOCK_N)
        result = tl.load(ptrs, mask=mask)
        for step in range(1, ctx.world_size):
            peer = rotated_rank(ctx.rank, step, ctx.world_size)
            wait_for_input(flags, counters, peer, ctx.context, 0)  # at once, when it has begun
            span = ctx.tracing.record_event_start(iris.TraceEvent().put, peer, ptrs, tile, step, mask=mask)
            ctx.store(ptrs, result, peer, mask=mask)
            ctx.tracing.record_event_end(span)


@triton.jit(do_not_specialize=["epoch"])
def gemm_producer_consumer(
    a, b, c, column, made, epoch, roles, producers, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    flags, counters, members, context,
    rank: tl.constexpr, world: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """``N`` are the columns of this rank, from ``column`` of C on."""
    ctx = iris.DeviceContext.initialize(context, rank, world, tracing=TRACE)
    begin_turn(flags, counters, members, rank, context, world)
    role = tl.atomic_add(roles, 1, sem="relaxed", scope="gpu")
    if role < producers:
        produce(
            a, b, c + column, made, epoch, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
            role, producers, ctx, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
        )  # fmt: skip
    else:
        consume(
            c + column, made, epoch, M, N, stride_cm, role - producers, tl.num_programs(0) - producers,
            flags, counters, ctx, BLOCK_M, BLOCK_N, GROUP_M,
        )  # fmt: skip
    if gemm_common.leave(flags, counters, members, ctx):
        tl.store(roles, 0)


class Example(gemm_common.Gemm):
    kernel = gemm_producer_consumer
    split = "n"
    communicators = True

    def prepare(self):
        self.producers, self.consumers = (min(self.tiles, n) for n in (self.args.gemm_sms, self.args.comm_sms))
        self.made = torch.zeros(self.tiles, dtype=torch.int32, device=self.device)
        self.roles = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.epoch = 0

    def launch(self, trace):
        self.epoch += 1
        self.matmul(
            (self.producers + self.consumers,),
            self.a, self.b, self.c, self.first, self.made, self.epoch, self.roles, self.producers, *self.sizes,
            *self.strides, self.N, *self.turn, self.ctx.get_device_context(),
            self.rank, self.world, *self.blocks, self.group_m, trace,
        )  # fmt: skip

    def owner(self, row, column, tile):
        return f"multiplied and sent by rank {self.owner_of_column(column)}"


if __name__ == "__main__":
    gemm_common.main(Example, __doc__)
