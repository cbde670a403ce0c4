"""Formats are read back, figures are drawn, and every output says where its figures come from."""

import csv
import importlib.util
import io
import json
import re

import pytest
import torch

from iris import bench
from iris.bench import plot, report
from iris.bench.results import Result, from_record
from iris.errors import ArgumentError

WHERE = {
    "world_size": 2,
    "devices": ["NVIDIA H200", "NVIDIA H200"],
    "compute_units": 132,
    "link": "nvlink",
    "runtime": "gpu",
    "clock": "gpu",
    "torch": "2.13.0",
    "triton": "3.9.0",
    "python": "3.11.7",
    "iris": "0.1.0",
    "date": "2026-01-02",
    "command": "bench_x.py --axis_M=16",
}


def rows():
    half = torch.float16

    def result(M, algorithm, **values):
        params = {"M": M, "N": 8, "dtype": half, "algorithm": algorithm}
        return Result("matmul", params, None, [], world_size=2, index=len(made), **values)

    made = []
    for M in (16, 4096):
        made.append(result(M, "torch", counters={"k_blocks": 3}, validated=True, n_warmup=25))
        made[-1].take_samples([[2.0, 4.0, 3.0], [1.0, 2.0, 9.0]], flops=6e12, nbytes=3e9)
        made[-1].speedups = {"torch": 1.0}
        made.append(result(M, "pull", graph=True, n_warmup=25))
        made[-1].take_samples([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], flops=6e12, nbytes=3e9)
        made[-1].speedups, made[-1].hidden_pct, made[-1].hidden_of_possible_pct = {"torch": 1.5}, 62.0, 124.0
    made.append(result(1, "pull", skipped=True, skip_reason="no plan, or | none"))
    made.append(result(2, "pull", failure="wrong", error="rank 1: 3 of 16 elements"))
    return made


HEADER = ["M", "N", "dtype", "algorithm", "GPU Time (ms)", "Skew %", "BW (GB/s)", "TFLOPS", "k_blocks"]
HEADER += ["x torch", "hidden %", "hidden of possible %", "min (ms)", "q1-q3 (ms)", "checked"]
FIRST = ["16", "8", "float16", "torch", "3.000", "33.3", "1000.0", "2000.0", "3", "1.00", "-", "-"]
FIRST += ["2.000", "2.500-3.500"]


def test_the_console_table():
    text = report.render("console", rows(), [WHERE])
    head, command, _, name, *table = text.splitlines()
    assert head == (
        "2 ranks (gpu) on 2 x NVIDIA H200, 132 compute units a rank, link nvlink; Iris 0.1.0, torch 2.13.0, Triton "
        "3.9.0, Python 3.11.7; 2026-01-02"
    )
    assert command == "Command: bench_x.py --axis_M=16"
    assert name == "matmul"
    assert re.split(r"\s{2,}", table[0].strip()) == HEADER
    assert table[1].split() == [*FIRST, "yes"]
    assert len({len(line) for line in table[:5]}) == 1  # aligned
    assert re.fullmatch(r" *1 +8 +float16 +pull  \(skipped\) no plan, or \| none", table[5])
    assert re.fullmatch(r" *2 +8 +float16 +pull  \(wrong\) rank 1: 3 of 16 elements", table[6])
    assert table[7:] == [
        "3 calls after 26, caches cold, ranks meet on the host",
        "3 calls after 26, caches cold, ranks meet on the host, graphs replayed",
    ]


def test_markdown_is_read_back():
    text = report.render("markdown", rows(), [WHERE])
    table = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
    assert cells[0] == HEADER
    assert set(cells[1]) == {"---"}
    assert cells[2] == [*FIRST, "yes"]
    assert {len(row) for row in cells} == {len(HEADER)}
    assert cells[6][4] == "(skipped) no plan, or \\| none"
    assert "## matmul" in text
    assert "NVIDIA H200" in text


def test_json_is_read_back():
    records = json.loads(report.render("json", rows(), [WHERE]))
    first = records[0]
    assert list(first)[:3] == ["benchmark", "world_size", "params"]
    assert first["params"] == {"M": 16, "N": 8, "dtype": "float16", "algorithm": "torch"}
    for name in ("gpu_time_ms", "min_time_ms", "skew_pct", "local_times_ms", "bandwidth_gbps", "tflops", "counters"):
        assert first[name] == getattr(rows()[0], name)
    assert (records[4]["skipped"], records[4]["skip_reason"]) == (True, "no plan, or | none")
    assert records[4]["gpu_time_ms"] is None
    assert all(record["environment"] == WHERE for record in records)
    for record, result in zip(records, rows(), strict=True):
        del record["environment"]
        assert from_record(record, result.params) == result


def test_csv_is_read_back():
    records = list(csv.DictReader(io.StringIO(report.render("csv", rows(), [WHERE]))))
    names = ["benchmark", "world_size", "M", "N", "dtype", "algorithm", "gpu_time_ms", "min_time_ms", "skew_pct"]
    names += ["bandwidth_gbps", "tflops", "k_blocks", "skipped", "skip_reason"]
    assert list(records[0])[: len(names)] == names
    assert float(records[1]["gpu_time_ms"]) == 2.0
    assert float(records[1]["speedup_torch"]) == 1.5
    assert float(records[1]["hidden_pct"]) == 62.0
    assert float(records[1]["hidden_of_possible_pct"]) == 124.0
    assert [r["skipped"] for r in records] == ["False"] * 4 + ["True", "False"]
    assert records[4]["skip_reason"] == "no plan, or | none"
    assert records[5]["error"] == "rank 1: 3 of 16 elements"
    assert {r["devices"] for r in records} == {"NVIDIA H200; NVIDIA H200"}
    assert {r["command"] for r in records} == {WHERE["command"]}
    assert len(records) == 6


@pytest.mark.parametrize("format", ["console", "markdown", "csv"])
def test_an_imitated_link_is_said_to_be_one(format):
    where = {**WHERE, "emulated_link": "48 GB/s a direction from each peer"}
    text = report.render(format, rows(), [where])
    assert "48 GB/s a direction from each peer" in text
    if format != "csv":
        assert "link nvlink, EMULATED: 48 GB/s" in text
        assert "EMULATED" not in report.render(format, rows(), [WHERE])


@pytest.mark.parametrize("format", ["console", "markdown", "json", "csv"])
def test_interpreted_times_are_said_to_mean_nothing(format, capsys):
    @bench.register
    def idle(state, ctx):
        state.exec(lambda: None)

    bench.main(["--axis_num_ranks=1", f"--benchmark_format={format}"])
    said = capsys.readouterr()
    text = said.out if format in ("console", "markdown") else said.err
    assert "Kernels are interpreted: times are those of the host's clock and mean nothing" in text
    if format == "json":
        (record,) = json.loads(said.out)
        assert record["environment"]["clock"] == "host, interpreted"
        assert record["n_repeat"] == 3
        assert not record["cold_cache"]


def test_the_suffix_of_the_file_gives_its_format(tmp_path, capsys):
    @bench.register
    def idle(state, ctx):
        state.exec(lambda: None)

    for suffix, start in (
        (".csv", "benchmark,world_size,"),
        (".md", "1 rank (cpu)"),
        (".json", "[\n"),
        (".txt", "1 r"),
    ):
        path = tmp_path / f"out{suffix}"
        bench.main(["--axis_num_ranks=1", f"--benchmark_out={path}"])
        assert path.read_text().startswith(start)
        assert "GPU Time (ms)" in capsys.readouterr().out


def test_what_was_finished_stays_when_a_run_is_cut_short(tmp_path):
    out = tmp_path / "out.json"

    @bench.register
    @bench.axis("part", [2, 1, 0])
    def cut(state, ctx):
        if not state["part"]:
            assert [record["params"]["part"] for record in json.loads(out.read_text())] == [2, 1]
            raise KeyboardInterrupt
        state.exec(lambda: None)

    with pytest.raises(KeyboardInterrupt):
        bench.main(["--axis_num_ranks=1", f"--benchmark_out={out}"])
    assert [record["params"]["part"] for record in json.loads(out.read_text())] == [2, 1]
    assert list(tmp_path.iterdir()) == [out]


def test_plots_without_matplotlib_are_refused_before_anything_runs(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find_spec(name))

    @bench.register
    def never(state, ctx):
        raise AssertionError("this ran")

    with pytest.raises(ArgumentError, match=r"pip install 'iris-kernels\[plot\]'"):
        bench.main(["--axis_num_ranks=1", "--plot=x"])


def test_points_of_a_plot():
    labels, lines = plot.points([r for r in rows() if r.gpu_time_ms is not None])
    assert labels == ["16x8", "4096x8"]
    assert {line: sorted(by_label) for line, by_label in lines.items()} == {"torch": labels, "pull": labels}
    other = Result("copy", {"num_ranks": 2, "nbytes": 64, "dtype": torch.int8}, 1.0, [1.0], candidate="a")
    bare = Result("copy", {"num_ranks": 2, "nbytes": 128, "dtype": torch.int8}, 1.0, [1.0], candidate="b")
    assert plot.points([other, bare])[0] == ["64", "128"]
    assert list(plot.points([other, bare])[1]) == ["a", "b"]


def test_plots_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plots")
    folder = tmp_path / "new" / "plots"
    four = Result("copy", {"nbytes": 64}, None, [], world_size=4)
    four.take_samples([[1.0], [2.0], [3.0], [4.0]], None, 100)
    written = plot.draw([*rows(), four], [WHERE], folder)
    stems = ("matmul_2ranks", "copy_4ranks")
    assert written == [folder / f"{stem}.{suffix}" for stem in stems for suffix in ("png", "svg")]
    assert (folder / "matmul_2ranks.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "matmul_2ranks.svg").read_text()


def test_results_in_a_file_are_drawn_again(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plots")
    path = tmp_path / "measured.json"
    path.write_text(report.render("json", rows(), [WHERE]))
    drawn = []
    monkeypatch.setattr(plot, "_fill", lambda panels, results: drawn.append(plot.points(results)))
    written = plot.draw_file(path, tmp_path)
    assert written == [tmp_path / f"measured_matmul_2ranks.{suffix}" for suffix in ("png", "svg")]
    ((labels, lines),) = drawn
    assert labels == ["16x8", "4096x8"]
    times = {line: [by_label[label].gpu_time_ms for label in labels] for line, by_label in lines.items()}
    assert times == {"torch": [3.0, 3.0], "pull": [2.0, 2.0]}
