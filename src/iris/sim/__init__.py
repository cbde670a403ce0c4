"""The simulator: all ranks of a world in this process, deterministic, checked for races, deadlocks and bad accesses.

results = iris.sim.run(fn, world_size=4)             # fn(ctx) on every rank
iris.sim.explore(fn, world_size=4, seeds=range(100))
print(iris.sim.predict(fn, world_size=4, device="h200"))
"""

from iris.errors import (
    DeadlockError,
    MissingBarrierWarning,
    OutOfBoundsError,
    RaceError,
    SimulationError,
    StepLimitError,
    UninitializedReadError,
)
from iris.runtime.reports import (
    Access,
    BoundsReport,
    DeadlockReport,
    RaceReport,
    StepLimitReport,
    UninitializedReport,
    Waiter,
)
from iris.sim.prediction import Prediction, predict
from iris.sim.running import explore, run
from iris.sim.watcher import CHECKS

__all__ = [
    "CHECKS",
    "Access",
    "BoundsReport",
    "DeadlockError",
    "DeadlockReport",
    "MissingBarrierWarning",
    "OutOfBoundsError",
    "Prediction",
    "RaceError",
    "RaceReport",
    "SimulationError",
    "StepLimitError",
    "StepLimitReport",
    "UninitializedReadError",
    "UninitializedReport",
    "Waiter",
    "explore",
    "predict",
    "run",
]
