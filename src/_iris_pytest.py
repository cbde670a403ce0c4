"""The simulator in pytest: fixture ``sim``, markers ``seeds`` and ``sim``, option ``--sim-seed``.

    @pytest.mark.seeds(20)                       # the test once for each seed from 0 to 19
    @pytest.mark.sim(resident_programs=8)        # options of iris.sim.run
    def test_exchange(sim):
        results = sim.run(body, 4)               # body(ctx) on every rank

Outside of the package on purpose: pytest loads its plugins whenever it starts, and ``import iris`` loads torch and
settles the runtime. Nothing of Iris is imported before the fixture is used.
"""

from __future__ import annotations

import importlib
import inspect
import os
import random
import shlex
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any

import pytest

_MACHINERY = (__name__, "iris.sim.running", "iris.runtime.world")


class Simulator:
    """What the fixture ``sim`` gives.

    Attributes:
        seed: of the runs of this test.
        options: of :func:`iris.sim.run`, from the marks of the test.
    """

    def __init__(self, seed: int, options: dict[str, Any]):
        self.seed = seed
        self.options = options
        self._raised: list[tuple[int, BaseException]] = []

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
        """:func:`iris.sim.run` with the test's seed and options; options given here come first.

        Args:
            fn, world_size, args: as for ``iris.sim.run``.
            options: more options of it, and keyword arguments of ``fn``.

        Returns:
            What ``fn`` returned on each rank.

        Raises:
            Exception: whatever ``iris.sim.run`` raises. The test fails when kernels of this process are compiled but
                are to be interpreted, or the other way round.
        """
        self._raised = []
        settings = {"seed": self.seed, **self.options, **options}
        on = settings.get("on", "cpu")
        simulator = _simulator(on)
        _check_runtime(on)
        _check_names(self.options, simulator.run)

        def of_rank(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return fn(ctx, *args, **kwargs)
            except BaseException as error:
                self._raised.append((ctx.get_rank(), error))
                raise

        return simulator.run(of_rank, world_size, *args, **settings)

    def who(self, error: BaseException) -> str:
        """Says which rank of the last run raised an error; empty when none did, and for findings, which say it."""
        if _is_finding(error):
            return ""
        ranks = [rank for rank, raised in self._raised if raised is error]
        return f"Raised by rank {ranks[0]}. " if ranks else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("iris", "simulator of Iris")
    group.addoption(
        "--sim-seed",
        type=int,
        default=None,
        metavar="N",
        help="run tests that use the fixture `sim` with this seed only, to repeat a failure",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "seeds(n): run the test, which uses the fixture `sim`, with seeds 0 to n-1, or with those of a list"
    )
    config.addinivalue_line("markers", "sim(**options): options of iris.sim.run for the fixture `sim`")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("seeds")
    if mark is None:
        return
    if "sim" not in metafunc.fixturenames:
        if mark in metafunc.definition.own_markers:
            raise pytest.Collector.CollectError(
                f"{metafunc.function.__name__}: seeds are for the fixture `sim`; use it"
            )
        return
    chosen = metafunc.config.getoption("sim_seed")
    seeds = _seeds(mark, metafunc.function.__name__) if chosen is None else [chosen]
    metafunc.parametrize("sim", seeds, indirect=True, ids=[f"seed{seed}" for seed in seeds])


def _seeds(mark: pytest.Mark, test: str) -> list[int]:
    given = mark.args[0] if len(mark.args) == 1 and not mark.kwargs else None
    seeds = range(given) if isinstance(given, int) else given
    if not isinstance(seeds, Iterable) or not (seeds := list(seeds)) or not all(isinstance(n, int) for n in seeds):
        raise pytest.Collector.CollectError(
            f"{test}: seeds takes a number of seeds above 0, or a list of seeds, got {mark.args} {mark.kwargs or ''}"
        )
    return seeds


@pytest.fixture
def sim(request: pytest.FixtureRequest) -> Iterator[Simulator]:
    """The simulator of Iris: ``sim.run(fn, world_size, *args)`` runs ``fn(ctx, *args)`` on every rank.

    The random numbers of Python, NumPy and PyTorch start the same for every test, whatever ran before it.
    """
    seed = getattr(request, "param", None)
    if seed is None:
        seed = request.config.getoption("sim_seed") or 0
    marks = list(request.node.iter_markers("sim"))
    if any(mark.args for mark in marks):
        pytest.fail("the marker sim takes options by name, such as sim(device='h200')", pytrace=False)
    # The closest mark comes first and has the last word.
    options = {name: value for mark in reversed(marks) for name, value in mark.kwargs.items()}
    _simulator(options.get("on", "cpu"))
    import numpy as np
    import torch

    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        yield Simulator(seed, options)
    random.setstate(of_python)
    np.random.set_state(of_numpy)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    simulator = getattr(item, "funcargs", {}).get("sim")
    if call.excinfo is None or call.when != "call" or not isinstance(simulator, Simulator):
        return (yield)
    error = call.excinfo.value
    if not item.config.getoption("fulltrace") and not item.config.getoption("usepdb", False):
        error.__traceback__ = _shortened(error.__traceback__, whole=_is_finding(error))
        call.excinfo = pytest.ExceptionInfo.from_exception(error)
    report = yield
    if report.failed and hasattr(report.longrepr, "addsection"):
        # A finding knows the seed, which the test may have given itself.
        seed = getattr(error, "seed", None) if _is_finding(error) else simulator.seed
        text = f"{simulator.who(error)}Repeat it: {_command(item, simulator.seed)}"
        if seed != simulator.seed:
            text = f"{simulator.who(error)}The test ran this with seed {seed}. Repeat it: {_command(item, None)}"
        report.longrepr.addsection("simulator of Iris", text)  # type: ignore[union-attr]
    return report


def _command(item: pytest.Item, seed: int | None) -> str:
    """The command that runs one test with one seed."""
    name = item.nodeid
    parameters = getattr(item, "callspec", None)
    if parameters is not None and list(parameters.params) == ["sim"]:
        name = name.removesuffix(f"[{parameters.id}]")
    return shlex.join(["pytest", name] + ([] if seed is None else ["--sim-seed", str(seed)]))


def _is_finding(error: BaseException) -> bool:
    errors = sys.modules.get("iris.errors")
    return errors is not None and isinstance(error, errors.SimulationError)


def _shortened(trace: TracebackType | None, whole: bool) -> TracebackType | None:
    """A traceback without what lies between the test and its ranks; with ``whole``, without all that lies below.

    A finding is a report that has the places in it, and its traceback leads through the interpreter.
    """
    kept = []
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") not in _MACHINERY:
            kept.append(trace)
        elif whole:
            break
        trace = trace.tb_next
    result = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def _simulator(on: str) -> Any:
    """The module ``iris.sim``; settles the runtime when nobody has."""
    if "iris" in sys.modules or os.environ.get("IRIS_RUNTIME"):
        return importlib.import_module("iris.sim")
    # Only for this process: those that tests start settle by themselves.
    os.environ["IRIS_RUNTIME"] = "gpu" if on == "gpu" else "sim"
    try:
        return importlib.import_module("iris.sim")
    finally:
        del os.environ["IRIS_RUNTIME"]


def _check_runtime(on: str) -> None:
    """Fail the test when kernels of this process are compiled but are to be interpreted, or the other way round."""
    runtime, reason = importlib.import_module("iris.runtime.settle").settled()
    if runtime == "gpu" and on != "gpu":
        pytest.fail(
            f"the simulator interprets kernels, but those of this process are compiled ({reason}). Start pytest with "
            'IRIS_RUNTIME=sim, or set os.environ["IRIS_RUNTIME"] = "sim" at the top of the first conftest.py, before '
            "anything imports iris. A test that is to run on the GPU, without checks, is marked sim(on='gpu')",
            pytrace=False,
        )
    if runtime != "gpu" and on == "gpu":
        pytest.fail(
            f"on='gpu' compiles kernels, but those of this process are interpreted ({reason}). Start pytest with "
            "IRIS_RUNTIME=gpu on a machine with a GPU",
            pytrace=False,
        )


def _check_names(options: dict[str, Any], run: Callable[..., Any]) -> None:
    parameters = inspect.signature(run).parameters.values()
    possible = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "seed"]
    unknown = [name for name in options if name not in possible]
    if unknown:
        pytest.fail(f"sim({unknown[0]}=...) is not known; possible: {', '.join(possible)}", pytrace=False)
