"""Axes, registration, and the options of a benchmark script."""

import pytest
import torch

from iris import bench
from iris.bench import _options, declare
from iris.errors import ArgumentError


def parsed(*argv, num_ranks=2):
    options = _options.parse(argv, declare.registered())
    return [(c.benchmark.name, *c.params.values()) for c in options.combinations(num_ranks)]


@pytest.fixture
def product():
    @bench.register
    @bench.axis("M", [1, 2])
    @bench.axis("dtype", [torch.float16, torch.float32])
    @bench.axis("algorithm", ["ring", "7"])
    def product(state, ctx):
        """Multiplies."""

    return product


def test_the_outermost_axis_varies_slowest(product):
    half, single = torch.float16, torch.float32
    expected = [("product", m, d, a) for m in (1, 2) for d in (half, single) for a in ("ring", "7")]
    assert parsed() == expected


def test_values_and_exclusions_of_the_command_line(product):
    argv = ("--axis_M=pow2:3:5", "--skip_M=16", "--axis_dtype=bf16,float64", "--skip_dtype=fp64", "--axis_algorithm=7")
    assert parsed(*argv) == [("product", m, torch.bfloat16, "7") for m in (8, 32)]
    assert parsed("--axis_M", "lin:5:20:5", "--axis_dtype=fp32", "--axis_algorithm=ring") == [
        ("product", m, torch.float32, "ring") for m in (5, 10, 15, 20)
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,3", [1, 2, 3]),
        ("0.5,1e3", [0.5, 1000.0]),
        ("pow2:0:3", [1, 2, 4, 8]),
        ("lin:1:6:2", [1, 3, 5]),
        ("fp16,float16,fp32,bf16,bfloat16", [torch.float16, torch.float16, torch.float32, *[torch.bfloat16] * 2]),
        ("ring,two_shot", ["ring", "two_shot"]),
        ("-4", [-4]),
    ],
)
def test_values(text, values):
    found = _options.parse_values("--axis_x", text)
    assert found == values
    assert list(map(type, found)) == list(map(type, values))


@pytest.mark.parametrize("text", ["pow2:1", "pow2:a:b", "pow2:5:3", "lin:1:2", "lin:1:9:0", "lin:9:1:1", "1,,2", ""])
def test_malformed_values_are_refused(text):
    with pytest.raises(ValueError, match=r"--axis_x|power_of_two|linear_range"):
        _options.parse_values("--axis_x", text)


@pytest.mark.parametrize(
    "argv", [["--nothing"], ["word"], ["--axis_Z=1"], ["--axis_M"], ["--n_rep=3"], ["--n_repeat=x"]]
)
def test_unknown_options_leave_with_2(product, argv, capsys):
    with pytest.raises(SystemExit) as stop:
        parsed(*argv)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert argv[0].partition("=")[0] in said
    if argv == ["--axis_Z=1"]:
        assert "axes: M, algorithm, dtype, num_ranks" in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--n_repeat=0"], "--n_repeat must be at least 1, got 0"),
        (["--heap_size=0"], "--heap_size must be at least 1"),
        (["--benchmark_filter=("], "no regular expression"),
        (["--axis_num_ranks=0"], "0 is no number of ranks"),
        (["--axis_num_ranks=two"], "'two' is no number of ranks"),
    ],
)
def test_impossible_values_are_refused(product, argv, message):
    with pytest.raises(ArgumentError, match=message.replace("(", r"\(")):
        parsed(*argv)


def test_ranges():
    assert bench.power_of_two(10, 12) == [1024, 2048, 4096]
    assert bench.linear_range(100, 300, 100) == [100, 200, 300]


def test_the_filter_searches(product):
    @bench.register
    def other(state, ctx):
        pass

    assert parsed("--benchmark_filter=oth") == [("other",)]
    assert len(parsed("--benchmark_filter=o")) == 8 + 1


def test_num_ranks_can_be_added(product):
    argv = ("--axis_num_ranks=2,4", "--axis_M=1", "--axis_dtype=fp16", "--axis_algorithm=ring")
    combinations = _options.parse(argv, declare.registered()).combinations(3)
    assert [(c.num_ranks, c.params["num_ranks"]) for c in combinations] == [(2, 2), (4, 4)]


def test_what_cannot_be_declared():
    def fn(state, ctx):
        pass

    for message, make in {
        "Python name": lambda: bench.axis("a b", [1]),
        "at least one": lambda: bench.axis("a", []),
        "needs alternate": lambda: bench.axis("a", [1], baseline=1),
        "which is no value": lambda: bench.axis("a", [1], alternate=True, baseline=2),
        "role 'x' is not known": lambda: bench.axis("a", [1], alternate=True, roles={1: "x"}),
        "cannot alternate": lambda: bench.axis("num_ranks", [1], alternate=True),
        "no number of ranks": lambda: bench.axis("num_ranks", [1.5]),
        "two axes a": lambda: bench.axis("a", [1])(bench.axis("a", [2])(fn)),
        "@bench.register above": lambda: bench.axis("c", [1])(bench.register(fn)),
    }.items():
        with pytest.raises(ArgumentError, match=message):
            make()


def test_two_of_one_name_are_refused(product):
    first = product

    def make():
        @bench.register
        def product(state, ctx):
            pass

    make()
    with pytest.raises(ArgumentError, match="two benchmarks have the name product"):
        declare.registered()
    bench.register(first)  # the same once more replaces itself
    assert len(declare._benchmarks) == 2


def test_nothing_selected_leaves_with_1(product, capsys):
    for argv, said in ((["--benchmark_filter=zzz"], "there are: product"), (["--skip_M=1,2"], "left out by --skip_")):
        with pytest.raises(SystemExit) as stop:
            bench.main(argv)
        assert stop.value.code == 1
        assert said in capsys.readouterr().err
    declare._benchmarks.clear()
    with pytest.raises(SystemExit) as stop:
        bench.main([])
    assert stop.value.code == 1
    assert "no benchmark is registered" in capsys.readouterr().err


def test_the_list(product, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["--benchmark_list"])
    assert stop.value.code == 0
    assert (
        capsys.readouterr().out == "product: Multiplies.\n  M: 1, 2\n  dtype: float16, float32\n  algorithm: ring, 7\n"
    )


def test_a_run_of_another_size_is_refused(product, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit) as stop:
        bench.main(["--axis_num_ranks=2,4"])
    assert stop.value.code == 1
    assert "the benchmarks have 2, 4: add --axis_num_ranks=3" in capsys.readouterr().err
