"""A rank of a pool: takes test bodies from the parent, runs them, sends back what came of them.

Started as ``python -m iris.testing._worker FILE``, where FILE holds a pickled :class:`iris.testing._processes.Start`.
Without GPUs this process imports everything once and then forks the ranks, which is why a pool of eight starts in
little more than the time of one import. A GPU's driver does not survive a fork: on GPUs each rank starts by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from iris.testing import _messages
from iris.testing._processes import Reply, Request, Start, output_file, stack_file, status_file

_PR_SET_PDEATHSIG = 1
_contexts: dict[int, Any] = {}


def main(path: str) -> None:
    """Be the rank that the file at ``path`` describes, or fork one process for each of its ranks."""
    with open(path, "rb") as file:
        start: Start = _messages.loads(file.read())
    _end_with(start.parent)
    sys.path.extend(entry for entry in start.path if entry not in sys.path)
    for name in start.preload:
        importlib.import_module(name)
    if start.gpus:
        ((rank, descriptor),) = start.ranks.items()
        _rank(start, rank, descriptor)
        return
    # What is alive now is never collected, so the ranks go on sharing these pages.
    gc.collect()
    gc.freeze()
    launcher = os.getpid()
    children: dict[int, int] = {}
    for rank, descriptor in start.ranks.items():
        child = os.fork()
        if child == 0:
            _end_with(launcher)
            for other in start.ranks.values():
                if other != descriptor:
                    os.close(other)
            _rank(start, rank, descriptor)
            # An interpreter that ends visits every object, and so would copy every page it shares with the launcher.
            sys.stdout.flush()
            os._exit(0)
        children[child] = rank
    for descriptor in start.ranks.values():
        os.close(descriptor)
    while children:
        child, status = os.wait()
        with open(status_file(start.folder, children.pop(child)), "w") as file:
            file.write(str(os.waitstatus_to_exitcode(status)))


def _end_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # It ended before the kernel was told.
        os._exit(1)


def _rank(start: Start, rank: int, descriptor: int) -> None:
    log = os.open(output_file(start.folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    for stream in (sys.stdout, sys.stderr):
        # What a body printed must be in the file when its process is killed.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stacks = open(stack_file(start.folder, rank), "w")  # noqa: SIM115  faulthandler needs it as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), ROLE_RANK=str(rank))
    connection = Connection(descriptor)
    connection.send_bytes(_messages.dumps(os.getpid()))
    try:
        _initialize(start, rank)
        connection.send_bytes(_messages.dumps("ready"))
        _serve(connection, rank, start.world_size)
    finally:
        _contexts.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


def _initialize(start: Start, rank: int) -> None:
    backend = "gloo"
    if start.gpus:
        torch.cuda.set_device(rank % start.gpus)
        # NCCL refuses two ranks on one GPU.
        if start.gpus >= start.world_size:
            backend = "cpu:gloo,cuda:nccl"
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend)


def _serve(connection: Connection, rank: int, world_size: int) -> None:
    while True:
        try:
            request: Request = _messages.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):  # The parent closed the pool.
            return
        environment = dict(os.environ)
        torch.manual_seed(rank)
        reply = _run(request, rank, world_size)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        sys.stdout.flush()
        connection.send_bytes(_messages.dumps(reply))


def _run(request: Request, rank: int, world_size: int) -> Reply:
    try:
        body = _messages.resolve(request.body)
        args, kwargs = _messages.loads(request.arguments)
        if request.heap_bytes is None:
            value = body(rank, world_size, *args, **kwargs)
        else:
            value = body(_context(request.heap_bytes), *args, **kwargs)
        payload = _messages.dumps(value)
    # Whatever a body raises is the parent's to judge, pytest's own outcomes included.
    except BaseException as error:  # noqa: BLE001
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
        payload, name = _dump_error(error), type(error).__qualname__
        return Reply(rank, False, payload, name, text, time.monotonic(), dist.is_initialized())
    return Reply(rank, True, payload, "", "", time.monotonic(), dist.is_initialized())


def _context(heap_bytes: int) -> Any:
    import iris

    if heap_bytes not in _contexts:
        _contexts[heap_bytes] = iris.iris(heap_bytes)
    return _contexts[heap_bytes]


def _dump_error(error: BaseException) -> bytes | None:
    """The exception's pickle, or None where it does not survive one: classes may hold anything and raise anything."""
    with contextlib.suppress(Exception):
        payload = _messages.dumps(error)
        _messages.loads(payload)
        return payload
    return None


if __name__ == "__main__":
    main(sys.argv[1])
