"""What the simulator says when nothing can move."""

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris import errors, sim


def stuck(body, world=1, **options):
    with pytest.raises(errors.DeadlockError) as caught:
        sim.run(body, world, **options)
    assert str(caught.value).startswith(str(caught.value.report))
    return caught.value.report


def flags(ctx, n=4):
    result = ctx.zeros(n, dtype=torch.int32)
    ctx.barrier()
    return result


@triton.jit
def raw_wait_kernel(ready, wanted, KIND: tl.constexpr):
    index = tl.program_id(0)
    if KIND == "cas":
        while tl.atomic_cas(ready + index, wanted, wanted, sem="acquire", scope="sys") != wanted:
            pass
    elif KIND == "add":
        while tl.atomic_add(ready + index, 0, sem="acquire", scope="sys") != wanted:
            pass
    elif KIND == "or":
        while tl.atomic_or(ready + index, 0, sem="acquire", scope="sys") != wanted:
            pass
    else:
        while tl.load(ready + index, volatile=True) != wanted:
            pass


@pytest.mark.parametrize("kind", ["cas", "add", "or", "volatile"])
def test_a_loop_that_polls(kind):
    def body(ctx):
        ready = flags(ctx)
        ready[2] = 5
        raw_wait_kernel[(3,)](ready, 7, kind)

    report = stuck(body)
    waiters = {w.program[0]: w for w in report.waiters}
    assert sorted(waiters) == [0, 1, 2]
    waiter = waiters[2]
    assert (waiter.rank, waiter.kernel, waiter.flag, waiter.owner, waiter.seen) == (
        0,
        "raw_wait_kernel",
        "ready[2]",
        0,
        5,
    )
    assert waiter.file == __file__
    assert waiter.source.startswith("while tl.")
    assert waiter.values["index"] == "2"
    assert waiter.values["wanted"] == "7"
    assert report.hosts == ("rank 0, host: waits for its stream",)
    assert report.not_started == ()


@pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="this Triton has no atomic_poll")
def test_atomic_poll():
    @triton.jit
    def poll_kernel(ready):
        tl.atomic_poll(ready + 1, 3, sem="acquire", scope="sys")

    (waiter,) = stuck(lambda ctx: poll_kernel[(1,)](flags(ctx))).waiters
    assert (waiter.flag, waiter.seen) == ("ready[1]", 0)
    assert "atomic_poll" in waiter.source


@pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="this Triton has no atomic_poll")
def test_atomic_poll_ends_when_the_value_comes():
    @triton.jit
    def poll_kernel(ready, out):
        tl.atomic_poll(ready, 3, sem="acquire", scope="sys")
        tl.store(out, tl.load(ready + 1))

    @triton.jit
    def count_kernel(ready):
        tl.store(ready + 1, 9)
        for _ in range(3):
            tl.debug_barrier()
            tl.atomic_add(ready, 1, sem="release", scope="sys")

    def body(ctx):
        ready, out = flags(ctx), flags(ctx)
        side = ctx.new_stream()
        with ctx.use_stream(side):
            poll_kernel[(1,)](ready, out)
        with ctx.use_stream(ctx.new_stream()):
            count_kernel[(1,)](ready)
        side.synchronize()
        return out[0].item()

    assert sim.explore(body, 1, seeds=range(5)) == [[9]] * 5


@triton.jit
def signal_kernel(context, ready, inbox, rank: tl.constexpr, world: tl.constexpr, SET: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    to = (rank + 1) % world
    ctx.store(inbox, rank, to_rank=to)
    iris.signal.notify(ready + SET, 1, rank, to, context + 2)
    iris.signal.wait(ready + 1, 1, context)


def test_a_wait_for_a_signal_says_what_it_wants_and_who_wrote_beside_it():
    def body(ctx):
        inbox = flags(ctx)
        signal_kernel[(1,)](ctx.get_device_context(), flags(ctx), inbox, ctx.get_rank(), 3, SET=2)

    report = stuck(body, 3)
    assert sorted(w.rank for w in report.waiters) == [0, 1, 2]
    for waiter in report.waiters:
        assert (waiter.flag, waiter.owner, waiter.wanted, waiter.seen) == ("ready[1]", waiter.rank, 1, 0)
        assert waiter.source == "iris.signal.wait(ready + 1, 1, context)"
        before = (waiter.rank - 1) % 3
        assert "no kernel has written it" in waiter.writers
        assert f"rank {before}, kernel signal_kernel, program 0" in waiter.writers


def test_a_flag_that_was_overwritten_names_who_wrote_last():
    @triton.jit
    def set_kernel(ready):
        tl.atomic_xchg(ready, tl.program_id(0) + 1, sem="release", scope="gpu")

    def body(ctx):
        ready = flags(ctx)
        set_kernel[(2,)](ready)
        raw_wait_kernel[(1,)](ready, 3, "add")

    (waiter,) = stuck(body).waiters
    assert waiter.seen in (1, 2)
    assert waiter.writers.startswith("last written by rank 0, kernel set_kernel, program ")
    assert waiter.writers.count("set_kernel") == 2


def test_a_flag_that_nobody_writes():
    (waiter,) = stuck(lambda ctx: raw_wait_kernel[(1,)](flags(ctx), 1, "add")).waiters
    assert waiter.writers == "no kernel has written this tensor on any rank"


def test_a_flag_on_a_peer():
    @triton.jit
    def peer_kernel(context, ready, rank: tl.constexpr, world: tl.constexpr):
        ctx = iris.DeviceContext.initialize(context, rank, world)
        while ctx.atomic_add(ready + 3, 0, 1 - rank, sem="acquire", scope="sys") == 0:
            pass

    def body(ctx):
        ready = flags(ctx)
        if ctx.get_rank() == 0:
            peer_kernel[(1,)](ctx.get_device_context(), ready, 0, 2)
        ctx.barrier()

    report = stuck(body, 2)
    (waiter,) = report.waiters
    assert (waiter.rank, waiter.flag, waiter.owner) == (0, "ready[3]", 1)
    assert report.hosts == ("rank 0, host: waits for its stream", "rank 1, host: waits for barrier() of ranks [0, 1]")


def test_a_tile_of_flags():
    @triton.jit
    def tile_kernel(ready, N: tl.constexpr):
        seen = 0
        while seen < N:
            seen = tl.sum(tl.load(ready + tl.arange(0, N), volatile=True))

    for n in (4, 256):
        report = stuck(lambda ctx, n=n: tile_kernel[(2,)](flags(ctx, n), n))
        assert {w.flag for w in report.waiters} == {"ready[0]"}
        assert {w.kernel for w in report.waiters} == {"tile_kernel"}


def test_without_the_check_for_races():
    report = stuck(lambda ctx: raw_wait_kernel[(1,)](flags(ctx), 1, "add"), check="deadlocks")
    assert report.waiters[0].writers == "who wrote it is not known without the check for races"
    assert report.waiters[0].seen == 0


def test_hosts_in_different_waits():
    def body(ctx):
        if ctx.get_rank() == 0:
            ctx.barrier(group=[0, 1])
        else:
            ctx.barrier()

    assert stuck(body, 3).hosts == (
        "rank 0, host: waits for barrier() of ranks [0, 1]",
        "rank 1, host: waits for barrier() of ranks [0, 1, 2]",
        "rank 2, host: waits for barrier() of ranks [0, 1, 2]",
    )


def test_many_programs_are_listed_in_short():
    report = stuck(lambda ctx: raw_wait_kernel[(20,)](flags(ctx, 20), 1, "add"))
    assert len(report.waiters) == 20
    assert "and 8 more programs that wait" in str(report)


def test_many_programs_that_wait_are_found_stuck_without_many_polls():
    report = stuck(lambda ctx: raw_wait_kernel[(50,)](flags(ctx, 50), 1, "add"), 4, step_limit=4000)
    assert len(report.waiters) == 200


def test_a_wait_that_counts_its_polls_is_found_too():
    @triton.jit
    def counting_kernel(ready):
        polls = 0
        while tl.atomic_add(ready, 0, sem="acquire", scope="sys") == 0:
            polls += 1

    (waiter,) = stuck(lambda ctx: counting_kernel[(1,)](flags(ctx)), step_limit=50_000).waiters
    assert waiter.source.startswith("while tl.atomic_add")
