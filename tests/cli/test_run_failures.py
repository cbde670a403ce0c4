"""How ``iris run`` ends when a rank fails, or when it is ended itself: soon, clearly, and leaving nothing behind."""

import os
import signal
import time
from pathlib import Path

import pytest

# Rank 1 fails in the given way while the others wait for it in a collective that would never end.
FAIL = """
    import os, signal, sys
    import torch
    import torch.distributed as dist

    def fail():
        {how}

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        fail()
    dist.all_reduce(torch.ones(1))
"""

# The ranks, each with a child of its own, write down their process ids and stay.
STAY = """
    import os, pathlib, subprocess, sys, time
    child = subprocess.Popen(["sleep", "600"])
    folder = pathlib.Path(sys.argv[1])
    (folder / (os.environ["RANK"] + ".new")).write_text(f"{os.getpid()} {child.pid}")
    os.rename(folder / (os.environ["RANK"] + ".new"), folder / (os.environ["RANK"] + ".pids"))
    time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_gone(pids: list[int], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def pids_of_ranks(folder: Path, world: int) -> list[int]:
    deadline = time.monotonic() + 30
    while len(files := list(folder.glob("*.pids"))) < world:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    return [int(word) for file in files for word in file.read_text().split()]


def last_report(errors: str) -> str:
    """The report at the end of standard error, which names the first failure."""
    return errors[errors.index("iris run: rank") :]


def test_the_traceback_of_the_first_rank_comes_last_and_alone(iris_command, script):
    path = script(FAIL.format(how="raise ValueError('the tile is too large')"))
    result = iris_command("run", "-n", 3, path)
    assert result.returncode == 1
    report = last_report(result.stderr)
    assert report.startswith("iris run: rank 1 failed with exit code 1:\nTraceback (most recent call last):")
    assert "in fail" in report
    assert "ValueError: the tile is too large" in report
    # The ranks that only noticed get a line; neither they nor the launcher's own frames add a traceback.
    assert result.stderr.count("Traceback") == 1
    assert "_rank.py" not in result.stderr
    assert "runpy" not in result.stderr


@pytest.mark.parametrize(
    ("how", "code", "first", "also"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by signal 9 (SIGKILL)", "ran out of memory"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was ended by signal 11 (SIGSEGV)", "in fail"),
        ("print('last words', file=sys.stderr); os._exit(7)", 7, "failed with exit code 7", "  last words"),
        ("sys.exit('no such layer')", 1, "failed with exit code 1", "sys.exit('no such layer')"),
    ],
    ids=["sigkill", "sigsegv", "_exit", "sys.exit"],
)
def test_a_rank_that_ends_without_an_exception(iris_command, script, how, code, first, also):
    start = time.monotonic()
    result = iris_command("run", "-n", 3, script(FAIL.format(how=how)))
    assert time.monotonic() - start < 30
    report = last_report(result.stderr)
    assert report.startswith(f"iris run: rank 1 {first}"), result.stderr
    assert also in report.partition("After that")[0]
    assert result.returncode == code


def test_ranks_that_never_notice_are_ended_within_seconds(iris_command, script, tmp_path):
    path = script(
        """
        import os, pathlib, signal, sys, time
        if os.environ["RANK"] == "0":
            while len(list(pathlib.Path(sys.argv[1]).glob("*.pid"))) < 2:
                time.sleep(0.01)
            raise RuntimeError("only me")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(sys.argv[1], os.environ["RANK"] + ".pid").write_text(str(time.time()))
        time.sleep(600)
        """
    )
    result = iris_command("run", "-n", 3, path, tmp_path)
    ended = time.time() - max(float(file.read_text()) for file in tmp_path.glob("*.pid"))
    assert result.returncode == 1
    assert "RuntimeError: only me" in result.stderr
    assert "Ended by iris run because of it: ranks 1 and 2." in result.stderr
    assert ended < 10


def test_a_failure_is_reported_even_if_the_rank_cannot_finish(iris_command, script):
    path = script(
        """
        import threading, time
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise KeyError("weights")
        """
    )
    result = iris_command("run", "-n", 1, path)
    assert result.returncode == 1
    assert "KeyError: 'weights'" in result.stderr


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ending_the_launcher_ends_everything(iris_command, script, tmp_path, signum):
    run = iris_command.start("run", "-n", 2, script(STAY), tmp_path)
    pids = pids_of_ranks(tmp_path, 2)
    run.send_signal(signum)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 128 + signum
    assert f"ended by signal {int(signum)} ({signum.name})" in errors
    assert "Traceback" not in errors
    assert all_gone(pids)


def test_a_launcher_that_is_killed_takes_its_ranks_along(iris_command, script, tmp_path):
    run = iris_command.start("run", "-n", 2, script(STAY.replace("child.pid", "os.getpid()")), tmp_path)
    pids = pids_of_ranks(tmp_path, 2)
    run.kill()
    run.wait(timeout=30)
    assert all_gone(pids)


def test_killing_one_rank_leaves_neither_processes_nor_files(iris_command, script, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    before = set(os.listdir("/dev/shm"))
    run = iris_command.start("run", "-n", 2, script(STAY), tmp_path, TMPDIR=str(temporary))
    pids = pids_of_ranks(tmp_path, 2)
    os.kill(int((tmp_path / "1.pids").read_text().split()[0]), signal.SIGKILL)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 137
    assert "rank 1 was ended by signal 9" in errors
    assert all_gone(pids)
    assert list(temporary.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= before


def test_a_rank_that_ends_well_leaves_no_child_behind(iris_command, script, tmp_path):
    path = script(STAY.replace("time.sleep(600)", ""))
    result = iris_command("run", "-n", 2, path, tmp_path)
    assert result.returncode == 0
    assert all_gone(pids_of_ranks(tmp_path, 2))
