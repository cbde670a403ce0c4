"""Triton's interpreter as Iris runs it: low-precision numbers, atomics, polls, waits on later programs, streams."""

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris.errors import ArgumentError, WaitTimeout
from iris.runtime import scheduler as scheduling
from iris.runtime import settle, streams

pytestmark = pytest.mark.skipif(
    settle.settle() == "gpu", reason="the gpu runtime compiles kernels; nothing is interpreted"
)


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask, other=1.0)
    y = tl.load(y_ptr + offs, mask=mask, other=1.0)
    tl.store(out_ptr + offs, x + y, mask=mask)
    tl.store(out_ptr + n + offs, x * y, mask=mask)
    tl.store(out_ptr + 2 * n + offs, tl.maximum(x, y), mask=mask)
    tl.store(out_ptr + 3 * n + offs, tl.where(x < y, x, -y), mask=mask)
    tl.store(out_ptr + 4 * n + offs, tl.abs(x) - y, mask=mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_arithmetic(dtype):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(50, generator=generator).to(dtype) for _ in range(2))
    out = torch.zeros(5, 50, dtype=dtype)
    arithmetic_kernel[(1,)](x, y, out, 50, BLOCK=64)
    want = torch.stack([x + y, x * y, torch.maximum(x, y), torch.where(x < y, x, -y), x.abs() - y])
    assert torch.equal(out, want)


@triton.jit
def conditions_kernel(x_ptr, out_ptr, count_ptr, n, more, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = (offs < n) & (more > 1)
    x = tl.load(x_ptr + offs, mask=mask, other=-1)
    tl.store(out_ptr + offs, x, mask=(more > 2) & (offs >= 0))
    tl.store(out_ptr + BLOCK + offs, x, mask=mask)
    tl.atomic_add(count_ptr + offs, 1, mask=mask)


def body_conditions(ctx):
    device = ctx.get_device()
    for more in (3, 2, 1):
        # Nobody has written the rest of the input, so the checks say when it is read.
        x, out = ctx.empty(4, dtype=torch.int32).copy_(torch.arange(4)), ctx.zeros(2, 8, dtype=torch.int32)
        count = torch.zeros(8, dtype=torch.int32, device=device)
        conditions_kernel[(1,)](x, out, count, 4, more, BLOCK=8)
        there = [0, 1, 2, 3] if more > 1 else [0] * 4
        assert out.tolist() == [there + [-1] * 4 if more > 2 else [0] * 8, there + [0] * 4]
        assert count.tolist() == [int(more > 1)] * 4 + [0] * 4
        ctx.barrier()


def test_conditions_of_blocks_and_scalars_together(sim):
    sim.run(body_conditions, 1)


def test_types_and_tensors_of_one_shape_are_alike():
    first, again = (tl.block_type(tl.int32, [2, 4]) for _ in range(2))
    assert first == again
    assert first.name == again.name
    assert (again.numel, list(again.shape), again.scalar) == (8, [2, 4], tl.int32)
    assert tl.block_type(tl.float32, [2, 4]) != first
    assert tl.block_type(tl.pointer_type(tl.int32), [2, 4]).scalar.is_ptr()
    tensors = [tl.tensor(name, again) for name in ("a", "b")]
    assert [(t.handle, t.dtype, [int(n) for n in t.shape], int(t.numel)) for t in tensors] == [
        ("a", tl.int32, [2, 4], 8),
        ("b", tl.int32, [2, 4], 8),
    ]
    with pytest.raises(TypeError):
        tl.block_type(tl.int32, [2, 4.0])


@triton.jit
def cast_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(out_ptr + offs, x.to(out_ptr.dtype.element_ty), mask=offs < n)


LOW = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_every_bit_pattern_widens_as_torch_says(dtype):
    count = 1 << (8 * dtype.itemsize)
    bits = torch.arange(count, dtype=torch.int64).to(torch.uint16 if dtype.itemsize == 2 else torch.uint8)
    x, out = bits.view(dtype), torch.zeros(count)
    cast_kernel[(1,)](x, out, count, BLOCK=count)
    assert torch.equal(out.nan_to_num(nan=12345.0), x.to(torch.float32).nan_to_num(nan=12345.0))


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_narrowing_rounds_to_nearest_even(dtype):
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 20
    out = torch.zeros(4096).to(dtype)
    cast_kernel[(1,)](x, out, 4096, BLOCK=4096)
    assert torch.equal(out.view(torch.uint8), x.to(dtype).view(torch.uint8))


@triton.jit
def loop_kernel(out_ptr, n):
    total = 0
    for i in range(n):
        total += i
    for i in range(2, n, 3):
        total += 100 * i
    tl.store(out_ptr, total)


def test_range_over_a_kernel_argument():
    out = torch.zeros(1, dtype=torch.int64)
    loop_kernel[(1,)](out, 10)
    assert out.item() == 45 + 100 * (2 + 5 + 8)


@triton.jit
def spin_kernel(flag, out):
    pid = tl.program_id(0)
    if pid == 0:
        while tl.load(flag, volatile=True) != 3:
            pass
        tl.store(out, 1)
        while tl.atomic_cas(flag + 1, 1, 2) != 1:
            pass
        tl.store(out + 1, 1)
    if pid == 2:
        tl.store(flag, 3)
        tl.atomic_xchg(flag + 1, 1)


def test_raw_spin_loops_see_later_programs():
    flag, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    spin_kernel[(3,)](flag, out)
    assert out.tolist() == [1, 1]
    assert flag.tolist() == [3, 2]


def test_a_spin_loop_that_never_ends_is_an_error():
    limit, scheduling.current().time_limit_s = scheduling.current().time_limit_s, 0.5
    try:
        with pytest.raises(WaitTimeout, match=r"kernel spin_kernel, program \(0, 0, 0\) polls address 0x"):
            spin_kernel[(1,)](torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    finally:
        scheduling.current().time_limit_s = limit
    assert not scheduling.current().active


@triton.jit
def failing_kernel(x_ptr):
    tl.static_assert(x_ptr.dtype.element_ty == tl.int32, "only int32 here")


def test_an_error_names_kernel_program_and_line():
    with pytest.raises(
        Exception, match=r"kernel failing_kernel, program \(0, 0, 0\), .*test_interpreter.py:\d+: .*only int32 here"
    ):
        failing_kernel[(2,)](torch.zeros(1))
    assert not scheduling.current().active


@triton.jit
def half_atomics_kernel(cells, old, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    value = (offs + 1).to(cells.dtype.element_ty)
    before = tl.atomic_add(cells + offs, value, mask=mask)
    tl.store(old + offs, before, mask=mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_atomics_touch_only_their_half_of_a_word(dtype):
    for start in (0, 1):
        cells, old = torch.full((12,), 5.0, dtype=dtype), torch.zeros(8, dtype=dtype)
        half_atomics_kernel[(3,)](cells[start:], old, 7, BLOCK=8)
        want = torch.full((12,), 5.0)
        want[start : start + 7] += 3 * torch.arange(1, 8)
        assert torch.equal(cells.float(), want)


def test_tensors_of_another_device_are_refused():
    with pytest.raises(ArgumentError, match=r"argument x_ptr is on meta"):
        failing_kernel[(1,)](torch.zeros(1, device="meta"))


@triton.jit
def ping_kernel(flags, out, BLOCK: tl.constexpr):
    while tl.load(flags, volatile=True) != 1:
        pass
    tl.store(out, 1)
    tl.atomic_xchg(flags + 1, 1)


@triton.jit
def pong_kernel(flags, out):
    tl.atomic_xchg(flags, 1)
    while tl.load(flags + 1, volatile=True) != 1:
        pass
    tl.store(out + 1, 1)


def test_kernels_of_two_streams_overlap():
    flags, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    side = streams.new_stream()
    with streams.use_stream(side):
        ping_kernel[(1,)](flags, out, BLOCK=1)
    assert out.tolist() == [0, 0]
    pong_kernel[(1,)](flags, out)
    side.synchronize()
    assert out.tolist() == [1, 1]


def test_events_order_streams():
    flags, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    first, second = streams.new_stream(), streams.new_stream()
    with streams.use_stream(first):
        ping_kernel[(1,)](flags, out, BLOCK=1)
    event = first.record_event()
    second.wait_event(event)
    with streams.use_stream(second):
        loop_kernel[(1,)](out, 3)
    streams.progress()
    assert not event.query()
    assert out[0] == 0
    flags[0] = 1
    second.synchronize()
    assert event.query()
    assert out[0] == 0 + 1 + 2 + 100 * 2


def test_grids_of_nothing_and_of_three_axes():
    out = torch.zeros(1, dtype=torch.int64)
    loop_kernel[(0,)](out, 10)
    assert out.item() == 0
    with pytest.raises(ArgumentError, match="1 to 3 extents"):
        loop_kernel[(1, 1, 1, 1)](out, 10)
    assert iris.__version__
