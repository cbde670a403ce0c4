"""What a machine offers, asked one question at a time. Nothing here prints; ``doctor.py`` does.

Every probe returns findings and never fails because of the machine: a broken installation is what it is there to tell.
"""

from __future__ import annotations

import importlib
import mmap
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from iris import _env
from iris.errors import IrisError
from iris.runtime import gpus as visible_gpus
from iris.runtime import mps

DISTRIBUTION = "iris-kernels"
_PACKAGES = ("torch", "triton", "numpy", "greenlet")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what it is.
        value: what was found, in words.
        state: ``ok``; ``note`` for what works with a limit; ``problem`` for what keeps ranks from running.
        remedy: how to mend it; empty when ``state`` is ``ok``.
    """

    name: str
    value: str
    state: str = "ok"
    remedy: str = ""


def software() -> list[Finding]:
    """Python and the packages that Iris stands on, and whether they lie in the tested ranges."""
    ranges = tested_ranges()
    python = platform.python_version()
    findings = [_version_finding("python", python, ranges.get("python", ""))]
    for name in _PACKAGES:
        try:
            importlib.import_module(name)
            findings.append(_version_finding(name, metadata.version(name), ranges.get(name, "")))
        except (ImportError, OSError) as error:
            # OSError: a package is there and one of its shared libraries is not.
            spec = ranges.get(name, "")
            remedy = f"install it: python -m pip install '{name}{spec}'"
            findings.append(Finding(name, f"cannot be imported: {error}", "problem", remedy))
    if not ranges:
        remedy = "install Iris itself (python -m pip install -e .), so that the tested ranges are known"
        findings.append(Finding(DISTRIBUTION, "runs from a source tree that is not installed", "note", remedy))
    return findings


def tested_ranges() -> dict[str, str]:
    """Version range of Python and of each package, from the metadata of the distribution; empty if not installed."""
    try:
        about = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return {}
    ranges = {"python": about["Requires-Python"] or ""}
    for requirement in about.get_all("Requires-Dist") or []:
        found = re.match(r"([A-Za-z0-9_.-]+)\s*\(?([^;)]*)\)?\s*(;.*)?$", requirement)
        if found and not found.group(3):
            ranges[found.group(1)] = found.group(2).strip()
    return ranges


def within(version: str, spec: str) -> bool:
    """Whether a version satisfies a range such as ``>=2.11,<2.14``. Local and pre-release parts do not count."""
    comparisons = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "==": lambda a, b: a == b,
        ">": lambda a, b: a > b,
        "<": lambda a, b: a < b,
    }
    have = _release(version)
    for part in filter(None, (part.strip() for part in spec.split(","))):
        found = re.match(r"(>=|<=|==|>|<)\s*(.+)", part)
        if not found:
            raise ValueError(f"range {part!r} is not understood; possible: >=, <=, ==, > or < and a version")
        wanted = _release(found.group(2))
        width = max(len(have), len(wanted))
        pad = [numbers + (0,) * (width - len(numbers)) for numbers in (have, wanted)]
        if not comparisons[found.group(1)](*pad):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found.group(0).split(".")) if found else ()


def _version_finding(name: str, version: str, spec: str) -> Finding:
    if within(version, spec):
        return Finding(name, f"{version}   tested: {_ordered(spec)}" if spec else version)
    remedy = f"{name} {version} is outside of the tested range {_ordered(spec)}: it may work, nobody has tried"
    return Finding(name, f"{version}   tested: {_ordered(spec)}", "note", remedy)


def _ordered(spec: str) -> str:
    return ", ".join(sorted((part.strip() for part in spec.split(",")), key=lambda part: part.startswith("<")))


def machine() -> list[Finding]:
    """Cores, memory, and whether processes can share memory files."""
    findings = [
        Finding("system", f"{platform.system()} {platform.release()} on {platform.machine()}"),
        Finding("cpu cores", str(len(os.sched_getaffinity(0)))),
        Finding("memory", f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"),
    ]
    trouble = memory_file_trouble()
    if trouble:
        remedy = (
            "the cpu runtime shares its heap through memfd_create and /proc/<pid>/fd: use Linux with /proc mounted "
            "without hidepid, and run all ranks as one user in one container"
        )
        findings.append(Finding("shared memory files", trouble, "problem", remedy))
    else:
        findings.append(Finding("shared memory files", "memfd and /proc/<pid>/fd work between processes"))
    return findings


def memory_file_trouble() -> str:
    """What keeps a second process from writing to a memory file of this one; empty when nothing does."""
    child = (
        "import mmap, os, sys\n"
        "file = os.open(sys.argv[1], os.O_RDWR)\n"
        "mmap.mmap(file, mmap.PAGESIZE, mmap.MAP_SHARED)[0] = 42\n"
    )
    try:
        own = os.memfd_create("iris-doctor", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        return f"memfd_create: {error}"
    try:
        os.ftruncate(own, mmap.PAGESIZE)
        result = subprocess.run(
            [sys.executable, "-I", "-c", child, f"/proc/{os.getpid()}/fd/{own}"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if result.returncode:
            return (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        with mmap.mmap(own, mmap.PAGESIZE, mmap.MAP_SHARED) as memory:
            return "" if memory[0] == 42 else "a second process wrote, and nothing arrived"
    finally:
        os.close(own)


def gpus() -> list[Finding]:
    """The visible GPUs, how they are linked, and what several ranks on one would need."""
    if not visible_gpus.device_files():
        return [Finding("gpus", "none: no driver's device file is there")]
    try:
        import torch

        from iris import _target

        count = torch.cuda.device_count()
        if not count:
            remedy = "a GPU driver is there: install a torch that is built for it, and check CUDA_VISIBLE_DEVICES"
            return [Finding("gpus", f"torch {torch.__version__} sees none", "note", remedy)]
        findings = []
        for index in range(count):
            target = _target.detect(index)
            memory = torch.cuda.get_device_properties(index).total_memory / 2**30
            units = f"{target.compute_units} compute units"
            findings.append(Finding(f"gpu {index}", f"{target.name}, {target.arch}, {units}, {memory:.0f} GiB"))
        findings += _peers(count)
        nvidia = torch.version.hip is None
    except (ImportError, OSError, RuntimeError) as error:
        remedy = "torch cannot use the GPU; check that the driver fits this torch (nvidia-smi, rocm-smi)"
        return [Finding("gpus", str(error).splitlines()[0], "problem", remedy)]
    if nvidia:
        control = mps.binary()
        remedy = "without it, ranks that share a GPU take turns; it comes with the NVIDIA driver: put it on PATH"
        findings.append(Finding("MPS", control) if control else Finding("MPS", "not on PATH", "note", remedy))
    return [*findings, _symmetric_memory()]


def _peers(count: int) -> list[Finding]:
    import torch

    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if not pairs:
        return []
    if not without:
        return [Finding("peer access", "all pairs")]
    remedy = "GPUs without peer access cannot share a symmetric heap: choose others with CUDA_VISIBLE_DEVICES"
    return [Finding("peer access", f"missing: {', '.join(without)}", "note", remedy)]


def _symmetric_memory() -> Finding:
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        remedy = "the gpu runtime stands on it: install a released torch with distributed support"
        return Finding("torch symmetric memory", f"cannot be imported: {error}", "problem", remedy)
    return Finding("torch symmetric memory", "available")


def links() -> str:
    """The table of links as the vendor's tool prints it; empty without GPUs or without the tool."""
    if not visible_gpus.device_files():
        return ""
    for command in (["nvidia-smi", "topo", "-m"], ["rocm-smi", "--showtopo"]):
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            continue
        if result.returncode == 0:
            # nvidia-smi underlines its header with terminal codes, and explains each abbreviation there is.
            return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).partition("\nLegend:")[0].rstrip()
    return ""


def runtime() -> Finding:
    """The runtime that ranks started now would use, and why."""
    # Settled already if the whole package was imported, as `python -m iris` does; asking anew would see traces of that.
    known = "iris.runtime.settle" in sys.modules
    try:
        settle = importlib.import_module("iris.runtime.settle")
        chosen, reason = settle.settled() if known else settle.choose()
    except (ImportError, OSError, IrisError) as error:
        return Finding("runtime", f"cannot be chosen: {error}", "problem", "mend what is listed here first")
    if chosen == "gpu" and not visible_gpus.visible().count:
        remedy = "unset IRIS_RUNTIME, or make a GPU visible to torch"
        return Finding("runtime", f"gpu, because {reason}; but torch sees no GPU", "problem", remedy)
    return Finding("runtime", f"{chosen}, because {reason}")


def tables() -> list[Finding]:
    """What choices of configurations go by here: the package's tables and rules, the cost model, the user's records."""
    try:
        from iris import _machine
        from iris.tuning import heuristics, store
        from iris.tuning import tables as shipped

        product, how = _product()
        findings = [Finding("this machine", f"{product or 'of no product that tables know'}, {how}")]
        applying = [file for file in shipped.files() if file.machine == product]
        for file in applying:
            entries = f"{file.entries} {'entry' if file.entries == 1 else 'entries'}"
            worlds = f"{', '.join(map(str, file.worlds))} ranks, {', '.join(file.links)}"
            findings.append(Finding(file.operation, f"table of {file.machine}: {entries}, {worlds}; {file.source}"))
        if not applying:
            others = ", ".join(dict.fromkeys(file.machine for file in shipped.files()))
            findings.append(Finding("tables", f"none for this machine; there are those of {others}"))
        rules = [operation for operation, machine in heuristics.files() if machine == product]
        findings.append(Finding("rules", ", ".join(rules) or "none for this machine"))
        stand_in = "stand in where nothing was measured" if product in _machine.names() else "not for this machine"
        findings.append(Finding("predictions", stand_in))
        saved, here = store.saved_records(), len(store.read_all())
        records = f"{here} record{'s' * (here != 1)}"
        records += f", and {len(saved) - here} of other versions" if len(saved) > here else ""
        findings.append(Finding("user cache", f"{records} in {store.folder() or 'no folder'}"))
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        # IrisErrors among them: a device or a variable that cannot be understood.
        return [Finding("tables", f"cannot be read: {error}", "note", "mend what is listed here first")]
    trouble = store.unwritable()
    if trouble:
        remedy = "make it writable, or name another folder with IRIS_CACHE_DIR; until then what is tuned is forgotten"
        findings.append(Finding("user cache folder", f"cannot be written: {trouble}", "note", remedy))
    return findings


def _product() -> tuple[str, str]:
    """The product that tables go by here, and why it is that."""
    from iris import _target

    if visible_gpus.visible().count:
        target = _target.detect(0)
        return target.product, f"from the device {target.name}, {target.arch}"
    named = _target.override()
    if named is not None:
        return named.product, "from IRIS_GPU_ARCH, for there is no GPU"
    return "", "for there is no GPU"


def variables() -> list[Finding]:
    """Every variable of Iris with its value here."""
    findings = []
    for name in _env.VARIABLES:
        try:
            value = _env.get(name)
        except IrisError as error:
            findings.append(Finding(name, repr(os.environ[name]), "problem", str(error)))
            continue
        shown = "unset" if value is None else str(value)
        findings.append(Finding(name, shown if os.environ.get(name) else f"{shown} (default)"))
    return findings


def place() -> str:
    """Where the package that answers lives."""
    return str(Path(__file__).parents[1])
