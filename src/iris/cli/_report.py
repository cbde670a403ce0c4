"""What ``iris run`` prints when a run did not end well: the first failure in full, the others in a line each."""

from __future__ import annotations

import signal
import sys

from iris.cli._supervise import Outcome, Rank

TIMEOUT_CODE = 124  # as timeout(1) of the GNU core utilities
_RULE = "-" * 100
_SUMMARY = 160


def exit_code(outcome: Outcome) -> int:
    """The exit code of the run: 0, that of the rank that failed first, 128 + signal, or 124 for the time limit."""
    if outcome.signal:
        return 128 + outcome.signal
    failures = outcome.failures
    if failures:
        return _code(failures[0])
    return TIMEOUT_CODE if outcome.timed_out else 0


def text(outcome: Outcome, timeout: float | None) -> str:
    """The report, or an empty string for a run that ended well."""
    if outcome.signal:
        return f"iris run: ended by {_signal_name(outcome.signal)}; all ranks are gone.\n"
    failures = outcome.failures
    if not failures:
        return _time_limit(outcome, timeout) if outcome.timed_out else ""
    first, *others = failures
    parts = [_RULE, f"iris run: rank {first.index} {_how(first)}:", _what(first).rstrip()]
    if others:
        parts += ["", "After that:", *(f"  rank {rank.index} {_how(rank)}{_summary(rank)}" for rank in others)]
    ended = [rank.index for rank in outcome.ranks if rank.ended_by_us and rank not in failures]
    if ended:
        parts += ["", f"Ended by iris run because of it: {_names(ended)}."]
    return "\n".join([*parts, _RULE]) + "\n"


def show(outcome: Outcome, timeout: float | None) -> None:
    """Print the report to standard error."""
    sys.stderr.write(text(outcome, timeout))
    sys.stderr.flush()


def _code(rank: Rank) -> int:
    if rank.returncode is None or rank.ended_by_us or rank.returncode == 0:
        # It had failed, and was then ended while it cleaned up.
        return rank.failure["code"] % 256 if rank.failure is not None else 1
    return rank.returncode if rank.returncode > 0 else 128 - rank.returncode


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _how(rank: Rank) -> str:
    if rank.failure is None and rank.returncode is not None and rank.returncode < 0:
        return f"was ended by {_signal_name(-rank.returncode)}"
    return f"failed with exit code {_code(rank)}"


def _summary(rank: Rank) -> str:
    if rank.failure is None:
        return ""
    summary = rank.failure["summary"]
    return f": {summary}" if len(summary) <= _SUMMARY else f": {summary[:_SUMMARY]} ..."


def _what(rank: Rank) -> str:
    """All that is known of why a rank failed."""
    if rank.failure is not None and rank.failure["kind"] == "error":
        return rank.failure["text"]
    parts = []
    if rank.failure is not None:
        parts.append(f"It called {rank.failure['summary']} here:\n  {rank.failure['text']}")
    if rank.stacks:
        parts.append(_own_lines(rank.stacks))
    elif rank.returncode == -signal.SIGKILL:
        parts.append("Somebody killed it, or the system ran out of memory; the kernel's log (dmesg) tells which.")
    if rank.stderr and rank.failure is None:
        tail = rank.stderr.decode(errors="replace").splitlines()[-20:]
        parts.append("The last lines of its standard error:\n" + "\n".join(f"  {line}" for line in tail))
    return "\n".join(parts) or "It printed nothing to standard error."


def _time_limit(outcome: Outcome, timeout: float | None) -> str:
    late = [rank for rank in outcome.ranks if rank.ended_by_us]
    parts = [_RULE, f"iris run: not finished after {timeout:g} s (--timeout); ended {_names([r.index for r in late])}."]
    for rank in late:
        parts += ["", f"rank {rank.index} was here:", _own_lines(rank.stacks).rstrip() or "  (no Python stack)"]
    return "\n".join([*parts, _RULE]) + "\n"


def _own_lines(stacks: str) -> str:
    """Stacks without the frames of the wrapper that every rank runs in."""
    foreign = ("_rank.py", "<frozen runpy>", "/runpy.py")
    return "\n".join(line for line in stacks.splitlines() if not any(f'{name}"' in line for name in foreign)) + "\n"


def _names(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"
