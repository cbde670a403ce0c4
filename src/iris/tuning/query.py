"""What a choice depends on (:class:`Query`), and what is known of one case (:class:`Entry`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Query:
    """A problem and where it runs. Equal queries have equal choices, on every rank.

    Attributes:
        operation: its name, ``"all_gather_matmul"`` or ``"all_reduce"`` for example.
        machine: :attr:`iris._target.Target.product`, ``"mi300x"`` for example; empty for a device that is not known.
        arch: architecture of the device, ``"gfx942"`` for example.
        link: one of :data:`iris.runtime.links.LINKS`.
        world: number of ranks that take part.
        units: compute units that a rank has.
        dtype: of the first input, as torch names it without ``torch.``.
        sizes: names and sizes: M, N and K of the whole product, or ``bytes`` of a collective as its table counts them.
        options: what else tables tell apart, by name: ``gather_dim`` (0, 1) and ``transpose`` (NN, NT, TN, TT).
        details: what else a kernel is compiled for, by name, such as dtypes, strides and epilogue: tables are for all
            of them, what was tuned on this machine for one.
    """

    operation: str
    machine: str
    arch: str
    link: str
    world: int
    units: int
    dtype: str
    sizes: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, str], ...] = ()
    details: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        sizes = "x".join(str(size) for _, size in self.sizes) + (" bytes" if self.sizes[0][0] == "bytes" else "")
        options = "".join(f", {name}={value}" for name, value in self.options)
        return f"{self.operation} {sizes} {self.dtype}{options}, {self.world} ranks of {self.machine or self.arch}"


@dataclass(frozen=True)
class Entry:
    """What is known of one case: the best that was found for it, and how it did.

    Attributes:
        name: how messages call it.
        algorithm: name of the algorithm; ``"torch"`` where PyTorch's operations were at least as fast.
        params: fields of the algorithm's configuration by name, without those that have their default; immutable.
        sizes: those of the case.
        milliseconds: what it took, the slowest rank's median; None when it is not known.
        torch_milliseconds: what PyTorch's operations took in the same run; None when it is not known.
        speedup: the ratio of the two, or the published one; None when it is not known.
        emulated: whether an imitated link was measured.
        source: machine, versions, date and where the figures come from, in a sentence.
        key: identifies algorithm and params.
    """

    name: str
    algorithm: str
    params: Mapping[str, Any] = field(hash=False)
    sizes: tuple[tuple[str, int], ...]
    milliseconds: float | None
    torch_milliseconds: float | None
    speedup: float | None
    source: str
    emulated: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))

    @property
    def key(self) -> str:
        return config_key(self.algorithm, self.params)


def config_key(algorithm: str, params: Mapping[str, Any]) -> str:
    """A short text that is the same for the same algorithm and parameters, in any process and on any machine."""
    text = json.dumps([algorithm, dict(sorted(params.items()))], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
