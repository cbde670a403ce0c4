"""The pytest plugin, in this suite and in a project of its own."""

import random
import re
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
pytest_plugins = "pytester"

PROJECT = """
    import pytest
    import torch
    import triton
    import triton.language as tl

    import iris

    @triton.jit
    def push(data, inbox, rank, peer, heap_bases):
        offs = tl.arange(0, 4)
        iris.store(inbox + offs, tl.load(data + offs), rank, peer, heap_bases)

    def exchange(ctx, wait):
        rank, world = ctx.get_rank(), ctx.get_num_ranks()
        data = torch.arange(4.0) + rank
        inbox = ctx.zeros(4)
        ctx.barrier()
        push[(1,)](data, inbox, rank, (rank + 1) % world, ctx.get_heap_bases())
        if wait:
            ctx.barrier()
        return inbox[0].item()

    @pytest.mark.seeds(3)
    def test_right(sim):
        assert sim.run(exchange, 3, True) == [2.0, 0.0, 1.0]

    @pytest.mark.seeds([7, 8])
    @pytest.mark.sim(resident_programs=2, check="races")
    def test_race(sim):
        assert sim.options == {"resident_programs": 2, "check": "races"}
        sim.run(exchange, 2, wait=False)

    def fail(ctx):
        if ctx.get_rank() == 1:
            raise KeyError("paper")
        ctx.barrier()

    @pytest.mark.parametrize("world", [2])
    def test_error(sim, world):
        sim.run(fail, world)

    @pytest.mark.sim(devise="h200")
    def test_misspelt(sim):
        sim.run(exchange, 2, True)
"""


@pytest.fixture
def project(pytester, monkeypatch):
    """Runs pytest with the plugin in a project of its own."""
    for name in ("IRIS_RUNTIME", "TRITON_INTERPRET", "PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    # An installed Iris is found by its entry point, which would load the plugin twice.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(text, *arguments):
        pytester.makepyfile(test_it=text)
        return pytester.runpytest_subprocess("-p", "_iris_pytest", "--strict-markers", *arguments, timeout=100)

    return run


@pytest.mark.seeds(2)
@pytest.mark.sim(device="h200")
def test_in_this_suite(sim, request):
    assert request.node.callspec.id == f"seed{sim.seed}"
    numbers = sim.run(lambda ctx, factor, plus: factor * ctx.get_rank() + plus, 3, 10, plus=sim.seed)
    assert numbers == [sim.seed, 10 + sim.seed, 20 + sim.seed]


@pytest.mark.parametrize("again", [False, True])
def test_random_numbers_start_the_same(sim, again):
    assert random.random() == random.Random(0).random()


def test_failures_show_the_report_and_the_command_that_repeats_them(project):
    result = project(PROJECT)
    result.assert_outcomes(passed=3, failed=4)
    output = result.stdout.str()
    race = output[output.index("_ test_race[seed8]") : output.index("_ test_error[2]")]
    assert re.search(r"E +iris.errors.RaceError: race on inbox", race)
    assert re.search(r"E +rank \d, kernel push, program 0: store of inbox", race)
    assert re.search(r"E +at .*test_it.py:\d+: return inbox\[0\].item", race)
    assert "Repeat it: pytest test_it.py::test_race --sim-seed 8\n" in race
    error = output[output.index("_ test_error[2]") : output.index("_ test_misspelt")]
    assert "Raised by rank 1. Repeat it: pytest 'test_it.py::test_error[2]' --sim-seed 0\n" in error
    for line in (">       sim.run(fail, world)", '>           raise KeyError("paper")'):
        assert line in error
    for machinery in ("world.py", "interpreter.py", "races.py", "_iris_pytest.py"):
        assert f"{machinery}:" not in output
    assert "sim(devise=...) is not known; possible: device, " in output


def test_one_seed(project):
    text = """
        import pytest

        @pytest.mark.seeds(3)
        def test_seeds(sim):
            assert sim.seed == 11

        def test_one(sim):
            assert sim.seed == 11

        class TestMarked:
            pytestmark = pytest.mark.seeds(3)

            def test_without_the_fixture(self):
                pass
    """
    result = project(text, "--sim-seed", "11", "-v")
    result.assert_outcomes(passed=3)
    assert "test_seeds[seed11]" in result.stdout.str()


def test_nothing_heavy_is_loaded_and_misuse_is_an_error(project):
    text = """
        import sys
        import pytest

        def test_light():
            assert not {"iris", "torch", "triton", "numpy"} & set(sys.modules)

        MISUSE
    """
    project(text.replace("MISUSE", "")).assert_outcomes(passed=1)
    for mark, message in (("seeds(3)", "use it"), ("seeds(0)", "number of seeds above 0"), ("seeds()", "above 0")):
        fixture = "sim" if mark != "seeds(3)" else ""
        result = project(text.replace("MISUSE", f"@pytest.mark.{mark}\n        def test_it({fixture}): pass"))
        result.assert_outcomes(errors=1)
        assert message in result.stdout.str()


def test_compiled_kernels_are_refused_with_a_remedy(project, monkeypatch):
    monkeypatch.setenv("IRIS_RUNTIME", "gpu")
    result = project("def test_it(sim): sim.run(print, 2)")
    result.assert_outcomes(failed=1)
    assert (
        "kernels, but those of this process are compiled (IRIS_RUNTIME=gpu). Start pytest with" in result.stdout.str()
    )
    assert "running.py" not in result.stdout.str()


def test_the_plugin_is_an_entry_point():
    pyproject = (SRC.parent / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\niris-sim = "_iris_pytest"\n' in pyproject
    assert '"src/_iris_pytest.py"' in pyproject
    assert "_iris_pytest" in sys.modules
