"""``iris trace``: the table, the picture, and one line for what cannot be shown."""

import os
from pathlib import Path

import pytest

import _iris_command
from handmade_trace import handmade
from iris.tracing import chrome

TABLE = """\
Measured on Model T
10 spans of 3 ranks in 52.00 us

rank kind              count           total        median          bytes
   0 wait                  1         8.50 us       8.50 us              0
   0 compute               1        40.25 us      40.25 us              0
   0 fetch                 3        15.00 us       4.00 us          1,234
   1 wait                  3        44.00 us      12.00 us              0
   1 compute               1         0.00 us       0.00 us              0   1 without an end
   1 fetch                 1         0.50 us       0.50 us              8

rank 1 waited 42.00 us for rank 0, 2 times, at most 30.00 us
rank 0 waited 8.50 us for rank 1, 1 times, at most 8.50 us
the host of rank 1 waited 2.00 us for rank 2, 1 times, at most 2.00 us

rank 1: 7 events did not fit into its buffer and are missing
times of different ranks may be off by 2.50 us
"""


def test_table_and_picture(iris_command, tmp_path):
    path = handmade(tmp_path / "trace.json")
    result = iris_command("trace", path)
    assert result.returncode == 0, result.stderr
    picture = tmp_path / "trace.png"
    assert result.stdout == f"{TABLE}\npicture: {picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")

    result = iris_command("trace", path, "-o", tmp_path / "own.svg")
    assert result.stdout == f"{TABLE}\npicture: {tmp_path / 'own.svg'}\n"
    assert "<!-- Rank 2 -->" in (tmp_path / "own.svg").read_text()


def test_a_prediction_is_called_one(iris_command, tmp_path):
    event = chrome.event("wait", 1, "host", 0.0, 3.0, {"target_rank": 1})
    facts = {"predicted": True, "machine": "mi300x"}
    path = chrome.write(tmp_path / "trace.json", chrome.document(range(2), [event], facts))
    result = iris_command("trace", path, "--no-picture")
    lines = result.stdout.splitlines()
    assert lines[:2] == ["Predicted for mi300x, not measured", "1 spans of 2 ranks in 3.00 us"]
    assert lines[-1] == "the host of rank 1 waited 3.00 us for itself, 1 times, at most 3.00 us"
    assert {p.name for p in tmp_path.iterdir()} == {"trace.json"}


def test_without_matplotlib(iris_command, tmp_path):
    path = handmade(tmp_path / "trace.json")
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['matplotlib'] = None\n")
    source = str(Path(_iris_command.__file__).parent)
    where = os.pathsep.join([str(tmp_path), source])
    result = iris_command("trace", path, PYTHONPATH=where)
    assert result.returncode == 0, result.stderr
    last = "no picture: matplotlib is not installed (pip install 'iris-kernels[plot]')"
    assert result.stdout == f"{TABLE}\n{last}\n"

    result = iris_command("trace", path, "-o", tmp_path / "own.png", PYTHONPATH=where)
    assert (result.returncode, result.stdout) == (2, "")
    message = f"iris: {tmp_path / 'own.png'} needs matplotlib, which is not installed: pip install 'iris-kernels[plot]'"
    assert result.stderr.splitlines() == [message]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, (), "No such file or directory"),
        ("{", (), "is no JSON"),
        ('{"traceEvents": 1}', (), "no list `traceEvents`"),
        ("{}", ("-o", "picture.gif"), "possible: .png, .svg, .pdf"),
    ],
    ids=["no file", "no JSON", "no trace", "no picture"],
)
def test_errors_are_one_line(iris_command, tmp_path, content, options, message):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    result = iris_command("trace", path, *options)
    assert (result.returncode, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("iris: ")
    assert message in line
