"""What an operation will do and why: :class:`Plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SOURCES = ("exact", "nearest", "heuristic", "cache", "predicted", "fallback", "user")


@dataclass(frozen=True)
class Plan:
    """The path that an operation takes for one problem.

    Attributes:
        operation: the operation's name.
        algorithm: the algorithm's name, one of the operation's.
        config: the configuration of its kernel, None when PyTorch's own operations run.
        source: where the choice comes from, one of :data:`SOURCES`.
        reason: a sentence that says why.
        problem: the problem in words: shapes, dtype, ranks.
        speedup: expected speed-up over PyTorch's unfused operations, None when it is not known.
    """

    operation: str
    algorithm: str
    config: Any
    source: str
    reason: str
    problem: str
    speedup: float | None = None

    def __str__(self) -> str:
        known = "" if self.speedup is None else f", expected {self.speedup:.2f}x PyTorch"
        shown = "" if self.config is None else f", {self.config}"
        return f"{self.operation} {self.problem}: {self.algorithm} ({self.source}{known}): {self.reason}{shown}"
