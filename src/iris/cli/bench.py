"""``iris bench``: runs a benchmark script, or lists those of a folder."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from iris.errors import ArgumentError

_DEFAULT = "benchmarks"


def bench(script: Path | None, arguments: Sequence[str]) -> None:
    """Become the script, or print the scripts of a folder.

    Args:
        script: a benchmark script, or a folder; None for the folder ``benchmarks``, or the current one.
        arguments: options for the script.

    Raises:
        ArgumentError: there is no such script, or options were given without one.
    """
    place = script if script is not None else Path(_DEFAULT) if Path(_DEFAULT).is_dir() else Path()
    if place.is_dir():
        if arguments:
            raise ArgumentError(f"{place} is a folder; name the script that {arguments[0]} is for")
        _list(place)
        return
    if not place.exists():
        raise ArgumentError(f"there is no script {str(place)!r} (seen from {os.getcwd()}); a folder lists its scripts")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(place), *arguments])


def _list(folder: Path) -> None:
    """Print the benchmark scripts of a folder, without running them."""
    found = []
    for path in sorted(folder.glob("*.py")):
        try:
            tree = ast.parse(path.read_text())
        except SyntaxError as error:
            found.append((path, f"(cannot be read: {error.msg}, line {error.lineno})"))
            continue
        if any(_registers(node) for node in ast.walk(tree)):
            found.append((path, (ast.get_docstring(tree) or "").partition("\n")[0]))
    if not found:
        print(f"no benchmark script in {folder.resolve()}: a script is listed when it uses @bench.register")
        return
    width = max(len(str(path)) for path, _ in found)
    for path, text in found:
        print(f"{path!s:{width}}  {text}".rstrip())
    print(f"\nRun one with: iris bench {found[0][0]}\nIts options:  iris bench {found[0][0]} --help")


def _registers(node: ast.AST) -> bool:
    names = ("register", "bench.register", "iris.bench.register")
    return isinstance(node, ast.FunctionDef) and any(ast.unparse(d) in names for d in node.decorator_list)
