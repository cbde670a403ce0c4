"""What the ranks of a collective hold, and how what came of it is compared.

Every rank can make every rank's input, so tests know what to expect without communication.
"""

import itertools

import torch

from iris.errors import IrisError
from iris.testing.numeric import assert_bitwise_equal, random_tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *FP8)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
REDUCED = (*FLOATS, *INTEGERS)
MOVED = (*REDUCED, torch.bool, torch.complex64)
# Layouts of a tensor in memory, and the element at which it begins.
LAYOUTS = ("plain", "odd", "columns", "rows", "transposed")


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def steps(shape, dtype, *, seed, rank):
    """Numbers whose sums over eight ranks are exact in float32, but not in narrower floating-point types.

    Integers: of the type's whole range, so that sums and products wrap around.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        high = info.max if dtype == torch.int64 else info.max + 1
        return torch.randint(info.min, high, shape, generator=generator, dtype=torch.int64).to(dtype)
    digits, shifts = (4, 3) if dtype.itemsize == 1 else (128, 5)
    numbers = torch.randint(-digits, digits + 1, shape, generator=generator)
    return (numbers * 2 ** torch.randint(0, shifts, shape, generator=generator)).to(dtype)


def factors(shape, dtype, *, seed, rank):
    """Numbers whose products over eight ranks are exact in float32; integers as :func:`steps`."""
    if not dtype.is_floating_point:
        return steps(shape, dtype, seed=seed, rank=rank)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    choices = torch.tensor([-2.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 2.0])
    return choices[torch.randint(0, len(choices), shape, generator=generator)].to(dtype)


def movable(shape, dtype, *, seed, rank):
    """Numbers of any dtype; random bits where no arithmetic is done with them."""
    if dtype == torch.bool:
        return random_tensor(shape, torch.int32, seed=seed, rank=rank) > 0
    if dtype.is_complex:
        parts = [random_tensor(shape, torch.float32, seed=2 * seed + part, rank=rank) for part in (0, 1)]
        return torch.complex(*parts).to(dtype)
    return (
        random_tensor(shape, dtype, seed=seed, rank=rank)
        if dtype.is_floating_point
        else steps(shape, dtype, seed=seed, rank=rank)
    )


def rounded(reference, dtype):
    """A reference that float32 holds exactly, rounded once to ``dtype``."""
    return (
        reference.to(torch.float32).to(dtype) if dtype.is_floating_point and dtype.itemsize < 4 else reference.to(dtype)
    )


def strides_of(shape, layout):
    """Strides of a layout: contiguous, every second element, longer rows, or the last dimension first."""
    shape = list(shape)
    if layout == "transposed" and len(shape) > 1:
        inner = strides_of(shape[:-1], "plain")
        return (*inner, max(1, torch.Size(shape[:-1]).numel()))
    padded = shape[:-1] + [shape[-1] + 3] if layout == "rows" and shape else shape
    tails = [1, *itertools.accumulate(reversed(padded[1:]), lambda a, b: a * max(b, 1))] if padded else []
    return tuple(stride * (2 if layout == "columns" else 1) for stride in reversed(tails))


class Buffer:
    """Memory with a tensor in it, all of it filled with ones bits (NaN in floating-point types) at first.

    Attributes:
        tensor: the tensor.
    """

    def __init__(self, ctx, shape, dtype, layout="plain", heap=True):
        strides = strides_of(shape, layout)
        first = 0 if layout == "plain" else 1
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        length = max(last, 0) + 4
        self.memory = (
            ctx.zeros(length, dtype=dtype) if heap else torch.zeros(length, dtype=dtype, device=ctx.get_device())
        )
        self.tensor = self.memory.as_strided(tuple(shape), strides, self.memory.storage_offset() + first)
        self.clear()

    def clear(self):
        self.memory.view(torch.uint8).fill_(255)

    def set(self, values):
        self.tensor.copy_(values.to(self.tensor.device))
        return self

    def check(self, expected):
        """The tensor has these values (zeros of either sign), and what surrounds it is as it was."""
        assert_same(self.tensor.cpu(), expected)
        mask = torch.zeros(self.memory.numel(), dtype=torch.bool)
        first = self.tensor.storage_offset() - self.memory.storage_offset()
        mask.as_strided(tuple(self.tensor.shape), self.tensor.stride(), first).fill_(True)
        outside = self.memory.view(torch.uint8).cpu().view(len(mask), -1)[~mask]
        assert (outside == 255).all(), "memory beside the tensor was written"


def assert_same(actual, expected):
    """Equal values of equal dtype; zeros may have either sign, which depends on the order of a sum."""
    if actual.dtype.is_complex or actual.dtype == torch.bool:
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected), (actual, expected)
    elif actual.dtype in FP8:
        assert actual.dtype == expected.dtype
        assert_bitwise_equal(actual.to(torch.float32) + 0, expected.to(torch.float32) + 0)
    else:
        assert_bitwise_equal(actual + 0, expected + 0)


def outcome(call, *args, **kwargs):
    """The message of the Iris error that a call raises, with its class in front; "" when it raises none."""
    try:
        call(*args, **kwargs)
    except IrisError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def on_new_context(rank, world_size, body, *args):
    """Run ``body`` with a context whose ranks have agreed on nothing yet; for ``ranks(n).run(..., context=None)``."""
    import iris

    return body(iris.iris(1 << 25), *args)  # on a GPU the channels of one workspace take 5 MiB
