"""GEMM examples 13 to 17: options, JSON, traces, validation, and the faults that such kernels have."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from iris import _target

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("1[3-7]_*.py"))
ATOMICS, RING, SCATTER, ONE_SHOT, PRODUCER = EXAMPLES
WORKER = Path(__file__).with_name("_compile_worker.py")
each = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)

SMALL = ("--BLK_M", 16, "--BLK_N", 32, "--BLK_K", 16)


def passed(lines: list[str], ranks: int, what: str) -> None:
    for rank in range(ranks):
        assert sum(line.startswith(f"rank {rank} of {ranks}: {what}") for line in lines) == 1, lines
    assert sum("validation passed" in line for line in lines) == ranks, lines


@each
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("datatype", ["fp32", "bf16", "int8"])
def test_every_access_is_right(run, example, ranks, datatype):
    """In the simulator, with checks: 15 tiles or fewer that 3 and 4 ranks do not divide, edges in M, N and K."""
    words = ("-m", 70, "-n", 75, "-k", 41, "--datatype", datatype, *SMALL)
    passed(run(ranks, example, "--validate", *words, options=("--sim",)), ranks, f"70x75x41 {datatype}")


@each
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(7, 9, 5), (40, 50, 20)], ids=["one-tile", "six-tiles"])
@pytest.mark.parametrize(("ranks", "resident"), [(2, 1), (3, 1), (3, 2), (5, 2)])
def test_few_programs_at_a_time_in_two_orders(run, example, ranks, resident, shape):
    """As many programs resident at a time as one or two: none waits for one that cannot start."""
    m, n, k = shape
    words = ("--validate", "-m", m, "-n", n, "-k", k, *SMALL)
    run(ranks, example, *words, options=("--sim", "--seeds", 2, "--resident-programs", resident))


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_ring_with_more_messages_than_slots(run, ranks, lanes):
    words = ("-m", 100, "-n", 90, "-k", 16, "--comm_sms", lanes, "--gemm_sms", 2, *SMALL)
    passed(run(ranks, RING, "--validate", *words, options=("--sim",)), ranks, "100x90x16 fp16 in 21 tiles")


def planted(tmp_path: Path, example: Path, right: str, wrong: str) -> Path:
    """A copy of an example, with what it needs, where ``right`` is replaced."""
    folder = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", folder)
    source = example.read_text()
    assert source.count(right) == 1, right
    path = folder / example.name
    path.write_text(source.replace(right, wrong))
    return path


PLANTED = {
    "a slot is written before it was read": (RING, "ctx.wait(consumed, sent - SLOTS, peer=after)", "pass"),
    "a slot is read before it was written": (RING, "ctx.wait(ready, received, peer=before)", "pass"),
    "a product is read before it was made": (RING, "ctx.wait(made + tile, epoch, peer=rank)", "pass"),
    "a peer adds before the sums are cleared": (ATOMICS, "wait_for_input(flags, counters, peer, context, 0)", "pass"),
    "a consumer is ahead of its producer": (PRODUCER, "ctx.wait(made + tile, epoch, peer=ctx.rank)", "pass"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_race_is_found(launch, tmp_path, name):
    path = planted(tmp_path, *PLANTED[name])
    words = ("--validate", "-m", 40, "-n", 70, "-k", 16, "--gemm_sms", 2, *SMALL)
    if "comm_sms" in path.read_text():
        words += ("--comm_sms", 1)
    result = launch(3, path, *words, options=("--sim", "--seeds", 8))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "RaceError" in result.stderr or "UninitializedReadError" in result.stderr, result.stderr


def test_validation_names_the_first_wrong_element(launch, tmp_path):
    path = planted(tmp_path, SCATTER, "result = acc.to(c.dtype.element_ty)",
                   "result = (acc + (rank == 1) * (rows == 33)[:, None]).to(c.dtype.element_ty)")  # fmt: skip
    result = launch(2, path, "--validate", "-m", 50, "-n", 40, "-k", 24, "--datatype", "fp32", *SMALL)
    assert result.returncode == 1, result.stdout + result.stderr
    said = "20 of 2000 elements of C are wrong, the first is C[33, 20] = "
    for rank in range(2):
        (line,) = {line for line in result.stdout.splitlines() if line.startswith(f"rank {rank}: {said}")}
        assert line.endswith("; tile 2, stored by rank 1")
        assert f"rank {rank} of 2: 50x40x24 fp32 in 4 tiles, validation failed" in result.stdout


def test_json_and_traces(run, tmp_path):
    output = tmp_path / "ring.json"
    words = ("-m", 40, "-n", 60, "-k", 32, "--datatype", "int8", "--gemm_sms", 2, "--comm_sms", 1, *SMALL)
    lines = run(2, RING, "--validate", "--benchmark", "--trace-tiles", "--output_file", output, *words)
    passed(lines, 2, "40x60x32 int8 in 6 tiles, validation passed, ")
    record = json.loads(output.read_text())
    given = {"m": 40, "n": 60, "k": 32, "datatype": "int8", "BLK_M": 16, "BLK_N": 32, "BLK_K": 16, "gemm_sms": 2,
             "comm_sms": 1, "num_ranks": 2, "world_size": 2, "success": True, "total_experiments": 2}  # fmt: skip
    assert {name: record[name] for name in given} == given
    assert {"gsize_m", "num_stages", "heap_size", "debug", "trace_tiles", "output_file", "device"} <= set(record)
    resources = [record[name] for name in ("gemm_registers", "gemm_spills", "gemm_shared")]
    if record["arch"] == "interpreter":
        assert resources == [None] * 3
        assert record["gemm_resources_missing"] == "the kernel was interpreted, not compiled"
    else:
        assert all(isinstance(figure, int) for figure in resources)
    assert record["total_ms"] > 0
    assert record["gemm_ms"] > 0
    assert record["tflops"] == pytest.approx(2 * 40 * 60 * 32 / record["total_ms"] * 1e-9)
    for rank in range(2):
        tiles = json.loads((tmp_path / f"ring_tiles_rank{rank}.json").read_text())
        assert [tile["tile_id"] for tile in tiles] == list(range(6))
        assert min(tile["gemm_begin"] for tile in tiles) == min(
            v for t in tiles for n, v in t.items() if n != "tile_id"
        )
        for tile in tiles:
            assert 0 <= tile["gemm_begin"] < tile["gemm_end"] <= tile["poll_end"] <= tile["comm_end"]
            # A tile's sum starts at rank tile % 2, which adds nothing to it.
            assert ("op_begin" in tile) == (tile["tile_id"] % 2 != rank)


def test_figures_of_the_compiled_kernel(monkeypatch):
    """What ``matmul`` says of a kernel, with and without debug."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    compiled = SimpleNamespace(n_regs=90, n_spills=2, metadata=SimpleNamespace(shared=3072))
    kernel = {(4, 1): lambda a, **options: compiled}
    matmul = importlib.import_module("gemm_common").Matmul(kernel, {"num_warps": 8})
    figures = (matmul.get_matmul_registers, matmul.get_matmul_spills, matmul.get_matmul_shared)

    def refused(why: str) -> None:
        for figure in figures:
            with pytest.raises(RuntimeError, match=why):
                figure()

    matmul((4, 1), 0, TRACE=False)
    refused(r"call set_debug\(True\) before the matmul")
    matmul.set_debug(True)
    refused("call the matmul first")
    matmul((4, 1), 0, TRACE=False)
    assert [figure() for figure in figures] == [90, 2, 3072]
    matmul.set_debug(False)
    refused(r"call set_debug\(True\) before the matmul")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("-k", 1), "-k is 1 and is divided among 2 ranks; give one each"),
        (("--BLK_M", 24), "--BLK_M is 24; possible: powers of two from 16"),
        (("--gemm_sms", 0), "gemm_sms is 0; possible: from 1"),
        (("-r", 3), "--num_ranks is 3, but the launcher has started 2"),
    ],
)
def test_what_cannot_be(launch, words, why):
    result = launch(2, ATOMICS, *words)
    assert result.returncode == 2, result.stdout + result.stderr
    assert why in result.stderr


@pytest.mark.slow
def test_an_example_starts_its_ranks(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "TRITON_", "RANK", "WORLD_SIZE"))}
    done = subprocess.run(
        [sys.executable, str(ONE_SHOT), "-r", "3", "-m", "30", "-n", "40", "-k", "24", "--validate"],
        env={**environment, "PYTHONPATH": str(ROOT / "src"), "IRIS_RUNTIME": "cpu"},
        capture_output=True,
        text=True,
        timeout=90,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    passed(done.stdout.splitlines(), 3, "30x40x24 fp16 in 1 tiles")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", _target.compiled_archs())
def test_kernels_compile_and_fit_the_shared_memory(arch, tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "TRITON_"))}
    environment |= {"IRIS_RUNTIME": "gpu", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(WORKER), arch, "fp16", "fp32", "int8"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert {record["example"] for record in answer["records"]} == {path.stem for path in EXAMPLES}
    assert not [record for record in answer["records"] if record["shared"] > answer["limit"]]
