"""Tensors on the symmetric heap: creation with the arguments of torch, and raw memory seen as a tensor.

Every argument is checked before the heap is asked for memory. Allocation is local arithmetic that all ranks repeat, so
a call that failed on one rank must leave that rank's heap where it was.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from iris.errors import ArgumentError, DeviceMismatch, OutputError, UnsupportedError

_INT64_MAX = 2**63 - 1

_FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_WIDE_UNSIGNED),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, *_FLOAT8),
)
# torch has no generators and no ranges for these dtypes, so values are made in a wider dtype and then converted.
_WIDER = dict.fromkeys(_FLOAT8, torch.float32) | dict.fromkeys(_WIDE_UNSIGNED, torch.int64)

# Writes values into a tensor, drawing from a generator where it needs random numbers.
_Fill = Callable[[torch.Tensor, "torch.Generator | None"], Any]


def parse_size(*size: Any) -> tuple[int, ...]:
    """The shape meant by ``2, 3`` or ``(2, 3)`` or ``[2, 3]`` or ``((2, 3),)``; ``()`` is the shape of a scalar.

    Raises:
        TypeError: a size is not an integer.
        ArgumentError: a size is negative, or strides of this shape do not fit into 64 bits.
    """
    given: Sequence[Any] = size
    while len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = given[0]
    shape = tuple(_integer("size", value) for value in given)
    for value in shape:
        if value < 0:
            raise ArgumentError(f"size {shape} has the negative entry {value}; sizes are 0 or more")
    if math.prod(max(value, 1) for value in shape) > _INT64_MAX:
        raise ArgumentError(f"size {shape} is too large: element offsets must stay below 2**63")
    return shape


class TensorFactory:
    """Creation of tensors on the symmetric heap, as methods of the context.

    All methods are collective in order: every rank makes the same allocations in the same order. They do not
    communicate, and a call that raises leaves the heap untouched.

    Shared arguments:
        size: integers, or one tuple or list of them; wrapping containers of length 1 are removed.
        out: a tensor on the symmetric heap that receives the values instead of a new allocation. The result is
            ``out.view(size)``, or ``out`` itself when it has that shape.
        dtype: a torch dtype; ``None`` takes :func:`torch.get_default_dtype` unless the method says otherwise.
        layout: ``torch.strided``.
        device: ``None``, the context's device, or its type without an index.
        requires_grad: whether autograd records operations on the result.
        generator: the source of random numbers, on the context's device; ``None`` takes torch's default.
        pin_memory: accepted for programs written for torch, without effect.

    Shared errors:
        TypeError: an argument has the wrong type.
        ArgumentError: a value, a size or the layout is not possible.
        DeviceMismatch: ``device`` or ``generator`` belongs to another device.
        OutputError: ``out`` has the wrong element count, the wrong dtype, or is not on the symmetric heap.
        UnsupportedError: the method, or ``requires_grad``, does not exist for the dtype.
        HeapExhausted: the heap has no room.

    Values equal those of the torch function of the same name with the same generator state. For float8 dtypes they
    are torch's float32 values converted, and for uint16, uint32 and uint64 ranges its int64 values; a temporary
    tensor of the wider dtype is needed there and nowhere else.
    """

    # Given by the context class.
    heap: Any
    heap_bases: torch.Tensor
    cur_rank: int

    def zeros(self, *size, out=None, dtype=None, layout=torch.strided, device=None, requires_grad=False):
        """Tensor of shape ``size`` filled with 0. Collective in order; arguments and errors as in the class."""
        return self._create("zeros", parse_size(*size), dtype, _Constant(0), out, layout, device, requires_grad)

    def ones(self, *size, out=None, dtype=None, layout=torch.strided, device=None, requires_grad=False):
        """Tensor of shape ``size`` filled with 1. Collective in order; arguments and errors as in the class."""
        return self._create("ones", parse_size(*size), dtype, _Constant(1), out, layout, device, requires_grad)

    def full(self, size, fill_value, *, out=None, dtype=None, layout=torch.strided, device=None, requires_grad=False):
        """Tensor of shape ``size`` filled with ``fill_value``. Collective in order; errors as in the class.

        ``dtype=None`` takes int64 for an integer or bool, the default dtype for a float and its complex counterpart
        for a complex number. A value that the dtype cannot hold is an ArgumentError.
        """
        value = _number("fill_value", fill_value, numbers.Complex)
        if dtype is None:
            dtype = torch.int64 if isinstance(value, int) else _default_dtype(value)
        shape = parse_size(size)
        name = f"full with fill_value={fill_value}"
        _check_fits(name, dtype, value)
        return self._create(name, shape, dtype, _Constant(value), out, layout, device, requires_grad)

    def empty(
        self,
        *size,
        out=None,
        dtype=None,
        layout=torch.strided,
        device=None,
        requires_grad=False,
        pin_memory=False,
        memory_format=torch.contiguous_format,
    ):
        """Tensor of shape ``size`` with whatever the memory held. Collective in order; errors as in the class.

        ``memory_format`` ``channels_last`` gives a 4-D and ``channels_last_3d`` a 5-D tensor the strides of that
        format; the shape stays ``size``. With any other number of dimensions the result is contiguous.
        """
        shape = parse_size(*size)
        strides = _format_strides(shape, memory_format)
        return self._create("empty", shape, dtype, None, out, layout, device, requires_grad, strides=strides)

    def zeros_like(
        self, input, *, dtype=None, layout=None, device=None, requires_grad=False, memory_format=torch.preserve_format
    ):
        """Tensor of 0 with the shape of ``input``. Collective in order; errors as in the class.

        ``dtype``, ``layout`` and ``device`` default to those of ``input``, so an input on another device raises.
        ``preserve_format`` keeps the strides of a channels-last input and is contiguous for every other; the other
        formats are as in :meth:`empty`.
        """
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"input must be a torch.Tensor, got {type(input).__name__}")
        dtype = input.dtype if dtype is None else dtype
        layout = input.layout if layout is None else layout
        device = input.device if device is None else device
        shape = tuple(input.shape)
        _check_layout(layout)
        if memory_format == torch.preserve_format:
            strides = _preserved_strides(input)
        else:
            strides = _format_strides(shape, memory_format)
        fill = _Constant(0)
        return self._create("zeros_like", shape, dtype, fill, None, layout, device, requires_grad, strides=strides)

    def rand(
        self,
        *size,
        generator=None,
        out=None,
        dtype=None,
        layout=torch.strided,
        device=None,
        requires_grad=False,
        pin_memory=False,
    ):
        """Tensor of shape ``size``, uniform in [0, 1), floating or complex. Collective in order; see the class."""
        fill = _drawn(torch.rand)
        return self._create("rand", parse_size(*size), dtype, fill, out, layout, device, requires_grad, generator)

    def randn(
        self,
        *size,
        generator=None,
        out=None,
        dtype=None,
        layout=torch.strided,
        device=None,
        requires_grad=False,
        pin_memory=False,
    ):
        """Tensor of shape ``size``, normal with mean 0 and variance 1, floating or complex. Collective in order; see
        the class. Values are drawn into the heap memory itself."""
        fill = _drawn(torch.randn)
        return self._create("randn", parse_size(*size), dtype, fill, out, layout, device, requires_grad, generator)

    def randint(
        self, *args, generator=None, out=None, dtype=None, layout=torch.strided, device=None, requires_grad=False
    ):
        """``randint(high, size)`` or ``randint(low, high, size)``: integers uniform in [low, high), low being 0.

        ``dtype=None`` takes int64. Collective in order; errors as in the class, and ArgumentError when ``low`` is not
        below ``high``, when the dtype cannot hold the values, or when there are not 2 or 3 positional arguments.
        """
        if len(args) not in (2, 3):
            raise ArgumentError(
                f"randint expects 2 or 3 positional arguments, got {len(args)}; possible: (high, size) and "
                "(low, high, size)"
            )
        low, high, size = args if len(args) == 3 else (0, *args)
        low, high, shape = _integer("low", low), _integer("high", high), parse_size(size)
        name = f"randint from {low} to {high}"
        if low >= high:
            raise ArgumentError(f"{name}: low must be below high")
        dtype = torch.int64 if dtype is None else dtype
        _check_fits(name, dtype, low, high - 1)
        fill = _drawn(torch.randint, low, high)
        return self._create(name, shape, dtype, fill, out, layout, device, requires_grad, generator)

    def arange(
        self, start=0, end=None, step=1, *, out=None, dtype=None, layout=torch.strided, device=None, requires_grad=False
    ):
        """1-D tensor of ``start``, ``start + step``, ... up to but without ``end``; one positional argument is the end.

        The length is ``ceil((end - start) / step)``. ``dtype=None`` takes the default dtype when an argument is a
        float and int64 otherwise. Collective in order; errors as in the class, and ArgumentError when the step is 0,
        the range is empty, or the dtype cannot hold the values.
        """
        if end is None:
            start, end = 0, start
        start, end, step = _number("start", start), _number("end", end), _number("step", step)
        name = f"arange from {start} to {end} by {step}"
        if step == 0:
            raise ArgumentError("step must be non-zero")
        if start >= end if step > 0 else start <= end:
            raise ArgumentError(f"Invalid range: start={start} does not reach end={end} with step={step}")
        if dtype is None:
            has_float = any(isinstance(value, float) for value in (start, end, step))
            dtype = torch.get_default_dtype() if has_float else torch.int64
        _check_dtype(dtype)
        try:
            length = torch.arange(start, end, step, dtype=dtype, device="meta").numel()
        except (RuntimeError, ValueError, OverflowError) as error:
            raise ArgumentError(f"{name} is not possible with {dtype}: {error}") from error
        _check_fits(name, dtype, start, start + (length - 1) * step)

        def fill(tensor, _):
            # torch resizes an out= tensor of another length, and the tensor of the trial has one.
            if tensor.numel() == length:
                torch.arange(start, end, step, out=tensor)
            else:
                torch.arange(tensor.numel(), out=tensor)

        return self._create(name, (length,), dtype, fill, out, layout, device, requires_grad)

    def linspace(self, start, end, steps, out=None, dtype=None, layout=torch.strided, device=None, requires_grad=False):
        """1-D tensor of ``steps`` values evenly spaced from ``start`` to ``end``, both included.

        ``steps`` is an integer or a tuple or list of integers, whose product counts. ``dtype=None`` takes the default
        dtype, or its complex counterpart when an endpoint is complex. Collective in order; errors as in the class.
        """
        start, end = _number("start", start, numbers.Complex), _number("end", end, numbers.Complex)
        length = math.prod(parse_size(steps))
        name = f"linspace from {start} to {end}"
        dtype = _default_dtype(start, end) if dtype is None else dtype
        _check_fits(name, dtype, start, end)
        return self._create(
            name,
            (length,),
            dtype,
            lambda tensor, _: torch.linspace(start, end, tensor.numel(), out=tensor),
            out,
            layout,
            device,
            requires_grad,
        )

    def uniform(self, size, low=0.0, high=1.0, dtype=torch.float):
        """Tensor of shape ``size``, uniform in [low, high), floating dtypes. Collective in order; see the class."""
        low, high = _number("low", low), _number("high", high)
        shape = parse_size(size)
        name = f"uniform from {low} to {high}"
        return self._create(name, shape, dtype, lambda tensor, g: tensor.uniform_(low, high, generator=g))

    def allocate_symmetric(self, *size, dtype=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialised tensor of shape ``size`` and the addresses of its copies on all ranks.

        Entry ``r`` of the second tensor, int64 of shape ``(num_ranks,)`` on the context's device, is the address of
        this tensor on rank ``r`` as mapped in this process. Collective in order; errors as in the class.
        """
        tensor = self.empty(*size, dtype=dtype)
        # data_ptr() of an empty tensor is 0, wherever it lies.
        address = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize
        return tensor, self.heap_bases - self.heap_bases[self.cur_rank] + int(address)

    def _create(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
        fill: _Fill | None,
        out: torch.Tensor | None = None,
        layout: torch.layout = torch.strided,
        device: Any = None,
        requires_grad: bool = False,
        generator: torch.Generator | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Check everything, then allocate (or take ``out``), then fill. ``strides=None`` means contiguous."""
        heap = self.heap
        dtype = torch.get_default_dtype() if dtype is None else dtype
        _check_dtype(dtype)
        _check_layout(layout)
        _check_device(device, heap.device)
        _check_generator(generator, heap.device)
        if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            raise UnsupportedError(
                f"requires_grad=True is not possible with {dtype}; possible: floating and complex dtypes"
            )
        # Filling with one value works in every dtype; the rest of torch's factories do not know all of them.
        made_in = dtype if fill is None or isinstance(fill, _Constant) else _WIDER.get(dtype, dtype)
        if fill is not None:
            _try_fill(name, fill, dtype, made_in)
        if out is not None:
            result = _output(out, shape, strides, dtype, heap)
        wide = None
        if fill is not None and made_in != dtype:
            # Before the allocation, because this needs memory too.
            wide = torch.empty(shape, dtype=made_in, device=heap.device)
            fill(wide, generator)
        if out is None:
            result = _arranged(heap.allocate(math.prod(shape), dtype), shape, strides)
        if wide is not None:
            result.copy_(wide)
        elif fill is not None:
            fill(result, generator)
        return result.requires_grad_() if requires_grad else result


class CUDAArrayInterface:
    """Raw device memory in the form that array libraries exchange, ``__cuda_array_interface__`` version 3.

    Args:
        ptr: device address of the first byte.
        nbytes: number of bytes.
        device: the device that the address belongs to.
        owner: an object that must live as long as the memory is in use; the importing library keeps this interface,
            and the interface keeps the owner.
    """

    def __init__(self, ptr: int, nbytes: int, device: Any = None, owner: Any = None):
        self.device = device
        self.owner = owner
        self.__cuda_array_interface__ = _byte_interface(ptr, nbytes)


class _HostArrayInterface:
    """Host memory in the form that NumPy reads; keeps the owner of the memory alive."""

    def __init__(self, ptr: int, nbytes: int, owner: Any):
        self.owner = owner
        self.__array_interface__ = _byte_interface(ptr, nbytes)


def tensor_from_ptr(
    ptr: int, shape: int | Sequence[int], dtype: torch.dtype, device: Any, owner: Any = None
) -> torch.Tensor:
    """Contiguous tensor of ``shape`` (an element count or a shape) over memory that already exists, without a copy.

    The memory must be mapped and stay mapped while the tensor or any view of it lives. ``owner`` is kept alive for
    exactly that long: its finalizer may release the memory.

    Raises:
        ArgumentError: the address is not above 0 or not a multiple of the element size.
        DeviceMismatch: torch can reach the memory from ``device`` only by copying it.
        UnsupportedError: ``device`` is neither a CUDA (or ROCm) device nor the CPU, or the dtype is not known.
    """
    size = parse_size(shape)
    _check_dtype(dtype)
    device = torch.device(device)
    if ptr <= 0 or ptr % dtype.itemsize:
        raise ArgumentError(f"address {ptr:#x} is not possible for {dtype}: a multiple of {dtype.itemsize} above 0 is")
    count = math.prod(size)
    # A tensor over 0 bytes forgets its address and its owner; one over 1 byte, cut to length 0, keeps both.
    nbytes = max(count * dtype.itemsize, 1)
    if device.type == "cpu":
        flat = torch.from_numpy(np.asarray(_HostArrayInterface(ptr, nbytes, owner)))
    elif device.type == "cuda":
        flat = torch.as_tensor(CUDAArrayInterface(ptr, nbytes, device, owner), device=device)
    else:
        raise UnsupportedError(f"device {device} cannot be wrapped from an address; possible: cuda and cpu")
    if flat.data_ptr() != ptr:
        raise DeviceMismatch(f"address {ptr:#x} is not memory of device {device}; torch could only have copied it")
    return flat[: count * dtype.itemsize].view(dtype).view(size)


class _Constant:
    """Fills with one value, which torch does for every dtype."""

    def __init__(self, value: Any):
        self.value = value

    def __call__(self, tensor: torch.Tensor, generator: torch.Generator | None) -> None:
        tensor.fill_(self.value)


def _drawn(factory: Callable[..., torch.Tensor], *args: Any) -> _Fill:
    return lambda tensor, generator: factory(*args, tensor.shape, generator=generator, out=tensor)


def _byte_interface(ptr: int, nbytes: int) -> dict[str, Any]:
    return {"data": (ptr, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def _integer(name: str, value: Any) -> int:
    is_bool = isinstance(value, (bool, np.bool_)) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool)
    if not is_bool:
        try:
            return operator.index(value)  # pyright: ignore[reportArgumentType]
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")


def _number(name: str, value: Any, kind: type = numbers.Real) -> Any:
    """``value`` as a Python int, float or complex; 0-d tensors and NumPy scalars count as the number they hold."""
    number = value.item() if isinstance(value, (torch.Tensor, np.generic)) and value.ndim == 0 else value
    if isinstance(number, kind):
        for python_type, abstract in ((int, numbers.Integral), (float, numbers.Real), (complex, numbers.Complex)):
            if isinstance(number, abstract):
                return python_type(number)  # pyright: ignore[reportArgumentType]
    raise TypeError(f"{name} must be a {kind.__name__.lower()} number, got {value!r} of type {type(value).__name__}")


def _default_dtype(*values: Any) -> torch.dtype:
    default = torch.get_default_dtype()
    return default.to_complex() if any(isinstance(value, complex) for value in values) else default


def _check_dtype(dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}; possible: {_names(_DTYPES)}")
    if dtype not in _DTYPES:
        raise UnsupportedError(f"{dtype} cannot be created on the symmetric heap; possible: {_names(_DTYPES)}")


def _check_layout(layout: Any) -> None:
    if layout != torch.strided:
        raise ArgumentError(f"Layout {layout} not supported; possible: torch.strided")


def _check_device(requested: Any, own: torch.device) -> None:
    if requested is None:
        return
    try:
        wanted = torch.device(requested)
    except (RuntimeError, TypeError):
        wanted = None
    if wanted is not None and wanted.type == own.type and wanted.index in (None, own.index or 0):
        return
    if own.type == "cpu":
        remedy = "this context runs on cpu, and device=ctx.device is the portable form"
    else:
        remedy = f"possible: None, '{own.type}', '{own}'"
    raise DeviceMismatch(
        f"Device mismatch: requested device {requested} but Iris instance is on device {own}; {remedy}"
    )


def _check_generator(generator: Any, own: torch.device) -> None:
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    if generator.device.type != own.type or (generator.device.index or 0) != (own.index or 0):
        raise DeviceMismatch(
            f"generator is on device {generator.device} but Iris instance is on device {own}; possible: "
            f"torch.Generator(device='{own}')"
        )


def _check_fits(name: str, dtype: Any, *values: Any) -> None:
    """Refuse finite values outside the range of ``dtype``. Infinity and NaN are left to torch."""
    _check_dtype(dtype)
    if dtype.is_complex:
        return
    if dtype == torch.bool:
        low, high = 0, 1
    else:
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        low, high = info.min, info.max
    for value in values:
        finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        if finite and not low <= value <= high:
            raise ArgumentError(f"{name}: the values do not fit {dtype}, which holds {low} to {high}; got {value}")


def _try_fill(name: str, fill: _Fill, dtype: torch.dtype, made_in: torch.dtype) -> None:
    """Run ``fill`` on two host elements, so that what torch refuses is refused before the heap is touched."""

    def attempt(trial: torch.dtype) -> None:
        # A generator of its own: the trial must not advance the caller's random numbers.
        fill(torch.empty(2, dtype=trial), torch.Generator())

    try:
        attempt(made_in)
    except NotImplementedError:
        possible = []
        for other in _DTYPES:
            try:
                attempt(_WIDER.get(other, other))
            except (RuntimeError, ValueError):
                continue
            possible.append(other)
        raise UnsupportedError(f"{name} does not exist for {dtype}; possible: {_names(possible)}") from None
    except (RuntimeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{name} is not possible with {dtype}: {error}") from error


def _output(
    out: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype, heap: Any
) -> torch.Tensor:
    """``out`` in the wanted shape, checked in the order element count, dtype, place."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor, got {type(out).__name__}")
    count = math.prod(shape)
    if out.numel() != count:
        raise OutputError(f"The output tensor has {out.numel()} elements, but {count} are required")
    if out.dtype != dtype:
        raise OutputError(f"The output tensor has dtype {out.dtype}, but {dtype} is required")
    if not heap.is_symmetric(out):
        raise OutputError("The output tensor is not on the symmetric heap")
    if out.requires_grad and torch.is_grad_enabled():
        raise OutputError("The output tensor requires grad, which out= does not track; pass out.detach()")
    if out.shape == shape and strides in (None, out.stride()):
        return out
    try:
        return _arranged(out.view(-1), shape, strides)
    except RuntimeError as error:
        raise OutputError(
            f"The output tensor of shape {tuple(out.shape)} and strides {out.stride()} cannot be viewed as shape "
            f"{shape}; a contiguous tensor can"
        ) from error


def _arranged(flat: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> torch.Tensor:
    return flat.view(shape) if strides is None else flat.as_strided(shape, strides)


def _format_strides(shape: tuple[int, ...], memory_format: Any) -> tuple[int, ...] | None:
    """Strides of ``shape`` in a memory format, ``None`` for contiguous."""
    if not isinstance(memory_format, torch.memory_format):
        raise TypeError(
            f"memory_format must be a torch.memory_format, got {memory_format!r}; possible: contiguous_format, "
            "channels_last, channels_last_3d and, for zeros_like, preserve_format"
        )
    if len(shape) != {torch.channels_last: 4, torch.channels_last_3d: 5}.get(memory_format):
        return None
    return torch.empty(shape, memory_format=memory_format, device="meta").stride()


def _preserved_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    if channels_last is None or tensor.stride(1) != 1:
        return None
    if tensor.is_contiguous(memory_format=channels_last):
        return tensor.stride()
    return _format_strides(tuple(tensor.shape), channels_last)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes) or "none"
