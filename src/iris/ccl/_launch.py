"""Launches of the kernels of collectives, with what all of them take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from iris.ccl._pieces import Pieces, integer_dtype
from iris.ccl.choice import Programs
from iris.runtime import launch
from iris.runtime.channels import Channels
from iris.runtime.groups import Group

if TYPE_CHECKING:
    from iris.runtime.context import Iris


def kernel_launch(
    ctx: Iris,
    operation: str,
    kernel: Any,
    members: Group,
    programs: Programs,
    *,
    numbers: tuple[int, ...],
    shape: tuple[int, ...],
    root: tuple[int, ...] = (),
    slots: torch.dtype | None = None,
    moves: bool = False,
    indexed: bool = True,
    messages: bool = False,
    **meta: Any,
) -> Callable[..., None]:
    """A function ``(channels, out, inp)`` that launches ``kernel``.

    Args:
        ctx: the context.
        operation: name of the operation, for messages.
        kernel: takes input, output, ``numbers``, ``shape``, slots (with ``slots``), flags, epochs, tickets, members,
            index, ``root``, context, and the constants of ``meta``.
        members: the group.
        programs: how it runs.
        numbers: counts of elements, blocks and the like.
        shape: columns and strides of input and output.
        root: places of ranks in the group that the kernel takes after the caller's.
        slots: the type that slots hold.
        moves: values are moved only, so the kernel sees integers of their size.
        indexed: whether the kernel takes the caller's place in the group before ``root``.
        messages: whether the kernel takes the flags, counts and slots of messages instead of those of collectives.
        meta: constants of the kernel.
    """
    ranks, context = ctx.group_members(members), ctx.get_device_context()
    peers = 2
    while peers < members.size:
        peers *= 2
    grid = (programs.count,)
    # Interpreted programs start in any order, as many at a time as a simulation says.
    tickets = programs.count > 1 and (not ctx.target.compiled or programs.count > ctx.get_cu_count())
    meta |= {
        "TICKETS": tickets,
        "WORLD": members.size,
        "PEERS": peers,
        "BLOCK": programs.block,
        "KERNEL": launch.kernel_id(operation),
    }
    places = (members.index, *root) if indexed else root
    fixed = (*numbers, *shape)
    again: Callable[..., None] | None = None

    def parts(channels: Channels) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        if messages:
            return channels.message_slots, channels.message_words
        return channels.slots, channels.words

    def addresses(channels: Channels) -> tuple[int, ...]:
        memory, words = parts(channels)
        own = (memory.data_ptr(),) if slots is not None else ()
        return (*fixed, *own, *(word.data_ptr() for word in words), ranks.data_ptr(), *places, context.data_ptr())

    usual = addresses(ctx.channels)

    def issue(channels: Channels, out: torch.Tensor | None, inp: torch.Tensor | None) -> None:
        nonlocal again
        # A rank that only gives, or only gets, passes one tensor for both; the kernel uses one of them.
        out, inp = (inp if out is None else out), (out if inp is None else inp)
        assert out is not None
        assert inp is not None
        if again is not None:
            rest = usual if channels is ctx.channels else addresses(channels)
            again(ctx.stream_handle(), inp.data_ptr(), out.data_ptr(), *rest)
            return
        if moves:
            integers = integer_dtype(inp.dtype)
            out, inp = out.view(integers), inp.view(integers)
        memory, words = parts(channels)
        own = (memory.view(slots),) if slots is not None else ()
        compiled = launch.start(
            ctx, kernel, grid, inp, out, *fixed, *own, *words, ranks, *places, context,
            num_warps=programs.num_warps, maxnreg=programs.registers, **meta,
        )  # fmt: skip
        if compiled is not None:
            again = launch.again(compiled, kernel, grid, **meta)

    return issue


def matrix_shape(inp: Pieces, out: Pieces) -> tuple[int, ...]:
    """Columns and strides of input and output, as kernels take them."""
    return (*inp.strides, *out.strides)
