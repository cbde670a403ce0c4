"""Tables and rules of a test's own, in the place of all that the package ships."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from iris import _target
from iris.ops import choice
from iris.tuning import heuristics, selection, store, tables
from iris.tuning.autotune import params_of
from iris.tuning.query import Entry

# Links that nothing was measured over: the cost model decides. What it must promise at least, by vendor.
WANTED = {"nvidia": 1.1, "amd": 1.4}
# GB/s into a rank where that is not the rate of the links that the machine's devices have.
SLOW = {"pcie": 25.0}
UNMEASURED = [
    (target, link)
    for target in _target.KNOWN.values()
    for link in ("pcie", "xgmi")
    if link == target.link or (link, target.vendor) == ("pcie", "nvidia")
]
unmeasured = pytest.mark.parametrize(("target", "link"), UNMEASURED, ids=[f"{t.product}-{li}" for t, li in UNMEASURED])

PROVENANCE = {"here": {"hardware": "a machine", "source": "a test"}}


def forget():
    """Nothing that was read or selected is remembered."""
    for remembering in (tables.load, heuristics._load, selection.select, selection.unproven):
        remembering.cache_clear()


class Files:
    """What is shipped; nothing until something is added."""

    def __init__(self):
        self._files = {}

    def read(self, kind, operation, machine):
        return self._files.get((kind, operation, machine))

    def table(self, operation, machine, *entries, sets=(), **others):
        """A table. Entries and sets say what differs from the usual."""
        usual = {"link": "xgmi", "world": 8, "dtype": "16-bit", "options": {}}
        entries = [
            usual | {"name": f"case{number}", "algorithm": "hbm_buffer", "params": {}} | entry
            for number, entry in enumerate(entries)
        ]
        sets = [usual | {"enabled": True, "evidence": "measured", "defaults": None} | group for group in sets]
        self._add("tuned", operation, machine, {"entries": entries, "sets": sets, **others})

    def rules(self, operation, machine, then, **others):
        """Rules that set the same for every problem."""
        self._add("heuristics", operation, machine, {"groups": [{"rules": [{"then": then}]}], **others})

    def _add(self, kind, operation, machine, data):
        head = {"schema": 1, "operation": operation, "machine": machine, "provenance": PROVENANCE}
        self._files[kind, operation, machine] = head | data
        forget()


@contextmanager
def instead():
    """The :class:`Files` that are read instead of the package's."""
    files = Files()
    with pytest.MonkeyPatch.context() as patch:
        for module in (tables, heuristics):
            patch.setattr(module, "read", files.read)
        forget()
        yield files
    forget()


@contextmanager
def chosen(ctx, algorithm, config):
    """The library chooses this for every fused operation that leaves it open. Collective: ranks may share a process."""
    made_up = selection.Selection("exact", algorithm, params_of(config), None, "a test says so")
    choice.select = lambda query, record=None: made_up
    try:
        yield
        ctx.barrier()
    finally:
        choice.select = selection.select


def case(M, N, K, speedup, milliseconds=1.0, **others):
    """An entry of a table."""
    measured = {"ms": milliseconds, "torch_ms": None, "speedup": speedup}
    return {"sizes": {"M": M, "N": N, "K": K}, "measured": measured, **others}


def record(query, algorithm="hbm_buffer", default_key="", speedup=1.5, **params):
    """What was tuned for a case on this machine."""
    torch_milliseconds = None if speedup is None else 2.0 * speedup
    entry = Entry("best", algorithm, params, query.sizes, 2.0, torch_milliseconds, speedup, "a test")
    return store.as_record(entry, default_key)


def tuned(*known):
    """``ctx.service`` of a stand-in context that knows these (query, record)."""
    found = dict(known)
    return lambda name: SimpleNamespace(find=lambda query, members: {"tuned": found}[name].get(query))
