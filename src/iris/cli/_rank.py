"""What runs in the process of each rank of ``iris run``, around the program that was asked for.

Started by path, as ``python _rank.py REPORT_FD LAUNCHER_PID KIND TARGET [ARGUMENT...]``, and not as a module: importing
the package here would settle its runtime before the program had a chance to set an environment variable. For the same
reason this file imports nothing but the standard library.

KIND is ``script``, ``module`` or ``program``. REPORT_FD is the writing end of a pipe to the launcher. A line on it that
starts with ``{`` is a JSON record: ``{"kind": "ready"}`` once stacks can be asked for with SIGUSR2, and one record when
the program ends with an error. All other lines come from :mod:`faulthandler`.
"""

import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from types import TracebackType

PR_SET_PDEATHSIG = 1
STACK_SIGNAL = signal.SIGUSR2


def die_with_launcher(launcher_pid: int) -> None:
    """Have the kernel end this process when the launcher is gone, however it went."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The launcher may have died before the line above took effect.
    if os.getppid() != launcher_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without its first frames, which belong to this file and to runpy."""
    foreign = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in foreign:
        trace = trace.tb_next
    return trace


def record(report_fd: int, **fields: object) -> None:
    """Send one record to the launcher; without a launcher there is nobody to tell."""
    try:
        os.write(report_fd, (json.dumps(fields) + "\n").encode())
    except BrokenPipeError:
        os._exit(1)


def run(kind: str, target: str, arguments: list[str]) -> None:
    """Run the program as ``python TARGET`` or ``python -m TARGET`` would, or become it when it is no Python program."""
    if kind == "program":
        os.execvp(target, [target, *arguments])
    sys.argv = [target, *arguments]
    safe_path = getattr(sys.flags, "safe_path", False)
    here = os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(target))
    # Entry 0 is the folder of this file, put there by Python, unless it was told not to.
    sys.path[0:1] = [here] if not safe_path else sys.path[0:1]
    if kind == "module":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def main() -> None:
    """Run the program; on an error write it down for the launcher, which shows the first one at the end."""
    report_fd, launcher_pid, kind, target, *arguments = sys.argv[1:]
    report = int(report_fd)
    os.set_inheritable(report, False)
    die_with_launcher(int(launcher_pid))
    if kind != "program":
        faulthandler.enable(file=report, all_threads=True)
        faulthandler.register(STACK_SIGNAL, file=report, all_threads=True)
        record(report, kind="ready")
        # Whole lines, PYTHONUNBUFFERED or not: otherwise ranks that share a pipe mix in the middle of a line.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    try:
        run(kind, target, arguments)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            lines = traceback.format_tb(own_frames(stop.__traceback__))
            where = lines[-1].strip() if lines else ""
            code = stop.code if isinstance(stop.code, int) else 1
            record(report, kind="exit", time=time.time(), text=where, code=code, summary=f"sys.exit({stop.code!r})")
        raise
    except BaseException as error:  # noqa: BLE001 - whatever ended the program is what has to be reported
        trace = own_frames(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, trace))
        summary = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]
        code = 127 if kind == "program" else 1
        record(report, kind="error", time=time.time(), text=text, code=code, summary=summary)
        # The launcher prints the traceback. A hook of the program's own may do more than print; torch's only prints.
        if sys.excepthook is not sys.__excepthook__ and not sys.excepthook.__module__.startswith("torch."):
            sys.excepthook(type(error), error, trace)
        sys.exit(code)


if __name__ == "__main__":
    main()
