"""Predictions by formulas: worked out by hand in simple cases, and compared with what was measured."""

import importlib.util
import json
import math
import statistics
import sys
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

from iris._machine import by_name, names
from iris._target import KNOWN
from iris.errors import ArgumentError
from iris.ops.config import FusedConfig, HbmBufferConfig
from iris.tuning import cost_model
from iris.tuning._calibration import FIGURES, Calibration, calibration
from iris.tuning.cost_model import ALGORITHMS, COLLECTIVES, DEFAULTS, predict, rank

ROOT = Path(__file__).parents[2]
H200 = by_name("h200")
# 8 units of 1 TFLOP/s each where 0.8 of the peak is reached. Memory and programs keep up with anything.
TOY = replace(
    H200,
    name="toy",
    compute_units=8,
    matrix_flops_per_s={"float16": 10e12},
    memory_bytes_per_s=1e18,
    cache_bytes_per_s=1e18,
    program_local_bytes_per_s=1e18,
    program_remote_bytes_per_s=1e18,
    local_latency_ns=1e-9,
)
FIT = calibration("toy", "")
TILE = {"block_size_m": 128, "block_size_n": 128, "block_size_k": 64, "num_stages": 4}
STAGED = {**TILE, "k_per_flag": 16, "num_fetch_sms": 20, "first_stage_fetch_sms": 20, "num_fetch_stages": 4}
SIZES = {"M": 4096, "N": 3584, "K": 8192}
LARGE = {"M": 16384, "N": 3584, "K": 8192}


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("report_cost_model", ROOT / "benchmarks" / "report_cost_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_product_that_fits_the_units_by_hand():
    """16 tiles on 8 units: two rounds of 2 * 128 * 128 * 64 FLOP at 1 TFLOP/s."""
    prediction = predict("matmul_all_reduce", TOY, {"M": 512, "N": 512, "K": 64}, 1, "float16", TILE)
    assert prediction.gemm - FIT.kernel_s == pytest.approx(2 * 2 * 128 * 128 * 64 / 1e12, rel=1e-9)
    assert prediction.fused == prediction.gemm
    assert prediction.communication == 0
    assert prediction.bound == "compute"


def test_one_tile_more_than_the_units_is_a_round_more():
    """Tiles of less than 16 blocks of K are not divided."""

    def rounds(columns):
        prediction = predict("matmul_all_reduce", TOY, {"M": 128, "N": 128 * columns, "K": 512}, 1, "float16", TILE)
        return (prediction.gemm - FIT.kernel_s) / (2 * 128 * 128 * 512 / 1e12)

    assert [rounds(columns) for columns in (1, 8, 9, 16, 17)] == pytest.approx([1, 1, 2, 2, 3])


def test_the_last_tiles_are_divided_where_that_pays():
    """12 tiles on 8 units: one round, and 8 halves with an exchange of sums in the second."""
    depth = 1 << 20
    prediction = predict("matmul_all_reduce", TOY, {"M": 384, "N": 512, "K": depth}, 1, "float16", TILE)
    tile = 2 * 128 * 128 * depth / 1e12
    exchange = 1.5e-6 + 128 * 128 * 4 * 4.5e-6 / (128 << 10)
    assert prediction.gemm - FIT.kernel_s == pytest.approx(1.5 * tile + 2 * exchange, rel=1e-9)


def test_a_product_with_few_rows_is_as_slow_as_memory():
    machine = replace(TOY, memory_bytes_per_s=1e12, memory_efficiency=0.5, cache_bytes=0)
    prediction = predict("matmul_all_reduce", machine, {"M": 16, "N": 1024, "K": 4096}, 1, "float16", TILE)
    # A is padded to a tile; B; C.
    nbytes = 2 * (128 * 4096 + 1024 * 4096 + 16 * 1024)
    compute = 2 * 128 * 128 * 4096 / 1e12
    assert prediction.gemm - FIT.kernel_s == pytest.approx(math.hypot(nbytes / 0.5e12, compute), rel=1e-9)
    slower = replace(machine, memory_bytes_per_s=1e11)
    assert predict("matmul_all_reduce", slower, {"M": 16, "N": 1024, "K": 4096}, 1, "float16", TILE).bound == "memory"


def test_large_tiles_need_fewer_operands():
    """The smaller the tile, the more bytes a program loads for each product."""
    times = [
        predict("matmul_all_reduce", "h200", LARGE, 1, "float16", {**TILE, "block_size_m": m, "block_size_n": n}).gemm
        for m, n in ((128, 256), (128, 128), (64, 128), (64, 64))
    ]
    assert times == sorted(times)
    assert times[-1] > 2 * times[0]


def test_one_stage_hides_no_loads():
    def gemm(stages):
        return predict("matmul_all_reduce", "h200", LARGE, 1, "float16", {**TILE, "num_stages": stages}).gemm

    assert gemm(1) > 1.5 * gemm(4)
    assert gemm(2) >= gemm(3) >= gemm(4)


def test_tiles_that_share_rows_and_columns_bring_less_from_memory():
    machine = replace(H200, memory_bytes_per_s=3e11)

    def gemm(group):
        sizes = {"M": 16384, "N": 16384, "K": 8192}
        return predict("matmul_all_reduce", machine, sizes, 1, "float16", {**TILE, "group_size_m": group}).gemm

    assert gemm(1) > gemm(8)


def test_a_gather_by_copies_of_one_stage_by_hand():
    """Two ranks, A along M, all tiles in one round: those of the peer begin when its shard has come."""
    sizes = {"M": 256, "N": 256, "K": 8192}
    config = {**TILE, "transport": "copy_engine", "num_fetch_stages": 1}
    prediction = predict(
        "all_gather_matmul", TOY, sizes, 2, "float16", config, gather_dim=0, link_gbps=100, algorithm="copy_engine"
    )
    fetch = 128 * 8192 * 2 / 100e9
    assert prediction.communication == pytest.approx(fetch, rel=1e-9)
    assert prediction.bound == "compute"
    # 4 tiles on 8 units are divided in two pieces, the second of which adds the sums of the first.
    tile = 2 * 128 * 128 * 8192 / 1e12
    exchange = 1.5e-6 + 128 * 128 * 4 * 4.5e-6 / (128 << 10)
    flag = 550e-9 * min(1, (FIT.copies_s + fetch) / (tile / 2 + 2 * exchange))
    pieces = (tile * FIT.staged_loop + flag) / 2 + 2 * exchange
    start = FIT.kernel_s + FIT.fused_s + FIT.copies_s
    assert prediction.fused == pytest.approx(start + fetch + pieces, rel=1e-9)


@pytest.mark.parametrize("algorithm", ["pull", "hbm_buffer", "copy_engine"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_wider_link_is_never_slower(algorithm, dim):
    times = [
        predict(
            "all_gather_matmul", "h200", SIZES, 4, "float16", STAGED if algorithm != "pull" else TILE,
            algorithm=algorithm, gather_dim=dim, link_gbps=gbps,
        )
        for gbps in (5, 20, 50, 100, 200, 400, 1000, 1e6, math.inf)
    ]  # fmt: skip
    fused, unfused = [one.fused for one in times], [one.unfused for one in times]
    assert fused == sorted(fused, reverse=True)
    assert unfused == sorted(unfused, reverse=True)
    assert times[0].bound == "link"
    assert fused[0] > 5 * fused[-1]


@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [(name, kernel) for name, kernels in ALGORITHMS.items() for kernel in kernels if name != "all_gather_matmul"],
)
def test_a_wider_link_is_never_slower_elsewhere(operation, algorithm):
    sizes = {"bytes": 64 << 20} if operation in COLLECTIVES else SIZES
    params = {} if operation in COLLECTIVES else TILE
    fused = [
        predict(operation, "h200", sizes, 4, "float16", params, algorithm=algorithm, link_gbps=gbps).fused
        for gbps in (5, 20, 50, 100, 200, 400, 1000, math.inf)
    ]
    assert fused == sorted(fused, reverse=True)
    assert fused[0] > fused[-1]


@pytest.mark.parametrize("operation", ALGORITHMS)
def test_more_work_is_never_faster(operation):
    def fused(factor):
        if operation in COLLECTIVES:
            return predict(operation, "mi300x", {"bytes": factor << 16}, 8, "bfloat16").fused
        return predict(operation, "mi300x", {"M": 256 * factor, "N": 4096, "K": 8192}, 8, "bfloat16", TILE).fused

    times = [fused(1 << power) for power in range(9)]
    assert times == sorted(times)
    assert times[-1] > times[0]


@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"])
def test_more_compute_units_are_never_slower(operation):
    times = [
        predict(operation, "h200", LARGE, 2, "float16", TILE, units=units, algorithm=ALGORITHMS[operation][0]).fused
        for units in (4, 16, 33, 66, 99, 132)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 10 * times[-1]


def test_ranks_that_share_a_device_share_its_memory():
    """A product that memory bounds takes twice as long with half of the units."""
    sizes = {"M": 16, "N": 65536, "K": 8192}
    tile = {"block_size_m": 16, "block_size_n": 128, "block_size_k": 256, "num_stages": 4}
    machine = replace(H200, program_local_bytes_per_s=1e12)
    whole, half = (
        predict("matmul_all_reduce", machine, sizes, 1, "float16", tile, units=units).gemm for units in (None, 66)
    )
    assert (half - FIT.kernel_s) / (whole - FIT.kernel_s) == pytest.approx(2, rel=0.05)


def test_nothing_but_the_product_is_left_with_an_endless_link():
    prediction = predict(
        "all_gather_matmul", "h200", LARGE, 2, "float16", {**STAGED, "transport": "copy_engine"}, link_gbps=math.inf
    )
    assert prediction.communication == 0
    assert prediction.gemm < prediction.fused < prediction.gemm * FIT.staged_loop + FIT.fused_s
    for kernel in ("two_shot", "one_shot"):
        sent = predict("matmul_all_reduce", "h200", LARGE, 2, "float16", TILE, algorithm=kernel, link_gbps=math.inf)
        assert sent.communication == 0
        assert sent.gemm < sent.fused < 1.2 * sent.gemm


def test_a_slow_link_decides_alone():
    """With 1 GB/s the time is that of the bytes, and nothing is gained but the product."""
    nbytes = 16384 * 8192 * 2 / 2
    prediction = predict("all_gather_matmul", "h200", LARGE, 2, "float16", STAGED, link_gbps=1)
    assert prediction.fused == pytest.approx(nbytes / 1e9, rel=0.02)
    assert prediction.bound == "link"
    reduced = predict("matmul_all_reduce", "h200", LARGE, 2, "float16", TILE, link_gbps=1)
    assert reduced.fused == pytest.approx(16384 * 3584 * 2 / 1e9, rel=0.05)


def test_pull_reads_a_for_each_column_of_tiles():
    prediction = predict("all_gather_matmul", "h200", LARGE, 2, "float16", TILE, algorithm="pull", link_gbps=10)
    assert prediction.communication == pytest.approx(16384 * 8192 * 2 / 2 * 28 / 10e9, rel=1e-9)


def fetched_by(programs):
    config = {**STAGED, "num_fetch_sms": programs, "first_stage_fetch_sms": programs}
    return predict("all_gather_matmul", "h200", LARGE, 2, "float16", config)


def test_too_few_fetchers_are_what_a_gather_waits_for():
    few, many = (fetched_by(programs) for programs in (1, 16))
    assert few.bound == "fetch"
    assert few.fused > 2 * many.fused
    assert few.communication > 10 * many.communication


def test_fetchers_do_not_multiply():
    """Twice as many as the link needs take programs from the product."""
    some, all_of_them = (fetched_by(programs) for programs in (20, 120))
    assert all_of_them.communication == some.communication
    assert all_of_them.fused > some.fused


def test_pieces_have_a_best_size():
    """Small ones cost a fetcher's time and looks at flags, large ones come late."""

    def fused(blocks):
        config = {**STAGED, "k_per_flag": blocks, "num_fetch_stages": 1}
        return predict("all_gather_matmul", "h200", {**SIZES, "M": 1024}, 2, "float16", config, gather_dim=0).fused

    times = {blocks: fused(blocks) for blocks in (1, 8, 128)}
    assert times[8] < times[1]
    assert times[8] < times[128]


def test_more_stages_bring_the_first_tiles_sooner():
    config = {**STAGED, "transport": "copy_engine"}
    one, four = (
        predict("all_gather_matmul", "h200", SIZES, 8, "float16", {**config, "num_fetch_stages": stages}).fused
        for stages in (1, 4)
    )
    assert four < one


def test_two_shot_sends_less_than_one_shot_to_many():
    two, one = (
        predict("matmul_all_reduce", "h200", SIZES, 8, "float16", {**TILE, "all_reduce_variant": variant})
        for variant in ("two_shot", "one_shot")
    )
    assert (two.algorithm, one.algorithm) == ("two_shot", "one_shot")
    assert one.communication == pytest.approx(two.communication * 8 / 2)


def test_the_unfused_operations_by_hand():
    """Of a kernel's product and a collective: the collective is NCCL's, the product one of the library's tiles."""
    sizes, world = {"M": 4096, "N": 4096, "K": 64}, 4
    links = {
        "matmul_all_gather": (3 / 4, FIT.vendor_link),
        "matmul_reduce_scatter": (3 / 4, FIT.vendor_link),
        "matmul_all_reduce": (6 / 4, FIT.vendor_reduce_link),
    }
    for operation, (share, rate) in links.items():
        prediction = predict(operation, TOY, sizes, world, "float16", {}, algorithm="torch", link_gbps=10)
        nbytes = 4096 * 4096 * 2 * share
        expected = FIT.vendor_collective_s * (1 + nbytes / (nbytes + FIT.vendor_ramp_bytes)) + nbytes / (10e9 * rate)
        assert prediction.communication == pytest.approx(expected, rel=1e-9), operation
        assert prediction.fused == prediction.unfused == prediction.communication + prediction.gemm
        assert prediction.speedup == 1


def test_pytorch_puts_columns_side_by_side():
    along_m, along_k = (
        predict("all_gather_matmul", "h200", SIZES, 2, "float16", STAGED, gather_dim=dim).unfused for dim in (0, 1)
    )
    copied = 2 * 4096 * 8192 * 2 / (4.8e12 * 0.89 * FIT.side_by_side)
    assert along_k - along_m == pytest.approx(copied, rel=1e-6)


def test_a_collective_by_hand():
    nbytes, link = 64 << 20, 450e9 * 0.82
    part = nbytes / 2
    prediction = predict("all_gather", "h200", {"bytes": nbytes}, 2, "bfloat16")
    ramp = 1.5e-6 * part / (part + (256 << 10))
    assert prediction.fused == pytest.approx(FIT.collective_s + ramp + part / (link * FIT.collective_link), rel=1e-9)
    assert (prediction.bound, prediction.gemm, prediction.model) == ("link", 0.0, "")
    few = predict("all_gather", "h200", {"bytes": nbytes}, 2, "bfloat16", {"comm_sms": 4})
    assert few.communication == pytest.approx(part / (4 * FIT.collective_bytes_per_s), rel=1e-9)
    assert few.bound == "fetch"
    copied = predict("all_gather", "h200", {"bytes": nbytes}, 2, "bfloat16", {"comm_sms": 4}, algorithm="copy_engine")
    start = FIT.collective_s * FIT.copy_engine_start
    assert copied.fused == pytest.approx(start + ramp + part / (link * FIT.copy_engine_link), rel=1e-9)
    assert copied.bound == "link"  # no program moves it


def test_a_rank_on_xgmi_receives_from_each_peer_over_its_own_link():
    two, eight = (predict("all_to_all", "mi300x", {"bytes": 1 << 30}, world, "float16") for world in (2, 8))
    # Half of the bytes over one link; seven eighths over seven.
    assert two.communication / eight.communication == pytest.approx((1 / 2) / (7 / 8 / 7), rel=1e-9)


@pytest.mark.parametrize("machine", names())
def test_every_machine_has_times_of_every_operation(machine):
    for operation, kernels in ALGORITHMS.items():
        sizes = {"bytes": 4096} if operation in COLLECTIVES else {"M": 1, "N": 17, "K": 33}
        large = {"bytes": 1 << 28} if operation in COLLECTIVES else {"M": 10000, "N": 4096, "K": 10007}
        for algorithm in kernels:
            for world in (1, 2, 3, 8):
                for dtype in ("float16", "bfloat16", "float32", "int8"):
                    for size in (sizes, large):
                        one = predict(operation, machine, size, world, dtype, algorithm=algorithm, gather_dim=world % 2)
                        times = (one.fused, one.unfused, one.speedup)
                        assert all(math.isfinite(value) and value > 0 for value in times), one
                        assert one.gemm >= 0, one
                        assert math.isfinite(one.communication), one
                        assert one.bound in ("compute", "link", "fetch", "memory")
                        assert (one.communication == 0) == (world == 1) or algorithm == "torch", one


def test_the_defaults_are_those_of_the_configurations():
    default = HbmBufferConfig()
    assert {name: getattr(default, name) for name in DEFAULTS} == DEFAULTS
    own = {field.name for field in fields(HbmBufferConfig)} - {field.name for field in fields(FusedConfig)}
    assert set(cost_model._STAGING) == own


@pytest.mark.parametrize(
    ("operation", "params", "algorithm"),
    [
        ("all_gather_matmul", {}, "hbm_buffer"),
        ("all_gather_matmul", TILE, "pull"),
        ("all_gather_matmul", STAGED, "hbm_buffer"),
        ("all_gather_matmul", {**TILE, "transport": "copy_engine"}, "copy_engine"),
        ("matmul_all_reduce", TILE, "two_shot"),
        ("matmul_all_reduce", {**TILE, "all_reduce_variant": "one_shot"}, "one_shot"),
        ("matmul_reduce_scatter", TILE, "fused"),
        ("matmul_all_gather", TILE, "fused"),
        ("all_reduce", {"all_reduce_variant": "push"}, "push"),
        ("all_gather", {"all_gather_variant": "partitioned"}, "partitioned"),
        ("all_gather", {"all_gather_variant": "copy_engine"}, "copy_engine"),
        ("broadcast", {}, "direct"),
    ],
)
def test_the_algorithm_that_parameters_are_for(operation, params, algorithm):
    sizes = {"bytes": 4096} if operation in COLLECTIVES else SIZES
    assert predict(operation, "h200", sizes, 2, "float16", params).algorithm == algorithm


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": "v100"}, "machine 'v100' is not known; possible: mi300x, .*b200"),
        ({"operation": "conv"}, "operation 'conv' has no model; possible: all_gather_matmul, .*broadcast"),
        ({"dtype": "complex64"}, "no matrix rate for dtype 'complex64'; possible: .*float16"),
        ({"algorithm": "one_shot"}, "algorithm 'one_shot' of all_gather_matmul has no model; possible: hbm_buffer"),
        ({"sizes": {"M": 64, "N": 64}}, "sizes of all_gather_matmul are M, N, K; got M, N"),
        ({"sizes": {"bytes": 64}}, "sizes of all_gather_matmul are M, N, K; got bytes"),
        ({"sizes": {"M": 0, "N": 64, "K": 64}}, "M must be a whole number above 0, got 0"),
        ({"sizes": {"M": 2.5, "N": 64, "K": 64}}, "M must be a whole number above 0, got 2.5"),
        ({"world": 0}, "world must be a whole number above 0, got 0"),
        ({"units": -1}, "units must be a whole number above 0, got -1"),
        ({"link_gbps": 0.0}, "link_gbps must be above 0, got 0.0"),
        ({"link_gbps": math.nan}, "link_gbps must be above 0, got nan"),
        ({"gather_dim": 2}, "gather_dim must be 0 or 1, got 2"),
        ({"params": {**STAGED, "k_per_flag": 0}}, "k_per_flag must be a whole number above 0, got 0"),
        ({"params": {**TILE, "num_sms": 0}}, "num_sms must be a whole number above 0, got 0"),
    ],
)
def test_errors_say_what_is_possible(change, message):
    given = {"operation": "all_gather_matmul", "machine": "h200", "sizes": SIZES, "world": 2, "dtype": "float16"}
    with pytest.raises(ArgumentError, match=message):
        predict(**{**given, **change})


def test_sizes_may_be_those_of_a_query():
    assert predict("all_gather_matmul", "h200", tuple(SIZES.items()), 2, "float16", STAGED) == predict(
        "all_gather_matmul", H200, SIZES, 2, "float16", STAGED
    )


def test_a_prediction_stays_as_it_is_and_says_that_it_is_one():
    prediction = predict("all_gather_matmul", "h200", SIZES, 2, "float16", STAGED)
    with pytest.raises(FrozenInstanceError):
        prediction.fused = 0.0
    assert "us predicted" in str(prediction)
    assert "896 tiles of 128x128 on 132 programs" in str(prediction)


def test_candidates_are_ranked_by_their_time():
    candidates = [
        ("torch", {}),
        ("pull", TILE),
        (None, STAGED),
        (None, {**STAGED, "block_size_n": 256}),
        (None, {**STAGED, "num_fetch_sms": 1}),
        (None, dict(STAGED)),
    ]
    found = rank(candidates, "all_gather_matmul", "h200", LARGE, 2, "float16")
    times = [candidate.prediction.fused for candidate in found]
    assert times == sorted(times)
    assert found[0].params == {**STAGED, "block_size_n": 256}
    assert {candidate.algorithm for candidate in found} == {"torch", "pull", "hbm_buffer"}
    # Equal ones stay in the order given.
    equal = [candidate.params for candidate in found if candidate.params == STAGED]
    assert equal[0] is candidates[2][1]
    assert equal[1] is candidates[5][1]
    assert rank(candidates, "all_gather_matmul", "h200", LARGE, 2, "float16") == found


def test_every_figure_has_a_source_and_a_value_for_every_machine():
    assert set(FIGURES) == set(Calibration._fields)
    places = {"", *(target.family for target in KNOWN.values()), *KNOWN}
    for name, (meaning, values) in FIGURES.items():
        assert "" in values or {"sm", "gfx"} <= set(values), name
        assert set(values) <= places, name
        assert len(meaning.split()) >= 4, name
        for value, source in values.values():
            assert value > 0, name
            assert len(source.split()) >= 3, f"{name}: {source!r} is no sentence"
    for name, target in KNOWN.items():
        for share in ("kernel_efficiency", "vendor_efficiency", "vendor_link", "collective_link"):
            assert 0.2 < getattr(calibration(name, target.family), share) <= 1


def figures_table() -> str:
    """The table of docs/cost-model.md."""
    lines = ["| figure | means | of | value | source |", "|---|---|---|---|---|"]
    for name, (meaning, values) in FIGURES.items():
        for place, (value, source) in values.items():
            shown = {"": "all others" if len(values) > 1 else "all", "gfx": "other AMD"}.get(place, place)
            lines.append(f"| {name} | {meaning} | {shown} | {value:.4g} | {source} |")
    return "\n".join(lines)


def test_the_documentation_has_the_same_figures():
    table = figures_table()
    assert table in (ROOT / "docs" / "cost-model.md").read_text(), f"docs/cost-model.md should have:\n{table}"


def test_predictions_are_near_what_two_h200_measured(report):
    (measured,) = (one for one in report.sets() if one.name == "h200_two")
    assert len(measured.rows) > 200
    assert measured.left_out == 0
    fused, unfused = report.errors(measured.rows)
    assert statistics.median(map(abs, fused)) < 0.1
    assert statistics.median(map(abs, unfused)) < 0.1
    # Nothing was fitted to these: more ranks, and a link of another rate.
    (alone,) = (one for one in report.sets() if one.name == "h200_alone")
    assert max(map(abs, report.errors(alone.rows)[0])) < 0.2


def test_predictions_are_near_what_was_published_for_mi300x(report):
    found = [one for one in report.sets() if one.name == "all_gather_matmul mi300x"]
    assert len(found) == 1
    fused, unfused = report.errors(found[0].rows)
    assert len(fused) == 28
    assert statistics.median(map(abs, fused)) < 0.35
    assert statistics.median(map(abs, unfused)) < 0.35


@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "all_reduce"])
def test_the_predicted_best_is_better_than_a_fixed_choice(report, operation):
    (measured,) = (one for one in report.sets() if one.name == "h200_two")
    made = report.choices(row for row in measured.rows if row.operation == operation)
    assert len(made) >= 9
    loss = statistics.mean(choice.loss for choice in made)
    assert loss < 0.6 * statistics.mean(choice.losses[0] for choice in made), "the first"
    assert loss < report.best_fixed(made)[1]
    assert statistics.median(choice.order for choice in made) > 0.5


def test_the_rank_correlation_by_hand(report):
    assert report.rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert report.rank_correlation([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    # Ranks 1 2 3 4 and 2 1 4 3: 1 - 6 * 4 / (4 * 15).
    assert report.rank_correlation([1, 2, 3, 4], [5, 4, 9, 7]) == pytest.approx(0.6)
    assert report.rank_correlation([1, 1], [1, 2]) == 0


def test_the_report_of_made_up_rows(report):
    """A row that is predicted exactly, one that is measured at twice the prediction, and PyTorch at half of it."""
    one = predict("all_gather_matmul", "h200", SIZES, 2, "float16", STAGED)
    other = predict("all_gather_matmul", "h200", SIZES, 2, "float16", TILE)
    content = {"machine": "h200"}
    base = {"operation": "all_gather_matmul", "world": 2, "dtype": "float16", "sizes": SIZES}
    rows = [
        report._measured(content, {**base, "algorithm": "hbm_buffer", "params": STAGED, "ms": one.fused * 1e3}),
        report._measured(
            content,
            {**base, "algorithm": "pull", "params": TILE, "ms": other.fused * 2e3, "torch_ms": other.unfused * 2e3},
        ),
    ]
    fused, unfused = report.errors(rows)
    assert fused == pytest.approx([0, -0.5])
    assert unfused == pytest.approx([-0.5])
    (choice,) = report.choices(rows)
    assert choice.loss == choice.losses[0] == 0
    assert choice.losses[1:] == pytest.approx((other.fused * 2 / one.fused - 1, one.unfused * 2 / one.fused - 1))
    assert choice.algorithms == ("hbm_buffer", "pull", "torch")
    assert report.best_fixed([choice]) == ("hbm_buffer", 0)
    assert report._measured(content, {**base, "algorithm": "ring", "params": {}, "ms": 1.0}) is None


def test_the_report_is_written(report, tmp_path, capsys):
    path = tmp_path / "report.md"
    assert report.main(["--out", str(path)]) == 0
    text = path.read_text()
    for name in ("h200_two", "h200_alone", "all_gather_matmul mi300x", "measured with upstream's"):
        assert name in text
    assert text.split("\n", 2)[2].strip() == capsys.readouterr().out.strip()
    assert report.main(["--rows", "h200_alone"]) == 0
    assert "gather_dim 0: measured 0.4055 ms" in capsys.readouterr().out
    with pytest.raises(ArgumentError, match=r"no data 'h100'; possible: .*h200_two"):
        report.main(["--rows", "h100"])


def test_the_data_says_where_it_comes_from():
    for path in (ROOT / "benchmarks" / "data").glob("h[12]00_*.json"):
        content = json.loads(path.read_text())
        assert content["machine"] in KNOWN, path
        assert len(content["source"].split()) > 5, path
        assert isinstance(content["emulated"], bool), path
        for row in content["rows"]:
            assert row["ms"] > 0, row
            assert row["operation"] in ALGORITHMS, row
