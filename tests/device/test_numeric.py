"""The one matrix multiplication of kernels: widened where needed, summed in 32 bits."""

import pytest
import torch
import triton
import triton.language as tl

import iris  # settles the runtime before kernels are decorated
from iris.device import numeric

PAIRS = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.int8, torch.int8),
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.float8_e5m2, torch.float8_e5m2),
    (torch.float8_e4m3fn, torch.float8_e5m2),
]


@triton.jit
def mma_kernel(a_ptr, b_ptr, out_ptr, S: tl.constexpr):
    offs = tl.arange(0, S)
    where = offs[:, None] * S + offs[None, :]
    acc = tl.zeros((S, S), dtype=numeric.accumulator_dtype(a_ptr.dtype.element_ty))
    acc = numeric.mma(tl.load(a_ptr + where), tl.load(b_ptr + where), acc, "ieee")
    tl.store(out_ptr + where, acc)


def body_mma(ctx, pair, low, high):
    size, device = 32, ctx.get_device()
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randint(low, high, (size, size), generator=generator).to(dtype) for dtype in pair)
    kind = torch.int32 if pair[0] == torch.int8 else torch.float32
    out = torch.full((size, size), -1, dtype=kind, device=device)
    mma_kernel[(1,)](a.to(device), b.to(device), out, S=size)
    want = a.to(torch.float64) @ b.to(torch.float64)
    assert torch.equal(out.cpu().to(torch.float64), want), pair


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "x".join(str(d).removeprefix("torch.") for d in pair))
def test_integers_multiply_exactly(ranks, pair):
    ranks(1).run(body_mma, pair, -2, 3)


def test_int8_sums_do_not_wrap(ranks):
    ranks(1).run(body_mma, (torch.int8, torch.int8), 100, 127)


@triton.jit
def round_kernel(source, target, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    value = tl.load(source + offs, mask=offs < n).to(tl.float32)
    tl.store(target + offs, numeric.narrow(value, target.dtype.element_ty), mask=offs < n)


def body_round(ctx, dtype):
    source = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 2, 1000)
    # Ties, and values whose rounding carries into the exponent.
    source[:6] = torch.tensor([1.00390625, 1.01171875, 1.99999, -1.99999, 0.0, 255.9])
    target = torch.zeros(1000, dtype=dtype, device=ctx.get_device())
    round_kernel[(1,)](source.to(ctx.get_device()), target, 1000, BLOCK=1024)
    assert torch.equal(target.cpu(), source.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_rounds_to_nearest_even(ranks, dtype):
    ranks(1).run(body_round, dtype)


def test_runtime_is_settled():
    assert iris.__version__
