"""Shapes of all_gather_matmul that were measured elsewhere, as the package ships them; read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TABLES = Path(__file__).parents[1] / "src" / "iris" / "tuning" / "data" / "tuned" / "all_gather_matmul"
MACHINES = ("mi300x",)  # whose tables have shapes that upstream published


def shapes(machine: str) -> list[dict[str, Any]]:
    """What the table of a machine has: ``label``, ``M``, ``N``, ``K``, ``num_ranks``, ``speedup``, ``tflops``."""
    table = json.loads((_TABLES / f"{machine}.json").read_text())
    found = []
    for entry in table["entries"]:
        if entry["options"] == {"gather_dim": "1", "transpose": "NN"}:
            figures = {name: entry["measured"][name] for name in ("speedup", "tflops")}
            found.append({"label": entry["name"], **entry["sizes"], "num_ranks": entry["world"], **figures})
    return found


def shown(entry: dict[str, Any]) -> str:
    """How the axis of a benchmark names a shape."""
    return f"{entry['M']}x{entry['N']}x{entry['K']}"
