"""Atomics on other ranks' memory, and what their old values are good for.

- add: a histogram whose bins are spread over the ranks, and work taken from one counter;
- compare-and-swap: every program takes the first free seat;
- max: the largest value of all ranks and where it is, in one word.

How fast they are: 09_bandwidth.py.

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


@triton.jit
def take_seat(seats, rank, heap_bases):
    # Only a free seat, a 0, is replaced: of all who try at once, one finds the 0 and the others find that one's name.
    me = rank * tl.num_programs(0) + tl.program_id(0) + 1
    seat = 0
    found = iris.atomic_cas(seats, 0, me, rank, 0, heap_bases, sem="relaxed")
    while found != 0:
        seat += 1
        found = iris.atomic_cas(seats + seat, 0, me, rank, 0, heap_bases, sem="relaxed")


@triton.jit
def find_largest(values, largest, n, rank, heap_bases, world: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + offs, mask=offs < n, other=-1)
    # The value in the upper half decides, and what is below it comes along.
    place = tl.max((value.to(tl.int64) << 32) + rank * n + offs, axis=0)
    for peer in range(world):
        iris.atomic_max(largest, place, rank, peer, heap_bases, sem="relaxed")


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

# Seats: as many as programs, so that all are taken, each by another program.
programs = 3
seats = ctx.zeros(world * programs, dtype=torch.int32)
ctx.barrier()
take_seat[(programs,)](seats, rank, ctx.get_heap_bases())
ctx.barrier()
names = ctx.broadcast(seats, src=0).tolist()
assert sorted(names) == list(range(1, world * programs + 1)), names

# Largest: every rank offers the best of each of its programs to all ranks, so all of them end with the same word.
largest = ctx.full((1,), -1, dtype=torch.int64)
ctx.barrier()
find_largest[(triton.cdiv(n, block),)](values, largest, n, rank, ctx.get_heap_bases(), world, BLOCK=block)
ctx.barrier()
place = int(largest) & (2**32 - 1)
top = (all_values == all_values.max()).flatten().nonzero()
assert int(largest) >> 32 == int(all_values.max())
assert place == int(top.max())  # of equal values the last one wins

print(
    f"rank {rank} of {world}: owns {len(expected)} bins, took {int((takers == rank + 1).sum())} of {items} items; "
    f"all {len(names)} seats are taken, the largest value is number {place % n} of rank {place // n}"
)
