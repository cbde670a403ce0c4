"""``iris tune``: measures ways to run an operation on the ranks of this machine, and keeps the best of each problem."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from iris.errors import ArgumentError
from iris.runtime import gpus

PRODUCTS = ("all_gather_matmul", "matmul_all_gather", "matmul_all_reduce", "matmul_reduce_scatter")
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast")
OPERATIONS = PRODUCTS + COLLECTIVES
DTYPES = (
    "float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
TRANSPOSES = ("NN", "NT", "TN", "TT")
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 1000, "MB": 1000**2, "GB": 1000**3}


@dataclass(frozen=True)
class Request:
    """What is to be tuned; travels to the ranks as JSON.

    Attributes:
        operation: one of :data:`OPERATIONS`.
        ranks: how many.
        sizes: of each problem: M, N and K of a product, bytes of a collective.
        dtype: one of :data:`DTYPES`.
        gather_dim: of all_gather_matmul.
        transpose: one of :data:`TRANSPOSES`: T for an A or B whose columns are contiguous.
        candidates: how many ways to try for a problem.
    """

    operation: str
    ranks: int
    sizes: tuple[tuple[int, ...], ...]
    dtype: str = "float16"
    gather_dim: int = 1
    transpose: str = "NN"
    candidates: int = 8

    def to_json(self) -> str:
        """The text that :meth:`from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """The request that :meth:`to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "sizes": tuple(tuple(sizes) for sizes in fields["sizes"])})


def request_of(
    operation: str | None,
    shapes: str | None,
    nbytes: str | None,
    num_ranks: int,
    dtype: str = "float16",
    gather_dim: int = 1,
    transpose: str = "NN",
    candidates: int = 8,
) -> Request:
    """What the words of a command line ask for.

    Raises:
        ArgumentError: says what is not possible, and what is.
    """
    if operation not in OPERATIONS:
        given = "no operation was named" if operation is None else f"there is no operation {operation!r} to tune"
        raise ArgumentError(f"{given}; possible: {', '.join(OPERATIONS)}")
    product = operation in PRODUCTS
    if product and (shapes is None or nbytes is not None):
        raise ArgumentError(f"{operation} is tuned for shapes: give --shapes MxNxK[,MxNxK...], and no --bytes")
    if not product and (nbytes is None or shapes is not None):
        raise ArgumentError(f"{operation} is tuned for sizes: give --bytes 64KiB[,1MiB...], and no --shapes")
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype {dtype!r} is not possible; possible: {', '.join(DTYPES)}")
    if not product and dtype.startswith("float8"):
        raise ArgumentError(f"collectives are tuned with {', '.join(DTYPES[:3])}, not {dtype}")
    if gather_dim not in (0, 1):
        raise ArgumentError(f"gather_dim {gather_dim} is not possible; possible: 0 (A has rows), 1 (A has columns)")
    if gather_dim == 0 and operation != "all_gather_matmul":
        raise ArgumentError(f"--gather-dim is for all_gather_matmul, not for {operation}")
    if transpose not in TRANSPOSES:
        raise ArgumentError(f"transpose {transpose!r} is not possible; possible: {', '.join(TRANSPOSES)}")
    if candidates < 2:
        raise ArgumentError(f"{candidates} candidates leave nothing to choose; possible: 2 and more")
    sizes = tuple(map(_shape, _words(shapes))) if product else tuple((_bytes(word),) for word in _words(nbytes))
    request = Request(operation, num_ranks, sizes, dtype, gather_dim, transpose, candidates)
    for one in sizes:
        _check_divides(request, one)
    return request


def tune(
    request: Request, *, loopback: bool = False, link_gbps: float | None = None, timeout: float | None = None
) -> int:
    """Start the ranks and let them tune; with ``loopback`` become the process that runs them all.

    Returns:
        0 when everything could be tuned, otherwise another exit code.

    Raises:
        ArgumentError: the options do not go together, or there is no GPU.
    """
    command = ["-m", "iris.cli._tune_rank", request.to_json()]
    if loopback:
        from iris.cli.simulate import simulate

        given = {} if link_gbps is None else {"--link-gbps": link_gbps}
        simulate("--loopback", command, request.ranks, given, timeout=timeout)
    if link_gbps is not None:
        raise ArgumentError("--link-gbps needs --loopback; between processes links are real")
    if not gpus.visible().count:
        raise ArgumentError("tuning measures on a GPU, and none is visible here; `iris doctor` says what is missing")
    from iris.cli.run import launch

    return launch(command, request.ranks, timeout=timeout)


def show(tuning: Any) -> None:
    """Print what came of tuning a problem, an :class:`iris.tuning.autotune.Tuning`."""
    console = Console(highlight=False)
    record = tuning.record
    if not tuning.trials:
        console.print(Text(f"{tuning.query}: {record.algorithm}, tuned before"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False, title_justify="left")
    table.title = f"{tuning.query} ({tuning.seconds:.1f} s)"
    table.add_column("candidate", overflow="fold")
    for title in ("ms", "of default"):
        table.add_column(title, justify="right")
    table.add_column("", overflow="fold")
    default = tuning.trials[0].milliseconds
    for number, trial in enumerate(tuning.trials):
        notes = ["without tuning"] if number == 0 else []
        notes += ["taken"] if trial.candidate.name == record.name else []
        if trial.milliseconds is None:
            table.add_row(trial.candidate.name, "", "", Text(f"failed: {trial.failure}", "red"))
            continue
        share = "" if not default else f"{trial.milliseconds / default:.3f}"
        style = "green" if "taken" in notes else ""
        table.add_row(Text(trial.candidate.name, style), f"{trial.milliseconds:.4f}", share, ", ".join(notes))
    console.print(table)
    where = f"stored in {tuning.path}" if tuning.path else "not stored, so it is forgotten with this program"
    console.print(Text(f"{record.algorithm}: {where}\n"), soft_wrap=True)


def show_records() -> None:
    """Print what the user's cache holds."""
    from iris.tuning import store

    console = Console(highlight=False)
    saved = store.saved_records()
    place = store.folder()
    if not saved:
        console.print(Text(f"nothing has been tuned: {place or 'there is no cache folder'} holds no records"))
        return
    here = store.versions()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for title in ("problem", "taken", "ms", "PyTorch", "when", ""):
        table.add_column(title, overflow="fold", justify="right" if title in ("ms", "PyTorch") else "left")
    for one in saved:
        record = one.record
        notes = ["over an imitated link or none"] if record.emulated else []
        if one.versions != here:
            notes.append("not used here: " + ", ".join(f"{name} {version}" for name, version in one.versions))
        table.add_row(
            str(one.query), record.name, _number(record.milliseconds), _number(record.torch_milliseconds),
            record.date[:10], "; ".join(notes),
        )  # fmt: skip
    console.print(table)
    console.print(Text(f"{len(saved)} in {place}"), soft_wrap=True)


def clear_records(operation: str | None) -> None:
    """Remove the records of an operation, or all, and say how many there were.

    Raises:
        ArgumentError: there is no such operation, or the files cannot be removed.
    """
    from iris.tuning import store

    if operation not in (None, *OPERATIONS):
        raise ArgumentError(f"there is no operation {operation!r} to tune; possible: {', '.join(OPERATIONS)}")
    try:
        count = store.clear(operation)
    except OSError as error:
        raise ArgumentError(f"what was tuned cannot be removed: {error}") from error
    print(f"removed {count} record{'s' * (count != 1)} of {operation or 'all operations'} in {store.folder()}")


def _number(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.4f}"


def _words(text: str | None) -> Sequence[str]:
    words = [word for word in re.split(r"[,\s]+", text or "") if word]
    if not words:
        raise ArgumentError("no size was given; possible: --shapes 4096x4096x8192, or --bytes 64KiB, several by commas")
    return words


def _shape(word: str) -> tuple[int, ...]:
    match = re.fullmatch(r"(\d+)[xX*](\d+)[xX*](\d+)", word)
    sizes = tuple(map(int, match.groups())) if match else ()
    if not sizes or 0 in sizes:
        raise ArgumentError(f"the shape {word!r} is not possible; possible: MxNxK, such as 4096x4096x8192")
    return sizes


def _bytes(word: str) -> int:
    match = re.fullmatch(r"(\d+)([A-Za-z]*)", word)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not int(match[1]):
        raise ArgumentError(f"the size {word!r} is not possible; possible: 65536, 64KiB, 1MiB, 2GiB, 1MB, ...")
    return int(match[1]) * unit


def _check_divides(request: Request, sizes: tuple[int, ...]) -> None:
    """Raise where a problem cannot be shared by the ranks."""
    ranks = request.ranks
    if request.operation in COLLECTIVES:
        width = 4 if request.dtype == "float32" else 2
        if sizes[0] % (ranks * width):
            raise ArgumentError(
                f"{sizes[0]} bytes cannot be shared by {ranks} ranks in {request.dtype}; possible: multiples of "
                f"{ranks * width}"
            )
        return
    M, _, K = sizes
    shared = {("all_gather_matmul", 1): ("K", K), ("all_gather_matmul", 0): ("M", M)}
    shared |= {("matmul_all_gather", 1): ("M", M)}
    shared |= {("matmul_all_reduce", 1): ("K", K), ("matmul_reduce_scatter", 1): ("K", K)}
    name, size = shared.get((request.operation, request.gather_dim), ("", 0))
    if size % ranks:
        raise ArgumentError(f"{name}={size} of {'x'.join(map(str, sizes))} cannot be shared by {ranks} ranks evenly")
