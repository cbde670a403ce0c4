"""FusedConfig: what it accepts, what it says about a wrong field, and how much shared memory it takes."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from iris.errors import ArgumentError
from iris.ops import FusedConfig
from iris.ops.config import ALL_REDUCE_VARIANTS


def test_the_defaults_are_valid():
    FusedConfig().validate()
    FusedConfig().validate(world_size=7)


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_blocks_are_powers_of_two(size):
    FusedConfig(size, size, size).validate()


@pytest.mark.parametrize(
    ("field", "values", "possible"),
    [
        ("block_size_m", (0, -16, 8, 17, 48, 100), "a power of two of at least 16"),
        ("block_size_n", (0, -16, 8, 17, 48, 100), "a power of two of at least 16"),
        ("block_size_k", (0, -16, 8, 17, 48, 100), "a power of two of at least 16"),
        ("group_size_m", (0, -1), "above 0"),
        ("num_xcds", (0, -1), "above 0"),
        ("chunk_size", (0, -1), "above 0"),
        ("all_reduce_num_rings", (0, -1), "above 0"),
        ("num_stages", (0, -1), "above 0"),
        ("num_sms", (0, -3), "None or above 0"),
        ("num_warps", (0, 3, 32, -4), "1, 2, 4, 8 or 16"),
        ("all_reduce_variant", ("", "fast", None), "one of atomic, ring, one_shot, two_shot, spinlock"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_possible(field, values, possible):
    for value in values:
        with pytest.raises(ArgumentError) as caught:
            replace(FusedConfig(), **{field: value}).validate()
        text = str(caught.value)
        assert text.startswith(f"FusedConfig.{field} must be")
        assert possible in text
        assert text.endswith(f"got {value!r}")


@pytest.mark.parametrize("variant", ALL_REDUCE_VARIANTS)
def test_the_ring_divides_the_columns_among_the_ranks(variant):
    config = FusedConfig(block_size_n=64, all_reduce_variant=variant)
    for world in (1, 2, 4, 8, None):
        config.validate(world)
    if variant == "ring":
        with pytest.raises(ArgumentError, match="block_size_n=64 must be a multiple of world_size=3"):
            config.validate(3)
    else:
        config.validate(3)


def test_a_configuration_is_a_value():
    config = FusedConfig(num_warps=4)
    assert config == FusedConfig(num_warps=4)
    assert len({config, FusedConfig(num_warps=4), FusedConfig()}) == 2
    with pytest.raises(FrozenInstanceError):
        config.num_warps = 8


def test_positional_order():
    """Programs written for other releases pass the first fields by position."""
    names = [f.name for f in fields(FusedConfig)]
    assert names[:6] == ["block_size_m", "block_size_n", "block_size_k", "group_size_m", "num_sms", "num_xcds"]


def test_shared_memory_holds_a_tile_of_a_and_of_b_for_each_stage():
    config = FusedConfig(128, 256, 64, num_stages=3)
    assert config.shared_memory_bytes(2, 2) == 3 * (128 * 64 * 2 + 64 * 256 * 2)
    assert config.shared_memory_bytes(1, 4) == 3 * (128 * 64 * 1 + 64 * 256 * 4)
    assert replace(config, num_stages=1).shared_memory_bytes(2, 2) == 128 * 64 * 2 + 64 * 256 * 2


def test_the_text_tells_what_differs_between_plans():
    text = str(FusedConfig(64, 128, 32, group_size_m=4, num_warps=8, num_stages=3))
    for part in ("64x128x32", "4", "8 warps", "3 stages"):
        assert part in text
