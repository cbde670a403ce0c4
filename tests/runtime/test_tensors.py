"""Tensor creation against torch's own functions, on a heap that is one buffer; needs no processes."""

import ctypes
import gc
import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iris.errors import ArgumentError, DeviceMismatch, OutputError, UnsupportedError
from iris.runtime.tensors import CUDAArrayInterface, TensorFactory, _check_device, parse_size, tensor_from_ptr

INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
ALL = [torch.bool, *INTS, *UNSIGNED, *FLOATS, *COMPLEX, *FLOAT8, torch.float8_e8m0fnu]
SHAPES = [(1,), (5,), (2, 3), (3, 4, 5), (1, 1, 1), (10, 20), (100, 100), (0,), (4, 0), ()]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class FakeHeap:
    """Bump allocator over one buffer that starts out as random bytes."""

    def __init__(self, nbytes=1 << 20):
        self.device = torch.device("cpu")
        self.memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        self.used = 0
        self.calls = 0

    def allocate(self, num_elements, dtype, alignment=1024):
        nbytes = num_elements * dtype.itemsize
        start = -(-self.used // alignment) * alignment
        if start + nbytes > self.memory.numel():
            raise MemoryError(f"{nbytes} bytes do not fit")
        self.calls += 1
        self.used = start + nbytes
        return self.memory[start : start + nbytes].view(dtype)

    def is_symmetric(self, tensor):
        return tensor.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()


class Context(TensorFactory):
    def __init__(self, bases=(1 << 40, 1 << 41, 1 << 42), rank=1):
        self.heap = FakeHeap()
        self.cur_rank = rank
        bases = list(bases)
        bases[rank] = self.heap.memory.data_ptr()
        self.heap_bases = torch.tensor(bases, dtype=torch.int64)


@pytest.fixture
def ctx():
    return Context()


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(result, expected, ctx):
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert ctx.heap.is_symmetric(result)
    assert torch.equal(bits(result), bits(expected))


def seeded(seed=None):
    return torch.Generator().manual_seed(torch.randint(1 << 30, ()).item() if seed is None else seed)


# Every creator, called so that only `size` and keywords vary.
CREATORS = {
    "zeros": lambda ctx, size, **kw: ctx.zeros(size, **kw),
    "ones": lambda ctx, size, **kw: ctx.ones(size, **kw),
    "full": lambda ctx, size, **kw: ctx.full(size, 1.5, **kw),
    "empty": lambda ctx, size, **kw: ctx.empty(size, **kw),
    "rand": lambda ctx, size, **kw: ctx.rand(size, **kw),
    "randn": lambda ctx, size, **kw: ctx.randn(size, **kw),
    "randint": lambda ctx, size, **kw: ctx.randint(-3, 9, size, **({"dtype": torch.float32} | kw)),
    "arange": lambda ctx, size, **kw: ctx.arange(0.0, math.prod(size), **kw),
    "linspace": lambda ctx, size, **kw: ctx.linspace(-1.0, 2.0, size, **kw),
}
creators = pytest.mark.parametrize("create", [pytest.param(f, id=name) for name, f in CREATORS.items()])


# --- values, dtypes, shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ALL)
def test_zeros_ones_empty(ctx, dtype, shape):
    assert_same(ctx.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), ctx)
    assert_same(ctx.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype), ctx)
    empty = ctx.empty(shape, dtype=dtype)
    assert (empty.shape, empty.dtype, empty.is_contiguous()) == (shape, dtype, True)
    assert ctx.heap.is_symmetric(empty)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ALL)
def test_full(ctx, dtype, shape):
    value = True if dtype == torch.bool else 8
    assert_same(ctx.full(shape, value, dtype=dtype), torch.full(shape, value, dtype=dtype), ctx)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (3, torch.int64),
        (True, torch.int64),
        (np.int32(3), torch.int64),
        (torch.tensor(3), torch.int64),
        (2.5, torch.float32),
        (np.float64(2.5), torch.float32),
        (torch.tensor(2.5), torch.float32),
        (math.inf, torch.float32),
        (1 + 2j, torch.complex64),
    ],
)
def test_full_takes_the_dtype_of_the_value(ctx, value, dtype):
    result = ctx.full((2, 3), value)
    assert result.dtype == dtype
    assert torch.equal(result, torch.full((2, 3), value.item() if hasattr(value, "item") else value, dtype=dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("name", ["rand", "randn"])
def test_random_equals_torch(ctx, name, dtype, shape):
    seed = torch.randint(1 << 30, ()).item()
    result = getattr(ctx, name)(*shape, dtype=dtype, generator=seeded(seed))
    assert_same(result, getattr(torch, name)(shape, dtype=dtype, generator=seeded(seed)), ctx)


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("name", ["rand", "randn"])
def test_random_float8_is_float32_rounded(ctx, name, dtype):
    result = getattr(ctx, name)(30, 7, dtype=dtype, generator=seeded(5))
    assert_same(result, getattr(torch, name)(30, 7, generator=seeded(5)).to(dtype), ctx)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*INTS, *UNSIGNED, *FLOATS])
def test_randint_equals_torch(ctx, dtype, shape):
    seed = torch.randint(1 << 30, ()).item()
    result = ctx.randint(3, 100, shape, dtype=dtype, generator=seeded(seed))
    assert_same(result, torch.randint(3, 100, shape, dtype=dtype, generator=seeded(seed)), ctx)
    result = ctx.randint(100, shape, generator=seeded(seed))
    assert_same(result, torch.randint(100, shape, generator=seeded(seed)), ctx)


def test_randint_bool_and_float8(ctx):
    assert_same(
        ctx.randint(2, (50,), dtype=torch.bool, generator=seeded(1)),
        torch.randint(2, (50,), dtype=torch.bool, generator=seeded(1)),
        ctx,
    )
    assert_same(
        ctx.randint(-8, 9, (50,), dtype=torch.float8_e4m3fn, generator=seeded(1)),
        torch.randint(-8, 9, (50,), dtype=torch.float32, generator=seeded(1)).to(torch.float8_e4m3fn),
        ctx,
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_equals_torch(ctx, dtype):
    torch.manual_seed(11)
    result = ctx.uniform((6, 7), -2.0, 5.0, dtype=dtype)
    torch.manual_seed(11)
    assert_same(result, torch.empty(6, 7, dtype=dtype).uniform_(-2.0, 5.0), ctx)
    assert ctx.uniform(4).dtype == torch.float32


@pytest.mark.parametrize("name", ["rand", "randn"])
def test_the_default_generator_advances_as_torch_does(ctx, name):
    torch.manual_seed(3)
    results = [getattr(ctx, name)(9), getattr(ctx, name)(20), ctx.randint(50, (8,)), torch.rand(3)]
    torch.manual_seed(3)
    expected = [getattr(torch, name)(9), getattr(torch, name)(20), torch.randint(50, (8,)), torch.rand(3)]
    for result, want in zip(results, expected, strict=True):
        assert torch.equal(result, want)


@pytest.mark.parametrize("dtype", [None, *INTS, *FLOATS])
@pytest.mark.parametrize("args", [(7,), (2, 9), (2, 9, 3), (9, 2, -3), (0, 7, 1), (0.0, 5.0), (1.5, 9.25, 2.0), (5.0,)])
def test_arange_equals_torch(ctx, args, dtype):
    assert_same(ctx.arange(*args, dtype=dtype), torch.arange(*args, dtype=dtype), ctx)


def test_arange_forms(ctx):
    assert_same(ctx.arange(end=5), torch.arange(5), ctx)
    assert_same(ctx.arange(start=2, end=8, step=2), torch.arange(2, 8, 2), ctx)
    assert_same(ctx.arange(torch.tensor(4), np.int64(9)), torch.arange(4, 9), ctx)
    assert_same(ctx.arange(0.1, 1.0, 0.3), torch.arange(0.1, 1.0, 0.3), ctx)
    assert_same(ctx.arange(5, dtype=torch.uint16), torch.arange(5).to(torch.uint16), ctx)
    assert_same(ctx.arange(-4, 5, dtype=torch.float8_e5m2), torch.arange(-4.0, 5.0).to(torch.float8_e5m2), ctx)
    assert_same(ctx.arange(2**40, 2**40 + 3), torch.arange(2**40, 2**40 + 3), ctx)


@given(
    st.integers(-60, 60) | st.floats(-60, 60, width=32),
    st.integers(-60, 60) | st.floats(-60, 60, width=32),
    st.integers(-9, 9) | st.floats(-9, 9, width=32),
    st.sampled_from([None, torch.int64, torch.int32, torch.float32, torch.float64]),
)
@settings(deadline=None, max_examples=200)
def test_arange_is_torch_or_a_value_error(start, end, step, dtype):
    ctx = Context()
    if step != 0 and abs((end - start) / step) > 1e5:
        return
    try:
        result = ctx.arange(start, end, step, dtype=dtype)
    except ValueError:
        assert ctx.heap.calls == 0
        unreachable = step == 0 or (start >= end if step > 0 else start <= end)
        # An integer dtype cuts a fractional step to 0.
        assert unreachable or (dtype in (torch.int64, torch.int32) and int(step) == 0)
        return
    assert_same(result, torch.arange(start, end, step, dtype=dtype), ctx)


@pytest.mark.parametrize("dtype", [None, *INTS, *FLOATS, *COMPLEX])
@pytest.mark.parametrize("args", [(0, 10, 5), (-3.5, 3.5, 8), (5, 5, 3), (4.0, 1.0, 4), (1, 9, 1), (1, 9, 0)])
def test_linspace_equals_torch(ctx, args, dtype):
    if dtype == torch.uint8 and args[0] < 0:
        with pytest.raises(ArgumentError, match="do not fit"):
            ctx.linspace(*args, dtype=dtype)
        return
    assert_same(ctx.linspace(*args, dtype=dtype), torch.linspace(*args, dtype=dtype), ctx)


def test_linspace_forms(ctx):
    expected = torch.linspace(0, 1, 6)
    for steps in (6, (6,), [6], ((6,),), (2, 3), np.int64(6)):
        assert_same(ctx.linspace(0, 1, steps), expected, ctx)
    assert_same(ctx.linspace(torch.tensor(0.0), 1.0, 6), expected, ctx)
    assert_same(ctx.linspace(0, 1j, 3), torch.linspace(0, 1j, 3), ctx)
    assert_same(ctx.linspace(0, 1, 5, dtype=torch.float8_e4m3fn), torch.linspace(0, 1, 5).to(torch.float8_e4m3fn), ctx)
    out = ctx.empty(6)
    assert ctx.linspace(0, 1, 6, out) is out


def test_default_dtype_is_followed(ctx):
    previous = torch.get_default_dtype()
    try:
        for default in (torch.float64, torch.float16, torch.bfloat16):
            torch.set_default_dtype(default)
            for name in ("zeros", "ones", "empty", "rand", "randn"):
                assert getattr(ctx, name)(3).dtype == default
            assert ctx.full((2,), 1.0).dtype == default
            assert ctx.full((2,), 1).dtype == torch.int64
            assert ctx.arange(3.0).dtype == default
            assert ctx.arange(3).dtype == torch.int64
            assert ctx.linspace(0, 1, 3).dtype == default
            assert ctx.randint(5, (2,)).dtype == torch.int64
            assert ctx.uniform((2,)).dtype == torch.float32
            assert ctx.allocate_symmetric(2)[0].dtype == default
        torch.set_default_dtype(torch.float64)
        assert ctx.linspace(0, 1j, 3).dtype == torch.complex128
    finally:
        torch.set_default_dtype(previous)


def test_values_do_not_touch_the_neighbours(ctx):
    before = ctx.randn(33)
    kept = before.clone()
    middle = ctx.ones(3, dtype=torch.int8)
    after = ctx.randn(7)
    kept_after = after.clone()
    middle.fill_(7)
    ctx.zeros(3, dtype=torch.int8, out=middle)
    assert torch.equal(before, kept)
    assert torch.equal(after, kept_after)
    assert (after.data_ptr() - ctx.heap.memory.data_ptr()) % 256 == 0


# --- size forms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zeros", "ones", "empty", "rand", "randn"])
def test_size_forms(ctx, name):
    create = getattr(ctx, name)
    for size in [(2, 3), ((2, 3),), ([2, 3],), (((2, 3),),), ([[[2, 3]]],), (torch.Size([2, 3]),), (np.int64(2), 3)]:
        assert create(*size).shape == (2, 3)
    for size in [(5,), ([5],), ((5,),), (((5,),),)]:
        assert create(*size).shape == (5,)
    for size in [((),), ([],), (((),),)]:
        assert create(*size).shape == ()
        assert create(*size).numel() == 1


containers = st.sampled_from([tuple, list])


@given(st.lists(st.integers(0, 1000), max_size=5), st.lists(containers, max_size=4))
def test_parse_size_unwraps(sizes, wrappers):
    wrapped = tuple(sizes)
    for wrap in wrappers:
        wrapped = wrap([wrapped])
    assert parse_size(wrapped) == tuple(sizes)
    assert parse_size(*sizes) == tuple(sizes)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=4).filter(lambda sizes: min(sizes) < 0))
def test_parse_size_names_a_negative_size(sizes):
    with pytest.raises(ArgumentError, match=str(next(size for size in sizes if size < 0))):
        parse_size(sizes)


@given(
    st.lists(st.sampled_from([True, False, 1.0, "2", None, np.bool_(True), torch.tensor(True), (1,), 1j]), min_size=1),
    st.integers(0, 9),
)
def test_parse_size_refuses_what_is_no_integer(bad, good):
    with pytest.raises(TypeError, match="size must be an integer"):
        parse_size(good, *bad)


@pytest.mark.parametrize("size", [(2**63,), (2**32, 2**32), (0, 2**62, 2**62), (0, 2**64)])
def test_sizes_past_64_bits_are_refused(ctx, size):
    with pytest.raises(ArgumentError, match="too large"):
        ctx.zeros(size, dtype=torch.int8)
    assert ctx.heap.calls == 0


def test_large_sizes_only_ask_the_heap():
    asked = []

    class Refusing(FakeHeap):
        def allocate(self, num_elements, dtype, alignment=1024):
            asked.append(num_elements)
            raise MemoryError

    ctx = Context()
    ctx.heap = Refusing()
    for create in (ctx.zeros, ctx.rand, ctx.empty):
        with pytest.raises(MemoryError):
            create(2**32)
    with pytest.raises(MemoryError):
        ctx.arange(2**33)
    with pytest.raises(MemoryError):
        ctx.linspace(0, 1, 2**34)
    assert asked == [2**32, 2**32, 2**32, 2**33, 2**34]


# --- arguments that every creator shares ------------------------------------------------------------------------------


@creators
def test_requires_grad(ctx, create):
    result = create(ctx, (2, 3), requires_grad=True)
    assert result.requires_grad
    assert result.is_leaf
    (result.double() * 3).sum().backward()
    assert torch.equal(result.grad, torch.full_like(result.detach(), 3))
    assert not create(ctx, (2, 3)).requires_grad


@pytest.mark.parametrize("name", ["zeros", "ones", "empty"])
def test_requires_grad_needs_a_floating_dtype(ctx, name):
    with pytest.raises(UnsupportedError, match=r"requires_grad.*int32.*floating"):
        getattr(ctx, name)(3, dtype=torch.int32, requires_grad=True)
    with pytest.raises(RuntimeError):
        ctx.arange(3, requires_grad=True)
    assert ctx.heap.calls == 0


@creators
@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", torch.device("cpu")])
def test_own_device_is_accepted(ctx, create, device):
    assert create(ctx, (2, 3), device=device).device == ctx.heap.device


@creators
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1", torch.device("cuda:0"), "meta", "mps", "cpu:1", "nope"])
def test_other_devices_are_refused(ctx, create, device):
    with pytest.raises(
        DeviceMismatch, match=rf"Device mismatch: requested device {device} but Iris instance is on"
    ) as e:
        create(ctx, (2, 3), device=device)
    assert isinstance(e.value, RuntimeError)
    assert "this context runs on cpu" in str(e.value)
    assert "device=ctx.device" in str(e.value)
    assert ctx.heap.calls == 0


@pytest.mark.parametrize("index", [0, 1, 7])
def test_devices_of_a_gpu_context(index):
    own = torch.device("cuda", index)
    for device in (None, "cuda", own, f"cuda:{index}"):
        _check_device(device, own)
    for device in ("cpu", torch.device("cpu"), "mps", "meta", f"cuda:{index + 1}"):
        with pytest.raises(DeviceMismatch, match=rf"requested device {device} but Iris instance is on device {own}"):
            _check_device(device, own)


@creators
def test_layout(ctx, create):
    create(ctx, (2, 3), layout=torch.strided)
    calls = ctx.heap.calls
    for layout in (torch.sparse_coo, torch.sparse_csr, "strided"):
        with pytest.raises(ValueError, match=r"Layout .* not supported.*torch\.strided"):
            create(ctx, (2, 3), layout=layout)
    assert ctx.heap.calls == calls


@creators
def test_out_shares_the_memory(ctx, create):
    out = ctx.empty(6)
    calls = ctx.heap.calls
    torch.manual_seed(0)
    result = create(ctx, (2, 3), out=out, dtype=torch.float32)
    assert ctx.heap.calls == calls
    assert result.data_ptr() == out.data_ptr()
    result.reshape(-1)[4] = 77.0
    assert out[4] == 77.0
    torch.manual_seed(0)
    if create is not CREATORS["empty"]:
        result = create(ctx, (2, 3), out=out, dtype=torch.float32)
        torch.manual_seed(0)
        assert torch.equal(result, create(ctx, (2, 3), dtype=torch.float32))
        assert torch.equal(out, result.reshape(-1))


@pytest.mark.parametrize("name", ["zeros", "ones", "rand", "randn", "empty"])
def test_out_of_the_same_shape_is_returned_itself(ctx, name):
    out = ctx.empty(4, 5)
    assert getattr(ctx, name)(4, 5, out=out) is out
    assert getattr(ctx, name)(5, 4, out=out).shape == (5, 4)


@creators
def test_out_errors(ctx, create):
    good = ctx.randn(6)
    outside = torch.randn(6)
    wrong = [
        (ctx.randn(7), "The output tensor has 7 elements, but 6 are required"),
        (ctx.ones(7, dtype=torch.int32), "The output tensor has 7 elements, but 6 are required"),
        (ctx.ones(6, dtype=torch.int32), "The output tensor has dtype torch.int32, but torch.float32 is required"),
        (outside.int(), "The output tensor has dtype torch.int32, but torch.float32 is required"),
        (outside, "The output tensor is not on the symmetric heap"),
        (ctx.randn(6, requires_grad=True), "The output tensor requires grad"),
    ]
    calls, used = ctx.heap.calls, ctx.heap.memory.clone()
    for out, text in wrong:
        with pytest.raises(OutputError, match=text) as e:
            create(ctx, (2, 3), out=out, dtype=torch.float32)
        assert isinstance(e.value, RuntimeError)
    with pytest.raises(TypeError, match=r"out must be a torch\.Tensor, got list"):
        create(ctx, (2, 3), out=[1.0] * 6)
    assert ctx.heap.calls == calls
    assert torch.equal(ctx.heap.memory, used)
    assert create(ctx, (2, 3), out=good, dtype=torch.float32).data_ptr() == good.data_ptr()


def test_out_of_a_failed_call_keeps_its_values(ctx):
    out = ctx.randint(100, (6,), dtype=torch.int8)
    kept = out.clone()
    with pytest.raises(ValueError, match="do not fit"):
        ctx.arange(300, 306, dtype=torch.int8, out=out)
    with pytest.raises(ValueError, match="do not fit"):
        ctx.full((6,), 300, dtype=torch.int8, out=out)
    with pytest.raises(NotImplementedError):
        ctx.randn(6, dtype=torch.int8, out=out)
    assert torch.equal(out, kept)


def test_out_with_strides(ctx):
    base = ctx.zeros(4, 6)
    out = base[:, ::2]
    assert ctx.randn(4, 3, out=out, generator=seeded(2)) is out
    assert torch.equal(base[:, ::2], torch.randn(4, 3, generator=seeded(2)))
    assert not base[:, 1::2].any()
    for refused in (base[:, :3], base[:3, :4].T):
        with pytest.raises(OutputError, match="cannot be viewed as shape"):
            ctx.zeros(12, out=refused)


@creators
def test_dtype_must_be_a_torch_dtype(ctx, create):
    for dtype in ("float32", np.float32, float):
        with pytest.raises(TypeError, match=r"dtype must be a torch.dtype, got .*torch\.float32"):
            create(ctx, (2, 3), dtype=dtype)
    with pytest.raises(UnsupportedError, match=r"torch\.bits8 cannot be created .*torch\.float32"):
        create(ctx, (2, 3), dtype=torch.bits8)
    assert ctx.heap.calls == 0


# --- failed calls leave the heap where it was -------------------------------------------------------------------------

FAILING = {
    "negative size": (lambda c: c.zeros(3, -1), ValueError, "-1"),
    "negative full": (lambda c: c.full((-2,), 1), ValueError, "-2"),
    "negative steps": (lambda c: c.linspace(0, 1, -4), ValueError, "-4"),
    "bool size": (lambda c: c.ones(True), TypeError, "True of type bool"),
    "float size": (lambda c: c.ones(2.0), TypeError, "2.0 of type float"),
    "text size": (lambda c: c.empty("3"), TypeError, "'3' of type str"),
    "full past int8": (lambda c: c.full(3, 300, dtype=torch.int8), ValueError, "torch.int8, which holds -128 to 127"),
    "full past uint8": (lambda c: c.full(3, -1, dtype=torch.uint8), ValueError, "torch.uint8, which holds 0 to 255"),
    "full past int64": (lambda c: c.full(3, 2**63), ValueError, "do not fit torch.int64"),
    "full past half": (lambda c: c.full(3, 1e6, dtype=torch.float16), ValueError, "do not fit torch.float16"),
    "full past fp8": (lambda c: c.full(3, 500, dtype=torch.float8_e4m3fn), ValueError, "448"),
    "full nan int": (lambda c: c.full(3, math.nan, dtype=torch.int32), ValueError, "fill_value=nan is not possible"),
    "full complex real": (lambda c: c.full(3, 1j, dtype=torch.float32), ValueError, "not possible with torch.float32"),
    "full text": (lambda c: c.full(3, "x"), TypeError, "fill_value must be a complex number"),
    "full tensor": (lambda c: c.full(3, torch.ones(2)), TypeError, "fill_value must be a complex number"),
    "rand int": (lambda c: c.rand(3, dtype=torch.int32), NotImplementedError, "rand does not exist for torch.int32"),
    "randn bool": (lambda c: c.randn(3, dtype=torch.bool), RuntimeError, "possible: torch.float16, torch.bfloat16"),
    "uniform int": (lambda c: c.uniform(3, dtype=torch.int64), NotImplementedError, "does not exist for torch.int64"),
    "uniform order": (lambda c: c.uniform(3, 2.0, 1.0), ValueError, "uniform from 2.0 to 1.0"),
    "uniform text": (lambda c: c.uniform(3, "a"), TypeError, "low must be a real number"),
    "randint order": (lambda c: c.randint(5, 5, (3,)), ValueError, "low must be below high"),
    "randint negative": (lambda c: c.randint(-5, (3,)), ValueError, "from 0 to -5"),
    "randint 1": (lambda c: c.randint(5), ValueError, "randint expects 2 or 3 positional arguments, got 1"),
    "randint 4": (lambda c: c.randint(1, 2, (3,), 4), ValueError, "randint expects 2 or 3 positional arguments, got 4"),
    "randint int8": (lambda c: c.randint(0, 300, (3,), dtype=torch.int8), ValueError, "do not fit torch.int8"),
    "randint uint16": (lambda c: c.randint(-1, 3, (3,), dtype=torch.uint16), ValueError, "do not fit torch.uint16"),
    "randint int64": (lambda c: c.randint(0, 2**64, (3,)), ValueError, "do not fit torch.int64"),
    "randint edge": (lambda c: c.randint(0, 2**63, (3,)), ValueError, "not possible with torch.int64"),
    "randint half": (lambda c: c.randint(0, 70000, (3,), dtype=torch.float16), ValueError, "do not fit torch.float16"),
    "randint complex": (lambda c: c.randint(4, (3,), dtype=torch.complex64), ValueError, "torch.complex64"),
    "randint float": (lambda c: c.randint(4.0, (3,)), TypeError, "high must be an integer"),
    "arange step": (lambda c: c.arange(0, 5, 0), ValueError, "step must be non-zero"),
    "arange up": (lambda c: c.arange(5, 5), ValueError, "Invalid range: start=5"),
    "arange down": (lambda c: c.arange(0, 5, -1), ValueError, "Invalid range: start=0"),
    "arange zero": (lambda c: c.arange(0), ValueError, "Invalid range"),
    "arange int8": (lambda c: c.arange(300, dtype=torch.int8), ValueError, "do not fit torch.int8"),
    "arange 2**32 int8": (lambda c: c.arange(2**32, dtype=torch.int8), ValueError, "do not fit torch.int8"),
    "arange down int8": (lambda c: c.arange(0, -200, -1, dtype=torch.int8), ValueError, "got -199"),
    "arange uint8": (lambda c: c.arange(-1, 5, dtype=torch.uint8), ValueError, "do not fit torch.uint8"),
    "arange half": (lambda c: c.arange(70000, dtype=torch.float16), ValueError, "do not fit torch.float16"),
    "arange uint64": (lambda c: c.arange(2**63, 2**63 + 2, dtype=torch.uint64), ValueError, "arange from"),
    "arange int64": (lambda c: c.arange(2**63 - 2, 2**63), ValueError, "arange from"),
    "arange bool": (lambda c: c.arange(2, dtype=torch.bool), NotImplementedError, "does not exist for torch.bool"),
    "arange complex": (lambda c: c.arange(1j), TypeError, "end must be a real number"),
    "arange inf": (lambda c: c.arange(math.inf), ValueError, "arange from 0 to inf"),
    "arange nan": (lambda c: c.arange(math.nan), ValueError, "arange from 0 to nan"),
    "arange vast": (lambda c: c.arange(1e30), ValueError, "arange from 0 to 1e"),
    "arange cut step": (lambda c: c.arange(0, 5, 0.5, dtype=torch.int32), ValueError, "step must be nonzero"),
    "linspace int8": (lambda c: c.linspace(0, 1000, 5, dtype=torch.int8), ValueError, "do not fit torch.int8"),
    "linspace complex": (lambda c: c.linspace(0, 1j, 5, dtype=torch.float32), ValueError, "torch.float32"),
    "linspace bool": (lambda c: c.linspace(0, 1, 2, dtype=torch.bool), NotImplementedError, "torch.bool"),
    "linspace text": (lambda c: c.linspace("0", 1, 2), TypeError, "start must be a complex number"),
    "generator type": (lambda c: c.rand(3, generator=5), TypeError, "generator must be a torch.Generator"),
    "like list": (lambda c: c.zeros_like([1, 2]), TypeError, "input must be a torch.Tensor, got list"),
    "like device": (lambda c: c.zeros_like(torch.empty(3, device="meta")), RuntimeError, "requested device meta"),
    "like layout": (lambda c: c.zeros_like(torch.ones(3).to_sparse()), ValueError, "Layout torch.sparse_coo"),
    "like dtype": (lambda c: c.zeros_like(torch.ones(3), dtype="float32"), TypeError, "dtype must be a torch.dtype"),
    "memory format": (lambda c: c.empty(3, memory_format="channels_last"), TypeError, "possible: contiguous_format"),
    "symmetric": (lambda c: c.allocate_symmetric(-1), ValueError, "-1"),
}


@pytest.mark.parametrize(("call", "error", "text"), [pytest.param(*case, id=name) for name, case in FAILING.items()])
def test_failed_calls_leave_the_heap_untouched(ctx, call, error, text):
    memory, state = ctx.heap.memory.clone(), torch.get_rng_state()
    with pytest.raises(error) as e:
        call(ctx)
    assert text in str(e.value)
    assert ctx.heap.calls == 0
    assert torch.equal(ctx.heap.memory, memory)
    assert torch.equal(torch.get_rng_state(), state)


def test_pin_memory_is_ignored(ctx):
    for name in ("empty", "rand", "randn"):
        assert not getattr(ctx, name)(3, pin_memory=True).is_pinned()


# --- memory formats ---------------------------------------------------------------------------------------------------

FORMATS = [torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format]


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (1, 3, 1, 1), (2, 0, 4, 5)])
def test_channels_last(ctx, shape):
    expected = torch.empty(shape, memory_format=torch.channels_last)
    result = ctx.empty(shape, memory_format=torch.channels_last)
    assert (result.shape, result.stride()) == (expected.shape, expected.stride())
    assert ctx.heap.is_symmetric(result)
    source = torch.randn(shape)
    like = ctx.zeros_like(source, memory_format=torch.channels_last)
    assert (like.shape, like.stride()) == (expected.shape, expected.stride())
    assert not like.any()
    assert ctx.heap.calls == 2


def test_channels_last_3d(ctx):
    expected = torch.empty((2, 3, 4, 5, 6), memory_format=torch.channels_last_3d)
    for result in (
        ctx.empty(expected.shape, memory_format=torch.channels_last_3d),
        ctx.zeros_like(expected.contiguous(), memory_format=torch.channels_last_3d),
        ctx.zeros_like(expected),
    ):
        assert (result.shape, result.stride()) == (expected.shape, expected.stride())


@pytest.mark.parametrize("memory_format", FORMATS)
def test_other_combinations_are_contiguous(ctx, memory_format):
    for shape in [(3,), (3, 4), (2, 3, 4)]:
        assert ctx.empty(shape, memory_format=memory_format).is_contiguous()
        assert ctx.zeros_like(torch.randn(shape), memory_format=memory_format).is_contiguous()


def test_empty_with_out_and_memory_format(ctx):
    out = ctx.empty(2 * 3 * 4 * 5)
    result = ctx.empty(2, 3, 4, 5, out=out, memory_format=torch.channels_last)
    assert result.data_ptr() == out.data_ptr()
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert ctx.empty(2, 3, 4, 5, out=result, memory_format=torch.channels_last) is result


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.randn(2, 3, 1, 1), True),
        (torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), True),
        (torch.randn(2, 3, 4, 5), True),
        (torch.randn(4, 6).T, False),
        (torch.randn(4, 6)[:, ::2], False),
        (torch.randn(1, 1, 1, 1).expand(2, 3, 4, 5), False),
        (torch.randn(2, 3, 4, 5).permute(3, 2, 1, 0), False),
    ],
)
def test_preserve_format(ctx, source, kept):
    result = ctx.zeros_like(source)
    assert (result.shape, result.dtype) == (source.shape, source.dtype)
    assert result.stride() == (torch.zeros_like(source) if kept else torch.zeros(source.shape)).stride()
    assert not result.any()


def test_preserve_format_of_a_channels_last_slice(ctx):
    source = torch.randn(2, 3, 4, 6).to(memory_format=torch.channels_last)[..., ::2]
    assert ctx.zeros_like(source).stride() == torch.zeros_like(source).stride()


@pytest.mark.parametrize("dtype", ALL)
def test_zeros_like_dtypes(ctx, dtype):
    source = torch.ones(3, 4, dtype=dtype)
    assert_same(ctx.zeros_like(source), torch.zeros(3, 4, dtype=dtype), ctx)
    assert_same(ctx.zeros_like(torch.randn(3, 4), dtype=dtype), torch.zeros(3, 4, dtype=dtype), ctx)
    assert ctx.zeros_like(torch.randn(2), requires_grad=True).requires_grad


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(7,), (2, 3), (0,), ()])
def test_allocate_symmetric(ctx, size):
    ctx.empty(5)
    tensor, peers = ctx.allocate_symmetric(size, dtype=torch.float16)
    assert (tensor.shape, tensor.dtype) == (size, torch.float16)
    assert (peers.shape, peers.dtype) == ((3,), torch.int64)
    distance = (peers - ctx.heap_bases).unique()
    assert distance.numel() == 1
    if tensor.numel():
        assert peers[ctx.cur_rank] == tensor.data_ptr()
    assert 0 <= distance.item() < ctx.heap.memory.numel()


class Owner:
    pass


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("shape", [24, (24,), (2, 3, 4), (0,), (3, 0), ()])
def test_tensor_from_ptr(dtype, shape):
    memory = torch.randint(0, 2, (1024,), dtype=torch.uint8)
    tensor = tensor_from_ptr(memory.data_ptr() + 64, shape, dtype, "cpu", owner=memory)
    assert (tensor.shape, tensor.dtype) == (parse_size(shape), dtype)
    assert torch.equal(bits(tensor), memory[64 : 64 + tensor.nbytes])
    assert tensor.untyped_storage().data_ptr() == memory.data_ptr() + 64
    if tensor.numel():
        memory[64] = 77
        assert bits(tensor)[0] == 77


@pytest.mark.parametrize("count", [0, 16])
def test_tensor_from_ptr_keeps_the_owner_until_the_last_view_is_gone(count):
    owner, died = Owner(), []
    owner.memory = ctypes.create_string_buffer(b"\1" * 64, 64)
    address = ctypes.addressof(owner.memory)
    weakref.finalize(owner, died.append, True)
    tensor = tensor_from_ptr(address, count, torch.int16, "cpu", owner=owner)
    del owner
    views = [tensor[count // 2 :], tensor.view(torch.uint8)]
    views.append(views[0].detach())
    storage = tensor.untyped_storage()
    del tensor
    gc.collect()
    assert not died
    while views:
        views.pop()
        gc.collect()
        assert not died
    del storage
    gc.collect()
    assert died == [True]


def test_tensor_from_ptr_is_released_without_the_collector():
    owner, died = Owner(), []
    memory = torch.zeros(64, dtype=torch.uint8)
    weakref.finalize(owner, died.append, True)
    gc.disable()
    try:
        tensor = tensor_from_ptr(memory.data_ptr(), 8, torch.int64, "cpu", owner=owner)
        view = tensor[1:]
        del owner, tensor
        assert not died
        del view
        assert died == [True]
    finally:
        gc.enable()


def test_tensor_from_ptr_has_its_own_version_counter():
    memory = torch.zeros(64, dtype=torch.uint8)
    first = tensor_from_ptr(memory.data_ptr(), 4, torch.float32, "cpu", memory).requires_grad_()
    second = tensor_from_ptr(memory.data_ptr() + 16, 4, torch.float32, "cpu", memory)
    loss = (first * first).sum()
    second.add_(1)
    loss.backward()
    assert torch.equal(first.grad, 2 * first.detach())


def test_tensor_from_ptr_errors():
    memory = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="a multiple of 4 above 0"):
        tensor_from_ptr(memory.data_ptr() + 2, 4, torch.float32, "cpu")
    with pytest.raises(ArgumentError, match="address 0x0"):
        tensor_from_ptr(0, 4, torch.float32, "cpu")
    with pytest.raises(ArgumentError, match="-3"):
        tensor_from_ptr(memory.data_ptr(), -3, torch.float32, "cpu")
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype"):
        tensor_from_ptr(memory.data_ptr(), 3, "float32", "cpu")
    with pytest.raises(UnsupportedError, match=r"device meta .*possible: cuda and cpu"):
        tensor_from_ptr(memory.data_ptr(), 3, torch.float32, "meta")


def test_cuda_array_interface():
    owner = Owner()
    interface = CUDAArrayInterface(4096, 128, "cuda:0", owner)
    described = interface.__cuda_array_interface__
    assert described == {"data": (4096, False), "shape": (128,), "typestr": "|u1", "version": 3}
    assert interface.owner is owner


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", [(24,), (2, 3, 4), (0,)])
def test_tensor_from_ptr_on_a_gpu(shape):
    owner, died = Owner(), []
    memory = torch.randint(0, 256, (1024,), dtype=torch.uint8, device="cuda")
    weakref.finalize(owner, died.append, True)
    tensor = tensor_from_ptr(memory.data_ptr() + 64, shape, torch.bfloat16, memory.device, owner=owner)
    del owner
    assert torch.equal(tensor.view(-1).view(torch.uint8), memory[64 : 64 + tensor.nbytes])
    assert tensor.untyped_storage().data_ptr() == memory.data_ptr() + 64
    view = tensor[:1]
    del tensor
    gc.collect()
    assert not died
    del view
    gc.collect()
    assert died == [True]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ALL)
def test_creators_on_a_gpu(dtype):
    ctx = Context()
    ctx.heap.memory = ctx.heap.memory.cuda()
    ctx.heap.device = ctx.heap.memory.device

    def generator(seed):
        return torch.Generator(device="cuda").manual_seed(seed)

    calls = {
        "zeros": lambda module, **kw: module.zeros((30, 7), **kw),
        "ones": lambda module, **kw: module.ones((30, 7), **kw),
        "full": lambda module, **kw: module.full((30, 7), 1, **kw),
        "rand": lambda module, **kw: module.rand((30, 7), generator=generator(3), **kw),
        "randn": lambda module, **kw: module.randn((30, 7), generator=generator(3), **kw),
        "randint": lambda module, **kw: module.randint(1, 2, (30, 7), generator=generator(3), **kw),
        "arange": lambda module, **kw: module.arange(1, 90, **kw),
        "linspace": lambda module, **kw: module.linspace(1, 9, 30, **kw),
    }
    for call in calls.values():
        before = ctx.heap.calls
        try:
            result = call(ctx, dtype=dtype, device="cuda")
        except (UnsupportedError, ArgumentError):
            assert ctx.heap.calls == before
            continue
        try:
            expected = call(torch, dtype=dtype, device="cuda")
        except NotImplementedError:
            wide = torch.float32 if dtype.is_floating_point else torch.int64
            expected = call(torch, dtype=wide, device="cuda").to(dtype)
        assert_same(result, expected, ctx)
