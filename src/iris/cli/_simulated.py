"""The process of ``iris run --sim`` and ``iris run --loopback``: runs a program once for each rank, in one world.

Started by path, as ``python _simulated.py REQUEST TARGET [ARGUMENT...]``; REQUEST is what :mod:`iris.cli.simulate`
wrote. The program is compiled once and executed by each rank in a module of its own, which is ``__main__`` while that
rank runs. Modules that the program imports are one for all ranks.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import random
import shlex
import sys
import threading
import traceback
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

RULE = "-" * 100


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        code: its code.
        file: its file, absolute.
        spec: how it was found when it is a module; None for a script.
    """

    code: CodeType
    file: str
    spec: ModuleSpec | None = None

    def module(self) -> ModuleType:
        """A fresh ``__main__`` for it."""
        module = ModuleType("__main__")
        loader = self.spec.loader if self.spec else SourceFileLoader("__main__", self.file)
        module.__dict__.update(
            __file__=self.file,
            __loader__=loader,
            __spec__=self.spec,
            __package__=self.spec.parent if self.spec else None,
            __cached__=self.spec.cached if self.spec else None,
        )
        return module


class Arguments:
    """``sys.argv`` of each rank."""

    def __init__(self, size: int):
        self._lists = [list(sys.argv) for _ in range(size)]
        self._outside = sys.argv

    def enter(self, rank: int) -> None:
        self._outside = sys.argv
        sys.argv = self._lists[rank]

    def leave(self, rank: int) -> None:
        self._lists[rank] = sys.argv
        sys.argv = self._outside


@dataclass(frozen=True)
class Failure:
    """An error that a rank's program ended with; ``trace`` begins in the program."""

    rank: int
    error: BaseException
    trace: TracebackType | None


def load(kind: str, target: str, arguments: list[str], safe_path: bool) -> Program:
    """Compile the program, with ``sys.argv`` and ``sys.path`` as ``python TARGET`` or ``python -m TARGET`` has them."""
    sys.argv = [target, *arguments]
    if not safe_path:
        sys.path.insert(0, os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(target)))
    if kind == "module":
        return _module(target)
    file = os.path.abspath(target)
    with open(file, "rb") as source:
        return Program(compile(source.read(), file, "exec", dont_inherit=True), file)


def _module(name: str) -> Program:
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        sys.exit(f"iris run: there is no module {name!r} that can be run")
    sys.argv[0] = spec.origin or name
    return Program(code, spec.origin or name, spec)


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def run(program: Program, request: dict[str, Any], seed: int) -> int:
    """Run every rank with one seed; say on standard error what went wrong. Returns the exit code."""
    from greenlet import GreenletExit
    from numpy.random import seed as seed_numpy

    from iris.errors import IrisError, SimulationError
    from iris.sim.rank_state import MainModules
    from iris.sim.running import simulate

    modules = [program.module() for _ in range(request["ranks"])]
    failures: list[Failure] = []

    def of_rank(rank: int) -> Any:
        def body() -> None:
            # A process takes these seeds from the system: other numbers on each rank, but also in each run.
            random.seed(rank)
            seed_numpy(rank)
            try:
                exec(program.code, modules[rank].__dict__)
            except GreenletExit:
                raise
            except BaseException as error:
                if isinstance(error, SystemExit) and error.code in (None, 0):
                    return
                trace = error.__traceback__
                failures.append(Failure(rank, error, trace.tb_next if trace is not None else None))
                raise

        return body

    size = len(modules)
    try:
        switches = [MainModules(modules), Arguments(size)]
        simulate([of_rank(rank) for rank in range(size)], seed=seed, switches=switches, **request["options"])
    except KeyboardInterrupt:
        _say("iris run: ended by signal 2 (SIGINT).")
        return 130
    except SimulationError as error:
        found = str(error.report or error)
        _say(RULE, f"iris run: {type(error).__name__} with seed {seed}:", found, "", _repeat(request, seed), RULE)
        return 1
    except BaseException as error:
        failure = next((f for f in failures if f.error is error), None)
        if failure is None:
            if not isinstance(error, IrisError):
                raise
            _say(f"iris: {error}")
            return 2
        code, text = _describe(failure)
        header = f"iris run: rank {failure.rank} failed with exit code {code}:"
        _say(RULE, header, text, "", _repeat(request, seed), RULE)
        return code
    return 0


def _describe(failure: Failure) -> tuple[int, str]:
    """The exit code that an error stands for, and its text."""
    error = failure.error
    if not isinstance(error, SystemExit):
        return 1, "".join(traceback.format_exception(type(error), error, failure.trace)).rstrip()
    lines = traceback.format_tb(failure.trace)
    where = f" here:\n  {lines[-1].strip()}" if lines else "."
    if isinstance(error.code, int):
        return error.code % 256, f"It called sys.exit({error.code}){where}"
    return 1, f"{error.code}\n\nIt said this with sys.exit{where}"


def _repeat(request: dict[str, Any], seed: int) -> str:
    before, after = request["repeat"]
    return f"Repeat it: {shlex.join([*before, '--seed', str(seed), *after])}"


def _say(*lines: str) -> None:
    sys.stdout.flush()
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _out_of_time(seconds: float) -> NoReturn:
    """End the process from another thread, and say where it was."""
    from iris.runtime import scheduler
    from iris.runtime.world import World

    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    world = scheduler.current()
    who = "it"
    if isinstance(world, World):
        program, host = world.current, world.host
        if program is not None:
            who = f"rank {program.state.rank}, {program.describe()}"
        elif host is not None:
            who = f"rank {host.rank}"
    frames = traceback.extract_stack(frame)
    own = [i for i, f in enumerate(frames) if f.filename == __file__]
    stack = "".join(traceback.format_list(frames[own[-1] + 1 if own else 0 :])).rstrip()
    _say(RULE, f"iris run: not finished after {seconds:g} s (--timeout); {who} was here:", stack, RULE)
    os._exit(124)


def main() -> int:
    """Run the program with each seed, up to the first that fails. Returns the exit code."""
    safe_path = getattr(sys.flags, "safe_path", False)
    if not safe_path:
        del sys.path[0]  # the folder of this file
    request: dict[str, Any] = json.loads(sys.argv[1])
    target, *arguments = sys.argv[2:]
    # Before the program's folder is on the path, which may hold anything.
    import iris.sim  # noqa: F401

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        program = load(request["kind"], target, arguments, safe_path)
    except SyntaxError as error:
        _say("".join(traceback.format_exception_only(type(error), error)).rstrip())
        return 1
    if request["timeout"] is not None:
        limit = threading.Timer(request["timeout"], _out_of_time, [request["timeout"]])
        limit.daemon = True
        limit.start()
    count = request["seeds"]
    if count is None:
        return run(program, request, request["seed"])
    for seed in range(count):
        _say(f"iris run: seed {seed} ({seed + 1} of {count})")
        code = run(program, request, seed)
        if code:
            return code
        gc.collect()  # modules are cycles, and hold the heaps of the ranks that ended
    _say(f"iris run: nothing found with {count} seeds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
