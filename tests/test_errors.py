"""Errors: each is an IrisError and the builtin that a caller would expect, and survives the way to another process."""

import inspect
import pickle

import pytest

from iris import errors
from iris.errors import IrisError, RankLost, WaitRecord, WaitTimeout

CLASSES = [
    c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception) and not issubclass(c, Warning)
]
BUILTINS = {
    "ArgumentError": ValueError,
    "NotSymmetricError": ValueError,
    "NotAMemberError": ValueError,
    "EnvironmentValueError": ValueError,
    "RankMismatch": ValueError,
    "HeapExhausted": MemoryError,
    "DeviceMismatch": RuntimeError,
    "OutputError": RuntimeError,
    "RuntimeConflict": RuntimeError,
    "CaptureError": RuntimeError,
    "UnsupportedError": NotImplementedError,
    "RankLost": RuntimeError,
    "WaitTimeout": TimeoutError,
    "SimulationError": AssertionError,
    "DeadlockError": AssertionError,
    "RaceError": AssertionError,
    "OutOfBoundsError": IndexError,
    "UninitializedReadError": AssertionError,
    "StepLimitError": AssertionError,
}
RECORD = WaitRecord(1, "all_gather_matmul/pull", "tensor flags, element 32", 5, 4, 2, 17)


def test_every_error_is_listed_with_its_builtin():
    assert {c.__name__ for c in CLASSES} == {*BUILTINS, "IrisError"}


@pytest.mark.parametrize("name", list(BUILTINS))
def test_both_ways_of_catching_work(name):
    kind = getattr(errors, name)
    with pytest.raises(BUILTINS[name], match="what was wrong"):
        raise kind("what was wrong")
    with pytest.raises(IrisError, match="what was wrong"):
        raise kind("what was wrong")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_every_error_says_when_it_is_raised(kind):
    assert inspect.getdoc(kind)
    assert kind.__doc__ != kind.__mro__[1].__doc__


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_errors_survive_pickling(kind):
    again = pickle.loads(pickle.dumps(kind("message")))
    assert type(again) is kind
    assert str(again) == "message"


def test_what_errors_carry_survives_pickling():
    lost = pickle.loads(pickle.dumps(RankLost("rank 2 is gone", (2,))))
    assert (str(lost), lost.ranks) == ("rank 2 is gone", (2,))
    timeout = pickle.loads(pickle.dumps(WaitTimeout("a wait did not end", (RECORD,))))
    assert (str(timeout), timeout.records) == ("a wait did not end", (RECORD,))


def test_a_record_reads_as_a_sentence():
    assert str(RECORD) == (
        "rank 1, kernel all_gather_matmul/pull, program 17: waited for tensor flags, element 32 to reach 5, "
        "last saw 4; rank 2 was expected to write it"
    )
    assert str(WaitRecord(0, "k", "f", 1, 0, -1, 0)).endswith("last saw 0; a peer was expected to write it")
