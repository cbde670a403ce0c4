"""Steps of a ring that are separated by a barrier in the stream: the host waits for nothing until the end.

Data goes round the ring, one neighbour a step, through two buffers in turn. On a GPU the steps are captured in a graph
and replayed.

iris run -n 3 examples/05_device_barrier.py
"""

import torch
import triton
import triton.language as tl

import iris


@triton.jit
def shift(context, source, target, n, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    """The next rank's `target` becomes this rank's `source` + 1."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + offs, mask=offs < n)
    ctx.store(target + offs, value + 1, to_rank=(rank + 1) % world, mask=offs < n)


ctx = iris.iris(heap_size=1 << 20)
rank, world = ctx.get_rank(), ctx.get_num_ranks()
n, block, steps, repeats = 300, 128, 2 * world, 3
buffers = [ctx.zeros(n, dtype=torch.int32), ctx.zeros(n, dtype=torch.int32)]
ctx.barrier()  # every rank has filled its buffers before its neighbour writes there


def ring():
    for step in range(steps):
        source, target = buffers[step % 2], buffers[(step + 1) % 2]
        shift[(triton.cdiv(n, block),)](ctx.get_device_context(), source, target, n, rank, world, BLOCK=block)
        # After it, what the neighbour wrote here is visible, and it has read what the next step overwrites.
        ctx.device_barrier()


ring()  # compiles the kernels; needed before a capture
buffers[0].copy_(torch.arange(n, dtype=torch.int32) + 1000 * rank)
ctx.barrier()

if ctx.get_device().type == "cuda":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ring()
    for _ in range(repeats):
        graph.replay()
else:
    for _ in range(repeats):
        ring()
ctx.barrier()

# The data went round the ring twice in each repetition and is back where it began, with 1 added in each step.
expected = torch.arange(n) + 1000 * rank + repeats * steps
assert torch.equal(buffers[0].cpu().long(), expected)
print(f"rank {rank} of {world}: {repeats} x {steps} steps, the data is back")
