"""Compiles the kernels that given configurations launch, and prints what came of them as JSON.

    IRIS_RUNTIME=gpu python _shipped_worker.py mi300x < cases.json

The input is a list of cases: operation, algorithm, fields of the configuration, sizes, ranks, gather dimension,
transpose and dtype. The call is prepared as it would be on the machine, so what is compiled is what runs. Launches that
differ in numbers alone are one kernel, which is compiled once.
"""

import json
import sys
from types import SimpleNamespace

import torch
from _ccl_kernels import noting
from _compile_worker import stack_bytes
from _reduce_kernels import _Machine as ReduceMachine
from _staged_kernels import _Machine, specialised, tensor, without_copies

from iris import _target
from iris.ops import _hbm_buffer, _matmul_all_gather, _matmul_reduce, all_gather_matmul
from iris.ops._all_gather_matmul_call import Call
from iris.ops._matmul_reduce_call import ALL_REDUCE, REDUCE_SCATTER, Asked, checked
from iris.ops.arguments import Problem
from iris.ops.choice import choose
from iris.ops.config import FusedConfig, HbmBufferConfig
from iris.ops.staging import Staging
from iris.runtime.compile import compile_kernel
from iris.runtime.groups import Group

_SCALES = (None, None)


def gathering(target, case, dtype, config):
    """The launch of an all-gather + matmul."""
    M, N, K = case["sizes"]
    world, dim = case["world"], case["gather_dim"]
    machine, members = _Machine(target, world), Group(tuple(range(world)), 0)
    rows, depth = (M, K // world) if dim == 1 else (M // world, K)
    a, b = tensor(rows, depth, case["transpose"][0], dtype), tensor(K, N, case["transpose"][1], dtype)
    out = tensor(M, N, "N", dtype)
    problem = Problem(M, N, K, dtype, dtype, dtype, world, dim, None, case["transpose"], "none", False)
    call = Call(machine, problem, choose(machine, problem, case["algorithm"], config, ""), out, a, b, None, _SCALES)
    words = torch.empty(64, dtype=torch.int32)
    workspace = SimpleNamespace(staging=Staging(machine), locks=words, counters=words)
    issue = all_gather_matmul._run_pull if case["algorithm"] == "pull" else _hbm_buffer.run_hbm_buffer
    with without_copies():
        issue(machine, call, workspace, out, a, b, None, _SCALES, members)


def reducing(target, case, dtype, config):
    """The launch of a product whose parts are added."""
    M, N, K = case["sizes"]
    world = case["world"]
    machine, members = ReduceMachine(target, world, False), Group(tuple(range(world)), 0)
    a, b = tensor(M, K, case["transpose"][0], dtype), tensor(K, N, case["transpose"][1], dtype)
    out = tensor(-(-M // world) if case["operation"] == REDUCE_SCATTER else M, N, "N", dtype)
    asked = Asked(case["operation"], case["algorithm"], config, "none", _SCALES, None)
    call = checked(machine, members, asked, out, a, b, None)
    words = torch.empty(64, dtype=torch.int32)
    memory = SimpleNamespace(arrived=words, queue=words, locks=words, counters=words)
    memory.buffer = torch.empty(call.schedule.nbytes, dtype=torch.uint8, device="meta")
    memory.sizes = (call.schedule.nbytes, call.schedule.flags)
    memory.get = lambda nbytes, flags: memory
    memory.sums = lambda count, flags, dtype: (torch.empty(count, dtype=dtype, device="meta"), words)
    _matmul_reduce._issue(machine, call, SimpleNamespace(partials=memory), out, a, b, None, asked, members)


def sending(target, case, dtype, config):
    """The launch of a product that goes to all ranks."""
    M, N, K = case["sizes"]
    world = case["world"]
    machine, members = ReduceMachine(target, world, False), Group(tuple(range(world)), 0)
    rows = M // world
    a, b = tensor(rows, K, case["transpose"][0], dtype), tensor(K, N, case["transpose"][1], dtype)
    out = tensor(rows * world, N, "N", dtype)
    asked = Asked(case["operation"], case["algorithm"], config, "none", _SCALES, None)
    call = _matmul_all_gather.checked(machine, members, asked, out, a, b, None)
    words = torch.empty(64, dtype=torch.int32)
    workspace = SimpleNamespace(queue=words, locks=words, counters=words)
    _matmul_all_gather._run_kernel(machine, call, workspace, out, a, b, None, _SCALES, members)


LAUNCHES = {
    "all_gather_matmul": gathering,
    ALL_REDUCE: reducing,
    REDUCE_SCATTER: reducing,
    _matmul_all_gather.OPERATION: sending,
}


def launch_of(target, case):
    """Kernel, arguments and options of a case."""
    staged = case["algorithm"] in ("hbm_buffer", "copy_engine")
    config = (HbmBufferConfig if staged else FusedConfig)(**case["params"])
    config.validate(case["world"])
    with noting() as noted:
        LAUNCHES[case["operation"]](target, case, getattr(torch, case["dtype"]), config)
    kernel, args, meta = noted[-1]
    return kernel, *specialised(kernel, args, meta)


def main(product):
    target = _target.KNOWN[product]
    compiled, answers = {}, []
    for case in json.load(sys.stdin):
        kernel, arguments, options = launch_of(target, case)
        key = json.dumps([kernel.__name__, arguments, options], sort_keys=True, default=str)
        if key not in compiled:
            try:
                made = compile_kernel(kernel, target, arguments, **options)
                compiled[key] = {"error": "", "shared": made.metadata.shared, "stack": stack_bytes(target, made)}
            except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the finding
                compiled[key] = {"error": f"{type(error).__name__}: {error}"[-2000:]}
        answers.append(compiled[key])
    print(json.dumps({"answers": answers, "kernels": len(compiled)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
