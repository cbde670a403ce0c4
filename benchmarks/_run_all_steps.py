"""The steps of run_all.py, most important first. An operation that is added gets a line in :func:`table`."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import _published

ALGORITHMS_SMALL = "torch,hbm_buffer,auto,matmul"
REDUCE_ALGORITHMS_SMALL = "torch,ccl,auto,matmul"
SMALL_SIZES, LARGE_SIZES = "4KiB,8KiB,16KiB,64KiB,256KiB", "1MiB,4MiB,16MiB,64MiB,256MiB"
SOME_SIZES = "4KiB,64KiB,1MiB,16MiB,256MiB"
FEW_SMS = 16  # of a collective that leaves the others to something else
# Layers of Llama 70B whose input is gathered, by two: (names, N, K, gather_dim). Each of so many ranks has N divided by
# them, and all of K. The input of the first two is sharded by tokens, that of the other two by features, since the
# layer before left it so. The other two may also have K divided, and their outputs added up: bench_matmul_reduce.py.
LLAMA = (
    ("qkv-gate_up", (10240, 57344), (8192,), 0),
    ("attention_out-down", (8192,), (8192, 28672), 1),
)
# Of the shapes of this machine's table so many are a step.
SEEDS, SEEDS_A_STEP = "mi300x", 6
# Layers whose configurations are swept, with the gather_dim: those of _tuned.GATHERED that the steps above measure.
SWEPT = (("n3584_k8192", 0), ("n3584_k8192", 1), ("llama_70b_qkv", 0), ("llama_70b_gate_up", 0))
# The grids of iris.concurrent: products of 512 rows to 8192 cubed, by their places in collect.SHAPES. A grid has more
# points than tuning times, since of fewer it would always find the best.
GRID_SHAPES, GRID_COLLECTIVES = (3, 7), ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
GRID_CASES = (GRID_SHAPES[1] - GRID_SHAPES[0]) * len(GRID_COLLECTIVES)
TESTS = (
    ("tests-gpu", ("tests/gpu",)),
    ("tests-device", ("tests/device", "tests/x")),
    ("tests-ops", ("tests/ops",)),
    ("tests-ccl", ("tests/ccl",)),
    ("tests-runtime", ("tests/runtime", "tests/tracing", "tests/testing")),
)
CPUS_FOR_WORKERS, WORKERS = 16, 4


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: of the step and of its files.
        what: in words.
        estimate: seconds; for a resumable one the least that is worth starting it for.
        words: after ``python``; ``{out}`` stands for the folder of results.
        kind: ``"machine"``, ``"bench"`` (a script of iris.bench), ``"collectives"``, ``"sweep"`` (of configurations),
            ``"grid"`` (of iris.concurrent) or ``"tests"``.
        resumable: whether a run that is ended goes on next time, with the output that it left.
        impossible: why it cannot be done with this number of ranks; empty when it can.
        then: a command after it, also when it was ended; it makes of the output what the summary reads.
    """

    name: str
    what: str
    estimate: float
    words: tuple[str, ...]
    kind: str = "bench"
    resumable: bool = False
    impossible: str = ""
    then: tuple[str, ...] = ()

    @property
    def output(self) -> str:
        """The file it writes, below the folder of results."""
        return f"data/{self.name}.json" if self.kind != "tests" else f"data/{self.name}.jsonl"

    @property
    def digest(self) -> str:
        """The file that ``then`` writes, below the folder of results."""
        return f"data/{self.name}.digest.json"

    @property
    def limit(self) -> float:
        """Seconds after which it is ended, if the budget does not end it before."""
        return 1800.0 if self.resumable else max(90.0, 3 * self.estimate)


def table(ranks: int, small: bool = False) -> list[Step]:
    """All steps for a number of ranks.

    Args:
        ranks: how many.
        small: tiny problems, to try the steps without GPUs.
    """

    def run(script, *words):
        return ("-m", "_iris_command", "run", "-n", str(ranks), f"benchmarks/{script}", *words)

    def bench(name, what, estimate, script, *words, tiny=(), impossible="", kind="bench"):
        own = run(
            script,
            f"--axis_num_ranks={ranks}",
            f"--benchmark_out={{out}}/data/{name}.json",
            *(tiny if small else words),
        )
        return Step(name, what, estimate, own, kind, impossible=impossible)

    def links(name, what, estimate, which, *tiny):
        return bench(
            name,
            what,
            estimate,
            "bench_links.py",
            f"--benchmark_filter={which}",
            tiny=(f"--benchmark_filter={which}", *tiny),
        )

    def all_gather_matmul(sizes, estimate, dtypes="fp16"):
        return bench(
            f"all_gather_matmul-{sizes.replace(',', '-')}",
            f"all_gather_matmul, N=3584, K=8192, M={sizes}, {dtypes}",
            estimate,
            "bench_all_gather_matmul.py",
            f"--axis_M={sizes}",
            "--axis_gather_dim=0,1",
            f"--axis_dtype={dtypes}",
            tiny=(
                f"--axis_M={32 * (1 + sizes.count(','))}",
                "--axis_N=40",
                "--axis_K=48",
                "--axis_gather_dim=0,1",
                "--axis_dtype=fp16",
                f"--axis_algorithm={ALGORITHMS_SMALL}",
                "--n_repeat=1",
            ),
        )

    def llama(layers, columns, depths, gather_dim):
        own = [n // ranks for n in columns]
        odd = [n for n in columns if n % ranks]
        shown = f"N={_listed(columns)}/{ranks}={_listed(own)}, K={_listed(depths)}, gather_dim={gather_dim}"
        return bench(
            f"llama-{layers}",
            f"all_gather_matmul, Llama 70B, {layers}: {shown}",
            55,
            "bench_all_gather_matmul.py",
            "--axis_M=64,1024,4096,16384",
            f"--axis_N={_listed(own)}",
            f"--axis_K={_listed(depths)}",
            f"--axis_gather_dim={gather_dim}",
            "--axis_dtype=bf16",
            "--skip_algorithm=pull,own matmul",
            tiny=(
                "--axis_M=32",
                "--axis_N=40",
                "--axis_K=48",
                f"--axis_gather_dim={gather_dim}",
                "--axis_dtype=bf16",
                f"--axis_algorithm={ALGORITHMS_SMALL}",
                "--n_repeat=1",
            ),
            impossible=f"N={_listed(odd)} is no multiple of {ranks} ranks" if odd else "",
        )

    def seed_shapes():
        published = _published.shapes(SEEDS)
        own = [entry for entry in published if entry["num_ranks"] == ranks]
        odd = [entry for entry in own if entry["K"] % ranks]
        shapes = [_published.shown(entry) for entry in own if entry not in odd]
        impossible = ""
        if not shapes:
            known = sorted({entry["num_ranks"] for entry in published})
            impossible = f"the table of {SEEDS} has shapes for {_listed(known)} ranks, not for {ranks}"
        what = f"all_gather_matmul, shapes that were measured on {SEEDS} with {ranks} ranks"
        without = f", without {_listed(map(_published.shown, odd))}, whose K is no multiple of {ranks}" if odd else ""
        steps = max(1, -(-len(shapes) // SEEDS_A_STEP))
        for number in range(1, steps + 1):
            some = shapes[number - 1 :: steps]
            yield bench(
                f"seed_shapes-{number}",
                f"{what}, {len(some)} of {len(shapes)}{without}",
                90,
                "bench_all_gather_matmul.py",
                f"--shapes={SEEDS}",
                f"--benchmark_filter=^{SEEDS}_{ranks}_ranks$",
                f"--axis_shape={_listed(some)}",
                "--skip_algorithm=own matmul",
                # A call takes up to 0.3 s.
                "--n_warmup=1",
                "--n_repeat=5",
                tiny=(
                    f"--shapes={SEEDS}",
                    f"--benchmark_filter=^{SEEDS}_{ranks}_ranks$",
                    "--axis_shape=32x40x48",
                    f"--axis_algorithm={ALGORITHMS_SMALL}",
                    "--n_repeat=1",
                ),
                impossible=impossible,
            )

    def sweep(layer, gather_dim):
        return bench(
            f"sweep-{layer}-{gather_dim}",
            f"configurations of all_gather_matmul, {layer}, gather_dim={gather_dim}, bf16",
            90,
            "collect_tuned.py",
            "--benchmark_filter=all_gather_matmul",
            f"--axis_layer={layer}",
            f"--axis_gather_dim={gather_dim}",
            tiny=(
                "--benchmark_filter=all_gather_matmul",
                f"--axis_layer={layer}",
                f"--axis_gather_dim={gather_dim}",
                "--axis_M=1024",
                "--small",
                "--variations=0",
                "--n_repeat=1",
            ),
            kind="sweep",
        )

    def grid():
        name = "concurrent_grid"
        out = f"{{out}}/data/{name}.json"
        own = ("-m", "_iris_command", "run", "-n", str(ranks), "-m", "iris.concurrent.tuning_data.collect")
        own += ("--out", out, "--cases", "{}:{}".format(*GRID_SHAPES), "--collectives", ",".join(GRID_COLLECTIVES))
        own += ("--budget-s", "1")
        return Step(
            name,
            f"iris.concurrent, grids of splits and tiles of {GRID_CASES} cases",
            60,
            own,
            "grid",
            resumable=True,
            impossible="splits are timed on GPUs, and tiny problems have none that matter" if small else "",
            then=("benchmarks/report_concurrent.py", out, "--json", f"{{out}}/data/{name}.digest.json"),
        )

    def matmul_reduce(sizes, estimate, dtypes="fp16", shapes=""):
        layers = ("--shapes=llama70b", "--skip_algorithm=own matmul") if shapes else ()
        # The K of every problem is divided among the ranks.
        odd = 8192 % ranks or (shapes and 28672 % ranks)
        which = "layers of Llama 70B" if shapes else "N=3584, K=8192"
        return bench(
            f"matmul_reduce-{shapes and shapes + '-'}{sizes.replace(',', '-')}",
            f"matmul_all_reduce, matmul_reduce_scatter, {which}, M={sizes}, {dtypes}",
            estimate,
            "bench_matmul_reduce.py",
            *layers,
            f"--axis_M={sizes}",
            f"--axis_dtype={dtypes}",
            tiny=("--small", *layers[:1], f"--axis_algorithm={REDUCE_ALGORITHMS_SMALL}", "--n_repeat=1"),
            impossible=f"K=8192 or K=28672 is no multiple of {ranks} ranks" if odd else "",
        )

    def concurrent(sizes, estimate):
        return bench(
            "concurrent",
            f"iris.concurrent, a GEMM of {sizes} cubed beside a collective, fp16",
            estimate,
            "bench_concurrent.py",
            f"--axis_gemm={','.join('x'.join([size] * 3) for size in sizes.split(','))}",
            "--axis_share=0.2,0.5,1",
            "--candidates=3",
            "--n_repeat=5",
            tiny=("--small", "--candidates=1", "--n_repeat=1"),
        )

    def collective(operation, estimate, sizes=SOME_SIZES, part="", more=()):
        name = operation + part
        words = ("--ops", operation, "--sizes", sizes, *more, "--json", f"{{out}}/data/{name}.json")
        tiny = ("--ops", operation, "--sizes", "4KiB", "--samples", "2", *more, "--json", f"{{out}}/data/{name}.json")
        first, last = sizes.split(",")[0], sizes.split(",")[-1]
        what = f"{operation}, bf16, {first} to {last}"
        return Step(name, what, estimate, run("bench_collectives.py", *(tiny if small else words)), "collectives")

    def tests(name, folders):
        # More processes of pytest than one share the GPUs, but most of a test is compilation.
        several = (os.cpu_count() or 1) >= CPUS_FOR_WORKERS and importlib.util.find_spec("xdist") is not None
        workers = ("-n", str(WORKERS)) if several else ()
        words = (*folders, "-m", "gpu", "--runtime", "gpu", "--worlds", str(ranks), *workers)
        if small:
            words = ("tests/device/test_signal.py", "-k", "counting", "--runtime", "cpu", "--worlds", str(ranks))
        files = ("--record-outcomes", f"{{out}}/data/{name}.jsonl", "--leave-out", f"{{out}}/data/{name}.done.json")
        files += ("--most-ranks", str(ranks))
        own = ("-m", "pytest", "-p", "_run_all_tests", *files, "-q", "-p", "no:cacheprovider", *words)
        return Step(name, f"pytest {' '.join(folders)}", 60, own, "tests", resumable=True)

    steps = [
        Step(
            "machine",
            "GPUs, how they are joined, versions",
            15,
            ("benchmarks/_run_all_machine.py", "{out}/data/machine.json"),
            "machine",
        ),
        links(
            "links",
            "puts and gets by kernels and the copy engine, 1 MiB to 1 GiB",
            60,
            "bandwidth",
            "--axis_nbytes=8192",
            "--axis_by=2,copy_engine",
            "--n_repeat=1",
        ),
        links("round_trip", "round trips of a flag", 20, "round_trip", "--axis_trips=32", "--n_repeat=1"),
        all_gather_matmul("4096", 50, "fp16,bf16"),
        all_gather_matmul("16384", 55, "fp16,bf16"),
        collective("all_reduce", 45, SMALL_SIZES, "-small"),
        collective("all_gather", 70, f"{SMALL_SIZES},{LARGE_SIZES}", more=("--comm_sms", str(FEW_SMS))),
        matmul_reduce("4096", 50, "fp16,bf16"),
        matmul_reduce("16384", 35),
        concurrent("8192,4096", 75),
        matmul_reduce("64,256,1024", 65),
        collective("all_reduce", 50, LARGE_SIZES, "-large"),
        *(llama(*layer) for layer in LLAMA),
        *seed_shapes(),
        all_gather_matmul("8192", 35),
        all_gather_matmul("64,128,256", 50),
        matmul_reduce("4096,16384", 75, "bf16", "llama"),
        matmul_reduce("64,1024", 65, "bf16", "llama"),
        all_gather_matmul("512,1024,2048", 50),
        collective("reduce_scatter", 35),
        collective("all_to_all", 25),
        collective("broadcast", 30),
        bench(
            "copy",
            "copies inside a GPU and from a peer",
            25,
            "bench_copy.py",
            tiny=("--axis_nbytes=16384", "--n_repeat=1"),
        ),
        grid(),
        *(sweep(*one) for one in SWEPT),
        *(tests(*group) for group in TESTS),
    ]
    names = [step.name for step in steps]
    assert len(set(names)) == len(names), names
    return steps


def _listed(numbers):
    return ",".join(map(str, numbers))
