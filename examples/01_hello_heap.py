"""Every rank reads what the next rank put on the symmetric heap.

iris run -n 2 examples/01_hello_heap.py
"""

import torch
import triton
import triton.language as tl

import iris


@triton.jit
def read_peer(data, out, rank, peer, heap_bases, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    # `data` is an address in this rank's heap; the value comes from the same place in the peer's heap.
    tl.store(out + offs, iris.load(data + offs, rank, peer, heap_bases, mask=mask), mask=mask)


ctx = iris.iris(heap_size=1 << 20)
rank, world = ctx.get_rank(), ctx.get_num_ranks()
peer = (rank + 1) % world

# Every rank makes the same allocations in the same order, so `data` lies at the same place in every heap.
data = ctx.arange(10 * rank, 10 * rank + 6)
# Only this rank touches `out`, so it need not be on the heap.
out = torch.full_like(data, -1)

ctx.barrier()  # every rank has written its data
read_peer[(1,)](data, out, rank, peer, ctx.get_heap_bases(), data.numel(), BLOCK=8)
ctx.barrier()  # every rank has read

assert out.tolist() == list(range(10 * peer, 10 * peer + 6)), out
print(f"rank {rank} of {world} read {out.tolist()} from rank {peer}")
