"""What a kernel runs on: one frozen record of hardware facts, and its detection. No other file asks which vendor it is.

The figures of :data:`KNOWN` are the vendors' published ones (CDNA 3 and CDNA 4 white papers, Hopper and Blackwell
architecture white papers, CUDA programming guide for the shared memory a block may use).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from iris import _env
from iris.errors import ArgumentError


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

    @property
    def compiled(self) -> bool:
        """Whether kernels are compiled for this target; False for the interpreter."""
        return self.vendor != "cpu"

    @property
    def descriptors(self) -> bool:
        """Whether the target has a unit that copies tiles of a tensor to shared memory by a descriptor."""
        return self.vendor == "nvidia" and int(self.arch.removeprefix("sm_").rstrip("a")) >= 90

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

KNOWN: dict[str, Target] = {
    "mi300x": Target("amd", "gfx942", "AMD Instinct MI300X", 304, 64 * _KIB, 64, 8, 100_000_000, _FNUZ_FP8),
    "mi325x": Target("amd", "gfx942", "AMD Instinct MI325X", 304, 64 * _KIB, 64, 8, 100_000_000, _FNUZ_FP8),
    "mi350x": Target("amd", "gfx950", "AMD Instinct MI350X", 256, 160 * _KIB, 64, 8, 100_000_000, _OCP_FP8),
    "h100": Target("nvidia", "sm_90", "NVIDIA H100", 132, 227 * _KIB, 32, 1, 1_000_000_000, _OCP_FP8),
    "h200": Target("nvidia", "sm_90", "NVIDIA H200", 132, 227 * _KIB, 32, 1, 1_000_000_000, _OCP_FP8),
    "b200": Target("nvidia", "sm_100", "NVIDIA B200", 148, 227 * _KIB, 32, 2, 1_000_000_000, _OCP_FP8),
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


@cache
def detect(device_index: int) -> Target:
    """Facts of a visible GPU, read from torch; figures that torch does not report come from :data:`KNOWN`."""
    import torch

    properties = torch.cuda.get_device_properties(device_index)
    amd = torch.version.hip is not None
    if amd:
        arch = normalize_arch(properties.gcnArchName)
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    override = _env.get("IRIS_GPU_ARCH")
    if override:
        arch = normalize_arch(override) or override
    family = next((target for target in KNOWN.values() if target.arch == arch), None)
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
    )
