"""Fused operations and collectives as functions that return new tensors: for autograd and ``torch.compile``.

    import iris
    from iris import functional

    ctx = iris.iris()
    handle = functional.handle(ctx)
    y = functional.all_gather_matmul(x, w, handle=handle)

Each is an operator of PyTorch (``torch.ops.iris.all_gather_matmul`` and so on) with a kernel for shapes and with
gradients, so ``torch.compile(fullgraph=True)`` takes a function that calls it. Every rank of the group calls the same
functions in the same order, forward and backward: give all ranks the same program, and the same tensors
``requires_grad``.

Gradients. A rank's loss is its own, and what is minimised is the sum of all ranks' losses: the gradient of a tensor is
the derivative of that sum with respect to this rank's tensor. So the gradient of an all-gather is a reduce-scatter,
that of a reduce-scatter an all-gather, and that of an all-reduce an all-reduce. It is the one convention under which a
function's gradient depends on nothing but the function, whatever the ranks do with its result. A program in which every
rank computes the same loss from the same result counts it ``world_size`` times, and divides by that; parameters that
all ranks hold the same get the sum over ranks of their gradients, as always.

Memory. Inputs and results are ordinary tensors. What peers read or write lies on the symmetric heap for the time of
the call: it is copied through a buffer there that the context keeps, of the size of the largest such tensor. So no
tensor that autograd keeps is on the heap, and ranks may drop them in any order.
"""

from iris.functional._collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from iris.functional._handles import handle
from iris.functional._products import (
    all_gather_matmul,
    matmul_all_gather,
    matmul_all_reduce,
    matmul_reduce_scatter,
)

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "handle",
    "matmul_all_gather",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
]
