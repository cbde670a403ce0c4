"""A GEMM beside an independent collective.

Each operation has a module form, ``iris.concurrent.gemm.all_gather(ctx, A, B, comm_src, ...)``, and a context form,
``ctx.concurrent.all_gather(A, B, comm_src, ...)``. :mod:`iris.concurrent.autotune` finds the split and the tile,
:mod:`iris.concurrent.predictor` predicts what they take.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING

from iris.concurrent import autotune, gemm, predictor
from iris.concurrent.workspace import Workspace, make_workspace

if TYPE_CHECKING:
    from iris.runtime.context import Iris

__all__ = ["ConcurrentNamespace", "Workspace", "autotune", "gemm", "make_workspace", "predictor"]


class ConcurrentNamespace:
    """The operations of one context, without its argument; ``ctx.concurrent``. See :mod:`iris.concurrent.gemm`."""

    def __init__(self, ctx: Iris):
        self.all_gather = MethodType(gemm.all_gather, ctx)
        self.all_reduce = MethodType(gemm.all_reduce, ctx)
        self.reduce_scatter = MethodType(gemm.reduce_scatter, ctx)
        self.all_to_all = MethodType(gemm.all_to_all, ctx)
        self.broadcast = MethodType(gemm.broadcast, ctx)
        self.make_workspace = MethodType(make_workspace, ctx)
