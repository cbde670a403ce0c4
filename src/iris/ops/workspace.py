"""``FusedWorkspace``: the memory that a fused operation needs between ranks, and what it was made for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from iris.errors import ArgumentError
from iris.ops.staging import Staging
from iris.runtime.groups import Group
from iris.tuning import Plan

if TYPE_CHECKING:
    from iris.ops.partials import Partials


@dataclass
class FusedWorkspace:
    """Made by an operation's ``*_preamble``, or by its first call; returned by every call.

    May be used again for what it was made for, in calls that follow each other on one stream, also in a captured graph.

    Attributes:
        operation: name of the operation.
        shape: (M, N, K).
        dtype: dtype of A.
        world_size: number of ranks.
        variant: the algorithm.
        group: the ranks, in group order.
        aux_buffer: what peers' shards are fetched into, or the own partial products; None before the first call, and
            when there is neither.
        locks: flags on the symmetric heap (int32), None when the algorithm has none.
        counters: int32 words in ordinary memory: epoch, programs started, programs ended.
        staging: what peers' shards are fetched into, for the algorithm that does.
        partials: partial products and their flags, on the symmetric heap, for operations that add them.
        plan: the plan of the latest call.
        trace_data: figures of the latest call that was asked for them, see
            :func:`iris.ops.all_gather_matmul_hbm_buffer.all_gather_matmul_hbm_buffer`; else None.
        prepared: whether it can be used.
    """

    operation: str = ""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    world_size: int = 1
    variant: str = ""
    group: Group = field(default_factory=lambda: Group((0,), 0))
    aux_buffer: torch.Tensor | None = None
    locks: torch.Tensor | None = None
    counters: torch.Tensor | None = None
    staging: Staging | None = None
    partials: Partials | None = None
    plan: Plan | None = None
    trace_data: dict[str, Any] | None = None
    prepared: bool = False
    _finish: Callable[[], None] | None = None

    def matches(
        self, operation: str, shape: tuple[int, ...], dtype: torch.dtype, world_size: int, variant: str = ""
    ) -> bool:
        """Whether the workspace was made for this and is prepared."""
        return self.prepared and not self.differences(
            operation=operation, shape=shape, dtype=dtype, world_size=world_size, variant=variant
        )

    def differences(self, **wanted: object) -> list[str]:
        """The fields in which the workspace differs from what is wanted, in words."""
        return [
            f"{name} is {getattr(self, name)}, this call has {value}"
            for name, value in wanted.items()
            if getattr(self, name) != value
        ]

    def require(self, **wanted: object) -> None:
        """Raise unless the workspace was made for what is wanted.

        Raises:
            ArgumentError: lists the fields that differ.
        """
        differing = self.differences(**wanted)
        if not self.prepared:
            differing.append("it is not prepared (cleared or reset)")
        if differing:
            raise ArgumentError(f"the workspace was made for something else: {'; '.join(differing)}")

    def wait(self) -> None:
        """Order the current stream after the latest call with ``async_op=True``; nothing to do after other calls."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def reset(self) -> None:
        """Mark as not prepared."""
        self.prepared = False

    def clear(self) -> None:
        """Mark as not prepared and give the buffers back."""
        self.aux_buffer = self.locks = self.counters = self.staging = self.partials = None
        self.prepared = False
