"""What a kernel runs on: one frozen record of hardware facts, and its detection. No other file asks which vendor it is.

The figures of :data:`KNOWN` are the vendors' published ones (CDNA 3 and CDNA 4 white papers, Hopper and Blackwell
architecture white papers, CUDA programming guide for the shared memory a block may use).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from iris import _env
from iris.errors import ArgumentError, EnvironmentValueError


@dataclass(frozen=True)
class Target:
    """Hardware facts of one device.

    Attributes:
        vendor: ``"nvidia"``, ``"amd"`` or ``"cpu"`` (the interpreter).
        arch: ``"sm_90"``, ``"gfx942"``, ``"interpreter"`` and so on.
        name: the product's name.
        compute_units: streaming multiprocessors or compute units of one device.
        shared_memory_bytes: the most shared memory that one program may use.
        warp_size: threads of a warp.
        chiplets: dies that have an L2 cache of their own.
        clock_hz: ticks a second of the clock that kernels read.
        fp8: names of the fp8 dtypes of torch that the target multiplies.
        product: key of :data:`KNOWN` that tables of configurations go by, ``"mi300x"`` for example; empty when it is
            not known. Products that share an architecture are told apart by it.
    """

    vendor: str
    arch: str
    name: str
    compute_units: int
    shared_memory_bytes: int
    warp_size: int
    chiplets: int
    clock_hz: int
    fp8: tuple[str, ...] = ()
    product: str = ""

    @property
    def compiled(self) -> bool:
        """Whether kernels are compiled for this target; False for the interpreter."""
        return self.vendor != "cpu"

    @property
    def descriptors(self) -> bool:
        """Whether the target has a unit that copies tiles of a tensor to shared memory by a descriptor."""
        return self.vendor == "nvidia" and int(self.arch.removeprefix("sm_").rstrip("a")) >= 90

    @property
    def family(self) -> str:
        """The letters that its architecture begins with, ``"gfx"`` or ``"sm"``: devices of a family are made alike."""
        return self.arch.rstrip("0123456789abcdef").rstrip("_")

    @property
    def link(self) -> str:
        """What joins devices of this kind in one machine, where they have the vendor's own links; one of
        :data:`iris.runtime.links.LINKS`."""
        return {"amd": "xgmi", "nvidia": "nvlink"}.get(self.vendor, "interpreted")

    def gpu_target(self):
        """The ``triton.backends.compiler.GPUTarget`` to compile for.

        Raises:
            ArgumentError: this is the interpreter, for which nothing is compiled.
        """
        from triton.backends.compiler import GPUTarget

        if self.vendor == "nvidia":
            return GPUTarget("cuda", int(self.arch.removeprefix("sm_").rstrip("a")), self.warp_size)
        if self.vendor == "amd":
            return GPUTarget("hip", self.arch, self.warp_size)
        raise ArgumentError(f"target {self.arch} is interpreted; compiled targets: {', '.join(compiled_archs())}")

    def unit_name(self, die: int, unit: int) -> str:
        """What the vendor calls a compute unit, by the indices that kernels read: ``SM7``, or ``XCC1_CU7``."""
        return f"SM{unit}" if self.vendor == "nvidia" else f"XCC{die}_CU{unit}"

    def share(self, ranks: int) -> Target:
        """This target as each of ``ranks`` ranks sees it when they share the device's compute units evenly."""
        return replace(self, compute_units=max(1, self.compute_units // max(1, ranks)))


_KIB = 1024
_OCP_FP8 = ("float8_e4m3fn", "float8_e5m2")
_FNUZ_FP8 = ("float8_e4m3fnuz", "float8_e5m2fnuz")


def _known(product: str, vendor: str, arch: str, name: str, units: int, shared_kib: int, chiplets: int, fp8) -> Target:
    warp, clock = (64, 100_000_000) if vendor == "amd" else (32, 1_000_000_000)
    return Target(vendor, arch, name, units, shared_kib * _KIB, warp, chiplets, clock, fp8, product)


# Of products with the same architecture the first stands for those that nobody names.
KNOWN: dict[str, Target] = {
    target.product: target
    for target in (
        _known("mi300x", "amd", "gfx942", "AMD Instinct MI300X", 304, 64, 8, _FNUZ_FP8),
        _known("mi325x", "amd", "gfx942", "AMD Instinct MI325X", 304, 64, 8, _FNUZ_FP8),
        _known("mi355x", "amd", "gfx950", "AMD Instinct MI355X", 256, 160, 8, _OCP_FP8),
        _known("mi350x", "amd", "gfx950", "AMD Instinct MI350X", 256, 160, 8, _OCP_FP8),
        _known("h100", "nvidia", "sm_90", "NVIDIA H100", 132, 227, 1, _OCP_FP8),
        _known("h200", "nvidia", "sm_90", "NVIDIA H200", 132, 227, 1, _OCP_FP8),
        _known("b200", "nvidia", "sm_100", "NVIDIA B200", 148, 227, 2, _OCP_FP8),
    )
}

INTERPRETER = Target("cpu", "interpreter", "Triton interpreter", 8, 1 << 30, 32, 1, 1_000_000_000, _OCP_FP8 + _FNUZ_FP8)


def compiled_archs() -> tuple[str, ...]:
    """The architectures that every kernel is compiled for in the tests."""
    return tuple(dict.fromkeys(target.arch for target in KNOWN.values()))


def by_arch(arch: str) -> Target:
    """The first known target of an architecture, for compiling without the device.

    Raises:
        ArgumentError: the architecture is not known; the message lists those that are.
    """
    wanted = normalize_arch(arch)
    for target in KNOWN.values():
        if target.arch == wanted:
            return target
    raise ArgumentError(f"architecture {arch!r} is not known; known: {', '.join(compiled_archs())}")


def normalize_arch(text: str | None) -> str:
    """An architecture without feature suffixes: ``gfx942:sramecc+:xnack-`` gives ``gfx942``; unknown gives ``""``.

    ``amdgcn-amd-amdhsa--gfx942`` and ``(9, 0)`` written as ``"9.0"`` are understood too.
    """
    text = (text or "").strip().lower()
    amd = re.search(r"gfx[0-9a-f]+", text)
    if amd:
        return amd.group(0)
    nvidia = re.search(r"sm_?(\d{2,3})", text)
    if nvidia:
        return f"sm_{nvidia.group(1)}"
    capability = re.fullmatch(r"\(?\s*(\d+)\s*[.,]\s*(\d)\s*\)?", text)
    if capability:
        return f"sm_{capability.group(1)}{capability.group(2)}"
    return ""


# A word that is the name of a product, as in "NVIDIA H20" or "AMD Instinct MI308X"; "AMD Radeon Graphics" has none.
_PRODUCT_WORD = re.compile(r"(?<![a-z0-9])(?!gfx|hbm|sxm|sm)[a-z]{1,3}\d{2,4}[a-z]?(?![a-z0-9])")


def product_named(name: str, arch: str) -> str:
    """The known product that a device's name tells, or else the first with its architecture; empty when neither does.

    A name that tells another product gives none: an MI300A is no MI300X, nor a GH200 an H200, though their
    architectures are the same.
    """
    words = _PRODUCT_WORD.findall(name.lower())
    for word in words:
        if word in KNOWN and KNOWN[word].arch == arch:
            return word
    return "" if words else next((product for product, target in KNOWN.items() if target.arch == arch), "")


@dataclass(frozen=True)
class Named:
    """What a text says about a device.

    Attributes:
        product: key of :data:`KNOWN`.
        arch: the product's architecture.
        how: how the product follows from the text, in words; empty when the text is the product's name.
    """

    product: str
    arch: str
    how: str = ""


def possible_names() -> str:
    """What :func:`product_of` understands, in words."""
    return f"a product ({', '.join(KNOWN)}) or an architecture ({', '.join(compiled_archs())})"


@cache
def product_of(text: str, own: str = "") -> Named:
    """The product and the architecture that a text names.

    Args:
        text: a product or an architecture in any spelling and case: ``"MI300X"``, ``"gfx942:sramecc+:xnack-"``,
            ``"sm_90a"``.
        own: the device's own product. A bare architecture keeps it where it has that architecture, and otherwise means
            the first known product that has.

    Raises:
        ArgumentError: lists what is possible.
    """
    word = text.strip().lower()
    if word in KNOWN:
        return Named(word, KNOWN[word].arch)
    arch = normalize_arch(word)
    products = [product for product, target in KNOWN.items() if target.arch == arch]
    if not products:
        raise ArgumentError(f"{text!r} names no known device; possible: {possible_names()}")
    if own in products:
        return Named(own, arch, f"{arch} is the architecture of this machine's {own}")
    others = f", before {', '.join(products[1:])}" if products[1:] else ""
    return Named(products[0], arch, f"{products[0]} is the first known product with {arch}{others}")


def override(own: str = "") -> Named | None:
    """What ``IRIS_GPU_ARCH`` says about the device, whose own product is ``own``; None when it is unset.

    Raises:
        EnvironmentValueError: it names no known device; the message lists what is possible.
    """
    text = _env.get("IRIS_GPU_ARCH")
    if not text:
        return None
    try:
        return product_of(text, own)
    except ArgumentError:
        raise EnvironmentValueError(
            f"IRIS_GPU_ARCH={text!r} names no known device; possible: {possible_names()}"
        ) from None


def detect(device_index: int) -> Target:
    """Facts of a visible GPU, read from torch; figures that torch does not report come from :data:`KNOWN`.

    ``IRIS_GPU_ARCH`` overrides its product and architecture.

    Raises:
        EnvironmentValueError: ``IRIS_GPU_ARCH`` names no known device, or one of another vendor.
    """
    target = device(device_index)
    named = override(target.product)
    return target if named is None else _overridden(target, named)


@cache
def device(device_index: int) -> Target:
    """As :func:`detect`, whatever ``IRIS_GPU_ARCH`` says."""
    import torch

    properties = torch.cuda.get_device_properties(device_index)
    amd = torch.version.hip is not None
    arch = normalize_arch(properties.gcnArchName) if amd else f"sm_{properties.major}{properties.minor}"
    product = product_named(properties.name, arch)
    family = KNOWN.get(product) or next((target for target in KNOWN.values() if target.arch == arch), None)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or (family.shared_memory_bytes if family else 0)
    return Target(
        vendor="amd" if amd else "nvidia",
        arch=arch,
        name=properties.name,
        compute_units=properties.multi_processor_count,
        shared_memory_bytes=shared or 64 * _KIB,
        warp_size=getattr(properties, "warp_size", 64 if amd else 32),
        chiplets=family.chiplets if family else 1,
        clock_hz=100_000_000 if amd else 1_000_000_000,
        fp8=family.fp8 if family else (),
        product=product,
    )


@cache
def _overridden(target: Target, named: Named) -> Target:
    family = KNOWN[named.product]
    if family.vendor != target.vendor:
        raise EnvironmentValueError(
            f"IRIS_GPU_ARCH names {named.product} ({named.arch}), but kernels run on {target.name} ({target.arch}); "
            f"possible: a product or an architecture of {target.vendor}"
        )
    return replace(target, arch=named.arch, product=named.product, chiplets=family.chiplets, fp8=family.fp8)


def forget_devices() -> None:
    """Read the visible GPUs anew when they are asked for next."""
    device.cache_clear()
