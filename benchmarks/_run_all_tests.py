"""A plugin of pytest: outcomes are written to a file as they come, and why a test failed with them, so that a run that
is ended early has lost nothing.

python -m pytest -p _run_all_tests --record-outcomes FILE --leave-out FILE --most-ranks 2 ...
"""

from __future__ import annotations

import json
import re
from pathlib import Path

WORST_FIRST = ("failed", "skipped", "passed")
MOST_STARTS = 2
MOST_REASON, MOST_WHY = 1500, 300  # characters that are kept: of a reason the last ones, of its essence the first
_MARKED = re.compile(r"E(?:\s{3}|\s*$)(.*)")  # how pytest begins the lines that say what was wrong
_NAMED = re.compile(
    r"[\w.]*[A-Z]\w*(Error|Exception|Mismatch|Lost|Timeout|Expired|Exhausted|Conflict|Resources|Interrupt|Exit): .*\S"
)


def pytest_addoption(parser):
    parser.addoption("--record-outcomes", metavar="FILE", help="add a line for each phase of each test")
    parser.addoption("--leave-out", metavar="FILE", help="JSON list of tests that are not run")
    parser.addoption("--most-ranks", type=int, help="leave out tests that take more ranks, which would share GPUs")


def pytest_configure(config):
    # Of several processes of pytest the one that collects the reports writes them.
    path = config.getoption("--record-outcomes")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(path)))


def pytest_collection_modifyitems(config, items):
    path = config.getoption("--leave-out")
    known = set(json.loads(Path(path).read_text())) if path else set()
    most = config.getoption("--most-ranks") or float("inf")
    out = {item for item in items if item.nodeid in known or _ranks(item) > most}
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]


def _ranks(item):
    world = getattr(item, "callspec", None) and item.callspec.params.get("world")
    return world if isinstance(world, int) else 0


class Recorder:
    """Writes a line when a test starts and one for each of its phases."""

    def __init__(self, path):
        self.path = path

    def _add(self, **line):
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logstart(self, nodeid):
        self._add(test=nodeid, started=True)

    def pytest_runtest_logreport(self, report):
        self._add(test=report.nodeid, when=report.when, outcome=report.outcome, **_reason(report))

    def pytest_collectreport(self, report):
        if report.failed:
            self._add(test=report.nodeid, when="collect", outcome="failed", **_reason(report))


def _reason(report):
    # The essence is of all of it, since its line may be far from the end.
    text = report.longreprtext if report.failed else ""
    return {"why": essence(text), "reason": text[-MOST_REASON:]} if report.failed else {}


def _lines(path):
    """What was written, in order."""
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            yield json.loads(text)
        except ValueError:
            continue  # cut off in the middle


def outcomes(path):
    """What became of each test: ``passed``, ``skipped``, ``failed``, or ``started`` when it has not ended.

    A test that was started :data:`MOST_STARTS` times and never ended has failed.
    """
    found, starts = {}, {}
    for line in _lines(path):
        test = line["test"]
        if line.get("started"):
            starts[test] = starts.get(test, 0) + 1
            found[test] = ("passed", False)
            continue
        before, _ = found.get(test, ("passed", False))
        worst = min(before, line["outcome"], key=WORST_FIRST.index)
        found[test] = (worst, line["when"] not in ("setup", "call"))
    return {
        test: outcome if ended else "failed" if starts.get(test, 0) >= MOST_STARTS else "started"
        for test, (outcome, ended) in found.items()
    }


def reasons(path):
    """The essence of why each test failed that did."""
    found = {}
    for line in _lines(path):
        if line.get("started"):
            found.pop(line["test"], None)
        elif line["outcome"] == "failed":
            # What went wrong first is the reason, not what cleaning up then met.
            found.setdefault(line["test"], line.get("why", "no reason was recorded"))
    failed = [test for test, outcome in outcomes(path).items() if outcome == "failed"]
    return {test: found.get(test, f"it was started {MOST_STARTS} times and never ended") for test in failed}


def essence(reason):
    """The line of a reason that says most: the last one that names an error, else the first of those marked last."""
    lines = reason.splitlines()
    marked = [(place, match[1].strip()) for place, match in enumerate(map(_MARKED.match, lines)) if match]
    named = [text for _, text in marked if _NAMED.match(text)]
    if named:
        return named[-1][:MOST_WHY]
    first = ""
    for number, (place, text) in enumerate(marked):
        if text and (not first or marked[number - 1][0] != place - 1):
            first = text
    last = next((line.strip() for line in reversed(lines) if line.strip()), "pytest gave no reason")
    return (first or last)[:MOST_WHY]
