"""In virtual time kernels read the virtual clock: what they record agrees with the predicted timeline."""

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris import sim
from iris.device._compat import INTERPRETED
from iris.tracing import chrome

pytestmark = pytest.mark.skipif(not INTERPRETED.value, reason="kernels of this process are compiled")


@triton.jit
def late_kernel(context, a, flag, size, rank: tl.constexpr, world: tl.constexpr, SIZE: tl.constexpr):
    """Rank 0 multiplies before it tells the others, which wait for it."""
    ctx = iris.DeviceContext.initialize(context, rank, world, tracing=True)
    offs = tl.arange(0, SIZE)
    if rank == 0:
        block = tl.load(a + offs[:, None] * SIZE + offs[None, :])
        span = ctx.tracing.record_event_start(iris.TraceEvent().compute, 0, a, 0, 0)
        product = block
        for _ in range(size):
            product = tl.dot(block, product).to(tl.float16)
        ctx.tracing.record_event_end(span)
        tl.store(a + offs[:, None] * SIZE + offs[None, :], product)
        for peer in range(1, world):
            ctx.notify(flag, 1, peer)
    else:
        span = ctx.tracing.record_event_start(iris.TraceEvent().wait, 0, flag, 0, 0)
        ctx.wait(flag, 1, 0)
        ctx.tracing.record_event_end(span)


def body(ctx, folder):
    ctx.tracing.enable(10)
    a, flag = torch.zeros(64, 64, dtype=torch.float16), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    late_kernel[(1,)](ctx.get_device_context(), a, flag, 6, ctx.get_rank(), ctx.get_num_ranks(), SIZE=64)
    ctx.barrier()
    return ctx.tracing.export(f"{folder}/trace.json", merge=True)


def test_recorded_times_are_the_predicted_ones(tmp_path):
    prediction = sim.predict(body, 2, str(tmp_path), device="h200")
    trace = chrome.read(tmp_path / "trace.json")
    assert trace.predicted == "h200"
    recorded = {span.name: span for span in trace.spans}
    assert set(recorded) == {"compute", "wait"}
    for kind in recorded:
        inside = [s for s in prediction.timeline.spans if s.kind == kind and s.kernel == "late_kernel"]
        assert inside
        # On the same clock, and little more: the wait also reads its flag before, and whether other waits have failed.
        start = recorded[kind].start_us + trace.metadata[0]["timestamp_offset"]
        assert start <= min(s.start_ns for s in inside) / 1e3 + 1e-3
        assert max(s.end_ns for s in inside) / 1e3 <= start + recorded[kind].duration_us + 1e-3
        more = recorded[kind].duration_us - sum(s.duration_ns for s in inside) / 1e3
        assert more < {"compute": 0.1, "wait": 2.0}[kind]
    assert recorded["wait"].end_us > recorded["compute"].end_us, "it waited for what comes after the arithmetic"
