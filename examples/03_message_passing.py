"""A stream of messages through one buffer: a producer, a consumer, and two flags, ready and consumed.

Program 0 of each rank writes messages into the inbox of the next rank, program 1 reads its own inbox.
- ready:    lies with the consumer. "Message number e is in your inbox."
- consumed: lies with the producer. "I have read message number e, you may overwrite it."
A flag holds the number of the latest message, so it only grows and nothing is reset, not even between launches. With
several slots in place of the one inbox the producer can be ahead: 10_producer_consumer.py.

iris run -n 2 examples/03_message_passing.py
"""

import torch
import triton
import triton.language as tl

import iris


@triton.jit
def produce(ctx, messages, inbox, ready, consumed, first, rounds, n, BLOCK: tl.constexpr):
    to = (ctx.rank + 1) % ctx.world_size
    offs = tl.arange(0, BLOCK)
    for i in range(rounds):
        message = first + i + 1
        ctx.wait(consumed, message - 1, peer=to)  # the message before was read
        # A load here and a store there in one: from the own `messages`, which need not be on the heap.
        ctx.put(messages + (message - 1) * n + offs, inbox + offs, to_rank=to, mask=offs < n)
        ctx.notify(ready, message, to)  # after the stores of all threads of this program


@triton.jit
def consume(ctx, inbox, ready, consumed, received, first, rounds, n, BLOCK: tl.constexpr):
    sender = (ctx.rank + ctx.world_size - 1) % ctx.world_size
    offs = tl.arange(0, BLOCK)
    for i in range(rounds):
        message = first + i + 1
        ctx.wait(ready, message, peer=sender)
        value = tl.load(inbox + offs, mask=offs < n)
        tl.store(received + (message - 1) * n + offs, value, mask=offs < n)
        ctx.notify(consumed, message, sender)


@triton.jit
def pass_messages(
    context, messages, inbox, ready, consumed, received, first, rounds, n,
    rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, rank, world)
    # Two programs always fit on the device at once, so neither waits for one that cannot start.
    if tl.program_id(0) == 0:
        produce(ctx, messages, inbox, ready, consumed, first, rounds, n, BLOCK)
    else:
        consume(ctx, inbox, ready, consumed, received, first, rounds, n, BLOCK)


ctx = iris.iris(heap_size=1 << 20)
rank, world = ctx.get_rank(), ctx.get_num_ranks()
launches, rounds, n = 3, 5, 50

# What this rank sends, and what it expects: every value tells its sender, message and position apart.
numbers = torch.arange(launches * rounds)[:, None] * 100 + torch.arange(n)[None, :]
messages = (numbers + 10000 * rank).to(torch.int32).to(ctx.get_device())
sender = (rank - 1) % world
expected = (numbers + 10000 * sender).to(torch.int32).to(ctx.get_device())
received = torch.full_like(messages, -1)

# What peers write is on the heap.
inbox = ctx.full((n,), -1, dtype=torch.int32)
ready = ctx.zeros(1, dtype=torch.int32)
consumed = ctx.zeros(1, dtype=torch.int32)
ctx.barrier()  # the flags are 0 everywhere before anyone sets one

for launch in range(launches):
    # No barrier between the launches: the flags keep a fast rank from overwriting what a slow one has not read.
    pass_messages[(2,)](
        ctx.get_device_context(), messages, inbox, ready, consumed, received, launch * rounds, rounds, n,
        rank, world, BLOCK=64,
    )  # fmt: skip
ctx.barrier()  # raises on every rank when a wait of any rank did not end

assert torch.equal(received, expected)
print(f"rank {rank} of {world}: received {launches * rounds} messages from rank {sender} in order")
