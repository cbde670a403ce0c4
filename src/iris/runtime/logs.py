"""The ``iris`` logger: one handler, and lines that say which rank speaks.

A line reads ``HH:MM:SS LEVEL [Iris] [rank/world] [module] message``, with ``?`` for a rank that is not known. The level
is ``IRIS_LOG_LEVEL`` until :func:`set_logger_level` or the program changes it.

Records do not propagate to the root logger, or a program with a root handler would print them twice. pytest's
``caplog`` hears such a logger from pytest 9 on. For older ones a test calls ``logger.addHandler(caplog.handler)``,
which does no harm where the handler is there already, and ``logger.removeHandler(caplog.handler)`` at its end.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from iris import _env
from iris.errors import ArgumentError

DEBUG = logging.DEBUG
INFO = logging.INFO
WARNING = logging.WARNING
ERROR = logging.ERROR

_LEVELS = {"DEBUG": DEBUG, "INFO": INFO, "WARNING": WARNING, "ERROR": ERROR, "CRITICAL": logging.CRITICAL}
_HANDLER_NAME = "iris"

logger = logging.getLogger("iris")


class IrisFormatter(logging.Formatter):
    """Formats a record as ``HH:MM:SS LEVEL [Iris] [rank/world] [module] message``.

    The rank and the number of ranks come from the record's attributes ``iris_rank`` and ``iris_num_ranks``.
    """

    def __init__(self):
        super().__init__(
            "%(asctime)s %(levelname)s [Iris] [%(iris_rank)s/%(iris_num_ranks)s] [%(module)s] %(message)s",
            datefmt="%H:%M:%S",
            defaults={"iris_rank": "?", "iris_num_ranks": "?"},
        )


class _StandardErrorHandler(logging.StreamHandler):
    """Writes to whatever ``sys.stderr`` is when a record comes, as notebooks and test runners replace it."""

    def __init__(self):
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def set_logger_level(level: int | str) -> None:
    """Set the lowest level that the ``iris`` logger prints.

    Args:
        level: ``iris.DEBUG``, ``INFO``, ``WARNING``, ``ERROR`` or ``logging.CRITICAL``, or such a name in any case.

    Raises:
        ArgumentError: the level is not one of these.
    """
    logger.setLevel(_level(level))


def log_rank(
    level: int | str,
    msg: object,
    *args: object,
    rank: int | None = None,
    num_ranks: int | None = None,
    stacklevel: int = 1,
) -> None:
    """Log ``msg % args`` with the rank that speaks. Formats nothing when the level is switched off.

    Args:
        level: as in :func:`set_logger_level`.
        msg: the message or its format.
        args: the values of the format.
        rank: the rank, ``None`` when it is not known.
        num_ranks: the number of ranks, ``None`` when it is not known.
        stacklevel: which caller the line names as its module: 1 the direct one, 2 that one's caller.

    Raises:
        ArgumentError: the level is not known.
    """
    number = _level(level)
    if logger.isEnabledFor(number):
        known = {"iris_rank": rank, "iris_num_ranks": num_ranks}
        extra = {name: value for name, value in known.items() if value is not None}
        logger.log(number, msg, *args, extra=extra, stacklevel=stacklevel + 1)


def _level(level: int | str) -> int:
    number = _LEVELS.get(level.upper()) if isinstance(level, str) else level
    if number is None or isinstance(number, bool) or number not in _LEVELS.values():
        possible = ", ".join(f"{name} ({value})" for name, value in _LEVELS.items())
        raise ArgumentError(f"log level {level!r} is not known; possible: {possible}")
    return number


def _install() -> None:
    """Give the logger its handler and level once. What the program set up before importing Iris stays."""
    if not any(handler.get_name() == _HANDLER_NAME for handler in logger.handlers):
        handler = _StandardErrorHandler()
        handler.set_name(_HANDLER_NAME)
        handler.setFormatter(IrisFormatter())
        logger.addHandler(handler)
        logger.propagate = False
    if logger.level == logging.NOTSET:
        set_logger_level(_env.get("IRIS_LOG_LEVEL"))


_install()
