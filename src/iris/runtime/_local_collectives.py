"""The process group of one rank of an in-process world: what each collective posts, and the copies it comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist

from iris.errors import ArgumentError, RuntimeConflict, UnsupportedError
from iris.runtime._local_exchange import Channel, LocalWork, Post, Transfer, describe, mark, name_of

_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class LocalGroup(dist.ProcessGroup):
    """One rank's process group over a :class:`Channel`.

    Args:
        channel: shared with the other members.
        place: this rank's place in the group.
        name: of the group; no other group object of the process has it.
        description: for ``group_desc``.
        backend: the name that the program asked for.
    """

    def __init__(self, channel: Channel, place: int, name: str, description: str, backend: str):
        super().__init__(place, len(channel.ranks))  # pyright: ignore[reportCallIssue] - an overload that the stub lacks
        self._channel = channel
        self._place = place
        self._local_name = name
        self._description = description
        self._backend_name = backend
        self._posted = 0

    def __repr__(self) -> str:
        return f"LocalGroup(ranks={list(self._channel.ranks)}, place={self._place})"

    @property
    def group_name(self) -> str:
        return self._local_name

    @property
    def group_desc(self) -> str:
        return self._description

    def getBackendName(self) -> str:
        return self._backend_name

    def name(self) -> str:
        return self._backend_name

    def shutdown(self) -> None:
        """Nothing to release."""

    def abort(self) -> None:
        """Nothing to release."""

    def allreduce(self, tensors, opts=None) -> LocalWork:
        op = _op(opts)
        plan = partial(_plan_reduce, op=op, root=None)
        return self._post("all_reduce", tensors, tensors, plan, op=op, shape=_sizes(tensors))

    def reduce(self, tensors, opts) -> LocalWork:
        op, root = _op(opts), opts.rootRank
        plan = partial(_plan_reduce, op=op, root=root)
        return self._post("reduce", tensors, tensors, plan, op=op, root=str(self._rank(root)), shape=_sizes(tensors))

    def broadcast(self, tensors, opts) -> LocalWork:
        root = opts.rootRank
        plan = partial(_plan_broadcast, root=root)
        return self._post("broadcast", tensors, tensors, plan, root=str(self._rank(root)), shape=_sizes(tensors))

    def allgather(self, outputs, inputs, opts=None) -> LocalWork:
        self._check_count("all_gather", "output", outputs[0])
        return self._post("all_gather", inputs, outputs[0], _plan_exchange)

    def all_gather_single(self, output, tensor, opts=None) -> LocalWork:
        chunks = self._chunks("all_gather_into_tensor", "output", output, "input", tensor)
        return self._post("all_gather_into_tensor", [tensor], chunks, _plan_exchange, shape=_sizes([tensor]))

    def all_gather_single_coalesced(self, outputs, inputs, opts=None) -> LocalWork:
        pairs = zip(outputs, inputs, strict=True)
        return LocalWork.together([self.all_gather_single(output, tensor, opts) for output, tensor in pairs])

    def reduce_scatter(self, outputs, inputs, opts=None) -> LocalWork:
        self._check_count("reduce_scatter", "input", inputs[0])
        return self._reduce_scatter("reduce_scatter", outputs[0], inputs[0], opts)

    def reduce_scatter_single(self, output, tensor, opts=None) -> LocalWork:
        chunks = self._chunks("reduce_scatter_tensor", "input", tensor, "output", output)
        return self._reduce_scatter("reduce_scatter_tensor", output, chunks, opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None) -> LocalWork:
        pairs = zip(outputs, inputs, strict=True)
        return LocalWork.together([self.reduce_scatter_single(output, tensor, opts) for output, tensor in pairs])

    def gather(self, outputs, inputs, opts) -> LocalWork:
        root, targets = opts.rootRank, outputs[0] if outputs else []
        if root == self._place:
            self._check_count("gather", "gather_list", targets)
        plan = partial(_plan_exchange, only_dst=root)
        return self._post("gather", inputs, targets, plan, root=str(self._rank(root)), shape=_sizes(inputs))

    def scatter(self, outputs, inputs, opts) -> LocalWork:
        root, sources = opts.rootRank, inputs[0] if inputs else []
        if root == self._place:
            self._check_count("scatter", "scatter_list", sources)
        plan = partial(_plan_exchange, only_src=root)
        return self._post("scatter", sources, outputs, plan, root=str(self._rank(root)), shape=_sizes(outputs))

    def alltoall(self, outputs, inputs, opts=None) -> LocalWork:
        self._check_count("all_to_all", "output", outputs)
        self._check_count("all_to_all", "input", inputs)
        return self._post("all_to_all", inputs, outputs, _plan_exchange)

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts=None) -> LocalWork:
        targets = self._split("output", output, output_splits)
        return self._post("all_to_all_single", self._split("input", tensor, input_splits), targets, _plan_exchange)

    def barrier(self, opts=None) -> LocalWork:
        return self._post("barrier", [], [], lambda posts: [])

    def monitored_barrier(self, timeout=None, wait_all_ranks=False) -> None:
        self.barrier().wait()

    def send(self, tensors, dst, tag) -> LocalWork:
        post = self._make("send and recv", tensors, [], _plan_message, {})
        call = self._channel.meet(self._place, dst, tag, 0, post)
        return LocalWork([call], f"send of {describe(tensors)} to rank {self._rank(dst)} with tag {tag}", tensors)

    def recv(self, tensors, src, tag) -> LocalWork:
        post = self._make("send and recv", [], tensors, _plan_message, {})
        call = self._channel.meet(src, self._place, tag, 1, post)
        return LocalWork([call], f"recv of {describe(tensors)} from rank {self._rank(src)} with tag {tag}", tensors)

    def recv_anysource(self, tensors, tag) -> LocalWork:
        raise UnsupportedError(
            "recv from any source does not exist between ranks of one process: name the source, src="
        )

    def _reduce_scatter(self, name, output, inputs, opts) -> LocalWork:
        op = _op(opts)
        return self._post(name, inputs, [output], partial(_plan_reduce_scatter, op=op), op=op, shape=_sizes(inputs))

    def _post(self, name, inputs, outputs, plan, **agree: Any) -> LocalWork:
        """Post to the group's next collective."""
        alike = {thing: value if isinstance(value, tuple) else (value, value) for thing, value in agree.items()}
        post = self._make(name, inputs, outputs, plan, alike)
        what = f"{name} over ranks {list(self._channel.ranks)}"
        self._posted += 1
        call = self._channel.join(self._posted, self._place, what, post)
        tensors = f" of {describe(inputs or outputs)}" if inputs or outputs else ""
        return LocalWork([call], f"{name}{tensors} over ranks {list(self._channel.ranks)}", list(outputs))

    def _make(self, name, inputs, outputs, plan, agree: dict[str, tuple[Any, str]]) -> Post:
        rank = self._rank(self._place)
        if self._channel.host.current_rank() != rank:
            raise RuntimeConflict(
                f"rank {self._channel.host.current_rank()} called {name} on a group object of rank {rank}; "
                "each rank must use the object that its own call of new_group returned"
            )
        tensors = [*inputs, *outputs]
        if "op" in agree:
            _check_op(name, agree["op"][0], tensors[0].dtype)
        if tensors:
            dtypes = ", ".join(sorted({name_of(tensor.dtype) for tensor in tensors}))
            agree = {**agree, "dtype": (dtypes, dtypes)}
        return Post(name, agree, list(inputs), list(outputs), plan, mark(tensors, barrier=name == "barrier"))

    def _rank(self, place: int) -> Any:
        return self._channel.ranks[place]

    def _check_count(self, name: str, which: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self.size():
            raise ArgumentError(f"{name}: the {which} list has {len(tensors)} tensors, the group {self.size()} ranks")

    def _chunks(self, name, which, whole, other, part) -> list[torch.Tensor]:
        """``whole`` as one flat piece a rank."""
        if whole.numel() != self.size() * part.numel() or not whole.is_contiguous():
            raise ArgumentError(
                f"{name}: the {which} must be contiguous and have {self.size()} times the elements of the {other}, one "
                f"part a rank; got {which} {describe([whole])}, stride {whole.stride()}, and {other} {describe([part])}"
            )
        flat = whole.detach().view(-1)
        return [flat.narrow(0, i * part.numel(), part.numel()) for i in range(self.size())]

    def _split(self, which: str, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        rows = tensor.shape[0] if tensor.dim() else 0
        sizes = list(sizes) or [rows // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != rows or min(sizes) < 0:
            raise ArgumentError(
                f"all_to_all_single: the {which} has {rows} rows, which {self.size()} ranks cannot share as {sizes}"
            )
        return list(tensor.detach().split(sizes))


# torch has renamed these methods; its versions call either name.
for _name, _same in {
    "allreduce_coalesced": "allreduce",
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}.items():
    setattr(LocalGroup, _name, getattr(LocalGroup, _same))


def _plan_exchange(posts: list[Post], only_src: int | None = None, only_dst: int | None = None) -> list[Transfer]:
    """From every source's piece for a destination to the destination's piece for that source.

    A rank that posted one tensor uses it for every peer.
    """
    return [
        Transfer(src, _piece(source.inputs, dst), dst, _piece(target.outputs, src))
        for src, source in enumerate(posts)
        for dst, target in enumerate(posts)
        if only_src in (None, src) and only_dst in (None, dst)
    ]


def _piece(tensors: list[torch.Tensor], peer: int) -> torch.Tensor:
    return tensors[peer if len(tensors) > 1 else 0]


def _plan_broadcast(posts: list[Post], root: int) -> list[Transfer]:
    return [
        Transfer(root, source, dst, target)
        for dst, post in enumerate(posts)
        if dst != root
        for source, target in zip(posts[root].inputs, post.outputs, strict=True)
    ]


def _plan_message(posts: list[Post]) -> list[Transfer]:
    return [Transfer(0, posts[0].inputs[0], 1, posts[1].outputs[0])]


def _plan_reduce(posts: list[Post], op: str, root: int | None) -> list[Transfer]:
    totals = [_combine(op, list(tensors)) for tensors in zip(*(post.inputs for post in posts), strict=True)]
    return [
        # As in a ring: every rank sends and receives all but its own part, once to add up and once to hand out.
        Transfer(dst, total, dst, target, combined=(2 if root is None else 1) * (len(posts) - 1) / len(posts))
        for dst, post in enumerate(posts)
        if root in (None, dst)
        for total, target in zip(totals, post.outputs, strict=True)
    ]


def _plan_reduce_scatter(posts: list[Post], op: str) -> list[Transfer]:
    # All sums before the first copy: an output may be a part of its rank's own input.
    totals = [_combine(op, [post.inputs[dst] for post in posts]) for dst in range(len(posts))]
    peers = float(len(posts) - 1)
    return [Transfer(dst, total, dst, posts[dst].outputs[0], combined=peers) for dst, total in enumerate(totals)]


def _combine(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The reduction of ``tensors`` in group order, flat. Types below fp32 are summed in fp32 and rounded once."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    total = reduce(_STEPS[op], (tensor.detach().reshape(-1).to(wide) for tensor in tensors))
    if op == "AVG":
        exact = dtype.is_floating_point or dtype.is_complex
        total = torch.div(total, len(tensors), rounding_mode=None if exact else "trunc")
    return total.to(dtype)


def _op(opts: Any) -> str:
    """The name of a reduction, given as options, a ``ReduceOp`` or nothing (a sum)."""
    op = getattr(opts, "reduceOp", opts)
    op = getattr(op, "op", op)
    return "SUM" if op is None else op.name


def _check_op(name: str, op: str, dtype: torch.dtype) -> None:
    if op not in _STEPS:
        raise UnsupportedError(f"{name}: {op} does not exist between ranks of one process, only {', '.join(_STEPS)}")
    real = dtype.is_floating_point or dtype.is_complex
    if (
        (op.startswith("B") and real)
        or (op in ("MIN", "MAX") and dtype.is_complex)
        or (op, dtype) == ("AVG", torch.bool)
    ):
        raise ArgumentError(f"{name}: {op} is not defined for {name_of(dtype)}")


def _sizes(tensors: Sequence[torch.Tensor]) -> tuple[object, str]:
    """What must be alike, the numbers of elements, and how to say it."""
    return [tensor.numel() for tensor in tensors], ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
