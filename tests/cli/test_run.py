"""``iris run`` with real rank processes on the CPU."""

import os
import re
import time
from pathlib import Path

import pytest

from iris.cli.run import launch
from iris.errors import ArgumentError

HELLO = """
    import sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", int(total), sys.argv[1:])
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_meet_and_their_lines_stay_whole(iris_command, script, num_ranks):
    result = iris_command("run", "-n", num_ranks, script(HELLO), PYTHONUNBUFFERED="1")
    total = num_ranks * (num_ranks + 1) // 2
    assert result.returncode == 0, result.stderr
    expected = [f"rank {r} of {num_ranks} sum {total} []" for r in range(num_ranks)]
    assert sorted(result.stdout.splitlines()) == expected
    assert "iris run" not in result.stderr


def test_what_follows_the_script_is_the_scripts(iris_command, script):
    path = script("import sys; print(sys.argv, __name__, sys.path[0])")
    arguments = ["-n", "7", "--timeout", "x", "--", "-m", "--help"]
    result = iris_command("run", "-n", 1, path, *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{[str(path), *arguments]} __main__ {path.parent}"


def test_a_module_and_its_options(iris_command, script):
    path = script("import sys; print(__name__, __package__, sys.argv)", "a_module.py")
    python_path = os.pathsep.join([str(path.parent), str(Path(__file__).parents[2] / "src")])
    result = iris_command("run", "-n", 1, "-m", "a_module", "-n", "3", PYTHONPATH=python_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"__main__  {[str(path), '-n', '3']}"


def test_any_program(iris_command):
    result = iris_command("run", "-n", 2, "--no-python", "sh", "-c", "echo $RANK/$WORLD_SIZE; exit $RANK")
    assert sorted(result.stdout.split()) == ["0/2", "1/2"]
    assert result.returncode == 1
    assert "rank 1 failed with exit code 1" in result.stderr


def test_kernel_source_and_child_processes_work_in_the_wrapped_main(iris_command, script):
    path = script(
        """
        import inspect
        import multiprocessing

        def square(x):
            return x * x

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]), "x * x" in inspect.getsource(square))
        """
    )
    result = iris_command("run", "-n", 1, path)
    assert result.stdout.strip() == "[1, 4, 9] True", result.stderr


def test_environment_of_the_ranks(iris_command, script):
    path = script(
        """
        import os
        names = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "OMP_NUM_THREADS",
                 "TRITON_INTERPRET")
        print(*(os.environ.get(name) for name in names))
        """
    )
    result = iris_command("run", "-n", 1, path, NCCL_NVLS_ENABLE="2", OMP_NUM_THREADS="3")
    # What the caller set stays; and the launcher leaves the choice of the runtime to the ranks.
    assert set(result.stdout.splitlines()) == {"1 2 1 3 None"}, result.stderr
    threads = iris_command("run", "-n", 2, path).stdout.split()[3]
    assert int(threads) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_three_runs_at_the_same_moment(iris_command, script):
    path = script(HELLO)
    runs = [iris_command.start("run", "-n", 2, path, str(i)) for i in range(3)]
    for i, run in enumerate(runs):
        output, errors = run.communicate(timeout=90)
        assert run.returncode == 0, errors
        assert sorted(output.splitlines()) == [f"rank {r} of 2 sum 3 ['{i}']" for r in range(2)]


def test_time_limit_tells_where_the_ranks_were(iris_command, script):
    path = script(
        """
        import time

        def stuck_here():
            time.sleep(600)

        print("started")
        stuck_here()
        """
    )
    start = time.monotonic()
    result = iris_command("run", "-n", 2, "--timeout", 2, path)
    assert time.monotonic() - start < 20
    assert result.returncode == 124
    assert result.stdout.count("started") == 2
    assert "not finished after 2 s (--timeout)" in result.stderr
    assert len(re.findall(r"rank \d was here:\n.*\n.*in stuck_here", result.stderr)) == 2
    assert "_rank.py" not in result.stderr


def test_standard_error_passes_through_live(iris_command, script):
    path = script(
        """
        import sys, time
        print("early", file=sys.stderr)
        time.sleep(600)
        """
    )
    run = iris_command.start("run", "-n", 1, path)
    try:
        assert run.stderr.readline() == "early\n"
        assert run.poll() is None
    finally:
        run.terminate()
        run.communicate(timeout=30)


def test_launch_returns_the_code_and_takes_variables(script, capfd):
    path = script("import os, sys; print(os.environ['COLOUR']); sys.exit(int(os.environ['RANK']) * 3)")
    assert launch([str(path)], 2, env={"COLOUR": "green"}) == 3
    output = capfd.readouterr()
    assert output.out == "green\ngreen\n"
    assert "rank 1 failed with exit code 3" in output.err
    assert "sys.exit(3)" in output.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((["nowhere.py"], 1), "no script 'nowhere.py'"),
        (([], 1), "no program was given"),
        ((["-m"], 1), "a module is needed"),
        ((["x.py"], 0), "num_ranks is 0"),
    ],
)
def test_wrong_arguments_are_told_before_anything_starts(arguments, words):
    with pytest.raises(ArgumentError, match=re.escape(words)):
        launch(*arguments)


def test_wrong_time_limit():
    with pytest.raises(ArgumentError, match=r"timeout is -1; possible: seconds, more than 0"):
        launch(["x.py"], 1, timeout=-1)


def test_wrong_variable_is_one_error_and_not_one_a_rank(iris_command, script):
    result = iris_command("run", "-n", 2, script("print('ran')"), IRIS_CHECK="sometimes")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.strip() == "iris: IRIS_CHECK='sometimes' is not known; possible: first, always or off"
