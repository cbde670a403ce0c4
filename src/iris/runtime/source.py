"""Where in the source a program or host code is, leaving out the libraries that it calls."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

_IRIS = Path(__file__).parents[1]
# Kernels may be written in any file but these.
_LIBRARY = (
    *(str(Path(str(package.__file__)).parent) + os.sep for package in (triton, np, torch)),
    *(str(_IRIS / folder) + os.sep for folder in ("runtime", "device", "sim", "testing")),
    # Building blocks of kernels; barrier.py has a kernel of its own.
    *(str(file) for file in sorted((_IRIS / "x").glob("*.py")) if file.name != "barrier.py"),
)
_known: dict[Any, bool] = {}


def is_library(code: Any) -> bool:
    """Whether a frame's code belongs to Triton, PyTorch, NumPy or the parts of Iris that kernels are not written in."""
    known = _known.get(code)
    if known is None:
        known = _known[code] = code.co_filename.startswith(("<", *_LIBRARY))
    return known


def source_line(file: str, line: int) -> str:
    """The text of a line."""
    return linecache.getline(file, line).strip()


def place() -> tuple[str, int]:
    """File and line of the innermost calling frame that is not library code."""
    frame = sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_code):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "unknown", 0
