"""A plan reads as a sentence and is a value."""

from dataclasses import replace

from iris.ops import FusedConfig
from iris.tuning import Plan

PLAN = Plan("all_gather_matmul", "torch", None, "fallback", "it is faster", "64x128x256 float16 NN, 4 ranks")


def test_a_plan_without_a_kernel():
    assert str(PLAN) == "all_gather_matmul 64x128x256 float16 NN, 4 ranks: torch (fallback): it is faster"


def test_a_plan_with_a_configuration_and_a_speedup():
    config = FusedConfig(64, 128, 32)
    text = str(replace(PLAN, algorithm="pull", config=config, source="exact", speedup=1.256))
    assert text.startswith("all_gather_matmul 64x128x256 float16 NN, 4 ranks: pull (exact, expected 1.26x PyTorch): ")
    assert text.endswith(f"it is faster, {config}")


def test_equal_plans_are_one():
    assert len({PLAN, replace(PLAN), replace(PLAN, speedup=2.0)}) == 2
