"""Faults that are planted in the kernel's protocol are found by the simulator, and the kernel without them is right."""

import re

import pytest
import torch
import triton
import triton.language as tl

from iris import sim
from iris.concurrent import _two_queue_kernel
from iris.errors import RaceError, SimulationError
from iris.x.turn import end_alone

HOW = {"num_wgs": 3, "gemm_wgs": 2, "gemm_block": (16, 16, 16), "comm_block": (16, 16), "num_warps": 4}


@triton.jit
def no_wait(flags, counters, peer, context, KERNEL: tl.constexpr):
    pass


@triton.jit
def end_without_peers(flags, counters, members, index, context, WORLD: tl.constexpr, KERNEL: tl.constexpr):
    return end_alone(counters, context)


def body(ctx, name, mode):
    """A call between kernels of PyTorch that write its input, read its output and write its input again."""
    rank, world, device = ctx.get_rank(), ctx.get_num_ranks(), ctx.get_device()
    a = torch.ones(20, 16, device=device)
    src, dst = ctx.empty(6 * world, 5), ctx.empty(6 * world, 5)
    own = src[:6] if name == "all_gather" else src
    src.fill_(rank + 1)
    dst.fill_(float("nan"))
    how = HOW if mode == "fused" else {**HOW, "num_wgs": None, "comm_wgs": 2}
    _, out = getattr(ctx.concurrent, name)(a, a[:16], own, comm_dst=dst, mode=mode, **how)
    got = out.clone()
    src.fill_(-1)
    ctx.barrier()
    if name == "all_gather":
        assert got[::6, 0].tolist() == [r + 1 for r in range(world)]
    elif name == "all_reduce":
        assert (got == world * (world + 1) / 2).all()
    else:
        assert got[::6, 0].tolist() == [r + 1 for r in range(world)]


def first_finding(name, mode="fused", seeds=20):
    for seed in range(seeds):
        try:
            sim.run(body, 2, name, mode, seed=seed)
        except SimulationError as finding:
            return finding
        except AssertionError:
            pass  # wrong numbers in an order that hides the fault from the checks
    return None


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "all_to_all"])
@pytest.mark.parametrize(
    ("function", "fault"), [("wait_for_input", no_wait), ("end_turn", end_without_peers)], ids=["entry", "exit"]
)
def test_a_missing_meeting_is_found(monkeypatch, name, function, fault):
    monkeypatch.setattr(_two_queue_kernel, function, fault)
    finding = first_finding(name)
    assert isinstance(finding, RaceError), finding
    assert "two_queue_kernel" in str(finding)
    assert re.search("race on (src_ptr|dst_ptr)", str(finding)), finding


@pytest.mark.parametrize(
    ("name", "mode"), [("all_reduce", "fused"), ("all_gather", "concurrent"), ("all_to_all", "fused")]
)
def test_no_false_alarm(name, mode):
    for seed in range(4):
        sim.run(body, 2, name, mode, seed=seed)
