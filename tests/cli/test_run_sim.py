"""``iris run --sim``: scripts as they are, in the simulator."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from iris.cli import simulate as simulation
from iris.errors import ArgumentError
from iris.runtime.gpus import Gpus

ROOT = Path(__file__).resolve().parents[2]
# Those that start simulations themselves are no scripts of one rank.
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("[0-9]*.py") if "iris.sim" not in path.read_text())

RACE = """
    import torch
    import triton
    import triton.language as tl

    import iris

    @triton.jit
    def push(data, inbox, rank, peer, heap_bases):
        offs = tl.arange(0, 4)
        iris.store(inbox + offs, tl.load(data + offs), rank, peer, heap_bases)

    ctx = iris.iris(1 << 20)
    rank, world = ctx.get_rank(), ctx.get_num_ranks()
    data = torch.arange(4.0) + rank
    inbox = ctx.zeros(4)
    ctx.barrier()
    push[(1,)](data, inbox, rank, (rank + 1) % world, ctx.get_heap_bases())
    print(inbox.sum())  # nothing says that the neighbour has written
"""

DEADLOCK = """
    import torch
    import triton
    import triton.language as tl

    import iris

    @triton.jit
    def wait_for_nobody(context, flag, rank: tl.constexpr, world: tl.constexpr):
        iris.DeviceContext.initialize(context, rank, world).wait(flag, 1, peer=0)

    ctx = iris.iris(1 << 20)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if ctx.get_rank() == 1:
        wait_for_nobody[(1,)](ctx.get_device_context(), flag, 1, ctx.get_num_ranks())
    ctx.barrier()
"""

# The order in which the ranks get their tickets depends on the seed.
TICKETS = """
    import torch
    import triton

    import iris

    @triton.jit
    def take_ticket(counter, ticket, rank, heap_bases):
        value = iris.atomic_add(counter, 1, rank, 0, heap_bases, sem="relaxed")
        triton.language.store(ticket, value)

    ctx = iris.iris(1 << 20)
    counter = ctx.zeros(1, dtype=torch.int32)
    ticket = torch.zeros(1, dtype=torch.int32)
    ctx.barrier()
    take_ticket[(1,)](counter, ticket, ctx.get_rank(), ctx.get_heap_bases())
    ctx.barrier()
    assert int(ticket) == ctx.get_rank(), f"ticket {int(ticket)}"
"""

TORCHRUN = """
    import argparse
    import os
    import pickle
    import random
    import sys

    import torch
    import torch.distributed as dist

    import iris

    calls = 0

    class Message:
        pass

    def main():
        global calls
        calls += 1
        parser = argparse.ArgumentParser()
        parser.add_argument("--rows", type=int)
        rows = parser.parse_args().rows
        sys.argv.append("of this rank")

        dist.init_process_group("gloo")
        ctx = iris.iris(1 << 20)
        rank = ctx.get_rank()
        assert (dist.get_rank(), dist.get_world_size()) == (rank, ctx.get_num_ranks())
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
        assert not torch.cuda.is_available()
        total = torch.tensor(rank + 1)
        dist.all_reduce(total)
        dist.barrier()
        assert calls == 1, "the ranks share a global"
        assert isinstance(pickle.loads(pickle.dumps(Message())), Message), "__main__ is another rank's"
        assert "torch._dynamo" not in sys.modules, "a second spent on importing torch.compile, which nothing uses"
        print("rank", rank, "sum", int(total), "rows", rows, sys.argv, __name__, __file__, sys.path[0])
        print("random", random.random())
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
        sys.exit()
"""


def repeated(iris_command, result):
    """Runs the command that a report says repeats it."""
    line = re.search(r"^Repeat it: iris (.*)$", result.stderr, re.MULTILINE)
    assert line is not None, result.stderr
    return iris_command(*shlex.split(line.group(1)))


def once(path):
    """The examples with even numbers; by default the others run as processes alone."""
    return pytest.param(path, marks=() if int(path.name[:2]) % 2 == 0 else pytest.mark.slow, id=path.stem)


@pytest.mark.parametrize("example", map(once, EXAMPLES))
def test_examples(iris_command, example):
    result = iris_command("run", "--sim", "-n", 4, example)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^rank \d of 4", result.stdout, re.MULTILINE)) == 4
    assert result.stderr == ""


def test_a_race_is_reported_with_the_command_that_repeats_it(iris_command, script):
    path = script(RACE)
    result = iris_command("run", "--sim", "-n", 3, "--seed", 5, "--check", "races,bounds", path)
    assert result.returncode == 1
    assert "RaceError with seed 5" in result.stderr
    assert re.search(rf"rank \d, kernel push, program 0: store of inbox.*\n +at {path}:\d+: iris.store", result.stderr)
    assert re.search(rf"rank \d, host code: .* of inbox.*\n +at {path}:\d+: print\(inbox.sum", result.stderr)
    assert "Traceback" not in result.stderr
    assert f"iris run --sim -n 3 --seed 5 --check races,bounds {path}" in result.stderr
    assert repeated(iris_command, result).stderr == result.stderr


def test_a_deadlock_is_reported(iris_command, script):
    result = iris_command("run", "--sim", "-n", 2, script(DEADLOCK))
    assert result.returncode == 1
    assert "DeadlockError with seed 0" in result.stderr
    assert "rank 1, kernel wait_for_nobody, program 0 waits for flag[0] of rank 1 to reach 1" in result.stderr
    assert "rank 0, host: waits for barrier()" in result.stderr


def test_seeds_are_tried_until_one_fails(iris_command, script):
    result = iris_command("run", "--sim", "-n", 2, "--seeds", 12, script(TICKETS))
    assert result.returncode == 1
    seeds = [int(n) for n in re.findall(r"^iris run: seed (\d+) \(\d+ of 12\)$", result.stderr, re.MULTILINE)]
    assert seeds == list(range(len(seeds)))
    assert f"--seed {seeds[-1]} " in result.stderr
    again = repeated(iris_command, result)
    assert again.returncode == 1
    assert again.stderr == result.stderr[result.stderr.index("----") :]


def test_a_script_for_torchrun(iris_command, script):
    path = script(TORCHRUN)
    result = iris_command("run", "--sim", "-n", 3, "--seeds", 2, path, "--rows", 7)
    assert result.returncode == 0, result.stderr
    arguments = [str(path), "--rows", "7", "of this rank"]
    for rank in range(3):
        line = f"rank {rank} sum 6 rows 7 {arguments} __main__ {path} {path.parent}"
        assert result.stdout.splitlines().count(line) == 2, result.stdout
    # Other random numbers on each rank, the same with each seed.
    numbers = re.findall(r"^random (.*)$", result.stdout, re.MULTILINE)
    assert sorted(numbers[:3]) == sorted(numbers[3:])
    assert len(set(numbers)) == 3
    assert "nothing found with 2 seeds" in result.stderr


def test_a_module(iris_command, script):
    path = script("import sys; print(__name__, __package__, __spec__.name, sys.argv)", "a_module.py")
    python_path = os.pathsep.join([str(path.parent), str(ROOT / "src")])
    result = iris_command("run", "--sim", "-n", 2, "-m", "a_module", "-n", "3", PYTHONPATH=python_path)
    assert result.stdout.splitlines() == 2 * [f"__main__  a_module {[str(path), '-n', '3']}"], result.stderr


ENDINGS = {
    "code": ("sys.exit(7)", 7, "rank 1 failed with exit code 7"),
    "message": ("sys.exit('out of paper')", 1, "out of paper\n"),
    "error": ("raise KeyError('paper')", 1, "in <module>\n    if ctx.get_rank() == 1:"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_how_a_rank_ends(iris_command, script, ending):
    code, status, said = ENDINGS[ending]
    path = script(
        f"""
        import sys
        import iris

        ctx = iris.iris(1 << 20)
        ctx.barrier()
        if ctx.get_rank() == 0:
            sys.exit(0)
        if ctx.get_rank() == 1: {code}
        """
    )
    result = iris_command("run", "--sim", "-n", 3, path)
    assert result.returncode == status, result.stderr
    assert said in result.stderr
    assert "_simulated.py" not in result.stderr


def test_time_limit(iris_command, script):
    path = script(
        """
        import iris

        def forever():
            while True:
                pass

        if iris.iris(1 << 20).get_rank() == 1:
            forever()
        """
    )
    result = iris_command("run", "--sim", "-n", 2, "--timeout", 1, path)
    assert result.returncode == 124
    assert re.search(r"rank 1 was here:\n  File .*program.py", result.stderr), result.stderr


def test_unknown_values_are_refused(iris_command, script):
    result = iris_command("run", "--sim", "--device", "abacus", script(""))
    assert result.returncode == 2
    assert result.stderr.startswith("iris: device 'abacus' is not known; possible: ")


@pytest.mark.parametrize(
    ("mode", "given", "message"),
    [
        ("", {"--seed": 1}, "--seed needs --sim or --loopback"),
        ("", {"--check": "races"}, "--check needs --sim"),
        ("--sim", {"--link-gbps": 1.0}, "--link-gbps needs --loopback"),
        ("--sim", {"--link-per-peer": True}, "--link-per-peer needs --loopback"),
        ("--loopback", {"--link-per-peer": True}, "--link-per-peer needs the rate of a link: give --link-gbps"),
        ("--loopback", {"--device": "h200"}, "means nothing with --loopback"),
        ("--sim", {"--seed": 1, "--seeds": 2}, "give one of them"),
    ],
)
def test_options_that_mean_nothing_are_refused(mode, given, message):
    with pytest.raises(ArgumentError, match=message):
        simulation.check_options(mode, given)


def test_other_programs_are_refused():
    with pytest.raises(ArgumentError, match="--no-python"):
        simulation.simulate("--sim", ["ls"], 2, {}, python=False)


def test_loopback_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(simulation.gpus, "visible", lambda: Gpus(0, ""))
    with pytest.raises(ArgumentError, match="none is visible"):
        simulation.simulate("--loopback", [__file__], 2, {})


@pytest.mark.parametrize(("chosen", "taken"), [(None, "0"), ("3,1", "3")])
def test_loopback_shows_the_program_one_gpu(monkeypatch, chosen, taken):
    started = []
    monkeypatch.setattr(simulation.gpus, "visible", lambda: Gpus(2, "nvidia"))
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    if chosen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    given = {"--link-gbps": 50.0, "--seed": 3, "--link-per-peer": True}
    simulation.simulate("--loopback", [__file__, "x"], 2, given)
    program, words, environment = started[0]
    assert (program, words[-2:]) == (sys.executable, [__file__, "x"])
    request = json.loads(words[2])
    assert request["options"] == {"on": "gpu", "link_gbps": 50.0, "link_per_peer": True}
    assert request["repeat"][1] == ["--link-gbps", "50.0", "--link-per-peer", __file__, "x"]
    assert (environment["IRIS_RUNTIME"], environment["CUDA_VISIBLE_DEVICES"]) == ("gpu", taken)
    assert "TRITON_INTERPRET" not in environment


@pytest.mark.gpu
def test_loopback(iris_command):
    result = iris_command("run", "--loopback", "-n", 4, EXAMPLES[0])
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^rank \d of 4 read", result.stdout, re.MULTILINE)) == 4


def test_the_command_stays_light():
    code = (
        "import sys, _iris_command; _iris_command.enter_bare_package(); import iris.cli.simulate, iris.cli.run; "
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / "src")}).returncode
        == 0
    )
