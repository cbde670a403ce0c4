"""``iris run --sim`` and ``iris run --loopback``: the ranks of a program as coroutines of one process.

With ``--sim`` the simulator runs them and checks every access; with ``--loopback`` they share one GPU. The launcher
becomes that process, so that signals, standard input and the exit code are the program's own. What it does is in
``_simulated.py``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from iris.cli.run import check_command
from iris.errors import ArgumentError
from iris.runtime import gpus

_PROGRAM = str(Path(__file__).with_name("_simulated.py"))
_VISIBILITY = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}
# Which options each way to run takes beside those of every run.
_OPTIONS = {
    "--sim": ("--seed", "--seeds", "--device", "--resident-programs", "--check", "--step-limit"),
    "--loopback": ("--seed", "--seeds", "--link-gbps", "--link-per-peer"),
}


def check_options(mode: str, given: Mapping[str, object]) -> None:
    """Refuse options that mean nothing here.

    Args:
        mode: ``--sim``, ``--loopback``, or empty for ranks that are processes.
        given: the options of :func:`simulate` that were given, by name.

    Raises:
        ArgumentError: names an option that ``mode`` does not take, and what takes it.
    """
    for name in given:
        if name not in _OPTIONS.get(mode, ()):
            takers = " or ".join(m for m, names in _OPTIONS.items() if name in names)
            raise ArgumentError(f"{name} needs {takers}" + (f"; it means nothing with {mode}" if mode else ""))
    if "--seed" in given and "--seeds" in given:
        raise ArgumentError("--seed runs one seed and --seeds the first so many; give one of them")
    if "--link-per-peer" in given and "--link-gbps" not in given:
        raise ArgumentError("--link-per-peer needs the rate of a link: give --link-gbps")


def simulate(
    mode: str,
    command: Sequence[str],
    num_ranks: int,
    given: Mapping[str, object],
    *,
    timeout: float | None = None,
    python: bool = True,
) -> NoReturn:
    """Become the process that runs a program's ranks.

    Args:
        mode: ``--sim`` or ``--loopback``.
        command: ``["script.py", argument...]`` or ``["-m", "module", argument...]``.
        num_ranks: how many ranks, from 1.
        given: the options that were given, by name, such as ``{"--seed": 3}``; True for a flag.
        timeout: seconds after which the process ends, with a report of where it was; None for no limit.
        python: False is refused: other programs cannot be ranks of one process.

    Raises:
        ArgumentError: the arguments cannot be used, or there is no GPU for ``--loopback``.
    """
    check_options(mode, given)
    if not python:
        raise ArgumentError(f"--no-python starts a process for each rank; {mode} runs Python code in one process")
    kind, words = check_command(command, num_ranks, timeout, python)
    if kind == "script" and not os.path.isfile(words[0]):
        raise ArgumentError(f"{words[0]!r} is not a file; {mode} runs a script, or a module with -m")
    options = {name[2:].replace("-", "_"): value for name, value in given.items()}
    seeds = options.pop("seeds", None)
    seed = options.pop("seed", 0)
    settings = []
    for name, value in given.items():
        if name not in ("--seed", "--seeds"):
            settings += [name] if value is True else [name, str(value)]
    request = {
        "kind": kind,
        "ranks": num_ranks,
        "seeds": seeds,
        "seed": seed,
        "timeout": timeout,
        "options": {"on": "cpu" if mode == "--sim" else "gpu", **options},
        # The command that repeats one seed, without the seed.
        "repeat": [["iris", "run", mode, "-n", str(num_ranks)], [*settings, *command]],
    }
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, **_environment(mode)}
    if mode == "--loopback":
        environment.pop("TRITON_INTERPRET", None)
    os.execve(sys.executable, [sys.executable, _PROGRAM, json.dumps(request), *words], environment)


def _environment(mode: str) -> dict[str, str]:
    """What the process needs in its environment."""
    # Sets of strings in the same order in every run: the same seed gives the same run.
    values = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED") or "0"}
    if mode == "--sim":
        # Tensors are on the CPU; a program that asks torch for a GPU is to find none.
        return {**values, "IRIS_RUNTIME": "sim", **dict.fromkeys(_VISIBILITY.values(), "-1")}
    found = gpus.visible()
    if not found.count:
        raise ArgumentError("--loopback runs all ranks on one GPU, and none is visible here; --sim needs none")
    # One GPU, the first: a rank that takes GPU LOCAL_RANK % count takes the one that all share.
    name = _VISIBILITY[found.vendor]
    return {**values, "IRIS_RUNTIME": "gpu", name: os.environ.get(name, "").split(",")[0] or "0"}
