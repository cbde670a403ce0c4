"""The command line: ``iris run``, ``iris doctor``, ``iris env``, ``iris demo``."""

from iris.cli._app import main

__all__ = ["main"]
