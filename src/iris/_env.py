"""Every environment variable of Iris: name, type, default and meaning. No other file reads the environment for them.

``docs/env.md`` is what :func:`markdown` gives; a test compares the two.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from iris.errors import EnvironmentValueError


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: the variable's name.
        default: the value used when it is unset or empty.
        possible: the possible values, in words, for the documentation and the error text.
        meaning: what it changes.
        parse: turns the text into the value; raises ValueError for text it does not know.
    """

    name: str
    default: Any
    possible: str
    meaning: str
    parse: Callable[[str], Any]


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in names:
            raise ValueError(text)
        return value

    return parse


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError(text)
    return value


_LOG_LEVELS = ("debug", "info", "warning", "error")

_ALL = (
    Variable(
        "IRIS_RUNTIME",
        "auto",
        "auto, gpu, cpu or sim",
        "Where ranks run. auto takes gpu when a GPU is visible and cpu otherwise. sim interprets kernels as cpu does, "
        "for `iris.sim` and `iris run --sim`.",
        _choice("auto", "gpu", "cpu", "sim"),
    ),
    Variable(
        "IRIS_LOG_LEVEL",
        "warning",
        "debug, info, warning or error",
        "Lowest level that the `iris` logger prints. info prints each plan once per shape.",
        _choice(*_LOG_LEVELS),
    ),
    Variable(
        "IRIS_CHECK",
        "first",
        "first, always or off",
        "When the arguments of an operation are compared across ranks: at the first call of a combination, at every "
        "call, or never.",
        _choice("first", "always", "off"),
    ),
    Variable(
        "IRIS_TIMEOUT",
        60.0,
        "seconds, more than 0",
        "Longest time that the host waits for a peer before it becomes an error. Waits inside kernels end after three "
        "quarters of it, so that what they saw reaches the ranks that wait on the host.",
        _positive_float,
    ),
    Variable(
        "IRIS_ALLOCATOR",
        None,
        "torch, vmem or vmem_chunked",
        "Overrides the allocator_type argument of iris.iris(). Accepted for programs written for other releases; one "
        "allocator serves all three names.",
        _choice("torch", "vmem", "vmem_chunked"),
    ),
    Variable(
        "IRIS_GPU_ARCH",
        None,
        "an architecture (gfx942, sm_90, …) or a product (mi300x, h200, …) that Iris knows",
        "Overrides the detected GPU when configurations are chosen. A bare architecture keeps the product that is "
        "there if it has that architecture.",
        lambda text: text.strip().lower(),
    ),
    Variable(
        "IRIS_KERNEL_ARTIFACTS_DIR",
        None,
        "a folder",
        "Where `iris.tracing.kernel_artifacts.iris_launch` keeps what kernels were compiled to; unset keeps nothing.",
        str,
    ),
    Variable(
        "IRIS_CACHE_DIR",
        None,
        "a folder",
        "Where what was tuned on this machine is kept, in its folder `tuned`. Unset takes the folder `iris` where the "
        "platform keeps caches: `$XDG_CACHE_HOME` or `~/.cache`, `~/Library/Caches` on macOS.",
        str,
    ),
    Variable(
        "IRIS_RANKS_PER_GPU",
        None,
        "a whole number above 0",
        "Set by `iris run` when several ranks share a GPU; persistent kernels keep to their share of compute units.",
        _positive_int,
    ),
    Variable(
        "IRIS_BENCH_RUN",
        None,
        "a file",
        "Set by a benchmark script for the ranks that it starts: what to measure, and where rank 0 writes the results.",
        str,
    ),
)

VARIABLES: dict[str, Variable] = {variable.name: variable for variable in _ALL}


# Operations ask at every call.
_parsed: dict[tuple[str, str], Any] = {}


def get(name: str) -> Any:
    """Value of variable ``name``, parsed; its default when unset or empty.

    Raises:
        EnvironmentValueError: the variable holds text that it does not know.
    """
    text = os.environ.get(name, "")
    if (name, text) in _parsed:
        return _parsed[name, text]
    variable = VARIABLES[name]
    try:
        value = variable.parse(text) if text.strip() else variable.default
    except ValueError:
        raise EnvironmentValueError(f"{name}={text!r} is not known; possible: {variable.possible}") from None
    _parsed[name, text] = value
    return value


def check_all() -> None:
    """Parse every variable that is set, so that a wrong value is reported before any work is done.

    Raises:
        EnvironmentValueError: names the first variable with an unknown value.
    """
    for name in VARIABLES:
        get(name)


def markdown() -> str:
    """The table of ``docs/env.md``."""
    rows = ["| variable | possible values | default | meaning |", "|---|---|---|---|"]
    for v in _ALL:
        default = "unset" if v.default is None else str(v.default)
        rows.append(f"| `{v.name}` | {v.possible} | {default} | {v.meaning} |")
    return "# Environment variables\n\n" + "\n".join(rows) + "\n"
