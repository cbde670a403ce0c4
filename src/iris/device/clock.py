"""Clocks and places of the running program, under the names of the original API (``iris.device_utils``)."""

from iris.device._asm import compute_unit, die, ticks, ticks_per_microsecond

# A clock that counts at a constant rate: nanoseconds on NVIDIA and under the interpreter, 10 ns units on AMD.
read_realtime = ticks
get_cu_id = compute_unit
get_xcc_id = die

__all__ = ["get_cu_id", "get_xcc_id", "read_realtime", "ticks_per_microsecond"]
