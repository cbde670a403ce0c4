"""``torch.distributed`` between ranks that are coroutines: operations, subgroups, disagreements, and what is left."""

import inspect
import itertools
import random
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from greenlet import getcurrent, greenlet
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed import distributed_c10d, init_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from iris.errors import ArgumentError, RankLost, RankMismatch, RuntimeConflict, UnsupportedError
from iris.runtime.local_group import LocalDistributed

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

SEEDS = (0, 1, 2)


class Stuck(Exception):
    """Raised in every rank when none can go on."""


class Hub:
    """A world of coroutines that run in an order drawn from a seed."""

    def __init__(self, world_size, seed=0):
        self.random = random.Random(seed)
        self.world_size = world_size
        self.current = -1
        self.orders = []
        self.carries = []
        self.dist = LocalDistributed(world_size, lambda: self.current, self.wait_until, self.order, self.carry)

    def order(self, ranks, what):
        self.orders.append((list(ranks), what))

    def carry(self, rank, received):
        self.carries.append((rank, dict(received)))
        return lambda: self.carries.append((rank, "arrived"))

    def wait_until(self, condition, why):
        while not condition():
            self.waits[self.current] = (condition, why)
            self.main.switch()

    def run(self, body, *args, init=True):
        """``body(rank, world_size, *args)`` on every rank; the results, or the exceptions that the ranks raised."""

        def host(rank):
            try:
                if init:
                    dist.init_process_group()
                return body(rank, self.world_size, *args)
            except Exception as error:  # noqa: BLE001 - tests look at what each rank raised
                return error

        self.main, self.waits = getcurrent(), {}
        coroutines = [greenlet(host) for _ in range(self.world_size)]
        results = [None] * self.world_size
        alive = list(range(self.world_size))
        while alive:
            self.random.shuffle(alive)
            ready = [r for r in alive if r not in self.waits or self.waits[r][0]()]
            stuck = Stuck(
                "; ".join(f"rank {r} waits for {self.waits[r][1]}" for r in sorted(alive)) if not ready else ""
            )
            for rank in ready or list(alive):
                self.waits.pop(rank, None)
                self.current = rank
                self.dist.enter(rank)
                try:
                    done = coroutines[rank]
                    value = done.switch(*(() if done else (rank,))) if ready else done.throw(stuck)
                finally:
                    self.dist.leave(rank)
                    self.current = -1
                if coroutines[rank].dead:
                    results[rank] = value
                    alive.remove(rank)
        return results


def run(world_size, body, *args, **options):
    """The results of ``body`` on every rank of a fresh world, which leaves no trace."""
    hub = Hub(world_size)
    try:
        results = hub.run(body, *args, **options)
    finally:
        hub.dist.close()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def faults(world_size, body, *args, **options):
    """The exceptions of ``body``, one a rank."""
    hub = Hub(world_size)
    try:
        return hub.run(body, *args, **options)
    finally:
        hub.dist.close()


def data(rank, shape, dtype=torch.float32, salt=0):
    """Random numbers that differ between ranks."""
    made = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=made).bool()
    if dtype.is_floating_point:
        return torch.randn(shape, generator=made).to(dtype)
    return torch.randint(1, 7, shape, generator=made).to(dtype)


REDUCTIONS = {
    "SUM": lambda x: x.sum(0),
    "PRODUCT": lambda x: x.prod(0),
    "MIN": lambda x: x.amin(0),
    "MAX": lambda x: x.amax(0),
    "AVG": lambda x: x.mean(0),
}
BITS = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


def reduced(op, tensors):
    """The oracle: float64 or integers, all ranks at once."""
    if op in BITS:
        total = tensors[0]
        for tensor in tensors[1:]:
            total = BITS[op](total, tensor)
        return total
    if tensors[0].dtype.is_floating_point:
        return REDUCTIONS[op](torch.stack(tensors).double()).to(tensors[0].dtype)
    if op == "AVG":
        return (torch.stack(tensors).sum(0) / len(tensors)).trunc().to(tensors[0].dtype)
    return REDUCTIONS[op](torch.stack(tensors)).to(tensors[0].dtype)


def body_all_reduce(rank, world_size, op, dtype):
    tensor = data(rank, (3, 5), dtype)
    assert dist.all_reduce(tensor, getattr(dist.ReduceOp, op)) is None
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_all_reduce(world, op, dtype):
    expected = reduced(op, [data(r, (3, 5), dtype) for r in range(world)])
    for result in run(world, body_all_reduce, op, dtype):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("op", BITS)
def test_all_reduce_of_bits(world, op, dtype):
    expected = reduced(op, [data(r, (3, 5), dtype) for r in range(world)])
    for result in run(world, body_all_reduce, op, dtype):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT"])
def test_short_floats_are_rounded_once(op, dtype):
    # In rank order in fp32: bitwise what a loop over the ranks gives.
    total = data(0, (3, 5), dtype).float()
    for rank in range(1, 4):
        other = data(rank, (3, 5), dtype).float()
        total = total * other if op == "PRODUCT" else total + other
    expected = (total / 4 if op == "AVG" else total).to(dtype)
    for result in run(4, body_all_reduce, op, dtype):
        assert torch.equal(result, expected)


def body_sum_of_bools(rank, world_size):
    tensor = torch.tensor([rank == 0, False, True])
    dist.all_reduce(tensor)
    return tensor.tolist()


def test_a_sum_of_bools_is_an_or():
    assert run(3, body_sum_of_bools) == [[True, False, True]] * 3


def body_complex(rank, world_size):
    tensor = torch.complex(data(rank, (4,)), data(rank, (4,), salt=1))
    dist.all_reduce(tensor)
    return tensor


def test_complex_tensors():
    expected = sum(torch.complex(data(r, (4,)), data(r, (4,), salt=1)) for r in range(3))
    for result in run(3, body_complex):
        torch.testing.assert_close(result, expected)


def body_strided(rank, world_size):
    tensor = data(rank, (6, 4)).t()[:, ::2]
    dist.all_reduce(tensor)
    gathered = [torch.empty(3, 4).t() for _ in range(world_size)]
    dist.all_gather(gathered, tensor)
    return tensor, gathered


def test_strided_tensors():
    expected = sum(data(r, (6, 4)).t()[:, ::2] for r in range(2))
    for tensor, gathered in run(2, body_strided):
        torch.testing.assert_close(tensor, expected)
        assert all(torch.equal(g, tensor) for g in gathered)


def body_reduce(rank, world_size, root):
    tensor = data(rank, (4,))
    dist.reduce(tensor, root)
    return tensor


def test_reduce_changes_the_root_only(world):
    for root in range(world):
        results = run(world, body_reduce, root)
        for rank, result in enumerate(results):
            expected = reduced("SUM", [data(r, (4,)) for r in range(world)]) if rank == root else data(rank, (4,))
            torch.testing.assert_close(result, expected)


def body_broadcast(rank, world_size, root):
    tensor = data(rank, (2, 3))
    dist.broadcast(tensor, root)
    return tensor


def test_broadcast(world):
    for root in range(world):
        assert all(torch.equal(t, data(root, (2, 3))) for t in run(world, body_broadcast, root))


def body_all_gather(rank, world_size):
    uneven = [torch.empty(r + 1, 2) for r in range(world_size)]
    dist.all_gather(uneven, data(rank, (rank + 1, 2)))
    flat = torch.empty(3 * world_size, 2)
    dist.all_gather_into_tensor(flat, data(rank, (3, 2), salt=1))
    stacked = torch.empty(world_size, 3, 2)
    stacked[rank] = data(rank, (3, 2), salt=1)
    dist.all_gather_into_tensor(stacked, stacked[rank])
    return uneven, flat, stacked


def test_all_gather(world):
    parts = [data(r, (3, 2), salt=1) for r in range(world)]
    for uneven, flat, stacked in run(world, body_all_gather):
        assert all(torch.equal(u, data(r, (r + 1, 2))) for r, u in enumerate(uneven))
        assert torch.equal(flat, torch.cat(parts))
        assert torch.equal(stacked, torch.stack(parts))


def body_reduce_scatter(rank, world_size, op):
    op = getattr(dist.ReduceOp, op)
    uneven = torch.empty(rank + 1)
    dist.reduce_scatter(uneven, [data(rank, (r + 1,), salt=r) for r in range(world_size)], op)
    whole = data(rank, (2 * world_size, 3), salt=9)
    in_place = whole.clone()
    output = torch.empty(2, 3)
    dist.reduce_scatter_tensor(output, whole, op)
    dist.reduce_scatter_tensor(in_place[2 * rank : 2 * rank + 2], in_place, op)
    return uneven, output, in_place[2 * rank : 2 * rank + 2]


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
def test_reduce_scatter(world, op):
    whole = reduced(op, [data(r, (2 * world, 3), salt=9) for r in range(world)])
    for rank, (uneven, output, in_place) in enumerate(run(world, body_reduce_scatter, op)):
        torch.testing.assert_close(uneven, reduced(op, [data(r, (rank + 1,), salt=rank) for r in range(world)]))
        torch.testing.assert_close(output, whole[2 * rank : 2 * rank + 2])
        assert torch.equal(in_place, output)


def amount(src, dst):
    return (src + 2 * dst) % 4


def body_all_to_all(rank, world_size):
    outputs = [torch.empty(amount(r, rank), 2) for r in range(world_size)]
    dist.all_to_all(outputs, [data(rank, (amount(rank, r), 2), salt=r) for r in range(world_size)])
    return outputs, *body_all_to_all_single(rank, world_size)


def body_all_to_all_single(rank, world_size):
    sends = [amount(rank, r) for r in range(world_size)]
    takes = [amount(r, rank) for r in range(world_size)]
    single = torch.empty(sum(takes), 2)
    pieces = [data(rank, (amount(rank, r), 2), salt=r) for r in range(world_size)]
    dist.all_to_all_single(single, torch.cat(pieces), takes, sends)
    even = torch.empty(2 * world_size)
    dist.all_to_all_single(even, data(rank, (2 * world_size,), salt=7))
    return single, even


def test_all_to_all(world):
    for rank, (outputs, single, even) in enumerate(run(world, body_all_to_all)):
        expected = [data(src, (amount(src, rank), 2), salt=rank) for src in range(world)]
        assert all(torch.equal(o, e) for o, e in zip(outputs, expected, strict=True))
        assert torch.equal(single, torch.cat(expected))
        chunks = [data(src, (2 * world,), salt=7)[2 * rank : 2 * rank + 2] for src in range(world)]
        assert torch.equal(even, torch.cat(chunks))


def body_gather_scatter(rank, world_size, root):
    gathered = [torch.empty(3) for _ in range(world_size)] if rank == root else None
    dist.gather(data(rank, (3,)), gathered, dst=root)
    mine = torch.empty(2)
    dist.scatter(mine, [data(root, (2,), salt=r) for r in range(world_size)] if rank == root else None, src=root)
    return gathered, mine


def test_gather_and_scatter(world):
    for root in range(world):
        for rank, (gathered, mine) in enumerate(run(world, body_gather_scatter, root)):
            assert torch.equal(mine, data(root, (2,), salt=rank))
            if rank == root:
                assert all(torch.equal(g, data(r, (3,))) for r, g in enumerate(gathered))


def body_objects(rank, world_size, root):
    mine = {"rank": rank, "text": "x" * (5 * rank)}
    gathered = [None] * world_size
    dist.all_gather_object(gathered, mine)
    listed = [mine, rank] if rank == root else [None, None]
    dist.broadcast_object_list(listed, src=root)
    at_root = [None] * world_size if rank == root else None
    dist.gather_object(mine, at_root, dst=root)
    part = [None]
    dist.scatter_object_list(part, [("part", r) for r in range(world_size)] if rank == root else None, src=root)
    return gathered, listed, at_root, part


def test_objects(world):
    objects = [{"rank": r, "text": "x" * (5 * r)} for r in range(world)]
    root = world - 1
    for rank, result in enumerate(run(world, body_objects, root)):
        assert result == (objects, [objects[root], root], objects if rank == root else None, [("part", rank)])


def body_ring(rank, world_size):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    first, second = torch.empty(2), torch.empty(3)
    works = [
        dist.isend(data(rank, (2,)), right, tag=1),
        dist.isend(data(rank, (3,), salt=1), right, tag=2),
        # By tag, not by order of issue.
        dist.irecv(second, left, tag=2),
        dist.irecv(first, left, tag=1),
    ]
    for work in works:
        work.wait()
    in_order = [torch.empty(1) for _ in range(3)]
    works = [dist.isend(torch.tensor([10.0 * i + rank]), right) for i in range(3)]
    works += [dist.irecv(tensor, left) for tensor in in_order]
    for work in reversed(works):
        work.wait()
    return first, second, [t.item() for t in in_order]


def test_messages(world):
    for rank, (first, second, in_order) in enumerate(run(world, body_ring)):
        left = (rank - 1) % world
        assert torch.equal(first, data(left, (2,)))
        assert torch.equal(second, data(left, (3,), salt=1))
        assert in_order == [left, 10.0 + left, 20.0 + left]


def body_blocking_messages(rank, world_size):
    tensor = torch.empty(2)
    if rank == 0:
        dist.send(data(0, (2,)), 1)
        return dist.recv(tensor, src=1), tensor
    source = dist.recv(tensor, 0)
    dist.send(tensor + 1, dst=0)
    return source, tensor


def test_send_and_recv():
    (from_one, back), (from_zero, there) = run(2, body_blocking_messages)
    assert (from_one, from_zero) == (1, 0)
    assert torch.equal(there, data(0, (2,)))
    assert torch.equal(back, there + 1)


def body_batch(rank, world_size):
    tensor = torch.empty(2)
    peer = 1 - rank
    operations = [dist.P2POp(dist.isend, data(rank, (2,)), peer), dist.P2POp(dist.irecv, tensor, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return tensor


def test_a_batch_of_messages():
    assert all(torch.equal(t, data(1 - r, (2,))) for r, t in enumerate(run(2, body_batch)))


def body_async(rank, world_size):
    tensors = [data(rank, (4,), salt=s) for s in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    assert all(isinstance(work, dist.Work) for work in works)
    late = dist.barrier(async_op=True)
    while not late.is_completed():
        pass
    assert all(work.is_completed() and work.is_success() for work in works)
    for work in reversed(works):
        assert work.wait(timedelta(seconds=1)) is True
    assert works[0].get_future().value()[0] is works[0].result()[0] is tensors[0]
    return tensors


@pytest.mark.parametrize("world", [1, 3])
def test_asynchronous_calls(world):
    for tensors in run(world, body_async):
        for salt, tensor in enumerate(tensors):
            torch.testing.assert_close(tensor, reduced("SUM", [data(r, (4,), salt=salt) for r in range(world)]))


def body_no_move_before_the_last(rank, world_size, log):
    tensor = torch.full((2,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    log.append((rank, tensor[0].item(), work.is_success()))
    work.wait()
    return tensor[0].item()


def test_data_moves_when_the_last_rank_arrives():
    log = []
    assert run(3, body_no_move_before_the_last, log) == [3.0] * 3
    assert [moved for *_, moved in log] == [False, False, True]
    assert [value for _, value, _ in log[:2]] == [rank for rank, *_ in log[:2]]


def body_coalesced(rank, world_size):
    tensors = [data(rank, (2,)), data(rank, (3,), salt=1)]
    with distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    outputs = [torch.empty(2 * world_size), torch.empty(3 * world_size)]
    with distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for output, tensor in zip(outputs, tensors, strict=True):
            dist.all_gather_into_tensor(output, tensor, async_op=True)
    manager.wait()
    return tensors, outputs


def test_coalesced_calls():
    for tensors, outputs in run(2, body_coalesced):
        for salt, (tensor, output) in enumerate(zip(tensors, outputs, strict=True)):
            torch.testing.assert_close(tensor, reduced("SUM", [data(r, tensor.shape, salt=salt) for r in range(2)]))
            assert torch.equal(output, torch.cat([tensor, tensor]))


def body_groups(rank, world_size, groups):
    seen = []
    for ranks in groups:
        group = dist.new_group(ranks)
        if rank not in ranks:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
            continue
        members = dist.get_process_group_ranks(group)
        assert sorted(members) == sorted(ranks)
        assert dist.get_world_size(group) == len(ranks)
        assert members[dist.get_rank(group)] == rank
        assert dist.get_global_rank(group, dist.get_rank(group)) == rank
        total = data(rank, (3,))
        dist.all_reduce(total, group=group)
        root = members[-1]
        sent = data(rank, (2,))
        dist.broadcast(sent, root, group=group)
        gathered = [None] * len(ranks)
        dist.all_gather_object(gathered, rank, group=group)
        assert gathered == members
        dist.barrier(group)
        seen.append((ranks, total, root, sent))
    return seen


@pytest.mark.parametrize("groups", [[[2, 0]], [[3, 1], [1, 0, 2], [2], [0, 1, 2, 3]], [[0, 3], [3, 0], [2, 1]]])
def test_groups_of_any_ranks_in_any_order(groups):
    for seen in run(4, body_groups, groups):
        for ranks, total, root, sent in seen:
            torch.testing.assert_close(total, sum(data(r, (3,)) for r in sorted(ranks)))
            assert torch.equal(sent, data(root, (2,)))


def body_unsorted(rank, world_size):
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    gathered = torch.empty(3)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
    return dist.get_process_group_ranks(group), gathered.tolist()


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch always sorts a group's ranks"
)
def test_a_group_keeps_the_order_of_its_ranks():
    assert run(3, body_unsorted) == [([2, 0, 1], [2.0, 0.0, 1.0])] * 3


def body_two_groups(rank, world_size):
    evens, odds, world = dist.new_group([0, 2]), dist.new_group([3, 1]), dist.group.WORLD
    mine = evens if rank % 2 == 0 else odds
    works, tensors = [], []
    for step in range(4):
        # Ranks issue to the two groups in orders of their own; only the order within a group is shared.
        for group in (mine, world) if rank < 2 else (world, mine):
            tensors.append((group is world, step, data(rank, (2,), salt=step + 10 * (group is world))))
            works.append(dist.all_reduce(tensors[-1][2], group=group, async_op=True))
    for work in works:
        work.wait()
    return tensors


@pytest.mark.parametrize("seed", SEEDS)
def test_two_groups_at_a_time(seed):
    hub = Hub(4, seed)
    for rank, tensors in enumerate(hub.run(body_two_groups)):
        for of_world, step, tensor in tensors:
            members = range(4) if of_world else range(rank % 2, 4, 2)
            expected = reduced("SUM", [data(r, (2,), salt=step + 10 * of_world) for r in members])
            torch.testing.assert_close(tensor, expected)
    hub.dist.close()


def body_local_synchronization(rank, world_size):
    group = dist.new_group([0, 2], use_local_synchronization=True) if rank != 1 else None
    tensor = torch.ones(1)
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_groups_that_only_members_make():
    assert run(3, body_local_synchronization) == [2.0, 1.0, 2.0]


def test_order_is_told_before_and_after_the_data_moves():
    hub = Hub(4)

    def body(rank, world_size):
        group = dist.new_group([3, 1])
        tensor = torch.full((1,), float(rank))
        if rank in (1, 3):
            dist.all_reduce(tensor, group=group)
        dist.barrier()
        if rank < 2:
            (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)

    assert hub.run(body) == [None] * 4
    hub.dist.close()
    assert hub.orders == [
        *[([1, 3], "all_reduce over ranks [1, 3]")] * 2,
        *[([0, 1, 2, 3], "barrier over ranks [0, 1, 2, 3]")] * 2,
        *[([0, 1], "send from rank 0 to rank 1 with tag 0")] * 2,
    ]


def test_what_links_carry_is_told_by_source():
    hub = Hub(4)

    def body(rank, world_size):
        group = dist.new_group([3, 1, 0])
        mine = torch.full((6,), float(rank), dtype=torch.float32)
        if rank in (0, 1, 3):
            dist.all_gather([torch.empty(6) for _ in range(3)], mine, group=group)
            dist.all_reduce(mine, group=group)
            dist.reduce_scatter_tensor(torch.empty(2), mine, group=group)
        dist.broadcast(mine, 2)

    assert hub.run(body) == [None] * 4
    hub.dist.close()
    carries = {rank: [received for r, received in hub.carries if r == rank] for rank in range(4)}
    for rank in (0, 1, 3):
        others = [peer for peer in (0, 1, 3) if peer != rank]
        # A sum takes each part of the tensor there and back: 2 * 24 bytes * 2/3 over two links.
        expected = [dict.fromkeys(others, 24), dict.fromkeys(others, 16), dict.fromkeys(others, 8), {2: 24}]
        assert carries[rank][::2] == expected
        assert carries[rank][1::2] == ["arrived"] * 4
    assert carries[2] == []


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_data_moves_by_torch_operations():
    with Seen() as seen:
        run(2, body_all_reduce, "SUM", torch.float32)
    assert "aten::add.Tensor" in seen.names
    assert seen.names.count("aten::copy_") >= 2


# Disagreements.


def test_every_rank_reads_which_rank_is_in_which_call():
    def body(rank, world_size):
        tensor = torch.ones(2)
        if rank == 1:
            dist.barrier()
        elif rank == 2:
            dist.broadcast(tensor, 0)
        else:
            dist.all_reduce(tensor)

    for fault in faults(3, body):
        assert isinstance(fault, RankMismatch)
        assert "rank 0 is in all_reduce, rank 1 is in barrier, rank 2 is in broadcast" in str(fault)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda r: dist.all_reduce(torch.ones(2 + r)), r"shape: rank 0 has \(2,\), rank 1 has \(3,\)"),
        (lambda r: dist.all_reduce(torch.ones(2, dtype=(torch.int32, torch.float32)[r])), "rank 0 has int32, rank 1"),
        (lambda r: dist.all_reduce(torch.ones(2), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[r]), "op: rank 0 has SUM"),
        (lambda r: dist.broadcast(torch.ones(2 + r), 0), r"shape: rank 0 has \(2,\), rank 1 has \(3,\)"),
        (lambda r: dist.broadcast(torch.ones(2), r), "root: rank 0 has 0, rank 1 has 1"),
        (lambda r: dist.reduce(torch.ones(2), r), "root: rank 0 has 0, rank 1 has 1"),
        (
            lambda r: dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2 + r)),
            r"rank 1 gives float32 \(3,\) to rank 0, which takes float32 \(2,\)",
        ),
        (
            lambda r: dist.all_gather_into_tensor(torch.ones(4 + 2 * r), torch.ones(2 + r)),
            r"shape: rank 0 has \(2,\), rank 1 has \(3,\)",
        ),
        (
            lambda r: dist.reduce_scatter_tensor(torch.ones(1 + r), torch.ones(2 + 2 * r)),
            r"shape: rank 0 has \(1,\), \(1,\), rank 1 has \(2,\), \(2,\)",
        ),
        (
            lambda r: dist.all_to_all_single(torch.ones(2), torch.ones(2), [1, 1], [2 * r, 2 - 2 * r]),
            r"rank 0 gives float32 \(0,\) to rank 0, which takes float32 \(1,\)",
        ),
        (
            lambda r: dist.send(torch.ones(2), 1) if r == 0 else dist.recv(torch.ones(3), 0),
            r"rank 0 gives float32 \(2,\) to rank 1, which takes float32 \(3,\)",
        ),
    ],
)
def test_every_rank_reads_what_each_rank_passed(call, text):
    for fault in faults(2, lambda rank, world_size: call(rank)):
        assert isinstance(fault, RankMismatch), fault
        with pytest.raises(RankMismatch, match=text):
            raise fault


def test_a_disagreement_moves_nothing():
    def body(rank, world_size):
        outputs = [torch.zeros(2), torch.zeros(2)]
        with pytest.raises(RankMismatch):
            dist.all_gather(outputs, torch.ones(2 + rank))
        dist.barrier()
        return [o.tolist() for o in outputs]

    assert run(2, body) == [[[0.0, 0.0], [0.0, 0.0]]] * 2


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: dist.all_gather([torch.ones(2)], torch.ones(2)), "output list has 1 tensors, the group 2 ranks"),
        (lambda: dist.all_gather_into_tensor(torch.ones(5), torch.ones(2)), "2 times the elements of the input"),
        (lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2, 2).t()), "must be contiguous"),
        (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)), "3 rows, which 2 ranks cannot share"),
        (lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BOR), "BOR is not defined for float32"),
        (lambda: dist.all_reduce(torch.ones(2).bool(), dist.ReduceOp.AVG), "AVG is not defined for bool"),
    ],
)
def test_arguments_that_no_peer_could_match(call, text):
    for fault in faults(2, lambda rank, world_size: call()):
        assert isinstance(fault, ArgumentError)
        assert text in str(fault)


def test_recv_from_any_source_does_not_exist():
    for fault in faults(2, lambda rank, world_size: dist.recv(torch.ones(1))):
        assert isinstance(fault, UnsupportedError)


def test_a_rank_that_never_arrives():
    hub = Hub(3)

    def body(rank, world_size):
        if rank == 0:
            dist.recv(torch.ones(1), 2, tag=4)
        elif rank == 1:
            dist.all_reduce(torch.ones(2, 3))

    first, second, third = hub.run(body)
    assert third is None
    assert isinstance(first, Stuck)
    assert "rank 0 waits for recv of float32 (1,) from rank 2 with tag 4" in str(first)
    assert "rank 1 waits for all_reduce of float32 (2, 3) over ranks [0, 1, 2]" in str(second)
    assert hub.dist.pending() == [
        "all_reduce over ranks [0, 1, 2]: ranks [1] arrived, ranks [0, 2] did not",
        "send from rank 2 to rank 0 with tag 4: ranks [0] arrived, ranks [2] did not",
    ]
    hub.dist.close()
    assert hub.dist.pending() == []


def test_an_error_while_data_moves_reaches_every_rank():
    class Faulty(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.name() == "aten::copy_":
                raise ZeroDivisionError("planted")
            return func(*args, **(kwargs or {}))

    with Faulty():
        results = faults(3, lambda rank, world_size: dist.broadcast(torch.ones(2), 0))
    assert sorted(type(r).__name__ for r in results) == ["RankLost", "RankLost", "ZeroDivisionError"]
    mover = next(r for r, result in enumerate(results) if isinstance(result, ZeroDivisionError))
    assert all(f"rank {mover} failed" in str(r) for r in results if isinstance(r, RankLost))


def test_groups_made_in_different_orders():
    def body(rank, world_size):
        for ranks in ([0, 1], [1, 2])[:: 1 if rank else -1]:
            dist.new_group(ranks)

    results = faults(3, body)
    fault = next(result for result in results if isinstance(result, RankMismatch))
    assert "[0, 1]" in str(fault)
    assert "[1, 2]" in str(fault)


def test_a_group_object_of_another_rank():
    shared = []

    def body(rank, world_size):
        shared.append(dist.group.WORLD)
        dist.barrier()
        if dist.group.WORLD is not shared[0]:
            dist.all_reduce(torch.ones(1), group=shared[0])

    faulty = [result for result in faults(2, body) if result is not None]
    assert [type(fault) for fault in faulty] == [RuntimeConflict]
    assert "on a group object of rank" in str(faulty[0])


# Initialisation.


@pytest.mark.parametrize(
    ("args", "options", "name"),
    [
        ((), {}, "undefined"),
        (("nccl",), {}, "nccl"),
        (("gloo",), {"init_method": "env://"}, "gloo"),
        (("cpu:gloo,cuda:nccl",), {"timeout": timedelta(seconds=5)}, "cpu:gloo,cuda:nccl"),
        ((None, "tcp://127.0.0.1:1"), {"device_id": torch.device("cuda", 7)}, "undefined"),
        ((), {"backend": "NCCL", "device_id": 3}, "nccl"),
        (("gloo",), {"store": dist.HashStore(), "rank": -1, "world_size": 3}, "gloo"),
    ],
)
def test_any_way_to_initialise(args, options, name):
    def body(rank, world_size):
        assert not dist.is_initialized()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dist.init_process_group(*args, **options)
            dist.barrier()
            pair = dist.new_group([0, 1])
        assert dist.is_initialized()
        assert dist.get_backend() == name
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        assert dist.get_process_group_ranks(None) == [0, 1, 2]
        assert dist.get_rank(pair) == (rank if rank < 2 else -1)
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group()
        return True

    assert run(3, body, init=False) == [True] * 3


def test_every_name_of_the_function_initialises():
    def body(rank, world_size):
        from torch.distributed import init_process_group as bound_now

        for function in (init_process_group, bound_now, distributed_c10d.init_process_group):
            function("nccl")
            assert dist.get_rank() == rank
            dist.destroy_process_group()
        return True

    assert run(2, body, init=False) == [True] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 5, "world_size": 2},
        {"rank": -1, "world_size": 8},
        {"init_method": "tcp://127.0.0.1:1?rank=5&world_size=2"},
    ],
)
def test_rank_and_size_must_be_the_worlds(options):
    for rank, fault in enumerate(faults(2, lambda *_: dist.init_process_group("gloo", **options), init=False)):
        assert isinstance(fault, ValueError)
        assert f"this is rank {rank} of a world of 2 ranks" in str(fault)
        assert ("rank 5" if "8" not in str(options) else "world size 8") in str(fault)


def test_nothing_is_initialised_before():
    for fault in faults(2, lambda *_: dist.all_reduce(torch.ones(1)), init=False):
        assert "Default process group has not been initialized" in str(fault)


def test_destroyed_and_initialised_again():
    def body(rank, world_size):
        totals = []
        for turn in range(3):
            dist.init_process_group()
            group = dist.new_group([0, 1])
            tensor = torch.tensor([float(rank + turn)])
            if rank < 2:
                dist.all_reduce(tensor, group=group)
                if turn == 1:
                    dist.destroy_process_group(group)
            dist.all_reduce(tensor)
            dist.destroy_process_group()
            assert not dist.is_initialized()
            totals.append(tensor.item())
        return totals

    assert run(3, body, init=False) == [[4.0, 9.0, 14.0]] * 3


def test_the_store():
    def body(rank, world_size):
        store = distributed_c10d._get_default_store()
        if rank == world_size - 1:
            store.set("key", "value")
            store.append("key", b"!")
        assert store.get("key") == b"value!"
        store.add("arrived", 1)
        store.set(f"rank {rank}", b"here")
        store.wait([f"rank {r}" for r in range(world_size)], timedelta(seconds=1))
        assert store.add("arrived", 0) == world_size
        assert store.check(["key"])
        assert not store.check(["key", "nothing"])
        prefixed = dist.PrefixStore("prefix", store)
        if rank == 0:
            prefixed.set("mine", "0")
        dist.barrier()
        assert prefixed.get("mine") == b"0"
        assert store.get("prefix/mine") == b"0"
        assert store.compare_set("new", "", "made") == b"made"
        assert store.compare_set("new", "other", "unmade") == b"made"
        assert store.multi_get(["key", "new"]) == [b"value!", b"made"]
        dist.barrier()
        return store.delete_key("key"), store.num_keys()

    deleted = [deleted for deleted, _ in run(3, body)]
    assert sorted(deleted) == [False, False, True]


def test_a_key_that_never_comes():
    def body(rank, world_size):
        distributed_c10d._get_default_store().get("nothing")

    for fault in faults(2, body):
        assert isinstance(fault, Stuck)
        assert "keys ['nothing'] of the store" in str(fault)


def test_a_wait_inside_of_torch_raises_at_once():
    def body(rank, world_size):
        dist.PrefixStore("prefix", distributed_c10d._get_default_store()).get("late")

    start = time.perf_counter()
    assert all(isinstance(fault, dist.DistStoreError) for fault in faults(2, body))
    assert time.perf_counter() - start < 5


def test_collectives_that_torch_would_wait_for_in_its_own_code_raise():
    def body(rank, world_size):
        functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD)

    for fault in faults(2, body):
        assert "LocalWork" in str(fault)


# CUDA, with streams that only write down what they are told.


class Stream:
    device = None

    def __init__(self, name, log):
        self.name = name
        self.log = log

    def record_event(self):
        self.log.append(f"{self.name} records")
        return self

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.name}")


def test_streams_wait_and_the_host_does_not(monkeypatch):
    log = []
    hub = Hub(3)
    streams = [Stream(rank, log) for rank in range(3)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[hub.current])

    def body(rank, world_size):
        work = dist.barrier(async_op=True)
        log.append(f"{rank} posted")
        hub.wait_until(lambda: sum("posted" in line for line in log) == 3, "all posts")
        work.wait()
        return rank

    assert hub.run(body) == [0, 1, 2]
    hub.dist.close()
    first, second, last = (int(line[0]) for line in log if "posted" in line)
    moved = [f"{last} waits for {rank}" for rank in range(3)]
    assert log[:-3] == [
        *[f"{first} records", f"{first} posted", f"{second} records", f"{second} posted", f"{last} records"],
        *moved,
        f"{last} records",
        # The data has moved on the receivers' streams.
        *[line for rank in range(3) for line in (f"{rank} records", f"{last} waits for {rank}")],
        f"{last} records",
        *[f"{rank} waits for {last}" for rank in range(3)],
        f"{last} posted",
    ]
    assert sorted(log[-3:]) == [f"{rank} waits for {last}" for rank in range(3)]


# What is left.


def fingerprint():
    init = distributed_c10d.init_process_group.__wrapped__
    while hasattr(init, "__wrapped__"):
        init = init.__wrapped__
    names = {k: v for k, v in distributed_c10d.__dict__.items() if not k.startswith("__")}
    tables = {k: dict(v) for k, v in names.items() if k.startswith("_pg_") and isinstance(v, dict)}
    return names, tables, init.__code__, init.__defaults__, dist.is_initialized(), distributed_c10d._group_count


def test_nothing_is_left_between_turns_and_after():
    before = fingerprint()
    hub = Hub(2)

    def body(rank, world_size):
        dist.new_group([0])
        hub.wait_until(iter([False, True]).__next__, "a turn of the other")
        inside.append(fingerprint())

    inside = []
    seen = []
    wait_until = hub.wait_until

    def spy(condition, why):
        seen.append(dist.is_initialized())
        wait_until(condition, why)

    hub.wait_until = spy
    hub.run(body)
    assert seen == [True, True]
    assert all(now != before for now in inside)
    assert fingerprint() == before
    hub.dist.close()
    hub.dist.close()
    assert fingerprint() == before


def test_a_real_group_survives():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before, group, name = fingerprint(), dist.group.WORLD, dist.group.WORLD.group_name
        assert run(3, body_sum_of_bools) == [[True, False, True]] * 3

        def body(rank, world_size):
            dist.destroy_process_group()

        run(2, body)
        assert fingerprint() == before
        assert dist.group.WORLD is group
        assert torch._C._distributed_c10d._resolve_process_group(name) is not None
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


def test_views_do_not_nest():
    hub = Hub(2)
    hub.dist.enter(0)
    with pytest.raises(RuntimeConflict):
        hub.dist.enter(1)
    with pytest.raises(RuntimeConflict):
        hub.dist.leave(1)
    hub.dist.close()
    assert not dist.is_initialized()
    with pytest.raises(RuntimeConflict):
        hub.dist.leave(0)


def test_a_switch_is_cheap():
    hub = Hub(2)
    best = min(_switch_seconds(hub.dist) for _ in range(5))
    hub.dist.close()
    assert best < 20e-6


def _switch_seconds(world):
    start = time.perf_counter()
    for rank in itertools.islice(itertools.cycle((0, 1)), 200):
        world.enter(rank)
        world.leave(rank)
    return (time.perf_counter() - start) / 200


# The same bodies on gloo, between processes.


def body_like_gloo(rank, world_size):
    objects = body_objects(rank, world_size, 1)
    gathered = [torch.empty(3) for _ in range(world_size)]
    dist.all_gather(gathered, data(rank, (3,)))
    return (
        body_all_reduce(rank, world_size, "PRODUCT", torch.float64).tolist(),
        [t.tolist() for t in gathered],
        [t.tolist() for t in body_all_to_all_single(rank, world_size)],
        [t.tolist() for t in body_ring(rank, world_size)[:2]],
        [(total.tolist(), root, sent.tolist()) for _, total, root, sent in body_groups(rank, world_size, [[2, 0]])],
        objects,
    )


def body_compare(rank, world_size):
    # In a rank process with a real gloo group: run the in-process world beside it and compare this rank's results.
    real = body_like_gloo(rank, world_size)
    local = run(world_size, body_like_gloo)[rank]
    assert local == real, (local, real)


@pytest.mark.processes("gloo connects processes")
def test_gloo_gives_the_same(ranks, pytestconfig):
    if pytestconfig.option.runtime == "gpu":
        pytest.skip("the ranks of the cpu runtime have a gloo group")
    ranks(3).run(body_compare, context=None)
