"""FusedConfig and HbmBufferConfig: what they accept, what they say about a wrong field, how much memory they take."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from iris.errors import ArgumentError
from iris.ops import FusedConfig
from iris.ops.config import ALL_REDUCE_VARIANTS, STAGED_LAYOUTS, TRANSPORTS, HbmBufferConfig


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


def test_a_staging_buffer_has_fields_of_its_own():
    config = HbmBufferConfig(64, 64, 32, k_per_flag=3)
    assert isinstance(config, FusedConfig)
    config.validate(7)
    for layout in STAGED_LAYOUTS:
        replace(config, staged_a_layout=layout).validate()
    for transport in TRANSPORTS:
        replace(config, transport=transport).validate()
    replace(
        config, first_stage_fetch_sms=0, num_fetch_sms=10_000, num_fetch_stages=10_000, k_per_flag=10_000
    ).validate()
    assert config != FusedConfig(64, 64, 32)
    assert len({config, replace(config), replace(config, transport="copy_engine")}) == 2


@pytest.mark.parametrize(
    ("field", "values", "possible"),
    [
        ("k_per_flag", (0, -1), "above 0"),
        ("num_fetch_sms", (0, -1), "above 0"),
        ("num_fetch_stages", (0, -1), "above 0"),
        ("first_stage_fetch_sms", (-1,), "at least 0"),
        ("staged_a_layout", ("", "rows", None), "one of k_contiguous, m_contiguous"),
        ("transport", ("", "nvlink", None), "one of sm, copy_engine"),
    ],
)
def test_a_wrong_field_of_a_staging_buffer_is_named(field, values, possible):
    for value in values:
        with pytest.raises(ArgumentError) as caught:
            replace(HbmBufferConfig(), **{field: value}).validate()
        text = str(caught.value)
        assert text.startswith(f"HbmBufferConfig.{field} must be")
        assert possible in text
        assert text.endswith(f"got {value!r}")
    with pytest.raises(ArgumentError, match="block_size_m must be a power of two"):
        HbmBufferConfig(48).validate()


def test_copies_bring_rows_as_they_lie():
    config = HbmBufferConfig(transport="copy_engine", staged_a_layout="m_contiguous")
    with pytest.raises(ArgumentError, match=r"'copy_engine' takes staged_a_layout 'k_contiguous', got 'm_contiguous'"):
        config.validate()


def test_the_text_tells_how_shards_are_brought():
    config = HbmBufferConfig(k_per_flag=5, num_fetch_sms=6, num_fetch_stages=7, first_stage_fetch_sms=9)
    for part in (str(FusedConfig()), "5 blocks a flag", "6 fetchers", "9 for the first of 7 stages", "k_contiguous"):
        assert part in str(config)
    copied = str(replace(config, transport="copy_engine"))
    assert "copies in 7 stages" in copied
    assert "fetchers" not in copied
