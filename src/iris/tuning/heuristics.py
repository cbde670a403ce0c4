"""Configurations by rule: ``data/heuristics/<operation>/<machine>.json``, see ``data/SCHEMA.md``.

Groups of rules are gone through in order. Within a group the first rule whose conditions hold is taken, and what the
groups set is merged. Later groups may ask for what earlier ones set, and for features that are derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from iris.tuning.query import Query
from iris.tuning.tables import SCHEMA, dtype_class, names, read, sentence


def configuration(machine: str, operation: str, features: Mapping[str, Any]) -> dict[str, Any] | None:
    """Parameters by the machine's rules for an operation.

    Args:
        machine: :attr:`iris._target.Target.product`.
        operation: its name.
        features: what rules may ask for, by name; :func:`features_of` gives those of a problem.

    Returns:
        The parameters, with ``"algorithm"`` among them where a rule names it; None when the machine has no rules for
        the operation, or the problem is not among those that they are for.

    Raises:
        KeyError: a rule asks for a feature that is not there; a fault of the file or of the features.
    """
    data = _load(operation, machine)
    if data is None or not _holds(data.get("where", {}), features):
        return None
    known, params = dict(features), {}
    for group in data["groups"]:
        for name, formula in group.get("derive", {}).items():
            known[name] = _derived(formula, known)
        rule = next((rule for rule in group["rules"] if _holds(rule.get("when", {}), known)), None)
        if rule is None:
            continue
        chosen = dict(rule["then"])
        for name, whole in group.get("halve", {}).items():
            if name in chosen:
                chosen[name] = _halved(chosen[name], known[whole])
        params |= chosen
        known |= chosen
    return params


def features_of(query: Query) -> dict[str, Any]:
    """What rules may ask for of a problem: sizes, options, ``world``, ``units``, ``link`` and ``dtype`` as tables class
    it."""
    return {
        **dict(query.sizes),
        **dict(query.options),
        "world": query.world,
        "units": query.units,
        "link": query.link,
        "dtype": dtype_class(query.dtype),
    }


def algorithm(machine: str, operation: str) -> str:
    """The algorithm that the machine's rules are for; empty when there are none or each rule names its own."""
    data = _load(operation, machine)
    return data.get("algorithm", "") if data else ""


def source(machine: str, operation: str) -> str:
    """Where the machine's rules come from, in a sentence; empty when there are none."""
    data = _load(operation, machine)
    return "; ".join(map(sentence, data["provenance"].values())) if data else ""


def files() -> tuple[tuple[str, str], ...]:
    """Operations and machines that there are rules for."""
    return names("heuristics")


@cache
def _load(operation: str, machine: str) -> dict[str, Any] | None:
    data = read("heuristics", operation, machine)
    if data is not None and data["schema"] != SCHEMA:
        raise ValueError(f"the rules of {operation} on {machine} have schema {data['schema']}")
    return data


def _holds(conditions: Mapping[str, Any], features: Mapping[str, Any]) -> bool:
    return all(_within(features[name], wanted) for name, wanted in conditions.items())


def _within(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return wanted.get("min", value) <= value <= wanted.get("max", value)
    return value in wanted if isinstance(wanted, list) else value == wanted


def _derived(formula: str, features: Mapping[str, Any]) -> int:
    """``"A // B"`` or ``"A * B"``; each is a feature or a number."""
    left, operator, right = formula.split()
    a, b = (int(word) if word.isdigit() else features[word] for word in (left, right))
    if operator == "*":
        return a * b
    if operator == "//":
        return a // b
    raise ValueError(f"a rule derives {formula!r}; possible: 'A // B' and 'A * B'")


def _halved(value: int, whole: int) -> int:
    """``value``, halved until it divides ``whole``."""
    while value > 1 and whole % value:
        value //= 2
    return value
