"""The examples and the code of the README and the documentation: what a reader copies runs and prints what it says."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import iris
from iris.ops.choice import PULL_ROWS
from iris.tuning import steps as tables
from iris.x.context import DeviceContext

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
# They make their ranks themselves.
PREDICTION = ROOT / "examples" / "07_predict_a_timeline.py"
RACE = ROOT / "examples" / "08_find_a_race.py"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TIME_LIMIT_S = 90

# Runs the given programs one after another, each as a main module with a file that Triton can read its kernels from.
RUNNER = "import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path, run_name='__main__')\n"


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def once(path: Path):
    """The examples with odd numbers; by default the others run in the simulator alone (tests/cli/test_run_sim.py)."""
    return pytest.param(path, marks=() if int(path.name[:2]) % 2 else pytest.mark.slow, id=path.stem)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("example", [once(path) for path in EXAMPLES if path not in (PREDICTION, RACE)])
def test_example(run, example, num_ranks):
    lines = run(num_ranks, example)
    for rank in range(num_ranks):
        # An example checks its own results and prints its line after that.
        assert sum(line.startswith(f"rank {rank} of {num_ranks}") for line in lines) == 1, lines


def simulated(*words: object, folder: Path | None = None) -> subprocess.CompletedProcess:
    """Runs ``python words`` in the simulator."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("IRIS_", "TRITON_"))}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "IRIS_RUNTIME": "sim"}
    command = [sys.executable, *(str(word) for word in words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S, cwd=folder)


def test_example_of_a_prediction(tmp_path):
    result = simulated(PREDICTION, "--device", "h200", "--ranks", 3, "--trace", tmp_path / "trace.json")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "Predicted (cost model h200, not measured)"
    assert [line.partition(":")[0] for line in lines[-3:]] == [f"rank {rank} of 3" for rank in range(3)]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["metadata"]["predicted"] is True
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2}


def test_example_of_a_race():
    result = simulated(RACE, "--ranks", 3, "--seeds", 4)
    assert result.returncode == 0, result.stdout + result.stderr
    report, _, right = result.stdout.partition("with both:\n")
    assert report.startswith("ready without consumed:\nrace on inbox[0] to inbox[15] (16 elements)\n")
    assert "    missing order: " in report
    assert [line.partition(":")[0] for line in right.splitlines()] == [f"rank {rank} of 3" for rank in range(3)]


def assert_reported(program: Path, ranks: int, shown: str) -> None:
    """The simulator prints for a program what a page shows, line breaks apart, with one of the first seeds."""
    expected = " ".join(line for line in shown.splitlines() if not line.startswith(("iris run:", "Repeat it:")))
    printed = ""
    for seed in range(8):
        command = ("-m", "_iris_command", "run", "--sim", "-n", ranks, "--seed", seed, program.name)
        printed = simulated(*command, folder=program.parent).stderr.replace(f"{program.parent}/", "")
        if " ".join(expected.split()) in " ".join(printed.split()):
            return
    raise AssertionError(printed)


def test_reports_of_the_page_on_the_simulator(tmp_path):
    page = ROOT / "docs" / "simulator.md"
    race, deadlock = blocks(page, "text")
    program = blocks(page, "python")[0]
    path = tmp_path / "exchange.py"
    path.write_text(program)
    assert_reported(path, 4, race)

    for hunk in re.split(r"^@@.*\n", blocks(page, "diff")[0], flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        assert program.count(old) == 1, old
        program = program.replace(old, "".join(line[1:] for line in lines if line[0] in " +"))
    path.write_text("".join(line for line in program.splitlines(keepends=True) if "notify(consumed" not in line))
    assert_reported(path, 4, deadlock)

    path.write_text(program)
    (tmp_path / "test_exchange.py").write_text(blocks(page, "py")[0])
    result = simulated(
        "-m", "pytest", "-q", "-p", "no:iris-sim", "-p", "_iris_pytest", "test_exchange.py", folder=tmp_path
    )
    assert "60 passed" in result.stdout, result.stdout


def test_report_of_the_readme(tmp_path):
    page = ROOT / "README.md"
    barrier = "ctx.barrier()  # every rank has written its data\n"
    assert barrier in blocks(page, "python")[0]
    path = tmp_path / "hello.py"
    path.write_text(blocks(page, "python")[0].replace(barrier, ""))
    assert_reported(path, 2, blocks(page, "text")[0])


def test_examples_are_numbered_without_gaps():
    assert [int(path.name[:2]) for path in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))


def test_options_of_the_matmul_example(run):
    example = ROOT / "examples" / "06_all_gather_matmul.py"
    lines = run(2, example, "--m", 5, "--n", 33, "--k", 34, "--dtype", "bfloat16", "--algorithm", "torch")
    assert any("5x33x34 bfloat16" in line and ": torch (user)" in line for line in lines), lines


def test_options_of_the_bandwidth_example(run):
    example = ROOT / "examples" / "09_bandwidth.py"
    operations = ("store", "all-load", "all-atomic_add")
    lines = run(2, example, "--op", *operations, "--dtype", "bfloat16", "--bytes", 2, 35000, "--repeats", 1)
    for operation in operations:
        for nbytes in (2, 35000):  # one element, and two programs of which the second is not full
            head = lines.index(f"{operation}, torch.bfloat16, {nbytes} bytes a peer, GB/s on the memory of")
            ranks = ["all others"] if operation.startswith("all-") else ["rank 0", "rank 1"]
            assert re.split(r"\s{2,}", lines[head + 1].strip()) == ranks
            for rank, row in enumerate(lines[head + 2 : head + 4]):
                assert re.fullmatch(rf"by rank {rank} ( +\d+\.\d+){{{len(ranks)}}}", row), row
    assert sum(line.endswith("3 operations, every value is right") for line in lines) == 2


def test_options_of_the_producer_and_consumer(run):
    example = ROOT / "examples" / "10_producer_consumer.py"
    lines = run(2, example, "--slots", 1, "--rounds", 1, 4, "--programs", 3, "--part", 16)
    assert set(lines) == {
        "rank 0 of 2: sent 5 messages through 1 slots in 2 launches",
        "rank 1 of 2: received 5 messages in order, all checksums right",
    }


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_code_of_a_page_runs_and_prints_what_the_page_shows(run, page, tmp_path):
    paths = []
    for number, block in enumerate(blocks(page, "python")):
        paths.append(tmp_path / f"block_{number}.py")
        paths[-1].write_text(block)
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER)
    printed = run(2, runner, *paths)
    for console in blocks(page, "console"):
        command, *shown = console.splitlines()
        assert command.startswith("$ iris run -n 2 ")
        assert set(shown) <= set(printed)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_of_a_page_lead_somewhere(page):
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    for target in targets:
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


@pytest.mark.parametrize("page", ["README.md", "docs/protocols/all_gather_matmul.md"])
def test_pages_tell_where_the_plan_changes(page):
    text = (ROOT / page).read_text()
    for row in tables.rows("all_gather_matmul"):
        for step in row["steps"]:
            if "up_to_bytes" in step:
                assert f"{in_units(step['up_to_bytes'] + 1)}" in text
    assert f"M up to {PULL_ROWS}" in text


def in_units(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes % (1 << 20) == 0 else f"{nbytes / 1024:g} KiB"


def test_the_page_on_collectives_shows_the_table_of_algorithms():
    rows = []
    for row in tables.rows("collectives"):
        least, most = row["world"]
        ranks = f"{least}" if least == most else f"{least} and more" if most == 1024 else f"{least} to {most}"
        steps = [
            f"`{step['algorithm']}`" + (f" up to {in_units(step['up_to_bytes'])}" if "up_to_bytes" in step else "")
            for step in row["steps"]
        ]
        source = "rule" if row["source"].startswith("heuristic") else "measured"
        rows.append(f"| {row['operation']} | {row['link']} | {ranks} | {', then '.join(steps)} | {source} |")
    head = "| operation | link | ranks | algorithm | from |\n|---|---|---|---|---|\n"
    page = (ROOT / "docs" / "collectives.md").read_text()
    assert page.partition(head)[2].partition("\n\n")[0].splitlines() == rows


def documented_signatures() -> list[tuple[str, list[str]]]:
    text = (ROOT / "docs" / "device-api.md").read_text()
    calls = re.findall(r"`(iris\.(?:signal\.)?\w+)\(([a-z_]+(?:, \w+)*)\)`", text)
    return [(function, parameters.split(", ")) for function, parameters in calls]


def parameters_of(function: object) -> list[str]:
    return list(inspect.signature(getattr(function, "fn", function)).parameters)


@pytest.mark.parametrize(("function", "documented"), documented_signatures(), ids=str)
def test_documented_order_of_arguments(function, documented):
    value = iris
    for part in function.split(".")[1:]:
        value = getattr(value, part)
    assert parameters_of(value)[: len(documented)] == documented


def test_documented_methods_of_the_device_context():
    text = (ROOT / "docs" / "device-api.md").read_text()
    section = text[text.index("## DeviceContext") : text.index("## Machine")]
    methods = re.findall(r"`([a-z_]+)\(([a-z_]+(?:, [\w=.\-]+)*)\)`", section)
    assert {"load", "store", "get", "put", "copy", "atomic_add", "atomic_cas", "notify", "notify_add", "wait"} <= {
        method for method, _ in methods
    }
    for method, parameters in methods:
        documented = [p.split("=")[0] for p in parameters.split(", ") if p != "..."]
        function = getattr(DeviceContext, method)
        assert parameters_of(function)[1 : 1 + len(documented)] == documented, method
