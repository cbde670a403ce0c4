"""A GEMM and an independent collective on one device: five collectives, two modes, several splits, the same bits.

In "fused" mode one kernel has a queue of tiles of the product and a queue of tiles of the collective, and whoever finds
its own empty helps with the other. In "concurrent" mode two kernels run on two streams. `gemm_wgs` says how many
programs begin with the product. Neither result depends on any of that.

iris run -n 3 examples/18_concurrent_gemm.py
"""

import torch

import iris

ctx = iris.iris(heap_size=1 << 24)
rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
M, N, K = 70, 96, 64
rows, columns = 4 * world + 1, 24  # rows that the ranks do not share evenly

# The product is each rank's own; its tensors may lie anywhere.
generator = torch.Generator().manual_seed(rank)
a = torch.randn(M, K, generator=generator).to(device)
b = torch.randn(K, N, generator=generator).to(device)
product = a.double() @ b.double()

# Random whole numbers for the collectives, row r for rank r: the same on every rank, so that each knows what to expect.
everyone = torch.randint(-99, 100, (world, rows, columns), generator=torch.Generator().manual_seed(1))
everyone = everyone.float().to(device)
mine = ctx.as_symmetric(everyone[rank])  # peers read it


def chunk(tensor):
    """This rank's rows, as torch.chunk cuts them."""
    size = -(-tensor.shape[0] // world)
    return tensor[rank * size : (rank + 1) * size]


expected = {
    "all_gather": everyone.reshape(world * rows, columns),
    "all_reduce": everyone.sum(dim=0),
    "reduce_scatter": chunk(everyone.sum(dim=0)),
    "all_to_all": torch.cat([chunk(theirs) for theirs in everyone]),
    "broadcast": everyone[0],
}
splits = {
    "defaults": {},
    "all programs begin with the collective": {"num_wgs": 4, "gemm_wgs": 0},
    "all begin with the product, one may go on to the collective": {"num_wgs": 4, "gemm_wgs": 4, "comm_cap": 1},
    "two kernels": {"mode": "concurrent", "gemm_wgs": 3, "comm_wgs": 1},
}

first = None
checked = 0
for name, wanted in expected.items():
    # Peers write the output where the operation says so; made once, because all ranks allocate together.
    out = ctx.full(tuple(wanted.shape), float("nan")) if name in ("all_gather", "all_reduce", "broadcast") else None
    for split in splits.values():
        c, moved = getattr(ctx.concurrent, name)(a, b, mine, comm_dst=out, **split)
        ctx.synchronize()
        assert torch.equal(moved, wanted), f"rank {rank}: {name}, {split}"
        # float32 may be multiplied in tf32, with 10 bits; sums of K products of about 1.
        assert (c.double() - product).abs().max() < 2.0**-9 * K, f"rank {rank}: {name}, {split}"
        first = c if first is None else first
        assert torch.equal(c, first), f"rank {rank}: the product's bits depend on {name}, {split}"
        checked += 1

ctx.barrier()  # raises on every rank when a wait of any rank did not end
print(f"rank {rank} of {world}: {checked} calls, {len(splits)} splits of programs, the same bits")
