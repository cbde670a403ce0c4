"""One command that measures everything: links, operations against their peers, and the tests, on several GPUs.

    python benchmarks/run_all.py --ranks 2 --out results
    python benchmarks/run_all.py --ranks 2 --out results --list
    python benchmarks/run_all.py --ranks 2 --out results --only 'links,all_reduce*'
    python benchmarks/run_all.py --ranks 2 --out small --small      # tiny problems, also without GPUs

A call takes at most ``--budget`` seconds: a step whose estimate no longer fits is left for the next call, which goes on
after what is finished. A step that fails is recorded with its last lines, and the rest goes on. ``summary.md`` in the
folder of results says what was measured, on what, and which goals were reached; it is written anew after every step.

The exit code is 0, 1 when a step failed in this call or an earlier one, 2 for a wrong option.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fnmatch
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import _run_all_report as report
from _run_all_goals import counted, has_failed
from _run_all_steps import Step, table
from _run_all_tests import outcomes

ROOT = Path(__file__).resolve().parents[1]
STATE = "state.json"
# A program that uses NVLink's multicast can leave the GPUs of a host out of service when it is ended.
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
RESERVE = 20.0  # seconds of the budget that are kept for ending a step and drawing figures
GRACE = 12.0  # between asking a step to end and ending it
MOST_ATTEMPTS = 2  # of a step that does not end by itself
MOST_CRASHES = 4  # of pytest, after which the tests that have not run are given up
MOST_FRUITLESS = 3  # attempts, one after the other, that add nothing to what a resumable step has
LAST_LINES = 15
_POLL = 0.2
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
FINISHED = ("done", "failed", "skipped")
CACHE = "tuned"  # folder of what steps tune, each for itself: auto is measured as the package has it
DIGEST_S = 40.0  # the most that the command after a step takes


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ranks", type=int, help="how many ranks; default those of the results, else one for each GPU")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of results; default %(default)s")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds of this call; default %(default)g")
    parser.add_argument(
        "--only", default="", help="these steps, also if they are done; names and patterns, as 'llama*'"
    )
    parser.add_argument(
        "--list", action="store_true", help="show the steps, their estimates and their state, and leave"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what is in the folder of results")
    parser.add_argument("--small", action="store_true", help="tiny problems, to try the steps; works without GPUs")
    given = parser.parse_args(argv)
    if given.ranks is not None and given.ranks < 2:
        parser.error(f"--ranks is {given.ranks}; links need 2 or more")
    if not given.budget > RESERVE:
        parser.error(f"--budget is {given.budget:g}; possible: seconds, more than {RESERVE:g}")
    given.parser = parser
    return given


class State:
    """What became of each step, in a file that is replaced as a whole."""

    def __init__(self, folder: Path):
        self.path = folder / STATE
        self.data = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.data.setdefault("steps", {})

    def __getitem__(self, name: str) -> dict:
        return self.data["steps"].setdefault(name, {"state": "waiting", "attempts": 0, "seconds": 0.0})

    def forget(self, name: str) -> None:
        """Forget what became of a step, so that it can begin anew."""
        self.data["steps"].pop(name, None)

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, prefix=".state-", delete=False) as file:
            json.dump(self.data, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, self.path)

    def take(self, **facts: object) -> str:
        """Note what all calls must have in common; in words what an earlier one had differently, empty if nothing."""
        for name, value in facts.items():
            before = self.data.setdefault(name, value)
            if before != value:
                return f"{self.path} is of a run with {name}={before}, this one has {value}"
        return ""


def count_gpus() -> int:
    # In a process of its own, since this one starts others and has no use for torch.
    program = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def select(steps: list[Step], only: str) -> list[Step]:
    """The steps that ``only`` names; all when it is empty.

    Raises:
        ValueError: a word of it names none.
    """
    words = [word.strip() for word in only.split(",") if word.strip()]
    for word in words:
        if not any(fnmatch.fnmatch(step.name, word) for step in steps):
            raise ValueError(
                f"--only {word}: there is no such step; possible: {', '.join(step.name for step in steps)}"
            )
    return [step for step in steps if not words or any(fnmatch.fnmatch(step.name, word) for word in words)]


def environment(cache: Path | None = None) -> dict[str, str]:
    """Of what is started. ``cache``: folder of what is tuned there, in place of the user's."""
    own = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **WITHOUT_MULTICAST,
        "PYTHONPATH": os.pathsep.join(filter(None, own)),
        "PYTHONUNBUFFERED": "1",
        **({} if cache is None else {"IRIS_CACHE_DIR": str(cache)}),
    }


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextlib.contextmanager
def _signals_leave() -> Iterator[None]:
    """Let signals raise, so that the running step is ended with this program."""

    def leave(signum, frame):
        sys.exit(128 + signum)

    previous = {signum: signal.signal(signum, leave) for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


def execute(
    words: Sequence[str], log: Path, limit: float, ask: signal.Signals, cache: Path | None = None
) -> int | None:
    """Run a command, its output into a log; its exit code, None when it did not end within ``limit`` seconds.

    Args:
        words: after ``python``.
        log: added to.
        limit: seconds.
        ask: the signal that it ends at; what is left of it is killed.
        cache: as of :func:`environment`.
    """
    with log.open("ab") as file:
        file.write(f"$ python {shlex.join(words)}\n".encode())
        file.flush()
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment(cache),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - this program has one thread
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.send_signal(ask)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
            # Its group may outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def verdict(step: Step, out: Path, code: int | None, limit: float) -> str:
    """What is wrong with how a step ended; empty when nothing is."""
    output = out / step.output
    if step.kind == "tests":
        counts = counted(outcomes(output))
        if code is not None and code < 0:
            return f"pytest was ended by signal {-code}"
        if not sum(counts.values()):
            return f"no test ran (exit status {code})"
        if counts["failed"]:
            return f"{counts['failed']} of {sum(counts.values())} tests failed"
        if code is None:
            return f"{sum(counts.values())} tests ran, the others are left for another call"
        # 5: nothing was left to run.
        return "" if code in (0, 5) else f"exit status {code}"
    if code is None:
        return "the rest is left for another call" if step.resumable else f"it did not end within {limit:.0f} s"
    if code:
        return f"exit status {code}" if code > 0 else f"ended by signal {-code}"
    return "" if output.exists() else f"it wrote no {step.output}"


def do(step: Step, out: Path, state: State, left: float) -> None:
    """Run a step with at most ``left`` seconds and record how it went."""
    record, log = state[step.name], out / "logs" / f"{step.name}.log"
    limit = min(step.limit, left)
    output = out / step.output
    before = output.read_bytes() if output.exists() else b""

    def completed(words):
        return [word.replace("{out}", str(out)) for word in words]

    if step.kind == "tests":
        known = outcomes(output)
        (out / f"data/{step.name}.done.json").write_text(
            json.dumps([test for test, outcome in known.items() if outcome != "started"])
        )
    else:
        if not step.resumable:
            output.unlink(missing_ok=True)  # of an attempt that came to nothing
        if record["attempts"] == 0:
            log.unlink(missing_ok=True)
    record |= {"state": "running", "attempts": record["attempts"] + 1, "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    record |= {"command": "python " + shlex.join(step.words), "error": "", "last_lines": []}
    state.save()
    begin = time.monotonic()
    ask = signal.SIGINT if step.kind == "tests" else signal.SIGTERM
    try:
        code = execute(completed(step.words), log, limit, ask, out / CACHE / step.name)
        after = execute(completed(step.then), log, DIGEST_S, ask) if step.then and output.exists() else 0
    except BaseException:  # this program is ended, which says nothing about the step
        record |= {"state": "waiting", "attempts": record["attempts"] - 1}
        state.save()
        raise
    record["seconds"] = round(record["seconds"] + time.monotonic() - begin, 1)
    error = verdict(step, out, code, limit)
    if not error and after != 0:
        error = f"its digest failed: {'it did not end' if after is None else f'exit status {after}'}"
    cut = code is None or (code < 0 and record["attempts"] <= MOST_CRASHES)
    # Tests count what never ends themselves.
    adds = step.kind == "tests" or (output.exists() and output.read_bytes() != before)
    record["fruitless"] = 0 if adds else record.get("fruitless", 0) + 1
    if cut and step.resumable and record["fruitless"] < MOST_FRUITLESS:
        record["state"] = "partly"
    elif code is None and limit < step.limit and record["attempts"] < MOST_ATTEMPTS:
        record["state"] = "waiting"  # the budget ended it
    else:
        record["state"] = "failed" if error else "done"
    if record["state"] != "done":
        lines = log.read_text(errors="replace").splitlines()
        record |= {"error": error, "last_lines": lines[-LAST_LINES:]}
    state.save()


def show(steps: list[Step], state: State) -> None:
    """The steps with their estimates and states."""
    width = max(len(step.name) for step in steps)
    for step in steps:
        record = state.data["steps"].get(step.name, {})
        seconds = f"{record['seconds']:.0f} s" if record.get("seconds") else ""
        about = f"from {step.estimate:.0f} s" if step.resumable else f"about {step.estimate:.0f} s"
        end = f"  {record.get('error')}" if record.get("error") else ""
        print(f"{step.name:{width}}  {about:>11}  {record.get('state', 'waiting'):8} {seconds:>6}  {step.what}{end}")
    waiting = [s for s in steps if state.data["steps"].get(s.name, {}).get("state") not in FINISHED]
    print(f"{len(waiting)} of {len(steps)} steps are to be done, about {sum(s.estimate for s in waiting):.0f} s")


def run(steps: list[Step], out: Path, state: State, deadline: float, write, *, again: bool = False) -> list[Step]:
    """Do the steps that fit; those that did not fit.

    Args:
        steps: to be done, in order.
        out: folder of results.
        state: of the steps.
        deadline: when all must have ended, on the monotonic clock.
        write: called after each step.
        again: do finished steps too. What they gave before stays until they begin.
    """
    postponed = []
    for number, step in enumerate(steps, 1):
        record = state[step.name]
        if record["state"] == "running":  # the program was ended so quickly that it could not say so
            record["state"] = "failed" if record["attempts"] >= MOST_ATTEMPTS and not step.resumable else "waiting"
            record["error"] = f"it was running when run_all.py was killed, {record['attempts']} times"
            state.save()
        if record["state"] in FINISHED and not again:
            continue
        if step.impossible:
            record |= {"state": "skipped", "error": step.impossible}
            state.save()
            print(f"[{number}/{len(steps)}] {step.name}: left out, {step.impossible}", flush=True)
            continue
        left = deadline - time.monotonic()
        if step.estimate > left:
            postponed.append(step)
            continue
        print(f"[{number}/{len(steps)}] {step.name}: {step.what}, about {step.estimate:.0f} s", flush=True)
        if record["state"] in FINISHED:
            for name in (step.output, step.digest):
                (out / name).unlink(missing_ok=True)
            state.forget(step.name)
            record = state[step.name]
        begin = time.monotonic()
        do(step, out, state, left)
        how = f"{record['state']} after {time.monotonic() - begin:.0f} s"
        print(f"    {how}{', ' + record['error'] if record.get('error') else ''}", flush=True)
        for line in record.get("last_lines", []):
            print(f"    | {line}", flush=True)
        if record["state"] not in FINISHED:
            postponed.append(step)
        write()
    return postponed


def main(argv: Sequence[str] | None = None) -> int:
    begin = time.monotonic()
    given = arguments(argv)
    out = given.out.absolute()
    if given.fresh and not given.list:
        # What it wrote itself, and nothing else that may be in the folder.
        for name in ("data", "logs", "figures", CACHE):
            shutil.rmtree(out / name, ignore_errors=True)
        for name in (STATE, report.SUMMARY, report.TABLES):
            (out / name).unlink(missing_ok=True)
    state = State(out)
    ranks = given.ranks or state.data.get("ranks")
    if ranks is None:
        ranks = count_gpus() or 2
    small = given.small or bool(state.data.get("small"))
    if ranks < 2:
        given.parser.error("there is one GPU, and links need 2 ranks: give --ranks (ranks then share it)")
    other = state.take(ranks=ranks, small=small)
    if other:
        given.parser.error(f"{other}: give another --out, or --fresh")
    steps = table(ranks, small)
    try:
        chosen = select(steps, given.only)
    except ValueError as error:
        given.parser.error(str(error))
    if given.list:
        show(chosen, state)
        return 0
    if not small and not count_gpus():
        given.parser.error("there is no GPU, and interpreted kernels would take days: give --small")
    for folder in ("data", "logs"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    state.data.setdefault("calls", []).append("python benchmarks/run_all.py " + shlex.join(argv or sys.argv[1:]))
    state.save()
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no figures are drawn (pip install 'iris-kernels[plot]')", flush=True)
    print(f"{ranks} ranks, results in {given.out}, {given.budget:.0f} s for this call", flush=True)
    try:
        with _signals_leave():
            deadline = begin + given.budget - RESERVE
            write = partial(report.write, out, steps, state.data)
            postponed = run(chosen, out, state, deadline, write, again=bool(given.only))
    finally:
        report.write(out, steps, state.data, draw_figures=True)
    failed = [step.name for step in steps if has_failed(out, step, state.data)]
    if postponed:
        names = ", ".join(step.name for step in postponed)
        print(f"left for another call, about {sum(s.estimate for s in postponed):.0f} s: {names}")
        longest = max(step.estimate for step in postponed)
        if longest > given.budget - RESERVE:
            print(f"a step needs about {longest:.0f} s: give --budget of {longest + RESERVE + 5:.0f} or more")
    print(f"failed: {', '.join(failed)}" if failed else "nothing failed")
    print(f"see {given.out / report.SUMMARY}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
