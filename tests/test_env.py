"""Environment variables: parsed, refused with the possible values, and documented."""

from pathlib import Path

import pytest

from iris import _env
from iris.errors import EnvironmentValueError

DOCUMENT = Path(__file__).parents[1] / "docs" / "env.md"

VALID = {
    "IRIS_RUNTIME": [("gpu", "gpu"), (" CPU ", "cpu"), ("auto", "auto"), ("sim", "sim")],
    "IRIS_LOG_LEVEL": [("debug", "debug"), ("Info", "info"), ("warning", "warning"), ("ERROR", "error")],
    "IRIS_CHECK": [("first", "first"), ("always", "always"), ("off", "off")],
    "IRIS_TIMEOUT": [("0.5", 0.5), ("60", 60.0), (" 7 ", 7.0), ("1e3", 1000.0)],
    "IRIS_ALLOCATOR": [("torch", "torch"), ("vmem", "vmem"), ("vmem_chunked", "vmem_chunked")],
    "IRIS_GPU_ARCH": [("gfx942", "gfx942"), (" SM_90 ", "sm_90")],
    "IRIS_RANKS_PER_GPU": [("1", 1), ("8", 8)],
    "IRIS_KERNEL_ARTIFACTS_DIR": [("/tmp/kept", "/tmp/kept")],
    "IRIS_CACHE_DIR": [("/tmp/cache", "/tmp/cache")],
    "IRIS_BENCH_RUN": [("/tmp/run.jsonl", "/tmp/run.jsonl")],
}
INVALID = {
    "IRIS_RUNTIME": ["tpu", "simulator", "cpu,gpu"],
    "IRIS_LOG_LEVEL": ["loud", "10"],
    "IRIS_CHECK": ["sometimes", "1"],
    "IRIS_TIMEOUT": ["0", "-1", "inf", "nan", "soon"],
    "IRIS_ALLOCATOR": ["malloc"],
    "IRIS_RANKS_PER_GPU": ["0", "-2", "1.5", "many"],
}


def cases(table):
    return [
        (name, *(value if isinstance(value, tuple) else (value,))) for name, values in table.items() for value in values
    ]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in _env.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_every_variable_has_cases():
    """A new variable without cases here is noticed."""
    assert set(VALID) == set(_env.VARIABLES)
    # Only they take any text.
    any_text = {"IRIS_GPU_ARCH", "IRIS_BENCH_RUN", "IRIS_KERNEL_ARTIFACTS_DIR", "IRIS_CACHE_DIR"}
    assert set(_env.VARIABLES) - set(INVALID) == any_text


@pytest.mark.parametrize(("name", "text", "value"), cases(VALID))
def test_values(monkeypatch, name, text, value):
    monkeypatch.setenv(name, text)
    assert _env.get(name) == value
    assert type(_env.get(name)) is type(value)
    _env.check_all()


@pytest.mark.parametrize("name", list(_env.VARIABLES))
@pytest.mark.parametrize("text", [None, "", "  "])
def test_unset_and_empty_mean_the_default(monkeypatch, name, text):
    if text is not None:
        monkeypatch.setenv(name, text)
    assert _env.get(name) == _env.VARIABLES[name].default
    _env.check_all()


@pytest.mark.parametrize(("name", "text"), cases(INVALID))
def test_unknown_values_are_refused_with_the_possible_ones(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    for call in (lambda: _env.get(name), _env.check_all):
        with pytest.raises(EnvironmentValueError) as caught:
            call()
        assert f"{name}={text!r} is not known" in str(caught.value)
        assert _env.VARIABLES[name].possible in str(caught.value)


def test_a_name_that_is_no_variable_is_our_own_bug():
    with pytest.raises(KeyError):
        _env.get("IRIS_NOTHING")


def test_the_document_is_the_generated_one():
    assert DOCUMENT.read_text() == _env.markdown(), "write it again with _env.markdown()"


def test_the_document_has_a_row_for_every_variable():
    rows = _env.markdown().splitlines()[2:]
    assert rows[0].count("|") == 5
    assert [row.split("`")[1] for row in rows[2:]] == list(_env.VARIABLES)
    assert all(row.count("|") == 5 for row in rows), "a | in a text would break the table"
