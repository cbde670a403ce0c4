"""Every planted bug is found within some seeds, and its right twin is right and gives no alarm."""

import re
import warnings

import pytest

from iris import errors, sim

from .planted import PLANTED

FAULTY_SEEDS = 20
FIXED_SEEDS = 10
MANY_SEEDS = 200


def named(planted):
    return planted.name.replace(" ", "-")


each = pytest.mark.parametrize("planted", PLANTED, ids=named)


def first_finding(planted):
    """The first error or warning of the simulator, seed by seed.

    Wrong numbers alone are none: they come up in orders that hide the fault, for example when a producer has
    overwritten everything before its consumer looks for the first time.
    """
    for seed in range(FAULTY_SEEDS):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", errors.MissingBarrierWarning)
            try:
                sim.run(planted.faulty, planted.world_size, seed=seed, **planted.options)
            except errors.SimulationError as finding:
                return finding
            except AssertionError:
                pass
        for warning in caught:
            if issubclass(warning.category, errors.MissingBarrierWarning):
                return warning.message
    return None


@each
def test_found(planted):
    finding = first_finding(planted)
    assert finding is not None, f"not found with {FAULTY_SEEDS} seeds"
    assert type(finding) is planted.error, finding
    missing = [part for part in planted.message if not re.search(part, str(finding))]
    assert not missing, f"{missing} not in: {finding}"


def explore_fixed(planted, seeds):
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.MissingBarrierWarning)
        sim.explore(planted.fixed, planted.world_size, seeds=seeds, **planted.options)


@each
def test_no_false_alarm(planted):
    explore_fixed(planted, range(FIXED_SEEDS))


@pytest.mark.slow
@each
def test_no_false_alarm_in_many_orders(planted):
    explore_fixed(planted, range(FIXED_SEEDS, MANY_SEEDS))


@pytest.mark.parametrize(("world", "planted"), [pytest.param(p.world_size, p, id=named(p)) for p in PLANTED])
def test_twin_is_right_on_ranks(ranks, world, planted):
    ranks(world).run(planted.fixed)
