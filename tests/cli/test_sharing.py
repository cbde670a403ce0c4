"""Ranks that share a GPU, with a stand-in for the MPS control program that writes down how it was called."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

# Started with -d it leaves a daemon behind; a line on standard input is a command to that daemon.
FAKE_CONTROL = """#!/bin/sh
case "$1" in
-d)
    [ -n "$FAKE_BROKEN" ] && { echo "no permission for this" >&2; exit 1; }
    mode=$(stat -c %a "$CUDA_MPS_PIPE_DIRECTORY/..")
    echo "start $CUDA_MPS_PIPE_DIRECTORY $mode [$CUDA_VISIBLE_DEVICES]" >> "$FAKE_LOG"
    "$0" serve &
    ;;
serve)
    echo "daemon $$" >> "$FAKE_LOG"
    while [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/stop" ]; do sleep 0.05; done
    echo "stopped" >> "$FAKE_LOG"
    ;;
*)
    read -r command
    echo "$command $CUDA_MPS_PIPE_DIRECTORY" >> "$FAKE_LOG"
    [ -z "$FAKE_STUBBORN" ] && touch "$CUDA_MPS_PIPE_DIRECTORY/stop"
    ;;
esac
"""

# The command line with a number of GPUs that this machine does not have.
DRIVER = """
import sys
import _iris_command
_iris_command.enter_bare_package()
from iris.runtime import gpus
gpus.visible = lambda environment: gpus.Gpus(int({count}), "{vendor}")
_iris_command.main()
"""

SHOW = """
    import os
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
             "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "IRIS_RANKS_PER_GPU", "CUDA_VISIBLE_DEVICES")
    print(*(os.environ.get(name) for name in names))
"""


@pytest.fixture
def shared(iris_command, tmp_path):
    """``iris`` on a machine with GPUs to share; ``calls()`` gives what the control program wrote down."""
    folder = tmp_path / "bin"
    folder.mkdir()
    control = folder / "nvidia-cuda-mps-control"
    control.write_text(FAKE_CONTROL)
    control.chmod(0o755)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    log = tmp_path / "calls"
    log.touch()

    variables = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "FAKE_LOG": str(log), "TMPDIR": str(temporary)}

    class Shared:
        def gpus(self, count: int, vendor: str = "nvidia") -> None:
            iris_command.words = (sys.executable, "-c", DRIVER.format(count=count, vendor=vendor))

        def run(self, *arguments, **changes):
            return iris_command("run", *arguments, **{**variables, **changes})

        def start(self, *arguments, **changes):
            return iris_command.start("run", *arguments, **{**variables, **changes})

        def calls(self) -> list[list[str]]:
            return [line.split() for line in log.read_text().splitlines()]

        def left_behind(self) -> list:
            """Folders and processes that should be gone."""
            calls = dict(line[:2] for line in self.calls() if len(line) > 1)
            daemon = Path("/proc", calls["daemon"]) if "daemon" in calls else None
            folders = [Path(calls["start"]).parent] if "start" in calls else []
            return [path for path in [*folders, daemon, *temporary.iterdir()] if path and path.exists()]

    result = Shared()
    result.gpus(1)
    return result


def test_four_ranks_on_two_gpus(shared, script):
    shared.gpus(2)
    result = shared.run("-n", 4, script(SHOW), CUDA_VISIBLE_DEVICES="2,3")
    assert result.returncode == 0, result.stderr
    assert "MPS" not in result.stderr
    start, daemon, quit_, stopped = shared.calls()
    pipe = start[1]
    # A private folder, and a daemon that does not renumber the GPUs: each rank's list counts from the machine's.
    assert start == ["start", pipe, "700", "[]"]
    assert daemon[0] == "daemon"
    assert quit_ == ["quit", pipe]
    assert stopped == ["stopped"]
    log = str(Path(pipe).parent / "log")
    assert result.stdout.splitlines() == [f"{pipe} {log} 50 1 2 2,3"] * 4
    assert shared.left_behind() == []


@pytest.mark.parametrize(("ranks", "gpus", "each", "share"), [(3, 2, 2, 50), (3, 1, 3, 33), (8, 1, 8, 12)])
def test_shares(shared, script, ranks, gpus, each, share):
    shared.gpus(gpus)
    lines = shared.run("-n", ranks, script(SHOW)).stdout.splitlines()
    assert [line.split()[2:5] for line in lines] == [[str(share), "1", str(each)]] * ranks


def test_enough_gpus_need_no_daemon(shared, script):
    shared.gpus(2)
    result = shared.run("-n", 2, script(SHOW))
    assert result.stdout.splitlines() == ["None None None None None None"] * 2
    assert shared.calls() == []


def test_the_cpu_runtime_needs_no_daemon(shared, script):
    assert "None None None None None" in shared.run("-n", 2, script(SHOW), IRIS_RUNTIME="CPU").stdout
    assert shared.calls() == []


def test_amd_gpus_are_shared_without_a_daemon(shared, script):
    shared.gpus(1, "amd")
    result = shared.run("-n", 2, script(SHOW))
    assert result.stdout.splitlines() == ["None None None 1 2 None"] * 2
    assert shared.calls() == []
    assert "MPS" not in result.stderr


def test_without_the_control_program(shared, script):
    result = shared.run("-n", 2, script(SHOW), PATH="/usr/bin:/bin")
    assert result.returncode == 0
    assert "2 ranks share 1 GPU without NVIDIA MPS: nvidia-cuda-mps-control is not on PATH" in result.stderr
    assert "take turns" in result.stderr
    assert result.stdout.splitlines() == ["None None None 1 2 None"] * 2


def test_a_daemon_that_does_not_start(shared, script):
    result = shared.run("-n", 2, script(SHOW), FAKE_BROKEN="1")
    assert result.returncode == 0
    assert "did not start: exit code 1: no permission for this" in result.stderr
    assert shared.left_behind() == []


def test_the_daemon_ends_when_a_rank_fails(shared, script):
    result = shared.run("-n", 2, script("raise OSError('no weights')"))
    assert result.returncode == 1
    assert "OSError: no weights" in result.stderr
    assert [line[0] for line in shared.calls()] == ["start", "daemon", "quit", "stopped"]
    assert shared.left_behind() == []


def test_a_daemon_that_does_not_quit_is_killed(shared, script):
    result = shared.run("-n", 2, script(SHOW), FAKE_STUBBORN="1")
    assert result.returncode == 0
    assert [line[0] for line in shared.calls()] == ["start", "daemon", "quit"]
    assert shared.left_behind() == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_daemon_ends_with_the_launcher(shared, script, signum):
    run = shared.start("-n", 2, script("import time; print('up'); time.sleep(600)"))
    assert run.stdout.readline() == "up\n"
    run.send_signal(signum)
    run.communicate(timeout=30)
    # After SIGKILL the launcher cannot wait for it; the guard process sees to it on its own.
    deadline = time.monotonic() + 15
    while shared.left_behind() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert shared.left_behind() == []
    assert [line[0] for line in shared.calls()] == ["start", "daemon", "quit", "stopped"]
