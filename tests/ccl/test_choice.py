"""Which algorithm a collective takes: the table, fallbacks, and programs that fit the machine."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iris import _target
from iris.ccl import choice
from iris.ccl._arguments import REDUCED
from iris.ccl.config import VARIANTS, Config, ReduceOp
from iris.errors import NotSymmetricError, UnsupportedError
from iris.runtime import channels
from iris.runtime.groups import Group
from iris.runtime.links import LINKS
from iris.tuning import steps
from iris.tuning.plan import SOURCES
from made_tables import instead, record, tuned

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
TARGETS = [_target.INTERPRETER, *map(_target.by_arch, _target.compiled_archs())]
WORLDS = (2, 3, 4, 5, 8, 16, 72, 1024)


def machine(target=_target.INTERPRETER, runtime="gpu", units=132, known=()):
    return SimpleNamespace(
        target=target, runtime=runtime, gpu_id=0, num_ranks=4, get_cu_count=lambda: units,
        channels=SimpleNamespace(layout=channels.layout(target, 4)), service=tuned(*known),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def files():
    """No measured cases and no rules but a test's own."""
    with instead() as files:
        yield files


@pytest.mark.parametrize("operation", list(VARIANTS))
@pytest.mark.parametrize("link", LINKS)
def test_every_operation_link_and_world_has_a_row(operation, link):
    for world in WORLDS:
        for nbytes in (0, 1, 4096, 4097, 1 << 20, 1 << 40):
            for product in ("h200", "mi300x", ""):
                entry = steps.lookup("collectives", link, world, nbytes, product, operation=operation)
                assert entry.algorithm in VARIANTS[operation]
                assert f"{world} ranks, {link}" in entry.reason
                assert not entry.measured or product == "h200"


def test_rows_are_in_order():
    """Steps grow and the last is open; rows name known things and say where they come from."""
    for row in steps.rows("collectives"):
        assert row["operation"] in VARIANTS
        assert row["link"] in LINKS
        least, most = row["world"]
        assert 2 <= least <= most
        bounds = [step.get("up_to_bytes") for step in row["steps"]]
        assert bounds[-1] is None
        assert all(bounds[:-1])
        assert bounds[:-1] == sorted(set(bounds[:-1]))
        assert {step["algorithm"] for step in row["steps"]} <= set(VARIANTS[row["operation"]])
        assert row["source"]
        assert row.get("machine", "h200") in _target.KNOWN
        # What was measured says where, and nothing else does.
        assert ("machine" in row) != row["source"].startswith("heuristic")


def auto(operation, nbytes, world=2, product="h200", link="nvlink"):
    """What the table has, and whether it was measured on such a machine."""
    entry = steps.lookup("collectives", link, world, nbytes, product, operation=operation)
    return entry.algorithm, entry.measured


def measured_on_two_h200(operation):
    """Times in graphs that the page shows: bytes -> microseconds by algorithm, ``torch`` being NCCL."""
    section = PAGE.read_text().partition("\n## Collectives on two H200\n")[2].partition("\n## ")[0]
    table = section.partition(f"\n{operation}:\n\n")[2].partition("\n\n")[0].splitlines()
    heads, *rows = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in table)
    renamed = {"NCCL": "torch", "Iris": "default"}
    found = {}
    for row in rows[1:]:
        number, unit = re.fullmatch(r"(\d+) ([KM])iB", row[0]).groups()
        named = {renamed.get(head, head): cell for head, cell in zip(heads, row, strict=True)}
        times = {name: float(named[name]) for name in VARIANTS[operation] if name in named}
        found[int(number) << {"K": 10, "M": 20}[unit]] = times
    return found


@pytest.mark.parametrize("operation", list(VARIANTS))
def test_two_h200_take_what_was_the_fastest_there(operation):
    """Of what can be taken: PyTorch's symmetric memory is measured beside, and nothing here runs it."""
    measured = measured_on_two_h200(operation)
    assert {4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20} <= set(measured)
    for nbytes, times in measured.items():
        algorithm, known = auto(operation, nbytes)
        assert known, (operation, nbytes)
        assert {"torch", algorithm} <= set(times)
        # Two kernels that take turns are the same within this.
        assert times[algorithm] <= 1.03 * min(times.values()), (operation, nbytes, algorithm, times)


@pytest.mark.parametrize(
    ("operation", "ours"),
    [("all_reduce", "two_shot"), ("reduce_scatter", "two_shot"), ("all_gather", "persistent"),
     ("all_to_all", "default"), ("broadcast", "direct")],
)  # fmt: skip
def test_large_sizes_are_torchs_only_where_nothing_was_measured(operation, ours):
    large = 256 << 20
    for nbytes in (large, 1 << 30):
        assert auto(operation, nbytes) == (ours, True)
        # The same link and number of ranks on another machine: what was measured is the best guess.
        assert auto(operation, nbytes, product="h100") == (ours, False)
        for world in (3, 4, 8, 72):
            assert auto(operation, nbytes, world) == ("torch", False)
        for link in ("xgmi", "pcie"):
            for world in (2, 8):
                assert auto(operation, nbytes, world, link=link) == ("torch", False)
    assert auto(operation, large, link="shared")[0] == ours


def test_other_worlds_keep_their_rules():
    mib = 1 << 20
    for world in (3, 8):
        assert [auto("reduce_scatter", n * mib, world)[0] for n in (1, 32, 33)] == ["two_shot", "two_shot", "torch"]
        assert [auto("broadcast", n * mib, world)[0] for n in (1, 2, 32, 33)] == [
            "direct", "scatter_allgather", "scatter_allgather", "torch",
        ]  # fmt: skip


OBSTACLE = NotSymmetricError("it lies elsewhere")
TORCH = UnsupportedError("no")


def chosen(named=None, nbytes=1 << 20, ctx=None, dtype=None, config=None, **obstacles):
    every = dict.fromkeys(("push", "two_shot", "one_shot", "torch")) | obstacles
    return choice.choose(
        ctx or machine(), "all_reduce", Group((0, 1), 0), None, nbytes, named, every, ("two_shot", "one_shot", "push"),
        dtype, config,
    )  # fmt: skip


def test_the_table_decides():
    got = chosen()
    assert (got.algorithm, got.source) == ("two_shot", "heuristic")
    assert "4097 and more bytes, 2 ranks, interpreted" in got.reason
    small = chosen(nbytes=100)
    assert (small.algorithm, small.source) == ("push", "heuristic")
    assert "0 to 4096 bytes" in small.reason


def test_an_obstacle_leads_to_the_next():
    got = chosen(two_shot=OBSTACLE)
    assert got.algorithm == "one_shot"
    assert got.reason == "the table has two_shot, which cannot be taken: it lies elsewhere"
    assert chosen(two_shot=OBSTACLE, one_shot=OBSTACLE).algorithm == "push"
    with pytest.raises(NotSymmetricError, match="it lies elsewhere"):
        chosen(two_shot=OBSTACLE, one_shot=TORCH, push=TORCH)


def test_the_caller_decides():
    got = chosen("push")
    assert (got.algorithm, got.source) == ("push", "user")
    with pytest.raises(NotSymmetricError, match="it lies elsewhere"):
        chosen("one_shot", one_shot=OBSTACLE)
    assert got.source in SOURCES


H200 = _target.KNOWN["h200"]


def of_h200(known=()):
    """A context of two ranks that share an H200."""
    return machine(H200, "loopback", known=known)


def asked(ctx, nbytes=1 << 20, dtype=torch.bfloat16):
    return choice.query_of(ctx, "all_reduce", Group((0, 1), 0), nbytes, dtype)


def ship(files, *entries):
    usual = {"link": "shared", "world": 2, "dtype": "16-bit", "algorithm": "one_shot"}
    files.table("all_reduce", "h200", *(usual | entry for entry in entries))


def entry(nbytes, speedup, **others):
    return {"sizes": {"bytes": nbytes}, "measured": {"ms": 0.5, "torch_ms": None, "speedup": speedup}, **others}


def test_what_was_measured_comes_before_the_table_by_bytes(files):
    usual = chosen(ctx=of_h200(), dtype=torch.bfloat16)
    assert (usual.algorithm, usual.source, usual.config) == ("two_shot", "exact", None)
    assert "1048576 bytes" in usual.reason
    ship(files, entry(1 << 20, 1.7, params={"comm_sms": 5, "all_reduce_variant": "one_shot"}))
    got = chosen(ctx=of_h200(), dtype=torch.bfloat16)
    assert (got.algorithm, got.source, got.speedup) == ("one_shot", "exact", 1.7)
    assert got.config == Config(comm_sms=5, all_reduce_variant="one_shot")
    assert "1.7x PyTorch" in got.reason
    near = chosen(ctx=of_h200(), nbytes=1 << 20 | 512, dtype=torch.bfloat16)
    assert (near.algorithm, near.source) == ("one_shot", "nearest")
    # Another dtype, a size that is not near, another machine.
    for other in (
        chosen(ctx=of_h200(), dtype=torch.float32),
        chosen(ctx=of_h200(), nbytes=1 << 21, dtype=torch.bfloat16),
        chosen(ctx=machine(_target.KNOWN["h100"], "loopback"), dtype=torch.bfloat16),
    ):
        assert (other.algorithm, other.config) == ("two_shot", None)
    assert "a guess for h100" in other.reason
    assert other.source == "heuristic"


def test_what_was_measured_and_cannot_be_taken_leaves_it_to_the_table_by_bytes(files):
    ship(files, entry(1 << 20, 1.7))
    got = chosen(ctx=of_h200(), dtype=torch.bfloat16, one_shot=OBSTACLE)
    assert (got.algorithm, got.source) == ("two_shot", "exact")


def test_what_lost_to_torch_needs_nccl(files, monkeypatch):
    """Without it PyTorch would copy through the host, which is not what was measured."""
    ship(files, entry(1 << 20, 0.8))
    assert chosen(ctx=of_h200(), dtype=torch.bfloat16).algorithm == "two_shot"
    monkeypatch.setattr(choice, "nccl", lambda group: True)
    got = chosen(ctx=of_h200(), dtype=torch.bfloat16)
    assert (got.algorithm, got.source, got.config) == ("torch", "fallback", None)
    assert "0.8x PyTorch" in got.reason


def test_what_was_tuned_here_is_taken_for_what_it_was_tuned_for(files):
    query = asked(of_h200())
    ctx = of_h200([(query, record(query, "push", comm_sms=3, all_reduce_variant="push"))])
    got = chosen(ctx=ctx, dtype=torch.bfloat16)
    assert (got.algorithm, got.source, got.speedup) == ("push", "cache", 1.5)
    assert got.config == Config(comm_sms=3, all_reduce_variant="push")
    # Another dtype or size is another case; so is one that the caller configures, and one that cannot be.
    assert chosen(ctx=ctx, dtype=torch.float16).source == "exact"
    assert chosen(ctx=ctx, dtype=torch.bfloat16, nbytes=1 << 21).source == "exact"
    mine = Config(comm_sms=2)
    given = chosen(ctx=ctx, dtype=torch.bfloat16, config=mine)
    assert (given.algorithm, given.source, given.config) == ("two_shot", "exact", mine)
    assert chosen("one_shot", ctx=ctx, dtype=torch.bfloat16, config=mine).config == mine
    assert chosen(ctx=ctx, dtype=torch.bfloat16, push=OBSTACLE).algorithm == "two_shot"


def test_torch_that_won_in_tuning_needs_no_nccl(files):
    """It was timed through the group that there is."""
    query = asked(of_h200())
    ctx = of_h200([(query, record(query, "torch"))])
    got = chosen(ctx=ctx, dtype=torch.bfloat16)
    assert (got.algorithm, got.source, got.config) == ("torch", "cache", None)
    assert chosen(ctx=ctx, dtype=torch.bfloat16, torch=TORCH).algorithm == "two_shot"


def test_what_torch_cannot_take():
    ctx, world = machine(), Group((0, 1, 2, 3), 0)
    x = torch.zeros(4, 4)
    assert choice.torch_obstacle(ctx, world, None, (x,)) == ""
    assert choice.torch_obstacle(ctx, world, [0, 1, 2, 3], (x,)) == ""
    assert "sequence of ranks" in choice.torch_obstacle(ctx, Group((0, 1), 0), [0, 1], (x,))
    assert "sequence of ranks" in choice.torch_obstacle(ctx, Group((1, 0, 2, 3), 1), [1, 0, 2, 3], (x,))
    assert "contiguous" in choice.torch_obstacle(ctx, world, None, (x, x.t()))
    for dtype in (torch.float8_e5m2, torch.int16):
        assert choice.torch_obstacle(ctx, world, None, (x.to(dtype),)) == ""
        assert "do not reduce" in choice.torch_obstacle(ctx, world, None, (x.to(dtype),), ReduceOp.SUM)
    assert choice.torch_obstacle(ctx, world, None, (x,), ReduceOp.SUM) == ""
    assert "gloo does not average" in choice.torch_obstacle(ctx, world, None, (x,), ReduceOp.AVG)


@given(
    target=st.sampled_from(TARGETS),
    count=st.integers(1, 1 << 34),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    lanes=st.sampled_from([4, 64, 256]),
    most=st.sampled_from([128, 1024, 4096, 1 << 16]),
    units=st.sampled_from([1, 20, 132, 304]),
    config=st.sampled_from(
        [None, Config(), Config(comm_sms=3), Config(block_size_m=256, block_size_n=256), Config(num_warps=2)]
    ),
)
def test_programs(target, count, itemsize, lanes, most, units, config):
    got = choice.programs(machine(target, units=units), config, count, itemsize, lanes, most)
    assert 1 <= got.count <= lanes
    assert got.count <= -(-count // got.block), "no program without a block"
    assert got.block <= most
    assert got.block & (got.block - 1) == 0
    assert got.num_warps in (1, 2, 4, 8, 16, 32)
    assert got.num_warps * target.warp_size <= 1024
    if config is not None and config.comm_sms:
        assert got.count <= config.comm_sms
    if config is not None and config.num_warps:
        assert got.num_warps == config.num_warps
    assert str(got) == f"{got.count} programs, blocks of {got.block} elements, {got.num_warps} warps"


@given(world=st.integers(2, 1024), dtype=st.sampled_from(REDUCED))
def test_blocks_of_all_ranks_fit_the_registers(world, dtype):
    got = choice.most_block(world, dtype)
    assert got & (got - 1) == 0
    assert 1024 <= got <= 32768 // dtype.itemsize
    # Registers of a thread, of 1024, for what it reads of all ranks, the sum, and the wide form of what it adds.
    wide = choice.wide_dtype(dtype).itemsize
    assert got == 1024 or got / 1024 * (world * dtype.itemsize + 2 * wide) / 4 <= 48


def test_more_programs_for_more_elements():
    ctx = machine(_target.by_arch("sm_90"))
    counts = [choice.programs(ctx, None, n, 2, 256, 1 << 16).count for n in (1, 5000, 100_000, 1 << 24)]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] >= 100
