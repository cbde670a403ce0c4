"""The host exchange: values in group order, ranks in different calls, ranks that are late, gone, or without the store.

Ranks are threads over one store here, except where a process has to end.
"""

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from iris.errors import RankLost, RankMismatch
from iris.runtime import bootstrap
from iris.runtime.bootstrap import Exchange

LIMIT_S = 20.0


def exchanges(world, store=None, timeout_s=LIMIT_S, name="test"):
    store = store or dist.HashStore()
    return [Exchange(store, name, rank, world, timeout_s) for rank in range(world)]


def on_all(members, body):
    """``body(exchange)`` in one thread a rank; results, or the errors, in the order of ``members``."""

    def guarded(exchange):
        try:
            return body(exchange)
        except Exception as error:  # noqa: BLE001 - the error is the result
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(guarded, members))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_values_come_in_rank_order(world):
    for turn in range(3):
        ranks = exchanges(world, name=f"test/{turn}")
        got = on_all(ranks, lambda e: e.all_gather("values", {"rank": e.rank, "data": [e.rank] * 3}))
        assert got == [[{"rank": r, "data": [r] * 3} for r in range(world)]] * world


def test_values_come_in_group_order():
    ranks = exchanges(4)
    members = (3, 0, 2)
    got = on_all([ranks[r] for r in members], lambda e: e.all_gather("values", e.rank * 10, members))
    assert got == [[30, 0, 20]] * 3


def test_groups_interleave():
    """Two pairs and the world in turn, with pairs at different paces: no value reaches another call."""
    ranks = exchanges(4)

    def body(exchange):
        pair = (0, 1) if exchange.rank < 2 else (3, 2)
        seen = []
        for call in range(30):
            if exchange.rank >= 2 and call % 7 == 0:
                time.sleep(0.002)
            seen.append(exchange.all_gather("pair", (exchange.rank, call), pair))
            if call % 3 == 0:
                seen.append(exchange.all_gather("world", (exchange.rank, -call)))
        return seen

    for rank, seen in enumerate(on_all(ranks, body)):
        pair = (0, 1) if rank < 2 else (3, 2)
        want = []
        for call in range(30):
            want.append([(r, call) for r in pair])
            if call % 3 == 0:
                want.append([(r, -call) for r in range(4)])
        assert seen == want, f"rank {rank}"


def test_contexts_do_not_mix():
    """Exchanges of different names over one store."""
    store = dist.HashStore()
    first, second = exchanges(2, store, name="iris/0"), exchanges(2, store, name="iris/1")
    a, b = on_all([first[0], second[1]], lambda e: [e.rank]), on_all([first[1], second[0]], lambda e: [e.rank])
    assert (a, b) == ([[0], [1]], [[1], [0]])
    pairs = list(zip(first, second, strict=True))
    got = on_all(pairs, lambda pair: (pair[1].all_gather("t", "second"), pair[0].all_gather("t", "first")))
    assert got == [(["second"] * 2, ["first"] * 2)] * 2


def test_different_calls_are_a_mismatch_on_every_rank():
    ranks = exchanges(3)
    got = on_all(ranks, lambda e: e.all_gather("barrier()" if e.rank == 1 else "broadcast()", None))
    for error in got:
        assert isinstance(error, RankMismatch)
        assert str(error) == (
            "the ranks are in different collective calls: rank 0 is in broadcast(); rank 1 is in barrier(); "
            "rank 2 is in broadcast()"
        )
    # The ranks stay in step.
    assert on_all(ranks, lambda e: e.all_gather("barrier()", e.rank)) == [[0, 1, 2]] * 3


def test_a_missing_rank_is_named_with_the_fault_it_reported():
    ranks = exchanges(3, timeout_s=0.6)
    ranks[2].post_fault("ArgumentError: wrong shape")
    start = time.monotonic()
    got = on_all(ranks[:2], lambda e: e.all_gather("barrier()", None))
    assert time.monotonic() - start < 5
    for rank, error in enumerate(got):
        assert isinstance(error, RankLost)
        assert error.ranks == (2,)
        assert str(error) == (
            f"rank 2 did not arrive at barrier() within 0.6 s (IRIS_TIMEOUT), rank {rank} waited there; "
            "rank 2 reported: ArgumentError: wrong shape"
        )


def test_every_missing_rank_is_named():
    error = on_all(exchanges(4, timeout_s=0.4)[1:2], lambda e: e.all_gather("barrier()", None))[0]
    assert error.ranks == (0, 2, 3)
    assert str(error).startswith("rank 0, rank 2, rank 3 did not arrive")


def test_a_fault_is_withdrawn_by_the_next_call():
    ranks = exchanges(2)
    ranks[1].post_fault("WaitTimeout: old")
    assert ranks[0].faults() == {1: "WaitTimeout: old"}
    assert ranks[1].faults() == {}, "the own fault is known"
    on_all(ranks, lambda e: e.all_gather("barrier()", None))
    assert ranks[0].faults() == {}


def test_kernels_go_on_while_a_rank_waits():
    ranks = exchanges(2)
    turns = []
    ranks[0].progress = lambda: turns.append(1)

    def body(exchange):
        while exchange.rank == 1 and len(turns) < 5:
            time.sleep(0.001)
        return exchange.all_gather("barrier()", exchange.rank)

    assert on_all(ranks, body) == [[0, 1]] * 2
    assert len(turns) >= 5


def test_keys_do_not_pile_up():
    store = dist.HashStore()
    ranks = exchanges(3, store)

    def body(exchange):
        for call in range(100):
            exchange.all_gather("call", call)
            if exchange.rank < 2:
                exchange.all_gather("pair", call, (0, 1))

    assert on_all(ranks, body) == [None] * 3
    # One or two values of each rank for each group.
    assert store.num_keys() <= 2 * (3 + 2)


def test_a_world_of_one_needs_no_store():
    alone = Exchange(None, "test", 0, 1, 0.1)
    assert alone.all_gather("barrier()", "x") == ["x"]
    alone.post_fault("nothing reads this")
    assert alone.faults() == {}
    assert exchanges(3)[1].all_gather("pair", "y", (1,)) == ["y"]


PEER = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from iris.runtime.bootstrap import Exchange
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=20))
exchange = Exchange(store, "test", 1, 2, 20.0)
exchange.introduce()
exchange.all_gather("last", None)
sys.stdin.readline()
"""


@pytest.fixture
def peer():
    """(exchange of rank 0, process that is rank 1 and ends when its standard input does)."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    environment = os.environ | {"IRIS_RUNTIME": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", PEER, str(store.port)], stdin=subprocess.PIPE, env=environment)
    exchange = Exchange(store, "test", 0, 2, 60.0)
    try:
        places = exchange.introduce()
        assert [place[2] for place in places] == [os.getpid(), process.pid]
        exchange.all_gather("last", None)
        yield exchange, process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


def test_a_process_that_ends_is_noticed_quickly(peer):
    exchange, process = peer
    exchange.watch()  # still there
    threading.Timer(0.3, process.kill).start()
    start = time.monotonic()
    with pytest.raises(
        RankLost, match=rf"rank 1 \(process {process.pid}\) has ended while rank 0 was waiting"
    ) as caught:
        exchange.all_gather("barrier()", None)
    # The kill is not waited for by anyone, so the process is a zombie, which counts as ended.
    assert time.monotonic() - start < 5, "long before the time limit of 60 s"
    assert caught.value.ranks == (1,)


def test_the_watch_of_waiting_kernels_notices_it_too(peer):
    exchange, process = peer
    process.kill()
    process.wait()  # no zombie: the process is gone altogether
    time.sleep(0.3)  # it looks every quarter of a second
    with pytest.raises(RankLost, match="rank 1"):
        exchange.watch(0.0)


def test_processes_elsewhere_are_not_looked_up():
    """A process id means nothing on another host or in another container."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    ranks = exchanges(2, timeout_s=0.4)
    here = (os.uname().nodename, bootstrap._pid_namespace())
    ranks[0]._places = {1: (*here, ended.pid)}
    with pytest.raises(RankLost, match="has ended"):
        ranks[0].watch()
    for place in (("another host", here[1], ended.pid), (here[0], "another namespace", ended.pid)):
        again = exchanges(2, timeout_s=0.4)[0]
        again._places = {1: place}
        again.watch()
        with pytest.raises(RankLost, match="did not arrive"):
            again.all_gather("barrier()", None)


STORE = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
print(store.port, flush=True)
sys.stdin.readline()
"""


def test_a_store_that_is_gone_is_a_lost_rank():
    host = subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with host:
        port = int(host.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
        exchange = Exchange(store, "test", 1, 2, 30.0)
        threading.Timer(0.3, host.kill).start()
        start = time.monotonic()
        with pytest.raises(RankLost, match=re.escape("(rank 0, or the launcher) has ended")) as caught:
            exchange.all_gather("barrier()", None)
        assert time.monotonic() - start < 20
        assert caught.value.ranks == (0,)


def test_without_a_launcher_the_world_is_one_rank(monkeypatch):
    for names in ((), ("RANK",), ("WORLD_SIZE",)):
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name in names:
            monkeypatch.setenv(name, "1")
        assert bootstrap.initialize_distributed("gloo", 60.0) == (None, 0, 1, False)
        assert not dist.is_initialized()


def body_initialize(rank, world_size):
    """The program has made a group, which is left alone."""
    assert dist.is_initialized()
    store, *place, made = bootstrap.initialize_distributed("gloo", 60.0)
    assert isinstance(store, dist.Store)
    assert place == [rank, world_size]
    assert not made


def test_a_group_that_the_program_made_is_used(ranks):
    ranks(2).run(body_initialize, context=None)


MAKE = """
import torch.distributed as dist
from iris.runtime.bootstrap import initialize_distributed
print(initialize_distributed("gloo", 60.0), dist.is_initialized(), initialize_distributed("gloo", 60.0))
dist.destroy_process_group()
"""


def test_a_group_is_made_once_from_the_environment_of_a_launcher():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {
        "IRIS_RUNTIME": "cpu",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    done = subprocess.run([sys.executable, "-c", MAKE], env=environment, capture_output=True, text=True, timeout=60)
    # A world of one needs no store.
    assert done.stdout == "(None, 0, 1, True) True (None, 0, 1, False)\n", done.stderr
