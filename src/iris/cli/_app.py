"""The commands and their help. What a command does is imported when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from iris.errors import IrisError

app = typer.Typer(
    help="Multi-GPU Triton kernels over a symmetric heap.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the ``iris`` command."""
    try:
        app(prog_name="iris")
    except IrisError as error:
        print(f"iris: {error}", file=sys.stderr)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            version = metadata.version("iris-kernels")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        print(f"iris {version}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options of the command itself."""


_RUN_HELP = (
    "Run a program as several ranks on this machine.\n\n"
    "The ranks find each other as under torchrun. With fewer GPUs than ranks, ranks share GPUs; with none, kernels run "
    "on the CPU through Triton's interpreter.\n\n"
    "When a rank fails, the others are ended and the traceback of the rank that failed first is printed last. However "
    "the run ends, nothing is left behind.\n\n"
    "[bold]iris run -n 4 train.py --steps 10[/]\n\n"
    "[bold]iris run -n 2 -m mypackage.serve --port 0[/]\n\n"
    "[bold]iris run --sim --seeds 20 -n 4 train.py[/]"
)
_SIMULATOR = "In one process"


# Options end at the first word that is none, so that everything after the script belongs to the script.
@app.command("run", help=_RUN_HELP, context_settings={"allow_interspersed_args": False})
def _run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM [ARGUMENT]...", help="The script, or the module with [bold]-m[/]; then its own arguments."
        ),
    ],
    num_ranks: Annotated[int, typer.Option("-n", "--num-ranks", min=1, help="How many rank processes to start.")] = 1,
    module: Annotated[bool, typer.Option("-m", "--module", help="PROGRAM is the name of a module.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="End all ranks after this time, and report where they were."),
    ] = None,
    no_python: Annotated[
        bool, typer.Option("--no-python", "--python-free", help="PROGRAM is any program, not a Python script.")
    ] = False,
    sim: Annotated[
        bool,
        typer.Option(
            "--sim",
            rich_help_panel=_SIMULATOR,
            help="Simulate the ranks: no GPU; races, deadlocks and accesses to wrong memory are found.",
        ),
    ] = False,
    loopback: Annotated[
        bool, typer.Option("--loopback", rich_help_panel=_SIMULATOR, help="Run all ranks on one GPU, without checks.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, rich_help_panel=_SIMULATOR, help="Of the order in which ranks and programs run; 0 by default."
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=_SIMULATOR, help="Repeat with so many seeds from 0, until one fails."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=_SIMULATOR, help="The device to simulate; mi300x by default."),
    ] = None,
    resident_programs: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=_SIMULATOR, help="Programs of a rank that run at a time in the simulator."),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            rich_help_panel=_SIMULATOR,
            help="What to look for: races, bounds, uninitialized; all by default. Deadlocks are always found.",
        ),
    ] = None,
    step_limit: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=_SIMULATOR, help="Polls and atomics after which a simulation is given up."),
    ] = None,
    link_gbps: Annotated[
        float | None,
        typer.Option(metavar="GB/S", rich_help_panel=_SIMULATOR, help="Pace reads and writes of peers in loopback."),
    ] = None,
    link_per_peer: Annotated[
        bool,
        typer.Option(
            "--link-per-peer",
            rich_help_panel=_SIMULATOR,
            help="Every pair of ranks has links of that rate; by default a rank has one to all peers together.",
        ),
    ] = False,
) -> None:
    """Start the ranks; leave with the exit code of the run."""
    from iris.cli.run import launch
    from iris.cli.simulate import check_options, simulate

    if module and no_python:
        raise typer.BadParameter("a module is Python; give -m or --no-python, not both")
    if sim and loopback:
        raise typer.BadParameter("ranks are simulated or run on a GPU; give --sim or --loopback, not both")
    words = ["-m", *command] if module else command
    options = {
        "--seed": seed,
        "--seeds": seeds,
        "--device": device,
        "--resident-programs": resident_programs,
        "--check": check,
        "--step-limit": step_limit,
        "--link-gbps": link_gbps,
        "--link-per-peer": link_per_peer or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if sim or loopback:
        simulate("--sim" if sim else "--loopback", words, num_ranks, given, timeout=timeout, python=not no_python)
    check_options("", given)
    raise typer.Exit(launch(words, num_ranks, timeout=timeout, python=not no_python))


@app.command("doctor")
def _doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Say what this machine offers, what is missing and how to mend it.

    Leaves with 0 when ranks can run here, with 1 when they cannot.
    """
    from iris.cli.doctor import doctor

    raise typer.Exit(doctor(as_json=as_json))


@app.command("env")
def _environment() -> None:
    """List the environment variables of Iris, with their values here."""
    from iris.cli.doctor import print_variables

    print_variables()


_BENCH_HELP = (
    "Run a benchmark script, or list the scripts of a folder.\n\n"
    "A script declares its benchmarks with [bold]iris.bench[/] and starts its ranks by itself, once for each number of "
    "ranks that it measures. What follows the script belongs to it: [bold]iris bench SCRIPT --help[/] shows its "
    "options. To choose the ranks yourself, or to simulate them, start it with [bold]iris run[/].\n\n"
    "Leaves with the exit code of the script: 1 when a result was wrong or could not be measured.\n\n"
    "[bold]iris bench[/]\n\n"
    "[bold]iris bench benchmarks/bench_copy.py --axis_num_ranks=2 --benchmark_out copy.json[/]"
)


@app.command("bench", help=_BENCH_HELP, context_settings={"allow_interspersed_args": False})
def _bench(
    script: Annotated[
        Path | None,
        typer.Argument(
            metavar="SCRIPT|FOLDER",
            help="The script; or a folder, [bold]benchmarks[/] or else the current one by default.",
        ),
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="Options of the script.")] = None,
) -> None:
    """Become the script, or list scripts."""
    from iris.cli.bench import bench

    bench(script, arguments or [])


_TUNE_HELP = (
    "Measure several ways to run an operation on this machine's GPUs, and keep the best of each problem.\n\n"
    "OPERATION is all_gather_matmul, matmul_all_gather, matmul_all_reduce or matmul_reduce_scatter, with "
    "[bold]--shapes[/], or all_gather, all_reduce, reduce_scatter, all_to_all or broadcast, with [bold]--bytes[/].\n\n"
    "A shape MxNxK is that of the whole product, of which the ranks have parts. What would run without tuning and "
    "PyTorch's operations are always among the candidates, results are checked before they are timed, and the slowest "
    "rank decides. Programs of this user on this machine take what was found.\n\n"
    "Leaves with 0 when everything was tuned.\n\n"
    "[bold]iris tune all_gather_matmul --shapes 4096x4096x8192,8192x4096x14336 -n 8[/]\n\n"
    "[bold]iris tune all_reduce --bytes 64KiB,1MiB,64MiB -n 4 --dtype bfloat16[/]\n\n"
    "[bold]iris tune --list[/]"
)


@app.command("tune", help=_TUNE_HELP)
def _tune(
    operation: Annotated[str | None, typer.Argument(metavar="OPERATION", help="What to tune.")] = None,
    shapes: Annotated[
        str | None, typer.Option(metavar="MxNxK,...", help="The products, by rows, columns and depth.")
    ] = None,
    nbytes: Annotated[
        str | None,
        typer.Option("--bytes", metavar="SIZE,...", help="The collectives, by size: 65536, 64KiB, 1MiB, ..."),
    ] = None,
    num_ranks: Annotated[int, typer.Option("-n", "--num-ranks", min=1, help="How many ranks take part.")] = 1,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="float16, bfloat16, float32, float8_e4m3fn, ...")
    ] = "float16",
    gather_dim: Annotated[
        int, typer.Option(help="Of all_gather_matmul: 1 where ranks have columns of A, 0 where they have rows.")
    ] = 1,
    transpose: Annotated[
        str, typer.Option(metavar="NN|NT|TN|TT", help="T for an A or B whose columns lie together in memory.")
    ] = "NN",
    candidates: Annotated[int, typer.Option(help="How many ways to try for a problem.")] = 8,
    loopback: Annotated[
        bool, typer.Option("--loopback", rich_help_panel=_SIMULATOR, help="Run all ranks on one GPU.")
    ] = False,
    link_gbps: Annotated[
        float | None,
        typer.Option(metavar="GB/S", rich_help_panel=_SIMULATOR, help="Pace reads and writes of peers in loopback."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End all ranks after this time, and report where they were.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show what was tuned on this machine, and leave.")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Forget what was tuned of OPERATION, or all, and leave.")
    ] = False,
) -> None:
    """Tune, list or clear."""
    from iris.cli import tune

    if listed and clear:
        raise typer.BadParameter("records are shown or removed; give --list or --clear, not both")
    if listed or clear:
        tune.show_records() if listed else tune.clear_records(operation)
        return
    request = tune.request_of(operation, shapes, nbytes, num_ranks, dtype, gather_dim, transpose.upper(), candidates)
    raise typer.Exit(tune.tune(request, loopback=loopback, link_gbps=link_gbps, timeout=timeout))


@app.command("demo")
def _demo(
    num_ranks: Annotated[
        int, typer.Option("-n", "--num-ranks", min=1, help="How many ranks to split the matmuls over.")
    ] = 4,
    dtype: Annotated[
        str, typer.Option(metavar="float32|float16|bfloat16", help="Type of the numbers in the matmuls.")
    ] = "float32",
    layer: Annotated[int, typer.Option(min=0, max=5, help="Layer whose feed-forward block runs.")] = 0,
    algorithm: Annotated[
        str, typer.Option(metavar="auto|pull|torch", help="Algorithm of all_gather_matmul; auto lets it choose.")
    ] = "auto",
    sentences: Annotated[
        Path | None, typer.Option("--sentences", metavar="FILE", help="Sentences of your own, one a line.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results to a JSON file.")
    ] = None,
) -> None:
    """Run sentences through a layer of all-MiniLM-L6-v2 whose feed-forward block is split over several ranks.

    Leaves with 0 when the results match float64, with 1 when they do not.
    """
    from iris.cli.run import launch

    arguments = ["--dtype", dtype, "--layer", str(layer), "--algorithm", algorithm]
    arguments += ["--sentences", str(sentences)] if sentences else []
    arguments += ["--json", str(json_file)] if json_file else []
    # By name, as the ranks get it too: the command line knows how to start the demo and nothing else of it.
    inputs = importlib.import_module("iris.demo.inputs")
    inputs.check(inputs.parse(arguments))
    raise typer.Exit(launch(["-m", "iris.demo", *arguments], num_ranks))


@app.command("trace")
def _trace(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="A trace, or the traces of several ranks, as JSON.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The picture: .png, .svg or .pdf; else FILE as .png."),
    ] = None,
    picture: Annotated[bool, typer.Option("--picture/--no-picture", help="Draw a picture.")] = True,
) -> None:
    """Show what `ctx.tracing.export` recorded or `iris.sim.predict` predicted: figures, and a picture of each rank.

    Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) open the same files.
    """
    from iris.cli.trace import trace

    trace(files, output, picture)
