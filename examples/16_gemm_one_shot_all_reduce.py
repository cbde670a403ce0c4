"""GEMM + one-shot all-reduce: every rank publishes its product, and every rank reads all of them and adds.

A and B are divided along K, C = sum over ranks of A @ B on every rank, added in rank order, so all ranks have the same
bits. Each rank reads world - 1 products: the way to go for small C, because it is one exchange.

Protocol. A program takes tiles from a queue, multiplies them and publishes each: it stores the tile in the own heap,
in float32 (int32 for int8), and sets the tile's lock to the number of the call. When no tile is left to multiply, it
takes tiles to add: it waits for the lock on every rank, reads the tile of each, adds and stores to the own C. The
kernel ends when all peers' have, so the products may then be overwritten.

Progress. When a program begins to wait, every tile of its rank has been taken to be multiplied by a program that runs.

iris run -n 2 examples/16_gemm_one_shot_all_reduce.py --validate
"""

import gemm_common
import torch
import triton
import triton.language as tl

import iris
from iris.x.schedule import grouped_tile
from iris.x.turn import begin_turn


@triton.jit(do_not_specialize=["epoch"])
def gemm_one_shot_all_reduce(
    a, b, c, products, locks, epoch, queue, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    flags, counters, members, context,
    rank: tl.constexpr, world: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, rank, world, tracing=TRACE)
    begin_turn(flags, counters, members, rank, context, world)
    product_view = iris.make_tensor_view(products, M, N, N, 1)
    c_view = iris.make_tensor_view(c, M, N, N, 1)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)

    position = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")
    while position < tiles_m * tiles_n:
        pid_m, pid_n = grouped_tile(position, tiles_m, tiles_n, GROUP_M)
        span = ctx.tracing.record_event_start(iris.TraceEvent().compute, -1, 0, pid_m * tiles_n + pid_n, 0)
        acc = gemm_common.multiply_tile(
            a, b, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, pid_m, pid_n, ctx, BLOCK_M, BLOCK_N, BLOCK_K
        )
        ctx.publish_tile(iris.Tile(pid_m, pid_n, BLOCK_M, BLOCK_N, acc), product_view, locks, epoch)
        ctx.tracing.record_event_end(span)
        position = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")

    position = tl.atomic_add(queue + 1, 1, sem="relaxed", scope="gpu")
    while position < tiles_m * tiles_n:
        pid_m, pid_n = grouped_tile(position, tiles_m, tiles_n, GROUP_M)
        span = ctx.tracing.record_event_start(iris.TraceEvent().reduce, -1, 0, pid_m * tiles_n + pid_n, 0)
        tile = iris.TileView(pid_m, pid_n, BLOCK_M, BLOCK_N)
        ctx.all_reduce_one_shot(tile, product_view, c_view, locks, epoch)
        ctx.tracing.record_event_end(span)
        position = tl.atomic_add(queue + 1, 1, sem="relaxed", scope="gpu")

    if gemm_common.leave(flags, counters, members, ctx):
        tl.store(queue, 0)
        tl.store(queue + 1, 0)


class Example(gemm_common.Gemm):
    kernel = gemm_one_shot_all_reduce

    def prepare(self):
        self.products = self.ctx.empty(self.M, self.N, dtype=self.sum_dtype)
        self.locks = self.ctx.zeros(self.tiles, dtype=torch.int32)
        self.queue = torch.zeros(2, dtype=torch.int32, device=self.device)
        self.epoch = 0

    def launch(self, trace):
        self.epoch += 1
        self.matmul(
            (min(self.tiles, self.args.gemm_sms),),
            self.a, self.b, self.c, self.products, self.locks, self.epoch, self.queue, *self.sizes, *self.strides,
            *self.turn, self.ctx.get_device_context(), self.rank, self.world, *self.blocks, self.group_m, trace,
        )  # fmt: skip

    def owner(self, row, column, tile):
        return f"added and stored by rank {self.rank}"


if __name__ == "__main__":
    gemm_common.main(Example, __doc__)
