"""The logger, under the name of the original API."""

from iris.runtime.logs import DEBUG, ERROR, INFO, WARNING, IrisFormatter, logger, set_logger_level

__all__ = ["DEBUG", "ERROR", "INFO", "WARNING", "IrisFormatter", "logger", "set_logger_level"]
