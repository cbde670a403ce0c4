"""``iris.sim.run`` and ``explore``: options, results, seeds, and that a run leaves the process as it was."""

import gc
import os
import random
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from greenlet import greenlet
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import iris
from iris import errors, sim
from iris.device import _asm
from iris.runtime import scheduler, streams


def ring(ctx):
    """Every rank adds its number to a sum that goes round; returns the sum that came to it."""
    inbox, flag = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    ring_kernel[(1,)](ctx.get_device_context(), inbox, flag, ctx.get_rank(), ctx.get_num_ranks())
    ctx.barrier()
    return inbox.item()


@triton.jit
def ring_kernel(context, inbox, flag, rank: tl.constexpr, world: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    before = 0
    if rank > 0:
        iris.signal.wait(flag, 1, context)
        before = tl.load(inbox)
    to = (rank + 1) % world
    ctx.store(inbox, before + rank, to_rank=to)
    iris.signal.notify(flag, 1, rank, to, context + 2)


@pytest.mark.parametrize("world", [1, 2, 3, 8, 16])
def test_results_are_in_the_order_of_ranks(world):
    received = sim.run(ring, world)
    assert received == [world * (world - 1) // 2, *(r * (r - 1) // 2 for r in range(1, world))]


def test_arguments_reach_every_rank():
    def body(ctx, factor, *, offset):
        return factor * ctx.get_rank() + offset

    assert sim.run(body, 3, 10, offset=1) == [1, 11, 21]


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "2", None])
def test_world_sizes_that_are_none(size):
    with pytest.raises(errors.ArgumentError, match="world_size must be a number of ranks above 0"):
        sim.run(ring, size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": None}, "seed must be a whole number, got None"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"device": "mi3"}, "device 'mi3' is not known; possible: .*mi300x"),
        ({"resident_programs": 0}, "resident_programs must be a whole number of at least 1, got 0"),
        ({"resident_programs": 2.0}, "resident_programs must be .*, got 2.0"),
        ({"step_limit": 0}, "step_limit must be a whole number of at least 1, got 0"),
        ({"check": "races,leaks"}, "check: leaks is not known; possible: races, deadlocks, bounds, uninitialized"),
        ({"check": ["leaks", 1]}, "check: leaks, 1 is not known; possible: races"),
        ({"check": None}, "check must be names out of .*, got None"),
        ({"on": "tpu"}, "on must be 'cpu' or 'gpu', got 'tpu'"),
        ({"link_gbps": 50}, "link_gbps .* needs on='gpu'"),
        ({"link_gbps": 0.0, "on": "gpu"}, "link_gbps must be above 0, got 0.0"),
        ({"link_per_peer": True}, "link_per_peer needs the rate of a link: give link_gbps"),
        ({"heap_size": 0}, "heap_size must be a number of bytes above 0, got 0"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(errors.ArgumentError, match=message):
        sim.run(ring, 2, **options)


def test_the_gpu_needs_compiled_kernels():
    with pytest.raises(errors.RuntimeConflict, match="IRIS_RUNTIME=gpu"):
        sim.run(ring, 2, on="gpu")


def test_the_device_gives_the_compute_units():
    units = {device: sim.run(lambda ctx: ctx.get_cu_count(), 1, device=device)[0] for device in ("h200", "mi300x")}
    assert units == {"h200": 132, "mi300x": 304}


def test_heap_size():
    with pytest.raises(errors.HeapExhausted, match="4096"):
        sim.run(lambda ctx: ctx.zeros(1025, dtype=torch.float32), 2, heap_size=4096)


@triton.jit
def racing_kernel(out):
    tl.store(out, tl.program_id(0))


def racing(ctx):
    racing_kernel[(2,)](ctx.zeros(1, dtype=torch.int32))


def past_the_end(ctx):
    racing_kernel[(1,)](ctx.zeros(1, dtype=torch.int32)[1:])


def unwritten(ctx):
    return ctx.empty(1, dtype=torch.float32).item()


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize(
    ("check", "body", "error"),
    [
        ("races", racing, errors.RaceError),
        ("bounds", past_the_end, errors.OutOfBoundsError),
        ("uninitialized", unwritten, errors.UninitializedReadError),
    ],
)
def test_checks_can_be_chosen(check, body, error, as_list):
    with pytest.raises(error):
        sim.run(body, 1, check=[check] if as_list else f" {check} ,deadlocks")
    if check != "bounds":  # without that check the store would happen
        sim.run(body, 1, check=[c for c in sim.CHECKS if c != check])


def test_what_a_rank_raises_is_raised():
    error = KeyError("of rank 1")

    def body(ctx):
        if ctx.get_rank() == 1:
            raise error
        ctx.barrier()

    with pytest.raises(KeyError) as caught:
        sim.run(body, 3, seed=7)
    assert caught.value is error
    assert error.__notes__ == ["seed=7 of iris.sim.run repeats it"]


def test_what_a_kernel_raises_is_raised_where_it_was_launched():
    @triton.jit
    def broken_kernel(out):
        tl.store(out, tl.arange(0, 3))

    def body(ctx):
        try:
            broken_kernel[(2,)](ctx.zeros(1, dtype=torch.int32))
        except triton.runtime.errors.InterpreterError as error:
            return str(error)

    assert "kernel broken_kernel, program (" in sim.run(body, 1)[0]


def test_a_rank_that_returns_early_leaves_the_others_stuck():
    def body(ctx):
        if ctx.get_rank() != 1:
            ctx.barrier()

    with pytest.raises(errors.DeadlockError) as caught:
        sim.run(body, 3)
    assert caught.value.report.hosts == (
        "rank 0, host: waits for barrier() of ranks [0, 1, 2]",
        "rank 1, host: has returned",
        "rank 2, host: waits for barrier() of ranks [0, 1, 2]",
    )


def test_kernels_left_behind_by_a_rank_run_to_their_end():
    kept = []

    def body(ctx):
        out = ctx.zeros(2, dtype=torch.int32)
        ctx.synchronize()
        kept.append(out)
        with ctx.use_stream(ctx.new_stream()):
            racing_kernel[(1,)](out[1:])
            ones_kernel[(1,)](out)

    sim.run(body, 1)
    assert kept[0].tolist() == [1, 0]


def test_an_error_of_a_kernel_that_nobody_waited_for():
    @triton.jit
    def broken_kernel(out):
        tl.store(out, tl.arange(0, 3))

    def body(ctx):
        out = ctx.zeros(1, dtype=torch.int32)
        ctx.synchronize()
        with ctx.use_stream(ctx.new_stream()):
            broken_kernel[(1,)](out)

    with pytest.raises(triton.runtime.errors.InterpreterError, match="broken_kernel"):
        sim.run(body, 1)


@triton.jit
def ones_kernel(out):
    tl.store(out, 1)


def order_of_programs(ctx, programs=8):
    """The order in which the programs of all ranks took tickets on rank 0."""
    ticket, order = ctx.zeros(1, dtype=torch.int32), ctx.zeros((2, programs), dtype=torch.int32)
    ctx.barrier()
    ticket_kernel[(programs,)](ctx.get_device_context(), ticket, order, ctx.get_rank(), ctx.get_num_ranks(), programs)
    ctx.barrier()
    return order.tolist()


@triton.jit
def ticket_kernel(context, ticket, order, rank: tl.constexpr, world: tl.constexpr, programs: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, rank, world)
    mine = ctx.atomic_add(ticket, 1, 0, sem="relaxed", scope="sys")
    tl.store(order + rank * programs + tl.program_id(0), mine)


def test_a_seed_fixes_the_order():
    runs = {seed: sim.run(order_of_programs, 2, seed=seed) for seed in range(4)}
    assert all(sim.run(order_of_programs, 2, seed=seed) == run for seed, run in runs.items())
    assert len({str(run) for run in runs.values()}) == 4


def test_a_seed_fixes_the_report():
    def found(seed):
        with pytest.raises(errors.RaceError) as caught:
            sim.run(racing, 2, seed=seed)
        assert caught.value.seed == seed
        assert f"seed={seed} of iris.sim.run repeats it" in str(caught.value)
        report = caught.value.report
        return report.first.rank, report.first.program, report.second.program

    reports = [found(seed) for seed in range(8)]
    assert [found(seed) for seed in range(8)] == reports
    assert len(set(reports)) > 1


def test_explore_gives_the_results_of_each_seed():
    assert sim.explore(ring, 2, seeds=range(3)) == [[1, 0]] * 3


def test_explore_stops_at_the_first_seed_that_fails():
    tried = []

    def body(ctx):
        tried.append(1)
        if len(tried) == 3:
            racing(ctx)

    with pytest.raises(errors.RaceError, match="seed=12 of iris") as caught:
        sim.explore(body, 1, seeds=range(10, 100))
    assert caught.value.seed == 12
    assert len(tried) == 3


def test_explore_says_with_which_seed_an_ordinary_error_came():
    def body(ctx):
        first = order_of_programs(ctx)
        assert first[0][0] < 12

    with pytest.raises(AssertionError) as caught:
        sim.explore(body, 2, seeds=range(40))
    seed = int(caught.value.__notes__[-1].removeprefix("seed=").partition(" ")[0])
    with pytest.raises(AssertionError):
        sim.run(body, 2, seed=seed)


@triton.jit
def counting_kernel(flag, out, polls):
    seen = 0
    for _ in range(polls):
        seen += 1 + tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.store(out + tl.program_id(0), seen)


@pytest.mark.parametrize(("world", "polls"), [(1, 1), (1, 10), (1, 200), (2, 200), (2, 600)])
def test_a_loop_that_polls_so_many_times_ends(world, polls):
    def body(ctx):
        out, flag = ctx.zeros(3, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
        counting_kernel[(3,)](flag, out, polls)
        return out.tolist()

    assert sim.run(body, world) == [[polls] * 3] * world


def test_step_limit():
    def body(ctx):
        counting_kernel[(1,)](ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32), 100)

    sim.run(body, 1, step_limit=100)
    with pytest.raises(errors.StepLimitError, match=r"rank 0, kernel counting_kernel, program 0 .* \(step_limit=99\)"):
        sim.run(body, 1, step_limit=99)


@triton.jit
def endless_kernel(out):
    i = 0
    while i < 10:
        i = i * 1
    tl.store(out, i)


def test_a_loop_that_touches_no_memory():
    with pytest.raises(errors.StepLimitError, match=r"rank 0, kernel endless_kernel, program 0 has taken .* turns"):
        sim.run(lambda ctx: endless_kernel[(1,)](ctx.zeros(1, dtype=torch.int32)), 1)


@triton.jit
def delay_kernel(out, nanoseconds):
    start = iris.device_utils.read_realtime()
    turns = 0
    while iris.device_utils.read_realtime() - start < nanoseconds:
        turns += 1
    tl.store(out, turns)


def test_a_loop_that_waits_for_the_clock_ends():
    def body(ctx):
        out = ctx.zeros(1, dtype=torch.int32)
        delay_kernel[(1,)](out, 100_000)
        return out.item()

    assert sim.run(body, 1)[0] > 0


def numbers():
    return random.random(), float(np.random.rand()), torch.rand(2).tolist(), float(np.random.randn())


def test_random_numbers_are_those_of_a_process():
    def seeded(seed):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def body(ctx):
        seeded(ctx.get_rank())
        drawn = [numbers()]
        ctx.barrier()
        drawn.append(numbers())
        ctx.barrier()
        return [*drawn, numbers()]

    seeded(99)
    before = numbers()
    seeded(99)
    drawn = sim.run(body, 3)
    assert numbers() == before
    for rank in range(3):
        seeded(rank)
        assert drawn[rank] == [numbers() for _ in range(3)]


def test_random_numbers_of_ranks_that_seed_nothing_are_alike():
    torch.manual_seed(5)
    first, second = sim.run(lambda ctx: (torch.rand(1).item(), ctx.barrier(), torch.rand(1).item()), 2)
    assert first == second
    assert first[0] != first[2]


def test_environment_of_each_rank():
    def body(ctx):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        given = [os.environ[name] for name in names]
        os.environ["IRIS_TEST_OF_RANK"] = str(ctx.get_rank())
        del os.environ["IRIS_TEST_OUTSIDE"]
        ctx.barrier()
        return given, os.environ["IRIS_TEST_OF_RANK"], "IRIS_TEST_OUTSIDE" in os.environ

    os.environ["IRIS_TEST_OUTSIDE"] = "1"
    before = dict(os.environ)
    try:
        results = sim.run(body, 2)
        assert dict(os.environ) == before
    finally:
        del os.environ["IRIS_TEST_OUTSIDE"]
    assert results == [([r, r, "2", "2", "localhost"], r, False) for r in "01"]


def state():
    """What PyTorch keeps for the process and code turns on for a while."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        "dtype": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
    }


MODES = {
    "grad": (torch.no_grad, False),
    "inference": (torch.inference_mode, True),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.bfloat16),
    "device": (lambda: torch.device("meta"), "meta"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", [0, 1])
def test_modes_of_a_rank_are_its_own(mode, first):
    """Both ranks have the mode on for a while, one begins and ends earlier."""
    make, value = MODES[mode]

    def body(ctx):
        seen = []
        late = ctx.get_rank() != first
        if late:
            seen.append(state()[mode])
            ctx.barrier()
        with make():
            for _ in range(2):
                ctx.barrier()
                seen.append(state()[mode])
        ctx.barrier()
        seen.append(state()[mode])
        if not late:
            ctx.barrier()
            seen.append(state()[mode])
        return seen

    before = state()
    results = sim.run(body, 2)
    assert state() == before
    assert results[1 - first] == [before[mode], value, value, before[mode]]
    assert results[first] == [value, value, before[mode], before[mode]]


def test_the_default_dtype_of_a_rank_is_its_own():
    def body(ctx):
        if ctx.get_rank() == 0:
            torch.set_default_dtype(torch.float64)
        ctx.barrier()
        return torch.zeros(1).dtype

    assert sim.run(body, 2) == [torch.float64, torch.float32]
    assert torch.get_default_dtype() == torch.float32


def test_torch_distributed_of_each_rank():
    def body(ctx):
        total = torch.tensor([ctx.get_rank() + 1.0])
        dist.all_reduce(total)
        return dist.get_rank(), dist.get_world_size(), total.item()

    assert sim.run(body, 3) == [(r, 3, 6.0) for r in range(3)]
    assert not dist.is_initialized()


def test_a_run_within_a_run_is_refused():
    def body(ctx):
        with pytest.raises(errors.RuntimeConflict, match="another one"):
            sim.run(ring, 2)
        return ctx.get_rank()

    assert sim.run(body, 2) == [0, 1]


def surroundings():
    return {
        "functions": _get_current_function_mode_stack(),
        "dispatch": _get_current_dispatch_mode_stack(),
        "environment": dict(os.environ),
        "distributed": (dist.is_initialized(), dist.get_rank, dist.all_reduce, dist.init_process_group),
        "asm": (_asm.clock_ns, _asm.place),
        "main": sys.modules["__main__"],
        "scheduler": scheduler.current(),
        "streams": streams._streams,
        "load": tl.load,
        "sum": tl.sum,
        "index": getattr(tl.tensor, "__index__", None),
        "state": state(),
    }


def suspended():
    """How many coroutines have begun and not ended."""
    gc.collect()
    return sum(isinstance(o, greenlet) and bool(o) for o in gc.get_objects())


def raises_on_one_rank(ctx):
    if ctx.get_rank() == 1:
        raise ValueError("rank 1")
    ctx.barrier()


def raises_while_others_wait_in_modes(ctx):
    with torch.inference_mode(), torch.device("cpu"), torch.autocast("cpu"):
        os.environ["IRIS_TEST_OF_RANK"] = "1"
        raises_on_one_rank(ctx)


def deadlocks_in_kernels(ctx):
    waiting_kernel[(3,)](ctx.zeros(1, dtype=torch.int32))


def waits_again_when_unwound(ctx):
    try:
        deadlocks_in_kernels(ctx)
    finally:
        ctx.barrier()


@triton.jit
def waiting_kernel(flag):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
        pass


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (ring, None),
        (racing, errors.RaceError),
        (unwritten, errors.UninitializedReadError),
        (raises_on_one_rank, ValueError),
        (raises_while_others_wait_in_modes, ValueError),
        (deadlocks_in_kernels, errors.DeadlockError),
        (waits_again_when_unwound, errors.DeadlockError),
    ],
)
def test_a_run_leaves_the_process_as_it_was(body, error):
    before, alive = surroundings(), suspended()
    if error is None:
        sim.run(body, 3)
    else:
        with pytest.raises(error):
            sim.run(body, 3)
    assert surroundings() == before
    assert suspended() == alive
    assert surroundings() == before
    assert sim.run(ring, 3) == [3, 0, 1]
