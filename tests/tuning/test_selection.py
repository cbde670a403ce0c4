"""What is selected from what is known of a problem, in which order, and why."""

from dataclasses import FrozenInstanceError, replace

import pytest

from iris._target import KNOWN
from iris.tuning import heuristics, selection, tables
from iris.tuning.query import Query, config_key
from iris.tuning.selection import packaged_key, select
from made_tables import case, forget, instead, record

OPERATION = "all_gather_matmul"
TORCH_KEY = config_key("torch", {})
MINE, THEIRS = {"block_size_m": 128, "k_per_flag": 4}, {"block_size_m": 64, "k_per_flag": 2}
RULE = {"block_size_m": 32}


def query(M=4096, N=2048, K=1024, world=8, transpose="NN", gather_dim="1", machine="mi300x", **others):
    asked = Query(
        OPERATION, machine, KNOWN[machine].arch, "xgmi", world, KNOWN[machine].compute_units, "float16",
        (("M", M), ("N", N), ("K", K)), (("gather_dim", gather_dim), ("transpose", transpose)),
    )  # fmt: skip
    return replace(asked, **others)


QUERY = query()


@pytest.fixture
def files():
    """Nothing is shipped but a test's own."""
    with instead() as files:
        yield files


@pytest.fixture
def everything(files):
    """A case for just this problem, one near to it, and a rule."""
    files.table(
        OPERATION, "mi300x", case(4096, 2048, 1024, 1.25, params=MINE), case(4200, 2048, 1024, 1.5, params=THEIRS)
    )
    files.rules(OPERATION, "mi300x", RULE, algorithm="hbm_buffer")


def chosen(found):
    return found.kind, found.algorithm, dict(found.params), found.speedup


def test_what_was_measured_for_just_this_problem_comes_first(everything):
    found = select(QUERY)
    assert chosen(found) == ("exact", "hbm_buffer", MINE, 1.25)
    assert found.source == "exact"
    assert found.entry == tables.exact(QUERY)
    for part in ("just this problem", "case0", "1.25x PyTorch", "1 ms", "a machine", "a test"):
        assert part in found.reason


def test_a_record_that_never_met_the_packaged_case_comes_after_it(everything):
    for met in ("", TORCH_KEY, config_key("hbm_buffer", THEIRS), config_key("pull", MINE)):
        assert chosen(select(QUERY, record(QUERY, "pull", met, block_size_m=16))) == chosen(select(QUERY))


def test_a_record_that_was_measured_against_the_packaged_case_comes_before_it(everything):
    assert packaged_key(QUERY) == config_key("hbm_buffer", MINE)
    found = select(QUERY, record(QUERY, "pull", packaged_key(QUERY), block_size_m=16))
    assert chosen(found) == ("cache", "pull", {"block_size_m": 16}, 1.5)
    assert found.source == "cache"
    for part in ("tuned on this machine", "2 ms", "a test"):
        assert part in found.reason


def test_a_record_is_of_no_use_once_the_package_has_another_case(files):
    files.table(OPERATION, "mi300x", case(4096, 2048, 1024, 1.25, params=MINE))
    tuned = record(QUERY, "pull", packaged_key(QUERY))
    assert select(QUERY, tuned).kind == "cache"
    files.table(OPERATION, "mi300x", case(4096, 2048, 1024, 1.3, params=THEIRS))
    assert chosen(select(QUERY, tuned)) == ("exact", "hbm_buffer", THEIRS, 1.3)


def test_a_record_comes_before_what_is_near_and_what_rules_say(everything):
    near = query(M=4128)
    assert select(near).kind == "nearest"
    assert select(near, record(near, "pull")).source == "cache"
    far = query(M=64)
    assert select(far).kind == "rule"
    assert select(far, record(far, "pull")).source == "cache"


def test_a_record_comes_before_a_set_that_is_off(files):
    files.table(OPERATION, "mi300x", sets=[{"enabled": False, "reason": "too slow"}])
    assert select(QUERY).kind == "disabled"
    assert chosen(select(QUERY, record(QUERY, "pull", TORCH_KEY)))[:2] == ("cache", "pull")


def test_torch_may_be_what_tuning_found(everything):
    found = select(QUERY, record(QUERY, "torch", packaged_key(QUERY), speedup=1.0))
    assert chosen(found)[:3] == ("cache", "torch", {})
    assert found.source == "cache"


@pytest.mark.parametrize("speedup", [0.854, 1.0])
def test_what_was_not_faster_than_torch_is_not_taken(files, speedup):
    files.table(OPERATION, "mi300x", case(4096, 2048, 1024, speedup, params=MINE))
    files.rules(OPERATION, "mi300x", RULE, algorithm="hbm_buffer")
    found = select(QUERY)
    assert chosen(found) == ("exact", "torch", {}, None)
    assert found.source == "fallback"
    assert f"{speedup:.3g}x PyTorch, so PyTorch's operations run" in found.reason
    assert found.entry.speedup == speedup
    # A near case that won does not matter then.
    files.table(OPERATION, "mi300x", case(4096, 2048, 1024, speedup), case(4100, 2048, 1024, 2.0))
    assert select(QUERY).algorithm == "torch"


def test_where_torch_was_the_best_it_runs(files):
    files.table(OPERATION, "mi300x", case(4096, 2048, 1024, 1.0, algorithm="torch"))
    found = select(QUERY)
    assert chosen(found) == ("exact", "torch", {}, None)
    assert found.source == "fallback"
    assert "PyTorch's operations were the fastest" in found.reason


def test_what_was_never_compared_with_torch_is_no_win(files):
    files.table(OPERATION, "mi300x", case(4096, 2048, 1024, None, params=MINE))
    found = select(QUERY)
    assert chosen(found) == ("exact", "torch", {}, None)
    assert found.source == "fallback"
    assert "never compared with PyTorch's operations" in found.reason
    # A record was compared with what the package had: PyTorch's operations.
    assert packaged_key(QUERY) == TORCH_KEY
    assert select(QUERY, record(QUERY, "pull", TORCH_KEY)).kind == "cache"


def test_a_set_that_is_off_is_left_to_torch(files):
    files.rules(OPERATION, "mi300x", RULE, algorithm="hbm_buffer")
    files.table(
        OPERATION, "mi300x", case(4096, 2048, 1024, 1.5), sets=[{"enabled": False, "reason": "there is little to hide"}]
    )
    for asked in (QUERY, query(M=4100), query(M=64)):
        found = select(asked)
        assert chosen(found) == ("disabled", "torch", {}, None)
        assert found.source == "fallback"
        assert found.reason.startswith("there is little to hide (a machine")
        assert (found.entry is not None) == (asked is QUERY)
        assert packaged_key(asked) == TORCH_KEY
    # Other ranks are another set.
    assert select(query(world=4)).kind == "rule"


def test_a_kernel_that_does_not_fit_the_machine_is_left_to_torch(files):
    files.table(OPERATION, "mi300x", case(4096, 2048, 1024, 1.5, fits=False, why="it needs too much shared memory"))
    found = select(QUERY)
    assert chosen(found)[:2] == ("disabled", "torch")
    assert "it needs too much shared memory" in found.reason


def test_fewer_ranks_than_were_measured_are_left_to_torch(files):
    files.table(OPERATION, "mi300x", case(4096, 2048, 1024, 1.5), least_world=8)
    found = select(query(world=3))
    assert chosen(found)[:2] == ("disabled", "torch")
    assert "world_size=3" in found.reason


def test_sizes_near_to_a_measured_case_take_its_configuration(everything):
    found = select(query(M=4300))
    assert chosen(found) == ("nearest", "hbm_buffer", THEIRS, 1.5)
    assert found.source == "nearest"
    for part in ("sizes near to these", "case1", "1.5x PyTorch"):
        assert part in found.reason


def test_sizes_near_to_a_case_that_lost_are_left_to_torch(files):
    files.rules(OPERATION, "mi300x", RULE, algorithm="hbm_buffer")
    files.table(OPERATION, "mi300x", case(4096, 2048, 1024, 0.7, params=MINE), case(65536, 2048, 1024, 1.5))
    found = select(query(M=4200))
    assert chosen(found) == ("nearest", "torch", {}, None)
    assert found.source == "fallback"
    assert "case0" in found.reason
    assert "0.7x PyTorch" in found.reason
    # Not when a case that is near, too, was faster.
    files.table(OPERATION, "mi300x", case(4096, 2048, 1024, 0.7), case(4500, 2048, 1024, 1.1, params=MINE))
    assert chosen(select(query(M=4200))) == ("nearest", "hbm_buffer", MINE, 1.1)


def test_where_nothing_that_was_compared_won_torch_runs_for_all_sizes(files):
    files.rules(OPERATION, "mi300x", RULE, algorithm="hbm_buffer")
    lost = case(4096, 2048, 1024, 0.7), case(8192, 2048, 1024, 0.8)
    files.table(OPERATION, "mi300x", *lost, sets=[{}])
    found = select(query(M=64))
    assert chosen(found)[:2] == ("disabled", "torch")
    assert "none of the 2 measured cases was faster than PyTorch (best 0.8x)" in found.reason
    # Without a set the cases speak for sizes near to theirs alone.
    files.table(OPERATION, "mi300x", *lost)
    assert select(query(M=64)).kind == "rule"


def test_a_rule_is_taken_where_no_case_is_near(everything):
    found = select(query(M=64))
    assert chosen(found) == ("rule", "hbm_buffer", RULE, None)
    assert found.source == "heuristic"
    assert found.entry is None
    for part in ("no measured case is near", "a rule of mi300x has hbm_buffer", "a machine"):
        assert part in found.reason


def test_a_rule_may_name_its_algorithm(files):
    files.rules(OPERATION, "mi300x", {"algorithm": "pull", **RULE}, algorithm="hbm_buffer")
    assert chosen(select(QUERY)) == ("rule", "pull", RULE, None)
    files.rules(OPERATION, "mi300x", {"algorithm": "torch", **RULE}, algorithm="hbm_buffer")
    found = select(QUERY)
    assert chosen(found) == ("rule", "torch", {}, None)
    assert found.source == "fallback"


def test_a_rule_of_a_set_that_was_extrapolated_says_so(files):
    files.rules(OPERATION, "mi300x", RULE, algorithm="hbm_buffer")
    files.table(
        OPERATION, "mi300x", sets=[{"evidence": "extrapolated from NN", "defaults": {"num_stages": 3, "num_warps": 4}}]
    )
    found = select(QUERY)
    # What the rules leave open the set has a default for.
    assert chosen(found) == ("rule", "hbm_buffer", {"num_stages": 3, "num_warps": 4} | RULE, None)
    assert "extrapolated from NN" in found.reason


def test_rules_of_a_set_that_was_never_validated_are_left_to_the_cost_model(files):
    files.rules(OPERATION, "mi300x", RULE, algorithm="hbm_buffer")
    files.table(OPERATION, "mi300x", sets=[{"evidence": "unvalidated defaults"}])
    assert select(QUERY) is None
    assert chosen(selection.unproven(QUERY))[:2] == ("rule", "hbm_buffer")
    assert selection.unproven(QUERY).rules_of == ""


def test_where_nothing_is_known_nothing_is_selected(files):
    assert select(QUERY) is None
    assert packaged_key(QUERY) == TORCH_KEY
    assert selection.unproven(QUERY) is None
    # Only what was tuned here.
    assert select(QUERY, record(QUERY, "pull")).kind == "cache"


def test_no_machine_takes_what_another_has(everything):
    relative = query(machine="mi325x")
    assert KNOWN["mi325x"].arch == KNOWN["mi300x"].arch
    assert select(relative) is None
    # The rule of its relative is for the cost model to consider, and says whose it is.
    rule = selection.unproven(relative)
    assert chosen(rule) == ("rule", "hbm_buffer", RULE, None)
    assert rule.rules_of == "mi300x"
    assert "mi300x, which has the same architecture gfx942" in rule.reason
    assert selection.unproven(query(machine="mi355x")) is None


@pytest.mark.parametrize(
    "other",
    [
        {"link": "pcie"}, {"world": 4}, {"dtype": "float32"}, {"operation": "matmul_all_gather"}, {"machine": ""},
        {"options": (("gather_dim", "0"), ("transpose", "NN"))},
        {"options": (("gather_dim", "1"), ("transpose", "NT"))},
        {"sizes": (("M", 2048), ("N", 4096), ("K", 1024))}, {"units": 20},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_a_case_is_for_what_it_was_measured_for(files, other):
    options = {"gather_dim": "1", "transpose": "NN"}
    units = KNOWN["mi300x"].compute_units
    files.table(OPERATION, "mi300x", case(4096, 2048, 1024, 1.5, options=options, units=units))
    assert select(QUERY).kind == "exact"
    assert select(replace(QUERY, **other)) is None


def test_what_a_kernel_is_compiled_for_beside_does_not_matter_to_a_case(everything):
    """Tables are for all of them; what was tuned is found by all of the query."""
    for details in ((("bias", "(2048,)"),), (("activation", "relu"), ("scaled", "True"))):
        assert chosen(select(replace(QUERY, details=details))) == chosen(select(QUERY))
    assert select(replace(QUERY, dtype="bfloat16")).kind == "exact"


def test_an_imitated_link_is_said(files):
    files.table(OPERATION, "mi300x", case(4096, 2048, 1024, 1.25, emulated=True))
    assert "over an imitated link" in select(QUERY).reason
    files.table(OPERATION, "mi300x", case(4096, 2048, 1024, 0.25, emulated=True))
    assert "over an imitated link" in select(QUERY).reason
    # What was measured over a real one comes first, wherever it stands.
    files.table(
        OPERATION, "mi300x", case(4096, 2048, 1024, 1.25, emulated=True), case(4096, 2048, 1024, 1.1, params=MINE)
    )
    assert chosen(select(QUERY)) == ("exact", "hbm_buffer", MINE, 1.1)
    assert "imitated" not in select(QUERY).reason


def test_a_selection_cannot_be_changed_and_is_remembered(everything):
    tuned = record(QUERY, "pull", packaged_key(QUERY))
    for given in ((QUERY,), (QUERY, tuned), (query(M=4300),), (query(M=64),)):
        found = select(*given)
        with pytest.raises(TypeError):
            found.params["block_size_m"] = 1
        with pytest.raises(FrozenInstanceError):
            found.algorithm = "torch"
        # Equal questions, not the same objects.
        assert select(*(replace(one) for one in given)) is found
        hash(found)
    assert select(QUERY) is not select(QUERY, tuned)
    # What a caller takes is its own.
    params = dict(select(QUERY).params)
    params["block_size_m"] = 1
    assert select(QUERY).params["block_size_m"] == 128


def test_a_rule_that_is_taken_leaves_the_rules_as_they_are(files):
    files.rules(OPERATION, "mi300x", {"algorithm": "pull", **RULE})
    first = chosen(select(QUERY))
    selection.select.cache_clear()
    assert chosen(select(QUERY)) == first
    assert heuristics.configuration("mi300x", OPERATION, heuristics.features_of(QUERY)) == {"algorithm": "pull", **RULE}


# What the package ships.


@pytest.fixture
def shipped():
    forget()
    yield
    forget()


def test_a_published_case_is_selected(shipped):
    found = select(query(131072, 16384, 16384))
    assert chosen(found)[:2] == ("exact", "hbm_buffer")
    assert found.speedup == 1.343
    assert "MI300X" in found.reason
    assert "upstream" in found.reason, "that another kernel was measured is said"


def test_every_case_of_the_package_is_selected_as_it_was_measured(shipped):
    """A win is taken, everything else is not, with whatever number of ranks and link."""
    seen = 0
    for operation, machine in tables.names("tuned"):
        for one in tables.cases(operation, machine):
            asked = Query(
                operation, machine, KNOWN[machine].arch, one.link, one.world,
                one.units or KNOWN[machine].compute_units, "float16", one.entry.sizes, tuple(one.options.items()),
            )  # fmt: skip
            if tables.exact(asked) is not one.entry:
                continue  # it was measured over a real link, too
            found, group = select(asked), tables.group_of(asked)
            seen += 1
            on = group is None or group.enabled
            if one.beats_torch and on:
                assert chosen(found) == ("exact", one.entry.algorithm, dict(one.entry.params), one.entry.speedup)
                assert packaged_key(asked) == one.entry.key
            else:
                assert (found.algorithm, found.source) == ("torch", "fallback")
                assert found.kind == ("exact" if on else "disabled")
                assert packaged_key(asked) == TORCH_KEY
            assert found.entry is one.entry
    assert seen >= 38  # of two machines
