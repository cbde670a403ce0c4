"""Fixtures that run a test body on ranks: coroutines in the simulator, processes on the cpu runtime, processes on GPUs,
or coroutines that share one GPU (``loopback``).

A test is written once:

    def body(ctx): ...

    def test_it(ranks, world):      # once for each of --worlds
        ranks(world).run(body)

Tests of kernels (:data:`KERNELS`) run in the simulator under all checks, in an order that differs from test to test,
and those of 2 ranks also as processes; the others run as processes. ``--runtime`` runs all in one way. With
``-m gpu --runtime gpu`` or ``loopback`` ranks run on GPUs: every test that uses ``ranks`` then has the marker ``gpu``.
``@pytest.mark.parametrize("world", ...)`` on a test replaces the worlds, ``@pytest.mark.processes(why)`` keeps it from
the runtimes whose ranks are coroutines, ``@pytest.mark.interpreted(why)`` from those that compile kernels.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
import zlib
from collections import OrderedDict

import pytest

WORLDS = (1, 2, 3, 4)
KERNELS = ("tests/ccl/", "tests/concurrent/", "tests/device/", "tests/ops/", "tests/tracing/", "tests/x/")
# Worlds in which tests of kernels also run as processes.
_PROCESS_WORLDS = (2,)
_POOLS_KEPT = 2
# Below the time limit of a test, so that a body that hangs is reported by its pool, with every rank's stack.
_BODY_SECONDS = 90.0
COMPILED = ("gpu", "loopback")
_left_out = pytest.StashKey[str]()


def pytest_addoption(parser, pluginmanager):
    if not pluginmanager.has_plugin("iris-sim"):  # a source tree that is not installed has no entry points
        pluginmanager.register(importlib.import_module("_iris_pytest"), "iris-sim")
    parser.addoption(
        "--runtime",
        choices=("cpu", "gpu", "sim", "loopback"),
        help="where the ranks of test bodies run; default: gpu with -m gpu, else sim and cpu as tests/conftest.py says",
    )
    parser.addoption(
        "--worlds", default=",".join(map(str, WORLDS)), help="world sizes of tests that take any (default: %(default)s)"
    )


def pytest_configure(config):
    config.option.mixed = config.option.runtime is None and config.option.markexpr.strip() != "gpu"
    if config.option.runtime is None:
        config.option.runtime = "cpu" if config.option.mixed else "gpu"
    try:
        config.option.worlds = [int(w) for w in str(config.option.worlds).split(",")]
    except ValueError:
        raise pytest.UsageError(f"--worlds={config.option.worlds}: expected numbers such as 1,2,4") from None
    # Hundreds of processes import the library: compiling it in each would be a fifth of what they do.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Settle this process before test modules decorate kernels: its tests run where those of the ranks do. Processes
    # that tests start settle by themselves.
    before = os.environ.get("IRIS_RUNTIME")
    os.environ["IRIS_RUNTIME"] = {"loopback": "gpu"}.get(config.option.runtime, config.option.runtime)
    if config.option.runtime in COMPILED:
        _keep_to_themselves(config)
    if config.option.runtime == "loopback":
        # A test without ranks may be the one that starts CUDA.
        importlib.import_module("iris.sim.loopback").settle_cuda()
    import iris  # noqa: F401

    if before is None:
        del os.environ["IRIS_RUNTIME"]
    else:
        os.environ["IRIS_RUNTIME"] = before


def _keep_to_themselves(config):
    """Contexts on GPUs know what the user has tuned, and tests tune: they have a cache of their own."""
    place = tempfile.TemporaryDirectory(prefix="iris-tests-")
    os.environ["IRIS_CACHE_DIR"] = place.name
    config.add_cleanup(place.cleanup)


def pytest_generate_tests(metafunc):
    chosen = [name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark)]
    if "world" in metafunc.fixturenames and "world" not in chosen:
        metafunc.parametrize("world", metafunc.config.option.worlds, scope="session")
    if "ranks" in metafunc.fixturenames and "ranks" not in chosen:
        of_kernels = metafunc.config.option.mixed and metafunc.definition.nodeid.startswith(KERNELS)
        if of_kernels and not metafunc.definition.get_closest_marker("processes"):
            metafunc.parametrize("ranks", ["sim", "cpu"], indirect=True)


def _names(mark):
    names = mark.args[0] if mark.args else mark.kwargs["argnames"]
    return [n.strip() for n in names.split(",")] if isinstance(names, str) else names


def pytest_runtest_setup(item):
    runtime = item.config.option.runtime
    for name, impossible in (("processes", ("sim", "loopback")), ("interpreted", COMPILED)):
        mark = item.get_closest_marker(name)
        if mark and runtime in impossible:
            pytest.skip(f"not with --runtime {runtime}: {mark.args[0]}")


def pytest_itemcollected(item):
    if item.config.option.runtime in COMPILED and "ranks" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.gpu)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    _leave_out_gpu_tests(config, items)
    if config.option.mixed:
        doubled = {item: None for item in items if _runs_in_the_simulator_alone(item)}
        config.hook.pytest_deselected(items=list(doubled))
        items[:] = [item for item in items if item not in doubled]
    # A pool starts once when the tests of one world follow each other.
    items.sort(key=lambda item: item.callspec.params.get("world", 0) if hasattr(item, "callspec") else 0)


def _runs_in_the_simulator_alone(item):
    if not item.nodeid.startswith(KERNELS) or not hasattr(item, "callspec") or item.get_closest_marker("processes"):
        return False
    given = item.callspec.params
    return given.get("ranks") == "cpu" and given.get("world", 2) not in _PROCESS_WORLDS


def _leave_out_gpu_tests(config, items):
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if not left_out:
        return
    if not re.search(r"\bgpu\b", config.option.markexpr):
        reason = "run them with -m gpu"
    elif not _gpu_visible():
        reason = "no GPU is visible"
    else:
        return
    config.stash[_left_out] = f"tests that need a GPU are left out, {len(left_out)} here: {reason}"
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _gpu_visible():
    from iris.runtime.settle import gpu_visible

    return gpu_visible()


def pytest_report_collectionfinish(config):
    return config.stash.get(_left_out, [])


class _Pools:
    """The pools of a session, the last used ones alive."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.pools = OrderedDict()

    def __call__(self, world_size):
        from iris.testing import RankPool

        if world_size not in self.pools:
            self.pools[world_size] = RankPool(world_size, runtime=self.runtime, timeout=_BODY_SECONDS)
        self.pools.move_to_end(world_size)
        while len(self.pools) > _POOLS_KEPT:
            self.pools.popitem(last=False)[1].close()
        return self.pools[world_size]

    def close(self):
        while self.pools:
            self.pools.popitem()[1].close()


@pytest.fixture(scope="session")
def _pools():
    pools = {runtime: _Pools(runtime) for runtime in ("cpu", "gpu")}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(request, _pools):
    """``ranks(world_size)`` gives that many ranks, with the interface of ``iris.testing.RankPool``."""
    runtime = getattr(request, "param", request.config.option.runtime)
    if runtime in _pools:
        return _pools[runtime]
    from simulated_ranks import SimulatedRanks

    # Any order must do; which one is tried is the test's own, so that a failure repeats.
    seed = zlib.crc32(request.node.nodeid.encode()) % 1000
    return lambda world_size: SimulatedRanks(world_size, runtime, seed)
