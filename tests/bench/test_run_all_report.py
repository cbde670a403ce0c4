"""What run_all.py concludes from what its steps wrote: goals, tables, and why tests failed."""

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """Modules of the folder of benchmarks can be imported, each test's anew."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in (
        "_run_all_report",
        "_run_all_goals",
        "_run_all_steps",
        "_run_all_tests",
        "_published",
        "_tuned",
        "report_concurrent",
    ):
        sys.modules.pop(name, None)


def product(M, dtype, gather_dim, **times):
    """Rows of all_gather_matmul as the benchmark writes them, given milliseconds by algorithm."""
    shape = {"num_ranks": 2, "M": M, "N": 3584, "K": 8192, "dtype": dtype, "gather_dim": gather_dim}
    rows = []
    for algorithm, ms in times.items():
        row = {"benchmark": "all_gather_matmul", "params": {**shape, "algorithm": algorithm}, "gpu_time_ms": ms}
        row |= {"tflops": None if ms is None else 1.0, "skew_pct": 0.0, "bandwidth_gbps": None, "counters": {}}
        row |= {
            "speedups": {"torch": times["torch"] / ms} if ms else {},
            "validated": True,
            "error": "",
            "skip_reason": "",
        }
        hidden = (times["torch"] - ms) / (times["torch"] - times["matmul"]) * 100 if ms else None
        row |= {"hidden_pct": hidden, "hidden_of_possible_pct": hidden, "environment": {"clock": "gpu"}}
        rows.append(row)
    return rows


def collective(operation, nbytes, us, variant="auto", peer=False):
    row = {"operation": operation, "link": "nvlink", "world": 2, "bytes": nbytes, "name": variant, "variant": variant}
    return {**row, "peer": peer, "median_us": us, "graph_us": us, "algorithm": "ring", "calls": 2, "sets": 1}


def concluded(tmp_path, products, collectives, ranks=2, **more):
    """The goals of canned files, and the page. ``more``: what else is in the folder of data, by name."""
    import _run_all_report as report
    from _run_all_steps import table

    steps = table(ranks)
    (tmp_path / "data").mkdir(exist_ok=True)
    for name, value in more.items():
        (tmp_path / f"data/{name.replace('__', '-')}.json").write_text(json.dumps(value))
    (tmp_path / "data/all_gather_matmul-4096.json").write_text(json.dumps(products))
    (tmp_path / "data/all_reduce-small.json").write_text(json.dumps({"rows": collectives}))
    report.write(tmp_path, steps, {"ranks": ranks, "steps": {}})
    page = (tmp_path / "summary.md").read_text()
    return report.goals(report.Data(tmp_path, steps), ranks), page


def test_goals_that_are_reached(tmp_path):
    times = {"torch": 1.0, "auto": 0.7, "matmul": 0.65, "torch_fused": 0.75}
    products = product(4096, "float16", 0, **times) + product(16384, "float16", 1, **{**times, "torch_fused": None})
    # Fewer rows than the goals speak of.
    products += product(256, "float16", 0, **{**times, "auto": 2.0})
    sums = [collective("all_reduce", nbytes, us) for nbytes, us in ((4096, 9.0), (65536, 11.5), (1 << 20, 99.0))]
    # 128 MiB are received in 0.36 ms.
    sums += [collective("all_gather", nbytes, us) for nbytes, us in ((1 << 28, 360.0), (4096, 50.0))]
    sums.append(collective("all_gather", 1 << 28, 600.0, "nccl", True))
    goals, page = concluded(tmp_path, products, sums)
    assert [goal.verdict for goal in goals] == ["reached"] * 5, goals
    assert goals[0].measured.startswith("in 2 of 2: 1.43 (M=4096 float16 gather_dim=0)")
    assert goals[2].measured.startswith("in 1 of 1: 1.07")
    assert goals[3].measured == "in 2 of 2: 11.5 (64 KiB) to 9.0 (4 KiB)"
    assert goals[4].measured.startswith("in 1 of 1: 373")
    assert "| all_gather | 256 MiB | 360 | ring | auto | 360 | nccl | 600 | 1.667 |" in page
    assert "| 3584 | 8192 | float16 | 0 | 4096 | 1 | 0.75 | 0.7 | - | 1.429 | 1.071 | 85.71 |" in page


def seeded(sizes, why="", **times):
    """Rows of a published shape as the benchmark writes them; of one that was left out with the reason."""
    rows = product(0, "float16", 1, **times)
    for row in rows:
        algorithm = row["params"]["algorithm"]
        row["params"] = {"num_ranks": 8, "shape": sizes, "dtype": "float16", "gather_dim": 1, "algorithm": algorithm}
        row |= {"skip_reason": why, "counters": {"takes": "hbm_buffer", "published speedup": 1.343}}
    return rows


def graphed(us, nbytes=8192, graph=True):
    row = collective("all_reduce", nbytes, us)
    return row if graph else {name: value for name, value in row.items() if name != "graph_us"}


def split(number, lost):
    return {"case": f"case {number}", "points": 50, "best_ms": 1.0, "tuning": lost, "default": 0.05}


FAST = {"torch": 1.0, "auto": 0.7, "matmul": 0.65}
EVEN = {"torch": 1.0, "auto": 1.02, "matmul": 0.9}
UNMEASURED = {"torch": None, "auto": None, "matmul": None}


@pytest.mark.parametrize("ranks", [4, 8])
def test_goals_of_more_ranks_that_are_reached(tmp_path, ranks):
    products = product(4096, "float16", 0, **FAST) + product(16384, "float16", 1, **FAST)
    products += product(256, "float16", 0, **EVEN)
    left_out = seeded("64x32x16", "it takes about 9 GiB a rank, and 1 GiB are there", **UNMEASURED)
    more = {
        "seed_shapes__1": seeded("131072x16384x16384", **EVEN) + left_out,
        # One case is far off, and on average they are not.
        "concurrent_grid.digest": {"cases": [split(n, 0.001) for n in range(15)] + [split(15, 0.2)]},
    }
    # Single calls and other sizes do not count.
    sums = [{**graphed(10.5), "median_us": 99.0}, graphed(50.0, 16384)]
    goals, page = concluded(tmp_path, products, sums, ranks, **more)
    assert [goal.verdict for goal in goals] == ["reached"] * 4, goals
    assert "1.3 times" in goals[0].goal
    assert goals[0].measured.startswith("in 2 of 2: 1.43")
    assert "at least 0.97 times as fast, since 3 % are noise" in goals[1].goal
    assert goals[1].measured.startswith("in 4 of 4: 0.98")
    assert goals[2].measured.startswith("in 1 of 1: 10.5 (8 KiB)")
    assert goals[3].measured == "1.3 % over 16 of 16 cases, at most 20 % (case 15)"
    assert "| 131072 | 16384 | 16384 | 1 | - | - | 1.02 | hbm_buffer | 0.9804 | 1.343 |" in page
    assert "- left out: M=64 N=32 K=16 float16 gather_dim=1: it takes about 9 GiB a rank" in page
    assert "| case 15 | 50 | 1 | 20 | 5 |" in page


def test_goals_of_more_ranks_that_are_missed_or_not_measured(tmp_path):
    slow = seeded("131072x16384x16384", **{**EVEN, "auto": 1.04})
    grid = {"cases": [split(n, 0.03) for n in range(16)]}
    more = {"seed_shapes__2": slow, "concurrent_grid.digest": grid}
    products = product(4096, "float16", 0, **{**FAST, "auto": 0.8})
    goals, _ = concluded(tmp_path, products, [graphed(11.0)], 8, **more)
    assert [goal.verdict for goal in goals] == ["missed"] * 4, goals
    assert goals[1].measured.startswith("in 1 of 2: 0.96 (M=131072")
    # Half of a grid, a graph that could not be captured and a problem that failed are no success.
    more["concurrent_grid.digest"] = {"cases": [split(n, 0.0) for n in range(8)]}
    more["seed_shapes__2"] = seeded("131072x16384x16384", **{**EVEN, "auto": None})
    goals, _ = concluded(tmp_path, product(4096, "float16", 0, **FAST), [graphed(1.0, graph=False)], 8, **more)
    assert [goal.verdict for goal in goals] == ["reached", *["not measured"] * 3], goals
    for file in (tmp_path / "data").iterdir():
        file.unlink()
    goals, _ = concluded(tmp_path, [], [], 8)
    assert [goal.measured for goal in goals] == ["-"] * 4
    assert {goal.verdict for goal in goals} == {"not measured"}


def test_all_reduce_is_measured_at_the_size_of_the_goal():
    import _run_all_goals as goals
    from _run_all_steps import table

    (small,) = (one for one in table(8) if one.name == "all_reduce-small")
    assert f"{goals.AT_BYTES >> 10}KiB" in small.words[small.words.index("--sizes") + 1].split(",")


def test_configurations_in_the_summary(tmp_path):
    params = {"num_ranks": 4, "layer": "n3584_k8192", "M": 4096, "gather_dim": 0, "dtype": "bfloat16"}
    times = {"matmul": 0.5, "torch": 1.0, "hbm_buffer k_per_flag=8": 0.9, "copy_engine transport=copy_engine": 0.8}
    rows = [{"benchmark": "all_gather_matmul", "params": params, "candidate": c, "gpu_time_ms": ms}
            for c, ms in {**times, "hbm_buffer k_per_flag=4": None}.items()]  # fmt: skip
    goals, page = concluded(tmp_path, [], [], 4, sweep__n3584_k8192__0=rows)
    assert "| n3584_k8192 | 0 | 4096 | 2 | 1 | 0.9 | 0.8 | 1.25 | copy_engine transport=copy_engine |" in page
    assert goals[1].verdict == "not measured", "a configuration is not what is chosen"


def summed(benchmark, M, dtype="float16", **times):
    """Rows of bench_matmul_reduce.py as it writes them, given milliseconds by algorithm; none of one without a time."""
    rows = product(M, dtype, 0, torch=3.0, matmul=1.0)[:1] * len(times)
    for i, (algorithm, ms) in enumerate(times.items()):
        params = {"num_ranks": 2, "M": M, "N": 3584, "K": 8192, "dtype": dtype, "algorithm": algorithm}
        rows[i] = rows[i] | {"benchmark": benchmark, "params": params, "gpu_time_ms": ms, "hidden_pct": 12.5}
    return rows


def test_sums_and_gathers_in_the_summary(tmp_path):
    import _run_all_report as report
    from _run_all_steps import table

    times = {"torch": 3.0, "ccl": 2.5, "torch_one_shot": None, "torch_two_shot": 2.0, "two_shot": 1.6, "one_shot": 4.0}
    rows = summed("matmul_all_reduce", 64, **times, auto=2.4, matmul=1.5, **{"own matmul": 1.4, "ccl reduction": 0.5})
    rows += summed("matmul_reduce_scatter_llama70b", 4096, "bfloat16", fused=None, torch_fused=1.25)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/matmul_reduce-4096.json").write_text(json.dumps(rows))
    gathers = [collective("all_gather", 1 << 28, us, name) for name, us in (("auto", 360.0), ("copy engine", 400.0))]
    gathers.append(collective("all_gather", 1 << 20, 8.0, "persistent, 16 SMs"))
    (tmp_path / "data/all_gather.json").write_text(json.dumps({"rows": gathers}))
    report.write(tmp_path, table(2), {"ranks": 2, "steps": {}})
    page = (tmp_path / "summary.md").read_text()
    problem = "| matmul_all_reduce | 3584 | 8192 | float16 | 64 | 3 | torch_two_shot | 2 | - | two_shot | 1.6 |"
    assert f"{problem} 2.4 | - | 1.25 | 0.8333 | 12.5 | 1 | 1.5 |" in page
    assert "| matmul_reduce_scatter | 3584 | 8192 | bfloat16 | 4096 | - | - | - | 1.25 | - | - | - |" in page
    assert "| size | auto | copy engine | persistent, 16 SMs |" in page
    assert "| 256 MiB | 372.8 | 335.5 | - |" in page
    assert "| 1 MiB | - | - | 65.54 |" in page


def test_goals_that_are_missed_or_not_measured(tmp_path):
    times = {"torch": 1.0, "auto": 0.9, "matmul": 0.65, "torch_fused": 0.85}
    good = {"torch": 1.0, "auto": 0.7, "matmul": 0.65, "torch_fused": 0.75}
    products = product(4096, "float16", 0, **times) + product(8192, "float16", 0, **good)
    sums = [collective("all_reduce", 65536, 12.0), collective("all_gather", 1 << 28, 400.0)]
    goals, page = concluded(tmp_path, products, sums)
    assert [goal.verdict for goal in goals] == ["missed"] * 5, goals
    assert "in 1 of 2: 1.11 (M=4096 float16 gather_dim=0) to 1.43" in page
    # A problem without a figure is no success.
    unknown = product(4096, "float16", 0, **good) + product(8192, "float16", 0, **{**good, "auto": None})
    goals, _ = concluded(tmp_path, unknown, [])
    assert [goal.verdict for goal in goals] == ["not measured"] * 5
    assert "1 have no figure" in goals[0].measured
    for row in products:
        row["environment"] = {"clock": "host, interpreted"}
    goals, page = concluded(tmp_path, products, sums)
    assert {goal.verdict for goal in goals} == {"not measured"}
    assert "times mean nothing" in page


REASONS = {
    ">   assert 1 == 2\nE   assert 1 == 2\nE    +  where 1 = f()\n\nx.py:1: AssertionError": "assert 1 == 2",
    "E   KeyError: 'x'\n\nThen\n\nE   RuntimeError: outer\nE   second\n\nx.py:9: RuntimeError": "RuntimeError: outer",
    # Of a process that a test started the error is in the middle of the message.
    "E   AssertionError: Traceback\nE       File\nE     iris.errors.WaitTimeout: rank 3\nE     \nE   assert 1 == 0": (
        "iris.errors.WaitTimeout: rank 3"
    ),
    "E       fixture 'nothing' not found\n>       available fixtures: a, b\n\nx.py:29": "fixture 'nothing' not found",
    "[gw1] linux\nworker 'gw1' crashed while running 'x.py'\n\n": "worker 'gw1' crashed while running 'x.py'",
    "": "pytest gave no reason",
    "E   ValueError: " + "x" * 1000: "ValueError: " + "x" * 288,
}


@pytest.mark.parametrize(("text", "line"), REASONS.items(), ids=range(len(REASONS)))
def test_the_line_of_a_reason_that_says_most(text, line):
    from _run_all_tests import essence

    assert essence(text) == line


def test_reasons_are_those_of_the_last_start_and_of_what_failed_first(tmp_path):
    from _run_all_tests import reasons

    def failed(test, when, why=None):
        line = {"test": test, "when": when, "outcome": "failed"}
        return line if why is None else {**line, "why": why}

    lines = [
        {"test": "again", "started": True}, failed("again", "call", "the first time"), failed("again", "teardown"),
        {"test": "again", "started": True}, failed("again", "call", "in the call"),
        failed("again", "teardown", "after"),
        {"test": "passes", "started": True}, {"test": "passes", "when": "call", "outcome": "passed"},
        {"test": "passes", "when": "teardown", "outcome": "passed"},
        failed("file.py", "collect", "no such module"), failed("older", "teardown"),
    ]  # fmt: skip
    path = tmp_path / "tests.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"test": "cut')
    assert reasons(path) == {
        "again": "in the call",
        "file.py": "no such module",
        "older": "no reason was recorded",
    }


def test_what_tuning_loses_in_a_corpus(tmp_path, capsys):
    import report_concurrent

    out = tmp_path / "digest.json"
    corpus = FOLDER / "data/concurrent_mi355x.json"
    report_concurrent.main([str(corpus), "--json", str(out)])
    (case,) = json.loads(out.read_text())["cases"]
    assert capsys.readouterr().out == ""
    report_concurrent.main([str(corpus)])
    told = {source: line for line in capsys.readouterr().out.splitlines() for source in ("tuning", "default")
            if f"| {source} |" in line}  # fmt: skip
    assert f"{case['tuning']:.1%}" in told["tuning"].split("|")[-2]
    assert f"{case['default']:.1%}" in told["default"]
    assert case["points"] == 50
    with pytest.raises(ValueError, match="--json is for one corpus, and there are 2"):
        report_concurrent.main([str(corpus), str(corpus), "--json", str(out)])


def test_swept_layers_are_known():
    import _tuned
    from _run_all_steps import SWEPT

    assert {layer for layer, _ in SWEPT} <= set(_tuned.GATHERED)
