"""Every collective of `ctx.ccl`, called once and checked.

No call needs a barrier before or after it: it waits in the stream until its peers have written what it reads, and its
end tells that they have read what it may overwrite. The host waits for nothing, so calls can be captured in a graph.
Which tensors must be on the heap differs; where a peer reads or writes one directly, it must.

iris run -n 3 examples/11_collectives.py
"""

import torch

import iris
from iris.ccl import Config, ReduceOp

ctx = iris.iris(heap_size=1 << 22)
rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
before, after = (rank - 1) % world, (rank + 1) % world
M, N = 4, 6
checked = 0


def everyone(*shape):
    """Random whole numbers, row r for rank r: the same on every rank, so that each knows what to expect."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-99, 100, (world, *shape), generator=generator).float().to(device)


def on_heap(*shape):
    """A tensor that peers can reach, unwritten."""
    return ctx.full(shape, float("nan"))


def check(got, expected):
    global checked
    assert torch.equal(got, expected), f"rank {rank}:\n{got}\ninstead of\n{expected}"
    checked += 1


# all_gather: everybody's tensors, one below the other or side by side.
inputs = everyone(M, N)
out = on_heap(world * M, N)
ctx.ccl.all_gather(out, inputs[rank])
check(out, inputs.reshape(world * M, N))
out = on_heap(M, world * N)
ctx.ccl.all_gather(out, inputs[rank], dim=1)
check(out, torch.cat(list(inputs), dim=1))

# all_reduce: the sum, or another operation, on every rank. The operation chooses how; `explain` says what and why.
mine = ctx.as_symmetric(inputs[rank])
total = on_heap(M, N)
plan = ctx.ccl.explain("all_reduce", total, mine)
if rank == 0:
    print(plan)
ctx.ccl.all_reduce(total, mine)
check(total, inputs.sum(dim=0))
ctx.ccl.all_reduce(total, mine, op=ReduceOp.MAX)
check(total, inputs.amax(dim=0))
for variant in ("push", "one_shot", "two_shot", "ring", "atomic", "spinlock", "torch"):
    total.fill_(float("nan"))
    ctx.ccl.all_reduce(total, mine, config=Config(all_reduce_variant=variant))
    check(total, inputs.sum(dim=0))

# reduce_scatter: each rank has its rows of the sum when the output has that shape, as in PyTorch.
inputs = everyone(world * M, N)
mine = ctx.as_symmetric(inputs[rank])
out = torch.full((M, N), float("nan"), device=device)
ctx.ccl.reduce_scatter(out, mine)
check(out, inputs.sum(dim=0)[rank * M : (rank + 1) * M])
# With an output of the input's shape each rank has its tiles of the sum, and leaves the rest as it is.
out = torch.full((world * M, N), float("nan"), device=device)
ctx.ccl.reduce_scatter(out, mine, config=Config(block_size_m=2, block_size_n=4))
written = ~out.isnan()
check(out[written], inputs.sum(dim=0)[written])
owners = ctx.as_symmetric(written.float())
ctx.ccl.all_reduce(owners, owners)
check(owners, torch.ones_like(owners))  # every element is in a tile of one rank

# all_to_all: piece p goes to rank p. Pieces are columns unless dim says otherwise; dim=0 is PyTorch's.
inputs = everyone(M, world * N)
out = on_heap(M, world * N)
ctx.ccl.all_to_all(out, inputs[rank])
check(out, torch.cat([theirs[:, rank * N : (rank + 1) * N] for theirs in inputs], dim=1))
inputs = everyone(world * M, N)
out = on_heap(world * M, N)
ctx.ccl.all_to_all(out, inputs[rank], dim=0)
check(out, torch.cat([theirs[rank * M : (rank + 1) * M] for theirs in inputs]))

# From one rank to all: a whole tensor, in place or into another, or to each its rows.
root = world - 1
inputs = everyone(M, N)
data = ctx.as_symmetric(inputs[rank])
ctx.ccl.broadcast(data, src=root)
check(data, inputs[root])
out = on_heap(M, N)
ctx.ccl.broadcast_tensor(out, inputs[rank], src=0)
check(out, inputs[0])
rows = everyone(world * M, N)[root]
ctx.ccl.scatter(out, rows if rank == root else None, src=root)
check(out, rows[rank * M : (rank + 1) * M])

# From all to one rank: the sum, or everybody's tensors one below the other.
mine = ctx.as_symmetric(inputs[rank])
out = torch.full((M, N), float("nan"), device=device)
ctx.ccl.reduce(out, mine, dst=root)
if rank == root:
    check(out, inputs.sum(dim=0))
out = torch.full((world * M, N), float("nan"), device=device) if rank == root else None
ctx.ccl.gather(out, mine, dst=root)
if rank == root:
    check(out, inputs.reshape(world * M, N))

# From rank to rank, with tensors anywhere: both directions in one call, so that a ring does not wait for itself.
out = torch.full((M, N), float("nan"), device=device)
ctx.ccl.sendrecv(inputs[rank], out, dst=after, src=before)
check(out, inputs[before])
if world > 1:
    if rank == 0:
        ctx.ccl.send(inputs[rank], dst=root)
    elif rank == root:
        ctx.ccl.recv(out, src=0)
        check(out, inputs[0])

# A group is any ranks in any order, and the order is that of the result. Only members call.
group = [root, 0] if world > 1 else [0]
out = on_heap(len(group) * M, N)  # allocation stays collective over all ranks
if rank in group:
    ctx.ccl.all_gather(out, inputs[rank], group=group)
    check(out, torch.cat([inputs[member] for member in group]))

# With async_op=True a call runs in a stream of its own; what is launched in between goes on beside it.
out = on_heap(world * M, N)
work = ctx.ccl.all_gather(out, inputs[rank], async_op=True)
norm = inputs[rank].square().sum()
work.wait()  # what follows in the current stream sees the result
check(out, inputs.reshape(world * M, N))
check(norm, inputs.square().sum(dim=(1, 2))[rank])

# A graph replays a call on new data. A workspace of its own keeps the call apart from those outside of the graph.
workspace = ctx.ccl.all_reduce_preamble(total, mine)
ctx.ccl.all_reduce(total, mine, workspace=workspace)  # compiles; needed before a capture
graph = torch.cuda.CUDAGraph() if device.type == "cuda" else None
if graph is not None:
    with torch.cuda.graph(graph):
        ctx.ccl.all_reduce(total, mine, workspace=workspace)
elif rank == 0:
    print("no graph: PyTorch captures graphs on GPUs only, the calls are made one by one")
for factor in (1, 2, 3):
    mine.copy_(factor * inputs[rank])
    if graph is not None:
        graph.replay()
    else:
        ctx.ccl.all_reduce(total, mine, workspace=workspace)
    check(total, factor * inputs.sum(dim=0))

ctx.barrier()  # raises on every rank when a wait of any rank did not end
print(f"rank {rank} of {world}: {checked} results, all right")
