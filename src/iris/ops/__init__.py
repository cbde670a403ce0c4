"""Fused GEMM + communication operations.

Each operation has a module form, ``iris.ops.all_gather_matmul(ctx, out, A, B, ...)``, and a context form,
``ctx.ops.all_gather_matmul(out, A, B, ...)``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from iris.errors import ArgumentError
from iris.ops.all_gather_matmul import all_gather_matmul, all_gather_matmul_preamble
from iris.ops.all_gather_matmul_hbm_buffer import all_gather_matmul_hbm_buffer, all_gather_matmul_hbm_buffer_preamble
from iris.ops.config import FusedConfig
from iris.ops.matmul_all_gather import matmul_all_gather, matmul_all_gather_preamble
from iris.ops.matmul_all_reduce import matmul_all_reduce, matmul_all_reduce_preamble
from iris.ops.matmul_reduce_scatter import matmul_reduce_scatter, matmul_reduce_scatter_preamble
from iris.ops.workspace import FusedWorkspace
from iris.tuning import Plan

if TYPE_CHECKING:
    import torch

    from iris.ops.auto_config import AutoConfigResult, select_ag_mm_config
    from iris.runtime.context import Iris

__all__ = [
    "AutoConfigResult",
    "FusedConfig",
    "FusedWorkspace",
    "OpsNamespace",
    "Plan",
    "all_gather_matmul",
    "all_gather_matmul_hbm_buffer",
    "all_gather_matmul_hbm_buffer_preamble",
    "all_gather_matmul_preamble",
    "matmul_all_gather",
    "matmul_all_gather_preamble",
    "matmul_all_reduce",
    "matmul_all_reduce_preamble",
    "matmul_reduce_scatter",
    "matmul_reduce_scatter_preamble",
    "select_ag_mm_config",
]

_OF_AUTO_CONFIG = ("AutoConfigResult", "select_ag_mm_config")
_OPERATIONS = ("all_gather_matmul", "matmul_all_gather", "matmul_all_reduce", "matmul_reduce_scatter")


def __getattr__(name: str) -> Any:
    # Loaded when they are first asked for: it looks for files, and most programs have no use for it.
    if name in _OF_AUTO_CONFIG:
        return getattr(importlib.import_module("iris.ops.auto_config"), name)
    raise AttributeError(f"module 'iris.ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_AUTO_CONFIG})


class OpsNamespace:
    """The operations of one context; ``ctx.ops``."""

    def __init__(self, ctx: Iris):
        self._ctx = ctx

    def all_gather_matmul(
        self,
        output_tensor: torch.Tensor,
        A_sharded: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        async_op: bool = False,
        config: FusedConfig | None = None,
        workspace: FusedWorkspace | None = None,
        *,
        algorithm: str | None = None,
        gather_dim: int = 1,
        group: Any = None,
        activation: str = "none",
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        tune: bool = False,
        allow_fallback: bool = True,
    ) -> FusedWorkspace:
        """``out = act(scales * gather(A) @ B + bias)``; see :func:`iris.ops.all_gather_matmul.all_gather_matmul`."""
        return all_gather_matmul(
            self._ctx,
            output_tensor,
            A_sharded,
            B,
            bias,
            async_op,
            config,
            workspace,
            algorithm=algorithm,
            gather_dim=gather_dim,
            group=group,
            activation=activation,
            scale_a=scale_a,
            scale_b=scale_b,
            tune=tune,
            allow_fallback=allow_fallback,
        )

    def matmul_all_gather(
        self,
        output: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        async_op: bool = False,
        config: FusedConfig | None = None,
        workspace: FusedWorkspace | None = None,
        *,
        algorithm: str | None = None,
        group: Any = None,
        activation: str = "none",
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        tune: bool = False,
        allow_fallback: bool = True,
    ) -> FusedWorkspace:
        """The rows of ``act(scales * A @ B + bias)`` of all ranks, on every rank; see
        :func:`iris.ops.matmul_all_gather.matmul_all_gather`."""
        return matmul_all_gather(
            self._ctx,
            output,
            A,
            B,
            bias,
            async_op,
            config,
            workspace,
            algorithm=algorithm,
            group=group,
            activation=activation,
            scale_a=scale_a,
            scale_b=scale_b,
            tune=tune,
            allow_fallback=allow_fallback,
        )

    def matmul_all_reduce(
        self,
        output_tensor: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        async_op: bool = False,
        config: FusedConfig | None = None,
        workspace: FusedWorkspace | None = None,
        *,
        algorithm: str | None = None,
        group: Any = None,
        activation: str = "none",
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        tune: bool = False,
        allow_fallback: bool = True,
    ) -> FusedWorkspace:
        """``out = act(scales * sum over ranks of A @ B + bias)``, on every rank; see
        :func:`iris.ops.matmul_all_reduce.matmul_all_reduce`."""
        return matmul_all_reduce(
            self._ctx,
            output_tensor,
            A,
            B,
            async_op,
            config,
            workspace,
            bias=bias,
            algorithm=algorithm,
            group=group,
            activation=activation,
            scale_a=scale_a,
            scale_b=scale_b,
            tune=tune,
            allow_fallback=allow_fallback,
        )

    def matmul_reduce_scatter(
        self,
        output_tensor: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        async_op: bool = False,
        config: FusedConfig | None = None,
        workspace: FusedWorkspace | None = None,
        *,
        algorithm: str | None = None,
        group: Any = None,
        activation: str = "none",
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        tune: bool = False,
        allow_fallback: bool = True,
    ) -> FusedWorkspace:
        """The own rows of ``act(scales * sum over ranks of A @ B + bias)``; see
        :func:`iris.ops.matmul_reduce_scatter.matmul_reduce_scatter`."""
        return matmul_reduce_scatter(
            self._ctx,
            output_tensor,
            A,
            B,
            async_op,
            config,
            workspace,
            bias=bias,
            algorithm=algorithm,
            group=group,
            activation=activation,
            scale_a=scale_a,
            scale_b=scale_b,
            tune=tune,
            allow_fallback=allow_fallback,
        )

    def explain(self, operation: str, *args: Any, **kwargs: Any) -> Plan:
        """The plan that an operation would follow with these arguments; runs nothing. Local.

        Raises:
            ArgumentError: there is no such operation, or its arguments are wrong.
        """
        if operation not in _OPERATIONS:
            raise ArgumentError(f"there is no operation {operation!r}; possible: {', '.join(_OPERATIONS)}")
        explain: Callable[..., Plan] = importlib.import_module(f"iris.ops.{operation}").explain
        return explain(self._ctx, *args, **kwargs)
