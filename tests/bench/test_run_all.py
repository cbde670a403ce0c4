"""run_all.py: its steps, calls that are cut short, steps that fail; and the benchmark of links."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from iris.tuning import tables

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
MODULES = (
    "run_all",
    "_run_all_report",
    "_run_all_goals",
    "_run_all_steps",
    "_run_all_tests",
    "_published",
    "bench_links",
)
IRIS = ("-m", "_iris_command", "run")


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """Modules of the folder of benchmarks can be imported, each test's anew."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Calls ``run_all.main`` with steps of the test's own; returns the exit code, and the record of each step."""
    import run_all

    def run(steps, *words, reserve=0.0, grace=1.0):
        monkeypatch.setattr(run_all, "table", lambda ranks, small=False: steps)
        monkeypatch.setattr(run_all, "RESERVE", reserve)
        monkeypatch.setattr(run_all, "GRACE", grace)
        code = run_all.main(["--ranks", "2", "--small", "--out", str(tmp_path / "out"), *words])
        return code, json.loads((tmp_path / "out/state.json").read_text())["steps"]

    return run


def step(name, program, estimate=1.0, **more):
    """A step that runs a program and then writes its output."""
    from _run_all_steps import Step

    write = f"import json, os, sys, time\n{program}\nopen(r'{{out}}/data/{name}.json', 'w').write('[]')"
    return Step(name, f"what {name} does", estimate, ("-c", write), **more)


def counting(name, tmp_path, program="", **more):
    """A step that also adds a line to a file, so that its runs can be counted."""
    return step(name, f"open(r'{tmp_path}/{name}', 'a').write('run\\n')\n{program}", **more)


def runs(tmp_path, *names):
    paths = [tmp_path / name for name in names]
    return [path.read_text().count("run") if path.exists() else 0 for path in paths]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("small", [False, True])
def test_the_table(ranks, small):
    from _run_all_steps import table

    steps = table(ranks, small)
    # What matters most comes first, the tests last.
    names = [one.name for one in steps]
    assert names[:2] == ["machine", "links"]
    assert all(one.kind != "tests" for one in steps[: names.index("tests-gpu")])
    for one in steps:
        files = [word for word in one.words if word.startswith(("benchmarks/", "tests/"))]
        assert files or one.kind == "grid", one
        assert all((ROOT / word).exists() for word in files), one
        if one.kind != "tests":
            assert any(word.endswith(one.output) for word in one.words), one
        if "run" in one.words:
            assert one.words[one.words.index("-n") + 1] == str(ranks)
        if one.kind == "bench":
            assert f"--axis_num_ranks={ranks}" in one.words
    impossible = {one.name for one in steps if one.impossible}
    divided = ("llama-", "matmul_reduce-", "seed_shapes-")
    expected = {one.name for one in steps if one.name.startswith(divided)} if ranks == 3 else set()
    assert impossible == expected | ({"concurrent_grid"} if small else set())
    # What is tuned comes after all that is measured.
    tuned = [one for one in steps if one.kind in ("grid", "sweep")]
    assert steps[names.index("tests-gpu") - len(tuned) : names.index("tests-gpu")] == tuned
    if not small and ranks == 2:
        (down,) = (one for one in steps if one.name == "llama-attention_out-down")
        assert {"--axis_N=4096", "--axis_K=8192,28672", "--axis_gather_dim=1"} <= set(down.words)
        (layers,) = (one for one in steps if one.name == "matmul_reduce-llama-64-1024")
        assert {"--shapes=llama70b", "--axis_M=64,1024", "--axis_dtype=bf16"} <= set(layers.words)
        (gather,) = (one for one in steps if one.name == "all_gather")
        assert gather.words[gather.words.index("--comm_sms") + 1] == "16"
        # What compares with others fits into two and a half calls of the default budget.
        assert sum(one.estimate for one in steps if one.kind not in ("tests", "grid", "sweep")) < 2.5 * (540 - 20)
        # All of it fits into calls.
        assert max(one.estimate for one in steps) <= 90


@pytest.mark.parametrize(("ranks", "steps", "count"), [(2, 2, 7), (4, 2, 9), (8, 2, 12)])
def test_every_published_shape_of_these_ranks_is_in_one_step(ranks, steps, count):
    from _run_all_steps import table

    own = [one for one in table(ranks) if one.name.startswith("seed_shapes-")]
    assert len(own) == steps
    values = [word.partition("=")[2] for one in own for word in one.words if word.startswith("--axis_shape=")]
    named = [tuple(map(int, shape.split("x"))) for value in values for shape in value.split(",")]
    known = {size for case in tables.cases("all_gather_matmul", "mi300x") if case.world == ranks
             for size in [tuple(n for _, n in case.entry.sizes)]}  # fmt: skip
    assert len(named) == len(set(named)) == count
    assert set(named) == known


def test_shapes_that_do_not_divide_are_left_out_and_named(monkeypatch):
    import _run_all_steps as steps

    entry = {"label": "", "M": 64, "N": 32, "num_ranks": 8, "speedup": None, "tflops": None}
    monkeypatch.setattr(steps._published, "shapes", lambda machine: [{**entry, "K": 96}, {**entry, "K": 100}])
    (one,) = (one for one in steps.table(8) if one.name.startswith("seed_shapes"))
    assert "--axis_shape=64x32x96" in one.words
    assert "1 of 1, without 64x32x100, whose K is no multiple of 8" in one.what
    (one,) = (one for one in steps.table(5) if one.name.startswith("seed_shapes"))
    assert one.impossible == "the table of mi300x has shapes for 8 ranks, not for 5"


def test_the_step_of_grids_asks_for_what_the_goal_counts():
    from _run_all_steps import GRID_CASES, table

    from iris.concurrent.tuning_data import collect

    (grid,) = (one for one in table(8) if one.kind == "grid")
    request = collect.parse(grid.words[grid.words.index("iris.concurrent.tuning_data.collect") + 1 :], 8)
    assert len(request.cases) == GRID_CASES == 16
    assert str(request.out).endswith(grid.output)
    # Of no more points than are timed the best would always be found.
    assert len(request.shares) * collect._TILES > 2 * 8
    assert not request.quick
    assert all((shape.comm_m, shape.N > 0) == (256 * 8, True) for _, shape in request.cases)
    assert grid.then[-1].endswith(grid.digest)


def test_a_failing_step_is_recorded_and_the_rest_goes_on(call, tmp_path, capsys):
    fails = step("fails", "print('something'); print('the reason', file=sys.stderr); sys.exit(3)")
    silent = step("silent", "sys.exit(0)")
    wants = "from run_all import WITHOUT_MULTICAST as wanted\nassert all(os.environ[k] == v for k, v in wanted.items())"
    steps = [fails, silent, step("environment", wants), step("cannot", "", impossible="there is a reason")]
    code, records = call(steps)
    assert code == 1
    assert {name: record["state"] for name, record in records.items()} == {
        "fails": "failed",
        "silent": "failed",
        "environment": "done",
        "cannot": "skipped",
    }
    assert records["fails"]["error"] == "exit status 3"
    assert records["fails"]["last_lines"][-2:] == ["something", "the reason"]
    assert records["silent"]["error"] == "it wrote no data/silent.json"
    page = (tmp_path / "out/summary.md").read_text()
    assert "### Last lines of fails" in page
    assert "| cannot | skipped |" in page
    assert "failed: fails, silent" in capsys.readouterr().out
    # Failed steps stay failed, and are done again when they are named.
    assert call(steps)[0] == 1
    fixed = [step("fails", ""), step("silent", ""), *steps[2:]]
    code, records = call(fixed, "--only", "fai*,silent")
    assert code == 0
    assert records["fails"]["state"] == records["silent"]["state"] == "done"
    assert records["fails"]["error"] == ""


def test_a_call_does_what_fits_into_its_budget(call, tmp_path, capsys):
    steps = [
        counting("first", tmp_path),
        counting("long", tmp_path, estimate=500),
        counting("last", tmp_path),
    ]
    assert call(steps, "--budget", "100")[0] == 0
    assert runs(tmp_path, "first", "long", "last") == [1, 0, 1]
    said = capsys.readouterr().out
    assert "left for another call, about 500 s: long" in said
    assert "give --budget of" in said
    code, records = call(steps, "--budget", "600")
    assert code == 0
    assert runs(tmp_path, "first", "long", "last") == [1, 1, 1]
    assert {record["state"] for record in records.values()} == {"done"}
    call(steps, "--list")
    assert "0 of 3 steps are to be done" in capsys.readouterr().out
    call(steps, "--fresh", "--budget", "100")
    assert runs(tmp_path, "first", "long", "last") == [2, 1, 2]


def test_what_a_step_gave_stays_until_it_begins_again(call, tmp_path, capsys):
    output, summary = tmp_path / "out/data/first.json", tmp_path / "out/summary.md"
    code, before = call([counting("first", tmp_path), counting("second", tmp_path)])
    assert (code, output.read_text()) == (0, "[]")
    output.write_text("[ ]")  # as no run writes it
    # The estimate of the first does not fit; the second, which is named too, does.
    long = [counting("first", tmp_path, estimate=500), counting("second", tmp_path)]
    code, records = call(long, "--only", "first,second", "--budget", "100")
    assert (code, runs(tmp_path, "first", "second")) == (0, [1, 2])
    assert output.read_text() == "[ ]"
    assert records["first"] == before["first"]
    assert "| first | done |" in summary.read_text()
    assert "left for another call, about 500 s: first" in capsys.readouterr().out
    # It is still done, so a call that names nothing leaves it.
    call(long, "--budget", "600")
    assert runs(tmp_path, "first", "second") == [1, 2]
    code, records = call(long, "--only", "first", "--budget", "600")
    assert (code, runs(tmp_path, "first", "second")) == (0, [2, 2])
    assert output.read_text() == "[]"
    assert (records["first"]["state"], records["first"]["attempts"]) == ("done", 1)
    # One that begins and fails has nothing of the run before.
    code, records = call([counting("first", tmp_path, "sys.exit(3)"), long[1]], "--only", "first")
    assert (code, records["first"]["state"], output.exists()) == (1, "failed", False)


# Adds a case to its output; ended by a signal unless one was there.
ADDS = """
out = r"{out}/data/grid.json"
cases = open(out).read() if os.path.exists(out) else ""
open(out, "w").write(cases + "case ")
cases or os.kill(os.getpid(), 9)
sys.exit(0)
"""


def test_a_resumable_step_goes_on_with_what_it_left(call, tmp_path):
    digest = "import sys; open(sys.argv[2], 'w').write(open(sys.argv[1]).read().upper())"
    own = ("-c", digest, "{out}/data/grid.json", "{out}/data/grid.digest.json")
    grid = step("grid", ADDS, kind="grid", resumable=True, then=own)
    read = (tmp_path / "out/data/grid.digest.json").read_text
    code, records = call([grid])
    assert (code, records["grid"]["state"]) == (0, "partly")
    # Also of what was ended there is a digest.
    assert read() == "CASE "
    assert call([grid])[1]["grid"]["state"] == "done"
    assert read() == "CASE CASE "
    # One that is named begins anew.
    assert call([grid], "--only", "grid")[1]["grid"]["state"] == "partly"
    assert read() == "CASE "
    broken = step("grid", ADDS, kind="grid", resumable=True, then=("-c", "raise SystemExit(5)"))
    code, records = call([broken])
    assert (code, records["grid"]["state"]) == (1, "failed")
    assert records["grid"]["error"] == "its digest failed: exit status 5"


def test_a_resumable_step_that_adds_nothing_is_given_up(call):
    grid = step("grid", "os.kill(os.getpid(), 9)", kind="grid", resumable=True)
    assert [call([grid])[1]["grid"]["state"] for _ in range(3)] == ["partly", "partly", "failed"]
    # Where something was added in between it is not.
    one = step("grid", "open(r'{out}/data/grid.json', 'a').write('a case'); os.kill(os.getpid(), 9)", kind="grid",
               resumable=True)  # fmt: skip
    order = [grid, grid, one, grid, grid]
    call([grid], "--fresh")
    assert [call([each])[1]["grid"]["state"] for each in order[1:]] == ["partly"] * 3 + ["failed"]


def test_what_a_step_tunes_is_its_own(call, tmp_path):
    tells = "print(os.environ['IRIS_CACHE_DIR'])"
    call([step("one", tells), step("two", tells)])
    for name in ("one", "two"):
        assert (tmp_path / f"out/logs/{name}.log").read_text().endswith(f"{tmp_path}/out/tuned/{name}\n")


def gone(pid):
    """Whether a process has ended, or will be collected by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def soon(condition, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


SLEEPS = """
import subprocess
child = subprocess.Popen(["sleep", "300"])
open(r"{path}", "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(300)
"""


def test_a_step_that_does_not_end_is_ended_with_all_that_it_started(call, tmp_path):
    path = tmp_path / "pids"
    sleeps = counting("sleeps", tmp_path, SLEEPS.format(path=path), estimate=0.1)
    # Its budget ends it the first time, so it may try again.
    code, records = call([sleeps], "--budget", "4")
    assert code == 0
    assert (records["sleeps"]["state"], records["sleeps"]["attempts"]) == ("waiting", 1)
    assert all(soon(lambda pid=pid: gone(pid)) for pid in path.read_text().split())
    code, records = call([sleeps, step("next", "", estimate=0.1)], "--budget", "4")
    assert code == 1
    assert records["sleeps"]["state"] == "failed"
    assert "did not end within" in records["sleeps"]["error"]
    assert runs(tmp_path, "sleeps") == [2]


PROGRAM = """
import sys
import run_all
from _run_all_steps import Step
words = [("-c", text) for text in {programs!r}]
names = ("first", "sleeps", "last")
run_all.table = lambda ranks, small=False: [Step(n, n, 1, w) for n, w in zip(names, words)]
sys.exit(run_all.main(["--ranks", "2", "--small", "--out", r"{out}"]))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_call_that_is_killed_is_resumed(tmp_path, how):
    out, pids = tmp_path / "out", tmp_path / "pids"
    add = "open(r'{0}/{1}', 'a').write('run\\n'); open(r'{{out}}/data/{1}.json', 'w').write('[]')"
    first, last = (add.format(tmp_path, name) for name in ("first", "last"))
    sleep = f"import os, time; open(r'{pids}', 'w').write(str(os.getpid())); time.sleep(300)"
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}

    def start(second):
        program = PROGRAM.format(programs=[first, second, last], out=out)
        return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.DEVNULL)

    running = start(sleep)
    assert soon(lambda: pids.exists() and pids.read_text())
    running.send_signal(how)
    assert running.wait(30) == (-how if how == signal.SIGKILL else 128 + how)
    assert soon(lambda: gone(pids.read_text())), "the step outlived the program"
    state = json.loads((out / "state.json").read_text())["steps"]
    assert state["first"]["state"] == "done"
    assert state["sleeps"]["state"] == ("running" if how == signal.SIGKILL else "waiting")
    assert start(add.format(tmp_path, "sleeps")).wait(60) == 0
    assert runs(tmp_path, "first", "sleeps", "last") == [1, 1, 1]
    state = json.loads((out / "state.json").read_text())["steps"]
    assert {record["state"] for record in state.values()} == {"done"}


TESTS = """
import time
import pytest

def test_passes(): pass

def test_fails(): assert False, "planted" + 400 * (chr(10) + "a line")

@pytest.mark.skip(reason="planted")
def test_skipped(): pass

@pytest.mark.parametrize("world", [2, 3])
def test_of_ranks(world): assert world == 2

def test_first_takes_long():
    import pathlib
    mark = pathlib.Path(__file__).with_name("mark")
    if not mark.exists():
        mark.touch()
        time.sleep(300)

def test_after(): pass
"""


def test_tests_go_on_where_they_were_cut(call, tmp_path):
    from _run_all_steps import Step, table

    program = tmp_path / "test_planted.py"
    program.write_text(TESTS)
    whole = next(one for one in table(2) if one.name == "tests-gpu")
    # The step's own words up to what it tests.
    own = whole.words[: whole.words.index("tests/gpu")]
    words = (*own, "-c", os.devnull, "--rootdir", str(tmp_path), str(program))
    tests = Step("tests-gpu", "tests", 0.1, words, "tests", resumable=True)
    code, records = call([tests], "--budget", "12", grace=10)
    assert records["tests-gpu"]["state"] == "partly"
    assert records["tests-gpu"]["error"] == "1 of 4 tests failed"
    assert code == 1
    # Why it failed is known though pytest was ended before it could say so.
    page = (tmp_path / "out/summary.md").read_text()
    assert "- `test_planted.py::test_fails`: `AssertionError: planted`\n" in page
    lines = [json.loads(line) for line in (tmp_path / "out/data/tests-gpu.jsonl").read_text().splitlines()]
    (reason,) = (line["reason"] for line in lines if "reason" in line)
    assert reason.endswith(": AssertionError")
    assert len(reason) == 1500
    code, records = call([tests], "--budget", "60", grace=10)
    assert records["tests-gpu"]["state"] == "failed"
    assert records["tests-gpu"]["error"] == "1 of 6 tests failed"
    log = (tmp_path / "out/logs/tests-gpu.log").read_text()
    assert "\n2 passed, 5 deselected" in log, "a test that had ended ran again"
    page = (tmp_path / "out/summary.md").read_text()
    assert "| tests-gpu | 4 | 1 | 1 | 0 |" in page
    assert "- `test_planted.py::test_fails`: `AssertionError: planted`\n" in page
    assert "More of each reason: `data/tests-gpu.jsonl` (`reason`), `logs/tests-gpu.log`." in page


def test_a_test_that_ends_pytest_does_not_keep_the_others_from_running(call, tmp_path):
    from _run_all_steps import Step, table

    program = tmp_path / "test_crash.py"
    program.write_text("import os\ndef test_crashes(): os.kill(os.getpid(), 9)\ndef test_after(): pass\n")
    whole = next(one for one in table(2) if one.name == "tests-gpu")
    words = (*whole.words[: whole.words.index("tests/gpu")], "-c", os.devnull, "--rootdir", str(tmp_path), str(program))
    one = Step("tests-gpu", "tests", 0.1, words, "tests", resumable=True)
    states = [call([one])[1]["tests-gpu"]["state"] for _ in range(3)]
    assert states == ["partly", "partly", "failed"]
    page = (tmp_path / "out/summary.md").read_text()
    assert "| tests-gpu | 1 | 1 | 0 | 0 |" in page
    assert "- `test_crash.py::test_crashes`: `it was started 2 times and never ended`" in page


def test_what_cannot_be_asked_for(call, tmp_path, capsys):
    for words, message in (
        (["--only", "one,nothing*"], "there is no such step; possible: one"),
        (["--budget", "0"], "--budget is 0"),
        (["--ranks", "1"], "links need 2 or more"),
    ):
        with pytest.raises(SystemExit) as stop:
            call([step("one", "")], *words)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    call([step("one", "")])
    with pytest.raises(SystemExit):
        call([step("one", "")], "--ranks", "4")
    assert "a run with ranks=2, this one has 4" in capsys.readouterr().err


LINKS = ("--axis_nbytes=4096,70000", "--axis_by=2,copy_engine", "--axis_trips=64", "--n_warmup=0", "--n_repeat=1")


def test_links_between_processes(own_script, tmp_path):
    out = tmp_path / "links.json"
    words = ("--axis_num_ranks=2", f"--benchmark_out={out}", *LINKS, "--skip_direction=one")
    done = own_script("bench_links.py")(*words, command=(*IRIS, "-n", "2"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())
    assert len(rows) == 2 * 2 * 2 + 2
    assert all(row["validated"] and row["gpu_time_ms"] > 0 for row in rows)
    trips = [row["counters"] for row in rows if row["benchmark"] == "round_trip"]
    assert all(0 < c["fastest us"] <= c["round trip us"] <= c["slowest batch us"] for c in trips)


def test_links_in_the_simulator(records):
    import bench_links  # noqa: F401 - registers its benchmarks

    world = 3
    rows = records("--axis_nbytes=70000", "--axis_by=2,copy_engine,nonsense", "--axis_trips=32", world=world)
    nonsense = [row for row in rows if row["params"].get("by") == "nonsense"]
    measured = [row for row in rows if row not in nonsense]
    assert len(nonsense) == 4
    assert all("by=nonsense is not known" in row["skip_reason"] for row in nonsense)
    assert len(measured) == 2 * 2 * 2 + 2
    for row in measured:
        assert row["validated"], row
        one = row["params"].get("direction") == "one"
        assert row["timed_ranks"] == ([0] if one else [0, 1] if "trips" in row["params"] else list(range(world)))


def test_bytes_that_do_not_arrive_are_not_timed(records, monkeypatch):
    import bench_links

    class Nothing:
        def __getitem__(self, grid):
            return lambda *args, **meta: None

    monkeypatch.setattr(bench_links, "put_kernel", Nothing())
    monkeypatch.setattr(bench_links, "ping_pong_kernel", Nothing())
    rows = records("--axis_nbytes=4096", "--axis_by=2", "--axis_trips=32", world=2, fails=True)
    wrong = {(r["benchmark"], r["params"].get("way")): r["failure"] for r in rows}
    assert wrong == {("bandwidth", "put"): "wrong", ("bandwidth", "get"): "", ("round_trip", None): "wrong"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_steps_with_tiny_problems(tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable,
        str(FOLDER / "run_all.py"),
        "--ranks",
        "2",
        "--small",
        "--out",
        str(out),
        "--budget",
        "900",
    ]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (out / "summary.md").read_text()
    for title in (
        "Links",
        "Round trips",
        "all_gather_matmul, layers",
        "all_gather_matmul, shapes of mi300x",
        "Configurations",
        "matmul_all_reduce",
        "A GEMM beside",
        "Collectives",
        "Copies",
        "Tests",
    ):
        assert re.search(rf"^## {title}", page, re.MULTILINE), title
    assert "| waiting |" not in page
