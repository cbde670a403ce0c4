"""Benchmarks that are declared: functions with axes, measured on all ranks, checked before they are timed.

import iris.bench as bench

@bench.register
@bench.axis("num_ranks", [2, 4])
@bench.axis("M", bench.power_of_two(10, 14))
def copy(state, ctx):
    source = bench.random_tensor((state["M"],), torch.float16, seed=1, rank=ctx.get_rank(), device=ctx.get_device())
    target = torch.empty_like(source)
    state.set_bytes(2 * source.nbytes)
    state.validate(target, source.double())
    state.exec(lambda: target.copy_(source))

if __name__ == "__main__":
    bench.main()
"""

from iris.bench._main import main
from iris.bench.declare import AxisDef, BenchmarkDef, axis, linear_range, power_of_two, register
from iris.bench.results import Result
from iris.bench.state import State
from iris.runtime.numeric import random_tensor

__all__ = [
    "AxisDef",
    "BenchmarkDef",
    "Result",
    "State",
    "axis",
    "linear_range",
    "main",
    "power_of_two",
    "random_tensor",
    "register",
]
