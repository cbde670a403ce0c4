"""The pool of rank processes: results, what travels, and errors that bodies raise."""

import os
import sys
import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from iris.errors import WaitRecord, WaitTimeout
from iris.testing import RankPool, RanksFailed


@pytest.fixture(scope="module")
def pool():
    with RankPool(3, timeout=60) as pool:
        yield pool


@dataclass
class Pair:
    rank: int
    tensor: torch.Tensor


class Unpicklable(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class Picky(Exception):
    """Pickles, but cannot be made again from its arguments."""

    def __init__(self, first, second):
        super().__init__(first)


def body_place(rank, world_size, offset=0):
    assert rank == dist.get_rank() == int(os.environ["RANK"]) == int(os.environ["LOCAL_RANK"])
    assert world_size == dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    return rank * 10 + offset


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_results_are_in_rank_order(world_size):
    with RankPool(world_size) as pool:
        assert pool.run(body_place, context=None, offset=3) == [rank * 10 + 3 for rank in range(world_size)]


def body_context(ctx):
    total = torch.tensor([ctx.get_rank() + 1])
    dist.all_reduce(total)
    ctx.barrier()
    return id(ctx), ctx.get_num_ranks(), int(total), ctx.heap_size


def test_bodies_share_a_context_of_a_heap_size(pool):
    first, again = pool.run(body_context), pool.run(body_context)
    small = pool.run(body_context, context=1 << 20)
    assert first == again
    for (one, world, total, heap), (other, _, _, small_heap) in zip(first, small, strict=True):
        assert (world, total) == (3, 6)
        assert one != other
        assert heap == 64 << 20
        assert small_heap == 1 << 20


def body_pids(rank, world_size):
    return os.getpid()


def test_ranks_are_processes_that_stay(pool):
    first = pool.run(body_pids, context=None)
    assert len({os.getpid(), *first}) == 4
    assert pool.run(body_pids, context=None) == first


def body_tensors(rank, world_size, shards, pair):
    assert pair.tensor.shape == (4, 0)
    assert shards[rank].dtype == torch.bfloat16
    whole = torch.zeros(1 << 20)
    part = whole[10:20:3]
    part += rank
    return {
        "mine": shards[rank].T,
        "pair": Pair(rank, part),
        "fp8": torch.ones(2).to(torch.float8_e5m2),
        "one": part[0],
    }


def test_tensors_travel_both_ways(pool):
    shards = [torch.randn(5, 7).to(torch.bfloat16) + rank for rank in range(3)]
    results = pool.run(body_tensors, shards, Pair(1, torch.empty(4, 0)), context=None)
    for rank, result in enumerate(results):
        assert torch.equal(result["mine"], shards[rank].T)
        assert type(result["pair"]) is Pair
        assert result["pair"].tensor.tolist() == [rank] * 4
        # Not the megabytes that the four numbers were a view of.
        assert result["pair"].tensor.untyped_storage().nbytes() == 16
        assert result["fp8"].dtype == torch.float8_e5m2
        assert result["one"].shape == ()


def body_leaves_traces(rank, world_size):
    os.environ["TRACE"] = "left"
    os.environ.pop("IRIS_RUNTIME")
    return torch.rand(3).tolist()


def body_sees_traces(rank, world_size):
    return os.environ.get("TRACE"), os.environ["IRIS_RUNTIME"], torch.rand(3).tolist()


def test_a_body_leaves_no_environment_and_no_random_state(pool):
    numbers = pool.run(body_leaves_traces, context=None)
    assert len({str(n) for n in numbers}) == 3
    assert pool.run(body_sees_traces, context=None) == [(None, "cpu", n) for n in numbers]


def body_raises(rank, world_size, which, error):
    print(f"printed on rank {rank}")
    if rank in which:
        time.sleep(0.2 * (2 - rank))
        raise error
    return rank


def test_an_error_shows_every_traceback_and_the_first_comes_first(pool):
    before = pool.run(body_pids, context=None)
    with pytest.raises(RanksFailed) as caught:
        pool.run(body_raises, [0, 2], KeyError("planted"), context=None)
    text = str(caught.value)
    assert text.startswith("body_raises failed on ranks 0, 2 of 3; rank 1 returned")
    assert text.index("--- rank 2 ---") < text.index("--- rank 0 ---")
    assert text.count("KeyError: 'planted'") == 2
    assert "in body_raises" in text
    assert "_worker.py" not in text
    assert "printed on rank 2" in text
    assert "printed on rank 1" not in text
    assert list(caught.value.errors) == [2, 0]
    assert all(type(error) is KeyError for error in caught.value.errors.values())
    assert [o.value for o in caught.value.outcomes] == [None, 1, None]
    # Ranks may have stopped at different places.
    assert set(before).isdisjoint(pool.run(body_pids, context=None))


def test_an_error_shows_only_its_own_output(pool):
    pool.run(body_raises, [], None, context=None)
    with pytest.raises(RanksFailed) as caught:
        pool.run(body_raises, [1], ValueError("x"), context=None)
    assert str(caught.value).count("printed on rank 1") == 1


def test_one_traceback_for_the_same_error(pool):
    with pytest.raises(RanksFailed) as caught:
        pool.run(body_place, "surplus", "surplus", context=None)
    assert str(caught.value).count("Traceback") == 1
    assert str(caught.value).count("the same as on rank") == 2


def body_special(rank, world_size, kind):
    if kind == "unpicklable":
        raise Unpicklable("a lock")
    if kind == "picky":
        raise Picky("one", "two")
    if kind == "exit":
        sys.exit(5)
    if kind == "result":
        return threading.Lock()
    raise WaitTimeout("late", (WaitRecord(rank, "k", "f[0]", 1, 0, -1, 7),))


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("unpicklable", "Unpicklable", "a lock"),
        ("picky", "Picky", "one"),
        ("exit", SystemExit, "SystemExit: 5"),
        ("result", TypeError, "cannot pickle '_thread.lock'"),
        ("iris", WaitTimeout, "late"),
    ],
)
def test_expected_errors_are_outcomes_and_keep_the_ranks(pool, kind, error, text):
    before = pool.run(body_pids, context=None)
    outcomes = pool.run_expecting(body_special, kind, context=None)
    assert [o.rank for o in outcomes] == [0, 1, 2]
    for o in outcomes:
        assert o.failed
        assert o.error == error if isinstance(error, str) else type(o.error) is error
        assert text in o.traceback
    if kind == "iris":
        assert [o.error.records[0].rank for o in outcomes] == [0, 1, 2]
    assert pool.run(body_pids, context=None) == before


def test_expecting_gives_values_too_and_new_ranks_when_they_differ(pool):
    assert [o.value for o in pool.run_expecting(body_place, context=None)] == [0, 10, 20]
    before = pool.run(body_pids, context=None)
    outcomes = pool.run_expecting(body_raises, [1], OSError("planted"), context=None)
    assert [o.failed for o in outcomes] == [False, True, False]
    assert type(outcomes[1].error) is OSError
    assert outcomes[2].value == 2
    assert set(before).isdisjoint(pool.run(body_pids, context=None))


class Bodies:
    @staticmethod
    def place(rank, world_size):
        return rank


def test_what_cannot_be_sent_is_refused(pool):
    def local(rank, world_size):
        return rank

    for body in (local, lambda rank, world_size: rank):
        with pytest.raises(ValueError, match="cannot run on ranks: they import it by name"):
            pool.run(body, context=None)
    with pytest.raises(ValueError, match="its module has none"):
        pool.run(print, context=None)
    assert pool.run(Bodies.place, context=None) == [0, 1, 2]


def test_bad_arguments_of_a_pool():
    for world_size in (0, -1, True, "2"):
        with pytest.raises(ValueError, match="above 0"):
            RankPool(world_size)
    with pytest.raises(ValueError, match="possible: 'cpu' or 'gpu'"):
        RankPool(1, runtime="tpu")


def test_variables_reach_the_ranks():
    with RankPool(2, env={"TRACE": "given"}) as pool:
        assert [seen for seen, *_ in pool.run(body_sees_traces, context=None)] == ["given"] * 2
