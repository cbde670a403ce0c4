"""Rules: the published ones give the published configurations, and what the form of the files means."""

import json
from importlib import resources

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iris._target import KNOWN
from iris.ops.arguments import Problem
from iris.ops.choice import Place, configured
from iris.ops.config import HbmBufferConfig
from iris.tuning import heuristics
from iris.tuning.query import Query
from iris.tuning.selection import Selection

OPERATION = "all_gather_matmul"
MACHINES = [machine for operation, machine in heuristics.files() if operation == OPERATION]


def features(M=131072, N=16384, K=16384, world=8, **others):
    usual = {"M": M, "N": N, "K": K, "world": world, "units": 304, "link": "xgmi", "dtype": "16-bit"}
    return usual | {"gather_dim": "1", "transpose": "NN"} | others


def rules(machine, **sizes):
    return heuristics.configuration(machine, OPERATION, features(**sizes))


@pytest.fixture
def made(monkeypatch):
    """Puts rules of one's own in the place of mi300x's."""

    def use(groups, **others):
        data = {"schema": 1, "provenance": {"here": {"hardware": "a machine", "source": "a test"}}, "groups": groups}
        monkeypatch.setattr(heuristics, "_load", lambda operation, machine: data | others)

    return use


@pytest.mark.parametrize(
    ("M", "N", "K", "expected"),
    [
        (4096, 4096, 4096, {"block_size_m": 128, "group_size_m": 8, "k_per_flag": 8, "num_fetch_sms": 16}),
        (16384, 16384, 131072, {"block_size_m": 128, "group_size_m": 16, "k_per_flag": 64, "num_fetch_sms": 32}),
        (327680, 28672, 4096, {"block_size_m": 256, "group_size_m": 24, "k_per_flag": 8, "num_fetch_sms": 52}),
        (131072, 16384, 16384, {"block_size_m": 256, "group_size_m": 24, "k_per_flag": 16}),
        (8192, 8192, 262144, {"block_size_m": 128, "group_size_m": 8, "k_per_flag": 64}),
    ],
)
def test_published_examples(M, N, K, expected):
    given_params = rules("mi300x", M=M, N=N, K=K)
    assert {name: given_params[name] for name in expected} == expected
    fixed = {"block_size_n": 256, "block_size_k": 64, "num_warps": 8, "num_stages": 2, "num_xcds": 8}
    assert {name: given_params[name] for name in fixed} == fixed


def test_rules_of_mi355x():
    assert rules("mi355x", M=32768, K=4096) == {
        "block_size_m": 256, "block_size_n": 256, "block_size_k": 64, "num_warps": 8, "num_stages": 2, "num_xcds": 8,
        "allow_tf32": True, "num_fetch_sms": 16, "num_fetch_stages": 1, "first_stage_fetch_sms": 52,
        "group_size_m": 4, "k_per_flag": 8,
    }  # fmt: skip
    more = rules("mi355x", M=32769, K=65536)
    assert (more["group_size_m"], more["k_per_flag"]) == (8, 16)


def test_blocks_of_a_flag_divide_those_of_k():
    # 172 blocks of K: 16 does not divide them, nor does 8.
    assert rules("mi300x", M=4096, N=4096, K=11008)["k_per_flag"] == 4
    # 171 blocks have no power of two.
    assert rules("mi300x", M=4096, N=4096, K=10944)["k_per_flag"] == 1


@pytest.mark.parametrize("machine", MACHINES)
@settings(deadline=None, max_examples=60)
@given(M=st.integers(1, 1 << 20), N=st.integers(1, 1 << 16), K=st.integers(1, 1 << 19))
def test_rules_give_valid_configurations_for_all_sizes(machine, M, N, K):
    target = KNOWN[machine]
    for world in (1, 2, 3, 4, 8, 16):
        for transpose in ("NN", "NT", "TN", "TT"):
            for gather_dim in ("0", "1"):
                asked = features(
                    M, N, K, world, transpose=transpose, gather_dim=gather_dim, units=target.compute_units,
                    link="xgmi" if target.vendor == "amd" else "nvlink",
                )  # fmt: skip
                params = heuristics.configuration(machine, OPERATION, asked)
                if params is not None and params.get("algorithm", "hbm_buffer") == "hbm_buffer":
                    params.pop("algorithm", None)
                    problem = Problem(M, N, K, *[torch.float16] * 3, world, int(gather_dim), None, transpose)
                    place = Place(target, target.link)
                    config = configured(place, problem, Selection("rule", "hbm_buffer", params, None, ""))
                    assert isinstance(config, HbmBufferConfig)
                    config.validate(world)


@pytest.mark.parametrize(
    "others",
    [{"world": 4}, {"world": 16}, {"gather_dim": "0"}, {"dtype": "float32"}, {"link": "shared"}],
)
def test_rules_are_for_what_they_were_derived_from(others):
    assert rules("mi300x") is not None
    assert heuristics.configuration("mi300x", OPERATION, features() | others) is None


def test_no_machine_borrows_the_rules_of_another():
    for machine in ("mi325x", "mi350x", "", "v100"):
        assert heuristics.configuration(machine, OPERATION, features()) is None
        assert heuristics.source(machine, OPERATION) == heuristics.algorithm(machine, OPERATION) == ""
    assert heuristics.configuration("mi300x", "all_reduce", features()) is None


def test_rules_say_where_they_come_from():
    for machine in ("mi300x", "mi355x"):
        assert heuristics.algorithm(machine, OPERATION) == "hbm_buffer"
        for part in (machine.upper(), "ROCm/iris pull request", "not this library's"):
            assert part in heuristics.source(machine, OPERATION)
    assert {(OPERATION, "mi300x"), (OPERATION, "mi355x")} <= set(heuristics.files())


@pytest.mark.parametrize(("operation", "machine"), heuristics.files())
def test_every_file_keeps_to_the_schema(operation, machine):
    place = resources.files("iris.tuning") / "data" / "heuristics" / operation / f"{machine}.json"
    data = json.loads(place.read_text())
    assert (data["schema"], data["operation"], data["machine"]) == (1, operation, machine)
    assert data["arch"] == KNOWN[machine].arch
    assert all(one["hardware"] and one["source"] for one in data["provenance"].values())
    for group in data["groups"]:
        assert set(group) <= {"derive", "rules", "halve"}
        assert all(set(rule) <= {"when", "then"} and rule["then"] for rule in group["rules"])


def test_features_of_a_problem():
    asked = Query(
        OPERATION, "h200", "sm_90", "nvlink", 4, 132, "bfloat16", (("M", 1), ("N", 2), ("K", 3)),
        (("gather_dim", "0"), ("transpose", "NT")), (("bias", "1"),),
    )  # fmt: skip
    assert heuristics.features_of(asked) == {
        "M": 1, "N": 2, "K": 3, "world": 4, "units": 132, "link": "nvlink", "dtype": "16-bit", "gather_dim": "0",
        "transpose": "NT",
    }  # fmt: skip


def test_the_first_rule_that_fits_wins_and_groups_merge(made):
    made(
        [
            {"rules": [{"when": {"M": {"max": 10}}, "then": {"a": 1}}, {"when": {"M": {"max": 20}}, "then": {"a": 2}}]},
            {"rules": [{"when": {"N": {"min": 5}}, "then": {"b": 3, "a": 9}}, {"then": {"b": 4}}]},
        ]
    )
    assert rules("mi300x", M=10, N=4) == {"a": 1, "b": 4}
    assert rules("mi300x", M=11, N=4) == {"a": 2, "b": 4}
    assert rules("mi300x", M=20, N=5) == {"a": 9, "b": 3}
    assert rules("mi300x", M=21, N=4) == {"b": 4}, "a group whose rules do not fit sets nothing"


def test_later_groups_see_what_earlier_ones_set_and_derive(made):
    made(
        [
            {"rules": [{"then": {"tile": 64}}]},
            {"derive": {"tiles": "M // tile", "work": "tiles * 3"}, "rules": [
                {"when": {"tiles": 2, "work": {"min": 6, "max": 6}, "tile": [32, 64]}, "then": {"found": True}}]},
        ]
    )  # fmt: skip
    assert rules("mi300x", M=191) == {"tile": 64, "found": True}
    assert rules("mi300x", M=192) == {"tile": 64}


def test_a_fault_of_a_file_is_named(made):
    made([{"derive": {"x": "M - 1"}, "rules": [{"then": {"a": 1}}]}])
    with pytest.raises(ValueError, match="'M - 1'; possible: 'A // B' and 'A \\* B'"):
        rules("mi300x")
    made([{"rules": [{"when": {"missing": 1}, "then": {"a": 1}}]}])
    with pytest.raises(KeyError, match="missing"):
        rules("mi300x")


def test_what_is_given_out_is_a_copy():
    first = rules("mi300x")
    first["k_per_flag"] = 99
    assert rules("mi300x")["k_per_flag"] == 16
