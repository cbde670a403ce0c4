"""Checks of arguments before anything is launched: what is refused, and that the message says what is possible."""

from types import SimpleNamespace

import pytest
import torch

from iris import _target
from iris.errors import ArgumentError, DeviceMismatch, UnsupportedError
from iris.ops import arguments
from iris.ops.arguments import Problem
from iris.runtime import checks
from iris.runtime.checks import FLOATS, FP8

FP8_NVIDIA = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_GFX942 = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@pytest.fixture
def ctx():
    """Of the context, what the checks ask: the device."""
    return SimpleNamespace(device="cpu", get_device=lambda: torch.device("cpu"))


def of(dtype):
    return torch.empty(2, 2, dtype=dtype)


def test_matrices(ctx):
    matrix = torch.empty(3, 4)
    assert checks.check_matrix(ctx, "A", matrix) is matrix
    checks.check_matrix(ctx, "A", torch.empty(0, 4))
    for wrong in (None, [[1.0]], 3):
        with pytest.raises(ArgumentError, match=f"A must be a tensor, got {type(wrong).__name__}"):
            checks.check_matrix(ctx, "A", wrong)
    for shape in ((), (3,), (1, 3, 4)):
        with pytest.raises(ArgumentError) as caught:
            checks.check_matrix(ctx, "A", torch.empty(shape))
        assert str(caught.value) == f"A must have two dimensions, got shape {shape}"


def test_the_device(ctx):
    with pytest.raises(DeviceMismatch, match="B is on meta, the context is on cpu"):
        checks.check_matrix(ctx, "B", torch.empty(3, 4, device="meta"))


H200, MI300X, MI350X = (_target.KNOWN[name] for name in ("h200", "mi300x", "mi350x"))


@pytest.mark.parametrize("target", [H200, MI300X, MI350X, _target.INTERPRETER], ids=lambda t: t.arch)
def test_combinations_of_dtypes(target):
    """Every triple of dtypes: those of the documentation pass, every other is refused in words."""
    able = tuple(getattr(torch, name) for name in target.fp8)
    dtypes = (*FLOATS, *FP8, torch.int8, torch.int32, torch.int64, torch.float64, torch.bool)
    passed = 0
    for a in dtypes:
        for b in dtypes:
            for out in dtypes:
                right = (
                    (a == b and a in FLOATS and out in FLOATS)
                    or (a == b == torch.int8 and out == torch.int32)
                    or a == b == out == torch.float64
                    or (a in able and b in able and out in FLOATS)
                )
                if right:
                    arguments.check_dtypes(target, of(a), of(b), of(out))
                    passed += 1
                    continue
                with pytest.raises((ArgumentError, UnsupportedError)):
                    arguments.check_dtypes(target, of(a), of(b), of(out))
    assert passed == 9 + 1 + 1 + 3 * len(able) ** 2


def test_messages_of_dtypes():
    def message(target, a, b, out, kind=ArgumentError):
        with pytest.raises(kind) as caught:
            arguments.check_dtypes(target, of(a), of(b), of(out))
        return str(caught.value)

    half, single = torch.float16, torch.float32
    text = message(H200, half, single, single)
    assert text == "A and B must have one dtype, or both an fp8 dtype; got torch.float16 and torch.float32"
    text = message(H200, torch.int8, torch.int8, single)
    assert text == "out must be int32 for inputs of torch.int8, got torch.float32"
    text = message(H200, torch.float64, torch.float64, single)
    assert text == "out must be float64 for inputs of torch.float64, got torch.float32"
    text = message(H200, torch.int16, torch.int16, torch.int16)
    assert text == "A and B may be float64, float32, float16, bfloat16, int8 or fp8; got torch.int16"
    text = message(MI300X, *FP8_GFX942[:1], FP8_NVIDIA[0], half, UnsupportedError)
    assert text == "B is float8_e4m3fn, which gfx942 does not multiply; it does: float8_e4m3fnuz, float8_e5m2fnuz"
    bare = SimpleNamespace(arch="sm_75", fp8=())
    assert message(bare, FP8_NVIDIA[0], FP8_NVIDIA[0], half, UnsupportedError).endswith("it does: no fp8 dtype")


M, N = 6, 10


@pytest.mark.parametrize("shape", [(N,), (M, N), (1, N), (M, 1), (1, 1)])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.float64], ids=str)
def test_biases(ctx, shape, dtype):
    out_dtype = torch.float16 if dtype in FLOATS else dtype
    arguments.check_bias(ctx, torch.empty(shape, dtype=dtype), M, N, out_dtype)


def test_no_bias_and_a_bias_of_a_square(ctx):
    arguments.check_bias(ctx, None, M, N, torch.float16)
    arguments.check_bias(ctx, torch.empty(N), N, N, torch.float16)


@pytest.mark.parametrize("shape", [(), (N + 1,), (1,), (N, M), (M, 2), (2, N), (1, M, N), (0,)])
def test_biases_of_the_wrong_shape(ctx, shape):
    with pytest.raises(ArgumentError) as caught:
        arguments.check_bias(ctx, torch.empty(shape), M, N, torch.float16)
    assert str(N) in str(caught.value)
    assert str(shape[0] if len(shape) == 1 else shape) in str(caught.value)


def test_a_bias_for_each_row_is_refused_with_the_remedy(ctx):
    with pytest.raises(ArgumentError, match=r"pass bias\[:, None\]"):
        arguments.check_bias(ctx, torch.empty(M), M, N, torch.float16)
    arguments.check_bias(ctx, torch.empty(M)[:, None], M, N, torch.float16)


def test_biases_that_are_no_tensors_or_elsewhere(ctx):
    with pytest.raises(ArgumentError, match="bias must be a tensor or None, got float"):
        arguments.check_bias(ctx, 1.0, M, N, torch.float16)
    with pytest.raises(DeviceMismatch, match="bias is on meta"):
        arguments.check_bias(ctx, torch.empty(N, device="meta"), M, N, torch.float16)
    for dtype in (torch.float64, torch.int8, torch.bool, torch.int32):
        with pytest.raises(ArgumentError, match=f"or bfloat16 for an output of torch.float16, got {dtype}"):
            arguments.check_bias(ctx, torch.empty(N, dtype=dtype), M, N, torch.float16)
    # A fraction would be lost in a sum of integers.
    with pytest.raises(ArgumentError, match=r"bias must be int32 for an int32 output, got torch.float32"):
        arguments.check_bias(ctx, torch.empty(N), M, N, torch.int32)


@pytest.mark.parametrize(
    ("matrix", "letter"),
    [
        (torch.empty(4, 6), "N"),
        (torch.empty(4, 6).t(), "T"),
        (torch.empty(4, 12)[:, ::2], "N"),
        (torch.empty(1, 1), "N"),
        (torch.empty(4, 1), "N"),
    ],
)
def test_the_letter_of_a_layout(matrix, letter):
    assert arguments.letter(matrix) == letter


def test_a_problem_reads_as_a_line():
    half = torch.float16
    same = Problem(64, 128, 256, half, half, half, 4, 1, None, "NT")
    assert str(same) == "64x128x256 float16 NT, 4 ranks, gather_dim=1"
    mixed = Problem(64, 128, 256, torch.int8, torch.int8, torch.int32, 2, 0, (128,), "NN")
    assert str(mixed) == "64x128x256 int8 x int8 -> int32 NN, 2 ranks, gather_dim=0"
