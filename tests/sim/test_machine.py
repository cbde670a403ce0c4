"""The figures of known machines, and how a rate is shared. Expected times are worked out by hand."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import iris
from iris._machine import Machine, by_name, figure_names, names
from iris._target import KNOWN
from iris.errors import ArgumentError
from iris.sim.machine import Cache, Channel, Paths, take

DATA = json.loads((Path(iris.__file__).parent / "_machines.json").read_text())
# Two units of 1000 FLOP/ns each; 10 bytes/ns of memory; 2 bytes/ns to one peer and 4 to all; no cache.
TOY = Machine(
    name="toy",
    compute_units=2,
    chiplets=1,
    matrix_flops_per_s={"float16": 4e12, "float8": 8e12},
    matrix_efficiency=0.5,
    matrix_tile=(16, 8, 32),
    memory_bytes_per_s=20e9,
    memory_efficiency=0.5,
    cache_bytes=0,
    cache_bytes_per_s=0.0,
    link_peer_bytes_per_s=4e9,
    link_total_bytes_per_s=8e9,
    link_efficiency=0.5,
    program_local_bytes_per_s=5e9,
    program_remote_bytes_per_s=1e9,
    program_remote_bulk_bytes_per_s=100e9,
    launch_latency_ns=100.0,
    host_exchange_latency_ns=50.0,
    local_latency_ns=10.0,
    remote_latency_ns=30.0,
    local_flag_latency_ns=5.0,
    remote_flag_latency_ns=20.0,
    resident_programs_per_unit=1,
)


def test_every_known_target_has_a_machine():
    assert set(names()) == set(KNOWN) == set(DATA["machines"])
    for name, target in KNOWN.items():
        machine = by_name(name.upper())
        assert machine.name == name
        assert (machine.compute_units, machine.chiplets) == (target.compute_units, target.chiplets)


@pytest.mark.parametrize("name", names())
def test_every_figure_is_described_and_has_a_source(name):
    machine = by_name(name)
    assert set(machine.sources) == set(figure_names())
    assert set(DATA["machines"][name]) == set(DATA["schema"]["fields"])
    for figure, source in machine.sources.items():
        assert len(source.split()) >= 3, f"{figure}: {source!r} is no sentence"
    for entry in DATA["machines"][name].values():
        assert set(entry) == {"value", "source"}


@pytest.mark.parametrize("name", names())
def test_figures_are_of_a_plausible_size(name):
    """A slipped power of ten would pass everything else."""
    machine = by_name(name)
    rates = machine.matrix_flops_per_s
    assert set(rates) == {"float64", "float32", "float16", "bfloat16", "float8", "int8"}
    assert 3e13 < rates["float64"] < rates["float16"] == rates["bfloat16"] < rates["float8"] == rates["int8"] < 1e16
    assert 3e12 <= machine.memory_bytes_per_s < machine.cache_bytes_per_s < 3e13
    assert 5e10 < machine.link_peer_bytes_per_s <= machine.link_total_bytes_per_s < 1e12
    assert machine.program_remote_bytes_per_s <= machine.program_remote_bulk_bytes_per_s < machine.link_peer_bytes_per_s
    for efficiency in (machine.matrix_efficiency, machine.memory_efficiency, machine.link_efficiency):
        assert 0.3 < efficiency < 1
    assert 100 < machine.local_latency_ns < machine.remote_latency_ns < machine.launch_latency_ns < 1e5


def test_links_of_both_vendors():
    mi300x, h200 = by_name("mi300x"), by_name("h200")
    assert mi300x.link_total_bytes_per_s == 7 * mi300x.link_peer_bytes_per_s == 448e9
    assert h200.link_total_bytes_per_s == h200.link_peer_bytes_per_s == 450e9


def sources_table() -> str:
    """The table of docs/virtual-time.md: each figure, and the machines that have the same value for the same reason."""
    lines = ["| figure | machines | value | source |", "|---|---|---|---|"]
    for figure in DATA["schema"]["fields"]:
        groups: dict[tuple[str, str], list[str]] = {}
        for name, figures in DATA["machines"].items():
            entry = figures[figure]
            value = entry["value"]
            if isinstance(value, dict):
                shown = ", ".join(f"{dtype} {rate:.6g}" for dtype, rate in value.items())
            else:
                shown = ", ".join(f"{part:.9g}" for part in value) if isinstance(value, list) else f"{value:.9g}"
            groups.setdefault((shown, entry["source"]), []).append(name)
        lines += [f"| {figure} | {', '.join(group)} | {shown} | {why} |" for (shown, why), group in groups.items()]
    return "\n".join(lines)


def test_the_documentation_has_the_same_figures():
    document = (Path(__file__).parents[2] / "docs" / "virtual-time.md").read_text()
    table = sources_table()
    assert table in document, f"docs/virtual-time.md should have this table:\n{table}"


def test_an_unknown_machine_names_the_possible_ones():
    with pytest.raises(ArgumentError, match=r"'v100' is not known; possible: mi300x, .*b200"):
        by_name("v100")


def test_the_rate_of_a_dtype_by_any_of_its_names():
    h200 = by_name("h200")
    assert h200.rate("bfloat16") == h200.rate("bf16") == (989.4e12, 2)
    assert h200.rate("float8_e5m2")[1] == h200.rate("int8")[1] == 1
    assert TOY.rate("fp16") == (4e12, 2)
    with pytest.raises(ArgumentError, match="toy has no matrix rate for dtype 'float64'; possible: float16, fp16"):
        TOY.rate("float64")


def test_a_dot_is_rounded_up_to_matrix_instructions():
    # 2*16*8*16 = 4096 FLOP at 1000 FLOP/ns.
    assert TOY.dot_ns(16, 8, 16, "float16") == pytest.approx(4.096)
    assert TOY.dot_ns(1, 1, 1, "fp16") == pytest.approx(4.096)
    assert TOY.dot_ns(17, 8, 16, "float16") == pytest.approx(2 * 4.096)
    # 32 bytes along K are 32 elements of float8, at twice the rate.
    assert TOY.dot_ns(16, 8, 16, "fp8e4nv") == pytest.approx(4.096)
    with pytest.raises(ArgumentError, match=r"no matrix rate for dtype 'int8'; possible: float16, fp16, float8"):
        TOY.dot_ns(16, 16, 16, "int8")


def test_a_transfer_takes_what_is_left_of_each_bucket():
    channel = Channel(10.0, 100.0)
    assert take((channel,), 50.0, 300, 10.0) == pytest.approx(80.0)
    # 500 bytes by its own rate of 5 bytes/ns until 150, then 250 until 200.
    assert take((channel,), 50.0, 500, 5.0) == pytest.approx(150.0)
    assert channel.used == {0: pytest.approx(550), 1: pytest.approx(250)}
    # Bucket 0 has 450 left, bucket 1 has 750; the other 300 come at 10 bytes/ns from 200 on.
    assert take((channel,), 0.0, 1500, 10.0) == pytest.approx(230.0)
    assert channel.used == {0: pytest.approx(1000), 1: pytest.approx(1000), 2: pytest.approx(300)}
    assert take((channel,), 0.0, 100, 10.0) == pytest.approx(240.0), "full buckets are passed over"


def test_the_narrowest_of_several_channels_decides():
    wide, narrow = Channel(10.0, 100.0), Channel(2.0, 100.0)
    assert take((wide, narrow), 0.0, 300, 2.0) == pytest.approx(150.0)
    assert wide.used == narrow.used == {0: pytest.approx(200), 1: pytest.approx(100)}
    # The narrow one has room again from bucket 1 on, where it was half used.
    assert take((wide, narrow), 0.0, 100, 2.0) == pytest.approx(200.0)


sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, starts=st.data(), seed=st.integers(0, 1000))
def test_nothing_is_lost_and_no_bucket_gives_more_than_it_has(sizes, starts, seed):
    calls = [(starts.draw(st.floats(0, 900)), size, starts.draw(st.sampled_from((0.5, 3.0, 10.0)))) for size in sizes]
    random.Random(seed).shuffle(calls)
    channel = Channel(10.0, 100.0)
    for start, size, rate in calls:
        end = take((channel,), start, size, rate)
        assert end >= start + size / rate - 1e-6, "faster than its own rate"
    assert sum(channel.used.values()) == pytest.approx(sum(sizes))
    assert all(used <= channel.capacity * (1 + 1e-9) for used in channel.used.values())


def moves(order, pairs, size, start):
    """Ends of equal reads, given as (reader, owner) and called in an order, and the paths that they took."""
    paths = Paths(TOY, 6, 100.0)
    return [paths.move(*pairs[i], size, False, start, None, True) for i in order], paths


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(5)), size=st.integers(1, 4000), start=st.floats(0, 500))
def test_contention_at_one_device_does_not_depend_on_the_order_of_calls(order, size, start):
    pairs = [(reader, 0) for reader in (1, 2, 3, 4, 5)]
    ends, _ = moves(order, pairs, size, start)
    assert sorted(ends) == pytest.approx(sorted(moves(range(5), pairs, size, start)[0]))


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(8)), size=st.integers(1, 4000), start=st.floats(0, 500))
def test_crossing_contention_keeps_every_limit_in_any_order_of_calls(order, size, start):
    """Each of four readers reads from two owners: who comes first changes, what each link and device gives does not."""
    ends, paths = moves(order, [(reader, owner) for reader in (2, 3, 4, 5) for owner in (0, 1)], size, start)
    for (kind, *_), channel in paths.channels.items():
        readers = {"link": 1, "in": 2, "out": 4, "memory": 4}[kind]
        assert sum(channel.used.values()) == pytest.approx(readers * size)
        assert all(used <= channel.capacity * (1 + 1e-9) for used in channel.used.values())
    # An owner gives 4 bytes/ns, so it takes size ns for its four readers; no order takes more than twice as long.
    assert start + size - 100 <= max(ends) <= start + 2 * size + 100


@settings(max_examples=40, deadline=None)
@given(sizes=sizes, seed=st.integers(0, 1000), start=st.floats(0, 500))
def test_unequal_reads_of_one_link_are_done_at_the_same_time_in_any_order(sizes, seed, start):
    def last(sizes):
        paths = Paths(TOY, 2, 100.0)
        return max(paths.move(1, 0, size, False, start, None, True) for size in sizes)

    shuffled = random.Random(seed).sample(sizes, len(sizes))
    assert last(shuffled) == pytest.approx(last(sizes))


def test_each_direction_and_each_pair_has_its_own_link():
    paths = Paths(TOY, 3, 100.0)
    assert paths.move(1, 0, 400, False, 0.0, None, True) == pytest.approx(200.0)
    assert paths.move(0, 1, 400, False, 0.0, None, True) == pytest.approx(200.0), "the other direction"
    assert paths.move(2, 0, 400, False, 0.0, None, True) == pytest.approx(200.0), "another pair"
    assert paths.move(0, 1, 400, True, 0.0, None, True) == pytest.approx(400.0), "a write, where the first read went"
    carried = {link: sum(channel.used.values()) for link, channel in paths.channels.items() if link[0] == "link"}
    assert carried == {("link", 0, 1): 800, ("link", 1, 0): 400, ("link", 0, 2): 400}


def test_a_device_can_send_no_more_than_its_total():
    paths = Paths(TOY, 5, 100.0)
    ends = [paths.move(reader, 0, 400, False, 0.0, None, True) for reader in (1, 2, 3, 4)]
    # Four readers of 2 bytes/ns each would be 8; the total is 4.
    assert ends == pytest.approx([200.0, 200.0, 400.0, 400.0])


def test_a_cached_tile_does_not_use_memory():
    paths = Paths(replace(TOY, cache_bytes=1000, cache_bytes_per_s=40e9), 1, 100.0)
    assert paths.move(0, 0, 500, False, 0.0, 4096, False) == pytest.approx(100.0)
    assert paths.move(0, 0, 500, False, 0.0, 4096, False) == pytest.approx(100.0), "not before it was filled"
    assert paths.move(0, 0, 500, False, 100.0, 4096, False) == pytest.approx(200.0)
    assert paths.channels["memory", 0, 0].used == {0: pytest.approx(500)}
    assert sum(paths.channels["cache", 0, 0].used.values()) == pytest.approx(1500)


def test_a_cache_forgets_what_was_not_used_for_longest():
    cache = Cache(100)
    cache.fill(1, 40, 0.0, 1.0)
    cache.fill(2, 40, 0.0, 2.0)
    assert cache.ready_ns(1, 40, 5.0) == 1.0
    cache.fill(3, 40, 0.0, 3.0)
    assert cache.ready_ns(2, 40, 5.0) is None
    assert cache.ready_ns(1, 40, 5.0) == 1.0
    assert cache.ready_ns(1, 41, 5.0) is None, "only a part of it is there"
    cache.fill(4, 10, 6.0, 7.0)
    assert cache.ready_ns(4, 10, 5.0) is None, "its fill began later"
