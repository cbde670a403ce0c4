"""How many programs of a rank run at a time, and what that shows."""

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris import errors, sim


@triton.jit
def handover_kernel(flags, out, n, TICKET: tl.constexpr):
    """Each role but the first waits for the one before it."""
    role = tl.program_id(0)
    if TICKET:
        role = tl.atomic_add(flags + n, 1, sem="relaxed", scope="gpu")
    if role > 0:
        while tl.atomic_add(flags + role - 1, 0, sem="acquire", scope="gpu") == 0:
            pass
    tl.store(out + role, role)
    tl.debug_barrier()
    tl.atomic_xchg(flags + role, 1, sem="release", scope="gpu")


def handover(ctx, n, ticket):
    flags, out = ctx.zeros(n + 1, dtype=torch.int32), ctx.zeros(n, dtype=torch.int32)
    handover_kernel[(n,)](flags, out, n, ticket)
    return out.tolist()


@pytest.mark.parametrize("resident", [1, 2, 3, 12, 13, None])
@pytest.mark.parametrize("world", [1, 2])
def test_roles_by_ticket_need_no_more_than_one_place(world, resident):
    results = sim.explore(handover, world, 12, True, seeds=range(4), resident_programs=resident)
    assert results == [[list(range(12))] * world] * 4


@pytest.mark.parametrize("resident", [1, 2, 11])
def test_roles_by_program_index_lean_on_the_order_of_launch(resident):
    with pytest.raises(errors.DeadlockError) as caught:
        sim.explore(handover, 2, 12, False, seeds=range(40), resident_programs=resident)
    report = caught.value.report
    for text in report.not_started:
        assert "kernel handover_kernel: " in text
        assert f"of 12 programs have not started, because {resident} run at a time (resident_programs)" in text
    by_rank = [sum(w.rank == rank for w in report.waiters) for rank in (0, 1)]
    assert max(by_rank) == resident


@pytest.mark.parametrize("resident", [12, 100])
def test_roles_by_program_index_do_when_all_fit(resident):
    results = sim.explore(handover, 2, 12, False, seeds=range(10), resident_programs=resident)
    assert results == [[list(range(12))] * 2] * 10


def test_a_device_has_a_place_for_each_compute_unit():
    """Programs of a grid that all wait for each other fit when there are no more of them than compute units."""

    def body(ctx, extra):
        n = ctx.get_cu_count() + extra
        count = ctx.zeros(1, dtype=torch.int32)
        meet_kernel[(n,)](count, n)
        return count.item()

    assert sim.run(body, 1, 0, device="h200") == [132]
    with pytest.raises(errors.DeadlockError, match="1 of 133 programs have not started, because 132 run at a time"):
        sim.run(body, 1, 1, device="h200")


@triton.jit
def meet_kernel(count, n):
    tl.atomic_add(count, 1, sem="relaxed", scope="gpu")
    while tl.atomic_add(count, 0, sem="relaxed", scope="gpu") < n:
        pass


@triton.jit
def wait_kernel(flag):
    while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
        pass


@triton.jit
def set_kernel(flag):
    tl.atomic_xchg(flag, 1, sem="release", scope="gpu")


@pytest.mark.parametrize(("resident", "fits"), [(1, False), (2, False), (3, True)])
def test_launches_of_a_rank_share_its_places(resident, fits):
    """Two programs wait on one stream; the one that they wait for is on another."""

    def body(ctx):
        flag = ctx.zeros(1, dtype=torch.int32)
        ctx.synchronize()
        first, second = ctx.new_stream(), ctx.new_stream()
        with ctx.use_stream(first):
            wait_kernel[(2,)](flag)
        while True:  # until the first stream has taken its places
            if not first.record_event().query():
                break
        with ctx.use_stream(second):
            set_kernel[(1,)](flag)
        ctx.synchronize()

    if fits:
        sim.explore(body, 1, seeds=range(10), resident_programs=resident)
    else:
        with pytest.raises(errors.DeadlockError, match=r"kernel set_kernel: 1 of 1 programs have not started"):
            sim.explore(body, 1, seeds=range(10), resident_programs=resident)


@triton.jit
def exchange_kernel(context, flags, rank: tl.constexpr, world: tl.constexpr):
    """Program i of every rank waits for program i of the next rank."""
    at = flags + tl.program_id(0)
    to = (rank + 1) % world
    iris.signal.notify(at, 1, rank, to, context + 2)
    iris.signal.wait(at, 1, context)


@pytest.mark.parametrize("resident", [1, 2, 8])
def test_ranks_have_places_of_their_own(resident):
    """A rank's places are not taken by others; but ranks that start different programs first wait for each other."""

    def body(ctx):
        flags = ctx.zeros(8, dtype=torch.int32)
        ctx.barrier()
        exchange_kernel[(8,)](ctx.get_device_context(), flags, ctx.get_rank(), ctx.get_num_ranks())
        ctx.barrier()
        return flags.tolist()

    if resident == 8:
        assert sim.explore(body, 3, seeds=range(5), resident_programs=8) == [[[1] * 8] * 3] * 5
    else:
        with pytest.raises(errors.DeadlockError, match="programs have not started"):
            sim.explore(body, 3, seeds=range(20), resident_programs=resident)
