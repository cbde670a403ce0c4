"""How the operands of a matrix product come to the kernel; see :mod:`iris.x.operands`."""

from iris.x.operands import describable as describable
from iris.x.operands import describe_a as describe_a
from iris.x.operands import describe_b as describe_b
from iris.x.operands import takes_descriptors as takes_descriptors
