"""``iris doctor`` and ``iris env``: what this machine offers, for a person or a program to read."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from iris import _env
from iris.cli import _probe
from iris.cli._probe import Finding

_TITLES = {"gpus": "GPUs"}
_MARK = {"ok": ("ok", "green"), "note": ("note", "yellow"), "problem": ("problem", "bold red")}


def doctor(as_json: bool = False) -> int:
    """Look at the machine and print what was found.

    Args:
        as_json: print one JSON object instead of tables.

    Returns:
        0 when ranks can run here, 1 when a problem keeps them from it.
    """
    chosen = _probe.runtime()
    sections = {
        "software": _probe.software(),
        "machine": _probe.machine(),
        "gpus": _probe.gpus(),
        "runtime": [chosen],
        "tables": _probe.tables(),
        "variables": _probe.variables(),
    }
    problems = [f for name, findings in sections.items() for f in findings if _stops(name, f, chosen)]
    usable = not problems
    if as_json:
        answer = {name: [asdict(finding) for finding in findings] for name, findings in sections.items()}
        json.dump({"usable": usable, "place": _probe.place(), "links": _probe.links(), **answer}, sys.stdout, indent=2)
        print()
    else:
        _show(Console(highlight=False), sections, usable)
    return 0 if usable else 1


def print_variables() -> None:
    """Print the table of environment variables: name, value here, what it may be, what it means."""
    values = {finding.name: finding for finding in _probe.variables()}
    table = Table(box=None, padding=(0, 2, 1, 0), header_style="bold", title_justify="left")
    for title in ("variable", "here", "meaning"):
        table.add_column(title, overflow="fold")
    for name, variable in _env.VARIABLES.items():
        finding = values[name]
        style = _MARK[finding.state][1] if finding.state != "ok" else ""
        table.add_row(name, Text(finding.value, style), Text(f"{variable.meaning}\nPossible: {variable.possible}."))
    Console(highlight=False).print(table)


def _stops(section: str, finding: Finding, chosen: Finding) -> bool:
    """Whether a finding keeps ranks from running in the chosen runtime."""
    if finding.state != "problem":
        return False
    if finding.name == "shared memory files":
        return chosen.value.startswith("cpu")
    if section == "gpus":
        return chosen.value.startswith("gpu")
    return True


def _show(console: Console, sections: dict[str, list[Finding]], usable: bool) -> None:
    for title, findings in sections.items():
        console.print(Text(_TITLES.get(title, title.capitalize()), "bold"))
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(width=7)
        table.add_column(width=22)
        table.add_column(overflow="fold")
        for finding in findings:
            # A variable is a fact, not an achievement: only a wrong one gets a mark.
            mark = Text() if title == "variables" and finding.state == "ok" else Text(*_MARK[finding.state])
            table.add_row(mark, finding.name, Text(finding.value))
        console.print(table)
        if title == "gpus" and (links := _probe.links()):
            console.print(Text(links), soft_wrap=True)
        console.print()
    remedies = [finding for findings in sections.values() for finding in findings if finding.remedy]
    if remedies:
        console.print(Text("What to do", "bold"))
        for finding in remedies:
            console.print(Text(f"{finding.name}: ", _MARK[finding.state][1]) + Text(finding.remedy))
        console.print()
    if usable:
        console.print(Text("Ranks can run here. Try: iris demo", "green"))
    else:
        console.print(Text("Ranks cannot run here until the problems above are mended.", "bold red"))
