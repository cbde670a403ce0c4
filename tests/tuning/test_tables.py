"""The tables that the package ships: what they say of a problem, and that they hold what was published."""

import json
from dataclasses import FrozenInstanceError, fields, replace
from importlib import resources

import pytest

from iris._target import KNOWN
from iris.ops.config import HbmBufferConfig
from iris.runtime.links import LINKS
from iris.tuning import tables
from iris.tuning.query import Query, config_key

OPERATION = "all_gather_matmul"
SHIPPED = tables.names("tuned")
PARAMS = {"block_size_m": 128, "block_size_n": 256, "block_size_k": 64, "num_warps": 8, "num_stages": 2}


def query(M, N, K, world=8, transpose="NN", machine="mi300x", **others):
    asked = Query(
        OPERATION, machine, KNOWN[machine].arch, "xgmi", world, KNOWN[machine].compute_units, "float16",
        (("M", M), ("N", N), ("K", K)), (("gather_dim", "1"), ("transpose", transpose)),
    )  # fmt: skip
    return replace(asked, **others)


G2 = query(131072, 16384, 16384)


def document(*path):
    return json.loads((resources.files("iris.tuning") / "data").joinpath(*path).read_text())


@pytest.fixture
def made(monkeypatch):
    """Puts a table of one's own in the place of a machine's: ``made([{...}, ...], sets=..., ...)``."""

    def use(entries, machine="mi300x", operation=OPERATION, **others):
        usual = {
            "link": "xgmi", "world": 8, "dtype": "16-bit", "options": {}, "algorithm": "hbm_buffer", "params": PARAMS,
            "emulated": False,
        }  # fmt: skip
        records = [usual | {"name": f"e{number}"} | entry for number, entry in enumerate(entries)]
        data = {
            "schema": 1, "operation": operation, "machine": machine, "arch": KNOWN[machine].arch,
            "provenance": {"here": {"hardware": "a machine", "source": "a test"}}, "entries": records, **others,
        }  # fmt: skip
        table = tables.parse(data)
        real = tables.load
        monkeypatch.setattr(tables, "load", lambda o, m: table if (o, m) == (operation, machine) else real(o, m))
        return table

    return use


def entry(M, N, K, speedup, **others):
    return {"sizes": {"M": M, "N": N, "K": K}, "measured": {"ms": 1.0, "torch_ms": None, "speedup": speedup}, **others}


# What the files hold.


@pytest.mark.parametrize(("operation", "machine"), SHIPPED)
def test_every_file_keeps_to_the_schema(operation, machine):
    data = document("tuned", operation, f"{machine}.json")
    assert (data["schema"], data["operation"], data["machine"]) == (1, operation, machine)
    assert data["arch"] == KNOWN[machine].arch
    for provenance in data["provenance"].values():
        assert provenance["hardware"]
        assert provenance["source"]
    for record in (*data["entries"], *data.get("sets", ())):
        assert record["link"] in LINKS
        assert record["world"] >= 1
        assert record.get("provenance", next(iter(data["provenance"]))) in data["provenance"]
        assert all(isinstance(value, str) for value in record.get("options", {}).values())
    for record in data["entries"]:
        assert list(record["sizes"]) in (["M", "N", "K"], ["bytes"])
        assert all(size > 0 for size in record["sizes"].values())
        assert {"ms", "torch_ms", "speedup"} <= set(record["measured"])
        assert isinstance(record.get("emulated", False), bool)
        assert record.get("fits", True) or record["why"]
    for record in data.get("sets", ()):
        assert record["enabled"] or record["reason"]
        assert record["evidence"]


@pytest.mark.parametrize(("operation", "machine"), SHIPPED)
def test_no_case_is_there_twice(operation, machine):
    seen = set()
    for case in tables.cases(operation, machine):
        key = (case.link, case.world, case.dtype, case.units, tuple(case.options.items()), case.entry.sizes)
        assert (key, case.entry.emulated) not in seen
        seen.add((key, case.entry.emulated))


@pytest.mark.parametrize(("operation", "machine"), SHIPPED)
def test_speedups_agree_with_the_times_they_stand_beside(operation, machine):
    for record in document("tuned", operation, f"{machine}.json")["entries"]:
        for figures in (record["measured"], record.get("earlier") or {}):
            if figures.get("torch_ms") and figures.get("ms") and figures.get("speedup"):
                assert figures["torch_ms"] / figures["ms"] == pytest.approx(figures["speedup"], rel=0.02), record[
                    "name"
                ]
            if figures.get("tflops") and figures.get("ms") and "M" in record["sizes"]:
                flops = 2 * record["sizes"]["M"] * record["sizes"]["N"] * record["sizes"]["K"]
                # Of a rank: it multiplies all of what is gathered, and a part of what is added up or sent.
                flops /= 1 if operation == OPERATION else record["world"]
                assert flops / figures["ms"] / 1e9 == pytest.approx(figures["tflops"], rel=0.02), record["name"]


def test_the_best_speedup_of_a_set_is_that_of_its_entries():
    for operation, machine in SHIPPED:
        data = document("tuned", operation, f"{machine}.json")
        for group in data.get("sets", ()):
            own = [
                r["measured"]["speedup"] or (r.get("earlier") or {}).get("speedup") or 0.0
                for r in data["entries"]
                if (r["world"], r["options"], r["link"]) == (group["world"], group["options"], group["link"])
            ]
            assert group["best_speedup"] == (max(own) if any(own) else None)


def test_all_published_cases_of_mi300x_are_there():
    cases = tables.cases(OPERATION, "mi300x")
    assert {world: sum(case.world == world for case in cases) for world in (2, 4, 8)} == {2: 7, 4: 9, 8: 12}
    assert sum(case.beats_torch is True for case in cases) == 7
    assert sum(case.beats_torch is None for case in cases) == 9
    eight = {case.entry.name: case.entry.speedup for case in cases if case.world == 8}
    assert eight == {
        "g2": 1.343, "g14": 1.288, "g15": 1.284, "g16": 1.277, "g5": 1.224, "g6": 1.2, "g1": 1.136, "g8": 0.857,
        "g9": 0.854, "mixtral_gate": 0.703, "llama7b_gate": 0.551, "pow2_4k": 0.527,
    }  # fmt: skip


def test_all_published_cases_of_mi355x_are_there_and_lose():
    cases = tables.cases(OPERATION, "mi355x")
    assert len(cases) == 10
    assert all(case.beats_torch is False for case in cases)
    assert [min(c.entry.speedup for c in cases), max(c.entry.speedup for c in cases)] == [0.655, 0.882]
    # 8192x8192x8192 was published with 1.468x, did not come again, and is no entry.
    assert tables.exact(query(8192, 8192, 8192, machine="mi355x")) is None
    (dropped,) = document("tuned", OPERATION, "mi355x.json")["dropped"]
    assert (dropped["name"], dropped["earlier"]["speedup"]) == ("m1", 1.468)
    assert "not reproduce" in dropped["reason"]


def test_a_comparison_of_an_earlier_measurement_says_so():
    case = tables.exact(query(262144, 8192, 8192, machine="mi355x"))
    assert (case.milliseconds, case.torch_milliseconds, case.speedup) == (37.558, None, 0.882)
    assert "earlier measurement" in case.source


def test_an_entry_has_absolute_time_and_hardware_beside_its_speedup():
    for operation, machine in SHIPPED:
        for case in tables.cases(operation, machine):
            assert case.entry.milliseconds > 0
            assert len(case.entry.source.split()) > 5
    found = tables.exact(G2)
    assert (found.milliseconds, found.speedup) == (167.345, 1.343)
    for part in ("8x AMD Instinct MI300X", "pull request 506", "not with this library's kernel", "not published"):
        assert part in found.source


def test_what_is_shipped_is_listed():
    shipped = {(one.operation, one.machine): one for one in tables.files()}
    mi300x = shipped[OPERATION, "mi300x"]
    assert (mi300x.entries, mi300x.worlds, mi300x.links) == (28, (2, 4, 8), ("xgmi",))
    assert "MI300X" in mi300x.source
    assert shipped[OPERATION, "mi355x"].entries == 10


def test_the_defaults_that_entries_leave_out_are_those_of_the_configurations():
    assert {field.name: field.default for field in fields(HbmBufferConfig)} == dict(tables.FUSED_DEFAULTS)


@pytest.mark.parametrize(("operation", "machine"), [one for one in SHIPPED if "all_gather_matmul" in one[0]])
def test_every_shipped_configuration_is_valid(operation, machine):
    for case in tables.cases(operation, machine):
        HbmBufferConfig(**case.entry.params).validate(case.world)
    for group in tables.load(operation, machine).groups:
        HbmBufferConfig(**(group.defaults or {})).validate(group.world)


def test_a_configuration_has_one_key_whether_defaults_are_written_out_or_not(made):
    made([entry(64, 64, 64, 2.0, params=PARAMS), entry(128, 64, 64, 2.0, params={**PARAMS, "k_per_flag": 8})])
    first, second = tables.exact(query(64, 64, 64)), tables.exact(query(128, 64, 64))
    assert first.key == second.key == config_key("hbm_buffer", {"block_size_m": 128, "block_size_n": 256})


def test_published_times_of_another_machine_are_no_table():
    data = document("published", "all_gather_matmul_mi325x.json")
    assert (data["machine"], len(data["entries"])) == ("mi325x", 18)
    assert (OPERATION, "mi325x") not in SHIPPED
    row = next(r for r in data["entries"] if r["name"] == "new defaults, M=16384" and r["world"] == 8)
    assert row["measured"] == {"ms": 6.279, "torch_ms": None, "speedup": None, "baseline_ms": 29.48}


# What they say of a problem.


def test_an_exact_case_is_found():
    found = tables.exact(G2)
    assert (found.name, found.algorithm, found.speedup) == ("g2", "hbm_buffer", 1.343)
    config = HbmBufferConfig(**found.params)
    assert (config.block_size_m, config.block_size_n, config.group_size_m) == (256, 256, 24)
    assert (config.k_per_flag, config.num_fetch_sms, config.num_fetch_stages) == (32, 4, 64)


def test_float16_and_bfloat16_are_one():
    assert tables.exact(replace(G2, dtype="bfloat16")) is tables.exact(G2)
    assert tables.exact(replace(G2, dtype="float32")) is None
    assert (tables.dtype_class("bfloat16"), tables.dtype_class("int8")) == ("16-bit", "int8")


@pytest.mark.parametrize(
    "change",
    [
        {"world": 16},
        {"link": "nvlink"},
        {"operation": "matmul_all_reduce"},
        {"sizes": (("M", 131072), ("N", 16384), ("K", 16385))},
        {"options": (("gather_dim", "0"), ("transpose", "NN"))},
        {"options": (("gather_dim", "1"), ("transpose", "NT"))},
        {"options": ()},
    ],
)
def test_an_exact_case_is_of_just_this_problem(change):
    assert tables.exact(replace(G2, **change)) is None


@pytest.mark.parametrize("machine", [name for name in KNOWN if name != "mi300x"])
def test_no_machine_borrows_the_table_of_another(machine):
    asked = query(131072, 16384, 16384, machine=machine)
    for found in (tables.exact(asked), tables.nearest(asked)):
        assert found is None
    near = query(130000, 16000, 16384, machine=machine)
    assert tables.nearest(near) is None
    if machine == "mi325x":
        assert tables.disabled(query(131072, 16384, 16384, world=2, machine=machine)) == ""


def test_a_device_that_is_not_known_has_no_table():
    unknown = replace(G2, machine="", arch="gfx942")
    assert (tables.exact(unknown), tables.nearest(unknown), tables.disabled(unknown)) == (None, None, "")


def test_the_nearest_case_is_within_15_percent_of_its_own_sizes():
    assert tables.nearest(query(131072 * 115 // 100, 16384, 16384)).name == "g2"
    assert tables.nearest(query(131072 * 115 // 100 + 2, 16384, 16384)) is None
    assert tables.nearest(query(131072 * 86 // 100, 16384, 16384)).name == "g2"
    assert tables.nearest(query(131072 * 84 // 100, 16384, 16384)) is None
    assert tables.nearest(query(131072, 16384, 20000)) is None
    assert tables.nearest(G2) is tables.exact(G2)


def test_the_least_distance_in_logarithms_decides(made):
    made([entry(1000, 1000, 1000, 2.0), entry(1100, 1000, 1000, 3.0)])
    assert tables.nearest(query(1040, 1000, 1000)).name == "e0"
    assert tables.nearest(query(1060, 1000, 1000)).name == "e1"
    # 1048.8 is as far from both in logarithms, and the first of equal ones is taken below it.
    assert tables.nearest(query(1048, 1000, 1000)).name == "e0"
    assert tables.nearest(query(1049, 1000, 1000)).name == "e1"


def test_of_equally_near_cases_the_first_is_taken(made):
    made([entry(1000, 1000, 1000, 2.0, options={"transpose": "NN"}), entry(1000, 1000, 1000, 3.0)])
    assert tables.nearest(query(1010, 1000, 1000)).name == "e0"


def test_a_nearer_case_that_loses_is_passed_over(made):
    made([entry(1000, 1000, 1000, 0.9), entry(1100, 1000, 1000, 1.1)])
    assert tables.nearest(query(1001, 1000, 1000)).name == "e1"
    assert tables.nearest_slower(query(1001, 1000, 1000)) is None, "a faster one is near"
    assert tables.nearest_slower(query(900, 1000, 1000)).name == "e0"


def test_an_unknown_speedup_is_no_win(made):
    made([entry(1000, 1000, 1000, None)])
    asked = query(1000, 1000, 1000)
    assert tables.exact(asked).name == "e0"
    assert tables.beats_torch(tables.exact(asked)) is None
    assert (tables.nearest(asked), tables.nearest_slower(asked), tables.disabled(asked)) == (None, None, "")


def test_as_fast_as_torch_is_no_win(made):
    made([entry(1000, 1000, 1000, 1.0), entry(2000, 1000, 1000, 3.0, algorithm="torch", params={})])
    for M in (1000, 2000):
        assert tables.beats_torch(tables.exact(query(M, 1000, 1000))) is False
        assert tables.nearest(query(M, 1000, 1000)) is None


def test_an_option_that_an_entry_does_not_have_fits_all(made):
    made([entry(64, 64, 64, 2.0, options={"gather_dim": "1"})])
    for transpose in ("NN", "NT", "TN", "TT"):
        assert tables.exact(query(64, 64, 64, transpose=transpose)).name == "e0"
    assert tables.exact(query(64, 64, 64, options=(("gather_dim", "0"),))) is None
    assert tables.exact(query(64, 64, 64, options=())) is None


def test_units_are_compared_where_an_entry_has_them(made):
    made([entry(64, 64, 64, 2.0, units=38)])
    assert tables.exact(query(64, 64, 64)) is None
    assert tables.exact(query(64, 64, 64, units=38)).name == "e0"


def test_real_links_come_before_imitated_ones(made):
    made([entry(64, 64, 64, 2.0, emulated=True), entry(64, 64, 64, 1.5)])
    found = tables.exact(query(64, 64, 64))
    assert (found.name, found.emulated) == ("e1", False)


def test_collectives_are_found_by_bytes(made):
    made(
        [{"sizes": {"bytes": 65536}, "dtype": "any", "algorithm": "one_shot", "params": {"block_size_m": 256},
          "measured": {"ms": 0.01, "torch_ms": 0.02, "speedup": 2.0}}],
        operation="all_reduce",
    )  # fmt: skip
    asked = query(1, 1, 1, operation="all_reduce", sizes=(("bytes", 65536),), dtype="int8", options=())
    found = tables.exact(asked)
    assert (found.algorithm, found.milliseconds, found.torch_milliseconds) == ("one_shot", 0.01, 0.02)
    assert found.params == {"block_size_m": 256}, "the defaults of fused operations are not those of collectives"
    assert tables.nearest(replace(asked, sizes=(("bytes", 70000),))) is found
    assert tables.nearest(replace(asked, sizes=(("bytes", 100000),))) is None


def test_sets_that_are_off_say_why():
    two, four = tables.disabled(query(1, 2, 3, world=2)), tables.disabled(query(1, 2, 3, world=4))
    assert "2 ranks (best 0.887x)" in two
    assert "4 ranks (best 0.856x)" in four
    for transpose in ("NT", "TN", "TT"):
        assert "not measured" in tables.disabled(query(1, 2, 3, world=4, transpose=transpose))
        assert tables.disabled(query(1, 2, 3, world=8, transpose=transpose)) == ""
    assert tables.disabled(query(1000, 2000, 3000)) == ""


def test_a_number_of_ranks_without_a_set_is_off_below_the_least():
    assert tables.disabled(query(1, 2, 3, world=3)).startswith("world_size=3 < min_world_size=8")
    assert tables.disabled(query(1, 2, 3, world=16)) == ""


def test_where_every_measured_case_loses_the_set_is_off():
    assert tables.disabled(query(1, 2, 3, machine="mi355x")) == (
        "none of the 10 measured cases was faster than PyTorch (best 0.882x)"
    )
    assert tables.disabled(query(1, 2, 3, world=4, machine="mi355x")) == "", "nothing was measured with 4 ranks"


def test_near_a_case_that_loses_nothing_is_to_be_won():
    assert "pow2_4k" in tables.disabled(query(4100, 4000, 4096))
    assert tables.disabled(query(5000, 5000, 5000)) == ""


def test_what_does_not_fit_is_off(made):
    made([entry(64, 64, 64, 2.0, fits=False, why="it needs 70000 bytes of shared memory")])
    asked = query(64, 64, 64)
    assert tables.disabled(asked) == "it needs 70000 bytes of shared memory"
    assert (tables.exact(asked), tables.nearest(asked)) == (None, None)


def test_sets_have_defaults_and_evidence():
    assert tables.group_of(G2).measured
    for transpose in ("NT", "TN", "TT"):
        group = tables.group_of(query(1, 2, 3, transpose=transpose))
        assert (group.evidence, group.measured, group.enabled) == ("extrapolated from NN", False, True)
        assert (group.defaults["k_per_flag"], group.defaults["first_stage_fetch_sms"]) == (8, 64)
    assert tables.group_of(query(1, 2, 3, world=16)) is None


def test_what_is_given_out_cannot_be_changed():
    found, group = tables.exact(G2), tables.group_of(G2)
    for change in (
        lambda: found.params.update(k_per_flag=1),
        lambda: found.params.__setitem__("k_per_flag", 1),
        lambda: group.defaults.__setitem__("k_per_flag", 1),
        lambda: group.options.__setitem__("transpose", "TT"),
    ):
        with pytest.raises((TypeError, AttributeError)):
            change()
    with pytest.raises(FrozenInstanceError):
        found.speedup = 2.0


def test_another_schema_is_refused():
    with pytest.raises(ValueError, match="all_gather_matmul on mi300x has schema 2"):
        tables.parse({"schema": 2, "operation": OPERATION, "machine": "mi300x"})
