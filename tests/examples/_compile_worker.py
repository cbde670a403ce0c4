"""Compiles the kernels of the GEMM examples for one architecture and prints what came of it as JSON; needs no GPU.

    IRIS_RUNTIME=gpu python _compile_worker.py gfx942 fp16 bf16

A process of its own, because kernels are either compiled or interpreted, which is settled when iris is imported.
"""

import importlib
import json
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import gemm_common  # noqa: E402

from iris import _target  # noqa: E402
from iris.runtime.compile import compile_kernel  # noqa: E402

TYPES = {"fp16": ("fp16", "fp16", "fp32"), "bf16": ("bf16", "bf16", "fp32"), "fp32": ("fp32", "fp32", "fp32"),
         "int8": ("i8", "i32", "i32")}  # fmt: skip
FLAGS = ("made", "ready", "consumed", "counts", "roles", "queue", "locks", "flags", "counters", "members")
NUMBERS = ("epoch", "multipliers", "producers", "first", "column")
RANK, WORLD = 1, 8


def arguments(datatype: str, blocks: list[int], group_m: int, trace: bool) -> dict[str, object]:
    operand, out, sums = (f"*{name}" for name in TYPES[datatype])
    given: dict[str, object] = dict.fromkeys(FLAGS, "*i32") | dict.fromkeys(NUMBERS, "i32")
    given |= dict.fromkeys(("M", "N", "K", "stride_am", "stride_bk", "stride_cm"), "i32:16")
    given |= {"a": operand, "b": operand, "c": out, "sums": sums, "products": sums, "slots": sums, "context": "*i64"}
    given |= {"stride_ak": 1, "stride_bn": 1, "rank": RANK, "world": WORLD, "GROUP_M": group_m, "TRACE": trace}
    return given | dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), blocks, strict=True))


def main() -> None:
    arch, *datatypes = sys.argv[1:]
    target = _target.by_arch(arch)
    defaults = gemm_common.launch_defaults(target)
    records = []
    for path in sorted(EXAMPLES.glob("1[3-7]_*.py")):
        kernel = importlib.import_module(path.stem).Example.kernel
        for datatype in datatypes:
            blocks = defaults["blocks"][str(gemm_common.DATATYPES[datatype][0].itemsize)]
            trace = datatype == datatypes[0]
            given = arguments(datatype, blocks, defaults["gsize_m"], trace)
            compiled = compile_kernel(kernel, target, given, **defaults["options"])
            records.append({"example": path.stem, "datatype": datatype, "shared": compiled.metadata.shared})
    print(json.dumps({"limit": target.shared_memory_bytes, "records": records}))


if __name__ == "__main__":
    main()
