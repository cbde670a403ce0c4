"""Graph capture, which only a GPU has: replays see new inputs; what cannot be captured says so and spoils nothing."""

from dataclasses import replace

import pytest
import torch

from iris.errors import CaptureError
from iris.ops import FusedConfig
from iris.ops.config import HbmBufferConfig
from iris.testing.numeric import random_tensor
from iris.testing.reference import all_gather_matmul as reference
from made_tables import chosen

pytestmark = pytest.mark.gpu


def body_capture(ctx, with_workspace):
    import iris.ops

    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    M, N, K_local = 48, 40, 64
    config = FusedConfig(32, 32, 32, num_warps=4)
    a, b = ctx.zeros(M, K_local, dtype=torch.float32), torch.ones(K_local * world, N, device=device)
    out = torch.empty(M, N, device=device)
    workspace = iris.ops.all_gather_matmul_preamble(ctx, a, b, config) if with_workspace else None

    def step():
        ctx.ops.all_gather_matmul(out, a, b, config=config, workspace=workspace)
        ctx.device_barrier()

    step()
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        with pytest.raises(CaptureError, match="device_barrier"):
            ctx.barrier()
    for call in range(20):
        a.fill_(rank + call)
        out.fill_(float("nan"))
        graph.replay()
        want = K_local * sum(r + call for r in range(world))
        assert (out == want).all(), (call, want, out.unique().tolist())
    # A call outside of the graph goes on where the replays stopped.
    a.fill_(rank)
    step()
    ctx.barrier()
    assert (out == K_local * sum(range(world))).all()


@pytest.mark.parametrize("with_workspace", [True, False])
def test_replays_see_new_inputs(ranks, world, with_workspace):
    ranks(world).run(body_capture, with_workspace)


# Tiles that several programs fetch, in two stages, with a last one along K that is smaller.
FETCHED = HbmBufferConfig(
    64, 64, 32, group_size_m=2, num_warps=4, k_per_flag=2, num_fetch_sms=3, num_fetch_stages=2,
    first_stage_fetch_sms=5, num_sms=16,
)  # fmt: skip
M, N, K_LOCAL = 200, 136, 168


class Step:
    """A call whose inputs change: small integers, whose sums float32 holds exactly, so that every bit is known."""

    def __init__(self, ctx, algorithm, gather_dim, *, config=None, with_workspace=True):
        import iris.ops

        self.ctx, self.gather_dim, self.how = ctx, gather_dim, {"algorithm": algorithm, "gather_dim": gather_dim}
        if config is not None:
            self.how["config"] = config
        world, device = ctx.get_num_ranks(), ctx.get_device()
        self.shards = [random_tensor((M, K_LOCAL), torch.float16, seed=3, rank=r, integers=True) for r in range(world)]
        depth = K_LOCAL * (world if gather_dim == 1 else 1)
        self.b_host = random_tensor((depth, N), torch.float16, seed=4, rank=0, integers=True)
        self.a, self.b = ctx.as_symmetric(self.shards[ctx.get_rank()].to(device)), self.b_host.to(device)
        self.mine = self.shards[ctx.get_rank()].to(device)
        rows = M * (world if gather_dim == 0 else 1)
        self.out = torch.full((rows, N), float("nan"), device=device)
        self.bias = torch.arange(N, dtype=torch.float32, device=device) - 40
        self.workspace = None
        if with_workspace:
            self.workspace = iris.ops.all_gather_matmul_preamble(
                ctx, self.a, self.b, output_dtype=torch.float32, **self.how
            )
        self.product = reference(self.shards, self.b_host, None, gather_dim).to(device)

    def fill(self, call):
        """Inputs of this call, in the stream: each rank's shard is multiplied by a number of the call."""
        torch.mul(self.mine, call % 7 - 3, out=self.a)
        self.out.fill_(float("nan"))

    def issue(self):
        self.ctx.ops.all_gather_matmul(self.out, self.a, self.b, self.bias, workspace=self.workspace, **self.how)

    def wrong(self, call):
        """How many elements are not as wanted, as a tensor that nobody has waited for."""
        return (self.out != (call % 7 - 3) * self.product + self.bias).sum()


def captured(ctx, step):
    """A graph of a step, which has been right once outside of it."""
    step.fill(5)
    step.issue()
    assert not step.wrong(5)
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.issue()
    return graph


def body_staged_capture(ctx, gather_dim, with_workspace):
    step = Step(ctx, "hbm_buffer", gather_dim, config=FETCHED, with_workspace=with_workspace)
    graph = captured(ctx, step)
    for call in range(100):
        step.fill(call)
        graph.replay()
        assert not step.wrong(call), call
        if call % 10 == 3:  # calls outside of the graph count the same epochs
            step.fill(call + 1)
            step.issue()
            assert not step.wrong(call + 1), call
    ctx.barrier()


@pytest.mark.parametrize("with_workspace", [True, False])
@pytest.mark.parametrize("gather_dim", [0, 1])
def test_replays_through_a_staging_buffer(ranks, world, gather_dim, with_workspace):
    ranks(world).run(body_staged_capture, gather_dim, with_workspace)


def body_copies(ctx):
    """Copies beside the kernel that waits for them cannot be captured where there are any; nothing is spoilt."""
    step = Step(ctx, "copy_engine", 1)
    step.fill(5)
    step.issue()
    assert not step.wrong(5)
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.a.add_(0)
        if ctx.get_num_ranks() == 1:
            step.issue()
        else:
            with pytest.raises(CaptureError, match="'hbm_buffer' can"):
                step.issue()
    for call in range(20):
        step.fill(call)
        graph.replay()
        if ctx.get_num_ranks() > 1:
            step.issue()
        assert not step.wrong(call), call
    ctx.barrier()


def test_copies_are_not_captured(ranks, world):
    ranks(world).run(body_copies)


def body_copies_by_choice(ctx, gather_dim, with_workspace):
    """The library has chosen copies, and a graph holds programs that fetch in their place. They meet in one call."""
    with chosen(ctx, "copy_engine", replace(FETCHED, transport="copy_engine")):
        step = Step(ctx, None, gather_dim, with_workspace=with_workspace)
        graph = captured(ctx, step)
        for call in range(60):
            step.fill(call)
            if (call // 2 + ctx.get_rank()) % 3:
                graph.replay()
            else:
                step.issue()
            assert not step.wrong(call), call
        ctx.barrier()


@pytest.mark.parametrize("with_workspace", [True, False])
@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("world", [2, 4])
def test_a_graph_fetches_where_copies_were_chosen(ranks, world, gather_dim, with_workspace):
    ranks(world).run(body_copies_by_choice, gather_dim, with_workspace)


def body_growing(ctx):
    """A staging buffer that would have to grow in a capture says so; the graph and the operation go on."""
    world, device = ctx.get_num_ranks(), ctx.get_device()
    small = Step(ctx, "hbm_buffer", 1, config=FETCHED, with_workspace=False)
    small.fill(2)
    small.issue()
    a, b = ctx.zeros(4096, 1024, dtype=torch.float16), torch.zeros(1024 * world, 64, dtype=torch.float16, device=device)
    out = torch.zeros(4096, 64, dtype=torch.float16, device=device)

    def grow():
        ctx.ops.all_gather_matmul(out, a, b, algorithm="hbm_buffer", config=FETCHED)

    graph = torch.cuda.CUDAGraph()
    ctx.barrier()
    with torch.cuda.graph(graph):
        small.issue()
        with pytest.raises(CaptureError, match="make the call once before the capture"):
            grow()
    for call in range(5):
        small.fill(call)
        graph.replay()
        assert not small.wrong(call), call
        grow()  # the graph keeps the buffer that it was captured with
    ctx.barrier()
    assert (out == 0).all()


@pytest.mark.parametrize("world", [2, 4])
def test_a_buffer_does_not_grow_in_a_capture(ranks, world):
    ranks(world).run(body_growing)


def body_many_calls(ctx, algorithm, gather_dim, calls):
    """Back to back, without the host in between."""
    step = Step(ctx, algorithm, gather_dim)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.get_device())
    for call in range(calls):
        step.fill(call)
        step.issue()
        wrong += step.wrong(call)
    ctx.synchronize()
    assert wrong.item() == 0
    ctx.barrier()


@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("algorithm", ["hbm_buffer", "copy_engine"])
def test_a_thousand_calls_with_one_workspace(ranks, world, algorithm, gather_dim):
    ranks(world).run(body_many_calls, algorithm, gather_dim, 1000)
