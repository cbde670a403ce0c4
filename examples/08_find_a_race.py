"""A race that one call does not show, found without a GPU: a buffer that is written again before it was read.

In each call every rank sends a block to the next rank, and two flags could say when:
- ready:    lies with the reader. "Block number e is in your inbox."
- consumed: lies with the writer. "I have read block number e, you may overwrite it."
Without the second a fast rank overwrites what a slow one has not read. All ranks run in this process.

python examples/08_find_a_race.py --ranks 4 --seeds 20
"""

import argparse
import os

os.environ.setdefault("IRIS_RUNTIME", "sim")

import torch
import triton
import triton.language as tl

import iris


@triton.jit
def exchange_kernel(
    block, inbox, ready, consumed, received, epoch, context,
    rank: tl.constexpr, world: tl.constexpr, WAIT_CONSUMED: tl.constexpr,
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, rank, world)
    to, sender = (rank + 1) % world, (rank + world - 1) % world
    offs = tl.arange(0, 16)
    if WAIT_CONSUMED:
        ctx.wait(consumed, epoch - 1, peer=to)
    ctx.store(inbox + offs, tl.load(block + offs), to_rank=to)
    ctx.notify(ready, epoch, to)
    ctx.wait(ready, epoch, peer=sender)
    tl.store(received + offs, tl.load(inbox + offs))
    ctx.notify(consumed, epoch, sender)


def exchange(ctx, wait_consumed: bool, calls: int = 3) -> list[int]:
    """What each rank does. Returns the first number of every block that it has received."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    context = ctx.get_device_context()
    inbox = ctx.zeros(16, dtype=torch.int32)
    ready, consumed = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    received = torch.zeros(calls, 16, dtype=torch.int32)
    ctx.barrier()
    for call in range(calls):
        block = torch.full((16,), 10 * rank + call, dtype=torch.int32)
        exchange_kernel[(1,)](
            block, inbox, ready, consumed, received[call], call + 1, context, rank, world, WAIT_CONSUMED=wait_consumed
        )
    ctx.barrier()
    return received[:, 0].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=20, help="how many orders of ranks and programs to try")
    args = parser.parse_args()

    print("ready without consumed:")
    try:
        iris.sim.explore(exchange, args.ranks, False, seeds=range(args.seeds))
        raise SystemExit("no race was found")
    except iris.sim.RaceError as error:
        print(error)

    print("with both:")
    runs = iris.sim.explore(exchange, args.ranks, True, seeds=range(args.seeds))
    for rank in range(args.ranks):
        sender = (rank - 1) % args.ranks
        expected = [10 * sender + call for call in range(3)]
        assert all(results[rank] == expected for results in runs), [results[rank] for results in runs]
        print(f"rank {rank} of {args.ranks}: received {expected} from rank {sender} with all of {args.seeds} seeds")


if __name__ == "__main__":
    main()
