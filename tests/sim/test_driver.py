"""Room for spilled registers, with an imagined driver."""

from types import SimpleNamespace

import pytest

from iris.sim import driver


@pytest.fixture
def room(monkeypatch):
    """Bytes a thread, by when they were set; the first is what CUDA starts with."""
    given = [1024]
    monkeypatch.setattr(driver, "stack_bytes", lambda: given[-1])
    monkeypatch.setattr(driver, "set_stack_bytes", given.append)
    return given


def kernel(n_spills):
    return SimpleNamespace(n_spills=n_spills)


def test_room_is_made_for_the_largest_kernel_and_given_back(room):
    spills = driver.Spills()
    for words in (0, 256, 700, 300, 1500):
        spills.make_room(kernel(words))
    assert room == [1024, 2048, 2800, 6000]
    spills.give_back()
    assert room == [1024, 2048, 2800, 6000, 1024]


def test_nothing_more_is_set_where_nothing_spills(room):
    room[0] = 4096
    spills = driver.Spills()
    spills.make_room(kernel(0))
    spills.make_room(kernel(None))
    spills.make_room(kernel(1024))
    spills.give_back()
    assert room == [4096]


def test_without_a_driver_nothing_is_known_and_nothing_set(monkeypatch):
    monkeypatch.setattr(driver, "_driver", lambda: None)
    assert driver.stack_bytes() is None
    assert not driver.loads_lazily()
    spills = driver.Spills()
    spills.make_room(kernel(5000))
    spills.give_back()
