"""Graph capture, which only a GPU has: replays see new inputs; what cannot be captured says so and spoils nothing."""

import pytest
import torch

from iris.errors import CaptureError
from iris.ops import FusedConfig

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
