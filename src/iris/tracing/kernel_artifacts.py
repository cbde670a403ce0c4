"""What kernels were compiled to, kept in a folder: one place for each kernel, rank, configuration and text.

    <folder>/<algorithm>/<kernel>/rank_<r>/<configuration>/<hash>/{metadata.json, kernel.ttir, kernel.ttgir, ...}

``IRIS_KERNEL_ARTIFACTS_DIR`` is the folder; without it :func:`iris_launch` only launches. Interpreted kernels leave
nothing. ``summary.json``, written when a process ends, lists everything in the folder.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from iris import _env

STAGES = ("ttir", "ttgir", "llir", "ptx", "amdgcn")
_TEXTS = ("amdgcn", "ptx")
_BINARIES = ("hsaco", "cubin")
_DTYPES = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4m3fn",
    "float8_e4m3fnuz": "fp8e4m3",
    "float8_e5m2": "fp8e5m2",
    "float8_e5m2fnuz": "fp8e5m2fnuz",
}
_BLOCKS = {
    "BM": ("BLOCK_SIZE_M", "BLOCK_M", "BM"),
    "BN": ("BLOCK_SIZE_N", "BLOCK_N", "BN"),
    "BK": ("BLOCK_SIZE_K", "BLOCK_K", "BK"),
}
_folders: set[Path] = set()


def iris_launch(
    kernel_fn: Any, grid: Any, *args: Any, algorithm: str, rank: int, dtype: Any = None, **kwargs: Any
) -> Any:
    """Launch ``kernel_fn[grid](*args, **kwargs)`` and keep what it was compiled to when a folder is set.

    Args:
        kernel_fn: a ``@triton.jit`` function.
        grid: as Triton takes it.
        args, kwargs: the kernel's arguments and launch options.
        algorithm: first part of the path.
        rank: the calling rank.
        dtype: the dtype to name the configuration by; None leaves it out.

    Returns:
        What the launch returned: Triton's compiled kernel, None when it was interpreted.
    """
    compiled = kernel_fn[grid](*args, **kwargs)
    folder = _env.get("IRIS_KERNEL_ARTIFACTS_DIR")
    if folder and compiled is not None:
        name = getattr(kernel_fn, "__name__", type(kernel_fn).__name__)
        capture(compiled, Path(folder), algorithm=algorithm, kernel=name, rank=rank, dtype=dtype, constants=kwargs)
    return compiled


def capture(
    compiled: Any,
    folder: Path,
    *,
    algorithm: str,
    kernel: str,
    rank: int,
    dtype: Any = None,
    constants: Mapping[str, Any] | None = None,
) -> Path:
    """Keep a compiled kernel under ``folder``; one that is there already is left alone. Returns its place."""
    settings = dict(constants or {})
    warps = getattr(getattr(compiled, "metadata", None), "num_warps", None) or settings.get("num_warps")
    configuration = configuration_name(settings, dtype, warps)
    digest = kernel_hash(compiled)
    place = folder / _safe(algorithm) / _safe(kernel) / f"rank_{rank}" / configuration / digest
    if not _folders:
        atexit.register(_write_summaries)
    _folders.add(folder)
    if (place / "metadata.json").exists():
        return place
    place.mkdir(parents=True, exist_ok=True)
    stages = getattr(compiled, "asm", {})
    kept = []
    for stage in STAGES:
        content = stages.get(stage)
        if content is not None:
            path = place / f"kernel.{stage}"
            path.write_bytes(content if isinstance(content, bytes) else str(content).encode())
            kept.append(stage)
    facts = {
        "algorithm": algorithm,
        "kernel": kernel,
        "rank": rank,
        "configuration": configuration,
        "hash": digest,
        "dtype": dtype_name(dtype),
        "num_warps": warps,
        "stages": kept,
        "constants": {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str)},
    }
    # Last, since it says that the place is complete.
    _replace(place / "metadata.json", facts)
    return place


def kernel_hash(compiled: Any) -> str:
    """12 hexadecimal digits of what was compiled: of the assembly, else of the binary, else of Triton's own hash."""
    stages = getattr(compiled, "asm", None) or {}
    for stage in (*_TEXTS, *_BINARIES):
        content = stages.get(stage)
        if content:
            return hashlib.sha256(content if isinstance(content, bytes) else str(content).encode()).hexdigest()[:12]
    own = getattr(compiled, "hash", None)
    return str(own)[:12] if own else "unknown"


def dtype_name(dtype: Any) -> str | None:
    """``fp16``, ``bf16``, ``i8``, ``fp8e5m2`` and so on, for a dtype of torch or its name; None for None."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name) or re.sub(r"^(u|i)(?:int|nt)(\d+)$", r"\1\2", name)


def configuration_name(settings: Mapping[str, Any], dtype: Any = None, num_warps: int | None = None) -> str:
    """``BM128_BN64_BK32_fp16_w8``, of the parts that are known; ``default`` of none."""
    given = {name.upper(): value for name, value in settings.items()}
    parts = []
    for short, names in _BLOCKS.items():
        value = next((given[name] for name in names if name in given), None)
        if value is not None:
            parts.append(f"{short}{value}")
    parts += [_safe(name)] if (name := dtype_name(dtype)) else []
    parts += [f"w{num_warps}"] if num_warps else []
    return "_".join(parts) or "default"


def write_summary(folder: Path) -> Path:
    """Write ``summary.json``, the metadata of all kernels below ``folder``, and return its path."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*/*/rank_*/*/*/metadata.json"))]
    return _replace(folder / "summary.json", {"num_kernels": len(found), "kernels": found})


def _write_summaries() -> None:
    for folder in _folders:
        if folder.is_dir():
            write_summary(folder)


def _replace(path: Path, content: Any) -> Path:
    """Write JSON so that a reader, or another rank that writes the same, never sees a part of it."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(json.dumps(content, indent=2))
    new.replace(path)
    return path


def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).lstrip(".") or "_"
