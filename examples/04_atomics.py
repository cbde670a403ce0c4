"""Atomics on other ranks' memory: a histogram whose bins are spread over the ranks, and work taken from one counter.

iris run -n 3 examples/04_atomics.py
"""

import torch
import triton
import triton.language as tl

import iris


@triton.jit
def count_values(values, bins, n, rank, heap_bases, world: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + offs, mask=offs < n, other=0)
    for owner in range(world):
        # Bin b belongs to rank b % world. Nothing is published by these additions, so relaxed is enough; the default
        # scope, "sys", is what makes additions of different GPUs to one word add up.
        mine = (offs < n) & (value % world == owner)
        iris.atomic_add(bins + value // world, 1, rank, owner, heap_bases, mask=mine, sem="relaxed")


@triton.jit
def take_work(counter, taken_by, items, rank, heap_bases):
    # Every program of every rank takes the next item from the counter on rank 0 until none is left.
    item = iris.atomic_add(counter, 1, rank, 0, heap_bases, sem="relaxed")
    while item < items:
        # The old value is the number this program owns alone, so on rank 0 each item is signed exactly once.
        iris.atomic_add(taken_by + item, rank + 1, rank, 0, heap_bases, sem="relaxed")
        item = iris.atomic_add(counter, 1, rank, 0, heap_bases, sem="relaxed")


ctx = iris.iris(heap_size=1 << 20)
rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()

# Histogram: bin b is element b // world on rank b % world.
n, num_bins, block = 2000, 48, 256
generator = torch.Generator().manual_seed(0)
all_values = torch.randint(0, num_bins, (world, n), generator=generator, dtype=torch.int32)
values = all_values[rank].to(device)
bins = ctx.zeros(triton.cdiv(num_bins, world), dtype=torch.int32)
ctx.barrier()
count_values[(triton.cdiv(n, block),)](values, bins, n, rank, ctx.get_heap_bases(), world, BLOCK=block)
ctx.barrier()
expected = torch.bincount(all_values.flatten(), minlength=num_bins)[rank::world]
assert torch.equal(bins.cpu().long()[: len(expected)], expected)

# Work: who took an item is only known afterwards; that each was taken once is certain.
items = 100
counter = ctx.zeros(1, dtype=torch.int32)
taken_by = ctx.zeros(items, dtype=torch.int32)
ctx.barrier()
take_work[(4,)](counter, taken_by, items, rank, ctx.get_heap_bases())
ctx.barrier()
takers = ctx.broadcast(taken_by, src=0)
assert int(takers.min()) >= 1
assert int(takers.max()) <= world
print(f"rank {rank} of {world}: owns {len(expected)} bins, took {int((takers == rank + 1).sum())} of {items} items")
