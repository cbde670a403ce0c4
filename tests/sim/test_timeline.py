"""Summaries and traces of small simulations; every expected figure is worked out by hand."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from iris._events import EVENT_NAMES, Event, event_name
from iris._machine import Machine, by_name
from iris.sim.timeline import Timeline, intersection, length, union
from iris.sim.virtual_time import VirtualTime

# In bytes/ns: local memory 5, links 2. A unit has 1000 FLOP/ns. Without latencies, but for launches.
TOY = Machine(
    name="toy",
    compute_units=2,
    chiplets=2,
    matrix_flops_per_s={"float16": 2e12},
    matrix_efficiency=1.0,
    matrix_tile=(1, 1, 2),
    memory_bytes_per_s=10e9,
    memory_efficiency=1.0,
    cache_bytes=0,
    cache_bytes_per_s=0.0,
    link_peer_bytes_per_s=2e9,
    link_total_bytes_per_s=4e9,
    link_efficiency=1.0,
    program_local_bytes_per_s=5e9,
    program_remote_bytes_per_s=2e9,
    program_remote_bulk_bytes_per_s=2e9,
    launch_latency_ns=100.0,
    host_exchange_latency_ns=50.0,
    local_latency_ns=0.0,
    remote_latency_ns=0.0,
    local_flag_latency_ns=0.0,
    remote_flag_latency_ns=20.0,
    resident_programs_per_unit=1,
    sources={"launch_latency_ns": "made up for the test"},
)


@pytest.fixture
def two_ranks() -> VirtualTime:
    """Rank 0 fetches from 100 to 200 and computes from 100 to 150; rank 1 waits for its flag from 100 to 220."""
    time = VirtualTime(TOY, 2, bucket_ns=100.0)
    time.launch_issued("gemm", 0, 0, "gemm", 2)
    time.launch_issued("wait", 1, 0, "consume", 1)
    time.program_started("fetcher", "gemm", 0)
    time.program_started("worker", "gemm", 1)
    time.program_started("waiter", "wait", 0)
    time.transfer("fetcher", 1, 200, False, "k.py:3", address=0x1000)
    time.dot("worker", 50, 50, 10, "fp16")
    time.atomic("fetcher", 1, "k.py:5")
    time.released("fetcher", 0x2000)
    time.waited("waiter", 0x2000, "k.py:9")
    time.transfer("waiter", 1, 50, True, "k.py:10")
    for program in ("fetcher", "worker", "waiter"):
        time.program_ended(program)
    time.launch_ended("gemm")
    time.launch_ended("wait")
    time.host_waited_for_launch(0, "gemm")
    time.hosts_met([0, 1], "barrier")
    return time


def test_summary_of_a_hand_made_case(two_ranks):
    summary = Timeline(two_ranks).summary()
    assert summary.predicted
    assert summary.machine == "toy"
    # The host of rank 0 is free at 200, the last to arrive, and both leave 50 later.
    assert summary.makespan_ns == pytest.approx(250)
    assert summary.rank_makespan_ns == pytest.approx((250, 250))
    assert summary.rank_link_ns == pytest.approx((100, 0))
    assert summary.hidden_fraction == pytest.approx(0.5)
    assert summary.rank_hidden_fraction == (pytest.approx(0.5), None), "a local store is no link transfer"
    assert summary.idle_fraction[0] == pytest.approx((1 - 100 / 250, 1 - 50 / 250))
    assert summary.idle_fraction[1] == pytest.approx((1 - 10 / 250, 1))
    assert summary.rank_idle_fraction == pytest.approx((0.7, 0.98))
    assert summary.busy_ns == {
        k: pytest.approx(v) for k, v in {"fetch": 100, "compute": 50, "other": 0, "wait": 120, "store": 10}.items()
    }
    assert summary.waited_ns == {1: {0: pytest.approx(120)}}
    assert summary.host_waited_ns == {0: {0: pytest.approx(200)}, 1: {0: pytest.approx(250)}}


def test_the_report_says_that_it_is_a_prediction(two_ranks):
    lines = str(Timeline(two_ranks).summary()).splitlines()
    assert lines[0] == "Predicted (cost model toy, not measured)"
    assert "makespan 0.25 us, link transfers hidden by compute: 50.0%" in lines[1]
    assert lines[3].split() == ["0", "0.25", "us", "0.10", "us", "50.0%", "70.0%"]
    assert lines[4].split() == ["1", "0.25", "us", "0.00", "us", "-", "98.0%"]
    assert "  programs of rank 1 waited 0.12 us for rank 0" in lines


def test_hidden_time_counts_the_union_of_programs():
    """Two programs that fetch at the same time count once, and so do two that compute at the same time."""
    time = VirtualTime(replace(TOY, compute_units=4, matrix_flops_per_s={"float16": 4e12}), 3, bucket_ns=100.0)
    time.launch_issued("k", 0, 0, "k", 4)
    for i in range(4):
        time.program_started(i, "k", i)
    time.transfer(0, 1, 200, False, "")  # 100 to 200
    time.transfer(1, 2, 400, False, "")  # 100 to 300
    time.dot(2, 50, 50, 10, "fp16")  # 100 to 150
    time.dot(3, 50, 50, 10, "fp16")
    summary = Timeline(time).summary()
    assert summary.rank_link_ns[0] == pytest.approx(200)
    assert summary.hidden_fraction == pytest.approx(50 / 200)


def test_nothing_happened():
    summary = Timeline(VirtualTime(TOY, 1)).summary()
    assert (summary.makespan_ns, summary.hidden_fraction, summary.rank_idle_fraction) == (0.0, None, (1.0,))
    assert "Predicted" in str(summary)


def test_the_trace_is_valid_and_says_what_it_is(two_ranks, tmp_path):
    path = Timeline(two_ranks).write(tmp_path / "trace.json")
    trace = json.loads(path.read_text())
    metadata = trace["metadata"]
    assert (metadata["schema_version"], metadata["time_unit"], metadata["world_size"]) == ("1.1", "us", 2)
    assert metadata["predicted"] is True
    assert metadata["machine"] == "toy"
    assert metadata["sources"] == {"launch_latency_ns": "made up for the test"}
    named = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert [(event["name"], event["pid"], event["args"]["name"]) for event in named] == [
        ("process_name", 0, "Rank 0"),
        ("process_name", 1, "Rank 1"),
    ]
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == metadata["num_events"] == len(two_ranks.spans)
    for event in events:
        assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert {"program_id", "target_rank", "payload_size", "op_index", "where"} <= set(event["args"])
        assert event["cat"] == "iris"
        assert event["name"] in {*EVENT_NAMES.values(), "other"}
        assert event["tid"] == "host" or re.fullmatch(r"XCC\d+_CU\d+(_S\d+)?(_MEM)?", event["tid"])
        assert event["dur"] >= 0
    assert {event["name"] for event in events} == {"fetch", "store", "compute", "wait", "barrier", "other"}
    fetch = next(event for event in events if event["name"] == "fetch")
    assert (fetch["ts"], fetch["dur"], fetch["pid"], fetch["tid"]) == (0.1, 0.1, 0, "XCC0_CU0_MEM")
    assert fetch["args"]["address"] == "0x1000"
    assert (fetch["args"]["target_rank"], fetch["args"]["payload_size"], fetch["args"]["program_id"]) == (1, 200, 0)
    compute = next(event for event in events if event["name"] == "compute")
    assert (compute["ts"], compute["dur"], compute["tid"]) == (0.1, 0.05, "XCC1_CU0"), "chiplets take turns"
    wait = next(event for event in events if event["name"] == "wait" and event["pid"] == 1)
    assert (wait["ts"], wait["dur"], wait["args"]["target_rank"]) == (0.1, 0.12, 0)


@pytest.mark.parametrize("resident", [1, 2])
def test_no_two_spans_of_one_track_overlap(resident):
    """A pipelined loop with stores, waits and several programs a unit, twice over the same slots."""
    time = VirtualTime(replace(TOY, resident_programs_per_unit=resident, local_latency_ns=7.0), 2, bucket_ns=100.0)
    for turn in range(2):
        for rank in range(2):
            time.launch_issued((rank, turn), rank, 0, "k", 2 * resident)
            programs = [(rank, turn, i) for i in range(2 * resident)]
            for program in programs:
                time.program_started(program, (rank, turn), program[2])
            for step in range(6):
                for program in programs:
                    time.transfer(program, (rank + step) % 2, 40 + 13 * step, False, "")
                    time.dot(program, 20, 20, 10 + 9 * step, "fp16")
            for program in programs:
                time.transfer(program, 1 - rank, 64, True, "")
                time.atomic(program, 1 - rank, "")
                time.released(program, rank)
                time.waited(program, 1 - rank, "")
                time.program_ended(program)
            time.launch_ended((rank, turn))
    tracks: dict[tuple, list[tuple[float, float]]] = {}
    for event in Timeline(time).to_chrome()["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) == 2 * 2 * resident * 2, "a rank, a unit, a layer, arithmetic and transfers"
    for spans in tracks.values():
        spans.sort()
        for before, after in pairwise(spans):
            assert before[1] <= after[0] + 1e-9


def test_a_real_machine_names_the_source_of_each_figure():
    trace = Timeline(VirtualTime(by_name("mi300x"), 8)).to_chrome()
    assert "datasheet" in trace["metadata"]["sources"]["memory_bytes_per_s"]
    assert (trace["metadata"]["gpu_cu_count"], trace["metadata"]["gpu_num_xcc"]) == (304, 8)


def test_intervals():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (8, 8)]) == [(0, 4), (5, 6)]
    assert intersection([(0, 4), (5, 6)], [(1, 2), (3, 5.5), (7, 9)]) == [(1, 2), (3, 4), (5, 5.5)]
    assert length([(1, 2), (3, 4), (5, 5.5)]) == 2.5


def test_events_have_the_published_ids():
    assert (Event.LOAD, Event.STORE, Event.GET, Event.PUT, Event.COPY) == (0, 1, 2, 3, 4)
    assert (Event.FETCH, Event.COMPUTE, Event.REDUCE, Event.WAIT, Event.BARRIER) == (1024, 2048, 2049, 3072, 3073)
    assert [event_name(i) for i in range(5, 14)] == [
        f"atomic_{name}" for name in ("add", "sub", "cas", "xchg", "xor", "and", "or", "min", "max")
    ]
    assert event_name(1024) == "fetch"
    assert event_name(4000) == "unknown_4000"
