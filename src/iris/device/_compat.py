"""What differs between Triton releases, and between the compiler and the interpreter, settled once at import."""

import triton
import triton.language as tl
from triton import knobs
from triton.language import core

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))

# On AMD a release starts a write-back of the cache and waits for it before the atomic. The compiler of Triton 3.6
# leaves the wait out when it knows of no store in flight; 3.9 does not.
RELEASE_WAITS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9))

constexpr_function = triton.constexpr_function

_compiled_aggregate = getattr(triton, "aggregate", None) or core._aggregate


@constexpr_function
def constant(value):
    """A compile-time value as a field of an aggregate: ``tl.constexpr``, or a plain number under the interpreter.

    Interpreted kernels are Python, where ``tl.constexpr`` plus a block would be another ``tl.constexpr``.
    """
    if INTERPRETED.value:
        return value.value if isinstance(value, tl.constexpr) else value
    return tl.constexpr(value)


def compiled_constructor(init):
    """Marks the constructor of an aggregate, which gets ``_semantic``, if it wants it, where kernels are compiled."""
    init.__triton_builtin__ = True
    return init


class _Method:
    """Binds a device function to an instance, which the interpreter's function objects do not do by themselves."""

    def __init__(self, function):
        self.function = function

    def __get__(self, instance, owner=None):
        if instance is None:
            return self.function
        return lambda *args, **kwargs: self.function(instance, *args, **kwargs)


def aggregate(cls):
    """Class decorator: a value made of other values, with ``@triton.jit`` methods, in kernels of either kind."""
    if not INTERPRETED.value:
        return _compiled_aggregate(cls)
    for name, member in list(vars(cls).items()):
        if isinstance(member, triton.runtime.interpreter.InterpretedFunction):
            setattr(cls, name, _Method(member))
    return cls
