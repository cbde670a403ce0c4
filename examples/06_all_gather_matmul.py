"""All-gather + matmul of the library, compared with float64; prints the plan and why it was chosen.

iris run -n 2 examples/06_all_gather_matmul.py --m 64 --n 96 --k 128 --dtype bfloat16
"""

import argparse

import torch

import iris

# Allowed error of an element, as a multiple of the sum of |a * b| over K, and of the result for its last rounding.
LAST_ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--m", type=int, default=64, help="rows of A and out")
    parser.add_argument("--n", type=int, default=96, help="columns of B and out")
    parser.add_argument("--k", type=int, default=120, help="columns of the gathered A, a multiple of the ranks")
    parser.add_argument("--dtype", choices=LAST_ROUNDING, default="float32")
    parser.add_argument("--algorithm", choices=("torch", "pull"), help="default: the operation chooses")
    args = parser.parse_args()

    ctx = iris.iris(heap_size=1 << 28)
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    if args.k % world:
        parser.error(f"--k {args.k} is not a multiple of {world} ranks")
    dtype = getattr(torch, args.dtype)

    # The same on every rank, so that each can compute the whole product to compare with.
    generator = torch.Generator().manual_seed(0)
    whole_a = torch.randn(args.m, args.k, generator=generator).to(dtype)
    b = torch.randn(args.k, args.n, generator=generator).to(dtype).to(device)
    bias = torch.randn(args.n, generator=generator).to(dtype).to(device)

    # Rank r holds columns r * K/world to (r + 1) * K/world of A. Peers read it, so it goes on the symmetric heap.
    shard = ctx.as_symmetric(whole_a.chunk(world, dim=1)[rank].contiguous().to(device))
    out = torch.full((args.m, args.n), float("nan"), dtype=dtype, device=device)

    workspace = ctx.ops.all_gather_matmul(out, shard, b, bias, algorithm=args.algorithm)
    ctx.synchronize()

    a, b, bias, out = (t.cpu().double() for t in (whole_a, b, bias, out))
    expected = a @ b + bias
    error = (out - expected).abs()
    sums = a.abs() @ b.abs() + bias.abs()
    precise = torch.get_float32_matmul_precision() == "highest" or args.dtype != "float32"
    allowed = (2.0**-24 * args.k**0.5 * 3 if precise else 2.0**-10) * sums + LAST_ROUNDING[args.dtype] * expected.abs()
    assert bool((error <= allowed).all()), f"rank {rank}: largest error {error.max():.3g}"
    if rank == 0:
        print(workspace.plan)
    print(f"rank {rank} of {world}: largest error {error.max():.2e}, within {allowed.max():.2e} of float64")


if __name__ == "__main__":
    main()
