"""Checks of the arguments of matrix operations, and what they come to as a :class:`Problem`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from iris.errors import ArgumentError
from iris.runtime.checks import FLOATS, FP8, check_device, check_product_dtypes, check_tensor

if TYPE_CHECKING:
    from iris._target import Target
    from iris.runtime.context import Iris

ALIGNMENT = 16  # bytes
# What may follow the product, with PyTorch's function for it. Kernels have theirs in iris.device.numeric.activate.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda value: value,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


@dataclass(frozen=True)
class Problem:
    """A matrix multiplication over ranks.

    Attributes:
        M, N, K: sizes of the whole product: out is (M, N), the gathered A (M, K), B (K, N).
        a_dtype, b_dtype, out_dtype: dtypes.
        world_size: number of ranks that take part.
        gather_dim: 1 when A is sharded along K, 0 when along M; None when nothing is gathered: every rank has an A
            (M, K) and a B (K, N) of its own, and the products are added.
        bias: shape of the bias, None without one.
        transpose: two letters, N or T for A and B, as in BLAS: T when the columns are contiguous.
        activation: one of :data:`ACTIVATIONS`.
        scaled: whether there are scales of A and B.
        aligned: whether rows, or columns, of all matrices begin at addresses that are copied at once.
    """

    M: int
    N: int
    K: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    world_size: int
    gather_dim: int | None
    bias: tuple[int, ...] | None
    transpose: str
    activation: str = "none"
    scaled: bool = False
    aligned: bool = True

    def __str__(self) -> str:
        names = [str(d).removeprefix("torch.") for d in (self.a_dtype, self.b_dtype, self.out_dtype)]
        dtypes = names[0] if len(set(names)) == 1 else f"{names[0]} x {names[1]} -> {names[2]}"
        size = f"{self.M}x{self.N}x{self.K}"
        epilogue = (", scaled" if self.scaled else "") + (f", {self.activation}" if self.activation != "none" else "")
        gathered = "" if self.gather_dim is None else f", gather_dim={self.gather_dim}"
        return f"{size} {dtypes} {self.transpose}, {self.world_size} ranks{gathered}{epilogue}"


def aligned(matrix: torch.Tensor) -> bool:
    """Whether the rows of a matrix, or its columns where those lie together, begin at multiples of 16 bytes."""
    step = matrix.stride(1) if letter(matrix) == "T" else matrix.stride(0)
    return matrix.data_ptr() % ALIGNMENT == 0 and step * matrix.element_size() % ALIGNMENT == 0


def letter(matrix: torch.Tensor) -> str:
    """``"T"`` for a matrix whose columns are contiguous and whose rows are not, ``"N"`` otherwise."""
    return "T" if matrix.stride(0) == 1 and matrix.stride(1) != 1 else "N"


def check_dtypes(target: Target, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ArgumentError unless the dtypes of A, B and out go together on the target.

    Raises:
        ArgumentError: a combination that has no meaning here; the message lists those that have.
        UnsupportedError: an fp8 dtype that the target does not multiply.
    """
    possible = check_product_dtypes(target, a.dtype, b.dtype, float64=True)
    if out.dtype not in possible:
        names = ", ".join(str(d).removeprefix("torch.") for d in possible)
        raise ArgumentError(f"out must be {names} for inputs of {a.dtype}, got {out.dtype}")


def check_bias(ctx: Iris, bias: torch.Tensor | None, M: int, N: int, out_dtype: torch.dtype) -> None:
    """Raise ArgumentError unless ``bias`` is None, of length N, or 2-D and broadcasts to (M, N)."""
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor):
        raise ArgumentError(f"bias must be a tensor or None, got {type(bias).__name__}")
    check_device(ctx, "bias", bias)
    if out_dtype == torch.int32 and bias.dtype != torch.int32:
        raise ArgumentError(f"bias must be int32 for an int32 output, got {bias.dtype}")
    floats = (torch.float64, *FLOATS) if out_dtype == torch.float64 else FLOATS
    if out_dtype != torch.int32 and bias.dtype not in floats:
        *names, last = (str(d).removeprefix("torch.") for d in floats)
        raise ArgumentError(f"bias must be {', '.join(names)} or {last} for an output of {out_dtype}, got {bias.dtype}")
    if bias.dim() == 1:
        if bias.shape[0] != N:
            remedy = "; to add one value to each row pass bias[:, None]" if bias.shape[0] == M else ""
            raise ArgumentError(
                f"a 1-D bias is added to every row, so its length must be N={N}, got {bias.shape[0]} (M={M}){remedy}"
            )
    elif bias.dim() != 2 or any(have not in (1, want) for have, want in zip(bias.shape, (M, N), strict=True)):
        raise ArgumentError(
            f"bias must have shape ({N},), or broadcast from two dimensions to ({M}, {N}); got {tuple(bias.shape)}"
        )


def check_activation(activation: object, out_dtype: torch.dtype) -> str:
    """``activation``, when it is one of :data:`ACTIVATIONS` and applies to the output.

    Raises:
        ArgumentError: it is not.
    """
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        possible = ", ".join(map(repr, ACTIVATIONS))
        raise ArgumentError(f"activation {activation!r} is not known; possible: {possible}")
    if activation != "none" and out_dtype == torch.int32:
        raise ArgumentError(f"an int32 output has no activation, so it must be 'none'; got {activation!r}")
    return activation


def check_scales(ctx: Iris, scale_a: object, scale_b: object, dtype: torch.dtype) -> bool:
    """Whether scales are given, after making sure that they are float32 tensors of one element for fp8 inputs.

    Raises:
        ArgumentError: only one, no tensor, of another dtype or size, or for inputs of ``dtype`` that is not fp8.
        DeviceMismatch: on another device.
    """
    if scale_a is None and scale_b is None:
        return False
    for name, scale, other in (("scale_a", scale_a, "scale_b"), ("scale_b", scale_b, "scale_a")):
        if scale is None:
            raise ArgumentError(f"{other} is given and {name} is not; give both or neither (1.0 for no scale)")
        tensor = check_tensor(ctx, name, scale)
        if tensor.dtype != torch.float32 or tensor.numel() != 1:
            raise ArgumentError(
                f"{name} must be a float32 tensor of one element, got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    if dtype not in FP8:
        raise ArgumentError(f"scales are for fp8 inputs, A and B are {dtype}; leave scale_a and scale_b out")
    return True
