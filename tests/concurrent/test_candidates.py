"""What tuning tries: from the predictor, from the candidate set, from a few shares."""

from dataclasses import replace

import pytest

from iris._target import INTERPRETER, KNOWN
from iris.concurrent import _candidates, autotune
from iris.concurrent._call import Asked, _programs, usual_tiles
from iris.concurrent._candidates import Candidate, Conditions, candidates, default_split, heuristic, tiles_for
from iris.concurrent.predictor import COLLECTIVES, rank_splits
from iris.concurrent.tuning_data import candidates_of, load_candidate_set, split_of
from iris.errors import ArgumentError

SHAPE = {
    "gemm_m": 4096, "gemm_n": 4096, "gemm_k": 4096, "comm_m": 2048, "comm_n": 4096, "collective": "all_reduce",
    "world": 8,
}  # fmt: skip
DEFAULT = (128, 128, 64)


def conditions(product, machine=None, **changes):
    target = KNOWN[product]
    units = target.compute_units
    where = Conditions(target, product if machine is None else machine, "float16", 2, 2, units, units)
    return replace(where, **changes)


@pytest.mark.parametrize("product", list(KNOWN))
@pytest.mark.parametrize("rows", [1, 100, 8192])
def test_tiles_have_room_on_the_device(product, rows):
    target = KNOWN[product]
    found = tiles_for({**SHAPE, "gemm_m": rows}, conditions(product))
    assert found
    for m, n, k in found:
        # One stage at least, and sums of 128 registers in each of eight warps' threads.
        assert (m + n) * k * 2 <= target.shared_memory_bytes
        assert m * n <= 128 * 8 * target.warp_size
        assert m < 2 * rows or m == 16
    assert ((256, 256, 64) in found) == (target.vendor == "amd" and rows > 128)


def test_tiles_of_wider_elements_are_less_deep():
    narrow, wide = (tiles_for(SHAPE, conditions("h200", itemsize=size)) for size in (2, 4))
    assert wide == [(m, n, k // 2) for m, n, k in narrow]
    assert tiles_for(SHAPE, conditions("h200", target=INTERPRETER)) == []


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_known_machine_without_a_set_has_the_predictor_s(collective):
    where, shape = conditions("b200"), {**SHAPE, "collective": collective}
    assert not candidates_of(where.target.arch)
    found = candidates(shape, where, DEFAULT, most=8)
    ranked = rank_splits(shape, [DEFAULT, *tiles_for(shape, where)], machine="b200")
    assert len(found) == len({one.way for one in found}) == 8
    assert (found[0].way, found[0].pred_ms) == ((ranked[0].gemm_wgs, ranked[0].mt), ranked[0].pred_ms)
    # The second is of another tile, for where the model errs in tiles.
    assert found[1].gemm_block != found[0].gemm_block
    assert {one.way for one in found} <= {(one.gemm_wgs, one.mt) for one in ranked}


def test_a_known_machine_with_a_set_has_both_in_turn():
    where = conditions("mi300x")
    tiles = [DEFAULT, *tiles_for(SHAPE, where)]
    found = candidates(SHAPE, where, DEFAULT, most=8)
    ranked = [one.way for one in _candidates.predicted(SHAPE, where, tiles)]
    listed = [one.way for one in _candidates.derived(where, tiles)]
    assert [one.way for one in found][:4] == [listed[0], ranked[0], listed[1], ranked[1]]
    assert listed[0] == (280, (256, 256, 64))


@pytest.mark.parametrize("product", ["mi300x", "mi355x"])
def test_a_device_that_the_predictor_does_not_know_has_the_set(product):
    where = conditions(product, machine="mi308x", num_wgs=80, units=80)
    found = candidates(SHAPE, where, DEFAULT, most=8)
    known = [(split_of(share, 80), tile) for share, tile in candidates_of(where.target.arch)]
    assert [one.way for one in found] == list(dict.fromkeys(known))[:8]
    assert all(one.pred_ms is None for one in found)


def test_a_device_that_nothing_is_known_of_has_a_few_shares_of_the_default_tile():
    where = conditions("h100", machine="h20", num_wgs=304, target=replace(KNOWN["h100"], arch="sm_00"))
    found = candidates(SHAPE, where, DEFAULT, most=8)
    assert [one.way for one in found] == [(split, DEFAULT) for split in (152, 190, 228, 266, 304)]


@pytest.mark.parametrize("total", [1, 2, 7, 132, 304])
def test_shares_are_ascending_and_within_bounds(total):
    splits = [one.gemm_wgs for one in heuristic(conditions("h200", num_wgs=total), DEFAULT)]
    assert splits == sorted(set(splits))
    assert 1 <= splits[0] <= splits[-1] == total
    assert len(splits) <= 5
    own = [one.gemm_wgs for one in heuristic(conditions("h200", num_wgs=total, mode="concurrent"), DEFAULT)]
    assert own[-1] == max(1, total - 1)


def test_a_dtype_without_a_rate_is_not_predicted():
    assert candidates(SHAPE, conditions("b200", dtype="int32"), DEFAULT)[0] == Candidate(74, DEFAULT)


def test_a_tile_of_the_caller_is_the_only_one():
    for where in (conditions("mi300x"), conditions("mi300x", machine=""), conditions("h200"), conditions("h200", "")):
        found = candidates(SHAPE, where, DEFAULT, [(64, 64, 32)], most=8)
        assert len(found) > 2
        assert {one.gemm_block for one in found} == {(64, 64, 32)}


def test_two_kernels_leave_programs_for_the_collective():
    for product in ("mi300x", "h200"):
        where = conditions(product, mode="concurrent")
        assert all(0 < one.gemm_wgs < where.num_wgs for one in candidates(SHAPE, where, DEFAULT, most=40))
        given = replace(where, comm_wgs=20)
        assert all(0 < one.gemm_wgs <= where.num_wgs - 20 for one in candidates(SHAPE, given, DEFAULT, most=40))


@pytest.mark.parametrize("mode", ["fused", "concurrent"])
@pytest.mark.parametrize("total", [1, 8, 132, 304])
def test_the_default_split_is_that_of_the_operations(mode, total):
    class Place:
        def get_cu_count(self):
            return total

    programs = _programs(Place(), Asked(mode=mode), mode, 10**6, 10**6, "all_gather", 2)
    assert default_split(total, mode) == programs.multiplying
    if total > 8:
        given = _programs(Place(), Asked(mode=mode, comm_wgs=3, num_wgs=total), mode, 10**6, 10**6, "all_gather", 2)
        assert default_split(total, mode, 3) == given.multiplying


def test_the_set_of_the_package():
    archs = load_candidate_set()
    assert {"gfx942", "gfx950"} <= set(archs)
    for arch, found in archs.items():
        assert len(candidates_of(arch)) == len(found["order"]) == len(set(candidates_of(arch)))
        assert [row["k"] for row in found["coverage"]] == list(range(1, len(found["order"]) + 1))
        within = [row["pct_within_tol"] for row in found["coverage"]]
        assert within == sorted(within)
        assert found["source"]
    rows = {row["k"]: row for row in archs["gfx942"]["coverage"]}
    assert [rows[k]["pct_within_tol"] for k in (1, 4, 8)] == [25.0, 51.1, 73.9]
    archs.clear()
    assert load_candidate_set()


def test_topk_configs_speak_of_any_machine():
    found = autotune.topk_configs(SHAPE, k=4, machine="b200", default_gemm_block=DEFAULT)
    assert len(found) == 4
    assert all(one["pred_ms"] > 0 for one in found)
    small = autotune.topk_configs(SHAPE, 40, k=4, machine="h200")
    assert all(one["gemm_wgs"] <= 40 for one in small)
    with pytest.raises(ArgumentError, match="mi300x"):
        autotune.topk_configs(SHAPE, machine="h999")


@pytest.mark.parametrize(
    ("machine", "sizes", "itemsize", "tile"),
    [
        ("h200", (1, 8192, 8192), 2, (16, 128, 128)),
        ("h200", (16, 8192, 8192), 2, (16, 128, 128)),
        ("h200", (17, 8192, 8192), 2, (32, 64, 64)),
        ("h200", (1, 64, 8192), 2, (16, 64, 64)),
        # 32 and 64 tiles of 128x256 leave half of 132 units without one, 128 do not.
        ("h200", (128, 8192, 8192), 2, (128, 128, 64)),
        ("h200", (4096, 512, 8192), 2, (128, 128, 64)),
        ("h200", (512, 8192, 8192), 2, (128, 256, 64)),
        ("h200", (1, 8192, 8192), 1, (16, 64, 128)),
        ("mi300x", (1, 8192, 8192), 2, (16, 64, 64)),
    ],
)
def test_tiles_of_small_products(machine, sizes, itemsize, tile):
    found = usual_tiles(KNOWN[machine], *sizes, itemsize)
    assert (found.block_m, found.block_n, found.block_k) == tile
    assert found.num_warps == 8
    # What the caller wants stays.
    own = usual_tiles(KNOWN[machine], *sizes, itemsize, block=(64, 64, 64), num_warps=4)
    assert (own.block_m, own.block_n, own.block_k, own.num_warps) == (64, 64, 64, 4)
