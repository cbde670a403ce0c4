"""The pool of rank processes: ranks that die or hang, runs that are broken off, and what is left afterwards."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from iris.testing import RankDied, RankHung, RankPool, RanksFailed


@pytest.fixture(scope="module")
def pool():
    with RankPool(3, timeout=60) as pool:
        yield pool


def body_place(rank, world_size):
    assert dist.get_rank() == rank
    return rank * 10


def body_pids(rank, world_size):
    return os.getpid()


def body_dies(rank, world_size, how):
    print(f"last words of rank {rank}")
    if rank == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


@pytest.mark.parametrize(("how", "status"), [("exit", "exit status 3"), ("kill", "signal SIGKILL")])
def test_a_rank_that_dies_is_named_and_the_pool_works_on(pool, how, status):
    with pytest.raises(RanksFailed) as caught:
        pool.run(body_dies, how, context=None)
    text = str(caught.value)
    assert text.startswith("body_dies failed on rank 1 of 3; ranks 0, 2 returned")
    assert f"the process of rank 1 ended with {status}" in text
    assert "last words of rank 1" in text
    assert type(caught.value.errors[1]) is RankDied
    assert type(pool.run_expecting(body_dies, how, context=None)[1].error) is RankDied
    assert pool.run(body_place, context=None) == [0, 10, 20]


def body_waits_in_vain(rank, world_size):
    if rank == 0:
        raise ValueError("planted")
    dist.barrier()


def test_ranks_that_wait_for_a_failed_one_do_not_use_up_the_time():
    with RankPool(2) as pool:
        start = time.monotonic()
        with pytest.raises(RanksFailed, match="rank 1 did not end within 5 s after rank 0 had failed") as caught:
            pool.run(body_waits_in_vain, context=None, timeout=60)
        assert time.monotonic() - start < 30
        assert type(caught.value.errors[0]) is ValueError
        assert type(caught.value.errors[1]) is RankHung
        assert "in body_waits_in_vain" in str(caught.value)


def body_hangs(rank, world_size, which):
    print(f"rank {rank} was here")
    while rank == which:
        time.sleep(0.01)
    return os.getpid()


@pytest.mark.parametrize("method", ["run", "run_expecting"])
def test_a_rank_that_hangs_is_named_with_its_stack(pool, method):
    pids = pool.run(body_hangs, None, context=None)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        getattr(pool, method)(body_hangs, 2, context=None, timeout=3)
    assert 3 <= time.monotonic() - start < 15
    text = str(caught.value)
    assert text.startswith("body_hangs failed on rank 2 of 3; ranks 0, 1 returned")
    assert "rank 2 did not end within 3 s; its stack:" in text
    assert "in body_hangs" in text
    assert "rank 2 was here" in text
    assert type(caught.value.errors[2]) is RankHung
    wait_until(lambda: not any(map(alive, pids)))
    assert pool.run(body_place, context=None) == [0, 10, 20]


def test_a_rank_that_died_between_bodies_is_replaced(pool):
    pids = pool.run(body_pids, context=None)
    os.kill(pids[1], signal.SIGKILL)
    # Gone and not only ended: the threads of an ended process may still hold its socket open for a moment.
    wait_until(lambda: not os.path.exists(f"/proc/{pids[1]}"))
    assert pool.run(body_place, context=None) == [0, 10, 20]


def body_destroys_the_group(rank, world_size):
    dist.destroy_process_group()


def test_a_body_may_destroy_the_process_group(pool):
    pool.run(body_destroys_the_group, context=None)
    assert pool.run(body_place, context=None) == [0, 10, 20]


def body_sleeps(rank, world_size):
    time.sleep(60)


class Interrupted(BaseException):
    pass


def interrupt(*_):
    raise Interrupted


def test_an_interrupted_run_ends_the_ranks(pool):
    pids = pool.run(body_pids, context=None)
    # The time limit of a test and Ctrl-C arrive like this.
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Interrupted):
            pool.run(body_sleeps, context=None)
    finally:
        signal.signal(signal.SIGALRM, previous)
    wait_until(lambda: not any(map(alive, pids)))
    assert pool.run(body_place, context=None) == [0, 10, 20]


def body_descendants(rank, world_size):
    child = subprocess.Popen(["sleep", "600"])
    return os.getpid(), os.getppid(), child.pid


def test_nothing_is_left_after_close(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool = RankPool(2)
    pids = [pid for three in pool.run(body_descendants, context=None) for pid in three]
    assert all(map(alive, pids))
    assert list(tmp_path.iterdir())
    pool.close()
    wait_until(lambda: not any(map(alive, pids)))
    assert not list(tmp_path.iterdir())


PROGRAM = """
    import os, signal, threading, time
    from iris.testing import RankPool

    def body(rank, world_size):
        return os.getpid()

    def busy(rank, world_size):
        time.sleep(600)

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    if __name__ == "__main__":
        pool = RankPool(2)
        print(*pool.run(body, context=None), flush=True)
        {end}
"""


IN_A_BODY = "threading.Timer(0.5, kill).start(); pool.run(busy, context=None)"


@pytest.mark.parametrize("end", ["pass", "os._exit(1)", IN_A_BODY], ids=["exit", "_exit", "killed in a body"])
def test_ranks_end_with_their_parent_however_it_ends(tmp_path, end):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(end=end)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TMPDIR": str(tmp_path)}
    result = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=60)
    pids = [int(word) for word in result.stdout.split()]
    assert len(pids) == 2, result.stderr
    wait_until(lambda: not any(map(alive, pids)))


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not collected does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def body_hangs_on_gpu(ctx):
    if ctx.get_rank() == ctx.get_num_ranks() - 1:
        # Some twenty seconds: a kernel that really had no end could take the GPU with it.
        torch.cuda._sleep(30_000_000_000)
        torch.cuda.synchronize()


def body_adds_on_gpu(ctx):
    total = torch.full((1,), ctx.get_rank() + 1.0, device=ctx.get_device())
    ctx.barrier()
    return str(ctx.get_device()), total, ctx.runtime


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_rank_that_hangs_in_a_kernel_is_replaced(world_size):
    with RankPool(world_size, runtime="gpu", timeout=60) as pool:
        pool.run(body_adds_on_gpu)
        with pytest.raises(RanksFailed, match=f"rank {world_size - 1} did not end within 3 s"):
            pool.run(body_hangs_on_gpu, timeout=3)
        results = pool.run(body_adds_on_gpu, timeout=90)
    for rank, (device, total, runtime) in enumerate(results):
        assert device == f"cuda:{rank % torch.cuda.device_count()}"
        assert total.item() == rank + 1
        assert runtime == "gpu"
