"""Random data, tolerances and comparisons, for tests. :mod:`iris.bench` needs them too, so they live further down."""

from iris.runtime.numeric import (
    ROUNDING,
    assert_bitwise_equal,
    assert_close,
    random_like,
    random_tensor,
    tolerance,
)

__all__ = ["ROUNDING", "assert_bitwise_equal", "assert_close", "random_like", "random_tensor", "tolerance"]
