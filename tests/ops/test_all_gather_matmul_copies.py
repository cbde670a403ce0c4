"""all_gather_matmul where the library has chosen copies: what a capture runs, and what rows that lie apart get."""

import contextlib
from dataclasses import replace

import pytest
import torch
import triton

import iris
from gathered_products import ALGORITHMS, COPIED, assert_same, check, expect, problem, refuse_strided, slow
from iris import sim
from iris.device import signal
from iris.errors import CaptureError, RaceError
from iris.ops import choice
from iris.ops._all_gather_matmul_call import checked
from iris.testing.reference import all_gather_matmul as reference
from made_tables import chosen


class Captured:
    """As if a graph were being captured on this rank: what runs is what a graph would hold."""

    def __init__(self, ctx):
        self._ctx = ctx

    def __enter__(self):
        self._ctx.capturing = lambda stream=None: True

    def __exit__(self, *raised):
        del self._ctx.capturing


class Brought:
    """Who has brought shards to a staging buffer since the last look, as their flags say."""

    def __init__(self, staging):
        self._staging, self._seen = staging, staging.flags.clone()

    def by(self):
        copies = bool(self._staging.arrivals.any())
        programs = bool((self._staging.flags != self._seen).any())
        self._staging.arrivals.zero_()
        self._seen = self._staging.flags.clone()
        return {name for name, did in (("copies", copies), ("programs", programs)) if did}


def body_copies_by_choice(ctx, gather_dim, calls):
    """``calls``: for each call which ranks capture it."""
    world, rank = ctx.get_num_ranks(), ctx.get_rank()
    M, K = (40, 70 * world) if gather_dim == 1 else (40 * world, 70)
    out, a, b, shards, b_host = problem(ctx, M, 33, K, torch.float16, gather_dim=gather_dim, integers=True)
    mine, product = a.clone(), reference(shards, b_host, None, gather_dim)
    with chosen(ctx, "copy_engine", COPIED):
        brought = None
        for number, capturing in enumerate([(), *calls]):
            # Another A in each call: what an earlier one has left in the buffer is wrong.
            torch.mul(mine, number % 3 - 1, out=a)
            out.fill_(float("nan"))
            with Captured(ctx) if rank in capturing else contextlib.nullcontext():
                workspace = ctx.ops.all_gather_matmul(out, a, b, gather_dim=gather_dim)
            ctx.synchronize()
            assert_same(out.cpu().to(torch.float64), (number % 3 - 1) * product)
            if brought is None:
                brought, nbytes = Brought(workspace.staging), workspace.staging.nbytes
                assert "copies" in brought.by()
            else:
                assert brought.by() == {"programs" if rank in capturing else "copies"}, (number, rank)
            assert workspace.staging.nbytes == nbytes, "it grew"
            assert workspace.plan.algorithm == "copy_engine"
        ctx.barrier()
    assert "a test says so; while a graph is captured hbm_buffer runs" in str(workspace.plan)


@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("world", [2, slow(3)])
def test_a_capture_has_programs_fetch_where_copies_were_chosen(ranks, world, gather_dim):
    everybody = tuple(range(world))
    ranks(world).run(body_copies_by_choice, gather_dim, [everybody, (), everybody])


@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("world", [2, slow(3), slow(4)])
def test_some_ranks_copy_and_others_fetch_in_one_call(ranks, world, gather_dim):
    ranks(world).run(body_copies_by_choice, gather_dim, [(0,), (world - 1,), (0,), (), (1,)])


def body_enough_for_both(ctx, preamble):
    """From the first call on the buffer has what a capture needs."""
    out, a, b, *_ = problem(ctx, 70, 40, 200 * ctx.get_num_ranks(), torch.float16)
    with chosen(ctx, "copy_engine", COPIED):
        call = checked(
            ctx, ctx.resolve_group(None), out, a, b, None, "none", (None, None), None, None, 1, None
        )  # fmt: skip
        copies, programs = call.schedule, call.in_graphs
        assert (copies.copied, programs.copied) == (True, False)
        assert programs.config == choice.fetched(ctx, call.problem, COPIED)
        # The other way needs more of something, so this can fail.
        assert programs.flags > copies.flags
        assert call.staging == tuple(map(max, copies.staging, programs.staging))
        workspace = iris.ops.all_gather_matmul_preamble(ctx, a, b) if preamble else None
        workspace = ctx.ops.all_gather_matmul(out, a, b, workspace=workspace)
        staging = workspace.staging
        assert staging.flags.numel() >= programs.flags
        before = staging.buffer.data_ptr(), staging.flags.data_ptr(), staging.nbytes
        with Captured(ctx):
            ctx.ops.all_gather_matmul(out, a, b, workspace=workspace if preamble else None)
        ctx.synchronize()
        assert (staging.buffer.data_ptr(), staging.flags.data_ptr(), staging.nbytes) == before
        ctx.barrier()


@pytest.mark.parametrize("preamble", [False, True])
@pytest.mark.parametrize("world", [2])
def test_a_buffer_for_copies_serves_a_capture(ranks, world, preamble):
    ranks(world).run(body_enough_for_both, preamble)


def body_copies_by_name(ctx):
    """Who names copies, or gives their configuration, has nothing else in their place."""
    out, a, b, shards, b_host = problem(ctx, 40, 33, 35 * ctx.get_num_ranks(), torch.float16, integers=True)
    for how in (ALGORITHMS["copy_engine"], {"config": COPIED}):
        ctx.ops.all_gather_matmul(out, a, b, **how)
        with Captured(ctx):
            expect(CaptureError, "'copy_engine' cannot be captured", "'hbm_buffer' can")(
                lambda how=how: ctx.ops.all_gather_matmul(out, a, b, **how)
            )
        check(ctx, out, shards, b_host, integers=True)
        ctx.barrier()


@pytest.mark.parametrize("world", [2])
def test_copies_that_were_named_are_not_captured(ranks, world):
    ranks(world).run(body_copies_by_name)


def body_rows_apart(ctx, transpose):
    """Copies bring rows that lie together; of others the library's choice makes none."""
    world, device = ctx.get_num_ranks(), ctx.get_device()
    out, a, b, shards, b_host = problem(
        ctx, 40, 33, 35 * world, torch.float16, transpose=transpose, integers=True
    )  # fmt: skip
    if transpose == "NN":  # every other column of what lies on the heap
        wide = torch.zeros(40, 70, dtype=torch.float16, device=device)
        wide[:, ::2] = a
        a = ctx.as_symmetric(wide)[:, ::2]
    with chosen(ctx, "copy_engine", COPIED):
        plan = ctx.ops.explain("all_gather_matmul", out, a, b)
        brought = Brought(ctx.ops.all_gather_matmul(out, a, b).staging)
        ctx.synchronize()
        brought.by()
        workspace = ctx.ops.all_gather_matmul(out.fill_(float("nan")), a, b)
        check(ctx, out, shards, b_host, integers=True)
        ctx.barrier()
    assert brought.by() == {"programs"}
    assert workspace.plan == plan
    assert (plan.algorithm, plan.config.transport) == ("hbm_buffer", "sm")
    assert f"rows of A that lie apart, with strides {tuple(a.stride())}, so hbm_buffer runs" in plan.reason
    refuse_strided(ctx, out.fill_(float("nan")), a, b)


@pytest.mark.parametrize("transpose", ["NN", "TN"])
@pytest.mark.parametrize("world", [2])
def test_rows_that_lie_apart_are_not_copied_by_choice(ranks, world, transpose):
    ranks(world).run(body_rows_apart, transpose)


def body_overlapped(ctx, gather_dim):
    """Whole tiles, and divided ones after them, with all that follows a product."""
    world = ctx.get_num_ranks()
    M, K = (80, 40 * world) if gather_dim == 1 else (40 * world, 70)
    out, a, b, shards, b_host = problem(ctx, M, 100, K, torch.float16, gather_dim=gather_dim, integers=True)
    bias = torch.arange(100, dtype=torch.float32, device=ctx.get_device()) - 50
    want = reference(shards, b_host, bias.cpu(), gather_dim, activation="relu")
    results = []
    for stages in (2, 3):
        out.fill_(float("nan"))
        config = replace(COPIED, num_stages=stages)
        ctx.ops.all_gather_matmul(out, a, b, bias, activation="relu", gather_dim=gather_dim, config=config)
        ctx.synchronize()
        results.append(out.cpu())
        assert_same(results[-1].to(torch.float64), want)
        ctx.barrier()
    assert torch.equal(*results)


@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("world", [2, 3])
def test_tiles_that_overlap_have_the_bits_of_those_that_do_not(ranks, world, gather_dim):
    ranks(world).run(body_overlapped, gather_dim)


@triton.jit
def no_wait(flag_ptr, value, slot, limit, context, peer=-1, kernel=0):
    pass


def body_unwaited(ctx, gather_dim):
    out, a, b, *_ = problem(ctx, 80, 33, 70, torch.float16, gather_dim=gather_dim)
    ctx.ops.all_gather_matmul(out, a, b, gather_dim=gather_dim, config=COPIED)
    ctx.synchronize()


@pytest.mark.interpreted("the checks are the interpreter's")
@pytest.mark.parametrize("gather_dim", [0, 1])
def test_a_tile_that_does_not_wait_for_its_copy_is_found(monkeypatch, gather_dim):
    assert sim.run(body_unwaited, 2, gather_dim) == [None, None]
    monkeypatch.setattr(signal, "wait_apart", no_wait)
    with pytest.raises(RaceError, match="race on staged_ptr"):
        sim.run(body_unwaited, 2, gather_dim)
