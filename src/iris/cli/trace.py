"""``iris trace``: figures and a picture of recorded or predicted traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from iris.tracing import chrome, figures, gantt


def trace(files: Sequence[Path], output: Path | None, picture: bool) -> None:
    """Print the figures of the files and draw their picture.

    Args:
        files: one trace, or one for each rank.
        output: where the picture goes; None for beside the first file, if matplotlib is installed.
        picture: whether to draw one.

    Raises:
        ArgumentError: a file is no trace, or the picture that was asked for cannot be drawn.
    """
    if picture and output is not None:
        gantt.check_output(output)
    found = chrome.read(*files)
    print(figures.report(found))
    if not picture:
        return
    if output is None and not gantt.available():
        print("\nno picture: matplotlib is not installed (pip install 'iris-kernels[plot]')")
        return
    print(f"\npicture: {gantt.draw(found, output or files[0].with_suffix('.png'))}")
