"""all_gather_matmul_hbm_buffer: one way from parameters to a configuration, results for any of them, errors by name."""

import os
from dataclasses import asdict, replace

import pytest
import torch

import iris
from iris._events import Event
from iris.errors import ArgumentError, IrisError, NotSymmetricError, RankMismatch
from iris.ops import FusedConfig, all_gather_matmul_hbm_buffer, all_gather_matmul_hbm_buffer_preamble
from iris.ops.all_gather_matmul_hbm_buffer import trace_data
from iris.ops.config import HbmBufferConfig
from iris.testing.numeric import assert_bitwise_equal, assert_close, random_tensor
from iris.testing.reference import all_gather_matmul as reference

LAYOUTS = ("k_contiguous", "m_contiguous")
# Few programs: an interpreted program costs time even when it finds nothing to do.
TILE = FusedConfig(32, 32, 32, group_size_m=3, num_sms=5, num_warps=4)


def problem(ctx, M, N, K_local, dtype=torch.float16, *, integers=True, seed=0):
    """(out full of NaN, own shard on the heap, B, every rank's shard, B on the host)."""
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    shards = [random_tensor((M, K_local), dtype, seed=seed, rank=r, integers=integers) for r in range(world)]
    b = random_tensor((K_local * world, N), dtype, seed=seed + 1, rank=0, integers=integers)
    out = torch.full((M, N), float("nan"), dtype=torch.float32, device=device)
    return out, ctx.as_symmetric(shards[rank].to(device)), b.to(device), shards, b


def check(ctx, out, shards, b, bias=None):
    """Sums of small integers are exact, so values are equal; a zero may have either sign."""
    ctx.synchronize()
    assert_bitwise_equal(out.cpu().double() + 0, reference(shards, b, bias) + 0)


def body_sizes(ctx, layout):
    for M, N, K_local in [(1, 1, 1), (40, 33, 100)]:
        out, a, b, shards, b_host = problem(ctx, M, N, K_local, seed=M)
        bias = torch.arange(N, dtype=torch.float32) - 7
        workspace = all_gather_matmul_hbm_buffer(
            ctx, out, a, b, bias.to(ctx.get_device()), config=TILE, k_per_flag=2, staged_a_layout=layout,
            num_fetch_sms=2, first_stage_fetch_sms=3, num_fetch_stages=2,
        )  # fmt: skip
        check(ctx, out, shards, b_host, bias)
        assert workspace.plan.algorithm == "hbm_buffer"
        ctx.barrier()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_that_nothing_divides(ranks, world, layout):
    ranks(world).run(body_sizes, layout)


def body_parameters(ctx, cases):
    out, a, b, shards, b_host = problem(ctx, 70, 40, 70, seed=5)
    for given in cases:
        out.fill_(float("nan"))
        all_gather_matmul_hbm_buffer(ctx, out, a, b, config=TILE, **given)
        check(ctx, out, shards, b_host)
        ctx.barrier()


FEW = [
    {},
    {"k_per_flag": 1, "num_fetch_sms": 1, "first_stage_fetch_sms": 0},
    {"k_per_flag": 3, "num_fetch_stages": 4, "num_fetch_sms": 1, "first_stage_fetch_sms": 5},
    {"k_per_flag": 100, "num_fetch_stages": 100, "num_fetch_sms": 1000, "staged_a_layout": "m_contiguous"},
]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_parameters_give_the_result(ranks, world):
    ranks(world).run(body_parameters, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 5, 8])
def test_more_ranks(ranks, world):
    ranks(world).run(body_parameters, FEW)


def body_random(ctx, dtype):
    M, N = 50, 60
    out, a, b, shards, b_host = problem(ctx, M, N, 96, dtype, integers=False, seed=3)
    bias = random_tensor((M, N), torch.float32, seed=4, rank=0)
    all_gather_matmul_hbm_buffer(ctx, out, a, b, bias.to(ctx.get_device()))
    ctx.synchronize()
    assert_close(out.cpu(), reference(shards, b_host, bias), dtype, k=b.shape[0])


def test_random_data_and_the_configuration_of_the_operation(ranks):
    ranks(2).run(body_random, torch.bfloat16)


def body_configuration(ctx):
    out, a, b, *_ = problem(ctx, 40, 36, 32)
    fitted = ctx.ops.explain("all_gather_matmul", out, a, b, algorithm="hbm_buffer").config

    def ran(**given):
        config = all_gather_matmul_hbm_buffer(ctx, out, a, b, **given).plan.config
        ctx.barrier()
        return config

    def made(**given):
        return all_gather_matmul_hbm_buffer_preamble(ctx, a, b, **given).plan.config

    assert made() == fitted
    both = {"k_per_flag": 3, "staged_a_layout": "m_contiguous"}
    assert made(**both) == replace(fitted, **both)
    launched = {"num_warps": 2, "num_stages": 3, "num_fetch_sms": 7}
    assert ran(**both, **launched) == replace(fitted, **both, **launched)
    plain = HbmBufferConfig(**asdict(TILE), k_per_flag=8, num_fetch_sms=32, num_fetch_stages=1)
    assert plain.first_stage_fetch_sms == 256
    assert plain.staged_a_layout == "k_contiguous"
    assert ran(config=TILE) == made(config=TILE) == plain
    own = replace(plain, k_per_flag=5, num_fetch_stages=2, staged_a_layout="m_contiguous")
    assert ran(config=own) == made(config=own) == own
    assert ran(config=own, num_fetch_stages=1, fetch_block_m=32, fetch_block_k=32) == replace(own, num_fetch_stages=1)


def test_preamble_and_call_come_to_one_configuration(ranks):
    ranks(2).run(body_configuration)


def body_workspace(ctx):
    """One workspace for calls that follow each other, A overwritten in between; then calls that it was not made for."""
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    M, N, K_local = 40, 36, 70
    a = ctx.zeros(M, K_local, dtype=torch.float16)
    b = torch.ones(K_local * world, N, dtype=torch.float16, device=device)
    how = {"config": TILE, "k_per_flag": 2}
    workspace = all_gather_matmul_hbm_buffer_preamble(ctx, a, b, **how)
    outs = []
    for call in range(3):
        a.fill_(rank + call)
        outs.append(torch.full((M, N), float("nan"), device=device))
        returned = all_gather_matmul_hbm_buffer(ctx, outs[-1], a, b, workspace=workspace, async_op=call == 1, **how)
        assert returned is workspace
        workspace.wait()
    ctx.synchronize()
    for call, out in enumerate(outs):
        assert (out == K_local * sum(r + call for r in range(world))).all(), (call, out.unique())
    for given, parts in [
        ({"config": TILE, "k_per_flag": 1}, ["k_per_flag is 2, this call has 1"]),
        ({"config": TILE}, ["k_per_flag is 2, this call has 8"]),
        ({**how, "staged_a_layout": "m_contiguous"}, ["staged_a_layout is k_contiguous", "m_contiguous"]),
        ({"config": FusedConfig(16, 32, 32), "k_per_flag": 2}, ["block_size_m is 32, this call has 16"]),
    ]:
        with pytest.raises(ArgumentError, match="made for something else") as caught:
            all_gather_matmul_hbm_buffer(ctx, outs[0], a, b, workspace=workspace, **given)
        for part in parts:
            assert part in str(caught.value), str(caught.value)
    with pytest.raises(ArgumentError, match="shape is"):
        all_gather_matmul_hbm_buffer(ctx, outs[0][:20], a[:20], b, workspace=workspace, **how)
    plain = iris.ops.all_gather_matmul_preamble(ctx, a, b, TILE, algorithm="pull")
    with pytest.raises(ArgumentError, match="variant is pull, this call has hbm_buffer"):
        all_gather_matmul_hbm_buffer(ctx, outs[0], a, b, workspace=plain, **how)
    # What a launch takes besides may differ, and after all errors the workspace still serves.
    out = torch.full((M, N), float("nan"), device=device)
    all_gather_matmul_hbm_buffer(ctx, out, a, b, workspace=workspace, num_fetch_sms=3, num_warps=2, **how)
    ctx.synchronize()
    assert torch.equal(out, outs[-1])
    ctx.barrier()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_workspace_serves_what_it_was_made_for(ranks, world):
    ranks(world).run(body_workspace)


def body_errors(ctx):
    world, device = ctx.get_num_ranks(), ctx.get_device()
    a, b = ctx.zeros(64, 32), torch.zeros(32 * world, 16, device=device)
    out = torch.zeros(64, 16, device=device)

    def refused(kind, *parts, tensors=(out, a, b), **given):
        with pytest.raises(kind) as caught:
            all_gather_matmul_hbm_buffer(ctx, *tensors, **given)
        for part in parts:
            assert part in str(caught.value), str(caught.value)

    refused(ValueError, "staged_a_layout", "k_contiguous, m_contiguous", "'rows'", staged_a_layout="rows")
    refused(ArgumentError, "staged_a_layout", "'rows'", staged_a_layout="rows", config=TILE)
    with pytest.raises(ValueError, match="staged_a_layout"):
        all_gather_matmul_hbm_buffer_preamble(ctx, a, b, staged_a_layout="rows")
    for name, least in [("k_per_flag", 1), ("num_fetch_sms", 1), ("num_fetch_stages", 1), ("first_stage_fetch_sms", 0)]:
        refused(ArgumentError, name, f"got {least - 1}", **{name: least - 1})
    refused(ArgumentError, "num_warps", "got 3", num_warps=3)
    refused(ArgumentError, "fetch_block_m", "block_size_m=32", "got 64", config=TILE, fetch_block_m=64)
    refused(ArgumentError, "fetch_block_k", "block_size_k=32", "got 16", config=TILE, fetch_block_k=16)
    refused(ArgumentError, "FusedConfig", "dict", config={"block_size_m": 32})
    refused(ArgumentError, "block_size_m", "48", config=FusedConfig(48))
    # What the operation refuses, in its words, with a configuration and without.
    for config in (None, TILE):
        refused(ArgumentError, "N=16", "got 64", "bias[:, None]", tensors=(out, a, b, out[:, 0]), config=config)
        refused(ArgumentError, "output_tensor", "(63, 16)", tensors=(out[:63], a, b), config=config)
        refused(ArgumentError, "two dimensions", tensors=(out, a.view(-1), b), config=config)
        refused(ArgumentError, "tensor", tensors=(out, a, None), config=config)
        if world > 1:
            refused(NotSymmetricError, "A_sharded", tensors=(out, out.new_zeros(64, 32), b), config=config)
    with pytest.raises(ArgumentError, match="K_local"):
        all_gather_matmul_hbm_buffer_preamble(ctx, a, torch.zeros(32 * world + 1, 16, device=device))
    all_gather_matmul_hbm_buffer(ctx, out.fill_(float("nan")), a, b, config=TILE)
    ctx.synchronize()
    assert (out == 0).all()
    ctx.barrier()


def test_what_is_not_possible_is_refused_by_name(ranks, world):
    ranks(world).run(body_errors)


def body_one_rank_wrong(rank, world_size):
    os.environ["IRIS_TIMEOUT"] = "5"
    try:
        ctx = iris.iris(1 << 20)
        a, b = ctx.zeros(16, 16), torch.zeros(16 * world_size, 8, device=ctx.get_device())
        out = torch.zeros(16, 8, device=ctx.get_device())
        kinds = (ArgumentError, RankMismatch)
        for wrong, text in [({"fetch_block_m": 7}, "fetch_block_m"), ({"k_per_flag": 0}, "k_per_flag")]:
            with pytest.raises(kinds[rank != 1], match=text):
                all_gather_matmul_hbm_buffer(ctx, out, a, b, config=TILE, **(wrong if rank == 1 else {}))
        with pytest.raises(IrisError, match=r"config is .*3 blocks a flag.* on rank 0, .*4 blocks a flag"):
            all_gather_matmul_hbm_buffer(ctx, out, a, b, config=TILE, k_per_flag=3 + rank)
        ctx.barrier()
    finally:
        del os.environ["IRIS_TIMEOUT"]


def test_a_mistake_of_one_rank_is_known_to_all(ranks):
    ranks(2).run(body_one_rank_wrong, context=None)


def test_figures_of_a_trace():
    """Program 0 fetches and multiplies, 1 multiplies and waits twice, 2 did nothing, 3 has a span that did not end."""
    rows = [  # event, program, start, duration, die
        (Event.FETCH, 0, 100, 50, 5),
        (Event.COMPUTE, 0, 160, 40, 5),
        (Event.COMPUTE, 1, 90, 200, 6),
        (Event.WAIT, 1, 95, 5, 6),
        (Event.WAIT, 1, 120, 11, 6),
        (Event.FETCH, 3, 130, -1, 1),
        (Event.PUT, 3, 1, 1000, 1),
    ]
    columns = torch.tensor([[int(value) for value in row] for row in rows]).T
    names = ("event_id", "pid", "timestamp", "duration_cycles", "xcc_id")
    events = {
        name: column.to(torch.int64 if len(name) > 8 else torch.int32)
        for name, column in zip(names, columns, strict=True)
    }
    data = trace_data(events, 4, 1, 3, (5, 7), 2)
    assert data["start"].tolist() == [100, 90, -1, 130]
    assert data["end"].tolist() == [200, 290, -1, 130]
    assert data["wait"].tolist() == [0, 16, 0, 0]
    assert data["xcd"].tolist() == [5, 6, 0, 1]
    assert (data["start"].dtype, data["end"].dtype, data["wait"].dtype) == (torch.int64,) * 3
    assert data["xcd"].dtype == torch.int32
    numbers = {name: value for name, value in data.items() if isinstance(value, int)}
    assert numbers == {
        "grid_size": 4, "num_fetch_sms": 1, "num_fetch_stages": 3, "total_fetch_wgs": 2, "num_m_tiles": 5,
        "num_tiles_n": 7, "first_stage_fetch_sms": 3, "first_stage_size": 4, "rest_stage_size": 4,
        "gemm_tiles_per_stage": 14,
    }  # fmt: skip
    nothing = trace_data({name: column[:0] for name, column in events.items()}, 2, 1, 1, (1, 1), 1)
    assert nothing["start"].tolist() == [-1, -1]


def body_trace(ctx):
    out, a, b, shards, b_host = problem(ctx, 40, 70, 64, seed=8)
    workspace = all_gather_matmul_hbm_buffer(ctx, out, a, b, config=TILE, k_per_flag=1, num_fetch_sms=2)
    assert workspace.trace_data is None
    given = {"config": TILE, "k_per_flag": 1, "num_fetch_sms": 2, "first_stage_fetch_sms": 2}
    for before in (None, 1, 100_000):  # off; on with too little room; on with enough
        if before is not None:
            ctx.tracing.enable(before)
        out.fill_(float("nan"))
        workspace = all_gather_matmul_hbm_buffer(ctx, out, a, b, trace=True, **given)
        check(ctx, out, shards, b_host)
        data = workspace.trace_data
        assert ctx.tracing.enabled == (before is not None)
        assert ctx.tracing.dropped_events == 0
        assert ctx.tracing.max_events == (before if before == 100_000 else ctx.tracing.max_events)
        ctx.tracing.disable()
        assert (data["num_m_tiles"], data["num_tiles_n"]) == (2, 3)
        assert data["grid_size"] == len(data["start"]) == len(data["end"]) == len(data["wait"]) == len(data["xcd"])
        ran = data["start"] >= 0
        assert ran.any()
        assert (data["end"][ran] >= data["start"][ran]).all()
        assert (data["wait"][ran] <= data["end"][ran] - data["start"][ran]).all()
        # Both fetchers start before any piece can be taken twice, but one of them may take all pieces.
        assert data["total_fetch_wgs"] in ((1, 2) if ctx.get_num_ranks() > 1 else (0,))
        ctx.barrier()
    workspace = all_gather_matmul_hbm_buffer(ctx, out, a, b, **given)
    assert workspace.trace_data is None
    ctx.barrier()


@pytest.mark.parametrize("world", [1, 2])
def test_trace(ranks, world):
    ranks(world).run(body_trace)
