"""The picture of the two queues of iris.concurrent: what is in it, and the script that makes it from a call."""

import json
import re
import sys

import pytest

from iris import sim
from iris.errors import ArgumentError, IrisError
from iris.tracing import chrome, gantt

SCRIPT = "trace_concurrent.py"


@pytest.fixture
def drawing(monkeypatch, own_script):
    monkeypatch.syspath_prepend(str(own_script(SCRIPT).path.parent))
    import _two_queues

    yield _two_queues
    for name in ("_two_queues", "trace_concurrent"):
        sys.modules.pop(name, None)


# name, rank, program, queue, start, end
FUSED = (
    ("compute", 0, 0, 0, 10.0, 30.0),
    ("compute", 0, 1, 0, 11.0, 30.0),
    ("compute", 0, 0, 0, 31.0, 50.0),
    ("wait", 0, 2, 0, 10.5, 12.0),
    ("store", 0, 2, 1, 12.0, 20.0),
    ("store", 0, 2, 1, 21.0, 24.0),
    ("compute", 0, 2, 0, 25.0, 45.0),
    ("store", 0, 7, 3, 0.0, 99.0),  # of another kernel
    ("compute", 1, 0, 0, 40.0, 41.0),
)


def written(path, spans=FUSED, **facts):
    """A handmade trace of two ranks; with ``facts`` it knows how the call was made."""
    events = [
        chrome.event(name, rank, f"SM{program}", start, end, {"program_id": program, "pid_m": 0, "pid_n": queue})
        for name, rank, program, queue, start, end in spans
    ]
    known = {"gpu_device_name": "Model T", "aligned": True, "dropped_events": {"0": 0, "1": 5}}
    if facts:
        usual = {"mode": "fused", "collective": "all_gather", "gemm": [5, 6, 7], "comm": [8, 9], "dtype": "float16"}
        usual |= {"ranks": 2, "repeats": 3, "untraced_ms": {"0": 1.2, "1": 2}, "traced_ms": {"0": 3.4, "1": 4}}
        known["two_queues"] = {**usual, "alone": False, "one_gpu": False, "link": "", **facts}
    return chrome.write(path, chrome.document((0, 1), events, known))


def test_what_a_column_shows(tmp_path, drawing):
    one = drawing.column(chrome.read(written(tmp_path / "a.json", gemm_wgs=2, comm_wgs=2)), 0)
    # The first span of the file, of the other kernel, is its zero.
    assert one.taken == {drawing.GEMM: [10.0, 11.0, 25.0, 31.0], drawing.COLLECTIVE: [12.0, 21.0]}
    assert (one.start_us, one.end_us) == (10.0, 50.0)
    assert one.helpers() == {drawing.GEMM: 1, drawing.COLLECTIVE: 0}
    assert (one.programs, one.first) == ([(0, 0), (0, 1), (0, 2), (0, 3)], 2)
    assert one.title.startswith("rank 0, one kernel: 2 programs begin with the GEMM, 2 with the collective\n")
    assert one.title.endswith("1,200 us without tracing (median of 3), 3,400 us with it")
    other = drawing.column(chrome.read(tmp_path / "a.json"), 1)
    assert (len(other.programs), other.first) == (1, 1), "no more programs than tiles"
    assert other.title.endswith("5 spans did not fit and are missing")


def test_two_kernels_have_programs_of_their_own(tmp_path, drawing):
    spans = (*FUSED[:3], ("wait", 0, 0, 0, 10.5, 12.0), ("store", 0, 0, 1, 12.0, 20.0), ("store", 0, 1, 1, 12.0, 20.0))
    one = drawing.column(chrome.read(written(tmp_path / "a.json", spans, mode="concurrent", gemm_wgs=2, comm_wgs=3)), 0)
    assert (one.programs, one.first) == ([(0, 0), (0, 1), (1, 0), (1, 1)], 2)
    assert one.helpers() == {drawing.GEMM: 0, drawing.COLLECTIVE: 0}
    assert {piece.program for piece in one.pieces if piece.kind == drawing.WAITING} == {(1, 0)}
    assert "two kernels: 2 programs for the GEMM, 2 for the collective" in one.title


def test_pictures(tmp_path, drawing):
    known = written(tmp_path / "a.json", gemm_wgs=2, comm_wgs=1, alone=True, link="370 GB/s")
    outputs = drawing.draw([chrome.read(known)], None, tmp_path / "new" / "picture.svg")
    assert [output.name for output in outputs] == ["picture.svg", "picture.png"]
    assert outputs[1].read_bytes().startswith(b"\x89PNG\r\n")
    picture = outputs[0].read_text()
    for text in (
        "GEMM 5x6x7 beside all_gather of 8x9 a rank, float16, 2 ranks",
        "Measured on Model T; rank 0 works alone, with the whole card; an imitated link, 370 GB/s",
        "GEMM: 4 tiles, the last taken at 21 us; 1 programs of the other queue came",
        "collective: 2 tiles, the last taken at 11 us",
        "rank 1, one kernel: 1 programs begin with the GEMM, 0 with the collective",
        "waiting",
    ):
        assert f"<!-- {text}" in picture or f"\n{text}" in picture, text
    # Of a trace that does not say how it came about.
    (plain, _) = drawing.draw([chrome.read(written(tmp_path / "b.json", FUSED[:2]))], [0], tmp_path / "b.png")
    assert "<!-- rank 0 -->" in plain.read_text()
    assert "<!-- waiting -->" not in plain.read_text()


def test_a_picture_of_thousands_of_tiles_is_small(tmp_path, drawing):
    spans = []
    for program in range(132):
        for tile in range(40):
            start, exchanges = 40 * tile + program % 37, program > 99 and tile < 20
            spans.append(("store" if exchanges else "compute", 0, program, int(exchanges), start, start + 39.5))
    path = written(tmp_path / "a.json", spans, gemm_wgs=100, comm_wgs=32)
    svg, _ = drawing.draw([chrome.read(path)], [0], tmp_path / "a.svg")
    assert svg.stat().st_size < 400_000
    assert "32 programs of the other queue came" in svg.read_text()


def test_what_cannot_be_drawn(tmp_path, drawing, monkeypatch):
    trace = chrome.read(written(tmp_path / "a.json"))
    with pytest.raises(ArgumentError, match=r"no tile of iris.concurrent on rank 2; its ranks are \[0, 1\]"):
        drawing.draw([trace], [2], tmp_path / "a.svg")
    monkeypatch.setattr(gantt, "available", lambda: False)
    with pytest.raises(ArgumentError, match="needs matplotlib, which is not installed: pip install"):
        drawing.draw([trace], [0], tmp_path / "a.svg")


def test_two_ranks_as_processes(tmp_path, own_script):
    result = own_script(SCRIPT)(
        "--small", "--repeat=1", "--rank=all", f"--out={tmp_path}", command=("-m", "_iris_command", "run", "-n", "2")
    )
    assert result.returncode == 0, result.stdout + result.stderr
    # 22 tiles, and a wait for the peer by each program that comes to the collective.
    assert int(re.search(r"fused.json: (\d+) spans, 0 did not fit", result.stdout)[1]) >= 24
    trace = chrome.read(tmp_path / "fused.json")
    # 3 x 3 tiles of the product on each rank, and 2 of 4 tiles of the sum.
    for rank in (0, 1):
        for name, queue, tiles in (("compute", 0, 9), ("store", 1, 2)):
            found = [s.args["pid_m"] for s in trace.spans if (s.rank, s.name, s.args["pid_n"]) == (rank, name, queue)]
            assert sorted(found) == list(range(tiles))
    facts = trace.metadata[0]["two_queues"]
    assert (facts["mode"], facts["collective"], facts["gemm_wgs"], facts["comm_wgs"]) == ("fused", "all_reduce", 3, 1)
    assert min(facts[f"{kind}_ms"][rank] for kind in ("untraced", "traced") for rank in "01") > 0
    picture = (tmp_path / "two_queues.svg").read_text()
    for text in ("rank 0, one kernel", "rank 1, one kernel", "GEMM: 9 tiles", "collective: 2 tiles"):
        assert text in picture
    assert (tmp_path / "two_queues.png").read_bytes().startswith(b"\x89PNG\r\n")


def main_in_process(monkeypatch, *words):
    import trace_concurrent

    monkeypatch.setattr(sys, "argv", [SCRIPT, *map(str, words)])
    return trace_concurrent.main


def test_a_trace_that_is_there_is_drawn(tmp_path, drawing, monkeypatch, capsys):
    path = written(tmp_path / "a.json")
    main_in_process(monkeypatch, "--from", path, "--figure", tmp_path / "b.svg")()
    assert "a.json: 9 spans, 5 did not fit" in capsys.readouterr().out
    assert {found.name for found in tmp_path.iterdir()} == {"a.json", "b.svg", "b.png"}
    for words, message in (
        (("--from", tmp_path / "c.json"), "No such file"),
        (("--figure", "b.gif"), "possible: .png"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main_in_process(monkeypatch, *words)()
        assert message in capsys.readouterr().err


OTHERS = [pytest.param(n, marks=pytest.mark.slow) for n in ("all_gather", "reduce_scatter", "all_to_all", "broadcast")]


@pytest.mark.parametrize("collective", ["all_reduce", *OTHERS])
def test_rank_0_alone(tmp_path, drawing, monkeypatch, collective):
    monkeypatch.setenv("IRIS_CHECK", "off")  # the script sets it too, and the test puts it back
    words = ("--small", "--alone", "--mode=both", f"--collective={collective}", f"--out={tmp_path}")
    main = main_in_process(monkeypatch, *words)
    sim.run(lambda _ctx: main(), 3, heap_size=1 << 20)
    for mode in ("fused", "concurrent"):
        trace = chrome.read(tmp_path / f"{mode}_rank0.json")
        facts = trace.metadata[0]["two_queues"]
        assert (trace.ranks, facts["alone"], facts["mode"]) == ((0,), True, mode)
        assert facts["untraced_ms"].keys() == {"0"}
        json.dumps(facts)
    assert "rank 0 works alone" in (tmp_path / "two_queues.svg").read_text()


def test_alone_is_for_ranks_in_one_process(tmp_path, drawing, monkeypatch):
    main = main_in_process(monkeypatch, "--small", "--alone", f"--out={tmp_path}")
    with pytest.raises(IrisError, match="iris run --loopback"):
        main()
