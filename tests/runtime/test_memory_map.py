"""Which memory is known, how its shadow grows and refines, and what that costs."""

import gc
import resource

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iris.runtime.memory_map import MemoryMap, MemoryRegion

START = 1 << 20


def selected_bytes(region, entries):
    """Byte offsets that shadow entries stand for."""
    entries = np.arange(entries.start, entries.stop) if isinstance(entries, slice) else entries
    spread = np.asarray(entries).reshape(-1, 1) * region.granule + np.arange(region.granule)
    return set(spread.reshape(-1).tolist())


sizes = st.sampled_from([1, 2, 4, 8, 16])
selections = st.tuples(sizes, st.lists(st.integers(0, 48), min_size=1, max_size=4), st.booleans())


@given(st.lists(selections, min_size=1, max_size=8))
def test_entries_stand_for_the_bytes_that_were_accessed(accesses):
    """Whatever was written before keeps its mark when the granule becomes smaller."""
    region = MemoryRegion(START, 64, 0, "memory")
    marked = {}
    for number, (itemsize, offsets, aligned) in enumerate(accesses, 1):
        offsets = [o - o % itemsize if aligned else o for o in offsets]
        offsets = [min(o, 64 - itemsize) for o in offsets]
        entries = region.select(np.array([START + o for o in offsets], dtype=np.uint64), itemsize)
        touched = {o + i for o in offsets for i in range(itemsize)}
        assert selected_bytes(region, entries) == touched
        region.writes[entries] = number
        marked.update(dict.fromkeys(touched, number))
        shadow = np.repeat(region.writes, region.granule)
        assert [marked.get(o, 0) for o in range(64)] == shadow[:64].tolist()


views = st.sampled_from(
    [
        lambda t: t,
        lambda t: t[3:],
        lambda t: t[::2],
        lambda t: t.view(8, 8),
        lambda t: t.view(8, 8).t(),
        lambda t: t.view(8, 8)[2:5, 1:7],
        lambda t: t.view(8, 8)[:, 3],
        lambda t: t.view(8, 8)[1].expand(4, 8),
        lambda t: t.view(4, 4, 4).permute(2, 0, 1)[1:],
        lambda t: t.view(1, 64, 1)[:, 5:9],
        lambda t: t[7],
        lambda t: t.as_strided((3, 4), (4, 2), 5),
    ]
)
dtypes = st.sampled_from([torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.complex128])


@given(views, dtypes, st.sampled_from([0, 1, 2, 4, 8]), st.sampled_from([None, 1, 4, 8]))
def test_strided_selection_is_that_of_the_elements(view, dtype, offset, granule):
    nbytes = 64 * dtype.itemsize
    tensor = view(torch.zeros(64, dtype=dtype))
    region = MemoryRegion(START, nbytes + 16, 0, "memory")
    if granule is not None:
        region.select(np.array([START], dtype=np.uint64), granule)
    start = START + offset + tensor.storage_offset() * dtype.itemsize
    entries = region.select_strided(start, dtype.itemsize, tuple(tensor.shape), tuple(tensor.stride()))
    positions = torch.arange(64).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    expected = {offset + p * dtype.itemsize + i for p in positions.reshape(-1).tolist() for i in range(dtype.itemsize)}
    assert selected_bytes(region, entries) == expected


def test_contiguous_tensors_are_selected_by_a_slice():
    region = MemoryRegion(START, 64, 0, "memory")
    assert region.select_strided(START + 16, 4, (2, 4), (4, 1)) == slice(4, 12)


def test_a_region_that_ends_within_a_granule():
    region = MemoryRegion(START, 10, 0, "memory")
    region.select(np.array([START], dtype=np.uint64), 8)
    region.writes[:] = 7
    entries = region.select(np.array([START + 9], dtype=np.uint64), 1)
    assert entries.tolist() == [9]
    assert region.writes.tolist() == [7] * 10


def resident_bytes():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def mark_everything(region, addresses, itemsize):
    entries = region.select(addresses, itemsize)
    region.need_atomics()
    for shadow in (region.writes, region.reads, region.atomics, region.published):
        shadow[entries] = 1


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_the_shadow_takes_at_most_16_bytes_for_each(itemsize):
    nbytes = 1 << 20
    region = MemoryRegion(START, nbytes, 0, "memory")
    mark_everything(region, np.arange(START, START + nbytes, itemsize, dtype=np.uint64), itemsize)
    arrays = (region.writes, region.reads, region.atomics, region.published)
    assert sum(a.nbytes for a in arrays) == 16 * nbytes // itemsize


def test_the_shadow_grows_with_the_memory_that_is_touched():
    """Of 16 GiB, a part of 1 MiB is accessed, first as int64 and then as bytes."""
    before = resident_bytes()
    region = MemoryRegion(START, 16 << 30, 0, "memory")
    mark_everything(region, np.arange(START, START + (1 << 20), 8, dtype=np.uint64), 8)
    first = resident_bytes() - before
    assert first < 32 << 20
    region = MemoryRegion(START, 1 << 30, 0, "memory")
    mark_everything(region, np.arange(START, START + (1 << 20), 8, dtype=np.uint64), 8)
    mark_everything(region, np.arange(START, START + (1 << 20), dtype=np.uint64), 1)
    assert region.granule == 1
    assert resident_bytes() - before < 96 << 20


@pytest.fixture
def memory():
    """Regions at 100-200, 200-300 and 400-500."""
    result = MemoryMap()
    for start in (200, 400, 100):
        result.add(MemoryRegion(start, 100, 0, f"at {start}"))
    return result


@pytest.mark.parametrize(
    ("address", "found"),
    [(99, None), (100, 100), (199, 100), (200, 200), (299, 200), (300, None), (399, None), (499, 400), (500, None)],
)
def test_find(memory, address, found):
    for _ in range(2):
        region = memory.find(address)
        assert (None if region is None else region.start) == found
        memory.find(450)


@pytest.mark.parametrize(("address", "nearest"), [(0, 100), (310, 200), (390, 400), (10_000, 400)])
def test_nearest(memory, address, nearest):
    assert memory.nearest(address).start == nearest
    assert MemoryMap().nearest(address) is None


def test_removed_memory_is_not_found(memory):
    assert memory.find(250).start == 200
    memory.remove(200)
    memory.remove(200)
    assert memory.find(250) is None
    again = memory.add(MemoryRegion(200, 50, 1, "again"))
    assert memory.find(249) is again
    assert memory.find(250) is None


def test_a_tensor_is_known_until_its_storage_is_freed():
    memory = MemoryMap()
    tensor = torch.zeros(64, dtype=torch.int32)
    address = tensor.data_ptr()
    region = memory.add_tensor(tensor[16:32], 2, "label", "site")
    assert (region.start, region.end, region.rank, region.itemsize) == (address, address + 256, 2, 4)
    assert memory.add_tensor(tensor, 1, "other") is region
    view = tensor[60:]
    del tensor
    gc.collect()
    assert memory.find(address) is region
    del view
    gc.collect()
    assert memory.find(address) is None


def test_memory_that_was_given_out_again_is_kept_when_the_old_storage_dies():
    memory = MemoryMap()
    tensor = torch.zeros(64)
    region = memory.add_tensor(tensor, 0, "old")
    newer = memory.add(MemoryRegion(region.start, 256, 0, "new"))
    del tensor
    gc.collect()
    assert memory.find(newer.start) is newer


def test_empty_tensors_are_not_known():
    assert MemoryMap().add_tensor(torch.zeros(0), 0, "empty") is None


@pytest.mark.parametrize("kind", [lambda t: t, lambda t: torch.nn.Parameter(t, requires_grad=False)])
def test_search_finds_live_tensors(kind):
    memory = MemoryMap()
    tensor = kind(torch.zeros(64))
    region = memory.search(tensor[32:].data_ptr(), 3)
    assert (region.start, region.rank) == (tensor.data_ptr(), 3)
    assert memory.search(8, 0) is None


@pytest.mark.parametrize(
    ("shape", "offset", "name"),
    [
        (None, 12, "x[3]"),
        ((16,), 12, "x[3]"),
        ((4, 4), 20, "x[1, 1]"),
        ((2, 2, 4), 60, "x[1, 1, 3]"),
        ((2, 2), 32, "x[8]"),
    ],
)
def test_names_of_elements(shape, offset, name):
    region = MemoryRegion(START, 64, 0, "x", itemsize=4)
    region.shape = shape
    assert region.element(START + offset) == name


def test_describe():
    assert MemoryRegion(START, 4, 1, "x", "file.py:3").describe() == "x of rank 1, made at file.py:3"
    assert MemoryRegion(START, 4, 1, "x").describe() == "x of rank 1"
