"""Choice of algorithms and configurations."""

from iris.tuning.plan import Plan

__all__ = ["Plan"]
