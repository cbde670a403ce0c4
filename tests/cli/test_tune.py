"""``iris tune``: what it asks for, what the ranks do, what it shows; and the tables that ``iris doctor`` tells of."""

import json
from dataclasses import replace

import pytest

from iris.cli import _tune_rank, tune
from iris.cli._tune_rank import run
from iris.cli.tune import Request, request_of
from iris.errors import ArgumentError, UnsupportedError
from iris.ops import _matmul_all_gather
from iris.runtime import gpus
from iris.tuning import autotune, store
from iris.tuning.query import Query
from simulated_ranks import SimulatedRanks

without_gpu = pytest.mark.skipif(bool(gpus.device_files()), reason="tells what a machine without a GPU is told")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "250")
    return tmp_path / "tuned"


def record(operation="all_gather_matmul", emulated=False, **sizes):
    sizes = tuple((sizes or {"M": 64, "N": 32, "K": 16}).items())
    query = Query(operation, "h200", "sm_90", "nvlink", 2, 132, "float16", sizes)
    name, date = "hbm_buffer 64x64", "2026-01-02"
    return query, store.Record(name, "hbm_buffer", {}, sizes, 1.25, 1.5, 1.2, "s", emulated, date=date)


def test_shapes_and_sizes_are_understood():
    asked = request_of("all_gather_matmul", "64x32x16,128X64*32, 1x1x2", None, 2, transpose="NT")
    assert asked == Request("all_gather_matmul", 2, ((64, 32, 16), (128, 64, 32), (1, 1, 2)), transpose="NT")
    assert Request.from_json(asked.to_json()) == asked
    sizes = request_of("all_reduce", None, "64,2KiB 1mib,1GiB,3MB", 1).sizes
    assert sizes == ((64,), (2048,), (1 << 20,), (1 << 30,), (3_000_000,))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((None, "1x1x1", None, 2), r"no operation was named; possible: all_gather_matmul, .*broadcast"),
        (("matmul", "1x1x1", None, 2), r"no operation 'matmul' to tune; possible: .*all_reduce"),
        (("all_gather_matmul", None, None, 2), "give --shapes"),
        (("all_gather_matmul", "2x2x2", "64", 2), "no --bytes"),
        (("all_reduce", "2x2x2", None, 2), "give --bytes"),
        (("all_gather_matmul", "", None, 2), "no size was given"),
        (("all_gather_matmul", "64x64", None, 2), "'64x64' is not possible; possible: MxNxK"),
        (("all_gather_matmul", "64x0x64", None, 2), "'64x0x64' is not possible"),
        (("all_gather_matmul", "64x-1x64", None, 2), "'64x-1x64' is not possible"),
        (("all_reduce", None, "64XB", 2), "'64XB' is not possible; possible: 65536, 64KiB"),
        (("all_reduce", None, "0", 2), "'0' is not possible"),
        (("all_gather_matmul", "64x64x63", None, 2), "K=63 of 64x64x63 cannot be shared by 2 ranks"),
        (("all_gather_matmul", "63x64x64", None, 2, "float16", 0), "M=63 of"),
        (("matmul_all_gather", "63x64x64", None, 2), "M=63 of"),
        (("matmul_all_reduce", "63x64x65", None, 2), "K=65 of"),
        (("all_reduce", None, "66", 8), "66 bytes cannot be shared by 8 ranks in float16; possible: multiples of 16"),
        (("all_gather_matmul", "2x2x2", None, 2, "int7"), "dtype 'int7' is not possible; possible: float16, bfloat16"),
        (("all_reduce", None, "64", 2, "float8_e5m2"), "collectives are tuned with float16"),
        (("all_gather_matmul", "2x2x2", None, 2, "float16", 2), "gather_dim 2 is not possible"),
        (("matmul_all_gather", "2x2x2", None, 2, "float16", 0), "--gather-dim is for all_gather_matmul"),
        (("all_gather_matmul", "2x2x2", None, 2, "float16", 1, "XY"), "transpose 'XY' is not possible; possible: NN"),
        (("all_gather_matmul", "2x2x2", None, 2, "float16", 1, "NN", 1), "1 candidates leave nothing to choose"),
    ],
)
def test_what_is_not_possible_is_refused_with_what_is(given, said):
    with pytest.raises(ArgumentError, match=said):
        request_of(*given)


def test_an_imitated_link_needs_ranks_in_one_process():
    with pytest.raises(ArgumentError, match="--link-gbps needs --loopback"):
        tune.tune(request_of("all_reduce", None, "64", 2), link_gbps=50)


@without_gpu
def test_without_a_gpu_nothing_is_started(iris_command):
    for more in ((), ("--loopback",)):
        result = iris_command("tune", "all_reduce", "--bytes", "1KiB", "-n", 2, *more)
        assert result.returncode == 2
        assert "GPU" in result.stderr
        assert "Traceback" not in result.stderr


def times(ctx, candidate):
    """PyTorch's operations take longest, so that it is a kernel that wins."""
    return 2.0 if candidate.algorithm == "torch" else 1.5 if candidate.params else 1.0


def body(ctx, request, timer=times):
    with autotune.timed_by(timer):
        return run(ctx, request)


REQUESTS = [
    Request("all_gather_matmul", 2, ((40, 24, 32),), candidates=3),
    Request("all_gather_matmul", 2, ((40, 24, 32),), "bfloat16", 0, "TN", 3),
    Request("matmul_all_gather", 2, ((40, 24, 16),), "float32", candidates=3),
    Request("matmul_all_reduce", 2, ((24, 40, 32),), transpose="NT", candidates=3),
    Request("matmul_reduce_scatter", 2, ((33, 24, 32), (16, 16, 16)), candidates=3),
    Request("all_gather", 2, ((512,),), candidates=3),
    Request("all_reduce", 2, ((512,),), "float32", candidates=3),
    Request("reduce_scatter", 2, ((512,),), candidates=3),
    Request("all_to_all", 2, ((512,),), candidates=3),
    Request("broadcast", 2, ((512,),), "bfloat16", candidates=3),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"{r.operation}-{r.dtype}-{r.transpose}")
def test_ranks_tune_what_was_asked_for_and_show_it(request_, place, capsys):
    assert SimulatedRanks(2, "sim").run(body, request_) == [0, 0]
    path = place / f"{request_.operation}.json"
    records = json.loads(path.read_text())["records"]
    assert len(records) == len(request_.sizes)
    shown = " ".join(capsys.readouterr().out.split())
    assert "without tuning" in shown
    assert "torch 2.0000" in shown
    assert "failed" not in shown
    assert str(path.name) in shown.replace(" ", "")
    for value in records.values():
        assert value["milliseconds"] < 2.0
        assert None not in value["candidates"].values()


def test_a_candidate_whose_result_is_wrong_is_not_taken(place, capsys, monkeypatch):
    right = _matmul_all_gather._run_torch

    def wrong(problem, out, *args):
        right(problem, out, *args)
        out[3, 2] += 1

    monkeypatch.setattr(_matmul_all_gather, "_run_torch", wrong)
    request = Request("matmul_all_gather", 2, ((40, 24, 16),), candidates=3)
    assert SimulatedRanks(2, "sim").run(body, request, lambda ctx, c: 0.5 if c.algorithm == "torch" else 1.0) == [0, 0]
    (value,) = json.loads((place / "matmul_all_gather.json").read_text())["records"].values()
    assert value["algorithm"] == "fused"
    assert value["candidates"]["torch"] is None
    shown = " ".join(capsys.readouterr().out.split())
    assert "torch failed: OutputError: wrong at (3, 2): " in shown
    assert "wrong elements: 1" in shown


def body_interpreted(ctx, request):
    run(ctx, request)


def test_the_interpreter_is_no_place_to_tune():
    for outcome in SimulatedRanks(2, "sim").run_expecting(body_interpreted, REQUESTS[0]):
        assert isinstance(outcome.error, UnsupportedError)
        assert "needs a GPU" in str(outcome.error)


def test_the_heap_has_room_for_what_is_asked():
    for asked in REQUESTS:
        for sizes in asked.sizes:
            least = 4 * sizes[0] * sizes[1] if len(sizes) == 3 else 2 * sizes[0]
            assert _tune_rank._heap_bytes(asked, sizes) >= least


def test_records_are_listed_and_cleared(place, iris_command, monkeypatch):
    query, found = record()
    store.write(query.operation, {query: found})
    other, emulated = record("all_reduce", bytes=1 << 20, emulated=True)
    store.write(other.operation, {other: emulated})
    with monkeypatch.context() as old:
        old.setattr(store, "versions", lambda: (("iris", "0.0.1"), ("triton", "3.0"), ("torch", "2.0")))
        store.write(query.operation, {replace(query, world=4): found})
    here = {"IRIS_CACHE_DIR": str(place.parent), "COLUMNS": "250"}
    listed = iris_command("tune", "--list", **here)
    assert listed.returncode == 0
    lines = listed.stdout.splitlines()
    assert "all_gather_matmul 64x32x16 float16, 2 ranks of h200" in listed.stdout
    assert "hbm_buffer 64x64" in listed.stdout
    assert "1.2500" in listed.stdout
    assert [line.split()[-1] for line in lines if "not used here" in line] == ["2.0"]
    assert sum("imitated link" in line for line in lines) == 1
    assert f"3 in {place.parent}" in lines[-1]
    cleared = iris_command("tune", "all_gather_matmul", "--clear", **here)
    assert "removed 2 records of all_gather_matmul" in cleared.stdout
    assert [found.operation for found in store.read_all()] == ["all_reduce"]
    assert "removed 1 record of all operations" in iris_command("tune", "--clear", **here).stdout
    assert "nothing has been tuned" in iris_command("tune", "--list", **here).stdout
    both = iris_command("tune", "--clear", "--list", **here)
    assert both.returncode == 2
    wrong = iris_command("tune", "nothing", "--clear", **here)
    assert wrong.returncode == 2
    assert "no operation 'nothing'" in wrong.stderr


def test_the_command_explains_itself(iris_command):
    text = " ".join(iris_command("tune", "--help", COLUMNS="200").stdout.split())
    options = ("--shapes", "--bytes", "--candidates", "--loopback", "--list", "--clear", "--timeout")
    for word in (*tune.OPERATIONS, *options):
        assert word in text
    result = iris_command("tune", "all_gather_matmul", "--shapes", "8x8")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("iris: the shape '8x8' is not possible")


def section(result, name):
    return {finding["name"]: finding for finding in json.loads(result.stdout)[name]}


@without_gpu
def test_doctor_tells_which_tables_apply(iris_command, place):
    query, found = record()
    store.write(query.operation, {query: found})
    here = {"IRIS_CACHE_DIR": str(place.parent)}
    known = section(iris_command("doctor", "--json", IRIS_GPU_ARCH="mi300x", **here), "tables")
    assert known["this machine"]["value"] == "mi300x, from IRIS_GPU_ARCH, for there is no GPU"
    assert known["all_gather_matmul"]["value"].startswith("table of mi300x: 28 entries, 2, 4, 8 ranks, xgmi; ")
    assert "all_gather_matmul" in known["rules"]["value"]
    assert "stand in" in known["predictions"]["value"]
    assert known["user cache"]["value"] == f"1 record in {place.parent}"
    assert "user cache folder" not in known
    unknown = section(iris_command("doctor", "--json", **here), "tables")
    assert "no product" in unknown["this machine"]["value"]
    assert "mi300x" in unknown["tables"]["value"]
    assert unknown["rules"]["value"] == "none for this machine"
    assert unknown["predictions"]["value"] == "not for this machine"


def test_doctor_tells_of_a_cache_that_cannot_be_written(iris_command, tmp_path):
    (tmp_path / "file").write_text("")
    result = iris_command("doctor", "--json", IRIS_CACHE_DIR=str(tmp_path / "file" / "cache"))
    finding = section(result, "tables")["user cache folder"]
    assert finding["state"] == "note"
    assert "is a file" in finding["value"]
    assert "IRIS_CACHE_DIR" in finding["remedy"]
    assert result.returncode == 0  # ranks run without it
