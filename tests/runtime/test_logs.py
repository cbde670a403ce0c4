"""The logger: levels, the shape of a line, and who hears it."""

import importlib
import logging
import re
import subprocess
import sys

import pytest

from iris.errors import ArgumentError, EnvironmentValueError
from iris.runtime import logs


@pytest.fixture(autouse=True)
def restored():
    level = logs.logger.level
    yield
    logs.logger.setLevel(level)


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_constants():
    assert (logs.DEBUG, logs.INFO, logs.WARNING, logs.ERROR) == (10, 20, 30, 40)
    assert logs.logger is logging.getLogger("iris")


@pytest.mark.parametrize("level", [logs.DEBUG, logs.INFO, logs.WARNING, logs.ERROR, logging.CRITICAL])
def test_set_logger_level(level):
    logs.set_logger_level(level)
    assert logs.logger.level == level
    logs.set_logger_level(logs.DEBUG)
    logs.set_logger_level(logging.getLevelName(level).lower())
    assert logs.logger.level == level


@pytest.mark.parametrize("level", [15, -1, 0, "loud", "", None, True, 10.5, [10]])
def test_unknown_levels_name_the_known_ones(level):
    before = logs.logger.level
    for call in (logs.set_logger_level, lambda value: logs.log_rank(value, "text")):
        with pytest.raises(ArgumentError, match=re.escape(repr(level)) + r".*DEBUG \(10\), INFO \(20\), WARNING") as e:
            call(level)
        assert isinstance(e.value, ValueError)
    assert logs.logger.level == before


def test_a_line(capsys):
    logs.set_logger_level("info")
    logs.log_rank(logs.INFO, "sent %d of %s", 3, "x", rank=2, num_ranks=4)
    (line,) = lines(capsys)
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO \[Iris\] \[2/4\] \[test_logs\] sent 3 of x", line)


@pytest.mark.parametrize(
    ("known", "place"),
    [({}, "?/?"), ({"rank": 0}, "0/?"), ({"num_ranks": 8}, "?/8"), ({"rank": 0, "num_ranks": 1}, "0/1")],
)
def test_ranks_that_are_not_known(capsys, known, place):
    logs.log_rank("error", "100%", **known)
    assert lines(capsys)[0].endswith(f"ERROR [Iris] [{place}] [test_logs] 100%")


def test_a_plain_record_and_a_traceback(capsys):
    logs.logger.error("plain")
    try:
        raise KeyError("missing")
    except KeyError:
        logs.logger.exception("failed")
    text = lines(capsys)
    assert text[0].endswith("ERROR [Iris] [?/?] [test_logs] plain")
    assert text[1].endswith("failed")
    assert text[-1] == "KeyError: 'missing'"


def test_filtering(capsys):
    logs.set_logger_level(logs.WARNING)
    for level in (logs.DEBUG, logs.INFO, logs.WARNING, logs.ERROR):
        logs.log_rank(level, "level %d", level)
    assert [line[-8:] for line in lines(capsys)] == ["level 30", "level 40"]


def test_nothing_is_formatted_when_switched_off():
    class Costly:
        def __str__(self):
            raise AssertionError("formatted")

    logs.set_logger_level(logs.ERROR)
    logs.log_rank(logs.INFO, "%s", Costly())
    logs.log_rank(logs.INFO, Costly())


def test_stacklevel_names_the_callers_module(capsys):
    helper = {"logs": logs}
    exec(compile("def say(n): logs.log_rank(40, 'x', stacklevel=n)", "/somewhere/helper.py", "exec"), helper)
    helper["say"](1)
    helper["say"](2)
    first, second = lines(capsys)
    assert "[helper]" in first
    assert "[test_logs]" in second


def test_one_handler_however_often_the_module_is_loaded():
    handlers = list(logs.logger.handlers)
    level = logs.logger.level
    importlib.reload(logs)
    assert logs.logger.handlers == handlers
    assert logs.logger.level == level
    ours = [handler for handler in handlers if handler.get_name() == "iris"]
    assert len(ours) == 1
    assert isinstance(ours[0], logging.StreamHandler)
    assert type(ours[0].formatter).__name__ == "IrisFormatter"
    assert not logs.logger.propagate


def test_caplog_hears_the_records_once(caplog):
    logs.logger.addHandler(caplog.handler)
    try:
        logs.log_rank("error", "heard", rank=1, num_ranks=2)
    finally:
        logs.logger.removeHandler(caplog.handler)
    assert [(record.message, record.iris_rank) for record in caplog.records] == [("heard", 1)]


@pytest.mark.parametrize(
    ("text", "level"), [(None, 30), ("", 30), ("debug", 10), ("INFO", 20), ("warning", 30), ("error", 40)]
)
def test_level_from_the_environment(monkeypatch, text, level):
    monkeypatch.delenv("IRIS_LOG_LEVEL", raising=False)
    if text is not None:
        monkeypatch.setenv("IRIS_LOG_LEVEL", text)
    logs.logger.setLevel(logging.NOTSET)
    importlib.reload(logs)
    assert logs.logger.level == level


def test_wrong_level_in_the_environment(monkeypatch):
    monkeypatch.setenv("IRIS_LOG_LEVEL", "loud")
    logs.logger.setLevel(logging.NOTSET)
    with pytest.raises(
        EnvironmentValueError, match="IRIS_LOG_LEVEL='loud' is not known; possible: debug, info, warning"
    ):
        importlib.reload(logs)


def test_level_that_the_program_set_first_stays(monkeypatch):
    monkeypatch.setenv("IRIS_LOG_LEVEL", "debug")
    logs.logger.setLevel(logs.ERROR)
    importlib.reload(logs)
    assert logs.logger.level == logs.ERROR


def test_root_logger_is_left_alone():
    code = "import logging; from iris.runtime import logs; print(logging.root.handlers, logging.root.level)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert result.stdout.strip() == "[] 30", result.stderr
