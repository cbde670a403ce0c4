"""Where does the time go? A stream of messages, as in 03_message_passing.py, with spans around what its programs do.

Writes trace.json for Perfetto (ui.perfetto.dev), Chrome and `iris trace`, and trace_rank<r>.json of each rank, into the
folder that is given, or into a temporary one.

iris run -n 2 examples/12_trace.py traces
iris trace traces/trace.json
"""

import sys
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl

import iris
from iris.tracing import figures, read


@triton.jit
def produce(ctx, messages, inbox, ready, consumed, rounds, n, BLOCK: tl.constexpr):
    to = (ctx.rank + 1) % ctx.world_size
    offs = tl.arange(0, BLOCK)
    for i in range(rounds):
        # A span has a kind, the rank that it is about, a place in memory, and two numbers of your own.
        span = ctx.tracing.record_event_start(iris.TraceEvent().wait, to, consumed, i, 0)
        ctx.wait(consumed, i, peer=to)
        ctx.tracing.record_event_end(span)
        span = ctx.tracing.record_event_start(iris.TraceEvent().put, to, inbox + offs, i, 0, mask=offs < n)
        ctx.put(messages + i * n + offs, inbox + offs, to_rank=to, mask=offs < n)
        ctx.tracing.record_event_end(span)
        ctx.notify(ready, i + 1, to)


@triton.jit
def consume(ctx, inbox, ready, consumed, received, rounds, n, BLOCK: tl.constexpr):
    sender = (ctx.rank + ctx.world_size - 1) % ctx.world_size
    offs = tl.arange(0, BLOCK)
    for i in range(rounds):
        span = ctx.tracing.record_event_start(iris.TraceEvent().wait, sender, ready, i, 1)
        ctx.wait(ready, i + 1, peer=sender)
        ctx.tracing.record_event_end(span)
        span = ctx.tracing.record_event_start(iris.TraceEvent().compute, -1, received, i, 1)
        value = tl.load(inbox + offs, mask=offs < n)
        tl.store(received + i * n + offs, value * value, mask=offs < n)
        ctx.tracing.record_event_end(span)
        ctx.notify(consumed, i + 1, sender)


@triton.jit
def pass_messages(
    context, messages, inbox, ready, consumed, received, rounds, n,
    rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr, TRACING: tl.constexpr,
):  # fmt: skip
    # Without TRACING the spans are not compiled: the kernel is the same as one that has none.
    ctx = iris.DeviceContext.initialize(context, rank, world, tracing=TRACING)
    if tl.program_id(0) == 0:
        produce(ctx, messages, inbox, ready, consumed, rounds, n, BLOCK)
    else:
        consume(ctx, inbox, ready, consumed, received, rounds, n, BLOCK)


ctx = iris.iris(heap_size=1 << 20)
rank, world = ctx.get_rank(), ctx.get_num_ranks()
rounds, n = 4, 50

messages = (torch.arange(rounds * n).reshape(rounds, n) + 1000 * rank).to(ctx.get_device())
sender = (rank - 1) % world
received = torch.full_like(messages, -1)
inbox = ctx.full((n,), -1, dtype=messages.dtype)
ready = ctx.zeros(1, dtype=torch.int32)
consumed = ctx.zeros(1, dtype=torch.int32)

ctx.tracing.enable(max_events=1000)
ctx.barrier()
pass_messages[(2,)](
    ctx.get_device_context(), messages, inbox, ready, consumed, received, rounds, n, rank, world, BLOCK=64, TRACING=True
)
ctx.barrier()
expected = torch.arange(rounds * n).reshape(rounds, n) + 1000 * sender
assert torch.equal(received.cpu(), expected**2)

own = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
folder = Path(ctx.broadcast(own))  # that of rank 0
merged = ctx.tracing.export(folder / "trace.json", merge=True)  # collective
events = ctx.tracing.events()
moved = sum(events["payload_size"].tolist())
assert len(events["event_id"]) == 4 * rounds
assert moved == rounds * n * messages.element_size()
print(f"rank {rank} of {world}: {4 * rounds} spans, {moved} bytes put")
if rank == 0:
    print(figures.report(read(folder / "trace.json")))
