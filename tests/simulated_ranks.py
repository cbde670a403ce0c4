"""Ranks as coroutines, with the interface of ``iris.testing.RankPool``."""

import traceback

import torch
import torch.distributed as dist

from iris.sim.running import simulate
from iris.testing import Outcome
from iris.testing.ranks import HEAP_BYTES


class SimulatedRanks:
    """Runs bodies in the simulator under all checks, or on the one GPU that the ranks share (``loopback``)."""

    def __init__(self, world_size, runtime, seed=0):
        self.seed = seed
        self.world_size = world_size
        self.runtime = runtime

    def run(self, body, *args, context=HEAP_BYTES, timeout=None, **kwargs):
        __tracebackhide__ = True
        hosts = self._simulate(body, args, kwargs, context, all_outcomes=False)
        return [_on_cpu(host.value) for host in hosts]

    def run_expecting(self, body, *args, context=HEAP_BYTES, timeout=None, **kwargs):
        hosts = self._simulate(body, args, kwargs, context, all_outcomes=True)
        return [Outcome(h.rank, _on_cpu(h.value), h.error, _text(h.error), h.finished_at) for h in hosts]

    def _simulate(self, body, args, kwargs, heap_bytes, all_outcomes):
        def of_rank(rank):
            def run():
                torch.manual_seed(rank)
                dist.init_process_group()
                if heap_bytes is None:
                    return body(rank, self.world_size, *args, **kwargs)
                import iris

                return body(iris.iris(heap_bytes), *args, **kwargs)

            return run

        bodies = [of_rank(rank) for rank in range(self.world_size)]
        on = "cpu" if self.runtime == "sim" else "gpu"
        return simulate(bodies, on=on, seed=self.seed, device="h200", all_outcomes=all_outcomes)


def _text(error):
    return "" if error is None else "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(v) for v in value)
    if isinstance(value, dict):
        return {k: _on_cpu(v) for k, v in value.items()}
    return value
