"""Checks that several collectives share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris.ccl.config import Config, reduce_op
from iris.errors import ArgumentError, IrisError, UnsupportedError
from iris.runtime.checks import FP8, check_tensor
from iris.runtime.groups import Group

if TYPE_CHECKING:
    from iris.runtime.context import Iris

REDUCED = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, *FP8,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def check_pair(ctx: Iris, output_tensor: Any, input_tensor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and input, when they are tensors of one dtype on the context's device."""
    out = check_tensor(ctx, "output_tensor", output_tensor)
    inp = check_tensor(ctx, "input_tensor", input_tensor)
    if out.dtype != inp.dtype:
        raise ArgumentError(f"output_tensor and input_tensor must have one dtype, got {out.dtype} and {inp.dtype}")
    return out, inp


def check_config(config: Any) -> Config | None:
    """The caller's configuration."""
    if config is not None and not isinstance(config, Config):
        raise ArgumentError(f"config must be None or an iris.ccl.Config, got {type(config).__name__}")
    return config


def check_reduced(ctx: Iris, dtype: torch.dtype) -> None:
    """Raise unless values of ``dtype`` can be reduced on the context's device."""
    if dtype not in REDUCED:
        possible = ", ".join(str(d).removeprefix("torch.") for d in REDUCED)
        raise UnsupportedError(f"values of {dtype} cannot be reduced; possible: {possible}")
    if dtype in FP8 and str(dtype).removeprefix("torch.") not in ctx.target.fp8:
        able = ", ".join(ctx.target.fp8) or "no fp8 dtype"
        raise UnsupportedError(f"{ctx.target.arch} does not compute with {dtype}; it does with: {able}")


def meant_op(op: Any) -> Any:
    """The :class:`iris.ccl.ReduceOp` meant by ``op``, so that all names of it count as the same; else ``op``."""
    try:
        return reduce_op(op, floating=True)
    except IrisError:
        return op


def place_of(members: Group, rank: Any, name: str) -> int:
    """The place in the group of a rank of the world.

    Raises:
        ArgumentError: the rank is not in the group.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank not in members.ranks:
        raise ArgumentError(f"{name} must be a rank of the group {list(members.ranks)}, got {rank!r}")
    return members.ranks.index(rank)


def check_dimension(dim: Any, tensor: torch.Tensor) -> int:
    """``dim`` counted from 0."""
    if isinstance(dim, bool) or not isinstance(dim, int) or not -max(1, tensor.dim()) <= dim < max(1, tensor.dim()):
        raise ArgumentError(f"dim must be a dimension of the input of shape {tuple(tensor.shape)}, got {dim!r}")
    return dim % max(1, tensor.dim())
