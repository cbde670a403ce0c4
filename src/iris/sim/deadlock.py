"""Says why nothing can move: who waits where, for which flag, with which value, and who could have written it."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import torch

from iris.errors import DeadlockError
from iris.runtime.memory_map import MemoryRegion
from iris.runtime.reports import DeadlockReport, Waiter
from iris.runtime.scheduler import Program
from iris.runtime.source import is_library, source_line
from iris.runtime.tensors import tensor_from_ptr
from iris.runtime.world import World
from iris.sim.watcher import Watcher

_MOST_VALUES = 8
_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def deadlock(world: World, watcher: Watcher) -> DeadlockError:
    """The error for a world in which nothing can move."""
    stuck = [program for launch in world.active for program in launch.live]
    waiters = tuple(_waiter(program, watcher) for program in stuck)
    hosts = tuple(host.describe() for host in world.hosts)
    report = DeadlockReport(waiters, hosts, tuple(_not_started(world)))
    return DeadlockError(str(report), report)


def _not_started(world: World) -> list[str]:
    texts = []
    for launch in world.active:
        waiting = world.waiting_programs(launch)
        if waiting:
            total = int(np.prod(launch.grid))
            texts.append(
                f"rank {launch.state.rank}, kernel {launch.name}: {waiting} of {total} programs have not started, "
                f"because {world.residency} run at a time (resident_programs) and those wait. A program may wait "
                "only for what runs already or is done: give roles out by an atomic ticket, or "
                "launch no more programs than fit"
            )
    return texts


def _waiter(program: Program, watcher: Watcher) -> Waiter:
    frame, wanted = _frame(program)
    file, line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("unknown", 0)
    source = source_line(file, line)
    region, address = _flag(program, watcher)
    if region is None:
        flag, owner, seen, writers = "nothing in memory", program.state.rank, None, "it polls no memory"
    else:
        flag, owner = region.element(address), region.rank
        seen, writers = _value(region, address), _writers(region, address, watcher)
    values = _values(frame, source) if frame is not None else {}
    return Waiter(
        program.state.rank,
        program.launch.name,
        program.index,
        file,
        line,
        source,
        values,
        flag,
        owner,
        wanted,
        seen,
        writers,
    )


def _frame(program: Program) -> tuple[Any, int | None]:
    """The innermost frame that is not library code, and what ``iris.signal.wait`` waits for if it is there."""
    frame, wanted = program.coroutine.gr_frame, None
    while frame is not None and is_library(frame.f_code):
        if frame.f_code.co_name == "wait" and frame.f_code.co_filename.endswith("/device/signal.py"):
            wanted = _scalar(frame.f_locals.get("value"))
        frame = frame.f_back
    return frame, wanted


def _flag(program: Program, watcher: Watcher) -> tuple[MemoryRegion | None, int]:
    """What the program polls, leaving out the library's own words unless there is nothing else."""
    polled = program.state.polled | {first for first, _ in program.state.tiles}
    found = [(watcher.memory.find(a), a) for a in sorted(polled)]
    known = [(region, address) for region, address in found if region is not None]
    known.sort(key=lambda item: item[0].internal)
    return known[0] if known else (None, 0)


def _value(region: MemoryRegion, address: int) -> Any:
    if region.itemsize not in _DTYPES:
        return "?"
    start = address - (address - region.start) % region.itemsize
    raw = tensor_from_ptr(start, region.itemsize, torch.uint8, torch.device("cpu"))
    return int(raw.view(_DTYPES[region.itemsize])[0])


def _writers(region: MemoryRegion, address: int, watcher: Watcher) -> str:
    """Who wrote the flag; when nobody has, who wrote other elements of the tensor on any rank."""
    if not watcher.tracking:
        return "who wrote it is not known without the check for races"
    writers = [a for a in watcher.checker.accesses(region, address) if a.kernel]
    if writers:
        return "last written by " + "; ".join(f"{a.who()} at {a.file}:{a.line} ({a.what})" for a in writers[-3:])
    # The flag's own neighbours say most; those on other ranks are for tensors that only peers wait for.
    relatives = [region, *(watcher.memory.find(a) for a in region.everywhere if a != region.start)]
    found: dict[tuple[str, int], str] = {}
    for relative in relatives:
        if relative is None or relative.writes is None or (found and relative is not region):
            continue
        numbers = set(np.unique(relative.writes).tolist())
        if relative.atomics is not None:
            numbers |= {int(n) for s in np.unique(relative.atomics) for n in watcher.clocks.sets[s]}
        for number in sorted(n for n in numbers if n):
            access = watcher.checker.access(number, relative, relative.start)
            if access.kernel:
                found[access.file, access.line] = f"{access.who()} at {access.file}:{access.line} ({access.what})"
    if found:
        return "no kernel has written it; other elements of the tensor were written by " + "; ".join(
            list(found.values())[:4]
        )
    return "no kernel has written this tensor on any rank"


def _values(frame: Any, source: str) -> dict[str, str]:
    """Values of the scalars named in a line of source."""
    names = []
    for text in (source, source + " pass", source.rstrip(":")):
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        break
    values = {}
    for name in dict.fromkeys(names):
        value = _scalar(frame.f_locals.get(name))
        if value is not None:
            values[name] = str(value)
    return dict(list(values.items())[:_MOST_VALUES])


def _scalar(value: Any) -> int | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value
    value = getattr(value, "value", value)  # tl.constexpr
    if isinstance(value, int):
        return value
    handle = getattr(value, "handle", None)
    data = getattr(handle, "data", None)
    is_pointer = hasattr(getattr(handle, "dtype", None), "element_ty")
    if isinstance(data, np.ndarray) and data.size == 1 and data.dtype.kind in "iu" and not is_pointer:
        return int(data.item())
    return None
