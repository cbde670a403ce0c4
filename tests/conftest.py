"""Fixtures that run a test body on pools of rank processes, on the cpu runtime or, with ``--runtime gpu``, on GPUs."""

from __future__ import annotations

from collections import OrderedDict

import pytest

import iris  # settles the runtime before test modules decorate kernels

WORLDS = (1, 2, 3, 4)
_POOLS_KEPT = 2

assert iris.__version__


def pytest_addoption(parser):
    parser.addoption("--runtime", choices=("cpu", "gpu"), default="cpu", help="where the ranks of test pools run")
    parser.addoption("--worlds", default=",".join(map(str, WORLDS)), help="world sizes of tests that take any")


def pytest_generate_tests(metafunc):
    if "world" in metafunc.fixturenames:
        metafunc.parametrize(
            "world", [int(w) for w in metafunc.config.getoption("--worlds").split(",")], scope="session"
        )


def pytest_collection_modifyitems(config, items):
    on_gpu = config.getoption("--runtime") == "gpu"
    for item in items:
        if on_gpu and "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)
    # A pool is started once when the tests of one world follow each other.
    items.sort(key=lambda item: item.callspec.params.get("world", 0) if hasattr(item, "callspec") else 0)


class _Pools:
    def __init__(self, runtime):
        self.runtime = runtime
        self.pools = OrderedDict()

    def __call__(self, world_size):
        from iris.testing.ranks import RankPool

        if world_size not in self.pools:
            self.pools[world_size] = RankPool(world_size, runtime=self.runtime)
        self.pools.move_to_end(world_size)
        while len(self.pools) > _POOLS_KEPT:
            self.pools.popitem(last=False)[1].close()
        return self.pools[world_size]


@pytest.fixture(scope="session")
def ranks(pytestconfig):
    """``ranks(world_size)`` gives a pool of that many ranks."""
    pools = _Pools(pytestconfig.getoption("--runtime"))
    yield pools
    for pool in pools.pools.values():
        pool.close()
