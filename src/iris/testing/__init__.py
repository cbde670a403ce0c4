"""What tests of kernels need: a pool of rank processes, slow references, tolerances with reasons.

:class:`iris.testing.ranks.RankPool` runs a function on every rank of a pool of processes, :mod:`iris.testing.numeric`
makes data and compares results, and :mod:`iris.testing.reference` holds what the operations compute.
"""

from iris.testing.numeric import assert_bitwise_equal, assert_close, random_tensor
from iris.testing.ranks import Outcome, RankDied, RankHung, RankPool, RanksFailed

__all__ = [
    "Outcome",
    "RankDied",
    "RankHung",
    "RankPool",
    "RanksFailed",
    "assert_bitwise_equal",
    "assert_close",
    "random_tensor",
]
