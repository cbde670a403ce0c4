"""Collectives where only a GPU shows: captured graphs, tensors past 2^31 elements, many calls at full speed."""

import pytest
import torch

from iris.ccl import Config
from iris.errors import CaptureError

pytestmark = pytest.mark.gpu

# Elements on either side of which a 32-bit offset would go wrong.
BORDER = 1 << 31
ALL_REDUCE = ("push", "one_shot", "two_shot", "ring", "atomic", "spinlock")
WAYS = [
    *(("all_reduce", variant) for variant in ALL_REDUCE),
    ("all_gather", "persistent"), ("all_gather", "partitioned"), ("all_gather", "copy_engine"),
    ("all_to_all", "default"), ("reduce_scatter", "two_shot"),
    ("broadcast", "direct"), ("broadcast", "scatter_allgather"),
    ("reduce", None), ("gather", None), ("scatter", None), ("sendrecv", None),
]  # fmt: skip
way_parameter = pytest.mark.parametrize(("operation", "variant"), WAYS)


class Step:
    """One collective on tensors of its own, with inputs that change from call to call.

    Args:
        ctx: the context.
        operation, variant: which one.
        n: elements of a piece.
    """

    def __init__(self, ctx, operation, variant, n=1000):
        self.ctx, self.operation, self.n = ctx, operation, n
        self.rank, self.world = ctx.get_rank(), ctx.get_num_ranks()
        self.config = Config(**{f"{operation}_variant": variant}) if variant else None
        cut = operation in ("all_to_all", "reduce_scatter", "scatter")
        joined = operation in ("all_to_all", "all_gather", "gather")
        self.inp = ctx.zeros(n * (self.world if cut else 1), dtype=torch.float32)
        self.out = ctx.zeros(n * (self.world if joined else 1), dtype=torch.float32)

    def value(self, rank, call, n):
        """What a rank gives to a call: whole numbers that depend on all three."""
        return (torch.arange(n, device=self.ctx.get_device()) % 11 + 16.0 * rank + call % 7).to(torch.float32)

    def fill(self, call):
        self.inp.copy_(self.value(self.rank, call, self.inp.numel()))
        self.out.fill_(float("nan"))

    def issue(self):
        ccl, out, inp, config = self.ctx.ccl, self.out, self.inp, self.config
        root = self.world - 1
        if self.operation == "broadcast":
            return ccl.broadcast_tensor(out, inp, root, config=config)
        if self.operation == "reduce":
            return ccl.reduce(out, inp, root)
        if self.operation == "gather":
            return ccl.gather(out, inp, root)
        if self.operation == "scatter":
            return ccl.scatter(out, inp, root)
        if self.operation == "sendrecv":
            return ccl.sendrecv(inp, out, (self.rank + 1) % self.world, (self.rank - 1) % self.world)
        extra = {"dim": 0} if self.operation == "all_to_all" else {}
        return getattr(ccl, self.operation)(out, inp, config=config, **extra)

    def want(self, call):
        """What the output must be; None where it is not written."""
        every = [self.value(r, call, self.inp.numel()) for r in range(self.world)]
        mine = slice(self.rank * self.n, (self.rank + 1) * self.n)
        root = self.world - 1
        if self.operation in ("reduce", "gather") and self.rank != root:
            return None
        return {
            "all_reduce": lambda: sum(every), "reduce": lambda: sum(every), "all_gather": lambda: torch.cat(every),
            "gather": lambda: torch.cat(every), "reduce_scatter": lambda: sum(every)[mine],
            "all_to_all": lambda: torch.cat([e[mine] for e in every]), "broadcast": lambda: every[root],
            "scatter": lambda: every[root][mine], "sendrecv": lambda: every[(self.rank - 1) % self.world],
        }[self.operation]()  # fmt: skip

    def check(self, call, out=None):
        out, want = self.out if out is None else out, self.want(call)
        # On every rank, or one that has nothing to check could run far ahead of the others.
        self.ctx.synchronize()
        if want is not None:
            wrong = (out != want).nonzero().flatten()
            assert not len(wrong), (self.operation, call, wrong[:5].tolist(), out[wrong[:5]], want[wrong[:5]])


def captured(steps):
    """A graph of the steps, each made once before."""
    for step in steps:
        step.fill(0)
        step.issue()
    steps[0].ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step.issue()
    return graph


def body_capture(ctx, operation, variant, replays):
    step = Step(ctx, operation, variant)
    graph = captured([step])
    for call in range(replays):
        step.fill(call)
        graph.replay()
        step.check(call)
    # A call outside of the graph goes on where the replays stopped.
    step.fill(replays)
    step.issue()
    step.check(replays)
    ctx.barrier()


@way_parameter
def test_replays_see_new_inputs(ranks, world, operation, variant):
    if operation == "sendrecv" and world == 1:
        pytest.skip("a rank that sends to itself copies")
    ranks(world).run(body_capture, operation, variant, 100)


def body_several(ctx, replays):
    """All in one graph, with barriers in between and calls beside the stream."""
    steps = [Step(ctx, operation, variant, 300 + 64 * number) for number, (operation, variant) in enumerate(WAYS)]
    for step in steps:
        step.fill(0)
        step.issue()
    beside = [Step(ctx, "all_gather", variant) for variant in ("persistent", "copy_engine")]
    for step in beside:
        step.fill(0)
        step.issue()
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number, step in enumerate(steps):
            step.issue()
            if number % 5 == 2:
                ctx.device_barrier()
        works = [ctx.ccl.all_gather(s.out, s.inp, config=s.config, async_op=True) for s in beside]
        # Over the same channels, so in order with the calls before, whose end nobody has waited for.
        steps[0].issue()
        for work in works:
            work.wait()
    for call in range(replays):
        for step in (*steps, *beside):
            step.fill(call)
        graph.replay()
        for step in (*steps, *beside):
            step.check(call)
    ctx.barrier()


@pytest.mark.parametrize("world", [2, 4])
def test_several_in_one_graph(ranks, world):
    ranks(world).run(body_several, 100)


def body_two_graphs(ctx):
    """Replayed in turns, and with calls in between."""
    steps = [
        Step(ctx, "all_reduce", "push"),
        Step(ctx, "all_reduce", "two_shot", 100_000),
        Step(ctx, "all_gather", None),
    ]
    graphs = [captured([step]) for step in steps[:2]]
    for call in range(30):
        for step in steps:
            step.fill(call)
        graphs[call % 2].replay()
        steps[2].issue()
        graphs[1 - call % 2].replay()
        for step in steps:
            step.check(call)
    ctx.barrier()


@pytest.mark.parametrize("world", [2, 4])
def test_graphs_take_turns(ranks, world):
    ranks(world).run(body_two_graphs)


def body_first_call(ctx):
    """The first call of a combination cannot be captured; it says so and spoils nothing."""
    known, new = Step(ctx, "all_reduce", "push"), Step(ctx, "all_reduce", "push", 77)
    known.fill(0)
    known.issue()
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        known.issue()
        with pytest.raises(CaptureError, match="make the call once before the capture"):
            new.issue()
        with pytest.raises(CaptureError, match="device_barrier"):
            ctx.barrier()
    for call in range(5):
        known.fill(call)
        graph.replay()
        known.check(call)
    new.fill(1)
    new.issue()
    new.check(1)
    ctx.barrier()


@pytest.mark.parametrize("world", [2])
def test_a_first_call_is_not_captured(ranks, world):
    ranks(world).run(body_first_call)


def body_watched(ctx):
    """While the watchdog of PyTorch's collectives runs."""
    x = torch.ones(4, device=ctx.get_device())
    torch.distributed.all_reduce(x)
    body_capture(ctx, "all_gather", "persistent", 20)
    torch.distributed.all_reduce(x)
    assert (x == ctx.get_num_ranks() ** 2).all()


@pytest.mark.parametrize("world", [2])
def test_capture_beside_collectives_of_torch(ranks, world):
    ranks(world).run(body_watched)


def body_many_calls(ctx, operation, variant, calls):
    """No host synchronisation; outputs are filled with NaN and copied in the stream. Sizes change."""
    steps = [Step(ctx, operation, variant, n) for n in (100, 5000, 60_000)]
    results = []
    for call in range(calls):
        step = steps[call % 3]
        step.fill(call)
        step.issue()
        results.append(step.out.clone())
        if len(results) == 60:
            for back, got in enumerate(results):
                done = call - len(results) + 1 + back
                steps[done % 3].check(done, got)
            results.clear()
    ctx.barrier()


@way_parameter
@pytest.mark.parametrize("world", [2, 4])
def test_many_calls(ranks, world, operation, variant):
    ranks(world).run(body_many_calls, operation, variant, 540)


def body_beside_a_busy_stream(ctx):
    """U70: what a call does is ordered with the caller's stream, whatever the default stream does."""
    step, stream = Step(ctx, "all_reduce", None), ctx.new_stream()
    step.fill(0)
    step.issue()
    ctx.barrier()
    torch.cuda._sleep(500_000_000)
    with ctx.use_stream(stream):
        for call in range(100):
            step.fill(call)
            work = ctx.ccl.all_reduce(step.out, step.inp, async_op=call % 2 == 1)
            work.wait()
            step.check(call)
    ctx.barrier()


@pytest.mark.parametrize("world", [2])
def test_another_stream(ranks, world):
    ranks(world).run(body_beside_a_busy_stream)


def around(*places):
    """Indices on either side of each place."""
    return torch.tensor(sorted({p + d for p in places for d in (-2, -1, 0, 1, 2) if p + d >= 0}))


def large_values(rank, index, dtype):
    """What stands at an element of a large tensor."""
    return ((index * 7 + index // 1013 + 3 * rank) % 23).to(dtype)


def fill_large(tensor, rank, piece=1 << 26):
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), piece):
        end = min(start + piece, flat.numel())
        flat[start:end] = large_values(rank, torch.arange(start, end, device=flat.device), flat.dtype)


def same_everywhere(actual, want, piece=1 << 26):
    """Compare with ``want(index)``, piece by piece."""
    flat = actual.view(-1)
    for start in range(0, flat.numel(), piece):
        index = torch.arange(start, min(start + piece, flat.numel()), device=flat.device)
        wrong = (flat[start : start + len(index)] != want(index)).nonzero()
        assert not len(wrong), (start + int(wrong[0]), flat[start + int(wrong[0])].item())


def body_large_gather(ctx):
    """U04: bf16, (131328, 8192) from each of two ranks, 2.15e9 elements together."""
    rank, world, rows = ctx.get_rank(), ctx.get_num_ranks(), 131328
    inp = ctx.empty(rows, 8192, dtype=torch.bfloat16)
    fill_large(inp, rank)
    out = ctx.empty(world * rows, 8192, dtype=torch.bfloat16)
    for variant in ("persistent", "partitioned", "copy_engine"):
        out.fill_(float("nan"))
        ctx.ccl.all_gather(out, inp, config=Config(all_gather_variant=variant))
        assert out.numel() > BORDER
        edges = around(BORDER, rows * 8192, out.numel() - 3)
        edges = edges[edges < out.numel()].to(out.device)
        owner, place = edges // (rows * 8192), edges % (rows * 8192)
        want = torch.stack([large_values(int(o), p, out.dtype) for o, p in zip(owner, place, strict=True)])
        assert torch.equal(out.view(-1)[edges], want), variant
        for r in range(world):
            same_everywhere(out[r * rows : (r + 1) * rows], lambda index, r=r: large_values(r, index, out.dtype))
        ctx.barrier()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2])
def test_gather_past_31_bits(ranks, world):
    ranks(world).run(body_large_gather, context=8 << 30, timeout=500)


def body_large_reduce(ctx, variant):
    rank, world, n = ctx.get_rank(), ctx.get_num_ranks(), BORDER + 12_345
    inp, out = ctx.empty(n, dtype=torch.int8), ctx.empty(n, dtype=torch.int8)
    fill_large(inp, rank)
    out.fill_(-1)
    ctx.ccl.all_reduce(out, inp, config=Config(all_reduce_variant=variant))

    def want(index):
        return sum(large_values(r, index, torch.int8) for r in range(world))

    edges = around(0, BORDER // 2, n // 2, BORDER, n - 3).to(out.device)
    assert torch.equal(out[edges], want(edges))
    same_everywhere(out, want)
    ctx.barrier()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", ALL_REDUCE)
@pytest.mark.parametrize("world", [2])
def test_reduce_past_31_bits(ranks, world, variant):
    ranks(world).run(body_large_reduce, variant, context=6 << 30, timeout=500)


def body_large_strides(ctx):
    """Few elements, far apart: a row of the output begins past 2^31."""
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    memory = ctx.empty(BORDER + (1 << 22), dtype=torch.int8)
    memory.fill_(-1)
    out = memory.as_strided((world * 4, 100), ((BORDER + (1 << 20)) // (world * 4 - 1), 1), memory.storage_offset())
    inp = ctx.full((4, 100), rank + 1, dtype=torch.int8)
    ctx.ccl.all_gather(out, inp)
    assert out.stride(0) * (world * 4 - 1) > BORDER
    assert torch.equal(out[:, 0].cpu(), torch.arange(world).repeat_interleave(4).to(torch.int8) + 1)
    assert (memory != -1).sum() == out.numel()
    ctx.barrier()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [2])
def test_strides_past_31_bits(ranks, world):
    ranks(world).run(body_large_strides, context=6 << 30, timeout=250)
