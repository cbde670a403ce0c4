"""Files of traces: what is read is what was written, figures and pictures of handmade ones, errors for what is none."""

import json
import re

import pytest

from handmade_trace import EVENTS, METADATA, handmade
from iris.errors import ArgumentError
from iris.tracing import chrome, figures, gantt


def test_a_trace_is_read_as_it_was_written(tmp_path):
    trace = chrome.read(handmade(tmp_path / "sub" / "trace.json"))
    assert trace.ranks == (0, 1, 2)
    assert (trace.predicted, trace.aligned, trace.uncertainty_us) == (None, True, 2.5)
    assert trace.dropped == {0: 0, 1: 7, 2: 0}
    assert trace.metadata[0]["gpu_device_name"] == METADATA["gpu_device_name"]
    first = min(start for _, _, _, start, _, _, _ in EVENTS)
    for span, (name, rank, track, start, end, target, payload) in zip(trace.spans, EVENTS, strict=True):
        assert (span.name, span.rank, span.track) == (name, rank, track)
        assert (span.target_rank, span.payload_bytes) == (target, payload)
        assert span.start_us == pytest.approx(start - first, abs=1e-6)
        assert span.end_us is None if end is None else span.end_us == pytest.approx(end - first, abs=1e-6)


def test_times_are_rounded_to_nanoseconds_and_never_negative():
    event = chrome.event("wait", 0, "SM0", 1.00049, 1.0004, {})
    assert (event["ts"], event["dur"]) == (1.0, 0.0)
    event = chrome.event("wait", 0, "SM0", 1_700_000_000_000_000.25, 1_700_000_000_000_010.5, {})
    assert event["ts"] + event["dur"] == 1_700_000_000_000_010.5


def test_figures(tmp_path):
    trace = chrome.read(handmade(tmp_path / "trace.json"))
    rows = {(row.rank, row.kind): row for row in figures.rows(trace)}
    assert set(rows) == {(rank, kind) for rank in (0, 1) for kind in ("fetch", "compute", "wait")}
    fetch = rows[0, "fetch"]
    assert (fetch.count, fetch.payload_bytes, fetch.open) == (3, 1000 + 200 + 34, 0)
    assert (fetch.total_us, fetch.median_us) == pytest.approx((10 + 4 + 1, 4))
    assert (rows[1, "compute"].count, rows[1, "compute"].total_us, rows[1, "compute"].open) == (1, 0, 1)
    waits = [(w.rank, w.host, w.target_rank, w.count, w.total_us, w.longest_us) for w in figures.waits(trace)]
    assert waits == [
        (1, False, 0, 2, pytest.approx(30 + 12), pytest.approx(30)),
        (0, False, 1, 1, pytest.approx(8.5), pytest.approx(8.5)),
        (1, True, 2, 1, pytest.approx(2), pytest.approx(2)),
    ]


def colours(svg):
    return set(re.findall(r"#[0-9a-f]{6}", svg))


def test_pictures(tmp_path):
    trace = chrome.read(handmade(tmp_path / "trace.json"))
    assert gantt.draw(trace, tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG\r\n")
    picture = gantt.draw(trace, tmp_path / "new" / "a.svg").read_text()
    for text in ("Rank 0", "Rank 1 (7 events missing)", "Rank 2", "SM3", "microseconds", "Measured on Model T"):
        assert f"<!-- {text} -->" in picture, text
    drawn = {gantt._COLOURS[kind] for kind in ("fetch", "compute", "wait")}
    assert drawn <= colours(picture)
    assert gantt._COLOURS["reduce"] not in colours(picture)


def test_a_picture_of_many_tracks_and_of_none(tmp_path):
    spans = tuple(chrome.Span(f"own_{i % 9}", 0, f"SM{i}", i, i + 5.0, -1, 0, {}) for i in range(300))
    for name, chosen in (("many", spans), ("none", ())):
        trace = chrome.Trace(chosen, (0,), predicted="h200")
        picture = gantt.draw(trace, tmp_path / f"{name}.svg").read_text()
        assert "<!-- Predicted for h200, not measured -->" in picture
        assert ("<!-- 300 tracks -->" in picture) == (name == "many")


def test_files_of_several_ranks(tmp_path):
    def one(rank, **facts):
        event = chrome.event("fetch", rank, "SM0", 100.0 + rank, 110.0, {"target_rank": 1 - rank})
        path = tmp_path / f"{rank}.json"
        chrome.write(path, chrome.document([rank], [event], {"rank": rank, "aligned": False, **facts}))
        return path

    trace = chrome.read(one(0, dropped_events=3), one(1))
    assert (trace.ranks, trace.dropped, trace.aligned) == ((0, 1), {0: 3}, False)
    assert [(span.rank, span.start_us) for span in trace.spans] == [(0, 0.0), (1, 1.0)]
    assert "clocks were not compared" in figures.report(trace)
    assert chrome.read(one(0)).aligned, "one rank has one clock"
    assert chrome.read(one(0, clock="host"), one(1, clock="host")).aligned, "the same clock"
    assert not chrome.read(one(0, clock="a"), one(1, clock="b")).aligned
    with pytest.raises(ArgumentError, match="both hold rank 1"):
        chrome.read(one(1), one(1))
    with pytest.raises(ArgumentError, match="mix measured and predicted"):
        chrome.read(one(0), one(1, predicted=True, machine="h200"))


EVENT = {"name": "wait", "ph": "X", "pid": 0, "tid": "SM0", "ts": 1.0, "dur": 2.0, "args": {"target_rank": 1}}
BAD = {
    "no JSON": ("{", "is no JSON"),
    "no text": (b"\xff\xfe\x00", "is no JSON"),
    "a list": ([], "no list `traceEvents`"),
    "no events": ({"metadata": {}}, "no list `traceEvents`"),
    "events are no list": ({"traceEvents": {}}, "no list `traceEvents`"),
    "empty": ({"traceEvents": []}, "names no rank"),
    "metadata": ({"traceEvents": [EVENT], "metadata": 3}, "`metadata` is no object"),
    "unit": ({"traceEvents": [EVENT], "metadata": {"time_unit": "cycles"}}, "times are in 'cycles'"),
    "dropped": ({"traceEvents": [EVENT], "metadata": {"dropped_events": {"0": "many"}}}, "dropped_events"),
    "uncertainty": ({"traceEvents": [EVENT], "metadata": {"clock_uncertainty_us": "much"}}, "could not convert"),
    "an event is a number": ({"traceEvents": [EVENT, 3]}, "event 1 is none of Iris"),
    "no time": ({"traceEvents": [{**EVENT, "ts": None}]}, "event 0 is none of Iris"),
    "no length": ({"traceEvents": [{k: v for k, v in EVENT.items() if k != "dur"}]}, "KeyError: 'dur'"),
    "length": ({"traceEvents": [{**EVENT, "dur": -1}]}, "dur is -1"),
    "rank": ({"traceEvents": [{**EVENT, "pid": "main"}]}, "event 0 is none of Iris"),
    "args": ({"traceEvents": [{**EVENT, "args": [1]}]}, "event 0 is none of Iris"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_trace(tmp_path, name):
    content, message = BAD[name]
    path = tmp_path / "bad.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ArgumentError, match=re.escape(message)) as caught:
        chrome.read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ArgumentError, match="No such file"):
        chrome.read(tmp_path / "none.json")
    with pytest.raises(ArgumentError, match="no file"):
        chrome.read()
