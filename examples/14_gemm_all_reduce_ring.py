"""GEMM + all-reduce along a ring: the sum of a tile travels from rank to rank, and each adds its own product.

A and B are divided along K, C = sum over ranks of A @ B on every rank. Sums travel in float32 (int32 for int8). Some
programs multiply, the others, the *lanes*, communicate: lane l of every rank handles tiles l, l + lanes and so on.

Protocol of a lane. Tile t starts at rank t % world, which sends its product to the next rank; every further rank adds
its own and sends on; the last one, before the start, stores the sum on every rank. A message goes into one of two slots
that the lane has on the next rank.
- ready:    lies with the receiver. "Message number e is in its slot."
- consumed: lies with the sender. "I have read message number e": message e + 2 may take its slot.
- made:     lies with the own rank, one for each tile. "The own product of this call is there."
Messages of a lane are counted over all calls, and no flag is reset. A rank's C may be overwritten when its product of
the tile has come, because its kernel runs then. The kernel ends when all peers' have: then C is complete.

Progress. Roles are given out in the order in which programs start, so who multiplies has started before anybody waits,
and multiplies without waiting. A lane waits for the same lane of other ranks at the same or an earlier tile.

iris run -n 3 examples/14_gemm_all_reduce_ring.py --validate
"""

import gemm_common
import torch
import triton
import triton.language as tl

import iris
from iris.x.schedule import grouped_tile, rotated_rank, tile_number
from iris.x.tile import tile_ptr
from iris.x.turn import begin_turn

SLOTS = tl.constexpr(2)  # a power of two: counts of messages may wrap


@triton.jit
def multiply(
    a, b, products, made, epoch, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, first, programs, ctx,
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
        ptrs, mask = tile_ptr(products, M, N, N, 1, pid_m, pid_n, BLOCK_M, BLOCK_N)
        tl.store(ptrs, acc, mask=mask)
        ctx.tracing.record_event_end(span)
        iris.signal.publish(made + tile, epoch)  # after the stores of all threads of this program


@triton.jit
def all_reduce(
    products, made, epoch, c, slots, ready, consumed, counts, M, N, lane, lanes, ctx,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    rank: tl.constexpr = ctx.rank
    world: tl.constexpr = ctx.world_size
    before: tl.constexpr = (rank + world - 1) % world
    after: tl.constexpr = (rank + 1) % world
    place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    own_slots = slots + tl.cast(lane, tl.int64) * (SLOTS * BLOCK_M * BLOCK_N) + place
    ready += lane * iris.signal.FLAG_STRIDE  # a cache line for each flag, as lanes poll them
    consumed += lane * iris.signal.FLAG_STRIDE
    sent = tl.load(counts + lane)  # to the next rank, in all calls
    received = tl.load(counts + lanes + lane)  # from the rank before
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for position in range(lane, tiles_m * tiles_n, lanes):
        pid_m, pid_n = grouped_tile(position, tiles_m, tiles_n, GROUP_M)
        tile = tile_number(pid_m, pid_n, tiles_n)
        start = tile % world
        span = ctx.tracing.record_event_start(iris.TraceEvent().wait, rank, 0, tile, 0)
        ctx.wait(made + tile, epoch, peer=rank)
        ctx.tracing.record_event_end(span)
        ptrs, mask = tile_ptr(products, M, N, N, 1, pid_m, pid_n, BLOCK_M, BLOCK_N)
        total = tl.load(ptrs, mask=mask, other=0)
        if start != rank:
            received += 1
            span = ctx.tracing.record_event_start(iris.TraceEvent().wait, before, 0, tile, 1)
            ctx.wait(ready, received, peer=before)
            ctx.tracing.record_event_end(span)
            span = ctx.tracing.record_event_start(iris.TraceEvent().reduce, before, 0, tile, 1)
            total = tl.load(own_slots + (received & (SLOTS - 1)) * (BLOCK_M * BLOCK_N)) + total
            ctx.tracing.record_event_end(span)
            ctx.notify(consumed, received, before)
        if start != after:  # somebody has not added yet
            sent += 1
            span = ctx.tracing.record_event_start(iris.TraceEvent().wait, after, 0, tile, 2)
            ctx.wait(consumed, sent - SLOTS, peer=after)  # at once for the first messages
            ctx.tracing.record_event_end(span)
            span = ctx.tracing.record_event_start(iris.TraceEvent().put, after, 0, tile, 2)
            ctx.store(own_slots + (sent & (SLOTS - 1)) * (BLOCK_M * BLOCK_N), total, after)
            ctx.tracing.record_event_end(span)
            ctx.notify(ready, sent, after)
        else:
            results, _ = tile_ptr(c, M, N, N, 1, pid_m, pid_n, BLOCK_M, BLOCK_N)
            span = ctx.tracing.record_event_start(iris.TraceEvent().put, -1, results, tile, 3, mask=mask)
            result = total.to(c.dtype.element_ty)
            for step in range(world):
                ctx.store(results, result, rotated_rank(rank, step, world), mask=mask)
            ctx.tracing.record_event_end(span)
    tl.store(counts + lane, sent)
    tl.store(counts + lanes + lane, received)


@triton.jit(do_not_specialize=["epoch"])
def gemm_all_reduce_ring(
    a, b, c, products, made, epoch, slots, ready, consumed, counts, roles, multipliers,
    M, N, K, stride_am, stride_ak, stride_bk, stride_bn, flags, counters, members, context,
    rank: tl.constexpr, world: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, rank, world, tracing=TRACE)
    begin_turn(flags, counters, members, rank, context, world)
    role = tl.atomic_add(roles, 1, sem="relaxed", scope="gpu")
    if role < multipliers:
        multiply(
            a, b, products, made, epoch, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, role, multipliers, ctx,
            BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
        )  # fmt: skip
    else:
        all_reduce(
            products, made, epoch, c, slots, ready, consumed, counts, M, N, role - multipliers,
            tl.num_programs(0) - multipliers, ctx, BLOCK_M, BLOCK_N, GROUP_M,
        )  # fmt: skip
    if gemm_common.leave(flags, counters, members, ctx):
        tl.store(roles, 0)


class Example(gemm_common.Gemm):
    kernel = gemm_all_reduce_ring
    communicators = True

    def prepare(self):
        ctx, stride = self.ctx, iris.signal.FLAG_STRIDE.value
        self.multipliers, self.lanes = (min(self.tiles, n) for n in (self.args.gemm_sms, self.args.comm_sms))
        # What the rank before or after this one writes is on the heap.
        self.slots = ctx.empty(self.lanes, SLOTS.value, self.blocks[0] * self.blocks[1], dtype=self.sum_dtype)
        self.ready = ctx.zeros(self.lanes, stride, dtype=torch.int32)
        self.consumed = ctx.zeros(self.lanes, stride, dtype=torch.int32)
        self.products = torch.empty(self.M, self.N, dtype=self.sum_dtype, device=self.device)
        self.made = torch.zeros(self.tiles, dtype=torch.int32, device=self.device)
        self.counts = torch.zeros(2, self.lanes, dtype=torch.int32, device=self.device)
        self.roles = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.epoch = 0

    def launch(self, trace):
        self.epoch += 1
        self.matmul(
            (self.multipliers + self.lanes,),
            self.a, self.b, self.c, self.products, self.made, self.epoch, self.slots, self.ready, self.consumed,
            self.counts, self.roles, self.multipliers, *self.sizes, *self.strides, *self.turn,
            self.ctx.get_device_context(), self.rank, self.world, *self.blocks, self.group_m, trace,
        )  # fmt: skip

    def owner(self, row, column, tile):
        start = tile % self.world
        return f"whose sum starts at rank {start} and is stored by rank {(start - 1) % self.world}"


if __name__ == "__main__":
    gemm_common.main(Example, __doc__)
