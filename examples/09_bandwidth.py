"""GB/s of loads, stores and atomics on other ranks' memory, as a table with a row and a column for each rank.

- load, store, atomic_add, atomic_xchg: one rank at a time works on the memory of one other, for every pair.
- all-load, all-store, all-atomic_add, all-atomic_xchg: every rank works on the memory of all others, at the same time.

Every result is checked before it is timed. A figure is the median over the repetitions.

iris run -n 2 examples/09_bandwidth.py --op store all-store --dtype float16 --bytes 1048576 67108864
"""

import argparse

import torch
import triton
import triton.language as tl

import iris

# All kernels have the same arguments. `shared` is on the heap and `private` need not be; which of them is read and how
# many rows it has is said by `Run`. A launch works on `peers` ranks, beginning with rank `first`.


@triton.jit
def load(context, shared, private, n, first, peers, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for step in range(peers):
        peer = (first + step) % world
        value = ctx.load(shared + offs, from_rank=peer, mask=offs < n)
        tl.store(private + tl.cast(peer, tl.int64) * n + offs, value, mask=offs < n)


@triton.jit
def store(context, shared, private, n, first, peers, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(private + offs, mask=offs < n)
    row = shared + tl.cast(rank, tl.int64) * n
    for step in range(peers):
        ctx.store(row + offs, value, to_rank=(first + step) % world, mask=offs < n)


@triton.jit
def atomic_add(context, shared, private, n, first, peers, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(private + offs, mask=offs < n)
    for step in range(peers):
        # Nothing is published by the additions, so relaxed is enough.
        ctx.atomic_add(shared + offs, value, (first + step) % world, mask=offs < n, sem="relaxed")


@triton.jit
def atomic_xchg(
    context, shared, private, n, first, peers, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr
):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(private + offs, mask=offs < n)
    for step in range(peers):
        # What one peer gives goes to the next.
        value = ctx.atomic_xchg(shared + offs, value, (first + step) % world, mask=offs < n, sem="relaxed")
    tl.store(private + offs, value, mask=offs < n)


KERNELS = {kernel.__name__: kernel for kernel in (load, store, atomic_add, atomic_xchg)}
DTYPES = ("float16", "bfloat16", "float32", "int32")
UNWRITTEN = -99


def others_of(world: int) -> int:
    """How many ranks one works on in the ``all-`` forms: the others, or itself when it is alone."""
    return max(world - 1, 1)


class Run:
    """The buffers and launches of one operation and size."""

    def __init__(self, ctx, op: str, dtype: torch.dtype, nbytes: int):
        self.ctx, self.rank, self.world = ctx, ctx.get_rank(), ctx.get_num_ranks()
        self.op = op.removeprefix("all-")
        self.n = nbytes // dtype.itemsize
        # 16 KiB a program, so that each thread has several accesses of 16 bytes on their way.
        self.block = 16384 // dtype.itemsize
        # The same on every rank, so that each can tell what all ranks had. Small whole numbers add up without rounding.
        generator = torch.Generator().manual_seed(self.n)
        self.values = torch.randint(-16, 16, (self.world + 1, self.n), generator=generator).to(dtype)
        mine, start = (self.values[row].clone().to(ctx.get_device()) for row in (self.rank, self.world))
        rows = torch.full((self.world, self.n), UNWRITTEN, dtype=dtype, device=ctx.get_device())
        shared, self.private = {
            "load": (mine, rows),  # row p of `private` becomes what rank p has
            "store": (rows, mine),  # row p of `shared` becomes what rank p has
            "atomic_add": (start, mine),
            "atomic_xchg": (start, mine),
        }[self.op]
        self.shared = ctx.as_symmetric(shared)

    def launch(self, first: int, peers: int) -> None:
        KERNELS[self.op][(triton.cdiv(self.n, self.block),)](
            self.ctx.get_device_context(), self.shared, self.private, self.n, first, peers,
            self.rank, self.world, BLOCK=self.block, num_warps=8,
        )  # fmt: skip

    def validate(self, together: bool) -> None:
        """Each rank works once on the memory of each, and checks what this left."""
        self.ctx.barrier()  # every rank has filled its buffers
        for first, peers in [(self.rank + 1, self.world)] if together else [(peer, 1) for peer in range(self.world)]:
            self.launch(first, peers)
        self.ctx.barrier()
        shared, private, values = self.shared.cpu(), self.private.cpu(), self.values
        if self.op == "load":
            right = torch.equal(private, values[:-1])
        elif self.op == "store":
            right = torch.equal(shared, values[:-1])
        elif self.op == "atomic_add":
            right = torch.equal(shared.double(), values.double().sum(dim=0))
        else:
            # Exchanges in any order move values about; at each place the ranks together still have what they had.
            everyone = [self.ctx.broadcast((shared, private), src=rank) for rank in range(self.world)]
            have = torch.stack([part for parts in everyone for part in parts]).double()
            had = torch.cat([values[:-1], values[-1:].expand(self.world, -1)]).double()
            right = torch.equal(have.sort(dim=0).values, had.sort(dim=0).values)
        assert right, f"rank {self.rank}: {self.op} left wrong values"
        self.ctx.barrier()  # every rank has looked, and what comes next may change the values

    def time(self, together: bool, warmup: int, repeats: int) -> list[list[float]]:
        """Milliseconds, a row for each rank: on each rank, or on all others at once."""
        options = {"n_warmup": warmup, "n_repeat": repeats, "return_mode": "median", "device": self.ctx.get_device()}
        if together:
            # A barrier in the stream lets the ranks begin together, and the time holds nothing of the host.
            others = others_of(self.world)
            mine = iris.do_bench(lambda: self.launch(self.rank + 1, others), self.ctx.device_barrier, **options)
            return [[self.ctx.broadcast(mine, src=rank)] for rank in range(self.world)]
        table = []
        for rank in range(self.world):
            row = None
            if rank == self.rank:
                row = [iris.do_bench(lambda p=peer: self.launch(p, 1), **options) for peer in range(self.world)]
            table.append(self.ctx.broadcast(row, src=rank))  # the others wait here and leave the links alone
        return table


def show(run: Run, op: str, table: list[list[float]], together: bool) -> None:
    """The table, and the range over the ranks."""
    nbytes = run.n * run.private.element_size()
    per_second = [[nbytes * (others_of(run.world) if together else 1) / ms / 1e6 for ms in row] for row in table]
    heads = ["all others"] if together else [f"rank {peer}" for peer in range(run.world)]
    print(f"\n{op}, {run.private.dtype}, {nbytes} bytes a peer, GB/s on the memory of")
    print(" " * 10 + "".join(f"{head:>12}" for head in heads))
    for rank, row in enumerate(per_second):
        print(f"by rank {rank:<2}" + "".join(f"{figure:12.3f}" for figure in row))
    # On one's own memory the links take no part.
    figures = [f for rank, row in enumerate(per_second) for peer, f in enumerate(row) if together or peer != rank]
    if figures:
        slow, quick = min(figures), max(figures)
        updates = f"; {quick / run.private.element_size():.3f} billion updates a second" if "atomic" in op else ""
        print(f"{'slowest rank' if together else 'slowest pair'} {slow:.3f}, fastest {quick:.3f}{updates}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*KERNELS, *(f"all-{name}" for name in KERNELS)]
    parser.add_argument("--op", nargs="+", choices=names, default=names, help="default: all of them")
    parser.add_argument("--dtype", choices=DTYPES, default="int32", help="exchanges are int32 only")
    parser.add_argument("--bytes", nargs="+", type=int, help="bytes for each peer; default 64 MiB, interpreted 20000")
    parser.add_argument("--warmup", type=int, help="calls before the timed ones; default 10, interpreted 0")
    parser.add_argument("--repeats", type=int, help="timed calls; default 50, interpreted 2")
    parser.add_argument("--heap", type=int, default=1 << 30, help="bytes of symmetric heap of a rank")
    parser.add_argument("--validate", action=argparse.BooleanOptionalAction, default=True, help="check before timing")
    args = parser.parse_args()
    if args.dtype != "int32" and any("xchg" in op for op in args.op):
        parser.error(f"exchanges are of int32 words; with --dtype {args.dtype} name other operations with --op")

    ctx = iris.iris(args.heap)
    on_gpu = ctx.get_device().type == "cuda"
    warmup, repeats = (10, 50) if on_gpu else (0, 2)
    warmup = warmup if args.warmup is None else args.warmup
    repeats = repeats if args.repeats is None else args.repeats
    if ctx.get_rank() == 0 and not on_gpu:
        print("Kernels are interpreted here: the values are checked, the times mean nothing.")

    for op in args.op:
        together = op.startswith("all-")
        for nbytes in args.bytes or [1 << 26 if on_gpu else 20000]:
            run = Run(ctx, op, getattr(torch, args.dtype), nbytes)
            if args.validate:
                run.validate(together)
            table = run.time(together, warmup, repeats)
            if ctx.get_rank() == 0:
                show(run, op, table, together)
            del run
            ctx.barrier()  # what was on the heap is free again
    checked = "every value is right" if args.validate else "values not checked"
    print(f"rank {ctx.get_rank()} of {ctx.get_num_ranks()}: {len(args.op)} operations, {checked}")


if __name__ == "__main__":
    main()
