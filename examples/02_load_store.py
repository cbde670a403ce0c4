"""Two ways to gather everybody's data: every rank pushes its own to all, or every rank pulls from all.

Pushing writes to peers and pulling reads from them, so they differ in what must be on the heap and in when it is ready.

iris run -n 3 examples/02_load_store.py
"""

import torch
import triton
import triton.language as tl

import iris


@triton.jit
def push(context, mine, gathered, n, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    value = tl.load(mine + offs, mask=mask)
    for step in range(world):
        # Ranks begin with different peers, so that they do not all write to one at a time.
        peer = (rank + step) % world
        ctx.store(gathered + rank * n + offs, value, to_rank=peer, mask=mask)


@triton.jit
def pull(context, mine, gathered, n, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    for step in range(world):
        peer = (rank + step) % world
        # A load and a store in one: from the peer's `mine` to this rank's `gathered`.
        ctx.get(mine + offs, gathered + peer * n + offs, from_rank=peer, mask=mask)


ctx = iris.iris(heap_size=1 << 20)
rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
n, block = 1000, 256
grid = (triton.cdiv(n, block),)

# Values that depend on rank and position: with constants, a mixed-up rank or offset would go unseen.
values = torch.stack([1000.0 * r + torch.arange(n) for r in range(world)]).to(device)

# Push: what peers write, `gathered`, is on the heap. It is complete when all ranks have ended their kernels.
gathered = ctx.full((world, n), float("nan"))
mine = values[rank].clone()
ctx.barrier()
push[grid](ctx.get_device_context(), mine, gathered, n, rank, world, BLOCK=block)
ctx.barrier()
assert torch.equal(gathered, values)

# Pull: what peers read, `mine`, is on the heap. It must be written before any rank starts.
mine = ctx.as_symmetric(values[rank].clone())
gathered = torch.full((world, n), float("nan"), device=device)
ctx.barrier()
pull[grid](ctx.get_device_context(), mine, gathered, n, rank, world, BLOCK=block)
ctx.barrier()
assert torch.equal(gathered, values)

print(f"rank {rank} of {world}: pushed and pulled {world} x {n} values, both right")
