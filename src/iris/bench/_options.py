"""The command line of a benchmark script, and the combinations that it selects."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from iris.bench.declare import NUM_RANKS, AxisDef, BenchmarkDef, check_num_ranks, linear_range, power_of_two
from iris.bench.state import MEETINGS
from iris.errors import ArgumentError

FORMATS = ("console", "markdown", "json", "csv")
_SUFFIXES = {".md": "markdown", ".json": "json", ".csv": "csv"}
_SHORT = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4m3": torch.float8_e4m3fn,
    "fp8e5m2": torch.float8_e5m2,
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)} | _SHORT

_EPILOG = """\
parameters:
  --axis_NAME=VALUES    take these values for parameter NAME instead of the script's
  --skip_NAME=VALUES    leave these values of parameter NAME out
  VALUES is a list such as 1024,4096 or fp16,bf16 or ring,two_shot; pow2:10:14 (1024 to 16384); or lin:100:500:100.
  The parameter num_ranks is how many ranks run.

Started by `iris run` or torchrun, the script runs on those ranks; otherwise it starts its ranks itself, one run for
each value of num_ranks. The exit code is 0, or 1 when nothing was selected, or a result was wrong or not measured.
"""


class _Parser(argparse.ArgumentParser):
    """Options are written out in full: ``--n`` is no short form."""

    def __init__(self, own: argparse.ArgumentParser | None):
        super().__init__(
            parents=[] if own is None else [own],
            description="Runs the benchmarks of this script.",
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )


@dataclass(frozen=True)
class Combination:
    """One point of a benchmark's parameters; ``index`` is its place in the output."""

    index: int
    benchmark: BenchmarkDef
    params: dict[str, Any]
    num_ranks: int


@dataclass
class Options:
    """What the command line asks for.

    Attributes:
        chosen: the selected benchmarks, with the values that their axes take.
        skipped: (axis, value) pairs that are left out.
        given: the other options, by name.
    """

    chosen: list[BenchmarkDef]
    skipped: dict[str, list[Any]]
    given: argparse.Namespace

    def combinations(self, num_ranks: int) -> list[Combination]:
        """What is measured, the outermost axis slowest; ``num_ranks`` for benchmarks that do not have this axis."""
        found: list[Combination] = []
        for benchmark in self.chosen:
            names = [axis.name for axis in benchmark.axes]
            for values in itertools.product(*(axis.values for axis in benchmark.axes)):
                params = dict(zip(names, values, strict=True))
                if any(params[name] in self.skipped.get(name, ()) for name in names):
                    continue
                found.append(Combination(len(found), benchmark, params, params.get(NUM_RANKS, num_ranks)))
        return found

    @property
    def format(self) -> str:
        """The format of the output, from the name of its file when it is not given."""
        if self.given.benchmark_format:
            return self.given.benchmark_format
        out = self.given.benchmark_out or ""
        return next((name for suffix, name in _SUFFIXES.items() if out.endswith(suffix)), "console")


def parse(argv: Sequence[str], benchmarks: list[BenchmarkDef], own: argparse.ArgumentParser | None = None) -> Options:
    """Read the command line.

    Args:
        argv: its words.
        benchmarks: of the script.
        own: the script's own options.

    Raises:
        ArgumentError: a value is malformed, or cannot be.
        SystemExit: an option is unknown, or help was asked for.
    """
    parser = _parser(own)
    given, rest = parser.parse_known_args(argv)
    overrides: dict[str, list[Any]] = {}
    skipped: dict[str, list[Any]] = {}
    for option, text in _dynamic(parser, rest):
        kind, name = option[2:6], option[7:]
        kinds = {type(value) for b in benchmarks for a in b.axes if a.name == name for value in a.values}
        if not kinds and name != NUM_RANKS:
            known = sorted({a.name for b in benchmarks for a in b.axes} | {NUM_RANKS})
            parser.error(f"unrecognized arguments: {option}: no benchmark has an axis {name}; axes: {', '.join(known)}")
        values = parse_values(option, text, as_text=kinds == {str})
        (overrides if kind == "axis" else skipped)[name] = values
    for name, least in (("n_warmup", 0), ("n_repeat", 1), ("heap_size", 1)):
        value = getattr(given, name)
        if value is not None and value < least:
            raise ArgumentError(f"--{name} must be at least {least}, got {value}")
    if given.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--plot needs matplotlib, which is not installed: pip install 'iris-kernels[plot]'")
    try:
        wanted = re.compile(given.benchmark_filter)
    except re.error as error:
        raise ArgumentError(
            f"--benchmark_filter {given.benchmark_filter!r} is no regular expression: {error}"
        ) from None
    chosen = [_override(b, overrides) for b in benchmarks if wanted.search(b.name)]
    return Options(chosen, skipped, given)


def parse_values(option: str, text: str, *, as_text: bool = False) -> list[Any]:
    """The values that ``text`` stands for.

    Args:
        option: whose value it is, for messages.
        text: ``1,2,3``, ``pow2:a:b``, ``lin:a:b:step``, names of dtypes, numbers or words.
        as_text: the axis takes words only, so numbers and names of dtypes are words too.

    Raises:
        ArgumentError: the text is malformed.
    """
    kind, _, rest = text.partition(":")
    counts = {"pow2": 2, "lin": 3}
    if kind in counts and rest:
        try:
            numbers = [int(word) for word in rest.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) != counts[kind]:
            shape = "pow2:FIRST:LAST, exponents of 2" if kind == "pow2" else "lin:FIRST:LAST:STEP"
            raise ArgumentError(f"{option}={text}: expected {shape}, whole numbers")
        return power_of_two(*numbers) if kind == "pow2" else linear_range(*numbers)
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ArgumentError(f"{option}={text}: a value is empty; expected a list such as 1,2,3")
    return [word if as_text else _value(word) for word in words]


def _value(word: str) -> Any:
    if word in _DTYPES:
        return _DTYPES[word]
    for parse_number in (int, float):
        try:
            return parse_number(word)
        except ValueError:
            pass
    return word


def _parser(own: argparse.ArgumentParser | None) -> _Parser:
    parser = _Parser(own)
    add = parser.add_argument
    add("--benchmark_filter", metavar="REGEX", default="", help="run the benchmarks whose name matches; all by default")
    add("--benchmark_list", action="store_true", help="list the benchmarks with their parameters and leave")
    add("--benchmark_format", choices=FORMATS, help="default: by the suffix of --benchmark_out, else console")
    add("--benchmark_out", metavar="FILE", help="write the results to FILE as they come, and a table to the console")
    add("--plot", metavar="DIR", help="draw the results, one figure for each benchmark and number of ranks (PNG, SVG)")
    add("--n_warmup", type=int, help="calls before the measured ones; default 25, interpreted kernels 1")
    add("--n_repeat", type=int, help="measured calls; default 100, interpreted kernels 3")
    add("--cache", choices=("cold", "warm"), help="whether caches are emptied before each call; default cold")
    add(
        "--meet",
        choices=MEETINGS,
        help="where ranks meet before each call: in the stream, which hides the host's work, or on the host; "
        "default stream on GPUs",
    )
    add(
        "--heap_size",
        type=int,
        metavar="BYTES",
        help="symmetric heap of a rank; default 2**34 for a GPU, shared by the ranks on it, and 2**30 without GPUs",
    )
    add("--use_gluon", action="store_true", help="accepted and ignored: kernels are Triton's")
    return parser


def _dynamic(parser: _Parser, words: list[str]) -> list[tuple[str, str]]:
    """(option, text) of ``--axis_...`` and ``--skip_...``; any other word is an error."""
    found = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option, separator, text = word.partition("=")
        if not re.fullmatch(r"--(axis|skip)_\w+", option):
            parser.error(f"unrecognized arguments: {word}")
        if not separator:
            if not rest or rest[0].startswith("--"):
                parser.error(f"{option} needs values: {option}=1,2,3")
            text = rest.pop(0)
        found.append((option, text))
    return found


def _override(benchmark: BenchmarkDef, overrides: dict[str, list[Any]]) -> BenchmarkDef:
    axes = []
    for axis in benchmark.axes:
        values = tuple(overrides.get(axis.name, axis.values))
        if axis.name == NUM_RANKS:
            for value in values:
                check_num_ranks(value)
        axes.append(AxisDef(axis.name, values, axis.alternate, axis.baseline, axis.roles))
    if NUM_RANKS in overrides and all(axis.name != NUM_RANKS for axis in axes):
        for value in overrides[NUM_RANKS]:
            check_num_ranks(value)
        axes.insert(0, AxisDef(NUM_RANKS, tuple(overrides[NUM_RANKS])))
    return BenchmarkDef(benchmark.name, benchmark.fn, tuple(axes))
