"""Grids that are measured, and the points that are derived from them."""

import json
from pathlib import Path

import pytest

from iris.concurrent.tuning_data import collect, derive
from iris.concurrent.tuning_data._operands import Operands, Shape
from iris.concurrent.tuning_data.derive import Case, cases_of, coverage, order
from iris.errors import ArgumentError, OutputError, UnsupportedError
from iris.tuning import autotune, store
from simulated_ranks import SimulatedRanks

SHIPPED = Path(__file__).parents[2] / "benchmarks" / "data"
SMALL = ["--shapes", "40x48x32x22x40,64x64x32x64x16", "--shares", "0.5,0.75,1", "--tiles", "64x64x32,32x64x32"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_warned", set())


def timer(ctx, candidate):
    """Rank 0 is fast, so the others decide; the tile of 32 rows is faster with few programs."""
    split, tile = candidate.params.get("gemm_wgs", 99), candidate.params.get("gemm_block", (64, 64, 32))
    return (1 + abs(split - 66) / 100 + tile[0] / 1000) * (0.5 if ctx.get_rank() == 0 else 1.0)


def body_collect(ctx, words, timed=timer, operands=Operands):
    request = collect.parse(words, ctx.get_num_ranks())
    with autotune.using(timer=timed):
        return collect.run(ctx, request, operands)


@pytest.mark.parametrize(
    ("world", "words", "tiles"),
    [
        (1, ["--collectives", "all_reduce"], ((64, 64, 32), (32, 64, 32))),
        (3, ["--tiles", "32x64x32", "--cases", ":1", "--collectives", "reduce_scatter,all_to_all"], ((32, 64, 32),)),
    ],
)
def test_collect_measures_every_point_of_every_case(world, words, tiles, tmp_path):
    out = tmp_path / "sub" / "corpus.json"
    words = ["--out", str(out), *SMALL, *words]
    corpora = SimulatedRanks(world, "sim").run(body_collect, words)
    corpus = derive.read(out)
    assert all(one == corpus for one in corpora)
    request = collect.parse(words, world)
    asked = request.cases
    assert [(case["collective"], case["sizes"]) for case in corpus["cases"]] == [(n, s.sizes) for n, s in asked]
    assert (corpus["units"], corpus["mode"], corpus["dtype"]) == (132, "fused", "float16")
    slow = 1.0 if world > 1 else 0.5
    for case in corpus["cases"]:
        assert case["world"] == world
        ways = {(point["split_frac"], tuple(point["gemm_block"])) for point in case["points"]}
        assert ways == {(share, tile) for share in request.shares for tile in tiles}
        best = case["best"]
        assert (best["gemm_wgs"], best["gemm_block"]) == (66, [32, 64, 32])
        assert best["ms"] == pytest.approx(1.032 * slow, abs=1e-4)
        assert case["default"]["gemm_wgs"] == 99
        assert case["default"]["ms"] == pytest.approx((1.33 + 0.064) * slow, rel=0.1)
    # What was collected is known to later calls.
    assert len(store.saved_records()) == len(asked)


def test_collect_goes_on_where_it_stopped(tmp_path):
    out = tmp_path / "corpus.json"
    words = [*SMALL, "--collectives", "all_reduce", "--tiles", "32x64x32"]
    SimulatedRanks(2, "sim").run(body_collect, ["--out", str(out), *words, "--cases", "0:1"])
    before = derive.read(out)
    assert len(before["cases"]) == 1
    SimulatedRanks(2, "sim").run(body_collect, ["--out", str(out), *words], lambda *_: 7.0)
    after = derive.read(out)
    assert after["cases"][0] == before["cases"][0]
    assert after["cases"][1]["best"]["ms"] == 7.0
    # With another dtype it would be another corpus.
    outcomes = SimulatedRanks(2, "sim").run_expecting(body_collect, ["--out", str(out), *SMALL, "--dtype", "float32"])
    for outcome in outcomes:
        assert isinstance(outcome.error, ArgumentError)
        assert "dtype 'float16'" in str(outcome.error)


def body_wrong(ctx, words):
    """One rank's output is spoilt after each call, so nothing that was timed may count."""

    class Spoilt(Operands):
        def check(self):
            if ctx.get_rank() == 1:
                raise OutputError("the product is wrong: planted")
            super().check()

    return body_collect(ctx, words, operands=Spoilt)


def test_what_computes_wrong_results_is_not_timed(tmp_path):
    words = ["--out", str(tmp_path / "corpus.json"), *SMALL, "--collectives", "all_reduce", "--cases", "0:1"]
    outcomes = SimulatedRanks(2, "sim").run_expecting(body_wrong, words)
    for outcome in outcomes:
        assert isinstance(outcome.error, UnsupportedError)
        assert "no candidate can run" in str(outcome.error)
        assert "planted" in str(outcome.error)


def body_check(ctx, name):
    """What the check of outputs says of right ones, and of ones that are wrong in one element."""
    shape = Shape(40, 48, 32, 22, 40)
    operands = Operands(ctx, name, shape, "float16", "fused", 3)
    said = []
    for spoil in (None, 0, 1):
        outputs = operands.call()
        ctx.synchronize()
        ctx.barrier()
        if spoil is not None and outputs[spoil].numel():
            outputs[spoil].view(-1)[0] += 1
        try:
            operands.check()
            said.append("")
        except OutputError as error:
            said.append(str(error))
            ctx.exchange.all_gather("collect: outputs are filled", None)
        ctx.barrier()
    return said


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_outputs_are_checked(name):
    for right, product, collective in SimulatedRanks(2, "sim").run(body_check, name):
        assert right == ""
        assert "the product is wrong: 1 of" in product
        assert f"the {name} is wrong: 1 of" in collective


def body_alone(ctx, words, spoilt):
    """Rank 0 alone makes the calls; ``spoilt`` is a rank whose output somebody else writes to, too."""

    class Alone(Operands):
        def check(self):
            if spoilt is not None:
                ctx.synchronize()
                self._output(spoilt)[-1, -1] = 77
            super().check()

    return body_collect(ctx, [*words, "--alone"], operands=Alone)


@pytest.mark.parametrize("world", [2, 3])
def test_one_rank_alone(world, tmp_path, monkeypatch):
    monkeypatch.setenv("IRIS_CHECK", "off")
    out, names = tmp_path / "corpus.json", "all_gather,all_reduce,reduce_scatter,all_to_all,broadcast"
    words = ["--out", str(out), "--shapes", "40x48x32x70x40", "--tiles", "32x64x32", "--shares", "0.5,1"]
    SimulatedRanks(world, "sim").run(body_alone, [*words, "--collectives", names], None)
    corpus = derive.read(out)
    assert (corpus["alone"], corpus["link_gbps"], corpus["units"]) == (True, None, 132)
    assert [case["collective"] for case in corpus["cases"]] == names.split(",")
    for case in corpus["cases"]:
        assert case["world"] == world
        assert [point["ms"] for point in case["points"]] == pytest.approx([0.516, 0.846])
    # Nothing of it is kept for calls that all ranks make.
    assert not store.saved_records()


@pytest.mark.parametrize(("name", "spoilt"), [("all_reduce", 0), ("all_gather", 1), ("all_to_all", 0)])
def test_what_one_rank_alone_writes_is_checked(name, spoilt, tmp_path, monkeypatch):
    monkeypatch.setenv("IRIS_CHECK", "off")
    words = ["--out", str(tmp_path / "c.json"), *SMALL, "--collectives", name, "--cases", "0:1"]
    outcomes = SimulatedRanks(2, "sim").run_expecting(body_alone, words, spoilt)
    assert isinstance(outcomes[0].error, UnsupportedError)
    assert f"the {name} is wrong on rank {spoilt}: 1 of" in str(outcomes[0].error)


def body_untimed(ctx, out):
    return collect.run(ctx, collect.parse(["--out", out, *SMALL], ctx.get_num_ranks()))


def test_nothing_is_collected_without_a_clock(tmp_path):
    (outcome,) = SimulatedRanks(1, "sim").run_expecting(body_untimed, str(tmp_path / "corpus.json"))
    assert isinstance(outcome.error, UnsupportedError)
    assert "iris doctor" in str(outcome.error)
    assert not (tmp_path / "corpus.json").exists()


def test_what_can_be_asked_for():
    usual = collect.parse(["--out", "x.json"], 4)
    assert (len(usual.cases), len(usual.shares), usual.shapes[0].comm_m) == (75, 10, 1024)
    quick = collect.parse(["--out", "x.json", "--quick", "--collectives", "all_gather"], 2)
    assert (len(quick.cases), quick.shares, quick.quick) == (3, collect.QUICK_SHARES, True)
    assert len(collect.parse(["--out", "x.json", "--cases", "3:5"], 2).shapes) == 2
    for words, text in (
        (["--collectives", "gather"], "gather is not known"),
        (["--shapes", "1x2x3"], "5 whole numbers"),
        (["--tiles", "1x0x3"], "3 whole numbers"),
        (["--cases", "40:"], "leaves no shape"),
    ):
        with pytest.raises(ArgumentError, match=text):
            collect.parse(["--out", "x.json", *words], 2)


# --- derive

A, B, C = (0.5, (64, 64, 32)), (0.75, (64, 64, 32)), (1.0, (128, 64, 32))


def made(points, default=2.0):
    return Case("sm_90", 2, points, default)


def test_the_next_point_is_that_which_covers_the_most_cases():
    cases = [made({A: 1.0, B: 1.02, C: 1.5}), made({A: 1.2, B: 1.03, C: 1.0}), made({A: 1.3, B: 1.3, C: 1.0})]
    # B is good enough in two; of A and C only C is in the third.
    assert order(cases) == [B, C]
    assert order(cases, 0.0) == [C, A]


def test_of_equal_points_that_which_leaves_less_slowness():
    cases = [made({A: 1.0, B: 1.0}), made({A: 1.5, B: 1.4, C: 1.0})]
    assert order(cases) == [B, C]


def test_a_case_that_no_point_covers_ends_the_search():
    cases = [made({A: 1.0}), made({A: 1.5, B: 1.2}, default=1.0)]
    assert order(cases) == [A]
    rows = coverage(cases, [A])
    assert rows == [{"k": 1, "pct_within_tol": 50.0, "mean_slowdown": 1.25, "max_slowdown": 1.5}]


def test_a_point_that_was_not_measured_counts_as_the_default():
    cases = [made({A: 1.0}), made({B: 1.0}, default=1.5)]
    rows = coverage(cases, [A, B])
    assert [row["max_slowdown"] for row in rows] == [1.5, 1.0]


def corpus(arch="sm_90", cases=12, **changes):
    def point(share, ms):
        return {"split_frac": share, "gemm_wgs": round(132 * share), "gemm_block": [64, 64, 32], "ms": ms}

    grids = [
        [point(0.5, 1.0 + (i % 2)), point(0.75, 1.5), point(1.0, 2.0 - (i % 2)), point(0.9, None)] for i in range(cases)
    ]
    about = {
        "schema": 1,
        "kind": "concurrent",
        "arch": arch,
        "device": "D",
        "kernel": "K",
        "software": "S",
        "date": "T",
    }
    found = [{"world": 2 + i % 3, "default": point(0.75, 1.5), "points": grid} for i, grid in enumerate(grids)]
    return {**about, "cases": found, **changes}


def test_derive_replaces_its_architecture_and_leaves_the_others(tmp_path, capsys):
    out, one, quick = (tmp_path / name for name in ("set.json", "corpus.json", "quick.json"))
    kept = {"gfx942": {"source": "s", "order": [{"split_frac": 0.5, "gemm_block": [1, 2, 3]}], "coverage": []}}
    out.write_text(derive.as_text({**kept, "sm_90": {"source": "old"}}))
    one.write_text(json.dumps(corpus()))
    quick.write_text(json.dumps(corpus(quick=True, arch="sm_100")))
    words = [str(one), str(quick), "--out", str(out)]
    assert derive.main([*words, "--check"]) == 1
    assert derive.main(words) == 0
    assert derive.main([*words, "--check"]) == 0
    archs = json.loads(out.read_text())["archs"]
    assert archs["gfx942"] == kept["gfx942"]
    assert set(archs) == {"gfx942", "sm_90"}
    assert archs["sm_90"]["order"] == [{"split_frac": share, "gemm_block": [64, 64, 32]} for share in (0.5, 1.0)]
    assert archs["sm_90"]["worlds"] == [2, 3, 4]
    assert archs["sm_90"]["coverage"][-1]["pct_within_tol"] == 100.0
    said = capsys.readouterr().out
    assert "quick.json: left out" in said
    assert "sm_90: 2 points for 12 cases of [2, 3, 4] ranks" in said


def test_derive_says_what_is_wrong(tmp_path):
    path = tmp_path / "corpus.json"
    for content, text in (
        (json.dumps(corpus(cases=3)), "has 3 cases with a grid, 10 are needed"),
        (json.dumps(corpus(schema=2)), "no corpus of schema 1"),
        (json.dumps([]), "no corpus of schema 1"),
        ("{", "cannot be read as JSON"),
        (json.dumps(corpus(quick=True)), "none of the files has a whole grid"),
    ):
        path.write_text(content)
        with pytest.raises(ArgumentError, match=text):
            derive.main([str(path), "--out", str(tmp_path / "set.json")])
    assert not (tmp_path / "set.json").exists()


def test_corpora_are_not_in_the_package():
    package = Path(collect.__file__).parents[2]
    assert [path.name for path in package.rglob("*.json") if derive.KIND in path.read_text(encoding="utf-8")] == []


def test_the_shipped_corpora_are_read():
    names = [path.stem.removeprefix("concurrent_") for path in SHIPPED.glob("concurrent_*.json")]
    found = {name: cases_of(derive.read(SHIPPED / f"concurrent_{name}.json")) for name in names}
    wanted = {"mi300x": 4, "mi355x": 1, "h200": 60, "h200_alone": 180}
    assert {name: len(cases) for name, cases in found.items()} == wanted
    for cases in found.values():
        # Small products have two tiles, and the default is no point of theirs.
        assert all(len(case.points) in (20, 50) and min(case.points.values()) >= 1.0 for case in cases)


def test_the_set_of_the_h200_is_derived_from_its_corpora():
    corpora = [str(SHIPPED / f"concurrent_{name}.json") for name in ("h200", "h200_alone")]
    assert derive.main([*corpora, "--check"]) == 0


def test_the_schema_names_every_field(tmp_path):
    page = Path(collect.__file__).with_name("SCHEMA.md").read_text(encoding="utf-8")
    SimulatedRanks(1, "sim").run(
        body_collect, ["--out", str(tmp_path / "c.json"), *SMALL, "--collectives", "all_reduce", "--cases", "0:1"]
    )
    written = derive.read(tmp_path / "c.json")
    shipped = derive.read(SHIPPED / "concurrent_mi300x.json")
    names = {*written, *shipped, *written["cases"][0], *written["cases"][0]["points"][0], "failure"}
    names |= {name for known in derive.derive([corpus()], 0.03, 1).values() for name in known}
    missing = sorted(name for name in names if f"`{name}`" not in page)
    assert not missing
