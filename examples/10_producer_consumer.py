"""A producer and a consumer on two ranks, with a ring of slots between them that is used over and over.

The producer writes messages into slots on the consumer and may be ahead by as many messages as there are slots. Each
program sends and receives a part of every message by itself, so it has slots and two flags of its own:
- ready:    lies with the consumer. "Your part of message number e is in its slot."
- consumed: lies with the producer. "I have read my part of message number e, you may overwrite it."
Messages are counted from 1 over all launches; message e goes to slot (e - 1) % slots. A flag holds the number of the
latest message, an epoch, so nothing is reset, and a slot is free again when the message before it there was consumed.

iris run -n 2 examples/10_producer_consumer.py --slots 4 --rounds 6 15
"""

import argparse

import torch
import triton
import triton.language as tl

import iris


@triton.jit
def produce(
    context, messages, slots, ready, consumed, first, rounds, num_slots,
    rank: tl.constexpr, world: tl.constexpr, consumer: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, rank, world)
    program, size = tl.program_id(0), tl.num_programs(0) * PART
    offs = program * PART + tl.arange(0, PART)
    flag = program * iris.signal.FLAG_STRIDE  # a cache line for each flag, as programs poll them
    for epoch in range(first, first + rounds):
        ctx.wait(consumed + flag, epoch - num_slots, peer=consumer)  # at once for the first messages
        value = tl.load(messages + (epoch - 1) * size + offs)
        ctx.store(slots + (epoch - 1) % num_slots * size + offs, value, to_rank=consumer)
        ctx.notify(ready + flag, epoch, consumer)  # after the stores of all threads of this program


@triton.jit
def consume(
    context, checksums, slots, ready, consumed, first, rounds, num_slots,
    rank: tl.constexpr, world: tl.constexpr, producer: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(context, rank, world)
    program, programs = tl.program_id(0), tl.num_programs(0)
    offs = program * PART + tl.arange(0, PART)
    flag = program * iris.signal.FLAG_STRIDE  # a cache line for each flag, as programs poll them
    for epoch in range(first, first + rounds):
        ctx.wait(ready + flag, epoch, peer=producer)
        value = tl.load(slots + (epoch - 1) % num_slots * programs * PART + offs).to(tl.int64)
        # The position is a factor, so that values in each other's place change the sum.
        tl.store(checksums + (epoch - 1) * programs + program, tl.sum(value * (offs + 1), axis=0))
        ctx.notify(consumed + flag, epoch, producer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--rounds", type=int, nargs="+", default=[4, 7], help="messages in each launch")
    parser.add_argument("--programs", type=int, default=2, help="parts of a message; all must fit on the GPU at once")
    parser.add_argument("--part", type=int, default=256, help="values in a part, a power of two")
    args = parser.parse_args()

    ctx = iris.iris(heap_size=1 << 24)
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    if world == 1:
        parser.error("a producer and a consumer are two ranks: iris run -n 2")
    producer, consumer = 0, 1  # ranks after these only meet the others in the barriers
    total, size = sum(args.rounds), args.programs * args.part

    # Every rank makes the messages, so that the consumer knows what to expect; only the producer's are sent.
    generator = torch.Generator().manual_seed(0)
    messages = torch.randint(-(2**31), 2**31, (total, size), generator=generator).to(torch.int32)
    expected = (messages.long() * (1 + torch.arange(size))).reshape(total, args.programs, args.part).sum(dim=2)
    messages = messages.to(device)
    checksums = torch.zeros(total, args.programs, dtype=torch.int64, device=device)

    # What the other rank writes is on the heap. Each rank allocates all of it, as allocation is collective.
    slots = ctx.zeros(args.slots, size, dtype=torch.int32)
    ready = ctx.zeros(args.programs, iris.signal.FLAG_STRIDE.value, dtype=torch.int32)
    consumed = ctx.zeros(args.programs, iris.signal.FLAG_STRIDE.value, dtype=torch.int32)
    ctx.barrier()  # the flags are 0 everywhere before anyone sets one

    first = 1
    for rounds in args.rounds:
        # No barrier between the launches: the epochs go on where the launch before ended.
        shared = (slots, ready, consumed, first, rounds, args.slots, rank, world)
        if rank == producer:
            produce[(args.programs,)](ctx.get_device_context(), messages, *shared, consumer, PART=args.part)
        elif rank == consumer:
            consume[(args.programs,)](ctx.get_device_context(), checksums, *shared, producer, PART=args.part)
        first += rounds
    ctx.barrier()  # raises on every rank when a wait of any rank did not end

    did = "took no part"
    if rank == producer:
        did = f"sent {total} messages through {args.slots} slots in {len(args.rounds)} launches"
        assert consumed[:, 0].tolist() == [total] * args.programs, consumed[:, 0]
    elif rank == consumer:
        did = f"received {total} messages in order, all checksums right"
        wrong = (checksums.cpu() != expected).nonzero().tolist()
        assert not wrong, f"wrong checksums of (message, part): {wrong}"
    print(f"rank {rank} of {world}: {did}")


if __name__ == "__main__":
    main()
