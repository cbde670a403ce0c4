"""Graph capture of a GEMM beside a collective, which only a GPU has: replays see new inputs, calls go on after them."""

import pytest
import torch

from iris.errors import CaptureError

pytestmark = pytest.mark.gpu


def body_capture(ctx, mode, own):
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    a, b = torch.ones(200, 96, device=device), torch.ones(96, 136, device=device)
    src, dst = ctx.zeros(300, 72), ctx.zeros(300, 72)
    c = torch.empty(200, 136, device=device)
    workspace = ctx.concurrent.make_workspace() if own else None

    def step(rows=300):
        ctx.concurrent.all_reduce(a, b, src[:rows], C=c, comm_dst=dst[:rows], mode=mode, workspace=workspace)

    step()
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        with pytest.raises(CaptureError, match="make the call once before the capture"):
            step(299)
    for factor in range(1, 20):
        a.fill_(factor)
        src.fill_(factor * (rank + 1))
        c.fill_(float("nan"))
        dst.fill_(float("nan"))
        graph.replay()
        ctx.synchronize()
        assert (c == 96 * factor).all()
        assert (dst == factor * world * (world + 1) / 2).all()
    # A call outside of the graph goes on where the replays stopped.
    src.fill_(1)
    step()
    ctx.barrier()
    assert (dst == world).all()


@pytest.mark.parametrize("own", [True, False], ids=["own workspace", "the context's"])
@pytest.mark.parametrize("mode", ["fused", "concurrent"])
def test_replays_see_new_inputs(ranks, world, mode, own):
    ranks(world).run(body_capture, mode, own)
