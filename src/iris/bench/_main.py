"""``main``: what a benchmark script ends with."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from iris.bench import _start, report
from iris.bench._environment import NO_TIMES, environment
from iris.bench._options import Combination, Options, parse
from iris.bench._sweep import Sweep
from iris.bench.declare import NUM_RANKS, registered
from iris.bench.results import Result, plain


def main(argv: Sequence[str] | None = None, *, parser: argparse.ArgumentParser | None = None) -> list[Result]:
    """Run the benchmarks of the script and show what was measured.

    Ranks that a launcher started (``iris run``, also with ``--sim`` or ``--loopback``, or torchrun) measure in place.
    Otherwise the script is run again by ``iris run``, once for each number of ranks; one rank alone needs no launcher.

    Args:
        argv: the options; default those of the command line. ``--help`` lists them.
        parser: of the script's own options, made with ``add_help=False``. They are accepted and listed with the others;
            the script reads their values itself, with ``parser.parse_known_args()``.

    Returns:
        The results, on every rank.

    Raises:
        ArgumentError: the value of an option is malformed.
        SystemExit: with 1 when nothing was selected, or something was wrong or could not be measured; with 2 for an
            unknown option; with 0 after ``--help`` and ``--benchmark_list``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    benchmarks = registered()
    options = parse(words, benchmarks, parser)
    if options.given.benchmark_list:
        _list(options)
        sys.exit(0)
    if not options.chosen:
        names = ", ".join(benchmark.name for benchmark in benchmarks)
        what = f"no benchmark matches {options.given.benchmark_filter!r}; there are: {names}"
        _refuse(what if benchmarks else "no benchmark is registered: put @bench.register above a function")
    command = shlex.join([_program_name(), *words])
    in_place = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if in_place:
        return _in_place(options, int(os.environ["WORLD_SIZE"]), command)
    combinations = options.combinations(_start.default_num_ranks())
    if not combinations:
        _refuse("every combination is left out by --skip_...")
    sizes = sorted({combination.num_ranks for combination in combinations})
    if sizes == [1]:
        return _in_place(options, 1, command, combinations)
    return _on_ranks(options, combinations, sizes, command)


def _in_place(
    options: Options, world_size: int, command: str, combinations: list[Combination] | None = None
) -> list[Result]:
    """Measure on the ranks of this run."""
    request = _start.asked()
    every = combinations if combinations is not None else options.combinations(world_size)
    chosen = [c for c in every if (c.num_ranks == world_size if request is None else c.index in request[1])]
    leads = os.environ.get("RANK", "0") == "0"
    if not chosen:
        sizes = sorted({c.num_ranks for c in every})
        _refuse(
            f"nothing is selected for {world_size} ranks, which this run has; the benchmarks have "
            f"{', '.join(map(str, sizes)) or 'none'}: add --axis_{NUM_RANKS}={world_size}",
            leads,
        )
    others = sorted({c.num_ranks for c in every} - {world_size})
    if others and request is None and leads:
        _say(f"warning: this run has {world_size} ranks; left out: {NUM_RANKS} {', '.join(map(str, others))}")
    sweep = Sweep(options)
    where = environment(sweep.ctx, command)
    if request is not None and leads:
        _start.add(request[0], environment=where)
    results: list[Result] = []
    with _progress(len(chosen), leads and request is None) as progress:
        for group in sweep.run(chosen):
            results += group
            progress(len({result.index for result in results}))
            if request is not None and leads:
                _start.add(request[0], results=[result.record() for result in group])
            elif leads:
                _save(options, results, [where])  # what is finished stays when the run is cut short
    results.sort(key=lambda result: result.index)
    if request is None and leads:
        _show(options, results, [where])
    if request is None:
        _leave(results, leads)
    return results


def _on_ranks(options: Options, combinations: list[Combination], sizes: list[int], command: str) -> list[Result]:
    """Start ranks for each number of ranks, and collect their results."""
    results: list[Result] = []
    environments = []
    code = 0
    with _progress(len(combinations), True) as progress:
        for size in sizes:
            chosen = [c for c in combinations if c.num_ranks == size]
            before = len({result.index for result in results})
            where, found, ended = _start.run_ranks(chosen, size, lambda n, before=before: progress(before + n))
            environments += [{**where, "command": command}] if where is not None else []
            results += found
            _save(options, results, environments)
            if ended:
                code = ended
                missing = len({c.index for c in chosen} - {result.index for result in found})
                _say(f"the run with {size} ranks ended with {ended}; {missing} of its combinations have no result")
    results.sort(key=lambda result: result.index)
    _show(options, results, environments)
    _leave(results, True)
    if code:
        sys.exit(code)
    return results


def _save(options: Options, results: list[Result], environments: list[dict[str, Any]]) -> None:
    """Put results in the place of the file that was asked for, if one was."""
    out = options.given.benchmark_out
    if out:
        partial = Path(f"{out}.part")
        partial.write_text(report.render(options.format, sorted(results, key=lambda one: one.index), environments))
        os.replace(partial, out)


def _show(options: Options, results: list[Result], environments: list[dict[str, Any]]) -> None:
    given = options.given
    interpreted = any(where["clock"] != "gpu" for where in environments)
    _save(options, results, environments)
    shown = "console" if given.benchmark_out else options.format
    print(report.render(shown, results, environments), end="", flush=True)
    if interpreted and not given.benchmark_out and options.format in ("json", "csv"):
        _say(NO_TIMES)  # tables say it themselves
    if given.use_gluon:
        _say("--use_gluon is ignored: kernels are Triton's")
    if given.plot is not None:
        from iris.bench.plot import draw

        for path in draw(results, environments, Path(given.plot)):
            _say(f"drawn: {path}")


def _leave(results: list[Result], leads: bool) -> None:
    """Leave with 1 when something was wrong or could not be measured."""
    bad = [result for result in results if result.failure]
    if bad:
        wrong = sum(result.failure == "wrong" for result in bad)
        _refuse(f"{len(bad)} of {len(results)} were not measured: {wrong} wrong, {len(bad) - wrong} failed", leads)


def _list(options: Options) -> None:
    for benchmark in options.chosen:
        doc = (benchmark.fn.__doc__ or "").strip().splitlines()
        print(benchmark.name + (f": {doc[0]}" if doc else ""))
        for axis in benchmark.axes:
            values = ", ".join(str(plain(value)) for value in axis.values)
            print(f"  {axis.name}: {values}{' (in turns)' if axis.alternate else ''}")


@contextlib.contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, where that is a terminal."""
    if not wanted or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("combinations"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


def _program_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"-m {spec.name}" if spec is not None else sys.argv[0]


def _say(message: str) -> None:
    print(f"iris.bench: {message}", file=sys.stderr, flush=True)


def _refuse(message: str, leads: bool = True) -> NoReturn:
    """Leave with 1 and say why. The other ranks leave with 0: one rank tells the launcher."""
    if leads:
        _say(message)
    sys.exit(1 if leads else 0)
