"""matmul + reduce-scatter and + all-reduce on a GPU: replays of a graph, and a thousand calls, see new inputs."""

import pytest
import torch

import iris.ops
from iris.ops import FusedConfig
from reduced_products import KERNELS, REDUCE, SCATTER, check, expected, problem

pytestmark = pytest.mark.gpu
TILES = FusedConfig(64, 64, 32, group_size_m=2, num_warps=4, num_sms=8)
M, N, K = 200, 136, 168
WAYS = [(operation, algorithm) for operation in (SCATTER, REDUCE) for algorithm in KERNELS[operation]]
ways = pytest.mark.parametrize(("operation", "algorithm"), WAYS)


def body_replays(ctx, operation, algorithm):
    p = problem(ctx, M, N, K, torch.float16, operation=operation)

    def step():
        getattr(ctx.ops, operation)(p.out, p.a, p.b, algorithm=algorithm, config=TILES)

    step()
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(1, 20):
        new = problem(ctx, M, N, K, torch.float16, operation=operation, seed=seed, out=p.out)
        p.a.copy_(new.a)
        p.b.copy_(new.b)
        p.all_a, p.all_b = new.all_a, new.all_b
        # Peers write C when this rank's kernel runs, and not before.
        p.out.fill_(float("nan"))
        graph.replay()
        check(ctx, operation, p)
    # A call outside of the graph goes on where the replays stopped.
    p.out.fill_(float("nan"))
    step()
    check(ctx, operation, p)
    ctx.barrier()


@ways
def test_replays_see_new_inputs(ranks, world, operation, algorithm):
    ranks(world).run(body_replays, operation, algorithm)


def body_thousand_calls(ctx, operation, algorithm):
    p = problem(ctx, M, N, K, torch.float16, operation=operation, out_dtype=torch.float32)
    run, preamble = getattr(ctx.ops, operation), getattr(iris.ops, f"{operation}_preamble")
    workspace = preamble(ctx, p.out, p.a, p.b, algorithm=algorithm, config=TILES)
    first, wrong = p.a.clone(), torch.zeros((), dtype=torch.int64, device=p.a.device)
    # Small integers, whose sums float32 holds exactly.
    want = expected(operation, p.members, p.all_a, p.all_b, index=p.index).to(p.out.device, p.out.dtype)
    for turn in range(1000):
        factor = turn % 5 - 2
        torch.mul(first, factor, out=p.a)
        p.out.fill_(float("nan"))
        run(p.out, p.a, p.b, algorithm=algorithm, config=TILES, workspace=workspace)
        wrong += (p.out != want * factor).sum()
        if turn % 50 == 49:
            # Ranks of one process take turns at the launch queue of the GPU, which has room for about a thousand.
            ctx.synchronize()
    ctx.synchronize()
    assert wrong.item() == 0
    ctx.barrier()


@pytest.mark.timeout(300)
@ways
def test_a_thousand_calls_in_one_workspace(ranks, world, operation, algorithm):
    ranks(world).run(body_thousand_calls, operation, algorithm)
