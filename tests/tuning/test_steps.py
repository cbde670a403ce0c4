"""Tables by bytes: the row and the step that are taken, and what is said of them."""

import pytest

from iris.tuning import steps

ROWS = [
    {
        "machine": "h200", "link": "nvlink", "world": [2, 2], "gather_dim": "1", "source": "two of them",
        "steps": [{"up_to_bytes": 99, "algorithm": "small"}, {"up_to_bytes": 199, "algorithm": "middle"},
                  {"algorithm": "large"}],
    },
    {"link": "nvlink", "world": [2, 4], "source": "heuristic: a thought", "steps": [{"algorithm": "other"}]},
    {"machine": "mi300x", "link": "shared", "world": [2, 8], "source": "one of them", "steps": [{"algorithm": "sole"}]},
]  # fmt: skip


@pytest.fixture(autouse=True)
def made(monkeypatch):
    steps.lookup.cache_clear()
    monkeypatch.setattr(steps, "rows", lambda table: {"made": ROWS}[table])
    yield
    steps.lookup.cache_clear()


def lookup(nbytes, link="nvlink", world=2, machine="h200", **keys):
    return steps.lookup("made", link, world, nbytes, machine, **keys)


@pytest.mark.parametrize(
    ("nbytes", "algorithm", "bounds"),
    [
        (0, "small", "0 to 99"),
        (99, "small", "0 to 99"),
        (100, "middle", "100 to 199"),
        (199, "middle", "100 to 199"),
        (200, "large", "200 and more"),
        (1 << 50, "large", "200 and more"),
    ],
)
def test_a_step_ends_where_it_says(nbytes, algorithm, bounds):
    entry = lookup(nbytes, gather_dim="1")
    assert entry == steps.Entry(
        algorithm, True, f"the table has {algorithm} for {bounds} bytes, 2 ranks, nvlink (two of them)"
    )


def test_the_first_row_that_fits_is_taken():
    assert lookup(1, gather_dim="0").algorithm == "other"
    assert lookup(1, world=3, gather_dim="1").algorithm == "other"
    # A row without a column is for all values of it.
    assert lookup(1, world=4).algorithm == "other"


@pytest.mark.parametrize("asked", [{"world": 5}, {"link": "pcie"}, {"link": "carrier pigeon"}])
def test_where_there_is_no_row_there_is_no_entry(asked):
    assert lookup(1, **asked) is None


@pytest.mark.parametrize("machine", ["h100", "mi300x", ""])
def test_what_was_measured_elsewhere_is_a_guess_and_says_so(machine):
    entry = lookup(1, machine=machine, gather_dim="1")
    assert (entry.algorithm, entry.measured) == ("small", False)
    assert entry.reason.endswith(f"(two of them; a guess for {machine or 'this device'})")


@pytest.mark.parametrize("machine", ["h200", ""])
def test_what_was_measured_nowhere_is_no_measurement(machine):
    entry = lookup(1, world=3, machine=machine)
    assert not entry.measured
    assert entry.reason.endswith("(heuristic: a thought)")


def test_a_row_is_for_its_own_link():
    assert lookup(1, link="shared", machine="mi300x").measured
    assert lookup(1, link="shared", machine="mi300x").algorithm == "sole"
