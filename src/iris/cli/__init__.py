"""The command line: ``iris run``, ``iris doctor``, ``iris env``, ``iris bench``, ``iris demo``, ``iris trace``."""

from iris.cli._app import main

__all__ = ["main"]
