"""Groups: subsets in any order, side by side and overlapping, process groups, members only; mixtures of everything."""

import random
import time

import pytest
import torch
import torch.distributed as dist

from collective_data import outcome
from iris import sim
from iris.ccl import Config
from iris.errors import NotAMemberError

ONE = Config(comm_sms=1)


def value(rank, call, n, device):
    """What a rank contributes to a call: whole numbers, exact in float32."""
    return (torch.arange(n, device=device) % 7 + 10.0 * rank + call % 5).to(torch.float32)


class Member:
    """Issues collectives over groups and keeps, for each, what came of it and what should have."""

    def __init__(self, ctx, n=6, most=4):
        self.ctx, self.n, self.call = ctx, n, 0
        self.rank, self.device = ctx.get_rank(), ctx.get_device()
        self.inp, self.out = ctx.zeros(n * most, dtype=torch.float32), ctx.zeros(n * most, dtype=torch.float32)
        self.pending = []

    def values(self, ranks, n=None):
        return [value(r, self.call, n or self.n, self.device) for r in ranks]

    def issue(self, operation, ranks, group=None, config=ONE):
        """One collective over ``ranks``, which are ``group``; the caller is one of them."""
        ctx, n, world = self.ctx, self.n, len(ranks)
        me = ranks.index(self.rank)
        group = ranks if group is None else group
        inp, out = self.inp, self.out
        inp.fill_(float("nan"))
        out.fill_(float("nan"))
        root = ranks[self.call % world]
        if operation == "all_reduce":
            inp, out, want = inp[:n], out[:n], sum(self.values(ranks))
            inp.copy_(self.values(ranks)[me])
            ctx.ccl.all_reduce(out, inp, group=group, config=config)
        elif operation == "all_gather":
            inp, out, want = inp[:n], out[: n * world], torch.cat(self.values(ranks))
            inp.copy_(self.values(ranks)[me])
            ctx.ccl.all_gather(out, inp, group=group, config=config)
        elif operation == "reduce_scatter":
            inp, out = inp[: n * world], out[:n]
            every = self.values(ranks, n * world)
            inp.copy_(every[me])
            want = sum(every)[me * n : (me + 1) * n]
            ctx.ccl.reduce_scatter(out, inp, group=group, config=config)
        elif operation == "all_to_all":
            inp, out = inp[: n * world], out[: n * world]
            every = self.values(ranks, n * world)
            inp.copy_(every[me])
            want = torch.cat([v[me * n : (me + 1) * n] for v in every])
            ctx.ccl.all_to_all(out, inp, group=group, config=config)
        elif operation == "broadcast":
            out, want = out[:n], value(root, self.call, n, self.device)
            if self.rank == root:
                out.copy_(want)
            ctx.ccl.broadcast(out, root, group=group, config=config)
        elif operation == "reduce":
            inp, out, want = inp[:n], out[:n], sum(self.values(ranks))
            inp.copy_(self.values(ranks)[me])
            ctx.ccl.reduce(out, inp, root, group=group, config=config)
            want = want if self.rank == root else None
        elif operation == "gather":
            inp, out, want = inp[:n], out[: n * world], torch.cat(self.values(ranks))
            inp.copy_(self.values(ranks)[me])
            ctx.ccl.gather(out, inp, root, group=group, config=config)
            want = want if self.rank == root else None
        elif operation == "scatter":
            inp, out = inp[: n * world], out[:n]
            whole = value(root, self.call, n * world, self.device)
            inp.copy_(whole)
            want = whole[me * n : (me + 1) * n]
            ctx.ccl.scatter(out, inp, root, group=group, config=config)
        elif operation == "sendrecv":
            inp, out = inp[:n], out[:n]
            inp.copy_(self.values(ranks)[me])
            before, after = ranks[(me + world - 1) % world], ranks[(me + 1) % world]
            want = value(before, self.call, n, self.device)
            ctx.ccl.sendrecv(inp, out, after, before, group=group, config=config)
        else:
            assert operation == "device_barrier"
            ctx.device_barrier(group)
            want = None
        self.pending.append((self.call, operation, tuple(ranks), out.clone(), want))

    def check(self):
        self.ctx.synchronize()
        for call, operation, ranks, got, want in self.pending:
            assert want is None or torch.equal(got, want), (call, operation, ranks, got, want)
        self.pending.clear()


OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "sendrecv",
    "device_barrier",
)  # fmt: skip


def body_two_groups(ctx):
    """U26: [1, 3] and [2, 0] at once; results are in group order, and nobody else takes part."""
    member = Member(ctx)
    ranks = [[2, 0], [1, 3]][ctx.get_rank() % 2]
    for operation in OPERATIONS:
        member.issue(operation, ranks)
        member.call += 1
    member.check()


@pytest.mark.parametrize("world", [4])
def test_two_groups_side_by_side(ranks, world):
    ranks(world).run(body_two_groups)


def body_one_group(ctx):
    member = Member(ctx)
    if ctx.get_rank() in (1, 2):
        for operation in OPERATIONS:
            member.issue(operation, [2, 1])
            member.call += 1
    member.check()
    return len(OPERATIONS) if member.call else 0


@pytest.mark.parametrize("world", [3])
def test_others_take_no_part(ranks, world):
    assert ranks(world).run(body_one_group) == [0, len(OPERATIONS), len(OPERATIONS)]


def body_alone(ctx):
    """A group of one."""
    member = Member(ctx)
    for operation in OPERATIONS:
        member.issue(operation, [ctx.get_rank()])
        member.call += 1
    member.check()


@pytest.mark.parametrize("world", [1, 2])
def test_groups_of_one(ranks, world):
    ranks(world).run(body_alone)


def body_process_groups(ctx, torch_too):
    rank = ctx.get_rank()
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (1, 2), (0, 1, 2))}
    member = Member(ctx)
    for ranks, group in groups.items():
        if rank in ranks:
            for operation in OPERATIONS:
                member.issue(operation, list(ranks), group)
                if torch_too and operation in ("all_reduce", "all_gather", "all_to_all", "broadcast"):
                    member.issue(operation, list(ranks), group, Config(**{f"{operation}_variant": "torch"}))
                member.call += 1
        member.call = 0
    member.check()


@pytest.mark.parametrize("world", [3])
def test_process_groups(ranks, world):
    ranks(world).run(body_process_groups, True)


def body_members_only(ctx):
    """U28: at once on a rank outside; the members go on."""
    rank = ctx.get_rank()
    member = Member(ctx)
    outside = dist.new_group([0, 1])
    if rank < 2:
        for operation in OPERATIONS:
            member.issue(operation, [0, 1])
            member.call += 1
        member.check()
        return
    x, y = member.inp, member.out
    for group in ([0, 1], outside):
        for call in (
            lambda group: ctx.ccl.all_reduce(y, x, group=group), lambda group: ctx.ccl.all_gather(y, x[:6], group),
            lambda group: ctx.ccl.all_to_all(y, x, group), lambda group: ctx.ccl.reduce_scatter(y[:6], x, group=group),
            lambda group: ctx.ccl.broadcast(x, 0, group), lambda group: ctx.ccl.reduce(y, x, 0, group=group),
            lambda group: ctx.ccl.gather(y, x[:6], 0, group), lambda group: ctx.ccl.scatter(x[:6], y, 0, group),
            lambda group: ctx.ccl.send(x, 0, group), lambda group: ctx.ccl.sendrecv(x, y, 0, 0, group),
            ctx.ccl.barrier,
        ):  # fmt: skip
            with pytest.raises(NotAMemberError, match="only members may call"):
                call(group)


@pytest.mark.parametrize("world", [3])
def test_members_only(ranks, world):
    ranks(world).run(body_members_only)


def body_roots(ctx):
    """Roots are ranks of the world, and members."""
    x = ctx.zeros(4, dtype=torch.float32)
    messages = []
    if ctx.get_rank() > 0:
        messages = [outcome(ctx.ccl.broadcast, x, 0, [2, 1]), outcome(ctx.ccl.reduce, x, x, 0, group=[2, 1])]
        x.fill_(float(ctx.get_rank()))
        ctx.ccl.broadcast(x, 1, [2, 1])
        ctx.synchronize()
        assert (x == 1).all()
    return messages


@pytest.mark.parametrize("world", [3])
def test_roots_are_ranks_of_the_world(ranks, world):
    _, *members = ranks(world).run(body_roots)
    for messages in members:
        assert len(messages) == 2
        assert all("must be a rank of the group [2, 1], got 0" in m for m in messages), messages


def schedule(seed, world, count):
    """Collectives over random groups, the same on every rank."""
    order = random.Random(seed)
    for _ in range(count):
        ranks = order.sample(range(world), order.randint(2, world))
        config = Config(
            comm_sms=order.choice([1, 2, None]), block_size_m=1, block_size_n=order.choice([4, 16]),
            all_reduce_variant=order.choice(["push", "ring", "one_shot", "two_shot", "atomic", "spinlock"]),
            broadcast_variant=order.choice(["direct", "scatter_allgather"]),
        )  # fmt: skip
        yield order.choice(OPERATIONS), ranks, config


def body_mixture(ctx, seed, count):
    """Nothing on the host waits between the calls; late ranks differ."""
    member = Member(ctx)
    delays = random.Random(seed * 100 + ctx.get_rank())
    for operation, ranks, config in schedule(seed, ctx.get_num_ranks(), count):
        if ctx.get_rank() in ranks:
            if delays.random() < 0.1:
                time.sleep(0.002)
            member.issue(operation, ranks, config=config)
        member.call += 1
    member.check()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("world", [2, 4])
def test_mixtures(ranks, world, seed):
    ranks(world).run(body_mixture, seed, 16)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 13))
@pytest.mark.parametrize("world", [2, 3, 4])
def test_long_mixtures(ranks, world, seed):
    ranks(world).run(body_mixture, seed, 60)


@pytest.fixture
def simulator(request):
    if request.config.option.runtime != "cpu":
        pytest.skip("once, where tests run in several ways")
    return sim


@pytest.mark.parametrize("resident", [1, 2])
def test_progress_with_few_resident_programs(simulator, resident):
    """Programs start in the order of their lanes' numbers, so each meeting can take place."""
    simulator.run(body_mixture, 3, 5, 10, resident_programs=resident, heap_size=1 << 22)


@pytest.mark.slow
@pytest.mark.parametrize("resident", [1, 2, None])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_orders(simulator, world, resident):
    simulator.explore(body_mixture, world, 7, 20, seeds=range(20), resident_programs=resident, heap_size=1 << 22)
