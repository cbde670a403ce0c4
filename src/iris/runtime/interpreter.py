"""Triton's interpreter made fit for kernels that communicate. :func:`install` applies every change once.

What the stock interpreter of Triton 3.6 to 3.9 lacks, and what stands here instead:

- the programs of a grid run one after another: here they are coroutines (:mod:`iris.runtime.scheduler`) that switch
  at atomics and volatile loads;
- arguments are copied before and after a launch, which would overwrite what peers stored meanwhile: here kernels work
  on the tensors themselves, which must be in host memory;
- ``tl.dot``, arithmetic and atomics on bf16 work on raw bit patterns or fail; casts to bf16 and from fp8 round or
  decode wrongly: here they go through float32 and PyTorch's conversions;
- ``tl.atomic_poll`` blocks the thread: here it gives up control between reads;
- Triton 3.6 with NumPy 2.4 cannot turn a kernel argument into a ``range`` bound;
- Triton's own library is decorated when Triton is imported, perhaps for the compiler: see :func:`interpret_library`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import time
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.errors import InterpreterError

from iris.errors import ArgumentError, IrisError, MissingBarrierWarning
from iris.runtime import scheduler as scheduling
from iris.runtime.scheduler import Launch, Program, Scheduler
from iris.runtime.source import is_library
from iris.runtime.streams import submit

_LOW_PRECISION = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
_ORDERS = {"RELAXED": "relaxed", "ACQUIRE": "acquire", "RELEASE": "release", "ACQUIRE_RELEASE": "acq_rel"}
_SCOPES = {"CTA": "cta", "GPU": "gpu", "SYSTEM": "sys"}
_STORED_AS = {1: np.uint8, 2: np.uint16}

_Handle = stock.TensorHandle
_builder = stock.interpreter_builder
_Builder = type(_builder)
_cas = stock._interpreter.atomic_cas
_rmw = stock._interpreter.atomic_rmw
_RMW = stock._interpreter.RMW_OP


def widen(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """float32 values of an array that holds the bits of ``dtype`` (bf16 or fp8)."""
    if dtype == tl.bfloat16:
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    bits = torch.from_numpy(np.ascontiguousarray(data).reshape(-1))
    return bits.view(_LOW_PRECISION[dtype]).to(torch.float32).numpy().reshape(data.shape)


def narrow(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Bits of ``dtype`` (bf16 or fp8) for floating-point values, rounded to nearest even; fp8 saturates as GPUs do."""
    kind = _LOW_PRECISION[dtype]
    values = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32).reshape(-1))
    if kind != torch.bfloat16:
        largest = torch.finfo(kind).max
        values = values.clamp(-largest, largest)
    stored = torch.int16 if kind == torch.bfloat16 else torch.uint8
    return values.to(kind).view(stored).numpy().view(_STORED_AS[kind.itemsize]).reshape(data.shape)


def _values(handle) -> np.ndarray:
    dtype = handle.dtype.scalar
    return widen(handle.data, dtype) if dtype in _LOW_PRECISION else handle.data


def _is_low(*handles) -> bool:
    return any(handle.dtype.scalar in _LOW_PRECISION for handle in handles)


def _pack(data: np.ndarray, dtype: tl.dtype):
    """A handle for the float32 result of an operation on ``dtype``; comparisons stay boolean."""
    if data.dtype == np.bool_:
        return _Handle(data, tl.int1)
    return _Handle(narrow(data, dtype), dtype)


def _wrap_arithmetic() -> None:
    binary, unary, ternary, fma = _Builder.binary_op, _Builder.unary_op, _Builder.ternary_op, _Builder.create_fma

    def binary_op(self, lhs, rhs, op):
        if _is_low(lhs, rhs):
            return _pack(op(_values(lhs), _values(rhs)), lhs.dtype.scalar)
        result = binary(self, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            # A comparison. Were it of the type that was compared, a scalar one would become integers in a block.
            return _Handle(result.data, tl.int1)
        return result

    def unary_op(self, arg, op):
        if not _is_low(arg):
            return unary(self, arg, op)
        return _pack(op(_values(arg)), arg.dtype.scalar)

    def ternary_op(self, lhs, rhs, other, op):
        # np.where selects bits and needs no conversion.
        if op is np.where or not _is_low(lhs, rhs, other):
            return ternary(self, lhs, rhs, other, op)
        return _pack(op(_values(lhs), _values(rhs), _values(other)), other.dtype.scalar)

    def create_fma(self, x, y, z):
        if not _is_low(x, y, z):
            return fma(self, x, y, z)
        return _pack(_values(x).astype(np.float64) * _values(y) + _values(z), z.dtype.scalar)

    def create_dot(self, a, b, d, *_precision):
        observer = scheduling.current().observer
        if observer is not None:
            observer.dot(a.data.shape[-2], b.data.shape[-1], a.data.shape[-1], a.dtype.scalar.name)
        accumulator = d.data
        left, right = _values(a), _values(b)
        if np.issubdtype(accumulator.dtype, np.floating) and left.dtype != np.float64:
            left, right = left.astype(np.float32), right.astype(np.float32)
        else:
            left, right = left.astype(accumulator.dtype), right.astype(accumulator.dtype)
        return _Handle((left @ right).astype(accumulator.dtype) + accumulator, d.dtype.scalar)

    _Builder.binary_op = binary_op
    _Builder.unary_op = unary_op
    _Builder.ternary_op = ternary_op
    _Builder.create_fma = create_fma
    _Builder.create_dot = create_dot


def _wrap_casts() -> None:
    cast, fp_to_fp = _Builder.cast_impl, _Builder.create_fp_to_fp

    def convert(src, dst_type, otherwise):
        source, target = src.dtype.scalar, dst_type.scalar
        if source not in _LOW_PRECISION and target not in _LOW_PRECISION:
            return otherwise()
        values = _values(src)
        if target in _LOW_PRECISION:
            return _Handle(narrow(values, target), target)
        return _Handle(values.astype(stock._get_np_dtype(target)), target)

    def cast_impl(self, src, dst_type):
        return convert(src, dst_type, lambda: cast(self, src, dst_type))

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if rounding_mode == stock._ir.ROUNDING_MODE.RTZ:
            return fp_to_fp(self, src, dst_type, rounding_mode)
        return convert(src, dst_type, lambda: fp_to_fp(self, src, dst_type, rounding_mode))

    _Builder.cast_impl = cast_impl
    _Builder.create_fp_to_fp = create_fp_to_fp


def _remember_types() -> None:
    """Work out the shape of a type or of a tensor once; each time anew would be a fifth of running a kernel."""
    np_dtype, make_type, make_tensor = stock._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__
    np_dtypes, types, shapes = {}, {}, {}

    def get_np_dtype(dtype):
        known = np_dtypes.get(dtype.name)
        if known is None:
            known = np_dtypes[dtype.name] = np_dtype(dtype)
        return known

    def block_type(self, element_ty, shape):
        # The text tells 4 from 4.0, which is refused.
        key = f"{element_ty.name} {getattr(shape, 'values', shape)}"
        known = types.get(key)
        if known is None:
            make_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known

    def tensor(self, handle, type):
        known = shapes.get(type.name)
        if known is None:
            make_tensor(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    stock._get_np_dtype = get_np_dtype
    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = tensor


def _rmw_16_bit(op, ptr, val, mask, sem) -> np.ndarray:
    """Floating-point read-modify-write of 2-byte elements by compare-and-swap of the 4-byte word around each.

    Other processes may update the other half of the word meanwhile, so the loop swaps whole words.
    """
    low = val.dtype.scalar in _LOW_PRECISION
    decode = (lambda bits: widen(bits, tl.bfloat16)) if low else (lambda bits: bits.view(np.float16))
    encode = (lambda values: narrow(values, tl.bfloat16)) if low else (lambda v: v.astype(np.float16).view(np.uint16))
    apply = {_RMW.FADD: np.add, _RMW.MAX: np.fmax, _RMW.MIN: np.fmin, _RMW.XCHG: lambda old, new: new}.get(op)
    if apply is None:
        raise InterpreterError(f"atomic {op} is not defined for {val.dtype.scalar}")
    addresses, values, active = np.broadcast_arrays(ptr.data, val.data.view(np.uint16), mask.data)
    result = np.zeros(addresses.shape, dtype=np.uint16)
    for where in np.ndindex(addresses.shape):
        if not active[where]:
            continue
        address = int(addresses[where])
        word = np.array([address & ~3], dtype=np.uint64)
        half = (address >> 1) & 1
        while True:
            old = stock._interpreter.load(word, np.ones(1, bool), np.zeros(1, np.uint32), np.dtype(np.uint32))
            new = old.copy()
            before = old.view(np.uint16)[half : half + 1].copy()
            operand = np.array([values[where]], dtype=np.uint16)
            new.view(np.uint16)[half] = encode(apply(decode(before).astype(np.float32), decode(operand)))[0]
            if _cas(word, old, new, sem)[0] == old[0]:
                break
        result[where] = before[0]
    return result if low else result.view(np.float16)


def _itemsize(ptr) -> int:
    return max(1, ptr.dtype.scalar.element_ty.primitive_bitwidth // 8)


def _mask(mask) -> np.ndarray:
    # The tensor descriptors of Triton 3.6 give an array where others give a handle.
    return mask if isinstance(mask, np.ndarray) else mask.data


def _wrap_memory() -> None:
    masked_load, masked_store = _Builder.create_masked_load, _Builder.create_masked_store

    def create_masked_load(self, ptrs, mask, other, *args, **kwargs):
        scheduler = scheduling.current()
        volatile = kwargs["is_volatile"] if kwargs else args[-1]
        scheduler.touched()
        if scheduler.observer is not None:
            scheduler.observer.load(ptrs.data, _mask(mask), _itemsize(ptrs), volatile)
        loaded = masked_load(self, ptrs, mask, other, *args, **kwargs)
        if volatile:
            scheduler.pause(idle=True, addresses=ptrs.data)
        return loaded

    def create_load(self, ptr, *args):
        mask = _Handle(np.ones_like(ptr.data, dtype=bool), tl.int1)
        return self.create_masked_load(ptr, mask, None, *args)

    def create_masked_store(self, ptrs, value, mask, *args):
        scheduler = scheduling.current()
        scheduler.touched()
        if scheduler.observer is not None:
            scheduler.observer.store(ptrs.data, _mask(mask), _itemsize(ptrs))
        return masked_store(self, ptrs, value, mask, *args)

    def create_store(self, ptr, val, *args):
        mask = _Handle(np.ones_like(ptr.data, dtype=bool), tl.int1)
        return self.create_masked_store(ptr, val, mask, *args)

    def create_atomic_cas(self, ptr, cmp, val, sem, scope):
        addresses, wanted, new = map(np.ascontiguousarray, np.broadcast_arrays(ptr.data, cmp.data, val.data))
        order = self.ir_sem_to_interpreter_sem[sem]
        old = _observed(
            "cas", ptr, addresses, None, sem, scope, lambda: _cas(addresses, wanted, new, order), lambda o: o == wanted
        )
        return _Handle(old, cmp.dtype.scalar)

    def create_atomic_rmw(self, rmw_op, ptr, val, mask, sem, scope):
        op, order = self.ir_rmw_op_to_interpreter_rmw_op[rmw_op], self.ir_sem_to_interpreter_sem[sem]
        addresses, values, active = map(np.ascontiguousarray, np.broadcast_arrays(ptr.data, val.data, mask.data))

        def apply() -> np.ndarray:
            if val.data.itemsize == 2 and val.dtype.scalar in (tl.bfloat16, tl.float16):
                return _rmw_16_bit(op, ptr, val, mask, order)
            return _rmw(op, addresses, values, active, order)

        name = str(op).rpartition(".")[2].lower()
        old = _observed(name, ptr, addresses, active, sem, scope, apply, lambda o: _changes(op, o, values))
        return _Handle(old, val.dtype.scalar)

    def create_atomic_load(self, ptr, mask, sem, scope):
        # Only releases of Triton whose loads take one cache argument have this operation.
        values = []

        def read() -> np.ndarray:
            values.append(masked_load(self, ptr, mask, None, None, True))
            return values[0].data

        _observed("load", ptr, ptr.data, mask.data, sem, scope, read, lambda old: np.False_)
        return values[0]

    def create_atomic_store(self, ptr, val, mask, sem, scope):
        def write() -> np.ndarray:
            masked_store(self, ptr, val, mask, None)
            return val.data

        _observed("store", ptr, ptr.data, mask.data, sem, scope, write, lambda old: np.True_)

    def create_atomic_poll(self, ptr, expected, timeout_ns, sem, scope):
        start = time.perf_counter_ns()
        # Without a time limit Triton 3.9 gives an empty handle of the compiler.
        limit = timeout_ns.data.item() if isinstance(timeout_ns, _Handle) else None
        everywhere = _Handle(np.ones_like(ptr.data, dtype=bool), tl.int1)
        while True:
            seen = self.create_atomic_load(ptr, everywhere, sem, scope)
            matched = seen.data == expected.data
            if matched.all() or (limit is not None and time.perf_counter_ns() - start >= limit):
                return _Handle(matched, tl.int1)

    _Builder.create_masked_load = create_masked_load
    _Builder.create_load = create_load
    _Builder.create_masked_store = create_masked_store
    _Builder.create_store = create_store
    _Builder.create_atomic_cas = create_atomic_cas
    _Builder.create_atomic_rmw = create_atomic_rmw
    if hasattr(_Builder, "create_atomic_poll"):
        _Builder.create_atomic_poll = create_atomic_poll
        _Builder.create_atomic_load, _Builder.create_atomic_store = create_atomic_load, create_atomic_store
    _wrap_barrier()


def _observed(name, ptr, addresses, active, sem, scope, apply, changes) -> np.ndarray:
    """Run an atomic, tell the observer, and let other programs run; returns the old values."""
    scheduler = scheduling.current()
    scheduler.touched()
    if scheduler.observer is not None:
        scheduler.observer.before_atomic(addresses, active, _itemsize(ptr))
    old = apply()
    changed = np.broadcast_to(changes(old), addresses.shape)
    if active is not None:
        changed = changed & active
    if scheduler.observer is not None:
        scheduler.observer.atomic(
            name, addresses, active, _itemsize(ptr), _ORDERS[sem.name], _SCOPES[scope.name], changed
        )
    scheduler.pause(idle=not changed.any(), addresses=addresses)
    return old


def _changes(op, old: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Where a read-modify-write changed what it found. Only used to tell polls from progress."""
    if op in (_RMW.ADD, _RMW.FADD, _RMW.OR, _RMW.XOR):
        return values != 0
    if op == _RMW.XCHG:
        return old.view(values.dtype) != values if old.dtype.itemsize == values.dtype.itemsize else np.True_
    if op == _RMW.AND:
        return (old & values) != old
    if op in (_RMW.MAX, _RMW.UMAX):
        return values > old
    if op in (_RMW.MIN, _RMW.UMIN):
        return values < old
    return np.True_


def _wrap_barrier() -> None:
    barrier = _Builder.create_barrier

    def create_barrier(self, *args):
        observer = scheduling.current().observer
        if observer is not None:
            observer.barrier()
        return barrier(self, *args)

    _Builder.create_barrier = create_barrier


class _Language:
    """Patches of ``triton.language`` while at least one launch is active."""

    def __init__(self) -> None:
        self._scope = None
        self._everywhere = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def enter(self) -> None:
        if self._scope is None:
            self._scope = stock._patch_lang(self._everywhere)
            self._scope.set_attr(tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))

    def leave(self) -> None:
        if self._scope is not None and not scheduling.current().active:
            self._scope.restore()
            self._scope = None


_language = _Language()
leave_language = _language.leave


def _check_argument(kernel: str, name: str, value: object) -> None:
    device = getattr(value, "device", None)
    if hasattr(value, "data_ptr") and device is not None and device.type != "cpu":
        raise ArgumentError(
            f"kernel {kernel} runs under the interpreter, which works on host memory; argument {name} is on {device}. "
            "Create it with device='cpu', or run on the GPU with IRIS_RUNTIME=gpu"
        )


def _execute(executor, *args, **kwargs) -> None:
    """Stands for ``GridExecutor.__call__``: start a grid on the current stream."""
    kernel = executor.fn.__name__
    num_warps = int(kwargs.get("num_warps") or 4)
    spec = inspect.getfullargspec(executor.fn)
    kwargs = {name: value for name, value in kwargs.items() if name in spec.args or name in spec.kwonlyargs}
    for hook in executor.pre_run_hooks:
        hook(*args, **kwargs)
    given = inspect.getcallargs(executor.fn, *args, **kwargs)
    for name, value in given.items():
        _check_argument(kernel, name, value)
    constexprs = set(executor.constexprs)
    values = {name: v if name in constexprs else stock._implicit_cvt(v) for name, v in given.items()}
    grid = executor.grid(values) if callable(executor.grid) else executor.grid
    grid = (grid,) if isinstance(grid, int) else tuple(int(extent) for extent in grid)
    if not 1 <= len(grid) <= 3 or any(extent < 0 for extent in grid):
        raise ArgumentError(f"kernel {kernel}: the grid must have 1 to 3 extents of at least 0, got {grid}")
    grid += (1,) * (3 - len(grid))

    def body() -> None:
        program = scheduling.current().current
        try:
            executor.fn(**values)
        except (IrisError, MissingBarrierWarning):
            raise
        except Exception as error:
            raise InterpreterError(f"{program.describe()}, {_place(error)}: {error!r}") from error

    launch = Launch(kernel, grid, body, keep=given, num_warps=num_warps)
    submit(launch, before=_language.enter, after=_language.leave)


def _place(error: BaseException) -> str:
    """File and line of the innermost frame that is not library code."""
    place, trace = "unknown line", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_library(code):
            place = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _set_index(program: Program) -> None:
    _builder.grid_dim = program.launch.grid
    _builder.grid_idx = program.index


def _loop_turn() -> None:
    scheduling.current().loop_turn()


class _CountedLoops(stock.ASTTransformer):
    """Lets every turn of a kernel's loops be counted, so that a loop that cannot end is noticed."""

    def _counted(self, node):
        node = self.generic_visit(node)
        turn = ast.Expr(ast.Call(func=ast.Name(id="_iris_loop_turn", ctx=ast.Load()), args=[], keywords=[]))
        node.body.insert(0, ast.copy_location(turn, node))
        return node

    visit_While = _counted
    visit_For = _counted


def _call_device_function(function, *args, **kwargs):
    """Stands for ``InterpretedFunction.__call__``: the language is patched already, and errors keep their type."""
    return function.rewrite()(*args, **kwargs)


_installed = False


def install(seed: int = 0) -> None:
    """Apply the changes to Triton's interpreter in this process; later calls do nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    _wrap_arithmetic()
    _wrap_casts()
    _wrap_memory()
    _remember_types()
    # With each operation on integers Triton computes whether it overflows, for an assertion that is off and stays off.
    _builder.options = dataclasses.replace(_builder.options, sanitize_overflow=False)
    stock.FunctionRewriter.ast_transformer = _CountedLoops()
    stock._iris_loop_turn = _loop_turn  # the interpreter copies its own globals into those of a kernel
    stock.GridExecutor.__call__ = _execute
    stock.InterpretedFunction.__call__ = _call_device_function
    Scheduler.on_resume = staticmethod(_set_index)


def interpret_library() -> None:
    """Let Triton's own device functions be interpreted when Triton was imported before the runtime was settled.

    Triton decorates its library (``tl.sum``, ``tl.cdiv`` and so on) when it is imported, in the mode of that moment.
    """
    from triton.runtime.jit import JITFunction

    interpreted: dict[int, stock.InterpretedFunction] = {}

    def swap(function: JITFunction) -> stock.InterpretedFunction:
        return interpreted.setdefault(id(function), stock.InterpretedFunction(function.fn))

    for name, module in list(sys.modules.items()):
        if name == "triton" or name.startswith("triton."):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    setattr(module, attribute, swap(value))
    for attribute, value in list(vars(tl.tensor).items()):
        if isinstance(value, JITFunction):
            # A plain function, so that it binds to the tensor it is called on.
            setattr(tl.tensor, attribute, _member(swap(value)))


def _member(function: stock.InterpretedFunction):
    def member(*args, **kwargs):
        return function(*args, **kwargs)

    return member
