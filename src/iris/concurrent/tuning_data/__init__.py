"""Splits and tiles that are worth timing, derived from measurements of whole grids: ``candidate_set.json``.

``SCHEMA.md`` says what the files hold. ``collect`` measures grids, ``derive`` makes the set of them; both are commands:
``python -m iris.concurrent.tuning_data.collect`` and ``... .derive``.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

SCHEMA = 1
FILE = "candidate_set.json"


def load_candidate_set() -> dict[str, Any]:
    """What is known of each architecture, by its name; a copy that is the caller's."""
    return json.loads(_text())["archs"]


@cache
def candidates_of(arch: str) -> tuple[tuple[float, tuple[int, int, int]], ...]:
    """Share of the programs that begin with the GEMM, and tile, the most useful first; none for an architecture that
    nothing is known of."""
    known = load_candidate_set().get(arch)
    return tuple((one["split_frac"], tuple(one["gemm_block"])) for one in known["order"]) if known else ()


def split_of(split_frac: float, num_wgs: int) -> int:
    """The number of programs that a share of them is."""
    return max(1, min(num_wgs, round(split_frac * num_wgs)))


@cache
def _text() -> str:
    return (resources.files(__name__) / FILE).read_text(encoding="utf-8")
