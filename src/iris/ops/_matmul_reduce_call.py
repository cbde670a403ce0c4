"""What a call of matmul + reduce-scatter or + all-reduce comes to before anything runs: checks, agreement, plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from iris.errors import ArgumentError, IrisError, NotSymmetricError, UnsupportedError
from iris.ops import _moving_sums, arguments
from iris.ops._matmul_reduce_kernel import ONE_SHOT, SCATTER, TWO_SHOT
from iris.ops.arguments import Problem
from iris.ops.call import FusedCall, given_facts, place_facts, plan_facts, tensor_facts, torch_refuses
from iris.ops.choice import check_fits, fitted, float64_plan, known, predicted, tiles_for
from iris.ops.config import FusedConfig, HbmBufferConfig
from iris.ops.division import divided, exchange_time
from iris.ops.partials import Partials
from iris.ops.workspace import FusedWorkspace
from iris.runtime import checks
from iris.runtime.calls import Calls, StreamOrder
from iris.runtime.groups import Group
from iris.runtime.links import link_of
from iris.tuning import Plan
from iris.tuning.selection import Selection
from iris.tuning.steps import lookup
from iris.x.operands import takes_descriptors

if TYPE_CHECKING:
    from iris.runtime.context import Iris

REDUCE_SCATTER, ALL_REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
ALGORITHMS = {
    REDUCE_SCATTER: ("torch", "fused"),
    ALL_REDUCE: ("torch", "two_shot", *_moving_sums.ALGORITHMS, "one_shot"),
}
# Algorithms that write C on the other ranks.
_WRITE_PEERS = ("two_shot", *_moving_sums.ALGORITHMS)
_VARIANTS = {"fused": SCATTER.value, "two_shot": TWO_SHOT.value, "one_shot": ONE_SHOT.value}
_INPUTS = ("A", "B", "bias", "scale_a", "scale_b")
# Rounds of all programs that multiply tiles of other ranks before the first own ones: an all-reduce has to write the
# sums on every rank, too, and early ones are written meanwhile.
_ROUNDS_AHEAD = 0.5
# Rounds from which on a reduce-scatter, which writes nothing to other ranks after its sums, does all of theirs first.
_ROUNDS_IN_TURN = 6
# Programs that send at a time where they multiply several tiles each: enough for a link.
_SENDERS = 24


@dataclass(frozen=True)
class Asked:
    """The arguments of a call that are not tensors of the product, as they were given.

    Attributes:
        operation: :data:`REDUCE_SCATTER` or :data:`ALL_REDUCE`.
        algorithm, config, activation, group: of the call. scales: those of A and B, each None when not given.
        tune, allow_fallback: of the call.
    """

    operation: str
    algorithm: Any
    config: Any
    activation: Any
    scales: tuple[Any, Any]
    group: Any
    tune: bool = False
    allow_fallback: bool = True


@dataclass(frozen=True)
class Schedule:
    """The numbers of one call of the kernel, from its problem and configuration alone.

    Attributes:
        variant: the kernel's. grid: number of programs.
        ahead: how many tiles of every other rank are multiplied before the first own one.
        whole: tiles in one piece. splits: pieces along K of each of the others.
        nbytes, flags: sizes of the partial products that come to a rank, and of their flags.
        sums, summed: sizes of the sums of divided tiles (elements), and of their flags.
        senders: programs that may send to other ranks at a time.
        descriptors: whether operands come by tensor descriptors.
    """

    variant: int
    grid: int
    ahead: int
    whole: int
    splits: int
    nbytes: int
    flags: int
    sums: int
    summed: int
    senders: int
    descriptors: bool


class Call(FusedCall):
    """A checked combination of arguments, its plan, and what every launch of it needs.

    Attributes:
        chunk: rows of the output of a rank, by torch.chunk's rule; all of them where every rank has all.
        first, rows: first row of this rank, and how many it has.
        schedule: None where PyTorch's operations run.
    """

    def __init__(self, ctx: Iris, members: Group, problem: Problem, plan: Plan, out, a, b, bias, scales):
        inputs: dict[str, Any] = dict(zip(_INPUTS, (a, b, bias, *scales), strict=True))
        super().__init__(ctx, problem, plan, ("C", out), inputs)
        self.scatter = plan.operation == REDUCE_SCATTER
        self.chunk, self.first, self.rows = problem.M, 0, problem.M
        if self.scatter:
            self.chunk = _ceil(problem.M, members.size)
            self.first, self.rows = _own_rows(problem.M, members)
        self.schedule: Schedule | _moving_sums.Schedule | None = None
        if plan.algorithm in _moving_sums.ALGORITHMS:
            self.schedule = _moving_sums.schedule(ctx, problem, plan, a, b, self.precision)
        elif plan.config is not None:
            self.schedule = _schedule(ctx, problem, plan, self.chunk, a, b, self.precision)

    def require(self, workspace: FusedWorkspace, members: Group) -> None:
        """Raise ArgumentError unless ``workspace`` was made for such a call, and has room for it or can grow."""
        super().require(workspace, members)
        memory, s = workspace.partials, self.schedule
        if s is not None and memory is not None and memory.fixed and not memory.holds(s.nbytes, s.flags):
            raise ArgumentError(
                f"the workspace has room for {memory.sizes[0]} bytes of partial products and {memory.sizes[1]} flags, "
                f"this call needs {s.nbytes} and {s.flags}: make it with C's dtype and the config of the call"
            )


class State(Calls[Call]):
    """What a context remembers of these operations: agreed calls, workspaces, reported plans."""

    def __init__(self, ctx: Iris):
        super().__init__(ctx)
        self.order = StreamOrder(ctx)
        self._memories: dict[str, Partials] = {}
        self._workspaces: dict[tuple, FusedWorkspace] = {}

    def agree(self, members: Group, asked: Asked, out, a, b, bias, workspace, preamble: bool = False) -> Call:
        """Check the arguments and compare them across the group. Collective over the group.

        Raises:
            IrisError: what is wrong here.
            RankMismatch: what is wrong on another rank, or what differs.
        """
        error: IrisError | None = None
        call = None
        try:
            call = checked(self._ctx, members, asked, out, a, b, bias)
            call.check_overlap(out, a, b, bias, *asked.scales)
            if workspace is not None:
                call.require(workspace, members)
            elif call.schedule is not None and members.size < self._ctx.num_ranks and not preamble:
                raise ArgumentError(
                    f"{asked.operation} keeps partial products on the symmetric heap, which all ranks allocate "
                    f"together, and this call is of ranks {list(members.ranks)} alone: pass "
                    f"workspace={asked.operation}_preamble(...), which every rank makes, or take algorithm='torch'"
                )
        except IrisError as caught:
            error = caught
        facts = _facts(self._ctx, asked, call, out, a, b, bias)
        facts["workspace"] = "given" if workspace is not None else "none"
        facts["call"] = f"{asked.operation}_preamble" if preamble else asked.operation
        self._ctx.agreement.reach(asked.operation, members, facts, error)
        assert call is not None  # reach() raises the error
        return call

    def workspace(self, call: Call, members: Group) -> FusedWorkspace:
        """The workspace for such calls over the context's own memory. Collective over the world when that grows."""
        problem, plan = call.problem, call.plan
        key = (plan.operation, problem.M, problem.N, problem.K, problem.a_dtype, members.ranks, plan.algorithm)
        memory = self._memory(plan.algorithm)
        if call.schedule is not None:
            sizes = call.schedule.nbytes, call.schedule.flags
            if not memory.holds(*sizes):
                for workspace in self._workspaces.values():
                    if workspace.partials is memory:
                        workspace.aux_buffer = None  # or the heap could not take it back
            memory.get(*sizes)
        if key not in self._workspaces:
            self._workspaces[key] = workspace_over(call, members, memory)
        return self._workspaces[key]

    def _memory(self, algorithm: str) -> Partials:
        """The context's own memory for an algorithm; those that exchange partial products share one."""
        kind = algorithm if algorithm in (*_moving_sums.ALGORITHMS, "one_shot") else ""
        if kind not in self._memories:
            self._memories[kind] = Partials(self._ctx, zeroed=algorithm == "atomic")
        return self._memories[kind]


def workspace_over(call: Call, members: Group, partials: Partials) -> FusedWorkspace:
    """A workspace for ``call`` with this memory; without any where PyTorch's operations run."""
    if call.schedule is None:
        return FusedWorkspace(**call.made_for(members), prepared=True)
    return FusedWorkspace(
        **call.made_for(members), locks=partials.locks, counters=partials.counters, partials=partials, prepared=True
    )


def new_workspace(ctx: Iris, call: Call, members: Group) -> FusedWorkspace:
    """A workspace with memory of its own for ``call``. Collective over the world: all ranks make the allocations."""
    sizes = (0, 0) if call.schedule is None else (call.schedule.nbytes, call.schedule.flags)
    # Groups may call for different problems, and the heap wants the same sizes of every rank.
    everyone = ctx.exchange.all_gather(f"{call.plan.operation}_preamble(): sizes", sizes)
    nbytes, flags = (max(size) for size in zip(*everyone, strict=True))
    partials = Partials(ctx, fixed=True, zeroed=call.plan.algorithm == "atomic")
    if flags:
        partials.get(nbytes, flags)
    return workspace_over(call, members, partials)


def checked(ctx: Iris, members: Group, asked: Asked, out, a, b, bias) -> Call:
    """The call that the arguments make. Local.

    Raises:
        ArgumentError, NotSymmetricError, DeviceMismatch, UnsupportedError: says what was wrong, what was given and what
            is possible.
    """
    problem = _check(ctx, members, asked, out, a, b, bias)
    if asked.config is not None:
        if not isinstance(asked.config, FusedConfig) or isinstance(asked.config, HbmBufferConfig):
            raise ArgumentError(f"config must be a FusedConfig or None, got {type(asked.config).__name__}")
        asked.config.validate(members.size)
    reachable = members.size == 1 or not out.numel() or ctx.is_symmetric(out)
    plan = _choose(ctx, members, problem, asked, torch_refuses(problem, members, asked.group, ctx), reachable)
    if plan.algorithm in _WRITE_PEERS and not reachable:
        raise NotSymmetricError(
            f"C is written by the other ranks with algorithm {plan.algorithm!r}, so it must be on the symmetric heap; "
            "create it with ctx.zeros, ctx.empty and so on, or take algorithm 'one_shot'"
        )
    return Call(ctx, members, problem, plan, out, a, b, bias, asked.scales)


def _check(ctx: Iris, members: Group, asked: Asked, out: Any, a: Any, b: Any, bias: Any) -> Problem:
    for name, tensor in (("C", out), ("A", a), ("B", b)):
        checks.check_matrix(ctx, name, tensor)
    (M, depth), (K, N) = a.shape, b.shape
    if depth != K:
        raise ArgumentError(
            f"A must be (M, K) and B (K, N) with this rank's part of K; got A {tuple(a.shape)} and B {tuple(b.shape)}"
        )
    rows, whose = M, ""
    if asked.operation == REDUCE_SCATTER:
        rows = _own_rows(M, members)[1]
        whose = (
            f", member {members.index}'s rows of ({M}, {N}) when {members.size} ranks share them as torch.chunk does"
        )
    if tuple(out.shape) != (rows, N):
        raise ArgumentError(f"C must have shape ({rows}, {N}){whose}; got {tuple(out.shape)}")
    arguments.check_dtypes(ctx.target, a, b, out)
    arguments.check_bias(ctx, bias, M, N, out.dtype)
    arguments.check_activation(asked.activation, out.dtype)
    scaled = arguments.check_scales(ctx, *asked.scales, a.dtype)
    return Problem(
        M, N, K, a.dtype, b.dtype, out.dtype, members.size, None, tuple(bias.shape) if bias is not None else None,
        arguments.letter(a) + arguments.letter(b), asked.activation, scaled,
        all(map(arguments.aligned, (a, b, out))),
    )  # fmt: skip


def _choose(ctx: Iris, members: Group, problem: Problem, asked: Asked, refusal: str, reachable: bool) -> Plan:
    """The plan. ``refusal``: why PyTorch cannot do it, or empty; ``reachable``: whether peers can write C."""
    operation, algorithm, config = asked.operation, asked.algorithm, asked.config
    if algorithm is None and config is not None:
        algorithm = config.all_reduce_variant if operation == ALL_REDUCE else "fused"
        reason = "the caller gave a configuration, which is for the kernel"
    else:
        reason = "the caller named it"
    possible = ", ".join(ALGORITHMS[operation])
    if algorithm is not None and algorithm not in ALGORITHMS[operation]:
        raise ArgumentError(f"algorithm {algorithm!r} is not known for {operation}; possible: {possible}")

    wide = float64_plan(operation, ALGORITHMS[operation], problem, algorithm, config, refusal)
    if wide is not None:
        return wide

    def tiles(taken: str) -> FusedConfig:
        found = config
        if found is None:
            chunk = _ceil(problem.M, problem.world_size) if operation == REDUCE_SCATTER else problem.M
            if taken in _moving_sums.ALGORITHMS:
                found = _moving_sums.narrowed(fitted(ctx.target, replace(problem, M=chunk)))
            else:
                found = tiles_for(ctx, problem, chunk, problem.world_size if operation == REDUCE_SCATTER else 1)
        return replace(found, all_reduce_variant=taken) if operation == ALL_REDUCE else found

    def plan(taken: str, source: str, why: str) -> Plan:
        if taken == "torch":
            return Plan(operation, taken, None, source, why, str(problem))
        check_fits(ctx.target, tiles(taken), problem)
        return Plan(operation, taken, tiles(taken), source, why, str(problem))

    def selected(found: Selection) -> FusedConfig:
        given = replace(tiles(found.algorithm), **found.params) if found.kind == "rule" else FusedConfig(**found.params)
        return replace(given, all_reduce_variant=found.algorithm) if operation == ALL_REDUCE else given

    if algorithm == "torch":
        if config is not None:
            raise ArgumentError("algorithm 'torch' runs PyTorch's operations and takes no config")
        if refusal:
            raise UnsupportedError(f"algorithm 'torch' cannot do this: {refusal}; {ALGORITHMS[operation][-1]!r} can")
    if algorithm is not None:
        return plan(algorithm, "user", reason)
    found = known(ctx, operation, problem, members, bool(refusal), selected)
    if found is not None and (reachable or found.algorithm not in _WRITE_PEERS):
        return found
    kernel = "fused" if operation == REDUCE_SCATTER else "two_shot" if reachable else "one_shot"
    if not ctx.target.compiled:
        return plan(kernel, "heuristic", "kernels run under the interpreter, so results matter and speed does not")
    if refusal:
        return plan(kernel, "heuristic", refusal)
    if problem.world_size == 1:
        return plan("torch", "fallback", "one rank has nothing to add, so PyTorch's matmul runs")
    if problem.a_dtype.itemsize != 2:
        reason = "the library's kernels were measured with 16-bit types only, so PyTorch multiplies and adds"
        return plan("torch", "fallback", reason)
    nbytes = problem.M * problem.N * problem.out_dtype.itemsize
    entry = lookup(operation, link_of(ctx), problem.world_size, nbytes, ctx.target.product)
    if entry is None:
        ways = (kernel, "one_shot") if operation == ALL_REDUCE else (kernel,)
        return predicted(ctx, operation, problem, [(way, tiles(way)) for way in dict.fromkeys(ways)])
    reason = f"the sum has {nbytes} bytes; {entry.reason}"
    if entry.algorithm == "two_shot" and not reachable:
        return plan("one_shot", "heuristic", "the other ranks cannot write C, which is not on the symmetric heap")
    source = "fallback" if entry.algorithm == "torch" else "exact" if entry.measured else "heuristic"
    return plan(entry.algorithm, source, reason)


def _schedule(
    ctx: Iris, problem: Problem, plan: Plan, chunk: int, a: torch.Tensor, b: torch.Tensor, precision: str
) -> Schedule:
    config, world = plan.config, problem.world_size
    m, n = config.block_size_m, config.block_size_n
    variant, programs = _VARIANTS[plan.algorithm], config.num_sms or ctx.get_cu_count()
    tiles = _ceil(chunk, m) * _ceil(problem.N, n)
    # A rank owns, that is, adds up, so many tiles; and multiplies so many.
    owned = _ceil(tiles, world) if variant == TWO_SHOT.value else tiles
    positions = tiles if variant == ONE_SHOT.value else owned * world
    ahead = min(owned, _ceil(round(_ROUNDS_AHEAD * programs), max(1, world - 1)))
    if variant == SCATTER.value and positions > _ROUNDS_IN_TURN * programs:
        ahead = owned
    depth, itemsize = problem.K, problem.a_dtype.itemsize
    exchange = exchange_time(config, depth, itemsize) if depth else 0.0
    whole, splits = divided(positions, programs, _ceil(depth, config.block_size_k), exchange)
    split = positions - whole
    return Schedule(
        variant=variant,
        grid=min(programs, whole + split * splits),
        ahead=ahead,
        whole=whole,
        splits=splits,
        # Calls that do not end together have two in turn.
        nbytes=max(1, world - 1) * owned * m * n * problem.out_dtype.itemsize * (1 + (variant == ONE_SHOT.value)),
        flags=max(1, world - 1) * owned,
        # At least one of each: empty tensors have no address.
        sums=max(1, split * (splits - 1) * m * n),
        summed=max(1, split * (splits - 1)),
        # A single round ends at once, and is not to end later.
        senders=_SENDERS if positions > programs and variant != ONE_SHOT.value else programs,
        # Without matrix units operands come from shared memory element by element, and what a descriptor has brought
        # lies there as matrix units want it: kilobytes of registers are spilled.
        descriptors=takes_descriptors(ctx.target, a, b) and (a.dtype != torch.float32 or precision == "tf32"),
    )


def _facts(ctx: Iris, asked: Asked, call: Call | None, out, a, b, bias) -> dict[str, Any]:
    """What must be the same on every rank, by name; C's place, too, where peers write it through their own pointer."""
    facts = tensor_facts((("C", out), ("A", a), ("B", b), ("bias", bias)))
    if asked.operation == REDUCE_SCATTER:
        # The last ranks may have fewer rows.
        facts["C"] = (*out.shape[1:], out.dtype) if isinstance(out, torch.Tensor) else type(out).__name__
    else:
        taken = None if call is None else call.plan.algorithm
        # Where C lies decides between the kernels when the caller leaves it open.
        left_open = asked.algorithm is None and asked.config is None
        if taken in (None, *_WRITE_PEERS) or (taken == "one_shot" and left_open):
            facts |= place_facts(ctx, "C", out)
    facts |= given_facts(asked.activation, asked.scales, asked.algorithm, asked.config)
    return facts | plan_facts(call, asked.tune, asked.allow_fallback)


def _own_rows(M: int, members: Group) -> tuple[int, int]:
    """First row of this rank, and how many it has, by torch.chunk's rule."""
    chunk = _ceil(M, members.size)
    first = min(M, members.index * chunk)
    return first, min(M, first + chunk) - first


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit)
