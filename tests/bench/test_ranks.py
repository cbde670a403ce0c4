"""Several ranks: wrong results are refused, and what happens to one rank ends the combination on all, and no other."""

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris import bench
from iris.errors import ArgumentError, UnsupportedError
from iris.runtime.numeric import assert_bitwise_equal

FAULTS = ("none", "swapped", "unwritten", "one element", "one rank")


def gathered(ctx, n):
    return [bench.random_tensor((n,), torch.float32, seed=5, rank=r) for r in range(ctx.get_num_ranks())]


def test_planted_faults_are_refused_and_not_timed(measure):
    """An all-gather whose ranks' shares are swapped, left out, or wrong in one place, or on one rank only."""
    calls = dict.fromkeys(FAULTS, 0)

    @bench.register
    @bench.axis("fault", FAULTS)
    def all_gather(state, ctx):
        fault, rank = state["fault"], ctx.get_rank()
        shares = gathered(ctx, 40)
        order = shares[::-1] if fault == "swapped" or (fault == "one rank" and rank == 1) else shares
        out = torch.empty(40 * len(shares))

        def fn():
            calls[fault] += rank == 0
            if fault != "unwritten":
                torch.cat(order, out=out)
            if fault == "one element":
                out[57] += 1

        state.validate(out, torch.cat(shares).double())
        state.exec(fn)

    none, *faults = measure(world=2, fails=True)
    assert none.gpu_time_ms > 0
    assert none.validated
    assert len(none.local_times_ms) == 2
    assert calls == {"none": 1 + 1 + 1 + 2, **dict.fromkeys(FAULTS[1:], 1)}
    texts = [result.error for result in faults]
    assert [result.failure for result in faults] == ["wrong"] * 4
    assert [result.gpu_time_ms for result in faults] == [None] * 4
    assert "rank 0: 80 of 80 elements are wrong" in texts[0]
    assert "the first at (0,): got nan" in texts[1]
    assert "rank 0: 1 of 80 elements are wrong" in texts[2]
    assert "the first at (57,)" in texts[2]
    assert "rank 1: 80 of 80 elements are wrong" in texts[3]


def test_a_wrong_candidate_does_not_keep_the_others_from_being_timed(measure):
    @bench.register
    def sums(state, ctx):
        shares = gathered(ctx, 8)
        out, count = torch.empty(8), torch.empty(8, dtype=torch.int32)
        state.candidate("sum", lambda: torch.add(shares[0], shares[1], out=out))
        state.candidate("difference", lambda: torch.sub(shares[0], shares[1], out=out))
        state.candidate("count", lambda: count.copy_(torch.arange(8)))
        for name in ("sum", "difference"):
            state.validate(lambda: out, lambda: shares[0].double() + shares[1].double(), candidate=name)
        state.validate(count, torch.arange(8, dtype=torch.int32), bitwise=True, candidate="count")

    added, subtracted, counted = measure(world=2, fails=True)
    assert (added.failure, subtracted.failure, counted.failure) == ("", "wrong", "")
    assert added.validated
    assert counted.validated


def test_constant_references_are_refused(measure):
    @bench.register
    def constant(state, ctx):
        out = torch.empty(8)
        state.validate(out, torch.ones(8))
        state.exec(lambda: out.fill_(1))

    (result,) = measure(fails=True)
    assert "1.0 in all elements, so misplaced data would pass" in result.error


def test_tolerances(measure):
    @bench.register
    @bench.axis("allowed", [0.2, 0.05])
    def rough(state, ctx):
        out, want = torch.empty(8), torch.arange(8.0)
        state.validate(out, want, tolerance=(state["allowed"], 0.0))
        state.exec(lambda: out.copy_(want + 0.1))

    wide, narrow = measure(fails=True)
    assert (wide.failure, narrow.failure) == ("", "wrong")
    assert "allowed error 0.05" in narrow.error


@triton.jit
def read_next(out, inp, rank: tl.constexpr, peer, heap_bases):
    offs = tl.arange(0, 16)
    tl.store(out + offs, iris.load(inp + offs, rank, peer, heap_bases))


def test_kernels_and_the_heap_are_right_after_failures(measure):
    """A rank that fails, in set-up and while the others wait for it; the combinations after that are measured."""
    cases = ["fine", "one in set-up", "others in a barrier", "all alike", "heap", "skip", "one skips", "timing", "last"]

    @bench.register
    @bench.axis("case", cases)
    def read(state, ctx):
        case, rank, world = state["case"], ctx.get_rank(), ctx.get_num_ranks()
        if case == "skip":
            state.skip("not today")
        if case == "one skips" and rank == 1:
            state.skip("not here")
        if case in ("one in set-up", "others in a barrier") and rank == 1:
            raise UnsupportedError(f"planted on rank {rank}")
        if case == "all alike":
            raise ArgumentError("planted everywhere")
        if case == "heap":
            ctx.zeros(1 << 20, dtype=torch.float32)
        values = [bench.random_tensor((16,), torch.float32, seed=1, rank=r) for r in range(world)]
        inp, out = ctx.as_symmetric(values[rank]), torch.empty(16)
        if case == "others in a barrier":
            for _ in range(3):
                ctx.barrier()
        calls = []

        def fn():
            calls.append(None)
            if case == "timing" and rank == world - 1 and len(calls) == 4:
                raise MemoryError("planted while timing")
            read_next[(1,)](out, inp, rank, (rank + 1) % world, ctx.get_heap_bases())

        state.validate(out, values[(rank + 1) % world], bitwise=True)
        state.exec(fn)

    found = dict(zip(cases, measure("--heap_size=1000000", world=3, fails=True), strict=True))
    assert [c for c in cases if found[c].gpu_time_ms is not None] == ["fine", "last"]
    assert all(found[c].validated for c in ("fine", "last"))
    planted = "rank 1: UnsupportedError in the set-up: planted on rank 1"
    assert found["one in set-up"].error == planted
    assert found["others in a barrier"].error == planted
    assert found["all alike"].error == "ArgumentError in the set-up: planted everywhere"
    assert "HeapExhausted in the set-up" in found["heap"].error
    assert (found["skip"].skipped, found["skip"].skip_reason) == (True, "not today")
    assert found["one skips"].error == "the ranks disagree on skipping: rank 0 did not, rank 1 skipped, rank 2 did not"
    assert found["timing"].error == "rank 2: MemoryError in the timing: planted while timing"


def test_the_failure_of_one_algorithm_leaves_the_others(measure):
    @bench.register
    @bench.axis("algorithm", ["a", "b", "c"], alternate=True, baseline="a")
    def op(state, ctx):
        algorithm, calls = state["algorithm"], []
        tensor = ctx.zeros(16)

        def fn():
            calls.append(None)
            if algorithm == "b" and ctx.get_rank() == 1 and len(calls) > 2:
                raise UnsupportedError("planted")
            tensor.fill_(1)

        state.exec(fn)

    a, b, c = measure(world=2, fails=True)
    assert (a.failure, b.failure, c.failure) == ("", "failed", "")
    assert b.error == "rank 1: UnsupportedError in the timing: planted"
    assert set(c.speedups) == {"a"}


def test_ranks_that_time_different_things_are_refused(measure):
    @bench.register
    @bench.axis("differ", [True, False])
    def op(state, ctx):
        if state["differ"]:
            state.set_repeat(3 + ctx.get_rank())
        state.exec(lambda: None)

    first, second = measure(world=2, fails=True, counts=())
    assert first.failure == "failed"
    assert "the ranks disagree on what is measured: rank 0:" in first.error
    assert "'repeat': 3" in first.error
    assert "'repeat': 4" in first.error
    assert second.gpu_time_ms is not None


def test_other_errors_end_the_run(measure):
    @bench.register
    def broken(state, ctx):
        raise TypeError("a mistake of the program")

    with pytest.raises(TypeError, match="a mistake"):
        measure(world=2)


def test_random_tensors_differ_by_rank_and_place():
    a, b = (bench.random_tensor((64,), torch.float16, seed=1, rank=r) for r in (0, 1))
    assert len(set(a.tolist())) > 32
    assert not torch.equal(a, b)
    assert_bitwise_equal(a, bench.random_tensor((64,), torch.float16, seed=1, rank=0))
